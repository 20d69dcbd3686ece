"""The leaderboard's linear probe, and the protocol that the efficient probe shares with it."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from maect.data.index import ID, open_index
from maect.data.transforms import normalize
from maect.evaluate import probe_training
from maect.evaluate.features import Encoding
from maect.evaluate.lars_probes import LarsHead, LarsProbe
from maect.evaluate.probe_training import HELD_OUT, ProbeBatch, ProbeTask
from maect.evaluate.protocols.probes import LarsLinearProbe

from .by_hand import Plain, all_images, blocks_of, crops
from .conftest import Rank
from .test_efficient_probe import NAMES
from .test_efficient_probe import SETTINGS as EFFICIENT
from .test_efficient_probe import head_of as efficient_head
from .test_linear_probe import job_of

SETTINGS = LarsLinearProbe(
    epochs=3, batch_size=32, base_lr=160.0, warmup_epochs=1, crop_scale=(0.6, 1.0), flip=0.0,
    precision="fp32",
)  # fmt: skip
CPU = torch.device("cpu")


def head_of(width: int, classes: int, settings: LarsLinearProbe = SETTINGS) -> LarsHead:
    return LarsHead(width, classes, settings, CPU)


@pytest.mark.parametrize("settings", [SETTINGS, EFFICIENT], ids=lambda settings: settings.name)
def test_protocol_is_the_plain_loop(settings, images, tmp_path, rank):
    """Before the norm, the linear probe reads [CLS] and the efficient one the other tokens."""
    linear = settings is SETTINGS
    job = job_of(images, tmp_path / f"{settings.name}.json")
    metrics = settings.evaluate(rank, job)
    encoding = Encoding(job.run / "encoder.safetensors", CPU)
    assert encoding.pooling == "mean" and encoding.settings.class_token  # yet [CLS] is read
    train, test = open_index(job.path("train")), open_index(job.path("test"))

    def read(pictures: torch.Tensor) -> torch.Tensor:
        tokens = blocks_of(encoding.encoder, pictures)[-1]
        return tokens[:, 0] if linear else tokens[:, 1:]

    pictures, y_test = all_images(test)
    pixels = encoding.settings.pixels
    x_test = read(normalize(pictures, pixels))
    plain, efficient, history = Plain(head_of(16, 10)), efficient_head(16, 10), []
    steps, warmup = settings.epochs * 150 // 32, 150 / 32
    for batch, cropped in crops(train, steps, pixels):
        cosine = 0.5 * (1 + math.cos(math.pi * (batch.step - warmup) / (steps - warmup)))
        factor = (batch.step + 1) / (warmup + 1) if batch.step < warmup else cosine
        x, labels = read(cropped), torch.from_numpy(batch.labels)
        if linear:
            plain.step(x, labels, 20.0 * factor, 0.0)
            predicted = plain.logits(x_test).argmax(1)
        else:
            efficient.update(x, labels, factor)
            predicted = efficient.predict(x_test)
        if batch.step + 1 in ([5, 10, 14] if linear else [5, 10, 15, 18]):
            history.append(100 * float((predicted == y_test).double().mean()))
    assert metrics["by_epoch"] == pytest.approx(history, abs=100 / 70 + 1e-6)
    assert metrics[settings.name] == max(metrics["by_epoch"])
    assert metrics[f"{settings.name}_last"] == metrics["by_epoch"][-1]
    kept = load_file(job.out.with_suffix(".safetensors"))
    if linear:
        assert set(kept) == {"weight", "bias", "mean", "var"}
        weight = load_file(job.state / probe_training.STATE)["probe/weight"]
        expected = plain.parts["weight"].detach()
        torch.testing.assert_close(weight.double(), expected, rtol=1e-3, atol=1e-4)
    else:
        assert set(kept) == {*NAMES, "mean", "var"}


def test_the_twin_learns_as_if_held_out_images_were_not_there(images, tmp_path):
    settings = SETTINGS.model_copy(update={"held_out": 0.25})
    train, test = (open_index(images / "shards" / split) for split in ("train", "val"))
    encoding = Encoding(images / "runs/mae/encoder.safetensors", CPU)
    task = ProbeTask(Rank(), job_of(images, tmp_path / "a.json"), encoding, train, test, "")
    both = LarsProbe(task, settings)
    width, classes = encoding.settings.width, len(train.class_names)
    plain, alone = head_of(width, classes), head_of(width, classes)
    rng = torch.Generator().manual_seed(0)
    held_out = set(both.scored[HELD_OUT].rows[:, ID].tolist())
    for start in (0, 32, 64):
        ids = np.array(train.rows[start : start + 32, ID])
        others = torch.tensor([number not in held_out for number in ids.tolist()])
        assert not others.all()
        x = torch.randn(32, width, generator=rng)
        labels = torch.randint(0, classes, (32,), generator=rng)
        losses = both.step(x, ProbeBatch(x, labels, 0 * ids, ids), 0.5)
        assert torch.equal(losses[:1], plain.update(x, labels, 0.5))
        alone_loss = alone.update(x[others], labels[others], 0.5)
        assert torch.allclose(losses[1:], alone_loss, rtol=1e-5)
    assert torch.equal(both.heads[""].weight, plain.weight)
    assert torch.allclose(both.heads[HELD_OUT].weight, alone.weight, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(plain.weight, alone.weight, rtol=1e-2)


@pytest.mark.parametrize("name", ["lars_linear_probe", "efficient_probe"])
def test_held_out_images_choose_the_epoch(images, tmp_path, name):
    from maect.evaluate import PROTOCOLS

    base = SETTINGS if name == SETTINGS.name else EFFICIENT
    plain = base.evaluate(Rank(), job_of(images, tmp_path / "plain.json"))
    settings = PROTOCOLS[name].model_validate(base.model_dump() | {"held_out": 0.2})
    job = job_of(images, tmp_path / "held.json")
    metrics = settings.evaluate(Rank(), job)
    assert metrics["by_epoch"] == plain["by_epoch"]
    assert metrics[f"{name}_held_out"] == metrics["by_epoch"][metrics["held_out_epoch"] - 1]
    assert 0 <= metrics["held_out_accuracy"] <= 100
