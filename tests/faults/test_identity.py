"""Results that are not what is asked for are found by what lies in their folder, from anywhere."""

import os
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from make_results import EXPERIMENT, asked
from stamping import outdated, stamp_finished
from test_checksums import exchange, train_otherwise

from maect.core.files import read_record, write_record
from maect.core.stamps import stamped
from maect.experiment import Experiment, load
from maect.experiment.pages import pages
from maect.tools.dry_run import jobs_to_run

ROOT = Path(__file__).parents[2]
RUNS = {f"runs/{run}/done" for run in EXPERIMENT["runs"]}
PROTOCOLS = EXPERIMENT["evaluate"][0]["protocols"]
SETTINGS = EXPERIMENT["protocols"]


def features(*runs: str) -> set[str]:
    return {f"features/{run}/digits-{split}.done" for run in runs for split in ("train", "val")}


def evaluations(*runs: str, protocols: list[str] = PROTOCOLS) -> set[str]:
    return {f"evaluations/{run}/{name}.done" for run in runs for name in protocols}


BOTH = ("mae_tiny", "ct_tiny")
COMPUTED = features(*BOTH) | evaluations(*BOTH)
OF_IMAGES = evaluations(*BOTH, protocols=["linear_probe"])


def write(
    folder: Path,
    mae: dict[str, Any] | None = None,
    digits: dict[str, Any] | None = None,
    val: dict[str, Any] | None = None,
    **changes: Any,
) -> Experiment:
    """The experiment in a folder, with changes of a run, of the data set, and of top-level keys."""
    told = asked(folder) | changes
    told["runs"]["mae_tiny"]["set"] |= mae or {}
    told["datasets"]["digits"] |= digits or {}
    told["datasets"]["digits"]["splits"]["val"] |= val or {}
    (folder / "mini.yaml").write_text(yaml.safe_dump(told, sort_keys=False))
    return load(str(folder / "mini.yaml"))


