import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    # The folder's name is part of the mark in the processes' environment: one name per test.
    run = Run(tmp_path / f"run{os.getpid()}-{time.monotonic_ns()}")
    yield run
    run.end()
