"""Linear probing: a sweep over learning rates on frozen features (paper, B and table 9).

Heads of all rates, and of all representations, are trained on one pass of the encoder: one stacked
weight for each representation, and torch's SGD on the sum of the heads' losses, which do not meet.
"""

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from maect.core import distributed
from maect.core.context import Context
from maect.evaluate.base import EvaluationJob
from maect.evaluate.features import Encoding, LastBlocks
from maect.evaluate.probe_training import (
    HELD_OUT,
    HeadGroup,
    Probe,
    ProbeBatch,
    ProbeTask,
    train_probe,
)
from maect.evaluate.protocols.probes import LinearProbe
from maect.train.scores import BATCH


def evaluate(settings: LinearProbe, context: Context, job: EvaluationJob) -> dict[str, Any]:
    """Accuracies in percent: `linear_probe` (best epoch), `linear_probe_last`, and of each rate.

    docs/reference/probes.md lists the metrics.

    Kept is the classifier behind each best accuracy: `weight` [C, D] and `bias` [C] for
    features minus `mean` over the square root of `var` + 1e-5 (with concatenations each as
    `concat_l.weight` and so on).
    """
    path, device = job.encoder, distributed.device_of(context)
    blocks = max(BLOCKS) if settings.concat else 1
    if settings.refiner:
        encoding: Encoding = LastBlocks(path, device, settings.precision, blocks=RAW)
    else:
        encoding = Encoding(
            path, device, settings.precision, blocks=blocks, other_pooling=settings.concat
        )
    return train_probe(settings, context, job, encoding, _Forms)


BLOCKS = (1, 2, 4, 6)
RAW = 4
SINGLE_FORM = "linear_probe"
BN_EPS, BN_MOMENTUM = 1e-5, 0.1
REAL = ".real"


def representations(encoding: Encoding) -> dict[str, slice]:
    """Return which features each probe reads, by the name of its metric."""
    width = encoding.settings.width
    blocks = encoding.blocks
    columns = {
        f"concat_{count}": slice((blocks - count) * width, blocks * width)
        for count in BLOCKS
        if count <= blocks
    }
    if encoding.other is not None:
        columns["concat_cls_mean"] = slice((blocks - 1) * width, (blocks + 1) * width)
        if encoding.other == "mean":
            columns["concat_mean"] = slice(blocks * width, (blocks + 1) * width)
    return columns


def refiner_forms(encoding: Encoding) -> dict[str, slice]:
    """Return the columns of MIM-Refiner's forms in the features of `LastBlocks`."""
    width = encoding.settings.width
    poolings = ["cls", "mean"] if encoding.settings.class_token else ["mean"]
    first = 0
    columns = {}
    for source, blocks in (("output", 1), ("last", encoding.blocks)):
        for count in range(1, 1 + len(poolings)):
            end = first + count * blocks * width
            columns["_".join([source, *poolings[:count]])] = slice(first, end)
        first = end
    return columns


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
        generator = torch.Generator().manual_seed(seed)
        weight = torch.empty(len(rates), classes * width)
        torch.nn.init.trunc_normal_(weight, std=0.01, generator=generator)
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
        """Return the logits of normalized features [n, D], by one product: [n, R, C]."""
        return F.linear(x, self.weight.flatten(0, 1), self.bias.flatten()).unflatten(
            1, self.bias.shape
        )


