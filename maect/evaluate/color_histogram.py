"""Probes on every block that predict the image's colour histogram (paper, figure 5 and B).

How much of an image's colours a representation keeps: the error is small where instance
discrimination has learnt the shortcut of comparing colours.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from maect.core.errors import UserError
from maect.evaluate.probe_training import ByEpochs, Probe, ProbeBatch, ProbeTask

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from maect.evaluate.encoding import Encoding


class ColorHistogram(ByEpochs):
    """Probes on every block that predict the image's colour histogram (paper, figure 5 and B)."""

    name: ClassVar[str] = "color_histogram"
    title: ClassVar[str] = "colour histograms"
    test_data: ClassVar[str | None] = "only scored, after the last epoch"
    labelled: ClassVar[bool] = False

    epochs: int = Field(default=10, gt=0)
    pooling: Literal["cls", "mean"] = "cls"
    """What the probes read of each block: [CLS], as in the paper, or the mean of the patch tokens,
    for encoders whose contrastive head read that."""
    learning_rate: float = Field(default=0.1, gt=0)
    """Multiplied by batch_size / 256."""
    momentum: float = 0.9
    warmup_epochs: float = Field(default=1, ge=0)
    probes: int = Field(default=1, gt=0)
    """Of each block, that differ in their initial weights alone: how far they agree is measured."""

    def encoding(self, path: Path, device: torch.device) -> Encoding:
        """Every block, by [CLS] or the mean."""
        from maect.evaluate.encoding import Encoding

        return Encoding(path, device, self.precision, blocks=10**9, pooling=self.pooling)

    def headline(self) -> dict[str, str]:
        """Errors of the last block and the mean of all."""
        blocks = {"error_last": "last block", "error_mean": "mean of blocks"}
        return {key: f"error of {self.title}, {of}" for key, of in blocks.items()}

    def build_probe(self, task: ProbeTask) -> Probe:
        """Return the probes of all blocks.

        Metrics are `errors` of every block, first to last, in percent of a uniform prediction's.
        The probes of the last epoch are kept. docs/reference/probes.md lists the metrics.
        """
        task.train.check_channels(3)
        return _Blocks(task, self)


class _Blocks(Probe):
    """Probes of all blocks."""

    def __init__(self, task: ProbeTask, settings: ColorHistogram) -> None:
        from maect.evaluate.stacked_heads import HistogramHeads

        super().__init__(task)
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
        from maect.core import distributed

        features = distributed.gather_rows(features).repeat(1, self.probes)
        return self.heads.step(features, distributed.gather_rows(batch.targets), lr_multiplier)

    def metrics(self) -> dict[str, Any]:
        import numpy as np

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
    import torch

    from maect.evaluate.stacked_heads import BINS

    bins = (images >> 2).long().flatten(2)
    counts = torch.zeros(*images.shape[:2], BINS, device=images.device)
    counts.scatter_add_(2, bins, torch.ones((), device=images.device).expand_as(bins))
    return counts / bins.shape[2]


def _errors(task: ProbeTask, heads: dict[str, Tensor]) -> tuple[list[float], float]:
    """Mean absolute error of each head on the test split, and of a uniform prediction."""
    import torch

    from maect.core import distributed
    from maect.evaluate.stacked_heads import BINS, BN_EPS, predict_histograms

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
