"""An experiment for one's own images, from CIFAR-10 and from the bundled digits."""

import io
import json
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import tifffile
import yaml
from PIL import Image
from pyarrow import parquet

from maect.answers.public import PUBLIC
from maect.cli import build_app, main
from maect.core.errors import UserError
from maect.core.yaml_files import Loader
from maect.data.index import open_index
from maect.data.shard_plan import plan_shards
from maect.experiment import load
from maect.experiment.profile import find_profile
from maect.experiment.start import missing_images
from maect.launch.progress import rough
from maect.tools.dry_run import jobs_to_run
from maect.tools.new_experiment import (
    about,
    evaluated,
    flow,
    new_experiment,
    outlook,
    without_training,
)
from maect.tools.own_images import find_splits, held_out, inspect_images
from maect.tools.own_training import FEWEST_STEPS, HOUR, PROBES, weights
from maect.tools.plan import Device, all_jobs, make_plan, wall

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from maect.data.bundled import write_digits

    folder = tmp_path_factory.mktemp("own") / "my digits"
    write_digits(folder)
    return folder


def test_folders_of_classes_with_a_split(digits, tmp_path):
    text = new_experiment(digits, tmp_path / "mine.yaml")
    experiment = load(str(tmp_path / "mine.yaml"))
    mae = experiment.runs["mae_tiny"]
    assert (mae.settings.epochs, mae.encoder.image_size) == (1600, 16)
    ct = experiment.runs["ct_min_tiny"].settings
    assert (ct.batch_size, ct.head.queue_size, ct.head.topk) == (128, 1024, 20)
    assert ct.encoder_ema == 0.99 and "hardly change" not in text
    assert "ct_aug_tiny" not in experiment.runs and "the images have no colours" in text
    assert "1,297 images to train on in 10 classes" in text and "resize: 16" in text
    assert {name for _, name in experiment.evaluations} >= {"knn", "low_shot", "clustering"}
    assert not missing_images(experiment)
    assert experiment.spec.compare_with_paper is False  # these are not ImageNet's images


def test_a_part_is_held_out_of_every_class(digits, tmp_path):
    new_experiment(digits / "train", tmp_path / "mine.yaml")
    lists = {part: (tmp_path / f"mine.{part}.txt").read_text().split() for part in ("train", "val")}
    assert len(lists["train"]) + len(lists["val"]) == 1297
    assert not set(lists["train"]) & set(lists["val"])
    for label in range(10):
        held = [name for name in lists["val"] if name.startswith(f"{label}/")]
        assert len(held) in range(11, 16)  # groups of near-duplicates stay together
    splits = load(str(tmp_path / "mine.yaml")).datasets["train"].splits
    assert splits["train"].only == str(tmp_path / "mine.train.txt")
    assert splits["val"].only == str(tmp_path / "mine.val.txt")


def test_equal_and_nearly_equal_images_are_on_one_side(tmp_path):
    """Under other names, in another format, or as the next frame of a scene."""
    rng, images = np.random.default_rng(0), tmp_path / "images"
    images.mkdir()
    for number in range(110):
        small = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
        scene = Image.fromarray(small).resize((96, 72), Image.Resampling.BICUBIC)
        scene.save(images / f"a{number:03d}.png")
        shutil.copy(images / f"a{number:03d}.png", images / f"b{110 - number:03d}.png")
        scene.save(images / f"c{number * 7 % 110:03d}.jpg", quality=85)
        scene.crop((0, 0, 95, 72)).save(images / f"d{number * 13 % 110:03d}.png")
    given = inspect_images(images)
    held = held_out(given)
    assert 20 <= len(held) < 90
    for number in range(110):
        names = [
            f"a{number:03d}.png", f"b{110 - number:03d}.png", f"c{number * 7 % 110:03d}.jpg",
            f"d{number * 13 % 110:03d}.png",
        ]  # fmt: skip
        assert len({name in held for name in names}) == 1
    before = {(images / name).read_bytes() for name in held}
    # Whatever the files are called.
    for number, path in enumerate(sorted(images.iterdir(), key=lambda p: p.stat().st_size)):
        path.rename(images / f"x{number:03d}{path.suffix}")
    again = held_out(inspect_images(images))
    assert {(images / name).read_bytes() for name in again} == before


