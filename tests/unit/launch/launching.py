"""A run folder with its launchers, for tests that kill them."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from maect.core.files import write_record
from maect.launch.record import (
    Job,
    make_job_folder,
    progress,
    rank_0,
    read_job,
    saved_step,
    verdict,
    write_job,
)

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
MAECT_RUN = """
import subprocess, sys
from maect.tools import commands
start = subprocess.Popen
commands.subprocess.Popen = lambda words, **_: start(sys.argv[1:])
sys.exit(commands.snakemake("digits", "local", ()))
"""
"""`maect run` with a command in place of Snakemake: `python -c MAECT_RUN COMMAND`."""


def wait_for(
    condition: Callable[[], object], seconds: float = 90.0, what: str = "", pause: float = 0.02
) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain {what}"
        time.sleep(pause)


class Run:
    """A run folder, its launchers and the processes that belong to it."""

    def __init__(self, folder: Path, **resources: object) -> None:
        self.folder = folder
        self.resources = {"devices": 1, "cpus_per_task": 1, **resources}
        self.launchers: list[subprocess.Popen[str]] = []
        self.gates = folder.with_name(f"{folder.name}-gates")

    def hold(self, step: int) -> Path:
        """Let counts wait behind a step until the file is gone, or until they are asked to stop."""
        self.gates.mkdir(exist_ok=True)
        gate = self.gates / f"{step}.closed"
        gate.touch()
        return gate

    def command(self, arguments: dict, resources: dict, *words: str) -> list[str]:
        start = [sys.executable, str(HERE / "start.py"), str(self.folder)]
        return [*start, json.dumps(arguments), json.dumps(resources), *words]

    def start(self, *words: str, **arguments: object) -> subprocess.Popen[str]:
        """Start a launcher; its words go to a pipe."""
        if "function" not in arguments:
            arguments = {"steps": 40, "gates": str(self.gates), **arguments}
        process = subprocess.Popen(
            self.command(arguments, self.resources, *words),
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment(),
        )
        self.launchers.append(process)
        return process

    def start_held(self, step: int, **arguments: object) -> tuple[subprocess.Popen[str], Path]:
        """Start a launcher whose job is held at a step; return it with the file that holds it."""
        gate = self.hold(step)
        launcher = self.start(**arguments)
        self.reaches(step)
        return launcher, gate

    def pipeline(self, folder: Path, **arguments: object) -> "subprocess.Popen[bytes]":
        """Start Snakemake with one rule that starts a launcher: its words go to `folder`/log."""
        arguments = {"steps": 40, "gates": str(self.gates), **arguments}
        words = self.command(arguments, self.resources)
        command = " ".join(f"'{word}'" for word in words).replace("{", "{{").replace("}", "}}")
        command += (
            f' 2>> "{folder}/log" && touch out || {{{{ echo $? > "{folder}/status"; exit 1; }}}}'
        )
        # As the pipeline's rules do: launchers leave once this process is gone.
        rule = "import os\nfrom maect.launch.owner import SNAKEMAKE, this_process\n"
        rule += "os.environ.setdefault(SNAKEMAKE, this_process())\n"
        rule += f'rule count:\n    output: "out"\n    shell: """{command}"""\n'
        (folder / "Snakefile").write_text(rule)
        options = ["--cores", "1", "--quiet", "all", "--nolock", "--rerun-incomplete"]
        return subprocess.Popen(
            [sys.executable, "-m", "snakemake", *options, "--directory", str(folder)],
            cwd=folder,
            env=self.environment(),
        )

    def environment(self) -> dict[str, str]:
        paths = os.pathsep.join([str(HERE), str(ROOT)])
        # Beside the run's folder, to see what is left there.
        return {**os.environ, "PYTHONPATH": paths, "TMPDIR": str(self.folder.parent)}

    def rendezvous_folders(self) -> list[Path]:
        """Folders in which the ranks of one node meet."""
        return list(self.folder.parent.glob("maect-*"))

    def read(self, name: str) -> dict:
        try:
            return json.loads((self.folder / name).read_text())
        except (FileNotFoundError, ValueError):
            return {}

    def job(self) -> Job:
        """The job on record."""
        job = read_job(self.folder)
        assert job is not None
        return job

    def change_job(self, **values: object) -> None:
        """What a launcher might have written."""
        write_job(self.folder, replace(self.job(), **values))

    def state(self) -> str:
        """Of the job on record."""
        return self.read("job.json").get("state", "")

    def returned(self) -> str | None:
        """How the function of the job on record returned."""
        return verdict(self.folder, self.job())

    def saved(self) -> int:
        """The last step that the job on record has saved."""
        return saved_step(self.folder, self.job())

    def returns(self, how: str) -> None:
        """Say for rank 0 that the function has returned."""
        folder = make_job_folder(self.folder, self.job().name)
        write_record(folder / "rank-0.json", {"rank": 0, "end": how})

    def rendezvous(self) -> dict[str, Any]:
        """Where rank 0 says that the ranks meet."""
        meeting = rank_0(self.folder, self.job()).meeting
        assert meeting is not None
        return meeting

    def progress(self) -> dict:
        """The last report."""
        return progress(self.folder, read_job(self.folder))

    def step(self) -> int:
        """The last step that was reported."""
        return int(self.progress().get("step", 0))

    def reaches(self, step: int) -> None:
        wait_for(lambda: self.step() >= step, what=f"for step {step} of {self.folder}")

    def starts(self, rank: int = 0) -> list[dict]:
        """What each start of the function on one rank saw."""
        file = self.folder / f"started-{rank}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def processes(self) -> list[psutil.Process]:
        """Live processes of this folder's jobs: what a launcher might have left behind."""
        processes = []
        mark = f"MAECT_JOB=maect-{self.folder.name}-".encode()
        for process in psutil.process_iter():
            try:
                if mark in Path(f"/proc/{process.pid}/environ").read_bytes():
                    processes.append(process)
            except OSError:
                continue
        return processes

    def end(self) -> None:
        """Kill whatever is left."""
        for process in self.launchers:
            if process.poll() is None:
                self.kill(process)
            process.stderr.close()
        kill(self.processes())

    def kill(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait(30)


def kill(processes: list[psutil.Process]) -> None:
    """SIGKILL, and wait until they are gone."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _, left = psutil.wait_procs(processes, timeout=10)
    assert not left, f"not to be killed: {left}"


def finish(process: subprocess.Popen[str], seconds: float = 120) -> str:
    """Wait for a launcher and return its words."""
    try:
        return process.communicate(timeout=seconds)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        words = process.communicate(timeout=30)[1]
        raise AssertionError(
            f"the launcher did not end in {seconds} s; it said:\n{words}"
        ) from None
