"""The plan of a split's shards: which image goes where, fixed before the first byte is written.

An image's id is its place in a shuffled list, whatever the number of shards, so neither the number
of shards nor the order in which they are written changes what training sees.
"""

import hashlib
import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np

from maect.core.errors import UserError
from maect.core.files import read_json, write_json, write_text
from maect.data import random
from maect.data.sources import Entry, list_source

_SEED = 0
# Longer names do not fit a plain tar header together with their extension.
_KEY_BYTES = 90


def plan_shards(
    source: Path,
    kind: str,
    out: Path,
    shards: int,
    *,
    split: str | None = None,
    labels: Path | None = None,
    exclude: Path | None = None,
    shorter_side: int | None = None,
) -> dict[str, Any]:
    """List the source, shuffle it and assign every image to a shard. Repeating it changes nothing.

    Args:
        source: folder or archive, see `maect.data.sources`.
        kind: which kind of source.
        out: folder of this split's shards.
        shards: how many tars.
        split: their name; the name of `out` by default.
        labels: labels of the source, for the kinds that need them.
        exclude: text file of image names to leave out, one a line.
        shorter_side: recompress larger images to this shorter side; off by default.

    Returns:
        The content of `out`/plan.json.

    Raises:
        UserError: wrong source, or `out` holds shards of another plan.
    """
    source, out = Path(source), Path(out)
    if shards < 1:
        raise UserError(f"shards: {shards}; at least one is needed")
    listing = list_source(source, kind, labels)
    entries, excluded = _without(listing.entries, exclude)
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
        "source": str(source.resolve()),
        "n": len(keyed),
        "shards": shards,
        "class_names": listing.class_names,
        "ignored": {"count": len(listing.ignored), "first": listing.ignored[:10]},
        "excluded": excluded,
        "options": {} if shorter_side is None else {"shorter_side": shorter_side},
        "listings": [hashlib.sha256(text.encode()).hexdigest() for text in texts],
    }
    _check_same(out, plan)
    if (out / "plan.json").exists() and read_json(out / "plan.json") == plan:
        return plan
    for number, text in enumerate(texts):
        write_text(listing_path(out, number), text)
    write_json(out / "plan.json", plan)
    return plan


def read_plan(out: Path) -> dict[str, Any]:
    """The plan of a folder of shards.

    Raises:
        UserError: there is none.
    """
    if not (out / "plan.json").exists():
        raise UserError(f"{out}: no plan.json; plan the shards first (maect shard)")
    return read_json(out / "plan.json")


def read_listing(out: Path, number: int) -> tuple[int, list[tuple[str, Entry]]]:
    """First id, and (key, entry) of every image of a shard.

    Raises:
        UserError: no such shard, or its listing is not the planned one.
    """
    plan = read_plan(out)
    if not 0 <= number < plan["shards"]:
        raise UserError(f"{out}: no shard {number}; there are {plan['shards']}, from 0 on")
    path = listing_path(out, number)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; plan the shards again") from None
    if hashlib.sha256(text.encode()).hexdigest() != plan["listings"][number]:
        raise UserError(f"{path}: not what plan.json says; plan the shards again")
    values = [json.loads(line) for line in text.splitlines()]
    start, _ = _bounds(plan["n"], plan["shards"], number)
    return start, [(key, Entry(*rest)) for key, *rest in values]


def listing_path(out: Path, number: int) -> Path:
    """What goes into a shard."""
    return out / "parts" / f"{number:06d}.jsonl"


def shard_name(split: str, number: int) -> str:
    """File name of a shard."""
    return f"{split}-{number:06d}.tar"


def record_path(out: Path, number: int) -> Path:
    """The record that a shard is finished."""
    return out / "parts" / f"{number:06d}.json"


def _bounds(n: int, shards: int, number: int) -> tuple[int, int]:
    return number * n // shards, (number + 1) * n // shards


def _check_same(out: Path, plan: dict[str, Any]) -> None:
    """Finished shards must belong to this plan; they are never silently overwritten."""
    for path in sorted((out / "parts").glob("[0-9]*.json")):
        number, record = int(path.stem), read_json(path)
        planned = plan["listings"][number] if number < plan["shards"] else None
        if (record["listing"], record["options"]) != (planned, plan["options"]):
            raise UserError(
                f"{out}: holds finished shards of other images, options or number of shards; "
                "choose another folder or delete this one"
            )


def _without(entries: list[Entry], exclude: Path | None) -> tuple[list[Entry], list[str]]:
    if exclude is None:
        return entries, []
    try:
        names = set(exclude.read_text(encoding="utf-8").splitlines()) - {""}
    except OSError as error:
        raise UserError(f"{exclude}: {error.strerror}") from None
    if unknown := sorted(names - {entry.name for entry in entries}):
        raise UserError(f"{exclude}: {unknown[0]!r} is not in the source")
    return [entry for entry in entries if entry.name not in names], sorted(names)


def _keys(entries: list[Entry]) -> list[str]:
    """Unique tar names without extension, as close to the images' names as webdataset allows."""
    taken: set[str] = set()
    keys = []
    for entry in entries:
        folder, _, base = entry.name.rpartition("/")
        # webdataset ends the key at the first dot; a sample's members must share it.
        stem = base.rpartition(".")[0].replace(".", "_")
        key = f"{folder}/{stem}" if folder else stem
        key = "".join(c if c.isprintable() and c != "\\" else "_" for c in key)
        if len(key.encode("utf-8", "replace")) > _KEY_BYTES or key in taken:
            mark = hashlib.sha256(entry.name.encode("utf-8", "surrogateescape")).hexdigest()[:12]
            short = key.encode("utf-8", "replace")[: _KEY_BYTES - 13].decode("utf-8", "ignore")
            key = f"{short}-{mark}"
        taken.add(key)
        keys.append(key)
    return keys
