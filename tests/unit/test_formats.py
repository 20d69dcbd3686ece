"""Results of every released format are read: each has a small folder here, without weights.

A folder of a new format: `python tests/faults/make_results.py FOLDER`, less weights, states and
images; its defaults: `python tests/unit/test_formats.py > tests/unit/formats/N.json`. Those of a
format are made once and never again.
"""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import to_jsonable_python
from stamping import outdated, stamp_finished

from maect.core.files import FORMAT, read_record
from maect.data.config import ShardsConfig
from maect.data.index import open_index
from maect.evaluate import PROTOCOLS, EvaluationConfig, FeaturesConfig
from maect.evaluate.store import open_features
from maect.experiment import load
from maect.launch.record import read_job
from maect.recipes import Contrastive, Encoder, Pixels, Refiner
from maect.records import RunRecord
from maect.stages import STAGES
from maect.stages.run import RunConfig
from maect.tools.status import show
from maect.train.run_folder import is_finished, read_notes

FOLDERS = Path(__file__).with_name("formats")
SETTINGS = (*STAGES.values(), *PROTOCOLS.values(), Encoder, Pixels, Contrastive, Refiner)
CONFIGS = {
    "runs/*/config.yaml": RunConfig,
    "features/*/*.yaml": FeaturesConfig,
    "evaluations/*/*.yaml": EvaluationConfig,
    "shards/*/*/config.yaml": ShardsConfig,
}


def defaults() -> dict[str, dict[str, Any]]:
    """Of every class whose digest is an identity."""
    return {
        kind.__name__: {
            name: to_jsonable_python(field.get_default(call_default_factory=True))
            for name, field in sorted(kind.model_fields.items())
            if not field.is_required()
        }
        for kind in SETTINGS
    }


@pytest.mark.parametrize("number", range(1, FORMAT + 1))
def test_a_default_stays_what_it_was(number):
    """An identity leaves defaults out: another one would take old results for new ones."""
    now = defaults()
    for kind, then in json.loads((FOLDERS / f"{number}.json").read_text()).items():
        assert then.items() <= now[kind].items(), kind


@pytest.fixture(params=range(1, FORMAT + 1))
def results(request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with tarfile.open(FOLDERS / f"{request.param}.tar.gz") as tar:
        tar.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return Path("results")


def test_each_file_is_read(results):
    for pattern, kind in CONFIGS.items():
        paths = list(results.glob(pattern))
        assert paths and all(kind.read(path).digest for path in paths)
    for path in results.rglob("*.json"):
        written = json.loads(path.read_text())
        assert written["format"] <= FORMAT, path
        assert {*read_record(path)} == {*written} - {"format", "checksum"}
    for run in results.glob("runs/*"):
        job = read_job(run)
        assert job is not None and job.state == "ended"
        assert read_notes(run)["fingerprint"] == RunRecord.of(run).fingerprint
    for split, n in (("train", 60), ("val", 40)):
        index = open_index(results / f"shards/digits/{split}")
        features = open_features(results / f"features/mae_tiny/digits-{split}.safetensors")
        assert index.n == features.n == n
        assert features.record["index_digest"] == index.digest


def test_nothing_would_be_made_again(results, capsys):
    """What is asked for has the same identity as it had when it was made."""
    for run in results.glob("runs/*"):
        for name in RunRecord.of(run).files:
            (run / name).touch()  # weights are not kept here
        assert is_finished(run, read_notes(run)["fingerprint"])
    stamp_finished(load("mini.yaml"))
    assert len(list(results.rglob("done"))) == 3 + 2  # runs and splits
    assert outdated(load("mini.yaml")) == []
    text = Path("mini.yaml").read_text()
    Path("other.yaml").write_text(text.replace("epochs: 3", "epochs: 4"))
    assert results / "runs/mae_tiny/done" in outdated(load("other.yaml"))
    show(results)
    assert "3 runs" in capsys.readouterr().out


if __name__ == "__main__":
    print(json.dumps(defaults(), indent=1))
