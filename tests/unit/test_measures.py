"""Measures of features against their formulas, written once more with NumPy in float64."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from maect import measures
from maect.measures import alignment, effective_rank, knn, rank_me, same_class, uniformity, vote


@pytest.fixture
def vectors() -> torch.Tensor:
    """Unit vectors, float32 [40, 5]."""
    torch.manual_seed(0)
    return F.normalize(torch.randn(40, 5), dim=1)


def entropy(share: np.ndarray) -> float:
    return float(-(share * np.log(share)).sum())


def test_uniformity_and_effective_rank(vectors):
    pairs = [
        np.exp(-2 * np.sum((a - b) ** 2))
        for i, a in enumerate(vectors.numpy())
        for b in vectors.numpy()[:i]
    ]
    assert uniformity(vectors) == pytest.approx(np.log(np.mean(pairs)), rel=1e-5)
    centred = vectors.double() - vectors.double().mean(0)
    spectrum = np.linalg.svd(centred, compute_uv=False) ** 2
    assert effective_rank(vectors) == pytest.approx(np.exp(entropy(spectrum / spectrum.sum())))
    assert 4 < effective_rank(vectors) <= 5
    assert effective_rank(torch.ones(4, 3)) == 0


def test_rank_me_is_of_the_features_as_they_are(vectors):
    features = 3 * vectors + 1
    singular = np.linalg.svd(features.double(), compute_uv=False)
    expected = np.exp(entropy(singular / singular.sum() + 1e-7))
    assert rank_me(features) == pytest.approx(expected, rel=1e-6)


def test_alignment_is_the_mean_squared_distance_of_unit_vectors():
    torch.manual_seed(1)
    pairs = torch.randn(2, 7, 3)
    first, second = (np.array([row / np.linalg.norm(row) for row in one]) for one in pairs.numpy())
    distances = [np.sum((a - b) ** 2) for a, b in zip(first, second, strict=True)]
    assert alignment(pairs) == pytest.approx(np.mean(distances), rel=1e-5)


def votes_by_hand(similarity: np.ndarray, labels: np.ndarray, temperature: float) -> list[int]:
    totals = np.zeros((len(labels), labels.max() + 1))
    for row, (near, classes) in enumerate(zip(similarity, labels, strict=True)):
        for s, label in zip(near, classes, strict=True):
            totals[row, label] += np.exp(s / temperature)
    return totals.argmax(axis=1).tolist()


def test_votes_are_weighted_in_blocks_of_any_size(monkeypatch):
    rng = np.random.default_rng(0)
    similarity = -np.sort(-rng.uniform(-1, 1, (11, 6)))
    labels = rng.integers(0, 4, (11, 6))
    others = (labels + 1) % 4
    expected = [votes_by_hand(similarity, given, 2.0) for given in (labels, others)]
    assert expected[0] != labels[:, 0].tolist(), "the nearest alone does not decide"
    for block in (3, 256):
        monkeypatch.setattr(measures, "_VOTES", block)
        assert [vote(similarity, given, 2.0).tolist() for given in (labels, others)] == expected


@pytest.mark.parametrize("size", [30, 6])  # more and fewer than k
def test_knn_and_nearest_class_are_shares_of_the_queries(vectors, size):
    bank, queries = vectors[:size], vectors[30:]
    rng = np.random.default_rng(size)
    bank_labels, labels = rng.integers(0, 3, size), rng.integers(0, 3, 10)
    products = queries.double().numpy() @ bank.double().numpy().T
    order = np.argsort(-products, axis=1)[:, : measures.KNN_K]
    near = np.take_along_axis(products, order, axis=1)
    wanted = votes_by_hand(near, bank_labels[order], measures.KNN_TEMPERATURE)
    sets = (torch.from_numpy(one) for one in (labels, bank_labels))
    given = (queries, bank, *sets)
    assert knn(*given) == pytest.approx(100 * np.mean(np.array(wanted) == labels))
    nearest = bank_labels[products.argmax(axis=1)]
    assert same_class(*given) == pytest.approx(100 * np.mean(nearest == labels))
