"""Protocols that train a probe on a frozen encoder: settings, data, training, resume, best epoch.

Such a protocol is its settings, what it reads of the encoder, and a `Probe`: tensors, an update
and a score. The encoder runs once per image. Every rank encodes its share of the batch; what the
ranks exchange is up to the heads. State is saved after every epoch, every two minutes like that of
a training, and when the job is asked to stop.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, model_validator

from maect.core.context import Context
from maect.core.errors import UserError
from maect.core.settings import digest
from maect.data.index import ID, Index, open_index
from maect.evaluate.base import Encodes, EvaluationJob, ImageCount, Interrupted, encoder_checksum
from maect.evaluate.real import Real, RealLabels

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from maect.data.loader import Batch
    from maect.evaluate.encoding import Encoding

log = logging.getLogger(__name__)

STATE = "heads.safetensors"
FORMAT = 2  # of this file
SAVE_SECONDS = 120.0
"""Between two states; more where writing one takes over a twentieth of it."""


class TrainsProbe(Encodes):
    """Base of the protocols that train a probe on a frozen encoder."""

    writes_tensors: ClassVar[bool] = True

    batch_size: int = Field(default=1024, gt=0)
    seed: int = 0

    @abstractmethod
    def schedule(self, train: Index) -> Schedule:
        """Return how many updates there are of the images learnt from; a UserError if too few."""

    @abstractmethod
    def batches(
        self, task: ProbeTask, probe: Probe, start: int, steps: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's images, normalized float32 [b, C, S, S], and their targets."""

    def rate(self, step: int, schedule: Schedule) -> float:
        """Return the fraction of the peak learning rates in an update, from 0."""
        from maect.train import optimizer

        return optimizer.schedule(step, schedule.steps, schedule.warmup)

    def encoding(self, path: Path, device: torch.device) -> Encoding:
        """Return the encoder, read as this probe needs it."""
        from maect.evaluate.encoding import Encoding

        return Encoding(path, device, self.precision)

    @abstractmethod
    def build_probe(self, task: ProbeTask) -> Probe:
        """Return the probe with its initial values, on every rank; else a UserError says why."""

    def evaluate(self, context: Context, job: EvaluationJob) -> dict[str, Any]:
        """Train the probe, write its best tensors beside the JSON, and return its metrics."""
        from maect.core import distributed
        from maect.models.weights import save_tensors

        train, test = open_index(job.path("train")), open_index(job.path("test"))
        check_splits(train, test, labelled=self.labelled)
        encoding = self.encoding(job.run / "encoder.safetensors", distributed.device_of(context))
        sha256 = encoder_checksum(job.run)
        task = ProbeTask(context, job, encoding, train, test, sha256)
        with distributed.process_group(context):
            probe = self.build_probe(task)
            images = (train.digest, test.digest, str(job.resize))
            labels = self.real_sha256() if isinstance(self, RealLabels) else None
            more = [] if labels is None else [labels]
            identity = digest(self, sha256, *images, *probe.forms, *more)
            for _ in ProbeTrainer(task, self, probe, identity).epochs():
                probe.score()
            metrics = probe.metrics()
            if context.rank == 0:
                job.check_current()
                save_tensors(
                    job.out.with_suffix(".safetensors"), probe.best_tensors, probe.metadata()
                )
        return metrics


@dataclass(frozen=True)
class Schedule:
    """Number of updates.

    Attributes:
        steps: of them in all.
        ends: after how many of them each epoch ends, whereafter the state is saved.
        warmup: in how many of them the learning rates rise.
    """

    steps: int
    ends: list[int]
    warmup: float


