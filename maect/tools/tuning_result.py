"""Result of `maect tune`: is the encoder better on held-out images, and which one is kept."""

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from maect.core.errors import UserError, counted
from maect.core.files import write_table_text, write_text
from maect.evaluate.outcomes import Difference, difference, holm, outcomes_of, unpack
from maect.evaluate.protocols.encoders import Agreement
from maect.evaluate.protocols.stored_features import Geometry
from maect.experiment.load import Experiment
from maect.records import EvaluationRecord, Outcome
from maect.report.render import render_page
from maect.tools.tuning import AFTER, BEFORE

Word = Literal["Better", "Worse", "Not distinguishable"]
LEVEL = 0.05
KNN, AGREEMENT, WHITENED = "knn_raw", "agreement", "knn_whitened_0.01"
MEASURES = {
    KNN: "k-NN",
    "low_shot_1_raw": "1 label a class",
    "low_shot_2_raw": "2 labels a class",
    "low_shot_5_raw": "5 labels a class",
    "accuracy_raw": "cluster accuracy",
    WHITENED: "k-NN, features whitened",
    AGREEMENT: "neighbours that two views share",
}
SPREAD = {
    "alignment": "alignment of two views (0: equal)",
    "uniformity": "uniformity (0: all alike)",
    "rank_me": "RankMe (effective rank)",
}
LEAST_RANK = 0.5
"""Part of the effective rank that must be left without labels: collapsed features agree, too."""


@dataclass(frozen=True)
class TuningVerdict:
    """Answer to the question of whether a continued encoder is better.

    Attributes:
        word: the answer.
        measure: key of `MEASURES` that it rests on.
        reason: why it is not what the difference says; empty: it is.
    """

    word: Word
    measure: str
    reason: str = ""


def judge(differences: Mapping[str, Difference], ranks: tuple[float, float]) -> TuningVerdict:
    """Judge by k-NN, or without classes by the agreement of neighbours.

    A difference counts if its 95 % interval is on one side of 0 and its p below 0.05. Without
    classes more agreement counts only if at least half of the effective rank is left.

    Args:
        differences: on the held-out images, by measure.
        ranks: RankMe before and after.
    """
    measure = KNN if KNN in differences else AGREEMENT
    found = differences[measure]
    if found.p >= LEVEL or found.low <= 0 <= found.high:
        return TuningVerdict("Not distinguishable", measure)
    if found.value < 0:
        return TuningVerdict("Worse", measure)
    before, after = ranks
    if measure == AGREEMENT and after < LEAST_RANK * before:
        reason = f"the effective rank fell from {before:.1f} to {after:.1f}, as in a collapse"
        return TuningVerdict("Not distinguishable", measure, reason)
    return TuningVerdict("Better", measure)


def sentence(verdict: TuningVerdict, before: float, after: float, found: Difference) -> str:
    """Return the verdict with its number, as one sentence."""
    title = MEASURES[verdict.measure]
    title = title[0].lower() + title[1:]
    rests = f"{title} {before:.1f} → {after:.1f} %, {found.value:+.1f} points"
    rests += f" ({found.low:+.1f} to {found.high:+.1f}; p {_p(found.p)})"
    why = f"; {verdict.reason}" if verdict.reason else ""
    return f"{verdict.word}: {rests} on {counted(found.images, 'held-out image')}{why}."


def _p(value: float) -> str:
    return f"{value:.2g}" if value >= 1e-4 else "< 0.0001"


@dataclass(frozen=True)
class Measured:
    """Both encoders on the held-out images.

    Attributes:
        differences: after minus before, by measure.
        means: of both in percent, by measure.
        spread: values that no image has, of both.
        matrix: tuned minus the original's whitened features, k-NN; None without classes.
    """

    differences: dict[str, Difference]
    means: dict[str, tuple[float, float]]
    spread: dict[str, tuple[float, float]]
    matrix: Difference | None

    @property
    def verdict(self) -> TuningVerdict:
        """Return the verdict."""
        return judge(self.differences, self.spread["rank_me"])

    @property
    def sentence(self) -> str:
        """Return the verdict as one sentence."""
        measure = self.verdict.measure
        return sentence(self.verdict, *self.means[measure], self.differences[measure])

    @property
    def free(self) -> str:
        """Return how tuning compares with a whitening matrix, which needs no training."""
        if self.matrix is None:
            return ""
        whitened, _ = self.means[WHITENED]
        found = self.matrix
        start = f"Without training: whitening the original's features gives k-NN {whitened:.1f} %"
        if found.p >= LEVEL or found.low <= 0 <= found.high:
            interval = f"{found.value:+.1f} points, {found.low:+.1f} to {found.high:+.1f}"
            return f"{start} and does as well as the continued encoder ({interval})."
        word = "is behind" if found.value > 0 else "is ahead of"
        low, high = sorted((abs(found.low), abs(found.high)))
        points = f"{abs(found.value):.1f} points ({low:.1f} to {high:.1f})"
        return f"{start} and {word} the continued encoder by {points}."


