"""benchmarks/gpu.py, as far as a CPU can run it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu.py"
sys.path.insert(0, str(SCRIPT.parent))
import gpu_packages  # noqa: E402


def test_what_is_carried_has_the_versions_of_the_lock_file():
    pinned = gpu_packages.pinned(gpu_packages.LOCK.read_text())
    assert [line.partition("==")[0] for line in pinned] == [*gpu_packages.NAMES]
    assert all(line.partition("==")[2] for line in pinned)


@pytest.mark.slow
def test_rehearsal_of_all_parts(tmp_path):
    words = [sys.executable, "-P", str(SCRIPT), "--small", "--device", "cpu"]
    words += ["--out", str(tmp_path), "--work", str(tmp_path / "work")]
    for more in ([], ["--only", "control,longer,huge"]):
        done = subprocess.run([*words, *more], capture_output=True, text=True, timeout=540)
        assert done.returncode == 0, done.stdout + done.stderr
    lines = json.loads((tmp_path / "report.json").read_text())
    assert not [line for line in lines if "error" in line]
    by_name = {line["name"]: line for line in lines}
    assert set(by_name["restarts"]["largest_difference"].values()) == {0.0}
    assert {"loader", "cifar10: ct_min", "cifar10: ct_aug_no_lookup"} <= by_name.keys()
