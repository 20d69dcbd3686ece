"""What the `maect` commands that report do with their options."""

import argparse
from pathlib import Path

from maect.core.errors import UserError
from maect.core.files import read_json, write_text


def table(options: argparse.Namespace) -> None:
    """`maect table`: CSV, or by the file's ending Markdown, LaTeX or a page (.md, .tex, .html)."""
    from maect.report import page, render, tables

    rows = [tables.Row.parse(text) for text in options.row]
    frame = tables.build_table(options.name, rows, options.evaluations, not options.no_paper)
    for out in options.out:
        if out.suffix == ".csv":
            tables.write_table(frame, out)
        elif out.suffix == ".md":
            write_text(out, render.to_markdown(frame, options.name))
        elif out.suffix == ".tex":
            write_text(out, render.to_latex(frame, options.name))
        elif out.suffix == ".html":
            write_text(out, page.to_html(frame, options.name, rows, options.evaluations))
        else:
            raise UserError(f"{out}: a table is .csv, .md, .tex or .html")


def figure(options: argparse.Namespace) -> None:
    """`maect figure`: PDF and PNG."""
    from maect.report import figures
    from maect.report.class_names import class_titles
    from maect.report.tables import Row

    out = {path.suffix: path for path in options.out}
    if set(out) != {".pdf", ".png"}:
        raise UserError(f"figure {options.name}: is drawn to one .pdf and one .png")
    rows = [Row.parse(text) for text in options.row]
    names = class_titles(read_json(options.classes)["class_names"]) if options.classes else None
    files = out[".pdf"], out[".png"]
    figures.draw(options.name, rows, options.evaluations, *files, names, not options.no_paper)


def claims(options: argparse.Namespace) -> None:
    """`maect claims`: which of the paper's statements these tables support."""
    from maect.report import claims, cost, page, tables

    rows = [tables.Row.parse(text) for text in options.row]
    frames = {path.stem: tables.read_table(path) for path in options.tables}
    frames["cost"] = cost.cost_table(rows, options.runs)
    verdicts = claims.claims_table(frames)
    for out in options.out:
        if out.suffix == ".csv":
            claims.write_claims(verdicts, out)
        elif out.suffix == ".html":
            write_text(out, page.claims_page(verdicts))
        else:
            raise UserError(f"{out}: claims are .csv or .html")


def show(options: argparse.Namespace) -> None:
    """`maect show`: the tables of a results folder, and where everything is."""
    from maect.report import render, tables

    root: Path = options.root
    if not root.exists():
        raise UserError(f"{root}: no such results folder")
    for path in sorted(root.glob("tables/*.csv")):
        print(f"{path}\n{render.to_text(tables.read_table(path), path.stem)}")
    for path in [*sorted(root.glob("figures/*.png")), root / "report.html"]:
        if path.exists():
            print(path)
