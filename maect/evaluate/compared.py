"""What compared methods pass through an encoder in a training step, and that step on its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from maect.models.vit import VisionEncoder, build_encoder, mixed_precision
from maect.recipes import Encoder, visible_patches


@dataclass(frozen=True)
class Views:
    """A method's passes through the encoder, for each image and step."""

    learning: int
    """Global views that are learnt from."""
    local: int
    """Small views, 96 of 224 pixels, that are learnt from."""
    teacher: int
    """Global views that a momentum encoder sees, whole and without gradients."""
    mask_ratio: float = 0.0
    """Share of patches that are left out of the views learnt from."""
    epochs: Mapping[str, int] = field(default_factory=dict)
    """How long it was trained, by encoder size."""


# Views from the methods' code (their default arguments and commands). Epochs of MoCo v3 (B) and MSN
# from the names of their checkpoints; those of DINO, iBOT and larger MoCo v3 were not looked up.
METHODS = {
    "moco_v3": Views(2, 0, 2, epochs={"base": 300, "large": 300, "huge": 300}),
    "dino": Views(2, 10, 2, epochs={"base": 400}),
    # Masked patches become mask tokens: nothing is left out.
    "ibot": Views(2, 10, 2, epochs={"base": 400, "large": 250}),
    # Its published settings are those of ViT-S/16; local views are not masked.
    "msn": Views(1, 10, 1, 0.15, epochs={"base": 600, "large": 600}),
}


def method_step(
    views: Views, encoder: Encoder, batch: int, device: torch.device
) -> Callable[[], None]:
    """One update with a method's passes through the encoder, without its projection heads."""
    student = build_encoder(encoder).to(device)
    teacher = build_encoder(encoder).to(device).requires_grad_(False)
    # In whole patches, as near as they come to 96 of 224 pixels.
    patch, size = encoder.patch_size, encoder.image_size
    side = max(1, round(size * 96 / 224 / patch)) * patch
    small = _resized(student, encoder.model_copy(update={"image_size": side}), device)
    optimizer = torch.optim.AdamW(student.parameters(), fused=device.type == "cuda")
    images = torch.randn(max(views.learning, views.teacher) * batch, 3, size, size, device=device)
    local = torch.randn(views.local * batch, 3, side, side, device=device)
    kept = None
    if views.mask_ratio:
        visible = visible_patches(encoder.patches, views.mask_ratio)
        order = torch.rand(views.learning * batch, encoder.patches, device=device).argsort(dim=1)
        kept = order[:, :visible]

    def step() -> None:
        optimizer.zero_grad()
        with mixed_precision(device, "bf16"):
            with torch.no_grad():
                target = teacher(images[: views.teacher * batch])[:, 0].float().mean(dim=0)
            loss = _distance(student(images[: views.learning * batch], kept), target)
            if views.local:
                loss = loss + _distance(small(local), target)
        loss.backward()
        optimizer.step()
        average = [p.detach() for p in teacher.parameters()]
        torch._foreach_lerp_(average, [p.detach() for p in student.parameters()], 0.004)

    return step


def _resized(encoder: VisionEncoder, settings: Encoder, device: torch.device) -> VisionEncoder:
    """The same weights for another image size."""
    other = build_encoder(settings).to(device)
    other.blocks, other.norm, other.cls_token = encoder.blocks, encoder.norm, encoder.cls_token
    other.patch_embed.proj = encoder.patch_embed.proj
    return other


def _distance(tokens: Tensor, target: Tensor) -> Tensor:
    """Any scalar of the tokens will do: the loss costs nothing beside the encoder."""
    return (tokens[:, 0].float() - target).square().mean()
