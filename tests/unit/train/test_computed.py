"""How a training is computed may change at any time: it is no part of what a run is."""

import json
from pathlib import Path

import numpy as np
import pytest
from ranks import run
from tiny_runs import losses

from maect.core.settings import digest
from maect.evaluate.protocols import Accuracy
from maect.recipes import load_encoder
from maect.recipes.computing import PLAIN, Computing
from maect.records import RunRecord
from maect.stages import load_recipe
from maect.stages.run import RunConfig
from maect.train.checkpoint import saved

OTHERWISE = [
    {"accumulation": 2, "activation_checkpointing": True, "zero_stage": 3},
    {"zero_stage": 2, "attention": "flash_attn"},
    pytest.param({"compile": True}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("changes", OTHERWISE)
def test_a_run_goes_on_computed_otherwise(changes, job, whole, tmp_path):
    log = tmp_path / "log"
    assert run(2, job("mae", "mae"), log=log, stop_at=5) == ["requeue"]
    other = job("mae", "mae", **changes)
    folder = Path(other["folder"])
    assert run(2, other, log=log) == ["done"]
    assert "resuming from step 5" in log.read_text() and not list(folder.glob("stale-*"))
    for name, value in changes.items():
        name, before = ("compiled", False) if name == "compile" else (name, getattr(PLAIN, name))
        assert f"resumes with {name} {value}, it was {before}" in log.read_text()
    undisturbed = losses(whole / "mae")
    assert losses(folder)[:5] == undisturbed[:5]
    np.testing.assert_allclose(losses(folder), undisturbed, rtol=1e-4)
    record = json.loads(RunRecord.path(folder).read_text())
    assert record["computing"].items() >= changes.items()
    # Finished is finished, however it would be computed now.
    written = RunRecord.path(folder).stat().st_mtime_ns
    assert run(2, job("mae", "mae"), log=log) == ["done"]
    assert RunRecord.path(folder).stat().st_mtime_ns == written


def test_another_recipe_still_begins_anew(job, tmp_path):
    log = tmp_path / "log"
    value = job("mae", "mae", accumulation=2)
    assert run(1, value, log=log, stop_at=3) == ["requeue"]
    assert run(1, job("mae", "mae", base_lr=2e-3), log=log, stop_at=2) == ["requeue"]
    folder = Path(value["folder"])
    assert len(list(folder.glob("stale-*"))) == 1
    assert [state.name for state in saved(folder / "state")] == ["step-000000002"]


def test_identities_know_nothing_of_it():
    told = {
        "run": "mae", "stage": "pretrain", "size": "base", "encoder": load_encoder("base"),
        "settings": load_recipe("mae", "base"),
    }  # fmt: skip
    other = RunConfig(**told, computing=Computing(compile=True, deterministic=True))
    longer = RunConfig(**told | {"settings": load_recipe("mae", "base", {"epochs": 3})})
    assert RunConfig(**told).digest == other.digest != longer.digest
    assert digest(Accuracy()) != digest(Accuracy(precision="fp32"))
