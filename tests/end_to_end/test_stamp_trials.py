"""Trials of stamps on a whole pipeline: nothing is computed twice, and nothing is stale."""

import copy
import os
import random
import shutil
import signal
import time

import pytest
from mini_pipeline import MINI, ROOT, Pipeline, wait_for
from random_kills import content, differing

pytestmark = pytest.mark.slow
KILLS = 10


def test_ten_kills_at_random_moments(tmp_path):
    """SIGKILL of everything, from the first import to the last evaluation."""
    longer = copy.deepcopy(MINI)
    for run in longer["runs"].values():
        run["set"] = {"epochs": 3}
    undisturbed = Pipeline(tmp_path / "undisturbed", longer)
    undisturbed.complete("evaluations")
    pipeline = Pipeline(tmp_path / "killed", longer)
    pipeline.command()  # which makes its folder
    seed = random.randrange(10**6)
    print(f"seed {seed}")  # shown if it fails
    dice = random.Random(seed)
    for _ in range(KILLS):
        started = pipeline.start("evaluations")
        until = time.monotonic() + dice.uniform(1, 45)
        while started.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
        started.wait(timeout=60)
        pipeline.kill_everything()
        wait_for(lambda: not pipeline.processes(), 60, "every process to be gone")
    pipeline.complete("evaluations")
    assert differing(content(undisturbed), content(pipeline)) == []
    assert "Nothing to be done" in pipeline.complete("evaluations")


def test_a_copy_is_finished_in_another_clone(undisturbed, tmp_path):
    """Its times are kept; Snakemake remembers nothing."""
    pipeline = Pipeline(tmp_path / "copy", copy.deepcopy(MINI))
    words = pipeline.command("evaluations")
    shutil.copytree(undisturbed.results, pipeline.results)
    clone = tmp_path / "clone"
    for name in ("workflow", "cluster_profiles", "envs"):
        shutil.copytree(ROOT / name, clone / name)
    shutil.copy(ROOT / "Snakefile", clone)
    before = {path: path.stat().st_ino for path in pipeline.results.rglob("*.json")}

    class Clone(Pipeline):
        def command(self, *targets: str) -> list[str]:
            given = super().command(*targets)
            return [str(clone / "Snakefile") if word in words[4:5] else word for word in given]

    elsewhere = Clone(pipeline.folder, pipeline.experiment)
    assert words[4] == str(ROOT / "Snakefile")
    said = elsewhere.complete("evaluations")
    assert "Nothing to be done" in said
    assert {path: path.stat().st_ino for path in pipeline.results.rglob("*.json")} == before
