"""A pipeline small enough for a test, and helpers to run and to kill it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).parents[2]

MINI: dict[str, Any] = {
    "datasets": {
        "digits": {"kind": "digits", "resize": 16, "splits": {"train": {"shards": 2}, "val": {}}}
    },
    "runs": {
        "mae_tiny": {"recipe": "mae", "size": "tiny", "set": {"epochs": 1}},
        "head_min_tiny": {
            "recipe": "head_min",
            "size": "tiny",
            "from": "mae_tiny",
            "set": {"epochs": 1},
        },
        "ct_min_tiny": {
            "recipe": "ct_min",
            "size": "tiny",
            "from": "head_min_tiny",
            "set": {"epochs": 1},
        },
    },
    "evaluate": [{"runs": ["ct_min_tiny"], "protocols": ["knn"]}],
}


# One rank a training: each more is five seconds of a core, and others test several.
ONE_RANK = (("devices: auto", "devices: 1"),)


@dataclass
class Pipeline:
    """One experiment in a folder of its own, with changes of the local profile's text."""

    folder: Path
    experiment: dict[str, Any]
    changes: Sequence[tuple[str, str]] = ONE_RANK

    @property
    def results(self) -> Path:
        return self.folder / "results"

    def command(self, *targets: str) -> list[str]:
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "mini.yaml"
        text = yaml.safe_dump(self.experiment | {"storage": str(self.results)}, sort_keys=False)
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
        profile = self.folder / "profile/config.yaml"
        profile.parent.mkdir(exist_ok=True)
        local = (ROOT / "cluster_profiles/local/config.yaml").read_text()
        for before, after in self.changes:
            assert before in local
            local = local.replace(before, after)
        profile.write_text(local)
        return [
            *(sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile")),
            *("--profile", str(profile.parent), "--directory", str(self.folder)),
            *targets,
            *("--config", f"experiment={file}"),
        ]

    def start(self, *targets: str) -> "subprocess.Popen[str]":
        log = open(self.folder / "snakemake.log", "a")  # noqa: SIM115
        return subprocess.Popen(
            self.command(*targets), stdout=log, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip

    def run(self, *targets: str, timeout: float = 550) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self.command(*targets), capture_output=True, text=True, cwd=ROOT, timeout=timeout,
            check=False,
        )  # fmt: skip

    def complete(self, *targets: str) -> str:
        done = self.run(*targets)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        return done.stdout + done.stderr

    def processes(self) -> list[psutil.Process]:
        """Every live process that names this folder, in its arguments or where it stands."""
        found = []
        for process in psutil.process_iter():
            try:
                words = " ".join(process.cmdline()) + " " + process.cwd()
                zombie = process.status() == psutil.STATUS_ZOMBIE
            except psutil.Error:
                continue
            if str(self.folder) in words and not zombie and process.pid != os.getpid():
                found.append(process)
        return found

    def kill_everything(self) -> None:
        for process in self.processes():
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.Error:
                continue


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Poll until `condition` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.05)
