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
from maect.train.hooks import Hook, Session, Update
from maect.train.stage import RunInputs
from maect.train.watchdog import SCORING

BATCH = 256
"""Images in a forward pass."""


def share(
    context: Context,
    index: Index,
    device: torch.device,
    image_size: int,
    resize: int | None,
    *,
    squeezed: bool = False,
    batch: int = BATCH,
) -> Iterator[tuple[Tensor, NDArray[np.int64], NDArray[np.int64]]]:
    """Yield this rank's images of a split: uint8 [b, C, S, S] on the device, labels and ids [b].

    Args:
        resize: shorter side before the centre crop; none: 256/224 of the image size.
        squeezed: whole images are squeezed into a square instead.
        batch: images at once.
    """
    rows = distributed.share_of(context, index.n, batch)
    for images, labels, ids in evaluation_parts(
        index,
        image_size=image_size,
        resize=resize,
        parts=[rows[start : start + batch] for start in range(0, len(rows), batch)],
        threads=max(1, context.cpus),
        squeezed=squeezed,
    ):
        yield distributed.to_device_async(images, device), labels, ids


def encode_share(
    context: Context,
    index: Index,
    device: torch.device,
    image_size: int,
    resize: int | None,
    encode: Callable[[Tensor], Tensor],
    *,
    squeezed: bool = False,
    batch: int = BATCH,
) -> Tensor:
    """Return what `encode` gives of this rank's share of a split, [m, ...]; see `share`.

    As many rows on every rank, with zeros behind the last image.

    Args:
        encode: takes uint8 [b, C, S, S] on the device; its rows are one for each image.
    """
    rows = -(-index.n // (context.world_size * batch)) * batch
    out: Tensor | None = None
    done = 0
    for images, _, _ in share(
        context, index, device, image_size, resize, squeezed=squeezed, batch=batch
    ):
        values = encode(images)
        if out is None:
            out = values.new_zeros(rows, *values.shape[1:])
        out[done : done + len(values)] = values
        done += len(values)
    if out is None:  # a rank without images still takes part
        blank = torch.zeros(1, index.channels, image_size, image_size, dtype=torch.uint8)
        values = encode(blank.to(device))
        out = values.new_zeros(rows, *values.shape[1:])
    return out


def predicted(
    context: Context,
    index: Index,
    device: torch.device,
    image_size: int,
    resize: int | None,
    predict: Callable[[Tensor], Tensor],
) -> NDArray[np.int64]:
    """Return the class of every image of a split, int64 [n, ...], on every rank.

    Each rank predicts its share; see `encode_share`.
    """
    mine = encode_share(context, index, device, image_size, resize, predict)
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


class ScoreEpochs(Hook):
    """Scores a classifier after each epoch, in percent; the scores are part of the state."""

    def __init__(self, session: Session, index: Index, resize: int | None) -> None:
        """Score no epoch yet.

        Args:
            session: of a classifier; the rest of its last epoch is dropped.
            index: images to score on.
            resize: their shorter side before the centre crop; None: 256/224 of the image size.
        """
        self._session = session
        self._index = index
        self._resize = resize
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
        session = self._session
        epochs_before = session.images_after(step - 1) // session.images
        epochs_after = session.images_after(step) // session.images
        return epochs_after > epochs_before or step == session.steps

    def after_step(self, update: Update) -> None:
        """Log the accuracy, in percent, if the step ends an epoch."""
        if not self.reads_model(update.step):
            return
        session = self._session
        session.begin(SCORING, update.step)
        with session.clock.outside_steps(useful=True):
            found = accuracy(
                session.context, self._index, session.device, session.encoder.image_size,
                self._resize, session.objective.predict,
            )  # fmt: skip
        self._accuracies.append(found)
        if update.step == session.steps and len(self._accuracies) < session.stage.epochs:
            self._accuracies.append(found)  # the step ends the last two epochs
        update.values["accuracy"] = found
        update.log_now = True

    def before_save(self, record: dict[str, Any]) -> None:
        """Add the scores, and the images that they are of."""
        record["scores"] = self._record

    @property
    def _record(self) -> dict[str, Any]:
        return {
            "index_digest": self._index.digest,
            "resize": self._resize,
            "accuracies": list(self._accuracies),
        }
