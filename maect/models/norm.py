"""Batch normalisation over the global batch, per view, on any device.

torch's SyncBatchNorm runs on GPUs only and knows no views.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from maect.core.distributed import rank_and_size


class GlobalBatchNorm(nn.Module):
    """BatchNorm whose statistics are those of all ranks' rows of one view.

    Statistics and output are float32 at least. As in `nn.BatchNorm1d`, the running variance is
    the unbiased one, momentum 0.1, and the views update it one after the other.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [views, b, C] over b and the ranks; in eval mode by the running statistics."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if not self.training:
            scale = self.weight * torch.rsqrt(self.running_var + self.eps)
            return (x - self.running_mean) * scale + self.bias
        y, mean, variance = _Normalise.apply(x, self.weight, self.bias, self.eps)
        rows = x.shape[1] * rank_and_size()[1]
        with torch.no_grad():
            for view_mean, view_variance in zip(mean, variance, strict=True):
                self.running_mean.lerp_(view_mean, self.momentum)
                self.running_var.lerp_(view_variance * (rows / max(1, rows - 1)), self.momentum)
        return y


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        size = rank_and_size()[1]
        variance, mean = torch.var_mean(x, dim=1, correction=0)
        if size > 1:
            # Each rank's mean and variance combine without the cancellation of a sum of squares.
            both = torch.stack([mean, variance])
            parts = both.new_empty(size, *both.shape)
            dist.all_gather_into_tensor(parts.view(-1, *both.shape[1:]), both)
            mean = parts[:, 0].mean(0)
            variance = (parts[:, 1] + (parts[:, 0] - mean).square()).mean(0)
        inverse = torch.rsqrt(variance + eps)
        normal = (x - mean[:, None]) * inverse[:, None]
        ctx.save_for_backward(normal, inverse, weight)
        ctx.mark_non_differentiable(mean, variance)
        return torch.addcmul(bias, normal, weight), mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        normal, inverse, weight = ctx.saved_tensors
        gradient = gradients[0]
        sums = torch.stack([gradient.sum(1), (gradient * normal).sum(1)])
        bias_gradient, weight_gradient = sums.sum(1)
        size = rank_and_size()[1]
        if size > 1:
            dist.all_reduce(sums)
        shift, slope = sums[:, :, None] / (normal.shape[1] * size)
        x_gradient = (gradient - shift - normal * slope) * (inverse[:, None] * weight)
        return x_gradient, weight_gradient, bias_gradient, None
