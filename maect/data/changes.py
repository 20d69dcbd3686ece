"""Changes of images since they were sharded: added, removed, edited, relabelled."""

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
from maect.data.sources.noted import file_stats, read_noted
from maect.recipes import Pixels

COMPARED = 200
"""Images whose content is compared again, where the time of their file has changed."""


def _opened(plan: dict[str, Any], images: Path) -> ImageSource:
    """The images of a plan, at another place."""
    return open_source(plan["kind"], images, pixels=Pixels.of_shards(plan["options"]))


@dataclass(frozen=True)
class Changes:
    """Differences between images and those in finished shards, and their old and new place."""

    before: Path
    now: Path
    added: Sequence[str] = ()
    removed: Sequence[str] = ()
    edited: Sequence[str] = ()
    relabelled: Sequence[str] = ()
    """Images; those before are files."""

    @property
    def moved(self) -> bool:
        """Return whether they are looked for elsewhere."""
        return self.now != self.before

    @property
    def others(self) -> bool:
        """Return whether these are other images, not those of before, changed."""
        if self.relabelled or not self.moved:
            return bool(self.relabelled)
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
    """Return how the images differ from those in the shards that are made of them.

    None: in nothing, or unknown, since they were moved away as a whole, or are more than
    `MOST` files. Of those only the class folders are compared, and only if they lie elsewhere now.

    Args:
        out: the shards, finished or only planned.
        images: where the images are looked for now; where they were by default.
    """
    plan = seek_record(out / "plan.json")
    try:
        before = Path(plan["source"])
        source = _opened(plan, before if images is None else images.resolve())
        noted, folders = read_noted(out)
        if noted is None:
            if source.known_classes() == source.folder_names():
                folders = plan["class_names"]  # also of shards in whose time nothing was noted
            return _other_folders(before, source, folders)
        listing = source.listing()
        now = file_stats(source, listing.entries)
        if [*now] == [source.path.name] and [*noted] == [before.name]:  # one file, called otherwise
            now = {before.name: now[source.path.name]}
        both = now.keys() & noted.keys()
        edited = {name for name in both if now[name][0] != noted[name][0]}
        if source.path == before:  # a copy has the times of its making
            touched = {name for name in both - edited if now[name][1] != noted[name][1]}
            edited |= _edited(out, source, listing.entries, touched)
        found = Changes(
            before,
            source.path,
            added=sorted(now.keys() - noted.keys()),
            removed=sorted(noted.keys() - now.keys()),
            edited=sorted(edited),
            relabelled=_relabelled(out, plan, listing),
        )
    except (UserError, KeyError, ValueError, OSError):
        return None
    return found if str(found) else None


def _edited(
    out: Path, source: ImageSource, entries: Sequence[Entry], touched: set[str]
) -> set[str]:
    """Files with an image that is not the one in finished shards, of those that were touched.

    Of more than `COMPARED` images, evenly chosen ones are compared.
    """
    from maect.data.shard_check import differing

    if not touched or not (out / "index.json").exists():
        return set()
    names = {entry: as_utf8(source.file_of(entry)) for entry in entries}
    of_file = {entry: name for entry, name in names.items() if name in touched}
    chosen = [*of_file][:: max(1, -(-len(of_file) // COMPARED))]
    return {of_file[entry] for entry in differing(out, source, chosen)}


def _other_folders(before: Path, source: ImageSource, names: list[str] | None) -> Changes | None:
    """Class folders, each with a slash at its end, where images that lie elsewhere have others."""
    now = source.folder_names() if source.path != before else None
    if now is None or names is None or [*now] == names:
        return None
    added = [f"{name}/" for name in now if name not in names]
    removed = [f"{name}/" for name in names if name not in now]
    return Changes(before, source.path, added=added, removed=removed)


def _relabelled(out: Path, plan: dict[str, Any], listing: Listing) -> list[str]:
    """Images in the shards that have another class now, if the source itself says the classes."""
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
    """Return whether the images may be others than those in finished shards.

    That is more than `changes`, which compares the content of some: any file has another time.
    """
    plan = seek_record(out / "plan.json")
    if changes(out, images) is not None:
        return True
    try:
        noted, _ = read_noted(out)
        source = _opened(plan, images)
        return noted is not None and file_stats(source, source.listing().entries) != noted
    except (UserError, KeyError, ValueError, OSError):
        return False


def advice(out: Path, found: Changes, again: Path | None = None) -> str:
    """Return what has changed of the images in finished shards, and what to do."""
    plan, lists = seek_record(out / "plan.json"), ""
    if "unlisted" in plan and (found.added or found.removed):
        such = f" such as {plan['only']}" if "only" in plan else ""
        how = ["name new ones"] if found.added else []
        how += ["leave out removed ones"] if found.removed else []
        lists = f"lists of images{such} have to {' and '.join(how)}; "
    return (
        f"{found.now}: {found} since it was sharded; the shards are as they were; "
        f"{lists}the same command shards again after: rm -r {shlex.quote(str(again or out))}"
    )
