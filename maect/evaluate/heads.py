"""Heads on frozen features, trained together: linear classifiers and colour histograms."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from maect.evaluate.color_histogram import ColorHistogram

BN_EPS = 1e-5
BN_MOMENTUM = 0.1
BINS = 64  # of a colour channel


def learning_rate(step: int, steps: int, warmup: float) -> float:
    """Factor of the peak rate at an update: linear warm-up, then cosine to 0.

    As in the authors' schedules, neither 0 nor the peak comes up in the warm-up, nor 0 at the end.

    Args:
        step: update, from 0.
        steps: number of updates.
        warmup: updates of warm-up.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


class Heads:
    """R times BatchNorm1d(affine=False) and Linear, with SGD on the mean cross-entropy.

    All heads see the same features, so they share the statistics of one BatchNorm. The gradient
    of softmax regression is written out: one matrix product forward, one backward, for all heads.

    Attributes:
        weight: [R·C, D], bias: [R·C]; weight_momentum, bias_momentum alike.
        mean, var: running statistics of the features, [D].
        rows: which rows of all ranks' `total` these are.
    """

    SPLIT: tuple[str, ...] = ("weight", "bias", "weight_momentum", "bias_momentum")
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
        """Initialise from a normal distribution of deviation 0.01; biases are 0.

        Args:
            width: features per sample, D.
            classes: C.
            rates: peak learning rates, already scaled by the batch size.
            momentum: of SGD.
            seed: of the initial weights.
            device: where to train.
            mine: which of `rates` are this rank's; the others' heads are on other ranks.
        """
        generator = torch.Generator().manual_seed(seed)
        weight = torch.empty(len(rates), classes * width)
        torch.nn.init.trunc_normal_(weight, std=0.01, generator=generator)
        self.weight = weight[mine].reshape(-1, width).to(device)
        self.count, self.classes, self.momentum = len(rates[mine]), classes, momentum
        self.bias = torch.zeros(self.count * classes, device=device)
        self.weight_momentum = torch.zeros_like(self.weight)
        self.bias_momentum = torch.zeros_like(self.bias)
        self.mean = torch.zeros(width, device=device)
        self.var = torch.ones(width, device=device)
        first, last, _ = mine.indices(len(rates))
        self.rows, self.total = slice(first * classes, last * classes), len(rates) * classes
        self.rates = torch.tensor(rates[mine], device=device).repeat_interleave(classes)

    @torch.no_grad()
    def step(self, features: Tensor, labels: Tensor, factor: float) -> Tensor:
        """One update of every head on the global batch.

        Args:
            features: float32 [B, D], of all ranks.
            labels: int64 [B].
            factor: of the peak rates, at this update.

        Returns:
            Mean cross-entropy of each head before the update, [R].
        """
        size = len(features)
        var, mean = torch.var_mean(features, dim=0, correction=0)
        self.mean.lerp_(mean, BN_MOMENTUM)
        self.var.lerp_(var * size / max(size - 1, 1), BN_MOMENTUM)
        x = (features - mean) * torch.rsqrt(var + BN_EPS)
        logits = torch.addmm(self.bias, x, self.weight.T).view(size, self.count, self.classes)
        logp = logits.log_softmax(dim=2)
        target = labels.view(-1, 1, 1).expand(-1, self.count, 1)
        loss = -logp.gather(2, target).mean(dim=(0, 2))
        gradient = logp.exp_().scatter_add_(2, target, logp.new_full(target.shape, -1.0))
        gradient = gradient.view(size, -1).div_(size)
        self.weight_momentum.mul_(self.momentum).addmm_(gradient.T, x)
        self.bias_momentum.mul_(self.momentum).add_(gradient.sum(dim=0))
        self.weight.addcmul_(self.weight_momentum, self.rates[:, None], value=-factor)
        self.bias.addcmul_(self.bias_momentum, self.rates, value=-factor)
        return loss

    @torch.no_grad()
    def predict(self, features: Tensor) -> Tensor:
        """Class of each sample by each head, with the running statistics: int64 [n, R]."""
        x = (features - self.mean) * torch.rsqrt(self.var + BN_EPS)
        logits = torch.addmm(self.bias, x, self.weight.T)
        return logits.view(len(features), self.count, self.classes).argmax(dim=2)


class HistogramHeads:
    """A BatchNorm1d(affine=False) and Linear on each block, with SGD on the mean absolute error.

    Each block's loss is the mean over the batch and 192 bins of |softmax over a channel's bins −
    histogram|; its gradient is written out, one batched product forward and one backward.

    Attributes:
        weight: [L, D, 192], bias: [L, 192], of this rank's L blocks; the momenta alike.
        mean, var: running statistics of the features, [L, D].
        rows: which blocks of all these are.
    """

    SPLIT: tuple[str, ...] = ("weight", "bias", "weight_momentum", "bias_momentum", "mean", "var")
    SHARED: tuple[str, ...] = ()

    def __init__(
        self,
        width: int,
        blocks: int,
        settings: "ColorHistogram",
        device: torch.device,
        mine: slice = slice(None),
    ) -> None:
        """Initialise from a normal distribution of deviation 0.01; biases are 0."""
        generator = torch.Generator().manual_seed(settings.seed)
        weight = torch.empty(blocks, width, 3 * BINS)
        torch.nn.init.trunc_normal_(weight, std=0.01, generator=generator)
        self.width, self.total, self.rows = width, blocks, mine
        self.weight = weight[mine].to(device)
        count = len(self.weight)
        self.bias = torch.zeros(count, 3 * BINS, device=device)
        self.weight_momentum = torch.zeros_like(self.weight)
        self.bias_momentum = torch.zeros_like(self.bias)
        self.mean = torch.zeros(count, width, device=device)
        self.var = torch.ones(count, width, device=device)
        self.momentum = settings.momentum
        self.peak = settings.learning_rate * settings.batch_size / 256

    @torch.no_grad()
    def step(self, features: Tensor, targets: Tensor, factor: float) -> Tensor:
        """One update of every head on the global batch.

        Args:
            features: float32 [B, all blocks · D], of all ranks.
            targets: histograms, [B, 3, 64].
            factor: of the peak rate, at this update.

        Returns:
            Loss of each head before the update, [L].
        """
        size = len(features)
        x = features.view(size, self.total, self.width)[:, self.rows].transpose(0, 1)
        var, mean = torch.var_mean(x, dim=1, correction=0)
        self.mean.lerp_(mean, BN_MOMENTUM)
        self.var.lerp_(var * size / max(size - 1, 1), BN_MOMENTUM)
        x = (x - mean[:, None]) * torch.rsqrt(var + BN_EPS)[:, None]
        p = predict_histograms(x, self.weight, self.bias)
        difference = p - targets
        slope = difference.sign() / (size * 3 * BINS)
        gradient = p * (slope - (p * slope).sum(dim=3, keepdim=True))
        gradient = gradient.flatten(2)
        self.weight_momentum.mul_(self.momentum).baddbmm_(x.transpose(1, 2), gradient)
        self.bias_momentum.mul_(self.momentum).add_(gradient.sum(dim=1))
        self.weight.sub_(self.weight_momentum, alpha=self.peak * factor)
        self.bias.sub_(self.bias_momentum, alpha=self.peak * factor)
        return difference.abs_().mean(dim=(1, 2, 3))


def predict_histograms(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Histograms [L, b, 3, 64] from normalized features [L, b, D]."""
    logits = torch.baddbmm(bias[:, None], x, weight)
    return logits.unflatten(2, (3, BINS)).softmax(dim=3)
