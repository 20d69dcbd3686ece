"""CAPI, and Pixio's shape: features of a second writing, and what is refused."""

import plain_vit
import pytest
import torch

from maect.cli import main
from maect.core.errors import UserError
from maect.evaluate.features import Encoding
from maect.models.checkpoints import convert
from maect.models.foreign import TimmEncoder
from maect.models.weights import load_any_encoder, load_encoder_weights
from maect.recipes import Pixels, load_encoder
from maect.stages.imported import Import, import_weights


def imported(folder):
    checkpoint, weights = plain_vit.capi()
    torch.save(checkpoint, folder / "capi.pth")
    layout, new = import_weights(folder / "capi.pth", folder / "run")
    assert (layout, new.size) == ("capi", "tiny")
    return weights, load_any_encoder(folder / "run/encoder.safetensors")


@pytest.mark.parametrize("shape", [(16, 16), (24, 16)])
def test_capis_features_are_those_of_a_plain_forward_pass(tmp_path, shape):
    weights, (module, settings, pooling) = imported(tmp_path)
    assert isinstance(module, TimmEncoder) and (pooling, settings.module) == ("mean", "capi")
    images = torch.randn(2, 3, *shape, dtype=torch.float64)
    expected = plain_vit.capi_tokens(weights, images)
    with torch.no_grad():
        found = module.double()(images)
        torch.testing.assert_close(found.tokens, expected, rtol=1e-6, atol=1e-6)
        assert found.prefixes == 16 and found.grid == (shape[0] // 4, shape[1] // 4)
        mean = module.pool(found.tokens, pooling)
        torch.testing.assert_close(mean, expected[:, 16:].mean(1), rtol=1e-6, atol=1e-6)
        raw = module(images, norm="none", blocks=[3]).blocks[3]
        normal = raw / (raw.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        torch.testing.assert_close(normal, expected, rtol=1e-6, atol=1e-6)


def test_shapes_are_known_before_the_file_is_read():
    large, base = load_encoder("large14"), load_encoder("base", 256)
    capi = large.model_copy(update=Import(layout="capi").shape)
    assert (capi.patch_size, capi.registers, capi.class_token) == (14, 16, False)
    assert (capi.width, capi.depth, capi.heads, capi.image_size) == (1024, 24, 16, 224)
    pixio = base.model_copy(update=Import(layout="pixio").shape)
    assert (pixio.prefix_tokens, pixio.patches, pixio.class_token) == (8, 256, True)
    for size, shape in (("oneb16", (1536, 48, 24)), ("fiveb16", (3072, 48, 32))):
        encoder = load_encoder(size)
        assert (encoder.width, encoder.depth, encoder.heads) == shape and encoder.patch_size == 16
    pixio.check_trainable()
    with pytest.raises(ValueError, match="only plain ViTs are trained, and capi is none"):
        capi.check_trainable()


def test_what_needs_a_plain_vit_refuses_capi_in_one_line(tmp_path, capsys):
    imported(tmp_path)
    with pytest.raises(UserError, match="capi, which is no plain ViT"):
        load_encoder_weights(tmp_path / "run/encoder.safetensors")
    with pytest.raises(UserError, match=r"has no \[CLS\] token"):
        Encoding(tmp_path / "run/encoder.safetensors", torch.device("cpu"), pooling="cls")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert "capi, which is no plain ViT" in capsys.readouterr().err


def test_channels_are_adapted_and_other_image_sizes_work(tmp_path):
    checkpoint, _ = plain_vit.capi()
    grey = Pixels(channels=1, mean=(0.5,), std=(0.5,))
    new = convert(checkpoint, "capi", "x", image_size=32, pixels=grey)
    kernel = new.tensors["patch_embed.proj.weight"]
    summed = checkpoint["backbone.patch_embed.weight"].sum(1, keepdim=True)
    torch.testing.assert_close(kernel, summed)
    assert new.encoder.image_size == 32
