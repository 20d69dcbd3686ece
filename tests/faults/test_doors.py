"""What others, or the folder that one stands in, could bring into a run: a trial each."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from counting import expected
from launching import Run, finish
from PIL import Image
from slurm_commands import Commands

from maect.cli import main
from maect.core import owners
from maect.core.errors import NodeError, UserError
from maect.core.resources import full_paths
from maect.data.config import CONFIG, ShardsConfig, finished_shards
from maect.data.index import open_index
from maect.data.shards import shard
from maect.data.staging import stage
from maect.experiment.profile import by_rule, find_profile
from maect.launch import Resources, Task, clusters, launch, record
from maect.launch.launcher import _Launch
from maect.launch.owner import SNAKEMAKE
from maect.launch.record import Job
from maect.launch.shell import MARK
from maect.launch.state import STOPPED
from maect.tools.status import status_of

ROOT = Path(__file__).parents[2]
B = 12345  # another user, without a name
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
BIN = Path(sys.executable).parent


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / f"run{os.getpid()}-{time.monotonic_ns()}")
    yield run
    run.end()


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that other users can enter, as pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="doors-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """A working folder full of traps; returns those that have gone off."""
    here, sprung = tmp_path / "here", tmp_path / "sprung"
    here.mkdir()
    sprung.mkdir()
    code = f'import sys; open(f"{sprung}/{{__name__}}", "a").write(f"{{sys.argv}}")\n'
    names = ("psutil", "snakemake", "submitit", "timm", "torch", "yte", "yaml", "rich", "queue")
    for name in (*names, ".snakemake/pip-deployments/snakemake_executor_plugin_evil"):
        (here / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (here / f"{name}.py").write_text(code)
    for name in ("local", "default", "profiles/default"):
        (here / name).mkdir(parents=True)
        mark = f"{sprung}/{name.replace('/', '-')}"
        evil = f'?__import__(\\"os\\").system(\\"touch {mark}\\") or 1'
        (here / name / "config.yaml").write_text(f'__use_yte__: true\ncores: "{evil}"\n')
    monkeypatch.chdir(here)
    monkeypatch.delenv(SNAKEMAKE, raising=False)  # which a test that parsed the workflow left
    return lambda: sorted(file.name for file in sprung.iterdir())


# ---- the working folder


def test_a_command_takes_nothing_from_the_working_folder(tmp_path, trap, monkeypatch):
    """Modules, plugins and profiles that others have put there.

    `workflow_html` starts a Snakemake of its own, which would take `default` for a profile.
    """
    file, images = tmp_path / "mine.yaml", tmp_path / "images"
    for name in ("cats", "dogs"):
        (images / name).mkdir(parents=True)
        Image.new("RGB", (16, 16)).save(images / name / "1.png")
    changes = {"epochs": 1, "batch_size": 2}
    about = {
        "storage": str(tmp_path / "results"),
        "datasets": {"mine": {"splits": {"train": {"images": str(images)}}}},
        "runs": {"mae": {"recipe": "mae", "size": "tiny", "set": changes}},
    }
    file.write_text(yaml.safe_dump(about))
    monkeypatch.setenv("SNAKEMAKE_PROFILE", str(Path("local").absolute()))
    page = tmp_path / "results/workflow.html"
    words = [BIN / "maect", "run", file, page]
    done = subprocess.run(words, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    assert trap() == [] and page.exists()


def test_a_user_without_a_name(monkeypatch):
    """As in a container; libraries ask for it."""
    monkeypatch.delenv("LOGNAME", raising=False)
    monkeypatch.setattr(owners.pwd, "getpwuid", {}.__getitem__)
    assert owners.environment()["LOGNAME"] == str(os.getuid())


def test_a_job_takes_nothing_from_the_working_folder(run, trap):
    """Launcher and ranks, although PYTHONPATH has an empty and a relative entry at its end."""
    told = run.environment()
    told["PYTHONPATH"] += ":."
    command = run.command({"steps": 3}, {"devices": 2})
    # The launcher itself cannot help it: whatever is set for every Python.
    done = subprocess.run(
        [command[0], "-c", PROXY, *command[1:]],
        capture_output=True, text=True, timeout=120, env=told,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert run.read("done.json") == expected(3)
    assert trap() == []


PROXY = """
import os, runpy, sys
sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())]
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_profiles_and_scripts_by_name_are_those_of_the_pipeline(trap):
    """Folders and files that lie in the working folder; a path is taken as it is given."""
    assert find_profile("local") == ROOT / "cluster_profiles/local"
    assert find_profile("cluster_profiles/local") == ROOT / "cluster_profiles/local"
    assert find_profile("./local") == Path("local")
    with pytest.raises(UserError, match=r"the one in this folder is --profile \./default"):
        find_profile("default")
    Path("local/config.yaml").chmod(0o666)
    with pytest.raises(UserError, match=r"config\.yaml: every user may write it; run `chmod o-w"):
        find_profile("./local")
    names = {"setup": "envs/slurm.sh", "python": "envs/squashed_python"}
    Path("envs").mkdir()
    for name in (*names.values(), "apptainer"):
        Path(name).write_text("touch sprung")
    asked = by_rule({"training": names})["set-resources"]["pretrain"]
    assert {key: asked[key] for key in names} == {k: str(ROOT / n) for k, n in names.items()}
    assert full_paths("apptainer exec x python") == "apptainer exec x python"


