"""A linear head on patch tokens, for segmentation, in the settings of DINOv3.

A BatchNorm and one linear layer on the tokens of the last block behind the final norm, upsampled to
the pixels. Test images are read in overlapping windows, whose outputs are averaged.
docs/results/paper/probes_beside_their_authors.csv compares each setting with DINOv3's code
(facebookresearch/dinov3, `dinov3/eval/segmentation`): Pillow resizes images bilinearly, and masks
take the number at the corner of each cell. What is drawn depends on (seed, epoch, sample) alone.
"""

import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from maect.core import distributed
from maect.core.context import Context
from maect.core.errors import UserError
from maect.data import random
from maect.data.convert import ready_pixels
from maect.data.decode import UnreadableError, render_whole
from maect.data.index import HEIGHT, ID, WIDTH, open_index
from maect.data.loader import results_in_order
from maect.data.order import Order
from maect.data.transforms import hue, normalize
from maect.evaluate.base import EvaluationJob
from maect.evaluate.dense import CLASSES, MaskSplit, confusion_counts, iou_from_counts
from maect.evaluate.features import Encoding
from maect.evaluate.probe_training import (
    HELD_OUT,
    HeadGroup,
    Probe,
    ProbeBatch,
    ProbeTask,
    train_probe,
)
from maect.evaluate.protocols.probes import PatchLinear, UpdateSchedule
from maect.models.vit import seeded

IGNORED = 255
"""Target of a pixel that does not count."""
TRIES = 11
LARGEST = 0.75  # share of a crop's pixels that one class may have, if another crop can be found
BRIGHTNESS, CONTRAST, SATURATION, HUE = 32.0, (0.5, 1.5), (0.5, 1.5), (-0.5, 0.5)
_DRAWS = 1 + 2 * TRIES + 1 + 1 + 8
_LUMA = np.array([0.2989, 0.587, 0.114], np.float32)

Pixels = NDArray[np.uint8]
BN_EPS, BN_MOMENTUM, STD, BETAS = 1e-5, 0.1, 0.01, (0.9, 0.999)
START = 1e-6  # of the peak rate, in the first updates
_AT_ONCE = 16


def evaluate(settings: PatchLinear, context: Context, job: EvaluationJob) -> dict[str, Any]:
    """mIoU in percent: `patch_linear` (best), `patch_linear_last`, and after each period.

    The best head is kept. docs/reference/dense.md lists the metrics.
    """
    encoding = Encoding(job.encoder, distributed.device_of(context), settings.precision)
    encoder = encoding.settings
    beyond = settings.size % encoder.patch_size
    if beyond:
        raise UserError(
            f"{job.out.stem}: size {settings.size} is no multiple of the patches' "
            f"{encoder.patch_size} pixels; set size={settings.size - beyond}"
        )
    if encoder.timm is not None and encoder.image_size != settings.size:
        raise UserError(
            f"{job.run}: {encoder.timm} was imported for {encoder.image_size} pixels; "
            f"import it with --image-size {settings.size}, or set size={encoder.image_size}"
        )
    return train_probe(settings, context, job, encoding, Segmenter)


@dataclass(frozen=True)
class Crops:
    """Crops of a batch's images, before normalization.

    Attributes:
        images: uint8 [b, 3, S, S]; beyond `sides` they are 0.
        targets: place of each pixel's class, or `IGNORED`; uint8 [b, S, S].
        sides: height and width of what comes from the image, int64 [b, 2].
    """

    images: Tensor
    targets: Tensor
    sides: NDArray[np.int64]
    epochs: NDArray[np.int64]
    ids: NDArray[np.int64]


def picture(split: MaskSplit, row: int) -> Image.Image:
    """Read an image of a split at its own size; raise UserError if it cannot be decoded."""
    index = split.images
    (height, width) = split.images.rows[row][[HEIGHT, WIDTH]].tolist()
    try:
        data = index.read(row)
        pixels = ready_pixels(data, True, 3) if index.turned else render_whole(data, width, height)
    except UnreadableError as error:
        raise index.undecodable(row, error) from None
    return Image.fromarray(pixels, "RGB")