class OnCrops(TrainsProbe):
    """Settings of probes that learn from crops of the training images, flipped or not."""

    crop_scale: tuple[float, float] = (0.08, 1.0)
    flip: float = Field(default=0.5, ge=0, le=1)

    def batches(
        self, task: ProbeTask, probe: Probe, start: int, steps: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield augmented images and their targets, as `TrainsProbe.batches`."""
        from maect.core import distributed
        from maect.data.loader import train_batches
        from maect.data.transforms import augment
        from maect.recipes import View

        view = View(crop_scale=self.crop_scale, flip=self.flip)
        encoder, device = task.encoding.settings, task.encoding.device
        for batch in train_batches(
            probe.training_images,
            global_batch=self.batch_size,
            rank=task.context.rank,
            world_size=task.context.world_size,
            seed=self.seed,
            views=[view],
            image_size=encoder.image_size,
            start_step=start,
            steps=steps,
            threads=task.context.cpus,
        ):
            images = distributed.to_device_async(batch.images[0][0], device)
            x = augment(images, view, 0, self.seed, batch.epochs, batch.ids, encoder.pixels)
            yield x, distributed.to_device_async(probe.targets(batch, images), device)


class ByEpochs(OnCrops):
    """Settings of probes that train for a number of epochs."""

    encodes_every_epoch: ClassVar[bool] = False
    """Whether the test images are encoded after each epoch, and not once."""

    epochs: int = Field(default=50, gt=0)
    warmup_epochs: float = Field(default=5, ge=0)

    def encoded(self, images: ImageCount) -> float:
        """Count the training images once an epoch; and the test images, or those once."""
        tests = self.epochs if self.encodes_every_epoch else 1
        return self.epochs * images(self.train_split) + tests * images(self.test_split)

    def schedule(self, train: Index) -> Schedule:
        """Return the updates of whole batches; a UserError if all epochs are less than one."""
        if self.epochs * train.n < self.batch_size:
            raise UserError(
                f"{train.directory}: {self.epochs} epochs of {train.n} images are less than one "
                f"batch of {self.batch_size}; lower batch_size"
            )
        steps, ends = epoch_ends(train.n, self.batch_size, self.epochs)
        return Schedule(steps, ends, self.warmup_epochs * train.n / self.batch_size)


class ByUpdates(TrainsProbe):
    """Settings of probes that train for a number of updates, whatever the number of images."""

    updates: int = Field(gt=0)
    warmup_updates: int = Field(ge=0)
    period: int = Field(gt=0)
    """After how many updates the state is saved."""

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if self.warmup_updates >= self.updates:
            raise ValueError(f"warmup_updates {self.warmup_updates} of {self.updates} updates")
        return self

    def schedule(self, train: Index) -> Schedule:
        """Return the updates, an end after each period and after the last."""
        ends = [*range(self.period, self.updates, self.period), self.updates]
        return Schedule(self.updates, ends, self.warmup_updates)


def epoch_ends(images: int, batch: int, epochs: int) -> tuple[int, list[int]]:
    """Return the number of updates, and after how many each epoch is complete.

    Batches run on over the end of an epoch, so the update that completes it has begun the next
    one; the last epoch ends with the last full batch.
    """
    steps = epochs * images // batch
    return steps, [min(steps, -(-epoch * images // batch)) for epoch in range(1, epochs + 1)]


@dataclass(frozen=True)
class ProbeTask:
    """Inputs of a probe: this rank's encoder, and images of two splits."""

    context: Context
    job: EvaluationJob
    encoding: Encoding
    train: Index
    test: Index
    sha256: str

    def images(self, index: Index | None = None) -> Iterator[Tensor]:
        """Yield this rank's test images, or other ones: uint8 [b, C, S, S] on the device."""
        from maect.train.scores import share

        size = self.encoding.settings.image_size
        device = self.encoding.device
        for images, _, _ in share(self.context, index or self.test, device, size, self.job.resize):
            yield images

    def features(self, index: Index | None = None) -> tuple[Tensor, Tensor]:
        """Return features [n, D] of test images, or others, on every rank, and labels [n]."""
        import torch

        from maect.core import distributed
        from maect.train.scores import BATCH

        index = index or self.test
        device = self.encoding.device
        start = 0
        largest = -(-index.n // (self.context.world_size * BATCH)) * BATCH
        out = torch.zeros(largest, self.encoding.width, device=device)
        for images in self.images(index):
            out[start : start + len(images)] = self.encoding(images)
            start += len(images)
        features = self.check_finite(distributed.gather_rows(out)[: index.n])
        return features, torch.tensor(index.labels, device=device)

    def draw_held_out(self, part: float, seed: int) -> Index:
        """Return the drawn part of the training images, the same ones for every encoder."""
        from maect.data.subsets import held_out_mask

        count = max(1, round(part * self.train.n))
        return replace(self.train, rows=self.train.rows[held_out_mask(self.train, count, seed)])

    def predicted(
        self,
        predict: Callable[[Tensor], Tensor],
        index: Index | None = None,
        columns: tuple[int, ...] = (),
    ) -> NDArray[np.int64]:
        """Return the class of every test image, or others, int64 [n, *columns], on every rank."""
        from maect.train.scores import predicted

        size = self.encoding.settings.image_size
        device = self.encoding.device
        index = index or self.test
        resize = self.job.resize
        return predicted(self.context, index, device, size, resize, predict, columns)

    def real_labels_of(self, settings: RealLabels) -> Real | None:
        """Return ReaL's labels of the test images; None if the settings ask for none."""
        test = self.test
        return settings.real_labels_of(lambda: test.keys(), test.class_names, test.labels)

    def check_finite(self, features: Tensor) -> Tensor:
        """Return the features, or raise a UserError if one is not finite."""
        from maect.evaluate.encoding import check_finite

        check_finite(features, self.job.run)
        return features

    def share_of(self, total: int) -> slice:
        """Return which of so many heads this rank trains."""
        rank, ranks = self.context.rank, self.context.world_size
        return slice(total * rank // ranks, total * (rank + 1) // ranks)


class HeadGroup:
    """Heads that are trained together, this rank's part of them; by default every rank has all."""

    SPLIT: tuple[str, ...] = ()
    """Tensors whose rows are spread over the ranks."""
    SHARED: tuple[str, ...] = ()
    """Tensors that every rank has."""
    rows = slice(0)
    total = 0
    """This rank's share of this many rows."""


class Probe(ABC):
    """Tensors that are trained on the encoder, on one rank.

    Attributes:
        groups: the tensors that are trained, saved together, by a name of each group.
        forms: what of the encoder was chosen to be read; part of a saved state's identity.
        record: the accuracies after each epoch, or other JSON that is saved with the tensors.
        kept: tensors of the best epoch, which are saved likewise and left beside the JSON.
        held: images that a twin of the probe does not learn from, if there is one.
    """

    held_out_images: Index | None = None
    groups: Mapping[str, HeadGroup]
    forms: tuple[str, ...] = ()

    def __init__(self, task: ProbeTask) -> None:
        """Begin with nothing scored."""
        self.task = task
        self.record: dict[str, Any] = {}
        self.best_tensors: dict[str, Tensor] = {}

    @property
    def training_images(self) -> Index:
        """The images that are learnt from."""
        return self.task.train

    def read(self, images: Tensor) -> Tensor:
        """Encode normalized images, float32 [b, C, S, S], as this probe reads them."""
        return self.task.encoding(images)

    def targets(self, batch: Batch, images: Tensor) -> Tensor:
        """Return the targets of a batch and its images, uint8 [b, C, S, S]: its labels [b].

        With held-out images [b, 2], whether each is one of them beside its label.
        """
        import numpy as np
        import torch

        labels = torch.from_numpy(batch.labels)
        if self.held_out_images is None:
            return labels
        held = np.isin(batch.ids, self.held_out_images.rows[:, ID])
        return torch.stack([labels, torch.from_numpy(held).long()], 1)

    @abstractmethod
    def step(self, features: Tensor, targets: Tensor, lr_multiplier: float) -> Tensor:
        """Update once, and return losses from before the update; called on every rank.

        Args:
            features: what `read` gave of this rank's part of the batch, [b, ...].
            targets: of the same images, [b, ...].
        """

    def score(self) -> None:  # noqa: B027
        """Score after an epoch; called on every rank."""

    def add_scores(self, name: str, scores: float | list[float]) -> bool:
        """Add scores to those after each epoch; return whether the best one so far is of them."""
        import numpy as np

        history = self.record.setdefault(name, [])
        history.append(scores)
        return bool(np.max(scores) > np.max(history[:-1], initial=-1.0))

    def store_best(self, group: Any, names: tuple[str, ...]) -> None:
        """Store some tensors of a group as they are now."""
        self.best_tensors = {name: getattr(group, name).detach().clone() for name in names}

    @abstractmethod
    def metrics(self) -> dict[str, Any]:
        """Return the result after the last epoch; called on every rank."""

    def metadata(self) -> dict[str, str]:
        """Return the metadata of the best tensors' file."""
        names = json.dumps(self.task.train.class_names)
        return {"class_names": names, "encoder_sha256": self.task.sha256}


class ProbeTrainer:
    """Trains a probe on a frozen encoder, on one rank."""

    def __init__(self, task: ProbeTask, settings: TrainsProbe, probe: Probe, identity: str) -> None:
        """Resume from a saved state, if there is one of this very training.

        Raises:
            UserError: all epochs together are less than a batch.
        """
        self.context = task.context
        self.settings = settings
        self.task = task
        self.probe, self.identity = probe, identity
        self.file = task.job.state / STATE
        self.run = task.job.run
        self.schedule = settings.schedule(probe.training_images)
        self.steps, self.ends = self.schedule.steps, self.schedule.ends
        self.step, self.done = 0, 0
        self._saved_at = monotonic()
        self._save_took = 0.0
        self._load()

    def epochs(self) -> Iterator[int]:
        """Train, and yield the number of each epoch after its last update, before it is saved.

        Raises:
            Interrupted: asked to stop; the state is saved.
            UserError: heads that are no longer finite, on every rank; the state is not saved.
        """
        from maect.core import distributed

        yield from self._complete_epochs()
        started = monotonic()
        first = self.step
        left = self.steps - self.step
        for images, targets in self.settings.batches(self.task, self.probe, self.step, left):
            rate = self.settings.rate(self.step, self.schedule)
            loss = self.probe.step(self.probe.read(images), targets, rate)
            self.step += 1
            stop = self.context.stop_requested()
            save = distributed.any_rank(stop or self._is_due())
            reported = self.step % 10 == 0 or self.step == self.steps
            # Not in every step: to look at a loss is to wait for the GPU.
            if save or reported or self._epoch_is_complete():
                self._check_loss(loss)
            yield from self._complete_epochs()
            if reported:
                seconds = monotonic() - started
                self._report(loss, (self.step - first) * self.settings.batch_size / seconds)
            if save and self.step < self.steps:
                self._save()
                if distributed.any_rank(stop):
                    raise Interrupted

    def _is_due(self) -> bool:
        """Return whether rank 0 wants a state."""
        pause = max(SAVE_SECONDS, 20 * self._save_took)
        return self.context.rank == 0 and monotonic() - self._saved_at > pause

    def _epoch_is_complete(self) -> bool:
        return self.done < len(self.ends) and self.ends[self.done] <= self.step

    def _check_loss(self, loss: Tensor) -> None:
        """Refuse broken heads of any rank before they are scored or saved."""
        from maect.core import distributed

        if distributed.any_rank(not bool(loss.isfinite().all())):
            raise UserError(
                f"{self.run}: after {self.step} updates on {self.task.train.directory} the probe "
                "is not finite; the encoder diverged or its weights are damaged, or the rate is "
                "too high"
            )

    def _complete_epochs(self) -> Iterator[int]:
        while self._epoch_is_complete():
            yield self.done
            self.done += 1
            self._save()

    def _report(self, loss: Tensor, speed: float) -> None:
        images = self.probe.training_images.n
        self.context.report(
            {
                "epoch": self.step * self.settings.batch_size // images,
                "epochs": -(-self.steps * self.settings.batch_size // images),
                "step": self.step,
                "steps": self.steps,
                "loss": float(loss.min()) if len(loss) else None,
                "images_per_second": speed,
            }
        )

    def _save(self) -> None:
        """Save all heads in one file: a restart may have another number of ranks."""
        from maect.core.arrays import write_arrays

        started = monotonic()
        tensors = {f"kept.{name}": value for name, value in self.probe.best_tensors.items()}
        for name, group in self.probe.groups.items():
            tensors |= {f"{name}.{key}": all_rows(group, key) for key in group.SPLIT}
            tensors |= {f"{name}.{key}": getattr(group, key) for key in group.SHARED}
        if self.context.rank:
            return
        record = {"format": FORMAT, "identity": self.identity, "step": self.step, "done": self.done}
        plain = {name: value.detach().cpu().numpy() for name, value in tensors.items()}
        write_arrays(self.file, plain, {"record": json.dumps(record | {"own": self.probe.record})})
        self.context.saved(self.step)
        self._saved_at = monotonic()
        self._save_took = self._saved_at - started

    def _load(self) -> None:
        from safetensors.torch import load_file

        from maect.core import distributed

        record, fault = distributed.from_rank_0(_record(self.file, self.identity))
        if record is None:
            if fault and self.context.rank == 0:
                log.warning("%s: %s; the training starts over", self.file, fault)
            return
        tensors = load_file(self.file)
        for name, group in self.probe.groups.items():
            for key in group.SPLIT:
                getattr(group, key).data.copy_(tensors[f"{name}.{key}"][group.rows])
            for key in group.SHARED:
                getattr(group, key).data.copy_(tensors[f"{name}.{key}"])
        own = {name for name in tensors if name.startswith("kept.")}
        self.probe.best_tensors = {name.removeprefix("kept."): tensors[name] for name in own}
        self.step, self.done, self.probe.record = record["step"], record["done"], record["own"]


def all_rows(group: HeadGroup, key: str, rows: slice = slice(None)) -> Tensor:
    """Gather rows of a group's split tensor from all ranks; called on every rank."""
    from maect.core import distributed

    mine: Tensor = getattr(group, key).detach()
    if distributed.rank_and_size()[1] == 1:
        return mine[rows]
    out = mine.new_zeros(group.total, *mine.shape[1:])
    out[group.rows] = mine
    return distributed.sum_over_ranks(out[rows].contiguous())


def check_splits(train: Index, test: Index, *, labelled: bool = True) -> None:
    """Refuse, by a UserError, splits without labels, of other classes, or of a single class."""
    for index in (train, test):
        if index.n == 0:
            raise UserError(f"{index.directory}: holds no images")
        if labelled and index.labels.min(initial=0) < 0:
            raise UserError(f"{index.directory}: the probe needs labels; some images have none")
    if labelled and train.class_names != test.class_names:
        raise UserError(f"{train.directory} and {test.directory}: their classes differ")
    if labelled and len(train.class_names) < 2:
        raise UserError(f"{train.directory}: the probe needs at least two classes")


def _record(file: Path, identity: str) -> tuple[dict[str, Any] | None, str]:
    """Return a state file's record, or None and the reason why it cannot be resumed."""
    from maect.core.arrays import read_arrays

    if not file.exists():
        return None, ""
    try:
        record: dict[str, Any] = json.loads(read_arrays(file)[1]["record"])
        if record["format"] != FORMAT:
            return None, "saved by another version of maect"
        if record["identity"] != identity:
            return None, "of another encoder, other images or other settings"
    except (UserError, KeyError, TypeError, ValueError):
        return None, "not a saved training, or damaged"
    return record, ""
