"""Compare encoders on folders of images: compute features once, then a table of measures.

Measures are k-NN, logistic regression on few and on all labels, RankMe and uniformity. Each is the
mean of a score per test image, so that intervals and differences follow from it.

k-NN holds out, votes and chooses by the functions of the protocol `knn` (`maect.evaluate.knn`).
Its images and features may still be others than a report's; docs/reference/compare.md lists every
difference.
"""

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from maect import load
from maect.answers.encoder import ImageEncoder
from maect.answers.vectors import PART
from maect.core.errors import UserError, counted
from maect.core.log import progress
from maect.core.settings import digest
from maect.data.sources import open_source
from maect.data.subsets import balanced_rows
from maect.evaluate.base import RealLabels
from maect.evaluate.geometry import RAW, FeatureTask, corrections
from maect.evaluate.knn import sweep_settings
from maect.evaluate.logistic import best_penalty, fit_logistic, try_penalties
from maect.evaluate.low_shot import center_and_scale, right_by_few_labels
from maect.evaluate.outcomes import held_out_by_content, held_out_for
from maect.evaluate.protocols.stored_features import REMOVED, SHRINKAGES, Knn, Logistic
from maect.evaluate.real import Real, is_imagenets, real_labels_of
from maect.evaluate.store import Array, unit
from maect.measures import rank_me, uniformity
from maect.recipes import KNN_K, KNN_TEMPERATURE
from maect.tools.own_images import (
    Images,
    check_same_classes,
    find_splits,
    hashes_of,
    inspect_images,
)

log = logging.getLogger(__name__)

FEWEST = 40
ONE_IN = 5
"""One image in this many is tested on in a folder that has no split of its own."""
SHOTS = (1, 2, 5, 10)
LABEL_SETS = 5
KNN, KNN_HELD_OUT, KNN_BEST = "knn", "knn_held_out", "knn_best_on_test"
LOGISTIC, RANK_ME, UNIFORMITY = "logistic", "rank_me", "uniformity"
REAL = "_real"
MEASURES = {
    KNN: f"k-NN (k {KNN_K}, T {KNN_TEMPERATURE})",
    KNN_HELD_OUT: "k-NN, k and T chosen on held-out training images",
    KNN_BEST: "k-NN, k and T chosen on the test images",
    **{f"shots_{n}": f"{counted(n, 'label')} per class, logistic regression" for n in SHOTS},
    LOGISTIC: "logistic regression on all labels, C chosen on held-out training images",
    KNN + REAL: f"k-NN (k {KNN_K}, T {KNN_TEMPERATURE}), by ImageNet-ReaL's labels",
    LOGISTIC + REAL: "logistic regression on all labels, by ImageNet-ReaL's labels",
    RANK_ME: "RankMe (effective rank, up to the number of features)",
    UNIFORMITY: "uniformity (0: all alike; more negative: more spread out)",
}
"""Measures, and how tables call them. All but the last two are accuracies in percent."""
CORRECTIONS = {
    RAW: "as they are",
    "centred": "centred",
    "standardized": "standardised",
    **{f"whitened_{s:g}": f"whitened with shrinkage {s:g}" for s in SHRINKAGES},
    **{f"without_{n}": f"without the first {counted(n, 'component')}" for n in REMOVED},
}
"""Corrections of features, and their names in tables."""
GEOMETRY = {
    f"{measure}_{name}": f"{title}, features {text}"
    for measure, title in (
        ("knn", f"k-NN (k {KNN_K}, T {KNN_TEMPERATURE})"),
        ("shots_1", "1 label per class, logistic regression"),
        ("clusters", "k-means, cluster accuracy, mean of 10 runs"),
    )
    for name, text in CORRECTIONS.items()
}
"""Further measures of `--geometry`: accuracies after corrections without training."""
WITHOUT_LABELS = (RANK_ME, UNIFORMITY)
_PAIRS_OF = 2048


