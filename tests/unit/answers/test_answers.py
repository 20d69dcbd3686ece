"""Vectors, clusters, neighbours and classes of synthetic photographs, through the commands."""

import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

import maect
from maect.answers.classes import fit_classifier, read_classifier
from maect.answers.groups import around, write_clusters
from maect.answers.vectors import Vectors, nearest, write_vectors
from maect.cli import main
from maect.core.arrays import read_arrays, write_arrays
from maect.core.errors import UserError
from maect.evaluate.clustering import (
    GRAINS,
    Clusters,
    choose_resolution,
    cluster,
    comparable,
    graph_groups,
    scale_of,
    shared_neighbours,
)
from maect.evaluate.store import write_features
from maect.models.weights import save_tensors

from .conftest import rewritten


@pytest.fixture(scope="module")
def index(run: Path, photographs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("index") / "all.parquet"
    assert main(["embed", str(run), str(photographs), "--out", str(out)]) == 0
    return out


def test_the_table_has_the_names_and_the_bits(run, photographs, index, fitted):
    names = sorted(str(p.relative_to(photographs)) for p in photographs.rglob("No*"))
    encoded = maect.load(run).encode([photographs / name for name in names])
    frame = pd.read_parquet(index)
    assert list(frame.columns) == ["file", "vector", "stamp"] and list(frame["file"]) == names
    np.testing.assert_array_equal(np.stack(frame["vector"].to_list()), encoded)
    labelled = Vectors.read(fitted[0])
    assert labelled.files == names and labelled.labels == [name[0] for name in names]
    np.testing.assert_array_equal(labelled.values, encoded)


def test_bfloat16_is_asked_for_recorded_and_followed(run, photographs, tmp_path, capsys):
    out, half = tmp_path / "a.parquet", tmp_path / "half.parquet"
    command = ["embed", str(run), str(photographs), "--device", "cpu"]
    assert main([*command, "--out", str(out)]) == 0
    assert main([*command, "--out", str(half), "--precision", "bf16"]) == 0
    capsys.readouterr()
    exact, rounded = Vectors.read(out), Vectors.read(half)
    assert (exact.about["precision"], rounded.about["precision"]) == ("fp32", "bf16")
    np.testing.assert_allclose(rounded.values, exact.values, atol=0.1)
    # The image itself is found with similarity 1: it is encoded as the index was.
    image = photographs / rounded.files[0]
    assert main(["search", str(run), str(half), str(image), "--count", "3", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[0] == f"1.0000  {rounded.files[0]}"


def test_what_cannot_be_read_is_left_out_and_named(run, photographs, tmp_path, capsys):
    folder = tmp_path / "images"
    folder.mkdir()
    good = next(photographs.rglob("*.jpg")).read_bytes()
    (folder / "good.jpg").write_bytes(good)
    (folder / "half.jpg").write_bytes(good[: len(good) // 2])
    (folder / "page.png").write_text("<html>")
    out = tmp_path / "a.parquet"
    assert main(["embed", str(run), str(folder), "--out", str(out)]) == 0
    assert Vectors.read(out).files == ["good.jpg"]
    said = capsys.readouterr()
    assert "1 image," in said.out and "2 left out" in said.out
    assert "half.jpg" in said.err and "page.png" in said.err


def test_wrong_input_is_one_line(run, photographs, index, tmp_path, capsys):
    other = tmp_path / "other.parquet"
    vectors = Vectors.read(index)
    resized = Vectors(vectors.files, vectors.values, None, {**vectors.about, "resize": 16})
    write_vectors(other, [resized])
    image = str(next(photographs.rglob("*.jpg")))
    table = tmp_path / "table.parquet"
    pd.DataFrame({"path": [image]}).to_parquet(table)
    for command, fault in (
        (["embed", str(run), str(photographs), "--out", "a.xlsx"], "must end with .parquet"),
        (["embed", str(run), "gone", "--out", "a.parquet"], "gone: no such file or folder"),
        (["embed", str(photographs), str(run)], "no such encoder; train or import the run first"),
        (["embed", str(run), image, "--out", "a.parquet"], "or --kind"),
        (["search", str(run), "gone.parquet", image], "no such file; `maect embed"),
        (["search", str(run), image, image], "vectors are read from .parquet alone"),
        (["cluster", str(table), "--out", "a"], "not written by `maect embed`"),
        (["search", str(run), str(other), image], "another resize"),
        (["cluster", str(index), "--out", "a", "--groups", "31"], "cannot form 31 clusters"),
        (["predict", str(run), str(photographs), "--out", "a.csv"], "no such classifier"),
    ):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert fault in error and error.count("\n") == 1, error


def test_nearest_compares_all_as_the_index_is_spread():
    rng = np.random.default_rng(0)
    # A large common part, and numbers that vary unequally: plain cosines would all be near 1.
    spread = np.linspace(0.1, 5, 8)
    values = (30 + spread * rng.normal(size=(50, 8))).astype(np.float32)
    queries = (30 + spread * rng.normal(size=(4, 8))).astype(np.float32)
    index = Vectors([str(i) for i in range(50)], np.concatenate([values[:49], values[:1]]))
    similarity, found = nearest(index, queries, 5)
    mean, std = index.values.mean(0, dtype=float), index.values.std(0, dtype=float)
    for query, near, ids in zip((queries - mean) / std, similarity, found, strict=True):
        cosines = [
            row @ query / np.linalg.norm(row) / np.linalg.norm(query)
            for row in (index.values - mean) / std
        ]
        assert ids.tolist() == np.argsort(-np.round(cosines, 6), kind="stable")[:5].tolist()
        np.testing.assert_allclose(near, np.sort(cosines)[::-1][:5], atol=1e-4)


def test_few_images_have_no_spread_of_their_own():
    """Of two, standardised vectors would always be opposite."""
    values = np.array([[1, 0], [1, 1]], np.float32)
    similarity, found = nearest(Vectors(["a", "b"], values), values[:1], 2)
    np.testing.assert_allclose(similarity, [[1, 2**-0.5]], atol=1e-6)
    assert found.tolist() == [[0, 1]]


def blobs(sizes: tuple[int, ...]) -> Vectors:
    rng = np.random.default_rng(1)
    centers = 10 * rng.normal(size=(len(sizes), 16))
    truth = np.repeat(np.arange(len(sizes)), sizes)
    values = (centers[truth] + rng.normal(0, 0.5, (len(truth), 16))).astype(np.float32)
    return Vectors([f"{kind}-{i}" for i, kind in enumerate(truth)], values)


@pytest.mark.parametrize("how", [{}, {"count": 4}])
def test_clusters_are_found_largest_first(how):
    vectors = blobs((10, 40, 20, 30))
    clusters = cluster(vectors.values, **how)
    assert clusters.count == 4
    for number, truth in enumerate("1320"):
        members = clusters.members(number)
        assert {vectors.files[i][0] for i in members} == {truth}
        assert (np.diff(clusters.distance[members]) >= 0).all()
    assert bool(clusters.grains) == (not how)
    for count, grain in clusters.grains.items():
        sizes = [len(grain.members(number)) for number in range(grain.count)]
        assert grain.count == count != 4 and sizes == sorted(sizes, reverse=True)


def test_a_common_part_of_all_vectors_changes_no_group():
    """Raw vectors of an encoder point in nearly one direction; what differs is what counts."""
    vectors = blobs((10, 40, 20, 30))
    shifted = vectors.values * np.geomspace(1, 100, 16, dtype=np.float32) + 500
    assert cluster(shifted).cluster.tolist() == cluster(vectors.values).cluster.tolist()


def test_groups_of_digits_are_as_good_as_those_of_louvain_in_networkx():
    """Which found 14 groups, with an adjusted Rand index of 0.765 and 0.816 of information."""
    images, truth = load_digits(return_X_y=True)
    found = cluster(images.astype(np.float32)).cluster
    assert 12 <= found.max() + 1 <= 16
    assert adjusted_rand_score(truth, found) > 0.74
    assert normalized_mutual_info_score(truth, found) > 0.79
    again = cluster(images.astype(np.float32)).cluster
    assert (found == again).all()


def test_more_images_than_a_graph_holds_follow_the_nearest(monkeypatch):
    vectors = blobs((60, 50, 40))
    monkeypatch.setattr("maect.evaluate.clustering.LARGEST", 90)
    found = graph_groups(comparable(vectors.values, scale_of(vectors.values)))
    pairs = {(file[0], group) for file, group in zip(vectors.files, found[0.15], strict=True)}
    assert len(pairs) == len({group for _, group in pairs}) == 3


@pytest.mark.parametrize(
    ("counts", "resolution"),
    [([3, 3, 3, 3, 4, 6, 8, 9, 9], 0.15), ([2, 3, 4, 5, 6, 7, 8, 9, 9], 1.0),
     ([1, 1, 1, 1, 1, 2, 3, 4, 5], 1.0), ([1, 2, 4, 4, 4, 4, 5, 6, 9], 0.5)],
)  # fmt: skip
def test_a_number_that_many_resolutions_agree_on_is_chosen(counts, resolution):
    found = {grain: np.arange(count) for grain, count in zip(GRAINS, counts, strict=True)}
    assert choose_resolution(found) == resolution


def test_weights_of_the_graph_are_shared_neighbours():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(60, 4)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    near = [{i, *np.argsort(-(rows @ rows[i]))[:7].tolist()} for i in range(60)]
    weights = shared_neighbours(rows).toarray()
    for i in range(60):
        for j in range(60):
            joined = i != j and (j in near[i] or i in near[j])
            expected = len(near[i] & near[j]) / len(near[i] | near[j]) if joined else 0
            assert weights[i, j] == pytest.approx(expected)


def test_identical_images_are_no_clusters():
    with pytest.raises(UserError, match="cannot form 2 clusters"):
        cluster(np.ones((3, 4), np.float32))


def test_the_page_shows_pictures_without_a_network(index, tmp_path):
    assert main(["cluster", str(index), "--out", str(tmp_path), "--groups", "3"]) == 0
    frame = pd.read_csv(tmp_path / "clusters.csv")
    assert sorted(frame["file"]) == Vectors.read(index).files and {*frame["cluster"]} == {1, 2, 3}
    page = (tmp_path / "index.html").read_text()
    assert page.count("url(data:image/jpeg;base64,/9j/") >= 3
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert frame["file"][0] in page  # the one nearest to the mean of the largest cluster


def test_images_that_have_changed_since_are_said(run, photographs, tmp_path, capsys):
    images, index = tmp_path / "images", tmp_path / "x.parquet"
    shutil.copytree(photographs, images)
    assert main(["embed", str(run), str(images), "--out", str(index)]) == 0
    first, second = sorted(images.rglob("No*"))[:2]
    grouped = ["cluster", str(index), "--groups", "2", "--out", str(tmp_path / "groups")]
    searched = ["duplicates", str(index), "--out", str(tmp_path / "twice")]
    moved = shutil.copytree(images, tmp_path / "moved")
    assert main(grouped) == main(searched) == 0
    assert main([*grouped, "--images", str(moved)]) == 0  # copies have times of their own
    assert "have changed" not in capsys.readouterr().err
    first.write_bytes(second.read_bytes())
    second.unlink()
    for command in (grouped, searched):
        assert main(command) == 0
        said = capsys.readouterr().err
        assert "2 of 30 images are gone or have changed since" in said and first.name in said


def test_images_are_listed_once(index, tmp_path, monkeypatch):
    """To warn of changes, and for the page: a million files take minutes."""
    kind = type(Vectors.read(index).source())
    listed = []
    plain = kind.list_images
    monkeypatch.setattr(kind, "list_images", lambda self: listed.append(self) or plain(self))
    assert main(["cluster", str(index), "--groups", "2", "--out", str(tmp_path / "groups")]) == 0
    assert len(listed) == 1


def test_the_page_has_a_coarser_and_a_finer_grouping(index, tmp_path):
    vectors = blobs((40, 40, 40, 40, 40))
    clusters = cluster(vectors.values)
    assert clusters.count == 5
    read = Vectors.read(index)
    found = Vectors(vectors.files, vectors.values, None, read.about)
    write_clusters(found, clusters, tmp_path, read.source())
    page = (tmp_path / "index.html").read_text()
    numbers = re.findall(r'id="grain(\d+)"', page)
    assert [int(n) for n in numbers] == sorted({5, *(one.count for one in around(clusters))})
    assert len(numbers) > 1 and re.findall(r'id="grain(\d+)" checked', page) == ["5"]
    # About half as many, and twice as many.
    some = {n: Clusters(np.arange(n), np.zeros(n)) for n in (2, 4, 8, 10, 14)}
    near = around(Clusters(np.arange(5), np.zeros(5), some))
    assert [one.count for one in near] == [2, 10]


def test_predict_by_what_was_fitted_and_kept(run, predicted, tmp_path, capsys):
    predict, kept, out = predicted
    # From the file alone, what was written when it was fitted.
    assert out.read_text() == (kept.parent / "p.csv").read_text()
    frame = pd.read_csv(out)
    right = frame["class"] == frame["file"].str[0]
    assert right.mean() > 0.9 and frame["probability"].between(1 / 3, 1).all()
    classifier = read_classifier(kept)
    assert classifier.resize == 20
    with pytest.raises(UserError, match=r"a shorter side of 20 pixels, not 30; load .* resize=20"):
        classifier.check(maect.load(run, resize=30), kept)
    arrays, texts = read_arrays(kept)
    del texts["resize"]
    write_arrays(tmp_path / "older.safetensors", arrays, texts)
    with pytest.raises(UserError, match="says no resize of its images; fit it again"):
        read_classifier(tmp_path / "older.safetensors")
    other = rewritten(run, tmp_path / "other", 2)
    capsys.readouterr()
    assert main(["predict", str(other), *predict[2:]]) == 2
    assert "another encoder" in capsys.readouterr().err


def test_labelled_vectors_are_fitted_as_scikit_learn_does(tmp_path):
    """With the penalty of `low_shot`, on vectors that are centred and of length 1."""
    values = np.random.default_rng(0).normal(size=(60, 6)).astype(np.float32)
    labels, about = ["a", "b", "c"] * 20, {"encoder_sha256": "e", "resize": 16}
    names = [str(n) for n in range(60)]
    write_vectors(tmp_path / "v.parquet", [Vectors(names, values, labels, about)])
    found = fit_classifier(tmp_path / "v.parquet").probabilities(values)
    rows = values - values.mean(1, keepdims=True, dtype=float)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    model = LogisticRegression(C=1 / 0.00025, fit_intercept=False, tol=1e-9, max_iter=5000)
    np.testing.assert_allclose(found, model.fit(rows, labels).predict_proba(rows), atol=1e-3)


def test_only_features_behind_the_norm_are_fitted(tmp_path):
    path, labels, keys = tmp_path / "val.before_norm.safetensors", np.arange(6) % 2, [*"abcdef"]
    for change in ({"norm": False}, {"blocks": 4}):
        record = {"encoder_sha256": "e", "class_names": ["a", "b"], "resize": 16} | change
        rows = [np.eye(6, dtype=np.float32)]
        write_features(path, rows, width=6, labels=labels, keys=keys, record=record)
        with pytest.raises(UserError, match="features before the final norm, and images get"):
            fit_classifier(path)


def test_predict_by_a_linear_probe(run, photographs, tmp_path):
    """The file that the protocol leaves: batch norm and a linear layer.

    Images are resized as they were for it.
    """
    encoder = maect.load(run, resize=30)
    generator = torch.Generator().manual_seed(0)
    probe = {
        "weight": torch.randn(3, encoder.width, generator=generator),
        "bias": torch.randn(3, generator=generator),
        "mean": torch.randn(encoder.width, generator=generator),
        "var": torch.rand(encoder.width, generator=generator) + 0.1,
    }
    texts = {"class_names": '["x", "y", "z"]', "encoder_sha256": encoder.sha256, "resize": "30"}
    # Where the pipeline has it, so that nothing has to be named.
    copy = shutil.copytree(run, tmp_path / "runs/ct")
    save_tensors(tmp_path / "evaluations/ct/linear_probe.safetensors", probe, texts)
    out = tmp_path / "p.csv"
    assert main(["predict", str(copy), str(photographs), "--out", str(out)]) == 0
    frame = pd.read_csv(out)
    features = torch.from_numpy(encoder.encode([photographs / f for f in frame["file"]]))
    normed = (features - probe["mean"]) / torch.sqrt(probe["var"] + 1e-5)
    expected = torch.softmax(normed @ probe["weight"].T + probe["bias"], 1).max(1)
    assert frame["class"].tolist() == ["xyz"[i] for i in expected.indices]
    np.testing.assert_allclose(frame["probability"], expected.values.numpy(), atol=1e-3)
