"""Inputs that tell Snakemake which jobs of an experiment it has to run.

A rule's input is the resolved file of its job. Snakemake goes by times: where a job's stamp does
not say what is asked for, or its resolved file has to be written first, the input is an empty file
that is newer than all stamps. So nothing is written before the first job starts: a dry run, and a
start that is refused, leave a results folder as it is.
"""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from maect.core.stamps import stamp_path
from maect.experiment import resolve
from maect.experiment.load import Experiment
from maect.experiment.pages import PAGES
from maect.experiment.resolve import REPORT, WRITE_SHARDS


class Asked:
    """The resolved files of an experiment, compared with what lies in its results folder.

    Attributes:
        changed: resolved files of the finished jobs that have to run again.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.changed: list[Path] = []
        self._files: dict[Path, Path] = {}
        self._folder = TemporaryDirectory(prefix="maect-")
        self._newer = Path(self._folder.name, "settings-or-inputs-changed")
        self._newer.touch()

    def file(self, rule: str, path: Path, given: Mapping[str, str]) -> Path:
        """Return the input of a job that stands for its resolved file at `path`.

        Args:
            given: the wildcards of its rule.

        Raises:
            UserError: the experiment cannot be resolved.
        """
        if path not in self._files:
            is_asked = path.exists() and self._is_current(rule, path, given)
            self._files[path] = path if is_asked else self._newer
        return self._files[path]

    def images(self, dataset: str) -> list[Path]:
        """Return what bundled images are made of: nothing, or if they are another kind's a file."""
        return [self._newer] if self.experiment.other_kind(dataset) else []

    def _is_current(self, rule: str, path: Path, given: Mapping[str, str]) -> bool:
        """Return whether a job has to run for its inputs alone, if at all."""
        if not stamp_path(path).exists():  # the output of all jobs but pages: it runs anyway
            return rule not in PAGES and rule != REPORT
        if rule == WRITE_SHARDS:
            current = resolve.shards_are_current(self.experiment, given["dataset"], given["split"])
        else:
            config = resolve.job_config(self.experiment, rule, given)
            current = resolve.is_current(self.experiment, path, config)
        if not current:
            self.changed.append(path)
        return current
