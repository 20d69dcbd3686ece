"""Accuracy of the trained linear probe on shifted data (paper, section 5 and table 5).

A set that has only some of the classes (ImageNet-R and -A have 200) is scored among those: the
other logits do not take part, as in the authors' code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from maect.core.context import Context
from maect.core.errors import UserError
from maect.data.index import open_index
from maect.evaluate.base import Encodes, EvaluationJob, Images, Input, OutputOf, Shards
from maect.evaluate.linear_probe import TrainedProbe

if TYPE_CHECKING:
    import torch


class Robustness(Encodes):
    """The trained linear probe on shifted data (paper, table 5)."""

    name: ClassVar[str] = "robustness"
    title: ClassVar[str] = "linear probe on shifted data"
    test_data: ClassVar[str | None] = (
        "the probe's epoch and learning rate were chosen on the unshifted test split; of a shifted "
        "split only the classes among its labels can be predicted"
    )

    splits: tuple[str, ...] = (
        "imagenet_v2_threshold",
        "imagenet_v2_matched",
        "imagenet_v2_top",
        "imagenet_r",
        "imagenet_sketch",
        "imagenet_a",
    )
    """Splits of the evaluated dataset; each gives a metric of its name."""
    probe: str = "linear_probe"
    """Which evaluation's probe."""

    def inputs(self) -> Mapping[str, Input]:
        """The probe, and the images of every split by its name."""
        return {"probe": OutputOf(self.probe)} | {name: Shards(name) for name in self.splits}

    def encoded(self, images: Images) -> float:
        """Count every image once."""
        return sum(map(images, self.splits))

    def headline(self) -> dict[str, str]:
        """Accuracy on each set of images."""
        return {name: f"{self.title}: {name}" for name in self.splits}

    def evaluate(self, context: Context, job: EvaluationJob) -> dict[str, Any]:
        """Accuracy in percent on each of `splits`, by its name; and how many classes it has."""
        import numpy as np
        import torch

        from maect.core import distributed
        from maect.train.scores import accuracy

        probe = TrainedProbe(job, distributed.device_of(context), self.precision)
        indexes = {name: open_index(job.path(name)) for name in self.splits}
        for index in indexes.values():
            probe.check(index)
        classes = {name: np.unique(index.labels) for name, index in indexes.items()}
        single = [name for name, labels in classes.items() if len(labels) < 2]
        if single:
            raise UserError(
                f"{indexes[single[0]].directory}: images of one class, which any probe finds"
            )
        device, size = probe.encoding.device, probe.encoding.settings.image_size
        accuracies = {}
        with distributed.process_group(context):
            for name, index in indexes.items():
                known = torch.from_numpy(classes[name]).to(device)

                def predict(images: torch.Tensor, known: torch.Tensor = known) -> torch.Tensor:
                    return known[probe(images)[:, known].argmax(dim=1)]

                accuracies[name] = accuracy(context, index, device, size, job.resize, predict)
        return {**accuracies, "classes": {name: len(labels) for name, labels in classes.items()}}
