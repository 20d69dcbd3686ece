"""What tests that write a protocol a second time share: images, batches, blocks, a probe."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from sklearn.neighbors import KNeighborsClassifier

from maect.data.index import Index, open_index
from maect.data.loader import Batch, evaluation_parts, train_batches
from maect.data.transforms import augment
from maect.evaluate.base import EvaluationJob
from maect.evaluate.features import Encoding
from maect.evaluate.probe_training import ProbeTask
from maect.recipes import Pixels, View

from .conftest import Rank


def task_of(job: EvaluationJob) -> ProbeTask:
    """What a probe is trained by: encoder and splits of a job, opened by one rank."""
    encoding = Encoding(job.run / "encoder.safetensors", torch.device("cpu"))
    train, test = (open_index(job.path(split)) for split in ("train", "test"))
    return ProbeTask(Rank(), job, encoding, train, test, "")


def all_images(index: Index) -> tuple[torch.Tensor, torch.Tensor]:
    """Images uint8 [n, C, 16, 16] and labels [n] of a split of the fixture `images`."""
    ((images, labels, _),) = evaluation_parts(
        index, image_size=16, resize=16, parts=[range(index.n)], threads=1
    )
    return images, torch.from_numpy(labels)


def crops(
    index: Index, steps: int, pixels: Pixels, seed: int = 0
) -> Iterator[tuple[Batch, torch.Tensor]]:
    """Training batches of 32, and their images as a probe sees them, float32 [32, C, 16, 16]."""
    view = View(crop_scale=(0.6, 1.0), flip=0.0)
    for batch in train_batches(
        index, global_batch=32, rank=0, world_size=1, seed=seed, views=[view], image_size=16,
        start_step=0, steps=steps, threads=1,
    ):  # fmt: skip
        yield batch, augment(batch.images[0][0], view, 0, seed, batch.epochs, batch.ids, pixels)


@torch.no_grad()
def blocks_of(encoder, pictures):
    """Tokens [b, 1 + N, D] behind each block, [CLS] first, without the last norm."""
    x = encoder.patch_embed(pictures) + encoder.pos_embed[:, 1:]
    first = encoder.cls_token + encoder.pos_embed[:, :1]
    x = torch.cat([first.expand(len(x), -1, -1), x], 1)
    raw = []
    for block in encoder.blocks:
        x = block(x)
        raw.append(x)
    return raw


def scikit_knn(train, labels, test, k: int, temperature: float, least: float = 1e-5):
    """Classes by scikit-learn's neighbours in cosine distances, with DINO's weights.

    Votes must be ahead of the next by `least`.
    """
    model = KNeighborsClassifier(
        k, metric="cosine", algorithm="brute", weights=lambda d: np.exp((1 - d) / temperature)
    )
    model.fit(train.astype(np.float64), labels)
    votes = model.predict_proba(test.astype(np.float64))
    clear(votes, least)
    return model.classes_[votes.argmax(1)]


def clear(scores: Any, least: float, chosen: int = 1) -> None:
    """Fail where one of the `chosen` largest of a row is not ahead of the next; scores [..., n].

    Kernels for other processors move a score a little: no choice that is compared may hang on that.
    """
    ordered = -np.sort(-np.asarray(scores, np.float64), axis=-1)[..., : chosen + 1]
    gap = -np.diff(ordered).max(initial=-np.inf)
    assert gap >= least, (
        f"a choice is ahead of the next by {gap:.0e}, which rounding may decide on another "
        f"processor: choose a seed or data where that is at least {least:.0e}"
    )


class Plain:
    """BatchNorm, classifier and LARS a second time: float64, one loop over tensors.

    The gradients of the classifier are compared with their formulas.
    """

    names: tuple[str, ...] = ("weight", "bias")

    def __init__(self, probe) -> None:
        self.parts = {n: getattr(probe, n).detach().double().requires_grad_() for n in self.names}
        self.velocity = {name: torch.zeros_like(part) for name, part in self.parts.items()}
        self.mean = torch.zeros(self.parts["weight"].shape[1], dtype=torch.float64)
        self.var = torch.ones_like(self.mean)

    def pool(self, x: torch.Tensor) -> torch.Tensor:
        """Features [b, D] of what the probe reads."""
        return x.double()

    def step(self, given: torch.Tensor, labels: torch.Tensor, rate: float, decay: float) -> float:
        x, n = self.pool(given), len(given)
        mean, var = x.mean(0), ((x - x.mean(0)) ** 2).mean(0)
        self.mean = 0.9 * self.mean + 0.1 * mean.detach()
        self.var = 0.9 * self.var + 0.1 * var.detach() * n / (n - 1)
        normal = (x - mean) / (var + 1e-6).sqrt()
        logits = normal @ self.parts["weight"].T + self.parts["bias"]
        loss = sum(row.exp().sum().log() - row[y] for row, y in zip(logits, labels, strict=True))
        loss = loss / n
        found = torch.autograd.grad(loss, list(self.parts.values()))
        gradients = dict(zip(self.parts, found, strict=True))
        error = (logits.softmax(1) - torch.nn.functional.one_hot(labels, logits.shape[1])) / n
        torch.testing.assert_close(gradients["weight"], error.T @ normal)
        torch.testing.assert_close(gradients["bias"], error.sum(0))
        for name, gradient in gradients.items():
            part = self.parts[name].detach()
            if name != "bias":
                gradient = gradient + decay * part
                trust = 0.001 * math.sqrt(float((part**2).sum()))
                gradient = gradient * trust / math.sqrt(float((gradient**2).sum()))
            self.velocity[name] = 0.9 * self.velocity[name] + gradient
            self.parts[name] = (part - rate * self.velocity[name]).requires_grad_()
        return float(loss.detach())

    def logits(self, given: torch.Tensor) -> torch.Tensor:
        x = (self.pool(given) - self.mean) / (self.var + 1e-6).sqrt()
        return (x @ self.parts["weight"].T + self.parts["bias"]).detach()
