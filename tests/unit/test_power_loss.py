"""What is left after a loss of power is sound, and what was promised is there.

Of a folder, a file system without power keeps what was forced to the disk, and of what came after
it anything: the entries of each folder as they were at some moment since that folder was last
forced, each file's content as it was forced last, as it is, or empty. `Disk` records a folder while
it is written, and makes every such state of it, or a sample where there are very many.
"""

import itertools
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from maect.core.context import Context
from maect.core.errors import UserError
from maect.core.files import atomic_write, sha256_file, write_record
from maect.data.bundled import write_digits
from maect.data.shard_check import verify
from maect.data.shards import shard
from maect.launch import Resources, Task, record
from maect.records import RunRecord, entries
from maect.train.checkpoint import (
    Saver,
    check_files,
    complete_states,
    remove_incomplete,
    state_record,
)
from maect.train.metrics import Metrics
from maect.train.run_folder import RunLock, check_weights, is_finished

CHANGES = ("replace", "rename", "unlink", "remove", "rmdir", "mkdir", "link")
Entries = dict[str, int]


class Moment(NamedTuple):
    """A folder between two operations."""

    told: tuple[Any, ...]
    """What the program under test had been promised by then."""
    folders: dict[int, Entries]
    """Entries of each folder, by inode; name to inode."""
    files: dict[int, bytes]
    """Content of each file, by inode."""
    forced: dict[int, Any]
    """Content or entries that are on the disk, by inode."""


class Disk:
    """Records what happens below a folder, from Python, in all threads."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.moments, self._patches = root, list[Moment](), monkeypatch
        self._told: tuple[Any, ...] = ()
        self._held: dict[int, int] = {}  # open, so that no inode's number is used again
        self._forced: dict[int, Any] = {}
        self._lock = threading.RLock()
        root.mkdir()
        self._observe()
        self._forced |= self.moments[0].folders
        for name in CHANGES:
            monkeypatch.setattr(os, name, self._recorded(getattr(os, name)))
        monkeypatch.setattr(os, "fsync", self._force)

    def tell(self, promise: Any) -> None:
        """Note that from now on something has to survive."""
        with self._lock:
            self._told += (promise,)
            self._observe()

    def _recorded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            with self._lock:
                self._observe()
                result = function(*arguments, **named)
                self._observe()
                return result

        return call

    def _force(self, descriptor: int) -> None:
        with self._lock:
            moment = self._observe()
            inode = os.fstat(descriptor).st_ino
            known = moment.folders if inode in moment.folders else moment.files
            if inode in known:
                self._forced = self._forced | {inode: known[inode]}
            self._observe()

    def _observe(self) -> Moment:
        folders: dict[int, Entries] = {}
        contents: dict[int, bytes] = {}
        self._walk(self.root, folders, contents)
        moment = Moment(self._told, folders, contents, self._forced)
        if not self.moments or self.moments[-1] != moment:
            self.moments.append(moment)
        return moment

    def _walk(self, folder: Path, folders: dict[int, Entries], contents: dict[int, bytes]) -> None:
        found: Entries = {}
        for entry in os.scandir(folder):
            inode = entry.inode()
            found[entry.name] = inode
            if inode not in self._held:
                self._held[inode] = os.open(entry.path, os.O_RDONLY)
            if entry.is_dir():
                self._walk(Path(entry.path), folders, contents)
            else:
                contents[inode] = os.pread(self._held[inode], 1 << 24, 0)
        folders[os.stat(folder).st_ino] = found

    def close(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)

    def remains(self, number: int, limit: int) -> Iterator[tuple[dict[int, Entries], dict]]:
        """Entries of every folder, and contents, that a loss of power after a moment may leave."""
        now = self.moments[number]
        choices: dict[int, list[Entries]] = {}
        volatile: dict[int, bytes] = {}
        for moment in self.moments[: number + 1]:
            volatile |= moment.files
            for inode, found in moment.folders.items():
                if moment.forced.get(inode, {}) != now.forced.get(inode, {}):
                    continue  # since then it was forced to another state
                kept = choices.setdefault(inode, [now.forced.get(inode, {})])
                if found not in kept:
                    kept.append(found)
        count = 1
        for kept in choices.values():
            count *= len(kept)
        pick = random.Random(number)
        combinations: Iterator[tuple[Entries, ...]] = (
            itertools.product(*choices.values())
            if count <= limit
            else (tuple(pick.choice(kept) for kept in choices.values()) for _ in range(limit))
        )
        lost = {inode: now.forced.get(inode, b"") for inode in volatile}
        for folders in combinations:
            for contents in (lost, volatile):
                yield dict(zip(choices, folders, strict=True)), contents

    def after_power_loss(self, where: Path, limit: int = 6) -> Iterator[tuple[Path, tuple]]:
        """Folders as they may be found again, each once, and what had been promised."""
        self._patches.undo()
        seen = set()
        root = os.stat(self.root).st_ino
        for number in range(len(self.moments)):
            for folders, contents in self.remains(number, limit):
                plan = sorted(_plan(root, "", folders, contents))
                told = self.moments[number].told
                if (key := hash((repr(plan), told))) in seen:
                    continue
                seen.add(key)
                shutil.rmtree(where, ignore_errors=True)
                where.mkdir()
                for path, content in plan:
                    if content is None:
                        (where / path).mkdir(exist_ok=True)
                    else:
                        (where / path).write_bytes(content)
                yield where, told


def _plan(inode: int, path: str, folders: dict, contents: dict) -> Iterator[tuple[str, Any]]:
    for name, child in folders.get(inode, {}).items():
        if child in contents:
            yield f"{path}{name}", contents[child]
        else:
            yield f"{path}{name}", None
            yield from _plan(child, f"{path}{name}/", folders, contents)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    with monkeypatch.context() as patches:
        disk = Disk(tmp_path / "disk", patches)
        yield disk
        disk.close()


class Rank(Context):
    """One of two ranks, whose launcher's record is on the disk, too."""

    def __init__(self, rank: int, disk: Disk, world_size: int = 2) -> None:
        super().__init__()
        self.rank, self.world_size, self.disk = rank, world_size, disk

    def complete_states(self, step: int, /) -> None:
        if self.rank == 0:
            self.disk.tell(step)


