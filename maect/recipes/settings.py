"""The shapes that recipes speak of: encoders, NNCLR heads and the views of an image."""

from typing import Literal

from pydantic import Field, model_validator

from maect.core.settings import Settings, later


class Encoder(Settings):
    """A vision transformer's shape and how its output becomes one feature vector."""

    image_size: int = Field(gt=0)
    patch_size: int = Field(gt=0)
    width: int = Field(gt=0)
    depth: int = Field(gt=0)
    heads: int = Field(gt=0)
    decoder_width: int = Field(gt=0)
    decoder_depth: int = Field(gt=0)
    decoder_heads: int = Field(gt=0)
    mae_pooling: Literal["cls", "mean"]
    """How evaluations pool an encoder that was only pre-trained."""
    ct_pooling: Literal["cls", "mean"]
    """What the NNCLR head reads, and how evaluations pool a tuned encoder."""
    class_token: bool = True
    """Only some imported encoders (I-JEPA) have none; no stage trains them."""
    registers: int = later(0, ge=0)
    """Tokens beside [CLS] that nothing reads (Darcet et al. 2024)."""

    @property
    def patches(self) -> int:
        """Number of patch tokens of one image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def prefix_tokens(self) -> int:
        """Number of tokens before the patches: [CLS] and registers."""
        return int(self.class_token) + self.registers

    @model_validator(mode="after")
    def _divisible(self) -> "Encoder":
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}"
            )
        for part, width, heads in (
            ("width", self.width, self.heads),
            ("decoder_width", self.decoder_width, self.decoder_heads),
        ):
            if width % heads:
                raise ValueError(f"{part} {width} is not a multiple of its {heads} heads")
            if width % 4:
                raise ValueError(f"{part} {width} is not a multiple of 4 (sine-cosine positions)")
        return self


def visible_patches(patches: int, mask_ratio: float) -> int:
    """Patches left after masking, rounded down as in MAE."""
    return int(patches * (1 - mask_ratio))


class View(Settings):
    """How one view of an image is made: probabilities of each random change.

    Strengths are those of BYOL (`docs/data.md`); order: crop, flip, jitter, blur, gray, solarize.
    """

    crop_scale: tuple[float, float]
    flip: float = 0.5
    jitter: float = 0.0
    blur: float = 0.0
    gray: float = 0.0
    solarize: float = 0.0


# MAE: scale from 0.2; tuning and probing from 0.08; the aug variant follows BYOL's asymmetry.
AUGMENTATIONS: dict[str, tuple[View, View]] = {
    "mae": (View(crop_scale=(0.2, 1.0)),) * 2,
    "min": (View(crop_scale=(0.08, 1.0)),) * 2,
    "aug": (
        View(crop_scale=(0.08, 1.0), jitter=0.8, blur=1.0, gray=0.2),
        View(crop_scale=(0.08, 1.0), jitter=0.8, blur=0.1, gray=0.2, solarize=0.2),
    ),
}


class Contrastive(Settings):
    """The NNCLR head (paper, section 3 and A.2): shape, lookup and loss."""

    queue_size: int = Field(default=65536, gt=0)
    projector_hidden: int = Field(default=2048, gt=0)
    predictor_hidden: int = Field(default=4096, gt=0)
    embedding: int = Field(default=256, gt=0)
    temperature: float = Field(gt=0)
    topk: int = Field(ge=1)
    projector_ema: float = Field(ge=0, lt=1)
    """Momentum of the projector on the lookup path; 0 means the projector itself."""
    lookup: Literal["topk", "none", "oracle"] = "topk"
    """`none`: the other view itself is the positive; `oracle`: same-class neighbours only."""
    head_lr: float = Field(gt=0)
    head_weight_decay: float = Field(ge=0)
