"""MIM-Refiner's heads: one on each of several blocks, with a nearest-neighbour alignment loss.

Alkin et al. 2025 (arXiv 2402.10093), and the authors' code where the paper leaves something open.
All heads are one module with a leading axis, so the number of exchanges between ranks and of
kernels does not grow with that of heads. Shapes: H heads, G = 2 global views, V views, b samples of
this rank, B of all ranks, E numbers of an embedding.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from maect.core.distributed import gather_rows, rank_and_size
from maect.models.heads import GlobalBatchNorm, HeadOutput, QueueHead, exact, topk_nn
from maect.models.kernels import mixed_precision
from maect.recipes import Refiner

GLOBAL = 2
"""Number of views that look up a neighbour; they come first."""


class HeadsLinear(nn.Module):
    """A linear layer without bias for each head, [H, V, b, in] to [H, V, b, out]."""

    def __init__(self, heads: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        """Compute one batched product for all heads."""
        return torch.bmm(x.flatten(1, 2), self.weight.mT).unflatten(1, x.shape[1:3])


class HeadsBatchNorm(GlobalBatchNorm):
    """BatchNorm of each head's channels, [H, V, b, C], with one exchange for all heads."""

    def __init__(self, heads: int, channels: int, joint: bool) -> None:
        super().__init__(heads * channels)
        self.joint = joint

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over samples and ranks, and over views if statistics are joint."""
        heads, views, rows, channels = x.shape
        side_by_side = x.permute(1, 2, 0, 3).reshape(views, rows, heads * channels)
        if self.joint:
            side_by_side = side_by_side.flatten(0, 1)[None]
        y = super().forward(side_by_side)
        return y.view(views, rows, heads, channels).permute(2, 0, 1, 3)


class RefinerHeads(QueueHead):
    """Projector, predictor and queue of each head; all enqueue the same samples.

    Attributes:
        numbers: block that each head reads; `blocks`, int64 [H], is the same for files.
        queue: normalised projections of earlier samples, float32 [H, Q, E].
        counts: multiplicity of each pair of a global view and a view in the loss, float32 [G, V].
        logged: `counts` of pairs with a global view and of those with a local one, [kinds, G, V].
    """

    blocks: Tensor
    counts: Tensor
    logged: Tensor
    settings: Refiner

    def __init__(
        self, width: int, settings: Refiner, blocks: tuple[int, ...], views: int = GLOBAL
    ) -> None:
        """Draw weights and noise, head by head.

        Args:
            width: of the encoder.
            settings: of all heads.
            blocks: that the heads read, rising.
            views: of an image, global and local.
        """
        super().__init__(settings)
        heads = len(blocks)
        self.lookups = heads
        hidden, wide = settings.projector_hidden, settings.predictor_hidden
        out = settings.embedding
        joint = settings.statistics == "joint"

        def layer(inputs: int, outputs: int) -> list[nn.Module]:
            return [HeadsLinear(heads, inputs, outputs), HeadsBatchNorm(heads, outputs, joint)]

        self.projector = nn.Sequential(
            *layer(width, hidden), nn.GELU(), *layer(hidden, hidden), nn.GELU(), *layer(hidden, out)
        )
        self.predictor = nn.Sequential(*layer(out, wide), nn.GELU(), *layer(wide, out))
        linear = [part.weight for part in self.modules() if isinstance(part, HeadsLinear)]
        noise = []
        for head in range(heads):
            for weight in linear:
                nn.init.xavier_uniform_(weight.data[head])
            noise.append(torch.randn(settings.queue_size, out))
        self.start_queue(torch.stack(noise))
        self.register_buffer("blocks", torch.tensor(blocks))
        counts = pair_counts(views, settings.terms)
        self.register_buffer("counts", torch.tensor(counts), persistent=False)
        kinds = {
            "global": [[*row[:GLOBAL], *[0.0] * (views - GLOBAL)] for row in counts],
            "local": [[*[0.0] * GLOBAL, *row[GLOBAL:]] for row in counts],
        }
        self._pairs = {kind: sum(map(sum, kept)) for kind, kept in kinds.items()}
        used = {kind: kept for kind, kept in kinds.items() if self._pairs[kind]}
        self.register_buffer("logged", torch.tensor([*used.values()]), persistent=False)
        self.numbers = blocks

    def take_over(self, tensors: Mapping[str, Tensor]) -> None:
        """Load these heads out of those that a run has exported, by the numbers of their blocks."""
        there: list[int] = tensors["blocks"].tolist() if "blocks" in tensors else []
        missing = sorted(set(self.numbers) - set(there))
        if missing:
            raise ValueError(f"it has no head on block {missing[0]}, but on {there}")
        rows = torch.tensor([there.index(block) for block in self.numbers])

        def of_heads(name: str, value: Tensor) -> Tensor:
            if name in ("queue_ids", "queue_labels", "pointer"):
                return value
            # BatchNorm has the channels of all heads side by side.
            return value.unflatten(0, (len(there), -1))[rows].flatten(0, 1)

        super().take_over({name: of_heads(name, value) for name, value in tensors.items()})

    def newest(self, count: int) -> dict[str, Tensor]:
        """Return the last vectors of each queue, [count, E], by a suffix with the block: `.16`."""
        of_heads = zip(self.numbers, self._newest(count), strict=True)
        return {f".{block}": vectors for block, vectors in of_heads}

    def forward(
        self,
        features: Tensor,
        ids: Tensor,
        labels: Tensor,
        lookup_numbers: Tensor,
        weights: Tensor | None = None,
    ) -> HeadOutput:
        """Return the sum of the heads' losses of a batch, whose first view enters the queues.

        Args:
            features: of all views for each head, the global ones first, [H, V, b, D].
            ids: stable sample ids, int64 [b].
            labels: int64 [b], -1 where unknown.
            lookup_numbers: rank of the neighbour to take among the k nearest, int64 in [0, k),
                [H * G, b].
            weights: of each sample in each head's loss, float32 [H, b]; None: 1.
        """
        z = self.projector(features)
        prediction = self.predictor(z)
        owners = gather_rows(torch.stack([ids, labels], dim=1))
        with mixed_precision(features.device, self.settings.precision):
            anchor = F.normalize(exact(z[:, :GLOBAL].detach()), dim=3)
            prediction = F.normalize(exact(prediction), dim=3)
            numbers = lookup_numbers.unflatten(0, anchor.shape[:2])
            positive, metrics = self._positives(anchor, ids, labels, numbers)
            losses = self._losses(anchor, positive, prediction, ids, owners[:, 0])
        self._enqueue(anchor[:, 0], owners)
        pairs = sum(self._pairs.values())
        per_head = (losses.mean(2) * self.counts).sum((1, 2)) / pairs
        alignment = losses.detach().neg().exp().mean((0, 2))
        of_kinds = (alignment * self.logged).sum((1, 2)).unbind()
        kinds = [kind for kind, count in self._pairs.items() if count]
        for kind, value in zip(kinds, of_kinds, strict=True):
            metrics[f"alignment_{kind}"] = value / self._pairs[kind]
        of_heads = zip(self.numbers, per_head.detach().unbind(), strict=True)
        metrics |= {f"loss.{block}": value for block, value in of_heads}
        if weights is not None:
            weighted = (losses * weights[:, None, :, None]).mean(2)
            return HeadOutput((weighted * self.counts).sum() / pairs, metrics)
        return HeadOutput(per_head.sum(), metrics)

    def _losses(
        self, anchor: Tensor, positive: Tensor, prediction: Tensor, ids: Tensor, key_ids: Tensor
    ) -> Tensor:
        """Return the cross-entropy of finding one's own prediction of each view, [H, G, b, V].

        With `negatives: own`, other samples' predictions are compared with one's own projection,
        and one's own prediction with the neighbour of that projection. Otherwise all are compared
        with the neighbour. A batch across the end of an epoch may have an image twice, which is no
        negative of itself.

        Args:
            anchor: projections of the global views, normalised, [H, G, b, E].
            positive: their neighbours, [H, G, b, E].
            prediction: of all views, normalised, [H, V, b, E].
            ids: of this rank's samples, [b].
            key_ids: of all ranks' samples, [B].
        """
        heads, views, b, _ = prediction.shape
        first = rank_and_size()[0] * b
        keys = gather_rows(prediction.permute(2, 0, 1, 3)).permute(1, 2, 0, 3)  # [H, V, B, E]
        own = self.settings.negatives == "own"
        query = (anchor if own else positive).flatten(1, 2)
        logits = torch.bmm(query, keys.flatten(1, 2).mT) / self.settings.temperature
        logits = logits.view(heads, GLOBAL, b, views, -1)
        if own:
            # [H * b, G, E] by [H * b, E, V]: each sample's neighbours and its own predictions.
            near, mine = positive.transpose(1, 2).flatten(0, 1), prediction.transpose(1, 2)
            aligned = torch.bmm(near, mine.flatten(0, 1).mT) / self.settings.temperature
            aligned = aligned.view(heads, b, GLOBAL, views).permute(0, 2, 3, 1)
            logits = torch.diagonal_scatter(logits, aligned, first, 2, 4)
        target = torch.arange(first, first + b, device=logits.device)
        copies = (ids[:, None] == key_ids).scatter(1, target[:, None], False)
        logits = logits.masked_fill(copies[:, None], float("-inf")).flatten(0, 3)
        targets = target[:, None].expand(heads, GLOBAL, b, views).flatten()
        losses = F.cross_entropy(exact(logits), targets, reduction="none")
        return losses.view(heads, GLOBAL, b, views)

    @torch.no_grad()
    def _positives(
        self, anchor: Tensor, ids: Tensor, labels: Tensor, lookup_numbers: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return each anchor's neighbour, [H, G, b, E], and scalars to log about the lookup.

        Heads take turns, since the similarities of one fill [G, b, Q].
        """
        own = ids[:, None] == self.queue_ids
        near = torch.stack(
            [
                topk_nn((z @ queue.T).masked_fill(own, -2), self.settings.topk, numbers)
                for z, queue, numbers in zip(anchor, self.queue, lookup_numbers, strict=True)
            ]
        )
        heads = torch.arange(len(near), device=near.device)[:, None, None]
        positive, found = self.queue[heads, near], self.queue_labels[near]
        known = (found >= 0) & (labels >= 0)
        counts = known.sum((1, 2))
        hits = ((found == labels) & known).sum((1, 2)) / counts.clamp(min=1)
        similarity = (positive * anchor).sum(3).mean((1, 2))
        metrics = {"queue_filled": (self.queue_ids >= 0).float().mean()}
        lookups = {"accuracy": 100 * hits.float(), "known": counts, "similarity": similarity}
        for name, values in lookups.items():
            of_heads = zip(self.numbers, values.unbind(), strict=True)
            metrics |= {f"lookup_{name}.{block}": value for block, value in of_heads}
        return positive, metrics


