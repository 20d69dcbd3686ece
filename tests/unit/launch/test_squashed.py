"""The environment as one file: what `envs/squashed_python` runs."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from maect.core.resources import Resources

ROOT = Path(__file__).parents[3]
BY = ["squashfuse", "unsquashfs"]


@pytest.mark.skipif(not shutil.which("mksquashfs"), reason="squashfs-tools are not installed")
@pytest.mark.parametrize("by", BY)
def test_python_is_that_of_the_file(by, tmp_path):
    if not shutil.which(by):
        pytest.skip(f"{by} is not installed")
    (tmp_path / "envs").mkdir()
    shutil.copy(ROOT / "envs/squashed_python", tmp_path / "envs")
    venv, node = tmp_path / ".venv", tmp_path / "node"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (module,) = (path / "only_here.py" for path in venv.glob("lib/python*/site-packages"))
    module.write_text("import sys; print(sys.prefix)")
    subprocess.run(["mksquashfs", venv, f"{venv}.sqfs", "-quiet", "-no-progress"], check=True)
    shutil.rmtree(venv)
    node.mkdir()
    tools = tmp_path / "bin"  # without the other way
    tools.mkdir()
    for tool in Path("/usr/bin").iterdir():
        if tool.name not in BY or tool.name == by:
            (tools / tool.name).symlink_to(tool)
    words = ["bash", tmp_path / "envs/squashed_python", "-m", "only_here"]
    # The second rank finds what the first one mounted; jobs share what is unpacked.
    jobs = ("7", "7") if by == "squashfuse" else ("7", "8")
    environments = [
        {"PATH": str(tools), "TMPDIR": str(node), "SLURM_JOB_ID": number} for number in jobs
    ]
    try:
        started = [
            subprocess.Popen(words, env=one, stdout=subprocess.PIPE, text=True)
            for one in environments
        ]
        for process in started:
            said, _ = process.communicate()
            assert said.startswith(str(node))
        (folder,) = node.glob("maect-*")
        assert not (folder / "new").exists()
        if by == "unsquashfs":  # a job that was killed while it unpacked
            (folder / "venv").rename(folder / "new")
            done = subprocess.run(words, env=environments[0], capture_output=True, text=True)
            assert done.stdout == said and not (folder / "new").exists(), done.stderr
    finally:
        if by == "squashfuse":
            (mounted,) = node.glob("maect-*/venv")
            subprocess.run(["umount", mounted], check=False)


def test_a_command_in_place_of_python(tmp_path, monkeypatch):
    """A file in it is named in full, since a job begins in another folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "image.sif").touch()
    resources = Resources(python="apptainer exec --nv ./image.sif python").resolved()
    assert resources.python == f"apptainer exec --nv {tmp_path}/image.sif python"
    assert Resources().resolved().python == ""
