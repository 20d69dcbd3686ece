"""The stages of MIM-Refiner: the authors' settings cell by cell, rates, blocks and views."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from maect.core.errors import UserError
from maect.data.loader import Batch
from maect.recipes import Encoder, View, load_encoder
from maect.stages import check_source, load_recipe
from maect.stages.refine import Refine, RefineHeads

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

# The authors' files, stage 2 and stage 3 of l16_mae, h14_mae, l16_d2v2, h14_d2v2.
TABLE = """
size    recipe       epochs2 epochs3 batch peak2 peak3  tau blocks        number local
large   refine       20      30      1024  8e-4  1.6e-3 0.2 16..23        8      96
huge14  refine       20      30      512   4e-4  8e-4   0.3 20..31        12     98
large   refine_d2v2  20      20      1024  8e-4  1.6e-3 0.2 16..23        8      96
huge14  refine_d2v2  20      20      512   4e-4  8e-4   0.3 20..31        12     98
"""
ROWS = [line.split() for line in TABLE.strip().splitlines()]
COMMON = {
    "queue_size": 65536, "projector_hidden": 2048, "predictor_hidden": 4096, "embedding": 256,
    "head_weight_decay": 1e-5, "negatives": "own", "terms": "released", "statistics": "joint",
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS[1:], ids=lambda row: f"{row[0]}-{row[1]}")
def test_every_cell(row):
    size, recipe, *_ = row
    heads, refine = load_recipe("refine_heads", size), load_recipe(recipe, size)
    assert isinstance(heads, RefineHeads) and isinstance(refine, Refine)
    read = refine.head.read(load_encoder(size).depth)
    assert heads.head.read(load_encoder(size).depth) == read
    ours = {
        "size": size, "recipe": recipe, "epochs2": heads.epochs, "epochs3": refine.epochs,
        "batch": refine.batch_size, "peak2": heads.scaled_lr(heads.head.head_lr),
        "peak3": refine.scaled_lr(refine.head.head_lr), "tau": refine.head.temperature,
        "blocks": f"{read[0]}..{read[-1]}", "number": len(read), "local": refine.local_size,
    }  # fmt: skip
    assert [*ours] == ROWS[0]
    for value, printed in zip(ours.values(), row, strict=True):
        assert (
            float(printed) == pytest.approx(value)
            if printed[0].isdigit() and ".." not in (printed)
            else printed == value
        )
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
        stage.check_encoder(load_encoder(size))
    assert (refine.weight_decay, refine.layer_decay, refine.encoder_ema) == (0.05, 0.65, 0.9999)
    assert (refine.frozen_blocks, refine.class_token_decay) == (0, False)
    assert refine.encoder_average == 0.9999 and heads.encoder_average is None


def test_variants_of_the_ablations():
    plain, small = View(crop_scale=(0.25, 1)), View(crop_scale=(0.05, 0.25), size=96)
    for recipe, epochs in (("refine_heads_min", 20), ("refine_min", 10)):
        stage = load_recipe(recipe, "large")
        assert stage.view_settings() == (plain,) * 2 + (small,) * 10 and stage.epochs == epochs
    for recipe in ("refine_heads_global", "refine_global"):
        stage = load_recipe(recipe, "large")
        views = stage.view_settings()
        assert len(views) == 2 and views[0].crop_scale == (0.08, 1) and stage.epochs == 20


def test_rates():
    """Cosine to an absolute rate; layers by their depth; no decay of [CLS]."""
    encoder = load_encoder("tiny")
    stage = load_recipe("refine", "tiny", {"epochs": 10, "min_lr": 1e-5})
    groups = stage.parameter_groups(stage.objective(encoder, 0))
    found = {n: (g["peak_lr"], g["weight_decay"]) for g in groups for n in g["names"]}
    peak = 4e-3 * 128 / 256
    assert found["encoder.norm.weight"] == (peak, 0)
    assert found["encoder.blocks.3.attn.qkv.weight"] == (pytest.approx(peak * 0.65), 0.05)
    assert found["encoder.patch_embed.proj.weight"] == (pytest.approx(peak * 0.65**5), 0.05)
    assert found["encoder.cls_token"] == (pytest.approx(peak * 0.65**5), 0)
    assert found["heads.projector.0.weight"] == (2e-3 * 128 / 256, 1e-5)
    assert found["heads.projector.1.weight"] == (2e-3 * 128 / 256, 0)
    decayed = stage.model_copy(update={"class_token_decay": True})
    assert decayed.encoder_rates("cls_token", 4)[1] == 0.05
    steps, warmup = 100, 10
    for step in range(steps):
        t = step - warmup
        cosine = 1e-5 + (peak - 1e-5) * (1 + math.cos(math.pi * t / (steps - warmup))) / 2
        expected = peak * (step + 1) / (warmup + 1) if t < 0 else cosine
        assert peak * stage.lr_multiplier(step, steps) == pytest.approx(expected)
    heads = load_recipe("refine_heads", "tiny")
    objective = heads.objective(encoder, 0)
    names = [name for group in heads.parameter_groups(objective) for name in group["names"]]
    assert names and all(name.startswith("heads.") for name in names)
    assert not objective.encoder.training and objective.heads.training


def batch_of(stage, encoder, images, seed=0):
    noise, ids = torch.Generator().manual_seed(seed), np.arange(images)
    pixels = tuple(
        torch.randint(0, 256, (views, images, 3, side, side), dtype=torch.uint8, generator=noise)
        for side, views in ((encoder.image_size, 2), (stage.local_size, stage.local_views))
        if views
    )
    return Batch(0, ids, ids * 0, ids % 3, pixels)


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
        views = objective.prepare(batch_of(stage, encoder, 4), torch.device("cpu"))
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
    ],
)
def test_what_does_not_fit_the_encoder(changes, message):
    with pytest.raises(ValueError, match=message):
        load_recipe("refine", "tiny", changes).check_encoder(load_encoder("tiny"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warmup_epochs": 25}, "warmup_epochs 25.0 of 25 epochs"),
        ({"min_lr": 0.1}, "min_lr 0.1 is above the peak"),
        ({"mask_ratio": 0.5}, "less than or equal to 0"),
        ({"accumulation": 2}, "accumulation must be 1"),
        ({"batch_size": 100}, "does not divide queue_size 1024"),
        ({"augmentation": "mae"}, "augmentation"),
        ({"head": {"lookup": "none"}}, "unknown key 'head.lookup'"),
        ({"warmup_fraction": 0.2}, "unknown key 'warmup_fraction'"),
    ],
)
def test_settings_that_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        load_recipe("refine", "tiny", changes)


def test_heads_that_a_run_goes_on_from():
    encoder = load_encoder("tiny")
    heads = load_recipe("refine_heads", "tiny")
    source = ("heads", heads, encoder)
    refine = load_recipe("refine", "tiny")
    assert refine.takes(heads) == ("encoder.safetensors", "heads.safetensors")
    for blocks in ([2, 3], [3], 1, 2):
        stage = load_recipe("refine", "tiny", {"head": {"blocks": blocks}})
        check_source("run", stage, encoder, source, "from")
    with pytest.raises(UserError, match=r"block 1 has no head among \[2, 3\] of heads"):
        stage = load_recipe("refine", "tiny", {"head": {"blocks": 3}})
        check_source("run", stage, encoder, source, "from")
    with pytest.raises(UserError, match=r"heads.embedding 32 differs from 64 of heads"):
        stage = load_recipe("refine", "tiny", {"head": {"embedding": 32}})
        check_source("run", stage, encoder, source, "from")
    # The NNCLR head of combined pre-training is another thing.
    combined = load_recipe("mae", "tiny", {"contrastive": "combined", "head": {
        "topk": 1, "temperature": 0.2, "projector_ema": 0.0, "head_lr": 1e-3,
        "head_weight_decay": 0.0, "embedding": 32}})  # fmt: skip
    assert refine.takes(combined) == ("encoder.safetensors",)
    check_source("run", refine, encoder, ("combined", combined, encoder), "from")


def test_kernels_do_not_grow_with_the_heads():
    """But for the look-up of each, and what is logged of each."""
    from fake_gpu import count

    shape = Encoder(
        image_size=20, patch_size=5, width=32, depth=4, heads=2, decoder_width=32,
        decoder_depth=1, decoder_heads=2, mae_pooling="cls", ct_pooling="cls",
    )  # fmt: skip
    kernels = {}
    for heads in (1, 2, 4):
        head = {"blocks": heads, "queue_size": 64, "projector_hidden": 16, "embedding": 8,
                "predictor_hidden": 16}  # fmt: skip
        stage = load_recipe(
            "refine", "base", {"batch_size": 8, "local_size": 10, "head": {**head, "topk": 3}}
        )
        step = count(stage, shape, 8)
        kernels[heads] = step.forward.total(), step.backward.total()
    for more, fewer, added in ((2, 1, 1), (4, 2, 2)):
        forward, backward = (a - b for a, b in zip(kernels[more], kernels[fewer], strict=True))
        assert forward <= 11 * added  # product, mask, top-k and choice; pooled tokens, twice
        assert backward <= 9 * added  # of pooled tokens, added to what comes from above
