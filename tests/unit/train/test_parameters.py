"""Groups, layer-wise decay, schedule, EMA and draws, written a second time from the paper."""

import math

import numpy as np
import pytest
import torch

from maect.models.vit import seeded
from maect.recipes import Encoder, load_encoder, visible_patches
from maect.stages import load_recipe
from maect.train.checkpoint import Shard
from maect.train.engine import Engine
from maect.train.stage import layer_scale, schedule

TINY = Encoder(
    image_size=16, patch_size=4, width=24, depth=4, heads=2, decoder_width=16, decoder_depth=1,
    decoder_heads=2, mae_pooling="cls", ct_pooling="mean",
)  # fmt: skip


def found_groups(objective, stage):
    """Name of each trained parameter to its (learning rate, weight decay)."""
    return {
        name: (group["peak_lr"], group["weight_decay"])
        for group in stage.parameter_groups(objective)
        for name in group["names"]
    }


def test_layers_decay_over_the_full_depth():
    # ViT-L: block 12 is the first that is tuned; .65^12 = .0057 (protocol of the authors).
    assert layer_scale("blocks.12.mlp.fc1.weight", 24, 0.65) == pytest.approx(0.005688, rel=1e-3)
    assert layer_scale("blocks.23.norm1.weight", 24, 0.65) == 0.65
    assert layer_scale("norm.weight", 24, 0.65) == 1
    for name in ("patch_embed.proj.weight", "cls_token"):
        assert layer_scale(name, 24, 0.65) == pytest.approx(0.65**25)


def test_tuning_groups(tmp_path):
    stage = load_recipe("ct_min", "base", {"frozen_blocks": 2, "batch_size": 256})
    objective = tuned(stage, tmp_path)
    groups = found_groups(objective, stage)
    peak = 1e-4 * 256 * 2 / 256
    for name, (rate, decay) in groups.items():
        if name.startswith("head."):
            assert rate == pytest.approx(1e-4 * 256 * 2 / 256)
            assert decay == (
                1e-5 if name.endswith("weight") and "linear" in kind(objective, name) else 0
            )
            continue
        layer = {"encoder.blocks.2": 0.65**2, "encoder.blocks.3": 0.65, "encoder.norm": 1.0}
        scale = next(value for prefix, value in layer.items() if name.startswith(prefix))
        assert rate == pytest.approx(peak * scale)
        plain = name.endswith("bias") or "norm" in name
        assert decay == (0 if plain else 0.05)
    expected = {n for n, p in objective.named_parameters() if p.requires_grad}
    assert set(groups) == expected
    assert not any(n.startswith(("encoder.blocks.0", "encoder.blocks.1")) for n in groups)
    assert not {"encoder.cls_token", "encoder.patch_embed.proj.weight"} & set(groups)


def kind(objective, name):
    return type(objective.get_submodule(name.rpartition(".")[0])).__name__.lower()


def tuned(stage, tmp_path):
    from maect.models.vit import build_encoder
    from maect.models.weights import save_encoder

    with seeded(0):
        save_encoder(
            tmp_path / "encoder.safetensors", build_encoder(TINY).state_dict(), TINY, "cls"
        )
    return stage.build(TINY, 0, tmp_path)


def test_pretraining_decays_the_tokens_but_no_norm_and_no_bias():
    stage = load_recipe("mae", "base", {"batch_size": 256})
    objective = stage.build(TINY, 0, None)
    groups = found_groups(objective, stage)
    assert set(groups) == {name for name, _ in objective.named_parameters()}
    for name, parameter in objective.named_parameters():
        rate, decay = groups[name]
        assert rate == pytest.approx(1.5e-4 * 2)
        assert decay == (0.05 if parameter.ndim > 1 else 0)
    assert groups["encoder.cls_token"][1] == groups["decoder.mask_token"][1] == 0.05


def test_head_initialisation_trains_the_head_alone(tmp_path):
    stage = load_recipe("head_min", "base")
    groups = found_groups(tuned(stage, tmp_path), stage)
    assert groups and all(name.startswith("head.") for name in groups)


def test_scaled_learning_rates_are_those_of_the_authors():
    mae, ct = load_recipe("mae", "large"), load_recipe("ct_min", "large")
    assert mae.scaled_lr(mae.base_lr) == pytest.approx(1.2e-3)
    assert ct.scaled_lr(ct.base_lr) == pytest.approx(8e-4)
    aug = load_recipe("ct_aug", "huge")
    assert aug.scaled_lr(aug.head.head_lr) == pytest.approx(2e-3)
    paper = load_recipe("mae", "large", {"lr_counts_views": False})
    assert paper.scaled_lr(paper.base_lr) == pytest.approx(6e-4)


def test_schedule():
    rates = [schedule(s, 50, 10) for s in range(50)]
    np.testing.assert_allclose(rates[:10], np.linspace(0, 1, 12)[1:-1])
    cosine = [0.5 * (1 + math.cos(math.pi * t / 40)) for t in range(40)]
    np.testing.assert_allclose(rates[10:], cosine)
    assert rates[0] > 0 and 0 < rates[-1] < 0.01 and rates[10] == 1
    assert schedule(0, 5, 0) == 1
    recipe = load_recipe("ct_min", "large")
    steps = recipe.total_steps(1281167)
    assert steps == 20 * 1281167 // 1024
    peak = max(range(steps), key=lambda step: recipe.lr_multiplier(step, steps))
    assert peak == round(0.2 * steps)


def test_encoder_average():
    torch.manual_seed(0)
    weights = torch.randn(7)
    shard = Shard("encoder.blocks.1.w", 0, {"param": weights})
    head = Shard("head.w", 0, {"param": torch.randn(3)})
    engine = Engine.__new__(Engine)
    engine.shards = [shard, head]
    engine.start_average("encoder.")
    assert "ema" not in head.values and torch.equal(shard.values["ema"], weights)
    expected = weights.double().clone()
    for _ in range(100):
        weights.add_(0.01)
        engine.update_average(0.9999)
        expected = 0.9999 * expected + (1 - 0.9999) * weights.double()
    torch.testing.assert_close(shard.values["ema"].double(), expected, rtol=1e-6, atol=1e-7)
    engine.update_average(0.0)
    torch.testing.assert_close(shard.values["ema"], weights)


def test_visible_patches_are_rounded_down_as_in_mae():
    assert visible_patches(196, 0.75) == 49 and visible_patches(256, 0.75) == 64
    assert visible_patches(load_encoder("tiny").patches, 0.75) == 4
