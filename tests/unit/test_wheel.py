"""What a wheel holds is enough: the pipeline runs where there is no clone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*words: str | Path, **more: str | Path) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(words, capture_output=True, text=True, **more)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip wheel` packs, without packing it."""
    base = tmp_path_factory.mktemp("build")
    run(sys.executable, "setup.py", "--quiet", "build", "--build-base", base, cwd=ROOT)
    return next(base.glob("lib*"))


def test_commands_work_away_from_a_clone(package: Path, tmp_path: Path) -> None:
    script = """
import sys
from maect import cli
from maect.core.files import PIPELINE
print(PIPELINE)
for words in (["plan", "--experiment", "digits"], ["doctor", "--experiment", "digits", "--no-job"]):
    assert cli.main(words) == 0
"""
    environment = os.environ | {"PYTHONPATH": str(package)}
    done = run(sys.executable, "-c", script, cwd=tmp_path, env=environment)
    assert done.stdout.startswith(f"{package}/maect/pipeline\n")
    assert "digits on local\n" in done.stdout and "pretrain" in done.stdout
    built = (ROOT / "maect/data/native/libmaect_jpeg.so").exists()  # where there is a compiler
    assert ("JPEG decoder: native" in done.stdout) == built


@pytest.mark.slow
def test_a_wheel_in_a_clean_environment(tmp_path: Path) -> None:
    bin = tmp_path / "venv/bin"
    build = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, ROOT)
    run(sys.executable, "-m", "pip", *build)
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    uv = Path(sys.executable).with_name("uv")
    environment = os.environ | {"VIRTUAL_ENV": str(tmp_path / "venv")}
    environment.pop("PYTHONPATH", None)
    run(uv, "pip", "sync", ROOT / "envs/requirements.lock", env=environment)
    run(uv, "pip", "install", "--no-deps", next(tmp_path.glob("*.whl")), env=environment)
    away = tmp_path / "elsewhere"
    away.mkdir()
    run(bin / "maect", "run", "digits", "results/digits/shards/digits/val/index.json", cwd=away)
    told = run(bin / "maect", "new-experiment", "--images", "results/digits/images/digits",
               "--out", "mine.yaml", cwd=away).stdout  # fmt: skip
    run("bash", "-c", told.splitlines()[-1].removeprefix("Next: "), cwd=away)
    run(bin / "maect", "run", "digits", "results/digits/runs/mae_tiny/run.json", cwd=away)
    assert "mae_tiny" in run(bin / "maect", "status", cwd=away).stdout
