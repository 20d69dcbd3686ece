"""Detection of embeddings that have become the same, or a line: training is over then."""

import torch
from torch import Tensor

from maect.measures import uniformity

UNIFORMITY_LIMIT = -0.02
RANK_LIMIT = 1.2


def spread(vectors: Tensor) -> dict[str, float]:
    """Return how far unit vectors [n, E] spread: `uniformity` and `effective_rank`."""
    return {"uniformity": uniformity(vectors), "effective_rank": effective_rank(vectors)}


def effective_rank(vectors: Tensor) -> float:
    """Exponential of the entropy of the covariance's spectrum (Roy and Vetterli 2007), 1 to E."""
    centred = vectors.double() - vectors.double().mean(0)
    # On the CPU: a GPU's solver is loaded for seconds and is the slower one at this size.
    spectrum = torch.linalg.eigvalsh((centred.T @ centred).cpu()).clamp(min=0)
    total = spectrum.sum()
    if total <= 0:
        return 0.0
    share = spectrum / total
    return float(torch.special.entr(share).sum().exp())


def collapse(spread: dict[str, float]) -> str | None:
    """Return what is wrong with the values of `uniformity` and `effective_rank`, if anything."""
    if spread["uniformity"] > UNIFORMITY_LIMIT:
        return f"all embeddings are nearly the same (uniformity {spread['uniformity']:.4f})"
    if spread["effective_rank"] < RANK_LIMIT:
        return f"all embeddings lie on a line (effective rank {spread['effective_rank']:.2f})"
    return None
