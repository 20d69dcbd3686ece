"""Accuracy of fine-tuned encoders on the test split (paper, B and E)."""

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from maect.core.context import Context
from maect.core.distributed import device_of, process_group
from maect.core.errors import UserError
from maect.data.index import Index, open_index
from maect.evaluate.base import EvaluationJob, RealLabels
from maect.evaluate.features import Encoding
from maect.evaluate.protocols.encoders import TWIN, Accuracy
from maect.evaluate.real import real_labels_of
from maect.models.weights import load_tensors
from maect.records import RunRecord, checked_sha256
from maect.stages.fine_tune import FineTune
from maect.train.scores import predicted


def evaluate(settings: Accuracy, context: Context, job: EvaluationJob) -> dict[str, Any]:
    """Accuracies in percent: `fine_tune`, or `low_shot_N`, `low_shot_Npct`.

    docs/reference/few_labels.md lists the metrics.
    """
    asked = settings.trainings()
    given = job.paths("trained")
    if len(asked) != len(given):
        raise UserError(
            f"{job.out.stem}: asks for {len(asked)} fine-tuned runs, "
            f"inputs.trained names {len(given)}"
        )
    folders = dict(zip(asked, given, strict=True))
    test = open_index(job.path("test"))
    device = device_of(context)
    results = {}
    with process_group(context):
        for number, (suffix, (stage, seed)) in enumerate(settings.scored_trainings().items()):
            run = FineTuned(folders[suffix], stage, seed, test, device)
            results[suffix] = run.result(context, test, job.resize, settings)
            if settings.epoch == "best":
                results[suffix]["accuracies"] = run.accuracies(test, job.resize)
            if settings.held_out:
                stage, seed = settings.trainings()[suffix + TWIN]
                scores = trained_as(folders[suffix + TWIN], stage, seed).scores
                assert scores is not None  # of the images that it held out
                results[suffix]["held_out"] = list(scores.accuracies)
            context.report({"step": number + 1, "steps": len(folders)})
    named = {f"{settings.metric(s)}-{s.rpartition('-')[2]}": r for s, r in results.items()}
    job.notes["subsets"] = {name: result["subset"] for name, result in named.items()}
    metrics: dict[str, Any] = {}
    for metric in dict.fromkeys(settings.metric(suffix) for suffix in results):
        group = [result for s, result in results.items() if settings.metric(s) == metric]
        last = [result["accuracy"] for result in group]
        scored, of_last = last, metric
        if settings.epoch == "best":
            scored = [max(result["accuracies"]) for result in group]
            of_last = f"{metric}_last"
            metrics |= _mean(settings, of_last, last)
        if settings.held_out:
            chosen = [r["accuracies"][r["held_out"].index(max(r["held_out"]))] for r in group]
            metrics |= _mean(settings, f"{metric}_held_out", chosen)
        if settings.real_labels is not None:
            by_real = [result["real"] for result in group]
            metrics |= _mean(settings, f"{of_last}_real", by_real)
        metrics |= _mean(settings, metric, scored)
    keys = ["losses"]
    if settings.epoch == "best":
        keys.append("accuracies")
    if settings.held_out:
        keys.append("held_out")
    for key in keys:
        metrics[key] = {name: result[key] for name, result in named.items()}
    return metrics


def _mean(settings: Accuracy, metric: str, values: list[float]) -> dict[str, Any]:
    """Return the mean and, with several trainings, their deviation and values."""
    mean: dict[str, Any] = {metric: statistics.fmean(values)}
    if len(values) > 1:
        mean[f"{metric}_std"] = statistics.stdev(values)
        mean[f"{metric}_{'splits' if settings.shots else 'seeds'}"] = values
    return mean


def trained_as(folder: Path, stage: FineTune, seed: int) -> RunRecord:
    """Return a finished run's record; raise UserError if it has other settings or another seed."""
    record = RunRecord.of(folder)
    if record.seed != seed or not stage.matches_record(record.settings):
        raise UserError(f"{folder}: was trained with other settings than this evaluation asks")
    return record


class FineTuned:
    """Encoder and classifier as their run left them."""

    def __init__(
        self, folder: Path, stage: FineTune, seed: int, test: Index, device: torch.device
    ) -> None:
        """Load a run that was trained with `stage` and `seed`, to score it on `test`."""
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
        self.classifier = {name: value.to(device) for name, value in classifier.items()}

    def predict(self, images: Tensor) -> Tensor:
        """Class of each image, uint8 or normalized float32 [b, C, S, S]: int64 [b]."""
        with torch.inference_mode():
            return F.linear(self.encoding(images), **self.classifier).argmax(dim=1)

    def predicted(self, context: Context, test: Index, resize: int | None) -> NDArray[np.int64]:
        """Class of every image of a split, int64 [n]; every rank predicts its share."""
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
        """Accuracy, losses of the epochs, and the labelled images.

        With ReaL's labels the accuracy by those, too, as `real`.
        """
        found = self.predicted(context, test, resize)
        real = real_labels_of(settings, test.keys, test.class_names, test.labels)
        return {
            **({} if real is None else {"real": real.accuracy(found)}),
            "accuracy": 100 * int((found == test.labels).sum()) / test.n,
            "losses": list(self.record.losses or ()),
            "subset": self.record.subset and self.record.subset.model_dump(),
        }
