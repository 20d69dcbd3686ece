"""Length of pages and of sentences: README and docs stay short enough to be read."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
# Pages below docs/results are records or generated.
PAGES = sorted(
    path for path in (ROOT / "docs").rglob("*.md") if "results" not in path.relative_to(ROOT).parts
)
MOST_WORDS = {README: 899}
MOST_WORDS_OF_A_PAGE = 2500
LONGEST_MEAN = 16


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


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_short_and_so_are_its_sentences(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    most = MOST_WORDS.get(page, MOST_WORDS_OF_A_PAGE)
    length = len(text.split())  # tables, code and all, as `wc -w` counts
    assert length <= most, f"{length} words: move details to docs/reference"
    longest = sorted(sentences(text), key=words)[-3:]
    assert mean(text) < LONGEST_MEAN, f"{mean(text):.1f} words a sentence; split {longest}"


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
    """They begin with a verb or a noun."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    question = re.compile("(Wh(at|ether|ere|ich|y|en|o)|How)")
    found = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path in sorted((ROOT / "maect").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, kinds) and (text := ast.get_docstring(node) or "")
        if question.match(text)
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
