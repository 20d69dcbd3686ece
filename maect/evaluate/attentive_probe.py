"""Linear and attentive probes by CAPI's rule: the best of thirty on held-out training images.

Four readings of the last block behind the final norm, each with thirty classifiers: ten learning
rates times three weight decays. A tenth of the training images is learnt from by none. It chooses
one classifier of each reading, which alone sees the test images, once. The patch tokens are read by
one learnt query: keys and values are projected tokens, in heads of 64 channels.

docs/results/paper/probes_beside_their_authors.csv compares each setting with CAPI's code
(facebookresearch/capi, eval_classification.py). CAPI's own global feature is the mean of its
predictor's output, which an import leaves out: without [CLS] token there are two readings. Of
several [CLS] tokens the mean is read.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from maect.core import distributed
from maect.core.context import Context
from maect.core.errors import UserError
from maect.data.index import ID, Index
from maect.evaluate.base import EvaluationJob
from maect.evaluate.features import Encoding
from maect.evaluate.probe_training import (
    HELD_OUT,
    HeadGroup,
    Probe,
    ProbeBatch,
    ProbeTask,
    train_probe,
)
from maect.evaluate.protocols.probes import AttentiveProbe
from maect.models.vit import seeded

STD = 0.02
BETAS = (0.9, 0.95)
PATCHES = "patches"


def evaluate(settings: AttentiveProbe, context: Context, job: EvaluationJob) -> dict[str, Any]:
    """Accuracies in percent, `attentive_probe` of the patches and one for each other reading.

    The chosen classifiers are kept. docs/reference/probes.md lists the metrics.
    """
    encoding = Encoding(job.encoder, distributed.device_of(context), settings.precision)
    width = encoding.settings.width
    if width % settings.head_width:
        raise UserError(
            f"{job.out.stem}: head_width {settings.head_width} does not divide the encoder's width "
            f"{width}"
        )
    return train_probe(settings, context, job, encoding, Probes)


class Classifiers(HeadGroup):
    """Classifiers of one reading, of a learning rate and a weight decay each, and AdamW.

    Tensors begin with the number of the classifier, [H, ...].
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        pairs: Sequence[tuple[float, float]],
        scale: float,
        device: torch.device,
    ) -> None:
        """Take initial values.

        Args:
            tensors: stacked, by name; what has `bias` in its name is not decayed.
            pairs: learning rate and weight decay of each classifier.
        """
        self.names = self.SAVED = (*tensors,)
        self.count = len(pairs)
        groups = []
        for name, value in tensors.items():
            value = value.to(device)
            setattr(self, name, value.requires_grad_())
            # The optimizer sees parts of what is stacked, and changes those in place.
            groups += [
                {
                    "params": [part],
                    "peak": rate * scale,
                    "weight_decay": 0.0 if "bias" in name else decay,
                }
                for part, (rate, decay) in zip(value.detach(), pairs, strict=True)
            ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=BETAS)

    def logits(self, features: Tensor, heads: slice = slice(None)) -> Tensor:
        """Compute logits [b, H, C] of features [b, D] or, with a query, of tokens [b, N, D]."""
        weight, bias = self.weight[heads], self.bias[heads]
        if "query" not in self.names:
            return torch.einsum("bd,hcd->bhc", features, weight) + bias
        query, key, value = self.query[heads], self.key[heads], self.value[heads]
        split = (len(query), -1, self.head_width)
        width = features.shape[2]
        # What the query sees of a token is the token's product with the projected query.
        asked = torch.einsum("had,hadm->ham", query.view(*split), key.view(*split, width))
        scores = features @ (asked.flatten(0, 1).T * self.head_width**-0.5)  # [b, N, H * heads]
        seen = scores.softmax(dim=1).transpose(1, 2) @ features
        seen = seen.view(len(features), len(query), -1, width)
        pooled = torch.einsum("bham,hadm->bhad", seen, value.view(*split, width)).flatten(2)
        return torch.einsum("bhd,hcd->bhc", pooled + self.value_bias[heads], weight) + bias

    weight: Tensor
    bias: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    value_bias: Tensor
    head_width: int

    def descend(self, lr_multiplier: float) -> None:
        """Update once by the gradients, summed over the ranks, and clear them."""
        groups = iter(self.optimizer.param_groups)
        for name in self.names:
            tensor = getattr(self, name)
            for gradient in distributed.sum_over_ranks(tensor.grad):
                next(groups)["params"][0].grad = gradient
            tensor.grad = None
        super().descend(lr_multiplier)


