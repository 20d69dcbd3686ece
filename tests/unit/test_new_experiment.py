"""An experiment for one's own images, from CIFAR-10 and from the bundled digits."""

import io
import os
import re
import shlex
import shutil
import zipfile
from pathlib import Path
from typing import Any

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
from maect.experiment import Experiment, load
from maect.experiment.profile import find_profile
from maect.experiment.start import missing_images
from maect.launch.progress import rough
from maect.tools.dry_run import jobs_to_run
from maect.tools.new_experiment import evaluated, flow, new_experiment, outlook, without_training
from maect.tools.own_images import choose_validation, find_splits, inspect_images
from maect.tools.own_training import FEWEST_STEPS, HOUR, PROBES, average_for, lengths
from maect.tools.plan import Device, all_jobs, make_plan, tuned_part, wall


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from maect.data.bundled import write_digits

    folder = tmp_path_factory.mktemp("own") / "my digits"
    write_digits(folder)
    return folder


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """220 colours as images without classes."""
    return colours(tmp_path / "own", 220, 32)


def colours(folder: Path, count: int, *side: int, classes: int = 0, ending: str = "png") -> Path:
    """Images of one colour each, in one folder or in classes in turn."""
    for number in range(count):
        inside = folder / str(number % classes) if classes else folder
        inside.mkdir(parents=True, exist_ok=True)
        image = Image.new("RGB", (side[0], side[-1]), (number % 256, 0, 0))
        image.save(inside / f"{number:03}.{ending}")
    return folder


def made(images: Path, out: Path, *given: Any, **more: Any) -> tuple[str, Experiment]:
    """The text of what is written for these images, and the experiment that it is."""
    text = new_experiment(images, out, *given, **more)
    return text, load(str(out))


@pytest.fixture(scope="module")
def written(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Experiment, Path]:
    """What is written for the digits, and where."""
    out = tmp_path_factory.mktemp("written") / "mine.yaml"
    return *made(digits, out), out


def test_folders_of_classes_with_a_split(written):
    text, experiment, _ = written
    mae = experiment.runs["mae_tiny"]
    assert (mae.settings.epochs, mae.encoder.image_size) == (1600, 16)
    ct = experiment.runs["ct_min_tiny"].settings
    assert (ct.batch_size, ct.head.queue_size, ct.head.topk) == (128, 1024, 20)
    assert ct.encoder_ema == 0.99 and "hardly change" not in text
    # Of few steps the average spans the same part as the paper's.
    assert average_for(0.99, 50) == 0.95 and average_for(0.99, 10_000) == 0.99
    assert lengths("tiny", 20_000) == {"mae": 1000, "head_min": 50, "ct_min": 100}
    assert "ct_aug_tiny" not in experiment.runs and "the images have no colours" in text
    assert "1,297 images to train on in 10 classes" in text and "resize: 16" in text
    assert {name for _, name in experiment.evaluations} >= {"knn", "low_shot", "clustering"}
    assert not missing_images(experiment)
    assert experiment.spec.compare_with_paper is False  # these are not ImageNet's images


