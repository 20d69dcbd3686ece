"""The documentation's site is built, and every link and anchor in it leads somewhere."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cyclopts import UnknownOptionError

from maect.cli import build_app
from maect.data.retrieve import CATALOGUE

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *(
        page
        for page in (ROOT / "docs").rglob("*.md")
        if page.name != "found.md" and page.parent.name != "sources"
    ),
]


def build(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    return subprocess.run([*command, *words], capture_output=True, text=True, cwd=ROOT)


def test_the_site_is_built_without_a_broken_link(tmp_path: Path) -> None:
    done = build(tmp_path / "site")
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


def test_a_broken_link_would_be_found(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("[gone](gone.md) [nowhere](#nowhere)")
    settings = re.sub(r"(?s)\nnav:.*", "\n", (ROOT / "mkdocs.yml").read_text())
    settings = re.sub(r"\nhooks:.*", "", settings)
    (tmp_path / "mkdocs.yml").write_text(settings)
    done = build(tmp_path / "site", "--config-file", str(tmp_path / "mkdocs.yml"))
    assert done.returncode != 0
    assert "gone.md" in done.stderr and "#nowhere" in done.stderr


def test_the_files_that_the_readme_links_to_are_there() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text(encoding="utf-8")):
        if badge := re.match(r"\.\./\.\./actions(/workflows/\w+\.yml)", target):
            target = f".github{badge[1]}"
        assert (ROOT / target).exists(), target


def test_the_readmes_first_screen_says_what_to_type() -> None:
    """A catalogue of workflows lists a project only if its README has these two words."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first = " ".join(text.partition("\n## ")[0].split())
    assert "Snakemake workflow" in first
    for command in ("make demo", "make test", "snakemake --profile cluster_profiles/juwels"):
        assert command in first
    assert "each set everything up on a fresh machine" in first
    assert "about four points on the digits" in first
    assert (ROOT / "cluster_profiles/juwels/config.yaml").exists()


def test_the_picture_of_the_rules_has_all_of_them() -> None:
    """`make docs` draws it."""
    words = ["-m", "snakemake", "--config", "experiment=digits", "--rulegraph", "dot"]
    drawn = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT)
    rules = set(re.findall(r'label = "(\w+)"', drawn.stdout))
    picture = (ROOT / "docs/images/pipeline.svg").read_text(encoding="utf-8")
    assert rules and rules == set(re.findall(r"<text[^>]*>(\w+)</text>", picture))


def test_the_index_of_results_names_every_page() -> None:
    results = ROOT / "docs/results"
    index = results / "README.md"
    links = re.findall(r"\]\(([^)#]+)", index.read_text(encoding="utf-8"))
    pages = {*results.glob("*.md"), *results.glob("*/README.md")}
    pages -= {index, results / "sources/README.md"}
    own = {results / link for link in links if link.endswith(".md") and not link.startswith("..")}
    assert own == pages


def commands(text: str) -> list[list[str]]:
    """Words of the `maect` commands in code blocks, whose lines a backslash may join."""
    text = text.replace("\\\n", " ")
    lines = re.findall(r"^(?: {4,})?(maect [^|\n]*)", text, flags=re.M)
    return [shlex.split(line, comments=True)[1:] for line in lines if "--help" not in line]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_on_a_page_are_understood(page: Path) -> None:
    for words in commands(page.read_text(encoding="utf-8")):
        build_app().parse_args(words, exit_on_error=False, print_error=False)


def test_a_command_with_an_unknown_option_would_be_found(tmp_path: Path) -> None:
    text = "    maect clean results --removed  # no\n\nmaect shard a \\\n    b --shards 2\n"
    assert commands(text) == [
        ["clean", "results", "--removed"], ["shard", "a", "b", "--shards", "2"],
    ]  # fmt: skip
    with pytest.raises(UnknownOptionError, match="--removed"):
        build_app().parse_args(commands(text)[0], exit_on_error=False, print_error=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_fetched_is_in_the_catalogue_and_what_is_imported_was_fetched(page: Path) -> None:
    """`maect retrieve NAME FOLDER`, then `maect import FOLDER/FILE RUN`."""
    fetched: set[str] = set()
    for words in commands(page.read_text(encoding="utf-8")):
        if words[0] == "retrieve" and re.fullmatch(r"[a-z0-9_]+", words[1]):
            fetched |= {os.path.join(words[2], remote.name) for remote in CATALOGUE[words[1]]}
        elif words[0] == "import" and fetched:
            assert words[1] in fetched
