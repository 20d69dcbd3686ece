"""The operations that are counted on paper are those that PyTorch carries out."""

import pytest
import torch
from documented import multicrop
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from maect.recipes import Encoder
from maect.recipes.cost import peak_flops
from maect.stages import load_recipe
from maect.train.engine import random_batch

# Odd sizes, so that no two terms are equal by chance.
SHAPE = Encoder(
    image_size=20, patch_size=4, width=24, depth=5, heads=2, decoder_width=16, decoder_depth=3,
    decoder_heads=2, mae_pooling="cls", ct_pooling="mean",
)  # fmt: skip
HEAD = {
    "queue_size": 32, "projector_hidden": 20, "predictor_hidden": 36, "embedding": 12,
    "temperature": 0.2, "topk": 3, "projector_ema": 0.9, "head_lr": 1e-4,
    "head_weight_decay": 0.0,
}  # fmt: skip
REFINER = {
    "blocks": (1, 3, 4), "queue_size": 32, "projector_hidden": 20, "predictor_hidden": 36,
    "embedding": 12, "topk": 3,
}  # fmt: skip
LOCAL = {"local_views": 3, "local_size": 8}
CASES = {
    "mae": ("mae", {}),
    "one view": ("mae", {"views": 1, "mask_ratio": 0.5}),
    "combined": ("mae", {"contrastive": "combined", "head": HEAD}),
    "detached": ("mae", {"contrastive": "detached", "head": HEAD}),
    "head": ("head_min", {"head": HEAD | {"projector_ema": 0.0}}),
    "tune": ("ct_min", {"frozen_blocks": 2, "head": HEAD}),
    "all blocks": ("ct_min", {"frozen_blocks": 0, "head": HEAD}),
    "masked": ("ct_min", {"frozen_blocks": 3, "mask_ratio": 0.75, "head": HEAD}),
    "no lookup": ("ct_min", {"frozen_blocks": 2, "head": HEAD | {"lookup": "none"}}),
    "no lookup, one projector": (
        "ct_min", {"frozen_blocks": 2, "head": HEAD | {"lookup": "none", "projector_ema": 0.0}},
    ),
    "no lookup, frozen": ("head_min", {"head": HEAD | {"lookup": "none"}}),
    "diet": ("diet", {"frozen_blocks": 2, "images": 50}),
    "diet, all blocks": ("diet", {"frozen_blocks": 0, "images": 50, "views": 2}),
    "gradient stopped": (
        "ct_min", {"frozen_blocks": 2, "head": HEAD | {"lookup": "none", "stop_gradient": True}},
    ),
    "refiner's heads": ("refine_heads", {**LOCAL, "head": REFINER}),
    "refine": ("refine", {**LOCAL, "head": REFINER}),
    "frozen blocks": ("refine", {**LOCAL, "frozen_blocks": 2, "head": REFINER}),
    "neighbours": ("refine", {**LOCAL, "head": REFINER | {"negatives": "neighbour"}}),
    "global views": ("refine_global", {"head": REFINER | {"terms": "all"}}),
    # The similarity of local views to global ones is summed element by element.
    "several heads": ("multicrop", {"head": HEAD}),
    "several heads, one projector": ("multicrop", {"head": HEAD | {"projector_ema": 0.0}}),
    "several heads, no lookup": ("multicrop", {"head": HEAD | {"lookup": "none"}}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_as_counted_by_torch(case):
    name, changes = CASES[case]
    values = {"batch_size": 4, "precision": "fp32"} | changes
    if name == "multicrop":
        stage = multicrop(read=(1, 4), **LOCAL, **values)
    else:
        stage = load_recipe(name, "base", values)
    objective = stage.objective(SHAPE, 0)
    views = objective.prepare(random_batch(stage, SHAPE, 4), torch.device("cpu"))
    # The plain kernel: the fused ones compute the scores again in the backward pass.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        objective(views)[0].backward()
    assert counter.get_total_flops() == 4 * stage.flops_per_image(SHAPE)


def test_devices_by_name():
    assert peak_flops("NVIDIA A100-SXM4-40GB") == 312e12
    assert peak_flops("NVIDIA H100 80GB HBM3") == peak_flops("NVIDIA GH200 480GB") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    for unknown in ("NVIDIA RTX A4000", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", ""):
        assert peak_flops(unknown) is None
