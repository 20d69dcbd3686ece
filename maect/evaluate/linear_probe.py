"""Linear probing: a sweep over learning rates on frozen features (paper, B and table 9).

Heads of all rates, and of all representations, are trained on one pass of the encoder.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, model_validator

from maect.evaluate.base import Positive
from maect.evaluate.probe_training import HELD_OUT, ByEpochs, Probe, ProbeBatch, ProbeTask
from maect.evaluate.real import RealLabels

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from maect.evaluate.encoding import Encoding
    from maect.evaluate.stacked_heads import Heads


class LinearProbe(RealLabels, ByEpochs):
    """Linear probing (paper, table 9): ten learning rates, trained together."""

    name: ClassVar[str] = "linear_probe"
    title: ClassVar[str] = "linear probe"
    test_data: ClassVar[str | None] = (
        "linear_probe is the best learning rate and epoch on the test split, as the authors' "
        "logger chooses; linear_probe_last takes the last epoch and the best learning rate on the "
        "test split"
    )

    learning_rates: tuple[Positive, ...] = Field(
        default=(0.1, 0.09, 0.08, 0.07, 0.06, 0.05, 0.04, 0.03, 0.02, 0.01), min_length=1
    )
    momentum: float = 0.9
    concat: bool = False
    """Probe several forms instead: the last 1, 2, 4 and 6 blocks, [CLS] with mean, mean alone."""
    refiner: bool = False
    """Probe those of MIM-Refiner instead: the output, and the last four raw blocks, of both the
    [CLS] token, alone and with the mean of the patch tokens."""
    held_out: float = Field(default=0.0, ge=0, lt=1)
    """Train every probe a second time without this part of the training images, and choose form,
    rate and epoch on them."""

    @model_validator(mode="after")
    def _one_choice(self) -> LinearProbe:
        if self.concat and self.refiner:
            raise ValueError("concat and refiner are two choices of forms; leave one out")
        return self

    def encoding(self, path: Path, device: torch.device) -> Encoding:
        """Return the encoder, with all features that the forms need."""
        from maect.evaluate.encoding import Encoding, LastBlocks

        if self.refiner:
            return LastBlocks(path, device, self.precision, blocks=RAW)
        blocks = max(BLOCKS) if self.concat else 1
        return Encoding(path, device, self.precision, blocks=blocks, other_pooling=self.concat)

    def build_probe(self, task: ProbeTask) -> Probe:
        """Return the classifiers, one for each learning rate.

        Metrics are accuracies in percent: `linear_probe` (best epoch), `linear_probe_last`, and
        those of each rate.
        docs/reference/probes.md lists the metrics.

        Kept is the classifier behind each best accuracy: `weight` [C, D] and `bias` [C] for
        features minus `mean` over the square root of `var` + 1e-5 (with concatenations each as
        `concat_l.weight` and so on).
        """
        return _Forms(task, self)


BLOCKS = (1, 2, 4, 6)
RAW = 4
PLAIN = "linear_probe"
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


class _Forms(Probe):
    """Heads of all rates on each form of the features."""

    groups: dict[str, Heads]

    def __init__(self, task: ProbeTask, settings: LinearProbe) -> None:
        from maect.evaluate.stacked_heads import Heads

        super().__init__(task, settings.held_out, settings.seed)
        self.rates = list(settings.learning_rates)
        encoding = task.encoding
        self.columns = {PLAIN: slice(None)}
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
        import torch

        from maect.core import distributed

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
        if PLAIN not in metrics:
            best = max(self.columns, key=metrics.__getitem__)
            metrics |= {PLAIN: metrics[best], "best_form": best}
            if self.real is not None:
                metrics[f"{PLAIN}_real"] = metrics[f"{best}_real"]
        return metrics | self._chosen() if HELD_OUT in self.scored else metrics

    def _chosen(self) -> dict[str, Any]:
        """Return the metrics of form, rate and epoch that held-out images choose."""
        form, epoch, rate = _best([self.record[name + HELD_OUT] for name in self.columns])
        name = [*self.columns][form]
        real = {}
        if self.real is not None:
            real = {f"{PLAIN}_held_out_real": self.record[name + REAL][epoch][rate]}
        return real | {
            f"{PLAIN}_held_out": self.record[name][epoch][rate],
            "held_out_accuracy": self.record[name + HELD_OUT][epoch][rate],
            "held_out_form": name,
            "held_out_epoch": epoch + 1,
            "held_out_rate": self.rates[rate],
        }

    def metadata(self) -> dict[str, str]:
        resize = self.task.job.resize or self.task.encoding.settings.default_resize
        return super().metadata() | {"resize": str(resize)}

    def _accuracies(self, name: str, part: str) -> list[float]:
        """Return each rate's accuracy in percent; record those by ReaL's labels beside them."""
        import torch

        from maect.train.scores import BATCH

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
        prefix = "" if name == PLAIN else f"{name}."
        self.best_tensors |= {prefix + key: value.detach().clone() for key, value in best.items()}

    def _metrics(self, name: str, history: list[list[float]]) -> dict[str, Any]:
        (epoch, rate) = _best(history)
        last = history[-1]
        by_rate = {str(one): value for one, value in zip(self.rates, last, strict=True)}
        prefix = "" if name == PLAIN else f"{name}_"
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
    import numpy as np

    found = np.array(accuracies)
    return [int(place) for place in np.unravel_index(found.argmax(), found.shape)]
