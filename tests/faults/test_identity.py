"""Results that are not what is asked for are found by what lies in their folder, from anywhere."""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from stamping import outdated, stamp_finished

from maect.core.files import read_record, sha256_file, write_record
from maect.core.stamps import stamped
from maect.data.shards import shard
from maect.evaluate.base import Features
from maect.evaluate.evaluation import job_of, provenance
from maect.evaluate.store import write_features
from maect.experiment import Experiment, load, resolve
from maect.experiment.chosen_shards import note_own
from maect.experiment.pages import PAGES, pages
from maect.records import RunRecord
from maect.train.run_folder import source_files

ROOT = Path(__file__).parents[2]
ASKED: dict[str, Any] = {
    "storage": "results",
    "datasets": {"mine": {"resize": 16, "splits": {}}},
    "runs": {
        "mae": {"recipe": "mae", "size": "tiny"},
        "head": {"recipe": "head_min", "size": "tiny", "from": "mae"},
    },
    "evaluate": [{"runs": ["mae"], "protocols": ["knn", "clustering"]}],
    "tables": ["clustering"],
    "figures": ["pipeline"],
}


def write(folder: Path, **changes: Any) -> Experiment:
    """The experiment in a folder, with other top-level keys."""
    told = copy.deepcopy(ASKED) | {"storage": str(folder / "results")} | changes
    splits = {split: {"images": str(folder / "images" / split)} for split in ("train", "val")}
    for dataset in told["datasets"].values():
        dataset["splits"] = splits | dataset["splits"]
    (folder / "mine.yaml").write_text(yaml.safe_dump(told, sort_keys=False))
    return load(str(folder / "mine.yaml"))


def train(found: Experiment, name: str, bits: bytes = b"") -> None:
    """What a run leaves: its record as it is, weights of a few bytes."""
    told, folder = resolve.run_config(found, name), found.folder(name)
    data = read_record(told.shards / "index.json")["digest"]
    weights = [folder / file for file in told.settings.outputs]
    for path in weights:
        path.write_bytes(f"{name} {path.name} ".encode() + bits)
    record = {
        "run": name, "stage": told.stage, "seed": told.seed,
        "fingerprint": told.fingerprint(data, source_files(told.source)),
        "settings": told.settings.model_dump(mode="json"),
        "encoder": told.encoder.model_dump(mode="json"),
        "source": told.source and told.source.name,
        "files": [path.name for path in weights],
        "sha256": {path.name: sha256_file(path) for path in weights},
    }  # fmt: skip
    write_record(RunRecord.path(folder), record)


