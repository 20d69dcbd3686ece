from itertools import permutations

import numpy as np
import pytest
from safetensors.numpy import load_file
from sklearn.cluster import MiniBatchKMeans
from sklearn.preprocessing import StandardScaler

from maect.core.errors import UserError
from maect.evaluate import clustering
from maect.evaluate.protocols.stored_features import Clustering
from maect.evaluate.store import open_features

from .by_hand import clear
from .conftest import Rank, blobs, given, store


def brute_force_accuracy(labels, clusters) -> float:
    """Best of all ways to name the clusters."""
    size = max(labels.max(), clusters.max()) + 1
    return max(np.mean(np.array(p)[clusters] == labels) for p in permutations(range(size)))


def entropy(*columns) -> float:
    _, counts = np.unique(np.stack(columns), axis=1, return_counts=True)
    p = counts / counts.sum()
    return float(-(p * np.log(p)).sum())


@pytest.mark.parametrize("clusters", [2, 4, 6])
def test_scores_by_their_definitions(clusters):
    rng = np.random.default_rng(clusters)
    labels = np.append(np.arange(4), rng.integers(0, 4, 56))
    found = np.where(rng.random(60) < 0.6, labels % clusters, rng.integers(0, clusters, 60))
    scores = clustering.scores(labels, found)
    assert scores["accuracy"] == pytest.approx(100 * brute_force_accuracy(labels, found))
    h, g = entropy(labels), entropy(found)
    mutual = h + g - entropy(labels, found)
    assert scores["nmi"] == pytest.approx(100 * mutual / ((h + g) / 2))
    # Adjusted for chance by the mean over shufflings, which estimates the expected value.
    shuffled = [rng.permutation(found) for _ in range(3000)]
    expected = np.mean([h + g - entropy(labels, s) for s in shuffled])
    assert scores["ami"] == pytest.approx(
        100 * (mutual - expected) / ((h + g) / 2 - expected), abs=0.3
    )
    same = [(x[:, None] == x)[np.triu_indices(60, 1)] for x in (labels, found)]
    agree, chance = (same[0] & same[1]).sum(), same[0].sum() * same[1].sum() / len(same[0])
    ari = (agree - chance) / ((same[0].sum() + same[1].sum()) / 2 - chance)
    assert scores["ari"] == pytest.approx(100 * ari)


def test_protocol_is_the_plain_loop(job, rank, monkeypatch):
    monkeypatch.setattr("maect.evaluate.store._CHUNK", 70)
    settings = Clustering(runs=7, batch_size=32)
    metrics = settings.evaluate(rank, job)
    test = open_features(job.path("test"))
    rows = StandardScaler().fit_transform(test.values.astype(np.float64)).astype(np.float32)
    np.testing.assert_allclose(clustering.standardized(test.values), rows, atol=1e-6)
    rows = clustering.standardized(test.values)  # the same bits: k-means branches on them
    inertia, accuracy = [], []
    for seed in range(7):
        model = MiniBatchKMeans(6, batch_size=32, n_init=3, random_state=seed).fit(rows)
        inertia.append(model.inertia_)
        accuracy.append(100 * brute_force_accuracy(test.labels, model.labels_))
    clear(-np.array(inertia) / min(inertia), 1e-3)
    best = int(np.argmin(inertia))
    assert metrics["best_seed"] == best
    assert metrics["inertia"] == pytest.approx(inertia[best])
    assert metrics["accuracy"] == pytest.approx(accuracy[best])
    assert metrics["accuracy_mean"] == pytest.approx(np.mean(accuracy))
    assert metrics["accuracy_std"] == pytest.approx(np.std(accuracy))
    # Silhouette by its definition.
    distance = np.sqrt(((rows[:, None] - rows) ** 2).sum(2))
    groups = np.stack([distance[:, test.labels == c].sum(1) for c in range(6)], 1)
    counts = np.bincount(test.labels)
    own = groups[np.arange(90), test.labels] / (counts[test.labels] - 1)
    other = groups / counts
    other[np.arange(90), test.labels] = np.inf
    nearest = other.min(1)
    expected = 100 * np.mean((nearest - own) / np.maximum(nearest, own))
    assert metrics["silhouette"] == pytest.approx(expected, abs=1e-3)
    # The confusion matrix has the hits on its diagonal.
    arrays = load_file(job.out.with_suffix(".safetensors"))
    assert arrays.keys() == {"clusters", "centers", "confusion", "labels"}
    assert np.array_equal(arrays["labels"], test.labels)
    confusion = arrays["confusion"]
    assert confusion.sum() == 90
    assert 100 * np.trace(confusion) / 90 == pytest.approx(metrics["accuracy"])
    assert np.array_equal(confusion.sum(1), counts)
    assert arrays["centers"].shape == (6, 12) and confusion.shape == (6, 6)


