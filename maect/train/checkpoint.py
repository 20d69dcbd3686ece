"""Resumable state on disk: one file a rank, free of the world size, and never pickled.

    state/step-000000123/rank-0000.safetensors ...   its slices, and rank 0's buffers
    state/step-000000123/rank-0000.json ...          this rank's file is complete
    state/step-000000123/state.json                  all are: written last

Each rank copies what it owns at a step boundary and writes it in a thread while training goes on.
"""

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from maect.core.context import Context
from maect.core.distributed import (
    STEP_TIMEOUT,
    differing_ranks,
    from_rank_0,
    rank_and_size,
    sum_scalars,
)
from maect.core.errors import RankError, SupersededError, UserError
from maect.core.files import (
    atomic_write,
    seek_record,
    sha256_file,
    verified,
    write_record,
)
from maect.train.run_folder import RunLock, check_is_current, write_notes

log = logging.getLogger(__name__)

PARAM, AVERAGE = "param", "ema"
"""Kinds of values in a state; the others are the optimizer's: `exp_avg`, `exp_avg_sq`."""
KEPT = 2
"""Number of complete states that are kept."""
_WAIT_FOR_RANKS = STEP_TIMEOUT.total_seconds() / 2
"""Seconds; the ranks whose files rank 0 waits for may wait for it in an exchange meanwhile."""


@dataclass
class ParameterSlice:
    """A contiguous piece of a parameter that this rank updates, with moments and average.

    Attributes:
        name: of the parameter in the objective.
        start: offset in its flattened values.
        values: 1-D float32 by kind, views on what the optimizer updates: `param`, AdamW's
            `exp_avg` and `exp_avg_sq`, and `ema` where there is a running average.
    """

    name: str
    start: int
    values: dict[str, Tensor]


class ReplicaError(RankError):
    """Ranks disagree; another attempt from the last state may succeed."""


def compare_replicas(step: int, weights: Iterable[Tensor], buffers: dict[str, Tensor]) -> None:
    """Compare weights and buffers, which all ranks should hold alike, before a save.

    Raises:
        ReplicaError: some ranks hold other bits than most; the state before this one is sound.
    """
    ranks = differing_ranks(chain(weights, buffers.values()))
    if ranks:
        _, size = rank_and_size()
        raise ReplicaError(
            f"after step {step} the weights or buffers of rank {', '.join(map(str, ranks))} of "
            f"{size} differ from the others': a flipped bit, or a fault of a device; the state "
            "before is sound"
        )


