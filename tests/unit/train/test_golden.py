"""The first 50 losses of each stage, so that no refactoring changes the science unnoticed.

After an intended change, write the file anew: `MAECT_WRITE_GOLDEN=1 pytest` with this file.
"""

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run
from tiny_runs import losses

GOLDEN = Path(__file__).with_name("golden.json")
PACKAGES = ("torch", "deepspeed", "timm", "numpy", "pillow")
# Other versions and processors sum in another order, as other numbers of ranks do: two ranks
# differ by 2e-5 at most. Fifty times that leaves room, and is far below any change of method.
TOLERANCE = 2e-3
# A lookup whose best neighbours are nearly equally near takes another one there, and all later
# losses are others: then at least half of them are as close, and none is farther than this.
LARGEST = 1e-1


def machine():
    """What the bits depend on beside the source."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")
    return {
        "versions": {name: version(name) for name in PACKAGES},
        "processor": [platform.machine(), model, torch.backends.cpu.get_cpu_capability()],
    }


def curves(job, folder):
    """Losses of the three stages on one rank in fp32, 50 steps each."""
    jobs = [
        job("mae", "mae", folder=folder, epochs=20),
        job("head", "head_aug", "mae", folder=folder, epochs=20),
        job("ct", "ct_aug", "head", folder=folder, epochs=20),
    ]
    assert run(1, *jobs, log=folder.with_suffix(".log")) == ["done"] * 3
    return {name: losses(folder / name) for name in ("mae", "head", "ct")}


def test_losses_are_the_committed_ones(job, tmp_path):
    found = curves(job, tmp_path / "golden")
    if os.environ.get("MAECT_WRITE_GOLDEN"):
        GOLDEN.write_text(json.dumps({"machine": machine(), "losses": found}, indent=1) + "\n")
        pytest.skip("written anew")
    golden = json.loads(GOLDEN.read_text())
    for name, expected in golden["losses"].items():
        assert len(expected) == 50
        if machine() == golden["machine"]:
            assert found[name] == expected, name
        else:
            difference = np.abs(np.array(found[name]) / expected - 1)
            share = 1 if name == "mae" else 0.5
            assert np.quantile(difference, share) <= TOLERANCE, (name, difference)
            assert difference.max() < LARGEST, (name, difference)


def test_the_curve_notices_a_change_of_the_method(job, tmp_path):
    golden = json.loads(GOLDEN.read_text())["losses"]["mae"]
    changed = job("mae", "mae", epochs=20, mask_ratio=0.6875)
    assert run(1, changed, log=tmp_path / "log") == ["done"]
    difference = np.abs(np.array(losses(changed["folder"])) / golden - 1)
    assert difference.max() > 2 * TOLERANCE
