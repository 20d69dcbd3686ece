"""The oldest versions that pyproject.toml allows work: a lower bound is a promise."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ASKED = {one.name: one for one in map(Requirement, PROJECT["dependencies"])}
AS_LOCKED = re.compile(r"(torch|torchvision|triton|nvidia-|cuda-)")
"""Packages that are not installed once more: gigabytes, whose releases fit one another alone."""
EVERY_MODULE = """
import importlib, pkgutil, warnings, maect
warnings.simplefilter("ignore")
for module in pkgutil.walk_packages(maect.__path__, "maect."):
    if not module.name.endswith(("__main__", "libmaect_jpeg")):  # which is no module
        importlib.import_module(module.name)
"""
A_STEP = """
import deepspeed
from maect.recipes import load_encoder
from maect.stages import load_recipe
from maect.tools.speed import measure
assert deepspeed.__version__ == "{deepspeed}", deepspeed.__file__
assert measure(load_recipe("ct_min", "tiny", {{"batch_size": 4}}), load_encoder("tiny"), 4) > 0
"""


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("snakemake", "9.15.0"),  # takes only the folder of a profile, not its file
        ("submitit", "1.5.3"),  # imports pkg_resources, which setuptools no longer has
        ("deepspeed", "0.19.2"),  # KeyError: 'deepspeed_shm_comm' on every CPU
        ("deepspeed", "0.19.6"),  # refuses a setting of ZeRO 2: compute_grad_norm
    ],
)
def test_a_version_that_does_not_work_is_not_allowed(name, version):
    assert not ASKED[name].specifier.contains(version)


def test_the_workflow_asks_for_the_snakemake_that_the_package_asks_for():
    text = (ROOT / "workflow/Snakefile").read_text(encoding="utf-8")
    (least,) = re.findall(r'min_version\("([\d.]+)"\)', text)
    assert f">={least}" in {str(one) for one in ASKED["snakemake"].specifier}


@pytest.mark.slow  # installs a hundred packages
def test_the_lowest_versions_import_plan_and_train_a_step(tmp_path):
    lowest, packages = tmp_path / "lowest.txt", tmp_path / "packages"
    # Without what the lock file is resolved with.
    resolve = [UV, "pip", "compile", "--no-config", "--quiet", "--resolution", "lowest-direct"]
    resolve += ["--python", sys.executable, "--no-header", "--no-annotate", "-o", lowest]
    done = subprocess.run([*resolve, ROOT / "pyproject.toml"], capture_output=True, text=True)
    if done.returncode and ("error sending request" in done.stderr or "offline" in done.stderr):
        pytest.skip("no package index")
    assert done.returncode == 0, done.stderr
    lines = lowest.read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split(" ")[0].split("==") for line in lines if "==" in line)
    for name in ("snakemake", "submitit", "deepspeed"):
        allowed = ASKED[name].specifier
        assert any(str(one).startswith(">=") for one in allowed) and allowed.contains(pinned[name])
    lowest.write_text("".join(f"{line}\n" for line in lines if not AS_LOCKED.match(line)))
    install = [UV, "pip", "install", "--no-config", "--quiet", "--no-deps"]
    install += ["--python", sys.executable, "--target", packages, "-r", lowest]
    subprocess.run(install, check=True, cwd=tmp_path)
    environment = os.environ | {"PYTHONPATH": str(packages)}
    for words in (
        ["-c", EVERY_MODULE],
        ["-m", "maect", "run", "digits", "-n", "--quiet", "all"],
        ["-c", A_STEP.format(**pinned)],
    ):
        done = subprocess.run(
            [sys.executable, "-P", *words],
            cwd=tmp_path, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, (words, done.stderr[-2000:])