def extract(found: Experiment, split: str) -> None:
    kind = Features(split)
    record = {
        "encoder_sha256": sha256_file(found.folder("mae") / "encoder.safetensors"),
        "index_digest": read_record(found.shards("mine", split) / "index.json")["digest"],
        **resolve.features_config(found, "mae", "mine", kind).how,
        "class_names": ["a", "b"],
    }
    path = resolve.features_file(found, "mae", "mine", kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = np.zeros((2, 2), np.float32)
    labels = np.zeros(2, np.int64)
    write_features(path, [rows], width=2, labels=labels, keys=["a", "b"], record=record)


def evaluate(found: Experiment, name: str) -> None:
    told, path = (
        resolve.evaluation_config(found, "mae", name),
        found.root / f"evaluations/mae/{name}.yaml",
    )
    encoder = sha256_file(found.folder("mae") / "encoder.safetensors")
    result = {
        "metrics": {},
        "settings": told.settings.model_dump(mode="json") | {"resize": told.resize},
        "provenance": provenance(job_of(told, path), told.settings, 1, encoder),
    }
    if told.settings.writes_tensors:
        path.with_suffix(".safetensors").write_bytes(b"left")
    write_record(path.with_suffix(".json"), result)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images, experiment and complete results, in the order of their making."""
    folder = tmp_path_factory.mktemp("finished")
    for number in range(8):
        path = folder / "images" / ("train" if number < 4 else "val") / "ab"[number % 2]
        path.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (30 * number, 9, 9)).save(path / f"{number}.png")
    found = write(folder)
    for _, split in found.splits:
        own = found.own_shards("mine", split)
        own.mkdir(parents=True)
        note_own(own, found.shards_config("mine", split))
        shard(found.images("mine", split), own, "folder", 1)
    for path, told in resolve.files(found):
        told.write(path)
    for name in found.runs:
        train(found, name)
    for split in ("train", "val"):
        extract(found, split)
    for name in ("knn", "clustering"):
        evaluate(found, name)
    stamp_finished(found)
    shown = [
        out
        for page in PAGES.values()
        for name in page.names(found)
        for out in page.outputs(found, name)
    ]
    for path in (*shown, found.root / "report.html", found.root / "workflow.html"):
        path.write_text("made")
    finish_pages(folder)
    return folder


@pytest.fixture
def place(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, as `cp -a` makes one."""
    copied = tmp_path / "copy"
    shutil.copytree(finished, copied, copy_function=shutil.copy2)
    write(copied)
    return copied


def found_in(folder: Path, **changes: Any) -> set[str]:
    found = write(folder, **changes)
    return {str(path.relative_to(found.root)) for path in outdated(found)}


def finish_pages(folder: Path) -> None:
    """Make what is shown of the results as they are."""
    found = write(folder)
    for path, config in pages(found):
        with stamped(path, config):
            pass


def runs(**changes: Any) -> dict[str, Any]:
    return {"runs": ASKED["runs"] | {"mae": ASKED["runs"]["mae"] | {"set": changes}}}


FEATURES = {f"features/mae/mine-{split}.done" for split in ("train", "val")}
RUNS = {"runs/mae/done", "runs/head/done"}
EVALUATIONS = {f"evaluations/mae/{name}.done" for name in ("knn", "clustering")}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, set()),
        ({"online_evaluation": {"every_epochs": 7}}, set()),
        (runs(crop_scale=[0.25, 1.0]), {"runs/mae/done"}),
        (runs(zero_stage=2), set()),
        ({"features": "bf16"}, FEATURES | EVALUATIONS),
        ({"protocols": {"knn": {"k": 7}}}, {"evaluations/mae/knn.done"}),
        ({"datasets": {"mine": {"resize": 20, "splits": {}}}}, FEATURES | EVALUATIONS | RUNS),
        # Finished shards are refused, and made again by hand alone.
        ({"datasets": {"mine": {"resize": 16, "splits": {"val": {"shards": 2}}}}}, set()),
        ({"tables": []}, {"report.done"}),  # nor are there claims
    ],
    ids=(
        "nothing",
        "how often it is evaluated",
        "a recipe",
        "how it is computed",
        "precision",
        "a protocol",
        "resizing",
        "number of shards",
        "tables",
    ),
)
def test_settings_were_changed(place: Path, changes: dict[str, Any], expected: set[str]) -> None:
    """Audit 4: after a change of the file, exactly what it changes is found, in a copy as well."""
    if "'val'" in str(changes):
        splits = changes["datasets"]["mine"]["splits"]
        splits["val"] = {"images": str(place / "images/val"), "shards": 2}
    assert found_in(place, **changes) == expected


def test_an_encoder_was_replaced(place: Path) -> None:
    """Audit 11: features and evaluations of the encoder before, and what started from it."""
    train(write(place), "mae", b"trained again")
    # The run's own job finds that it is what is asked for.
    assert found_in(place) >= {*FEATURES, *EVALUATIONS, *RUNS}


def test_features_were_exchanged(place: Path) -> None:
    """Audit 11: features of train and val under each other's name, made of the same encoder."""
    names = (Path(name).with_suffix(".safetensors") for name in sorted(FEATURES))
    train_file, val_file = (place / "results" / name for name in names)
    train_file.rename(place / "aside")
    val_file.rename(train_file)
    (place / "aside").rename(val_file)
    assert found_in(place) == FEATURES  # they are made again, and then what is made of them


def test_shards_of_other_images(place: Path) -> None:
    """Shards made again of other images, with the times of before: all that read them is found."""
    index = place / "results/shards/mine/train/index.json"
    record, times = read_record(index), index.stat()
    write_record(index, record | {"digest": "0" * 64})
    os.utime(index, ns=(times.st_atime_ns, times.st_mtime_ns))
    expected = RUNS | {"shards/mine/train/done", "features/mae/mine-train.done"}
    assert found_in(place) >= expected


def test_what_is_gone_is_no_difference(place: Path) -> None:
    """Without shards, features or a source nothing can be said of what was made of them."""
    for name in ("shards", "features", "runs/mae"):
        shutil.rmtree(place / "results" / name)
    assert found_in(place) == set()


