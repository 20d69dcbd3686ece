"""Collect facts about images that were read, and warn where much of them is lost.

Sharding keeps them in the index, and every start of an experiment repeats the warning (nothing
heavy is imported here); commands that read a user's files print it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any

from maect.core.errors import counted
from maect.recipes import WHITE, Pixels

Facts = dict[str, Any]
"""Counts of images, JSON; those with `deep` are of more than 8 bits."""
TURNED = "turned"
"""Rotated upright whenever they are read."""
UNTURNED = "unturned"
"""Their EXIF orientation is ignored."""
TRANSPARENT = "transparent"
"""No background is stated, so colours show that their files hide."""
FULL = 65535
"""White of 16 bits where no range is stated."""
FEW_LEVELS = 64
"""Levels of 256 that count as few, over all deep images together, for a stated range."""


def deep_facts(values: tuple[float, float], levels: int) -> Facts:
    """Return the fact that an image has more than 8 bits.

    Args:
        values: the smallest and largest, before scaling.
        levels: bit n is set if a value was scaled to n of 255.
    """
    return {"deep": {"images": 1, "values": values, "levels": f"{levels:x}"}}


def merged(facts: Iterable[Facts]) -> Facts:
    """Return the facts about many images, from those about each of them or about each part."""
    facts = list(facts)
    names = (TURNED, UNTURNED, TRANSPARENT)
    counts = {name: sum(one.get(name, 0) for one in facts) for name in names}
    found: Facts = {name: n for name, n in counts.items() if n}
    deep = [one["deep"] for one in facts if "deep" in one]
    if deep:
        low, high = zip(*(one["values"] for one in deep), strict=True)
        levels = functools.reduce(operator.or_, (int(one["levels"], 16) for one in deep))
        images = sum(one["images"] for one in deep)
        found["deep"] = {"images": images, "values": [min(low), max(high)], "levels": f"{levels:x}"}
        dark = sum(_dark_images(one) for one in deep)
        if 0 < dark < images:
            found["deep"]["dark"] = dark
    return found


def _dark_images(deep: Facts) -> int:
    """Return how many of some deep images have no value above half of `FULL`."""
    everything: int = deep["images"] if deep["values"][1] < FULL / 2 else 0
    dark: int = deep.get("dark", everything)
    return dark


def warning(found: Facts, pixels: Pixels, *, option: bool = False) -> str | None:
    """Return a warning of information lost by reading with `pixels`, and the remedy, or None.

    Args:
        option: whether to state it by `--pixels`, rather than in an experiment's data set.
    """
    said = []
    deep = found.get("deep")
    if deep:
        levels = int(deep["levels"], 16).bit_count()
        low, high = deep["values"]
        black, white = pixels.range or (0, FULL)
        better = full_scale(low, high)
        # A range that somebody states may be wide on purpose, as long as much is left.
        lost = pixels.range is None or levels <= FEW_LEVELS
        if lost and better[1] - better[0] < (white - black) / 2:
            become = "become" if deep["images"] > 1 else "becomes"
            said.append(
                f"{counted(deep['images'], 'image')} of more than 8 bits {become} {levels} of 256 "
                f"grey levels: the values go from {low:g} to {high:g}, and {white:g} is white; "
                f"state the range: {_stated('range', better, option)}"
            )
        elif pixels.range is None and "dark" in deep:
            said.append(
                f"{deep['dark']} of {deep['images']} images of more than 8 bits have no value "
                f"above half of {white:g}, which is white: of 10 to 14 bits they become nearly "
                f"black; if they are, read them apart, {_stated('range', (0, 4095), option)} for "
                "12 bits"
            )
    transparent = found.get(TRANSPARENT)
    if transparent:
        said.append(
            f"{counted(transparent, 'image')} with transparent parts, of which the "
            "colours that their files hide there are used, often black; state what is behind them: "
            + _stated("background", WHITE, option)
        )
    unturned = found.get(UNTURNED)
    if unturned and not option:
        are = "is" if unturned == 1 else "are"
        said.append(
            f"{counted(unturned, 'image')} {are} not turned as EXIF says and viewers do; to turn "
            "them, state in the data set: pixels: {orientation: exif}"
        )
    return "; ".join(said) or None


def _stated(key: str, values: Iterable[float], option: bool) -> str:
    """Return the words that state a key of `pixels`, as an option or in an experiment."""
    words = [f"{value:g}" for value in values]
    if option:
        return f"--pixels {key}={','.join(words)}"
    return f"in the data set: pixels: {{{key}: [{', '.join(words)}]}}"


def full_scale(low: float, high: float) -> tuple[float, float]:
    """Return the range to propose for values from `low` to `high`.

    That is the range of their bits (such as 0 to 4095), which suits other images of the camera,
    too. It is their own range if some are below 0 or fractions, or if they fill less than a
    quarter of the range of their bits.
    """
    if low >= 0 and float(high).is_integer():
        span = 0.0, float((1 << max(8, int(high).bit_length())) - 1)
        if high - low >= (span[1] - span[0]) / 4:
            return span
    return low, high if high > low else low + 1
