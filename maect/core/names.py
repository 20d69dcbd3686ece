"""Names that a user has misspelt."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], label: str = "known") -> str:
    """The hint of a message about an unknown name: the nearest known one, else all of them."""
    known = list(dict.fromkeys(known))
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"{label}: {', '.join(known) or 'none'}"
