"""Settings that recipes have values for: pixels, encoder, views, heads, online evaluation.

A default here is a part of identities: resolved files omit it, so it never changes. A run's values
are those of its recipe (`maect/recipes/*.yaml`), which win over the defaults. Only `Computing`, how
a training is computed, is recorded and no part of an identity.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from maect.core.settings import Settings

KNN_K, KNN_TEMPERATURE = 10, 0.07
"""Neighbours and temperature of the reported k-NN, also online (paper, B)."""
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""ImageNet's mean and standard deviation, of pixel values from 0 to 1."""
WHITE = (255, 255, 255)
Level = Annotated[int, Field(ge=0, le=255)]
MOST_CHANNELS = 16
"""Channels of an image, at most."""


class Pixels(Settings):
    """Conversion of images into an encoder's values, except size and crop (`docs/data.md`).

    The defaults are the paper's: three channels of 8 bits, as stored.
    """

    channels: int = Field(default=3, ge=1, le=MOST_CHANNELS)
    orientation: Literal["stored", "exif"] = "stored"
    """`exif`: turned upright, if EXIF has an orientation."""
    background: tuple[Level, Level, Level] | None = None
    """Colour behind transparent pixels; None: transparency is dropped."""
    range: tuple[float, float] | None = None
    """Values that become 0 and 255, for images of more than 8 bits. None: 16-bit values keep their
    upper half, others are refused."""
    mean: tuple[float, ...] | None = None
    """Mean of each channel, of values from 0 to 1; None: ImageNet's."""
    std: tuple[float, ...] | None = None
    """Standard deviation of each channel; None: ImageNet's."""

    @property
    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel."""
        return self.mean or IMAGENET[0], self.std or IMAGENET[1]

    @property
    def files(self) -> dict[str, Any]:
        """Settings for reading files that differ from the defaults."""
        return self.model_dump(mode="json", exclude_defaults=True, exclude={"mean", "std"})

    @property
    def as_seen(self) -> "Pixels":
        """These settings for files that a person names: upright, with a background.

        By default a data set is read as torchvision's ImageFolder reads it, like the paper's. A
        person who names a file means the picture that a viewer shows.
        """
        seen = {"orientation": "exif", "background": self.background or WHITE}
        return self.model_copy(update=seen)

    @property
    def reading(self) -> dict[str, Any]:
        """Settings that `--pixels` may replace for one command.

        The number of channels and their statistics belong to the encoder.
        """
        return self.model_dump(include={"orientation", "background", "range"})

    @classmethod
    def of_shards(cls, options: dict[str, Any]) -> "Pixels":
        """Return the settings that shards were made with; means and deviations are placeholders."""
        made = options.get("pixels", {})
        half = (0.5,) * made.get("channels", 3)
        return cls.model_validate(made | {"mean": half, "std": half})

    @model_validator(mode="after")
    def _fitting(self) -> "Pixels":
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values is None and self.channels != 3:
                raise ValueError(f"channels {self.channels}: {name} of each must be given")
            if values is not None and len(values) != self.channels:
                raise ValueError(f"{name}: {len(values)} values for {self.channels} channels")
        if self.std is not None and min(self.std) <= 0:
            raise ValueError(f"std: {min(self.std)} is not above 0")
        if self.range is not None and not self.range[0] < self.range[1]:
            raise ValueError(f"range: {self.range[0]} is not below {self.range[1]}")
        return self


class InWeights(Settings):
    """Settings in the header of a file of weights, which omits `usual` ones at their defaults."""

    usual: ClassVar[tuple[str, ...]] = ()

    @property
    def header(self) -> str:
        """Text of the header, as JSON."""
        fields = type(self).model_fields
        return self.model_dump_json(
            exclude={name for name in self.usual if getattr(self, name) == fields[name].default}
        )


class Encoder(InWeights):
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
    """Pooling in evaluations of an encoder that was only pre-trained."""
    ct_pooling: Literal["cls", "mean"]
    """Pooling for the NNCLR head, and in evaluations of a tuned encoder."""
    class_token: bool = True
    """Whether there is a [CLS] token. Some imported encoders (I-JEPA) have none; no stage trains
    them."""
    registers: int = Field(default=0, ge=0)
    """Number of additional tokens that nothing reads (Darcet et al. 2024)."""
    norm: Literal["pre", "post"] = "pre"
    """Norms of the blocks: before attention and MLP, or after their sums (data2vec 2.0)."""
    pixels: Pixels = Pixels()
    """Conversion of its images."""
    resize: int | None = Field(default=None, gt=0)
    """Shorter side of images before the centre crop; None: 256/224 of the image size."""
    timm: str | None = None
    """timm's name of a model that is no plain ViT."""
    module: Literal["capi"] | None = None
    """Our module of a model that is no plain ViT (`maect.models.foreign`)."""
    usual: ClassVar[tuple[str, ...]] = ("registers", "norm", "pixels", "resize", "timm", "module")
    shape: ClassVar[tuple[str, ...]] = (
        "image_size", "patch_size", "width", "depth", "heads", "class_token", "registers", "norm",
    )  # fmt: skip
    """Settings that an encoder must share with one whose weights it takes over."""

    @property
    def patches(self) -> int:
        """Number of patch tokens of one image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def default_resize(self) -> int:
        """Default of the shorter side before the centre crop: 256 for 224 pixels."""
        return self.resize or round(self.image_size * 256 / 224)

    @property
    def features_precision(self) -> Literal["fp32", "tf32"]:
        """Default precision of features: TF32 from ViT-B's width on, to save time."""
        return "tf32" if self.width >= 768 else "fp32"

    def check_trainable(self) -> None:
        """Raise ValueError for a model that is no plain ViT."""
        if self.foreign is not None:
            raise ValueError(
                f"only plain ViTs are trained, and {self.foreign} is none: evaluate it, or "
                "start from a plain one, such as MAE's or DINOv2's (docs/weights.md)"
            )

    @property
    def foreign(self) -> str | None:
        """Name of a model that is no plain ViT; None: it is one."""
        return f"timm's {self.timm}" if self.timm is not None else self.module

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
    """Return the number of patches left after masking, rounded down as in MAE."""
    return int(patches * (1 - mask_ratio))


