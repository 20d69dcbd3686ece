import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.numpy import load_file

from maect.core.errors import UserError
from maect.data.index import open_index
from maect.evaluate.base import EvaluationJob
from maect.evaluate.pictures import ATLAS_BYTES, atlas, common_classes
from maect.evaluate.protocols.stored_features import Explore, Umap, columns_of
from maect.evaluate.store import open_features

from .conftest import blobs, store


@pytest.fixture
def job(images: Path, extracted: dict[str, Path], tmp_path: Path) -> EvaluationJob:
    given = {f"features_{split}": path for split, path in extracted.items()}
    given |= {f"images_{split}": images / "shards" / split for split in extracted}
    return EvaluationJob(images / "runs/mae", tmp_path / "explore.json", given)


def test_a_map_with_names_pictures_groups_and_look_alikes(job, rank):
    settings = Explore(splits=("train", "val"), images=100, clusters=5, neighbors=3)
    metrics = settings.evaluate(rank, job)
    assert (metrics["images"], metrics["clusters"]) == (100, 5)
    path = job.out.with_suffix(".safetensors")
    left = load_file(path)
    with safe_open(path, framework="numpy") as file:
        about = json.loads(file.metadata()["maect"])
    assert left["points"].shape == (100, 2) and np.isfinite(left["points"]).all()
    assert {0, 1} == {*left["splits"].tolist()} and about["splits"] == ["train", "val"]
    rows = []
    for position, (split, row) in enumerate(zip(left["splits"], left["ids"], strict=True)):
        index = open_index(job.path(f"images_{settings.splits[split]}"))
        # The names of the files as they are, where the shards have keys.
        assert about["names"][position] == f"{index.key(row)}.png"
        assert left["labels"][position] == index.labels[row]
        rows.append(open_features(job.path(f"features_{settings.splits[split]}")).values[row[None]])
    unit = np.concatenate(rows).astype(float)
    unit = (unit - unit.mean(0)) / unit.std(0)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    similarity = unit @ unit.T - 3 * np.eye(100)
    expected = np.sort(similarity, axis=1)[:, :-4:-1]
    np.testing.assert_allclose(left["similarity"], expected, atol=1e-5)
    found = np.take_along_axis(similarity, left["neighbors"], axis=1)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert left["grains"].size == 0  # their number was given
    # The picture of an image is where the page looks for it.
    page = np.asarray(Image.open(io.BytesIO(left["atlas"].tobytes())).convert("RGB"), float)
    index = open_index(job.path("images_val"))
    row, column = divmod(99, columns_of(100))
    side = about["side"]
    shown = page[row * side : (row + 1) * side, column * side : (column + 1) * side]
    image = np.asarray(Image.open(io.BytesIO(index.read(int(left["ids"][99])))), float)
    assert np.abs(shown - image).mean() < 6


def test_other_numbers_of_groups_are_left_where_none_is_given(job, rank):
    metrics = Explore(splits=("train", "val"), images=60).evaluate(rank, job)
    explored = load_file(job.out.with_suffix(".safetensors"))
    counts = explored["grains"].tolist()
    assert counts == metrics["grains"] and counts == sorted({*counts} - {1, metrics["clusters"]})
    assert [row.max() + 1 for row in explored["grain_clusters"]] == counts
    assert explored["grain_distance"].shape == (len(counts), 60) and counts


def test_splits_with_other_classes_keep_their_names(job):
    """A view of some classes, or a split without labels, numbers its classes otherwise."""
    train, val = (open_features(job.path(f"features_{split}")) for split in ("train", "val"))
    names = [f"class {number}" for number in range(10)]
    whole = replace(train, record=train.record | {"class_names": names})
    some = replace(val, labels=val.labels % 2, record=val.record | {"class_names": names[7:9]})
    none = replace(train, labels=train.labels * 0 - 1, record=train.record | {"class_names": []})
    rows = np.arange(20)
    classes, labels = common_classes([(whole, rows), (some, rows)])
    assert classes == names
    assert labels.tolist() == [*train.labels[:20], *(7 + some.labels[:20])]
    classes, labels = common_classes([(none, rows), (some, rows)])
    assert classes == names[7:9]
    assert labels.tolist() == [*([-1] * 20), *some.labels[:20]]


def test_what_cannot_be_explored_is_named(job, rank):
    with pytest.raises(UserError, match="7 images; 20 are needed to explore"):
        Explore(splits=("val",), images=7).evaluate(rank, job)
    with pytest.raises(ValidationError, match="above 5,000,000: the page would not open"):
        Explore(images=2000)
    wrong = EvaluationJob(job.run, job.out, dict(job.inputs, images_val=job.inputs["images_train"]))
    with pytest.raises(UserError, match="features of other images"):
        Explore().evaluate(rank, wrong)


def test_pictures_fit_into_a_report_whatever_they_show():
    noise = np.random.default_rng(0).integers(0, 256, (1000, 64, 64, 3), np.uint8)
    assert len(atlas(noise)) <= 2 * ATLAS_BYTES  # nothing is worse than noise
    smooth = np.broadcast_to(np.arange(64, dtype=np.uint8)[:, None], (9, 64, 64))
    assert len(atlas(np.stack([smooth] * 3, axis=-1))) < ATLAS_BYTES


def test_umap_is_reproducible(tmp_path, rank):
    features, labels = blobs(60, 8, 3, 0, spread=0.1)
    test = store(tmp_path / "t.safetensors", features, labels, class_names=["a", "b", "c"])
    points, chosen = [], labels[labels != 1]
    for number in range(2):
        one = EvaluationJob(tmp_path, tmp_path / f"{number}.json", {"test": test})
        assert Umap(classes=("c", "a")).evaluate(rank, one) == {"samples": len(chosen)}
        points.append(load_file(tmp_path / f"{number}.safetensors"))
    first = points[0]["points"]
    assert first.shape == (len(chosen), 2) and np.isfinite(first).all()
    assert np.array_equal(first, points[1]["points"])
    assert np.array_equal(points[0]["labels"], chosen)
    # Classes that lie far apart do so in the plane.
    centers = np.stack([first[chosen == c].mean(0) for c in (0, 2)])
    own = np.linalg.norm(first - centers[chosen // 2], axis=1).mean()
    assert np.linalg.norm(centers[0] - centers[1]) > own
    with pytest.raises(UserError, match="neighbors 60 needs more than the 60 samples"):
        Umap(neighbors=60).evaluate(rank, one)