def sound(state: Path) -> int | None:
    """The step of a state whose files are what its record says; None: it will not be used."""
    try:
        about = state_record(state, "ours")
        check_files(state, about, 0, 1)
    except UserError:
        return None
    return int(about["step"])


def test_states_of_a_training(disk, tmp_path, monkeypatch):
    """What the launcher was told is saved survives, with its log; nothing else is taken for it."""
    run = disk.root / "runs" / "mae"
    lock = RunLock(run, Rank(0, disk))
    savers = [Saver(run, Rank(rank, disk), lock if rank == 0 else None) for rank in range(2)]
    log = Metrics(run, 0, 9)
    for step in range(1, 4):
        log.log(step, {"loss": 1 / step}, {"device_seconds": float(step)})
        log.sync()
        for rank, saver in enumerate(savers):
            tensors = {"param|0|w": torch.full((4,), float(step + rank))}
            saver.save(step, tensors, {"fingerprint": "ours"})
        for saver in savers:
            saver.wait()
    assert [saver.error for saver in savers] == [None, None]
    count = 0
    for folder, told in disk.after_power_loss(tmp_path / "left"):
        count += 1
        states = complete_states(folder / "runs/mae/state")
        steps = [sound(state) for state in states]
        newest = max((step or 0 for step in steps), default=0)
        assert newest >= max(told, default=0), (told, states, steps)
        logged = {entry["step"] for entry in entries(folder / "runs/mae/metrics.jsonl")}
        assert logged >= set(range(1, newest + 1))
    assert count > 100
    # The next attempt takes over what was left at the end, and goes on.
    again = Rank(0, disk, world_size=1)
    remove_incomplete(folder / "runs/mae/state")
    saver = Saver(folder / "runs/mae", again, RunLock(folder / "runs/mae", again))
    saver.save(9, {}, {"fingerprint": "ours"})
    saver.wait()
    assert saver.error is None and sound(complete_states(folder / "runs/mae/state")[0]) == 9


def test_what_a_finished_run_leaves(disk, tmp_path):
    """A completion record that is there promises nothing that is not."""
    run = disk.root / "runs" / "mae"
    names = ["encoder.safetensors", "head.safetensors"]
    for name in names:
        with atomic_write(run / name) as temporary:
            temporary.write_bytes(name.encode() * 100)
    about = {"run": "mae", "stage": "pretrain", "fingerprint": "ours", "files": names}
    about["sha256"] = {name: sha256_file(run / name) for name in names}
    write_record(RunRecord.path(run), about)
    disk.tell("done")
    for folder, told in disk.after_power_loss(tmp_path / "left"):
        left = folder / "runs" / "mae"
        if told or is_finished(left, "ours"):
            check_weights(left)


def test_the_record_of_a_job(disk, tmp_path):
    """A job that was submitted is on record: it is never submitted twice."""
    run, job = disk.root / "runs" / "mae", None
    for number in range(3):
        job = record.new_job(run, Task("a:b"), Resources(cluster="slurm", cpus_per_task=1), job)
        record.make_job_folder(run, job.name)
        record.write_job(run, job)
        disk.tell(job.name)
        job.id, job.state, job.ending = str(number), "ended", "FAILED"
        record.write_job(run, job)
    for folder, told in disk.after_power_loss(tmp_path / "left"):
        found = record.read_job(folder / "runs" / "mae")
        assert not told or (found is not None and len(found.earlier) >= len(told) - 1)


def test_shards(disk, tmp_path):
    """Interrupted anywhere, the next sharding ends with the same bytes; an index is complete."""
    source, out = tmp_path / "images", disk.root / "val"
    write_digits(tmp_path)
    for path in sorted((tmp_path / "val").rglob("*.png"))[::60]:
        target = source / path.relative_to(tmp_path / "val")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    shard(source, out, "folder", 2)
    whole = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    count = 0
    for folder, _ in disk.after_power_loss(tmp_path / "left", limit=2):
        count += 1
        if (folder / "val" / "index.json").exists():
            assert verify(folder / "val")
        if count % 10 == 0:
            shard(source, folder / "val", "folder", 2)
            assert verify(folder / "val")
            for name, content in whole.items():
                assert (folder / "val" / name).read_bytes() == content, name
    assert count > 30
