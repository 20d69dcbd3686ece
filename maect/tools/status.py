"""`maect status`: what every run of an experiment is doing, from the files that it leaves."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maect.core.errors import UserError
from maect.core.files import read_mapping
from maect.experiment import load
from maect.launch import record
from maect.launch.launcher import CLUSTERS
from maect.launch.progress import duration, seconds_left
from maect.launch.record import Job

WIDTH = 100
BAR = 10
TAIL = 65536  # bytes of metrics.jsonl that hold at least its last entry
TITLES = ("run", "stage", "state", "progress", "images/s", "left", "loss", "job")
RIGHT = {"images/s", "left", "loss"}


@dataclass(frozen=True)
class Status:
    """One run, or one job that evaluates it.

    Attributes:
        state: done, running, waiting (in the queue), starting, stopped (by a person, or saved and
            returned), interrupted (its job is gone), failed, not started, unknown.
        part: of its steps that is done, or None.
        note: the cluster's reason, or what went wrong.
    """

    name: str
    stage: str
    state: str
    part: float | None = None
    speed: float | None = None
    left: float | None = None
    loss: float | None = None
    job: str = ""
    note: str = ""


def status(root: Path) -> list[str]:
    """Lines to print about a results folder.

    Raises:
        UserError: there is nothing of an experiment in it.
    """
    marks = [*root.glob("runs/*/job.json"), *root.glob("runs/*/run.json")]
    runs = {path.parent.name: path.parent for path in marks}
    known = planned(root)
    if not runs and not known:
        raise UserError(f"{root}: no runs there; give a results folder such as results/digits")
    order = list(known) + sorted(runs.keys() - known.keys())
    lines = [
        look(runs[name], name, (runs[name] / "run.json").exists())
        if name in runs
        else Status(name, known[name], "not started")
        for name in order
    ]
    jobs = list(evaluations(root))
    counts = Counter(line.state for line in lines)
    total = ", ".join(f"{count} {state}" for state, count in counts.items())
    ready = len(list(root.glob("evaluations/*/*.json")))
    more = f"; {ready} evaluations done" if ready or jobs else ""
    return [f"{root}: {len(lines)} runs: {total}{more}", *columns([*lines, *jobs])]


def planned(root: Path) -> dict[str, str]:
    """Runs of the experiment of this name and their stages; none if there is no such experiment."""
    try:
        return {run.name: run.stage for run in load(root.name).runs.values()}
    except UserError:
        return {}


def evaluations(root: Path) -> Iterator[Status]:
    """Features and evaluations that have a job but no result yet."""
    for kind, suffix in (("features", ".safetensors"), ("evaluations", ".json")):
        for folder in sorted(root.glob(f"{kind}/*/*.job")):
            if not folder.with_suffix(suffix).exists():
                yield look(folder, f"{folder.parent.name} {folder.stem}", False)


def look(folder: Path, name: str, done: bool) -> Status:
    """The state of one folder that a job works in."""
    finished: dict[str, Any] = read_mapping(folder / "run.json") if done else {}
    progress = record.progress(folder)
    job = record.read_job(folder)
    number = f"{job.cluster} {job.id or '-'}" if job else ""
    stage = finished.get("stage") or (_stage(folder, job) if job else "")
    step, steps = progress.get("step"), progress.get("steps")
    part = step / steps if isinstance(step, int) and steps else None
    loss = progress.get("loss", last_entry(folder / "metrics.jsonl").get("loss"))
    if done:
        speed = finished.get("images_per_second")
        return Status(name, stage, "done", 1.0, speed, None, loss, number)
    if job is None:
        return Status(name, stage, "unknown")
    state, note = job_state(folder, job)
    if state == "running":
        speed, left = progress.get("images_per_second"), seconds_left(progress)
        return Status(name, stage, state, part, speed, left, loss, number, note)
    return Status(name, stage, state, part, None, None, loss, number, note)


def job_state(folder: Path, job: Job) -> tuple[str, str]:
    """State of a run that is not done, and why."""
    if job.state == "ended":
        if job.ending == "stopped by the user":
            return "stopped", ""
        failure = record.failure(folder, job)
        return "failed", failure.message or job.ending or ""
    try:
        seen = CLUSTERS[job.cluster].state(folder, job)
    except UserError:
        return "unknown", f"its job was started on {job.host}"
    if seen.phase == "pending":
        return ("waiting" if job.cluster == "slurm" else "starting"), seen.text
    if seen.phase == "running":
        return "running", ""
    if seen.phase == "unknown":
        return "unknown", seen.text
    if record.verdict(folder, job) in ("requeue", "stopped"):
        return "stopped", "saved and returned before its end"
    failure = record.failure(folder, job, seen.rank)
    return ("failed", failure.message) if failure.kind else ("interrupted", seen.text)


def last_entry(path: Path) -> dict[str, Any]:
    """The last whole entry of a metrics file, or {}; reads only the file's end."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            value: dict[str, Any] = json.loads(line)
            return value
        except ValueError:
            continue
    return {}


def columns(lines: list[Status]) -> list[str]:
    """A table of at most `WIDTH` characters; notes stand below their line."""
    rows = [_cells(line) for line in lines]
    table = [dict(zip(TITLES, TITLES, strict=True)), *rows]
    widths = {title: max(len(row[title]) for row in table) for title in TITLES}
    others = sum(widths.values()) - widths["run"] + 2 * (len(TITLES) - 1)
    widths["run"] = min(widths["run"], max(12, WIDTH - others))

    def text(row: dict[str, str]) -> str:
        cells = []
        for title, width in widths.items():
            cell = row[title]
            if len(cell) > width:
                cell = cell[: width - 2] + ".."
            cells.append(cell.rjust(width) if title in RIGHT else cell.ljust(width))
        return "  ".join(cells)[:WIDTH].rstrip()

    printed = [text(table[0])]
    for row, line in zip(rows, lines, strict=True):
        printed.append(text(row))
        if line.note:
            note = " ".join(line.note.split())
            printed.append(f"    {note if len(note) <= WIDTH - 4 else note[: WIDTH - 6] + '..'}")
    return printed


def _cells(line: Status) -> dict[str, str]:
    bar = ""
    if line.part is not None:
        full = int(BAR * line.part)
        bar = f"{'#' * full}{'.' * (BAR - full)} {int(100 * line.part):3d} %"
    values = (
        line.name,
        line.stage,
        line.state,
        bar,
        "" if line.speed is None else f"{line.speed:.0f}",
        "" if line.left is None else duration(line.left),
        "" if line.loss is None else f"{line.loss:.4f}",
        line.job,
    )
    return dict(zip(TITLES, values, strict=True))


def _stage(folder: Path, job: Job) -> str:
    """What a job's request asks for; it is there before the job has begun."""
    request = read_mapping(record.place(folder, job) / "request.json").get("request", {})
    arguments = request.get("arguments", {})
    return str(arguments.get("stage") or arguments.get("protocol") or "features")
