"""The leaderboard's linear and efficient probes."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from maect.core.errors import UserError
from maect.data.index import ID
from maect.data.transforms import normalize
from maect.evaluate import probe_training
from maect.evaluate.lars_probes import LarsHead, LarsProbe, MultiQueryHead, adapt_gradient
from maect.evaluate.probe_training import HELD_OUT, ProbeBatch
from maect.evaluate.protocols.probes import EfficientProbe, LarsLinearProbe

from .by_hand import Plain, all_images, blocks_of, clear, crops, task_of
from .test_linear_probe import job_of

SETTINGS = LarsLinearProbe(
    epochs=3, batch_size=32, base_lr=160.0, warmup_epochs=1, crop_scale=(0.6, 1.0), flip=0.0,
    precision="fp32",
)  # fmt: skip
EFFICIENT = EfficientProbe(
    queries=4, epochs=4, batch_size=32, base_lr=160.0, warmup_epochs=1, crop_scale=(0.6, 1.0),
    flip=0.0, precision="fp32",
)  # fmt: skip
NAMES = ("queries", "values", "weight", "bias")
CPU = torch.device("cpu")


@pytest.mark.parametrize("settings", [SETTINGS, EFFICIENT], ids=lambda settings: settings.name)
def test_protocol_is_the_plain_loop(settings, images, tmp_path, rank):
    """Before the norm, the linear probe reads [CLS] and the efficient one the other tokens."""
    linear = settings is SETTINGS
    job = job_of(images, tmp_path / f"{settings.name}.json")
    metrics = settings.evaluate(rank, job)
    task = task_of(job)
    encoding = task.encoding
    assert encoding.pooling == "mean" and encoding.settings.class_token  # yet [CLS] is read

    def read(pictures: torch.Tensor) -> torch.Tensor:
        tokens = blocks_of(encoding.encoder, pictures)[-1]
        return tokens[:, 0] if linear else tokens[:, 1:]

    pictures, y_test = all_images(task.test)
    pixels = encoding.settings.pixels
    x_test = read(normalize(pictures, pixels))
    plain = Plain(LarsHead(16, 10, SETTINGS, CPU))
    efficient, history = MultiQueryHead(16, 10, EFFICIENT, CPU), []
    steps, warmup = settings.epochs * 150 // 32, 150 / 32
    for batch, cropped in crops(task.train, steps, pixels):
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
    task = task_of(job_of(images, tmp_path / "a.json"))
    both, train = LarsProbe(task, settings), task.train
    plain, alone = (LarsHead(16, 10, SETTINGS, CPU) for _ in range(2))
    rng = torch.Generator().manual_seed(0)
    held_out = set(both.scored[HELD_OUT].rows[:, ID].tolist())
    for start in (0, 32, 64):
        ids = np.array(train.rows[start : start + 32, ID])
        others = torch.tensor([number not in held_out for number in ids.tolist()])
        assert not others.all()
        x = torch.randn(32, 16, generator=rng)
        labels = torch.randint(0, 10, (32,), generator=rng)
        losses = both.step(x, ProbeBatch(x, labels, 0 * ids, ids), 0.5)
        assert torch.equal(losses[:1], plain.update(x, labels, 0.5))
        alone_loss = alone.update(x[others], labels[others], 0.5)
        assert torch.allclose(losses[1:], alone_loss, rtol=1e-5)
    assert torch.equal(both.heads[""].weight, plain.weight)
    assert torch.allclose(both.heads[HELD_OUT].weight, alone.weight, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(plain.weight, alone.weight, rtol=1e-2)
    # Its best epoch is chosen, not that of the test images.
    both.record = {"accuracies": [10.0, 30.0, 20.0], f"accuracies{HELD_OUT}": [5.0, 4.0, 6.0]}
    chosen = both.metrics()
    assert (chosen["lars_linear_probe"], chosen["best_epoch"]) == (30, 2)
    assert (chosen["lars_linear_probe_held_out"], chosen["held_out_accuracy"]) == (20, 6)


@pytest.mark.parametrize("settings", [SETTINGS, EFFICIENT], ids=lambda settings: settings.name)
def test_held_out_images_choose_the_epoch(images, tmp_path, rank, settings):
    plain = settings.evaluate(rank, job_of(images, tmp_path / "plain.json"))
    chosen = settings.model_copy(update={"held_out": 0.2})
    metrics = chosen.evaluate(rank, job_of(images, tmp_path / "held.json"))
    assert metrics["by_epoch"] == plain["by_epoch"]
    best = metrics["by_epoch"][metrics["held_out_epoch"] - 1]
    assert metrics[f"{settings.name}_held_out"] == best
    assert 0 <= metrics["held_out_accuracy"] <= 100


class PlainAttention(Plain):
    """The probe a second time: a loop over images, queries and tokens.

    Every token is projected before the sum, as the paper writes it.
    """

    names = NAMES

    def pool(self, tokens: torch.Tensor) -> torch.Tensor:
        queries, values = self.parts["queries"], self.parts["values"]
        count, width = queries.shape
        share, pooled = width // count, []
        for image in tokens.double():
            channels = []
            for q in range(count):
                scores = [math.exp(float(queries[q] @ t) / math.sqrt(width)) for t in image]
                terms = [torch.exp(queries[q] @ t / math.sqrt(width)) for t in image]
                own = values[q * share : (q + 1) * share]
                total = sum(terms)
                assert float(total) == pytest.approx(sum(scores))
                channels.append(
                    sum(w / total * (own @ t) for w, t in zip(terms, image, strict=True))
                )
            pooled.append(torch.cat(channels))
        return torch.stack(pooled)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_probe_trains_like_a_plain_loop(decay):
    settings = EFFICIENT.model_copy(update={"weight_decay": decay})
    probe = MultiQueryHead(12, 5, settings, CPU)
    plain = PlainAttention(probe)
    generator = torch.Generator().manual_seed(0)
    for step in range(6):
        tokens = 2 * torch.randn(8, 7, 12, generator=generator) + 0.5
        labels = torch.randint(5, (8,), generator=generator)
        pooled = plain.pool(tokens)
        torch.testing.assert_close(probe.pool(tokens).double(), pooled, rtol=1e-4, atol=1e-5)
        factor = 1 / (1 + step)
        loss = float(probe.update(tokens, labels, factor))
        expected = plain.step(tokens, labels, 160.0 * 32 / 256 * factor, decay)
        assert loss == pytest.approx(expected, rel=1e-4)
    for name in NAMES:
        ours = getattr(probe, name).detach().double()
        torch.testing.assert_close(ours, plain.parts[name].detach(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(probe.mean.double(), plain.mean, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(probe.var.double(), plain.var, rtol=1e-3, atol=1e-4)
    tokens = torch.randn(40, 7, 12, generator=generator)
    expected = plain.logits(tokens)
    clear(expected, 1e-3)
    assert torch.equal(probe.predict(tokens), expected.argmax(1))


def test_what_has_no_length_is_not_scaled():
    weight = torch.zeros(2, 2, requires_grad=True)
    weight.grad = torch.ones(2, 2)
    adapt_gradient(weight, 0.0)
    assert weight.grad.tolist() == [[1.0, 1.0]] * 2
    weight = torch.ones(2, 2, requires_grad=True)
    weight.grad = torch.zeros(2, 2)
    adapt_gradient(weight, 0.0)
    assert not weight.grad.any()


def test_queries_begin_as_the_authors_do_and_divide_the_width(images, tmp_path, rank):
    probe, again = (MultiQueryHead(64, 10, EFFICIENT, CPU) for _ in range(2))
    assert float(probe.queries.std()) == pytest.approx(0.02, rel=0.15)
    assert float(probe.values.abs().max()) <= 64**-0.5 < 1.01 * float(probe.values.abs().max())
    assert torch.equal(probe.weight, again.weight) and torch.equal(probe.queries, again.queries)
    job = job_of(images, tmp_path / "efficient_probe.json")
    with pytest.raises(UserError, match="queries 5 do not divide the encoder's width 16"):
        EFFICIENT.model_copy(update={"queries": 5}).evaluate(rank, job)
