"""Who may import whom (docs/architecture.md), read from the source of every module."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "maect"
EVERYONE = {"core", "recipes"}
MAY_IMPORT = {
    "core": set(),
    "recipes": {"core"},
    "data": EVERYONE,
    "models": EVERYONE,
    "launch": EVERYONE,
    "stages": EVERYONE | {"train", "data", "models"},
    "train": EVERYONE | {"data", "models", "stages"},
    "evaluate": EVERYONE | {"stages", "train", "data", "models"},
    "experiment": EVERYONE | {"stages", "evaluate"},
    "report": EVERYONE | {"stages", "evaluate", "experiment"},
    "tools": EVERYONE
    | {"data", "evaluate", "experiment", "launch", "models", "report", "stages", "train"},
}


def parts_imported(file: Path) -> set[str]:
    """First component below `maect` of everything of ours that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names]
        found |= {n.split(".")[1] for n in names if n.startswith("maect.")}
    return found


@pytest.mark.parametrize("part", sorted(MAY_IMPORT))
def test_arrows(part: str) -> None:
    files = list((PACKAGE / part).rglob("*.py")) or [PACKAGE / f"{part}.py"]
    for file in files:
        wrong = parts_imported(file) - MAY_IMPORT[part] - {part, "__version__"}
        assert not wrong, f"{file.relative_to(ROOT)} imports {sorted(wrong)}"


def test_every_part_has_a_rule() -> None:
    parts = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert parts - {"__init__", "__main__", "cli", "commands"} == set(MAY_IMPORT)


def test_nothing_is_unpickled_that_others_wrote() -> None:
    """`torch.load` says weights_only=True, `np.load` never allows pickles."""
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for call in re.findall(r"torch\.load\((?:[^()]|\([^()]*\))*\)", text):
            assert "weights_only=True" in call, f"{file}: {call}"
        assert "allow_pickle=True" not in text, file


def test_the_lock_file_names_no_index() -> None:
    lock = (ROOT / "envs/requirements.lock").read_text()
    assert "://" not in lock and "--index" not in lock
    packages = re.findall(r"^[A-Za-z0-9_.-]+==", lock, flags=re.M)
    assert len(packages) > 100
    for block in re.split(r"\n(?=[A-Za-z0-9])", lock.strip()):
        assert "--hash=sha256:" in block, block


def test_git_has_no_large_files() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    for name in filter(None, listed.stdout.split("\0")):
        file = ROOT / name
        assert not file.exists() or file.stat().st_size < 2**21, name
