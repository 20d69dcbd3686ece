"""A linear head on patch tokens, for segmentation, in the settings of DINOv3.

A BatchNorm and one linear layer on the tokens of the last block behind the final norm, upsampled to
the pixels. Test images are read in overlapping windows, whose outputs are averaged.
docs/results/paper/probes_beside_their_authors.csv compares each setting with DINOv3's code
(facebookresearch/dinov3, `dinov3/eval/segmentation`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from maect.core.errors import UserError
from maect.data.index import ID, open_index
from maect.evaluate.base import ImageCount
from maect.evaluate.dense import CLASSES, Masked, MaskSplit, confusion_counts, iou_from_counts
from maect.evaluate.probe_training import (
    HELD_OUT,
    ByUpdates,
    HeadGroup,
    Probe,
    ProbeBatch,
    ProbeTask,
    Schedule,
)
from maect.recipes import Encoder

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

BN_EPS, BN_MOMENTUM, STD, BETAS = 1e-5, 0.1, 0.01, (0.9, 0.999)
START = 1e-6  # of the peak rate, in the first updates
_AT_ONCE = 16


class PatchLinear(Masked, ByUpdates):
    """Segmentation by a linear head on patch tokens."""

    name: ClassVar[str] = "patch_linear"
    title: ClassVar[str] = "linear head on patches"
    test_data: ClassVar[str | None] = (
        "patch_linear is the best of the scores during the training on the test split, as the "
        "authors report it; patch_linear_last is the last one, patch_linear_held_out chooses on "
        "training images"
    )

    updates: int = Field(default=40_000, gt=0)
    warmup_updates: int = Field(default=1500, ge=0)
    period: int = Field(default=5000, gt=0)
    """After how many updates the test images are scored and the state is saved."""
    batch_size: int = Field(default=16, gt=0)
    size: int = Field(default=512, gt=0)
    """Of crops and windows, and of the shorter side of images."""
    stride: int = Field(default=341, gt=0)
    """Between windows."""
    ratios: tuple[float, float] = (0.5, 2.0)
    """That the shorter side of training images is multiplied by."""
    flip: float = Field(default=0.5, ge=0, le=1)
    learning_rate: float = Field(default=1e-3, gt=0)
    weight_decay: float = Field(default=1e-3, ge=0)
    dropout: float = Field(default=0.1, ge=0, lt=1)
    held_out: float = Field(default=0.0, ge=0, lt=1)
    """Train the head a second time without this part of the training images, and choose on them
    when to stop."""

    def flops(self, encoder: Encoder, images: ImageCount) -> float | None:
        """Count them of crops and test images as if these were square."""
        return super().flops(encoder.model_copy(update={"image_size": self.size}), images)

    def encoded(self, images: ImageCount) -> float:
        """Count the crops, and the test images after each period."""
        scored = -(-self.updates // self.period) * images(self.test_split)
        return self.updates * self.batch_size + scored

    def rate(self, step: int, schedule: Schedule) -> float:
        """Return the fraction of the peak rate: the first two updates have the same."""
        number = max(0, step - 1)
        total = schedule.steps
        if number < schedule.warmup:
            rising = 1 - (1 - number / schedule.warmup) * (1 - START)
            return rising * (1 - number / total)
        return (1 + math.cos(math.pi * (number + 1) / total)) / 2

    def build_probe(self, task: ProbeTask) -> Probe:
        """Return the classifiers of patches, one for each learning rate.

        Metrics are mIoU in percent: `patch_linear` (best), `patch_linear_last`, and after each
        period.
        The best head is kept. docs/reference/dense.md lists the metrics.
        """
        encoder = task.encoding.settings
        task.train.check_channels(3)
        task.test.check_channels(3)
        beyond = self.size % encoder.patch_size
        if beyond:
            raise UserError(
                f"{task.job.out.stem}: size {self.size} is no multiple of the patches' "
                f"{encoder.patch_size} pixels; set size={self.size - beyond}"
            )
        if encoder.timm is not None and encoder.image_size != self.size:
            raise UserError(
                f"{task.job.run}: {encoder.timm} was imported for {encoder.image_size} pixels; "
                f"import it with --image-size {self.size}, or set size={encoder.image_size}"
            )
        return Segmenter(task, self)

    def batches(
        self, task: ProbeTask, probe: Probe, start: int, steps: int
    ) -> Iterator[ProbeBatch]:
        """Yield crops [b, 3, S, S] and the targets of their pixels, int64 [b, S, S]."""
        from maect.core import distributed
        from maect.data.transforms import normalize
        from maect.evaluate.segments import crops

        assert isinstance(probe, Segmenter)
        device = task.encoding.device
        for found in crops(probe.train, probe.places, self, task.context, start, steps):
            images = normalize(distributed.to_device_async(found.images, device), probe.pixels)
            for image, (height, width) in zip(images, found.sides.tolist(), strict=True):
                image[:, height:], image[:, :, width:] = 0, 0
            targets = distributed.to_device_async(found.targets, device)
            yield ProbeBatch(images, targets, found.epochs, found.ids)

    def check_ranks(self, ranks: int) -> None:
        """Refuse a number of processes that does not divide the batch."""
        if self.batch_size % ranks:
            raise UserError(f"batch_size {self.batch_size} is not a multiple of {ranks} ranks")


class PatchHead(HeadGroup):
    """BatchNorm and linear layer with AdamW.

    Attributes:
        gain, shift: of the BatchNorm, [D]; weight: [C, D]; offset: [C].
        mean, var: running statistics, [D].
    """

    NAMES = ("gain", "shift", "weight", "offset")
    SAVED = (*NAMES, "mean", "var")

    gain: Tensor
    shift: Tensor
    weight: Tensor
    offset: Tensor

    def __init__(
        self, width: int, classes: int, settings: PatchLinear, device: torch.device
    ) -> None:
        """Set the initial values."""
        import torch

        from maect.models.vit import seeded

        with seeded(settings.seed):
            weight = torch.nn.init.normal_(torch.empty(classes, width), std=STD)
        tensors = {
            "gain": torch.ones(width),
            "shift": torch.zeros(width),
            "weight": weight,
            "offset": torch.zeros(classes),
        }
        for name, value in tensors.items():
            setattr(self, name, value.to(device).requires_grad_())
        self.mean, self.var = torch.zeros(width, device=device), torch.ones(width, device=device)
        parameters = [getattr(self, name) for name in self.NAMES]
        self.optimizer = torch.optim.AdamW(
            [{"params": parameters, "peak": settings.learning_rate}],
            betas=BETAS,
            weight_decay=settings.weight_decay,
        )

    def update(self, x: Tensor, targets: Tensor, lr_multiplier: float) -> Tensor:
        """Update once on all ranks' crops; return this rank's part of the loss before, [1].

        Args:
            x: this rank's tokens after dropout, [b, N, D].
            targets: places of classes, or `IGNORED`, int64 [b, S, S].
        """
        import torch
        from torch.nn import functional as F

        from maect.core import distributed
        from maect.evaluate.segments import IGNORED

        counts = torch.tensor([x[..., 0].numel(), targets.numel()], device=x.device).double()
        tokens, pixels = distributed.sum_over_ranks(counts).tolist()
        if not tokens:
            return torch.zeros(1, device=x.device)
        mean = distributed.sum_over_ranks(x.sum(dim=(0, 1))) / tokens
        var = distributed.sum_over_ranks((x - mean).square().sum(dim=(0, 1))) / tokens
        self.mean.lerp_(mean, BN_MOMENTUM)
        self.var.lerp_(var * tokens / max(tokens - 1, 1), BN_MOMENTUM)
        outputs = self._outputs((x - mean) * torch.rsqrt(var + BN_EPS), targets.shape[-1])
        loss = F.cross_entropy(outputs, targets, ignore_index=IGNORED, reduction="sum") / pixels
        loss.backward()
        for name in self.NAMES:
            distributed.sum_over_ranks(getattr(self, name).grad)
        self.descend(lr_multiplier)
        return loss.detach()[None]

    def outputs(self, tokens: Tensor, size: int) -> Tensor:
        """Compute outputs [b, C, size, size] of tokens [b, N, D] by the running statistics."""
        import torch

        with torch.no_grad():
            return self._outputs((tokens - self.mean) * torch.rsqrt(self.var + BN_EPS), size)

    def _outputs(self, normal: Tensor, size: int) -> Tensor:
        from torch.nn import functional as F

        grid = math.isqrt(normal.shape[1])
        logits = F.linear(normal * self.gain + self.shift, self.weight, self.offset)
        image = logits.transpose(1, 2).unflatten(2, (grid, grid))
        return F.interpolate(image, size=(size, size), mode="bilinear", align_corners=False)


class Segmenter(Probe):
    """A head, and with `held_out` one that learns from the other images alone."""

    groups: dict[str, PatchHead]

    def __init__(self, task: ProbeTask, settings: PatchLinear) -> None:
        import numpy as np

        from maect.evaluate.segments import IGNORED

        super().__init__(task, settings.held_out, settings.seed)
        self.settings = settings
        self.pixels = task.encoding.settings.pixels
        masks = {split: open_index(task.job.path(f"{split}_masks")) for split in ("train", "test")}
        self.forms = tuple(index.digest for index in masks.values())
        self.train = MaskSplit(task.train, masks["train"])
        self.test = MaskSplit(task.test, masks["test"])
        numbers = self.train.numbers(task.context.cpus)
        self.classes = np.array([n for n in numbers if n not in settings.ignore], np.uint8)
        if len(self.classes) < 2:
            raise UserError(f"{masks['train'].directory}: masks of one class only")
        self.places = np.full(CLASSES, IGNORED, np.uint8)
        self.places[self.classes] = np.arange(len(self.classes))
        width = task.encoding.settings.width
        device = task.encoding.device
        self.groups = {
            f"head{part}": PatchHead(width, len(self.classes), settings, device)
            for part in self.scored
        }

    def read(self, images: Tensor) -> Tensor:
        """Return the patch tokens behind the final norm, float32 [b, N, D]."""
        return self.task.encoding.output(images, "last").patch_tokens().float()

    def step(self, features: Tensor, batch: ProbeBatch, lr_multiplier: float) -> Tensor:
        """Drop channels and update all heads; return the loss of each, [1] or [2]."""
        import torch

        from maect.core import distributed
        from maect.data import random

        dropout, seed = self.settings.dropout, self.settings.seed
        width = features.shape[2]
        u = random.uniform(seed, batch.epochs, batch.ids, 0, random.DROP_CHANNELS, width)
        kept = torch.from_numpy((u >= dropout) / (1 - dropout)).float()
        x = features * kept[:, None].to(features.device)
        y = batch.targets.long()
        losses = [self.groups["head"].update(x, y, lr_multiplier)]
        if HELD_OUT in self.scored:
            others = torch.from_numpy(~self.is_held_out(batch.ids)).to(x.device)
            twin = self.groups[f"head{HELD_OUT}"]
            losses.append(twin.update(x[others], y[others], lr_multiplier))
        return distributed.sum_over_ranks(torch.cat(losses))

    def score(self) -> None:
        """Segment the test images, and by the twin the held-out ones."""
        import numpy as np

        mean, each, accuracy = self._iou("head", self.test, range(self.task.test.n))
        details = self.record.setdefault("details", {})
        details["last"] = {"classes": each, "accuracy": accuracy}
        if self.add_scores("miou", mean):
            details["best"] = details["last"]
            self.store_best(self.groups["head"], PatchHead.SAVED)
        if HELD_OUT in self.scored:
            held = np.flatnonzero(self.is_held_out(self.task.train.rows[:, ID]))
            found = self._iou(f"head{HELD_OUT}", self.train, held.tolist())
            self.add_scores("held_out", found[0])

    def _iou(
        self, group: str, split: MaskSplit, rows: range | list[int]
    ) -> tuple[float, dict[str, float], float]:
        """Return a head's mIoU, IoU of each class and accuracy on images, which the ranks share."""
        import torch

        from maect.core import distributed

        rank, ranks = distributed.rank_and_size()
        table = torch.zeros(CLASSES * CLASSES, dtype=torch.int64)
        for row in rows[rank::ranks]:
            truth = split.read(row)
            predicted = self.segmented(self.groups[group], split, row, truth.shape)
            table += torch.from_numpy(confusion_counts(truth, predicted, self.settings.ignore))
        return iou_from_counts(distributed.sum_over_ranks(table).numpy(), self.settings.ignore)

    def segmented(
        self, head: PatchHead, split: MaskSplit, row: int, shape: tuple[int, ...]
    ) -> NDArray[np.uint8]:
        """Predict the number of each pixel of an image, uint8 [height, width]."""
        import numpy as np
        import torch
        from torch.nn import functional as F

        from maect.data.transforms import normalize
        from maect.evaluate.segments import picture, resized, windows

        size = self.settings.size
        device = self.task.encoding.device
        pixels = np.array(resized(picture(split, row), size)).transpose(2, 0, 1)
        image = torch.from_numpy(pixels).to(device)
        height, width = image.shape[1:]
        corners = windows(height, width, size, self.settings.stride)
        canvas = torch.zeros(len(self.classes), *image.shape[1:], device=device)
        count = torch.zeros(image.shape[1:], device=device)
        for start in range(0, len(corners), _AT_ONCE):
            some = corners[start : start + _AT_ONCE]
            parts = torch.stack([image[:, y : y + size, x : x + size] for y, x in some])
            tokens = self.task.check_finite(self.read(normalize(parts, self.pixels)))
            for output, (y, x) in zip(head.outputs(tokens, size), some, strict=True):
                canvas[:, y : y + size, x : x + size] += output
                count[y : y + size, x : x + size] += 1
        whole = F.interpolate((canvas / count)[None], size=shape, mode="bilinear")[0]
        return self.classes[whole.argmax(dim=0).cpu().numpy()]

    def metrics(self) -> dict[str, Any]:
        """Return mIoU of the best score, the last and all."""
        name = PatchLinear.name
        history = self.record["miou"]
        details = self.record["details"]
        chosen: dict[str, Any] = {}
        if HELD_OUT in self.scored:
            scores = self.record["held_out"]
            best = scores.index(max(scores))
            chosen = {f"{name}_held_out": history[best], "held_out": scores}
        return {
            name: max(history),
            f"{name}_last": history[-1],
            f"{name}_accuracy": details["best"]["accuracy"],
            f"{name}_classes": details["best"]["classes"],
            "by_period": history,
            **chosen,
        }

    def metadata(self) -> dict[str, str]:
        """Return the encoder's checksum and the numbers of the classes."""
        numbers = " ".join(map(str, self.classes.tolist()))
        return {"encoder_sha256": self.task.sha256, "classes": numbers}
