"""A small finished pipeline, and a training that was stopped, made once."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "unit" / name) for name in ("train", "launch")]

from make_results import make  # noqa: E402
from ranks import Ranks, run  # noqa: E402
from tiny_runs import job_maker, noise_shards  # noqa: E402

Job = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `results`, `images` and `mini.yaml`; not to be changed."""
    folder = tmp_path_factory.mktemp("pipeline")
    made = {"function": make, "folder": folder}
    assert Ranks(1, [made], folder.with_name("log")).finish(500) == ["done"]
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
