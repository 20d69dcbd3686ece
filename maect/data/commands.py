"""Commands that write shards and download data."""

import os
from contextlib import nullcontext
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from maect.core.errors import UserError

StatedPixels = Annotated[
    str | None,
    Parameter(
        metavar="KEY=VALUE",
        help="how images are read, as in range=0,4095 (docs/data.md#pixels): range, background, "
        "orientation; several in quotes, with blanks between",
    ),
]


def shard(
    source: Path,
    out: Path | None = None,
    /,
    *,
    kind: str = "folder",
    shards: int = 1,
    labels: Path | None = None,
    only_listed: Path | None = None,
    exclude: Path | None = None,
    skip_unreadable: bool = False,
    shorter_side: int | None = None,
    pixels: StatedPixels = None,
    classes: str | None = None,
    only: str | None = None,
    threads: Annotated[int, Parameter(validator=Number(gte=1))] | None = None,
    verify: bool = False,
    log: Path | None = None,
) -> None:
    """Write images as webdataset tars with an index.

    `maect shard photos/train shards/train --shards 4`

    Args:
        source: the images: a folder or archive of the given kind; or the config.yaml of shards.
        out: folder of the shards, whose name names the split; not with a config.yaml.
        kind: what SOURCE is, one of the sources below (default folder).
        shards: number of tars (default 1).
        labels: labels of the source, for kinds that need them.
        only_listed: file of image names to take, one a line.
        exclude: file of image names to leave out, one a line.
        skip_unreadable: leave out images that cannot be read; the index lists them.
        shorter_side: recompress larger images to this shorter side.
        classes: for a view: dogs15, or a file of class names, one a line.
        only: do one step: plan, the number of a shard, or index.
        threads: to read images with (default: one for each core that it may use).
        verify: check shards that were written.
        log: also write messages to this file.
    """
    from maect.core.settings import validated
    from maect.core.stamps import stamped
    from maect.data import shard_check
    from maect.data import shards as work
    from maect.data.config import CONFIG, ShardsConfig, stated_pixels
    from maect.data.sources import find_source
    from maect.data.sources.view import read_classes
    from maect.data.subsets import class_view

    resolved = out is None
    if out is not None:
        find_source(kind)
        given = {
            "images": source, "kind": kind, "shards": shards, "labels": labels,
            "only": only_listed, "exclude": exclude, "classes": classes,
            "skip_unreadable": skip_unreadable, "shorter_side": shorter_side,
        }  # fmt: skip
        read = {} if pixels is None else {"pixels": _for_files(stated_pixels(pixels))}
        config = validated(ShardsConfig, given | read, "maect shard")
    elif source.suffix == ".yaml":
        config, out = ShardsConfig.read(source), source.parent
    else:
        raise UserError(f"{source}: name the folder of the shards, too")
    threads = threads or len(os.sched_getaffinity(0))
    stamp = stamped(out / CONFIG, config) if resolved else nullcontext()
    if verify:
        print(f"{out}: {shard_check.verify(out, threads=threads)} samples, all intact")
    elif not find_source(config.kind).sharded:
        if not config.classes:
            raise UserError(f"--kind {config.kind}: name the classes with --classes")
        with stamp:
            count = class_view(config.images, out, read_classes(config.classes))
        print(f"{out}: {count} samples of {config.images}")
    elif only == "plan":
        work.plan_shards(config.images, config.kind, out, config.shards, **config.options)
    elif only == "index":
        work.finish_index(out, threads=threads)
    elif only:
        if not only.isdecimal():
            raise UserError(f"--only {only}: must be plan, the number of a shard, or index")
        work.write_shard(out, int(only), threads=1)
    else:
        how = config.options
        with stamp:
            # What is finished needs its images no more.
            finished = resolved and work.finished_samples(out, config.kind, config.shards, **how)
            count = finished or work.shard(
                config.images, out, config.kind, config.shards, threads=threads, **how
            )
        again = f"; to read the images again: rm -r {out}" if finished else ""
        print(f"{out}: {count} samples{again}")


def _for_files(stated: dict[str, Any]) -> dict[str, Any]:
    """Add mean and deviation, which sharding needs not, where they are left out."""
    return dict.fromkeys(("mean", "std"), [0.5] * int(stated.get("channels", 3))) | stated


def retrieve(what: str, out: Path, /) -> None:
    """Download public data or weights.

    `maect retrieve mae_base weights`

    Args:
        what: digits, or a name from docs/data.md or docs/weights.md.
        out: folder to put it in.
    """
    from maect.data.sources import BUNDLED

    if what in BUNDLED:
        resolve_name(BUNDLED[what])(out)
        return
    from maect.data.retrieve import retrieve as fetch

    for path in fetch(what, out):
        print(path)
