"""Shards of noise images, and runs on them that nothing disturbed."""

from pathlib import Path

import pytest
from ranks import run
from tiny_runs import job_maker, noise_shards


@pytest.fixture(scope="session")
def shards(tmp_path_factory) -> Path:
    return noise_shards(tmp_path_factory.mktemp("noise"), 40)


@pytest.fixture
def job(tmp_path, shards):
    return job_maker(tmp_path, shards)


@pytest.fixture(scope="session")
def whole(tmp_path_factory, shards):
    """Folder of runs of two ranks that nothing disturbed: `mae`, `head_min` and `ct_min`."""
    root = tmp_path_factory.mktemp("whole")
    job = job_maker(root, shards)
    jobs = [
        job("mae", "mae"), job("head_min", "head_min", "mae"), job("ct_min", "ct_min", "head_min"),
    ]  # fmt: skip
    assert run(2, *jobs, log=root / "log") == ["done"] * 3
    return root / "runs"