def test_the_jobs_that_are_counted_are_those_that_snakemake_would_run(
    written, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    _, experiment, out = written
    asked = jobs_to_run([], [f"experiment={out}"], find_profile("local"))
    plan = make_plan(asked, experiment, Device("cpu"))
    ours = make_plan(all_jobs(experiment), experiment, Device("cpu"))
    assert {job.name for job in ours.jobs} == {job.name for job in plan.jobs}
    assert wall(ours.jobs) == pytest.approx(wall(plan.jobs))


def test_few_images_need_no_training(written, digits, monkeypatch):
    *_, out = written
    first, *commands = without_training(out)
    assert "fewer than 10,000 images first try a public encoder" in first
    parsed = [build_app().parse_args(shlex.split(line)[1:]) for line in commands]
    assert [command.__name__ for command, *_ in parsed] == ["retrieve", "embed", "cluster"]
    assert str(parsed[1][1].args[0]) in PUBLIC and parsed[1][1].args[1] == digits / "train"
    monkeypatch.setattr("maect.tools.new_experiment.FEW", 1297)
    assert without_training(out) == []


def test_a_train_folder_alone_is_no_class_and_a_part_is_held_out_of_every_class(digits, tmp_path):
    own = linked(tmp_path / "own", train=digits / "train")
    text, experiment = made(own, tmp_path / "mine.yaml")
    assert "in 10 classes" in text and "linear_probe" in text
    files = [tmp_path / f"mine.{part}.txt" for part in ("train", "val")]
    train, val = (file.read_text().split() for file in files)
    assert len(train) + len(val) == 1297 and not set(train) & set(val)
    for label in range(10):
        held = [name for name in val if name.startswith(f"{label}/")]
        assert len(held) in range(11, 16)  # groups of near-duplicates stay together
    splits = experiment.datasets["own"].splits
    assert [splits[name].only for name in ("train", "val")] == [*map(str, files)]


def test_equal_and_nearly_equal_images_are_on_one_side(tmp_path):
    """Under other names, in another format, or as the next frame of a scene."""
    rng, images = np.random.default_rng(0), tmp_path / "images"
    images.mkdir()
    scenes = []
    for number in range(110):
        names = [f"a{number:03d}.png", f"b{110 - number:03d}.png"]
        names += [f"c{number * 7 % 110:03d}.jpg", f"d{number * 13 % 110:03d}.png"]
        small = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
        scene = Image.fromarray(small).resize((96, 72), Image.Resampling.BICUBIC)
        for name in names[:3]:
            scene.save(images / name, quality=85)
        scene.crop((0, 0, 95, 72)).save(images / names[3])
        scenes.append(names)
    held = choose_validation(inspect_images(images))
    assert 20 <= len(held) < 90
    for names in scenes:
        assert len({name in held for name in names}) == 1
    before = {(images / name).read_bytes() for name in held}
    # Whatever the files are called.
    for number, path in enumerate(sorted(images.iterdir(), key=lambda p: p.stat().st_size)):
        path.rename(images / f"x{number:03d}{path.suffix}")
    again = choose_validation(inspect_images(images))
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


def test_nothing_is_left_of_what_cannot_be_read(own, tmp_path, monkeypatch):
    def refuse(path: str) -> None:
        raise UserError(f"{path}: wrong")

    monkeypatch.setattr("maect.tools.new_experiment.load", refuse)
    with pytest.raises(UserError, match="wrong"):
        new_experiment(own, tmp_path / "mine.yaml")
    assert list(tmp_path.glob("mine*")) == []


def test_without_labels(own, tmp_path):
    """What needs them is refused before anything is queued."""
    out = tmp_path / "mine.yaml"
    text, experiment = made(own, out)
    assert {name for _, name in experiment.evaluations} == {"explore"}
    (run, *_) = experiment.runs
    assert experiment.evaluation(run, "explore").split_names == ("train", "val")
    assert "kind: unlabelled" in text and "Without labels there is no accuracy" in text
    out.write_text(text.replace("protocols: [explore]", "protocols: [explore, knn]"))
    with pytest.raises(UserError, match=rf"knn of {run} needs labels, and own train has none"):
        load(str(out))
    out.write_text(text.replace("protocols: [explore]", "protocols: [explore, umap, throughput]"))
    load(str(out))


def test_large_images_get_a_large_encoder(tmp_path):
    folder = colours(tmp_path / "photos", 220, 640, 200, classes=2, ending="jpg")
    _, experiment = made(folder, tmp_path / "mine.yaml")
    encoder = experiment.runs["mae_base"].encoder
    assert (encoder.image_size, encoder.patch_size) == (192, 16)


def at(rate: float) -> Device:
    """A CPU of so many FLOP/s."""
    return type("At", (Device,), {"rate": rate})("cpu")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 images of noise in four classes."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("photos")
    for number in range(300):
        path = folder / f"{number % 4}/{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (90, 90, 3), np.uint8)).save(path)
    return folder


@pytest.mark.parametrize(
    ("speed", "shape"), [(2e8, ("tiny", 16)), (6e10, ("small", 64)), (2e11, ("base", 80))]
)
def test_quick_is_an_hour_by_plans_own_count(photos, tmp_path, speed, shape):
    out = tmp_path / "mine.yaml"
    text, experiment = made(photos, out, quick=at(speed))
    mae, tune = experiment.runs[f"mae_{shape[0]}"], experiment.runs[f"ct_min_{shape[0]}"]
    assert mae.encoder.image_size == shape[1]
    assert ("would not finish in an hour" in text) == (shape[0] != "base")
    jobs = make_plan(all_jobs(experiment), experiment, at(speed)).jobs
    assert 0.9 * HOUR < wall(jobs) <= HOUR
    part = tuned_part(experiment, f"ct_min_{shape[0]}")
    assert part is not None and 0.2 < part < 0.5  # about as did best on CIFAR-10
    probes = sum(job.seconds or 0 for job in jobs if job.stage == "linear_probe")
    assert probes <= PROBES
    # Tuning first gets the steps that change an encoder.
    steps = tune.settings.epochs * (270 // tune.settings.batch_size)
    assert steps >= FEWEST_STEPS - tune.settings.epochs and "hardly change" not in text
    takes, *_, comes = outlook(out, at(speed))
    assert f"encoders ct_min_{shape[0]}" in comes and "results/mine/report.html" in comes
    assert f"All of it takes about {rough(wall(jobs))} here" in takes


def test_public_weights_are_tuned_within_the_hour(tmp_path):
    out = tmp_path / "mine.yaml"
    folder = colours(tmp_path / "photos", 900, 240, classes=2, ending="jpg")
    text, experiment = made(folder, out, "mae_base", quick=at(2.5e11))
    tune = experiment.runs["ct_min_base"].settings
    assert tune.batch_size < 128 and "hardly change" not in text  # 128 would be two hours
    assert wall(make_plan(all_jobs(experiment), experiment, at(2.5e11)).jobs) <= HOUR
    assert without_training(out) == []  # it begins with a public one
    assert "No linear_probe: an hour is too short for it" in text


def test_deep_images_and_the_statistics_of_public_weights(tmp_path):
    """One odd image changes no statistics; public weights keep theirs."""
    rng, folder = np.random.default_rng(0), tmp_path / "photos"
    folder.mkdir()
    for number in range(200):
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(folder / f"{number}.png")
    for deep, public in ((1, None), (200, None), (200, "mae_base")):
        for number in range(deep):
            values = rng.integers(0, 4096, (8, 8), np.uint16)
            Image.fromarray(values).save(folder / f"{number}.png")
        text, experiment = made(folder, tmp_path / f"{deep}{public}.yaml", public)
        (dataset,) = experiment.datasets.values()
        assert dataset.pixels.range is not None
        assert (dataset.pixels.mean is None) == (deep == 1 or public is not None)
        assert ("Mean and deviation are mae_base's" in text) == (public is not None)


def test_mistakes_are_named(digits, own, tmp_path, monkeypatch):
    out = tmp_path / "mine.yaml"
    monkeypatch.chdir(own)
    with pytest.raises(UserError, match=r"results would lie among these images, in .*/results"):
        new_experiment(own, out)
    monkeypatch.undo()
    (tmp_path / "few").mkdir()
    shutil.copy(own / "000.png", tmp_path / "few")
    with zipfile.ZipFile(tmp_path / "own.zip", "w") as archive:
        for file in sorted(digits.rglob("*.png")):
            archive.write(file, f"own/{file.relative_to(digits)}")
    archived = r"own\.zip: its folders .*train, val are splits .* unpack it"
    for given, words in (
        ((tmp_path / "none", out), "no such folder"),
        ((digits, tmp_path / "mine.txt"), r"ends in \.yaml"),
        ((digits, tmp_path / "my birds.yaml"), "'my birds' has ' '; choose one without blanks"),
        ((digits, out, "mea"), "--from-public mea: unknown weights; choose from mae_base"),
        ((tmp_path / "few", out), "1 images; at least 200 are needed"),
        ((tmp_path / "own.zip", out), archived),
    ):
        with pytest.raises(UserError, match=words):
            new_experiment(*given)
    assert not list(tmp_path.glob("*.yaml"))
    # Nor is anything written over: only lists of its own are.
    theirs = tmp_path / "mine.train.txt"
    theirs.write_text("mine\n")
    with pytest.raises(UserError, match=r"mine\.train\.txt: already exists; choose another name"):
        new_experiment(own, out)
    assert theirs.read_text() == "mine\n" and not out.exists()
    theirs.unlink()
    new_experiment(own, out)
    with pytest.raises(UserError, match="already exists"):
        new_experiment(own, out)
    out.unlink()
    new_experiment(own, out)


VAL = {f"val__{n}": f"val/{n}" for n in range(9)}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (VAL, r"\(without 9\); make them the same, or pass --images \S+/train "),
        (VAL | {"val__9": "val/9", "val__ten": "val/1"}, r"\(with ten\); make"),
        ({"val__0": "val/0", "val__1": "val/1"}, r"\(without 2, 3, 4\);"),
        ({"Train": "train", "val": "val"}, "rain: .rain is there, too; rename one of them"),
    ],
)
def test_other_classes_than_those_trained_on_are_named(digits, tmp_path, parts, words):
    parts = {name: digits / part for name, part in {"train": "train", **parts}.items()}
    classes = "" if "Train" in parts else "val: other classes than .+/train .*"
    with pytest.raises(UserError, match=f"{classes}{words}"):
        new_experiment(linked(tmp_path / "own", **parts), tmp_path / "mine.yaml")
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


