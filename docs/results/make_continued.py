"""Makes the page on continued encoders: three ways of training and a matrix, before and after.

    python docs/results/publish.py collect digits_continued  # once it was run
    python docs/results/make_continued.py

It reads `digits_continued/` and writes `continued/values.csv` and `continued/README.md`.
"""

from pathlib import Path

import pandas as pd
from paired import Published

from maect.core.files import write_text
from maect.evaluate.outcomes import difference, holm
from maect.report.render import MISSING

HERE = Path(__file__).parent
DATA, OUT = HERE / "digits_continued", HERE / "continued"
ENCODERS = {"mae": "MAE", "joint": "contrastive, with registers"}
WAYS = {
    "": "as it was",
    "tune": "tuned",
    "refine": "refined (MIM-Refiner)",
    "diet": "DIET",
}
MEASURES = {
    ("geometry", "knn_raw"): "k-NN",
    ("geometry", "low_shot_1_raw"): "1 label a class",
    ("geometry", "accuracy_raw"): "cluster accuracy",
    ("agreement", "agreement"): "shared neighbours",
}
WHITENED = ("geometry", "knn_whitened_0.01")


def rows(published: Published) -> list[dict[str, object]]:
    """Return a row for each encoder and way, with k-NN's paired difference to the original."""
    found: list[dict[str, object]] = []
    chances = []
    for encoder, title in ENCODERS.items():
        first = published.outcomes[f"{encoder}_tiny", *("geometry", "knn_raw")]
        for way, text in [*WAYS.items(), ("matrix", "whitened by a matrix")]:
            run = f"{way}_{encoder}_tiny" if way in WAYS and way else f"{encoder}_tiny"
            row: dict[str, object] = {"encoder": title, "continued": text}
            for key, name in MEASURES.items():
                read = ("geometry", key[1].replace("raw", "whitened_0.01"))
                key = key if way != "matrix" else read
                row[name] = published.values.get((run, *key), float("nan"))
            if way == "matrix":
                row["shared neighbours"] = float("nan")
            if way:
                metric = WHITENED if way == "matrix" else ("geometry", "knn_raw")
                change = difference(first, published.outcomes[run, *metric])
                row |= {"k-NN gain": change.value, "low": change.low, "high": change.high}
                row["p"] = change.p
                chances.append(change.p)
            found.append(row)
    for row, p in zip([row for row in found if "p" in row], holm(chances), strict=True):
        row["p"] = p
    return found


def table(frame: pd.DataFrame) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| encoder | continued | " + " | ".join(MEASURES.values()) + " | k-NN gain | p (Holm) |",
        "| --- | --- |" + " ---: |" * (len(MEASURES) + 2),
    ]
    for row in frame.to_dict("records"):
        values = [
            f"{row[name]:.1f}" if row[name] == row[name] else MISSING for name in MEASURES.values()
        ]
        gain = p = ""
        if row["p"] == row["p"]:
            gain = f"{row['k-NN gain']:+.1f} ({row['low']:+.1f} to {row['high']:+.1f})"
            p = f"{row['p']:.2g}"
        cells = [row["encoder"], row["continued"], *values, gain, p]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Write the numbers and the page."""
    frame = pd.DataFrame(rows(Published(DATA)))
    write_text(OUT / "values.csv", frame.to_csv(index=False, lineterminator="\n"))
    found = (OUT / "found.md").read_text(encoding="utf-8")
    write_text(OUT / "README.md", found.replace("<!-- table -->", table(frame)))


if __name__ == "__main__":
    main()
