"""Encoders that timm builds by name: shapes and preprocessing as data; no torch.

`docs/reference/timm_table.py` writes `timm_encoders.csv`, and builds each of them for that.
"""

import csv
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Literal

from maect.core.errors import UserError
from maect.core.settings import Settings, validated
from maect.recipes import IMAGENET, Encoder, Pixels, load_encoder

TABLE = "timm_encoders.csv"


class TimmEntry(Settings):
    """A row of the table.

    Attributes:
        name: timm's, with the tag of its weights.
        architecture: timm's class.
        image_size: that it was trained or evaluated at, by timm's configuration.
        patch_size: image size / rows of tokens that it gives.
        depth: blocks whose outputs can be read; 1 where they differ in width.
        heads: of attention in a block; 1 where there is none.
        registers: tokens between [CLS] and the patches.
        pooling: `cls` or `mean`, or `head`: as timm's own head pools.
        resize: shorter side of images before the centre crop.
        size: of the encoder sizes here, the one whose recipes hold for it.
        plain: whether it is a ViT of that size exactly, once LayerScale is folded; every stage can
            start from one.
        layer_scale: whether vectors scale what attention and MLP add. In plain ViTs they are
            folded into the matrices before them at import.
        parameters: in millions.
        gflops: operations of one image of its size, counted; 10⁹.
    """

    name: str
    architecture: str
    image_size: int
    patch_size: int
    width: int
    depth: int
    heads: int
    class_token: bool
    registers: int
    pooling: Literal["cls", "mean", "head"]
    resize: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: str
    plain: bool
    layer_scale: bool
    parameters: float
    gflops: float
    licence: str

    def resize_for(self, image_size: int) -> int:
        """Return the shorter side of images before a centre crop of another size."""
        return max(image_size, round(image_size * self.resize / self.image_size))

    def encoder(self, image_size: int | None = None, pixels: Pixels | None = None) -> Encoder:
        """Return its settings, with timm's mean and deviation.

        Raises:
            UserError: it cannot have this image size or number of channels.
        """
        side = image_size or self.image_size
        if side != self.image_size and self.architecture == "Hiera":
            raise UserError(f"{self.name}: is made for {self.image_size} pixels, not {side}")
        pixels = pixels or Pixels()
        if pixels.channels != 3:
            raise UserError(f"{self.name}: reads 3 channels, not {pixels.channels}")
        usual = (self.mean, self.std) == IMAGENET
        statistics = {} if usual else {"mean": self.mean, "std": self.std}
        resize = self.resize_for(side)
        like = load_encoder(self.size).model_dump()
        values = like | {
            "image_size": side,
            "class_token": self.class_token,
            "registers": self.registers if self.plain else 0,
            "pixels": pixels.model_dump(exclude={"mean", "std"}) | statistics,
            "resize": resize if resize != round(side * 256 / 224) else None,
        }
        if not self.plain:
            shape = ("patch_size", "width", "depth", "heads", "registers")
            values |= {name: getattr(self, name) for name in shape} | {"timm": self.name}
        return validated(Encoder, values, self.name)


@cache
def timm_encoders() -> dict[str, TimmEntry]:
    """Return all encoders of the table by full name, NAME.TAG."""
    text = Path(__file__).with_name(TABLE).read_text(encoding="utf-8")
    rows = [dict(row) for row in csv.DictReader(text.splitlines())]
    lists = [{name: row[name].split() for name in ("mean", "std")} for row in rows]
    made = [TimmEntry.model_validate(row | of) for row, of in zip(rows, lists, strict=True)]
    return {one.name: one for one in made}


def find_timm(name: str) -> TimmEntry:
    """Return the encoder of a name; the tag can be left out if there is only one.

    Raises:
        UserError: the name is unknown or has several tags.
    """
    known = timm_encoders()
    if name in known:
        return known[name]
    tagged = [full for full in known if full.partition(".")[0] == name]
    if not tagged:
        bare = {full.partition(".")[0] for full in known}
        near = get_close_matches(name, sorted({*bare, *known}), n=1)
        listed = "docs/reference/timm_encoders.md lists them"
        hint = f"did you mean {near[0]!r}?" if near else listed
        raise UserError(f"timm: unknown encoder {name!r}; {hint}")
    if len(tagged) > 1:
        raise UserError(f"timm: {name} has several weights: write {' or '.join(tagged)}")
    return known[tagged[0]]
