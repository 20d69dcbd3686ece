"""Repeat a logged step, and compare it with the log bit by bit.

A step is a function of the state before it. So a copy of the run as it was when a state was saved,
trained up to that step, logs what the run logged. Nothing is written into the run's own folder.
"""

import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maect.core.entries import entries
from maect.core.errors import UserError
from maect.core.files import read_record, with_retries, write_record
from maect.data.index import Index
from maect.data.order import Order
from maect.records import RunRecord, is_finished
from maect.train.checkpoint import saved

REPORT = "replay.json"
SHOWN = 8  # of what there may be thousands of


@dataclass
class Replay:
    """Report of the ranks that repeat a step, from 1: losses, norms of gradients, why it ended."""

    step: int
    values: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    fault: str = ""

    def write(self, folder: Path, images: Index, seed: int, batch_size: int) -> None:
        """Leave the report, with the keys of the batch's images; for rank 0."""
        rows, _ = Order(images.n, seed).take((self.step - 1) * batch_size, batch_size)
        report = {
            "step": self.step,
            "fault": self.fault,
            # As text: JSON has no word for what is not finite.
            "values": {name: repr(value) for name, value in self.values.items()},
            "gradients": {name: repr(value) for name, value in self.gradients.items()},
            "images": [images.key(int(row)) for row in rows],
        }
        write_record(folder / REPORT, report)


def part_of(name: str) -> str:
    """The part of a module that a parameter belongs to: `encoder.blocks.3`, `encoder.cls_token`."""
    match = re.match(r".*?\.\d+(?=\.)", name)
    return match[0] if match else ".".join(name.split(".")[:2])


def states_before(run: Path, step: int) -> list[Path]:
    """Complete states of a run that a step can be repeated from, newest first."""
    return [state for state in saved(run / "state") if step_of(state) < step]


def step_of(state: Path) -> int:
    """The step of which a folder holds the state."""
    return int(state.name.removeprefix("step-"))


def copy_run(run: Path, folder: Path, states: Sequence[Path]) -> None:
    """Make `folder` what a run's folder was when the newest of some of its states was saved.

    States are linked where the file system can; UserError if one has just been deleted.
    """
    for name in ("recipe.json", "metrics.jsonl"):
        shutil.copyfile(run / name, folder / name)
    for state in states:
        try:
            shutil.copytree(state, folder / "state" / state.name, copy_function=_link)
        except (FileNotFoundError, shutil.Error) as error:
            raise UserError(f"{state}: deleted meanwhile; start again ({error})") from None


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


@dataclass(frozen=True)
class Repetition:
    """Repeated values beside the log.

    Attributes:
        first: the first step that was repeated.
        report: of the ranks about the last one, numbers as text.
        differences: step, value, what the log says, what was repeated.
        compared: number of logged steps that were compared.
        absent: repeated steps of which the log has no sound entry.
        names: what was compared.
    """

    first: int
    report: dict[str, Any]
    differences: list[tuple[int, str, Any, Any]]
    compared: int
    absent: list[int]
    names: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """Return a description for people."""
        step, fault = self.report["step"], self.report["fault"]
        lines = [f"steps {self.first} to {step} repeated: {self.compared} compared with the log"]
        if fault:
            lines.append(f"it ends the training: {fault}")
        if self.compared and not self.differences:
            lines.append(f"equal, bit by bit: {', '.join(self.names)}")
        for number, name, logged, repeated in self.differences[:SHOWN]:
            lines.append(f"step {number}: {name} {logged!r} in the log, {repeated!r} repeated")
        if len(self.differences) > SHOWN:
            lines.append(f"and {len(self.differences) - SHOWN} more differences")
        if self.absent:
            lines.append(f"not in the log: step {', '.join(map(str, self.absent[:SHOWN]))}")
        lines.append(f"step {step}: {_listed(self.report['values'])}")
        gradients = self.report["gradients"]
        odd = {name: norm for name, norm in gradients.items() if not math.isfinite(float(norm))}
        top = sorted(gradients, key=lambda name: -float(gradients[name]))[:SHOWN]
        shown = odd or {name: gradients[name] for name in top}
        kind = "not finite" if odd else "largest"
        lines.append(f"norms of gradients ({len(gradients)} parts, {kind}): {_listed(shown)}")
        images = self.report["images"]
        more = f", … ({len(images)})" if len(images) > SHOWN else ""
        lines.append(f"images: {', '.join(images[:SHOWN])}{more}")
        return lines


def compare(run: Path, folder: Path) -> Repetition:
    """Compare what was repeated in `folder` with the log of the run."""
    report = read_record(folder / REPORT)
    logged = {entry["step"]: _values(entry) for entry in entries(run / "metrics.jsonl")}
    first = max(map(step_of, saved(folder / "state")), default=0) + 1
    repeated = {
        entry["step"]: _values(entry)
        for entry in entries(folder / "metrics.jsonl")
        if entry["step"] >= first
    }
    differences = [
        (step, name, logged[step].get(name), value.get(name))
        for step, value in repeated.items()
        if step in logged
        for name in sorted(logged[step].keys() | value.keys())
        if repr(logged[step].get(name)) != repr(value.get(name))
    ]
    absent = sorted(({*repeated} | ({report["step"]} if report["fault"] else set())) - {*logged})
    compared = [step for step in repeated if step in logged]
    names = sorted({name for step in compared for name in repeated[step]})
    return Repetition(first, report, differences, len(compared), absent, tuple(names))


def _values(entry: Mapping[str, Any]) -> dict[str, Any]:
    """All of an entry that depends on recipe, seed and data alone; not the online evaluation."""
    return {
        name: value
        for name, value in entry.items()
        if name not in ("step", "timing") and not name.startswith("online_")
    }


def _listed(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def ranks_of(run: Path, states: Sequence[Path]) -> int | None:
    """Return how many ranks computed what follows the newest state, as far as the run says."""
    if states:
        return int(with_retries(read_record, states[0] / "state.json")["world_size"])
    return with_retries(RunRecord.of, run).world_size if is_finished(run) else None
