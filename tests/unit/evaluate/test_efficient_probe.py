import math

import pytest
import torch

from maect.core.errors import UserError
from maect.evaluate.lars_probes import MultiQueryHead, adapt_gradient
from maect.evaluate.protocols.probes import EfficientProbe

from .by_hand import Plain
from .margins import clear
from .test_linear_probe import job_of

SETTINGS = EfficientProbe(
    queries=4, epochs=4, batch_size=32, base_lr=160.0, warmup_epochs=1, crop_scale=(0.6, 1.0),
    flip=0.0, precision="fp32",
)  # fmt: skip
CPU = torch.device("cpu")
NAMES = ("queries", "values", "weight", "bias")


def head_of(width: int, classes: int, settings: EfficientProbe = SETTINGS) -> MultiQueryHead:
    return MultiQueryHead(width, classes, settings, CPU)


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
    settings = SETTINGS.model_copy(update={"weight_decay": decay})
    probe = head_of(12, 5, settings)
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


def test_initial_values_are_those_of_the_authors_modules():
    probe = head_of(64, 10)
    assert float(probe.queries.std()) == pytest.approx(0.02, rel=0.15)
    assert float(probe.values.abs().max()) <= 64**-0.5 < 1.01 * float(probe.values.abs().max())
    again = head_of(64, 10)
    assert torch.equal(probe.weight, again.weight) and torch.equal(probe.queries, again.queries)


def test_what_does_not_work_is_one_line(images, tmp_path, rank):
    job = job_of(images, tmp_path / "efficient_probe.json")
    with pytest.raises(UserError, match="queries 5 do not divide the encoder's width 16"):
        SETTINGS.model_copy(update={"queries": 5}).evaluate(rank, job)