def _check_crop_scale(scale: tuple[float, float]) -> tuple[float, float]:
    low, high = scale
    if not 0 < low <= high <= 1:
        raise ValueError(f"{list(scale)} is no range of parts of an image, from above 0 to 1")
    return scale


CropScale = Annotated[tuple[float, float], AfterValidator(_check_crop_scale)]
"""Smallest and largest part of an image's area that a crop shows."""


class View(Settings):
    """One view of an image: probabilities of each random change.

    Strengths are those of BYOL; order: crop, flip, jitter, blur, gray, solarize
    (`docs/reference/loader.md`).
    """

    crop_scale: CropScale
    size: int | None = Field(default=None, gt=0)
    """Height and width in pixels; None: the encoder's."""
    flip: float = 0.5
    jitter: float = 0.0
    blur: float = 0.0
    gray: float = 0.0
    solarize: float = 0.0


def views_by_size(views: Sequence[View], image_size: int) -> dict[int, list[int]]:
    """Return the numbers of the views of each size in pixels, in the order of first views.

    Views of one size are one tensor of a batch, and one pass through the encoder.
    """
    groups: dict[int, list[int]] = {}
    for number, view in enumerate(views):
        groups.setdefault(view.size or image_size, []).append(number)
    return groups


class OnlineEvaluation(Settings):
    """Interval of the online evaluation of a training; no part of the training's identity."""

    part: ClassVar[float] = 0.02
    """Images that an evaluation reads, at most, as a fraction of those trained on since the last
    one. A forward pass is faster than training on an image, so this bounds the time, too."""
    every_epochs: int = Field(default=5, gt=0)
    images: int = Field(default=5000, gt=0)
    """Images that an evaluation reads, at most; also at most 2 % of those trained on since the last
    one."""


