"""Device memory as it is planned, against a pretended device that counts allocations."""

import sys
from pathlib import Path

import pytest
from documented import multicrop

from maect.core.errors import UserError
from maect.recipes import Encoder, load_encoder
from maect.recipes.cost import GIB, PassMode, gpu_memory
from maect.recipes.settings import PLAIN, Computing, separate
from maect.stages import STAGES, load_recipe

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

SHAPE = Encoder(
    image_size=40, patch_size=5, width=96, depth=4, heads=2, decoder_width=64, decoder_depth=2,
    decoder_heads=2, mae_pooling="cls", ct_pooling="mean",
)  # fmt: skip
HEAD = {
    "queue_size": 512, "projector_hidden": 80, "predictor_hidden": 160, "embedding": 16,
    "temperature": 0.2, "topk": 3, "projector_ema": 0.9, "head_lr": 1e-4,
    "head_weight_decay": 0.0,
}  # fmt: skip
REFINER = {
    "blocks": (1, 2, 3), "queue_size": 512, "projector_hidden": 80, "predictor_hidden": 160,
    "embedding": 16, "topk": 3,
}  # fmt: skip
LOCAL = {"local_size": 20, "local_views": 4}
# What `deterministic: true` could not do on a GPU, by `torch.use_deterministic_algorithms`.
WITHOUT_ORDER = tuple(
    f"aten.{name}"
    for name in (
        "put_", "histc", "bincount", "median", "nll_loss2d", "grid_sampler", "upsample",
        "reflection_pad", "_adaptive_avg_pool", "avg_pool", "max_unpool", "_ctc_loss",
    )
)  # fmt: skip
CHECKPOINTING = {"activation_checkpointing": True}
CAPTURED = {"cuda_graphs": True}
CASES = {
    "mae": ("mae", {}),
    "mae, few images, float32": ("mae", {"batch_size": 16, "precision": "fp32"}),
    "mae, checkpointing": ("mae", CHECKPOINTING),
    "head": ("head_min", {"head": HEAD}),
    "tune, colours": ("ct_aug", {"frozen_blocks": 3, "head": HEAD}),
    "tune, checkpointing": ("ct_min", {"frozen_blocks": 0, "head": HEAD, **CHECKPOINTING}),
    "two sizes": ("multicrop", {}),
    "refine, bfloat16": ("refine", {**LOCAL, "head": {**REFINER, "precision": "bf16"}}),
    "refine, frozen": ("refine_heads", {**LOCAL, "head": {**REFINER, "topk": 1}}),
    "refine, global views": ("refine_global", {"frozen_blocks": 2, "head": REFINER}),
    "refine, large heads": (
        "refine",
        {**LOCAL, "head": {**REFINER, "projector_hidden": 320, "predictor_hidden": 640}},
    ),
    "fine-tune": ("fine_tune", {"frozen_blocks": 1}),
    "combined, captured": ("mae", {"contrastive": "combined", "head": HEAD, **CAPTURED}),
    "head, captured": ("head_min", {"head": HEAD, **CAPTURED}),
    "refine, captured": ("refine", {**LOCAL, "head": REFINER, **CAPTURED}),
    "fine-tune, checkpointing": ("fine_tune", CHECKPOINTING),
}


def stage_of(recipe, size="base", **changes):
    if recipe == "multicrop":
        return multicrop(local_size=20, read=(1, 3), **{"head": HEAD, **changes})
    if recipe == "fine_tune":
        return STAGES["fine_tune"].model_validate(changes)
    return load_recipe(recipe, size, changes)


@pytest.mark.parametrize("case", CASES)
def test_as_counted_on_a_pretended_device(case):
    from fake_gpu import count

    recipe, changes = CASES[case]
    changes, how = separate(changes)
    how = Computing(**({"cuda_graphs": False} | how))
    stage = stage_of(recipe, **{"batch_size": 64, **changes})
    counted = count(stage, SHAPE, stage.batch_size, classes=10, computing=how)
    planned = stage.footprint(SHAPE, stage.batch_size, how)
    assert planned.passes == pytest.approx(counted.peak, rel=0.1)
    assert planned.prepared == pytest.approx(counted.prepared, rel=0.1)
    called = {*counted.prepare, *counted.forward, *counted.backward}
    assert not {name for name in called if name.startswith(WITHOUT_ORDER)}


def test_states_are_shared_by_the_ranks():
    """AdamW's two moments and the weights that ZeRO updates, in float32; stages 2 and 3 alike."""
    footprint = stage_of("mae").footprint(load_encoder("base"), 64, Computing(cuda_graphs=False))
    trained = footprint.trained
    assert trained == footprint.weights == pytest.approx(111.9e6, rel=0.01)  # MAE's ViT-B

    def less(ranks, **how):
        return footprint.peak(PLAIN, 8) - footprint.peak(Computing(**how), ranks)

    assert less(16) == pytest.approx(1.05 * 12 * trained / 16)
    assert less(8, zero_stage=2) == pytest.approx(1.05 * 4 * trained * 7 / 8)
    assert less(8, zero_stage=2) == less(8, zero_stage=3)
    assert -less(8, overlap_comm=True) == pytest.approx(1.05 * 4 * 50e6)  # a second bucket
    # One rank updates its weights themselves, and exchanges nothing.
    assert less(1) == pytest.approx(1.05 * ((12 / 8 - 8) * trained + 4 * 50e6))


