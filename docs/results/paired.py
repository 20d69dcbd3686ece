"""Differences of encoders on the same test images, from what `publish.py` wrote.

A difference is the mean over seeds. ± is its standard deviation over seeds (n - 1), the interval
is by the bootstrap over images of the mean over seeds, and p is that the images' mean differences
have random signs. So interval and p are about images, for these trainings. ± is about trainings,
and so is `p_seeds`, a paired t-test over seeds.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import yaml
from numpy.typing import NDArray

from maect.evaluate.outcomes import difference, holm, unpack
from maect.records import Outcome
from maect.report.bounds import LEVEL, chance_of
from maect.report.render import MISSING

MAE, LOOKUP, NONE, STOPPED = "MAE", "lookup", "no lookup", "no lookup, gradient stopped"
VIEWS = {"min": "crops", "aug": "colours"}
DATA = {
    "digits_no_lookup": "digits",
    "cifar10_no_lookup": "CIFAR-10",
    "imagenette": "Imagenette",
    "tiny_imagenet_no_lookup": "Tiny-ImageNet",
}
"""Experiments with every kind of lookup, and the images that they have."""


@dataclass(frozen=True)
class Published:
    """The numbers of a published experiment."""

    folder: Path

    @cached_property
    def runs(self) -> dict[tuple[str, str], dict[int, str]]:
        """Runs by seed, by what they are (`MAE`, `LOOKUP` ...) and their views (none: an MAE)."""
        table = pd.read_csv(self.folder / "runs.csv", keep_default_na=False)
        found: dict[tuple[str, str], dict[int, str]] = {}
        for line in table[table["finished"]].to_dict("records"):
            if line["stage"] == "pretrain":
                found.setdefault((MAE, ""), {})[line["seed"]] = line["run"]
            elif line["stage"] == "tune":
                config = self.folder / f"resolved/{line['run']}.yaml"
                settings = yaml.safe_load(config.read_text(encoding="utf-8"))["settings"]
                head = settings["head"]
                kind = LOOKUP
                if head["lookup"] == "none":
                    kind = STOPPED if head["stop_gradient"] else NONE
                views = VIEWS[settings["augmentation"]]
                found.setdefault((kind, views), {})[line["seed"]] = line["run"]
        return found

    @cached_property
    def values(self) -> dict[tuple[str, str, str], float]:
        """Every number, by run, evaluation and metric."""
        table = pd.read_csv(self.folder / "measured.csv")
        values = table.set_index(["run", "evaluation", "metric"])["value"].to_dict()
        return cast(dict[tuple[str, str, str], float], values)

    @cached_property
    def outcomes(self) -> dict[tuple[str, str, str], NDArray[np.float64]]:
        """The share of right answers for each test image, likewise."""
        table = pd.read_csv(self.folder / "outcomes.csv")
        kept = table.to_dict("records")
        return {
            (line["run"], line["evaluation"], line["metric"]): unpack(
                Outcome(images=line["images"], trials=line["trials"], right=line["right"])
            )
            for line in kept
        }

    def seeds(self, model: tuple[str, str], evaluation: str, metric: str) -> dict[int, float]:
        """A number of a model, by seed."""
        runs = self.runs.get(model, {})
        keys = {seed: (run, evaluation, metric) for seed, run in sorted(runs.items())}
        return {seed: self.values[key] for seed, key in keys.items() if key in self.values}

    def compare(self, first: "Side", second: "Side", evaluation: str) -> dict[str, Any] | None:
        """What the second has more than the first, over the seeds that both have; None: none.

        Of a metric without outcomes, such as NMI, only the mean and ± are known.
        """
        one, two = (self.seeds(side.model, evaluation, side.metric) for side in (first, second))
        both = sorted(one.keys() & two.keys())
        if not both:
            return None
        changes = [two[seed] - one[seed] for seed in both]
        row: dict[str, Any] = {
            "value": float(np.mean(changes)),
            "std": float(np.std(changes, ddof=1)) if len(both) > 1 else None,
            "seeds": len(both),
            "p_seeds": chance_of(changes) if len(both) > 1 else None,
        }
        names = [
            [(self.runs[side.model][seed], evaluation, side.metric) for seed in both]
            for side in (first, second)
        ]
        if all(name in self.outcomes for side in names for name in side):
            one_side, other = (np.stack([self.outcomes[n] for n in side]) for side in names)
            found = asdict(difference(one_side.mean(axis=0), other.mean(axis=0)))
            row |= {key: found[key] for key in ("images", "low", "high", "p")}
            if np.isin([one_side, other], (0, 1)).all():
                row["gained"] = int((other > one_side).sum())
                row["lost"] = int((other < one_side).sum())
        return row


@dataclass(frozen=True)
class Side:
    """One side of a comparison: a model and a metric of its evaluation."""

    model: tuple[str, str]
    metric: str


def corrected(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add Holm's p over all rows that have one."""
    tested = [row for row in rows if row.get("p") is not None]
    for row, p in zip(tested, holm([row["p"] for row in tested]), strict=True):
        row["p_holm"] = p
    return list(rows)


def number_of_tests(rows: Sequence[dict[str, Any]]) -> str:
    """How many tests Holm's correction is over, of the first data set."""
    first = [row for row in rows if row["data"] == rows[0]["data"]]
    return str(sum(row.get("p") is not None for row in first))


def cell(row: dict[str, Any] | None, digits: int = 1) -> str:
    """A difference as a table shows it: value ± over seeds [interval over images]; bold: decided.

    Decided is what both tests hold for a difference at 5 %: over images (Holm's p), over seeds.
    """
    if row is None:
        return MISSING
    text = f"{row['value']:+.{digits}f}"
    if row.get("std") is not None and not pd.isna(row["std"]):
        text += f" ± {row['std']:.{digits}f}"
    if row.get("low") is not None and not pd.isna(row["low"]):
        text += f" [{row['low']:+.{digits}f}, {row['high']:+.{digits}f}]"
    tests = [row.get(name) for name in ("p_holm", "p_seeds")]
    decided = all(p is not None and p <= LEVEL for p in tests)
    return f"**{text}**" if decided else text


def published(names: Sequence[str], here: Path) -> Iterator[tuple[str, Published]]:
    """Yield those experiments that have published outcomes."""
    for name in names:
        if (here / name / "outcomes.csv").exists():
            yield name, Published(here / name)


def filled(text: str, rows: Sequence[dict[str, Any]], **blocks: str) -> str:
    """A page: `{NAME}` is a block, `{DATA/COMPARISON/VIEWS/METRIC}` the cell of a row.

    `{value DATA/...}` is its difference alone and `{p DATA/...}` Holm's p.
    """
    known = {"/".join((r["data"], r["comparison"], r["views"], r["metric"])): r for r in rows}

    def number(match: re.Match[str]) -> str:
        how, row = match[1], known.get(match[2])
        if how is None or row is None:
            return cell(row)
        return f"{row['value']:+.1f}" if how == "value " else f"{row['p_holm']:.1g}"

    for name, block in blocks.items():
        text = text.replace(f"{{{name}}}", block)
    return re.sub(r"\{(value |p )?([^{}/]+/[^{}]+)\}", number, text)