def test_a_working_folder_that_everybody_may_write(tmp_path, monkeypatch, capsys):
    """It is refused in a line before Snakemake starts, and so is one below it."""
    monkeypatch.chdir(tmp_path)
    here = Path.cwd()
    here.chmod(0o777)
    assert main(["run", "digits", "-n"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err == (
        f"maect run: {here}: every user may write there; run `chmod o-w {here}`; "
        "or start in a folder of your own\n"
    )
    Path("below").mkdir()
    os.chdir("below")
    with pytest.raises(UserError, match="every user may write there"):
        owners.check_working_folder()
    here.chmod(0o1777)
    owners.check_working_folder()


def test_a_private_folder_is_our_own_and_no_link(tmp_path):
    (tmp_path / "open").mkdir(mode=0o755)
    assert owners.private_folder(tmp_path / "open").stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to("open")
    with pytest.raises(UserError, match="link: not a folder of yours"):
        owners.private_folder(tmp_path / "link")


def test_numba_is_not_configured_by_the_working_folder(tmp_path, monkeypatch):
    """`.numba_config.yaml` may name the folder from which compiled code is unpickled."""
    from maect.evaluate.pictures import embedded

    monkeypatch.chdir(tmp_path)
    Path(".numba_config.yaml").write_text("cache_dir: /tmp/evil\n")
    with pytest.raises(UserError, match="Numba would be configured by it"):
        embedded(np.zeros((20, 4), np.float32), 15, 0)


# ---- staged shards


@pytest.fixture
def shards(public: Path) -> Path:
    images = public / "images"
    for number in range(12):
        (images / f"c{number % 3}").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (20 * number, 0, 0)).save(images / f"c{number % 3}/{number}.png")
    shard(images, public / "shards/train", "folder", 2)
    return public / "shards/train"


@as_root
def test_shards_of_strangers_are_not_reused_from_a_folder_that_everybody_may_write(
    public: Path,
) -> None:
    """As on /scratch, where anybody can make an experiment of any name."""
    for owner, name in ((0, "roots"), (B, "strangers")):
        shards = public / name / "shards/digits/val"
        shards.mkdir(parents=True)
        (shards / "index.json").write_text("{}")
        ShardsConfig(images=Path("/images"), kind="folder", shards=1).write(shards / CONFIG)
        os.chown(public / name, owner, owner)
    own = public / "mine/shards/digits/val"
    roots, strangers = (public / name / "shards/digits/val" for name in ("roots", "strangers"))
    assert finished_shards(own).keys() == {roots, strangers}
    public.chmod(0o1777)
    assert finished_shards(own).keys() == {roots}


def test_a_staged_copy_that_was_changed_is_made_again(shards, tmp_path):
    """A flipped bit in each file beside the tars, of the same size; and one while it is copied."""
    out = stage(shards, str(tmp_path))
    for name in ("index.npy", "keys.txt", "crc32.npy", "index.json"):
        whole = (out / name).read_bytes()
        (out / name).write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
        assert stage(shards, str(tmp_path)) == out and (out / name).read_bytes() == whole, name
    (tar, *_) = out.glob("*.tar")
    tar.unlink()
    damaged = bytearray((shards / tar.name).read_bytes())
    damaged[600] ^= 1
    (shards / tar.name).write_bytes(damaged)
    with pytest.raises(NodeError, match="has another checksum than its record"):
        stage(shards, str(tmp_path))


# ---- a run's folder that is somebody else's


def test_folders_that_let_others_exchange_runs_and_shards(public, shards):
    """Anybody may write there; in a sticky one, as /tmp, nobody can rename what is another's."""
    shards.chmod(0o777)
    with pytest.raises(UserError, match=f"{shards}: every user may write there"):
        open_index(shards)
    above = public / "results"
    (above / "x").mkdir(parents=True)
    above.chmod(0o777)
    (public / "link").symlink_to(above / "x")
    for folder in (above / "x", public / "link"):
        with pytest.raises(UserError, match=f"{above}: every user may write there"):
            launch(Task("a:b"), folder, Resources(), is_done=lambda: False, describe="count")
        assert not list(folder.glob("jobs/*"))
    for mode in (0o1777, 0o2775):  # the other: colleagues of one group trust each other
        above.chmod(mode)
        owners.refuse_public(above / "x")


@as_root
def test_the_status_of_somebody_elses_job(public: Path) -> None:
    """`jobs` is its owner's alone; `job.json` still says how an ended job ended."""
    folder = public / "runs/x"
    record.make_job_folder(folder, "maect-x-1")
    job = Job("local", "maect-x-1", 1, place=str(folder), state="submitted")

    def states() -> tuple[str, str, str]:
        record.write_job(folder, job)
        try:
            mine = status_of(folder, "x", False, clusters())
            os.seteuid(B)
            theirs = status_of(folder, "x", False, clusters())
        finally:
            os.seteuid(0)
        return mine.state, theirs.state, theirs.note

    with subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: job.name}) as process:
        job.id, job.pids = str(process.pid), [process.pid]
        alive = states()
        process.kill()
    note = "only the user who started its job can see whether it runs"
    assert alive == ("starting", "unknown", note)
    job.state, job.ending = "ended", STOPPED
    assert states() == ("stopped", "stopped", "")


