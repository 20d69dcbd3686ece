"""Heads on frozen features, many trained together: linear classifiers and colour histograms.

One stacked weight and torch's SGD on the sum of the heads' losses, which do not meet. By hand a
step takes 0.7 to 1.2 times as long (10 heads, 200 and 1,000 classes), little beside the encoder.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from maect.evaluate.probe_training import HeadGroup

BN_EPS = 1e-5
BN_MOMENTUM = 0.1
BINS = 64  # of a colour channel


class Stack(HeadGroup):
    """A weight and bias for each head, with SGD and momentum.

    Attributes:
        weight: of this rank's heads, [H, ...]; bias alike.
        rows: which heads of all ranks' `total` these are.
    """

    SPLIT: tuple[str, ...] = ("weight", "bias", "weight_momentum", "bias_momentum")

    def __init__(self, weight: Tensor, bias: Tensor, mine: slice, momentum: float) -> None:
        """Take this rank's part, `mine`, of the initial weights and biases of all ranks' heads."""
        first, last, _ = mine.indices(len(weight))
        self.rows = slice(first, last)
        self.total = len(weight)
        self.weight, self.bias = (w[mine].clone().requires_grad_() for w in (weight, bias))
        self.optimizer = torch.optim.SGD([self.weight, self.bias], momentum=momentum)
        self.weight_momentum, self.bias_momentum = map(torch.zeros_like, (self.weight, self.bias))
        # The optimizer changes its buffers in place.
        self.optimizer.state[self.weight]["momentum_buffer"] = self.weight_momentum
        self.optimizer.state[self.bias]["momentum_buffer"] = self.bias_momentum

    def descend(self, losses: Tensor, rate: float) -> None:
        """One update on the sum of losses."""
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.zero_grad()
        losses.sum().backward()
        self.optimizer.step()


class Heads(Stack):
    """R times BatchNorm1d(affine=False) and Linear, on the mean cross-entropy.

    All heads see the same features, so they share the statistics of one BatchNorm.

    Attributes:
        weight: [R, C, D], bias: [R, C].
        mean, var: running statistics of the features, [D].
    """

    SHARED: tuple[str, ...] = ("mean", "var")

    def __init__(
        self,
        width: int,
        classes: int,
        rates: list[float],
        momentum: float,
        seed: int,
        device: torch.device,
        mine: slice = slice(None),
    ) -> None:
        """Initialise from a normal distribution of standard deviation 0.01; biases are 0.

        Args:
            rates: peak learning rates, already scaled by the batch size.
            mine: which of `rates` are this rank's; the others' heads are on other ranks.
        """
        generator = torch.Generator().manual_seed(seed)
        weight = torch.empty(len(rates), classes * width)
        torch.nn.init.trunc_normal_(weight, std=0.01, generator=generator)
        bias = torch.zeros(len(rates), classes, device=device)
        super().__init__(weight.view(-1, classes, width).to(device), bias, mine, momentum)
        self.mean = torch.zeros(width, device=device)
        self.var = torch.ones(width, device=device)
        self.rates = torch.tensor(rates[mine], device=device)

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
        # SGD is linear in the gradients: a head's rate may as well be in its loss.
        self.descend(losses * self.rates, lr_multiplier)
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


class HistogramHeads(Stack):
    """A BatchNorm1d(affine=False) and Linear on each block, on the mean absolute error.

    Each block's loss is the mean over the batch and 192 bins of |softmax over a channel's bins −
    histogram|.

    Attributes:
        weight: [L, D, 192], bias: [L, 192], of this rank's L blocks.
        mean, var: running statistics of the features, [L, D].
    """

    SPLIT: tuple[str, ...] = (*Stack.SPLIT, "mean", "var")

    def __init__(
        self,
        width: int,
        blocks: int,
        peak: float,
        momentum: float,
        seed: int,
        device: torch.device,
        mine: slice = slice(None),
    ) -> None:
        """Initialise as `Heads`: of so many blocks on all ranks, with one peak learning rate."""
        generator = torch.Generator().manual_seed(seed)
        weight = torch.empty(blocks, width, 3 * BINS)
        torch.nn.init.trunc_normal_(weight, std=0.01, generator=generator)
        bias = torch.zeros(blocks, 3 * BINS, device=device)
        super().__init__(weight.to(device), bias, mine, momentum)
        self.width, self.peak = width, peak
        self.mean = torch.zeros(len(self.weight), width, device=device)
        self.var = torch.ones(len(self.weight), width, device=device)

    def step(self, features: Tensor, targets: Tensor, lr_multiplier: float) -> Tensor:
        """One update of every head on the global batch; return its loss before, [L].

        Args:
            features: float32 [B, all blocks · D], of all ranks.
            targets: histograms, [B, 3, 64].
        """
        size = len(features)
        x = features.view(size, self.total, self.width)[:, self.rows].transpose(0, 1)
        var, mean = torch.var_mean(x, dim=1, correction=0)
        self.mean.lerp_(mean, BN_MOMENTUM)
        self.var.lerp_(var * size / max(size - 1, 1), BN_MOMENTUM)
        x = (x - mean[:, None]) * torch.rsqrt(var + BN_EPS)[:, None]
        predicted = predict_histograms(x, self.weight, self.bias)
        losses = (predicted - targets).abs().mean(dim=(1, 2, 3))
        self.descend(losses, self.peak * lr_multiplier)
        return losses.detach()


def predict_histograms(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Histograms [L, b, 3, 64] from normalized features [L, b, D]."""
    logits = torch.baddbmm(bias[:, None], x, weight)
    return logits.unflatten(2, (3, BINS)).softmax(dim=3)