def test_folders_need_not_be_classes(own, tmp_path):
    """Of one image each, no class can be split."""
    words = "only 0 images can be held out, since most of the 220 classes .*--ignore-folders to use"
    with pytest.raises(UserError, match=words):
        new_experiment(in_classes(own, 1), tmp_path / "mine.yaml")
    assert not list(tmp_path.glob("mine*"))
    text = new_experiment(own, tmp_path / "mine.yaml", ignore_folders=True)
    assert "kind: unlabelled" in text and "198 images to train on without labels" in text


def test_images_added_later_are_in_no_split(own, tmp_path):
    _, experiment = made(own, tmp_path / "mine.yaml")
    for number in range(5):
        Image.new("RGB", (8, 8)).save(own / f"new{number}.png")
    images = 0
    for name, split in experiment.datasets["own"].splits.items():
        plan = plan_shards(own, split.kind, tmp_path / name, 1, only=Path(split.only)).record
        images += plan["n"]
        assert plan["unlisted"] == 225 - plan["n"]
    assert images == 220


def test_a_test_split_is_kept_apart(digits, tmp_path):
    parts = {"train": digits / "train", "val": digits / "val", "test": digits / "val"}
    text, experiment = made(linked(tmp_path / "own", **parts), tmp_path / "mine.yaml")
    assert list(experiment.datasets["own"].splits) == ["train", "val", "test"]
    said = "# There is no val beside test: what is chosen while evaluating is chosen on test"
    assert said not in text
    (tmp_path / "own/val").unlink()
    assert said in new_experiment(tmp_path / "own", tmp_path / "two.yaml")