def pair_counts(views: int, terms: str) -> list[list[float]]:
    """Count how often each pair of a global view and a view is in the loss, [G][V].

    With `terms` "all", each global view is paired with every other view once. With "released", as
    in the authors' code, the loop over L local views begins at view 0 of all. So it takes the
    global views, each also with itself, in place of the last two local ones.
    """
    second = range(GLOBAL, views) if terms == "all" else range(views - GLOBAL)
    counts = [[0.0] * views for _ in range(GLOBAL)]
    for i, row in enumerate(counts):
        for j in range(GLOBAL):
            if j != i:
                row[j] += 1
        for j in second:
            row[j] += 1
    return counts


def head_weights(
    schedule: str, heads: int, epochs: int, of_samples: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return the weight of each sample in each head's loss, by its epoch, [H, b].

    The last head's weight is 1. In the authors' ablation, with eight heads and 20 epochs, the lower
    heads end one after the other, after epochs 4, 6, ... 16. Here they end evenly between 0.2 and
    0.8 of the epochs.

    Args:
        schedule: `staggered_step`: 1, and 0 from the head's end on. `staggered_cosine`: 1, and from
            the head's end on a cosine to 0 at the last epoch. `one_hot`: 0.1, then 1 between the
            end of the head below and its own, then 0. `uniform`: 1 for a fifth of the epochs, then
            a cosine to 0, the same for all lower heads.
        heads: number of heads, H.
        epochs: of the training.
        of_samples: epoch of each sample, [b].
    """

    def end_of(head: int) -> float:
        return epochs * (0.2 + 0.6 * head / max(heads - 2, 1))

    def weight(head: int, epoch: int) -> float:
        start = epochs / 5 if schedule == "uniform" else end_of(head)
        if epoch < start - 1e-9:
            waits = head > 0 and epoch < end_of(head - 1) - 1e-9
            return 0.1 if schedule == "one_hot" and waits else 1.0
        if schedule in ("staggered_step", "one_hot"):
            return 0.0
        return (1 + math.cos(math.pi * (epoch - start) / (epochs - start))) / 2

    weights = np.ones((heads, len(of_samples)), np.float32)
    for epoch in np.unique(of_samples).tolist():  # one, or two at the end of an epoch
        column = [weight(head, epoch) for head in range(heads - 1)]
        weights[:-1, of_samples == epoch] = np.array(column, np.float32)[:, None]
    return weights
