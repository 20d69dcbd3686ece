"""The collapse guard, and metrics that survive interruptions."""

import pytest
import torch
from torch.nn import functional as F

from maect.measures import effective_rank, uniformity
from maect.recipes import load_encoder
from maect.stages import load_recipe
from maect.stages.objectives import collapse
from maect.train.engine import random_batch


def spread(vectors):
    return {"uniformity": uniformity(vectors), "effective_rank": effective_rank(vectors)}


def test_collapse_is_named():
    torch.manual_seed(0)
    scattered = F.normalize(torch.randn(64, 8), dim=1)
    assert collapse(spread(scattered)) is None
    point = F.normalize(torch.ones(64, 8) + 0.01 * torch.randn(64, 8), dim=1)
    assert "nearly the same" in collapse(spread(point))
    line = scattered[:1] * torch.where(torch.arange(64) % 2 == 0, 1.0, -1.0)[:, None]
    assert "on a line" in collapse(spread(line))


@pytest.mark.parametrize("recipe", ["ct_min", "refine_heads"])
def test_the_newest_entries_are_the_last_batch(recipe):
    """Also of a run with larger batches than the one before it, whose batches lie over the end."""
    stage = load_recipe(recipe, "tiny", {"head": {"queue_size": 32, "topk": 2}, "batch_size": 8})
    objective = stage.objective(load_encoder("tiny"), 0)
    (head,) = objective.queue_heads.values()
    for number, count in enumerate((8, 8, 8, 16, 16, 16)):
        before = head.queue.clone()
        drawn = random_batch(stage, objective.encoder.settings, count, number)
        with torch.no_grad():
            objective(objective.prepare(drawn, torch.device("cpu")))
        rows = (head.pointer - count + torch.arange(count)) % 32
        changed = (head.queue != before).flatten(-1).any(-1).view(-1, 32)
        assert (changed.nonzero()[:, 1].view(-1, count) == rows.sort().values).all()
        queues = head.queue.view(-1, 32, 64)
        for vectors, queue in zip(head.newest(count).values(), queues, strict=True):
            assert torch.equal(vectors, queue[rows])
    assert objective.health(16)[1] is None
