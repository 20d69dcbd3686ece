"""Lookups that no rounding decides.

Kernels for other processors, and sums over another number of ranks, move a cosine a little. Of two
candidates that are nearer to each other than that, one is taken here and the other there, and no
later loss is the same. A comparison needs data and seeds where this does not happen.
"""

import torch

from maect.models import heads, refiner

LEAST = 5e-4
"""Between cosines. Five steps of the tests' trainings move them by up to 1e-4."""
TOPK = heads.topk_nn


def clear(similarity, k, lookup_numbers, least=LEAST):
    """`topk_nn` that fails where the next candidate is about as near as the one it takes."""
    nearest = similarity.double().topk(min(k + 1, similarity.shape[-1]), dim=-1).values
    gaps = -torch.nn.functional.pad(nearest, (1, 1)).diff()  # before and behind each candidate
    gaps[..., 0] = torch.inf
    if nearest.shape[-1] == k:
        gaps[..., -1] = torch.inf
    place = lookup_numbers[..., None] * (k > 1)
    gap = float(torch.minimum(gaps.gather(-1, place), gaps.gather(-1, place + 1)).min())
    assert gap >= least, (
        f"two candidates of a lookup are {gap:.0e} apart, which rounding may decide on another "
        f"processor: choose a seed or data where they are at least {least:.0e} apart"
    )
    return TOPK(similarity, k, lookup_numbers)


def clearly(context, *, of, least=LEAST, **job):
    """A training, by the function `of`, in which no lookup is decided by rounding."""

    def checked(*arguments):
        return clear(*arguments, least)

    heads.topk_nn = refiner.topk_nn = checked
    return of(context, **job)


def noted(context, *, of, **job):
    """A training, by the function `of`: its verdict, and what its lookups took."""
    chosen = []

    def noting(*arguments):
        taken = TOPK(*arguments)
        chosen.append(taken.tolist())
        return taken

    heads.topk_nn = refiner.topk_nn = noting
    return of(context, **job), chosen


def repeated(context, *, of, chosen, **job):
    """A training whose lookups take what those of another one took, where only rounding differs."""
    left = iter(chosen)

    def repeating(similarity, k, lookup_numbers):
        own, taken = TOPK(similarity, k, lookup_numbers), torch.tensor(next(left))
        apart = similarity.gather(-1, torch.stack([own, taken], dim=-1)).diff().abs().max()
        assert apart <= LEAST, f"{apart:.0e} between what a lookup takes here and what it took"
        return taken

    heads.topk_nn = refiner.topk_nn = repeating
    return of(context, **job), chosen
