"""Stamps of results that a test has made without the pipeline, and what a start finds by them."""

from pathlib import Path

from maect.core.stamps import StampedFile, stamp_path, stamped
from maect.data.config import CONFIG, made_by
from maect.evaluate import EvaluationConfig, FeaturesConfig
from maect.experiment import Experiment, resolve
from maect.report.configs import PageConfig
from maect.stages.run import RunConfig


def stamp_finished(found: Experiment) -> None:
    """Write the stamp of every result that is there, as its job does in the end."""
    for pair in found.splits:
        path = found.own_shards(*pair) / CONFIG
        made = made_by(path.parent)
        if made is not None and made.result(path) is not None:
            _stamp(path, made)
    # In the order in which they are made of each other.
    order = (RunConfig, FeaturesConfig, EvaluationConfig, PageConfig)
    for kind in order:
        for path, config in resolve.files(found):
            if isinstance(config, kind) and path.exists() and config.result(path) is not None:
                _stamp(path, config)


def _stamp(path: Path, config: StampedFile) -> None:
    with stamped(path, config):
        pass


def outdated(found: Experiment) -> list[Path]:
    """Stamps that do not say what is asked for, so that their jobs run again."""
    stamps = [
        stamp_path(path)
        for path, config in resolve.files(found)
        if stamp_path(path).exists() and not resolve.is_current(found, path, config)
    ]
    for pair in found.splits:
        stamp = stamp_path(found.own_shards(*pair) / CONFIG)
        if stamp.exists() and not resolve.shards_are_current(found, *pair):
            stamps.append(stamp)
    return stamps
