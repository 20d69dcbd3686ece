"""A small finished pipeline, and a training that was stopped, made once."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "unit" / name) for name in ("train", "launch")]

from ranks import run  # noqa: E402
from tiny_runs import job_maker, noise_shards  # noqa: E402

Job = Callable[..., dict[str, Any]]


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


@pytest.fixture(scope="session")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Job]:
    """A run of ten steps that saved and stopped at the third."""
    root = tmp_path_factory.mktemp("stopped")
    job = job_maker(root, noise_shards(root, 40))
    assert run(1, job("mae", "mae"), log=root / "log", stop_at=3) == ["requeue"]
    return root, job


@pytest.fixture
def half(stopped: tuple[Path, Job], tmp_path: Path) -> dict[str, Any]:
    """Arguments of that run, in a copy: it saved at step 3 of 10, with one thread a rank."""
    shutil.copytree(stopped[0] / "runs", tmp_path / "runs")
    return stopped[1]("mae", "mae", folder=tmp_path / "runs")
