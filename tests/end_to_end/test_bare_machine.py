"""README's two commands on a machine that somebody has just got: nothing but what README names.

The root file system is Debian's smallest, by debootstrap; HOME is empty; no variable of this
machine is there but those that reach a package index (bare_root.sh).
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = "git,make,python3,python3-venv,ca-certificates"
"""What README asks for beside Linux."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * 3600)]


def run(*words: str | Path) -> str:
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root file system of Debian's stable release, and nothing else."""
    if os.geteuid() != 0 or not shutil.which("debootstrap") or not shutil.which("unshare"):
        pytest.skip("needs root, debootstrap (apt install debootstrap) and unshare")
    listed = run("apt-get", "indextargets", "--format", "$(SITE) $(CODENAME)").splitlines()
    sites = [line.split() for line in listed if line and "-" not in line.split()[1]]
    if not sites:
        pytest.skip("apt knows no mirror")
    (site, release), root = sites[0], tmp_path_factory.mktemp("bare") / "root"
    run("debootstrap", "--variant=minbase", f"--include={NEEDED}", release, root, site)
    return root


def interpreter(version: str) -> str:
    """One of pyenv's of this version, or this one; the root shows it. Without one: skipped."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for path in pyenv.glob(f"{version}.*/bin/python"):
        return str(path)
    if f"{sys.version_info.major}.{sys.version_info.minor}" == version:
        return f"{sys.base_prefix}/bin/python3"
    pytest.skip(f"no Python {version} on this machine")


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_readmes_two_commands(version, bare, tmp_path):
    """`make demo` leaves a report; `make test` then passes, without SLURM and a compiler."""
    python, root = interpreter(version), tmp_path / "root"
    run("cp", "--archive", bare, root)
    (root / "home/newcomer").mkdir(parents=True)
    run("git", "clone", "--quiet", ROOT, root / "home/newcomer/maect")
    try:
        for target in ("demo", "test"):
            script = Path(__file__).with_name("bare_root.sh")
            said = run(script, root, python, "make", target, f"PYTHON={python}")
            if target == "demo":
                assert "report.html in a browser" in said.splitlines()[-1]
    finally:
        shutil.rmtree(root)  # gigabytes
