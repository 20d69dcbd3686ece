"""benchmarks/gpu.py, as far as a CPU can run it."""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu.py"
sys.path.insert(0, str(SCRIPT.parent))
import gpu  # noqa: E402
import gpu_packages  # noqa: E402

ENDLESS = """
import json, time
print(json.dumps({"name": "first"}), flush=True)
print("not a line of the report", flush=True)
time.sleep(600)
"""


@pytest.fixture
def options(tmp_path):
    return Namespace(
        out=tmp_path, work=tmp_path, part=1, small=True, images=None, device="cpu", environment=None
    )


def test_a_part_is_ended_at_its_deadline_and_what_it_said_is_kept(options, monkeypatch):
    script = options.out / "endless.py"
    script.write_text(ENDLESS)
    monkeypatch.setattr(gpu, "__file__", str(script))
    file = options.out / "report.json"
    gpu.run("endless", 5, options, gpu.Report(file))
    first, last = json.loads(file.read_text())
    assert first["name"] == "first"
    assert last["error"] == "ended after 5 s"
    assert "not a line of the report" in (options.out / "log.txt").read_text()


def test_a_second_part_adds_to_the_report_of_the_first(tmp_path):
    file = tmp_path / "report.json"
    gpu.Report(file).add("fast", {"name": "one"})
    gpu.Report(file).add("huge", {"name": "two"})
    assert [line["name"] for line in json.loads(file.read_text())] == ["one", "two"]


def test_numbers_are_short_and_json_knows_them():
    given = {"a": [1.23456789, float("nan")], "b": {"c": float("inf")}, "d": 3}
    assert gpu.rounded(given) == {"a": [1.235, "nan"], "b": {"c": "inf"}, "d": 3}


def test_what_is_carried_has_the_versions_of_the_lock_file():
    pinned = gpu_packages.pinned(gpu_packages.LOCK.read_text())
    assert [line.partition("==")[0] for line in pinned] == [*gpu_packages.NAMES]
    assert all(line.partition("==")[2] for line in pinned)


@pytest.mark.slow
def test_rehearsal_of_both_parts(tmp_path):
    words = [sys.executable, "-P", str(SCRIPT), "--small", "--device", "cpu"]
    words += ["--out", str(tmp_path), "--work", str(tmp_path / "work")]
    for part in ("1", "2"):
        done = subprocess.run([*words, "--part", part], capture_output=True, text=True, timeout=540)
        assert done.returncode == 0, done.stdout + done.stderr
    lines = json.loads((tmp_path / "report.json").read_text())
    assert not [line for line in lines if "error" in line]
    by_name = {line["name"]: line for line in lines}
    assert set(by_name["restarts"]["largest_difference"].values()) == {0.0}
    assert {"loader", "cifar10: ct_min", "cifar10: ct_aug_no_lookup"} <= by_name.keys()