class HeadSettings(InWeights):
    """Settings of all heads with a queue: shape, lookup and rates."""

    queue_size: int = Field(default=65536, gt=0)
    """Vectors in the queue. Recipes set it, in contrastive.yaml and refiner.yaml; the default never
    changes, since it is part of identities."""
    projector_hidden: int = Field(default=2048, gt=0)
    predictor_hidden: int = Field(default=4096, gt=0)
    embedding: int = Field(default=256, gt=0)
    temperature: float = Field(gt=0)
    topk: int = Field(ge=1)
    """Nearest neighbours that a lookup draws from. Each recipe with a head sets it."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of similarities, lookup and loss; the authors use bf16."""
    head_lr: float = Field(gt=0)
    head_weight_decay: float = Field(ge=0)
    usual: ClassVar[tuple[str, ...]] = ("precision",)
    shape: ClassVar[tuple[str, ...]] = (
        "queue_size", "projector_hidden", "predictor_hidden", "embedding",
    )  # fmt: skip
    """Settings that a head must share with one that it takes over."""
    drawn: ClassVar[tuple[str, ...]] = ("topk",)
    """Settings that all heads of a stage share, since one number is drawn for all their lookups."""

    @model_validator(mode="after")
    def _has_candidates(self) -> Self:
        if self.topk > self.queue_size:
            raise ValueError(f"topk {self.topk} is larger than queue_size {self.queue_size}")
        return self

    @property
    def needs_labels(self) -> bool:
        """Return whether labels of training images are read."""
        return False

    @property
    def right(self) -> float:
        """Fraction of the lookups that are not made wrong on purpose."""
        return 1.0


