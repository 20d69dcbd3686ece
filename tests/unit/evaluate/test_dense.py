"""Dense evaluations: masks beside images, patches, mIoU, and CAPI's choices."""

import hashlib
import shutil
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from sklearn.metrics import jaccard_score
from sklearn.neighbors import KNeighborsClassifier

from maect.core.errors import UserError
from maect.core.files import read_record
from maect.data.bundled import draw
from maect.data.index import WIDTH, open_index
from maect.data.shards import shard
from maect.data.transforms import normalize
from maect.evaluate import dense, patch_classifiers
from maect.evaluate.dense import MaskSplit, miou
from maect.evaluate.evaluation import evaluate
from maect.evaluate.features import Encoding
from maect.evaluate.knn import nearest
from maect.evaluate.patch_classifiers import (
    Patches,
    choose_and_score,
    predict_by_neighbours,
    predict_by_regression,
    training_patches,
)
from maect.evaluate.patch_linear import picture
from maect.evaluate.protocols.probes import PatchKnn, PatchLogistic
from maect.recipes import Pixels

from .conftest import Rank, masked_job, resolved


@pytest.mark.parametrize("ignore", [(0, 255), (255,), ()])
def test_miou_is_that_of_scikit_learn(ignore):
    rng = np.random.default_rng(0)
    truth = rng.choice([0, 1, 2, 7, 255], (50, 16)).astype(np.uint8)
    predicted = np.where(rng.random(truth.shape) < 0.6, truth, rng.choice([0, 1, 9], truth.shape))
    mean, each, accuracy = miou(truth, predicted.astype(np.uint8), ignore)
    counted = ~np.isin(truth, ignore)
    pair = truth[counted], predicted[counted]
    assert mean == pytest.approx(100 * jaccard_score(*pair, average="macro"))
    labels = sorted({*np.unique(pair[0]), *np.unique(pair[1])})
    own = 100 * jaccard_score(*pair, average=None, labels=labels)
    assert [*each.values()] == pytest.approx(own)
    assert [*map(int, each)] == labels
    assert accuracy == pytest.approx(100 * (pair[0] == pair[1]).mean())


def test_distance_l2_finds_what_scikit_learn_finds():
    rng = np.random.default_rng(1)
    train, queries = (rng.normal(size=(n, 6)).astype(np.float32) for n in (300, 40))
    _, ids = nearest(train, queries, 5, None, 2, "l2")
    model = KNeighborsClassifier(5).fit(train, np.zeros(len(train)))
    assert (ids == model.kneighbors(queries, return_distance=False)).all()


def test_pixels_vote_one_by_one():
    """A patch takes the most frequent class of each of its pixels."""
    features = np.array([[1, 0], [1, 0.1], [1, -0.1], [0, 1]], np.float32)
    classes = np.array([[1, 2], [1, 3], [4, 3], [5, 5]], np.uint8)
    queries = np.array([[1, 0.01]], np.float32)
    choices = [{"k": k, "distance": "cosine"} for k in (1, 3)]
    settings = PatchKnn(neighbours=(1, 3))
    votes = predict_by_neighbours(settings, (features, classes), queries, choices, 1)
    assert [values.tolist() for values in votes] == [[[1, 2]], [[1, 3]]]


def test_regression_gives_every_pixel_the_class_of_its_patch():
    rng = np.random.default_rng(2)
    labels = rng.choice([1, 4, 9], (6, 10)).astype(np.uint8)
    features = np.eye(10, dtype=np.float32)[labels] + 0.01 * rng.random((6, 10, 10), np.float32)
    classes = np.repeat(labels[:, :, None], 4, 2)
    classes[:, :, :2] = 7, 8  # two pixels of four are of other classes
    patches = Patches(features.astype(np.float32), classes)
    known = patches.rows(), patches.pixels()
    (predicted,) = predict_by_regression(PatchLogistic(), known, patches.rows(), [{"c": 10.0}], 1)
    assert (predicted == labels.reshape(-1, 1)).all()


def test_ignored_patches_teach_nothing():
    features = np.arange(8, dtype=np.float32).reshape(1, 4, 2)
    classes = np.array([[[0, 0], [1, 1], [255, 255], [2, 0]]], np.uint8)
    patches = Patches(features, classes)
    rows, pixels = training_patches(PatchKnn(ignore=(0, 255)), patches)
    assert rows.tolist() == [[2, 3]]  # of 2 and 0 the smaller is the patch's
    assert pixels.tolist() == [[1, 1]]
    assert len(training_patches(PatchKnn(ignore=(255,)), patches)[0]) == 3
    half = PatchKnn(ignore=(255,), patches_one_in=2)
    assert training_patches(half, patches)[0].tolist() == [[0, 1]]


