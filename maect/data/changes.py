"""Find out which images were added, removed, edited or relabelled since they were sharded.

Sharding notes the size and time of every file, which a start compares.
"""

import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maect.core.errors import UserError, counted
from maect.core.files import seek_record, write_record
from maect.data.sources import find_source, open_source
from maect.data.sources.base import (
    UNLABELLED,
    EmptyClassError,
    Entry,
    ImageSource,
    Listing,
    as_utf8,
)
from maect.recipes import Pixels

FILES = "files.json"
MOST = 50_000
"""Files that a start compares: more would delay it."""


def note_files(out: Path, source: ImageSource, entries: Sequence[Entry]) -> None:
    """Write the names, sizes and times of the images' files beside their shards.

    Of more than `MOST` files, write only the names of their class folders.
    """
    if len({source.file_of(entry) for entry in entries}) <= MOST:
        write_record(out / FILES, {"files": dict(sorted(_file_stats(source, entries).items()))})
    else:
        write_record(out / FILES, {"folders": [*(source.folder_names() or [])]})


def files_digest(source: ImageSource, entries: Iterable[Entry]) -> str:
    """Return the SHA-256 of the names, sizes and times of the files that have these images."""
    stats = sorted(_file_stats(source, entries).items())
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()


def _file_stats(source: ImageSource, entries: Iterable[Entry]) -> dict[str, list[int]]:
    """Return size in bytes and time in nanoseconds of each file that has some of the images."""
    stats = {}
    for name in {source.file_of(entry) for entry in entries}:
        try:
            status = os.stat(source.root / name)
            stats[as_utf8(name)] = [status.st_size, status.st_mtime_ns]
        except OSError:  # it is gone
            stats[as_utf8(name)] = [-1, 0]
    return stats


@dataclass(frozen=True)
class Changes:
    """Differences between a source and the images in its shards.

    Attributes:
        before, now: old and new place of the images.
        added, removed, edited: names of files.
        relabelled: names of images.
        fault: why the images can no longer be listed, which leaves all else unknown.
    """

    before: Path
    now: Path
    added: Sequence[str] = ()
    removed: Sequence[str] = ()
    edited: Sequence[str] = ()
    relabelled: Sequence[str] = ()
    fault: str = ""

    @property
    def moved(self) -> bool:
        """Return whether the images are looked for at another place."""
        return self.now != self.before

    @property
    def are_replaced(self) -> bool:
        """Return whether these are other images, rather than the same ones with some changes."""
        if self.relabelled:
            return True
        if not self.moved:
            return False
        # A folder that was moved as a whole may have grown since.
        return bool(self.removed or self.edited or (self.added and self.before.exists()))

    def __str__(self) -> str:
        if self.fault:
            return f"{self.fault}; what else has changed is unknown"
        kinds = {
            "file": {"added": self.added, "removed": self.removed, "changed": self.edited},
            "image": {"relabelled": self.relabelled},
        }
        return ", ".join(
            f"{counted(len(names), what)} {how} ({names[0]}{' …' if len(names) > 1 else ''})"
            for what, of in kinds.items()
            for how, names in of.items()
            if names
        )


def changes(out: Path, images: Path | None = None) -> Changes | None:
    """Compare images with those in their shards; return None if nothing differs or is known.

    Nothing is known of images that are gone. Times count only where the images were: those of a
    copy are of the copying. Of more than `MOST` files only the class folders are compared, and only
    at another place.

    Args:
        out: the shards, finished or only planned.
        images: where the images are now; by default where they were.
    """
    plan = seek_record(out / "plan.json")
    try:
        before = Path(plan["source"])
        where = before if images is None else images.resolve()
        source = open_source(plan["kind"], where, pixels=Pixels.of_shards(plan["options"]))
        notes = seek_record(out / FILES)
        if "files" not in notes:
            return _compare_folders(before, source, notes["folders"])
        noted = notes["files"]
        try:
            listing = source.listing()
        except EmptyClassError as error:
            return Changes(before, source.path, fault=str(error))
        now = _file_stats(source, listing.entries)
        if [*now] == [source.path.name] and [*noted] == [before.name]:  # one renamed file
            now = {before.name: now[source.path.name]}
        compared = 2 if source.path == before else 1
        edited = [
            name
            for name in now.keys() & noted.keys()
            if now[name][:compared] != noted[name][:compared]
        ]
        found = Changes(
            before,
            source.path,
            added=sorted(now.keys() - noted.keys()),
            removed=sorted(noted.keys() - now.keys()),
            edited=sorted(edited),
            relabelled=_relabelled_images(out, plan, listing),
        )
    except (UserError, KeyError, ValueError, OSError):
        return None
    return found if str(found) else None


def _compare_folders(before: Path, source: ImageSource, names: list[str]) -> Changes | None:
    """Compare the names of class folders at another place; each gets a slash at its end."""
    now = source.folder_names() if source.path != before else None
    if now is None or [*now] == names:
        return None
    added = [f"{name}/" for name in now if name not in names]
    removed = [f"{name}/" for name in names if name not in now]
    return Changes(before, source.path, added=added, removed=removed)


def _relabelled_images(out: Path, plan: dict[str, Any], listing: Listing) -> list[str]:
    """Return images in the shards whose class is another now, if the source names the classes."""
    if "labels" in find_source(plan["kind"]).takes:
        return []

    def name(label: int, names: list[str]) -> str | None:
        return None if label == UNLABELLED else names[label]

    now = {entry.name: name(entry.label, listing.class_names) for entry in listing.entries}
    different = []
    for path in sorted((out / "parts").glob("[0-9]*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            _, image, label, *_ = json.loads(line)
            class_name = name(label, plan["class_names"])
            if now.get(image, class_name) != class_name:
                different.append(image)
    return sorted(different)


def advice(out: Path, found: Changes, again: Path | None = None) -> str:
    """Return a message: images changed since they were sharded, and the remedy.

    `again`: folder to delete for that, if not `out`.
    """
    plan = seek_record(out / "plan.json")
    lists = ""
    if "unlisted" in plan and (found.added or found.removed):
        such = f" such as {plan['only']}" if "only" in plan else ""
        how = []
        if found.added:
            how.append("name new ones")
        if found.removed:
            how.append("leave out removed ones")
        lists = f"lists of images{such} have to {' and '.join(how)}; "
    return (
        f"{found.now}: {found} since it was sharded; the shards are as they were; "
        f"{lists}the same command shards again after: rm -r {shlex.quote(str(again or out))}"
    )
