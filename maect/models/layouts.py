"""Layouts of public checkpoints; no torch, because an experiment is checked with it."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Location:
    """Place where a checkpoint may hold an encoder.

    Attributes:
        entry: of the checkpoint, with the state dict; "": the checkpoint is one itself.
        prefix: of the encoder's names in it.
        dropped: patterns of full names that are not the encoder's; any other name is an error.
        renamed: beginnings of names behind the prefix, and what they are here.
    """

    entry: str
    prefix: str = ""
    dropped: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    def ours(self, name: str) -> str:
        """A full name as it is here."""
        name = name.removeprefix(self.prefix)
        for old, new in self.renamed:
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    def theirs(self, name: str) -> str:
        """A name that is ours as it is there."""
        for old, new in self.renamed:
            if name.startswith(new):
                name = old + name.removeprefix(new)
                break
        return self.prefix + name


@dataclass(frozen=True)
class Layout:
    """One way in which weights are published.

    Attributes:
        locations: where the encoder may be.
        pooling: how its evaluations pool: one for all sizes, or what the size says about MAE or
            about contrastive tuning.
        class_token: whether it has a [CLS] token.
        mae_positions: whether its position embedding is MAE's sine-cosine table: what tells apart
            layouts with the same names. None: not compared.
        norm: of its blocks, before attention and MLP or behind their sums.
        mark: a name that must be there: what tells apart layouts that are alike otherwise.
        class_tokens: number of [CLS] tokens; all but the first become registers.
        registers: number of other tokens before the patches, where the layout has some.
        module: name of a model of ours that is no plain ViT.
        final_norm: whether its blocks have a norm behind them; if not, one that changes nothing but
            mean and variance takes its place.
    """

    locations: tuple[Location, ...]
    pooling: Literal["cls", "mean", "mean_cls", "mae_pooling", "ct_pooling"] = "cls"
    class_token: bool = True
    mae_positions: bool | None = None
    norm: Literal["pre", "post"] = "pre"
    mark: str | None = None
    class_tokens: int = 1
    registers: int = 0
    module: Literal["capi"] | None = None
    final_norm: bool = True

    @property
    def shape(self) -> dict[str, Any]:
        """Return what it says of an encoder's shape."""
        shape = {"class_token": self.class_token, "norm": self.norm}
        registers = self.registers + self.class_tokens - 1
        more = {"registers": registers, "module": self.module}
        return shape | {key: value for key, value in more.items() if value}


def _moco(kept: str, other: str) -> Location:
    """One of the two encoders that MoCo v3 trains."""
    dropped = (f"module.{kept}.head.*", f"module.{other}.*", "module.predictor.*")
    return Location("state_dict", f"module.{kept}.", dropped)


# fairseq's names of what timm calls otherwise, and MIM-Refiner's.
_IMAGE = "modality_encoders.IMAGE."
_DATA2VEC = (
    (f"{_IMAGE}local_encoder.", "patch_embed."),
    (f"{_IMAGE}extra_tokens", "cls_token"),
    (f"{_IMAGE}fixed_positional_encoder.positions", "pos_embed"),
    (f"{_IMAGE}context_encoder.norm.", "norm_pre."),
)
_REFINED = (("pos_embed.embed", "pos_embed"), ("cls_tokens.tokens", "cls_token"))


@dataclass(frozen=True)
class Family:
    """Public encoders that are no layout, and how a file of theirs is recognised.

    Attributes:
        title: what they are called.
        marks: ends of names of tensors that all must be there.
        timm: a name of timm that such files are imported by.
        layout: a layout that they have; neither: they are not imported.
    """

    title: str
    marks: tuple[str, ...]
    timm: str | None = None
    layout: str | None = None


