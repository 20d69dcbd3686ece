"""`maect status`: the state of every run of an experiment, from the files that it writes."""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from maect.core.errors import UserError, counted
from maect.core.log import aligned
from maect.core.yaml_files import read_yaml
from maect.experiment import load
from maect.launch import clusters, record
from maect.launch.progress import part, rough, seconds_left
from maect.launch.record import Job
from maect.launch.state import NOT_ACCEPTED_YET, STOPPED, Cluster, notice_of, outcome
from maect.records import RunRecord, entries, is_finished

if TYPE_CHECKING:
    from rich.table import Table

NOT_STARTED = "not started"
TAIL = 65536  # bytes of metrics.jsonl that hold its last entry
TITLES = (
    "run", "stage", "state", "progress", "images/s", "left", "loss", "online k-NN", "useful", "job"
)  # fmt: skip
STYLES = {"done": "green", "running": "cyan", "failed": "red", "interrupted": "yellow"}
RIGHT = {"progress", "images/s", "left", "loss", "online k-NN", "useful"}
WHOLE = {"state", "progress", "left"}
"""Columns that a narrow terminal shows whole."""


@dataclass(frozen=True)
class Status:
    """One run, or one job that evaluates it.

    Attributes:
        state: done, running, waiting (in the queue), starting, stopped (by a person, or saved and
            returned), interrupted (its job is gone), failed, not started, unknown.
        part: of its steps that is done, or None.
        knn: accuracy in percent on training images at the last online evaluation, or None.
        useful: part of the device time held so far that led to steps that are kept, or None.
        note: the cluster's reason, or what went wrong.
    """

    name: str
    stage: str
    state: str
    part: float | None = None
    speed: float | None = None
    left: float | None = None
    loss: float | None = None
    knn: float | None = None
    useful: float | None = None
    job: str = ""
    note: str = ""


def show(root: Path, every: bool = False) -> None:
    """Print the state of the runs of a results folder, on a terminal within its width."""
    head, lines = status(root)
    begun = [line for line in lines if line.state != NOT_STARTED]
    if begun and not every:
        lines = begun
        head = head.replace(NOT_STARTED, f"{NOT_STARTED} (--every lists them)")
    if not sys.stdout.isatty():
        print(head, *columns(lines), sep="\n")
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    console.print(head, style="bold")
    console.print(terminal_table(lines))
    for note in _notes(lines):
        console.print(note, style="italic")


def status(root: Path) -> tuple[str, list[Status]]:
    """Return a line about a results folder, and the status of its runs and evaluations.

    Raises:
        UserError: there is nothing of an experiment in it.
    """
    done = RunRecord.path(Path())
    marks = [path for name in (Path("job.json"), done) for path in root.glob(f"runs/*/{name}")]
    runs = {path.parent.name: path.parent for path in marks}
    known = planned(root)
    if not runs and not known:
        raise UserError(f"{root}: no runs there; give a results folder such as results/digits")
    order = list(known) + sorted(runs.keys() - known.keys())
    seen = clusters()
    lines = [
        status_of(runs[name], name, is_finished(runs[name]), seen)
        if name in runs
        else Status(name, known[name], NOT_STARTED)
        for name in order
    ]
    jobs = list(evaluations(root, seen))
    counts = Counter(line.state for line in lines)
    total = ", ".join(f"{count} {state}" for state, count in counts.items())
    ready = len(list(root.glob("evaluations/*/*.json")))
    more = f"; {counted(ready, 'evaluation')} done" if ready or jobs else ""
    if any(line.knn is not None for line in lines):
        more += "; online k-NN: on training images"
    return f"{root}: {counted(len(lines), 'run')}: {total}{more}", [*lines, *jobs]


def planned(root: Path) -> dict[str, str]:
    """Return the stages of an experiment's runs, by name; {} if there is no such experiment."""
    try:
        return {run.name: run.stage for run in load(root.name).runs.values()}
    except UserError:
        return {}


def evaluations(root: Path, clusters: Mapping[str, Cluster]) -> Iterator[Status]:
    """Yield the status of features and evaluations that have a job but no result yet."""
    for kind, suffix in (("features", ".safetensors"), ("evaluations", ".json")):
        for folder in sorted(root.glob(f"{kind}/*/*.job")):
            if not folder.with_suffix(suffix).exists():
                yield status_of(folder, f"{folder.parent.name} {folder.stem}", False, clusters)


