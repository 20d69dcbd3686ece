"""Writes the table of timm's encoders: `python docs/reference/timm_table.py`.

Every model is built on the meta device and runs there once, which takes neither weights nor memory.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, cast

import pandas as pd
import timm
import torch
from timm.layers import LayerScale
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from maect.core.files import write_text
from maect.models.foreign import create
from maect.models.vit import build_encoder
from maect.recipes import load_encoder, sizes
from maect.recipes import timm_encoders as data

ROOT = Path(__file__).parents[2]
CSV = Path(data.__file__).with_name(data.TABLE)
PAGE = ROOT / "docs/reference/timm_encoders.md"

FAMILIES = {
    r"dinov3": "DINOv3, EUPE",
    r"dinov2": "DINOv2",
    r"tips": "TIPSv2",
    r"\.dino$": "DINO",
    r"ijepa": "I-JEPA",
    r"fcmae": "ConvNeXt V2, by FCMAE",
    r"\.mae$": "MAE",
    r"siglip": "SigLIP, SigLIP 2, PaliGemma's",
    r"aimv2": "AIMv2",
    r"_pe_": "Perception Encoder",
    r"^eva|^beit": "EVA-02, BEiT-3",
    r"intern": "InternViT",
    r"clip": "CLIP and its like",
}
"""By what is in their names; the first that fits."""
LEFT_OUT = r"^(hiera|naflex|fastvit|vitamin|test_)|radio|gemma|samvit|convnext.*clip|patch14.*_384"
"""Models with another way to their tokens than images of one size in, tokens or a map out; and of
an image size that their patches do not tile."""


def wanted() -> list[str]:
    """Names of the encoders: trained without labels or with texts, bicubic and cropped as here."""
    names = []
    for name in timm.list_pretrained():
        given = timm.get_pretrained_cfg(name)
        if re.search(LEFT_OUT, name) or given is None or family(name) is None:
            continue
        tag = name.partition(".")[2]
        with_texts = ("clip" in name or "_pe_" in name) and "_ft_" not in tag
        if given.num_classes and not with_texts:
            continue
        if given.interpolation == "bicubic" and given.crop_mode == "center":
            names.append(name)
    return names


def family(name: str) -> str | None:
    """Of which family an encoder is, if of any."""
    return next((title for word, title in FAMILIES.items() if re.search(word, name)), None)


def row(name: str) -> dict[str, Any]:
    """The table's row of an encoder."""
    given = timm.get_pretrained_cfg(name)
    assert given is not None and given.input_size is not None
    side = given.input_size[-1]
    return {
        "name": name,
        "image_size": side,
        **_shape(name.partition(".")[0], side),
        "resize": math.floor(side / given.crop_pct),
        "mean": " ".join(f"{value:.8g}" for value in given.mean),
        "std": " ".join(f"{value:.8g}" for value in given.std),
        "licence": given.license or "not stated",
    }


@cache
def _shape(name: str, side: int) -> dict[str, Any]:
    """Return what does not depend on which weights a model has, at an image size."""
    with torch.device("meta"):
        module: Any = create(name).eval()
    parameters, size = sum(p.numel() for p in module.parameters()), plain_size(module)
    depth = len(getattr(module, "blocks", ()))
    output, operations = counted(module, side)
    tokens = output.ndim == 3
    prefix = int(getattr(module, "num_prefix_tokens", 0)) if tokens else 0
    cls = tokens and prefix > 0 and getattr(module, "cls_token", None) is not None
    width = int(output.shape[2] if tokens else output.shape[1])
    rows = math.isqrt(output.shape[1] - prefix) if tokens else int(output.shape[2])
    deep = tokens and depth > 0
    attention = getattr(module.blocks[0], "attn", None) if deep else None
    like = size or ("base" if width < 1024 else "large" if width < 1280 else "huge")
    return {
        "architecture": type(module).__name__,
        "patch_size": side // rows,
        "width": width,
        "depth": depth if deep else 1,
        "heads": int(getattr(attention, "num_heads", 1)),
        "class_token": _word(cls),
        "registers": prefix - int(cls),
        "pooling": pooling(module, cls, tokens),
        "size": like,
        "plain": _word(size is not None),
        "layer_scale": _word(any(isinstance(part, LayerScale) for part in module.modules())),
        "parameters": f"{parameters / 1e6:.1f}",
        "gflops": f"{operations / 1e9:.4g}",
    }


