"""How a training is computed may change at any time: it is no part of what a run is."""

import json
from pathlib import Path

import numpy as np
from ranks import run
from tiny_runs import losses

from maect.core.settings import digest
from maect.evaluate.protocols.encoders import Accuracy
from maect.recipes import load_encoder
from maect.recipes.settings import PLAIN, Computing
from maect.records import RunRecord
from maect.stages import load_recipe
from maect.stages.run import RunConfig

OTHERWISE = {
    3: {"zero_stage": 2, "attention": "flash_attn"},
    6: {"accumulation": 2, "activation_checkpointing": True, "zero_stage": 3},
}
"""By the step after which a run goes on so."""


def test_a_run_goes_on_computed_otherwise(job, whole, tmp_path):
    log, ways = tmp_path / "log", [{}, *OTHERWISE.values()]
    jobs = [job("mae", "mae", **changes) for changes in ways]
    folder = Path(jobs[0]["folder"])
    parts = [value | {"stop_at": at} for value, at in zip(jobs, (*OTHERWISE, None), strict=True)]
    # Finished is finished, however it would be computed now.
    assert run(2, *parts, jobs[0], log=log) == ["requeue", "requeue", "done", "done"]
    assert not list(folder.glob("stale-*"))
    before = PLAIN.model_dump()
    for step, changes in OTHERWISE.items():
        assert f"resuming from step {step}" in log.read_text()
        for name, value in changes.items():
            assert f"resumes with {name} {value}, it was {before[name]}" in log.read_text()
        before |= changes
    undisturbed = losses(whole / "mae")
    assert losses(folder)[:3] == undisturbed[:3]
    np.testing.assert_allclose(losses(folder), undisturbed, rtol=1e-4)
    record = json.loads(RunRecord.path(folder).read_text())
    assert record["computing"].items() >= OTHERWISE[6].items()


def test_identities_know_nothing_of_it():
    told = {
        "run": "mae", "stage": "pretrain", "size": "base", "encoder": load_encoder("base"),
        "settings": load_recipe("mae", "base"),
    }  # fmt: skip
    other = RunConfig(**told, computing=Computing(compile=True, deterministic=True))
    longer = RunConfig(**told | {"settings": load_recipe("mae", "base", {"epochs": 3})})
    assert RunConfig(**told).digest == other.digest != longer.digest
    assert digest(Accuracy()) != digest(Accuracy(precision="fp32"))