@dataclass(frozen=True)
class Score:
    """One measure of one encoder on one folder.

    Attributes:
        per_image: percent of each test image; of several label sets the mean; [n], by ReaL's
            labels of fewer, or [1] without labels.
    """

    per_image: NDArray[np.float64]
    chosen: str = ""
    sets: tuple[float, ...] = field(default=())

    @property
    def value(self) -> float:
        """The measure."""
        return float(self.per_image.mean())

    @property
    def deviation(self) -> float | None:
        """Standard deviation over label sets (n - 1), in percentage points; None without them."""
        return float(np.std(self.sets, ddof=1)) if len(self.sets) > 1 else None


def measure_with_labels(
    train: Array,
    labels: NDArray[np.int64],
    contents: Sequence[int] | Sequence[str],
    test: Array,
    test_labels: NDArray[np.int64],
    threads: int = 1,
    real: Real | None = None,
) -> dict[str, Score]:
    """Measure k-NN and logistic regressions; shots with too few images per class are left out.

    Args:
        contents: checksum of each training image, by which some are held out.
        real: ReaL's labels of the test images, which k-NN and logistic regression are scored by,
            too.

    Raises:
        UserError: fewer training images than k-NN compares with, or one class only.
    """
    if len(labels) < KNN_K:
        raise UserError(f"{len(labels)} training images, too few for k-NN with k {KNN_K}")
    held = held_out_for(labels, contents, len(test))
    held_for_logistic = held_out_by_content(labels, contents, Logistic().one_in)
    if min(len(np.unique(labels[~mask])) for mask in (held, held_for_logistic)) < 2:
        raise UserError("all training images are of one class")
    if not held_for_logistic.any():
        raise UserError("no class has two training images, so none can be held out")
    own = Knn()
    sweep = sweep_settings(own, train, labels, held, test, None, threads)
    outer = {pair: _percent(classes, test_labels) for pair, classes in sweep.votes.items()}
    best = max(outer, key=lambda pair: float(outer[pair].mean()))
    scores = {KNN: Score(outer[own.k, own.temperature])}
    for name, pair in ((KNN_HELD_OUT, sweep.chosen), (KNN_BEST, best)):
        if pair is not None:
            scores[name] = Score(outer[pair], f"k {pair[0]}, T {pair[1]:g}")
    counts = np.bincount(labels, minlength=int(test_labels.max(initial=0)) + 1)
    fewest = counts[np.union1d(labels, test_labels)].min()
    queries = center_and_scale(test)
    # A weak penalty may not converge, nor need to.
    with threadpool_limits(1), warnings.catch_warnings(action="ignore"):
        for shots in SHOTS:
            if shots <= fewest:
                known = [(train[ids], labels[ids]) for ids in _label_sets(labels, shots)]
                right = right_by_few_labels(known, len(counts), queries, test_labels)
                scores[f"shots_{shots}"] = _score_of_sets(right)
        c = best_penalty(try_penalties(train, labels, held_for_logistic, threads=threads))
        classes = fit_logistic(train, labels, c)(test)
    scores[LOGISTIC] = Score(_percent(classes, test_labels), f"C {c:.3g}")
    if real is not None:
        for name, predicted in ((KNN, sweep.votes[own.k, own.temperature]), (LOGISTIC, classes)):
            scores[name + REAL] = Score(100 * real.right(predicted).astype(np.float64))
    return scores


def measure_corrections(
    train: Array,
    labels: NDArray[np.int64],
    test: Array,
    test_labels: NDArray[np.int64],
    threads: int = 1,
) -> dict[str, Score]:
    """Measure `GEOMETRY`; corrections of more components than there are features are left out.

    Raises:
        UserError: features or labels that can be neither classified nor clustered.
    """
    task = FeatureTask(labels, test_labels, {1: _label_sets(labels, 1)})
    task.check(test)
    scores: dict[str, Score] = {}
    for name, correct in corrections(train).items():
        right = task.measure(train, test, correct, threads).right
        scores[f"knn_{name}"] = Score(100.0 * right["knn"][0])
        scores[f"shots_1_{name}"] = _score_of_sets(right["low_shot_1"])
        scores[f"clusters_{name}"] = Score((100.0 * right["accuracy"]).mean(axis=0))
    return scores