class Contrastive(HeadSettings):
    """The NNCLR head (paper, section 3 and A.2): shape, lookup and loss."""

    projector_ema: float = Field(ge=0, lt=1)
    """Momentum of the projector on the lookup path; 0 means the projector itself."""
    lookup: Literal["topk", "none", "oracle"] = "topk"
    """`topk`: nearest neighbours; `none`: the other view is the positive; `oracle`: neighbours of
    the same class."""
    oracle_right: float = Field(default=1.0, ge=0, le=1)
    """Fraction of the oracle's lookups that are of the same class. The others, drawn for each view
    of an image, are the nearest of other classes."""
    stop_gradient: bool = True
    """Whether the positive gets no gradient. Entries of a queue never do; with `lookup: none` the
    default is false."""
    usual: ClassVar[tuple[str, ...]] = ("precision", "oracle_right", "stop_gradient")
    drawn: ClassVar[tuple[str, ...]] = ("topk", "lookup", "oracle_right")

    @property
    def needs_labels(self) -> bool:
        """Return whether labels are needed: only by the oracle lookup."""
        return self.lookup == "oracle"

    @property
    def right(self) -> float:
        """Fraction of the lookups that are not made wrong on purpose: less than 1 for an oracle."""
        return self.oracle_right

    @model_validator(mode="before")
    @classmethod
    def _gradient_without_lookup(cls, values: Any) -> Any:
        without = isinstance(values, dict) and values.get("lookup") == "none"
        return {"stop_gradient": False} | values if without else values

    @model_validator(mode="after")
    def _only_of_an_oracle(self) -> "Contrastive":
        if self.oracle_right < 1 and self.lookup != "oracle":
            raise ValueError(f"oracle_right {self.oracle_right}: only `lookup: oracle` has one")
        return self

    @model_serializer(mode="wrap")
    def _dump_without_lookup(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = dump(self)
        # The checksum of a head's file depends on their order: precision and rates last.
        for key in ("precision", "head_lr", "head_weight_decay"):
            if key in values:
                values[key] = values.pop(key)
        if self.lookup == "none":
            # Its default differs from the field's, so it must not be left out.
            values["stop_gradient"] = self.stop_gradient
        return values


WeightSchedule = Literal["staggered_step", "staggered_cosine", "one_hot", "uniform"]


class Refiner(HeadSettings):
    """MIM-Refiner's heads (Alkin et al. 2025), one on each of several blocks."""

    blocks: (
        Annotated[int, Field(ge=1, strict=True)] | Annotated[tuple[int, ...], Field(min_length=1)]
    )
    """Blocks with a head: the number of last ones, or their numbers from 0, with the last block.
    The head of the last block reads the encoder's output, after the final norm."""
    negatives: Literal["own", "neighbour"] = "own"
    """Vector that other samples are compared with: one's own, or its neighbour (NNCLR)."""
    terms: Literal["released", "all"] = "all"
    """Pairs of views in the loss: as in the authors' code, or every global view with every other
    view once."""
    statistics: Literal["joint", "per_view"] = "joint"
    """Statistics of BatchNorm: over the vectors of all views, or of each view."""
    weights: WeightSchedule | None = None
    """Schedule of the loss weights of all heads but the last; None: all are 1 to the end."""
    usual: ClassVar[tuple[str, ...]] = ("precision", "weights")

    @property
    def count(self) -> int:
        """Number of heads."""
        return self.blocks if isinstance(self.blocks, int) else len(self.blocks)

    def read(self, depth: int) -> tuple[int, ...]:
        """Return the numbers of the blocks with a head; ValueError if they do not fit `depth`."""
        if isinstance(self.blocks, int):
            if self.blocks > depth:
                raise ValueError(f"blocks {self.blocks}: the encoder has {depth}")
            return tuple(range(depth - self.blocks, depth))
        numbers = self.blocks
        rising = list(numbers) == sorted(set(numbers))
        if not rising or numbers[0] < 0 or numbers[-1] != depth - 1:
            raise ValueError(
                f"blocks {list(numbers)}: not rising numbers from 0 up to the encoder's last "
                f"block {depth - 1}"
            )
        return numbers


class Computing(Settings):
    """Way of computing a training. It may change between attempts and affects rounding only."""

    zero_stage: Literal[1, 2, 3] = 1
    """DeepSpeed partitions over the ranks: 1 optimizer states, 2 also gradients, 3 also
    parameters."""
    overlap_comm: bool = False
    """Average gradients during the backward pass; for a slow network, and not measured."""
    accumulation: int = Field(default=1, gt=0)
    """Forward passes per optimizer step; 1 in contrastive stages, for their batch statistics."""
    compile: bool | None = None
    """Compile the transformer blocks. None: on GPUs for ViT-B and larger, under ZeRO 1 and 2, but
    not in fine-tuning."""
    cuda_graphs: bool | None = None
    """Replay forward and backward pass as CUDA graphs. None: on one GPU, without accumulation and
    activation checkpointing. It is impossible on several."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass, for less memory."""
    attention: Literal["sdpa", "flash_attn"] = "sdpa"
    """Kernel of attention (`maect.models.kernels`)."""
    deterministic: bool = False
    """Use deterministic kernels, for the same bits at every start also on GPUs."""

    @property
    def captures_passes(self) -> bool:
        """Return whether a single GPU replays its passes.

        A recomputed pass draws from the generator's state, and the gradients of several passes add
        up in place: neither can be replayed.
        """
        can_be = self.accumulation == 1 and not self.activation_checkpointing
        return can_be and self.cuda_graphs is not False

    @field_validator("zero_stage", mode="before")
    @classmethod
    def _refuse_stage_0(cls, value: object) -> object:
        if value == 0 and not isinstance(value, bool):
            raise ValueError("there is no stage 0: leave it out (1: one rank has nothing to share)")
        return value

    def changes(self, before: "Computing") -> str:
        """Return the settings that differ from another way, as `key: value, …`."""
        values = self.model_dump()
        other = before.model_dump()
        return ", ".join(f"{key}: {value}" for key, value in values.items() if value != other[key])


PLAIN = Computing()


def separate(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split values into settings of a stage and settings of `Computing`."""
    how = {key: value for key, value in values.items() if key in Computing.model_fields}
    return {key: value for key, value in values.items() if key not in how}, how
