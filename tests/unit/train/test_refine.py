"""The stages of MIM-Refiner: the authors' settings cell by cell, blocks and views."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from maect.core.errors import UserError
from maect.experiment import load
from maect.recipes import View, load_encoder
from maect.stages import check_source, load_recipe
from maect.stages.refine import Refine, RefineHeads
from maect.train.engine import random_batch

# The authors' files in stage2 and stage3, each with our run of `refined` from those weights. Blocks
# are those of stage 3, numbered from 0; frozen are the first blocks and what comes before them.
TABLE = """
name         run                      norm epochs2 epochs3 batch peak2 peak3  tau  blocks  number pool local frozen
l16_mae      refine_large             pre  20      30      1024  8e-4  1.6e-3 0.2  16..23  8      cls  96    0
h14_mae      refine_huge14            pre  20      30      512   4e-4  8e-4   0.3  20..31  12     cls  98    0
twob14_mae   refine_twob14            pre  20      20      512   4e-4  8e-4   0.35 16..23  8      cls  98    6
l16_d2v2     refine_d2v2_large        post 20      20      1024  8e-4  1.6e-3 0.2  16..23  8      cls  96    0
h14_d2v2     refine_d2v2_huge14       post 20      20      512   4e-4  8e-4   0.3  20..31  12     cls  98    0
l16_dbot     refine_dbot_large        pre  20      30      1024  8e-4  1.6e-3 0.2  16..23  8      cls  96    0
h14_dbot     refine_dbot_huge14       pre  20      30      512   4e-4  8e-4   0.3  20..31  12     cls  98    0
l16_crossmae refine_crossmae_large    pre  20      30      1024  8e-4  1.6e-3 0.2  16..23  8      mean 96    0
"""  # noqa: E501
ROWS = [line.split() for line in TABLE.strip().splitlines()]
COMMON = {
    "queue_size": 65536, "projector_hidden": 2048, "predictor_hidden": 4096, "embedding": 256,
    "head_weight_decay": 1e-5, "negatives": "own", "terms": "released", "statistics": "joint",
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS[1:], ids=lambda row: row[0])
def test_every_cell(row):
    runs = load("refined").runs
    run = runs[row[1]]
    refine, shape, source = run.settings, run.encoder, runs[run.source]
    heads, weights = source.settings, runs[source.source]
    assert isinstance(heads, RefineHeads) and isinstance(refine, Refine)
    assert weights.stage == "import" and weights.encoder.norm == source.encoder.norm == shape.norm
    read = refine.head.read(shape.depth)
    lower = {"twob14_mae": (12, 13, 14, 15)}  # that only stage 2 has
    assert heads.head.read(shape.depth) == lower.get(row[0], ()) + read
    assert heads.export_pooling(shape) == refine.export_pooling(shape)
    ours = {
        "name": row[0], "run": run.name, "norm": shape.norm, "epochs2": heads.epochs,
        "epochs3": refine.epochs, "batch": refine.batch_size,
        "peak2": heads.scaled_lr(heads.head.head_lr),
        "peak3": refine.scaled_lr(refine.head.head_lr), "tau": refine.head.temperature,
        "blocks": f"{read[0]}..{read[-1]}", "number": len(read),
        "pool": refine.export_pooling(shape),
        "local": refine.local_size, "frozen": refine.frozen_blocks,
    }  # fmt: skip
    assert [*ours] == ROWS[0]
    for value, printed in zip(ours.values(), row, strict=True):
        if isinstance(value, str):
            assert printed == value
        else:
            assert float(printed) == pytest.approx(value)
    assert refine.scaled_lr(refine.base_lr) == refine.scaled_lr(refine.head.head_lr)
    assert (heads.head.topk, refine.head.topk) == (1, 20)
    for stage in (heads, refine):
        assert {key: getattr(stage.head, key) for key in COMMON} == COMMON
        assert stage.head.temperature == refine.head.temperature
        assert (stage.batch_size, stage.local_size) == (refine.batch_size, refine.local_size)
        assert (stage.beta1, stage.beta2) == (0.9, 0.95)
        assert (stage.warmup_epochs, stage.min_lr, stage.precision) == (4, 1e-6, "bf16")
        colours = {"flip": 0.5, "jitter": 0.8, "gray": 0.2}
        assert stage.view_settings() == (
            View(crop_scale=(0.25, 1), blur=1.0, **colours),
            View(crop_scale=(0.25, 1), blur=0.1, solarize=0.2, **colours),
            *[View(crop_scale=(0.05, 0.25), blur=0.5, size=stage.local_size, **colours)] * 10,
        )
        stage.check_encoder(shape)
    assert (refine.weight_decay, refine.layer_decay, refine.encoder_ema) == (0.05, 0.65, 0.9999)
    assert refine.encoder_rates("cls_token", shape.depth)[1] == 0
    decayed = refine.model_copy(update={"class_token_decay": True})
    assert decayed.encoder_rates("cls_token", shape.depth)[1] == 0.05
    assert refine.encoder_average == 0.9999 and heads.encoder_average is None


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_what_each_head_reads(norm):
    """Raw output of its block; of the last one the encoder's output."""
    encoder = load_encoder("tiny").model_copy(update={"norm": norm, "ct_pooling": "cls"})
    stage = load_recipe(
        "refine", "tiny", {"head": {"blocks": [0, 2, 3], "queue_size": 256}, "precision": "fp32"}
    )
    objective = stage.objective(encoder, 0)
    with torch.no_grad():
        for name, value in objective.encoder.named_parameters():
            if name.startswith("norm."):
                value.mul_(2).add_(0.1)
        views = objective.prepare(random_batch(stage, encoder, 4), torch.device("cpu"))
        outputs, seen = {}, []
        for number, block in enumerate(objective.encoder.blocks):
            block.register_forward_hook(
                lambda _, inputs, x, n=number: outputs.setdefault(n, []).append(x[:, 0])
            )
        objective.heads.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        loss, metrics = objective(views)
    assert seen[0].shape == (3, 6, 4, 64)
    for row, block in ((0, 0), (1, 2), (2, 3)):
        raw = torch.cat([x.unflatten(0, (-1, 4)) for x in outputs[block]])
        expected = objective.encoder.norm(raw) if block == 3 else raw
        torch.testing.assert_close(seen[0][row], expected)
        assert torch.equal(seen[0][row], raw) == (block < 3 or norm == "post")
    assert loss.item() == pytest.approx(sum(float(metrics[f"loss.{n}"]) for n in (0, 2, 3)))


