"""The collapse guard, and metrics that survive interruptions."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from maect.measures import uniformity
from maect.models.heads import NNCLRHead
from maect.models.vit import seeded
from maect.stages import load_recipe
from maect.train.collapse import collapse, effective_rank


def test_uniformity_and_rank_against_their_formulas():
    torch.manual_seed(0)
    vectors = F.normalize(torch.randn(40, 5), dim=1)
    pairs = [
        np.exp(-2 * np.sum((a - b) ** 2))
        for i, a in enumerate(vectors.numpy())
        for b in vectors.numpy()[:i]
    ]
    assert uniformity(vectors) == pytest.approx(np.log(np.mean(pairs)), rel=1e-5)
    singular = np.linalg.svd(vectors.double() - vectors.double().mean(0), compute_uv=False) ** 2
    share = singular / singular.sum()
    assert effective_rank(vectors) == pytest.approx(np.exp(-(share * np.log(share)).sum()))
    assert 4 < effective_rank(vectors) <= 5


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


def test_the_newest_entries_are_the_last_batch():
    settings = load_recipe(
        "ct_min", "tiny", {"batch_size": 8, "head": {"queue_size": 16, "topk": 2}}
    ).head
    with seeded(0):
        head = NNCLRHead(6, settings)
    for _ in range(3):
        before, nearest = head.queue.clone(), torch.zeros(2, 8, dtype=torch.int64)
        head(torch.randn(2, 8, 6), torch.arange(8), torch.arange(8), nearest)
        assert torch.equal(head.newest(8)[""], head.queue[(head.queue != before).any(dim=1)])
