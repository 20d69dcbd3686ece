"""Shards that experiments share: which of them a split without shards of its own has begun with.

Three files in a split's folder say so. `config.yaml`, of before sharding begins: what its own
shards are made of. `index.json`: they are finished. `taken.json`: it has begun with another
experiment's.
"""

import os
import stat
from pathlib import Path

from maect.core.files import seek_record
from maect.data.config import CONFIG, ShardsConfig, made_by

TAKEN = "taken.json"


def taken(own: Path) -> Path | None:
    """The other experiment's folder that a split without shards of its own has begun with."""
    noted = seek_record(own / TAKEN)
    for folder, made in finished(own).items() if noted else ():
        # Those of images that were edited in place are made of the same by their configs.
        if (made.source_identity, index_digest(folder)) == (noted["made_of"], noted["digest"]):
            return folder
    return None


def index_digest(shards: Path) -> str | None:
    """Return what identifies the content of finished shards."""
    return seek_record(shards / "index.json").get("digest")


def finished(own: Path) -> dict[Path, ShardsConfig]:
    """Finished shards of a split of this name, of every experiment, and what they were made of."""
    root = own.parents[2]
    files = sorted(root.parent.glob(f"*/shards/*/{own.name}/{CONFIG}"))
    folders = [file.parent for file in files if (file.parent / "index.json").exists()]
    if folders and root.parent.stat().st_mode & stat.S_IWOTH:
        # Where every user may make a folder, such as /scratch, a stranger's is not taken.
        owners = {above: above.lstat().st_uid for above in {f.parents[2] for f in folders} - {root}}
        folders = [f for f in folders if owners.get(f.parents[2], 0) in (0, os.geteuid())]
    return {folder: made for folder in folders if (made := made_by(folder)) is not None}


def shards_of(features: Path, split: str) -> Path | None:
    """Folder of the shards whose features a file of a results folder holds; None: not there."""
    for own in sorted(features.absolute().parent.parent.parent.glob(f"shards/*/{split}")):
        if f"{features.stem}.".startswith(f"{own.parent.name}-{split}."):
            return own if (own / "index.json").exists() else taken(own)
    return None
