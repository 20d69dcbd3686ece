"""DIET against a second writing of its loss and of its steps, in float64."""

import math
from pathlib import Path

import float64
import pytest
import torch
from test_second_writing import adam, encode
from tiny_runs import ENCODER

from maect.core.errors import UserError
from maect.data.index import open_index
from maect.stages import load_recipe
from maect.stages.diet import Diet

STEPS, BATCH, IMAGES, SMOOTHING = 8, 16, 40, 0.3
SETTINGS = {
    "augmentation": "min", "views": 1, "epochs": 4, "batch_size": BATCH, "precision": "fp32",
    "images": IMAGES, "base_lr": 8e-3, "layer_lr": 3.2e-2, "layer_decay": 0.65,
    "weight_decay": 0.05, "frozen_blocks": 2, "warmup_fraction": 2 / STEPS,
    "label_smoothing": SMOOTHING,
}  # fmt: skip
SEED = 3


def cross_entropy(views, w):
    """The mean over views of images, each a class with 0.7 + 0.3 / 40 of the mass."""
    total = 0
    for images in views.images[0]:
        features = encode(images, w)[1][:, 1:].mean(1)
        for row, number in zip(features, views.ids.tolist(), strict=True):
            logits = w["numbers.weight"] @ row
            chances = logits - logits.max()
            chances = chances - chances.exp().sum().log()
            total = total - (1 - SMOOTHING) * chances[number] - SMOOTHING * chances.mean()
    return total / (len(views.images[0]) * len(views.ids))


def rate(name):
    """The layer's own rate, and the encoder's by blocks: 0.65 for each below the norm."""
    if name == "numbers.weight":
        return 3.2e-2 * BATCH / 256
    peak = 8e-3 * BATCH / 256
    if not name.startswith("encoder.blocks."):
        return peak
    return peak * 0.65 ** (4 - int(name.split(".")[2]))


@pytest.mark.parametrize("views", [1, 2])
def test_steps_are_those_of_a_second_writing(shards, views):
    stage = Diet.model_validate(SETTINGS | {"views": views, "lr_counts_views": False})
    objective = stage.objective(ENCODER, SEED).double()
    w, moments = float64.copied(objective), {}
    assert w["numbers.weight"].requires_grad and not w["encoder.cls_token"].requires_grad
    assert not w["encoder.blocks.1.mlp.fc1.weight"].requires_grad
    for step, given, loss, logged in float64.trained(
        objective, stage, open_index(Path(shards)), STEPS, SEED
    ):
        ours = cross_entropy(given, w)
        ours.backward()
        assert ours.item() == pytest.approx(loss.item(), rel=1e-9), step
        assert 0 <= logged["images_told_apart"] <= 1
        adam(w, moments, step, rate)
    assert ours.item() < math.log(IMAGES)
    for name, parameter in objective.named_parameters():
        torch.testing.assert_close(parameter.data, w[name].detach(), rtol=1e-8, atol=1e-10)


def test_images_without_a_row_are_refused(shards):
    stage = load_recipe("diet", "tiny", {"batch_size": 16, "images": 39})
    with pytest.raises(UserError, match="numbered to 39, and the layer 39 rows: set images to 40"):
        stage.training_images(open_index(Path(shards)))
