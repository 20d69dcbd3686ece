"""Probes on every block that predict the image's colour histogram (paper, figure 5 and B).

How much of an image's colours a representation keeps: the error is small where instance
discrimination has learnt the shortcut of comparing colours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from maect.core.context import Context
from maect.core.errors import UserError
from maect.core.files import sha256_file
from maect.core.settings import digest, later
from maect.evaluate.base import Encodes, EvaluationJob, Images, Input, Shards
from maect.recipes import Encoder
from maect.recipes.cost import encode_flops

if TYPE_CHECKING:
    from torch import Tensor

    from maect.data.index import Index
    from maect.data.loader import Batch
    from maect.evaluate.features import Encoding


class ColorHistogram(Encodes):
    """Probes on every block that predict the image's colour histogram (paper, figure 5 and B)."""

    name: ClassVar[str] = "color_histogram"
    title: ClassVar[str] = "colour histograms"
    leaves: ClassVar[bool] = True
    test_data: ClassVar[str | None] = "only scored, after the last epoch"

    epochs: int = Field(default=10, gt=0)
    batch_size: int = Field(default=1024, gt=0)
    pooling: Literal["cls", "mean"] = "cls"
    """What the probes read of each block: [CLS], as in the paper, or the mean of the patch tokens,
    for encoders whose contrastive head read that."""
    learning_rate: float = Field(default=0.1, gt=0)
    """Multiplied by batch_size / 256."""
    momentum: float = 0.9
    warmup_epochs: float = Field(default=1, ge=0)
    crop_scale: tuple[float, float] = (0.08, 1.0)
    flip: float = Field(default=0.5, ge=0, le=1)
    seed: int = 0
    probes: int = later(1, gt=0)
    """Of each block, that differ in their initial weights alone: how far they agree is measured."""

    def inputs(self) -> dict[str, Input]:
        """Images of both splits."""
        return {"train": Shards(self.train_split), "test": Shards(self.test_split)}

    def flops(self, encoder: Encoder, images: Images) -> float:
        """Encode every training image once an epoch and every test image once."""
        seen = self.epochs * images(self.train_split) + images(self.test_split)
        return encode_flops(encoder) * seen

    def evaluate(self, context: Context, job: EvaluationJob) -> dict[str, Any]:
        """Errors in percent of a uniform prediction's: `errors` of every block, first to last.

        `error_last` and `error_mean` are of the last block and the mean; `uniform_error` is the
        mean absolute error of predicting 1/64 everywhere on the test split. Of several probes it
        is their mean, and `error_last_std`, `error_mean_std` are the standard deviations.

        Raises:
            Interrupted: told to stop; the state is saved, and a restart ends with the same bits.
            UserError: an encoder without the [CLS] token that is to be read, or a batch larger
                than all epochs together.
        """
        import numpy as np

        from maect.core import distributed
        from maect.data.index import open_index
        from maect.evaluate.features import Encoding
        from maect.evaluate.heads import HistogramHeads
        from maect.evaluate.probing import Probing, check
        from maect.models.weights import save_tensors

        train = open_index(job.path("train"))
        train.check_channels(3)
        test = open_index(job.path("test"))
        check(train, test, labelled=False)
        path = job.run / "encoder.safetensors"
        device = distributed.device_of(context)
        encoding = Encoding(path, device, self.precision, blocks=10**9, pooling=self.pooling)
        identity = digest(self, sha256_file(path), train.digest, test.digest, str(job.resize))
        rank, size, total = context.rank, context.world_size, encoding.blocks * self.probes
        mine = slice(total * rank // size, total * (rank + 1) // size)
        with distributed.process_group(context):
            peak = self.learning_rate * self.batch_size / 256
            heads = HistogramHeads(
                encoding.settings.width, total, peak, self.momentum, self.seed, device, mine
            )

            def update(features: Tensor, targets: Tensor, lr_multiplier: float) -> Tensor:
                features = distributed.gather_rows(features).repeat(1, self.probes)
                return heads.step(features, distributed.gather_rows(targets), lr_multiplier)

            groups = {"heads": heads}
            training = Probing(context, job, self, train, encoding, groups, identity)
            for _ in training.epochs(_targets, update):
                pass
            trained = {
                key: training.full("heads", key) for key in ("weight", "bias", "mean", "var")
            }
            errors, uniform = _errors(context, job, test, encoding, trained)
            if rank == 0:
                save_tensors(job.out.with_suffix(".safetensors"), trained, {})
        if uniform == 0:
            raise UserError(f"{test.directory}: every image's colours are spread uniformly")
        relative = 100 * np.reshape(errors, (self.probes, -1)) / uniform
        of_each = {"error_last": relative[:, -1], "error_mean": relative.mean(axis=1)}
        metrics: dict[str, Any] = {"errors": relative.mean(axis=0).tolist()}
        for name, values in of_each.items():
            metrics[name] = float(values.mean())
            if self.probes > 1:
                metrics[f"{name}_std"] = float(values.std(ddof=1))
        return metrics | {"uniform_error": uniform}


def histograms(images: Tensor) -> Tensor:
    """Share of each channel's pixels in 64 bins of four levels: uint8 [b, 3, S, S] to [b, 3, 64].

    Of the image as the encoder sees it before normalization; a flip changes nothing.
    """
    import torch

    from maect.evaluate.heads import BINS

    bins = (images >> 2).long().flatten(2)
    counts = torch.zeros(*images.shape[:2], BINS, device=images.device)
    counts.scatter_add_(2, bins, torch.ones((), device=images.device).expand_as(bins))
    return counts / bins.shape[2]


def _targets(batch: Batch, images: Tensor) -> Tensor:
    return histograms(images)


def _errors(
    context: Context, job: EvaluationJob, test: Index, encoding: Encoding, heads: dict[str, Tensor]
) -> tuple[list[float], float]:
    """Mean absolute error of each head on the test split, and of a uniform prediction."""
    import torch

    from maect.core import distributed
    from maect.evaluate.features import finite
    from maect.evaluate.heads import BINS, BN_EPS, predict_histograms
    from maect.train.accuracy import share

    sums = torch.zeros(len(heads["weight"]) + 1, dtype=torch.float64)
    probes = len(heads["weight"]) // encoding.blocks
    scale = torch.rsqrt(heads["var"] + BN_EPS)[:, None]
    size = encoding.settings.image_size
    for images, _, _ in share(context, test, encoding.device, size, job.resize):
        features = encoding(images).view(len(images), encoding.blocks, -1).transpose(0, 1)
        finite(features, job.run)
        target, features = histograms(images), features.repeat(probes, 1, 1)
        p = predict_histograms(
            (features - heads["mean"][:, None]) * scale, heads["weight"], heads["bias"]
        )
        sums[:-1] += (p - target).abs().mean(dim=(2, 3)).double().sum(dim=1).cpu()
        sums[-1] += (1 / BINS - target).abs().mean(dim=(1, 2)).double().sum().cpu()
    *errors, uniform = (distributed.sum_over_ranks(sums) / test.n).tolist()
    return errors, uniform