def test_processes_do_not_matter(job, monkeypatch):
    """The same bits from this process alone, and from others."""
    monkeypatch.setattr(clustering, "SMALL", 0)
    runs = [Clustering(runs=4, batch_size=32).evaluate(Rank(cpus=n), job) for n in (1, 2)]
    assert runs[0] == runs[1]


def test_clusters_name_the_features_that_they_are_of(tmp_path):
    parts = {"norm": "none", "blocks": 2, "precision": "bf16"}
    test = open_features(store(tmp_path / "a.safetensors", *blobs(9, 4, 2, 0), **parts))
    assert clustering.origin(test) == {
        "encoder_sha256": "e" * 64, "index_digest": "d" * 64, "norm": "none", "blocks": 2,
        "pooling": "cls", "resize": 16,
    }  # fmt: skip


def test_class_subset(tmp_path, job, rank):
    features, labels = blobs(90, 12, 6, 1)
    names = ["ant", "bee", "cat", "dog", "eel", "fox"]
    test = store(tmp_path / "test.safetensors", features, labels, class_names=names)
    job = given(job, test=test)
    settings = Clustering(runs=3, subsets={"pets": ("dog", "cat")})
    metrics = settings.evaluate(rank, job)
    alone = np.isin(labels, [2, 3])
    only = store(tmp_path / "pets.safetensors", features[alone], labels[alone])
    expected = Clustering(runs=3).evaluate(rank, given(job, test=only))
    assert {key: metrics[f"pets_{key}"] for key in expected} == expected


def test_what_cannot_be_clustered(tmp_path, job, rank, monkeypatch):
    """Of every class one image has no silhouette; found before anything is clustered."""
    names = ["ant", "bee", "cat"]
    plain, few = Clustering(runs=2), Clustering(runs=2, subsets={"few": ("bee", "cat")})
    gnu = Clustering(subsets={"pets": ("gnu",)})
    some = blobs(20, 4, 2, 0)[0]
    table = (
        (plain, np.full((20, 4), 0.1), np.arange(20) % 3, "fewer distinct features than the 3"),
        (plain, some, np.full(20, 4), "at least two classes"),
        (plain, some[:6], np.arange(6), r"2\.safetensors: one sample of each of 6 classes"),
        (few, some[:4], [0, 0, 1, 2], r"3\.safetensors: one sample of each of 2 classes"),
        (gnu, some[:4], [0, 0, 1, 2], r"subset pets: .*4\.safetensors has no class gnu"),
    )
    for number, (settings, features, labels, message) in enumerate(table):
        if number == 2:
            monkeypatch.setattr(clustering, "best_of_runs", lambda *_: pytest.fail("clustered"))
        path = store(tmp_path / f"{number}.safetensors", features, labels, class_names=names)
        with pytest.raises(UserError, match=message):
            settings.evaluate(rank, given(job, test=path))
    assert not job.out.with_suffix(".safetensors").exists()