# The first that fits is taken: special ones come before those that they resemble.
FAMILIES = (
    Family("CAPI", ("blocks.0.residual1.norm.weight", "registers"), layout="capi"),
    Family("DINOv3", ("storage_tokens",), "vit_large_patch16_dinov3.lvd1689m"),
    Family(
        "DINOv2 with registers",
        ("register_tokens", "blocks.0.ls1.gamma"),
        "vit_large_patch14_reg4_dinov2",
    ),
    Family("BEiT", ("blocks.0.gamma_1", "blocks.0.attn.q_bias")),
    Family("DINOv2", ("mask_token", "blocks.0.ls1.gamma"), "vit_large_patch14_dinov2"),
    Family("AIMv2", ("trunk.blocks.0.attn.qkv.weight",), "aimv2_large_patch14_224"),
    Family("SigLIP", ("attn_pool.latent",), "vit_large_patch16_siglip_256"),
    Family("Perception Encoder", ("attn_pool.probe",), "vit_pe_core_large_patch14_336"),
    Family("Hiera", ("blocks.0.attn.qkv.weight", "pos_embed_window")),
    Family("ConvNeXt V2", ("stages.0.0.grn.gamma",), "convnextv2_base.fcmae"),
    Family("ConvNeXt V2", ("stages.0.blocks.0.mlp.grn.weight",), "convnextv2_base.fcmae"),
    Family("a model of transformers", ("encoder.layer.0.attention.attention.query.weight",)),
    Family("CLIP", ("visual.transformer.resblocks.0.attn.in_proj_weight",)),
)

# Tried from top to bottom. docs/weights.md has their sources.
LAYOUTS: dict[str, Layout] = {
    "mae": Layout(
        tuple(
            Location(entry, dropped=("decoder_*", "mask_token"))
            for entry in ("model", "state_dict", "")
        ),
        "mae_pooling",
        mae_positions=True,
    ),
    "mae_ct": Layout((Location("state_dict"), Location("")), "ct_pooling", mae_positions=True),
    "crossmae": Layout(
        (Location("model", dropped=("decoder_*", "mask_token", "dec_norms.*", "wfm.*")),),
        "mean",
        mae_positions=True,
        mark="wfm.linear.weight",
        final_norm=False,
    ),
    "layer_grafting": Layout((_moco("momentum_encoder", "base_encoder"),), mae_positions=True),
    "moco_v3": Layout(
        (
            _moco("base_encoder", "momentum_encoder"),
            Location("state_dict", "module.", ("module.head.*",)),
        )
    ),
    "msn": Layout((Location("target_encoder", "module.", ("module.fc.*",)),)),
    "ijepa": Layout((Location("target_encoder", "module."),), "mean", class_token=False),
    "ibot": Layout(
        (
            Location("state_dict", dropped=("head.*", "masked_embed")),
            Location("teacher", "backbone.", ("head.*", "backbone.masked_embed")),
        ),
        mae_positions=False,
    ),
    "dino": Layout((Location(""),), mae_positions=False),
    "data2vec2": Layout(
        (
            Location("model", dropped=(f"{_IMAGE}decoder.*", "_ema"), renamed=_DATA2VEC),
            # Fine-tuned by fairseq: the encoder as a part, and a classifier.
            Location(
                "model",
                "model.",
                (f"model.{_IMAGE}decoder.*", "model._ema", "head.*", "fc_norm.*", "linear_norm.*"),
                _DATA2VEC,
            ),
        ),
        norm="post",
    ),
    "mim_refiner_post": Layout(
        (Location("state_dict", renamed=(*_REFINED, ("embed_norm.", "norm_pre."))),), norm="post"
    ),
    "mim_refiner": Layout((Location("state_dict", renamed=_REFINED),)),
    "mim_refiner_mean": Layout((Location("state_dict", renamed=_REFINED),), "mean"),
    "pixio": Layout(
        tuple(Location(entry, dropped=("decoder_*", "mask_token")) for entry in ("model", "")),
        "mean_cls",
        class_tokens=8,
    ),
    "capi": Layout(
        (
            Location(
                "",
                "backbone.",
                ("backbone.decoder.*", "backbone.mask_token", "head.*"),
                (("encoder.blocks.", "blocks."), ("patch_embed.", "patch_embed.proj.")),
            ),
        ),
        "mean",
        class_token=False,
        registers=16,
        module="capi",
    ),
}
