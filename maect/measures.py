"""Measures of features that need no training: the vote of neighbours, rank, spread, two views.

PyTorch is imported by the functions that compute with it: votes on stored features need none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from maect.recipes import KNN_K, KNN_TEMPERATURE

if TYPE_CHECKING:
    from torch import Tensor

_VOTES = 256


def vote(
    similarity: NDArray[np.float64], labels: NDArray[np.int64], temperature: float
) -> NDArray[np.int64]:
    """Return the class of the largest summed weight exp(s / T); of equal classes the first.

    Args:
        similarity: [q, k], most similar first.
        labels: int64 [q, k].
        temperature: T.

    Returns:
        int64 [q].
    """
    # Relative to the nearest: the same vote, and no overflow at small T.
    weights = np.exp((similarity - similarity[:, :1]) / temperature)
    classes = int(labels.max()) + 1
    out = np.empty(len(labels), np.int64)
    for start in range(0, len(labels), _VOTES):
        part = slice(start, start + _VOTES)
        rows = np.arange(len(labels[part]))[:, None] * classes
        votes = np.bincount(
            (rows + labels[part]).ravel(), weights[part].ravel(), minlength=len(rows) * classes
        )
        out[part] = votes.reshape(-1, classes).argmax(axis=1)
    return out


def knn(queries: Tensor, bank: Tensor, labels: Tensor, bank_labels: Tensor) -> float:
    """Return the percent of queries that their neighbours' vote gets right (Wu et al. 2018, DINO).

    For training, on small sets in memory; evaluations search by `maect.evaluate.knn.nearest`.

    Args:
        queries: unit vectors [q, D].
        bank: unit vectors [m, D].
        labels: of the queries, int64 [q].
        bank_labels: int64 [m].
    """
    similarity, ids = (queries @ bank.T).topk(min(KNN_K, len(bank)), dim=1)
    votes = vote(similarity.double().numpy(), bank_labels[ids].numpy(), KNN_TEMPERATURE)
    return 100 * float((votes == labels.numpy()).mean())


def same_class(queries: Tensor, bank: Tensor, labels: Tensor, bank_labels: Tensor) -> float:
    """Return the percent of queries whose nearest vector of the bank is of their class.

    That is how often a lookup with k = 1 would be right. Arguments are those of `knn`.
    """
    nearest = (queries @ bank.T).argmax(dim=1)
    return 100 * float((bank_labels[nearest] == labels).double().mean())


def rank_me(features: Tensor) -> float:
    """RankMe (Garrido et al. 2023): exponential of the entropy of the singular values, 1 to D.

    Args:
        features: as they are, neither centred nor of unit length, [n, D].
    """
    import torch

    products = features.double().T @ features.double()
    singular = torch.linalg.eigvalsh(products).clamp(min=0).sqrt()
    share = singular / singular.sum().clamp(min=1e-12) + 1e-7
    return float(torch.special.entr(share).sum().exp())


def effective_rank(vectors: Tensor) -> float:
    """Return the exponential of the entropy of the covariance's spectrum, from 1 to E.

    Roy and Vetterli 2007; 0 if all vectors [n, E] are the same.
    """
    import torch

    centred = vectors.double() - vectors.double().mean(0)
    # On the CPU: a GPU's solver is loaded for seconds and is the slower one at this size.
    spectrum = torch.linalg.eigvalsh((centred.T @ centred).cpu()).clamp(min=0)
    total = spectrum.sum()
    if total <= 0:
        return 0.0
    share = spectrum / total
    return float(torch.special.entr(share).sum().exp())


def uniformity(vectors: Tensor) -> float:
    """log of the mean of exp(-2 d^2) over pairs of unit vectors (Wang and Isola 2020); 0 is worst.

    Args:
        vectors: unit vectors [n, E].
    """
    import torch

    squared = torch.pdist(vectors.float()).square()
    return float(squared.mul(-2).exp().mean().log())


def alignment(pairs: Tensor) -> float:
    """Mean squared distance of the two views' unit vectors (Wang and Isola 2020); 0 is best.

    Args:
        pairs: features of two views, [2, q, D].
    """
    from torch.nn import functional as F

    first, second = F.normalize(pairs, dim=2)
    return float((first - second).square().sum(1).mean())
