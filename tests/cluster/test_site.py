"""`maect doctor` on the test cluster: a job on two nodes, and faults with their hints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from slurm_cluster import ACCOUNT, Cluster

pytestmark = pytest.mark.cluster
JUWELS = Path(__file__).parents[2] / "cluster_profiles/juwels"


def doctor(
    cluster: Cluster, folder: Path, profile: Path, *options: str, account: str = ACCOUNT
) -> tuple[int, list[str]]:
    words = [sys.executable, "-m", "maect", "doctor", "--experiment", "digits", *options]
    env = {**os.environ, "SLURM_CONF": str(cluster.conf), "MAECT_ACCOUNT": account}
    env |= {"XDG_CACHE_HOME": str(folder / "cache"), "MAECT_SQUEUE_SECONDS": "1"}
    done = subprocess.run(
        [*words, "--profile", str(profile)],
        cwd=folder, env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return done.returncode, [*done.stdout.splitlines(), done.stderr.strip()]


def with_changes(folder: Path, **changes: object) -> Path:
    """The profile of JUWELS with other resources for pre-training."""
    profile = yaml.safe_load((JUWELS / "config.yaml").read_text())
    jobs = profile["__variables__"]["jobs"]
    jobs["training"]["setup"] = str(JUWELS.parents[1] / jobs["training"]["setup"])
    jobs["pretrain"] = changes
    (folder / "config.yaml").write_text(yaml.safe_dump(profile, sort_keys=False))
    return folder


def test_two_nodes_reach_each_other(cluster, tmp_path):
    # The GPUs of the test cluster are files: a run that asks for none has no fault.
    profile = with_changes(tmp_path, devices=1, slurm_extra="--gres=none")
    code, lines = doctor(cluster, tmp_path, profile)
    text = "\n".join(lines)
    assert code == 0, text
    assert "ok   job on 2 nodes, 2 ranks: python 3." in text
    assert "ok   gloo all-reduce over 2 ranks" in text
    assert "ok   DeepSpeed trains a step over 2 ranks" in text
    assert "ok   every rank sees the files of all others" in text
    assert "note no GPU: ranks run on the CPU" in text
    assert "note too much: 16 x 4 devices in booster" in text  # it has three nodes
    assert not list(tmp_path.glob("results/digits/.doctor*"))


def test_requests_that_slurm_refuses(cluster, tmp_path):
    """Each of them before a job is queued, with a hint."""
    profile = with_changes(tmp_path, slurm_partition="nosuch")
    code, lines = doctor(cluster, tmp_path, profile, account="notmine")
    refused = next(i for i, line in enumerate(lines) if line.startswith("FAIL"))
    assert code == 2 and "devices in nosuch" in lines[refused]
    assert "invalid partition" in lines[refused].lower()
    assert lines[refused + 1].startswith("     hint: correct partition")
    assert any("Invalid account" in line for line in lines)
    assert "checks failed" in lines[-1] and not any("ranks" in line for line in lines)
