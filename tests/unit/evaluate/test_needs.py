"""What an evaluation reads of others is asked for when the experiment is read."""

from pathlib import Path

import pytest
import yaml

from maect.core.errors import UserError
from maect.experiment import load

BASE = {
    "datasets": {"digits": {"kind": "digits", "splits": {"train": {}, "val": {}, "noisy": {}}}},
    "runs": {"mae": {"recipe": "mae", "size": "tiny"}},
    "protocols": {"robustness": {"splits": ["noisy"]}},
}


def read(tmp_path: Path, *protocols: str, **changes: object):
    path = tmp_path / "an.yaml"
    values = BASE | {"evaluate": [{"runs": ["mae"], "protocols": list(protocols)}]} | changes
    path.write_text(yaml.safe_dump(values))
    return load(str(path))


@pytest.mark.parametrize(
    ("protocol", "needed"),
    [
        ("robustness", "linear_probe"),
        ("effective_invariance", "linear_probe"),
        ("retrieval", "clustering"),
    ],
)
def test_a_missing_evaluation_is_named(tmp_path: Path, protocol: str, needed: str) -> None:
    with pytest.raises(UserError, match=f"{protocol} of mae reads the output of {needed}; add it"):
        read(tmp_path, protocol)
    assert len(read(tmp_path, protocol, needed).evaluations) == 2


def test_splits_must_be_there(tmp_path: Path) -> None:
    wrong = {"robustness": {"splits": ["noisy", "nosy"]}}
    with pytest.raises(
        UserError, match=r"robustness: splits: unknown 'nosy'; did you mean 'noisy'"
    ):
        read(tmp_path, "robustness", "linear_probe", protocols=wrong)


def test_a_variant_takes_its_size(tmp_path: Path) -> None:
    experiment = read(tmp_path, "throughput", "linear_probe_concat")
    assert experiment.evaluation("mae", "throughput").size == "tiny"
    settings = experiment.evaluation("mae", "linear_probe_concat")
    assert settings.name == "linear_probe" and settings.concat
