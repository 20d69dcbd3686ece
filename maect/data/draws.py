"""Random draws of a batch that are not for its pixels, from (seed, epoch, sample id, view) alone.

Those for the pixels are in `maect.data.transforms`, the generator is `maect.data.random`.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maect.data import random


def ids_shuffle(
    patches: int, seed: int, epochs: NDArray[np.int64], ids: NDArray[np.int64], views: int
) -> Tensor:
    """Random order of each sample's patches (MAE's `ids_shuffle`); the first stay visible.

    Returns:
        int64 [views, b, L].
    """
    orders = [
        np.argsort(
            random.bits(seed, epochs, ids, view, random.MASK, patches), axis=1, kind="stable"
        )
        for view in range(views)
    ]
    return torch.from_numpy(np.stack(orders))


def lookup_numbers(
    k: int, seed: int, epochs: NDArray[np.int64], ids: NDArray[np.int64], views: int
) -> Tensor:
    """Which of the k nearest neighbours is the positive: uniform below k, int64 [views, b]."""
    rows = [random.uniform(seed, epochs, ids, view, random.LOOKUP, 1) for view in range(views)]
    return torch.from_numpy((np.stack(rows)[:, :, 0] * k).astype(np.int64))


def drop_path_factors(
    rates: NDArray[np.float64], seed: int, epochs: NDArray[np.int64], ids: NDArray[np.int64]
) -> Tensor:
    """Factors of the residual branches under stochastic depth (Huang et al. 2016).

    Args:
        rates: how often each branch is dropped, [branches].
        seed: the training's.
        epochs: epoch of each sample, [b].
        ids: stable sample ids, [b].

    Returns:
        float32 [branches, b]: 0 where a branch is dropped, otherwise 1 / (1 - rate).
    """
    u = random.uniform(seed, epochs, ids, 0, random.DROP_PATH, len(rates))
    return torch.from_numpy(((u >= rates) / (1 - rates)).T.astype(np.float32))
