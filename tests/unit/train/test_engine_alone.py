"""What an engine of one rank says of itself, and how it uses its settings."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from maect.core.context import Context
from maect.recipes import load_encoder
from maect.recipes.settings import Computing
from maect.stages import load_recipe
from maect.train import engine
from maect.train.engine import Engine, random_batch, seconds_between, single_rank_group

CPU = torch.device("cpu")


def engine_of(model, computing):
    settings = load_recipe("mae", "base", {"batch_size": 2})
    group = {"params": [*model.parameters()], "peak_lr": 1e-3, "weight_decay": 0.0}
    return Engine(model, settings, [group], CPU, computing)


def test_an_engine_of_one_rank_without_passes():
    """Its learning rates before the first update, the seconds between its marks, its end."""
    model = nn.Linear(3, 2)
    with single_rank_group(Context()):
        ours = engine_of(model, Computing())
        assert ours.learning_rates() == (0, 0) and not ours.captures and not ours.compiled
        first = ours.mark()
        assert 0 <= seconds_between(first, ours.mark()) < 60
        ours.close()
    assert {piece.name for piece in ours.slices} == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("fault", ["", "there is no compiler"])
def test_an_engine_says_whether_its_blocks_are_compiled(fault, monkeypatch):
    asked = []

    def compile_blocks(module, device):
        asked.append((module, device))
        return fault

    monkeypatch.setattr(engine, "compile_blocks", compile_blocks)
    model = nn.Linear(3, 2)
    with single_rank_group(Context()):
        ours = engine_of(model, Computing(compile=True))
        ours.close()
    assert asked == [(model, CPU)]
    assert (ours.compiled, ours.not_compiled) == (not fault, fault)


def test_attention_and_checkpointing_are_those_of_the_config(monkeypatch):
    stage = load_recipe("mae", "tiny", {"batch_size": 4})
    model = stage.objective(load_encoder("tiny"), 0)
    asked = []
    monkeypatch.setattr(engine, "use_attention", lambda *given: asked.append(given))
    computing = Computing(activation_checkpointing=True, attention="flash_attn")
    with single_rank_group(Context()):
        Engine(model, stage, stage.parameter_groups(model), CPU, computing).close()
    assert asked == [(model, "flash_attn")]
    assert model.encoder.checkpointing and model.decoder.checkpointing


def test_deepspeed_is_told_of_the_cpu_and_its_deprecated_calls_are_not_shown(monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    with single_rank_group(Context()), warnings.catch_warnings(record=True) as shown:
        assert os.environ["DS_ACCELERATOR"] == "cpu"
        warnings.warn("all_gather_into_tensor is deprecated", FutureWarning, stacklevel=1)
        dist.all_gather_into_tensor(torch.empty(1), torch.ones(1))
        warnings.warn("another sentence", FutureWarning, stacklevel=1)
    assert [str(one.message) for one in shown] == ["another sentence"]


def test_a_random_batch_has_the_shapes_of_a_decoded_one():
    encoder, stage = load_encoder("tiny"), load_recipe("mae", "tiny")
    one, same, other = (random_batch(stage, encoder, 30, seed) for seed in (0, 0, 1))
    (pixels,) = one.images
    side = encoder.image_size
    assert pixels.shape == (len(stage.view_settings()), 30, 3, side, side)
    assert pixels.dtype == torch.uint8
    assert (pixels.min(), pixels.max()) == (0, 255)
    assert torch.equal(pixels, same.images[0]) and not torch.equal(pixels, other.images[0])
    assert one.step == 0 and one.epochs.tolist() == [0] * 30
    assert one.ids.tolist() == [*range(30)] and one.labels.tolist() == [*range(10)] * 3
