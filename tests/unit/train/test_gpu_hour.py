"""The hour on a GPU, rehearsed on a CPU: what is reported, killed, resumed and carried along."""

import faulthandler
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from argparse import Namespace
from importlib import metadata
from pathlib import Path

import pytest
import torch

GPU = Path(__file__).parents[2] / "gpu"
sys.path[:0] = [str(GPU), str(GPU.parent / "benchmarks")]


def options(out, **others):
    found = {"minutes": 45, "call": 9, "packages": None, "images": None, "size": None}
    found |= {"device": "cpu", "small": True, "speed": None, "training": None}
    return Namespace(out=out, **found | others)


@pytest.fixture
def hour(monkeypatch):
    """The script, whose steps take no time: each says what it was."""
    import hour

    def quick(self, step, options, most, left):
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

    def slow(self, step, options, most, left):
        clock[0] += 30
        assert clock[0] - begun <= 60 * options.call
        return quick(self, step, options, most, left)

    monkeypatch.setattr(hour.Report, "run", slow)
    given, calls = options(tmp_path, dies_at="", minutes=12, call=4), 0
    status = hour.MORE
    while status == hour.MORE:
        begun, calls = clock[0], calls + 1
        status = hour.call(given)
    assert status == 0 and 3 <= calls <= 5
    assert clock[0] <= 12 * 60 and len(names(tmp_path)) < len(list(hour.steps(given)))


@pytest.mark.parametrize("rest", [1e6, 340.0, 0.0])
def test_epochs_fit_the_time_that_is_left(rest):
    import hour

    seconds, most = {"mae": 2.0, "head_min": 1.0, "ct_min": 4.0}, {}
    most |= {"mae": 400, "head_min": 20, "ct_min": 40}
    found = hour.fitted(rest, seconds, most)
    assert found == {
        1e6: most, 340.0: {"mae": 138, "head_min": 6, "ct_min": 13}, 0.0: dict.fromkeys(most, 1)
    }[rest]  # fmt: skip
    if rest:
        assert sum(seconds[name] * found[name] for name in most) <= rest


def images(folder, count):
    from PIL import Image

    for number in range(count):
        for split in ("train", "test"):
            file = folder / split / "ab"[number % 2] / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), (number, 0, 0)).save(file)
    return folder


@pytest.mark.parametrize("kind", ["drawn", "folder", "archive"])
def test_images_of_the_last_training(kind, tmp_path, monkeypatch):
    import hour

    from maect.data.index import open_index

    monkeypatch.setattr(hour, "drawn", lambda out, count: images(out, 3) / "train")
    given = None if kind == "drawn" else images(tmp_path / "mine", 3)
    if kind == "archive":
        given = tmp_path / "mine.tar.xz"
        with tarfile.open(given, "w:xz") as tar:
            for split in ("test", "train"):
                tar.add(tmp_path / "mine" / split, split)
    work = tmp_path / "work"
    work.mkdir()
    for _ in range(2):  # the second call finds them
        index = open_index(hour.write_shards(given, work, few=True))
        assert [*index.class_names] == ["a", "b"] and index.labels.tolist().count(0) == 2
        given = given and tmp_path / "gone"


def test_a_learning_curve_survives_its_training(hour, tmp_path, monkeypatch):
    """It is read by whoever comes next: from files, also from a line that is not all there."""
    from maect.core.entries import line_of

    work = tmp_path / "work"
    monkeypatch.setattr(hour, "work_folder", lambda out: work)
    assert hour.learned(work) == {}
    (work / "mae").mkdir(parents=True)
    stage = {"images_per_second": 9.0, "epochs": 4, "epochs_of_recipe": 40}
    plan = {"images": "drawn shapes", "number": 600, "encoder": "tiny8", "seconds": 7}
    plan["stages"] = {"mae": stage, "head_min": stage}
    (work / "plan.json").write_text(json.dumps(plan))
    lines = [
        line_of(step, {"epoch": step / 2, "loss": loss} | evaluated, {})
        for step, (loss, evaluated) in enumerate(
            [(3.0, {}), (2.0, {"online_knn": 40.0}), (1.0, {"online_knn": 50.0}), (9.0, {})], 1
        )
    ]
    (work / "mae" / "metrics.jsonl").write_text("".join(lines)[:-20])
    (tmp_path / "report.json").write_text(json.dumps([{"name": "training"}]))
    (line,) = hour.Report(tmp_path / "report.json").lines
    found = line["values"]["stages"]
    assert line["status"] == "killed" and found["head_min"]["curve"] == []
    assert found["mae"]["trained"] == 1.5 and found["mae"]["curve"] == [
        {"epoch": 1.0, "loss": 2.5, "knn": 40.0}, {"epoch": 1.5, "loss": 1.0, "knn": 50.0},
    ]  # fmt: skip
    said = hour.page([line])
    assert "| mae | 9 | 2 of 4, 40 | 40.0 (1), 50.0 (2) | 2.5, 1 |" in said, said


