"""Search for results that are not what an experiment asks for, in the results folder alone.

Results say themselves what they were made by: records of runs and evaluations, the headers of
features, `config.yaml` beside shards; a table, figure or page is newer than the resolved file
beside it. So a copy of the folder, another clone and a start from elsewhere find the same.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from maect.core.errors import UserError
from maect.core.files import seek_record
from maect.core.settings import SettingsFile
from maect.data.sources.view import read_classes
from maect.evaluate.base import Features, OutputOf, Shards, Trained
from maect.evaluate.real import RealLabels
from maect.evaluate.store import open_record
from maect.experiment import resolve
from maect.experiment.chosen_shards import is_made_otherwise
from maect.experiment.load import Experiment
from maect.experiment.pages import pages
from maect.records import ENCODER, EvaluationRecord, RunRecord
from maect.stages.imported import Import, is_another_file, shape_found


def outdated(experiment: Experiment) -> list[Path]:
    """Return files that are there and not what the experiment asks for, one of each job.

    What is made of such a file follows it. Of what inputs are gone nothing can be told: it stays.
    """
    found = Differences(experiment)
    return [
        *found._images(),
        *found._shards(),
        *found._runs(),
        *found._features(),
        *found._evaluations(),
        *found._shown(),
    ]


class Differences:
    """A results folder beside what is asked for; every record is read once."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment, self.root = experiment, experiment.root

    def _images(self) -> Iterator[Path]:
        for name in filter(self.experiment.other_kind, self.experiment.datasets):
            yield self.root / "images" / name

    def _shards(self) -> Iterator[Path]:
        for name, part in self.experiment.splits:
            dataset = self.experiment.datasets[name]
            own, split = self.experiment.own_shards(name, part), dataset.splits[part]
            if split.source.sharded:
                planned = (own / "plan.json").exists()
                if planned and is_made_otherwise(own, split, dataset.pixels):
                    yield own / "plan.json"
            elif index := self.record(own / "index.json"):
                try:
                    classes = list(read_classes(str(split.classes)))
                except (OSError, UserError):
                    continue
                of = self.index(self.experiment.shards(name, str(split.of)))
                made = {**index, "of": index.get("view_of", {}).get("digest")}
                if _differ(made, {"class_names": classes, "of": of}):
                    yield own / "index.json"

    def _runs(self) -> Iterator[Path]:
        for name in self.experiment.runs:
            folder = self.experiment.folder(name)
            made = self.run(folder)
            if made and self.is_another_run(name, made):
                yield RunRecord.path(folder)

    def is_another_run(self, name: str, made: RunRecord) -> bool:
        """Return whether a finished run is not the one asked for, or began with other weights."""
        config = resolve.run_config(self.experiment, name)
        settings, shape = config.settings, config.encoder
        if made.stage != config.stage:
            return True
        if isinstance(settings, Import):
            weights = made.weights
            if weights is None:
                return False
            if config.weights is not None and is_another_file(config.weights, weights):
                return True
            if settings.layout is None:  # found in the weights, and this with it
                shape = shape.model_copy(update=shape_found(weights))
            asked = [(settings.layout, weights.layout), (settings.timm, weights.timm)]
            return made.encoder != shape or any(a not in (None, given) for a, given in asked)
        if (made.encoder, made.seed) != (shape, config.seed) or not settings.is_said_by(
            made.settings
        ):
            return True
        if made.source != (config.source and config.source.name):
            return True
        data = self.index(config.shards) if config.shards else None
        weights_of = self.weights(config.source) if config.source else {}
        if data is None or (config.source and not weights_of):
            return False  # what it was made of is gone
        return made.fingerprint != config.fingerprint(data, weights_of)

    def _features(self) -> Iterator[Path]:
        protocols = [self.experiment.evaluation(*pair) for pair in self.experiment.evaluations]
        read = [kind for one in protocols for kind in one.inputs().values()]
        endings = {resolve.ending(kind) for kind in read if isinstance(kind, Features)}
        for run in self.experiment.evaluated:
            pairs = itertools.product(self.experiment.splits, sorted(endings))
            for (dataset, split), ending in pairs:
                kind = resolve.of_ending(split, ending)
                path = resolve.features_file(self.experiment, run, dataset, kind)
                made_of = {"encoder_sha256": self.encoder(run)}
                if _differ(self.header(path), self.asked_of(run, dataset, kind) | made_of):
                    yield path

    def asked_of(self, run: str, dataset: str, kind: Features) -> dict[str, Any]:
        """Return what a header of features would say if they were made now, as far as is known."""
        config = resolve.features_config(self.experiment, run, dataset, kind)
        return config.how | {"index_digest": self.index(config.shards)}

    def _evaluations(self) -> Iterator[Path]:
        for run, name in self.experiment.evaluations:
            path = self.root / "evaluations" / run / f"{name}.json"
            made = self.result(path)
            if made and self.is_another_evaluation(run, name, made):
                yield path

    def is_another_evaluation(self, run: str, name: str, made: EvaluationRecord) -> bool:
        """Return whether a result is of other settings, weights, images or inputs."""
        config, about = resolve.evaluation_config(self.experiment, run, name), made.provenance
        if not config.is_answered_by(made):
            return True
        if _differ(about, {"encoder_sha256": self.encoder(run)}):
            return True
        splits, inputs = about.get("splits", {}), about.get("inputs", {})
        dataset = self.experiment.dataset_of(name)
        for key, kind in config.settings.inputs().items():
            paths = config.paths(key)
            if isinstance(kind, Features):
                # Without the features, which are large, the result itself says what they were.
                read = self.header(paths[0]) or self.asked_of(run, dataset, kind)
                if _differ(splits.get(key, {}), {k: read.get(k) for k in splits.get(key, {})}):
                    return True
            elif isinstance(kind, Shards):
                if _differ(splits.get(key, {}), {"index_digest": self.index(paths[0])}):
                    return True
            elif isinstance(kind, OutputOf):
                other = self.result(paths[0].with_suffix(".json"))
                if _differ(inputs, {key: other and other.left_sha256}):
                    return True
            elif isinstance(kind, Trained):
                trained = [self.encoder(path.name) for path in paths]
                if None not in trained and _differ(inputs, {key: trained}):
                    return True
        if isinstance(config.settings, RealLabels):
            try:
                return _differ(inputs, {"real_labels": config.settings.real_sha256()})
            except UserError:
                return False  # gone: what it was scored by is unknown
        return False

    def _shown(self) -> Iterator[Path]:
        for path, config, outputs in pages(self.experiment):
            there = [output for output in outputs if output.exists()]
            if there and not _is_made_by(config, path, there):
                yield there[0]

    @cache  # noqa: B019 (of one comparison)
    def record(self, path: Path) -> dict[str, Any]:
        """A JSON record; {} where there is none, or damaged, which whoever uses it will say."""
        return seek_record(path)

    @cache  # noqa: B019
    def header(self, path: Path) -> dict[str, Any]:
        """Return what a features file says about its making, likewise."""
        try:
            return open_record(path) if path.exists() else {}
        except UserError:
            return {}

    def index(self, shards: Path) -> str | None:
        """Digest of shards; None where there are none."""
        return self.record(shards / "index.json").get("digest")

    @cache  # noqa: B019
    def run(self, folder: Path) -> RunRecord | None:
        """The record of a run, likewise."""
        return RunRecord.find(folder)

    @cache  # noqa: B019
    def result(self, path: Path) -> EvaluationRecord | None:
        """Result of an evaluation, likewise."""
        return EvaluationRecord.seek(path)

    def weights(self, run: Path) -> dict[str, str]:
        """Checksums of the weights that a finished run promises."""
        record = self.run(run)
        return record.sha256 if record else {}

    def encoder(self, run: str) -> str | None:
        """Checksum of a run's encoder; None where it has none."""
        return self.weights(self.experiment.folder(run)).get(ENCODER)


def _differ(made: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    """Return whether a record says another value than is asked for, where both say one."""
    return any(made.get(key, value) != value for key, value in asked.items() if value is not None)


def _is_made_by(config: SettingsFile, path: Path, outputs: Sequence[Path]) -> bool:
    """Return whether files were made after their resolved file, and that says what is asked for."""
    try:
        same = type(config).read(path).identity(path) == config.identity(path)
    except UserError:
        return False
    written = path.stat().st_mtime_ns
    return same and all(output.stat().st_mtime_ns >= written for output in outputs)