@pytest.mark.parametrize(
    ("recipe", "size", "gpu", "ranks", "chosen"),
    [
        ("mae", "large", "A100-40GB", 16, {}),
        ("fine_tune", "large", "A100-64GB", 4, {}),
        ("fine_tune", "large", "A100-40GB", 4, {"accumulation": 2}),
        ("fine_tune", "huge14", "A100-40GB", 4, {"accumulation": 4}),
        # Batch statistics and negatives are those of one pass.
        ("ct_min", "large", "A100-40GB", 4, CHECKPOINTING),
    ],
)
def test_what_does_not_fit_is_computed_in_parts(recipe, size, gpu, ranks, chosen):
    stage, encoder, memory = stage_of(recipe, size), load_encoder(size), gpu_memory(gpu)
    assert (stage.peak_memory(encoder, ranks) > memory) is bool(chosen)
    fitted = stage.fitted(encoder, PLAIN, ranks // 4, 4, memory)
    assert fitted == Computing(**chosen)
    assert stage.peak_memory(encoder, ranks, fitted) <= memory


@pytest.mark.parametrize(
    ("ranks", "ways"),
    [
        # One rank alone captures its passes, which keep their memory.
        (1, ({}, {"cuda_graphs": False}, CHECKPOINTING)),
        (4, ({}, CHECKPOINTING, CHECKPOINTING | {"zero_stage": 2})),
    ],
)
def test_what_costs_least_time_comes_first(ranks, ways):
    tune, encoder = stage_of("ct_min", "huge14"), load_encoder("huge14")
    whole = tune.peak_memory(encoder, ranks)
    needed = [tune.peak_memory(encoder, ranks, Computing(**how)) for how in ways]
    assert needed == sorted(needed, reverse=True) and needed[0] == whole
    for memory, chosen in zip(needed, ways, strict=True):
        assert tune.fitted(encoder, PLAIN, 1, ranks, memory) == Computing(**chosen)


def test_several_ranks_capture_no_passes_and_an_online_evaluation_takes_a_copy():
    tune, encoder = stage_of("ct_min", "base"), load_encoder("base")
    ways = [Computing(cuda_graphs=captured) for captured in (True, False)]
    one, two = ([tune.peak_memory(encoder, ranks, way) for way in ways] for ranks in (1, 2))
    assert one[0] > one[1] and two[0] == two[1]
    copy = 4 * tune.footprint(encoder, 1).weights
    for memory, chosen in ((two[0], CHECKPOINTING), (two[0] + copy, {})):
        assert tune.fitted(encoder, PLAIN, 1, 2, memory, online=True) == Computing(**chosen)


@pytest.mark.parametrize("name", ["mae", "ct_min"])
def test_what_a_run_leaves_is_three_states_and_its_exports(name):
    """A state: weights and two moments, averages and buffers."""
    stage, encoder = stage_of(name, "tiny"), load_encoder("tiny")
    objective = stage.objective(encoder, 0)
    trained = {n: p.numel() for n, p in objective.named_parameters() if p.requires_grad}
    averaged = sum(n for name, n in trained.items() if name.startswith("encoder."))
    state = 12 * sum(trained.values()) + (4 * averaged if name == "ct_min" else 0)
    buffers = objective.saved_buffers().values()
    state += sum(buffer.numel() * buffer.element_size() for buffer in buffers)
    exports = [*objective.encoder.state_dict().values()]
    exports += objective.head.exported().values() if name == "ct_min" else []
    exported = sum(tensor.numel() * tensor.element_size() for tensor in exports)
    assert stage.state_bytes(encoder) == pytest.approx(3 * state + exported, rel=0.02)
    once = type("Once", (type(stage),), {"keeps_state": False}).model_validate(stage.model_dump())
    assert once.state_bytes(encoder) == pytest.approx(exported, rel=0.03)


def test_precision_decides_the_bytes_of_a_number():
    for precision, size in (("bf16", 2), ("fp32", 4)):
        assert stage_of("mae", precision=precision).passes(PLAIN) == PassMode(size, False)


def test_what_fits_in_no_way_is_refused():
    for stage, size, devices, memory in (("ct_min", "huge14", 1, 30), ("mae", "huge14", 4, 6)):
        with pytest.raises(UserError, match=rf"on {devices} GPUs takes .* it has {memory}; take"):
            stage_of(stage, size).fitted(load_encoder(size), PLAIN, 1, devices, memory * GIB)


def test_a_batch_that_does_not_split_is_refused_before_memory():
    for stage, way in (
        (stage_of("fine_tune", batch_size=8), PLAIN),  # pairs
        (stage_of("mae", batch_size=64), Computing(accumulation=3)),
    ):
        with pytest.raises(UserError, match=f"^batch_size {stage.batch_size}.* ranks x accum"):
            stage.fitted(load_encoder("base"), way, 2, 4, 40 * GIB)


def test_pairs_of_mixed_images_stay_together():
    stage = stage_of("fine_tune", batch_size=4 * 34)
    assert {way.accumulation for way in stage.ways(PLAIN, 4)} == {1}  # 17 is odd
    stage = stage_of("fine_tune", batch_size=4 * 34, mixup=0, cutmix=0)
    assert {way.accumulation for way in stage.ways(PLAIN, 4)} == {1, 2}


def test_memory_by_name():
    assert gpu_memory("A100-40GB") == gpu_memory("NVIDIA A100-SXM4-40GB") == 0.98 * 40 * GIB
    assert gpu_memory("NVIDIA H100 80GB HBM3") == 0.98 * 80 * GIB
    for name in ("GH200-96GB", "GH200-120GB", "NVIDIA GH200 120GB", "NVIDIA GH200 480GB"):
        assert gpu_memory(name) == 0.98 * 96 * GIB
    assert gpu_memory("H100") is None and gpu_memory("") is None