def test_of_equal_settings_the_first_is_chosen_and_a_killed_job_does_not_choose_again(
    drawn, tmp_path, monkeypatch
):
    """Right with k from 3 on, whatever is shown; it notes what was to be learnt from."""
    one = Patches(np.zeros((1, 2, 1), np.float32), np.array([[[1], [2]]], np.uint8))
    parts = dict.fromkeys(("train", "held", "test"), one)
    monkeypatch.setattr(patch_classifiers, "encode_splits", lambda *_: parts)
    choices = [{"k": 1}, {"k": 3}, {"k": 10}]
    seen = []

    def predict(settings, known, queries, some, threads):
        seen.append((len(known[0]), some))
        if len(seen) == 2:
            raise MemoryError
        return [np.array([[1], [2 if one["k"] > 1 else 1]], np.uint8) for one in some]

    def scored(seed=0):
        job = masked_job(drawn, tmp_path / "fixed.json")
        return choose_and_score(PatchKnn(seed=seed), Rank(), job, choices, predict)

    with pytest.raises(MemoryError):
        scored()
    metrics = scored()
    assert (metrics["k"], metrics["patch_knn"]) == (3, 100)
    assert [row["miou"] for row in metrics["held_out"]] == [25, 100, 100]
    # The choice made, held-out images are learnt from as well.
    last = (4, [{"k": 3}])
    assert seen == [(2, choices), last, last]
    assert scored(seed=1) == metrics and seen[3:] == [(2, choices), last]


def test_features_are_standardised_by_the_patches_that_are_learnt_from(drawn, tmp_path):
    job = masked_job(drawn, tmp_path / "a.json")
    parts = patch_classifiers.encode_splits(PatchKnn(), Rank(), job)
    assert parts is not None and len(parts["held"].features) == 4
    assert np.abs(parts["train"].rows().mean(0)).max() < 1e-4