def linked(folder: Path, **parts: Path) -> Path:
    """A folder with these sub-folders; `__` in a name stands for /."""
    for name, target in parts.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)
    return folder


@pytest.mark.parametrize(
    ("parts", "train", "val", "test"),
    [
        ({"train": "train"}, "train", None, None),
        ({"imgs__all": "train"}, "imgs/all", None, None),
        ({"data__train": "train", "data__test": "val"}, "data/train", "data/test", None),
        ({"Training_Set": "train", "Testing": "val"}, "Training_Set", "Testing", None),
        ({"TRAIN": "train", "Test": "val", "Validation": "val"}, "TRAIN", "Validation", "Test"),
        ({"train__images": "train", "val-set": "val"}, "train/images", "val-set", None),
        ({"train": "train", "extra": "val"}, "train", None, None),
        ({"train": "train/0", "plane": "train/1"}, "", None, None),  # a class of trains
        ({"train": "train/0", "val": "train/1"}, "train", "val", None),
    ],
)
def test_where_the_splits_are(digits, tmp_path, parts, train, val, test):
    folder = linked(tmp_path / "own", **{name: digits / part for name, part in parts.items()})
    (folder / "notes").mkdir()
    (folder / "notes/read.me").write_text("no image")
    assert find_splits(folder) == (
        folder / train, folder / val if val else None, folder / test if test else None,
    )  # fmt: skip


def test_a_train_folder_alone_is_not_a_class(digits, tmp_path):
    text = new_experiment(linked(tmp_path / "own", train=digits / "train"), tmp_path / "mine.yaml")
    assert "in 10 classes" in text and "linear_probe" in text
    assert load(str(tmp_path / "mine.yaml")).default_dataset == "own"
    assert len((tmp_path / "mine.val.txt").read_text().split()) > 100


def test_loose_images_are_named_as_the_reason_for_no_labels(digits, tmp_path):
    folder = linked(tmp_path / "own", **{str(n): digits / f"train/{n}" for n in range(10)})
    for number, path in enumerate(sorted((digits / "val").rglob("*.png"))[:3]):
        (folder / f"{number}.png").write_bytes(path.read_bytes())
    text = new_experiment(folder, tmp_path / "mine.yaml")
    assert "kind: unlabelled" in text
    assert f"No labels are used: 3 images lie beside the class folders in\n# {folder}; sort" in text


@pytest.mark.parametrize(
    "name", ["2023", "no", "1e5", "a: b", "\U0001f426 birds", 'a"b\\c', "Vögel"]
)
def test_any_name_of_a_folder_is_quoted(digits, tmp_path, name):
    folder = linked(tmp_path / name, **{str(n): digits / f"train/{n}" for n in range(2)})
    new_experiment(folder, tmp_path / "mine.yaml")
    experiment = load(str(tmp_path / "mine.yaml"))
    assert experiment.datasets[experiment.default_dataset].splits["train"].images == str(folder)
    assert not missing_images(experiment)


def test_nothing_is_left_of_what_cannot_be_read(digits, tmp_path, monkeypatch):
    def refuse(path: str) -> None:
        raise UserError(f"{path}: wrong")

    monkeypatch.setattr("maect.tools.new_experiment.load", refuse)
    with pytest.raises(UserError, match="wrong"):
        new_experiment(digits / "train", tmp_path / "mine.yaml")
    assert list(tmp_path.glob("mine*")) == []


