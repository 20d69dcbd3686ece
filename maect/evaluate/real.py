"""ImageNet-ReaL (Beyer et al. 2020): all labels that people gave to a validation image, or none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from maect.core.errors import UserError
from maect.core.files import sha256_file
from maect.evaluate.base import RealLabels

_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})(?:\.\w+)?$")


LEAST = 50.0
"""Percent of ImageNet's own labels that are ReaL's at the least, where classes have one order: of
the whole split 90 are."""


def real_sha256(settings: RealLabels) -> str | None:
    """Return the labels' sha256; None if they are not asked for; UserError: no such file."""
    path = settings.labels_file
    if path is None:
        return None
    if not path.is_file():
        raise _missing(path, "no such file")
    return sha256_file(path)


def real_labels_of(
    settings: RealLabels,
    keys: Callable[[], Sequence[str]],
    class_names: Sequence[str] = (),
    labels: NDArray[np.int64] | None = None,
) -> Real | None:
    """Read ReaL's labels of the images of some keys; None if they are not asked for.

    Keys end with `ILSVRC2012_val_` and a number. Without `class_names`, and without the images'
    own `labels`, int64 [n], none are compared.
    """
    path = settings.labels_file
    return None if path is None else Real(path, keys(), class_names, labels)


def is_imagenets(key: str) -> bool:
    """Return whether an image is called as those of ImageNet's validation split are."""
    return _NUMBER.search(key) is not None


class Real:
    """ReaL's labels of some images."""

    def __init__(
        self,
        path: Path,
        keys: Sequence[str],
        class_names: Sequence[str] = (),
        labels: NDArray[np.int64] | None = None,
    ) -> None:
        """Find the labels by the images' names; raise UserError if they do not fit."""
        given = read_real(path)
        classes = 1 + max((number for each in given for number in each), default=-1)
        if class_names and classes > len(class_names):
            raise UserError(
                f"{path}: labels of {classes} classes, the images have {len(class_names)}; ReaL's "
                "are those of all of ImageNet-1k"
            )
        # Behind the classes a column for what is predicted beyond them, which is wrong.
        self._right = np.zeros((len(keys), classes + 1), bool)
        for row, key in enumerate(keys):
            match = _NUMBER.search(key)
            if match is None or not 1 <= int(match[1]) <= len(given):
                raise UserError(
                    f"real_labels: {key!r} is none of the {len(given)} images of "
                    f"{path}, which are called ILSVRC2012_val_ and a number"
                )
            self._right[row, given[int(match[1]) - 1]] = True
        self.counted = self._right.any(axis=1)
        if not self.counted.any():
            raise UserError(f"{path}: gives no label to any of the test images")
        if labels is None:
            return
        agree = self.accuracy(labels)
        if agree < LEAST:
            raise UserError(
                f"{path}: only {agree:.0f} % of the images' own labels are among ReaL's, which are "
                "numbers of ImageNet's classes in the order of their WordNet ids: name the class "
                "folders by these"
            )

    def right(self, predicted: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether each predicted class, int64 [n], is right: bool, of images with labels."""
        columns = np.minimum(predicted, self._right.shape[1] - 1)
        found: NDArray[np.bool_] = self._right[np.arange(len(predicted)), columns]
        return found[self.counted]

    def accuracy(self, predicted: NDArray[np.int64]) -> float:
        """Percent of the images with labels whose predicted class, int64 [n], is among them."""
        return 100 * float(self.right(predicted).mean())


def _missing(path: Path, why: str | None) -> UserError:
    return UserError(f"{path}: {why}; `maect retrieve imagenet_real FOLDER` fetches real.json")


def read_real(path: Path) -> list[list[int]]:
    """Read the labels of each validation image, in order; raise UserError if the file is none."""
    try:
        labels = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _missing(path, error.strerror) from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    if not isinstance(labels, list) or not all(
        isinstance(each, list) and all(type(number) is int and number >= 0 for number in each)
        for each in labels
    ):
        raise UserError(f"{path}: not ReaL's labels, a list of class numbers for each image")
    return labels
