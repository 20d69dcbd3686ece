"""Makes the page on continued encoders: ways of training and a matrix, before and after.

    python docs/results/publish.py collect digits_continued  # once it was run
    python docs/results/make_continued.py

It reads `digits_continued/` and `imagenette_repair/`, and writes `continued/values.csv`,
`repair/values.csv` and the two tables in `continued/README.md`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from paired import Published

from maect.core.files import write_text
from maect.evaluate.outcomes import difference, holm
from maect.report.render import MISSING

HERE = Path(__file__).parent
PAGE = HERE / "continued/README.md"
KNN, SHOT, ACCURACY = "knn_raw", "low_shot_1_raw", "accuracy_raw"
WHITENED = "whitened_0.01"
MATRIX = "whitened by a matrix"


@dataclass(frozen=True)
class Line:
    """A line of a table.

    Attributes:
        encoder: its title.
        continued: how, in words.
        run: that is read.
        first: the encoder as it was; the line of itself has no gain.
        whitened: whether the run's features are whitened.
    """

    encoder: str
    continued: str
    run: str
    first: str
    whitened: bool = False

    def read(self, evaluation: str, metric: str) -> tuple[str, str, str] | None:
        """Return the number to read; None: whitened features do not have it."""
        if self.whitened and evaluation != "geometry":
            return None
        if self.whitened:
            metric = metric.replace("raw", WHITENED)
        return self.run, evaluation, metric


@dataclass(frozen=True)
class Shown:
    """A table of the shown.

    Attributes:
        data: the published experiment.
        out: folder of its numbers.
        measures: titles of the columns, by evaluation and metric.
        lines: of the table.
    """

    data: str
    out: str
    measures: Mapping[tuple[str, str], str]
    lines: Sequence[Line]


COLUMNS = {
    ("geometry", KNN): "k-NN",
    ("geometry", SHOT): "1 label a class",
    ("geometry", ACCURACY): "cluster accuracy",
}
ENCODERS = {"mae": "MAE", "joint": "contrastive"}
WAYS = {"tune": "tuned", "refine": "refined (MIM-Refiner)", "diet": "DIET"}


def lines_of(encoder: str, title: str) -> list[Line]:
    """Return the lines of an encoder of digits."""
    first = f"{encoder}_tiny"
    ways = [Line(title, text, f"{way}_{first}", first) for way, text in WAYS.items()]
    return [
        Line(title, "as it was", first, first),
        *ways,
        Line(title, MATRIX, first, first, whitened=True),
    ]


DIGITS = Shown(
    "digits_continued",
    "continued",
    COLUMNS,
    [line for encoder, title in ENCODERS.items() for line in lines_of(encoder, title)],
)
SPOILT = "spoilt"
REPAIR = Shown(
    "imagenette_repair",
    "repair",
    COLUMNS,
    [
        Line("spoilt", "as it was", SPOILT, SPOILT),
        Line("spoilt", MATRIX, SPOILT, SPOILT, whitened=True),
        Line("spoilt", "tuned", "tune_small14", SPOILT),
        Line("spoilt", "tuned, then whitened", "tune_small14", SPOILT, whitened=True),
        Line("spoilt", "DIET", "diet_small14", SPOILT),
        Line("random", "tuned", "random_small14", SPOILT),
    ],
)
TABLES = (REPAIR, DIGITS)


def rows(shown: Shown, published: Published) -> list[dict[str, object]]:
    """Return a row for each line, with k-NN's paired difference to the encoder as it was."""
    found: list[dict[str, object]] = []
    tested: list[dict[str, object]] = []
    chances = []
    for line in shown.lines:
        row: dict[str, object] = {"encoder": line.encoder, "continued": line.continued}
        for key, name in shown.measures.items():
            read = line.read(*key)
            row[name] = float("nan") if read is None else published.values[read]
        found.append(row)
        if line.run == line.first and not line.whitened:
            continue
        read = line.read("geometry", KNN)
        assert read is not None
        first = published.outcomes[line.first, "geometry", KNN]
        change = difference(first, published.outcomes[read])
        row |= {"k-NN gain": change.value, "low": change.low, "high": change.high}
        tested.append(row)
        chances.append(change.p)
    for row, p in zip(tested, holm(chances), strict=True):
        row["p"] = p
    return found


def table(shown: Shown, frame: pd.DataFrame) -> str:
    """Return the rows as Markdown."""
    names = list(shown.measures.values())
    lines = [
        "| encoder | continued | " + " | ".join(names) + " | k-NN gain |",
        "| --- | --- |" + " ---: |" * (len(names) + 1),
    ]
    for row in frame.to_dict("records"):
        values = [f"{row[name]:.1f}" if row[name] == row[name] else MISSING for name in names]
        gain = ""
        if row["p"] == row["p"]:
            gain = f"{row['k-NN gain']:+.1f} ({row['low']:+.1f} to {row['high']:+.1f})"
        cells = [row["encoder"], row["continued"], *values, gain]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Write the numbers and the tables."""
    text = PAGE.read_text(encoding="utf-8")
    old = list(re.finditer(r"\| encoder .*\n(\|.*\n)+", text))
    for shown, found in reversed(list(zip(TABLES, old, strict=True))):
        frame = pd.DataFrame(rows(shown, Published(HERE / shown.data)))
        numbers = frame.to_csv(index=False, lineterminator="\n")
        write_text(HERE / shown.out / "values.csv", numbers)
        text = f"{text[: found.start()]}{table(shown, frame)}\n{text[found.end() :]}"
    write_text(PAGE, text)


if __name__ == "__main__":
    main()
