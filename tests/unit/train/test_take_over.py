"""What a run takes over from the one that it starts from, and what it leaves for the next one."""

import pytest
import torch
from tiny_runs import ENCODER, HEAD, STAGE

from maect.core.errors import UserError
from maect.models.vit import build_encoder, seeded
from maect.models.weights import load_tensors, save_encoder, save_tensors
from maect.recipes.settings import Computing
from maect.stages.pretrain import Pretrain
from maect.stages.tune import Head, Tune

MAE = Pretrain.model_validate(
    STAGE | {"augmentation": "mae", "base_lr": 1e-3, "weight_decay": 0.05}
)
UPPER = {"base_lr": 1e-3, "weight_decay": 0.05, "layer_decay": 0.65, "frozen_blocks": 2}


def head_stage(**head):
    return Head.model_validate(STAGE | {"augmentation": "min", "head": HEAD | head})


def tune_stage(**head):
    values = STAGE | UPPER | {"augmentation": "min", "encoder_ema": 0.99, "head": HEAD | head}
    return Tune.model_validate(values)


@pytest.fixture
def source(tmp_path):
    """A finished run of a head: no two of its tensors are alike, or as new ones."""
    folder = tmp_path / "head"
    with seeded(5):
        encoder = build_encoder(ENCODER)
    save_encoder(folder / "encoder.safetensors", encoder.state_dict(), ENCODER, "mean")
    head = head_stage().objective(ENCODER, 6).head
    with torch.no_grad():
        for number, value in enumerate(head.state_dict().values()):
            value.add_(torch.tensor(number + 1).to(value.dtype))
        head.pointer.fill_(48)
        head.queue_ids.copy_(torch.arange(64))
        head.queue_labels.copy_(torch.arange(64) % 4)
    save_tensors(folder / "head.safetensors", head.exported(), {})
    return folder


def test_tuning_goes_on_with_encoder_and_head(source):
    objective = tune_stage().build(ENCODER, 1, source)
    left = load_tensors(source / "head.safetensors")[0]
    assert {"queue", "queue_ids", "queue_labels", "pointer"} < set(left)
    taken = objective.head.state_dict()
    for name, value in left.items():
        assert torch.equal(taken[name], value), name
    # The EMA projector begins at the projector that was taken over, not at a random one.
    slow = objective.head.slow_projector.state_dict()
    for name, value in objective.head.projector.state_dict().items():
        assert torch.equal(slow[name], value), name
    encoder = load_tensors(source / "encoder.safetensors")[0]
    for name, value in objective.encoder.state_dict().items():
        assert torch.equal(value, encoder[name]), name


def test_a_new_head_takes_over_the_encoder_alone(source):
    objective = head_stage().build(ENCODER, 1, source)
    new = head_stage().objective(ENCODER, 1).head.state_dict()
    for name, value in objective.head.state_dict().items():
        assert torch.equal(value, new[name]), name
    encoder = load_tensors(source / "encoder.safetensors")[0]
    assert torch.equal(objective.encoder.cls_token, encoder["cls_token"])
    assert not any(p.requires_grad for p in objective.encoder.parameters())


def test_samples_of_other_images_are_forgotten_and_their_vectors_kept(source):
    objective = tune_stage().build(ENCODER, 1, source)
    queue = objective.head.queue.clone()
    objective.forget_samples(["labels"])
    assert objective.head.queue_labels.eq(-1).all()
    assert objective.head.queue_ids.tolist() == list(range(64))
    objective.forget_samples(["ids", "labels"])
    assert objective.head.queue_ids.eq(-1).all() and torch.equal(objective.head.queue, queue)


def test_a_head_of_another_shape_is_refused(source):
    with pytest.raises(UserError, match=r"head.safetensors: projector.0.weight is \[16, 16\], "):
        tune_stage(projector_hidden=8).build(ENCODER, 1, source)
    with pytest.raises(ValueError, match=r"head\.embedding 4 differs from 8"):
        tune_stage(embedding=4).check_source(ENCODER, head_stage(), ENCODER)


def test_an_encoder_of_another_shape_is_refused():
    """The resizing of images for evaluation is no part of the shape."""
    resized, wider = (ENCODER.model_copy(update=of) for of in ({"resize": 20}, {"width": 32}))
    tune_stage().check_source(ENCODER, head_stage(), resized)
    with pytest.raises(ValueError, match="its encoder differs"):
        tune_stage().check_source(ENCODER, head_stage(), wider)


def test_which_files_are_read_and_left():
    tune, head = tune_stage(), head_stage()
    both = ("encoder.safetensors", "head.safetensors")
    assert tune.inputs(head) == both == tune.outputs == head.outputs
    assert tune.inputs(MAE) == head.inputs(MAE) == ("encoder.safetensors",) == MAE.outputs
    assert head.inputs(tune) == ("encoder.safetensors",)  # it begins a new head
    assert MAE.inputs(head) == ()


@pytest.mark.parametrize(("ranks", "accumulation"), [(3, 1), (32, 1), (2, 3)])
def test_a_batch_is_split_evenly(ranks, accumulation):
    MAE.check_ranks(16)
    MAE.check_ranks(4, Computing(accumulation=4))
    with pytest.raises(UserError, match=f"{ranks} ranks x accumulation {accumulation}"):
        MAE.check_ranks(ranks, Computing(accumulation=accumulation))
