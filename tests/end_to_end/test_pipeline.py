"""The whole pipeline through Snakemake: outcome, restarts after kills, mistakes, re-runs."""

import copy
import csv
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from mini_pipeline import MINI, Pipeline, wait_for

from maect.cli import main
from maect.core.errors import UserError
from maect.launch.owner import lock_folder
from maect.records import RunRecord

ENCODERS = ("mae_tiny", "head_min_tiny", "ct_min_tiny")


def metric_lines(pipeline: Pipeline, run: str) -> list[dict[str, Any]]:
    """Logged values without those that depend on the clock."""
    text = (pipeline.results / "runs" / run / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return [{k: v for k, v in line.items() if k != "timing"} for line in lines]


def test_what_a_run_leaves(undisturbed):
    for run in ENCODERS:
        folder = undisturbed.results / "runs" / run
        record = json.loads(RunRecord.path(folder).read_text())
        assert {"settings", "computing", "versions", "device_hours"} <= set(record)
        assert record["world_size"] == 1
        assert list((folder / "tensorboard").iterdir())
        steps = [line["step"] for line in metric_lines(undisturbed, run)]
        assert steps == sorted(set(steps)) and steps
        assert (folder / "head.safetensors").exists() == (run != "mae_tiny")
    knn = json.loads((undisturbed.results / "evaluations/ct_min_tiny/knn.json").read_text())
    assert set(knn) == {
        "format", "metrics", "outcomes", "settings", "provenance", "checksum"
    }  # fmt: skip
    assert 50 < knn["metrics"]["knn"] <= 100
    log = (undisturbed.results / "logs/ct_min_tiny/tune.log").read_text()
    # Polls of a run of seconds may miss all of it; the last line says how far it came.
    assert "done: epoch " in log and "images/s" in log
    # Evaluations that run beside each other say whose a line is.
    for line in (undisturbed.results / "logs/ct_min_tiny/knn.log").read_text().splitlines():
        assert "] evaluate ct_min_tiny knn: " in line


def test_resolved_files_are_those_that_the_pipeline_wrote(undisturbed):
    written = {
        file: (file.read_text(), file.stat().st_mtime_ns)
        for file in undisturbed.results.glob("*/*/*.yaml")
    }
    assert {file.parent.name for file in written} >= {*ENCODERS}
    assert main(["resolve", str(undisturbed.folder / "mini.yaml")]) == 0
    for file, (text, changed) in written.items():
        assert (file.read_text(), file.stat().st_mtime_ns) == (text, changed), file


def copy_of(undisturbed: Pipeline, folder: Path) -> Pipeline:
    """Finished results elsewhere, with their times and without Snakemake's memory."""
    pipeline = Pipeline(folder, copy.deepcopy(MINI))
    pipeline.command()
    shutil.copytree(undisturbed.results, pipeline.results)
    return pipeline


def computed(pipeline: Pipeline) -> dict[Path, tuple[int, bytes]]:
    """What took time to compute: each file as it is, and the place that it has on the disk."""
    patterns = (
        "runs/*/run.json",
        "runs/*/*.safetensors",
        "features/*/*.s*",
        "evaluations/*/*.json",
    )
    files = [path for pattern in patterns for path in pipeline.results.glob(pattern)]
    files += [*pipeline.results.glob("shards/*/*/*.tar")]
    assert len(files) > 10
    return {path: (path.stat().st_ino, path.read_bytes()) for path in files}


@pytest.mark.parametrize(
    "end", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_a_copy_is_finished_whatever_its_times(undisturbed, tmp_path, end):
    """Its jobs look at what is there, also if they are killed, and nothing is computed again.

    Times are reversed, and stamps of evaluations are gone, as version 0.2.0 has left results. The
    only output that Snakemake deletes before a job is its stamp.
    """
    pipeline = copy_of(undisturbed, tmp_path / "copy")
    before, now = computed(pipeline), time.time()
    for path in pipeline.results.rglob("*"):
        if path.is_file():
            os.utime(path, (now, now - path.stat().st_mtime % 9999))
    for stamp in pipeline.results.glob("evaluations/*/*.done"):
        stamp.unlink()
    stamp = pipeline.results / "runs/mae_tiny/done"
    (pipeline.results / "shards/digits/train/done").touch()  # newer than what is made of it
    started = pipeline.start("evaluations")
    wait_for(lambda: not stamp.exists(), 200, "Snakemake to delete the stamp")
    assert computed(pipeline) == before
    owner = f"process {started.pid} "  # another pipeline on the folder is refused
    with pytest.raises(UserError, match=owner), lock_folder(pipeline.results, patience=0):
        pass
    os.killpg(started.pid, end)
    started.wait(timeout=180)
    if end == signal.SIGINT:
        told = (pipeline.folder / "snakemake.log").read_text()
        _, line, after = told.rpartition("maect: interrupted: trainings save")
        assert line and "Error in rule" not in after and "WorkflowError" not in after
    wait_for(lambda: not pipeline.processes(), 60, "every process to be gone")
    pipeline.complete("evaluations")
    assert stamp.exists() and computed(pipeline) == before
    # Results are asked for by their names.
    names = ("evaluations/ct_min_tiny/knn.json", "runs/mae_tiny/encoder.safetensors")
    files = [str(pipeline.results / name) for name in names]
    profile = f"{pipeline.folder}/profile"
    done = maect("run", str(pipeline.folder / "mini.yaml"), *files, "--profile", profile)
    assert done.returncode == 0 and "Nothing to be done" in done.stderr, done.stderr


@pytest.mark.slow
def test_a_setting_is_changed_killed_and_set_back(undisturbed, tmp_path):
    """Dry run, kill in the middle of the new training, back: as if it had never been."""
    pipeline = copy_of(undisturbed, tmp_path / "back")
    before = computed(pipeline)
    changed = copy.deepcopy(MINI)
    changed["runs"]["ct_min_tiny"]["set"]["head"] = {"topk": 2}
    other = Pipeline(pipeline.folder, changed)
    for _ in range(2):
        assert "Contrastive tuning of ct_min_tiny" in other.complete("-n", "evaluations")
    assert "Nothing to be done" in pipeline.complete("-n", "evaluations")
    started = other.start("evaluations")
    run = pipeline.results / "runs/ct_min_tiny"
    wait_for(lambda: bool(list(run.glob("stale-*/run.json"))), 300, "the new training to begin")
    os.killpg(started.pid, signal.SIGKILL)
    started.wait(timeout=60)
    pipeline.kill_everything()
    pipeline.complete("evaluations")
    assert computed(pipeline) == before
    assert "Nothing to be done" in pipeline.complete("evaluations")


@pytest.mark.slow
def test_a_second_data_set_is_a_column_of_the_page_of_data_sets(undisturbed, tmp_path):
    """Only what is of the second data set is computed, and the page."""
    several = copy.deepcopy(MINI)
    several["datasets"]["larger"] = {
        "kind": "digits",
        "resize": 20,
        "splits": {"train": {}, "val": {}},
    }
    both = {"datasets": ["digits", "larger"], "protocols": ["knn", "low_shot"]}
    several["evaluate"] = [{"runs": ["ct_min_tiny"], **both}]
    pipeline = Pipeline(tmp_path / "several", several)
    pipeline.command()
    for folder in ("images", "shards", "runs", "features", "evaluations"):
        shutil.copytree(undisturbed.results / folder, pipeline.results / folder)
    log = pipeline.complete("datasets")
    assert "Pre-training" not in log and "Evaluating ct_min_tiny: knn.on.larger" in log
    with (pipeline.results / "datasets.csv").open(encoding="utf-8") as file:
        lines = {(row["dataset"], row["metric"]): row for row in csv.DictReader(file)}
    wanted = ("knn", "knn_standardized", "knn_held_out", "low_shot_1", "low_shot_2", "low_shot_5")
    for name, metric in itertools.product(both["datasets"], wanted):
        low, value, high = (float(lines[name, metric][key]) for key in ("low", "value", "high"))
        evaluation = metric.partition("_")[0].replace("low", "low_shot")
        ending = "" if name == "digits" else ".on.larger"
        result = pipeline.results / f"evaluations/ct_min_tiny/{evaluation}{ending}.json"
        assert value == json.loads(result.read_text())["metrics"][metric]
        assert low < value < high and high - low < 15
    assert lines["digits", "knn"]["value"] != lines["larger", "knn"]["value"]
    text = (pipeline.results / "datasets.md").read_text()
    assert re.findall(r"(?m)^## (.*)$", text) == ["digits", "larger"]


def test_an_unreadable_image_is_named(tmp_path):
    from PIL import Image
    from sklearn.datasets import load_sample_image

    for split in ("train", "val"):
        for label in ("a", "b"):
            folder = tmp_path / "images" / split / label
            folder.mkdir(parents=True)
            Image.fromarray(load_sample_image("flower.jpg")[:64, :64]).save(folder / "good.jpg")
    (tmp_path / "images/train/b/broken.jpg").write_bytes(b"\xff\xd8\xff but no picture")
    splits = {s: {"images": str(tmp_path / "images" / s)} for s in ("train", "val")}
    done = Pipeline(tmp_path / "m", MINI | {"datasets": {"mine": {"splits": splits}}}).run("shards")
    assert done.returncode != 0
    assert "broken.jpg" in done.stderr + done.stdout


def maect(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "maect", *words], capture_output=True, text=True)
