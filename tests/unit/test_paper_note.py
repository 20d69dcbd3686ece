"""The draft of the paper and the note: sections that JOSS asks for, numbers that are published."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILT = runpy.run_path(str(ROOT / "docs/paper/build.py"))


def test_the_note_has_the_published_numbers():
    """As the results' pages have them, which are made of the same files another way."""
    text = " ".join(BUILT["note"]().split())
    assert "| CIFAR-10: k-NN | 49.6 ± 0.5 | 53.4 ± 0.2 | 61.7 ± 0.6 |" in text
    assert "gives 95.7 ± 0.8 k-NN instead of 85.2 ± 1.3" in text
    assert "What is not measured" in text and "nan" not in text


def test_a_number_that_is_not_published_stops_the_note():
    with pytest.raises(ValueError, match="not enough values"):
        BUILT["cell"]("cifar10/tables/low_shot", "ct_other", "knn")
