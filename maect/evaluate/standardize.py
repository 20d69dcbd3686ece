"""Features with mean 0 and standard deviation 1, as scikit-learn's StandardScaler makes them."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

ROWS = 16384

Array = NDArray[np.float32]
Scale = tuple[NDArray[np.float64], NDArray[np.float64]]


def moments(rows: Callable[[int, int], Array], n: int, width: int) -> Scale:
    """Mean and (biased) standard deviation of each feature, read and summed in chunks, [width].

    The standard deviation of a feature that does not vary is infinite: standardised it is 0.

    Args:
        rows: gives the features from one sample up to another, float32 [m, width].
        n: number of samples.
        width: features per sample.
    """
    starts = range(0, n, ROWS)
    total = np.zeros(width)
    for start in starts:
        total += rows(start, min(start + ROWS, n)).sum(axis=0, dtype=np.float64)
    mean = total / n
    total[:] = 0
    for start in starts:
        total += np.square(rows(start, min(start + ROWS, n)) - mean).sum(axis=0)
    std = np.sqrt(total / n)
    # Rounding leaves a trace of a spread on a feature that is the same everywhere.
    std[std <= 1e-6 * np.abs(mean)] = np.inf
    return mean, std


def standardize(rows: Array, scale: Scale) -> Array:
    """(x - mean) / standard deviation, in float64 until rounded: float32 [n, width]."""
    out: Array = ((rows - scale[0]) / scale[1]).astype(np.float32)
    return out