@as_root
@pytest.mark.parametrize("cluster", ["local", "slurm"])
def test_a_colleague_ends_no_job_that_is_hidden(public, monkeypatch, cluster):
    """With `PrivateData=jobs` SLURM says that there is no such job, as `/proc` does here."""
    commands = Commands(public / "bin")
    commands.folder.chmod(0o777)
    monkeypatch.setenv("PATH", f"{commands.folder}:{os.environ['PATH']}")
    folder = public / "runs/x"
    record.make_job_folder(folder, "maect-x-1")
    job = Job(cluster, "maect-x-1", 1, place=str(folder), state="submitted", id="7", pids=[7])
    record.write_job(folder, job)
    nothing: Any = None
    launcher = _Launch(nothing, folder, nothing, nothing, nothing, nothing)
    launcher.recorded = job.name
    os.seteuid(B)
    try:
        assert launcher.poll(job).phase == "unknown"
        assert not launcher.end(job)
    finally:
        os.seteuid(0)
    assert launcher.end(job), "its owner may"
    assert not commands.asked("scancel")


# ---- copies, moved folders, other machines


def test_where_a_record_belongs(tmp_path):
    """Copies and moved folders have no live job; names that mean the same folder do."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    record.write_job(first, Job("local", "x", 1, place=str(first), state="submitted", id="7"))
    (tmp_path / "link").symlink_to(first)
    shutil.copytree(first, second)

    def state(folder: Path) -> str:
        job = record.read_job(folder)
        assert job is not None
        return job.state

    assert [state(first), state(tmp_path / "link"), state(second)] == [
        "submitted", "submitted", "ended",
    ]  # fmt: skip
    first.rename(tmp_path / "away")
    assert state(tmp_path / "away") == "ended"


def test_a_folder_that_is_moved_while_it_runs(run):
    """The launcher ends and submits nothing in the old place; it goes on in the new one."""
    launcher = run.start(steps=2000, save_every=1)
    run.reaches(5)
    moved = Run(run.folder.with_name(f"{run.folder.name}-moved"))
    run.folder.rename(moved.folder)
    words = finish(launcher, 60)
    assert launcher.returncode == 2 and "job.json: gone, with its folder" in words, words
    try:
        words = finish(moved.start(steps=40))
        assert f"is that of {run.folder}, and left alone" in words, words
        assert moved.starts()[-1]["step"] >= 4, "step 5 was reported before it was saved"
    finally:
        moved.end()
