"""Linear probing: a sweep over learning rates on frozen features (paper, B and table 9).

The encoder runs once per image; all heads are trained on what it gives. Every rank encodes its
share of the batch, the features are exchanged, and each rank trains some of the heads, so that
the gradients need no exchange and the world size does not change them.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from maect.data.augment import augment
from maect.data.index import Index, open_index
from maect.data.loader import train_batches
from maect.errors import UserError
from maect.evaluate import ranks
from maect.evaluate.encoding import Encoding
from maect.evaluate.features import BATCH, batches
from maect.evaluate.heads import Heads, learning_rate
from maect.evaluate.job import Context, Interrupted, Job
from maect.files import atomic_write, sha256_file
from maect.recipes import View, digest
from maect.recipes.protocols import LinearProbe

INPUTS = ("train_shards", "test_shards")
ON_EVERY_RANK = True
TEST_DATA = (
    "linear_probe is the best learning rate and epoch on the test split, as the authors' logger "
    "chooses; linear_probe_last takes the last epoch and the best learning rate on the test split"
)
STATE = "heads.safetensors"


def evaluate(context: Context, job: Job, settings: LinearProbe) -> dict[str, Any]:
    """Accuracies in percent: `linear_probe` (best epoch), `linear_probe_last`, and by rate.

    Called on every rank. Beside the JSON, `linear_probe.safetensors` keeps the classifier behind
    `linear_probe`: `weight` [C, D] and `bias` [C] for features minus `mean` over the square root
    of `var` + 1e-5. Saves its state after every epoch; a restart goes on from there with
    the same bits.

    Raises:
        Interrupted: told to stop; the state is saved.
        UserError: unlabelled images, classes that differ between the splits, or a batch that is
            larger than all epochs together or no multiple of the ranks.
    """
    train = open_index(job.need("train_shards"))
    test = open_index(job.need("test_shards"))
    _check(train, test, settings)
    path = job.run / "encoder.safetensors"
    encoding = Encoding(
        path,
        ranks.device_of(context),
        settings.precision,
        blocks=settings.blocks,
        cls_and_mean=settings.cls_and_mean,
    )
    identity = digest(settings, sha256_file(path), train.digest, test.digest, str(job.resize))
    with ranks.process_group(context):
        return _Probe(context, job, settings, train, test, encoding, identity).run()


def _check(train: Index, test: Index, settings: LinearProbe) -> None:
    for index in (train, test):
        if index.labels.min(initial=0) < 0:
            raise UserError(f"{index.directory}: the probe needs labels; some images have none")
    if train.class_names != test.class_names:
        raise UserError(f"{train.directory} and {test.directory}: their classes differ")
    if len(train.class_names) < 2:
        raise UserError(f"{train.directory}: the probe needs at least two classes")
    if settings.epochs * train.n < settings.batch_size:
        raise UserError(
            f"{train.directory}: {settings.epochs} epochs of {train.n} images are less than one "
            f"batch of {settings.batch_size}; lower batch_size"
        )


class _Probe:
    """One run of the protocol on one rank."""

    def __init__(
        self,
        context: Context,
        job: Job,
        settings: LinearProbe,
        train: Index,
        test: Index,
        encoding: Encoding,
        identity: str,
    ) -> None:
        self.context, self.job, self.settings = context, job, settings
        self.train, self.test, self.encoding, self.identity = train, test, encoding, identity
        per_epoch = train.n / settings.batch_size
        self.steps = int(settings.epochs * per_epoch)
        self.warmup = settings.warmup_epochs * per_epoch
        # Batches run on over the end of an epoch; an epoch ends with the update that completes it.
        self.ends = [int((epoch + 1) * per_epoch) for epoch in range(settings.epochs)]
        self.rates = list(settings.learning_rates)
        rank, size = context.rank, context.world_size
        bounds = [len(self.rates) * i // size for i in range(size + 1)]
        self.mine = slice(bounds[rank], bounds[rank + 1])
        self.heads = self._new_heads(self.mine)
        self.step = 0
        self.history: list[list[float]] = []
        """Accuracy of each rate after each epoch."""
        self.best: dict[str, Tensor] = {}
        """The classifier of the highest accuracy so far: weight, bias, mean and var."""

    def _new_heads(self, mine: slice) -> Heads:
        return Heads(
            self.encoding.width,
            len(self.train.class_names),
            [rate * self.settings.batch_size / 256 for rate in self.rates],
            self.settings.momentum,
            self.settings.seed,
            self.encoding.device,
            mine,
        )

    def run(self) -> dict[str, Any]:
        self._load()
        features, labels = self._test_features()
        view = View(crop_scale=self.settings.crop_scale, flip=self.settings.flip)
        seed, size = self.settings.seed, self.settings.batch_size
        started, first = time.monotonic(), self.step
        self._finish_epochs(features, labels)
        loader = train_batches(
            self.train,
            global_batch=size,
            rank=self.context.rank,
            world_size=self.context.world_size,
            seed=seed,
            views=[view],
            image_size=self.encoding.settings.image_size,
            start_step=self.step,
            steps=self.steps - self.step,
            threads=self.context.cpus,
        )
        for batch in loader:
            images = batch.images[0].to(self.encoding.device, non_blocking=True)
            x = self.encoding(augment(images, view, 0, seed, batch.epochs, batch.ids))
            targets, stop = self._exchange(torch.from_numpy(batch.labels))
            x = ranks.gather_rows(self.context, x)
            factor = learning_rate(self.step, self.steps, self.warmup)
            loss = self.heads.step(x, targets.to(x.device), factor)
            self.step += 1
            self._finish_epochs(features, labels)
            if self.step % 10 == 0 or self.step == self.steps:
                speed = (self.step - first) * size / (time.monotonic() - started)
                self.context.report(
                    {
                        "epoch": self.step * size // self.train.n,
                        "epochs": self.settings.epochs,
                        "step": self.step,
                        "steps": self.steps,
                        "loss": float(loss.min()) if len(loss) else None,
                        "images_per_second": speed,
                    }
                )
            if stop and self.step < self.steps:
                self._save()
                raise Interrupted
        return self._metrics()

    def _exchange(self, labels: Tensor) -> tuple[Tensor, bool]:
        """Labels of the global batch, and whether any rank was told to stop."""
        stop = torch.tensor([int(self.context.stop_requested())])
        rows = torch.cat([labels, stop])[None]
        rows = ranks.gather_rows(self.context, rows)
        return rows[:, :-1].flatten(), bool(rows[:, -1].any())

    def _test_features(self) -> tuple[Tensor, Tensor]:
        """Features of the test split on every rank, [n, D], and its labels."""
        n, size = self.test.n, self.context.world_size
        share = -(-n // (size * BATCH)) * BATCH  # whole batches: the same ones on any world size
        rows = range(min(n, share * self.context.rank), min(n, share * (self.context.rank + 1)))
        out = torch.zeros(share, self.encoding.width, device=self.encoding.device)
        for place, part in batches(
            self.test, self.encoding, self.job.resize, rows, self.context.cpus
        ):
            out[place : place + len(part)] = part
        features = ranks.gather_rows(self.context, out)[:n]
        if not torch.isfinite(features).all():
            raise UserError(
                f"{self.job.run}: the features are not finite; the encoder diverged or its "
                "weights are damaged"
            )
        return features, torch.tensor(self.test.labels, device=features.device)

    def _finish_epochs(self, features: Tensor, labels: Tensor) -> None:
        """Evaluate and save after an epoch's last update."""
        while len(self.history) < self.settings.epochs and (
            self.ends[len(self.history)] <= self.step
        ):
            hits = torch.zeros(len(self.rates), dtype=torch.int64)
            for start in range(0, len(labels), BATCH):
                part = slice(start, start + BATCH)
                right = self.heads.predict(features[part]) == labels[part, None]
                hits[self.mine] += right.sum(dim=0).cpu()
            ranks.sum_ranks(self.context, hits)
            self.history.append([100 * count / len(labels) for count in hits.tolist()])
            self._save()

    def _collect(self, mine: Tensor) -> Tensor:
        """The rows of all ranks' heads, which differ in number."""
        classes = self.heads.classes
        out = mine.new_zeros(len(self.rates) * classes, *mine.shape[1:])
        out[self.mine.start * classes : self.mine.stop * classes] = mine
        return ranks.sum_ranks(self.context, out)

    def _save(self) -> None:
        """All heads in one file: a restart may have another number of ranks."""
        tensors = {name: self._collect(getattr(self.heads, name)) for name in Heads.BY_RATE}
        tensors |= {name: getattr(self.heads, name) for name in Heads.SHARED}
        if self.context.rank:
            return
        tops = [max(accuracies) for accuracies in self.history]
        at_end = self.history and self.ends[len(self.history) - 1] == self.step
        if at_end and tops[-1] > max(tops[:-1], default=-1.0):
            first = self.history[-1].index(tops[-1]) * self.heads.classes
            rows = slice(first, first + self.heads.classes)
            self.best = {
                "weight": tensors["weight"][rows].clone(),
                "bias": tensors["bias"][rows].clone(),
                "mean": tensors["mean"].clone(),
                "var": tensors["var"].clone(),
            }
        tensors |= {f"best_{name}": value for name, value in self.best.items()}
        record = {"identity": self.identity, "step": self.step, "history": self.history}
        with atomic_write(self.job.state / STATE) as temporary:
            plain = {name: value.cpu().contiguous() for name, value in tensors.items()}
            save_file(plain, temporary, {"record": json.dumps(record)})

    def _load(self) -> None:
        """Go on from a saved state, if there is one of this very probe."""
        file = self.job.state / STATE
        record = ranks.from_first(self.context, _record(file))
        if record is None:
            return
        if record["identity"] != self.identity:
            if self.context.rank == 0:
                print(f"{file}: of another encoder or other settings; anew", file=sys.stderr)
            return
        tensors = load_file(file)
        classes = self.heads.classes
        for name in Heads.BY_RATE:
            mine = slice(self.mine.start * classes, self.mine.stop * classes)
            getattr(self.heads, name).copy_(tensors[name][mine])
        for name in Heads.SHARED:
            getattr(self.heads, name).copy_(tensors[name])
        best = {name for name in tensors if name.startswith("best_")}
        self.best = {name.removeprefix("best_"): tensors[name] for name in best}
        self.step, self.history = record["step"], record["history"]

    def _metrics(self) -> dict[str, Any]:
        if self.context.rank == 0:
            with atomic_write(self.job.out.with_suffix(".safetensors")) as temporary:
                save_file({name: value.cpu() for name, value in self.best.items()}, temporary)
        best = max(max(accuracies) for accuracies in self.history)
        epoch = next(i for i, accuracies in enumerate(self.history) if best in accuracies)
        last = self.history[-1]
        return {
            "linear_probe": best,
            "linear_probe_last": max(last),
            "best_epoch": epoch + 1,
            "best_rate": self.rates[self.history[epoch].index(best)],
            "best_rate_last": self.rates[last.index(max(last))],
            "last_by_rate": {
                str(rate): value for rate, value in zip(self.rates, last, strict=True)
            },
            "best_by_epoch": [max(accuracies) for accuracies in self.history],
        }


def _record(file: Path) -> dict[str, Any] | None:
    """What a state file says about itself; None if there is none, or it is damaged."""
    try:
        with safe_open(file, framework="pt") as handle:
            record: dict[str, Any] = json.loads(handle.metadata()["record"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
    return record