class Probes(Probe):
    """The classifiers of every reading."""

    settings: AttentiveProbe
    groups: dict[str, Classifiers]

    def __init__(self, task: ProbeTask, settings: AttentiveProbe) -> None:
        super().__init__(task, settings, settings.held_out)
        encoder = task.encoding.settings
        self.real = task.real_labels_of(settings)
        self.choosing = self.scored[HELD_OUT]
        self.pairs = list(itertools.product(settings.learning_rates, settings.weight_decays))
        readings = (
            ("cls", "mean", "cls_mean", PATCHES) if encoder.class_token else ("mean", PATCHES)
        )
        self.groups = {name: self._drawn(name) for name in readings}

    def _drawn(self, name: str) -> Classifiers:
        """Initialise the classifiers of a reading."""
        settings = self.settings
        count = len(self.pairs)
        width = self.task.encoding.settings.width
        classes = len(self.task.train.class_names)
        shapes: dict[str, tuple[int, ...]] = {}
        if name == PATCHES:
            shapes = {"query": (width,), "key": (width, width), "value": (width, width)}
            shapes |= {"value_bias": (width,)}
        inputs = 2 * width if name == "cls_mean" else width
        shapes |= {"weight": (classes, inputs), "bias": (classes,)}
        with seeded(settings.seed):
            tensors = {
                key: torch.zeros(count, *shape)
                if "bias" in key
                else torch.nn.init.trunc_normal_(torch.empty(count, *shape), std=STD)
                for key, shape in shapes.items()
            }
        scale = settings.batch_size / 256
        device = self.task.encoding.device
        group = Classifiers(tensors, self.pairs, scale, device)
        group.head_width = settings.head_width
        return group

    @property
    def training_images(self) -> Index:
        """The training images that are not held out."""
        train = self.task.train
        return replace(train, rows=train.rows[~self.is_held_out(train.rows[:, ID])])

    def read(self, images: Tensor) -> Tensor:
        """Return all tokens behind the final norm, float32 [b, P + N, D]."""
        return self.task.encoding.output(images, "last").tokens.float()

    def _readings(self, tokens: Tensor) -> dict[str, Tensor]:
        """Return the features that the classifiers of each reading take from tokens."""
        encoder = self.task.encoding.encoder
        given = {"mean": encoder.pool(tokens, "mean")}
        if "cls" in self.groups:
            own = self.task.encoding.pooling
            given["cls"] = encoder.pool(tokens, own if own == "mean_cls" else "cls")
            given["cls_mean"] = torch.cat([given["cls"], given["mean"]], dim=1)
        return given | {PATCHES: tokens[:, encoder.num_prefix_tokens :]}

    def step(self, features: Tensor, batch: ProbeBatch, lr_multiplier: float) -> Tensor:
        """Update the classifiers of every reading; return the loss of each, [4 * H]."""
        given = self._readings(features)
        losses = []
        share = 1 / (distributed.rank_and_size()[1] * len(self.pairs) * len(self.groups))
        for name, group in self.groups.items():
            logits = group.logits(given[name])
            labels = batch.targets[:, None].expand(logits.shape[:2])
            each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(dim=0)
            (each.sum() * share).backward()
            losses.append(each.detach())
            group.descend(lr_multiplier)
        return torch.cat(losses)

    def metrics(self) -> dict[str, Any]:
        """Choose classifiers on the held-out images, and score them on the test images."""
        count = len(self.pairs)
        classes = [slice(None)] * len(self.groups)
        found = self.task.predicted(lambda images: self._predict(images, classes), self.choosing)
        by_head = 100 * (found == self.choosing.labels[:, None]).mean(axis=0).reshape(-1, count)
        best = by_head.argmax(axis=1).tolist()
        heads = [slice(head, head + 1) for head in best]
        tested = self.task.predicted(lambda images: self._predict(images, heads))
        metrics: dict[str, Any] = {"chosen": {}, "held_out": {}}
        for number, (name, group) in enumerate(self.groups.items()):
            metric = AttentiveProbe.name + ("" if name == PATCHES else f"_{name}")
            metrics[metric] = 100 * float((tested[:, number] == self.task.test.labels).mean())
            if self.real is not None:
                metrics[f"{metric}_real"] = self.real.accuracy(tested[:, number])
            tried = [
                {"rate": rate, "decay": decay, "accuracy": accuracy}
                for (rate, decay), accuracy in zip(
                    self.pairs, by_head[number].tolist(), strict=True
                )
            ]
            metrics["held_out"][name] = tried
            metrics["chosen"][name] = tried[best[number]]
            for key in group.names:
                self.best_tensors[f"{name}.{key}"] = (
                    getattr(group, key)[best[number]].detach().clone()
                )
        return metrics

    def _predict(self, images: Tensor, heads: list[slice]) -> Tensor:
        """Predict each image's class by some classifiers of each reading, [b, classifiers]."""
        with torch.no_grad():
            given = self._readings(self.task.check_finite(self.read(images)))
            logits = [
                group.logits(given[name], chosen)
                for (name, group), chosen in zip(self.groups.items(), heads, strict=True)
            ]
        return torch.cat([each.argmax(dim=2) for each in logits], dim=1)
