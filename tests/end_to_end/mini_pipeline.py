"""A pipeline small enough for a test, and helpers to run and to kill it."""

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
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
        "mae_tiny": {"recipe": "mae"},
        "head_min_tiny": {"recipe": "head_min", "from": "mae_tiny"},
        "ct_min_tiny": {"recipe": "ct_min", "from": "head_min_tiny"},
    },
    "evaluate": [{"runs": ["ct_min_tiny"], "protocols": ["knn"]}],
}
for told in MINI["runs"].values():
    told |= {"size": "tiny", "set": {"epochs": 1}}

# One rank a training: each more is five seconds of a core, and others test several.
ONE_RANK = (("devices: auto", "devices: 1"),)


@dataclass
class Pipeline:
    """One experiment in a folder of its own, with changes of the text of its profile."""

    folder: Path
    experiment: dict[str, Any]
    changes: Sequence[tuple[str, str]] = ONE_RANK
    profile: Path = ROOT / "cluster_profiles/local"

    @property
    def results(self) -> Path:
        return self.folder / "results"

    def command(self, *targets: str) -> list[str]:
        self.folder.mkdir(parents=True, exist_ok=True)
        file, profile = self.folder / "mini.yaml", self.profile
        text = yaml.safe_dump(self.experiment | {"storage": str(self.results)}, sort_keys=False)
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
        if self.changes:
            text = (profile / "config.yaml").read_text()
            for before, after in self.changes:
                assert before in text
                text = text.replace(before, after)
            profile = self.folder / "profile"
            profile.mkdir(exist_ok=True)
            (profile / "config.yaml").write_text(text)
        return [
            *(sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile")),
            *("--profile", str(profile), "--directory", str(self.folder)),
            *targets,
            *("--config", f"experiment={file}"),
        ]

    def start(self, *targets: str) -> "subprocess.Popen[str]":
        words = self.command(*targets)
        with open(self.folder / "snakemake.log", "a") as log:
            return subprocess.Popen(
                words, stdout=log, stderr=log, text=True, cwd=ROOT, start_new_session=True
            )

    def complete(self, *targets: str, timeout: float = 550) -> str:
        done = subprocess.run(
            self.command(*targets), capture_output=True, text=True, cwd=ROOT, timeout=timeout
        )
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
            with suppress(psutil.Error):
                process.kill()
