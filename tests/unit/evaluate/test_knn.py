import numpy as np
import pytest
from sklearn.preprocessing import StandardScaler

from maect.core.errors import UserError
from maect.evaluate import knn
from maect.evaluate.outcomes import held_out_by_content, intervals
from maect.evaluate.protocols.stored_features import Knn
from maect.evaluate.store import moments, open_features, standardize
from maect.measures import vote

from .by_hand import clear, scikit_knn
from .conftest import blobs, features_job, given


@pytest.mark.parametrize("standardized", [False, True])
def test_agrees_with_scikit_learn(job, rank, monkeypatch, standardized):
    monkeypatch.setattr(knn, "TRAIN_ROWS", 70)
    monkeypatch.setattr(knn, "QUERIES", 16)
    train, test = open_features(job.path("train")), open_features(job.path("test"))
    metrics = Knn().evaluate(rank, job)
    x, y = train.values + 0, test.values + 0
    if standardized:
        scaler = StandardScaler().fit(x)
        x, y = scaler.transform(x), scaler.transform(y)
    rows = [row for row in metrics["sweep"] if row["standardized"] == standardized]
    assert {(row["k"], row["temperature"]) for row in rows} == {
        (k, t) for k in (1, 5, 10, 20, 50, 100, 200) for t in (0.02, 0.07, 0.2)
    }
    for row in rows:
        if row["k"] < train.n and row["temperature"] == 0.07:
            ordered = -np.sort(-cosines(x, y), axis=1)
            clear(ordered[:, row["k"] - 1 : row["k"] + 1], 1e-6)
        predicted = scikit_knn(x, train.labels, y, row["k"], row["temperature"])
        right = 100.0 * (predicted == test.labels)
        assert row["accuracy"] == pytest.approx(np.mean(right), abs=1e-9)
        if (row["k"], row["temperature"]) == (10, 0.07):
            ends = [float(end[0]) for end in intervals(right[:, None])]
    held = held_out_by_content(train.labels, train.contents())
    assert 15 < held.sum() < 45
    for row in rows:
        k, inner = row["k"], x[~held]
        ordered = -np.sort(-cosines(inner, x[held]), axis=1)
        clear(ordered[:, k - 1 : k + 1], 1e-6)
        predicted = scikit_knn(inner, train.labels[~held], x[held], k, row["temperature"])
        assert row["held_out"] == pytest.approx(100 * np.mean(predicted == train.labels[held]))
    name = "knn_standardized" if standardized else "knn"
    first = max(rows, key=lambda row: row["held_out"])
    assert metrics[f"{name}_held_out"] == first["accuracy"] <= metrics[f"{name}_best"]
    (paper,) = [row["accuracy"] for row in rows if (row["k"], row["temperature"]) == (10, 0.07)]
    assert metrics[name] == paper
    assert [metrics[f"{name}_{end}"] for end in ("low", "high")] == pytest.approx(ends)
    assert metrics[f"{name}_best"] == max(row["accuracy"] for row in rows)
    at = [row["accuracy"] for row in rows if row["temperature"] == 0.07]
    assert metrics[f"{name}_best_k"] == max(at) and len(at) < len(rows)


def cosines(train, queries):
    """In float64, [queries, train]."""
    train, queries = train.astype(np.float64), queries.astype(np.float64)
    lengths = [np.sqrt(np.square(rows).sum(1)) for rows in (train, queries)]
    products = np.stack([(train * query).sum(1) for query in queries])
    length = lengths[0] * lengths[1][:, None]
    return products / np.where(length > 0, length, 1)


