"""What a step asks of the device and the network, counted; docs/gpu.md has it for ViT-L."""

import sys
from pathlib import Path

import pytest
from ranks import run

GPU = str(Path(__file__).parents[2] / "gpu")
# Exchanges of the head of tuning, one BatchNorm each twice; of refinement's heads all together.
TUNE = {"forward": 10, "backward": 5}
HEADS = {"ct_min": TUNE, "ct_aug": TUNE, "refine": {"forward": 8, "backward": 6}}
# Tuning changes no colours here; in refinement all blocks learn, from images of two sizes.
KERNELS = {"ct_min": 1052, "refine": 3000}


def counts(context, recipe):
    """Of the seventh step on each of two ranks, and how many buckets and groups there are."""
    sys.path.insert(0, GPU)
    from counting import bucket_of, counted, narrow
    from first_day import Here, stage_of, trainer_of

    from maect.models import attention, precision
    from maect.train import exchange
    from maect.train.engine import start
    from maect.train.timing import packed, random_batch

    # As on a GPU.
    precision.bfloat16_on, attention.fused_attention = lambda kind: kind, attention.attend
    here = Here(start(context), True, Path(context.meeting).parent)
    stage, encoder = stage_of(here, recipe, "large", 8)
    own = narrow(stage, encoder)
    exchange.BUCKET = bucket_of((stage, encoder), own)
    with trainer_of(here, *own, 8, context) as trainer:
        batch = random_batch(trainer.stage, trainer.encoder, 4)
        batch = packed(batch, trainer.objective.draw, pinned=False)
        found = counted(trainer, [batch] * 8, 7)
    buckets = [bucket.scattered for bucket in trainer.engine._exchange.buckets]
    return found.table(), buckets, len(trainer.engine._peaks)


@pytest.mark.parametrize("recipe", ["mae", "ct_min", "ct_aug", "refine", "fine_tune"])
def test_a_step(recipe, tmp_path):
    table, buckets, groups = run(2, {"function": counts, "recipe": recipe}, log=tmp_path / "log")[0]
    assert sum(buckets) == len(buckets) - 1  # what is read first is nobody's alone
    # One reading, of the step before.
    assert table["waits"] == {"other": 1, "total": 1}
    # Gradients go out during the backward pass, weights come back, and scalars are summed.
    head = HEADS.get(recipe, {"forward": 0, "backward": 0})
    expected = {
        "forward": head["forward"], "backward": len(buckets) + head["backward"],
        "update": sum(buckets), "other": 1,
    }  # fmt: skip
    found = table["collectives"]
    assert {phase: found.get(phase, 0) for phase in expected} == expected
    assert found["total"] == sum(expected.values())
    # AdamW and its counts of steps: a few kernels a group, none a parameter.
    assert table["kernels"]["update"] <= 6 * groups + 10
    # Of ViT-L, in as many buckets.
    assert table["kernels"]["total"] <= KERNELS.get(recipe, 1300)