def measured(experiment: Experiment) -> Measured:
    """Read the evaluations of both encoders.

    Raises:
        UserError: they are not there, or of other images.
    """
    kept: dict[str, dict[str, Outcome]] = {BEFORE: {}, AFTER: {}}
    images: dict[str, str] = {}
    for run, name in experiment.evaluations:
        if run in kept and name in (Geometry.name, Agreement.name):
            digest, outcomes = outcomes_of(_result(experiment, run, name))
            if images.setdefault(name, digest) != digest:
                raise UserError(f"{experiment.root}: {name} was measured on other images")
            kept[run] |= {key: one for key, one in outcomes.items() if key in MEASURES}
    differences, means = {}, {}
    for key in MEASURES:
        if key in kept[BEFORE]:
            first, second = unpack(kept[BEFORE][key]), unpack(kept[AFTER][key])
            differences[key] = difference(first, second)
            means[key] = 100 * float(np.mean(first)), 100 * float(np.mean(second))
    spreads = [
        EvaluationRecord.read(_result(experiment, run, Agreement.name)).metrics
        for run in (BEFORE, AFTER)
    ]
    spread = {key: (float(spreads[0][key]), float(spreads[1][key])) for key in SPREAD}
    matrix = None
    if WHITENED in kept[BEFORE]:
        matrix = difference(unpack(kept[BEFORE][WHITENED]), unpack(kept[AFTER][KNN]))
    return Measured(differences, means, spread, matrix)


def _result(experiment: Experiment, run: str, name: str) -> Path:
    return experiment.root / "evaluations" / run / f"{name}.json"


def conclude(experiment: Experiment, name: str) -> list[str]:
    """Write the result's page and table, export the better encoder, and return lines to print.

    Args:
        name: of the encoder that was continued.

    Raises:
        UserError: the experiment is not finished.
    """
    found = measured(experiment)
    chosen = AFTER if found.verdict.word == "Better" else BEFORE
    kept, how = _exported(experiment, chosen)
    whose = "the continued encoder" if chosen == AFTER else f"the original, {name}"
    keeps = f"Kept: {whose}, in {kept}."
    rows = _rows(found)
    table = io.StringIO()
    writer = csv.DictWriter(table, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_table_text(experiment.root / "result.csv", table.getvalue())
    page = experiment.root / "result.html"
    text = render_page(
        "tuning.html", title=found.sentence, kept=keeps, free=found.free, rows=rows,
        spread=[
            {"title": title, "before": f"{found.spread[key][0]:.2f}",
             "after": f"{found.spread[key][1]:.2f}"}
            for key, title in SPREAD.items()
        ],
        name=name, how=how,
    )  # fmt: skip
    write_text(page, text)
    return [*filter(None, (found.sentence, keeps, found.free)), f"{page}: open it"]


def _rows(found: Measured) -> list[dict[str, str]]:
    """Return the table, a row a measure; p is corrected for all of them (Holm)."""
    chances = holm([one.p for one in found.differences.values()])
    rows = []
    for (key, one), p in zip(found.differences.items(), chances, strict=True):
        before, after = found.means[key]
        rows.append(
            {
                "measure": MEASURES[key], "before": f"{before:.1f}", "after": f"{after:.1f}",
                "difference": f"{one.value:+.1f}", "low": f"{one.low:+.1f}",
                "high": f"{one.high:+.1f}", "p": _p(p), "images": str(one.images),
            }
        )  # fmt: skip
    return rows


def _exported(experiment: Experiment, run: str) -> tuple[Path, str]:
    """Export a run into `encoder`; return the folder, and code that loads it.

    What no model of timm can be stays in the run's own folder.
    """
    from maect.answers.card import card_of
    from maect.models.export import export_run
    from maect.stages.run import resize_of

    folder = experiment.folder(run)
    out = experiment.root / "encoder"
    try:
        export_run(folder, out, resize_of(folder), card_of(folder, None))
    except UserError:
        out = folder
    return out, f'encoder = maect.load("{out}")'
