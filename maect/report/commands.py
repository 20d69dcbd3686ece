"""What the `maect` commands that report do with their options."""

import sys
from pathlib import Path

from maect.core.errors import UserError
from maect.core.files import write_text
from maect.report.config import ClaimsConfig, ShownConfig


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


def show(root: Path) -> None:
    """`maect show`: the tables of a results folder, and where everything is."""
    from rich.console import Console

    from maect.report import render, tables

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