def test_without_labels(digits, tmp_path):
    folder = tmp_path / "flat"
    folder.mkdir()
    for path in sorted((digits / "train").rglob("*.png"))[:400]:
        (folder / f"{path.parent.name}-{path.name}").write_bytes(path.read_bytes())
    text = new_experiment(folder, tmp_path / "mine.yaml")
    experiment = load(str(tmp_path / "mine.yaml"))
    assert {name for _, name in experiment.evaluations} == {"explore"}
    assert experiment.evaluation("mae_tiny", "explore").split_names == ("train", "val")
    assert "kind: unlabelled" in text and "Without labels there is no accuracy" in text


def test_large_images_get_a_large_encoder(tmp_path):
    for number in range(220):
        path = tmp_path / f"photos/{number % 2}/{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (640, 200), (number, 0, 0)).save(path)
    new_experiment(tmp_path / "photos", tmp_path / "mine.yaml")
    encoder = load(str(tmp_path / "mine.yaml")).runs["mae_base"].encoder
    assert (encoder.image_size, encoder.patch_size) == (192, 16)


def at(rate: float) -> Device:
    """A CPU of so many FLOP/s."""
    return type("At", (Device,), {"rate": rate})("cpu")


@pytest.mark.parametrize(
    ("speed", "shape"),
    [
        (2e8, ("tiny", 16)), (2e9, ("tiny", 32)), (2e10, ("small", 32)), (6e10, ("small", 64)),
        (2e11, ("base", 80)),
    ],
)  # fmt: skip
def test_quick_is_an_hour_by_plans_own_count(tmp_path, speed, shape):
    rng = np.random.default_rng(0)
    for number in range(300):
        path = tmp_path / f"photos/{number % 4}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (90, 90, 3), np.uint8)).save(path)
    out = tmp_path / "mine.yaml"
    text = new_experiment(tmp_path / "photos", out, quick=at(speed))
    experiment = load(str(out))
    mae, tune = experiment.runs[f"mae_{shape[0]}"], experiment.runs[f"ct_min_{shape[0]}"]
    assert mae.encoder.image_size == shape[1]
    assert ("would not finish in an hour" in text) == (shape[0] != "base")
    jobs = make_plan(all_jobs(experiment), experiment, at(speed)).jobs
    assert 0.9 * HOUR < wall(jobs) <= HOUR
    probes = sum(job.seconds or 0 for job in jobs if job.stage == "linear_probe")
    assert probes <= PROBES
    # Tuning first gets the steps that change an encoder.
    steps = tune.settings.epochs * (270 // tune.settings.batch_size)
    assert steps >= FEWEST_STEPS - tune.settings.epochs and "hardly change" not in text
    takes = outlook(out, at(speed))[0]
    assert f"All of it takes about {rough(wall(jobs))} here" in takes


def test_public_weights_are_tuned_within_the_hour(tmp_path):
    for number in range(900):
        path = tmp_path / f"photos/{number % 2}/{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (300, 300), (number % 256, 0, 0)).save(path)
    out = tmp_path / "mine.yaml"
    text = new_experiment(tmp_path / "photos", out, "mae_base", quick=at(2.5e11))
    experiment = load(str(out))
    tune = experiment.runs["ct_min_base"].settings
    assert tune.batch_size < 128 and "hardly change" not in text  # 128 would be two hours
    assert wall(make_plan(all_jobs(experiment), experiment, at(2.5e11)).jobs) <= HOUR
    assert without_training(out) == []  # it begins with a public one
    assert "No linear_probe: an hour is too short for it" in text


def test_the_jobs_that_are_counted_are_those_that_snakemake_would_run(
    digits, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    new_experiment(digits, tmp_path / "mine.yaml")
    profile = find_profile("local")
    asked = jobs_to_run([], [f"experiment={tmp_path / 'mine.yaml'}"], profile)
    experiment = load(str(tmp_path / "mine.yaml"))
    plan = make_plan(asked, experiment, Device("cpu"))
    ours = make_plan(all_jobs(experiment), experiment, Device("cpu"))
    assert {job.name for job in ours.jobs} == {job.name for job in plan.jobs}
    assert wall(ours.jobs) == pytest.approx(wall(plan.jobs))


def test_what_it_takes_and_what_comes_out(digits, tmp_path):
    out = tmp_path / "mine.yaml"
    new_experiment(digits, out, quick=at(1e9))
    experiment = load(str(out))
    assert experiment.runs["mae_tiny"].settings.epochs < 1600
    takes, *_, comes = outlook(out, at(1e9))
    assert "All of it takes about" in takes and "GFLOP/s" in takes and "--quick" not in takes
    assert "encoders ct_min_tiny in results/mine/runs" in comes
    assert "low_shot, clustering, umap" in comes and "results/mine/report.html" in comes


def test_few_images_need_no_training(digits, tmp_path, monkeypatch):
    new_experiment(digits, tmp_path / "mine.yaml")
    first, *commands = without_training(tmp_path / "mine.yaml")
    assert "fewer than 10,000 images first try a public encoder" in first
    parsed = [build_app().parse_args(shlex.split(line)[1:]) for line in commands]
    assert [command.__name__ for command, *_ in parsed] == ["retrieve", "embed", "cluster"]
    assert str(parsed[1][1].args[0]) in PUBLIC and parsed[1][1].args[1] == digits / "train"
    monkeypatch.setattr("maect.tools.new_experiment.FEW", 1297)
    assert without_training(tmp_path / "mine.yaml") == []


def test_few_steps_have_a_short_average_and_a_warning(digits, tmp_path, monkeypatch):
    monkeypatch.setattr("maect.tools.own_training.FEWEST_STEPS", 10)
    monkeypatch.setattr("maect.tools.own_training.HOUR", 0.1)
    out = tmp_path / "mine.yaml"
    text = new_experiment(digits, out, quick=Device("cpu"))
    monkeypatch.undo()
    experiment = load(str(out))
    steps = experiment.runs["ct_min_tiny"].settings.epochs * 1297 // 16
    assert steps < 100 and "hardly change" not in text
    # The average spans the same part of the steps as the paper's.
    assert experiment.runs["ct_min_tiny"].settings.encoder_ema == round(1 - 2.5 / steps, 4)


def test_one_odd_image_changes_no_statistics(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(220):
        folder = tmp_path / "photos"
        folder.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(folder / f"{number}.png")
    deep = rng.integers(0, 4096, (8, 8), np.uint16)
    Image.fromarray(deep).save(folder / "0.png")
    new_experiment(folder, tmp_path / "mine.yaml")
    (dataset,) = load(str(tmp_path / "mine.yaml")).datasets.values()
    assert dataset.pixels.range is not None and dataset.pixels.mean is dataset.pixels.std is None


def test_the_one_transparent_image_is_found(tmp_path, capsys):
    """Though it is not among those that are opened."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(450):
        Image.new("RGB", (8, 8), (number % 256, 0, 0)).save(folder / f"{number:03d}.png")
    text = new_experiment(folder, tmp_path / "before.yaml")
    assert "Transparent parts" not in text
    Image.new("RGBA", (8, 8), (9, 9, 9, 255)).save(folder / "003.png")  # nothing shows through
    assert "Transparent parts" not in new_experiment(folder, tmp_path / "opaque.yaml")
    Image.new("RGBA", (8, 8), (9, 9, 9, 100)).save(folder / "004.png")
    assert "Transparent parts get a white background" in new_experiment(
        folder, tmp_path / "mine.yaml"
    )


def test_public_weights_keep_their_statistics(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(200):
        deep = rng.integers(0, 4096, (8, 8), np.uint16)
        Image.fromarray(deep).save(folder / f"{number}.png")
    for public in (None, "mae_base"):
        text = new_experiment(folder, tmp_path / f"{public}.yaml", public)
        (dataset,) = load(str(tmp_path / f"{public}.yaml")).datasets.values()
        assert (dataset.pixels.mean is None) == (public is not None)
        assert ("Mean and deviation are mae_base's" in text) == (public is not None)


def test_labels_are_asked_for_before_anything_is_queued(digits, tmp_path):
    folder = tmp_path / "flat"
    folder.mkdir()
    for path in sorted((digits / "train").rglob("*.png"))[:200]:
        (folder / f"{path.parent.name}-{path.name}").write_bytes(path.read_bytes())
    out = tmp_path / "mine.yaml"
    text = new_experiment(folder, out)
    out.write_text(text.replace("protocols: [explore]", "protocols: [explore, knn]"))
    with pytest.raises(UserError, match=r"knn of mae_tiny needs labels, and flat train has none"):
        load(str(out))
    out.write_text(text.replace("protocols: [explore]", "protocols: [explore, umap, throughput]"))
    load(str(out))


def test_mistakes_are_named(digits, tmp_path):
    out = tmp_path / "mine.yaml"
    with pytest.raises(UserError, match="no such folder"):
        new_experiment(tmp_path / "none", out)
    with pytest.raises(UserError, match=r"ends in \.yaml"):
        new_experiment(digits, tmp_path / "mine.txt")
    with pytest.raises(UserError, match="name: 'my birds' has ' '; choose one without blanks"):
        new_experiment(digits, tmp_path / "my birds.yaml")
    with pytest.raises(UserError, match="--from-public mea: unknown weights; choose from mae_base"):
        new_experiment(digits, out, "mea")
    (tmp_path / "few/a").mkdir(parents=True)
    Image.new("L", (8, 8)).save(tmp_path / "few/a/1.png")
    with pytest.raises(UserError, match="1 images; at least 200 are needed"):
        new_experiment(tmp_path / "few", out)
    assert not out.exists()
    out.write_text("mine")
    with pytest.raises(UserError, match="already exists"):
        new_experiment(digits, out)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            {str(n): f"val/{n}" for n in range(9)},
            r"without 9\); make them the same, or pass --images \S+/train ",
        ),
        ({**{str(n): f"val/{n}" for n in range(10)}, "ten": "val/1"}, r"\(with ten\); make"),
        ({"0": "val/0", "1": "val/1"}, r"\(without 2, 3, 4\);"),
    ],
)
def test_other_classes_than_those_trained_on_are_named(digits, tmp_path, parts, words):
    parts = {f"val__{name}": digits / part for name, part in parts.items()}
    folder = linked(tmp_path / "own", train=digits / "train", **parts)
    with pytest.raises(UserError, match=f"val: other classes than .+/train .*{words}"):
        new_experiment(folder, tmp_path / "mine.yaml")
    assert not list(tmp_path.glob("mine*"))


def test_test_images_without_classes_are_named(digits, tmp_path):
    """As competitions give them; what is said then works."""
    folder = linked(tmp_path / "own", train=digits / "train", test=digits / "val/0")
    with pytest.raises(UserError, match=r"own/test: has no classes, but .+/train has;") as caught:
        new_experiment(folder, tmp_path / "mine.yaml")
    hint = re.search(r"--images (\S+) to hold", str(caught.value))
    assert hint and "in 10 classes" in new_experiment(Path(hint[1]), tmp_path / "mine.yaml")


def in_classes(own: Path, size: int) -> Path:
    """The images of `own` in classes of so many."""
    for number, path in enumerate(sorted(own.iterdir())):
        (own / f"c{number // size}").mkdir(exist_ok=True)
        path.rename(own / f"c{number // size}" / path.name)
    return own


def test_small_classes_give_enough_to_evaluate_on(own, tmp_path):
    text = new_experiment(in_classes(own, 16), tmp_path / "mine.yaml")  # 14 classes
    held = (tmp_path / "mine.val.txt").read_text().split()
    assert len({name.split("/")[0] for name in held}) == 14 and len(held) >= 20
    assert "About one image in 5 of every class is held out" in text


def test_classes_of_one_image_each_cannot_be_split(own, tmp_path):
    with pytest.raises(
        UserError, match="only 0 images can be held out, since most of the 220 classes"
    ):
        new_experiment(in_classes(own, 1), tmp_path / "mine.yaml")
    assert not list(tmp_path.glob("mine*"))


def test_folders_need_not_be_classes(own, tmp_path):
    with pytest.raises(UserError, match="or pass --ignore-folders to use no classes"):
        new_experiment(in_classes(own, 1), tmp_path / "mine.yaml")
    text = new_experiment(own, tmp_path / "mine.yaml", ignore_folders=True)
    assert "kind: unlabelled" in text and "198 images to train on without labels" in text


def test_images_added_later_are_in_no_split(own, tmp_path):
    new_experiment(own, tmp_path / "mine.yaml")
    splits = load(str(tmp_path / "mine.yaml")).datasets["own"].splits
    for number in range(5):
        Image.new("RGB", (8, 8)).save(own / f"new{number}.png")
    images = 0
    for name, split in splits.items():
        plan = plan_shards(own, split.kind, tmp_path / name, 1, only=Path(split.only)).record
        images += plan["n"]
        assert plan["unlisted"] == 225 - plan["n"]
    assert images == 220


def test_a_test_split_is_kept_apart(digits, tmp_path):
    parts = {"train": digits / "train", "val": digits / "val", "test": digits / "val"}
    text = new_experiment(linked(tmp_path / "own", **parts), tmp_path / "mine.yaml")
    splits = load(str(tmp_path / "mine.yaml")).datasets["own"].splits
    assert list(splits) == ["train", "val", "test"] and "chosen on test" not in text
    (tmp_path / "own/val").unlink()
    text = new_experiment(tmp_path / "own", tmp_path / "two.yaml")
    assert (
        "# There is no val beside test: what is chosen while evaluating is chosen on test" in text
    )


def test_how_odd_images_are_read_is_stated(tmp_path):
    """Five channels of 12 bits in a table; what is written can be sharded."""
    rng = np.random.default_rng(0)
    for split, n in (("train", 200), ("validation", 20)):
        rows = []
        for _ in range(n):
            stream = io.BytesIO()
            tifffile.imwrite(
                stream, rng.integers(0, 4096, (8, 8, 5)).astype(np.uint16), photometric="minisblack"
            )
            rows.append({"bytes": stream.getvalue(), "path": None})
        (tmp_path / "own/data").mkdir(parents=True, exist_ok=True)
        table = pa.table({"image": rows, "label": [i % 2 for i in range(n)]})
        parquet.write_table(table, tmp_path / f"own/data/{split}-00000-of-00001.parquet")
    text = new_experiment(tmp_path / "own", tmp_path / "mine.yaml")
    assert re.search(r"Values of more than 8 bits: 0 to 409\d become 0 to 255", text)
    experiment = load(str(tmp_path / "mine.yaml"))
    dataset = experiment.datasets["own"]
    pixels = experiment.runs["mae_tiny"].encoder.pixels
    assert pixels == dataset.pixels and pixels.channels == 5 and pixels.orientation == "exif"
    assert pixels.mean is not None and abs(np.array(pixels.mean) - 0.5).max() < 0.02
    split = dataset.splits["val"]
    assert split.images is not None and split.images.endswith("data/validation*.parquet")
    experiment.shards_config("own", "val").write(tmp_path / "val/config.yaml")
    assert main(["shard", str(tmp_path / "val/config.yaml")]) == 0
    assert open_index(tmp_path / "val").channels == 5
    assert "ct_aug_tiny" not in experiment.runs


def test_evaluations_that_the_images_allow(own):
    images = inspect_images(in_classes(own, 10))  # 22 classes
    assert evaluated(images, set(), 23, "tiny")[0] == [
        "knn", "linear_probe", "low_shot", "clustering", "retrieval", "umap", "explore",
    ]  # fmt: skip
    kept = {
        name
        for n in range(22)
        for name in sorted(e.name for e in images.entries if e.label == n)[:4]
    }
    held = {e.name for e in images.entries} - kept
    assert evaluated(images, held, 16, "tiny")[0] == ["knn", "linear_probe", "umap", "explore"]
    few, why = evaluated(images, held, 15, "tiny")
    assert few == ["knn", "linear_probe", "explore"]
    assert "No umap: it needs more images than neighbours" in why


@pytest.mark.parametrize(
    "value", ["a b", "no", "010", "1:30", "/a, {b}: $c #1", "vögel", " a", True, 1e-05, 4095.0, []]
)
def test_values_are_written_on_one_line_as_they_are_read(value):
    line = flow({"x": value, "y": [value]})
    assert yaml.load(f"train: {line}\n", Loader) == {"train": {"x": value, "y": [value]}}
    assert "\n" not in line and flow("a") == "a"


def test_what_the_comments_say_is_so(own, tmp_path):
    text = new_experiment(own, tmp_path / "mine.yaml")
    assert "# About one image in 10 is held out" in text  # no classes to speak of
    assert "shows about 320,000 images" in text  # 198 images, 1,600 epochs
    assert [about(n) for n in (5000, 96_400, 20_000_000)] == ["5,000", "96,000", "20 million"]
    assert (weights("tiny"), weights("small")) == ("0.2 million", "5.3 million")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """220 colours as images without classes."""
    folder = tmp_path / "own"
    folder.mkdir()
    for number in range(220):
        Image.new("RGB", (32, 32), (number, 0, 0)).save(folder / f"{number:03}.png")
    return folder


def chunk(kind: bytes, data: bytes) -> bytes:
    """A part of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def odd_image(what: str) -> bytes:
    side = 30_000 if what == "bomb" else 8
    start = b"\x89PNG\r\n\x1a\n" + chunk(
        b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    )
    if what == "bad chunk":
        half = zlib.compress(bytes(72))[:5]  # the rest is expected in the next chunk
        return start + chunk(b"IDAT", half) + b"\0\0\0\5\1\2\3\4 no" + bytes(40)
    if what == "bomb":
        return start + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    return b""


@pytest.mark.parametrize("what", ["bad chunk", "bomb", "empty"])
def test_images_that_sharding_would_refuse_are_named(own, tmp_path, what):
    (own / "000.png").write_bytes(odd_image(what))
    with pytest.raises(UserError, match=r"000\.png: cannot be read as an image \(.+\); repair"):
        new_experiment(own, tmp_path / "mine.yaml")
    assert not list(tmp_path.glob("mine*"))
    text = new_experiment(own, tmp_path / "mine.yaml", skip_unreadable=True)
    assert "skip_unreadable: true" in text
    assert "# 1 of 110 images inspected cannot be read: left out.\n" in text
    assert "# 110 of 220 images were opened: sharding opens all, and names those" in text
    assert "# Up to 198 images to train on" in text


@pytest.mark.parametrize(
    ("name", "words"), [(b"v\xf6gel.png", "not UTF-8"), (b"a\nb.png", "contains a line break")]
)
def test_names_that_no_list_can_hold_are_named(own, tmp_path, name, words):
    os.rename(own / "219.png", os.path.join(os.fsencode(own), name))
    with pytest.raises(UserError, match=words):
        new_experiment(own, tmp_path / "mine.yaml")
    folder = Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name)))
    os.rename(own, folder)
    with pytest.raises(UserError, match=words):
        new_experiment(folder, tmp_path / "mine.yaml")


