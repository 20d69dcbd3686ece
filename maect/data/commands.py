"""Commands that write shards and download data."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, Token
from cyclopts.validators import Number

from maect.core.errors import UserError

if TYPE_CHECKING:
    from maect.data.config import ShardsConfig


def _read_pixels(_: Any, words: Sequence[Token]) -> dict[str, Any]:
    """Read the value of `--pixels`."""
    from maect.data.config import stated_pixels

    return stated_pixels(words[0].value)


StatedPixels = Annotated[
    dict[str, Any] | None,
    Parameter(
        converter=_read_pixels,
        n_tokens=1,
        accepts_keys=False,
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
    threads: Annotated[int, Parameter(validator=Number(gte=1))] | None = None,
    verify: bool = False,
    log: Path | None = None,
) -> None:
    """Write images as webdataset tars with an index.

    `maect shard photos/train shards/train --shards 4`

    Stopped, it continues when it is called again.

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
        threads: to read images with (default: one for each core that it may use).
        verify: check shards that were written.
        log: also write messages to this file.
    """
    from maect.core.settings import validated
    from maect.core.stamps import stamped
    from maect.data import shard_check
    from maect.data.config import CONFIG, ShardsConfig
    from maect.data.sources import find_source

    threads = threads or len(os.sched_getaffinity(0))
    if out is not None:
        find_source(kind)
        given = {
            "images": source, "kind": kind, "shards": shards, "labels": labels,
            "only": only_listed, "exclude": exclude, "classes": classes,
            "skip_unreadable": skip_unreadable, "shorter_side": shorter_side,
        }  # fmt: skip
        if pixels is not None:
            given["pixels"] = _for_files(pixels)
        config = validated(ShardsConfig, given, "maect shard")
        folder = out
        stamp: AbstractContextManager[None] = nullcontext()
    elif source.suffix == ".yaml":
        config = ShardsConfig.read(source)
        folder = source.parent
        stamp = stamped(folder / CONFIG, config)
    else:
        raise UserError(f"{source}: name the folder of the shards, too")
    if verify:
        print(f"{folder}: {shard_check.verify(folder, threads=threads)} samples, all intact")
        return
    with stamp:
        done = _write_shards(folder, config, threads, resolved=out is None)
    print(f"{folder}: {done}")


def _write_shards(out: Path, config: "ShardsConfig", threads: int, *, resolved: bool) -> str:
    """Write the shards, or the view, that a config asks for; return a summary.

    `resolved`: by a job of an experiment, for which finished shards need their images no more.
    """
    from maect.data import shards
    from maect.data.sources import find_source
    from maect.data.sources.base import read_classes
    from maect.data.subsets import class_view

    if not find_source(config.kind).sharded:
        if not config.classes:
            raise UserError(f"--kind {config.kind}: name the classes with --classes")
        count = class_view(config.images, out, read_classes(config.classes))
        return f"{count} samples of {config.images}"
    if resolved:
        finished = shards.finished_samples(out, config.kind, config.shards, **config.options)
        if finished:
            return f"{finished} samples; to read the images again: rm -r {out}"
    count = shards.shard(
        config.images, out, config.kind, config.shards, threads=threads, **config.options
    )
    return f"{count} samples"


def _for_files(stated: dict[str, Any]) -> dict[str, Any]:
    """Add mean and standard deviation where they are left out: sharding does not use them."""
    half = [0.5] * int(stated.get("channels", 3))
    return {"mean": half, "std": half} | stated


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
