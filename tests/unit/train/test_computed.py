"""How a training is computed may change at any time: it is no part of what a run is."""

import json
from pathlib import Path

import numpy as np
import pytest
from ranks import run, train
from tiny_runs import losses

from maect.core.settings import digest
from maect.evaluate.accuracy import Accuracy
from maect.stages import load_recipe
from maect.train.checkpoint import saved
from maect.train.stage import COMPUTED, Updates

OTHERWISE = [
    {"accumulation": 2, "activation_checkpointing": True, "zero_stage": 3},
    {"zero_stage": 0, "attention": "flash_attn"},
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
        assert f"resumes with {name} {value}, it was {COMPUTED[name]}" in log.read_text()
    undisturbed = losses(whole / "mae")
    assert losses(folder)[:5] == undisturbed[:5]
    np.testing.assert_allclose(losses(folder), undisturbed, rtol=1e-4)
    record = json.loads((folder / "run.json").read_text())
    assert record["recipe"].items() >= changes.items()
    # Finished is finished, however it would be computed now.
    written = (folder / "run.json").stat().st_mtime_ns
    assert run(2, job("mae", "mae"), log=log) == ["done"]
    assert (folder / "run.json").stat().st_mtime_ns == written


def as_it_was(context, **job):
    """A training of a version in which all settings were a run's identity."""
    Updates.decisive = classmethod(lambda cls, values: values)
    return train(context, **job)


def test_a_run_of_before_is_recognised_twice(job, whole, tmp_path):
    log = tmp_path / "log"
    old = job("mae", "mae", accumulation=2)
    folder = Path(old["folder"])
    assert run(2, old | {"function": as_it_was}, log=log, stop_at=3) == ["requeue"]
    began = json.loads((folder / "recipe.json").read_text())["fingerprint"]
    assert run(2, job("mae", "mae"), log=log, stop_at=6) == ["requeue"]
    assert run(2, job("mae", "mae", zero_stage=2), log=log) == ["done"]
    assert "resuming from step 6" in log.read_text() and not list(folder.glob("stale-*"))
    assert json.loads((folder / "run.json").read_text())["fingerprint"] == began
    np.testing.assert_allclose(losses(folder), losses(whole / "mae"), rtol=1e-4)


def test_another_recipe_still_begins_anew(job, tmp_path):
    log = tmp_path / "log"
    value = job("mae", "mae", accumulation=2)
    assert run(1, value | {"function": as_it_was}, log=log, stop_at=3) == ["requeue"]
    assert run(1, job("mae", "mae", base_lr=2e-3), log=log, stop_at=2) == ["requeue"]
    folder = Path(value["folder"])
    assert len(list(folder.glob("stale-*"))) == 1
    assert [state.name for state in saved(folder / "state")] == ["step-000000002"]


def test_identities_know_nothing_of_it():
    plain, other = (load_recipe("mae", "base", changes) for changes in ({}, {"compile": True}))
    assert digest(plain) == digest(load_recipe("mae", "base", {"deterministic": True}))
    assert digest(plain) == digest(other) != digest(load_recipe("mae", "base", {"epochs": 3}))
    assert digest(Accuracy()) == digest(Accuracy(accumulation=2, activation_checkpointing=True))
    assert digest(Accuracy()) != digest(Accuracy(precision="fp32"))
    # That of a run of old, whose recipe had the defaults.
    assert digest(plain) == digest(plain.model_dump(mode="json"))
