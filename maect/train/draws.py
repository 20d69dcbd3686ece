"""Masks and dice of a batch, drawn from (seed, epoch, sample id, view) alone."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maect.data import random


def patch_order(
    patches: int, seed: int, epochs: NDArray[np.int64], ids: NDArray[np.int64], views: int
) -> Tensor:
    """Random order of each sample's patches; the first ones are those that stay visible.

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


def lookup_dice(
    k: int, seed: int, epochs: NDArray[np.int64], ids: NDArray[np.int64], views: int
) -> Tensor:
    """Uniform numbers below k, independent per sample and view, int64 [views, b]."""
    rows = [random.uniform(seed, epochs, ids, view, random.LOOKUP, 1) for view in range(views)]
    return torch.from_numpy((np.stack(rows)[:, :, 0] * k).astype(np.int64))
