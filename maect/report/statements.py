"""Statements of the paper that its tables can decide: `paper/statements.yaml`.

A comparison is Python on values TABLE.ARCHITECTURE.METHOD.METRIC (`x.large["ema_0.9"].accuracy` for
names with a dot) and numbers; `*` is every architecture for which the experiment has all of the
comparison's models that are named with it; the metric `each_shift` is each of the paper's shifted
test sets, or each of those that stand in for them. They are text, not functions, because
`claims.csv` and the report print them.
"""

from pydantic.dataclasses import dataclass

from maect.paper import STRICT, read_paper

SHIFTED = ("imagenet_v2", "imagenet_r", "imagenet_sketch", "imagenet_a")
EACH_SHIFT = "each_shift"


@dataclass(frozen=True, config=STRICT)
class Statement:
    """A statement, where the paper makes it, and the comparisons that decide it."""

    name: str
    text: str
    paper: str
    comparisons: tuple[str, ...]


STATEMENTS = read_paper("statements", tuple[Statement, ...])
