"""Length of pages and of sentences: docs stay readable."""

import re
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
def test_a_page_is_short_and_so_are_its_sentences(page):
    text = page.read_text(encoding="utf-8")
    in_results = ROOT / "docs/results" in page.parents
    usual = MOST_WORDS_OF_RESULTS if in_results else MOST_WORDS_OF_A_PAGE
    most = MOST_WORDS.get(page, usual)
    assert length(page) <= most, f"{length(page)} words; at most {most}"
    longest = sorted(sentences(text), key=words)[-3:]
    assert mean(text) < LONGEST_MEAN, f"{mean(text):.1f} words a sentence; split {longest}"


def test_all_pages_together_can_be_read():
    total = sum(map(length, PAGES))
    assert total <= MOST_WORDS_OF_ALL, f"{total} words; cut what nobody has to know"
    assert len(PAGES) <= 50
