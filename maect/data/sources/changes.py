"""What has happened to images since they were sharded: added, removed, edited."""

import json
import os
import shlex
from collections.abc import Iterable
from pathlib import Path

from maect.core.errors import UserError, counted
from maect.core.files import read_mapping, write_text
from maect.data.sources import Entry, ImageSource, open_source
from maect.data.sources.archives import Archive

FILES = "files.jsonl"
MOST = 50_000
"""Files that are looked at again: more would delay every start."""


def note_files(out: Path, source: ImageSource, entries: Iterable[Entry]) -> None:
    """Write beside shards names and sizes of the files that images are in, if these are few."""
    names = _files(source, entries)
    if len(names) <= MOST:
        sizes = _sizes(source, names)
        lines = (json.dumps([name, size]) for name, size in sorted(sizes.items()))
        write_text(out / FILES, "".join(f"{line}\n" for line in lines))


def _files(source: ImageSource, entries: Iterable[Entry]) -> set[str]:
    """Names of the files below the source's folder."""
    packed = isinstance(source, Archive)  # whose entries are named by what is in it
    return {source.path.name} if packed else {entry.path for entry in entries}


def _sizes(source: ImageSource, names: Iterable[str]) -> dict[str, int]:
    """Bytes of each file; -1 of one that is gone."""
    sizes = {}
    for name in names:
        text = name.encode("utf-8", "backslashreplace").decode()
        try:
            sizes[text] = os.stat(source.root / name).st_size
        except OSError:
            sizes[text] = -1
    return sizes


def changes_since(out: Path) -> str | None:
    """How the images differ from those in finished shards, and what to do; None: in nothing.

    Nothing is said of images that were moved away as a whole, nor of more than `MOST` files.
    """
    plan, known = read_mapping(out / "plan.json"), out / FILES
    if not known.exists() or not (out / "index.json").exists():
        return None
    try:
        before = dict(json.loads(line) for line in known.read_text(encoding="utf-8").splitlines())
        source = open_source(plan["kind"], Path(plan["source"]))
        now = _sizes(source, _files(source, source.listing().entries))
    except (UserError, KeyError, ValueError):
        return None
    added, gone = sorted(now.keys() - before.keys()), sorted(before.keys() - now.keys())
    edited = sorted(name for name in now.keys() & before.keys() if now[name] != before[name])
    kinds = {"added": added, "removed": gone, "changed": edited}
    told = [
        f"{counted(len(names), 'file')} {how} ({names[0]}{' …' if len(names) > 1 else ''})"
        for how, names in kinds.items()
        if names
    ]
    if not told:
        return None
    lists = ""
    if "unlisted" in plan and (added or gone):
        such = f" such as {plan['only']}" if "only" in plan else ""
        how = ["name new ones"] if added else []
        how += ["leave out removed ones"] if gone else []
        lists = f"lists of images{such} have to {' and '.join(how)}; "
    return (
        f"{plan['source']}: {', '.join(told)} since it was sharded; the shards are as they were; "
        f"{lists}the same command shards again after: rm -r {shlex.quote(str(out))}"
    )