@pytest.fixture(scope="module")
def cifar10(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 300 images of two classes of CIFAR-10."""
    archive = Path(os.environ.get("MAECT_TEST_DATA", "/nonexistent")) / "cifar10.tar.xz"
    if not archive.exists():
        pytest.skip("CIFAR-10; set MAECT_TEST_DATA to the folder that has cifar10.tar.xz")
    folder = tmp_path_factory.mktemp("cifar10")
    counts: Counter[str] = Counter()
    with tarfile.open(archive) as tar:
        for member in tar:
            label, name = Path(member.name).parts[-2:] if member.isfile() else ("", "")
            if not label or counts[label] == 300:
                continue
            (folder / label).mkdir(exist_ok=True)
            data = tar.extractfile(member)
            assert data is not None
            (folder / label / name).write_bytes(data.read())
            counts[label] += 1
            if list(counts.values()) == [300, 300]:
                break
    return folder


@pytest.mark.slow
def test_the_walk_through_on_cifar10(cifar10, tmp_path):
    """What docs/experiments.md tells, up to the shards: `maect new-experiment`, -n, `shards`."""
    out = tmp_path / "mine.yaml"
    words = ["-m", "maect", "new-experiment", "--images", str(cifar10), "--out", str(out)]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert "540 images to train on in 2 classes" in done.stdout
    pipeline = [
        *(sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile")),
        *("--directory", str(tmp_path), "--cores", "2"),
    ]
    plan = subprocess.run(
        [*pipeline, "-n", "--config", f"experiment={out}"],
        capture_output=True, text=True, cwd=ROOT, check=True,
    )  # fmt: skip
    assert "Contrastive tuning of ct_aug_small" in plan.stdout + plan.stderr
    subprocess.run(
        [*pipeline, "shards", "--config", f"experiment={out}"],
        capture_output=True, text=True, cwd=ROOT, check=True,
    )  # fmt: skip
    shards = tmp_path / f"results/mine/shards/{cifar10.name}"
    counts = {s: json.loads((shards / s / "index.json").read_text())["n"] for s in ("train", "val")}
    assert counts == {"train": 540, "val": 60}
    with tarfile.open(next((shards / "val").glob("*.tar"))) as tar:
        first = next(member for member in tar if member.name.endswith(".jpg"))
        with Image.open(io.BytesIO(tar.extractfile(first).read())) as image:  # type: ignore[union-attr]
            assert image.size == (32, 32)


def test_an_archive_of_splits_is_refused(digits, tmp_path):
    with zipfile.ZipFile(tmp_path / "own.zip", "w") as archive:
        for file in sorted(digits.rglob("*.png")):
            archive.write(file, f"own/{file.relative_to(digits)}")
    with pytest.raises(
        UserError, match=r"own\.zip: its folders .*train, val are splits .* unpack it"
    ):
        new_experiment(tmp_path / "own.zip", tmp_path / "mine.yaml")


def test_lists_of_somebody_else_are_not_written_over(own, tmp_path):
    (tmp_path / "mine.train.txt").write_text("mine\n")
    with pytest.raises(UserError, match=r"mine\.train\.txt: already exists; choose another name"):
        new_experiment(own, tmp_path / "mine.yaml")
    assert (tmp_path / "mine.train.txt").read_text() == "mine\n"
    assert not (tmp_path / "mine.yaml").exists()
    (tmp_path / "mine.train.txt").unlink()
    new_experiment(own, tmp_path / "mine.yaml")
    (tmp_path / "mine.yaml").unlink()
    new_experiment(own, tmp_path / "mine.yaml")  # its own lists are there


@pytest.mark.parametrize("name", [b"x.\nstorage: elsewhere\n#", b"notes.caf\xe9"])
def test_files_that_are_left_out_may_have_any_name(own, tmp_path, name):
    Path(os.fsdecode(os.path.join(os.fsencode(own), name))).write_bytes(b"")
    new_experiment(own, tmp_path / "mine.yaml")
    told = yaml.safe_load((tmp_path / "mine.yaml").read_text())
    assert "storage" not in told


def test_a_stack_of_pages_is_named(own, tmp_path):
    pages = np.zeros((20, 40, 40), np.uint16)
    tifffile.imwrite(own / "000.a.tif", pages, photometric="minisblack")
    with pytest.raises(
        UserError, match=r"a\.tif: .*\[20, 40, 40\]: a stack of pages.*save one page a file"
    ):
        new_experiment(own, tmp_path / "mine.yaml")
