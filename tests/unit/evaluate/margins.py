"""Classes and neighbours that no rounding decides.

Kernels for other processors move a score a little. Where two ways to compute something are compared
by what they choose, the chosen must be ahead of the next by more than that.
"""

from typing import Any

import numpy as np


def clear(scores: Any, least: float, chosen: int = 1) -> None:
    """Fail where one of the `chosen` largest of a row is not ahead of the next; scores [..., n]."""
    ordered = -np.sort(-np.asarray(scores, np.float64), axis=-1)[..., : chosen + 1]
    gap = -np.diff(ordered).max(initial=-np.inf)
    assert gap >= least, (
        f"a choice is ahead of the next by {gap:.0e}, which rounding may decide on another "
        f"processor: choose a seed or data where that is at least {least:.0e}"
    )