def measure_without_labels(features: Array) -> dict[str, Score]:
    """Measure how features [n, d] spread; the first 2,048 are compared for uniformity."""
    some = torch.from_numpy(unit(features[:_PAIRS_OF]))
    return {
        RANK_ME: Score(np.array([rank_me(torch.from_numpy(features))])),
        UNIFORMITY: Score(np.array([uniformity(some)])),
    }


def _percent(classes: NDArray[np.int64], labels: NDArray[np.int64]) -> NDArray[np.float64]:
    return 100.0 * (classes == labels)


def _label_sets(labels: NDArray[np.int64], shots: int) -> list[NDArray[np.int64]]:
    """Return the ids of `LABEL_SETS` sets with this many training images of each class."""
    present, dense = np.unique(labels, return_inverse=True)
    names = [str(x) for x in present]
    return [balanced_rows(dense, shots, number, names) for number in range(1, LABEL_SETS + 1)]


def _score_of_sets(right: NDArray[np.bool_]) -> Score:
    """Return the score of what is right by each set of labels, bool [sets, n]."""
    percent = 100.0 * right
    return Score(percent.mean(axis=0), sets=tuple(percent.mean(axis=1).tolist()))


@dataclass(frozen=True)
class ImageFolder:
    """The images of a folder.

    Attributes:
        name: how tables call it.
        parts: its training and test images, or all in one.
        contents: SHA-256 of every image's bytes, part after part.
        checksums: their CRC-32, as in shards of unconverted images: the protocols hold out by it.
        labels: class of every image, int64 [n]; None without classes.
        test: which are tested on, bool [n]; none without classes.
        remarks: on the split, a sentence each.
    """

    name: str
    path: Path
    parts: tuple[Images, ...]
    contents: list[str]
    checksums: list[int]
    labels: NDArray[np.int64] | None
    test: NDArray[np.bool_]
    remarks: tuple[str, ...]

    @property
    def classes(self) -> int:
        """Number of classes; 0 without any."""
        return len(self.parts[0].class_names)


def named(given: Sequence[str], what: str) -> dict[str, Path]:
    """Read words PATH or NAME=PATH (else the folder's name); UserError if two are the same."""
    found: dict[str, Path] = {}
    for word in given:
        name, sign, path = word.partition("=")
        if not sign or os.path.exists(word):
            path = word
            name = Path(os.path.abspath(word)).name
        if name in found:
            raise UserError(f"two {what} are called {name}; write NAME={path} for one of them")
        found[name] = Path(path)
    return found


