"""The documentation's site is built, and every link and anchor in it leads somewhere."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from test_words import PAGES, README

from maect.cli import build_app
from maect.data.retrieve import CATALOGUE
from maect.evaluate import load_evaluation

ROOT = Path(__file__).parents[2]


def test_the_site_is_built_without_a_broken_link(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    start = (tmp_path / "site/index.html").read_text(encoding="utf-8")
    for page in ("experiments", "cluster", "report", "method", "data", "evaluation"):
        assert f'href="{page}/"' in start
        assert (tmp_path / "site" / page / "index.html").exists()
    commands, keys, python = (
        (tmp_path / "site/reference" / page / "index.html").read_text(encoding="utf-8")
        for page in ("commands", "keys", "python")
    )
    assert "new-experiment" in commands and "--ignore-folders" in commands
    assert "online_evaluation" in keys and "starting_from" in keys
    assert "ImageEncoder" in python and "batch_sampler" in python
    tables = (tmp_path / "site/results/digits/all_tables/index.html").read_text(encoding="utf-8")
    assert tables.count("<table>") > 10 and "MAE-CT min" in tables


def commands(text: str) -> list[list[str]]:
    """Words of the `maect` commands in code blocks, whose lines a backslash may join."""
    text = text.replace("\\\n", " ")
    lines = re.findall(r"^(?: {4,})?(maect [^|\n]*)", text, flags=re.M)
    return [shlex.split(line, comments=True)[1:] for line in lines if "--help" not in line]


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_on_a_page_are_understood(page):
    """What is retrieved is in the catalogue, and what is imported then was retrieved."""
    fetched: set[str] = set()
    app = build_app()
    for words in commands(page.read_text(encoding="utf-8")):
        app.parse_args(words, exit_on_error=False, print_error=False)
        if words[0] == "retrieve" and re.fullmatch(r"[a-z0-9_]+", words[1]):
            fetched |= {os.path.join(words[2], remote.name) for remote in CATALOGUE[words[1]]}
        elif words[0] == "import" and fetched:
            assert words[1] in fetched


def test_the_readme_says_what_to_type_and_links_to_files_that_are_there():
    """A catalogue of workflows lists a project only if its README has these two words."""
    text = README.read_text(encoding="utf-8")
    first = " ".join(text.partition("\n## ")[0].split())
    assert "Snakemake workflow" in first
    for command in ("make demo", "make test", "snakemake --profile cluster_profiles/juwels"):
        assert command in first
    assert (ROOT / "cluster_profiles/juwels/config.yaml").exists()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        if badge := re.match(r"\.\./\.\./actions(/workflows/\w+\.yml)", target):
            target = f".github{badge[1]}"
        assert (ROOT / target).exists(), target


def test_the_example_of_settings_is_read():
    page = (ROOT / "docs/evaluation.md").read_text(encoding="utf-8")
    (block,) = re.findall(r'```yaml title="settings"\n(.*?)```', page, re.DOTALL)
    for name, values in yaml.safe_load(block)["protocols"].items():
        protocol, settings = load_evaluation(name, "tiny", values)
        assert settings.identifying().keys() == values.keys() - {"protocol"}, protocol