def test_patches_lie_where_their_pixels_do(drawn, tmp_path):
    """Also in shards that have no plan, whose keys are names."""
    images, masks = (open_index(drawn / "shards" / name) for name in ("val", "val_masks"))
    split = MaskSplit(images, masks)
    for name in ("val", "val_masks"):
        shutil.copytree(drawn / "shards" / name, tmp_path / name)
        (tmp_path / name / "plan.json").unlink()
    bare = MaskSplit(open_index(tmp_path / "val"), open_index(tmp_path / "val_masks"))
    assert bare.rows == split.rows
    cells = split.patches(32, 64, 2)
    for number in range(images.n):
        mask = draw(int(images.key(number)))[1]
        assert (split.read(number) == mask).all()
        row, column = divmod(13, 8)
        wanted = mask[4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
        assert cells[number, 13].tolist() == wanted.flatten().tolist()
    assert split.numbers(2) == np.unique([draw(number)[1] for number in range(40, 60)]).tolist()
    for size, patches in ((32, 63), (33, 64)):
        with pytest.raises(UserError, match=f"{patches} patches do not tile {size} x {size}"):
            split.patches(size, patches, 1)


def test_patch_tokens_are_the_encoders_of_whole_images(drawn, monkeypatch):
    """Batch after batch; how many images are done is reported."""
    monkeypatch.setattr(dense, "_AT_ONCE", 8)
    encoding = Encoding(drawn / "runs/mae/encoder.safetensors", torch.device("cpu"))
    index, rank = open_index(drawn / "shards/val"), Rank()
    found = dense.encode_patches(rank, index, encoding)
    pictures = np.stack([draw(int(index.key(i)))[0] for i in range(20)]).transpose(0, 3, 1, 2)
    with torch.no_grad():
        images = normalize(torch.from_numpy(pictures), encoding.settings.pixels)
        tokens = encoding.encoder(images).tokens[:, encoding.settings.prefix_tokens :]
    np.testing.assert_allclose(found, tokens, atol=2e-4)
    assert [report["step"] for report in rank.reports] == [8, 16, 20]
    assert {report["steps"] for report in rank.reports} == {20}


@pytest.mark.parametrize(
    "protocol",
    [PatchKnn(), PatchLogistic(penalties=(1e-3, 1e-1), max_iterations=50)],
    ids=lambda p: p.name,
)
def test_an_untrained_encoder_is_better_than_background_alone(drawn, tmp_path, protocol):
    name = protocol.name
    job = masked_job(drawn, tmp_path / f"{name}.json")
    assert evaluate(Rank(), config=resolved(job, protocol)) == "done"
    metrics = read_record(job.out)["metrics"]
    truth = np.stack([draw(number)[1] for number in range(40, 60)])
    assert metrics[name] > miou(truth, np.ones_like(truth), ())[0]
    assert metrics[f"{name}_accuracy"] > 70
    assert {*metrics[f"{name}_classes"]} <= {"1", "2", "3", "4", "5"}
    best = max(metrics["held_out"], key=lambda row: row["miou"])
    for key in best.keys() - {"miou"}:
        assert metrics[key] == best[key]


def test_masks_that_do_not_fit_are_refused(drawn, tmp_path):
    images = open_index(drawn / "shards" / "val")
    with pytest.raises(UserError, match=r"no mask '00..', nor of 19 others"):
        MaskSplit(images, open_index(drawn / "shards" / "train_masks"))
    folder = tmp_path / "masks"
    shutil.copytree(drawn / "images" / "val_masks", folder)
    Image.new("RGB", (32, 32)).save(folder / "0042.png")
    palette = Image.fromarray(draw(43)[1], "P")
    palette.putpalette([*range(48)])
    palette.save(folder / "0043.png", bits=4)
    header, rows = struct.pack(">IIBBBBB", 32, 32, 4, 0, 0, 0, 0), 32 * (b"\0" + bytes(16))
    grey = b"\x89PNG\r\n\x1a\n"  # of 4 bits, which Pillow does not write
    for name, part in ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        grey += struct.pack(">I", len(part)) + name + part
        grey += struct.pack(">I", zlib.crc32(name + part))
    (folder / "0044.png").write_bytes(grey)
    shard(folder, tmp_path / "shards", "masks", 1)
    masks, sides = open_index(tmp_path / "shards"), images.rows.copy()
    rows = [int(images.key(i)) for i in range(images.n)]
    sides[rows.index(41), WIDTH] += 1
    with pytest.raises(UserError, match="'0041' is not of the image's size"):
        MaskSplit(replace(images, rows=sides), masks)
    split = MaskSplit(images, masks)
    for number, depth in ((42, "the mode RGB"), (44, "4-bit grey")):
        with pytest.raises(UserError, match=f"'00{number}' has pixels of {depth}"):
            split.read(rows.index(number))
    assert np.array_equal(split.read(rows.index(43)), draw(43)[1])


def test_masks_are_joined_by_names_of_any_length_and_never_to_two_images(tmp_path):
    name = "n" * 100
    for folder, kind, suffix in (("images", "unlabelled", "jpg"), ("masks", "masks", "png")):
        (tmp_path / folder).mkdir()
        Image.new("L", (8, 8)).save(tmp_path / folder / f"{name}.{suffix}")
        Image.new("L", (9, 8)).save(tmp_path / folder / "b.png")
        shard(tmp_path / folder, tmp_path / "shards" / folder, kind, 1)
    split = MaskSplit(*(open_index(tmp_path / "shards" / f) for f in ("images", "masks")))
    widths = [split.read(number).shape[1] for number in range(2)]
    assert widths == split.images.rows[:, WIDTH].tolist()
    shutil.copy(tmp_path / "images/b.png", tmp_path / "images/b.jpg")
    shard(tmp_path / "images", tmp_path / "again", "unlabelled", 1)
    with pytest.raises(UserError, match="2 files are called 'b', with different endings"):
        MaskSplit(open_index(tmp_path / "again"), split.masks)


def test_crops_for_the_linear_head_are_upright_as_their_masks(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (6, 4, 3), np.uint8)
    stored = Image.fromarray(noise).resize((24, 36))
    stored.save(tmp_path / "images/a.jpg", exif=exif)
    with Image.open(tmp_path / "images/a.jpg") as image:
        upright = ImageOps.exif_transpose(image).convert("RGB")
    Image.new("L", upright.size).save(tmp_path / "masks/a.png")
    pixels = Pixels(orientation="exif")
    shard(tmp_path / "images", tmp_path / "i", "unlabelled", 1, pixels=pixels)
    shard(tmp_path / "masks", tmp_path / "m", "masks", 1)
    split = MaskSplit(open_index(tmp_path / "i"), open_index(tmp_path / "m"))
    np.testing.assert_array_equal(np.asarray(picture(split, 0)), np.asarray(upright))


def test_shapes_are_the_same_everywhere():
    digest = hashlib.sha256(b"".join(part.tobytes() for n in range(1000) for part in draw(n)))
    assert digest.hexdigest() == "31606d3c7a6478aeed3986890c14ae4246cf3ec1cf1112f0a96afa373d36008d"
