"""Training of a probe on a frozen encoder: data, updates, resume, best epoch.

A protocol gives what is read of the encoder, and a `Probe`: heads, an update and a score. The
encoder runs once per image. Every rank encodes its share of the batch and has all heads; what the
ranks exchange is up to these. State is saved after every epoch, every two minutes like that of a
training, and when the job is asked to stop.
"""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maect.core import distributed
from maect.core.arrays import read_arrays, seek_arrays, write_arrays
from maect.core.context import Context
from maect.core.errors import UserError
from maect.core.settings import digest
from maect.data.index import ID, Index, open_index
from maect.data.loader import train_batches
from maect.data.subsets import held_out_mask
from maect.data.transforms import augment
from maect.evaluate.base import EvaluationJob, Interrupted, RealLabels, encoder_checksum
from maect.evaluate.features import Encoding, check_finite
from maect.evaluate.protocols.probes import OnCrops, TrainsProbe, UpdateSchedule
from maect.evaluate.real import Real, real_labels_of, real_sha256
from maect.models.weights import save_tensors
from maect.recipes import View
from maect.train import stage
from maect.train.scores import encode_share, predicted, share

log = logging.getLogger(__name__)

STATE = "heads.safetensors"
OPTIMIZER, BEST = "optimizer.", "best"
"""In a state: before the optimizer's tensors, and the group of the best tensors."""
HELD_OUT = ".held_out"
"""Suffix of heads that do not learn from the held-out images and are scored on them."""
SAVE_SECONDS = 120.0
"""Seconds between two states; more if writing one takes over a twentieth of them."""


@dataclass(frozen=True)
class ProbeBatch:
    """This rank's part of a batch.

    Attributes:
        images: as the encoder takes them, normalized float32 [b, C, S, S].
        targets: of the same images, [b, ...].
        epochs: of each image, int64 [b].
        ids: of the images, int64 [b].
    """

    images: Tensor
    targets: Tensor
    epochs: NDArray[np.int64]
    ids: NDArray[np.int64]


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
        size = self.encoding.settings.image_size
        device = self.encoding.device
        for images, _, _ in share(self.context, index or self.test, device, size, self.job.resize):
            yield images

    def features(self, index: Index | None = None) -> tuple[Tensor, Tensor]:
        """Return features [n, D] of test images, or others, on every rank, and labels [n]."""
        index = index or self.test
        size = self.encoding.settings.image_size
        device = self.encoding.device
        mine = encode_share(self.context, index, device, size, self.job.resize, self.encoding)
        features = self.check_finite(distributed.gather_rows(mine)[: index.n])
        return features, torch.tensor(index.labels, device=device)

    def draw_held_out(self, part: float, seed: int) -> Index:
        """Return the drawn part of the training images, the same ones for every encoder."""
        count = max(1, round(part * self.train.n))
        return replace(self.train, rows=self.train.rows[held_out_mask(self.train, count, seed)])

    def predicted(
        self, predict: Callable[[Tensor], Tensor], index: Index | None = None
    ) -> NDArray[np.int64]:
        """Return the class of every test image, or others, int64 [n, ...], on every rank."""
        size = self.encoding.settings.image_size
        device = self.encoding.device
        return predicted(self.context, index or self.test, device, size, self.job.resize, predict)

    def real_labels_of(self, settings: RealLabels) -> Real | None:
        """Return ReaL's labels of the test images; None if the settings ask for none."""
        return real_labels_of(settings, self.test.keys, self.test.class_names, self.test.labels)

    def check_finite(self, features: Tensor) -> Tensor:
        """Return the features, or raise a UserError if one is not finite."""
        check_finite(features, self.job.run)
        return features


class HeadGroup:
    """Heads that are trained together by one optimizer, the same on every rank."""

    SAVED: tuple[str, ...] = ()
    """Tensors that are saved, in addition to the optimizer's."""
    optimizer: torch.optim.Optimizer
    """Its parameter groups say their `peak` rate."""

    def descend(self, lr_multiplier: float) -> None:
        """Update once by the gradients that are there, and clear them."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * lr_multiplier
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """Return what a restart needs, by name."""
        tensors = {name: getattr(self, name).detach() for name in self.SAVED}
        for number, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"{OPTIMIZER}{number}.{key}": value for key, value in moments.items()}
        return tensors

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load tensors that `state` returned."""
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith(OPTIMIZER):
                number, key = name.removeprefix(OPTIMIZER).split(".")
                moments.setdefault(int(number), {})[key] = value
            else:
                getattr(self, name).data.copy_(value)
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})


