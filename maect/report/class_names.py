"""Names of classes that a reader understands."""

import re
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

WORDNET = re.compile(r"n\d{8}")
LEMMAS = "data/_info/imagenet_synset_to_lemma.txt"


@cache
def _lemmas() -> dict[str, str]:
    """WordNet id -> its words, from the file that comes with timm (read without importing it)."""
    spec = find_spec("timm")
    if spec is None or not spec.submodule_search_locations:
        return {}
    text = (Path(spec.submodule_search_locations[0]) / LEMMAS).read_text(encoding="utf-8")
    pairs = (line.split("\t") for line in text.splitlines() if "\t" in line)
    return {key: words.split(",")[0] for key, words in pairs}


def class_titles(names: Sequence[str]) -> list[str]:
    """How classes are printed: WordNet ids by their first word, the others by their folder."""
    if all(WORDNET.fullmatch(name) for name in names):
        return [_lemmas().get(name, name) for name in names]
    return [name.replace("_", " ") for name in names]
