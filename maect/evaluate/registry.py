"""Evaluations by name: a protocol, or a variant of one with settings of its own."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from maect.core.errors import UserError, did_you_mean
from maect.core.settings import one_line
from maect.evaluate.accuracy import Accuracy
from maect.evaluate.base import Protocol
from maect.evaluate.clustering import Clustering
from maect.evaluate.color_histogram import ColorHistogram
from maect.evaluate.effective_invariance import EffectiveInvariance
from maect.evaluate.efficient_probe import EfficientProbe
from maect.evaluate.knn import Knn
from maect.evaluate.linear_probe import LinearProbe
from maect.evaluate.low_shot import LowShot
from maect.evaluate.retrieval import Retrieval
from maect.evaluate.robustness import Robustness
from maect.evaluate.throughput import Throughput
from maect.evaluate.umap import Umap
from maect.recipes import variant_names, variant_values

PROTOCOLS: dict[str, type[Protocol]] = {
    protocol.name: protocol
    for protocol in (
        Knn,
        LowShot,
        LinearProbe,
        EfficientProbe,
        Accuracy,
        ColorHistogram,
        Clustering,
        Retrieval,
        Robustness,
        EffectiveInvariance,
        Throughput,
        Umap,
    )
}


def evaluation_names() -> tuple[str, ...]:
    """Names of all evaluations: every protocol, and the variants of `evaluations.yaml`."""
    return tuple(dict.fromkeys([*PROTOCOLS, *variant_names()]))


def load_evaluation(
    name: str, size: str, overrides: Mapping[str, Any] | None = None
) -> tuple[str, Protocol]:
    """An evaluation's protocol and its settings for an encoder size.

    Args:
        name: a protocol or one of its variants; with the key `protocol` in `overrides`, any name.
        size: of the encoder.
        overrides: settings that differ.

    Returns:
        The name of the protocol, which is a module of `maect.evaluate`, and the settings.

    Raises:
        UserError: unknown evaluation, protocol or key, or a value out of range.
    """
    values = variant_values(name, size) | dict(overrides or {})
    protocol = values.pop("protocol", name)
    if protocol not in PROTOCOLS:
        hint = did_you_mean(protocol, evaluation_names())
        raise UserError(f"unknown protocol {protocol!r}; {hint}")
    if "size" in PROTOCOLS[protocol].model_fields:
        values.setdefault("size", size)  # whose recipes it measures
    try:
        return protocol, PROTOCOLS[protocol].model_validate(values)
    except ValidationError as error:
        raise one_line(error, name) from None
