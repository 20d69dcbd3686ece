"""Tables as pages that stand alone: readable on a phone, in print and in the dark, offline."""

import html
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from maect.core.files import read_json
from maect.report.registry import architecture_title, method_title, table_of
from maect.report.render import MISSING, cell, legend, shown, table_title
from maect.report.tables import Row, result_of

STYLE = """
:root{color-scheme:light dark;
--ink:#1c2330;--soft:#5b6575;--line:#d5dae2;--page:#fff;--head:#f3f5f8}
@media(prefers-color-scheme:dark){:root{
--ink:#e6e9ef;--soft:#a3adbd;--line:#39424f;--page:#12161c;--head:#1b212a}}
body{margin:0;padding:1rem;background:var(--page);color:var(--ink);
font:15px/1.45 system-ui,sans-serif}
h1{font-size:1.15rem;margin:0 0 .2rem}p{margin:0 0 .8rem;color:var(--soft);max-width:60rem}
div.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .5rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{background:var(--head);font-weight:600;white-space:normal}th.name,td.name{text-align:left}
td.name.first{position:sticky;left:0;background:var(--page)}
small{color:var(--soft);display:block}
td.wide{white-space:normal;min-width:12rem}td{vertical-align:top}code{overflow-wrap:anywhere}
b.holds::before{content:"✓ "}b.fails::before{content:"✗ "}b.not{font-weight:400;color:var(--soft)}
td a{color:inherit;text-decoration:underline dotted 1px;text-underline-offset:.2em}
pre:target{outline:2px solid #0072b2;padding:.3rem}
h2{font-size:1rem;margin:1.2rem 0 .3rem}pre{font-size:.8em;overflow-x:auto}
summary{cursor:pointer;color:var(--soft);font-size:.85em}
"""


def html_page(title: str, body: str) -> str:
    """A page that stands alone: no script, no font and no address outside it."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>{body}</body></html>\n"
    )


def _folded(anchor: str, title: str, value: object) -> str:
    """JSON that a link to its anchor unfolds."""
    text = html.escape(json.dumps(value, indent=1))
    return (
        f"<details><summary>{html.escape(title)}</summary><pre id={anchor}>{text}</pre></details>"
    )


def sources(name: str, rows: Sequence[Row], evaluations: Path) -> str:
    """The files behind a table: each result with its settings and provenance, and each run.

    Raises:
        UserError: a result or a completion record that cannot be read.
    """
    table = table_of(name)
    results: dict[str, str] = {}
    runs: dict[str, str] = {}
    for row in rows:
        for run, protocol in itertools.product(row.runs, table.reads(row.method)):
            path = evaluations / run / f"{protocol}.json"
            if not path.exists():
                continue
            result = read_json(path)
            kept = {key: result.get(key) for key in ("metrics", "settings", "provenance")}
            anchor = f"{run}-{protocol}"
            results[anchor] = _folded(anchor, f"evaluations/{run}/{path.name}", kept)
            record = evaluations.parent / "runs" / run / "run.json"
            if run not in runs and record.exists():
                runs[run] = _folded(f"run-{run}", f"runs/{run}/run.json", read_json(record))
    parts = (
        ("Where the numbers come from", results),
        ("The runs behind them: recipe, seed, versions, cost", runs),
    )
    return "".join(f"<h2>{title}</h2>{''.join(of.values())}" for title, of in parts if of)


def to_html(
    frame: pd.DataFrame, name: str, rows: Sequence[Row] = (), evaluations: Path = Path()
) -> str:
    """A table as a page that reads on a phone, in print and in the dark.

    With the rows it was built from, the page also shows every result behind it, and each number
    leads to its own.
    """
    table = table_of(name)
    metrics = shown(frame, table)
    lines = []
    before = None
    runs = {(row.architecture, row.method): row.runs for row in rows}
    for _, line in frame.iterrows():
        if line["architecture"] != before:
            before = line["architecture"]
            size = html.escape(architecture_title(before))
            lines.append(f'<tr><th class="name" colspan="{1 + len(metrics)}">{size}</th></tr>')
        cells = []
        for metric in metrics:
            parts = cell(line, metric)
            measured = parts.value + (f" ± {parts.deviation}" if parts.deviation else "")
            names = table.evaluations_of(metric, line["method"])
            for run in runs.get((line["architecture"], line["method"]), []):
                if path := result_of(evaluations, run, names, metric.source):
                    measured = f'<a href="#{run}-{path.stem}">{measured}</a>'
                    break
            printed = f"paper {parts.paper}" if parts.paper else ""
            printed += f" ({parts.difference})" if parts.paper and parts.difference else ""
            small = f"<small>{printed}</small>" if printed else ""
            cells.append(f"<td>{measured or MISSING}{small}</td>")
        method = html.escape(method_title(line["method"]))
        lines.append(f'<tr><td class="name first">{method}</td>{"".join(cells)}</tr>')
    header = "".join(f"<th>{html.escape(m.title)}</th>" for m in metrics)
    title = table_title(table, metrics)
    body = (
        f"<h1>{html.escape(title)}</h1>"
        f"<p>Paper: {html.escape(table.paper)}. {html.escape(legend(metrics, frame))}</p>"
        '<div class="scroll"><table><thead><tr><th class="name">Method</th>'
        f"{header}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>{sources(name, rows, evaluations)}"
    )
    return html_page(title, body)


def claims_page(frame: pd.DataFrame) -> str:
    """The verdicts of `claims_table` as a page."""
    counts = frame["verdict"].value_counts()
    words = {"holds": "hold", "fails": "fail", "not measured": "not measured"}
    summary = ", ".join(f"{counts[v]} {word}" for v, word in words.items() if v in counts)
    rows = []
    for line in frame.to_dict("records"):
        text = {key: html.escape(str(value)) for key, value in line.items()}
        sure = {"yes": "beyond the deviation over seeds", "no": "within the deviation over seeds"}
        notes = [sure[line["significant"]]] if line["significant"] else []
        if line["paper_verdict"] and line["paper_verdict"] != "holds":
            notes.append(f"{line['paper_verdict']} by the paper's own numbers")
        note = f"<small>{html.escape('; '.join(notes))}</small>" if notes else ""
        rows.append(
            f'\n<tr><td class="name"><b class="{text["verdict"].split()[0]}">{text["verdict"]}</b>'
            f'{note}</td><td class="name wide">{text["statement"]}<small>{text["paper"]}</small>'
            f"<details><summary>numbers</summary><small>{text['numbers']}</small>"
            f"<small><code>{text['expression']}</code></small></details></td></tr>"
        )
    body = (
        "<h1>Claims</h1>"
        f"<p>{html.escape(summary)}. Statements of the paper, in our own words, decided by what "
        "was measured here.</p>"
        '<div class="scroll"><table><thead><tr><th class="name">Verdict</th>'
        f'<th class="name">Statement</th></tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )
    return html_page("Claims", body)
