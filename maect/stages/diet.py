"""DIET: the encoder learns to tell every image from every other one, by one linear layer.

The classes are the numbers of the training images (Ibrahim et al. 2024, "Occam's razor for
self-supervised learning"); continued on few images it is DIET-CP (Rodas et al. 2025, arXiv
2509.06990): cross-entropy with label smoothing, the last blocks alone, no other part.
"""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from maect.core.errors import UserError
from maect.recipes import Encoder
from maect.recipes.cost import FLOAT, Activations, Cost
from maect.recipes.settings import PLAIN, Computing
from maect.stages.base import UpperLayers, WithoutLabels

if TYPE_CHECKING:  # these import torch
    from maect.data.index import Index
    from maect.train.objective import Objective

LAYER = "numbers"
"""Name of the linear layer in the objective."""


class Diet(UpperLayers, WithoutLabels):
    """Classification of each view by the number of its image; only the encoder is exported."""

    name: ClassVar[str] = "diet"
    title: ClassVar[str] = "DIET of {run}"
    starts_from: ClassVar[tuple[str, ...]] = ("pretrain", "import", "tune", "refine")

    augmentation: Literal["min", "aug"]
    mask_ratio: float = Field(default=0.0, ge=0, le=0)
    warmup_fraction: float = Field(ge=0, lt=1)
    images: int = Field(gt=1)
    """Rows of the linear layer: as many as the training split has images, or more."""
    layer_lr: float = Field(gt=0)
    """Base learning rate of the linear layer, which starts at random."""
    label_smoothing: float = Field(ge=0, lt=1)

    @property
    def peak_lr(self) -> float:
        """Peak learning rate of the uppermost layers of the encoder."""
        return self.scaled_lr(self.base_lr)

    @property
    def warmup(self) -> float:
        """Fraction of the updates in which the learning rate rises."""
        return self.warmup_fraction

    def rates(self, name: str, depth: int) -> tuple[float, float]:
        """Return the linear layer's own learning rate for it, else `encoder_rates`."""
        if name.startswith(f"{LAYER}."):
            return self.scaled_lr(self.layer_lr), self.weight_decay
        return super().rates(name, depth)

    def costs(self, encoder: Encoder, computing: Computing = PLAIN) -> dict[str, Cost]:
        """Return the cost of the encoder, then of the linear layer."""
        weights = encoder.width * self.images
        # Logits and their gradient in float32.
        kept = Activations(self.views * FLOAT * self.images, 0, self.views * FLOAT * self.images)
        layer = Cost(weights, weights, self.views * 6 * weights, (kept,))
        return {**super().costs(encoder, computing), LAYER: layer}

    def training_images(self, index: "Index") -> "Index":
        """Return all images of a split; UserError if there are more than the layer has rows."""
        from maect.data.index import ID

        images = super().training_images(index)
        if (highest := int(images.rows[:, ID].max())) >= self.images:
            raise UserError(
                f"{index.directory}: has images numbered to {highest}, and the layer {self.images} "
                f"rows: set images to {highest + 1}"
            )
        return images

    def objective(self, encoder: Encoder, seed: int) -> "Objective":
        """Return encoder and linear layer, with random weights."""
        import torch
        from torch import Tensor, nn
        from torch.nn import functional as F

        from maect.models.vit import VisionEncoder, build_encoder, seeded
        from maect.stages.classifier import HEAD_STD
        from maect.stages.objectives import Views, ViewsObjective, flat
        from maect.train.passes import Passes

        stage = self

        class DietObjective(ViewsObjective):
            """Cross-entropy of the images' numbers, by one linear layer on the pooled tokens."""

            passes: Passes

            def __init__(self, vit: VisionEncoder, layer: nn.Linear) -> None:
                super().__init__(stage, vit, seed)
                self.numbers = layer
                self.passes = Passes(self.compute, [vit, layer])

            def compute(self, images: Tensor) -> tuple[Tensor, ...]:
                """Compute the logits of images [b, C, S, S], [b, numbers], in full precision."""
                layer = self.numbers.weight
                with self.autocast(images.device):
                    features = self.encoder.pool(self.encoder(images).tokens, self.head_pooling)
                with torch.autocast(images.device.type, enabled=False):
                    return (F.linear(features.to(layer.dtype), layer),)

            def inputs_of_passes(self, views: Views) -> list[tuple[Tensor, ...]]:
                """Return all views as one batch."""
                return [(flat(views.images[0]),)]

            def forward(self, views: Views) -> tuple[Tensor, dict[str, Tensor]]:
                """Return the mean cross-entropy over all views, [], and the part that is right."""
                ((images,),) = self.inputs_of_passes(views)
                (logits,) = self.passes(images)
                numbers = views.ids.repeat(len(views.images[0]))
                loss = F.cross_entropy(logits, numbers, label_smoothing=stage.label_smoothing)
                right = (logits.detach().argmax(dim=1) == numbers).float().mean()
                return loss, {"images_told_apart": right}

        with seeded(seed):
            vit = build_encoder(encoder)
            layer = nn.Linear(encoder.width, self.images, bias=False)
            nn.init.trunc_normal_(layer.weight, std=HEAD_STD)
        vit.freeze(self.frozen_blocks)
        return DietObjective(vit, layer)
