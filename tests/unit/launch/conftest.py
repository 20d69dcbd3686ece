import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Run
from slurm_commands import Commands


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    # The folder's name is part of the mark in the processes' environment: one name per test.
    run = Run(tmp_path / f"run{os.getpid()}-{time.monotonic_ns()}")
    yield run
    run.end()


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    commands = Commands(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{commands.folder}:/usr/bin:/bin")
    monkeypatch.setenv("MAECT_SQUEUE_SECONDS", "0.3")
    return commands
