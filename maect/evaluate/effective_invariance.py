"""Effective invariance of the linear probe to rotations and colour changes (paper, table 15).

Deng et al. 2022: 0 where the prediction of the changed image differs, otherwise a geometric mean
of both probabilities. The authors' code takes the root of the sum of products over all classes,
the paper's text that of the predicted class.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from maect.core.context import Context
from maect.data.index import open_index
from maect.evaluate.base import Encodes, EvaluationJob, Images, Input, OutputOf, Shards
from maect.evaluate.linear_probe import TrainedProbe
from maect.recipes import Pixels

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


class EffectiveInvariance(Encodes):
    """Change of the probe's prediction by rotations and changed colours (paper, table 15)."""

    name: ClassVar[str] = "effective_invariance"
    title: ClassVar[str] = "effective invariance"
    labelled: ClassVar[bool] = False
    test_data: ClassVar[str | None] = (
        "the probe's epoch and learning rate were chosen on the test split"
    )

    probe: str = "linear_probe"
    """Which evaluation's probe."""
    draws: int = Field(default=3, gt=0)
    """Random colour changes of each image; rotations are three."""
    seed: int = 0

    def inputs(self) -> dict[str, Input]:
        """The probe and the test images."""
        return {"probe": OutputOf(self.probe), "test": Shards(self.test_split)}

    def encoded(self, images: Images) -> float:
        """Count every test image as it is, turned three times and recoloured."""
        return images(self.test_split) * (4 + self.draws)

    def headline(self) -> dict[str, str]:
        """Invariance to each change."""
        return {f"ei_{change}": f"{self.title} to {change}" for change in CHANGES}

    def evaluate(self, context: Context, job: EvaluationJob) -> dict[str, Any]:
        """Means over the test images and changes, 0 to 1; `agreement_…` in percent.

        docs/reference/probes.md lists the metrics.
        """
        import torch

        from maect.core import distributed
        from maect.train.scores import share

        index = open_index(job.path("test"))
        index.check_channels(3)  # it changes colours
        probe = TrainedProbe(job, distributed.device_of(context), self.precision)
        probe.check(index)
        pixels = probe.encoding.settings.pixels
        # Rows: rotation, colour. Columns: code's formula, paper's formula, agreement, images.
        sums = torch.zeros(2, 4, dtype=torch.float64)
        with distributed.process_group(context):
            size, device = probe.encoding.settings.image_size, probe.encoding.device
            for images, _, ids in share(context, index, device, size, job.resize):
                plain = probe(images)
                for change, changed in _changed(images, ids, pixels, self):
                    values = invariance(plain, probe(changed))
                    sums[CHANGES.index(change), :3] += torch.stack(values).double().sum(dim=1).cpu()
                    sums[CHANGES.index(change), 3] += len(images)
            distributed.sum_over_ranks(sums)
        metrics = {}
        for change, (code, paper, agreement, images) in zip(CHANGES, sums.tolist(), strict=True):
            metrics[f"ei_{change}"] = code / images
            metrics[f"ei_{change}_paper"] = paper / images
            metrics[f"agreement_{change}"] = 100 * agreement / images
        return metrics


CHANGES = ("rotation", "color")


def invariance(plain: Tensor, changed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Effective invariance of each sample, from logits [b, C] before and after a change.

    Returns:
        By the authors' code, by the paper's text, and whether the predictions agree; float [b].
    """
    p, q = plain.softmax(dim=1), changed.softmax(dim=1)
    (top_p, class_p), (top_q, class_q) = p.max(dim=1), q.max(dim=1)
    agree = (class_p == class_q).to(p.dtype)
    return (p * q).sum(dim=1).sqrt() * agree, (top_p * top_q).sqrt() * agree, agree


def _changed(
    images: Tensor, ids: NDArray[np.int64], pixels: Pixels, settings: EffectiveInvariance
) -> Iterator[tuple[str, Tensor]]:
    import numpy as np

    from maect.data import random
    from maect.data.transforms import jitter, normalize

    for quarter in (1, 2, 3):
        yield "rotation", images.rot90(quarter, (2, 3))
    everyone = np.ones(len(ids), bool)
    for draw in range(settings.draws):
        u = random.uniform(settings.seed, draw, ids, 0, random.COLOR, 8)
        colored = jitter(images.float() / 255, everyone, u[:, :4], u[:, 4:])
        yield "color", normalize(colored, pixels)
