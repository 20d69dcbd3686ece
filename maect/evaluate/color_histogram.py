"""Probes on every block that predict the image's colour histogram (paper, figure 5 and B).

How much of an image's colours a representation keeps: the error is small where instance
discrimination has learnt the shortcut of comparing colours.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maect.core import distributed
from maect.core.context import Context
from maect.core.errors import UserError
from maect.evaluate.base import EvaluationJob
from maect.evaluate.features import Encoding
from maect.evaluate.probe_training import HeadGroup, Probe, ProbeBatch, ProbeTask, train_probe
from maect.evaluate.protocols.probes import ColorHistogram


def evaluate(settings: ColorHistogram, context: Context, job: EvaluationJob) -> dict[str, Any]:
    """Errors of every block, first to last, in percent of a uniform prediction's.

    The probes of the last epoch are kept. docs/reference/probes.md lists the metrics.
    """
    encoding = Encoding(
        job.encoder,
        distributed.device_of(context),
        settings.precision,
        blocks=10**9,
        pooling=settings.pooling,
    )
    return train_probe(settings, context, job, encoding, _Blocks)


BINS = 64  # of a colour channel
BN_EPS, BN_MOMENTUM = 1e-5, 0.1


class HistogramHeads(HeadGroup):
    """A BatchNorm1d(affine=False) and Linear on each block, on the mean absolute error.

    Each block's loss is the mean over the batch and 192 bins of |softmax over a channel's bins −
    histogram|.

    Attributes:
        weight: [L, D, 192], bias: [L, 192].
        mean, var: running statistics of the features, [L, D].
    """

    SAVED = ("weight", "bias", "mean", "var")

    def __init__(
        self,
        width: int,
        blocks: int,
        peak: float,
        momentum: float,
        seed: int,
        device: torch.device,
    ) -> None:
        """Initialise as linear probes, with one peak learning rate for all blocks."""
        generator = torch.Generator().manual_seed(seed)
        weight = torch.empty(blocks, width, 3 * BINS)
        torch.nn.init.trunc_normal_(weight, std=0.01, generator=generator)
        self.weight = weight.to(device).requires_grad_()
        self.bias = torch.zeros(blocks, 3 * BINS, device=device, requires_grad=True)
        self.mean = torch.zeros(blocks, width, device=device)
        self.var = torch.ones(blocks, width, device=device)
        group = {"params": [self.weight, self.bias], "peak": peak}
        self.optimizer = torch.optim.SGD([group], momentum=momentum)

    def step(self, features: Tensor, targets: Tensor, lr_multiplier: float) -> Tensor:
        """One update of every head on the global batch; return its loss before, [L].

        Args:
            features: float32 [B, L · D], of all ranks.
            targets: histograms, [B, 3, 64].
        """
        size = len(features)
        x = features.view(size, *self.mean.shape).transpose(0, 1)
        var, mean = torch.var_mean(x, dim=1, correction=0)
        self.mean.lerp_(mean, BN_MOMENTUM)
        self.var.lerp_(var * size / max(size - 1, 1), BN_MOMENTUM)
        x = (x - mean[:, None]) * torch.rsqrt(var + BN_EPS)[:, None]
        predicted = predict_histograms(x, self.weight, self.bias)
        losses = (predicted - targets).abs().mean(dim=(1, 2, 3))
        losses.sum().backward()
        self.descend(lr_multiplier)
        return losses.detach()


def predict_histograms(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Histograms [L, b, 3, 64] from normalized features [L, b, D]."""
    logits = torch.baddbmm(bias[:, None], x, weight)
    return logits.unflatten(2, (3, BINS)).softmax(dim=3)


class _Blocks(Probe):
    """Probes of all blocks."""

    def __init__(self, task: ProbeTask, settings: ColorHistogram) -> None:
        super().__init__(task, settings)
        task.train.check_channels(3)
        self.probes = settings.probes
        encoding = task.encoding
        total = encoding.blocks * settings.probes
        peak = settings.learning_rate * settings.batch_size / 256
        rest = (settings.momentum, settings.seed, encoding.device)
        self.heads = HistogramHeads(encoding.settings.width, total, peak, *rest)
        self.groups = {"heads": self.heads}

    def targets(self, labels: NDArray[np.int64], images: Tensor) -> Tensor:
        return histograms(images)

    def step(self, features: Tensor, batch: ProbeBatch, lr_multiplier: float) -> Tensor:
        features = distributed.gather_rows(features).repeat(1, self.probes)
        return self.heads.step(features, distributed.gather_rows(batch.targets), lr_multiplier)

    def metrics(self) -> dict[str, Any]:
        self.store_best(self.heads, self.heads.SAVED)
        errors, uniform = _errors(self.task, self.best_tensors)
        if uniform == 0:
            raise UserError(
                f"{self.task.test.directory}: every image's colours are spread uniformly"
            )
        relative = 100 * np.reshape(errors, (self.probes, -1)) / uniform
        of_each = {"error_last": relative[:, -1], "error_mean": relative.mean(axis=1)}
        metrics: dict[str, Any] = {"errors": relative.mean(axis=0).tolist()}
        for name, values in of_each.items():
            metrics[name] = float(values.mean())
            if self.probes > 1:
                metrics[f"{name}_std"] = float(values.std(ddof=1))
        return metrics | {"uniform_error": uniform}

    def metadata(self) -> dict[str, str]:
        return {}


def histograms(images: Tensor) -> Tensor:
    """Share of each channel's pixels in 64 bins of four levels: uint8 [b, 3, S, S] to [b, 3, 64].

    Of the image as the encoder sees it before normalization; a flip changes nothing.
    """
    bins = (images >> 2).long().flatten(2)
    counts = torch.zeros(*images.shape[:2], BINS, device=images.device)
    counts.scatter_add_(2, bins, torch.ones((), device=images.device).expand_as(bins))
    return counts / bins.shape[2]


def _errors(task: ProbeTask, heads: dict[str, Tensor]) -> tuple[list[float], float]:
    """Mean absolute error of each head on the test split, and of a uniform prediction."""
    sums = torch.zeros(len(heads["weight"]) + 1, dtype=torch.float64)
    blocks = task.encoding.blocks
    probes = len(heads["weight"]) // blocks
    scale = torch.rsqrt(heads["var"] + BN_EPS)[:, None]
    for images in task.images():
        features = task.check_finite(task.encoding(images))
        features = features.view(len(images), blocks, -1).transpose(0, 1)
        target = histograms(images)
        features = features.repeat(probes, 1, 1)
        p = predict_histograms(
            (features - heads["mean"][:, None]) * scale, heads["weight"], heads["bias"]
        )
        sums[:-1] += (p - target).abs().mean(dim=(2, 3)).double().sum(dim=1).cpu()
        sums[-1] += (1 / BINS - target).abs().mean(dim=(1, 2)).double().sum().cpu()
    *errors, uniform = (distributed.sum_over_ranks(sums) / task.test.n).tolist()
    return errors, uniform
