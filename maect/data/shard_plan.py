"""Plan the shards of a split: which image goes where, fixed before the first byte is written.

An image's id is its position in a shuffled list, whatever the number of shards, so neither that
number nor the order in which they are written changes what training sees.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maect.core.errors import UserError
from maect.core.files import read_record, write_record, write_text
from maect.data import key_of, random
from maect.data.changes import note_files
from maect.data.index import Index
from maect.data.sources import open_source
from maect.data.sources.base import Entry, ImageSource, Listing, text_lines
from maect.recipes import Pixels

log = logging.getLogger(__name__)

_SEED = 0


@dataclass(frozen=True)
class ShardPlan:
    """Plan of a split's shards; nothing of it is written yet.

    Attributes:
        record: content of plan.json.
        listings: content of parts/NUMBER.jsonl for each shard: the images in it, one a line.
        source: where the images are read.
        listed: all images of the source, also those that the plan leaves out.
    """

    record: dict[str, Any]
    listings: list[str]
    source: ImageSource
    listed: Sequence[Entry]


def plan_shards(
    source: Path,
    kind: str,
    out: Path,
    shards: int,
    *,
    split: str | None = None,
    labels: Path | None = None,
    only: Path | None = None,
    exclude: Path | None = None,
    skip_unreadable: bool = False,
    shorter_side: int | None = None,
    pixels: Pixels | None = None,
) -> ShardPlan:
    """List the source, shuffle its images and assign each to a shard. Write nothing.

    Args:
        source: folder or file with the images.
        out: folder that the shards are for.
        shards: number of tars.
        split: name of the split; that of `out` by default.
        labels: labels of the source, for the kinds that take them.
        only: text file with the names of the images to take, one a line.
        exclude: text file with the names of the images to leave out.
        skip_unreadable: leave out images that are gone or unreadable and list them in the index.
        shorter_side: pixels to which larger images are recompressed (off by default).
        pixels: how the images are converted.

    Raises:
        UserError: a wrong source, a list that names other images, or too few images.
    """
    if shards < 1:
        raise UserError(f"--shards {shards}: at least one is needed")
    images = open_source(kind, source, labels, pixels)
    if labels is None and "labels" in images.needs:
        raise UserError(
            f"{source}: the validation images carry no labels; give --labels (the devkit "
            "ILSVRC2012_devkit_t12.tar.gz, or a text file with lines `name label`)"
        )
    listing = images.listing()
    if listing.ignored:
        log.info("%s: files left out, by suffix: %s", source, listing.left_out)
    choice = _choose(listing, source, only, exclude, skip_unreadable)
    record: dict[str, Any] = {
        "split": split or out.name,
        "kind": kind,
        "source": str(images.path.resolve()),
        "n": len(choice.entries),
        "shards": shards,
        "class_names": listing.class_names,
        "ignored": {
            "count": len(listing.ignored),
            "suffixes": listing.ignored_suffixes,
            "first": listing.ignored[:10],
        },
        "excluded": choice.excluded,
    }
    if only is not None:
        record |= {"unlisted": choice.unlisted, "only": str(only)}
    if skip_unreadable:
        record |= {"skip_unreadable": True, "gone": choice.gone}
    n = len(choice.entries)
    if shards > n:
        raise UserError(f"{source}: {shards} shards for {n} images; lower the number")
    listings = _listings(choice.entries, shards)
    record["options"] = stored_options(shorter_side, pixels)
    record["listings"] = [hashlib.sha256(text.encode()).hexdigest() for text in listings]
    return ShardPlan(record, listings, images, listing.entries)


def stored_options(shorter_side: int | None, pixels: Pixels | None) -> dict[str, Any]:
    """Return the options that change an image's bytes, as plan.json has them."""
    options: dict[str, Any] = {}
    if shorter_side is not None:
        options["shorter_side"] = shorter_side
    if pixels is not None and pixels.files:
        options["pixels"] = pixels.files
    return options


def store_plan(out: Path, plan: ShardPlan) -> None:
    """Write a plan, and note the images' files, unless all of its shards are indexed.

    Raises:
        UserError: `out` holds finished shards of another plan.
    """
    record = plan.record
    for path in sorted((out / "parts").glob("[0-9]*.json")):
        number = int(path.stem)
        finished = read_record(path)
        planned = record["listings"][number] if number < record["shards"] else None
        if (finished.get("listing"), finished.get("options")) != (planned, record["options"]):
            raise UserError(
                f"{out}: holds finished shards of other images, options or number of shards; "
                "choose another folder or delete this one"
            )
    indexed = (out / "index.json").exists() and (out / "plan.json").exists()
    if indexed and read_record(out / "plan.json") == record:
        return
    for number, text in enumerate(plan.listings):
        write_text(_listing_path(out, number), text)
    note_files(out, plan.source, plan.listed)
    write_record(out / "plan.json", record)


