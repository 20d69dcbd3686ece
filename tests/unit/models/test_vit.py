"""The encoder and MAE's parts against the plainest second writing of their formulas."""

import math

import numpy as np
import pytest
import torch
from plain_vit import mae_table
from torch.nn import functional as F

from maect.models.decoder import Decoder, patchify, reconstruction_loss, unpatchify
from maect.models.vit import build_encoder, seeded, sincos_2d
from maect.models.weights import load_encoder_weights, save_encoder
from maect.recipes import Encoder

TINY = Encoder(
    image_size=16, patch_size=4, width=24, depth=3, heads=2, decoder_width=16, decoder_depth=2,
    decoder_heads=2, mae_pooling="cls", ct_pooling="mean",
)  # fmt: skip


def tiny(seed=0):
    with seeded(seed):
        return build_encoder(TINY)


def test_positions_follow_the_formula():
    np.testing.assert_allclose(sincos_2d(24, 40), mae_table(24, 40, cls=False), atol=1.5e-7)
    with pytest.raises(ValueError, match="width 18 is not a multiple of 4"):
        sincos_2d(18, 2)


def test_masked_encoding_is_that_of_the_visible_patches_alone():
    encoder = tiny().double()
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    kept = torch.tensor([[3, 0, 9], [15, 7, 2]])
    actual = encoder(images, kept).tokens
    for i in range(2):
        tokens = encoder.patch_embed(images[i : i + 1])[0] + encoder.pos_embed[0, 1:]
        x = torch.cat([encoder.cls_token[0], tokens[kept[i]]])[None]
        for block in encoder.blocks:
            x = block(x)
        torch.testing.assert_close(actual[i], encoder.norm(x)[0])


def test_pre_training_with_registers_masks_patches_only():
    shape = TINY.model_copy(update={"registers": 3})
    with seeded(0):
        encoder, decoder = build_encoder(shape), Decoder(shape)
    images, order = torch.randn(2, 3, 16, 16), torch.stack([torch.randperm(16) for _ in range(2)])
    tokens = encoder(images, order[:, :4]).tokens
    assert tokens.shape == (2, 1 + 3 + 4, 24)
    pixels = decoder(tokens, order)
    assert pixels.shape == (2, 16, 48)
    without = torch.cat([tokens[:, :1], tokens[:, 4:]], dim=1)
    decoder.registers = 0
    assert torch.equal(decoder(without, order), pixels)
    reconstruction_loss(pixels, images, order, 4, normalize=True).backward()
    assert encoder.reg_token.grad.abs().max() > 0


def test_initial_values_do_not_depend_on_earlier_draws():
    torch.manual_seed(1)
    first = tiny().state_dict()
    torch.randn(10)
    state = torch.get_rng_state()
    second = tiny().state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert not torch.equal(tiny(1).cls_token, tiny().cls_token)


def test_initialisation_is_maes():
    encoder = tiny()
    bound = math.sqrt(6 / (24 + 72))  # Xavier, of the joint query-key-value layer
    weight = encoder.blocks[0].attn.qkv.weight.detach()
    assert weight.abs().max() <= bound and weight.std() == pytest.approx(
        bound / math.sqrt(3), rel=0.1
    )
    assert encoder.blocks[0].attn.qkv.bias.abs().max() == 0
    assert encoder.patch_embed.proj.bias.abs().max() > 0  # torch's default, as in MAE
    assert encoder.cls_token.detach().std() == pytest.approx(0.02, rel=0.5)
    assert encoder.norm.eps == 1e-6


def test_freezing_changes_no_value_and_builds_no_graph_below():
    free, frozen = tiny(), tiny()
    frozen.freeze(3)
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(free(images).tokens, frozen(images).tokens)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.numel()) or t, lambda t: t
    ):
        frozen(images)
        # Only the final norm stores anything: its input, scale and statistics.
        assert 0 < sum(saved) < 3 * 2 * 17 * 24
        saved.clear()
        with torch.no_grad():
            free(images)
    assert not saved


def reference_mae_loss(prediction, images, masked, p):
    """He et al. 2022, in loops over images and patches."""
    errors = []
    for i, image in enumerate(images.numpy()):
        for patch in masked[i]:
            row, column = divmod(patch, images.shape[3] // p)
            pixels = image[:, row * p : row * p + p, column * p : column * p + p]
            pixels = pixels.transpose(1, 2, 0).flatten()
            target = (pixels - pixels.mean()) / np.sqrt(pixels.var(ddof=1) + 1e-6)
            errors.append(np.square(prediction[i, patch].numpy() - target).mean())
    return np.mean(errors)


def test_mae_loss_against_loops():
    torch.manual_seed(0)
    images = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    prediction = torch.randn(3, 16, 48, dtype=torch.float64)
    order = torch.stack([torch.randperm(16) for _ in range(3)])
    actual = reconstruction_loss(prediction, images, order, 4, normalize=True)
    expected = reference_mae_loss(prediction, images, order[:, 4:].tolist(), 4)
    assert float(actual) == pytest.approx(expected, rel=1e-12)
    raw = reconstruction_loss(prediction, images, order, 4, normalize=False)
    hidden = order[:, 4:, None].expand(-1, -1, 48)
    plain = F.mse_loss(prediction.gather(1, hidden), patchify(images, 4).gather(1, hidden))
    torch.testing.assert_close(raw, plain)


def test_patches_become_images_again():
    images = torch.randn(2, 4, 12, 12)
    patches = patchify(images, 3)
    assert torch.equal(patches[0, 1].view(3, 3, 4), images[0, :, :3, 3:6].permute(1, 2, 0))
    assert torch.equal(unpatchify(patches, 3), images)


def test_decoder_has_the_authors_norms_and_biases():
    decoder = Decoder(TINY)
    norms = [module for module in decoder.modules() if isinstance(module, torch.nn.LayerNorm)]
    assert len(norms) == 5 and {norm.eps for norm in norms} == {1e-6}
    assert all(block.attn.qkv.bias is not None for block in decoder.blocks)


def test_decoder_puts_patches_back_in_their_places():
    with seeded(0):
        decoder = Decoder(TINY).double()
    tokens = torch.randn(2, 1 + 5, 24, dtype=torch.float64)
    order = torch.stack([torch.randperm(16) for _ in range(2)])
    actual = decoder(tokens, order)
    for i in range(2):
        line = decoder.mask_token[0].expand(16, -1).clone()
        for rank in range(5):
            line[order[i, rank]] = decoder.embed(tokens[i, 1 + rank])
        x = torch.cat([decoder.embed(tokens[i, :1]), line])[None] + decoder.pos_embed
        for block in decoder.blocks:
            x = block(x)
        expected = decoder.pred(decoder.norm(x))[0, 1:]
        torch.testing.assert_close(actual[i], expected, rtol=1e-6, atol=1e-7)


def test_same_weights_same_bytes(tmp_path):
    """safetensors orders its texts at random in every process and call."""
    weights = tiny().state_dict()
    written = set()
    for number in range(6):
        path = tmp_path / f"{number}.safetensors"
        save_encoder(path, weights, TINY, "mean")
        written.add(path.read_bytes())
        module, settings, pooling = load_encoder_weights(path)
        assert settings == TINY and pooling == "mean" and not module.training
        torch.testing.assert_close(module.state_dict(), weights, rtol=0, atol=0)
    assert len(written) == 1
