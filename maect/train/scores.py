"""Accuracy on a split: of a classifier in training, and of a finished one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maect.core import distributed
from maect.core.context import Context
from maect.data.index import Index
from maect.data.loader import evaluation_parts

BATCH = 256


def share(
    context: Context, index: Index, device: torch.device, image_size: int, resize: int | None
) -> Iterator[tuple[Tensor, NDArray[np.int64], NDArray[np.int64]]]:
    """This rank's images of a split, uint8 [b, C, S, S] on the device, labels [b] and ids [b]."""
    rows = distributed.share_of(context, index.n, BATCH)
    for images, labels, ids in evaluation_parts(
        index,
        image_size=image_size,
        resize=resize,
        parts=[rows[start : start + BATCH] for start in range(0, len(rows), BATCH)],
        threads=max(1, context.cpus),
    ):
        yield distributed.to_device_async(images, device), labels, ids


def predicted(
    context: Context,
    index: Index,
    device: torch.device,
    image_size: int,
    resize: int | None,
    predict: Callable[[Tensor], Tensor],
    columns: tuple[int, ...] = (),
) -> NDArray[np.int64]:
    """Class of every image of a split, int64 [n, *columns], on every rank; each predicts its share.

    Args:
        resize: shorter side before the centre crop; none: 256/224 of the image size.
        predict: class of each image, uint8 [b, C, S, S] on the device: int64 [b, *columns].
        columns: none, or the number of classifiers.
    """
    each = -(-index.n // (context.world_size * BATCH)) * BATCH
    mine, start = torch.zeros(each, *columns, dtype=torch.int64, device=device), 0
    for images, _, _ in share(context, index, device, image_size, resize):
        mine[start : start + len(images)] = predict(images)
        start += len(images)
    classes: NDArray[np.int64] = distributed.gather_rows(mine)[: index.n].cpu().numpy()
    return classes


def accuracy(
    context: Context,
    index: Index,
    device: torch.device,
    image_size: int,
    resize: int | None,
    predict: Callable[[Tensor], Tensor],
) -> float:
    """Percent of a split's images whose class is predicted; arguments as of `predicted`."""
    found = predicted(context, index, device, image_size, resize, predict)
    return 100 * int((found == index.labels).sum()) / index.n


@dataclass
class Scores:
    """Accuracies of a classifier after each epoch so far, in percent; part of the state."""

    index: Index
    resize: int | None
    accuracies: list[float] = field(default_factory=list)

    @property
    def record(self) -> dict[str, Any]:
        """Return what states and the run's record say."""
        about = {"index_digest": self.index.digest, "resize": self.resize}
        return about | {"accuracies": list(self.accuracies)}

    def resumed(self, record: dict[str, Any] | None) -> Self | None:
        """Go on from what a state says; None if its epochs were not scored, or on other images."""
        if record is None or self.record != record | {"accuracies": []}:
            return None
        self.accuracies = list(record["accuracies"])
        return self
