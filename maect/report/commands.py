"""What the `maect` commands that report do with their options."""

import argparse
import sys
from pathlib import Path

from maect.core.errors import UserError
from maect.core.files import write_text
from maect.report.config import ClaimsConfig, Row, ShownConfig


def table(path: Path) -> None:
    """`maect table tables/NAME.yaml`: beside it NAME as CSV, Markdown, LaTeX and a page."""
    from maect.report import render, tables

    config = ShownConfig.read(path)
    frame = tables.build_table(
        config.name, config.rows, config.evaluations, config.compare_with_paper
    )
    tables.write_table(frame, path.with_suffix(".csv"))
    printed = render.printed(frame, config.name, config.rows, config.evaluations)
    for form in ("md", "tex", "html"):
        write_text(path.with_suffix(f".{form}"), render.render(printed, form))


def figure(path: Path) -> None:
    """`maect figure figures/NAME.yaml`: beside it NAME as PDF and PNG."""
    from maect.report.figures import draw

    draw(ShownConfig.read(path), path.with_suffix(".pdf"), path.with_suffix(".png"))


def claims(path: Path) -> None:
    """`maect claims claims.yaml`: beside it the verdicts as CSV and as a page."""
    from maect.report import claims, render, tables

    config = ClaimsConfig.read(path)
    frames = {file.stem: tables.read_table(file) for file in config.tables}
    frames["cost"] = tables.cost_table(config.rows, config.runs)
    verdicts = claims.claims_table(frames)
    claims.write_claims(verdicts, path.with_suffix(".csv"))
    write_text(path.with_suffix(".html"), render.claims_page(verdicts))


# The same by options, until the rules write these files.


def parse_row(text: str) -> Row:
    """`ARCHITECTURE:METHOD:RUN[,RUN]`; nothing behind the second colon means not run.

    Raises:
        UserError: other than three parts, or one of the first two is empty.
    """
    parts = text.split(":")
    if len(parts) != 3 or not parts[0] or not parts[1]:
        raise UserError(f"row {text!r}: write ARCHITECTURE:METHOD:RUN[,RUN]")
    return Row(parts[0], parts[1], [run for run in parts[2].split(",") if run])


def table_of(options: argparse.Namespace) -> None:
    """`maect table`: CSV, or by the file's ending Markdown, LaTeX or a page (.md, .tex, .html)."""
    from maect.report import render, tables

    rows = [parse_row(text) for text in options.row]
    frame = tables.build_table(options.name, rows, options.evaluations, not options.no_paper)
    printed = render.printed(frame, options.name, rows, options.evaluations)
    for out in options.out:
        if out.suffix == ".csv":
            tables.write_table(frame, out)
        elif out.suffix in (".md", ".tex", ".html"):
            write_text(out, render.render(printed, out.suffix[1:]))
        else:
            raise UserError(f"{out}: a table is .csv, .md, .tex or .html")


def figure_of(options: argparse.Namespace) -> None:
    """`maect figure`: PDF and PNG."""
    from maect.report.figures import draw

    out = {path.suffix: path for path in options.out}
    if set(out) != {".pdf", ".png"}:
        raise UserError(f"figure {options.name}: is drawn to one .pdf and one .png")
    shown = ShownConfig(
        name=options.name,
        rows=[parse_row(text) for text in options.row],
        evaluations=options.evaluations,
        runs=options.evaluations.parent / "runs",
        compare_with_paper=not options.no_paper,
        classes=options.classes,
    )
    draw(shown, out[".pdf"], out[".png"])


def claims_of(options: argparse.Namespace) -> None:
    """`maect claims`: which of the paper's statements these tables support."""
    from maect.report import claims, render, tables

    rows = [parse_row(text) for text in options.row]
    frames = {path.stem: tables.read_table(path) for path in options.tables}
    frames["cost"] = tables.cost_table(rows, options.runs)
    verdicts = claims.claims_table(frames)
    for out in options.out:
        if out.suffix == ".csv":
            claims.write_claims(verdicts, out)
        elif out.suffix == ".html":
            write_text(out, render.claims_page(verdicts))
        else:
            raise UserError(f"{out}: claims are .csv or .html")


def show(options: argparse.Namespace) -> None:
    """`maect show`: the tables of a results folder, and where everything is."""
    from rich.console import Console

    from maect.report import render, tables

    root: Path = options.root
    if not root.exists():
        raise UserError(f"{root}: no such results folder")
    # Cells are wrapped to fit a terminal, and nowhere else.
    console = Console(width=None if sys.stdout.isatty() else 1000)
    for path in sorted(root.glob("tables/*.csv")):
        print(path)
        console.print(render.for_terminal(render.printed(tables.read_table(path), path.stem)))
    for path in [*sorted(root.glob("figures/*.png")), root / "report.html"]:
        if path.exists():
            print(path)