def test_what_the_end_of_the_hour_cuts_off_is_no_fault(tmp_path):
    import hour

    step = hour.Step("sleeps", 1, ("-c", "import time; time.sleep(60)"))
    for most, left, status in ((9.0, 1.0, "out of time"), (1.0, 9.0, "too slow")):
        line = hour.Report(tmp_path / "report.json").run(step, options(tmp_path), most, left)
        assert (line["status"], line["must"]) == (status, status == "too slow")


def test_the_hour_on_record():
    """Its page is made of its report, says what it is, and hides no fault."""
    import hour

    folder = GPU.parents[1] / "docs" / "results" / "gpu_hour"
    lines = report(folder)
    said = hour.page(lines)
    assert (folder / "README.md").read_text() == said
    assert said.startswith("# Checks on NVIDIA H200")
    for line in lines:
        known = line["status"] in ("passed", "missed", "goes on", "killed", "out of time")
        assert known or line["status"].startswith("needs "), line
    whole = any(line["name"] == hour.TRAINING for line in lines)
    assert whole or "The hour was cut off here" in said


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
    ends(int(child.read_text()))


def ends(pid):
    for _ in range(300):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError(f"{pid} still runs")


def test_a_check_ends_with_the_call_that_was_killed(tmp_path):
    """It would compute beside the first check of the next call."""
    child = tmp_path / "child"
    check = f"import os, time; open({str(child)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = (
        f"import sys; sys.path.insert(0, {str(GPU)!r})\n"
        "import first_day, os, pathlib\n"
        f"words = [sys.executable, '-c', {check!r}]\n"
        f"first_day.result(words, pathlib.Path({str(tmp_path)!r}), dict(os.environ), 600)"
    )
    call = subprocess.Popen([sys.executable, "-c", code])
    while not (child.exists() and child.read_text()):
        time.sleep(0.1)
    call.kill()
    call.wait()
    ends(int(child.read_text()))


def test_a_model_is_built_once_a_size(tmp_path, monkeypatch):
    """By whichever check needs it first, with the same weights for all ways to compute it."""
    import first_day

    device = torch.device("cpu")
    here = first_day.Here(device, True, tmp_path, built=tmp_path / "built")
    for recipe in ("mae", "ct_min"):
        stage, encoder = first_day.stage_of(here, recipe, "large", 8)
        anew = first_day.objective_of(stage, encoder).state_dict()
        first_day.objective_of(stage, encoder, built=here.built)
        with monkeypatch.context() as patched:
            patched.setattr(type(stage), "build", None)
            other, _ = first_day.stage_of(here, recipe, "large", 4, compile=True)
            shared = first_day.objective_of(other, encoder, built=here.built)
        assert shared.stage is other
        assert all(map(torch.equal, anew.values(), shared.state_dict().values()))
    assert len(list(here.built.iterdir())) == 2


def test_packages_have_the_versions_of_the_lock_file():
    from packages import LOCK, NAMES, pinned

    assert "deepspeed==0.19.8" in pinned(LOCK.read_text())
    assert len(pinned(LOCK.read_text())) == len(NAMES)


WITHOUT_THE_REST = """
import ast, importlib, re, sys
from importlib.metadata import distribution, distributions, packages_distributions
from pathlib import Path

def name(text):
    return re.split(r"[^a-z0-9-]", text.lower().replace("_", "-"))[0]

installed = {name(one.metadata["Name"]) for one in distributions()}
there, more = set(), {*sys.argv[2:]}
while more:
    there |= more
    needs = [need for one in more - {*sys.argv[5:]} for need in distribution(one).requires or ()]
    more = {name(need) for need in needs if "extra ==" not in need} & installed - there
known = packages_distributions()
missing = {top for top, of in known.items() if top != "maect" and not {*map(name, of)} & there}

class Missing:
    def find_spec(self, full, path=None, target=None):
        if full.partition(".")[0] in missing:
            raise ModuleNotFoundError(full, name=full)

sys.meta_path.insert(0, Missing())
for file in Path(sys.argv[1]).glob("*.py"):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("maect"):
            importlib.import_module(node.module)
print(len(missing), "sklearn" in missing)
"""


def test_what_the_checks_import_is_carried():
    """With PyTorch, timm and SciPy alone beside it; packages that are carried bring nothing."""
    from packages import LOCK, NAMES

    words = [Path(LOCK).parents[1] / "tests/gpu", "torch", "timm", "scipy", *NAMES]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_REST, *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == "True"


