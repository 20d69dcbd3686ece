"""A small finished pipeline, made once."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `results`, `images` and `mini.yaml`; not to be changed."""
    folder = tmp_path_factory.mktemp("pipeline")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, HERE / "make_results.py", folder], env=environment, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture
def pipeline(pristine: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed; its resolved files name folders relative to themselves."""
    shutil.copytree(pristine, tmp_path / "pipeline", symlinks=True)
    return tmp_path / "pipeline"
