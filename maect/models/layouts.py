"""How public checkpoints are laid out; no torch, because an experiment is checked with it."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Location:
    """Where a checkpoint may hold an encoder.

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


@dataclass(frozen=True)
class Layout:
    """One way in which weights are published.

    Attributes:
        locations: where the encoder may be.
        pooling: how its evaluations pool: one for all sizes, or what the size says about MAE or
            about contrastive tuning.
        class_token: whether it has a [CLS] token.
        mae_positions: whether its position embedding is MAE's sine-cosine table: what tells apart
            layouts with the same names. None: not looked at.
        norm: of its blocks, before attention and MLP or behind their sums.
    """

    locations: tuple[Location, ...]
    pooling: Literal["cls", "mean", "mae_pooling", "ct_pooling"] = "cls"
    class_token: bool = True
    mae_positions: bool | None = None
    norm: Literal["pre", "post"] = "pre"

    @property
    def shape(self) -> dict[str, Any]:
        """What it says of an encoder's shape."""
        return {"class_token": self.class_token, "norm": self.norm}


def _moco(kept: str, other: str) -> Location:
    """One of the two encoders that MoCo v3 trains."""
    dropped = (f"module.{kept}.head.*", f"module.{other}.*", "module.predictor.*")
    return Location("state_dict", f"module.{kept}.", dropped)


# Kappamodules' names of what timm calls otherwise.
_REFINED = (("pos_embed.embed", "pos_embed"), ("cls_tokens.tokens", "cls_token"))

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
    "mim_refiner_post": Layout(
        (Location("state_dict", renamed=(*_REFINED, ("embed_norm.", "norm_pre."))),), norm="post"
    ),
    "mim_refiner": Layout((Location("state_dict", renamed=_REFINED),)),
}
