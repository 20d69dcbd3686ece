"""Classes of images: by a probe, the classifier of a fine-tuned run, or logistic regression."""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from maect.answers.encoder import ImageEncoder
from maect.answers.vectors import Vectors, write_rows
from maect.core.arrays import read_arrays, write_arrays
from maect.core.errors import UserError
from maect.evaluate.base import encoder_checksum
from maect.evaluate.low_shot import center_and_scale, fit
from maect.evaluate.protocols.stored_features import LowShot
from maect.evaluate.store import check_labelled, open_features
from maect.records import RunRecord, checked_sha256, is_finished
from maect.stages import STAGES

_KIND = "logistic_regression"
_COLUMNS = ["file", "class", "probability"]

Array = NDArray[np.float32]


@dataclass(frozen=True)
class VectorClassifier:
    """A linear classifier on vectors.

    Attributes:
        weight: float64 [width, classes]; of classes that had no examples NaN.
        bias: float64 [classes].
        class_names: of the columns.
        encoder_sha256: of the encoder whose vectors it reads.
        prepared: whether vectors are centred and scaled to length 1 first (logistic regression).
        resize: shorter side of the images that the vectors are of, before the centre crop; none:
            that of the run (fine-tuning).
        reading: how the images were read whose vectors it was fitted to, as `--pixels` states it;
            empty: unknown, and then as the encoder's data set says.
    """

    weight: NDArray[np.float64]
    bias: NDArray[np.float64]
    class_names: list[str]
    encoder_sha256: str | None
    prepared: bool
    resize: int | None = None
    reading: dict[str, Any] = field(default_factory=dict)

    def probabilities(self, vectors: Array) -> NDArray[np.float64]:
        """Return the softmax of the logits, float64 [n, classes]; 0 of classes without examples."""
        rows = center_and_scale(vectors) if self.prepared else vectors.astype(np.float64)
        logits = rows @ self.weight + self.bias
        return softmax(np.where(np.isnan(logits), -np.inf, logits), axis=1)

    def check(self, encoder: ImageEncoder, path: Path) -> None:
        """Refuse, by a UserError, another encoder than the one fitted to, or another resize."""
        if self.encoder_sha256 != encoder.sha256:
            raise UserError(
                f"{path}: fitted to the vectors of another encoder than {encoder.path}; fit it "
                "again (--labelled)"
            )
        if self.resize not in (None, encoder.resize):
            raise UserError(
                f"{path}: fitted to images with a shorter side of {self.resize} pixels, not "
                f"{encoder.resize}; load {encoder.path.parent} with resize={self.resize}"
            )

    def write(self, path: Path) -> None:
        """Write a logistic regression to a safetensors file, with its checksum."""
        texts = {
            "maect": _KIND,
            "class_names": json.dumps(self.class_names),
            "encoder_sha256": str(self.encoder_sha256),
            "resize": str(self.resize),
            "reading": json.dumps(self.reading),
        }
        write_arrays(path, {"weight": self.weight, "bias": self.bias}, texts)


def check_replaceable(path: Path) -> None:
    """Refuse, by a UserError, to write over a file that is no classifier of `--labelled`."""
    if not path.exists():
        return
    with suppress(UserError):
        if read_arrays(path)[1].get("maect") == _KIND:
            return
    raise UserError(f"{path}: exists, and was not fitted by --labelled; choose another name")


def classifier_of(run: Path) -> Path:
    """Return where a run's own classifier is: that it was fine-tuned with, or its linear probe."""
    run = run.absolute()
    if is_finished(run) and STAGES[RunRecord.of(run).stage].labelled:
        return run / "head.safetensors"
    return run.parent.parent / "evaluations" / run.name / "linear_probe.safetensors"


def read_classifier(path: Path) -> VectorClassifier:
    """Read a linear probe or head as it was left, or of `fit_classifier`; else a UserError."""
    from maect.evaluate.trained_probe import affine
    from maect.models.weights import load_tensors

    if not path.is_file():
        raise UserError(
            f"{path}: no such classifier; evaluate linear_probe, or give --labelled FEATURES"
        )
    checked_sha256(path)
    tensors, texts = load_tensors(path)
    if "classes" in texts:  # of fine-tuning
        weight = tensors["weight"].double().numpy().T
        bias = tensors["bias"].double().numpy()
        encoder = encoder_checksum(path.parent)
        return VectorClassifier(weight, bias, json.loads(texts["classes"]), encoder, prepared=False)
    if fitted := texts.get("maect") == _KIND:
        if "resize" not in texts:
            raise UserError(f"{path}: says no resize of its images; fit it again with --labelled")
        arrays, _ = read_arrays(path)  # which compares the checksum
        weight = arrays["weight"]
        bias = arrays["bias"]
    else:
        slope, offset = affine(tensors, texts, path)
        weight = slope.double().numpy().T
        bias = offset.double().numpy()
    names = json.loads(texts["class_names"])
    sha256 = texts["encoder_sha256"]
    reading = json.loads(texts.get("reading", "{}"))
    return VectorClassifier(weight, bias, names, sha256, fitted, int(texts["resize"]), reading)


def fit_classifier(labelled: Path) -> VectorClassifier:
    """Fit logistic regression, as `low_shot` does, to all labelled vectors of a file."""
    if labelled.suffix == ".parquet":
        vectors = Vectors.read(labelled)
        if vectors.labels is None:
            raise UserError(f"{labelled}: no labels; embed folders of classes with --kind folder")
        names, labels = np.unique(vectors.labels, return_inverse=True)
        values = vectors.values
        class_names = names.tolist()
        about = vectors.about
        reading = vectors.pixels.reading
    else:
        features = open_features(labelled)
        check_labelled(features)
        about = features.record
        reading = about.get("reading", {})
        if not about.get("norm", True) or about.get("blocks", 1) > 1:
            raise UserError(
                f"{labelled}: features before the final norm, and images get those after it here: "
                "give the split's file without an ending such as .before_norm"
            )
        values = features.values
        labels = features.labels
        class_names = [*about["class_names"]]
    penalty = LowShot().l2 / len(labels)
    weight, _ = fit(center_and_scale(values), labels, len(class_names), penalty)
    bias = np.zeros(len(class_names))
    made_by = about["encoder_sha256"]
    return VectorClassifier(weight, bias, class_names, made_by, True, about["resize"], reading)


def write_classes(parts: Iterable[Vectors], classifier: VectorClassifier, path: Path) -> None:
    """Write a table of each image's most probable class: file, class, probability."""

    def rows() -> Iterator[list[str]]:
        for part in parts:
            probabilities = classifier.probabilities(part.values)
            best = probabilities.argmax(axis=1)
            for name, row, column in zip(part.files, probabilities, best, strict=True):
                yield [name, classifier.class_names[column], f"{row[column]:.4f}"]

    write_rows(path, _COLUMNS, rows())
