"""What is checked in: declared imports, a complete lock file, nothing large."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement

import maect

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "envs/requirements.lock").read_text(encoding="utf-8")


def lint_imports(folder: Path) -> "subprocess.CompletedProcess[str]":
    words = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True)


def test_an_import_against_the_arrows_is_found(tmp_path: Path) -> None:
    """`make check` holds the contracts of pyproject.toml; here, that they hold anything."""
    (tmp_path / "maect").symlink_to(ROOT / "maect")
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text(settings)
    assert lint_imports(tmp_path).returncode == 0
    (tmp_path / "maect").unlink()
    for name in ("__init__", "__main__", "cli"):
        (tmp_path / f"maect/{name}.py").parent.mkdir(exist_ok=True)
        (tmp_path / f"maect/{name}.py").touch()
    contracts = tomllib.loads(settings)["tool"]["importlinter"]["contracts"]
    floors = re.findall(r"\w+", " ".join(contracts[0]["layers"]))
    for floor in {*floors} - {"__main__", "cli"}:
        (tmp_path / "maect" / floor).mkdir()
        (tmp_path / "maect" / floor / "__init__.py").touch()
    (tmp_path / "maect/data/__init__.py").write_text("def f():\n    import maect.evaluate\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1
    assert "maect.data is not allowed to import maect.evaluate" in done.stdout


def test_the_lock_file_names_no_index() -> None:
    assert "://" not in LOCK and "--index" not in LOCK
    for block in re.split(r"\n(?=[A-Za-z0-9])", LOCK.strip()):
        assert "--hash=sha256:" in block, block


def test_the_lock_file_has_what_the_project_asks_for() -> None:
    pinned = dict(re.findall(r"^([a-z0-9.-]+)==([^ ;]+)", LOCK, flags=re.M))
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for text in [*asked["project"]["dependencies"], *asked["dependency-groups"]["dev"]]:
        wanted = Requirement(text)
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        assert name in pinned, f"{text}: run `make lock`"
        assert wanted.specifier.contains(pinned[name]), f"{text}: run `make lock`"


def test_git_has_no_large_files() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "README.md" in listed.stdout
    for name in filter(None, listed.stdout.split("\0")):
        file = ROOT / name
        assert not file.exists() or file.stat().st_size < 2**21, name


def test_a_clone_that_was_moved_gets_a_new_environment(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "envs/requirements.lock"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/.installed").touch()
    make = ["make", "--dry-run", "--directory", str(tmp_path), ".venv/.installed"]
    for place, again in ((tmp_path, False), ("/elsewhere", True)):
        command = f"command = /usr/bin/python3 -m venv {place}/.venv\n"
        (tmp_path / ".venv/pyvenv.cfg").write_text(command)
        done = subprocess.run(make, capture_output=True, text=True, check=True)
        assert ("the clone was moved from /elsewhere/.venv" in done.stdout) == again
        assert ("-m venv --clear" in done.stdout) == again


def test_the_version_is_in_one_place() -> None:
    """The package's own; what cites it says the same."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"] and project["project"]["dynamic"] == ["version"]
    assert str(citation["version"]) == maect.__version__