def open_folder(name: str, path: Path) -> ImageFolder:
    """Find the images, classes and splits of a folder, and read every file once for its checksum.

    Training and test images are found as `maect new-experiment` finds them; without such a split
    one image in five of each class is tested on, chosen by its content.

    Raises:
        UserError: no images, too few, or other classes in its test images.
    """
    train, val, _ = find_splits(path)
    parts: tuple[Images, ...] = (inspect_images(train, FEWEST, skip_unreadable=True),)
    if val is not None:
        parts = (*parts, inspect_images(val, 1, skip_unreadable=True))
        check_same_classes(*parts)
    hashes = [found for part in parts for found in hashes_of(part)]
    contents = [one.sha256 for one in hashes]
    checksums = [one.crc32 for one in hashes]
    n = len(contents)
    remarks = []
    labels = np.array([entry.label for part in parts for entry in part.entries], np.int64)
    if not parts[0].class_names:
        if parts[0].loose:
            lie = "image lies" if parts[0].loose == 1 else "images lie"
            remarks.append(f"{parts[0].loose} {lie} beside class folders: no labels")
        remarks.append("No classes: only what needs no labels")
        untested = np.zeros(n, bool)
        return ImageFolder(name, path, parts, contents, checksums, None, untested, tuple(remarks))
    if labels.min() < 0:
        row = int(labels.argmin())
        entries = [entry for part in parts for entry in part.entries]
        raise UserError(f"{path}: {entries[row].name} has no class, but others have; leave it out")
    if val is None:
        test = held_out_by_content(labels, contents, ONE_IN)
        remarks.append(f"One image in {ONE_IN} of each class is tested on, chosen by content")
    else:
        test = np.arange(n) >= len(parts[0].entries)
        remarks.append(f"Tested on {os.path.relpath(val, path)}")
        known = {content for content, tested in zip(contents, test, strict=True) if not tested}
        both = sum(contents[row] in known for row in np.flatnonzero(test))
        if both:
            are = "image is" if both == 1 else "images are"
            remarks.append(f"{both} test {are} also among the training images")
    return ImageFolder(name, path, parts, contents, checksums, labels, test, tuple(remarks))


def vectors(encoder: ImageEncoder, folder: ImageFolder, kept: Path) -> Array:
    """Return vectors of all images of a folder, float32 [n, width]; of unreadable ones NaN.

    Every 512 are kept as a file named after the encoder, how images are prepared and the images'
    contents: what is there is not computed again, whatever the folder is called now.
    """
    out = np.full((len(folder.contents), encoder.width), np.nan, np.float32)
    row = 0
    report = progress(folder.name, len(folder.contents))
    for images in folder.parts:
        source = open_source(images.kind, images.folder, pixels=encoder.reading)
        source.listing()
        for start in range(0, len(images.entries), PART):
            entries = images.entries[start : start + PART]
            contents = folder.contents[row : row + len(entries)]
            file = kept / f"{digest(encoder.identity, contents)}.safetensors"
            values, faults = encoder.kept(file, source, entries)
            out[[row + i for i in range(len(entries)) if i not in faults]] = values
            for number, why in faults.items():
                log.warning("%s: left out: %s", entries[number].name, why)
            row += len(entries)
            report(row)
    encoder.warn(folder.path)
    return out


@dataclass(frozen=True)
class Matrix:
    """Scores by encoder, folder and measure; training and test images that were readable."""

    encoders: dict[str, ImageEncoder]
    folders: list[ImageFolder]
    scores: dict[tuple[str, str], dict[str, Score]]
    readable: dict[str, tuple[int, int]]


def compare(
    encoders: dict[str, Path],
    images: dict[str, Path],
    out: Path,
    device: str | None = None,
    threads: int | None = None,
    real_labels: Path | None = None,
    geometry: bool = False,
    pixels: Mapping[str, Any] | None = None,
) -> Matrix:
    """Measure every encoder on every folder; vectors that are kept in `out` are used.

    Args:
        geometry: also measure features behind corrections without training.
        pixels: how all of them read images, in place of what their data sets say.

    Raises:
        UserError: an encoder or folder that cannot be used, or ReaL's labels that match no folder,
            before anything is computed.
    """
    loaded = load_alike(encoders, device, pixels or {})
    folders = [open_folder(name, path) for name, path in images.items()]
    asked_real = RealLabels(real_labels=None if real_labels is None else str(real_labels))
    candidates = folders if real_labels else []
    of_real = [one for one in candidates if any(map(is_imagenets, _names(one, one.test)[:1]))]
    if real_labels and not of_real:
        raise UserError(
            f"{real_labels}: no folder has test images called ILSVRC2012_val_ and a number, whose "
            "labels these are"
        )
    for folder in of_real:  # refused before anything is computed
        real_of(folder, folder.test, asked_real)
    cores = threads or len(os.sched_getaffinity(0))
    scores: dict[tuple[str, str], dict[str, Score]] = {}
    readable: dict[str, tuple[int, int]] = {}
    for folder in folders:
        made = {}
        for name, encoder in loaded.items():
            log.info("%s: %s by %s", folder.name, counted(len(folder.contents), "image"), name)
            made[name] = vectors(encoder, folder, out / "vectors")
        # What one encoder cannot read is left out for all: they are compared on the same images.
        good = np.logical_and.reduce([np.isfinite(x).all(axis=1) for x in made.values()])
        if not good.any():
            fault = next(name for name, x in made.items() if not np.isfinite(x).any())
            raise UserError(f"{folder.path}: {fault} can read none of its images; leave one out")
        readable[folder.name] = int((good & ~folder.test).sum()), int((good & folder.test).sum())
        for name, features in made.items():
            log.info("%s: measuring %s", folder.name, name)
            real = real_of(folder, good & folder.test, asked_real) if folder in of_real else None
            try:
                known = measured(folder, features, good, cores, real, geometry)
            except UserError as error:
                raise UserError(f"{folder.path}: {error}") from None
            scores[name, folder.name] = known
    return Matrix(loaded, folders, scores, readable)


