"""The script for the first day on a GPU, as far as a CPU can run it."""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from ranks import run

GPU = Path(__file__).parents[2] / "gpu"
HERE = (0, 2, 3, 4, 5, 7, 9, 10, 12, 13, 14, 16, 17)


def checks(context, out):
    """Lines of the checks that need no other process."""
    sys.path.insert(0, str(GPU))
    import first_day

    options = Namespace(device="cpu", small=True, out=Path(out), built=None)
    return [first_day.check(number, options) for number in HERE]


@pytest.mark.slow  # as the hour on a bare machine
def test_checks_on_a_cpu(tmp_path):
    lines = run(1, {"function": checks, "out": str(tmp_path)}, log=tmp_path / "log")[0]
    for line in lines:
        assert line["status"] in ("passed", "missed"), line.get("error", line)
    # What is not a matter of speed.
    by_name = {line["name"]: line for line in lines}
    for name in (
        "environment",
        "numerics",
        "attention",
        "augmentation",
        "audit",
        "resume",
        "leak",
        "same_bits",
        "beside",
    ):
        assert by_name[name]["status"] == "passed", by_name[name]
    assert by_name["resume"]["values"]["tiny"] == {"twice": 0.0, "resumed": 0.0}


def command(out, *numbers):
    words = [sys.executable, str(GPU / "first_day.py"), "--out", str(out), "--device", "cpu"]
    return [*words, "--small", "--only", ",".join(map(str, numbers))]


def test_the_script_says_what_needs_a_gpu(tmp_path):
    done = subprocess.run(command(tmp_path, 6), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    line = json.loads(done.stdout.splitlines()[0])
    assert (line["name"], line["status"]) == ("memory", "needs a GPU")
    assert json.loads((tmp_path / "report.json").read_text()) == [line]
    assert " 6 memory" in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_checks_in_processes_of_their_own(tmp_path):
    done = subprocess.run(command(tmp_path, 1, 8, 15), capture_output=True, text=True)
    lines = json.loads((tmp_path / "report.json").read_text())
    assert done.returncode == 0, lines
    assert [line["status"] for line in lines] == ["passed"] * 3 or lines[1]["status"] == "missed"
