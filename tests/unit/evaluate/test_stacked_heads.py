import torch
from torch import nn

from maect.evaluate.stacked_heads import Heads
from maect.train.stage import schedule

from .margins import clear


def reference(heads: Heads, rates: list[float], batches, factors, momentum: float):
    """Each head as its own modules under autograd and torch's SGD."""
    _, classes, width = heads.weight.shape
    models = []
    for number, rate in enumerate(rates):
        linear = nn.Linear(width, classes)
        linear.weight.data = heads.weight[number].detach().clone()
        nn.init.zeros_(linear.bias)
        model = nn.Sequential(nn.BatchNorm1d(width, affine=False), linear).double()
        optimizer = torch.optim.SGD(linear.parameters(), rate, momentum)
        for (features, labels), factor in zip(batches, factors, strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(features.double()), labels).backward()
            optimizer.step()
        models.append(model.eval())
    return models


def test_heads_train_like_separate_modules() -> None:
    torch.manual_seed(0)
    rates, momentum = [2.0, 0.5, 0.01], 0.9
    heads = Heads(7, 5, rates, momentum, 3, torch.device("cpu"))
    batches = [(3 * torch.randn(32, 7) + 1, torch.randint(5, (32,))) for _ in range(25)]
    factors = [schedule(step, 25, 4) for step in range(25)]
    models = reference(heads, rates, batches, factors, momentum)
    for (features, labels), factor in zip(batches, factors, strict=True):
        heads.step(features, labels, factor)
    for number, model in enumerate(models):
        norm, linear = model
        torch.testing.assert_close(
            heads.weight[number].double(), linear.weight, rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(heads.bias[number].double(), linear.bias, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(heads.mean.double(), norm.running_mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(heads.var.double(), norm.running_var, rtol=1e-5, atol=1e-6)
        features = torch.randn(200, 7)
        expected = model(features.double())
        clear(expected.detach(), 1e-5)
        assert torch.equal(heads.predict(features)[:, number], expected.argmax(1))


def test_loss_is_the_cross_entropy_before_the_update() -> None:
    heads = Heads(4, 3, [0.1, 0.2], 0.9, 0, torch.device("cpu"))
    features, labels = torch.randn(16, 4), torch.randint(3, (16,))
    normal = (features - features.mean(0)) / (features.var(0, correction=0) + 1e-5).sqrt()
    expected = [
        nn.functional.cross_entropy(normal @ weight.T, labels) for weight in heads.weight.detach()
    ]
    torch.testing.assert_close(heads.step(features, labels, 1.0), torch.stack(expected))


def test_constant_features_stay_finite() -> None:
    heads = Heads(4, 3, [4.0], 0.9, 0, torch.device("cpu"))
    for _ in range(20):
        heads.step(torch.full((8, 4), 0.1), torch.zeros(8, dtype=torch.int64), 1.0)
    assert torch.isfinite(heads.weight).all()
    assert heads.predict(torch.full((2, 4), 0.1)).unique().tolist() == [0]
