"""What was found, as lines."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        kind: "ok", "note" (nothing to do with whether it works) or "FAIL".
        cure: what to do, of a failure.
    """

    kind: Literal["ok", "note", "FAIL"]
    what: str
    cure: str = ""


def lines(findings: Iterable[Finding]) -> list[str]:
    """For the terminal."""
    out = []
    for finding in findings:
        out.append(f"{finding.kind:<5}{finding.what}")
        if finding.cure:
            out.append(f"     cure: {finding.cure}")
    return out
