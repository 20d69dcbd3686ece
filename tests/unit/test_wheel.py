"""What a wheel holds is enough: the pipeline runs where there is no clone."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import maect

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")


def run(*words: str | Path, **more: str | Path) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(words, capture_output=True, text=True, **more)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_profiles_find_their_scripts_in_a_wheel(tmp_path):
    """`--profile juwels` of an installed wheel: its script is there, and enters the environment."""
    site = tmp_path / "venv/lib/python3.12/site-packages"
    # What `pip wheel` packs, without packing it.
    build = ["setup.py", "--quiet", "build", "--build-base", tmp_path / "build"]
    run(sys.executable, *build, cwd=ROOT, env=os.environ | {"CC": "false"})
    shutil.copytree(next((tmp_path / "build").glob("lib*")), site)
    (tmp_path / "venv/bin").mkdir()
    (tmp_path / "venv/bin/activate").write_text("export ENTERED=yes\n")
    script = """
from maect.experiment.profile import find_profile
from maect.tools.doctor import read_profile
rules = read_profile(find_profile("juwels"))
print(*{asked["setup"] for asked in rules.values() if asked.get("setup")})
"""
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = run(sys.executable, "-c", script, cwd=tmp_path, env=environment)
    envs = site / "maect/pipeline/envs"
    assert done.stdout == f"{envs}/juwels.sh\n"
    sourced = run("bash", "-c", f"source {envs}/juwels.sh && echo $ENTERED")
    assert sourced.stdout == "yes\n"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the sdist, and of the wheel that is made from it."""
    out = tmp_path_factory.mktemp("dist")
    run(UV, "build", "--quiet", "--out-dir", out, ROOT)
    return out


def interpreter(version: str) -> str:
    """A Python of this version, on the path or of pyenv; without one the test is skipped."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for path in (*pyenv.glob(f"{version}.*/bin/python"), shutil.which(f"python{version}")):
        if path is not None:
            return str(path)
    pytest.skip(f"no Python {version} on this machine")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_wheel_and_sdist_in_a_clean_environment(version, built, tmp_path):
    """The wheel runs a pipeline's first rules; what is installed from the sdist has its files."""
    bin = tmp_path / "venv/bin"
    run(UV, "venv", "--quiet", "--python", interpreter(version), tmp_path / "venv")
    environment = os.environ | {"VIRTUAL_ENV": str(tmp_path / "venv")}
    environment.pop("PYTHONPATH", None)
    run(UV, "pip", "sync", ROOT / "envs/requirements.lock", env=environment)
    files = []
    for package in (next(built.glob("*.tar.gz")), next(built.glob("*.whl"))):
        run(UV, "pip", "install", "--reinstall", "--no-deps", package, env=environment)
        run(bin / "maect", "--help", cwd=tmp_path)
        assert run(bin / "maect", "--version").stdout == f"maect {maect.__version__}\n"
        listed = run(UV, "pip", "show", "--files", "maect", env=environment).stdout.splitlines()
        files.append({line for line in listed if ".dist-info" not in line and ".so" not in line})
    assert files[0] == files[1]
    away = tmp_path / "elsewhere"
    away.mkdir()
    run(bin / "maect", "run", "digits", "results/digits/shards/digits/val/index.json", cwd=away)
    if version != f"{sys.version_info.major}.{sys.version_info.minor}":
        return  # the rest is the same for all, and takes minutes
    told = run(bin / "maect", "new-experiment", "--images", "results/digits/images/digits",
               "--out", "mine.yaml", cwd=away).stdout  # fmt: skip
    run("bash", "-c", told.splitlines()[-1].replace("Next: maect", str(bin / "maect")), cwd=away)
    run(bin / "maect", "run", "digits", "results/digits/runs/mae_tiny/run.json", cwd=away)
    assert "mae_tiny" in run(bin / "maect", "status", cwd=away).stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_demo_without_an_installation(built, tmp_path):
    """`uvx --from WHEEL maect demo`, with the newest releases; its lines fit a page."""
    wheel = next(built.glob("*.whl"))
    python = ("--no-python-downloads", "--python", sys.executable)
    done = run(
        UV, "tool", "run", "--quiet", *python, "--from", wheel, "maect", "demo", cwd=tmp_path
    )
    said = (done.stdout + done.stderr).splitlines()
    assert len(said) < 60
    assert "report.html in a browser" in done.stdout.splitlines()[-1]  # progress is on stderr
    # Of the words of Snakemake and of jobs none is on the terminal; the log has them.
    assert not any(word in line for line in said for word in ("jobid", "rule ", "epoch"))
    assert "Finished jobid" in (tmp_path / "results/digits/logs/demo.log").read_text()
    assert (tmp_path / "results/digits/report.html").exists()
