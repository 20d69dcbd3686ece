"""The operations that are counted on paper are those that PyTorch carries out."""

import pytest
import torch
from documented import multicrop
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from maect.models.vit import build_encoder
from maect.models.weights import save_encoder
from maect.recipes import Encoder
from maect.recipes.cost import peak_flops
from maect.stages import load_recipe
from maect.stages.objectives import Views

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
}  # fmt: skip


def counted(objective, images, lookups, order=None):
    """Operations of a step, by PyTorch; of images [v, 4, 3, s, s] by size."""
    ids, neighbors = torch.arange(4), torch.zeros(lookups, 4, dtype=torch.int64)
    # The plain kernel: the fused ones compute the scores again in the backward pass.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        objective(Views(images, order, ids, ids, neighbors))[0].backward()
    return counter.get_total_flops()


def views_of(*groups):
    """Noise: so many views of a size."""
    return tuple(torch.randn(views, 4, 3, size, size) for views, size in groups)


@pytest.mark.parametrize("case", CASES)
def test_as_counted_by_torch(case, tmp_path):
    name, changes = CASES[case]
    stage = load_recipe(name, "base", {"batch_size": 4, "precision": "fp32"} | changes)
    source = None
    if name != "mae":
        weights = build_encoder(SHAPE).state_dict()
        save_encoder(tmp_path / "encoder.safetensors", weights, SHAPE, "cls")
        source = tmp_path
    objective, views = stage.build(SHAPE, 0, source), stage.views
    order = torch.rand(views, 4, SHAPE.patches).argsort(2) if stage.mask_ratio else None
    found = counted(objective, views_of((views, 20)), views, order)
    assert found == 4 * stage.flops_per_image(SHAPE)


REFINER = {
    "blocks": (1, 3, 4), "queue_size": 32, "projector_hidden": 20, "predictor_hidden": 36,
    "embedding": 12, "topk": 3,
}  # fmt: skip
REFINED = {
    "heads": ("refine_heads", {}),
    "refine": ("refine", {}),
    "frozen blocks": ("refine", {"frozen_blocks": 2}),
    "neighbours": ("refine", {"head": {"negatives": "neighbour"}}),
    "global views": ("refine_global", {"head": {"terms": "all"}}),
}


@pytest.mark.parametrize("case", REFINED)
def test_refinement_as_counted_by_torch(case):
    name, changes = REFINED[case]
    local = {"local_views": 3, "local_size": 8} if name != "refine_global" else {}
    head = {"head": REFINER | changes.get("head", {})}
    values = {"batch_size": 4, "precision": "fp32"} | local | changes | head
    stage = load_recipe(name, "base", values)
    sizes = ((2, 20), (3, 8)) if local else ((2, 20),)
    found = counted(stage.objective(SHAPE, 0), views_of(*sizes), 6)
    assert found == 4 * stage.flops_per_image(SHAPE)


@pytest.mark.parametrize("changes", [{}, {"projector_ema": 0.0}, {"lookup": "none"}])
def test_local_views_of_a_head_as_counted_by_torch(changes):
    """The similarity of local views to global ones is summed element by element."""
    stage = multicrop(
        batch_size=4, precision="fp32", local_size=8, local_views=3, read=(1, 4),
        head=HEAD | changes,
    )  # fmt: skip
    found = counted(stage.objective(SHAPE, 0), views_of((2, 20), (3, 8)), 2)
    assert found == 4 * stage.flops_per_image(SHAPE)


def test_devices_by_name():
    assert peak_flops("NVIDIA A100-SXM4-40GB") == 312e12
    assert peak_flops("NVIDIA H100 80GB HBM3") == peak_flops("NVIDIA GH200 480GB") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    for unknown in ("NVIDIA RTX A4000", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", ""):
        assert peak_flops(unknown) is None