@pytest.fixture(scope="module")
def finished(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Complete results with their stamps."""
    folder = tmp_path_factory.mktemp("finished") / "pipeline"
    shutil.copytree(pristine, folder)
    found = write(folder)
    stamp_finished(found)
    (found.root / "workflow.html").write_text("made")
    now = time.time()
    for path in folder.rglob("*"):
        os.utime(path, (now, now))  # nothing is newer than what is made of it
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


CHANGED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "nothing": ({}, set()),
    "online_evaluation": ({"online_evaluation": {"every_epochs": 7}}, set()),
    "crop_scale": ({"mae": {"crop_scale": [0.25, 1.0]}}, {"runs/mae_tiny/done"}),
    "zero_stage": ({"mae": {"zero_stage": 2}}, set()),
    "precision": ({"features": "bf16"}, COMPUTED - OF_IMAGES),
    "k of k-NN": (
        {"protocols": EXPERIMENT["protocols"] | {"knn": {"k": 7}}},
        evaluations(*BOTH, protocols=["knn"]),
    ),
    "resize": ({"digits": {"resize": 20}}, COMPUTED | RUNS),
    # Finished shards are refused, and made again by hand alone.
    "number of shards": ({"val": {"shards": 2}}, set()),
    "tables": ({"tables": []}, {"report.done"}),  # nor are there claims
}


@pytest.mark.parametrize(("changes", "expected"), CHANGED.values(), ids=CHANGED)
def test_settings_were_changed(place, changes, expected):
    """Audit 4: after a change of the file, exactly what it changes is found, in a copy as well."""
    assert found_in(place, **changes) == expected


def test_an_encoder_was_replaced(place):
    """Audit 11: features and evaluations of the encoder before, and what started from it."""
    run = place / "results/runs/mae_tiny"
    train_otherwise(run, "ct_tiny")
    # The run's own job finds that it is what is asked for.
    made_of_it = features("mae_tiny") | evaluations("mae_tiny")
    assert found_in(place) >= made_of_it | {"runs/mae_tiny/done", "runs/head_tiny/done"}


def test_features_were_exchanged(place):
    """Audit 11: features of train and val under each other's name, made of the same encoder."""
    folder = place / "results/features/mae_tiny"
    exchange(folder / "digits-train.safetensors", folder / "digits-val.safetensors")
    # They are made again, and then what is made of them.
    assert found_in(place) == features("mae_tiny")


def test_shards_of_other_images(place):
    """Shards made again of other images, with the times of before: all that read them is found."""
    index = place / "results/shards/digits/train/index.json"
    record, times = read_record(index), index.stat()
    write_record(index, record | {"digest": "0" * 64})
    os.utime(index, ns=(times.st_atime_ns, times.st_mtime_ns))
    expected = {"shards/digits/train/done", "features/mae_tiny/digits-train.done", *RUNS}
    assert found_in(place) >= expected


def test_features_that_are_gone_hide_no_difference(place):
    """Results say which images, in which precision; of what has no file nothing can be said."""
    shutil.rmtree(place / "results/features")
    assert found_in(place) == set()
    assert found_in(place, features="bf16") == evaluations(*BOTH) - OF_IMAGES
    index = place / "results/shards/digits/val/index.json"
    write_record(index, read_record(index) | {"digest": "0" * 64})
    shown = {"report.done", "figures/confusion.done", "figures/umap.done"}
    assert found_in(place) - {"shards/digits/val/done"} - shown == evaluations(*BOTH)
    for name in ("shards", "runs/mae_tiny"):
        shutil.rmtree(place / "results" / name)
    assert found_in(place) == set()


def test_a_table_is_of_the_evaluations_that_are_there(place):
    """One arrives by `rsync -a` with an older time."""
    path = place / "results/evaluations/mae_tiny/knn.json"
    write_record(path, read_record(path) | {"metrics": {"knn": 12.5}})
    os.utime(path, (0, 0))
    assert found_in(place) == {"evaluations/mae_tiny/knn.done", "tables/low_shot.done"}


def test_a_page_is_of_the_tables_and_records_that_are_there(place):
    table = place / "results/tables/clustering.csv"
    table.write_text("made anew")
    os.utime(table, (0, 0))
    assert found_in(place) == {"claims.done", "report.done"}
    for path, config in pages(write(place)):
        with stamped(path, config):
            pass
    assert found_in(place) == set()
    claims = place / "results/claims.csv"
    claims.write_text("made anew")
    os.utime(claims, (0, 0))
    assert found_in(place) == {"report.done"}


def test_a_damaged_stamp_is_made_again(place):
    stamp = place / "results/evaluations/mae_tiny/knn.done"
    text = stamp.read_text()
    for damaged in (text[:-9], "", text.replace(": 1", ": 99")):  # the last: another format
        stamp.write_text(damaged)
        assert found_in(place) == {"evaluations/mae_tiny/knn.done"}


def test_a_result_that_is_gone_is_made_again(place):
    """Its stamp alone is no result."""
    stamps = {
        "runs/head_tiny/head.safetensors": "runs/head_tiny/done",
        "runs/ct_tiny/run.json": "runs/ct_tiny/done",
        "evaluations/mae_tiny/knn.json": "evaluations/mae_tiny/knn.done",
        "features/mae_tiny/digits-val.safetensors": "features/mae_tiny/digits-val.done",
    }
    for name in stamps:
        (place / "results" / name).unlink()
    assert found_in(place) == {*stamps.values()}


def plan(folder: Path, stand: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What a start from a folder would run, and how often."""
    stand.mkdir()
    monkeypatch.chdir(stand)
    profile = ROOT / "cluster_profiles/local"
    jobs = jobs_to_run([], [f"experiment={folder / 'mini.yaml'}"], profile)
    return Counter(job.rule for job in jobs)


def test_the_same_answer_from_anywhere(place, tmp_path, monkeypatch):
    """Audit 4: settings changed, no `.snakemake` where one stands, the folder is a copy.

    Features were removed to free space. A dry run writes nothing.
    """
    shutil.rmtree(place / "results/features")
    before = {path: path.stat().st_mtime_ns for path in (place / "results").rglob("*")}
    assert plan(place, tmp_path / "here", monkeypatch) == {}
    write(place, mae={"epochs": 7})
    jobs = plan(place, tmp_path / "elsewhere", monkeypatch)
    expected = {"pretrain": 1, "head": 1, "features": 4, "knn": 2, "clustering": 2}
    assert expected.items() <= jobs.items()
    write(place, features="bf16")
    jobs = plan(place, tmp_path / "precision", monkeypatch)
    assert (jobs["features"], jobs["knn"], jobs["linear_probe"], jobs["pretrain"]) == (4, 2, 0, 0)
    after = {path: path.stat().st_mtime_ns for path in (place / "results").rglob("*")}
    assert after == before


def test_what_is_gone_is_made_again_if_something_reads_it(place, tmp_path, monkeypatch):
    """Shards if a job reads them, finished ones never; evaluations also if nothing shows them."""
    shutil.rmtree(place / "results/shards/digits/train")
    write(place, val={"shards": 2})
    assert plan(place, tmp_path / "first", monkeypatch) == {}
    evaluations = place / "results/evaluations/mae_tiny"
    (evaluations / "retrieval.json").unlink()
    jobs = plan(place, tmp_path / "second", monkeypatch)
    assert (jobs["retrieval"], jobs["knn"], jobs["pretrain"], jobs["write_shards"]) == (1, 0, 0, 0)
    (evaluations / "linear_probe.json").unlink()
    jobs = plan(place, tmp_path / "third", monkeypatch)
    assert jobs["linear_probe"] and jobs["write_shards"] == 1
