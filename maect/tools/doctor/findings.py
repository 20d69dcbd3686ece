"""What was found, as lines."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        kind: "ok", "note" (nothing to do with whether it works) or "FAIL".
        hint: what to do, of a failure.
    """

    kind: Literal["ok", "note", "FAIL"]
    what: str
    hint: str = ""


def lines(findings: Iterable[Finding]) -> list[str]:
    """For the terminal."""
    out = []
    for finding in findings:
        out.append(f"{finding.kind:<5}{finding.what}")
        if finding.hint:
            out.append(f"     hint: {finding.hint}")
    return out
