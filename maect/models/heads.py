"""The NNCLR head: projector, predictor, queue, nearest-neighbour lookup and loss.

After the paper, section 3, equations 1 and 2, and appendix A.2, and the authors' code where the
paper leaves something open. Tensors of two views are [2, b, C]: view, sample of this rank, channel.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from maect.core.distributed import gather_rows, rank_and_size
from maect.models.kernels import mixed_precision
from maect.recipes import Contrastive, HeadSettings


@dataclass
class HeadOutput:
    """Loss and metrics of a batch.

    Attributes:
        loss: mean over this rank's samples of the symmetrised InfoNCE loss, [].
        metrics: scalars to log: lookup accuracy and similarity, and filled part of the queue.
        anchors: normalised vectors of both views, as they enter the queue, [2, b, E].
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    anchors: Tensor | None = None


def projector(width: int, hidden: int, out: int) -> nn.Sequential:
    """Return three linear layers, each followed by BatchNorm, the first two also by ReLU."""
    return nn.Sequential(
        *_layer(width, hidden), nn.ReLU(True), *_layer(hidden, hidden), nn.ReLU(True),
        *_layer(hidden, out),
    )  # fmt: skip


def predictor(width: int, hidden: int) -> nn.Sequential:
    """Return two linear layers with BatchNorm and ReLU between them."""
    first = _layer(width, hidden)
    return nn.Sequential(*first, nn.ReLU(True), nn.Linear(hidden, width, bias=False))


def _layer(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Linear(inputs, outputs, bias=False), GlobalBatchNorm(outputs)]


def as_buffers(module: nn.Module) -> nn.Module:
    """Return a copy whose parameters are buffers: not trained, and not sharded by ZeRO 3."""
    copy = deepcopy(module)
    for layer in copy.modules():
        for name, value in list(layer.named_parameters(recurse=False)):
            delattr(layer, name)
            layer.register_buffer(name, value.detach().clone())
    return copy


