"""Parts of the launcher that need no job: settings, progress line, environment."""

import json
import os
import shlex
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from maect.core.context import Context
from maect.core.errors import UserError
from maect.launch import LaunchError, Resources, Task, launch, progress
from maect.launch.record import Job, unique_name, write_job
from maect.launch.slurm import script
from maect.launch.worker import Rank

SLURM = {"cluster": "slurm", "cpus_per_task": 8}


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"cluster": "pbs"}, "'pbs' is unknown"),
        ({"devices": 0}, "--devices 0"),
        ({"runtime": 1.5}, "--runtime 1.5"),
        ({"mem_mb": -1}, "--mem-mb -1"),
        ({"nodes": 2}, "--nodes 2 needs --cluster slurm"),
        ({"setup": "envs/juwels.sh"}, "--setup envs/juwels.sh"),
        ({"slurm_account": "$A"}, r"--slurm-account \$A: this variable is not set"),
        ({"cluster": "slurm", "devices": "4"}, "--cpus-per-task auto is for this machine"),
        (SLURM | {"devices": "auto"}, "--devices auto is for"),
        (SLURM | {"nodes": "1..2"}, "a range is for trainings"),
        ({"cpus_per_task": "many"}, "--cpus-per-task many: must be a positive number"),
        ({"memory": 5}, "unknown 'memory'"),
    ],
)
def test_wrong_resources_are_refused(wrong, words):
    with pytest.raises(UserError, match=words):
        Resources.of(wrong).resolved()


def test_resources_in_numbers(monkeypatch):
    """Also by the names of version 0.2.0."""
    words = Resources.of({
        "cluster": "slurm", "nodes": "1..16", "devices": "4", "cpus": "8", "memory_mb": 2049,
        "minutes": "60", "partition": "gpu", "account": "me", "sbatch": "--qos=normal --exclusive",
        "setup": "envs/slurm.sh",
    })  # fmt: skip
    wanted = words.resolved(2)
    assert wanted == Resources(
        cluster="slurm", nodes=2, devices=4, cpus_per_task=8, mem_mb=2049, runtime=60,
        slurm_partition="gpu", slurm_account="me", slurm_extra="--qos=normal --exclusive",
        setup=os.path.abspath("envs/slurm.sh"),
    )  # fmt: skip
    assert wanted.ranks == 8
    assert wanted.options == {
        "requeue": True, "qos": "normal", "exclusive": True, "gres": "gpu:4"
    }  # fmt: skip
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)))
    assert Resources(devices=3).resolved().cpus_per_task == 2
    # Time to save is a tenth of the limit, 20 to 300 seconds.
    limits = [Resources(runtime=minutes).warning_seconds for minutes in (1, 5, 60)]
    assert limits == [20, 30, 300]


def test_progress_line():
    report = {"epoch": 3, "epochs": 100, "step": 120, "steps": 4000, "loss": 0.51234}
    report |= {"images_per_second": 812.4, "other": [1], "first_step": 20, "seconds": 50.0}
    line = progress.describe(report)
    assert line == "epoch 3/100  step 120/4000  loss 0.5123  812 images/s  32 minutes left"
    line = progress.describe({"loss": 1.0, "knn": 61.52, "images_per_second": 7.0})
    assert line == "loss 1.0000  online k-NN 61.5 %  7 images/s"
    assert progress.describe({"knn": None}) == ""
    # A resumed attempt's speed is that of its own steps; before the second step it is unknown.
    assert progress.seconds_left({"step": 20, "first_step": 20, "steps": 40, "seconds": 0}) is None
    assert progress.describe({"other": 1, "loss": None}) == ""


def test_progress_is_logged_now_and_then(caplog, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    caplog.set_level("INFO", "maect")
    line = progress.ProgressLine("train")
    times = []
    for second in range(900):
        now = 1000.0 + second
        if line.is_due():
            line.show(f"step {second}")
            line.show(f"step {second}")  # says nothing new
            times.append(second)
    assert caplog.messages == [f"train: step {second}" for second in times]
    assert times[:3] == [0, 10, 20] and times[-2:] == [830, 890]


def test_what_is_asked_of_slurm(tmp_path, commands, monkeypatch):
    resources = Resources(
        cluster="slurm", nodes=2, devices=4, cpus_per_task=12, mem_mb=494000, runtime=120,
        slurm_partition="booster", slurm_account="me", slurm_extra="--reservation=r --exclusive",
        setup="envs/a b.sh",
    )  # fmt: skip
    name = unique_name(tmp_path / "mae")
    folder = tmp_path / "a b"
    monkeypatch.setenv("SUBMITIT_PREEMPT_SIGNAL", "USR1")
    text = script(folder, name, resources)
    for line in ("nodes=2", "ntasks-per-node=4", "cpus-per-task=12", "time=120", "requeue",
                 "gres=gpu:4", "partition=booster", "account=me", "reservation=r", "exclusive",
                 "signal=USR2@300", f"job-name={name}", "open-mode=append",
                 "mem=494000MB"):  # fmt: skip
        assert f"#SBATCH --{line}\n" in text, line
    log = shlex.quote(f"{folder}/jobs/{name}/%j_%t_log.out")
    start = (
        f"srun --unbuffered --output {log} --kill-on-bad-exit=1 --export=ALL {sys.executable} -P -u"
    )
    assert f"\n{start} -m maect.launch.worker '{folder}' {name}\n" in text
    assert "--error" not in text
    assert "export SRUN_CPUS_PER_TASK=12\n" in text and "wckey" not in text
    assert "export PYTHONSAFEPATH=1\n" in text  # a site may start jobs without our environment
    assert "source 'envs/a b.sh' || exit 1\n" in text
    cpu = script(folder, name, Resources.of(SLURM | {"slurm_extra": "--gres=none"}))
    assert "#SBATCH --gres=none\n" in cpu


def test_slurm_without_slurm_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r'not accepted: .*"srun"'):
        launch(Task("counting:count"), tmp_path / "run", Resources(**SLURM),
               is_done=lambda: False, describe="count")  # fmt: skip
    assert json.loads((tmp_path / "run" / "job.json").read_text())["state"] == "ended"


def test_a_launched_rank_answers_everything_itself():
    methods = {name for name, value in vars(Context).items() if callable(value)}
    assert {"saved", "fail"} < methods <= vars(Rank).keys()


def test_a_job_that_was_given_up_or_replaced_is_no_longer_current(tmp_path):
    """It writes no state any more; a record that cannot be read says nothing of it."""
    job = Job("local", "maect-x-1", 1)
    rank: Any = SimpleNamespace(folder=tmp_path, name=job.name)
    for now in (job, replace(job, state="ended"), replace(job, name="maect-x-2")):
        write_job(tmp_path, now)
        assert Rank.is_current(rank) is (now is job)
    (tmp_path / "job.json").write_text("{")
    assert Rank.is_current(rank)
    (tmp_path / "job.json").unlink()
    assert not Rank.is_current(rank)
