"""Base of the probes of billpsomas/efficient-probing: BatchNorm, classifier and LARS.

A BatchNorm without parameters and one linear layer, on what may be pooled by trained tensors; LARS
(You et al. 2017) with the rate of MAE's linear probe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from maect.data.index import Index
from maect.evaluate.real import Real, RealLabels
from maect.evaluate.trained import ByEpochs, Group, Trainee, Trial

if TYPE_CHECKING:
    from torch import Tensor

BN_EPS, BN_MOMENTUM = 1e-6, 0.1
MOMENTUM, TRUST = 0.9, 0.001
CLASSIFIER = ("weight", "bias")


class TrainsByLars(RealLabels, ByEpochs):
    """Settings of the leaderboard's trained probes."""

    encodes_every_epoch: ClassVar[bool] = True

    epochs: int = Field(default=90, gt=0)
    batch_size: int = Field(default=4096, gt=0)
    base_lr: float = Field(default=0.1, gt=0)
    """Multiplied by batch_size / 256."""
    warmup_epochs: float = Field(default=10, ge=0)
    weight_decay: float = Field(default=0, ge=0)
    """Of all trained tensors but the classifier's bias."""
    held_out: float = Field(default=0.0, ge=0, lt=1)
    """Train the probe a second time without this part of the training images, and choose the epoch
    on them."""


class LarsProbe(Trainee, Group):
    """BatchNorm and classifier on pooled features, the same on every rank.

    With `held_out` a twin is trained beside it, on the same batches without the held-out images.

    Attributes:
        weight: [C, D]; bias: [C].
        mean, var: running statistics of what is pooled, [D].
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, trial: Trial, settings: TrainsByLars, *pooling: str) -> None:
        """Initialise as the authors' modules are, from `settings.seed`.

        `pooling` names the trained tensors in front of the BatchNorm, if any.
        """
        import torch

        from maect.models.vit import seeded

        super().__init__(trial)
        self.groups: dict[str, LarsProbe] = {"probe": self}
        self.name = settings.name
        self.real = trial.reassessed(settings)
        if settings.held_out:
            self.held = trial.held_out(settings.held_out, settings.seed)
            without = settings.model_copy(update={"held_out": 0.0, "real_labels": None})
            self.groups["twin"] = type(self)(trial, without, *pooling)
        self.pooling, self.trained = pooling, (*pooling, *CLASSIFIER)
        momenta = (f"{name}_momentum" for name in self.trained)
        self.SHARED = (*self.trained, *momenta, "mean", "var")
        width, device = trial.encoding.settings.width, trial.encoding.device
        with seeded(settings.seed):
            self.initialize(width, len(trial.train.class_names), settings)
        for name in self.trained:
            tensor = getattr(self, name).detach().to(device)
            setattr(self, f"{name}_momentum", torch.zeros_like(tensor))
            setattr(self, name, tensor.requires_grad_())
        self.mean = torch.zeros(width, device=device)
        self.var = torch.ones(width, device=device)
        self.peak = settings.base_lr * settings.batch_size / 256
        self.weight_decay = settings.weight_decay

    def initialize(self, width: int, classes: int, settings: Any) -> None:
        """Set the initial values, on the CPU: torch's of a linear layer."""
        from torch import nn

        classifier = nn.Linear(width, classes)
        self.weight, self.bias = classifier.weight, classifier.bias

    def pool(self, features: Tensor) -> Tensor:
        """Return one vector per image, [b, D]."""
        return features

    def step(self, features: Tensor, targets: Tensor, lr_multiplier: float) -> Tensor:
        """One update on the global batch; the loss is the mean cross-entropy, [1]."""
        import torch

        from maect.core import distributed

        targets = distributed.gather_rows(targets)
        if self.held is None:
            return self.update(features, targets, lr_multiplier)
        labels, others = targets[:, 0], targets[:, 1] == 0
        loss = self.update(features, labels, lr_multiplier)
        return torch.cat(
            [loss, self.groups["twin"].update(features, labels, lr_multiplier, others)]
        )

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
        from torch.nn import functional as F

        from maect.core import distributed

        mine = self.pool(features)
        pooled = distributed.gather_rows(mine.detach())
        if self.pooling:
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
        for name in self.trained:
            parameter = getattr(self, name)
            if name in self.pooling:
                distributed.sum_over_ranks(parameter.grad)
            momentum = getattr(self, f"{name}_momentum")
            lars(parameter, momentum, self.peak * lr_multiplier, self.weight_decay)
        return loss.detach()[None]

    def predict(self, features: Tensor) -> Tensor:
        """Class of each image, with the running statistics: int64 [n]."""
        import torch
        from torch.nn import functional as F

        with torch.no_grad():
            normal = (self.pool(features) - self.mean) * torch.rsqrt(self.var + BN_EPS)
            return F.linear(normal, self.weight, self.bias).argmax(dim=1)

    def score(self) -> None:
        """Encode the test images each time: the tokens of all would not fit into memory."""
        if self.add_scores("accuracies", self._accuracy(self, self.trial.test, self.real)):
            self.keep(self, (*self.trained, "mean", "var"))
        if self.held is not None:
            self.add_scores("held_out", self._accuracy(self.groups["twin"], self.held))

    def _accuracy(self, probe: LarsProbe, index: Index, real: Real | None = None) -> float:
        """In percent; that by ReaL's labels is recorded beside it."""
        found = self.trial.predicted(probe._class_of, index)
        if real is not None:
            self.record.setdefault("real", []).append(real.accuracy(found))
        return 100 * int((found == index.labels).sum()) / index.n

    def _class_of(self, images: Tensor) -> Tensor:
        return self.predict(self.trial.checked(self.read(images)))

    def metrics(self) -> dict[str, Any]:
        """Return the accuracies of the best epoch, the last one and all; by ReaL likewise."""
        history = self.record["accuracies"]
        epochs = {self.name: history.index(max(history)), f"{self.name}_last": -1}
        about: dict[str, Any] = {"best_epoch": epochs[self.name] + 1, "by_epoch": history}
        if self.held is not None:
            scores = self.record["held_out"]
            epoch = epochs[f"{self.name}_held_out"] = scores.index(max(scores))
            about |= {"held_out_epoch": epoch + 1, "held_out_accuracy": scores[epoch]}
        metrics = {name: history[epoch] for name, epoch in epochs.items()}
        if self.real is not None:
            by_real = self.record["real"]
            metrics |= {f"{name}_real": by_real[epoch] for name, epoch in epochs.items()}
        return metrics | about


def lars(parameter: Tensor, momentum: Tensor, rate: float, weight_decay: float) -> None:
    """One step of LARS (You et al. 2017), in place; the gradient is used up.

    As in MAE's code: weights over decayed gradient, vectors neither scaled nor decayed. timm's
    `Lars` adds the lengths of gradient and decay (without decay its bits are the same), scales
    vectors, too, and keeps the momenta to itself; here they are saved with the probe.
    """
    import torch

    with torch.no_grad():
        update = parameter.grad
        assert update is not None
        if parameter.ndim > 1:
            update = update + weight_decay * parameter
            length, change = parameter.norm(), update.norm()
            scaled = (length > 0) & (change > 0)
            update = update * torch.where(scaled, TRUST * length / change, 1.0)
        momentum.mul_(MOMENTUM).add_(update)
        parameter.sub_(momentum, alpha=rate)
        parameter.grad = None