class QueueHead(nn.Module):
    """Base class of a head with a queue, or of several heads in one module.

    Attributes:
        lookups: number of lookups for a view.
        queue: normalised vectors of earlier samples, float32 [Q, E]; of several heads [H, Q, E].
        queue_ids: their sample ids, int64 [Q]; -1 for initial noise and samples of another data
            set.
        queue_labels: their labels, int64 [Q], -1 if unknown; for logging and the oracle only.
        pointer: index in the queue where the next batch goes, int64 [].
    """

    lookups = 1
    queue: Tensor
    queue_ids: Tensor
    queue_labels: Tensor
    pointer: Tensor

    def __init__(self, settings: HeadSettings) -> None:
        super().__init__()
        self.settings = settings

    def start_queue(self, noise: Tensor) -> None:
        """Fill the queue with noise, [..., Q, E], in place of earlier samples' vectors."""
        size = self.settings.queue_size
        self.register_buffer("queue", F.normalize(noise, dim=-1))
        self.register_buffer("queue_ids", torch.full((size,), -1))
        self.register_buffer("queue_labels", torch.full((size,), -1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))

    def exported(self) -> dict[str, Tensor]:
        """Return the tensors that a finished run exports."""
        return self.state_dict()

    def take_over(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the tensors that a run has exported.

        Raises:
            ValueError: a tensor is missing or has another shape.
        """
        for name, value in self.exported().items():
            if name not in tensors or tensors[name].shape != value.shape:
                there = list(tensors[name].shape) if name in tensors else "nothing"
                raise ValueError(f"{name} is {there}, this recipe needs {list(value.shape)}")
        self.load_state_dict(dict(tensors), strict=False)

    def forget_samples(self, fields: Collection[str]) -> None:
        """Forget the queue's `ids` or `labels`, since they were of other images; keep vectors."""
        for name in fields:
            self.get_buffer(f"queue_{name}").fill_(-1)

    def newest(self, count: int) -> dict[str, Tensor]:
        """Return the last vectors of each queue, [count, E], by a suffix for the queue's name.

        They are the same on every rank.
        """
        return {"": self._newest(count)}

    def _newest(self, count: int) -> Tensor:
        """Return the last vectors, [..., count, E], also across the queue's end."""
        back = torch.arange(-count, 0, device=self.pointer.device)
        return self.queue[..., (self.pointer + back) % len(self.queue_ids), :]

    def after_update(self, gathered: Callable[[nn.Module], AbstractContextManager[None]]) -> None:
        """Update values that depend on the weights, which are whole within `gathered`."""

    @torch.no_grad()
    def _advance(self, owners: Tensor) -> Tensor:
        """Give the oldest entries to samples (id, label), [B, 2]; return their indices, [B]."""
        size = len(self.queue_ids)
        if size % len(owners):
            raise ValueError(f"global batch {len(owners)} does not divide queue_size {size}")
        # On the device: reading the pointer on the host would wait for the device every step.
        oldest = (self.pointer + torch.arange(len(owners), device=owners.device)) % size
        self.queue_ids[oldest] = owners[:, 0]
        self.queue_labels[oldest] = owners[:, 1]
        self.pointer.copy_((self.pointer + len(owners)) % size)
        return oldest

    @torch.no_grad()
    def _enqueue(self, vectors: Tensor, owners: Tensor) -> None:
        """Overwrite the oldest entries with all ranks' vectors, [..., b, E], in rank order."""
        rows = gather_rows(vectors.detach().movedim(-2, 0).to(self.queue.dtype))
        self.queue[..., self._advance(owners), :] = rows.movedim(0, -2)


class NNCLRHead(QueueHead):
    """Projector, EMA projector, predictor and queue.

    Attributes:
        slow_projector: the EMA projector, or None; states of training have this name in them.
    """

    settings: Contrastive

    def __init__(self, width: int, settings: Contrastive) -> None:
        super().__init__(settings)
        self.projector = projector(width, settings.projector_hidden, settings.embedding)
        self.predictor = predictor(settings.embedding, settings.predictor_hidden)
        self.start_queue(torch.randn(settings.queue_size, settings.embedding))
        self.slow_projector: nn.Module | None = None
        self.start_ema()

    def exported(self) -> dict[str, Tensor]:
        """Return the tensors that a finished run exports: all but those of the EMA projector."""
        slow = "slow_projector."
        return {k: v for k, v in self.state_dict().items() if not k.startswith(slow)}

    def take_over(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the tensors that a run has exported; the EMA projector starts at the projector."""
        super().take_over(tensors)
        self.start_ema()

    def after_update(self, gathered: Callable[[nn.Module], AbstractContextManager[None]]) -> None:
        """Move the EMA projector towards the projector."""
        if self.slow_projector is not None:
            with gathered(self.projector):
                self.update_ema()

    def start_ema(self) -> None:
        """Set the EMA projector to the projector, if the settings ask for one."""
        if self.settings.projector_ema:
            self.slow_projector = as_buffers(self.projector)

    @torch.no_grad()
    def update_ema(self) -> None:
        """Move the EMA projector's weights towards the projector; its statistics are copied."""
        if self.slow_projector is None:
            return
        weights = dict(self.projector.named_parameters())
        statistics = dict(self.projector.named_buffers())
        for name, average in self.slow_projector.named_buffers():
            if name in weights:
                value = weights[name].detach().to(average)
                average.lerp_(value, 1 - self.settings.projector_ema)
            else:
                average.copy_(statistics[name])

    def forward(
        self, features: Tensor, ids: Tensor, labels: Tensor, lookup_numbers: Tensor
    ) -> HeadOutput:
        """Return the loss of a batch, whose first view then enters the queue.

        Args:
            features: pooled encoder output of both views, [2, b, D].
            ids: stable sample ids, int64 [b].
            labels: int64 [b], -1 where unknown.
            lookup_numbers: rank of the neighbour to take among the k nearest, int64 in [0, k),
                [2, b]; an oracle takes one of another class if k is added.
        """
        z = self.projector(features)
        prediction = self.predictor(z)
        reaches = torch.is_grad_enabled() and not self.settings.stop_gradient
        with torch.set_grad_enabled(reaches):
            anchor = z if self.slow_projector is None else self.slow_projector(features)
        owners = gather_rows(torch.stack([ids, labels], dim=1))
        with mixed_precision(features.device, self.settings.precision):
            prediction = F.normalize(exact(prediction), dim=2)
            with torch.set_grad_enabled(reaches):
                anchor = F.normalize(exact(anchor), dim=2)
            positive, metrics = self._positives(anchor, ids, labels, lookup_numbers)
            keys = gather_rows(prediction.transpose(0, 1))
            temperature = self.settings.temperature
            key_ids = owners[:, 0]
            loss = (
                info_nce(positive[0], keys[:, 1], temperature, ids, key_ids)
                + info_nce(positive[1], keys[:, 0], temperature, ids, key_ids)
            ) / 2
        self._enqueue(anchor[0], owners)
        return HeadOutput(loss, metrics, anchor)

    def _positives(
        self, anchor: Tensor, ids: Tensor, labels: Tensor, lookup_numbers: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return each anchor's positive, [2, b, E], and scalars to log about the lookup."""
        filled = (self.queue_ids >= 0).float().mean()
        if self.settings.lookup == "none":
            return anchor, {"queue_filled": filled}
        with torch.no_grad():
            neighbor = self._look_up(anchor, ids, labels, lookup_numbers)
            positive, neighbor_labels = self.queue[neighbor], self.queue_labels[neighbor]
            known = (neighbor_labels >= 0) & (labels >= 0)
            count = known.sum()
            hits = ((neighbor_labels == labels) & known).sum() / count.clamp(min=1)
            return positive, {
                "lookup_accuracy": 100 * hits.float(),
                "lookup_known": count,
                "lookup_similarity": (positive * anchor).sum(2).mean(),
                "queue_filled": filled,
            }

    def _look_up(
        self, anchor: Tensor, ids: Tensor, labels: Tensor, lookup_numbers: Tensor
    ) -> Tensor:
        """Return the index in the queue of each anchor's neighbour, [2, b].

        An oracle's candidates are the other entries of the anchor's class. If there are none, its
        own entry is taken, and if the class has no entry at all, one of another class. If the
        oracle is to be wrong, candidates are the entries of other classes, if there are any.
        """
        topk = self.settings.topk
        similarity = anchor @ self.queue.T
        own = ids[:, None] == self.queue_ids
        similarity = similarity.masked_fill(own, -2)  # behind all others
        if self.settings.lookup == "oracle":
            same = (labels[:, None] == self.queue_labels) & (labels[:, None] >= 0)
            if self.settings.oracle_right < 1:
                wrong, lookup_numbers = lookup_numbers >= topk, lookup_numbers % topk
                known = (labels[:, None] >= 0) & (self.queue_labels >= 0)
                same = torch.where(wrong[..., None], known & ~same, same)
            # More than any two similarities differ by; bfloat16 would round their order away.
            similarity = exact(similarity) + 4 * same
            others = (same & ~own).sum(-1).clamp(min=1)
            candidates = torch.where(same.any(-1), others, topk)
            lookup_numbers = lookup_numbers % candidates
        return topk_nn(similarity, topk, lookup_numbers)


def exact(x: Tensor) -> Tensor:
    """Return x in float32 at least, for normalisation, whatever its products are computed in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def topk_nn(similarity: Tensor, k: int, lookup_numbers: Tensor) -> Tensor:
    """Return the queue index of one of the k nearest neighbours, [...] (paper, equation 1).

    Args:
        similarity: to every queue entry, [..., Q].
        k: number of candidates.
        lookup_numbers: rank of the neighbour among them, nearest first, int64 in [0, k), [...].
    """
    if k == 1:
        return similarity.argmax(dim=-1)
    candidates = similarity.topk(k, dim=-1).indices
    return candidates.gather(-1, lookup_numbers[..., None]).squeeze(-1)


def info_nce(
    positive: Tensor, keys: Tensor, temperature: float, ids: Tensor, key_ids: Tensor
) -> Tensor:
    """Return the cross-entropy of finding one's own prediction among those of the global batch.

    Paper, equation 2: queries are neighbours, negatives are the other samples' predictions. A batch
    across the end of an epoch may have an image twice, which is no negative of itself.

    Args:
        positive: this rank's queries, normalised, [b, E].
        keys: all ranks' predictions, normalised, [world * b, E].
        temperature: divides the similarities.
        ids: of this rank's samples, [b].
        key_ids: of all ranks' samples, [world * b].

    Returns:
        Mean over this rank's rows, [].
    """
    logits = positive @ keys.T / temperature
    rank, _ = rank_and_size()
    target = torch.arange(len(positive), device=logits.device) + rank * len(positive)
    copies = (ids[:, None] == key_ids).scatter(1, target[:, None], False)
    return F.cross_entropy(logits.masked_fill(copies, float("-inf")), target)


class GlobalBatchNorm(nn.Module):
    """BatchNorm over the rows of one view on all ranks.

    Statistics and output are float32 at least. As in `nn.BatchNorm1d`, the running variance is
    the unbiased one, momentum 0.1, and the views update it one after the other.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.eps = eps
        self.momentum = momentum
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [views, b, C] over b and ranks, or in eval mode by the running statistics."""
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