class Probe(ABC):
    """Heads that are trained on the encoder, on one rank.

    Attributes:
        groups: all heads, by a name of each group; saved together.
        forms: what of the encoder was chosen to be read; part of a saved state's identity.
        record: the accuracies after each epoch, or other JSON that is saved with the tensors.
        best_tensors: those of the best epoch, which are saved likewise and left beside the JSON.
        scored: images that heads are scored on, by the end of their names: the test images and,
            where they are asked for, training images that are held out.
    """

    groups: Mapping[str, HeadGroup]
    forms: tuple[str, ...] = ()

    def __init__(self, task: ProbeTask, settings: TrainsProbe, held_out: float = 0.0) -> None:
        """Begin with nothing scored; draw the part of the training images that is held out."""
        self.task = task
        self.settings = settings
        self.record: dict[str, Any] = {}
        self.best_tensors: dict[str, Tensor] = {}
        self.scored = {"": task.test}
        if held_out:
            self.scored[HELD_OUT] = task.draw_held_out(held_out, settings.seed)

    @property
    def training_images(self) -> Index:
        """The images that are learnt from."""
        return self.task.train

    def is_held_out(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which images are held out, bool [n]."""
        return np.isin(ids, self.scored[HELD_OUT].rows[:, ID])

    def learners(self, ids: NDArray[np.int64]) -> Tensor:
        """Return which images of all ranks are not held out, bool [B], by this rank's ids [b]."""
        others = torch.from_numpy(~self.is_held_out(ids)).long()
        return distributed.gather_rows(others.to(self.task.encoding.device)) == 1

    def batches(self, start: int, steps: int) -> Iterator[ProbeBatch]:
        """Yield this rank's part of each batch: crops of the training images, flipped or not."""
        task, settings = self.task, self.settings
        assert isinstance(settings, OnCrops)
        view = View(crop_scale=settings.crop_scale, flip=settings.flip)
        encoder, device = task.encoding.settings, task.encoding.device
        for batch in train_batches(
            self.training_images,
            global_batch=settings.batch_size,
            rank=task.context.rank,
            world_size=task.context.world_size,
            seed=settings.seed,
            views=[view],
            image_size=encoder.image_size,
            start_step=start,
            steps=steps,
            threads=task.context.cpus,
        ):
            images = distributed.to_device_async(batch.images[0][0], device)
            x = augment(images, view, 0, settings.seed, batch.epochs, batch.ids, encoder.pixels)
            targets = distributed.to_device_async(self.targets(batch.labels, images), device)
            yield ProbeBatch(x, targets, batch.epochs, batch.ids)

    @staticmethod
    def rate(step: int, schedule: UpdateSchedule) -> float:
        """Return the fraction of the peak learning rates in an update, from 0."""
        return stage.schedule(step, schedule.steps, schedule.warmup)

    def read(self, images: Tensor) -> Tensor:
        """Encode normalized images, float32 [b, C, S, S], as this probe reads them."""
        return self.task.encoding(images)

    def targets(self, labels: NDArray[np.int64], images: Tensor) -> Tensor:
        """Return the targets of images, uint8 [b, C, S, S]: their labels [b]."""
        return torch.from_numpy(labels)

    @abstractmethod
    def step(self, features: Tensor, batch: ProbeBatch, lr_multiplier: float) -> Tensor:
        """Update once, and return losses from before the update; called on every rank.

        Args:
            features: what `read` gave of this rank's part of the batch, [b, ...].
        """

    def score(self) -> None:  # noqa: B027
        """Score after an epoch; called on every rank."""

    def add_scores(self, name: str, scores: float | list[float]) -> bool:
        """Add scores to those after each epoch; return whether the best one so far is of them."""
        history = self.record.setdefault(name, [])
        history.append(scores)
        return bool(np.max(scores) > np.max(history[:-1], initial=-1.0))

    def store_best(self, group: HeadGroup, names: tuple[str, ...]) -> None:
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

    def __init__(self, probe: Probe, identity: str) -> None:
        """Resume from a saved state, if there is one of this very training.

        Raises:
            UserError: all epochs together are less than a batch.
        """
        self.task = probe.task
        self.context = probe.task.context
        self.probe, self.identity = probe, identity
        self.file = probe.task.job.state / STATE
        self.schedule = probe.settings.schedule(probe.training_images)
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
        yield from self._complete_epochs()
        started = monotonic()
        first = self.step
        left = self.steps - self.step
        for batch in self.probe.batches(self.step, left):
            rate = self.probe.rate(self.step, self.schedule)
            loss = self.probe.step(self.probe.read(batch.images), batch, rate)
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
                self._report(loss, (self.step - first) * self.probe.settings.batch_size / seconds)
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
        if distributed.any_rank(not bool(loss.isfinite().all())):
            raise UserError(
                f"{self.task.job.run}: after {self.step} updates on {self.task.train.directory} "
                "the probe is not finite; the encoder diverged or its weights are damaged, or the "
                "rate is too high"
            )

    def _complete_epochs(self) -> Iterator[int]:
        while self._epoch_is_complete():
            yield self.done
            self.done += 1
            self._save()

    def _report(self, loss: Tensor, speed: float) -> None:
        images = self.probe.training_images.n
        batch = self.probe.settings.batch_size
        self.context.report(
            {
                "epoch": self.step * batch // images,
                "epochs": -(-self.steps * batch // images),
                "step": self.step,
                "steps": self.steps,
                "loss": float(loss.min()),
                "images_per_second": speed,
            }
        )

    def _save(self) -> None:
        if self.context.rank:
            return
        started = monotonic()
        groups = {name: group.state() for name, group in self.probe.groups.items()}
        plain = {
            f"{name}/{key}": value.cpu().numpy()
            for name, tensors in (groups | {BEST: self.probe.best_tensors}).items()
            for key, value in tensors.items()
        }
        record = {"step": self.step, "done": self.done, "own": self.probe.record}
        write_arrays(self.file, plain, {"identity": self.identity, "record": json.dumps(record)})
        self.context.saved(self.step)
        self._saved_at = monotonic()
        self._save_took = self._saved_at - started

    def _load(self) -> None:
        known = seek_arrays(self.file)
        ours = known is not None and known[1].get("identity") == self.identity
        if not distributed.from_rank_0(ours):
            if self.context.rank == 0 and self.file.exists():
                log.warning(
                    "%s: damaged, or of another encoder, other images or settings; the training "
                    "starts over",
                    self.file,
                )
            return
        arrays, texts = read_arrays(self.file)
        tensors: dict[str, dict[str, Tensor]] = {}
        for name, value in arrays.items():
            owner, _, key = name.partition("/")
            tensors.setdefault(owner, {})[key] = torch.from_numpy(value)
        self.probe.best_tensors = tensors.pop(BEST, {})
        for name, group in self.probe.groups.items():
            group.load_state(tensors[name])
        record = json.loads(texts["record"])
        self.step, self.done, self.probe.record = record["step"], record["done"], record["own"]


def train_probe(
    settings: TrainsProbe,
    context: Context,
    job: EvaluationJob,
    encoding: Encoding,
    build: Callable[[ProbeTask, Any], Probe],
) -> dict[str, Any]:
    """Train a probe, write its best tensors beside the JSON, and return its metrics.

    Args:
        encoding: the encoder, read as the probe needs it.
        build: from the inputs and the settings to the probe with its initial values, on every
            rank; else a UserError says why.
    """
    train, test = open_index(job.path("train")), open_index(job.path("test"))
    check_splits(train, test, labelled=settings.labelled)
    sha256 = encoder_checksum(job.run)
    task = ProbeTask(context, job, encoding, train, test, sha256)
    with distributed.process_group(context):
        probe = build(task, settings)
        images = (train.digest, test.digest, str(job.resize))
        labels = real_sha256(settings) if isinstance(settings, RealLabels) else None
        more = [] if labels is None else [labels]
        identity = digest(settings, sha256, *images, *probe.forms, *more)
        for _ in ProbeTrainer(probe, identity).epochs():
            probe.score()
        metrics = probe.metrics()
        if context.rank == 0:
            job.check_current()
            save_tensors(job.out.with_suffix(".safetensors"), probe.best_tensors, probe.metadata())
    return metrics


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