def load_alike(
    encoders: Mapping[str, Path], device: str | None, pixels: Mapping[str, Any]
) -> dict[str, ImageEncoder]:
    """Load encoders that read images alike, as far as their data sets allow.

    A range that one data set states holds for encoders that state none: without it they would see
    the same deep images nearly black.
    """
    loaded = {name: load(path, device, pixels=pixels) for name, path in encoders.items()}
    ranges = {span for encoder in loaded.values() if (span := encoder.reading.range) is not None}
    if len(ranges) == 1 and "range" not in pixels:
        (span,) = ranges
        for name, encoder in loaded.items():
            if encoder.reading.range is None:
                encoder.read_as({**pixels, "range": span})
                log.info("%s: reads images of more than 8 bits by the range %g to %g", name, *span)
    for key in ("orientation", "background", "range"):
        found = {name: getattr(encoder.reading, key) for name, encoder in loaded.items()}
        if len(set(found.values())) > 1:
            said = ", ".join(f"{name} by {value}" for name, value in found.items())
            log.warning(
                "the encoders read images by another %s: %s; --pixels %s=… reads all alike",
                key, said, key,
            )  # fmt: skip
    return loaded


def _names(folder: ImageFolder, which: NDArray[np.bool_]) -> list[str]:
    """Return the names of some images of a folder."""
    names = [entry.name for part in folder.parts for entry in part.entries]
    return [names[row] for row in np.flatnonzero(which)]


def real_of(folder: ImageFolder, which: NDArray[np.bool_], labels: RealLabels) -> Real | None:
    """Return ReaL's labels of some images of a folder; UserError if these are not ImageNet's."""
    own = None if folder.labels is None else folder.labels[which]
    return real_labels_of(labels, lambda: _names(folder, which), folder.parts[0].class_names, own)


def measured(
    folder: ImageFolder,
    features: Array,
    good: NDArray[np.bool_],
    threads: int,
    real: Real | None = None,
    geometry: bool = False,
) -> dict[str, Score]:
    """Measure one encoder on one folder, by the features of those images that are readable.

    Args:
        features: float32 [n, width].
        good: which can be read, bool [n].
        real: ReaL's labels of the readable test images, if they are asked for.
        geometry: also behind corrections without training.
    """
    order = sorted(np.flatnonzero(good).tolist(), key=lambda row: folder.contents[row])
    spread = measure_without_labels(features[order])
    if folder.labels is None:
        return spread
    train = good & ~folder.test
    test = good & folder.test
    checksums = [folder.checksums[row] for row in np.flatnonzero(train)]
    known = features[train], folder.labels[train]
    asked = features[test], folder.labels[test]
    scores = measure_with_labels(*known, checksums, *asked, threads, real) | spread
    if not geometry:
        return scores
    return scores | measure_corrections(*known, *asked, threads)
