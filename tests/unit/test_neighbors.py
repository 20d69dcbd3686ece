"""`maect plan` and `doctor` on neighbours that are not good enough for tuning with crops alone."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from maect.core.entries import line_of
from maect.core.files import write_record
from maect.evaluate.store import write_features
from maect.experiment import Experiment, load
from maect.records import RunRecord
from maect.tools import neighbors
from maect.tools.neighbors import LEAST, measured, nearest, warnings

RUNS = {
    "mae_tiny": {"recipe": "mae", "size": "tiny"},
    "head_{aug}_tiny": {
        "recipe": "head_{aug}", "size": "tiny", "from": "mae_tiny", "each": {"aug": ["min", "aug"]},
    },
    "ct_{aug}_tiny": {
        "recipe": "ct_{aug}", "size": "tiny", "from": "head_{aug}_tiny",
        "each": {"aug": ["min", "aug"]},
    },
    "oracle_tiny": {
        "recipe": "ct_min", "size": "tiny", "from": "head_min_tiny",
        "set": {"head": {"lookup": "oracle"}},
    },
}  # fmt: skip


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    spec = {
        "storage": str(tmp_path / "r"),
        "seeds": 2,
        "datasets": {"digits": {"kind": "digits", "splits": {"train": {}, "val": {}}}},
        "runs": RUNS,
        "evaluate": [{"runs": ["ct_*"], "protocols": ["knn"]}],
    }
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump(spec, sort_keys=False))
    return load(str(file))


def logged(experiment: Experiment, run: str, **series: list[float]) -> None:
    """A log of an unfinished run, one entry an epoch."""
    folder = experiment.folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    steps = zip(*series.values(), strict=True)
    entries = [dict(zip(series, values, strict=True)) for values in steps]
    text = [line_of(n, e | {"epoch": n}, {"device_seconds": 1.0}) for n, e in enumerate(entries, 1)]
    (folder / "metrics.jsonl").write_text("".join(text) + text[-1][:5])  # the last is being written


def features_of(path: Path, right: float) -> None:
    """Features of 200 pairs of images; in the part `right` of pairs both are of one class."""
    random = np.random.default_rng(0)
    centers = np.repeat(random.normal(size=(200, 16)), 2, axis=0)
    rows = (centers + 0.01 * random.normal(size=(400, 16))).astype(np.float32)
    rows[:, 3] *= 1000  # a feature that decides all unless it is standardised
    labels = np.repeat(np.arange(200), 2)
    labels[1 : 2 * round(200 * (1 - right)) : 2] += 500
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"encoder_sha256": "0", "class_names": []}
    write_features(
        path, [rows], width=16, labels=labels, keys=list(map(str, range(400))), record=record
    )


def test_nothing_measured_is_nothing_said(experiment: Experiment) -> None:
    assert warnings(experiment) == [] and measured(experiment, "ct_min_tiny") is None


@pytest.mark.parametrize("right", [0.2, 0.75])
def test_features_tell_how_often_the_nearest_is_right(tmp_path: Path, right: float) -> None:
    features_of(tmp_path / "f.safetensors", right)
    assert nearest(tmp_path / "f.safetensors") == pytest.approx(100 * right)


def test_what_is_nearest_to_the_look_up_counts(experiment: Experiment) -> None:
    mae = experiment.root / "features/mae_tiny/digits-train.safetensors"
    logged(experiment, "mae_tiny", online_neighbors=[10.0, 30.0])
    found = measured(experiment, "ct_min_tiny")
    assert found is not None and found.percent == 30.0  # the last online evaluation
    assert found.source == "online evaluation of mae_tiny"
    features_of(mae, 0.25)
    found = measured(experiment, "ct_min_tiny")
    assert found is not None and (found.percent, found.source) == (25.0, "features of mae_tiny")
    logged(experiment, "head_min_tiny", lookup_accuracy=[90.0] * 5 + [LEAST - 2, LEAST] * 5)
    found = measured(experiment, "ct_min_tiny")
    assert found is not None and found.percent == LEAST - 1  # of the last ten entries
    assert found.source == "lookups of head_min_tiny"
    logged(experiment, "ct_min_tiny", lookup_accuracy=[LEAST + 1])
    assert warnings(experiment) == []  # its own lookups have become good enough


def test_only_tuning_with_crops_and_a_look_up_is_warned_of_and_once(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in ("mae_tiny", "mae_tiny-s1"):
        logged(experiment, run, online_neighbors=[LEAST - 0.6])
    (line,) = warnings(experiment)
    assert line.startswith(f"ct_min_tiny: {LEAST - 0.6:.0f} % of its neighbours are of the right")
    assert "online evaluation of mae_tiny" in line and "ct_aug" in line
    # A finished run is not to be warned of.
    for run in ("ct_min_tiny", "ct_min_tiny-s1"):
        (experiment.folder(run)).mkdir(parents=True)
        write_record(RunRecord.path(experiment.folder(run)), {"run": run, "stage": "tune"})
    assert warnings(experiment) == []


def test_no_large_file_is_read_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    features_of(tmp_path / "f.safetensors", 0.5)
    monkeypatch.setattr(neighbors, "LARGEST", 1000)
    assert nearest(tmp_path / "f.safetensors") is None


def test_labels_that_are_not_known_tell_nothing(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    rows, labels = np.eye(4, dtype=np.float32), np.array([0, 0, -1, 1])
    write_features(
        path, [rows], width=4, labels=labels, keys=list("abcd"), record={"class_names": []}
    )
    assert nearest(path) is None
