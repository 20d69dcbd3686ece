"""A training that diverges: what is on the disk is sound, and goes on."""

import math
import re
from itertools import count
from pathlib import Path

import torch
from ranks import refused, run
from safetensors.torch import load_file
from tiny_runs import metrics

from maect.train.checkpoint import complete_states
from maect.train.engine import Engine

ALWAYS = {"save_every_minutes": 0.0}
# 1e37 times the loss is still a float32; the norm of its gradient is not.
STEEP = {"contrastive": "combined", "contrastive_weight": 1e37, "head": {}}
WILD = {"base_lr": 1e30, "head": {"head_lr": 1e30}}


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


def saved_tensors(folder, last):
    """Values of the states of step `last` (0: of none) and of the one before it, all finite."""
    states = complete_states(Path(folder) / "state")
    assert {int(state.name[5:]) for state in states} == {last, last - 1} - {0, -1}
    tensors = [load_file(file) for state in states for file in sorted(state.glob("*.safetensors"))]
    assert len(tensors) == 2 * len(states)
    for name, value in (item for file in tensors for item in file.items()):
        assert value.isfinite().all(), name
    return tensors


def test_what_is_not_finite_enters_no_state(job, tmp_path, whole):
    """The pass after it has put embeddings that are no numbers into the queue by then."""
    head, log = whole / "head_min", tmp_path / "log"
    cases = [  # the pass from which gradients are no numbers, what is said, the step before
        (job("zero1", "ct_min", head), 5, "gradient norm nan in step 5; ", 4),
        (job("zero3", "ct_min", head, zero_stage=3), 10, "gradient norm nan in step 10; ", 9),
        (job("parts", "mae", accumulation=2), 6, "gradient norm nan in step 3; ", 2),
        (job("steep1", "mae", zero_stage=1, **STEEP), math.inf, "gradient norm .* in step 1; ", 0),
        (job("steep2", "mae", zero_stage=2, **STEEP), math.inf, "gradient norm .* in step 1; ", 0),
        (job("steep3", "mae", zero_stage=3, **STEEP), math.inf, "gradient norm .* in step 1; ", 0),
        (job("wild", "ct_min", head, **WILD), math.inf, "loss nan in step 2; ", 1),
    ]
    jobs = [value | ALWAYS | {"function": spoilt, "bad": bad} for value, bad, *_ in cases]
    resumed, sound = cases[0][0], job("sound", "ct_min", head, **WILD)
    *messages, again, stopped = run(2, *jobs, resumed, sound | {"stop_at": 1}, log=log)
    assert (again, stopped) == ("done", "requeue")
    for (value, _, said, last), message in zip(cases, messages, strict=True):
        assert re.match(f"TrainingFault: {said}the last saved state is older", message)
        if value is not resumed:
            saved_tensors(value["folder"], last)
            assert len(metrics(value["folder"])) == last
    assert metrics(resumed["folder"]) == metrics(whole / "ct_min")
    # Also the queue and the statistics, which the forward pass of step 2 changed.
    both = [saved_tensors(value["folder"], 1) for value in (cases[-1][0], sound)]
    for ours, theirs in zip(*both, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
