"""The recipes of docs/extending.md and its longer page, followed in a copy of the repository."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs/extending.md", ROOT / "docs/reference/several_heads.md"]
MOST_FILES = {"A stage": 3, "A protocol": 4, "An encoder size": 1, "A site": 2}
PARTS = ("Snakefile", "cluster_profiles", "envs", "maect", "tests", "workflow", "pyproject.toml")


def recipes() -> dict[str, str]:
    """Text below each heading, such as `A site`."""
    texts = (page.read_text(encoding="utf-8") for page in PAGES)
    sections = (section for text in texts for section in re.split(r"^## ", text, flags=re.M)[1:])
    return {section.split("\n")[0]: section for section in sections}


def blocks(text: str) -> list[tuple[str, str | None, str]]:
    """Language, file name and content of the fenced blocks, in their order."""
    found = re.findall(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', text, flags=re.M | re.S)
    return [(language, name or None, content) for language, name, content in found]


def changed(text: str, diff: str) -> str:
    """A file's text after a diff without line numbers, whose old lines are in it once."""
    lines = diff.splitlines(keepends=True)
    old = "".join(line[1:] or "\n" for line in lines if line[0] in " -\n")
    new = "".join(line[1:] or "\n" for line in lines if line[0] in " +\n")
    assert text.count(old) == 1, f"not there, or not once:\n{old}"
    return text.replace(old, new)


OF_ALL_STAGES = re.compile(r"pytest -q tests/unit/train/test_stages.py -k (\w+)")
"""Trains and kills a stage several times, which takes minutes."""
A_STEP = r"""python -c '
from maect.recipes import load_encoder
from maect.stages import load_recipe
from maect.tools import speed
speed.SECONDS = 0
assert speed.measure(load_recipe("\1", "tiny", {"batch_size": 4}), load_encoder("tiny"), 4) > 0
'"""
SLOW = [name for name, text in recipes().items() if OF_ALL_STAGES.search(text)]
RECIPES = [*recipes(), *(pytest.param(f"{n}, trained", marks=pytest.mark.slow) for n in SLOW)]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_works_as_it_is_written(name, tmp_path):
    name, _, trained = name.partition(", ")
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, tmp_path / part)
    files, commands = set(), []
    for language, file, content in blocks(recipes()[name]):
        if file is None:
            commands += [content] if language == "bash" else []
            continue
        files.add(file)
        path = tmp_path / file
        assert path.exists() == (language == "diff"), file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(changed(path.read_text(), content) if path.exists() else content)
    assert files and commands
    assert len(files) <= MOST_FILES.get(name, 3)
    script = "\n".join(["set -eo pipefail", *commands])
    if not trained:
        script = OF_ALL_STAGES.sub(A_STEP, script)
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PATH": programs},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
