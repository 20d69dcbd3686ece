"""Functions of the workflow's rules: `workflow/rules/common.smk` gives them Snakemake's objects."""

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from maect.core.errors import UserError
from maect.core.owners import check_working_folder, why_public
from maect.core.stamps import StampedFile, stamp_path
from maect.evaluate import PROTOCOLS
from maect.experiment import load, resolve, start
from maect.experiment.load import Experiment
from maect.experiment.pages import PAGES
from maect.experiment.resolve import REPORT, WRITE_SHARDS
from maect.stages import STAGES

LEFT = ("*", "*/*", "*/*/*done", "shards/*/*/done")
"""Stamps, pages and images that jobs leave in a results folder."""
JUST_LATER = 1e-3
"""Seconds by which an input that has changed is newer than all of them."""


def fail(message: object) -> NoReturn:
    """Print one line on an error that the user can mend, without a traceback, and exit."""
    print(f"maect: {message}", file=sys.stderr)
    raise SystemExit(2)


@cache
def say(message: str) -> None:
    """Print a line once."""
    print(f"maect: {message}", file=sys.stderr)


def load_experiment(config: Mapping[str, Any]) -> Experiment:
    """Load the experiment that Snakemake's config names, with the config's changes."""
    changes = {key: value for key, value in config.items() if key != "experiment"}
    try:
        check_working_folder()
        experiment = load(config.get("experiment", "paper"), **changes)
    except UserError as error:
        fail(error)
    return experiment


def check_targets(experiment: Experiment, words: Sequence[str]) -> None:
    """Refuse a result's file as a target of Snakemake by itself.

    `maect run` asks for its stamp instead. Snakemake would take a file that is there for finished,
    whatever it was made by.
    """
    if "snakemake" in (Path(words[0]).name, Path(words[0]).parent.name):  # not `maect run`
        for word, stamp in zip(words, resolve.targets(experiment, words), strict=True):
            if word != stamp:
                fail(f"{word}: ask Snakemake for {stamp}, or ask `maect run` for the file")


class Asked:
    """The resolved files of an experiment, compared with its results folder.

    The input of a rule is its resolved file. Snakemake goes by times: where a stamp does
    not say what is asked for, or its resolved file has to be written first, the input is an empty
    file that is newer than all stamps, by the clock that dated them: a file server's may differ
    from this machine's. So nothing is written before the first job starts: a dry run, and a start
    that is refused, leave a results folder as it is. Shards and features that are gone have an
    input that is older than all: they are made only if a job reads them.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self._files: dict[Path, Path] = {}
        # Snakemake's own folder: /tmp may be emptied while jobs run for days.
        place = Path(".snakemake").absolute()
        place.mkdir(exist_ok=True)
        self._folder = TemporaryDirectory(prefix="maect-", dir=place)
        self._newer = Path(self._folder.name, "settings-or-inputs-changed")
        self._newer.touch()
        later = _newest(experiment.root) + JUST_LATER
        os.utime(self._newer, (later, later))
        self._older = Path(self._folder.name, "settings")
        self._older.touch()
        os.utime(self._older, (0, 0))

    def file(self, rule: str, path: Path, given: Mapping[str, str]) -> Path:
        """Return the input of a job that stands for its resolved file at `path`.

        Args:
            given: the wildcards of its rule.

        Raises:
            UserError: the experiment cannot be resolved.
        """
        if path not in self._files:
            if rule in (WRITE_SHARDS, "features") and not stamp_path(path).exists():
                self._files[path] = self._older
            else:
                is_asked = path.exists() and self._is_current(rule, path, given)
                self._files[path] = path if is_asked else self._newer
        return self._files[path]

    def images(self, dataset: str) -> list[Path]:
        """Return the source of bundled images: nothing, or another kind's file."""
        return [self._newer] if self.experiment.other_kind(dataset) else []

    def _is_current(self, rule: str, path: Path, given: Mapping[str, str]) -> bool:
        """Return whether a job has to run for its inputs alone, if at all."""
        if rule == WRITE_SHARDS:
            return resolve.shards_are_current(self.experiment, given["dataset"], given["split"])
        config = resolve.job_config(self.experiment, rule, given)
        if stamp_path(path).exists():
            return resolve.is_current(self.experiment, path, config)
        # The stamp is the output of all jobs but pages: they run if something needs it.
        return rule not in PAGES and rule != REPORT and _asks_for(path, config)


def _asks_for(path: Path, config: StampedFile) -> bool:
    """Return whether the resolved file at `path` asks for what `config` does."""
    try:
        return type(config).read(path).asked == config.asked
    except UserError:
        return False


def _newest(root: Path) -> float:
    """Return the time of the newest file that a job has left in a results folder; 0: none has."""
    found = (path for pattern in LEFT for path in root.glob(pattern))
    return max((path.lstat().st_mtime for path in found), default=0.0)


