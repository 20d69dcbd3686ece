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
from lookups import noted, repeated
from ranks import run, train
from tiny_runs import losses

GOLDEN = Path(__file__).with_name("golden.json")
# What the lookups behind them took, [step][view][sample]. Of two candidates that are about equally
# near, another processor would take the other one, and all later losses would be others.
LOOKUPS = Path(__file__).with_name("golden_lookups.json")
PACKAGES = ("torch", "deepspeed", "timm", "numpy", "pillow")
# Other versions and processors sum in another order, as other numbers of ranks do: two ranks
# differ by 2e-5 at most. Fifty times that leaves room, and is far below any change of method.
TOLERANCE = 2e-3


def machine():
    """What the bits depend on beside the source."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")
    return {
        "versions": {name: version(name) for name in PACKAGES},
        "processor": [platform.machine(), model, torch.backends.cpu.get_cpu_capability()],
    }


def curves(job, folder, lookups=None):
    """Losses of the three stages on one rank in fp32, 50 steps each; and what lookups took.

    Args:
        job: the fixture.
        folder: of the runs.
        lookups: of each stage, to be repeated.
    """
    jobs = {
        "mae": job("mae", "mae", folder=folder, epochs=20),
        "head": job("head", "head_aug", "mae", folder=folder, epochs=20),
        "ct": job("ct", "ct_aug", "head", folder=folder, epochs=20),
    }
    for name, value in jobs.items():
        how = {"chosen": lookups[name]} if lookups else {}
        value |= {"function": repeated if lookups else noted, "of": train, **how}
    found = run(1, *jobs.values(), log=folder.with_suffix(".log"))
    assert [verdict for verdict, _ in found] == ["done"] * 3, found
    taken = {name: chosen for name, (_, chosen) in zip(jobs, found, strict=True)}
    return {name: losses(folder / name) for name in jobs}, taken


def test_losses_are_the_committed_ones(job, tmp_path):
    if os.environ.get("MAECT_WRITE_GOLDEN"):
        found, taken = curves(job, tmp_path / "golden")
        GOLDEN.write_text(json.dumps({"machine": machine(), "losses": found}, indent=1) + "\n")
        LOOKUPS.write_text(json.dumps(taken) + "\n")
        pytest.skip("written anew")
    golden, lookups = json.loads(GOLDEN.read_text()), json.loads(LOOKUPS.read_text())
    assert [len(lookups[name]) for name in ("head", "ct")] == [50, 50]
    here = machine() == golden["machine"]
    found, taken = curves(job, tmp_path / "golden", None if here else lookups)
    assert taken == lookups
    for name, expected in golden["losses"].items():
        assert len(expected) == 50
        if here:
            assert found[name] == expected, name
        else:
            difference = np.abs(np.array(found[name]) / expected - 1)
            assert difference.max() <= TOLERANCE, (name, difference)