class _Forms(Probe):
    """Heads of all rates on each form of the features."""

    groups: dict[str, Heads]

    def __init__(self, task: ProbeTask, settings: LinearProbe) -> None:
        super().__init__(task, settings, settings.held_out)
        self.rates = list(settings.learning_rates)
        encoding = task.encoding
        self.columns = {SINGLE_FORM: slice(None)}
        if settings.refiner:
            self.columns = refiner_forms(encoding)
        elif settings.concat:
            self.columns = representations(encoding)
        if settings.refiner or settings.concat:
            self.forms = tuple(self.columns)
        peaks = [rate * settings.batch_size / 256 for rate in self.rates]
        self.real = task.real_labels_of(settings)
        self.known = {part: task.features(index) for part, index in self.scored.items()}
        rest = (peaks, settings.momentum, settings.seed, encoding.device)
        widths = {n: len(range(*c.indices(encoding.width))) for n, c in self.columns.items()}
        self.groups = {
            name + part: Heads(width, len(task.train.class_names), *rest)
            for part in self.scored
            for name, width in widths.items()
        }

    def step(self, features: Tensor, batch: ProbeBatch, lr_multiplier: float) -> Tensor:
        features = distributed.gather_rows(features)
        labels = distributed.gather_rows(batch.targets)
        seen = {"": (features, labels)}
        if HELD_OUT in self.scored:
            others = self.learners(batch.ids)
            seen[HELD_OUT] = features[others], labels[others]
        losses = [
            self.groups[name + part].step(x[:, columns], y, lr_multiplier)
            for part, (x, y) in seen.items()
            for name, columns in self.columns.items()
        ]
        return torch.cat(losses)

    def score(self) -> None:
        for part in self.scored:
            for name in self.columns:
                accuracies = self._accuracies(name, part)
                if self.add_scores(name + part, accuracies) and not part:
                    self._keep(name, accuracies.index(max(accuracies)))

    def metrics(self) -> dict[str, Any]:
        found = [self._metrics(name, self.record[name]) for name in self.columns]
        metrics = {key: value for form in found for key, value in form.items()}
        if SINGLE_FORM not in metrics:
            best = max(self.columns, key=metrics.__getitem__)
            metrics |= {SINGLE_FORM: metrics[best], "best_form": best}
            if self.real is not None:
                metrics[f"{SINGLE_FORM}_real"] = metrics[f"{best}_real"]
        return metrics | self._chosen() if HELD_OUT in self.scored else metrics

    def _chosen(self) -> dict[str, Any]:
        """Return the metrics of form, rate and epoch that held-out images choose."""
        form, epoch, rate = _best([self.record[name + HELD_OUT] for name in self.columns])
        name = [*self.columns][form]
        real = {}
        if self.real is not None:
            real = {f"{SINGLE_FORM}_held_out_real": self.record[name + REAL][epoch][rate]}
        return real | {
            f"{SINGLE_FORM}_held_out": self.record[name][epoch][rate],
            "held_out_accuracy": self.record[name + HELD_OUT][epoch][rate],
            "held_out_form": name,
            "held_out_epoch": epoch + 1,
            "held_out_rate": self.rates[rate],
        }

    def metadata(self) -> dict[str, str]:
        resize = self.task.job.resize or self.task.encoding.settings.default_resize
        reading = json.dumps(self.task.train.reading)
        return super().metadata() | {"resize": str(resize), "reading": reading}

    def _accuracies(self, name: str, part: str) -> list[float]:
        """Return each rate's accuracy in percent; also record those by ReaL's labels."""
        features, labels = self.known[part]
        heads = self.groups[name + part]
        parts = features[:, self.columns[name]].split(BATCH)
        found = torch.cat([heads.predict(part) for part in parts])
        if self.real is not None and not part:
            by_real = [self.real.accuracy(classes) for classes in found.T.cpu().numpy()]
            self.record.setdefault(name + REAL, []).append(by_real)
        hits = (found == labels[:, None]).sum(dim=0)
        return [100 * count / len(labels) for count in hits.tolist()]

    def _keep(self, name: str, rate: int) -> None:
        heads = self.groups[name]
        best = {"weight": heads.weight[rate], "bias": heads.bias[rate]}
        best |= {"mean": heads.mean, "var": heads.var}
        prefix = "" if name == SINGLE_FORM else f"{name}."
        self.best_tensors |= {prefix + key: value.detach().clone() for key, value in best.items()}

    def _metrics(self, name: str, history: list[list[float]]) -> dict[str, Any]:
        (epoch, rate) = _best(history)
        last = history[-1]
        by_rate = {str(one): value for one, value in zip(self.rates, last, strict=True)}
        prefix = "" if name == SINGLE_FORM else f"{name}_"
        real = {}
        if self.real is not None:
            by_real = self.record[name + REAL]
            real[f"{name}_real"] = by_real[epoch][rate]
            real[f"{name}_last_real"] = by_real[-1][last.index(max(last))]
        return real | {
            name: history[epoch][rate],
            f"{name}_last": max(last),
            f"{prefix}best_epoch": epoch + 1,
            f"{prefix}best_rate": self.rates[rate],
            f"{prefix}best_rate_last": self.rates[last.index(max(last))],
            f"{prefix}last_by_rate": by_rate,
            f"{prefix}best_by_epoch": [max(accuracies) for accuracies in history],
        }


def _best(accuracies: list[Any]) -> list[int]:
    """Return the place of the highest number in nested lists; ties: the first."""
    found = np.array(accuracies)
    return [int(place) for place in np.unravel_index(found.argmax(), found.shape)]