def resized(image: Image.Image, short: int) -> Image.Image:
    """Resize an image, bilinear, so that its shorter side has `short` pixels."""
    width, height = image.size
    if height > width:
        size = short, int(short * height / width + 0.5)
    else:
        size = int(short * width / height + 0.5), short
    return image.resize(size, Image.Resampling.BILINEAR)


def resized_mask(mask: Pixels, size: tuple[int, int]) -> Pixels:
    """Resize a mask [height, width] to (width, height): the number at each cell's corner."""
    height, width = mask.shape
    rows = np.arange(size[1]) * height // size[1]
    columns = np.arange(size[0]) * width // size[0]
    return mask[rows[:, None], columns]


def crop(
    image: Image.Image, mask: Pixels, draws: NDArray[np.float64], settings: PatchLinear
) -> tuple[Pixels, Pixels]:
    """Resize, by a ratio that is uniform between two, crop, flip and recolour one image.

    Args:
        mask: targets of its pixels, [height, width].
        draws: uniform numbers, [_DRAWS].

    Returns:
        uint8 [h, w, 3] and [h, w], at most `settings.size` each.
    """
    size = settings.size
    image = resized(image, int(size * _between(settings.ratios, draws[0])))
    mask = resized_mask(mask, image.size)
    corners = draws[1 : 1 + 2 * TRIES].reshape(TRIES, 2)
    free = np.maximum(np.array(mask.shape) - size, 0)
    for number, (top, left) in enumerate(np.floor(corners * (free + 1)).astype(int).tolist()):
        part = mask[top : top + size, left : left + size]
        counts = np.bincount(part.ravel(), minlength=256)[:IGNORED]
        several = (counts > 0).sum() > 1
        if (several and counts.max() / counts.sum() < LARGEST) or number == TRIES - 1:
            break
    pixels = np.asarray(image)[top : top + size, left : left + size]
    after = draws[1 + 2 * TRIES :]
    if after[0] < settings.flip:
        pixels, part = pixels[:, ::-1], part[:, ::-1]
    return distorted(pixels, after[1:]), part


def distorted(pixels: Pixels, draws: NDArray[np.float64]) -> Pixels:
    """Change brightness, contrast, saturation and hue, each of every second image.

    Args:
        pixels: uint8 [h, w, 3].
        draws: whether contrast comes first, then whether and how much of each, uniform, [9].
    """
    early = draws[0] >= 0.5
    changes = draws[1:].reshape(4, 2)
    brightness, contrast, saturation, shift = (
        (float(amount) if chosen >= 0.5 else None) for chosen, amount in changes
    )
    if brightness is not None:
        pixels = _scaled(pixels, 1.0, BRIGHTNESS * (2 * brightness - 1))
    if contrast is not None and early:
        pixels = _scaled(pixels, _between(CONTRAST, contrast), 0.0)
    if saturation is not None:
        factor = np.float32(_between(SATURATION, saturation))
        grey = (pixels.astype(np.float32) @ _LUMA).astype(np.uint8)[:, :, None]
        mixed = factor * pixels.astype(np.float32) + (1 - factor) * grey.astype(np.float32)
        pixels = np.clip(mixed, 0, 255).astype(np.uint8)
    if shift is not None:
        x = torch.from_numpy(pixels.transpose(2, 0, 1)[None].astype(np.float32)) / 255
        turned = hue(x, torch.tensor(_between(HUE, shift)))
        pixels = (turned[0] * 255.999).to(torch.uint8).permute(1, 2, 0).numpy()
    if contrast is not None and not early:
        pixels = _scaled(pixels, _between(CONTRAST, contrast), 0.0)
    return pixels


def _between(ends: tuple[float, float], u: float) -> float:
    return ends[0] + (ends[1] - ends[0]) * u


def _scaled(pixels: Pixels, factor: float, more: float) -> Pixels:
    scaled = pixels.astype(np.float32) * np.float32(factor) + np.float32(more)
    return np.clip(scaled, 0, 255).astype(np.uint8)


