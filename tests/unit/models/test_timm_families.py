"""Features of one encoder of every family beside a forward pass by timm's own module.

Most are built at tiny sizes, by timm's own arguments, with random weights; those that are plain
ViTs have the smallest size that there is.
"""

from typing import Any

import pytest
import timm
import torch
from test_timm import imported, random_model, second_writing
from torch import Tensor, nn

from maect.evaluate.features import Encoding
from maect.models import checkpoints, foreign
from maect.models.weights import load_any_encoder
from maect.recipes.timm_encoders import find_timm

VIT: dict[str, Any] = {"embed_dim": 64, "depth": 3, "num_heads": 4}
CONVNEXT: dict[str, Any] = {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32)}
ENCODERS: dict[str, tuple[int, dict[str, Any]]] = {  # name: image size, arguments of timm
    "vit_base_patch16_224.dino": (224, {}),
    "vit_base_patch16_224.mae": (224, {}),
    "vit_base_patch16_siglip_gap_224.v2_webli": (224, {}),
    "vit_small_patch14_dinov2.lvd142m": (56, {}),
    "vit_small_patch14_reg4_dinov2.lvd142m": (56, {}),
    "vit_small_patch16_dinov3.lvd1689m": (64, VIT),
    "convnext_tiny.dinov3_lvd1689m": (64, CONVNEXT),
    "convnextv2_atto.fcmae": (64, CONVNEXT),
    "vit_base_patch14_reg1_tipsv2.webli": (56, {}),
    "vit_giant_patch16_gap_224.in22k_ijepa": (64, VIT),
    "vit_base_patch16_siglip_224.v2_webli": (64, VIT),
    "aimv2_large_patch14_224.apple_pt": (56, VIT),
    "vit_pe_core_base_patch16_224.fb": (64, VIT),
    "vit_pe_lang_large_patch14_448.fb": (56, VIT),
    "vit_pe_spatial_small_patch16_512.fb": (64, VIT),
    "eva02_tiny_patch14_224.mim_in22k": (56, VIT),
    "eva02_base_patch16_clip_224.merged2b": (64, VIT),
    "beit3_base_patch16_224.pt": (64, VIT),
    "vit_intern300m_patch14_448.ogvl_2pt5": (56, VIT),
    "vit_base_patch16_clip_224.openai": (64, VIT),
    "vit_base_mci_224.apple_mclip": (64, {"depth": 3}),
    "resnet50_clip_gap.cc12m": (64, {}),
}
TELLING = (  # a folded LayerScale, rotated and relative positions, maps, heads, norms and classes
    "vit_small_patch14_reg4_dinov2.lvd142m",
    "vit_small_patch16_dinov3.lvd1689m",
    "convnextv2_atto.fcmae",
    "vit_base_patch16_siglip_224.v2_webli",
    "aimv2_large_patch14_224.apple_pt",
    "vit_pe_spatial_small_patch16_512.fb",
    "eva02_tiny_patch14_224.mim_in22k",
    "vit_base_patch16_clip_224.openai",
)
TOLERANCE = 1e-6
FOLDED = 1e-5  # LayerScale in the matrices before it


def close(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> bool:
    """Compare with the scale of the features."""
    assert found.shape == expected.shape and expected.std() > 1e-3
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in TELLING else pytest.mark.slow) for name in ENCODERS],
)
def test_features_are_those_of_timms_module(name, tmp_path, monkeypatch):
    side, arguments = ENCODERS[name]
    row = find_timm(name)
    if "depth" in arguments:
        heads = arguments.get("num_heads", row.heads)
        width = arguments.get("embed_dim", row.width)
        row = row.model_copy(update={"width": width, "depth": 3, "heads": heads})
    elif arguments:
        row = row.model_copy(update={"width": 32})

    def create(name: str, **options: Any) -> nn.Module:
        return timm.create_model(name, pretrained=False, num_classes=0, **options, **arguments)

    monkeypatch.setattr(foreign, "create", create)
    monkeypatch.setattr(checkpoints, "find_timm", lambda _: row)
    module: Any = random_model(name, side, **arguments)
    weights = imported(module, name, side, tmp_path) / "encoder.safetensors"
    images = torch.randn(2, 3, side, side)
    with torch.no_grad():
        expected = second_writing(module, images, row.pooling)
    tolerance = FOLDED if row.plain and row.layer_scale else TOLERANCE
    assert close(Encoding(weights, torch.device("cpu"))(images), expected, tolerance)

    module, images = module.double(), images.double()
    encoder = load_any_encoder(weights)[0].double()
    outputs: dict[int, Tensor] = {}
    for number, block in enumerate(getattr(module, "blocks", ())):
        block.register_forward_hook(lambda _, __, x, number=number: outputs.update({number: x}))
    with torch.no_grad():
        after = module.forward_features(images)
        if after.ndim == 4:
            after = after.flatten(2).transpose(1, 2)
            outputs = {0: after}
        found = encoder(images, blocks=[*outputs])
        before = encoder(images, norm="none").tokens
        normed = encoder(images, blocks=[*outputs], norm="all").blocks
        norm = getattr(module, "norm", None) if len(outputs) > 1 else None
    assert len(outputs) == row.depth == len(found.blocks)
    assert close(found.tokens, after, tolerance)
    assert close(before, outputs[row.depth - 1], tolerance)
    prefix = after.shape[1] - found.grid[0] * found.grid[1]
    assert prefix == getattr(module, "num_prefix_tokens", 0)
    assert close(found.patch_tokens(), after[:, prefix:], tolerance)
    for number, x in outputs.items():
        assert close(found.blocks[number], x, tolerance)
        with torch.no_grad():
            assert close(normed[number], norm(x) if norm else x, tolerance)
