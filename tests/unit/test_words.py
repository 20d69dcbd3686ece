"""Length of pages and of sentences, and no bad example of the style: docs stay readable."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = sorted(
    path
    for path in (ROOT / "docs").rglob("*.md")
    # Not texts of generated pages, which count as those pages, nor a journal's manuscript.
    if path.parent.name not in ("sources", "paper") and path.name != "found.md"
)
MOST_WORDS_OF_ALL = 45_000
MOST_WORDS = {
    README: 899,
    ROOT / "CHANGELOG.md": 1500,
    ROOT / "docs/gpu.md": 1200,
    ROOT / "docs/scaling.md": 700,
}
MOST_WORDS_OF_RESULTS = 600
MOST_WORDS_OF_A_PAGE = 2500
LONGEST_MEAN = 16
BAD_EXAMPLES = (
    "has learned everything about an image and tunes it",
    "takes a few minutes of downloads without a word",
    "resumes where it was, and ends with the same bits",
    "what is printed of other methods without a run",
    "no MAE of twice the length was trained beside it",
    "nothing is concluded; waiting goes on",
    "settings of your shell for SLURM do not count",
    "whoever is in a hurry writes a number",
    "where the weights are from only you know",
    "of each of the largest groups the images nearest to its mean",
    "which may still be at it: by way of pinned memory",
    "or the ranks be others than it waits for",
    "what happens to each decoded image before flip and colours, if anything",
)
"""Phrases of sentences that the style was made against."""


def words(text: str) -> int:
    """Words that a reader sees; a link counts by its text."""
    text = re.sub(r"<!--.*?-->", " ", text, flags=re.S)
    text = re.sub(r"!?\[([^\]]*)\]\([^)\s]*\)", r"\1", text)
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def sentences(text: str) -> list[str]:
    """Sentences of the prose, without tables, headings and code blocks; inline code is a word."""
    text = re.sub(r"<!--.*?-->|^```.*?^```$", "", text, flags=re.S | re.M)
    kept = [
        "" if re.match(r"\s*[|#]| {4,}(?![-*\d])", line) else line for line in text.splitlines()
    ]
    # A paragraph and an item of a list end a sentence, too.
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*>]|\d+\.) )", "\n".join(kept))
    found = []
    for block in blocks:
        block = re.sub(r"!?\[([^\]]*)\]\([^)\s]*\)", r"\1", block)
        block = re.sub(r"`[^`]*`", "code", block).replace("et al.", "et al")
        found += re.split(r"(?<=[.!?])[)*\"]*\s+(?=\S)", block)
    return [" ".join(part.split()) for part in found if re.search(r"\w", part)]


def mean(text: str) -> float:
    """Words in a sentence, on average."""
    counts = [words(sentence) for sentence in sentences(text)]
    return sum(counts) / max(len(counts), 1)


def length(page: Path) -> int:
    """Words of a page with tables, code and all, as `wc -w` counts."""
    return len(page.read_text(encoding="utf-8").split())


@pytest.mark.parametrize(
    "page", sorted({*MOST_WORDS, *PAGES}), ids=lambda page: str(page.relative_to(ROOT))
)
def test_a_page_is_short_and_so_are_its_sentences(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    in_results = ROOT / "docs/results" in page.parents
    usual = MOST_WORDS_OF_RESULTS if in_results else MOST_WORDS_OF_A_PAGE
    most = MOST_WORDS.get(page, usual)
    assert length(page) <= most, f"{length(page)} words; at most {most}"
    longest = sorted(sentences(text), key=words)[-3:]
    assert mean(text) < LONGEST_MEAN, f"{mean(text):.1f} words a sentence; split {longest}"


def test_all_pages_together_can_be_read() -> None:
    total = sum(map(length, PAGES))
    assert total <= MOST_WORDS_OF_ALL, f"{total} words; cut what nobody has to know"
    assert len(PAGES) <= 50


def test_no_bad_example_of_the_style_is_written() -> None:
    kinds = {".md", ".py", ".yaml", ".smk", ".html", ".ipynb", ".sh"}
    folders = ("maect", "workflow", "docs", "benchmarks", "cluster_profiles", "envs")
    files = [path for name in folders for path in (ROOT / name).rglob("*") if path.suffix in kinds]
    found = []
    for path in [*ROOT.glob("*.md"), *files]:
        text = " ".join(path.read_text(encoding="utf-8").split()).lower()
        found += [(path, bad) for bad in BAD_EXAMPLES if bad.lower() in text]
    assert not found


def test_what_is_counted() -> None:
    text = (
        "# Not this\n\nOne two three. Four `a b c` [six](x.md#y)\nseven.\n\n    code here\n\n"
        "| a | b |\n| --- | --- |\n\n- An item: v. 0.5\n- Lehner et al. 2024 wrote\n\n"
        "```python\nmore code.\n```\n"
    )
    assert [words(sentence) for sentence in sentences(text)] == [3, 4, 3, 1, 5]
    assert mean(text) == 16 / 5
    assert words("[a b](c.md) <!-- no --> | 1.5 --- |") == 3


def test_docstrings_say_what_a_thing_does_or_is() -> None:
    """They begin with a verb or a noun; those of `statements.py` are statements of the paper."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    question = re.compile("(Wh(at|ether|ere|ich|y|en|o)|How)")
    found = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path in sorted((ROOT / "maect").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, kinds) and (text := ast.get_docstring(node) or "")
        if question.match(text) and path.name != "statements.py"
    ]
    assert not found


def test_no_class_name_stands_for_two_things() -> None:
    theirs = {"LogHandler"}  # Snakemake finds a plugin's class by this name
    classes = Counter(
        node.name
        for path in (ROOT / "maect").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in classes.items() if count > 1} <= theirs


def test_no_module_name_stands_for_two_things() -> None:
    """A package's base class, its commands and its entry point are called alike everywhere."""
    alike = {"__init__", "__main__", "base", "commands"}
    modules = Counter(path.stem for path in (ROOT / "maect").rglob("*.py"))
    assert {name for name, count in modules.items() if count > 1} == alike


def test_no_test_module_hides_another() -> None:
    """pytest imports those of folders that are no packages by their names alone."""
    names = Counter(
        path.name
        for path in (ROOT / "tests").rglob("test_*.py")
        if not (path.parent / "__init__.py").exists()
    )
    assert max(names.values()) == 1, names.most_common(3)