def read_listing(
    out: Path, plan: dict[str, Any], number: int
) -> tuple[int, list[tuple[str, Entry]]]:
    """Return the first id of a shard, and key and entry of each image in it."""
    path = _listing_path(out, number)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; plan the shards again") from None
    if hashlib.sha256(data).hexdigest() != plan["listings"][number]:
        raise UserError(f"{path}: not what plan.json says; plan the shards again")
    values = [json.loads(line) for line in data.splitlines()]
    start, _ = _bounds(plan["n"], plan["shards"], number)
    return start, [(key, Entry(*rest)) for key, *rest in values]


def image_names(index: Index) -> list[str]:
    """Return each sample's name below its source; its key if no plan has the name."""
    known: dict[str, str] = {}
    out = index.directory
    if (out / "plan.json").exists():
        plan = read_record(out / "plan.json")
        for number in range(plan["shards"]):
            _, entries = read_listing(out, plan, number)
            known |= {key: entry.name for key, entry in entries}
    keys = index.keys()
    return [known.get(key, key) for key in keys]


def _listing_path(out: Path, number: int) -> Path:
    return out / "parts" / f"{number:06d}.jsonl"


def _bounds(n: int, shards: int, number: int) -> tuple[int, int]:
    """Return the first id of a shard, and the first id of the next one."""
    return number * n // shards, (number + 1) * n // shards


@dataclass(frozen=True)
class _Choice:
    """Images to shard, and those that the lists of names leave out.

    Attributes:
        excluded: names that are listed to be left out, sorted.
        unlisted: number of images that the list of those to take does not name.
        gone: listed names that the source no longer has.
    """

    entries: list[Entry]
    excluded: list[str]
    unlisted: int
    gone: list[str]


def _choose(
    listing: Listing, source: Path, only: Path | None, exclude: Path | None, skip: bool
) -> _Choice:
    """Choose images by the lists of names."""
    wanted, missing = _read_names(listing.entries, only, skip)
    unwanted, gone = _read_names(listing.entries, exclude, skip)
    entries = [entry for entry in listing.entries if entry.name not in unwanted]
    unlisted = 0
    if only is not None:
        entries = [entry for entry in entries if entry.name in wanted]
        unlisted = len(listing.entries) - len(wanted)
    if listing.entries and not entries:
        lists = " and ".join(str(path) for path in (only, exclude) if path is not None)
        raise UserError(f"{lists}: no image of {source} is left; correct the list")
    return _Choice(entries, sorted(unwanted), unlisted, [*missing, *gone])


def _read_names(entries: list[Entry], path: Path | None, skip: bool) -> tuple[set[str], list[str]]:
    """Read a list of names: those of images, and, if `skip`, those that are gone.

    Text behind a tab is not read: a list of unreadable images gives the reason there.
    """
    if path is None:
        return set(), []
    lines = set(text_lines(path)) - {""}
    known = {entry.name for entry in entries}
    names = {line if line in known else line.partition("\t")[0] for line in lines}
    gone = sorted(names - known)
    if gone and not skip:
        more = f", nor are {len(gone) - 1} others of its lines" if len(gone) > 1 else ""
        raise UserError(
            f"{path}: {gone[0]!r} is not in the source{more}; correct the list, or have what is "
            "gone or unreadable left out (skip_unreadable: true, or --skip-unreadable)"
        )
    return names & known, gone


def _listings(entries: list[Entry], shards: int) -> list[str]:
    """Shuffle the images and return the listing of each shard."""
    keys = _unique_keys(entries)
    n = len(entries)
    order = np.argsort(random.bits(_SEED, 0, np.arange(n), 0, random.SHARD, 1)[:, 0]).tolist()
    listings = []
    for number in range(shards):
        start, end = _bounds(n, shards, number)
        lines = [json.dumps([keys[i], *astuple(entries[i])]) for i in order[start:end]]
        listings.append("".join(f"{line}\n" for line in lines))
    return listings


def _unique_keys(entries: list[Entry]) -> list[str]:
    """Return the name of each image in its tar, without extension."""
    taken: set[str] = set()
    keys = []
    for entry in entries:
        key = key_of(entry.name)
        if key in taken:
            key = key_of(entry.name, taken=True)
        taken.add(key)
        keys.append(key)
    return keys