def snapshot(slices: Iterable[ParameterSlice], buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies on the CPU of slices and buffers, by the names that a state has."""
    tensors = {f"buffer|0|{name}": value for name, value in buffers.items()}
    for piece in slices:
        for kind, value in piece.values.items():
            tensors[f"{kind}|{piece.start}|{piece.name}"] = value
    return {key: value.detach().to("cpu", copy=True) for key, value in tensors.items()}


class Saver:
    """Writes snapshots in the background, one at a time, and keeps the last two."""

    def __init__(
        self, folder: Path, context: Context, lock: RunLock | None, resumed: int | None = None
    ) -> None:
        """Prepare to save.

        Args:
            folder: of the run.
            context: this rank's.
            lock: rank 0's right to write the run; None on other ranks.
            resumed: step of the state that the training resumed from, which is not written again.
        """
        self.folder = folder / "state"
        self.context = context
        self._lock = lock
        self._resumed = resumed
        self.rank = context.rank
        self.world_size = context.world_size
        self.error: str | None = None
        self._warned = False
        self._number = 0
        self._first_save_noted = False
        self._thread: threading.Thread | None = None

    @property
    def is_writing(self) -> bool:
        """Return whether a state is being written; on rank 0, by any rank."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, step: int, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        """Start writing a state, after the one before it is written."""
        self.wait()
        self.error = None
        self._number += 1
        self._thread = threading.Thread(
            target=self._run, args=(step, tensors, record), name="maect-save"
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, step: int, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        folder = self.folder / step_name(step)
        try:
            if step != self._resumed:
                about = {"step": step, "world_size": self.world_size}
                self._write(folder, tensors, record | about)
            self.context.saved(step)
            if self._lock and not self._first_save_noted:
                # If all states are lost one day, the run does not begin anew.
                write_notes(self.folder.parent, saved=step)
                self._first_save_noted = True
        except SupersededError as error:
            self.context.fail(error)
        except Exception as error:  # a full disk must not end the training
            self.error = f"state of step {step} not saved ({error}); the one before it stays"
            log.warning(self.error)
            with suppress(OSError):  # rank 0 gives up waiting, and cleans up
                if self.rank == 0:
                    if not is_complete(folder):  # an earlier save of this step may be complete
                        shutil.rmtree(folder)
                else:
                    # The file stays: it may be of an earlier save of this step.
                    note = {"error": str(error), "save": self._number}
                    write_record(folder / f"rank-{self.rank:04d}.json", note)
            if not self._warned:
                self._warned = True
                with suppress(OSError):  # the next report has it too
                    self.context.say(f"{self.error}: what is trained since is lost if the job ends")

    def _write(self, folder: Path, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        if self._lock:
            self._lock.check()
            remove_incomplete(self.folder, keep=folder)  # of a save that failed, on a full disk
        else:
            check_is_current(self.context)
        own = folder / f"rank-{self.rank:04d}.safetensors"
        with atomic_write(own) as temporary:
            save_file(tensors, temporary)
            digest = sha256_file(temporary)
        write_record(own.with_suffix(".json"), {"sha256": digest, "save": self._number})
        if not self._lock:
            return
        files = {
            f"rank-{rank:04d}": self._wait_for(folder, rank) for rank in range(self.world_size)
        }
        self._lock.commit(folder / "state.json", record | {"files": files})
        for old in complete_states(self.folder)[KEPT:]:
            (old / "state.json").unlink(missing_ok=True)
            shutil.rmtree(old, ignore_errors=True)

    def _wait_for(self, folder: Path, rank: int) -> str:
        """Return the checksum of a rank's file, as soon as that is complete."""
        file = folder / f"rank-{rank:04d}.json"
        deadline = time.monotonic() + _WAIT_FOR_RANKS
        while time.monotonic() < deadline:
            value = seek_record(file)
            if value.get("save") != self._number:  # of a save of this step that failed before
                time.sleep(0.02)
                continue
            if "error" in value:
                raise OSError(f"rank {rank}: {value['error']}")
            return str(value["sha256"])
        raise TimeoutError(f"rank {rank} did not write its part in {_WAIT_FOR_RANKS:.0f} s")


def step_name(step: int) -> str:
    """Return the name of the folder of a step's state."""
    return f"step-{step:09d}"


def complete_states(folder: Path) -> list[Path]:
    """Return the complete states below `folder`, newest first."""
    return [state for state in _states(folder) if is_complete(state)]


def remove_incomplete(folder: Path, keep: Path | None = None) -> None:
    """Delete the remains of interrupted saves, but for the state `keep`; for rank 0."""
    for state in _states(folder):
        if state != keep and not is_complete(state):
            shutil.rmtree(state, ignore_errors=True)


def is_complete(state: Path) -> bool:
    """Return whether a state's record is there; OSError if the folder cannot be read."""
    return "state.json" in _names(state)


def _states(folder: Path) -> list[Path]:
    names = sorted(_names(folder), reverse=True)
    return [folder / name for name in names if name.startswith("step-")]


def _names(folder: Path) -> list[str]:
    # Neither Path.glob nor Path.exists: they take a file system's refusal for an absence.
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def quarantine(state: Path) -> None:
    """Rename a damaged state, so that nobody looks for it there."""
    aside = state.with_name(f"damaged-{state.name}")
    shutil.rmtree(aside, ignore_errors=True)
    state.rename(aside)


def state_record(state: Path, identity: str) -> dict[str, Any]:
    """Read the record of a state.

    Raises:
        UserError: it is damaged, missing or another run's.
        OSError: it cannot be read at present.
    """
    file = state / "state.json"
    try:
        record = verified(json.loads(file.read_bytes()))
        step, size, files = (record[key] for key in ("step", "world_size", "files"))
        if not (type(step) is type(size) is int and isinstance(files, dict) and files):
            raise ValueError("step, world_size or files")
    except FileNotFoundError:
        raise UserError(f"{file}: no such file") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: damaged ({error})") from None
    if step_name(step) != state.name:
        raise UserError(f"{file}: damaged (it says step {step})")
    if record.get("fingerprint", identity) != identity:
        raise UserError(f"{file}: the state of another run")
    return dict(record)


def check_files(state: Path, record: dict[str, Any], rank: int, world_size: int) -> None:
    """Compare this rank's share of a state's files with their checksums.

    Raises:
        UserError: a file is damaged or missing.
        OSError: a file cannot be read at present.
    """
    for name, digest in list(record["files"].items())[rank::world_size]:
        file = state / f"{name}.safetensors"
        try:
            found = sha256_file(file)
        except FileNotFoundError:
            raise UserError(f"{file}: no such file") from None
        if found != digest:
            raise UserError(f"{file}: checksum differs")


class StateReader:
    """Reads tensors, or parts of them, from a state that any number of ranks saved."""

    def __init__(self, folder: Path, record: dict[str, Any]) -> None:
        self.folder = folder
        self.record = record
        self.step: int = record["step"]
        self._parts: dict[tuple[str, str], list[tuple[int, int, Any, str]]] = {}
        for file in record["files"]:
            path = folder / f"{file}.safetensors"
            try:
                opened = safe_open(str(path), "pt").__enter__()
            except SafetensorError as error:
                raise UserError(f"{path}: damaged state ({error})") from None
            for key in opened.keys():  # noqa: SIM118
                kind, start, name = key.split("|", 2)
                shape = opened.get_slice(key).get_shape()
                numel = shape[0] if len(shape) == 1 else 0
                self._parts.setdefault((kind, name), []).append((int(start), numel, opened, key))

    def names(self, kind: str) -> list[str]:
        """Return the names of the tensors of one kind."""
        return sorted(name for other, name in self._parts if other == kind)

    def buffer(self, name: str) -> Tensor:
        """Return a buffer."""
        (_, _, file, key) = self._parts["buffer", name][0]
        return file.get_tensor(key)

    def values(self, kind: str, name: str, start: int, length: int) -> Tensor:
        """Return a part of a flattened parameter, moment or average, float32 [length].

        Args:
            kind: of the values.
            name: of the parameter.
            start: of the part.
            length: of the part.

        Raises:
            UserError: some of the values are missing.
        """
        out = torch.empty(length, dtype=torch.float32)
        missing = length
        for begin, numel, file, key in self._parts.get((kind, name), []):
            low, high = max(start, begin), min(start + length, begin + numel)
            if low < high:
                out[low - start : high - start] = file.get_slice(key)[low - begin : high - begin]
                missing -= high - low
        if missing:
            raise UserError(f"{self.folder}: {missing} values of {kind} {name} are missing")
        return out

    def full(self, kind: str, name: str, like: torch.Size) -> Tensor:
        """Return a whole parameter, moment or average in the shape `like`."""
        return self.values(kind, name, 0, like.numel()).view(like)

    def restore(self, slices: Iterable[ParameterSlice]) -> None:
        """Fill slices in place, whatever number of ranks saved the state."""
        for piece in slices:
            for kind, target in piece.values.items():
                target.copy_(self.values(kind, piece.name, piece.start, target.numel()))

    def part(self, kind: str, prefix: str, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a part's parameters, moments or averages, and its buffers.

        Args:
            kind: of the values.
            prefix: name of the part in the objective, with a dot.
            like: tensors by their names in the part, for the shapes.

        Returns:
            Tensors by their names in the part.
        """
        tensors = {}
        for name in self.names(kind):
            if name.startswith(prefix):
                own = name.removeprefix(prefix)
                tensors[own] = self.full(kind, name, like[own].shape)
        for name in self.names("buffer"):
            own = name.removeprefix(prefix)
            if name.startswith(prefix) and own in like:
                tensors[own] = self.buffer(name)
        return tensors


def find_state(
    folder: Path, identity: str, context: Context, convert_world_size: bool, device: torch.device
) -> StateReader | None:
    """Find the newest undamaged state, the same on all ranks; None if there is none at all.

    Args:
        folder: of the states.
        identity: fingerprint of the run.
        context: this rank's.
        convert_world_size: whether another number of ranks may have saved it.
        device: for the exchange between ranks.

    Raises:
        UserError: all are damaged; or it was saved by another number of ranks, and
            `convert_world_size` is not given.
        OSError: one cannot be read at present, so it is not known whether it is damaged.
    """
    damaged: list[str] = []
    why = ""
    for name in from_rank_0([state.name for state in complete_states(folder)]):
        record: dict[str, Any] = {}
        fault = ""
        try:
            record = state_record(folder / name, identity)
            check_files(folder / name, record, context.rank, context.world_size)
        except UserError as error:
            fault = str(error)
            log.warning("%s; using the state before it, if any", fault)
        if sum_scalars([float(bool(fault))], device)[0]:
            damaged.append(name)
            why = why or fault or f"{folder / name}: damaged, as another rank says"
            continue
        if context.rank == 0:
            for other in damaged:
                quarantine(folder / other)
        if record["world_size"] != context.world_size:
            change = f"{record['world_size']} ranks to {context.world_size}"
            if not convert_world_size:
                raise UserError(
                    f"{folder / name}: resuming would change from {change}, and the sums' rounding "
                    "with it; pass --convert-world-size if that is meant"
                )
            if context.rank == 0:
                log.info("%s: converted from %s", folder / name, change)
        if context.rank == 0:
            log.info("resuming from step %d", record["step"])
        return StateReader(folder / name, record)
    if damaged:
        raise UserError(
            f"{why}; no older state is intact: put one back from a copy, or delete {folder} with "
            "recipe.json, job.json and metrics.jsonl beside it to train from the beginning"
        )
    return None