def counted(module: Any, side: int) -> tuple[torch.Tensor, int]:
    """What a model on the meta device gives of one image before its head, and all operations."""
    module.requires_grad_(False)  # the counter's hooks look for gradients otherwise
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        output = module.forward_features(torch.zeros(1, 3, side, side))
        module.forward_head(output)
    return output, counter.get_total_flops()


def _word(value: bool) -> str:
    return "yes" if value else "no"


def pooling(module: nn.Module, cls: bool, tokens: bool) -> str:
    """Return how an encoder's tokens are pooled, by what its training's loss read.

    `head` where timm's head pools by attention or norms the mean, else [CLS] where there is one,
    else the mean of the patches.
    """
    if not tokens or getattr(module, "attn_pool", None) is not None:
        return "head"
    if not isinstance(getattr(module, "fc_norm", nn.Identity()), nn.Identity):
        return "head"
    return "cls" if cls else "mean"


def plain_size(module: nn.Module) -> str | None:
    """The encoder size whose encoder computes what this module does, if there is one.

    LayerScale makes no difference: it is folded into the matrices before it.
    """
    if type(module) is not VisionTransformer:
        return None
    for name in sizes():
        shape = load_encoder(name).model_copy(
            update={
                "class_token": module.has_class_token,
                "registers": module.num_reg_tokens,
                "image_size": _side(module),
            }
        )
        if shape.width != module.embed_dim or shape.depth != len(module.blocks):
            continue
        if shape.patch_size != module.patch_embed.patch_size[0]:
            continue
        with torch.device("meta"):
            ours = build_encoder(shape)
        if _described(ours) == _described(module):
            return name
    return None


def _side(module: VisionTransformer) -> int:
    return int(cast(Any, module.patch_embed).img_size[0])


def _described(module: VisionTransformer) -> str:
    """Every part of a ViT with its settings, as torch prints it; and its number of heads."""
    parts = [module.blocks, module.norm_pre, module.norm, module.fc_norm, module.patch_embed]
    heads = {cast(Any, block).attn.num_heads for block in module.blocks}
    text = f"{parts} {heads} {module.attn_pool} {module.pos_embed is None}"
    return text.replace("FusedAttention", "Attention").replace("LayerScale()", "Identity()")


def rows(names: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """Rows of these encoders, or of all."""
    return [row(name) for name in (wanted() if names is None else names)]


def page(made: list[dict[str, Any]]) -> str:
    """The page that sums the table up, with its numbers and a line for each family and pooling."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in made:
        groups.setdefault((str(family(one["name"])), one["pooling"]), []).append(one)
    order = {title: number for number, title in enumerate(FAMILIES.values())}
    lines = []
    for (title, how), of in sorted(groups.items(), key=lambda item: order[item[0][0]]):
        smallest = min(of, key=lambda one: (float(one["parameters"]), int(one["image_size"])))
        low, high = (
            f"{of_all(float(one['parameters']) for one in of):.0f}" for of_all in (min, max)
        )
        sides = sorted({int(one["image_size"]) for one in of})
        tuned = sum(one["plain"] == "yes" for one in of)
        lines.append(
            f"| {title} | {len(of)} | {low} to {high} | {sides[0]} to {sides[-1]} | {how} | "
            f"{tuned} | `{smallest['name']}` |\n"
        )
    counts = Counter(one["pooling"] for one in made)
    said = ", ".join(f"{counts[how]} {how}" for how in ("cls", "mean", "head"))
    text = PAGE.read_text(encoding="utf-8")
    text = re.sub(r"take \d+ encoders", f"take {len(made)} encoders", text)
    text = re.sub(r"\*\*Pooling\*\* \(.*?\)", f"**Pooling** ({said})", text)
    head, ruler, rest = re.split(r"(\n\| ---.*\n)", text)
    return head + ruler + "".join(lines) + rest[rest.index("\n\n") + 1 :]


def write() -> int:
    """Write the table and its page; returns the number of encoders."""
    made = rows()
    pd.DataFrame(made).to_csv(CSV, index=False)
    write_text(PAGE, page(made))
    return len(made)


if __name__ == "__main__":
    print(f"{CSV}, {PAGE}: {write()} encoders")
