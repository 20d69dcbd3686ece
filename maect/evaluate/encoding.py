"""A frozen encoder as a function from images to feature vectors."""

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from maect.data.augment import normalize
from maect.errors import UserError
from maect.models.encoder import pool
from maect.models.weights import load_encoder_weights

Precision = Literal["fp32", "bf16"]


class Encoding:
    """Encoder, pooling and precision.

    Attributes:
        settings: the encoder's shape.
        pooling: what its file says: "cls" or "mean" (of the patch tokens, after the final norm).
        width: features per image.
    """

    def __init__(
        self,
        path: Path,
        device: torch.device,
        precision: Precision = "fp32",
        *,
        blocks: int = 1,
        cls_and_mean: bool = False,
    ) -> None:
        """Load an encoder.

        Args:
            path: `encoder.safetensors`.
            device: where to run it.
            precision: bf16 runs under autocast; the features are float32 in any case.
            blocks: concatenate what the last so many blocks give (paper, appendix on
                representations for linear probing): the raw output of the earlier ones, the
                final norm's output for the last.
            cls_and_mean: concatenate [CLS] and mean, instead of one of them.

        Raises:
            UserError: no such encoder, or more blocks than it has.
        """
        if not path.exists():
            raise UserError(f"{path}: no such encoder; train or import the run first")
        self.encoder, self.settings, self.pooling = load_encoder_weights(path)
        if not 1 <= blocks <= self.settings.depth:
            raise UserError(f"{path}: {blocks} blocks asked for, it has {self.settings.depth}")
        self.encoder.to(device).requires_grad_(False).eval()
        self.device, self.precision, self.cls_and_mean = device, precision, cls_and_mean
        self.width = self.settings.width * blocks * (2 if cls_and_mean else 1)
        self._earlier: list[Tensor] = []
        depth = self.settings.depth
        for block in list(self.encoder.blocks)[depth - blocks : depth - 1]:
            block.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        self._earlier.append(output)

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
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            last = self.encoder(images)
        parts = []
        for tokens in [*self._earlier, last]:
            tokens = tokens.float()
            if self.cls_and_mean:
                parts += [pool(tokens, "cls"), pool(tokens, "mean")]
            else:
                parts.append(pool(tokens, self.pooling))
        self._earlier.clear()
        return torch.cat(parts, dim=1)
