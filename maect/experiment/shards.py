"""Which shards a split reads: its own, or those that another experiment made of the same images.

`maect.data.sources.shared` says which files of a split's folder tell.
"""

import itertools
import os
from pathlib import Path
from typing import Any

from maect.core.files import read_mapping, sha256_file, write_record
from maect.core.settings import digest
from maect.data.sources.changes import may_differ
from maect.data.sources.shared import ASKED, TAKEN, index_digest, taken
from maect.data.sources.shared import finished as all_finished
from maect.experiment.schema import Split, fill_path
from maect.recipes import Pixels


def made_of(split: Split, pixels: Pixels, images: Path) -> dict[str, Any]:
    """What a split's shards are made of: equal for equal shards, as far as folders can tell.

    An image that is added or removed changes the time of its folder. Bundled images are always the
    same.

    Raises:
        OSError: there are no such images or lists.
    """
    told = {"arguments": _arguments(split, pixels)}
    if split.images is None:
        return told
    return {"images": str(images.resolve()), "changed": last_changes(images), **told}


def find_shards(own: Path, split: Split, pixels: Pixels, images: Path) -> Path:
    """Folder of the shards that a split reads.

    Shards of its own an experiment keeps, and those of another one as well: an image that is added
    later re-runs nothing. It does not begin with those of images that have changed since.

    Args:
        own: where they are if no other experiment has them.
        split: what the experiment says of it.
        pixels: of the data set.
        images: the split's.
    """
    kept = split.images is None or not split.source.sharded or split.source.in_place
    if kept or (own / "plan.json").exists():
        return own
    where, found = images.resolve(), all_finished(own)
    finished = {
        folder: made
        for folder, made in found.items()
        if made.get("images") == str(images.resolve())
    }
    try:
        asked = made_of(split, pixels, images) if finished else {}
    except OSError:  # sharding will say so
        return own
    begun = taken(own)
    if begun in finished and finished[begun] | {"changed": ""} == asked | {"changed": ""}:
        return begun
    same = (folder for folder, made in finished.items() if made == asked)
    # A file that is edited in place leaves the times of folders as they are.
    return next((folder for folder in same if not may_differ(folder, where)), own)


def note_own(own: Path, made: dict[str, Any]) -> None:
    """Write down, before a split is sharded, what its shards are made of."""
    write_record(own / ASKED, made)
    (own / TAKEN).unlink(missing_ok=True)


def note_taken(own: Path, folder: Path) -> None:
    """Write down that a split has begun with another experiment's shards."""
    noted = {"made_of": read_mapping(folder / ASKED), "digest": index_digest(folder)}
    write_record(own / TAKEN, noted)


def said_otherwise(folder: Path, split: Split, pixels: Pixels) -> str:
    """Where arguments and lists are not those that shards were made by; empty: nowhere.

    Nothing is said of shards of before this was noted.
    """
    before = read_mapping(folder / ASKED).get("arguments")
    try:
        now = _arguments(split, pixels)
    except OSError:  # a list is gone: finished shards do without
        return ""
    if before is None or before == now:
        return ""
    made, said = _both(folder, before, now)
    told = []
    for option in sorted(o for o in made.keys() | said.keys() if made.get(o) != said.get(o)):
        key = "only" if option == "--only-listed" else option[2:].replace("-", "_")
        file = getattr(split, key, None) if key in ("labels", "only", "exclude") else None
        if option not in said or option not in made:
            how = "no longer stated" if option in made else "not stated then"
        else:
            how = "other content" if file else f"{said[option]}, made with {made[option]}"
        told.append(f"{key} ({fill_path(file)}: {how})" if file else f"{key} ({how})")
    return ", ".join(told)


def is_made_otherwise(folder: Path, split: Split, pixels: Pixels) -> bool:
    """Whether shards were made by other arguments than a split's, whatever is in its lists."""
    before = read_mapping(folder / ASKED).get("arguments")
    if before is None:
        return False
    made, said = _both(folder, before, split.arguments(pixels))
    for lists in ("--labels", "--only-listed", "--exclude", "--classes"):
        for options in (made, said):
            options.update({lists: ""} if lists in options else {})
    return made != said


def last_changes(images: Path) -> str:
    """Hash of when a file, those that a pattern fits, or all folders below one were changed.

    Raises:
        OSError: there is nothing.
    """
    pending = [images] if images.exists() else sorted(images.parent.glob(images.name)) or [images]
    times: dict[tuple[int, int], int] = {}  # a link may lead back
    while pending:
        path = pending.pop()
        status = path.stat()
        if (status.st_dev, status.st_ino) in times:
            continue
        times[status.st_dev, status.st_ino] = status.st_mtime_ns
        if path.is_dir():
            with os.scandir(path) as entries:
                inside = [
                    e for e in entries if e.is_dir() or e.name.endswith((".parquet", ".arrow"))
                ]
            pending += [Path(entry) for entry in inside]
    return digest(sorted(times.values()))


def _arguments(split: Split, pixels: Pixels) -> list[str]:
    """A split's arguments, with the content of lists in place of their names."""
    lists = {name: _content(Path(name)) for name in split.files()}
    return [lists.get(word, word) for word in split.arguments(pixels)]


def _content(path: Path) -> str:
    """sha256 of a list, or of what is in a folder such as the unpacked devkit of ImageNet."""
    if not path.is_dir():
        return sha256_file(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return digest({str(file.relative_to(path)): sha256_file(file) for file in files})


def _both(folder: Path, before: list[str], now: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """The options that shards were made by and those of now, without one that changed nothing."""
    made, said = _options(before), _options(now)
    if not read_mapping(folder / "index.json").get("unreadable"):  # nothing was left out by it
        made.pop("--skip-unreadable", None)
        said.pop("--skip-unreadable", None)
    return made, said


def _options(arguments: list[str]) -> dict[str, str]:
    """The values of options by their names; empty of those without one."""
    pairs = itertools.pairwise([*arguments, "--"])
    return {a: "" if b.startswith("--") else b for a, b in pairs if a.startswith("--")}
