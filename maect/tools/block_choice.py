"""Recommendation of a block and a pooling of an encoder, chosen on held-out training images.

The last block of a masked or a fine-tuned encoder is often not its best. Every block is read from
one forward pass, each with [CLS] and with the mean of the patches, and compared with the output as
the encoder pools it, by k-NN on standardised features. Test images choose nothing.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from maect.answers.encoder import ImageEncoder
from maect.core.errors import counted
from maect.evaluate.features import LastBlocks
from maect.evaluate.knn import votes_by_setting
from maect.evaluate.outcomes import Difference, difference, held_out_for
from maect.evaluate.store import moments, standardize
from maect.recipes import KNN_K, KNN_TEMPERATURE
from maect.tools.compare import ImageFolder, Matrix, vectors

log = logging.getLogger(__name__)

OUTPUT = "output"
LEVEL = 0.05
TITLES = {"cls": "[CLS]", "mean": "mean of the patches"}
ITS_OWN = "as its own head pools"
"""Title of any other pooling, which the encoder's output alone has."""
Reading = tuple[str, str]
"""A block, from 1, or `OUTPUT` after the final norm; and a pooling."""


@dataclass(frozen=True)
class Recommendation:
    """A reading of an encoder, and the encoder's own one.

    Attributes:
        best: that is recommended.
        own: as the encoder's file says.
        scores: k-NN on held-out training images in percent, by reading.
        gain: best minus own on these images.
        test: k-NN of best and own on the test images.
        blocks: of the encoder.
    """

    best: Reading
    own: Reading
    scores: Mapping[Reading, float]
    gain: Difference
    test: tuple[float, float]
    blocks: int

    @property
    def sentence(self) -> str:
        """Return the recommendation and its reason."""
        images = counted(self.gain.images, "held-out training image")
        others = counted(len(self.scores) - 1, "other reading")
        if self.best == self.own:
            return (
                f"{self._title(self.own)}, as it is: k-NN {self.scores[self.own]:.1f} % of "
                f"{images}, and none of {others} is distinguishably better"
            )
        gain = self.gain
        return (
            f"{self._title(self.best)}: k-NN {self.scores[self.best]:.1f} % of {images}, "
            f"{self._title(self.own)} {self.scores[self.own]:.1f} ({gain.value:+.1f}, "
            f"{gain.low:+.1f} to {gain.high:+.1f} for this reading alone; the test corrects "
            f"for {others}); on the test images {self.test[0]:.1f} and {self.test[1]:.1f}"
        )

    def _title(self, reading: Reading) -> str:
        block, pooling = reading
        where = OUTPUT if block == OUTPUT else f"block {block} of {self.blocks}"
        return f"{where}, {TITLES.get(pooling, ITS_OWN)}"


def readings(poolings: Sequence[str], blocks: int) -> list[Reading]:
    """Return the readings in the order of the columns of `LastBlocks`."""
    numbers = [str(number) for number in range(1, blocks + 1)]
    output = [(OUTPUT, pooling) for pooling in poolings]
    return output + [(number, pooling) for pooling in poolings for number in numbers]


def choose(right: Mapping[Reading, NDArray[np.bool_]], own: Reading) -> tuple[Reading, Difference]:
    """Choose the best reading, or the own one if none is distinguishably better.

    The images that choose also decide, so p is multiplied by the number of others (Bonferroni).

    Args:
        right: of each reading, which held-out images it gets right, bool [n].

    Returns:
        The reading, and its difference to the own one.
    """
    best = max(right, key=lambda reading: (right[reading].mean(), reading == own))
    found = difference(right[own].astype(float), right[best].astype(float))
    if found.p * (len(right) - 1) < LEVEL and found.low > 0:
        return best, found
    return own, difference(right[own].astype(float), right[own].astype(float))


def recommend(encoder: ImageEncoder, folder: ImageFolder, out: Path) -> Recommendation | None:
    """Recommend a reading on a folder's images; None without classes, or with too few images.

    Args:
        out: folder of `compare`, which keeps the features of all blocks, too.
    """
    if folder.labels is None:
        return None
    every = copy(encoder)
    encoding = LastBlocks(
        encoder.path, encoder.encoding.device, encoder.encoding.precision, blocks=10**9
    )
    every.encoding = encoding
    every.width = encoding.width
    log.info("%s: every block of %s", folder.name, encoder.path.parent.name)
    features = vectors(every, folder, out / "blocks")
    names = readings(encoding.poolings, encoding.blocks)
    columns = features.reshape(len(features), len(names), -1)
    read = {name: columns[:, number] for number, name in enumerate(names)}
    own = (OUTPUT, encoder.pooling)
    if own not in read:
        read[own] = vectors(encoder, folder, out / "vectors")
    good = np.isfinite(features).all(axis=1)
    train, test = np.flatnonzero(good & ~folder.test), np.flatnonzero(good & folder.test)
    checksums = [folder.checksums[row] for row in train]
    held = held_out_for(folder.labels[train], checksums, len(test))
    if (~held).sum() < KNN_K or not held.any():
        return None
    inner = {
        name: _right(one, folder.labels, train[~held], train[held]) for name, one in read.items()
    }
    best, gain = choose(inner, own)
    outer = [
        100 * float(_right(read[name], folder.labels, train, test).mean()) for name in (best, own)
    ]
    scores = {name: 100 * float(one.mean()) for name, one in inner.items()}
    return Recommendation(best, own, scores, gain, (outer[0], outer[1]), encoding.blocks)


def recommended(matrix: Matrix, out: Path) -> list[str]:
    """Return a line for each folder with classes and each encoder; `out` as in `recommend`."""
    found = {
        (folder.name, name): recommend(encoder, folder, out)
        for folder in matrix.folders
        for name, encoder in matrix.encoders.items()
    }
    return [
        f"{folder}: {name}: read {one.sentence}."
        for (folder, name), one in found.items()
        if one is not None
    ]


def _right(
    features: NDArray[np.float32], labels: NDArray[np.int64], bank: NDArray[np.int64],
    queries: NDArray[np.int64],
) -> NDArray[np.bool_]:  # fmt: skip
    """Return which queries k-NN gets right, with features standardised by the bank, bool [n]."""
    known = features[bank]
    correct = partial(standardize, scale=moments(known))
    pair = (KNN_K, KNN_TEMPERATURE)
    cores = len(os.sched_getaffinity(0))
    votes = votes_by_setting(known, labels[bank], features[queries], [pair], correct, cores)
    return votes[pair] == labels[queries]