def test_weights_of_the_heads_by_the_epoch_of_each_sample():
    """A lower head that has ended leaves nothing in the loss, and is still logged."""
    encoder = load_encoder("tiny")
    changes = {
        "epochs": 10, "precision": "fp32", "pool": "cls",
        "head": {"queue_size": 256, "weights": "staggered_step"},
    }  # fmt: skip
    objective = load_recipe("refine", "tiny", changes).objective(encoder, 0)
    assert objective.head_pooling == objective.export_pooling == "cls" != encoder.ct_pooling
    begins = random_batch(objective.stage, encoder, 4)
    for epochs, expected in (
        ([0, 0, 0, 1], [1, 1, 1, 1]), ([1, 2, 1, 2], [1, 0, 1, 0]), ([9, 9, 9, 9], [0, 0, 0, 0])
    ):  # fmt: skip
        views = objective.prepare(replace(begins, epochs=np.array(epochs)), torch.device("cpu"))
        assert views.weights.tolist() == [expected, [1] * 4]
        with torch.no_grad():
            loss, metrics = objective(views)
        both = metrics["loss.2"] + metrics["loss.3"]
        assert metrics["loss.3"] <= loss * (1 + 1e-6) and loss <= both * (1 + 1e-6)
        if sum(expected) in (0, 4):
            assert loss.item() == pytest.approx(float(both if sum(expected) else metrics["loss.3"]))


def test_lookups_are_drawn_for_every_head_and_view():
    encoder = load_encoder("tiny")
    one = load_recipe("refine", "tiny", {"head": {"blocks": 1}}).objective(encoder, 0)
    two = load_recipe("refine", "tiny").objective(encoder, 0)
    epochs, ids = np.zeros(64, np.int64), np.arange(64)
    first, both = (o.draw(epochs, ids)["neighbors"] for o in (one, two))
    assert first.shape == (2, 64) and both.shape == (4, 64)
    assert torch.equal(both[:2], first)  # head 0 has the numbers of a single one
    assert len({tuple(row.tolist()) for row in both}) == 4
    assert both.min() == 0 and both.max() == 19
    tune = load_recipe("ct_aug", "tiny").objective(encoder, 0)
    assert torch.equal(tune.draw(epochs, ids)["neighbors"], first)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"local_size": 16}, "local_size 16 is not below image_size 16"),
        ({"local_size": 6}, "views of 6 pixels: not a multiple of patch_size 4"),
        ({"head": {"blocks": 5}}, "blocks 5: the encoder has 4"),
        ({"head": {"blocks": [1, 2]}}, "up to the encoder's last block 3"),
        ({"frozen_blocks": 4}, "leaves none of the 4 blocks to refine"),
        ({"warmup_epochs": 25}, "warmup_epochs 25.0 of 25 epochs"),
        ({"min_lr": 0.1}, "min_lr 0.1 is above the peak"),
        ({"mask_ratio": 0.5}, "less than or equal to 0"),
        ({"crop_scale": [20, 100]}, r"crop_scale: \[20.0, 100.0\] is no range"),
        ({"batch_size": 100}, "does not divide queue_size 1024"),
        ({"augmentation": "mae"}, "augmentation"),
        ({"head": {"lookup": "none"}}, "unknown key 'head.lookup'"),
    ],
)
def test_settings_that_are_refused(changes, message):
    """Alone, or together with the encoder's shape."""
    with pytest.raises((UserError, ValueError), match=message):
        load_recipe("refine", "tiny", changes).check_encoder(load_encoder("tiny"))


def test_heads_that_a_run_goes_on_from():
    encoder, heads = load_encoder("tiny"), load_recipe("refine_heads", "tiny")
    refine = load_recipe("refine", "tiny")
    assert refine.inputs(heads) == ("encoder.safetensors", "heads.safetensors")

    def check(changes):
        stage = load_recipe("refine", "tiny", changes)
        check_source("run", stage, encoder, ("heads", heads, encoder), "from")

    for blocks in ([2, 3], [3], 1, 2):
        check({"head": {"blocks": blocks}})
    for changes, words in (
        ({"pool": "cls"}, "pool cls differs from mean of heads"),
        ({"head": {"blocks": 3}}, r"block 1 has no head among \[2, 3\] of heads"),
        ({"head": {"embedding": 32}}, r"heads\.embedding 32 differs from 64 of heads"),
    ):
        with pytest.raises(UserError, match=words):
            check(changes)
    # The NNCLR head of combined pre-training is another thing.
    combined = load_recipe("mae", "tiny", {"contrastive": "combined", "head": {
        "topk": 1, "temperature": 0.2, "projector_ema": 0.0, "head_lr": 1e-3,
        "head_weight_decay": 0.0, "embedding": 32}})  # fmt: skip
    assert refine.inputs(combined) == ("encoder.safetensors",)
    check_source("run", refine, encoder, ("combined", combined, encoder), "from")
