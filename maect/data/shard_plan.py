"""Plan of a split's shards: which image goes where, fixed before the first byte is written.

An image's id is its position in a shuffled list, whatever the number of shards, so neither that
number nor the order in which they are written changes what training sees.
"""

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np

from maect.core.errors import UserError
from maect.core.files import read_record, write_record, write_text
from maect.data import key_of, random
from maect.data.index import Index
from maect.data.sources import open_source
from maect.data.sources.archives import WebDataset
from maect.data.sources.base import Entry, text_lines
from maect.data.sources.noted import note_files
from maect.recipes import Pixels

log = logging.getLogger(__name__)

_SEED = 0


def planned(
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
) -> tuple[dict[str, Any], list[str], Callable[[], None]]:
    """The plan of `plan_shards`, the listing of each shard, and what notes the files down.

    Nothing is written.
    """
    if shards < 1:
        raise UserError(f"--shards {shards}: at least one is needed")
    images = open_source(kind, source, labels, pixels)
    if labels is None and "labels" in images.needs:
        raise UserError(
            f"{source}: the validation images carry no labels; give --labels (the devkit "
            "ILSVRC2012_devkit_t12.tar.gz, or a text file with lines `name label`)"
        )
    if images.in_place and shorter_side is not None:
        raise UserError(f"{source}: --shorter-side: an index of tars makes no image; unpack them")
    listing = images.listing()
    if listing.ignored:
        log.info("%s: files left out, by suffix: %s", source, listing.left_out)
    wanted, missing = _named(listing.entries, only, skip_unreadable)
    unwanted, gone = _named(listing.entries, exclude, skip_unreadable)
    entries = [entry for entry in listing.entries if entry.name not in unwanted]
    unlisted = 0
    if only is not None:
        entries = [entry for entry in entries if entry.name in wanted]
        unlisted = len(listing.entries) - len(wanted)
    if listing.entries and not entries:
        lists = " and ".join(str(path) for path in (only, exclude) if path is not None)
        raise UserError(f"{lists}: no image of {source} is left; correct the list")
    made = {} if pixels is None else pixels.files
    tars = []
    if isinstance(images, WebDataset):
        tars = [str(tar.resolve()) for tar in images.tars]
        shards = max(1, min(len(tars), len(entries)))
    if shards > len(entries):
        raise UserError(f"{source}: {shards} shards for {len(entries)} images; lower the number")
    keyed = list(zip(_keys(entries), entries, strict=True))
    order = np.argsort(random.bits(_SEED, 0, np.arange(len(keyed)), 0, random.SHARD, 1)[:, 0])
    texts = []
    for number in range(shards):
        part = order[slice(*_bounds(len(keyed), shards, number))]
        lines = (json.dumps([keyed[i][0], *astuple(keyed[i][1])]) for i in part)
        texts.append("".join(f"{line}\n" for line in lines))
    plan = {
        "split": split or out.name,
        "kind": kind,
        "source": str(images.path.resolve()),
        "n": len(keyed),
        "shards": shards,
        "class_names": listing.class_names,
        "ignored": {
            "count": len(listing.ignored),
            "suffixes": listing.ignored_suffixes,
            "first": listing.ignored[:10],
        },
        "excluded": sorted(unwanted),
        **({"unlisted": unlisted, "only": str(only)} if only is not None else {}),
        **({"skip_unreadable": True, "gone": [*missing, *gone]} if skip_unreadable else {}),
        **({"tars": tars} if tars else {}),
        "options": ({} if shorter_side is None else {"shorter_side": shorter_side})
        | ({"pixels": made} if made else {}),
        "listings": [hashlib.sha256(text.encode()).hexdigest() for text in texts],
    }
    return plan, texts, lambda: note_files(out, images, listing.entries)


def store_plan(
    out: Path, plan: dict[str, Any], listings: list[str], note: Callable[[], None]
) -> None:
    """Write the plan, unless it is there; finished shards of another plan are never overwritten."""
    for path in sorted((out / "parts").glob("[0-9]*.json")):
        number, record = int(path.stem), read_record(path)
        planned = plan["listings"][number] if number < plan["shards"] else None
        if (record.get("listing"), record.get("options")) != (planned, plan["options"]):
            raise UserError(
                f"{out}: holds finished shards of other images, options or number of shards; "
                "choose another folder or delete this one"
            )
    if (out / "plan.json").exists() and read_record(out / "plan.json") == plan:
        return
    for number, text in enumerate(listings):
        write_text(_listing_path(out, number), text)
    note()
    write_record(out / "plan.json", plan)


def read_plan(out: Path) -> dict[str, Any]:
    """The plan of a folder of shards, or a UserError: there is none."""
    if not (out / "plan.json").exists():
        raise UserError(f"{out}: no plan.json; plan the shards first (maect shard)")
    return read_record(out / "plan.json")


def read_listing(out: Path, number: int) -> tuple[int, list[tuple[str, Entry]]]:
    """First id, and (key, entry) of every image of a shard."""
    plan = read_plan(out)
    if not 0 <= number < plan["shards"]:
        raise UserError(f"{out}: no shard {number}; there are {plan['shards']}, from 0 on")
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
    """Names of all samples below their source, as far as the plan of the shards is there."""
    known: dict[str, str] = {}
    if (index.directory / "plan.json").exists():
        for number in range(read_plan(index.directory)["shards"]):
            known |= {key: entry.name for key, entry in read_listing(index.directory, number)[1]}
    keys = index.keys()
    return [known.get(key, key) for key in keys]


def _listing_path(out: Path, number: int) -> Path:
    """Return what goes into a shard."""
    return out / "parts" / f"{number:06d}.jsonl"


def _bounds(n: int, shards: int, number: int) -> tuple[int, int]:
    return number * n // shards, (number + 1) * n // shards


def _named(entries: list[Entry], path: Path | None, skip: bool) -> tuple[set[str], list[str]]:
    """The images that a list names, and, if some may be gone, the names of those.

    What stands behind a tab is not read: a list of unreadable images says there why.
    """
    if path is None:
        return set(), []
    lines = set(text_lines(path)) - {""}
    there = {entry.name for entry in entries}
    names = {line if line in there else line.partition("\t")[0] for line in lines}
    gone = sorted(names - there)
    if gone and not skip:
        more = f", nor are {len(gone) - 1} others of its lines" if len(gone) > 1 else ""
        raise UserError(
            f"{path}: {gone[0]!r} is not in the source{more}; correct the list, or have what is "
            "gone or unreadable left out (skip_unreadable: true, or --skip-unreadable)"
        )
    return names & there, gone


def _keys(entries: list[Entry]) -> list[str]:
    """Unique names in a tar, without extension."""
    taken: set[str] = set()
    keys = []
    for entry in entries:
        key = key_of(entry.name)
        if key in taken:
            key = key_of(entry.name, taken=True)
        taken.add(key)
        keys.append(key)
    return keys
