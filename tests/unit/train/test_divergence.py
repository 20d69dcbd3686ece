"""A training that diverges: what is on the disk is sound, and goes on."""

import math
from itertools import count
from pathlib import Path

import pytest
import torch
from ranks import refused, run
from safetensors.torch import load_file
from tiny_runs import metrics

from maect.train.checkpoint import complete_states
from maect.train.engine import Engine

ALWAYS = {"save_every_minutes": 0.0}


def spoilt(context, bad, **job):
    """A training whose gradient is not a number from a backward pass on."""
    real, passes = Engine.backward, count(1)

    def backward(self, loss):
        real(self, loss * math.nan if next(passes) >= bad else loss)

    Engine.backward = backward
    try:
        return refused(context, **job)
    finally:
        Engine.backward = real


def check_states(folder, last):
    """The newest state is that of step `last`, and all values on the disk are finite."""
    states = complete_states(Path(folder) / "state")
    assert states[0].name == f"step-{last:09d}"
    files = [file for state in states for file in state.glob("*.safetensors")]
    assert len(files) >= len(states)
    for file in files:
        for name, value in load_file(file).items():
            assert value.isfinite().all(), (file, name)


@pytest.mark.parametrize(
    ("how", "step"),
    [
        ({"zero_stage": 1}, 5),
        ({"zero_stage": 3}, 10),  # the last one
    ],
)
def test_a_gradient_that_is_not_finite_enters_no_state(how, step, job, tmp_path, whole):
    """The pass after it has put embeddings that are no numbers into the queue by then."""
    broken, log = job("broken", "ct_min", whole / "head_min", **how) | ALWAYS, tmp_path / "log"
    (said,) = run(2, broken | {"function": spoilt, "bad": step}, log=log)
    assert said.startswith(f"TrainingFault: gradient norm nan in step {step}; ")
    check_states(broken["folder"], step - 1)
    assert len(metrics(broken["folder"])) == step - 1
    if how["zero_stage"] == 1:
        assert run(2, broken, log=log) == ["done"]
        assert metrics(broken["folder"]) == metrics(whole / "ct_min")


def test_one_of_several_parts_of_a_batch(job, tmp_path):
    broken, log = job("broken", "mae", accumulation=2) | ALWAYS, tmp_path / "log"
    (said,) = run(1, broken | {"function": spoilt, "bad": 6}, log=log)
    assert said.startswith("TrainingFault: gradient norm nan in step 3; ")
    check_states(broken["folder"], 2)


def saved_tensors(folder):
    (state,) = complete_states(Path(folder) / "state")
    return [load_file(file) for file in sorted(state.glob("*.safetensors"))]


def test_the_state_before_is_that_of_a_run_that_was_stopped_there(job, tmp_path, whole):
    wild = {"base_lr": 1e30, "head": {"head_lr": 1e30}}
    broken, sound = (
        job(name, "ct_min", whole / "head_min", **wild) for name in ("broken", "sound")
    )
    jobs = broken | ALWAYS | {"function": refused}, sound | {"stop_at": 1}
    message, verdict = run(2, *jobs, log=tmp_path / "log")
    assert message.startswith("TrainingFault: loss nan in step 2; the last saved state is older")
    check_states(broken["folder"], 1)
    assert verdict == "requeue"
    # Also the queue and the statistics, which the forward pass of step 2 changed.
    pairs = zip(saved_tensors(broken["folder"]), saved_tensors(sound["folder"]), strict=True)
    for ours, theirs in pairs:
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_an_infinite_gradient_of_the_first_step(job, tmp_path):
    # 1e37 times the loss is still a float32; the norm of its gradient is not.
    steep = {"contrastive": "combined", "contrastive_weight": 1e37, "head": {}}
    jobs = [job(f"zero{zero}", "mae", zero_stage=zero, **steep) | ALWAYS for zero in (1, 2, 3)]
    messages = run(2, *(value | {"function": refused} for value in jobs), log=tmp_path / "log")
    for value, message in zip(jobs, messages, strict=True):
        assert "gradient norm" in message and "in step 1" in message
        assert complete_states(Path(value["folder"]) / "state") == []
