"""Find out which images were added, removed, edited or relabelled since they were sharded."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maect.core.errors import UserError, counted
from maect.core.files import seek_record
from maect.data.sources import find_source, open_source
from maect.data.sources.base import UNLABELLED, Entry, ImageSource, Listing, as_utf8
from maect.data.sources.file_stats import file_stats, read_notes
from maect.recipes import Pixels

COMPARED = 200
"""Images whose content is compared again, where the time of their file has changed."""


def _open_source(plan: dict[str, Any], images: Path) -> ImageSource:
    """Open the images of a plan at another place."""
    return open_source(plan["kind"], images, pixels=Pixels.of_shards(plan["options"]))


@dataclass(frozen=True)
class Changes:
    """Differences between a source and the images in its shards.

    Attributes:
        before, now: old and new place of the images.
        added, removed, edited: names of files.
        relabelled: names of images.
    """

    before: Path
    now: Path
    added: Sequence[str] = ()
    removed: Sequence[str] = ()
    edited: Sequence[str] = ()
    relabelled: Sequence[str] = ()

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

    Nothing is known of images that are gone. Of more than `file_stats.MOST` files only the class
    folders are compared, and only at another place.

    Args:
        out: the shards, finished or only planned.
        images: where the images are now; by default where they were.
    """
    plan = seek_record(out / "plan.json")
    try:
        before = Path(plan["source"])
        source = _open_source(plan, before if images is None else images.resolve())
        noted, folders = read_notes(out)
        if noted is None:
            if source.known_classes() == source.folder_names():
                folders = plan["class_names"]  # shards of version 0.1.0 have no notes
            return _compare_folders(before, source, folders)
        listing = source.listing()
        now = file_stats(source, listing.entries)
        if [*now] == [source.path.name] and [*noted] == [before.name]:  # one renamed file
            now = {before.name: now[source.path.name]}
        both = now.keys() & noted.keys()
        edited = {name for name in both if now[name][0] != noted[name][0]}
        if source.path == before:  # a copy's times are those of the copying
            touched = {name for name in both - edited if now[name][1] != noted[name][1]}
            edited |= _edited_files(out, source, listing.entries, touched)
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


def _edited_files(
    out: Path, source: ImageSource, entries: Sequence[Entry], touched: set[str]
) -> set[str]:
    """Return those of the touched files that have another image than the finished shards.

    Of more than `COMPARED` images, compare evenly chosen ones.
    """
    from maect.data.shard_check import differing_images

    if not touched or not (out / "index.json").exists():
        return set()
    names = {entry: as_utf8(source.file_of(entry)) for entry in entries}
    file_of = {entry: name for entry, name in names.items() if name in touched}
    step = max(1, -(-len(file_of) // COMPARED))
    chosen = [*file_of][::step]
    return {file_of[entry] for entry in differing_images(out, source, chosen)}


def _compare_folders(before: Path, source: ImageSource, names: list[str] | None) -> Changes | None:
    """Compare the names of class folders at another place; each gets a slash at its end."""
    now = source.folder_names() if source.path != before else None
    if now is None or names is None or [*now] == names:
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


def may_differ(out: Path, images: Path) -> bool:
    """Return whether the images may differ from those in finished shards.

    True also if only the time of a file is another, of which `changes` compares the content.
    """
    plan = seek_record(out / "plan.json")
    if changes(out, images) is not None:
        return True
    try:
        noted, _ = read_notes(out)
        source = _open_source(plan, images)
        return noted is not None and file_stats(source, source.listing().entries) != noted
    except (UserError, KeyError, ValueError, OSError):
        return False


def advice(out: Path, found: Changes, again: Path | None = None) -> str:
    """Return a message: which images have changed since they were sharded, and what to do.

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