def test_how_odd_images_are_read_is_stated(tmp_path):
    """Five channels of 12 bits in a table; what is written can be sharded."""
    rng = np.random.default_rng(0)
    for split, n in (("train", 200), ("validation", 20)):
        rows = []
        for _ in range(n):
            stream, pixels = io.BytesIO(), rng.integers(0, 4096, (8, 8, 5), np.uint16)
            tifffile.imwrite(stream, pixels, photometric="minisblack")
            rows.append({"bytes": stream.getvalue(), "path": None})
        (tmp_path / "own/data").mkdir(parents=True, exist_ok=True)
        table = pa.table({"image": rows, "label": [i % 2 for i in range(n)]})
        parquet.write_table(table, tmp_path / f"own/data/{split}-00000-of-00001.parquet")
    text, experiment = made(tmp_path / "own", tmp_path / "mine.yaml")
    assert re.search(r"Values of more than 8 bits: 0 to 409\d become 0 to 255", text)
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
    of_class = [sorted(e.name for e in images.entries if e.label == n) for n in range(22)]
    held = {name for names in of_class for name in names[4:]}
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


def test_images_that_sharding_would_refuse_are_named(own, tmp_path):
    (own / "000.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"000\.png: cannot be read as an image \(.+\); repair"):
        new_experiment(own, tmp_path / "mine.yaml")
    assert not list(tmp_path.glob("mine*"))
    text = new_experiment(own, tmp_path / "mine.yaml", skip_unreadable=True)
    assert "skip_unreadable: true" in text
    assert "# 1 of 110 images inspected cannot be read: left out.\n" in text
    assert "# Up to 198 images to train on" in text
    tifffile.imwrite(own / "0.tif", np.zeros((20, 40, 40), np.uint16), photometric="minisblack")
    with pytest.raises(UserError, match=r"0\.tif: .*\[20, 40, 40\]: a stack of pages.*save one"):
        new_experiment(own, tmp_path / "other.yaml")
    os.rename(own / "219.png", os.path.join(os.fsencode(own), b"v\xf6gel.png"))
    with pytest.raises(UserError, match="not UTF-8"):
        new_experiment(own, tmp_path / "other.yaml")
