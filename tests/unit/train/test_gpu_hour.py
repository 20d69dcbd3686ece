"""The hour on a GPU, rehearsed on a CPU: what is reported, killed, resumed and carried along."""

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch

GPU = Path(__file__).parents[2] / "gpu"
sys.path[:0] = [str(GPU), str(GPU.parent / "benchmarks")]


def options(out, **others):
    found = {"minutes": 45, "call": 9, "packages": None, "images": None, "size": None}
    found |= {"epochs": 1, "device": "cpu", "small": True, "speed": None, "training": None}
    return Namespace(out=out, **found | others)


@pytest.fixture
def hour(monkeypatch):
    """The script, whose steps take no time: each says what it was."""
    import hour

    def quick(self, step, options, seconds):
        self.lines.append({"name": step.name})
        hour.first_day.write(self.file, self.lines)
        if step.name == options.dies_at:
            raise KeyboardInterrupt
        self.lines[-1] |= {"status": "passed", "seconds": 30.0}
        hour.first_day.write(self.file, self.lines)
        return self.lines[-1]

    monkeypatch.setattr(hour.Report, "run", quick)
    return hour


def names(out):
    return [line["name"] for line in json.loads((out / "report.json").read_text())]


def test_a_killed_call_loses_one_check(hour, tmp_path):
    given = options(tmp_path, dies_at="speed mae large 128 plain")
    wanted = [step.name for step in hour.steps(given)]
    assert len(wanted) == len(set(wanted)) and wanted[0] == "environment"
    with pytest.raises(KeyboardInterrupt):
        hour.call(given)
    before = names(tmp_path)
    assert before[-1] == "speed mae large 128 plain" and before == wanted[: len(before)]
    hour.call(given)
    # The one that was lost is not tried again: it may be what kills.
    assert names(tmp_path)[: len(wanted)] == wanted
    lines = json.loads((tmp_path / "report.json").read_text())
    assert [line["name"] for line in lines if line["status"] == "killed"] == before[-1:]


def test_a_call_and_the_hour_end_in_time(hour, tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(hour.time, "perf_counter", lambda: clock[0])
    quick = hour.Report.run

    def slow(self, step, options, seconds):
        clock[0] += 30
        assert clock[0] - begun <= 60 * options.call
        return quick(self, step, options, seconds)

    monkeypatch.setattr(hour.Report, "run", slow)
    given, calls = options(tmp_path, dies_at="", minutes=12, call=4), 0
    status = hour.MORE
    while status == hour.MORE:
        begun, calls = clock[0], calls + 1
        status = hour.call(given)
    assert status == 0 and 3 <= calls <= 5
    assert clock[0] <= 12 * 60 and len(names(tmp_path)) < len(list(hour.steps(given)))


def test_attention_with_one_gradient_stacks_nothing():
    """What an hour times beside flash: by shapes alone, since no CPU has the kernel."""
    from fake_gpu import Counting, flash_attention
    from torch._subclasses.fake_tensor import FakeTensorMode

    from maect.models.attention import packed_attention

    kernels, moved = {}, {}
    for name, way in (("flash", flash_attention), ("packed", packed_attention)):
        with FakeTensorMode(), Counting() as counting:
            qkv = torch.empty(64, 197, 3, 16, 64, dtype=torch.bfloat16).requires_grad_()
            weights = torch.empty(64, 197, 16, 64, dtype=torch.bfloat16)
            way(qkv).backward(weights)
            assert qkv.grad.shape == qkv.shape and qkv.grad.is_contiguous()
            kernels[name], moved[name] = counting.kernels, sum(w.bytes for w in counting.work)
    assert kernels["flash"]["aten.stack.default"] == 1
    assert "aten.stack.default" not in kernels["packed"]
    assert moved["packed"] < 0.8 * moved["flash"]  # 0.31 of 0.47 GB


def test_what_a_check_started_ends_with_it(tmp_path):
    """Ranks of a check that is too slow would compute beside the next one."""
    import first_day

    child = tmp_path / "child"
    code = (
        "import pathlib, subprocess, sys, time\n"
        "job = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(child)!r}).write_text(str(job.pid))\n"
        "time.sleep(600)"
    )
    line = first_day.result([sys.executable, "-c", code], tmp_path, dict(os.environ), 10)
    assert line["status"] == "too slow" and 10 <= line["seconds"] < 60
    pid = int(child.read_text())
    for _ in range(100):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError(f"{pid} still runs")


def test_packages_have_the_versions_of_the_lock_file():
    from packages import LOCK, NAMES, pinned

    assert "deepspeed==0.19.8" in pinned(LOCK.read_text())
    assert len(pinned(LOCK.read_text())) == len(NAMES)


@pytest.mark.slow
def test_a_minute_on_a_cpu_and_then_the_rest(tmp_path):
    """Real checks under a limit that kills; the next call begins behind what was lost."""
    words = [sys.executable, "-u", str(GPU / "hour.py"), "--out", str(tmp_path), "--device", "cpu"]
    words += ["--small", "--minutes", "3", "--epochs", "2"]
    killed = subprocess.run(["timeout", "60", *words], capture_output=True, text=True)
    assert killed.returncode == 124
    before = json.loads((tmp_path / "report.json").read_text())
    done = [line for line in before if "status" in line]
    assert before and all(line["status"] in ("passed", "missed") for line in done), before
    files = [file for file in tmp_path.iterdir() if file.is_file()]
    assert {file.name for file in files} <= {"report.json", "report.new", "log.txt"}
    again = subprocess.run(words, capture_output=True, text=True, timeout=900)
    assert again.returncode in (0, 3), again.stdout + again.stderr
    after = json.loads((tmp_path / "report.json").read_text())
    assert len(after) > len(before) and after[: len(done)] == done


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif("MAECT_BARE_PYTHON" not in os.environ, reason="MAECT_BARE_PYTHON names none")
def test_on_a_bare_machine(tmp_path):
    """A Python that has PyTorch and timm, and nothing of ours: packages are carried."""
    from packages import MOST, collect

    python = os.environ["MAECT_BARE_PYTHON"]
    version = "import sys; print('%d.%d' % sys.version_info[:2])"
    found = subprocess.run([python, "-c", version], capture_output=True, text=True, check=True)
    assert collect(tmp_path / "packages", found.stdout.strip()) < MOST
    words = [python, "-u", str(GPU / "first_day.py"), "--out", str(tmp_path / "out"), "--small"]
    words += [
        "--device",
        "cpu",
        "--packages",
        str(tmp_path / "packages"),
        "--only",
        "0,1,2,9,15",
        "--seconds",
        "3000",
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    lines = json.loads((tmp_path / "out" / "report.json").read_text())
    assert done.returncode == 0, lines
