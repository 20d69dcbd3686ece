"""What an encoder gives by name, for images of any size, against timm and plain second writings."""

import copy
from functools import partial

import pytest
import timm.models.vision_transformer as timm_vit
import torch
from plain_vit import plain_tokens
from timm.layers import resample_abs_pos_embed

from maect.core.errors import UserError
from maect.models.vit import VisionEncoder, build_encoder, seeded, timm_arguments
from maect.recipes import Encoder

SHAPE = Encoder(
    image_size=16, patch_size=4, width=24, depth=4, heads=2, decoder_width=16, decoder_depth=2,
    decoder_heads=2, mae_pooling="cls", ct_pooling="mean", registers=2,
)  # fmt: skip


def encoder_of(**changes) -> VisionEncoder:
    with seeded(0):
        module = build_encoder(SHAPE.model_copy(update=changes))
        for parameter in module.parameters():  # norms, too, so that none is the identity
            torch.nn.init.normal_(parameter, std=0.2)
    return module


def timms(module: VisionEncoder, **options) -> timm_vit.VisionTransformer:
    """timm's own model with the same weights; registers have no positions."""
    other = timm_vit.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=24, depth=4, num_heads=2, num_classes=0,
        reg_tokens=2, **options,
    )  # fmt: skip
    other.load_state_dict(module.state_dict())
    return other


@pytest.mark.parametrize("norm", ["last", "none", "all"])
def test_blocks_are_timms_intermediates(norm):
    module, images = encoder_of(), torch.randn(3, 3, 16, 16)
    found = module(images, blocks=[1, 3], norm=norm)
    expected = timms(module).forward_intermediates(
        images, indices=[1, 3], norm=norm == "all", return_prefix_tokens=True,
        output_fmt="NLC", intermediates_only=True,
    )  # fmt: skip
    for block, (patches, prefix) in zip([1, 3], expected, strict=True):
        torch.testing.assert_close(found.patch_tokens(block), patches, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.prefix_tokens(block), prefix, rtol=1e-5, atol=1e-5)
    raw = found.blocks[3]
    last = {"last": module.norm(raw), "none": raw, "all": raw}[norm]
    assert torch.equal(found.tokens, last) and found.grid == (4, 4) and found.prefixes == 3
    assert found.prefix_tokens().shape == (3, 3, 24) and found.patch_tokens().shape == (3, 16, 24)


def test_asking_for_blocks_changes_nothing_and_reaches_the_gradients():
    images, order = torch.randn(3, 3, 16, 16), torch.rand(3, 16).argsort(1)
    kept = order[:, :5]
    plain, saving = encoder_of(), encoder_of()
    saving.checkpointing = True
    gradients = []
    for module in (plain, saving):
        module.freeze(1)
        found = module(images, kept, blocks=range(4), pooling="cls")
        assert torch.equal(found.tokens, module(images, kept).tokens)
        assert found.blocks[2].shape == (3, 24) and found.tokens.shape == (3, 8, 24)
        raw = module(images, kept, blocks=[2]).blocks[2]
        assert torch.equal(found.blocks[2], module.pool(raw, "cls"))
        assert not found.blocks[0].requires_grad and found.blocks[1].requires_grad
        found.blocks[2].pow(3).sum().backward()
        gradients.append({n: p.grad for n, p in module.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert {name.split(".")[1] for name in gradients[0]} == {"1", "2"}  # none above, none frozen
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name])


def test_unknown_blocks_and_images_that_patches_do_not_tile_are_refused():
    with pytest.raises(ValueError, match="no block 4 of 4"):
        encoder_of()(torch.randn(1, 3, 16, 16), blocks=[4])
    with pytest.raises(ValueError, match="images of 16 x 18 pixels: patches have 4"):
        encoder_of()(torch.randn(1, 3, 16, 18))


@pytest.mark.parametrize(("height", "width"), [(8, 8), (24, 24), (8, 20), (4, 16)])
def test_other_sizes_are_timms_without_antialiasing(height, width, monkeypatch):
    module, images = encoder_of(), torch.randn(2, 3, height, width)
    plain = partial(resample_abs_pos_embed, antialias=False)
    monkeypatch.setattr(timm_vit, "resample_abs_pos_embed", plain)
    expected = timms(module, dynamic_img_size=True).forward_features(images)
    found = module(images)
    torch.testing.assert_close(found.tokens, expected, rtol=1e-5, atol=1e-5)
    assert found.grid == (height // 4, width // 4)


def test_positions_are_made_once_and_follow_the_encoders_own():
    module = encoder_of()
    own = module.positions(2, 2)
    assert module.positions(2, 2) is own and module.positions(4, 4) is module.pos_embed
    assert not any("resampled" in name for name in module.state_dict())
    state = module.state_dict()
    state["pos_embed"] = 2 * state["pos_embed"]
    module.load_state_dict(state)
    torch.testing.assert_close(module.positions(2, 2), 2 * own)
    assert module.double().positions(2, 2).dtype == torch.float64
    with torch.inference_mode():
        made = copy.deepcopy(module).positions(2, 3)
    assert not made.is_inference()  # a training may use what an evaluation has asked for first


@pytest.mark.parametrize("changes", [{}, {"class_token": False}, {"registers": 0}])
def test_pooled_features_are_those_of_timms_models(changes):
    """Built with the arguments that an export names; `fc_norm` is fine-tuning's."""
    module, images = encoder_of(**changes), torch.randn(3, 3, 16, 16)
    tokens = module(images).tokens
    if module.settings.class_token:
        assert torch.equal(module.pool(tokens, "cls"), tokens[:, 0])
    else:
        with pytest.raises(UserError, match=r"no \[CLS\] token"):
            module.pool(tokens, "cls")
    first = module.settings.prefix_tokens
    torch.testing.assert_close(module.pool(tokens, "mean_cls"), tokens[:, :first].mean(1))
    for pooling in ("cls", "mean", "fc_norm")[not module.settings.class_token :]:
        arguments = timm_arguments(module.settings, pooling)
        assert ("reg_tokens" in arguments) == (module.settings.registers > 0)
        other = timm_vit.VisionTransformer(**arguments, num_classes=0)
        if pooling == "fc_norm":
            module.norm_after_pooling()
        other.load_state_dict(module.state_dict())
        found = module.pool(module(images).tokens, pooling)
        torch.testing.assert_close(found, other(images), rtol=1e-5, atol=1e-5)


def test_post_norm_blocks_by_their_formula():
    """data2vec 2.0: a norm behind the embedding and behind each sum, none at the end."""
    module = encoder_of(norm="post", registers=0, depth=2).double()
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    found = module(images, blocks=[0, 1])
    expected = plain_tokens(module.state_dict(), images)
    torch.testing.assert_close(found.tokens, expected, rtol=1e-10, atol=1e-10)
    assert torch.equal(found.blocks[1], found.tokens)
    first = {k: v for k, v in module.state_dict().items() if not k.startswith("blocks.1")}
    expected = plain_tokens(first, images)
    torch.testing.assert_close(found.blocks[0], expected, rtol=1e-10, atol=1e-10)
    module.freeze(1)
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
    assert {"norm_pre.weight", "norm_pre.bias", "cls_token"} <= frozen
