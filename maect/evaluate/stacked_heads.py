"""Heads on frozen features, many trained together: linear classifiers and colour histograms.

One stacked weight and torch's SGD on the sum of the heads' losses, which do not meet.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from maect.evaluate.probe_training import HeadGroup

BN_EPS = 1e-5
BN_MOMENTUM = 0.1
BINS = 64  # of a colour channel


class Heads(HeadGroup):
    """R times BatchNorm1d(affine=False) and Linear, on the mean cross-entropy.

    All heads see the same features, so they share the statistics of one BatchNorm.

    Attributes:
        weight: [R, C, D], bias: [R, C].
        mean, var: running statistics of the features, [D].
    """

    SAVED = ("weight", "bias", "mean", "var")

    def __init__(
        self,
        width: int,
        classes: int,
        rates: list[float],
        momentum: float,
        seed: int,
        device: torch.device,
    ) -> None:
        """Initialise from a normal distribution of standard deviation 0.01; biases are 0.

        Args:
            rates: peak learning rates, already scaled by the batch size.
        """
        weight = _drawn(len(rates), classes * width, seed=seed)
        self.weight = weight.view(-1, classes, width).to(device).requires_grad_()
        self.bias = torch.zeros(len(rates), classes, device=device, requires_grad=True)
        self.mean = torch.zeros(width, device=device)
        self.var = torch.ones(width, device=device)
        self.rates = torch.tensor(rates, device=device)
        # SGD is linear in the gradients: a head's rate may as well be in its loss.
        group = {"params": [self.weight, self.bias], "peak": 1.0}
        self.optimizer = torch.optim.SGD([group], momentum=momentum)

    def step(self, features: Tensor, labels: Tensor, lr_multiplier: float) -> Tensor:
        """One update of every head on the global batch; return the mean losses before it, [R].

        Args:
            features: float32 [B, D], of all ranks.
            labels: int64 [B].
        """
        x = F.batch_norm(
            features, self.mean, self.var, training=True, momentum=BN_MOMENTUM, eps=BN_EPS
        )
        logits = self._logits(x)
        target = labels[:, None].expand(logits.shape[:2])
        losses = F.cross_entropy(logits.transpose(1, 2), target, reduction="none").mean(dim=0)
        (losses * self.rates).sum().backward()
        self.descend(lr_multiplier)
        return losses.detach()

    def predict(self, features: Tensor) -> Tensor:
        """Class of each sample by each head, with the running statistics: int64 [n, R]."""
        with torch.no_grad():
            x = (features - self.mean) * torch.rsqrt(self.var + BN_EPS)
            return self._logits(x).argmax(dim=2)

    def _logits(self, x: Tensor) -> Tensor:
        """Of normalized features [n, D], as one product: [n, R, C]."""
        return F.linear(x, self.weight.flatten(0, 1), self.bias.flatten()).unflatten(
            1, self.bias.shape
        )


class HistogramHeads(HeadGroup):
    """A BatchNorm1d(affine=False) and Linear on each block, on the mean absolute error.

    Each block's loss is the mean over the batch and 192 bins of |softmax over a channel's bins −
    histogram|.

    Attributes:
        weight: [L, D, 192], bias: [L, 192].
        mean, var: running statistics of the features, [L, D].
    """

    SAVED = ("weight", "bias", "mean", "var")

    def __init__(
        self,
        width: int,
        blocks: int,
        peak: float,
        momentum: float,
        seed: int,
        device: torch.device,
    ) -> None:
        """Initialise as `Heads`, with one peak learning rate for all blocks."""
        self.weight = _drawn(blocks, width, 3 * BINS, seed=seed).to(device).requires_grad_()
        self.bias = torch.zeros(blocks, 3 * BINS, device=device, requires_grad=True)
        self.mean = torch.zeros(blocks, width, device=device)
        self.var = torch.ones(blocks, width, device=device)
        group = {"params": [self.weight, self.bias], "peak": peak}
        self.optimizer = torch.optim.SGD([group], momentum=momentum)

    def step(self, features: Tensor, targets: Tensor, lr_multiplier: float) -> Tensor:
        """One update of every head on the global batch; return its loss before, [L].

        Args:
            features: float32 [B, L · D], of all ranks.
            targets: histograms, [B, 3, 64].
        """
        size = len(features)
        x = features.view(size, *self.mean.shape).transpose(0, 1)
        var, mean = torch.var_mean(x, dim=1, correction=0)
        self.mean.lerp_(mean, BN_MOMENTUM)
        self.var.lerp_(var * size / max(size - 1, 1), BN_MOMENTUM)
        x = (x - mean[:, None]) * torch.rsqrt(var + BN_EPS)[:, None]
        predicted = predict_histograms(x, self.weight, self.bias)
        losses = (predicted - targets).abs().mean(dim=(1, 2, 3))
        losses.sum().backward()
        self.descend(lr_multiplier)
        return losses.detach()


def predict_histograms(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Histograms [L, b, 3, 64] from normalized features [L, b, D]."""
    logits = torch.baddbmm(bias[:, None], x, weight)
    return logits.unflatten(2, (3, BINS)).softmax(dim=3)


def _drawn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.init.trunc_normal_(torch.empty(shape), std=0.01, generator=generator)
