"""The model of a step on many GPUs: what `docs/gpu.md` and `docs/scaling.md` say of it."""

import sys
from pathlib import Path

import pytest

from maect.recipes import load_encoder
from maect.stages import load_recipe

sys.path[:0] = [str(Path(__file__).parents[1] / "benchmarks")]


@pytest.mark.parametrize(("gpu", "ranks", "least"), [("A100", 16, 0.42), ("H100", 8, 0.33)])
def test_what_gpus_reach_in_pretraining(gpu, ranks, least):
    """Of the peak of a data sheet, with the buckets and waits of the engine."""
    from fake_gpu import GPUS
    from scaling import Machine, buckets, step, terms

    stage, encoder = load_recipe("mae", "large", {}), load_encoder("large")
    assert stage.batch_size == 1024
    parts, _ = buckets(stage, encoder)
    # What is waited for before anything is computed, no rank has to get from another.
    assert [part.everywhere for part in parts if part.read < 0] == [True]
    seconds = step(terms(stage, encoder, ranks, Machine(gpu)))
    flops = stage.flops_per_image(encoder) * stage.batch_size / ranks
    assert flops / seconds / GPUS[gpu].peak >= least


def test_launches_are_those_of_what_learns():
    """A frozen block has no backward pass: tuning launches more kernels than the head's stage."""
    from scaling import Machine, terms

    encoder = load_encoder("large")
    head, tune, mae = (
        terms(load_recipe(name, "large", {}), encoder, 16, Machine())["launches"]
        for name in ("head_min", "ct_min", "mae")
    )
    # In tuning half of the 24 blocks learn: 37 kernels each, in place of 12.
    assert 12 * 20 < (tune - head) / Machine().launch < 12 * 37
    assert tune < mae
