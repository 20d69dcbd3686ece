"""Probes of billpsomas/efficient-probing, trained with LARS: linear, and with attention.

A BatchNorm without parameters and one linear layer, trained with LARS (You et al. 2017) at the rate
of MAE's linear probe. The linear probe reads one vector of each image. Efficient probing (Psomas et
al. 2026) puts attention in front: Q queries attend to the frozen patch tokens, which are their own
keys, and query q sums up its own D / Q of the D value channels.
docs/results/paper/probes_beside_their_authors.csv compares each setting with the authors' code.
"""

from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maect.core import distributed
from maect.core.context import Context
from maect.core.errors import UserError
from maect.evaluate.base import EvaluationJob, encoder_settings
from maect.evaluate.features import Encoding
from maect.evaluate.probe_training import (
    HELD_OUT,
    HeadGroup,
    Probe,
    ProbeBatch,
    ProbeTask,
    train_probe,
)
from maect.evaluate.protocols.probes import EfficientProbe, LarsLinearProbe, TrainsByLars
from maect.models.vit import seeded

BN_EPS, BN_MOMENTUM = 1e-6, 0.1
MOMENTUM, TRUST = 0.9, 0.001


def evaluate_linear(
    settings: LarsLinearProbe, context: Context, job: EvaluationJob
) -> dict[str, Any]:
    """Accuracies in percent: `lars_linear_probe` (best epoch), its `_last`, and of all epochs.

    The encoder is read by [CLS] token or patch mean, without the final norm. The probe of the best
    epoch is kept.
    """
    pooling: Literal["cls", "mean"] = "mean"
    if encoder_settings(job.run).class_token:
        pooling = "cls"
    device = distributed.device_of(context)
    encoding = Encoding(job.encoder, device, settings.precision, pooling=pooling, norm=False)
    return train_probe(settings, context, job, encoding, LarsProbe)


def evaluate_efficient(
    settings: EfficientProbe, context: Context, job: EvaluationJob
) -> dict[str, Any]:
    """Accuracies in percent: `efficient_probe` (best epoch), its `_last`, and of all epochs.

    The probe of the best epoch is kept.
    """
    encoding = Encoding(job.encoder, distributed.device_of(context), settings.precision)
    width = encoding.settings.width
    if width % settings.queries:
        raise UserError(
            f"{job.out.stem}: queries {settings.queries} do not divide the encoder's width {width}"
        )
    return train_probe(settings, context, job, encoding, MultiQueryProbe)


class LarsHead(HeadGroup):
    """BatchNorm and classifier on pooled features.

    Attributes:
        weight: [C, D]; bias: [C].
        mean, var: running statistics of what is pooled, [D].
    """

    POOLING: ClassVar[tuple[str, ...]] = ()
    """Trained tensors in front of the BatchNorm."""
    weight: Tensor
    bias: Tensor

    def __init__(
        self, width: int, classes: int, settings: TrainsByLars, device: torch.device
    ) -> None:
        """Initialise as the authors' modules are, from `settings.seed`."""
        self.trained = (*self.POOLING, "weight", "bias")
        self.SAVED = (*self.trained, "mean", "var")
        with seeded(settings.seed):
            self.initialize(width, classes, settings)
        for name in self.trained:
            setattr(self, name, getattr(self, name).detach().to(device).requires_grad_())
        self.mean = torch.zeros(width, device=device)
        self.var = torch.ones(width, device=device)
        self.weight_decay = settings.weight_decay
        parameters = [getattr(self, name) for name in self.trained]
        peak = settings.base_lr * settings.batch_size / 256
        self.optimizer = torch.optim.SGD([{"params": parameters, "peak": peak}], momentum=MOMENTUM)

    def initialize(self, width: int, classes: int, settings: Any) -> None:
        """Set the initial values, on the CPU: torch's of a linear layer."""
        classifier = nn.Linear(width, classes)
        self.weight, self.bias = classifier.weight, classifier.bias

    def pool(self, features: Tensor) -> Tensor:
        """Return one vector per image, [b, D]."""
        return features

    def update(
        self, features: Tensor, labels: Tensor, lr_multiplier: float, taken: Tensor | None = None
    ) -> Tensor:
        """Update once by rows of the global batch; return the mean cross-entropy before, [1].

        The classifier is trained on all ranks' rows by every rank; only what is pooled and the
        gradients of the pooling are exchanged.

        Args:
            features: of this rank's images, [b, ...].
            labels: of all ranks' images, [B].
            taken: which of all are learnt from, bool [B]; two at least.
        """
        mine = self.pool(features)
        pooled = distributed.gather_rows(mine.detach())
        if self.POOLING:
            pooled.requires_grad_()
        rows = pooled if taken is None else pooled[taken]
        normal = F.batch_norm(
            rows, self.mean, self.var, training=True, momentum=BN_MOMENTUM, eps=BN_EPS
        )
        logits = F.linear(normal, self.weight, self.bias)
        loss = F.cross_entropy(logits, labels if taken is None else labels[taken])
        loss.backward()
        if pooled.grad is not None:
            rank = distributed.rank_and_size()[0]
            mine.backward(pooled.grad[rank * len(mine) : (rank + 1) * len(mine)])
        for name in self.POOLING:
            distributed.sum_over_ranks(getattr(self, name).grad)
        for name in self.trained:
            adapt_gradient(getattr(self, name), self.weight_decay)
        self.descend(lr_multiplier)
        return loss.detach()[None]

    def predict(self, features: Tensor) -> Tensor:
        """Predict each image's class by the running statistics, int64 [n]."""
        with torch.no_grad():
            normal = (self.pool(features) - self.mean) * torch.rsqrt(self.var + BN_EPS)
            return F.linear(normal, self.weight, self.bias).argmax(dim=1)


