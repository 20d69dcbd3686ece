"""What the experiment says of a split against what its shards were made of."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from stamping import outdated, stamp_finished

from maect import cli
from maect.core.errors import UserError
from maect.core.files import write_record
from maect.core.stamps import stamped
from maect.data import changes
from maect.data.config import CONFIG, index_digest
from maect.data.index import open_index
from maect.data.shard_plan import plan_shards, store_plan
from maect.data.shards import shard
from maect.data.sources import open_source
from maect.data.sources.imagenet import imagenet_classes
from maect.evaluate.base import Features
from maect.experiment import Experiment, load, resolve
from maect.experiment.chosen_shards import note_own, note_taken
from maect.experiment.pipeline import Asked
from maect.experiment.resolve import features_config, run_config
from maect.experiment.start import PendingJob, changed_images, other_shards, prepare, shards_of
from maect.records import RunRecord
from maect.stages.run import resize_of

ROOT = Path(__file__).parents[2]
PAIR = ("fruit", "train")


def fruit(folder: Path, classes: str = "ab", level: int = 0) -> None:
    """Four images a class, each with a size of its own."""
    for name in classes:
        for number in range(4):
            path = folder / name / f"{number}.ppm"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8 + ord(name) - 96, 8 + number), (level, 9, 9)).save(path)


def experiment(name: str = "mine", resize: int | None = None, **changes: Any) -> Experiment:
    """The file, with keys of its train split changed; those that are None are left out."""
    train = {"images": "fruit", "only": "train.txt", "shards": 2} | changes
    train = {key: value for key, value in train.items() if value is not None}
    splits = {"train": train, "val": {"images": "fruit", "only": "val.txt"}}
    runs = {"mae_tiny": {"recipe": "mae", "size": "tiny"}}
    data = {"splits": splits} | ({"resize": resize} if resize else {})
    Path(f"{name}.yaml").write_text(yaml.safe_dump({"datasets": {"fruit": data}, "runs": runs}))
    return load(f"{name}.yaml")


def make(found: Experiment, split: str = "train", finish: bool = True) -> Path:
    """Shard as the pipeline does."""
    given = found.datasets["fruit"].splits[split]
    folder = found.own_shards("fruit", split)
    config = found.shards_config("fruit", split)
    note_own(folder, config)
    only = Path(given.only) if given.only else None
    images = found.images("fruit", split)
    if not finish:
        store_plan(folder, plan_shards(images, given.kind, folder, given.shards, only=only))
    else:
        shard(images, folder, given.kind, given.shards, only=only)
        with stamped(folder / CONFIG, config):
            pass
    return folder


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fruit(Path("fruit"))
    Path("train.txt").write_text("".join(f"{c}/{n}.ppm\n" for c in "ab" for n in range(3)))
    Path("val.txt").write_text("a/3.ppm\nb/3.ppm\n")
    rows = "".join(f"{c}/{n}.ppm,{c}\n" for c in "ab" for n in range(4))
    Path("fruit/table.csv").write_text(f"path,label\n{rows}")


def move_names() -> None:
    Path("val.txt").write_text("a/3.ppm\nb/3.ppm\nb/2.ppm\n")
    lines = Path("train.txt").read_text()
    Path("train.txt").write_text(lines.replace("b/2.ppm\n", ""))


def relabel() -> None:
    table = Path("fruit/table.csv")
    table.write_text(table.read_text().replace("a/1.ppm,a", "a/1.ppm,b"))


TABLE: dict[str, Any] = {"images": "fruit/table.csv", "kind": "list", "only": None}


@pytest.mark.parametrize(
    ("before", "edit", "after", "said"),
    [
        ({}, move_names, {}, "only (other content)"),
        ({}, None, {"only": None}, "only (other content)"),
        # As `maect duplicates` advises.
        ({}, lambda: Path("t").write_text("b/2.ppm\n"), {"exclude": "t"}, "exclude (other"),
        ({}, None, {"shards": 3}, "shards (3, made with 2)"),
        ({}, None, {"kind": "noise"}, "kind (noise, made with folder)"),
        (TABLE, relabel, TABLE, "fruit/table.csv: 1 image relabelled (a/1.ppm)"),
        ({}, lambda: fruit(Path("other"), "cd"), {"images": "other"}, "8 files added (c/0.ppm …)"),
        ({}, lambda: fruit(Path("other"), "abc"), {"images": "other"}, "4 files added (c/0.ppm"),
    ],
)
def test_what_is_said_otherwise_is_named(before, edit, after, said):
    folder = make(experiment(**before))
    assert changed_images(experiment(**before)) == []
    if edit:
        edit()
    found = experiment(**after)
    (note,) = other_shards(found, [PAIR])
    assert note.startswith("mine.yaml: datasets: fruit: train: not what its shards were made of: ")
    assert said in note and note.endswith(f"rm -r {folder}; else put back what was changed")
    assert changed_images(found) == [note]
    shutil.rmtree(folder)
    assert changed_images(experiment(**after)) == other_shards(found, [PAIR]) == []


def test_other_images_of_which_there_are_too_many_to_look_at(monkeypatch):
    """Their folders are; of ImageNet all classes are known, whichever are there."""
    monkeypatch.setattr(changes, "MOST", 3)
    make(experiment())
    fruit(Path("other"), "abc")
    fruit(Path("same"))
    (note,) = other_shards(experiment(images="other"), [PAIR])
    assert "1 file added (c/)" in note
    assert changed_images(experiment(images="same")) == []
    ids, given = imagenet_classes(), {"kind": "imagenet", "only": None, "shards": 1}
    for folder, classes in (("some", ids[:2]), ("all", ids[:4])):
        for name in classes:
            shutil.copytree("fruit/a", f"{folder}/{name}")
    make(experiment("theirs", images="some", **given))
    (note,) = other_shards(experiment("theirs", images="all", **given), [PAIR])
    assert f"2 files added ({ids[2]}/ …)" in note


def test_other_validation_images_of_imagenet():
    """Their labels are given apart, without which nothing is sharded."""
    Path("labels.txt").write_text("".join(f"{number} {number}\n" for number in range(4)))
    shutil.copytree("fruit/a", "images")
    shard(Path("images"), Path("shards"), "imagenet_val", 1, labels=Path("labels.txt"))
    assert changes.changes(Path("shards"), Path("images")) is None
    assert "4 files changed" in str(changes.changes(Path("shards"), Path("fruit/b")))
    Path("images/0.ppm").unlink()
    assert "1 file removed (0.ppm)" in str(changes.changes(Path("shards"), Path("images")))
    listing = open_source("imagenet_val", Path("fruit/b")).listing()
    assert {entry.label for entry in listing.entries} == {-1} and listing.class_names == []
    with pytest.raises(UserError, match="carry no labels; give --labels"):
        shard(Path("images"), Path("unlabelled"), "imagenet_val", 1)


@pytest.mark.parametrize(
    ("edit", "changed"),
    [
        (None, {}),
        (lambda: shutil.move("fruit", "elsewhere"), {"images": "elsewhere"}),
        (lambda: shutil.move("train.txt", "t.txt"), {"only": "t.txt"}),
        (None, {"skip_unreadable": True}),  # nothing was unreadable
        (lambda: Path("train.txt").unlink(), {}),
    ],
)
def test_what_stays_the_same_is_silent(edit, changed):
    folder = make(experiment())
    if edit:
        edit()
    found = experiment(**changed)
    assert found.shards(*PAIR) == folder
    assert changed_images(found) == other_shards(found, found.splits) == []


def test_an_archive_may_be_called_otherwise():
    with_archive = {"kind": "archive", "only": None, "shards": 1}
    shutil.make_archive("a", "zip", "fruit")
    make(experiment(images="a.zip", **with_archive))
    shutil.move("a.zip", "b.zip")
    assert changed_images(experiment(images="b.zip", **with_archive)) == []
    shutil.make_archive("c", "zip", "fruit/a")
    assert "1 file changed" in changed_images(experiment(images="c.zip", **with_archive))[0]


def test_other_labels_are_other_content():
    found, contents = experiment(kind="imagenet_val", labels="labels.txt", only=None), []
    for text in ("490\n", "490\n", "361\n"):
        Path("labels.txt").write_text(text)
        contents.append(found.shards_config(*PAIR).content)
    assert contents[0] == contents[1] != contents[2]


def test_images_that_are_added_are_a_warning_and_refuse_nothing():
    make(experiment())
    fruit(Path("fruit"), "c")
    found = experiment()
    (note,) = changed_images(found)
    assert "4 files added (c/0.ppm …) since it was sharded" in note
    assert other_shards(found, [PAIR]) == []
    shutil.move("fruit", "elsewhere")  # where it also grew
    assert other_shards(experiment(images="elsewhere"), [PAIR]) == []


def test_experiments_of_the_same_images_share_their_shards():
    """Once they are complete, and unless one has begun with its own."""
    folder = make(experiment("first"), finish=False)
    assert experiment("second").shards(*PAIR) != folder, "not complete"
    assert make(experiment("first")) == folder == experiment("second").shards(*PAIR)
    for other in ({"shards": 3}, {"only": "val.txt"}):
        assert experiment("third", **other).shards(*PAIR) != folder
    make(experiment("fourth"), finish=False)
    assert experiment("fourth").shards(*PAIR) != folder, "it has its own"
    fruit(Path("fruit"), "c")
    assert experiment("second").shards(*PAIR) != folder


def test_an_image_added_later_changes_no_split_that_reads_anothers_shards():
    """Two data sets of one experiment, which differ in how evaluations resize."""
    make(experiment(only=None))
    text = yaml.safe_load(Path("mine.yaml").read_text())
    data = text["datasets"]["fruit"]
    text["datasets"]["larger"] = {"resize": 20, "splits": {"train": data["splits"]["train"]}}
    Path("mine.yaml").write_text(yaml.safe_dump(text))
    found = load("mine.yaml")
    read = found.shards("larger", "train")
    assert read == found.own_shards("fruit", "train")
    prepare(found, [])
    fruit(Path("fruit"), "c")
    assert load("mine.yaml").shards("larger", "train") == read


def test_which_jobs_read_shards():
    found, folder = experiment(), make(experiment())
    root = found.root
    assert shards_of(found, [f"{folder}/index.json", f"{root}/runs/a/run.json"]) == [PAIR]
    for kind in (Features("val"), Features("val", norm=False), Features("val", blocks=4)):
        ending = resolve.ending(kind)
        for file in ("safetensors", "done"):  # the file, and the stamp that Snakemake knows
            path = f"{root}/features/a/fruit-val{ending}.{file}"
            assert shards_of(found, [path]) == [("fruit", "val")]
    assert shards_of(found, [f"{root}/tables/low_shot.csv"]) == []


def start(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "snakemake", "--snakefile", ROOT / "Snakefile", *words]
    command += ["--profile", ROOT / "cluster_profiles/local", "--config", "experiment=mine.yaml"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_job_that_would_read_them_is_refused():
    found = experiment()
    made = [make(found, split) for split in ("train", "val")]
    move_names()
    nothing = start("shards")
    said = "only (other content)"
    assert nothing.returncode == 0 and "Nothing to be done" in nothing.stderr
    assert nothing.stderr.count("maect: warning: mine.yaml: datasets: fruit: ") == 2
    shutil.rmtree(made[1])
    refused = start("encoders")
    last = refused.stderr.strip().splitlines()[-1]
    assert refused.returncode == 2, refused.stderr
    assert last.startswith("maect: mine.yaml: datasets: fruit: train: not what") and said in last
    assert not Path("results/mine/logs").exists() and not Path("results/mine/runs").exists()
    alone = start("shards")  # what is not read does not matter
    assert alone.returncode == 0 and (made[1] / "index.json").exists(), alone.stderr


def test_a_run_is_told_anew_how_images_are_resized(tmp_path):
    """Its job ends at once, having written that down for `maect embed` and others."""
    found = experiment()
    config = found.folder("mae_tiny") / "config.yaml"
    run_config(found, "mae_tiny").write(config)
    write_record(RunRecord.path(config.parent), {"run": "mae_tiny", "stage": "pretrain"})
    stamp_finished(found)
    found = experiment(resize=20)
    assert outdated(found) == [config.with_name("done")]
    prepare(found, [PendingJob("pretrain", {"run": "mae_tiny"}, [], config, False)])
    assert resize_of(config.parent) == 20
    assert features_config(found, "mae_tiny", "fruit", Features("val")).resize == 20
    stamp_finished(found)
    assert outdated(found) == []


def test_bundled_images_of_another_kind():
    """They are written again, once the shards of those before are removed as the message says."""

    def asked(kind: str) -> Experiment:
        values = {"datasets": {"fruit": {"kind": kind, "splits": {"train": {}}}}, "runs": {}}
        Path("mine.yaml").write_text(yaml.safe_dump(values))
        return load("mine.yaml")

    found = asked("digits")
    shutil.copytree("fruit", found.images("fruit", "train"))
    folder = make(found)
    assert other_shards(asked("shapes"), [PAIR]) == [], "unknown"
    Path("results/mine/images/fruit/kind.txt").write_text("digits\n")
    assert Asked(found).images("fruit") == other_shards(found, [PAIR]) == []
    (note,) = other_shards(asked("shapes"), [PAIR])
    assert "kind (shapes, made with digits)" in note and note.count(str(folder)) == 1
    shutil.rmtree(folder)
    assert len(Asked(asked("shapes")).images("fruit")) == 1


def test_a_plan_that_was_not_finished_is_not_gone_on_with():
    folder = make(experiment(), finish=False)
    move_names()
    job = {"dataset": "fruit", "split": "train"}
    prepare(experiment(), [PendingJob("write_shards", job, [], None, False)])
    assert cli.main(["shard", str(folder / CONFIG)]) == 0
    assert open_index(folder).n == len(Path("train.txt").read_text().splitlines()) == 5


def edit_in_place(path: Path, more: bytes = b"") -> None:
    path.write_bytes(path.read_bytes().replace(b"\t", b"\xf6") + more)


def test_shards_of_images_that_were_edited_in_place_are_not_taken():
    first = make(experiment("d1"))
    assert experiment("d2").shards(*PAIR) == first
    path = Path("fruit/a/0.ppm")  # which keeps its size
    kept = path.read_bytes()
    edit_in_place(path)
    later = (first / "files.json").stat().st_mtime + 1
    os.utime(path, (later, later))
    assert experiment("d2").shards(*PAIR) != first
    assert str(experiment("d1").changes(*PAIR)) == "1 file changed (a/0.ppm)"
    path.write_bytes(kept)
    (Path("fruit/c")).mkdir()  # a class without images hides no change
    assert "c: class folder without images" in str(experiment("d1").changes(*PAIR))
    Path("fruit/c").rmdir()
    note_taken(experiment("d2").own_shards(*PAIR), first)  # as when it starts
    for path in Path("fruit").glob("*/*.ppm"):
        edit_in_place(path, b"\n")
    third = experiment("d3")
    assert third.shards(*PAIR) == third.own_shards(*PAIR)
    own = make(third)
    assert index_digest(own) != index_digest(first)
    # Who began with the first goes on with them, and is told; who begins now has the third's.
    second = experiment("d2")
    assert (second.shards(*PAIR), experiment("d4").shards(*PAIR)) == (first, own)
    (note,) = changed_images(second)
    assert "8 files changed" in note and note.endswith(f"rm -r {second.own_shards(*PAIR)}")
    # Removed as told, it finds the new ones.
    shutil.rmtree(second.own_shards(*PAIR))
    assert experiment("d2").shards(*PAIR) == own
    # One that was killed before its plan was there had not taken anything.
    fifth = experiment("d5").own_shards(*PAIR)
    note_taken(fifth, first)
    note_own(fifth, experiment("d5").shards_config(*PAIR))
    assert experiment("d5").shards(*PAIR) == own
