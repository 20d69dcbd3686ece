"""Choice of a split's shards: its own, or those that another experiment made of the same images.

`maect.data.config` says which files of a split's folder tell.
"""

import os
from pathlib import Path
from typing import Any

from maect.core.files import seek_record, sha256_file, write_record
from maect.core.settings import digest
from maect.data.changes import changes
from maect.data.config import (
    CONFIG,
    LISTS,
    TAKEN,
    ShardsConfig,
    finished_shards,
    index_digest,
    made_by,
    reused_shards,
)
from maect.data.sources.base import CLASS_LISTS
from maect.experiment.schema import Split, fill_path
from maect.recipes import Pixels


def shards_config(split: Split, pixels: Pixels, images: Path) -> ShardsConfig:
    """Resolve the settings of a split's shards; OSError if images or lists are missing.

    An image that is added or removed changes the time of its folder; bundled ones are always the
    same.
    """
    stated = _stated(split, pixels)
    return ShardsConfig(
        images=images,
        changed="" if split.images is None else last_changes(images),
        lists_sha256=_checksums(stated),
        **stated,
    )


def find_shards(own: Path, split: Split, pixels: Pixels, images: Path) -> Path:
    """Return the folder of the shards that a split reads; `own` if no other experiment has them.

    An experiment keeps shards, its own and another's: an image that is added later re-runs nothing.
    It does not begin with those of images that have changed since.
    """
    kept = split.images is None or not split.source.sharded
    if kept or (own / "plan.json").exists():
        return own
    where = images.resolve()
    all_finished = finished_shards(own).items()
    finished = {folder: made for folder, made in all_finished if made.images.resolve() == where}
    if not finished:
        return own
    try:
        asked = shards_config(split, pixels, images)
    except OSError:  # sharding will say so
        return own
    begun = reused_shards(own)
    if begun in finished and finished[begun].content == asked.content:
        return begun
    same = (
        folder for folder, made in finished.items() if made.source_identity == asked.source_identity
    )
    # A file that is edited in place leaves the times of folders as they are.
    return next((folder for folder in same if not changes(folder, where)), own)


def note_own(own: Path, config: ShardsConfig) -> None:
    """Write the config of a split's shards before it is sharded.

    Beside a finished index it still says what that was made of: only where files are is new.
    """
    made = made_by(own)
    if made is not None and (own / "index.json").exists():
        config = config.model_copy(
            update={"changed": made.changed, "lists_sha256": made.lists_sha256}
        )
    config.write(own / CONFIG)
    (own / TAKEN).unlink(missing_ok=True)


def note_taken(own: Path, folder: Path) -> None:
    """Write down that a split has begun with another experiment's shards."""
    made = made_by(folder)
    noted = {"made_of": made and made.source_identity, "digest": index_digest(folder)}
    write_record(own / TAKEN, noted)


def differing_settings(folder: Path, split: Split, pixels: Pixels) -> str:
    """Name the settings and lists that are not those that shards were made by; empty: none."""
    made = made_by(folder)
    try:
        stated = _stated(split, pixels)
        checksums = _checksums(stated)
    except OSError:  # a list is gone: finished shards do without
        return ""
    if made is None:
        return ""
    asked = ShardsConfig(images=made.images, lists_sha256=checksums, **stated)
    before = _compared(folder, made)
    now = _compared(folder, asked)
    described = []
    for key in sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k)):
        is_list = key in made.lists_sha256.keys() | checksums
        how = "other content" if is_list else f"{now.get(key)}, made with {before.get(key)}"
        described.append(f"{key} ({how})")
    return ", ".join(described)


def last_changes(images: Path) -> str:
    """Return a hash of the times of a file, a pattern's files or the folders below one.

    Raises:
        OSError: there is none.
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
                inside = [e for e in entries if e.is_dir() or e.name.endswith(".parquet")]
            pending += [Path(entry) for entry in inside]
    return digest(sorted(times.values()))


def _stated(split: Split, pixels: Pixels) -> dict[str, Any]:
    """Return an experiment's settings of a split's shards, by the names of `ShardsConfig`."""
    stated = split.model_dump(include={"kind", "shards", "skip_unreadable"})
    given = {name: getattr(split, name) for name in LISTS}
    lists = {name: fill_path(file) if file else None for name, file in given.items()}
    made_ready = split.source.sharded and not split.source.numbers
    return {**stated, **lists, "pixels": pixels if made_ready else Pixels()}


def _checksums(stated: dict[str, Any]) -> dict[str, str]:
    """Return the checksums of the lists that are files; OSError if one is gone."""
    files = {name: stated[name] for name in LISTS if stated[name]}
    return {name: sha256_file(f) for name, f in files.items() if f not in CLASS_LISTS}


def _compared(folder: Path, config: ShardsConfig) -> dict[str, Any]:
    """Return the content of a config, without a setting that changed nothing in these shards."""
    content = config.content
    if not seek_record(folder / "index.json").get("unreadable"):  # nothing was left out by it
        content.pop("skip_unreadable", None)
    return content
