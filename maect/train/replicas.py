"""Comparison of what all ranks should hold alike."""

from collections.abc import Iterable
from itertools import chain

from torch import Tensor

from maect.core.distributed import differing_ranks, rank_and_size
from maect.core.errors import RankError


class ReplicaError(RankError):
    """Ranks disagree; another attempt from the last state may succeed."""


def compare_replicas(step: int, weights: Iterable[Tensor], buffers: dict[str, Tensor]) -> None:
    """Stop before a state is saved if ranks hold other bits of what all should hold alike.

    Raises:
        ReplicaError: they do; the state before it was sound.
    """
    if ranks := differing_ranks(chain(weights, buffers.values())):
        size = rank_and_size()[1]
        raise ReplicaError(
            f"after step {step} the weights or buffers of rank {', '.join(map(str, ranks))} of "
            f"{size} differ from the others': a flipped bit, or a fault of a device; the state "
            "before is sound"
        )
