"""Build paper.pdf and note.pdf (`make paper`); the note's numbers come from docs/results.

pandoc and Typst come from the packages pypandoc-binary and typst.
"""

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

import jinja2
import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE.parent / "results"


def rows(name: str) -> Iterator[dict[str, str]]:
    """Yield the rows of a CSV file below docs/results, named without its ending."""
    with open(RESULTS / f"{name}.csv", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def only(name: str, **wanted: str) -> dict[str, str]:
    """Return the one row with these values."""
    (row,) = (row for row in rows(name) if wanted.items() <= row.items())
    return row


def spread(value: str, std: str) -> str:
    """Return mean and standard deviation; the mean alone of one training."""
    return f"{float(value):.1f}" + (f" ± {float(std):.1f}" if std else "")


def cell(table: str, method: str, metric: str) -> str:
    """Return a method's cell of a table."""
    row = only(table, method=method)
    return spread(row[metric], row[f"{metric}_std"])


def one(folder: str, run: str, evaluation: str, metric: str) -> str:
    """Return a metric of one run."""
    named = {"run": run, "evaluation": evaluation, "metric": metric}
    return f"{float(only(f'{folder}/measured', **named)['value']):.1f}"


def geometry(data: str, model: str, views: str, correction: str, measure: str) -> str:
    """Return a measure of corrected features."""
    named = {"data": data, "model": model, "views": views, "correction": correction}
    row = only("geometry/values", **named, measure=measure)
    return spread(row["value"], row["std"] if int(row["seeds"]) > 1 else "")


def neighbours(data: str, views: str, metric: str) -> str:
    """Return lookup minus the clean control, in points."""
    named = {"data": data, "comparison": "neighbours", "views": views, "metric": metric}
    row = only("no_lookup/differences", **named)
    return f"{float(row['value']):+.1f} ± {float(row['std']):.1f}"


def note() -> str:
    """Return the note as Markdown."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.globals |= {"cell": cell, "one": one, "geometry": geometry}
    environment.globals |= {"neighbours": neighbours}
    template = environment.from_string((HERE / "note.md.j2").read_text(encoding="utf-8"))
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    return template.render(
        version=cited["version"],
        digits_images="1,797",
        kills=len([*rows("reliability/kills")]),
        faults=len([*rows("reliability/faults")]),
    )


def make_pdf(markdown: Path, out: Path) -> None:
    """Write a PDF of a page of Markdown by pandoc and Typst."""
    import pypandoc
    import typst

    words = ["--standalone", "--citeproc", f"--resource-path={HERE}"]
    words += [f"--bibliography={HERE / 'paper.bib'}", "--variable=papersize:a4"]
    words += ["--variable=fontsize:9.5pt", "--variable=margin.x:2cm", "--variable=margin.y:1.8cm"]
    page = out.with_suffix(".typ")
    pypandoc.convert_file(
        str(markdown), "typst", format="markdown", extra_args=words, outputfile=str(page)
    )
    out.write_bytes(typst.compile(str(page), root=str(ROOT)))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "note.md").write_text(note(), encoding="utf-8")
    make_pdf(folder / "note.md", folder / "note.pdf")
    make_pdf(HERE / "paper.md", folder / "paper.pdf")
