"""Accuracy of fine-tuned encoders on the test split (paper, B and E)."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from maect.core.context import Context
from maect.core.errors import UserError
from maect.data.index import Index, open_index
from maect.evaluate.base import Count, EvaluationJob, ImageCount, Input, Protocol, Shards, Trained
from maect.evaluate.real import RealLabels
from maect.recipes.few_labels import fraction_name
from maect.records import RunRecord, checked_sha256
from maect.stages.base import Supervised
from maect.stages.fine_tune import FineTune

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

TWIN = "_held_out"
"""Behind the name of a run, of the one that is trained without the held-out images."""


class Accuracy(RealLabels, Supervised, Protocol):
    """Mean accuracy over fine-tunings: of every seed, or every number of shots and split."""

    name: ClassVar[str] = "accuracy"
    title: ClassVar[str] = "accuracy of fine-tuned encoders"
    every_rank: ClassVar[bool] = True
    encoder_input: ClassVar[bool] = True

    shots: tuple[Count, ...] = ()
    """This many labels per class instead of a fraction, `splits` times each."""
    splits: int = Field(default=3, gt=0)
    seeds: int = Field(default=1, gt=0)
    """Trainings with seeds `seed`, `seed` + 1 ...; the subset is that of `seed`."""
    seed: int = 0
    epoch: Literal["best", "last"] = "best"
    """Which one is scored: the best on the test split, as in the authors' code, or the last."""
    held_out: float = Field(default=0.0, ge=0, lt=1)
    """Train each a second time without this part of the labelled images, and choose the epoch on
    them."""

    test_data: ClassVar[str | None] = (
        "each training is scored at its best epoch on the test split, as the authors do; values "
        "called _last, and all with epoch=last, choose nothing, those called _held_out choose on "
        "training images"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Accuracy:
        if self.shots and (self.seeds > 1 or self.fraction < 1):
            raise ValueError("shots: the splits are the repetitions; leave out seeds and fraction")
        if self.held_out and self.epoch == "last":
            raise ValueError("held_out chooses an epoch: leave out epoch=last")
        if self.held_out and 1 in self.shots:
            raise ValueError("held_out: of one label per class none can be held out")
        return self

    @property
    def lists(self) -> list[Path]:
        """The lists that its trainings read."""
        return list(dict.fromkeys(f for stage, _ in self.trainings().values() for f in stage.lists))

    def trainings(self) -> dict[str, tuple[FineTune, int]]:
        """Return settings and seed of each run, by the last part of its name; twins come last."""
        plain = self._plain()
        twins = {
            f"{suffix}{TWIN}": (stage.model_copy(update={"held_out": self.held_out}), seed)
            for suffix, (stage, seed) in plain.items()
        }
        return plain | (twins if self.held_out else {})

    def _plain(self) -> dict[str, tuple[FineTune, int]]:
        """Return the settings of the runs that are scored, which learn from all labelled images."""
        recipe = {name: getattr(self, name) for name in Supervised.model_fields}
        base = FineTune(**recipe, subset_seed=self.seed)
        if not self.shots:
            seeds = range(self.seed, self.seed + self.seeds)
            return {f"seed{seed}": (base.of_own_lists(), seed) for seed in seeds}
        subsets = [(shots, split + 1) for shots in self.shots for split in range(self.splits)]
        return {
            f"{shots}shot-split{split}": (
                base.model_copy(update={"shots": shots, "split": split}).of_own_lists(),
                self.seed,
            )
            for shots, split in subsets
        }

    def headline(self) -> dict[str, str]:
        """Accuracies by the labels, of the best epoch and of the one held-out images choose."""
        found = {}
        for metric in dict.fromkeys(map(self._metric, self._plain())):
            found[metric] = f"{self.title} ({metric})"
            found[f"{metric}_held_out"] = f"{found[metric]}, epoch chosen on held-out images"
        return found

    def inputs(self) -> dict[str, Input]:
        """Return the fine-tuned runs, and the images that score them."""
        return {"trained": Trained(tuple(self.trainings())), "test": Shards(self.test_split)}

    @property
    def split_names(self) -> tuple[str, ...]:
        """Splits of the evaluated dataset that are read, by the trainings, too."""
        return (self.train_split, self.test_split)

    def encoded(self, images: ImageCount) -> float | None:
        """Count the test images for every encoder."""
        return images(self.test_split) * len(self._plain())

    def evaluate(self, context: Context, job: EvaluationJob) -> dict[str, Any]:
        """Accuracies in percent: `fine_tune`, or `low_shot_N`, `low_shot_Npct`.

        docs/reference/few_labels.md lists the metrics.
        """
        asked = self.trainings()
        given = job.paths("trained")
        if len(asked) != len(given):
            raise UserError(
                f"{job.out.stem}: asks for {len(asked)} fine-tuned runs, "
                f"inputs.trained names {len(given)}"
            )
        return self.score(context, job, dict(zip(asked, given, strict=True)))

    def score(
        self, context: Context, job: EvaluationJob, folders: Mapping[str, Path]
    ) -> dict[str, Any]:
        """Return the metrics of finished runs."""
        from maect.core.distributed import device_of, process_group

        test = open_index(job.path("test"))
        device = device_of(context)
        results = {}
        with process_group(context):
            for number, (suffix, (stage, seed)) in enumerate(self._plain().items()):
                run = FineTuned(folders[suffix], stage, seed, test, device)
                results[suffix] = run.result(context, test, job.resize, self)
                if self.epoch == "best":
                    results[suffix]["accuracies"] = run.accuracies(test, job.resize)
                if self.held_out:
                    stage, seed = self.trainings()[suffix + TWIN]
                    scores = trained_as(folders[suffix + TWIN], stage, seed).scores
                    assert scores is not None  # of the images that it held out
                    results[suffix]["held_out"] = list(scores.accuracies)
                context.report({"step": number + 1, "steps": len(folders)})
        named = {f"{self._metric(s)}-{s.rpartition('-')[2]}": r for s, r in results.items()}
        job.notes["subsets"] = {name: result["subset"] for name, result in named.items()}
        metrics: dict[str, Any] = {}
        for metric in dict.fromkeys(self._metric(suffix) for suffix in results):
            group = [result for s, result in results.items() if self._metric(s) == metric]
            last = [result["accuracy"] for result in group]
            scored, of_last = last, metric
            if self.epoch == "best":
                scored = [max(result["accuracies"]) for result in group]
                of_last = f"{metric}_last"
                metrics |= self._mean(of_last, last)
            if self.held_out:
                chosen = [r["accuracies"][r["held_out"].index(max(r["held_out"]))] for r in group]
                metrics |= self._mean(f"{metric}_held_out", chosen)
            if self.real_labels is not None:
                by_real = [result["real"] for result in group]
                metrics |= self._mean(f"{of_last}_real", by_real)
            metrics |= self._mean(metric, scored)
        keys = ["losses", "weights_sha256"]
        if self.epoch == "best":
            keys.append("accuracies")
        if self.held_out:
            keys.append("held_out")
        for key in keys:
            metrics[key] = {name: result[key] for name, result in named.items()}
        return metrics

    def _mean(self, metric: str, values: list[float]) -> dict[str, Any]:
        """Return the mean and, with several trainings, their deviation and values."""
        mean: dict[str, Any] = {metric: statistics.fmean(values)}
        if len(values) > 1:
            mean[f"{metric}_std"] = statistics.stdev(values)
            mean[f"{metric}_{'splits' if self.shots else 'seeds'}"] = values
        return mean

    def _metric(self, suffix: str) -> str:
        """Return the metric that a training counts for."""
        shots = self.trainings()[suffix][0].shots
        if shots:
            return f"low_shot_{shots}"
        return "fine_tune" if self.fraction == 1 else fraction_name(self.fraction)


def trained_as(folder: Path, stage: FineTune, seed: int) -> RunRecord:
    """Return a finished run's record; raise UserError if it has other settings or another seed."""
    record = RunRecord.of(folder)
    if record.seed != seed or not stage.is_said_by(record.settings):
        raise UserError(f"{folder}: was trained with other settings than this evaluation asks")
    return record


class FineTuned:
    """Encoder and classifier as their run left them."""

    def __init__(
        self, folder: Path, stage: FineTune, seed: int, test: Index, device: torch.device
    ) -> None:
        """Load a run that was trained with `stage` and `seed`, to score it on `test`."""
        from maect.evaluate.encoding import Encoding
        from maect.models.weights import load_tensors

        self.record = trained_as(folder, stage, seed)
        self.folder = folder
        for name in self.record.sha256:
            checked_sha256(folder / name)
        path = folder / "encoder.safetensors"
        self.encoding = Encoding(path, device, stage.precision)
        if self.encoding.settings.foreign is not None:
            raise UserError(f"{path}: {self.encoding.settings.foreign}, which is no plain ViT")
        classifier, metadata = load_tensors(folder / "head.safetensors")
        if tuple(json.loads(metadata["classes"])) != test.class_names:
            raise UserError(f"{folder} and {test.directory}: their classes differ")
        # All weights under the names that they have in training.
        self.weights = {
            name if name.startswith("fc_norm.") else f"encoder.{name}": value.cpu()
            for name, value in self.encoding.encoder.state_dict().items()
        } | {f"head.{name}": value for name, value in classifier.items()}
        self.classifier = {name: value.to(device) for name, value in classifier.items()}

    def predict(self, images: Tensor) -> Tensor:
        """Class of each image, uint8 or normalized float32 [b, C, S, S]: int64 [b]."""
        import torch
        from torch.nn import functional as F

        with torch.inference_mode():
            return F.linear(self.encoding(images), **self.classifier).argmax(dim=1)

    def predicted(self, context: Context, test: Index, resize: int | None) -> NDArray[np.int64]:
        """Class of every image of a split, int64 [n]; every rank predicts its share."""
        from maect.train.scores import predicted

        size = self.encoding.settings.image_size
        device = self.encoding.device
        return predicted(context, test, device, size, resize, self.predict)

    def accuracies(self, test: Index, resize: int | None) -> list[float]:
        """After each epoch, as the training found them on these images; else a UserError."""
        scores = self.record.scores
        if scores is None or (scores.index_digest, scores.resize) != (test.digest, resize):
            raise UserError(
                f"{self.folder}: its epochs were not scored on {test.directory}; delete it to "
                "train it again, or score its last epoch (settings.epoch=last)"
            )
        return list(scores.accuracies)

    def result(
        self, context: Context, test: Index, resize: int | None, settings: RealLabels
    ) -> dict[str, Any]:
        """Accuracy, losses of the epochs, the labelled images, and sha256 of the weights.

        With ReaL's labels the accuracy by those, too, as `real`.
        """
        hashed = hashlib.sha256()
        for name, value in sorted(self.weights.items()):
            hashed.update(name.encode())
            hashed.update(value.contiguous().numpy().data)
        found = self.predicted(context, test, resize)
        real = settings.real_labels_of(test.keys, test.class_names, test.labels)
        return {
            **({} if real is None else {"real": real.accuracy(found)}),
            "accuracy": 100 * int((found == test.labels).sum()) / test.n,
            "losses": list(self.record.losses or ()),
            "subset": self.record.subset and self.record.subset.model_dump(),
            "weights_sha256": hashed.hexdigest(),
        }
