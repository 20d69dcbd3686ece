"""ImageNet-ReaL (Beyer et al. 2020): all labels that people gave to a validation image, or none."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from maect.core.errors import UserError
from maect.core.settings import Settings, later

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})$")


class RealLabels(Settings):
    """Settings of what is scored by ImageNet-ReaL's labels, too."""

    real_labels: str | None = later(None)
    """ReaL's `real.json`: a list of classes for each of ImageNet's 50,000 validation images."""

    def real(
        self, name: str, predicted: NDArray[np.int64], keys: Sequence[str]
    ) -> dict[str, float]:
        """Accuracy by ReaL's labels in percent as `NAME_real`; nothing if they are not asked for.

        An image counts as right if its predicted class is among its labels. Images without a label
        do not count.

        Args:
            name: of the metric.
            predicted: class of each test image, int64 [n], a place in the sorted WordNet ids.
            keys: names of the images, which end with `ILSVRC2012_val_` and their number.

        Raises:
            UserError: no such file, not ReaL's, or images that are not ImageNet's.
        """
        if self.real_labels is None:
            return {}
        labels = read_real(Path(os.path.expandvars(self.real_labels)).expanduser())
        hits = []
        for key, guess in zip(keys, predicted.tolist(), strict=True):
            match = _NUMBER.search(key)
            if match is None or not 1 <= int(match[1]) <= len(labels):
                raise UserError(
                    f"real_labels: {key!r} is none of the {len(labels)} images of "
                    f"{self.real_labels}, which are called ILSVRC2012_val_ and a number"
                )
            allowed = labels[int(match[1]) - 1]
            if allowed:
                hits.append(guess in allowed)
        if not hits:
            raise UserError(f"{self.real_labels}: gives no label to any of the test images")
        return {f"{name}_real": 100 * sum(hits) / len(hits)}


def read_real(path: Path) -> list[list[int]]:
    """Labels of each validation image in the order of their numbers.

    Raises:
        UserError: no such file, or no list of lists of class numbers.
    """
    try:
        labels = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; it is real.json of google-research/reassessed-imagenet"
        ) from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    if not isinstance(labels, list) or not all(
        isinstance(each, list) and all(type(number) is int for number in each) for each in labels
    ):
        raise UserError(f"{path}: not ReaL's labels, a list of class numbers for each image")
    return labels
