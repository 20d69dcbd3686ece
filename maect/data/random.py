"""Random numbers as a pure function of their purpose, not of when they are drawn.

Every number is a hash of (seed, stream, view, epoch, sample id, position). A worker, a rank or a
resumed run that asks for the same sample gets the same numbers. Only integer arithmetic modulo
2^64 is used, so the bits are the same on every machine.

The draws of a batch that are not for its pixels are here; those that are, in
`maect.data.transforms`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from torch import Tensor

# Streams: purposes of numbers. A value is never reused for another purpose.
ORDER = 1
CHUNK = 2
CROP = 3
FLIP = 4
COLOR = 5
MASK = 6
LOOKUP = 7
SHARD = 8
SUBSET = 9
RAND_AUGMENT = 11
ERASE = 12
MIX = 13
DROP_PATH = 14
ONLINE = 15
CORRUPT = 16
HELD_OUT = 17
WRONG = 18
SEGMENT = 19
DROP_CHANNELS = 20

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)
_WORD = (1 << 64) - 1


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Finaliser of SplitMix64 (Steele et al. 2014): a bijection of the 64-bit words."""
    x = (x ^ (x >> np.uint64(30))) * _MULTIPLY_1
    x = (x ^ (x >> np.uint64(27))) * _MULTIPLY_2
    return x ^ (x >> np.uint64(31))


def _words(values: ArrayLike) -> NDArray[np.uint64]:
    array = np.atleast_1d(np.asarray(values))
    if array.dtype.kind not in "iu":
        raise TypeError(f"integers expected, not {array.dtype}")
    return array.astype(np.uint64)  # of a negative one: modulo 2^64


def keys(seed: int, epochs: ArrayLike, ids: ArrayLike, view: int, stream: int) -> NDArray:
    """Return the start of each sample's sequence, uint64 [b]; distinct for distinct ids."""
    state = np.array([seed & _WORD], np.uint64)
    for part in ([stream], [view], epochs, ids):
        state = mix(mix(state + _GOLDEN) ^ (_words(part) * _GOLDEN))
    return state


def bits(
    seed: int, epochs: ArrayLike, ids: ArrayLike, view: int, stream: int, n: int, first: int = 0
) -> NDArray[np.uint64]:
    """Draw random 64-bit words.

    Args:
        epochs: the epoch of each sample, or one for all.
        ids: stable sample ids, [b].
        stream: a constant of this module: the purpose of the numbers.
        n: words per sample.
        first: words of its sequence that come before these.

    Returns:
        uint64 [b, n]; row i depends on nothing but the arguments of sample i.
    """
    start = keys(seed, epochs, ids, view, stream)
    steps = np.arange(first + 1, first + n + 1, dtype=np.uint64) * _GOLDEN
    return mix(start[:, None] + steps[None, :])


def uniform(
    seed: int, epochs: ArrayLike, ids: ArrayLike, view: int, stream: int, n: int
) -> NDArray[np.float64]:
    """Draw numbers in [0, 1), float64 [b, n]; arguments as for `bits`."""
    return (bits(seed, epochs, ids, view, stream, n) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def ids_shuffle(
    patches: int,
    seed: int,
    epochs: NDArray[np.int64],
    ids: NDArray[np.int64],
    views: Iterable[int],
) -> Tensor:
    """Draw an order of each sample's patches, int64 [views, b, L]; MAE keeps the first visible.

    Args:
        views: numbers of the views, each of which draws its own order.
    """
    import torch

    orders = [
        np.argsort(bits(seed, epochs, ids, view, MASK, patches), axis=1, kind="stable")
        for view in views
    ]
    return torch.from_numpy(np.stack(orders))


def lookup_numbers(
    k: int, seed: int, epochs: NDArray[np.int64], ids: NDArray[np.int64], views: int
) -> Tensor:
    """Draw which of the k nearest neighbours is the positive: 0 to k - 1, int64 [views, b]."""
    import torch

    rows = [uniform(seed, epochs, ids, view, LOOKUP, 1) for view in range(views)]
    return torch.from_numpy((np.stack(rows)[:, :, 0] * k).astype(np.int64))


def wrong_lookups(
    right: float, seed: int, epochs: NDArray[np.int64], ids: NDArray[np.int64], views: int
) -> Tensor:
    """Draw whether each lookup is wrong, bool [views, b]; a share `right` of them is not."""
    import torch

    rows = [uniform(seed, epochs, ids, view, WRONG, 1) for view in range(views)]
    return torch.from_numpy(np.stack(rows)[:, :, 0] >= right)


def drop_path_factors(
    rates: NDArray[np.float64], seed: int, epochs: NDArray[np.int64], ids: NDArray[np.int64]
) -> Tensor:
    """Draw factors of the residual branches for stochastic depth (Huang et al. 2016).

    Args:
        rates: probability of dropping each branch, [branches].

    Returns:
        float32 [branches, b]: 0 where a branch is dropped, otherwise 1 / (1 - rate).
    """
    import torch

    u = uniform(seed, epochs, ids, 0, DROP_PATH, len(rates))
    return torch.from_numpy(((u >= rates) / (1 - rates)).T.astype(np.float32))
