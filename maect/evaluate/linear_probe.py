"""Linear probing: a sweep over learning rates on frozen features (paper, B and table 9).

Heads of all rates, and of all representations, are trained on one pass of the encoder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from maect.core.context import Context
from maect.core.errors import UserError
from maect.core.files import sha256_file
from maect.core.settings import digest
from maect.evaluate.base import Encodes, EvaluationJob, Images, Input, Positive, Shards
from maect.recipes import Encoder
from maect.recipes.cost import encode_flops

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from maect.data.index import Index
    from maect.evaluate.features import Encoding
    from maect.models.precision import Precision


class LinearProbe(Encodes):
    """Linear probing (paper, table 9): ten learning rates, trained together."""

    name: ClassVar[str] = "linear_probe"
    title: ClassVar[str] = "linear probe"
    leaves: ClassVar[bool] = True
    test_data: ClassVar[str | None] = (
        "linear_probe is the best learning rate and epoch on the test split, as the authors' "
        "logger chooses; linear_probe_last takes the last epoch and the best learning rate on the "
        "test split"
    )

    epochs: int = Field(default=50, gt=0)
    batch_size: int = Field(default=1024, gt=0)
    learning_rates: tuple[Positive, ...] = Field(
        default=(0.1, 0.09, 0.08, 0.07, 0.06, 0.05, 0.04, 0.03, 0.02, 0.01), min_length=1
    )
    momentum: float = 0.9
    warmup_epochs: float = Field(default=5, ge=0)
    crop_scale: tuple[float, float] = (0.08, 1.0)
    flip: float = Field(default=0.5, ge=0, le=1)
    concat: bool = False
    """Probe several forms instead: the last 1, 2, 4 and 6 blocks, [CLS] with mean, mean alone."""
    seed: int = 0

    def inputs(self) -> dict[str, Input]:
        """Images of both splits."""
        return {"train": Shards(self.train_split), "test": Shards(self.test_split)}

    def flops(self, encoder: Encoder, images: Images) -> float:
        """Encode every training image once an epoch and every test image once."""
        seen = self.epochs * images(self.train_split) + images(self.test_split)
        return encode_flops(encoder) * seen

    def evaluate(self, context: Context, job: EvaluationJob) -> dict[str, Any]:
        """Accuracies in percent: `linear_probe` (best epoch), `linear_probe_last`, and by rate.

        With `concat` instead `concat_l` for the last l blocks, `concat_cls_mean` and, of an encoder
        that is read by its [CLS] token, `concat_mean`, each with the same details under its name;
        what the encoder has not is left out. `linear_probe` is then that of the `best_form`.

        Beside the JSON, a safetensors file of the same name keeps the classifier behind each best
        accuracy: `weight` [C, D] and `bias` [C] for features minus `mean` over the square root of
        `var` + 1e-5 (with concatenations each as `concat_l.weight` and so on).

        Raises:
            Interrupted: told to stop; the state is saved, and a restart ends with the same bits.
            UserError: unlabelled images, classes that differ between the splits, or a batch that is
                larger than all epochs together or no multiple of the ranks.
        """
        from maect.core import distributed
        from maect.data.index import open_index
        from maect.evaluate.features import Encoding
        from maect.evaluate.probing import check
        from maect.models.weights import save_tensors

        train = open_index(job.path("train"))
        test = open_index(job.path("test"))
        check(train, test)
        path = job.run / "encoder.safetensors"
        encoding = Encoding(
            path,
            distributed.device_of(context),
            self.precision,
            blocks=max(BLOCKS) if self.concat else 1,
            other_pooling=self.concat,
        )
        sha256 = sha256_file(path)
        forms = list(representations(encoding)) if self.concat else []
        identity = digest(self, sha256, train.digest, test.digest, str(job.resize), *forms)
        with distributed.process_group(context):
            probe = _Probe(context, job, self, train, encoding, identity)
            metrics = probe.run(*_test_features(context, job, test, encoding))
            if context.rank == 0:
                texts = {
                    "class_names": json.dumps(train.class_names),
                    "encoder_sha256": sha256,
                    "resize": str(job.resize or encoding.settings.default_resize),
                }
                save_tensors(job.out.with_suffix(".safetensors"), probe.training.kept, texts)
        return metrics


BLOCKS = (1, 2, 4, 6)
PLAIN = "linear_probe"


def representations(encoding: Encoding) -> dict[str, slice]:
    """Which features each probe reads, by the name of its metric."""
    width, blocks = encoding.settings.width, encoding.blocks
    columns = {
        f"concat_{count}": slice((blocks - count) * width, blocks * width)
        for count in BLOCKS
        if count <= blocks
    }
    if encoding.other is not None:
        columns["concat_cls_mean"] = slice((blocks - 1) * width, (blocks + 1) * width)
        if encoding.pooling == "cls":
            columns["concat_mean"] = slice(blocks * width, (blocks + 1) * width)
    return columns


class _Probe:
    """One run of the protocol on one rank."""

    def __init__(
        self,
        context: Context,
        job: EvaluationJob,
        settings: LinearProbe,
        train: Index,
        encoding: Encoding,
        identity: str,
    ) -> None:
        from maect.evaluate.heads import Heads
        from maect.evaluate.probing import Probing

        self.context, self.rates = context, list(settings.learning_rates)
        self.columns = representations(encoding) if settings.concat else {PLAIN: slice(None)}
        bounds = [len(self.rates) * i // context.world_size for i in range(context.world_size + 1)]
        self.mine = slice(bounds[context.rank], bounds[context.rank + 1])
        peaks = [rate * settings.batch_size / 256 for rate in self.rates]
        self.heads = {
            name: Heads(
                len(range(*columns.indices(encoding.width))),
                len(train.class_names),
                peaks,
                settings.momentum,
                settings.seed,
                encoding.device,
                self.mine,
            )
            for name, columns in self.columns.items()
        }
        self.training = Probing(context, job, settings, train, encoding, self.heads, identity)

    def run(self, features: Tensor, labels: Tensor) -> dict[str, Any]:
        """Train to the end, evaluating after every epoch; metrics."""
        from maect.evaluate.probing import labels_of

        history: dict[str, list[list[float]]] = self.training.record
        for _ in self.training.epochs(labels_of, self._update):
            for name in self.heads:
                accuracies = self._accuracies(name, features, labels)
                before = max((max(epoch) for epoch in history.get(name, [])), default=-1.0)
                history.setdefault(name, []).append(accuracies)
                if max(accuracies) > before:
                    self._keep(name, accuracies.index(max(accuracies)))
        metrics = {
            k: v for name in self.heads for k, v in self._metrics(name, history[name]).items()
        }
        if PLAIN not in metrics:
            best = max(self.heads, key=metrics.__getitem__)
            metrics |= {PLAIN: metrics[best], "best_form": best}
        return metrics

    def _update(self, features: Tensor, labels: Tensor, lr_multiplier: float) -> Tensor:
        import torch

        from maect.core import distributed

        features = distributed.gather_rows(features)
        labels = distributed.gather_rows(labels)
        losses = [
            heads.step(features[:, self.columns[name]], labels, lr_multiplier)
            for name, heads in self.heads.items()
        ]
        return torch.cat(losses)

    def _accuracies(self, name: str, features: Tensor, labels: Tensor) -> list[float]:
        """In percent, of each rate."""
        import torch

        from maect.core import distributed
        from maect.train.accuracy import BATCH

        hits = torch.zeros(len(self.rates), dtype=torch.int64)
        for start in range(0, len(labels), BATCH):
            part = slice(start, start + BATCH)
            predicted = self.heads[name].predict(features[part, self.columns[name]])
            hits[self.mine] += (predicted == labels[part, None]).sum(dim=0).cpu()
        distributed.sum_over_ranks(hits)
        return [100 * count / len(labels) for count in hits.tolist()]

    def _keep(self, name: str, rate: int) -> None:
        from maect.evaluate.heads import Heads

        one = slice(rate, rate + 1)
        best = {key: self.training.full(name, key, one)[0] for key in ("weight", "bias")}
        best |= {key: getattr(self.heads[name], key) for key in Heads.SHARED}
        prefix = "" if name == PLAIN else f"{name}."
        self.training.kept |= {prefix + key: value.clone() for key, value in best.items()}

    def _metrics(self, name: str, history: list[list[float]]) -> dict[str, Any]:
        best = max(max(accuracies) for accuracies in history)
        epoch = next(i for i, accuracies in enumerate(history) if best in accuracies)
        last = history[-1]
        by_rate = {str(rate): value for rate, value in zip(self.rates, last, strict=True)}
        prefix = "" if name == PLAIN else f"{name}_"
        return {
            name: best,
            f"{name}_last": max(last),
            f"{prefix}best_epoch": epoch + 1,
            f"{prefix}best_rate": self.rates[history[epoch].index(best)],
            f"{prefix}best_rate_last": self.rates[last.index(max(last))],
            f"{prefix}last_by_rate": by_rate,
            f"{prefix}best_by_epoch": [max(accuracies) for accuracies in history],
        }


def _test_features(
    context: Context, job: EvaluationJob, test: Index, encoding: Encoding
) -> tuple[Tensor, Tensor]:
    """Features of the test split on every rank, [n, D], and its labels."""
    import torch

    from maect.core import distributed
    from maect.evaluate.features import finite
    from maect.train.accuracy import BATCH, share

    largest = -(-test.n // (context.world_size * BATCH)) * BATCH
    out, start = torch.zeros(largest, encoding.width, device=encoding.device), 0
    size = encoding.settings.image_size
    for images, _, _ in share(context, test, encoding.device, size, job.resize):
        out[start : start + len(images)] = encoding(images)
        start += len(images)
    features = distributed.gather_rows(out)[: test.n]
    finite(features, job.run)
    return features, torch.tensor(test.labels, device=features.device)


def read_probe(path: Path) -> tuple[Tensor, Tensor, list[str], str | None]:
    """A linear probe that an evaluation left, as one linear layer on features.

    Returns:
        Weight [classes, width], bias [classes], names of the classes, and sha256 of the encoder.

    Raises:
        UserError: no probe, or not one of a single representation.
    """
    import torch

    from maect.evaluate.heads import BN_EPS
    from maect.models.weights import load_tensors

    tensors, texts = load_tensors(path)
    if not {"weight", "bias", "mean", "var"} <= tensors.keys() or "class_names" not in texts:
        raise UserError(f"{path}: holds no single linear probe; evaluate linear_probe again")
    scale = torch.rsqrt(tensors["var"] + BN_EPS)
    # BatchNorm is affine in the features: it becomes part of the linear layer.
    weight = tensors["weight"] * scale
    bias = tensors["bias"] - tensors["weight"] @ (tensors["mean"] * scale)
    return weight, bias, json.loads(texts["class_names"]), texts.get("encoder_sha256")


class TrainedProbe:
    """The linear probe that an evaluation left, on its encoder: from images to logits.

    Attributes:
        class_names: of the data that the probe was trained on.
    """

    def __init__(self, job: EvaluationJob, device: torch.device, precision: Precision) -> None:
        """Load the run's encoder and the probe of the job.

        Raises:
            UserError: no probe, not one of a single representation, or one of another encoder.
        """
        from maect.evaluate.features import Encoding

        path, encoder = job.path("probe"), job.run / "encoder.safetensors"
        weight, bias, class_names, sha256 = read_probe(path)
        self.encoding = Encoding(encoder, device, precision)
        if sha256 != sha256_file(encoder):
            raise UserError(f"{path}: trained on another encoder than {encoder}; probe it again")
        self.class_names = tuple(class_names)
        self.weight, self.bias = weight.to(device), bias.to(device)

    def __call__(self, images: Tensor) -> Tensor:
        """Logits float32 [b, classes] of images, uint8 [b, C, S, S] or normalized float32.

        Raises:
            UserError: logits that are not finite.
        """
        import torch

        with torch.inference_mode():
            logits = torch.addmm(self.bias, self.encoding(images), self.weight.T)
        if not torch.isfinite(logits).all():
            raise UserError(
                "the probe's predictions are not finite; the encoder diverged or its weights "
                "are damaged"
            )
        return logits

    def check(self, index: Index) -> None:
        """Refuse images that the probe cannot be scored on.

        Raises:
            UserError: no images, unlabelled ones, or other classes.
        """
        if index.n == 0:
            raise UserError(f"{index.directory}: holds no images")
        if index.labels.min() < 0:
            raise UserError(f"{index.directory}: some images have no label")
        if tuple(index.class_names) != self.class_names:
            raise UserError(
                f"{index.directory}: its classes are not those that the probe was trained on"
            )

    def share(
        self, context: Context, job: EvaluationJob, index: Index
    ) -> Iterator[tuple[Tensor, NDArray[np.int64], NDArray[np.int64]]]:
        """This rank's images uint8 [b, C, S, S] on the device, labels [b] and ids [b]."""
        from maect.train.accuracy import share

        size = self.encoding.settings.image_size
        return share(context, index, self.encoding.device, size, job.resize)
