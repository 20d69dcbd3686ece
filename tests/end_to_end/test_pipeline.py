"""The whole pipeline through Snakemake: outcome, restarts after kills, mistakes, re-runs."""

import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from launching import wait_for
from mini_pipeline import MINI, Pipeline
from PIL import Image
from random_kills import content, differing

from maect.cli import main
from maect.core.errors import UserError
from maect.launch.owner import lock_folder
from maect.records import RunRecord

ENCODERS = ("mae_tiny", "head_min_tiny", "ct_min_tiny")


def test_what_a_run_leaves(undisturbed):
    results = undisturbed.results
    for run in ENCODERS:
        folder = results / "runs" / run
        record = json.loads(RunRecord.path(folder).read_text())
        assert {"settings", "computing", "versions", "device_hours"} <= set(record)
        assert record["world_size"] == 1
        assert list((folder / "tensorboard").iterdir())
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines]
        assert steps == sorted(set(steps)) and steps
        assert (folder / "head.safetensors").exists() == (run != "mae_tiny")
    knn = json.loads((results / "evaluations/ct_min_tiny/knn.json").read_text())
    assert set(knn) == {
        "format", "metrics", "outcomes", "settings", "provenance", "checksum"
    }  # fmt: skip
    assert 50 < knn["metrics"]["knn"] <= 100
    log = (results / "logs/ct_min_tiny/tune.log").read_text()
    # Polls of a run of seconds may miss all of it; the last line says how far it came.
    assert "done: epoch " in log and "images/s" in log
    # Evaluations that run beside each other say whose a line is.
    for line in (results / "logs/ct_min_tiny/knn.log").read_text().splitlines():
        assert "] evaluate ct_min_tiny knn: " in line


def test_resolved_files_are_those_that_the_pipeline_wrote(undisturbed):
    files = [*undisturbed.results.glob("*/*/*.yaml")]
    assert {file.parent.name for file in files} >= {*ENCODERS}
    written = {file: (file.read_text(), file.stat().st_mtime_ns) for file in files}
    assert main(["resolve", str(undisturbed.folder / "mini.yaml")]) == 0
    assert {file: (file.read_text(), file.stat().st_mtime_ns) for file in files} == written


def copy_of(undisturbed: Pipeline, folder: Path) -> Pipeline:
    """Finished results elsewhere, with their times and without Snakemake's memory."""
    pipeline = Pipeline(folder, copy.deepcopy(MINI))
    pipeline.command()
    shutil.copytree(undisturbed.results, pipeline.results)
    return pipeline


def computed(pipeline: Pipeline) -> dict[Path, tuple[int, bytes]]:
    """What took time to compute: each file as it is, and the place that it has on the disk."""
    patterns = ("runs/*/run.json", "runs/*/*.safetensors", "features/*/*.s*")
    patterns += ("evaluations/*/*.json", "shards/*/*/*.tar")
    files = [path for pattern in patterns for path in pipeline.results.glob(pattern)]
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
    wait_for(lambda: not stamp.exists(), 200, "for Snakemake to delete the stamp")
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
    wait_for(lambda: not pipeline.processes(), 60, "for every process to be gone")
    pipeline.complete("evaluations")
    assert stamp.exists() and computed(pipeline) == before
    # Results are asked for by their names.
    names = ("evaluations/ct_min_tiny/knn.json", "runs/mae_tiny/encoder.safetensors")
    files = [str(pipeline.results / name) for name in names]
    profile = f"{pipeline.folder}/profile"
    words = ["run", str(pipeline.folder / "mini.yaml"), *files, "--profile", profile]
    done = subprocess.run([sys.executable, "-m", "maect", *words], capture_output=True, text=True)
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
    wait_for(lambda: bool(list(run.glob("stale-*/run.json"))), 300, "for the new training to begin")
    os.killpg(started.pid, signal.SIGKILL)
    started.wait(timeout=60)
    pipeline.kill_everything()
    pipeline.complete("evaluations")
    assert computed(pipeline) == before
    assert "Nothing to be done" in pipeline.complete("evaluations")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_kills_at_random_moments(tmp_path):
    """SIGKILL of everything, from the first import to the last evaluation."""
    longer = copy.deepcopy(MINI)
    for run in longer["runs"].values():
        run["set"] = {"epochs": 3}
    undisturbed = Pipeline(tmp_path / "undisturbed", longer)
    undisturbed.complete("evaluations")
    pipeline = Pipeline(tmp_path / "killed", longer)
    seed = random.randrange(10**6)
    print(f"seed {seed}")  # shown if it fails
    dice = random.Random(seed)
    for _ in range(10):
        started = pipeline.start("evaluations")
        with suppress(subprocess.TimeoutExpired):
            started.wait(dice.uniform(1, 45))
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
        started.wait(timeout=60)
        pipeline.kill_everything()
        wait_for(lambda: not pipeline.processes(), 60, "for every process to be gone")
    pipeline.complete("evaluations")
    assert differing(content(undisturbed), content(pipeline)) == []
    assert "Nothing to be done" in pipeline.complete("evaluations")


def test_an_unreadable_image_is_named(tmp_path):
    images = tmp_path / "images"
    for split in ("train", "val"):
        (images / split / "a").mkdir(parents=True)
        Image.new("RGB", (64, 64)).save(images / split / "a/good.jpg")
    (images / "train/a/broken.jpg").write_bytes(b"\xff\xd8\xff but no picture")
    splits = {split: {"images": str(images / split)} for split in ("train", "val")}
    pipeline = Pipeline(tmp_path / "m", MINI | {"datasets": {"mine": {"splits": splits}}})
    with pytest.raises(AssertionError, match=r"broken\.jpg"):
        pipeline.complete("shards")