def crops(
    split: MaskSplit,
    places: Pixels,
    settings: PatchLinear,
    context: Context,
    start: int,
    steps: int,
) -> Iterator[Crops]:
    """Yield this rank's part of batches `start` to `start + steps - 1`, a few decoded ahead.

    Args:
        places: of each number in a mask its class's place, or `IGNORED`; [256].
    """
    seed, size, batch = settings.seed, settings.size, settings.batch_size
    order = Order(split.images.n, seed)
    share = batch // context.world_size
    pool = ThreadPoolExecutor(max(1, context.cpus), thread_name_prefix="segments")

    def fill(out: Crops, row: int, number: int, draws: NDArray[np.float64]) -> None:
        mask = places[split.read(row)]
        pixels, part = crop(picture(split, row), mask, draws, settings)
        height, width = part.shape
        out.images[number].numpy()[:, :height, :width] = pixels.transpose(2, 0, 1)
        out.targets[number].numpy()[:height, :width] = part
        out.sides[number] = height, width

    def submitted(step: int) -> tuple[Crops, list[Future[None]]]:
        rows, epochs = order.take(step * batch + context.rank * share, share)
        ids = np.asarray(split.images.rows[rows][:, ID])
        draws = random.uniform(seed, epochs, ids, 0, random.SEGMENT, _DRAWS)
        out = Crops(
            torch.zeros(share, 3, size, size, dtype=torch.uint8),
            torch.full((share, size, size), IGNORED, dtype=torch.uint8),
            np.zeros((share, 2), np.int64),
            epochs,
            ids,
        )
        work = zip(rows.tolist(), range(share), draws, strict=True)
        return out, [pool.submit(fill, out, *each) for each in work]

    yield from results_in_order(map(submitted, range(start, start + steps)), pool)


def windows(height: int, width: int, size: int, stride: int) -> list[tuple[int, int]]:
    """Return upper left corners of windows that cover an image; the last ones end at its edges."""

    def starts(length: int) -> list[int]:
        count = max(length - size + stride - 1, 0) // stride + 1
        return [max(min(number * stride + size, length) - size, 0) for number in range(count)]

    return [(top, left) for top in starts(height) for left in starts(width)]


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
        with torch.no_grad():
            return self._outputs((tokens - self.mean) * torch.rsqrt(self.var + BN_EPS), size)

    def _outputs(self, normal: Tensor, size: int) -> Tensor:
        grid = math.isqrt(normal.shape[1])
        logits = F.linear(normal * self.gain + self.shift, self.weight, self.offset)
        image = logits.transpose(1, 2).unflatten(2, (grid, grid))
        return F.interpolate(image, size=(size, size), mode="bilinear", align_corners=False)


class Segmenter(Probe):
    """A head, and with `held_out` one that learns from the other images alone."""

    settings: PatchLinear
    groups: dict[str, PatchHead]

    def __init__(self, task: ProbeTask, settings: PatchLinear) -> None:
        super().__init__(task, settings, settings.held_out)
        for index in (task.train, task.test):
            index.check_channels(3)
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

    def batches(self, start: int, steps: int) -> Iterator[ProbeBatch]:
        """Yield crops [b, 3, S, S] and the targets of their pixels, int64 [b, S, S]."""
        device = self.task.encoding.device
        made = crops(self.train, self.places, self.settings, self.task.context, start, steps)
        for found in made:
            images = normalize(distributed.to_device_async(found.images, device), self.pixels)
            for image, (height, width) in zip(images, found.sides.tolist(), strict=True):
                image[:, height:], image[:, :, width:] = 0, 0
            targets = distributed.to_device_async(found.targets, device)
            yield ProbeBatch(images, targets, found.epochs, found.ids)

    @staticmethod
    def rate(step: int, schedule: UpdateSchedule) -> float:
        """Return the fraction of the peak rate: the first two updates have the same."""
        number = max(0, step - 1)
        total = schedule.steps
        if number < schedule.warmup:
            rising = 1 - (1 - number / schedule.warmup) * (1 - START)
            return rising * (1 - number / total)
        return (1 + math.cos(math.pi * (number + 1) / total)) / 2

    def read(self, images: Tensor) -> Tensor:
        """Return the patch tokens behind the final norm, float32 [b, N, D]."""
        return self.task.encoding.output(images, "last").patch_tokens().float()

    def step(self, features: Tensor, batch: ProbeBatch, lr_multiplier: float) -> Tensor:
        """Drop channels and update all heads; return the loss of each, [1] or [2]."""
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