def test_features_that_are_gone_hide_no_difference(place: Path) -> None:
    """Results say which images, in which precision."""
    shutil.rmtree(place / "results/features")
    assert found_in(place) == set()
    assert found_in(place, features="bf16") == EVALUATIONS
    index = place / "results/shards/mine/val/index.json"
    write_record(index, read_record(index) | {"digest": "0" * 64})
    assert found_in(place) - {"shards/mine/val/done", "report.done"} == EVALUATIONS
    shutil.rmtree(index.parent)
    assert found_in(place) == set()


def replace_evaluation(folder: Path, accuracy: float, seconds: float) -> Path:
    """Write another result, as `rsync -a` brings one; its time is so much after the one before."""
    path = folder / "results/evaluations/mae/clustering.json"
    before = path.stat().st_mtime
    write_record(path, read_record(path) | {"metrics": {"accuracy": accuracy}})
    os.utime(path, (before + seconds, before + seconds))
    return path


@pytest.mark.parametrize("seconds", [-9999, 1e-6, 9999])
def test_a_table_is_of_the_evaluations_that_are_there(place: Path, seconds: float) -> None:
    """One arrives with an older time: the table has old numbers, which no time tells."""
    assert found_in(place) == set()
    path = replace_evaluation(place, 12.5, seconds)
    assert found_in(place) == {"evaluations/mae/clustering.done", "tables/clustering.done"}
    table = read_record(place / "results/tables/clustering.done")
    made_of = table["made_of"]["../evaluations/mae/clustering.json"]
    assert made_of != json.loads(path.read_text())["checksum"]


def test_a_page_is_of_the_tables_and_records_that_are_there(place: Path) -> None:
    table = place / "results/tables/clustering.csv"
    table.write_text("made anew")
    os.utime(table, (0, 0))
    assert found_in(place) == {"claims.done", "report.done"}
    finish_pages(place)
    assert found_in(place) == set()
    claims = place / "results/claims.csv"
    claims.write_text("made anew")
    os.utime(claims, (0, 0))
    assert found_in(place) == {"report.done"}


@pytest.mark.parametrize("damage", ["cut", "empty", "another format"])
def test_a_damaged_stamp_is_made_again(place: Path, damage: str) -> None:
    stamp = place / "results/evaluations/mae/knn.done"
    text = stamp.read_text()
    cut = {"cut": text[:-9], "empty": "", "another format": text.replace(": 1", ": 99")}
    stamp.write_text(cut[damage])
    assert found_in(place) == {"evaluations/mae/knn.done"}


def test_a_result_that_is_gone_is_made_again(place: Path) -> None:
    """Its stamp alone is no result."""
    for name in ("runs/head/head.safetensors", "evaluations/mae/knn.json"):
        (place / "results" / name).unlink()
    (place / "results" / sorted(FEATURES)[0]).with_suffix(".safetensors").unlink()
    assert found_in(place) == {"runs/head/done", "evaluations/mae/knn.done", sorted(FEATURES)[0]}


def plan(folder: Path, stand: Path) -> tuple[dict[str, str], str]:
    """What a dry run from a folder would run, and what it says."""
    stand.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "-n"]
    command += ["--profile", str(ROOT / "cluster_profiles/local"), "--directory", str(stand)]
    command += ["--config", f"experiment={folder / 'mine.yaml'}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=stand)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    said = done.stdout + done.stderr
    return dict(re.findall(r"(?m)^(\w+) +(\d+)$", done.stdout)), said


def test_the_same_answer_from_anywhere(place: Path, tmp_path: Path) -> None:
    """Audit 4: settings changed, no `.snakemake` where one stands, the folder is a copy.

    A dry run writes nothing.
    """
    before = {path: path.stat().st_mtime_ns for path in (place / "results").rglob("*")}
    jobs, said = plan(place, tmp_path / "here")
    assert jobs == {} and "Nothing to be done" in said
    write(place, **runs(epochs=7))
    asked = {"pretrain": "1", "features": "2", "knn": "1", "clustering": "1"}
    jobs, said = plan(place, tmp_path / "elsewhere")
    assert asked.items() <= jobs.items() and "settings-or-inputs-changed" in said
    assert "head" not in jobs  # nothing that is asked for needs it
    after = {path: path.stat().st_mtime_ns for path in (place / "results").rglob("*")}
    assert after == before


def test_finished_shards_are_not_said_to_be_made_again(place: Path, tmp_path: Path) -> None:
    """A start refuses that, and says how."""
    splits = {"val": {"images": str(place / "images/val"), "shards": 2}}
    write(place, datasets={"mine": {"resize": 16, "splits": splits}})
    _, said = plan(place, tmp_path / "here")
    assert "To have them made anew: rm -r" in said and "Nothing to be done" in said
