import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from maect.core.errors import UserError
from maect.data.index import open_index
from maect.evaluate import clustering, pictures
from maect.evaluate.base import EvaluationJob
from maect.evaluate.protocols.stored_features import Clustering, Retrieval
from maect.evaluate.store import open_features

from .by_hand import clear
from .conftest import Rank, given, store


@pytest.fixture(scope="module")
def clustered(
    images: Path, extracted: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> EvaluationJob:
    """Features and clusters of the validation digits, all of them and three classes."""
    root = tmp_path_factory.mktemp("clustered")
    inputs = {"test": extracted["val"], "images": images / "shards/val"}
    job = EvaluationJob(images / "runs/mae", root / "clustering.json", inputs)
    Clustering(runs=3, subsets={"low": ("0", "1", "2")}).evaluate(Rank(), job)
    job = replace(job, out=root / "retrieval.json")
    return given(job, clusters=root / "clustering.safetensors")


def test_neighbours_and_clusters(clustered, rank):
    settings = Retrieval(neighbors=4, queries=3, side=8)
    metrics = settings.evaluate(rank, clustered)
    found = load_file(clustered.out.with_suffix(".safetensors"))
    test, index = open_features(clustered.path("test")), open_index(clustered.path("images"))
    rows = test.values.astype(np.float64)
    # Queries: the first image of classes 0, 3 and 6. Neighbours by cosine, themselves left out.
    assert found["query_labels"].tolist() == [0, 3, 6]
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    for query, neighbors in zip(found["query_ids"], found["neighbor_ids"], strict=True):
        assert query == np.flatnonzero(test.labels == test.labels[query])[0]
        similarity = unit @ unit[query]
        similarity[query] = -2
        clear(similarity, 1e-6, chosen=4)
        assert neighbors.tolist() == np.argsort(-similarity, kind="stable")[:4].tolist()
    # Clusters: the images nearest to each centre among standardised features.
    arrays = load_file(clustered.path("clusters"))
    standard = (rows - rows.mean(0)) / rows.std(0)
    assert found["cluster_ids"].shape == (10, 4)
    for center, ids in zip(arrays["centers"], found["cluster_ids"], strict=True):
        distance = np.linalg.norm(standard - center, axis=1)
        np.testing.assert_allclose(distance[ids], np.sort(distance)[:4], rtol=1e-5)
    # The class of a cluster: column i of the confusion matrix is the cluster of class i.
    for label, row in enumerate(found["cluster_classes"]):
        members = arrays["labels"][arrays["clusters"] == label]
        assert np.sum(members == row) == arrays["confusion"][row, row]
    assert sorted(found["cluster_classes"]) == list(range(10))
    for name in ("query", "neighbor", "cluster"):
        ids, labels = found[f"{name}_ids"], found[f"{name}_labels"]
        pictures = found[f"{name}_images"]
        assert np.array_equal(labels, test.labels[ids])
        assert pictures.shape == (*ids.shape, 8, 8, 3) and pictures.dtype == np.uint8
        image = Image.open(BytesIO(index.read(ids.ravel()[1]))).convert("RGB")
        small = image.resize((8, 8), Image.Resampling.BICUBIC)
        assert np.array_equal(pictures.reshape(-1, 8, 8, 3)[1], np.asarray(small))
    right = found["neighbor_labels"] == found["query_labels"][:, None]
    assert metrics["query_precision"] == 100 * right.mean()


def test_queries_of_some_classes_and_clusters_of_a_subset(clustered, rank):
    job = replace(clustered, out=clustered.out.with_name("some.json"))
    Retrieval(neighbors=5, classes=("7", "2"), subset="low", clusters=2).evaluate(rank, job)
    found = load_file(job.out.with_suffix(".safetensors"))
    labels = open_features(clustered.path("test")).labels
    assert found["query_labels"].tolist() == [7, 2]
    assert found["query_ids"].tolist() == [np.flatnonzero(labels == n)[0] for n in (7, 2)]
    assert found["neighbor_ids"].shape == found["cluster_ids"].shape == (2, 5)
    assert set(found["cluster_labels"].ravel()) <= {0, 1, 2} >= set(found["cluster_classes"])


def test_copies_do_not_hide_the_query(tmp_path):
    """Two copies and a third image: the query is never its own neighbour."""
    rows = np.array([[1.0, 0.0], [1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
    test = open_features(store(tmp_path / "t.safetensors", rows, [0, 0, 1, 1]))
    assert pictures._neighbors(test, np.array([0, 1]), 2, 1).tolist() == [[1, 2], [0, 2]]
    assert pictures.choose_queries(test, 5).tolist() == [0, 2]


def test_what_does_not_belong_together_is_refused(clustered, rank, tmp_path, images):
    """Clusters of equal shape and labels are told apart by what their file says of its origin."""
    table = [
        ({"neighbors": 70}, {}, "neighbors 70 needs more than the 70 images"),
        ({"classes": ("7", "12")}, {}, r"retrieval: classes of .*: unknown '12'"),
        ({"subset": "high"}, {}, "has no 'high_centers'"),
        ({}, {"images": images / "shards/train"}, "features of other images"),
        ({}, {"clusters": tmp_path / "none.safetensors"}, "no such clusters"),
    ]
    made = clustering.origin(open_features(clustered.path("test")))
    for other in ("encoder_sha256", "index_digest", "norm", "blocks", None):
        path = tmp_path / f"{other}.safetensors"
        texts = {"maect": json.dumps(made | {other: "f" * 64})} if other else None
        save_file(load_file(clustered.path("clusters")), path, texts)
        table.append(({}, {"clusters": path}, f"{other}.safetensors: clusters of another encoder"))
    for settings, inputs, message in table:
        with pytest.raises(UserError, match=message):
            Retrieval(**settings).evaluate(rank, given(clustered, **inputs))