def status_of(folder: Path, name: str, done: bool, clusters: Mapping[str, Cluster]) -> Status:
    """Return the status of one folder that a job works in."""
    run: RunRecord | None = None
    try:
        job = record.read_job(folder)
        note = ""
        run = RunRecord.of(folder) if done else None
    except (UserError, OSError) as error:
        job = None
        note = str(error)
    if run and job and job.state != "ended" and not job.computes(run.fingerprint):
        run, done = None, False  # it is made again, by another recipe
    report = record.progress(folder, job)
    number = f"{job.cluster} {job.id or '-'}" if job else ""
    logged: list[dict[str, Any]] = []
    try:
        logged = entries(folder / "metrics.jsonl", TAIL, run.log_sha256 if run else None)
    except UserError as error:
        note = str(error)
    loss = report.get("loss", logged[-1].get("loss") if logged else None)
    evaluated = [entry["online_knn"] for entry in logged if "online_knn" in entry]
    knn = report.get("knn") or (evaluated[-1] if evaluated else None)
    timing = logged[-1].get("timing", {}) if logged else {}
    held = timing.get("held_seconds")
    useful = timing["useful_seconds"] / held if held else None
    known = Status(name, "", "done", 1.0, None, None, loss, knn, None, number, note)
    if run is not None:
        speed = run.images_per_second
        useful = run.useful_part
        return replace(known, stage=run.stage, speed=speed, useful=useful)
    if done:
        return known
    if job is None:
        return Status(name, "", "unknown", note=note)
    word, note = state_and_note(folder, job, clusters)
    known = replace(
        known, stage=stage_of(folder, job), state=word, part=part(report), useful=useful, note=note
    )
    if word != "running":
        return known
    return replace(known, speed=report.get("images_per_second"), left=seconds_left(report))


def state_and_note(folder: Path, job: Job, clusters: Mapping[str, Cluster]) -> tuple[str, str]:
    """Return the state of an unfinished job in a word, and why."""
    try:
        notice = notice_of(folder, job, clusters)
    except UserError as error:
        return "unknown", str(error)
    text = notice.text
    if notice.phase == "pending":
        return ("waiting" if job.cluster == "slurm" else "starting"), text
    if notice.phase == "running":
        return "running", ""
    if notice.phase == "unknown":
        return "unknown", text
    how = outcome(folder, job, notice)
    if how == "saved":
        return "stopped", "saved and returned before its end"
    if how == "stopped":
        return "stopped", "" if text == STOPPED else text
    if job.id is None and text.startswith(NOT_ACCEPTED_YET):
        return "waiting", f"{text}; its launcher, while it runs, tries again"
    if how == "failed":
        raised = record.first_error(folder, job)
        return "failed", raised.message if raised else text
    return "interrupted", text


def columns(lines: list[Status]) -> list[str]:
    """Return the lines of a table: its head, a line for each run, then the notes."""
    rows = _rows(lines)
    right = [number for number, title in enumerate(rows[0]) if title in RIGHT]
    return [*aligned(rows, right), *_notes(lines)]


def terminal_table(lines: list[Status]) -> "Table":
    """Return the table for a terminal, where names and losses give way in a narrow one."""
    from rich.table import Table

    titles, *rows = _rows(lines)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        justify: Literal["left", "right"] = "right" if title in RIGHT else "left"
        table.add_column(title, justify=justify, no_wrap=title in WHOLE, overflow="ellipsis")
    for line, row in zip(lines, rows, strict=True):
        table.add_row(*row, style=STYLES.get(line.state))
    return table


def _rows(lines: list[Status]) -> list[list[str]]:
    """Return titles and cells; without online k-NN or useful time if no run has them."""
    known = {
        "online k-NN": any(line.knn is not None for line in lines),
        "useful": any(line.useful is not None for line in lines),
    }
    titles = [title for title in TITLES if known.get(title, True)]
    cells = [_cells(line) for line in lines]
    return [titles, *([of[title] for title in titles] for of in cells)]


def _notes(lines: list[Status]) -> list[str]:
    """Return a line for each note."""
    return [f"{line.name}: {' '.join(line.note.split())}" for line in lines if line.note]


def _cells(line: Status) -> dict[str, str]:
    """Return the text of each column, by its title."""
    return {
        "run": line.name,
        "stage": line.stage,
        "state": line.state,
        "progress": "" if line.part is None else f"{int(100 * line.part)} %",
        "images/s": "" if line.speed is None else f"{line.speed:.0f}",
        "left": "" if line.left is None else rough(line.left),
        "loss": "" if line.loss is None else f"{line.loss:.4f}",
        "online k-NN": "" if line.knn is None else f"{line.knn:.1f}",
        "useful": "" if line.useful is None else f"{int(100 * line.useful)} %",
        "job": line.job,
    }


def stage_of(folder: Path, job: Job) -> str:
    """Return the stage of a training, the protocol of an evaluation, or "features"."""
    if folder.parent.parent.name == "features":
        return "features"
    config = job.arguments.get("config")
    try:
        values = read_yaml(Path(config)) if config else {}
    except (OSError, UserError):
        values = {}
    return str(values.get("stage") or values.get("protocol") or "")
