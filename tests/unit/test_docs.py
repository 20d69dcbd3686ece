"""The documentation's site is built, and every link and anchor in it leads somewhere."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


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


def test_a_broken_link_would_be_found(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text("[gone](gone.md) [nowhere](#nowhere)")
    settings = re.sub(r"(?s)\nnav:.*", "\n", (ROOT / "mkdocs.yml").read_text())
    (tmp_path / "mkdocs.yml").write_text(settings)
    done = build(tmp_path / "site", "--config-file", str(tmp_path / "mkdocs.yml"))
    assert done.returncode != 0
    assert "gone.md" in done.stderr and "#nowhere" in done.stderr


def test_the_files_that_the_readme_links_to_are_there() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text(encoding="utf-8")):
        assert (ROOT / target).exists(), target