def exact(train, queries, k: int):
    """Sorted by cosine and then by id."""
    similarity = cosines(train, queries)
    ids = np.argsort(-similarity, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(similarity, ids, 1), ids


@pytest.mark.parametrize("k", [1, 17, 300])
def test_neighbours_are_exact_in_any_blocks_and_threads(job, monkeypatch, k):
    train, queries = (open_features(job.path(name)).values for name in ("train", "test"))
    expected, names = exact(train, queries, k)
    whole = knn.nearest(train, queries, k)
    assert all(map(np.array_equal, whole, knn.nearest(train, queries, k, threads=4)))
    if k < 300:
        clear(cosines(train, queries), 1e-6, chosen=k)
    for rows, block, threads in ((7, 64, 2), (64, 7, 2), (70, 16, 1), (299, 1, 2)):
        monkeypatch.setattr(knn, "TRAIN_ROWS", rows)
        monkeypatch.setattr(knn, "QUERIES", block)
        similarity, ids = knn.nearest(train, queries, k, threads=threads)
        np.testing.assert_allclose(similarity, expected, atol=1e-6)
        # Of all of them some are equally near but for the last bits.
        assert k == 300 or np.array_equal(ids, names)
        assert all(len(set(row)) == k for row in ids.tolist())
        found = np.take_along_axis(cosines(train, queries), ids, 1)
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("kind", ["equal", "copies", "zero", "collinear"])
def test_samples_that_are_equally_near(tmp_path, kind):
    """More samples are as near as the k-th than are wanted: any of them will do."""
    rng = np.random.default_rng(0)
    one, many = rng.normal(size=(1, 192)), rng.normal(size=(700, 192))
    rows = {
        "equal": np.repeat(one, 700, axis=0),
        "copies": np.where(np.arange(700)[:, None] % 3 > 0, one, many),
        "zero": np.zeros((700, 192)),
        "collinear": one * rng.integers(1, 9, (700, 1)),
    }[kind].astype(np.float32)
    queries = np.concatenate([rows[::50], one + rng.normal(size=(20, 192))]).astype(np.float32)
    similarity, ids = knn.nearest(rows, queries, 10)
    np.testing.assert_allclose(similarity, exact(rows, queries, 10)[0], atol=1e-6)
    assert all(len(set(row)) == 10 for row in ids.tolist())


def test_constant_and_zero_features_are_defined(tmp_path, rank):
    """All alike: everything ties; standardised, a column of 0.1 is one of 0."""
    labels = np.repeat([2, 1, 0], [12, 10, 18])
    for value in (0.0, 0.1):
        rows = np.full((40, 5), value)
        job = features_job(tmp_path / f"{value}", (rows, labels), (rows[:4], [2, 1, 0, 2]))
        metrics = Knn(k=40, sweep=(1, 10)).evaluate(rank, job)
        assert metrics["knn"] == metrics["knn_standardized"] == 25.0  # the largest class
        scale = moments(open_features(job.path("train")).values)
        assert not standardize(rows.astype(np.float32), scale).any()


def test_more_neighbours_than_samples(job, rank):
    with pytest.raises(UserError, match="k 400 is more than the 300 samples"):
        Knn(k=400).evaluate(rank, job)
    # A sweep leaves out what the train set cannot answer.
    metrics = Knn(sweep=(1, 300, 301)).evaluate(rank, job)
    assert {row["k"] for row in metrics["sweep"]} == {1, 10, 300}
    with pytest.raises(UserError, match="lacks the input 'train'"):
        Knn().evaluate(rank, given(job, train=None))


def test_votes_do_not_overflow():
    similarity = np.array([[1.0, 0.999, 0.998], [0.5, 0.5, -1.0]])
    labels = np.array([[0, 1, 1], [2, 1, 1]])
    assert vote(similarity, labels, 1e-4).tolist() == [0, 1]
    assert vote(similarity, labels, 1e4).tolist() == [1, 1]


def test_without_a_second_image_of_a_class_nothing_is_held_out(tmp_path, rank):
    features, _ = blobs(12, 4, 6, 0)
    both = features, range(12)
    metrics = Knn().evaluate(rank, features_job(tmp_path, both, both))
    assert "knn_held_out" not in metrics
    assert metrics["knn"] <= 100
