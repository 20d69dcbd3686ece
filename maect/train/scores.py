"""Accuracy on a split: of a classifier after each epoch, and of a finished one."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maect.core import distributed
from maect.core.context import Context
from maect.core.errors import UserError
from maect.data.index import Index, open_index
from maect.data.loader import evaluation_parts
from maect.train.device_time import DeviceTime
from maect.train.hooks import Hook, Update
from maect.train.objective import Objective
from maect.train.stage import RunInputs
from maect.train.watchdog import SCORING, Watchdog

BATCH = 256
"""Images in a forward pass."""


def share(
    context: Context, index: Index, device: torch.device, image_size: int, resize: int | None
) -> Iterator[tuple[Tensor, NDArray[np.int64], NDArray[np.int64]]]:
    """Yield this rank's images of a split: uint8 [b, C, S, S] on the device, labels and ids [b]."""
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
    """Return the class of every image of a split, int64 [n, *columns], on every rank.

    Each rank predicts its share.

    Args:
        resize: shorter side before the centre crop; none: 256/224 of the image size.
        predict: class of each image, uint8 [b, C, S, S] on the device: int64 [b, *columns].
        columns: none, or the number of classifiers.
    """
    each = -(-index.n // (context.world_size * BATCH)) * BATCH
    mine = torch.zeros(each, *columns, dtype=torch.int64, device=device)
    start = 0
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
    """Return the percentage of a split's images whose class is predicted; see `predicted`."""
    found = predicted(context, index, device, image_size, resize, predict)
    return 100 * int((found == index.labels).sum()) / index.n


def scored_split(run: RunInputs, split: Index) -> Index | None:
    """Return the images that the epochs of a run are scored on, or None.

    They are held out of the training split, or those of the split that the run names.

    Raises:
        UserError: it has other classes than the training images.
    """
    held_out = run.stage.scored_images(split)
    if held_out is not None:
        return held_out
    if run.test is None:
        return None
    index = open_index(run.test)
    if index.class_names != split.class_names:
        raise UserError(f"{run.test}: its classes differ from those of {run.shards}")
    return index


class EpochScores(Hook):
    """Scores a classifier after each epoch, in percent; the scores are part of the state."""

    def __init__(
        self,
        context: Context,
        objective: Objective,
        device: torch.device,
        clock: DeviceTime,
        watchdog: Watchdog,
        *,
        index: Index,
        resize: int | None,
        images: int,
        batch_size: int,
        steps: int,
    ) -> None:
        """Score no epoch yet.

        Args:
            context: this rank's.
            objective: a classifier.
            device: that computes.
            clock: of the training, which does not time the scoring as steps.
            watchdog: of the training.
            index: images to score on.
            resize: their shorter side before the centre crop; None: 256/224 of the image size.
            images: of an epoch.
            batch_size: of the global batch.
            steps: of the whole training; the rest of the last epoch is dropped.
        """
        self._context = context
        self._objective = objective
        self._device = device
        self._clock = clock
        self._watchdog = watchdog
        self._index = index
        self._resize = resize
        self._images = images
        self._batch_size = batch_size
        self._steps = steps
        self._accuracies: list[float] = []

    def resume(self, record: dict[str, Any]) -> bool:
        """Go on from a state's record; False if its epochs were not scored on these images."""
        scores = record.get("scores")
        if scores is None or self._record | {"accuracies": scores["accuracies"]} != scores:
            return False
        self._accuracies = list(scores["accuracies"])
        return True

    def reads_model(self, step: int) -> bool:
        """Return whether a step ends an epoch."""
        before = (step - 1) * self._batch_size // self._images
        after = step * self._batch_size // self._images
        return after > before or step == self._steps

    def after_step(self, update: Update) -> None:
        """Log the accuracy, in percent, if the step ends an epoch."""
        if not self.reads_model(update.step):
            return
        self._watchdog.begin(SCORING, update.step)
        size = self._objective.encoder.settings.image_size
        with self._clock.outside_steps(useful=True):
            found = accuracy(
                self._context, self._index, self._device, size, self._resize,
                self._objective.predict,
            )  # fmt: skip
        self._accuracies.append(found)
        update.values["accuracy"] = found
        update.log_now = True

    def before_save(self, record: dict[str, Any]) -> None:
        """Add the scores, and what they are of."""
        record["scores"] = self._record

    @property
    def _record(self) -> dict[str, Any]:
        return {
            "index_digest": self._index.digest,
            "resize": self._resize,
            "accuracies": list(self._accuracies),
        }
