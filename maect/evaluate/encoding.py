"""A frozen encoder: its features and tokens of images, as all evaluations read them."""

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from maect.core import distributed
from maect.core.errors import UserError
from maect.data.transforms import normalize
from maect.models.precision import Precision, mixed_precision
from maect.models.vit import EncoderOutput
from maect.models.weights import load_any_encoder
from maect.records import need_encoder
from maect.train.scores import BATCH

ON_CPU, CACHED = 32, 80_000_000
"""Images of a batch on a CPU at least, and bytes of what its widest layers give."""


class Encoding:
    """Encoder, pooling and precision.

    Attributes:
        pooling: what its file says: "cls" or "mean" (of the patch tokens, after the final norm) or
            "fc_norm" (the norm after the mean); or "head", as timm's own head pools.
        blocks: whose features are given: the number of last blocks, earliest first.
    """

    def __init__(
        self,
        path: Path,
        device: torch.device,
        precision: Precision = "fp32",
        *,
        blocks: int = 1,
        pooling: Literal["cls", "mean"] | None = None,
        other_pooling: bool = False,
        norm: bool = True,
    ) -> None:
        """Load an encoder.

        Args:
            precision: bf16 runs under autocast; the features are float32 in any case.
            blocks: concatenate what this many last blocks give, or all if there are fewer: the
                raw output of the earlier ones; only the last is normed.
            pooling: instead of the one that its file says.
            other_pooling: append the last block's other pooling (of an encoder with [CLS] token).
            norm: whether the final norm is applied to the last block.

        Raises:
            UserError: no such encoder, or no [CLS] token to pool.
        """
        need_encoder(path)
        self.encoder, self.settings, own = load_any_encoder(path)
        self.pooling = pooling or own
        if self.pooling == "cls" and not self.settings.class_token:
            raise UserError(f"{path}: has no [CLS] token, which this evaluation reads")
        self.encoder.to(device).requires_grad_(False).eval()
        self.device, self.precision, self.norm = device, precision, norm
        depth = self.settings.depth
        self.blocks = min(blocks, depth)
        self._earlier = range(depth - self.blocks, depth - 1)
        self.other: Literal["cls", "mean"] | None = None
        if other_pooling and self.settings.class_token:
            self.other = "mean" if self.pooling in ("cls", "mean_cls") else "cls"
        outputs = self.blocks if self.other is None else self.blocks + 1
        self.width = self.settings.width * outputs

    @property
    def batch_size(self) -> int:
        """Images at once that suit the device: on a CPU, larger ones leave its caches."""
        if self.device.type != "cpu":
            return BATCH
        shape = self.settings
        widest = 4 * 4 * (1 + shape.patches) * shape.width  # bytes of an image's hidden layer
        return max(ON_CPU, min(BATCH, CACHED // widest))

    def __call__(self, images: Tensor) -> Tensor:
        """Features of images, float32 [b, width] on the encoder's device.

        Args:
            images: uint8 [b, C, S, S], or float32, normalized.
        """
        with torch.inference_mode():
            return self._features(self._ready(images))

    def _features(self, images: Tensor) -> Tensor:
        # The norm after the mean is that of the last block, as the final norm would be.
        mean = "mean" if self.pooling in ("fc_norm", "head") else self.pooling
        norm: Literal["last", "none"] = "last" if self.norm else "none"
        with mixed_precision(self.device, self.precision):
            features = self.encoder(images, blocks=self._earlier, norm=norm, pooling=mean)
        last = features.tokens.float()  # a mean in full precision
        parts = [features.blocks[number].float() for number in self._earlier]
        parts.append(self.encoder.pool(last, self.pooling if self.norm else mean))
        if self.other is not None:
            parts.append(self.encoder.pool(last, self.other))
        return torch.cat(parts, dim=1)

    def output(self, images: Tensor, norm: Literal["last", "none"] = "none") -> EncoderOutput:
        """Return all tokens of the last block, before the final norm or after it.

        Args:
            images: uint8 [b, C, S, S], or float32, normalized.
            norm: "last" applies the final norm.

        Returns:
            On the encoder's device, in the precision that the blocks run in.
        """
        with torch.no_grad(), mixed_precision(self.device, self.precision):
            features: EncoderOutput = self.encoder(self._ready(images), norm=norm)
        return features

    def _ready(self, images: Tensor) -> Tensor:
        images = distributed.to_device_async(images, self.device)
        if images.dtype == torch.uint8:
            images = normalize(images, self.settings.pixels)
        return images


class LastBlocks(Encoding):
    """[CLS] and patch mean of the encoder's output, and of its last raw blocks, side by side.

    Columns: [CLS] and mean of the output; [CLS] of each block, earliest first; their means. Of an
    encoder without [CLS] token the means alone.
    """

    def __init__(self, path: Path, device: torch.device, precision: Precision, blocks: int) -> None:
        """Load an encoder, as `Encoding`, to read its last `blocks` blocks, or all of fewer."""
        super().__init__(path, device, precision, blocks=blocks)
        self.poolings: tuple[Literal["cls", "mean"], ...] = ("cls", "mean")
        if not self.settings.class_token:
            self.poolings = ("mean",)
        self.width = self.settings.width * (1 + self.blocks) * len(self.poolings)

    def _features(self, images: Tensor) -> Tensor:
        depth = self.settings.depth
        last = range(depth - self.blocks, depth)
        with mixed_precision(self.device, self.precision):
            features = self.encoder(images, blocks=last)
        sources = ([features.tokens], [features.blocks[number] for number in last])
        parts = [
            self.encoder.pool(tokens.float(), pooling)
            for source in sources
            for pooling in self.poolings
            for tokens in source
        ]
        return torch.cat(parts, dim=1)


def check_finite(features: Tensor, run: Path) -> None:
    """Refuse a broken encoder, by a UserError: a feature that is not finite."""
    if not torch.isfinite(features).all():
        raise UserError(
            f"{run}: the features are not finite; the encoder diverged or its weights are damaged"
        )
