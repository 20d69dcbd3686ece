"""Groups, layer-wise decay, schedule, EMA and draws, written a second time from the paper."""

import math

import numpy as np
import pytest
import torch

from maect.recipes import load_encoder, visible_patches
from maect.stages import load_recipe
from maect.train.checkpoint import ParameterSlice
from maect.train.engine import Engine
from maect.train.stage import schedule


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
    shard = ParameterSlice("encoder.blocks.1.w", 0, {"param": weights})
    head = ParameterSlice("head.w", 0, {"param": torch.randn(3)})
    engine = Engine.__new__(Engine)
    engine.slices = [shard, head]
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