BARE = ("torch==2.11.*", "numpy==2.5.*", "timm")
BARE_BYTES = 12e9
"""Of PyTorch with CUDA, packed and unpacked: the default index has no other for Linux."""


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A Python 3.12 that has PyTorch 2.11 and timm and nothing of ours, and the carried packages.

    A test that asks for it is skipped where none can be made.
    """
    from packages import MOST, collect

    uv, place = Path(sys.executable).with_name("uv"), tmp_path_factory.mktemp("bare")
    found = map(str, Path.home().glob(".pyenv/versions/3.12.*/bin"))
    path = os.pathsep.join([*found, os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "VIRTUAL_ENV": str(place / "venv")}
    if shutil.disk_usage(place).free < BARE_BYTES:
        pytest.skip(f"PyTorch 2.11 needs {BARE_BYTES / 1e9:.0f} GB in {place}")

    def made(*words):
        words = [uv, "--no-config", "--no-python-downloads", *words]
        done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=1800)
        return done.returncode == 0

    try:
        if not made("venv", "--python", "3.12", str(place / "venv")):
            pytest.skip("no Python 3.12 here")
        if not made("pip", "install", *BARE):
            pytest.skip(f"{', '.join(BARE)} cannot be installed here")
        assert collect(place / "packages", "3.12") < MOST
        yield [str(place / "venv" / "bin" / "python")], ["--packages", str(place / "packages")]
    finally:
        shutil.rmtree(place)


@pytest.fixture(params=["this environment", "a bare one"])
def hour_words(request, tmp_path):
    """The command of a call on a CPU with tiny shapes."""
    python, carried = [sys.executable], []
    if request.param == "a bare one":
        python, carried = request.getfixturevalue("bare")
    words = [*python, "-u", str(GPU / "hour.py"), "--out", str(tmp_path), "--device", "cpu"]
    return [*words, "--small", *carried]


def report(out):
    return json.loads((out / "report.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(4000)
def test_a_minute_on_a_cpu_and_then_the_rest(hour_words, tmp_path):
    """Real checks under a limit that kills; the next call begins behind what was lost."""
    faulthandler.cancel_dump_traceback_later()  # of eleven minutes
    words = [*hour_words, "--minutes", "3"]
    killed = subprocess.run(["timeout", "60", *words], capture_output=True, text=True)
    assert killed.returncode == 124
    before = report(tmp_path)
    done = [line for line in before if "status" in line]
    assert before and all(line["status"] in ("passed", "missed") for line in done), before
    files = [file for file in tmp_path.iterdir() if file.is_file()]
    assert {file.name for file in files} <= {"report.json", "report.new", "log.txt"}
    again = subprocess.run(words, capture_output=True, text=True, timeout=900)
    assert again.returncode in (0, 3), again.stdout + again.stderr
    after = report(tmp_path)
    assert len(after) > len(before) and after[: len(done)] == done


def test_a_killed_training_goes_on_unless_it_is_killed_again(hour, tmp_path):
    for expected in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            hour.call(options(tmp_path, dies_at="training"))
        assert names(tmp_path).count("training") == expected
    hour.call(options(tmp_path, dies_at=None))
    assert names(tmp_path).count("training") == 2


def test_the_time_of_a_killed_check_counts(hour, tmp_path):
    (tmp_path / "report.json").write_text(json.dumps([{"name": "a", "with": hour.versions()}]))
    (tmp_path / "log.txt").write_text("said last")
    began = (tmp_path / "report.json").stat().st_mtime
    os.utime(tmp_path / "log.txt", (began + 70, began + 70))
    found = hour.Report(tmp_path / "report.json")
    assert found.spent == pytest.approx(70, abs=0.01)
    assert found.lines[0]["with"]["torch"] == metadata.version("torch")


@pytest.mark.slow
@pytest.mark.timeout(9000)
@pytest.mark.parametrize("hour_words", ["a bare one"], indirect=True)
def test_the_whole_hour_on_a_bare_machine(hour_words, tmp_path):
    """All checks in calls of nine minutes: none fails, and few files are to be brought back."""
    import hour

    faulthandler.cancel_dump_traceback_later()  # of eleven minutes
    words = [*hour_words, "--minutes", "140"]
    for _ in range(20):
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode != hour.MORE:
            break
    lines = report(tmp_path)
    assert done.returncode == 0, [line for line in lines if line.get("status") != "passed"]
    wanted = [step.name for step in hour.steps(options(tmp_path))]
    assert [line["name"] for line in lines][: len(wanted)] == wanted
    for line in lines:
        known = line["status"] in ("passed", "missed", "goes on")
        assert known or line["status"].startswith("needs "), line
    assert (lines[-1]["name"], lines[-1]["status"]) == ("training", "passed")
    for stage in lines[-1]["values"]["stages"].values():
        assert stage["trained"] == pytest.approx(stage["epochs"], rel=0.1)
        assert stage["curve"][-1]["epoch"] == stage["trained"]
        assert all(0 <= one["knn"] <= 100 and one["loss"] > 0 for one in stage["curve"])
    assert (tmp_path / "report.md").read_text() == hour.page(lines)
    assert lines[0]["values"]["torch"].startswith("2.11."), lines[0]
    assert {file.name for file in tmp_path.iterdir()} == {"report.json", "report.md", "log.txt"}
