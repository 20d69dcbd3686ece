"""What others, or the folder that one stands in, could bring into a run: a trial each."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/unit/launch"))

from counting import expected  # noqa: E402
from launching import Run  # noqa: E402

from maect.core.errors import NodeError, UserError  # noqa: E402
from maect.core.files import read_json, sha256_file, write_record  # noqa: E402
from maect.data.index import LABEL  # noqa: E402
from maect.data.shards import shard  # noqa: E402
from maect.data.staging import stage  # noqa: E402
from maect.experiment import working_folder  # noqa: E402
from maect.experiment.profile import by_rule, find_profile  # noqa: E402
from maect.launch import Resources, submit  # noqa: E402

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
    return lambda: sorted(file.name for file in sprung.iterdir())


def maect(*words: str, **more: object) -> "subprocess.CompletedProcess[str]":
    """The command, as its user has it."""
    given = {"capture_output": True, "text": True, "timeout": 180, **more}
    return subprocess.run([str(BIN / "maect"), *words], **given)


# ---- the working folder


def test_a_dry_run_takes_nothing_from_the_working_folder(trap: Callable[[], list[str]]) -> None:
    """`maect run -n` among modules, plugins and profiles that others have put there."""
    done = maect("run", "digits", "-n", "shards")
    assert done.returncode == 0, done.stderr
    assert trap() == []


def test_a_plan_takes_nothing_from_the_working_folder(trap: Callable[[], list[str]]) -> None:
    """`maect plan`, which reads the workflow in its own process."""
    done = maect("plan", "shards", "--experiment", "digits")
    assert done.returncode == 0, done.stderr
    assert trap() == []


def test_python_m_maect_takes_nothing_from_the_working_folder(
    trap: Callable[[], list[str]],
) -> None:
    """`python -m maect`, where Python itself puts the working folder first."""
    subprocess.run([sys.executable, "-m", "maect", "status"], capture_output=True, timeout=60)
    assert trap() == []


@pytest.mark.parametrize("end", ["", ":"], ids=["PYTHONPATH", "an empty entry"])
def test_a_job_takes_nothing_from_the_working_folder(
    run: Run, trap: Callable[[], list[str]], end: str
) -> None:
    """Launcher, submission, controller and ranks, also with an empty entry in PYTHONPATH."""
    told = run.environment()
    told["PYTHONPATH"] += end
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


def test_a_job_of_slurm_takes_nothing_from_its_working_folder(tmp_path: Path) -> None:
    """The script for sbatch says so itself: a site may start jobs without our environment."""
    parameters = submit.slurm(Resources("slurm"), "maect-x-1", tmp_path)
    assert "export PYTHONSAFEPATH=1" in parameters["setup"]


def test_profiles_by_name_are_those_of_the_pipeline(trap: Callable[[], list[str]]) -> None:
    """A folder `local` that lies in the working folder; a path is taken as it is given."""
    assert find_profile("local") == ROOT / "cluster_profiles/local"
    assert find_profile("cluster_profiles/local") == ROOT / "cluster_profiles/local"
    assert find_profile("./local") == Path("local")
    with pytest.raises(UserError, match=r"the one in this folder is --profile \./default"):
        find_profile("default")


def test_scripts_that_a_profile_names_are_those_of_the_pipeline(
    trap: Callable[[], list[str]],
) -> None:
    """`setup: envs/slurm.sh` where the working folder has such a file, and `apptainer`."""
    Path("envs").mkdir()
    for name in ("envs/slurm.sh", "envs/squashed_python", "apptainer"):
        Path(name).write_text("touch sprung")
    jobs = {"training": {"setup": "envs/slurm.sh", "python": "envs/squashed_python"}}
    asked = by_rule(jobs)["set-resources"]["pretrain"]
    assert asked["setup"] == str(ROOT / "envs/slurm.sh")
    assert asked["python"] == str(ROOT / "envs/squashed_python")
    assert Resources.parse(nodes=1, python="apptainer exec x python").python == (
        "apptainer exec x python"
    )


def test_snakemake_itself_is_stopped_where_it_would_take_a_profile_unasked(
    trap: Callable[[], list[str]],
) -> None:
    """The bare `snakemake --profile cluster_profiles/SITE`: it has read it, and runs nothing."""
    words = ["--snakefile", str(ROOT / "Snakefile")]
    words += ["--profile", str(ROOT / "cluster_profiles/local"), "-n"]
    words += ["--config", "experiment=digits"]
    shutil.rmtree("default")
    shutil.rmtree(".snakemake")  # its own plugins it imports before it reads a Snakefile
    done = subprocess.run([BIN / "snakemake", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode and trap() == ["profiles-default"]
    said = done.stderr.splitlines()[-1]
    assert said.startswith("maect: ") and "profiles/default: Snakemake takes this" in said
    with pytest.raises(UserError, match="add --workflow-profile none"):
        working_folder.check_profiles(["/usr/bin/snakemake", "-n"])
    working_folder.check_profiles(["/usr/bin/snakemake", "--workflow-profile", "none"])


def test_a_working_folder_that_everybody_may_write(trap: Callable[[], list[str]]) -> None:
    """It is refused in a line before Snakemake starts, and so is one below it."""
    shutil.rmtree(".snakemake")
    Path.cwd().chmod(0o777)
    done = maect("run", "digits", "-n")
    here = Path.cwd()
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert done.stderr == (
        f"maect run: {here}: every user may write there; run `chmod o-w {here}`; "
        "or start in a folder of your own\n"
    )
    assert trap() == []
    Path("below").mkdir()
    os.chdir("below")
    with pytest.raises(UserError, match="every user may write there"):
        working_folder.check_working_folder()
    here.chmod(0o1777)
    working_folder.check_working_folder()


@as_root
def test_snakemakes_memory_made_by_somebody_else(trap: Callable[[], list[str]]) -> None:
    """`.snakemake` in a sticky folder such as /tmp."""
    Path.cwd().chmod(0o1777)
    working_folder.check_working_folder()
    os.chown(".snakemake", B, B)
    with pytest.raises(UserError, match=f"made by user {B}, and Snakemake would use it"):
        working_folder.check_working_folder()


def test_another_clone_of_maect_is_not_what_runs(tmp_path: Path, trap: object) -> None:
    """Started in another clone: its code is not used, and a line says so."""
    Path("maect").mkdir()
    Path("maect/__init__.py").write_text("raise SystemExit(9)")
    Path("Snakefile").touch()
    said = f"{Path.cwd()} is another clone of maect: its code is not used, but that of {ROOT}"
    assert working_folder.notes(ROOT) == [said]
    done = maect("replay", str(tmp_path / "none"), "--step", "1")
    assert f"warning: {said}" in done.stderr


def test_numba_is_not_configured_by_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`.numba_config.yaml` may name the folder from which compiled code is unpickled."""
    from maect.evaluate.umap import umap_class

    monkeypatch.chdir(tmp_path)
    Path(".numba_config.yaml").write_text("cache_dir: /tmp/evil\n")
    with pytest.raises(UserError, match="Numba would be configured by it"):
        umap_class()


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
def test_staged_shards_that_somebody_else_made_first(shards: Path, public: Path) -> None:
    """Labels shifted by one, checksums and all, in a shared folder of the node."""
    node = public / "node"
    node.mkdir()
    node.chmod(0o1777)
    evil = stage(shards, str(node))
    index = np.load(evil / "index.npy")
    index[:, LABEL] = (index[:, LABEL] + 1) % 3
    np.save(evil / "index.npy", index)
    record = read_json(evil / "index.json") | {"index_sha256": sha256_file(evil / "index.npy")}
    write_record(evil / "index.json", record)
    # Kept as it was by a user of another name; the one who stages finds it under any name.
    assert str(os.geteuid()) in evil.name
    os.chown(evil, B, B)
    with pytest.raises(UserError, match=f"not a folder of yours, but user {B}'s"):
        stage(shards, str(node))
    os.chown(evil, 0, 0)
    (labels,) = {tuple(np.load(stage(shards, str(node)) / "index.npy")[:, LABEL].tolist())}
    assert labels == tuple(np.load(shards / "index.npy")[:, LABEL].tolist())


@as_root
def test_two_users_of_a_node_stage_the_same_shards(shards: Path, public: Path) -> None:
    """Each has a folder of his own, which the other cannot enter."""
    node = public / "node"
    node.mkdir()
    node.chmod(0o1777)
    first = stage(shards, str(node))
    try:
        os.seteuid(B)
        second = stage(shards, str(node))
        with pytest.raises(PermissionError):
            list(first.iterdir())
    finally:
        os.seteuid(0)
    assert first != second and second.stat().st_uid == B
    assert {stat.S_IMODE(path.stat().st_mode) for path in (first, second)} == {0o700}


def test_a_staged_copy_that_was_changed_is_made_again(shards: Path, tmp_path: Path) -> None:
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