def resolved_input(asked: Asked, rule: str, pattern: str) -> Callable[[Any], str]:
    """Return the input function of a rule's resolved file: a newer file if that is outdated."""

    def resolved_file(wildcards: Any) -> str:
        try:
            path = Path(pattern.format_map(wildcards))
            return str(asked.file(rule, path, dict(wildcards.items())))
        except UserError as error:
            fail(error)

    return resolved_file


def stamps(experiment: Experiment, files: Iterable[Path]) -> list[str]:
    """Return the stamps that Snakemake waits for before a job reads these files."""
    return list(dict.fromkeys(str(resolve.stamp_of(experiment, file)) for file in files))


def shards_stamp(experiment: Experiment, dataset: str, split: str) -> list[str]:
    """Return the stamp of a split's shards."""
    return stamps(experiment, [experiment.shards(dataset, split) / "index.json"])


def shards_inputs(experiment: Experiment, dataset: str, split: str) -> list[str]:
    """Return the inputs of shards: bundled images; of a view, its split's shards and its classes.

    A user's folder of images is not watched.
    """
    given = experiment.datasets[dataset].splits[split]
    if given.of is not None:
        return [*shards_stamp(experiment, dataset, given.of), *map(str, given.files())]
    if experiment.datasets[dataset].bundled:
        return [f"{experiment.root}/images/{dataset}"]
    return []


def rule_names() -> list[str]:
    """Return the names of the rules that run a command."""
    own = ["write_images", resolve.WRITE_SHARDS, "features", resolve.REPORT, "workflow_html"]
    return [*own, *STAGES, *PROTOCOLS, *PAGES]


def is_forced(settings: Any, job: Any) -> bool:
    """Return whether the user wants a job to compute: `-F`, `-R RULE or FILE`, `-f` of a target.

    `settings` is `workflow.dag_settings`.
    """
    names = {job.rule.name, *map(os.path.abspath, job.output)}

    def is_among(words: Iterable[str]) -> bool:
        return not names.isdisjoint({*words, *map(os.path.abspath, words)})

    if settings.forceall or is_among(settings.forcerun):
        return True
    return bool(settings.forcetargets) and is_among(settings.targets)


def pending_jobs(workflow: Any, names: Mapping[str, str]) -> list[start.PendingJob]:
    """Return the jobs of this workflow that Snakemake will run.

    `workflow.dag.needrun_jobs` is the only way to ask for them (snakemake 9.27). `names` are those
    of the rules here, by the names that a workflow which uses this one gives them.
    """
    return [
        start.PendingJob(
            names[job.rule.name],
            dict(job.wildcards.items()),
            [*job.input, *job.output] if job.rule.shellcmd else [],
            Path(job.params.config) if "config" in job.params.keys() else None,  # noqa: SIM118
            is_forced(workflow.dag_settings, job),
        )
        for job in workflow.dag.needrun_jobs()
        if job.rule.name in names
    ]


def check_jobs(
    experiment: Experiment, jobs: Sequence[start.PendingJob], profile: Iterable[Mapping[str, Any]]
) -> None:
    """Refuse to start jobs that would fail or read something wrong; `profile`: its resources."""
    for given in profile:
        account = str(given["slurm_account"].raw).strip("'") if "slurm_account" in given else ""
        if account.startswith("$") and os.path.expandvars(account) == account:
            fail(f"the profile's account is {account}, which is not set: export it")
    for fault in start.faults(experiment, jobs):
        fail(fault)
    if reason := why_public(experiment.root):
        fail(f"{reason}; or put `storage` into a folder of your own")


def end_quietly_at_ctrl_c(logger: Any) -> None:
    """Replace the three pages that Snakemake prints at Ctrl-C by a line; jobs save and end."""

    def interrupt(*_: object) -> NoReturn:
        logger.addFilter(lambda record: False)
        say("interrupted: trainings save; the same command goes on from there")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)


def say_where_the_report_is(experiment: Experiment, began: float) -> None:
    """Name the report if it was made since `began` (Unix time)."""
    page = experiment.root / "report.html"
    if page.exists() and page.stat().st_mtime >= began:
        say(f"the report is {page}; open it in a browser")


def workflow_command(config: Mapping[str, Any], snakefile: Path) -> str:
    """Return the shell command that lets Snakemake write its own report of `{input.shown}`."""
    changes = [f"{key}={'' if value is None else value}" for key, value in config.items()]
    words = [
        *("python3", "-P", "-m", "maect.tools.start_snakemake"),
        *("--profile", "none", "--workflow-profile", "none", "--snakefile", str(snakefile)),
        *("--config", *changes, "--nolock", "--cores", "1"),
    ]
    # Braces are Snakemake's, which fills in the rest.
    quoted = shlex.join(words).replace("{", "{{").replace("}", "}}")
    return f"{quoted} --report {{output}} {{input.shown}} 2> {{log}}"