class LarsProbe(Probe):
    """A head, and with `held_out` one that learns from the same batches without held-out images."""

    HEAD: ClassVar[type[LarsHead]] = LarsHead

    def __init__(self, task: ProbeTask, settings: TrainsByLars) -> None:
        super().__init__(task, settings, settings.held_out)
        self.name = settings.name
        self.real = task.real_labels_of(settings)
        width = task.encoding.settings.width
        classes = len(task.train.class_names)
        self.heads = {
            part: self.HEAD(width, classes, settings, task.encoding.device) for part in self.scored
        }
        self.groups = {f"probe{part}": head for part, head in self.heads.items()}

    def step(self, features: Tensor, batch: ProbeBatch, lr_multiplier: float) -> Tensor:
        """Update once on the global batch; return the mean cross-entropy of each head."""
        labels = distributed.gather_rows(batch.targets)
        losses = [
            head.update(features, labels, lr_multiplier, self.learners(batch.ids) if part else None)
            for part, head in self.heads.items()
        ]
        return torch.cat(losses)

    def score(self) -> None:
        """Encode the test images each time: the tokens of all would not fit into memory."""
        for part, index in self.scored.items():
            head = self.heads[part]
            found = self.task.predicted(partial(self._predict, head), index)
            accuracy = 100 * int((found == index.labels).sum()) / index.n
            if self.add_scores(f"accuracies{part}", accuracy) and not part:
                self.store_best(head, head.SAVED)
            if self.real is not None and not part:
                self.record.setdefault("real", []).append(self.real.accuracy(found))

    def _predict(self, head: LarsHead, images: Tensor) -> Tensor:
        return head.predict(self.task.check_finite(self.read(images)))

    def metrics(self) -> dict[str, Any]:
        """Return the accuracies of the best epoch, the last one and all; also by ReaL's labels."""
        history = self.record["accuracies"]
        epochs = {self.name: history.index(max(history)), f"{self.name}_last": -1}
        about: dict[str, Any] = {"best_epoch": epochs[self.name] + 1, "by_epoch": history}
        if HELD_OUT in self.scored:
            scores = self.record[f"accuracies{HELD_OUT}"]
            epoch = epochs[f"{self.name}_held_out"] = scores.index(max(scores))
            about |= {"held_out_epoch": epoch + 1, "held_out_accuracy": scores[epoch]}
        metrics = {name: history[epoch] for name, epoch in epochs.items()}
        if self.real is not None:
            by_real = self.record["real"]
            metrics |= {f"{name}_real": by_real[epoch] for name, epoch in epochs.items()}
        return metrics | about


def adapt_gradient(parameter: Tensor, weight_decay: float) -> None:
    """Decay and scale a gradient in place as LARS does (You et al. 2017), for SGD behind it.

    As in MAE's code: weights over decayed gradient, vectors neither scaled nor decayed. timm's
    `Lars` adds the lengths of gradient and decay instead.
    """
    gradient = parameter.grad
    assert gradient is not None
    if parameter.ndim < 2:
        return
    with torch.no_grad():
        gradient.add_(parameter, alpha=weight_decay)
        length, change = parameter.norm(), gradient.norm()
        scaled = (length > 0) & (change > 0)
        gradient.mul_(torch.where(scaled, TRUST * length / change, 1.0))


class MultiQueryHead(LarsHead):
    """Attentive pooling in front of BatchNorm and classifier.

    Attributes:
        queries: [Q, D]; values: [D, D], rows q D / Q to (q + 1) D / Q are query q's.
    """

    POOLING = ("queries", "values")
    queries: Tensor
    values: Tensor

    def initialize(self, width: int, classes: int, settings: EfficientProbe) -> None:
        """Set the initial values, in the authors' order."""
        self.values = nn.Linear(width, width, bias=False).weight
        super().initialize(width, classes, settings)
        self.queries = 0.02 * torch.randn(settings.queries, width)

    def pool(self, tokens: Tensor) -> Tensor:
        """Pool tokens [b, N, D] by the queries: [b, D]."""
        count, width = self.queries.shape
        attention = (tokens @ (self.queries.T * width**-0.5)).softmax(dim=1)  # [b, N, Q]
        seen = attention.transpose(1, 2) @ tokens  # [b, Q, D]
        # For each query a product of its own: [Q, b, D] with [Q, D, D / Q].
        values = self.values.view(count, -1, width).transpose(1, 2)
        return (seen.transpose(0, 1) @ values).transpose(0, 1).flatten(1)


class MultiQueryProbe(LarsProbe):
    """The probe that attends to the patch tokens."""

    HEAD = MultiQueryHead

    def read(self, images: Tensor) -> Tensor:
        """Return the patch tokens, float32 [b, N, D]."""
        return self.task.encoding.output(images).patch_tokens().float()
