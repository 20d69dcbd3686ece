"""A frozen encoder as a function from images to feature vectors."""

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from maect.core.errors import UserError
from maect.data.transforms import normalize
from maect.models.vit import Precision, mixed_precision
from maect.models.weights import load_encoder_weights


class Encoding:
    """Encoder, pooling and precision.

    Attributes:
        settings: the encoder's shape.
        pooling: what its file says: "cls" or "mean" (of the patch tokens, after the final norm) or
            "fc_norm" (the norm after the mean).
        blocks: whose features are given: the last so many, earliest first.
        width: features per image.
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
    ) -> None:
        """Load an encoder.

        Args:
            path: `encoder.safetensors`.
            device: where to run it.
            precision: bf16 runs under autocast; the features are float32 in any case.
            blocks: concatenate what the last so many blocks give, or all if there are fewer: the
                raw output of the earlier ones, the final norm's output for the last.
            pooling: instead of the one that its file says.
            other_pooling: append the last block's other pooling (of an encoder with [CLS] token).

        Raises:
            UserError: no such encoder, or no [CLS] token to pool.
        """
        if not path.exists():
            raise UserError(f"{path}: no such encoder; train or import the run first")
        self.encoder, self.settings, own = load_encoder_weights(path)
        self.pooling = pooling or own
        if self.pooling == "cls" and not self.settings.class_token:
            raise UserError(f"{path}: has no [CLS] token, which this evaluation reads")
        self.encoder.to(device).requires_grad_(False).eval()
        self.device, self.precision = device, precision
        depth = self.settings.depth
        self.blocks = min(blocks, depth)
        self.other: Literal["cls", "mean"] | None = None
        if other_pooling and self.settings.class_token:
            self.other = "mean" if self.pooling == "cls" else "cls"
        self.width = self.settings.width * (self.blocks + (self.other is not None))
        self._earlier: list[Tensor] = []
        for block in list(self.encoder.blocks)[depth - self.blocks : depth - 1]:
            block.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        # Pooled at once: the tokens of all blocks of a batch would fill the memory.
        self._earlier.append(self._pool(output))

    def _pool(self, tokens: Tensor) -> Tensor:
        tokens = tokens if self.pooling == "cls" else tokens.float()  # a mean in full precision
        return self.encoder.pool(tokens, self.pooling).float()

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        """Features of images.

        Args:
            images: uint8 [b, 3, S, S], or float32, normalized.

        Returns:
            float32 [b, width] on the encoder's device.
        """
        images = images.to(self.device, non_blocking=True)
        if images.dtype == torch.uint8:
            images = normalize(images)
        self._earlier.clear()
        with mixed_precision(self.device, self.precision):
            last = self.encoder(images)
        parts = [*self._earlier, self._pool(last)]
        if self.other is not None:
            parts.append(self.encoder.pool(last.float(), self.other))
        self._earlier.clear()
        return torch.cat(parts, dim=1)

    @torch.no_grad()
    def tokens(self, images: Tensor) -> Tensor:
        """Patch tokens that the last block gives, before the final norm.

        Args:
            images: uint8 [b, 3, S, S], or float32, normalized.

        Returns:
            [b, patches, width] on the encoder's device, in the precision that the blocks run in.
        """
        images = images.to(self.device, non_blocking=True)
        if images.dtype == torch.uint8:
            images = normalize(images)
        last: list[Tensor] = []
        block = self.encoder.blocks[-1]
        hook = block.register_forward_hook(lambda module, inputs, output: last.append(output))
        with hook, mixed_precision(self.device, self.precision):
            self.encoder(images)
        return last[0][:, self.settings.prefix_tokens :]


def finite(features: Tensor, run: Path) -> None:
    """Refuse a broken encoder.

    Raises:
        UserError: a feature that is not finite.
    """
    if not torch.isfinite(features).all():
        raise UserError(
            f"{run}: the features are not finite; the encoder diverged or its weights are damaged"
        )
