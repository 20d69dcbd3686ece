import os
import re
import shlex
import signal
import sys
import time
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from snakemake.logging import logger

# Snakemake puts the Snakefile's folder first: the rules call the installed maect, and so it is here.
sys.path.sort(key=str(workflow.basedir).__eq__)

from maect import experiment as experiments
from maect.core.errors import UserError
from maect.core.owners import why_public
from maect.core.processes import SAFE_PATH
from maect.data.sources import open_source
from maect.data.sources.view import check_classes
from maect.evaluate import PROTOCOLS
from maect.experiment import resolve
from maect.experiment import start as starting
from maect.experiment import working_folder
from maect.experiment.asked import Asked
from maect.experiment.pages import PAGES, report_inputs
from maect.experiment.schema import fill_path, one_of
from maect.launch.owner import SNAKEMAKE, lock_folder, this_process
from maect.launch.resources import PROFILE, PROFILE_OF_TRAININGS
from maect.stages import STAGES

# Held while this Snakemake runs: a second one on the same results folder is refused.
ownership = ExitStack()
began = time.time()

# The rules call the `maect` of the environment that Snakemake itself runs in.
shell.prefix(
    f"set -euo pipefail; export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH; "
)

# Launchers leave their jobs running once this process is gone. (A subprocess of it reads this, too.)
os.environ.setdefault(SNAKEMAKE, this_process())

# Nothing below imports from the working folder, not even this process started once more.
os.environ[SAFE_PATH] = "1"

# Snakemake's lint asks for one. By the prefix above, rules run in Snakemake's own environment anyway.
ENVIRONMENT = "../../envs/environment.yaml"


def stop(message):
    """One line, no traceback: the user can fix this."""
    print(f"maect: {message}", file=sys.stderr)
    raise SystemExit(2)


if workflow.is_main_process:
    try:
        working_folder.check_working_folder()
        working_folder.check_profiles(sys.argv)
    except UserError as error:
        stop(error)
    for note in working_folder.notes(Path(workflow.basedir), sys.argv):
        print(f"maect: warning: {note}", file=sys.stderr)


def check_views():
    """Look for the classes of views before anything is sharded."""
    for dataset, name in experiment.splits:
        splits = experiment.datasets[dataset].splits
        view = splits[name]
        if not view.source.sharded:
            check_classes(
                fill_path(view.classes),
                experiment.shards(dataset, view.of),
                open_source(splits[view.of].kind, experiment.images(dataset, view.of)),
            )


try:
    changes = {key: value for key, value in config.items() if key != "experiment"}
    experiment = experiments.load(config.get("experiment", "paper"), **changes)
except UserError as error:
    stop(error)
try:
    check_views()
except UserError as error:
    stop(f"{experiment.file}: {error}")

ROOT = str(experiment.root)
RUN = f"{ROOT}/runs/{{run}}"
LOGS = f"{ROOT}/logs"
BENCHMARKS = f"{ROOT}/benchmarks"

# Where and how a command runs: defaults for one machine, set by the profile with `set-resources`.
# Read in the shell command, not in `params`, so that changing them re-runs nothing.
CLUSTER = {
    key: default for key, (_, default) in (PROFILE | PROFILE_OF_TRAININGS).items()
}


def on_devices(command, also=()):
    """The shell command that runs a `maect` command where the profile says."""
    told = [
        f"--{option.replace('_', '-')}={{resources.{key}:q}}"
        for key, (option, _) in {**PROFILE, **dict(also)}.items()
    ]
    return " ".join([command, *told, "--log {log:q}"])


wildcard_constraints:
    run=one_of(experiment.runs),
    dataset=one_of(experiment.datasets),
    split=one_of(dict.fromkeys(split for _, split in experiment.splits)),


warned = set()


def warn(faults):
    """In a dry run, print once what a real one would refuse."""
    for fault in faults:
        if workflow.dryrun and fault not in warned:
            warned.add(fault)
            print(f"maect: warning: {fault}", file=sys.stderr)


if workflow.is_main_process:
    for note in starting.changed_images(experiment):
        print(f"maect: warning: {note}", file=sys.stderr)


# A job that computes leaves a stamp, its only output here: Snakemake deletes nothing that took hours.
# Its inputs are its resolved file and the stamps of what it is made of. A job that finds its result to
# be what is asked for ends at once (maect/core/stamps.py).
asked = Asked(experiment)


def resolved(rule, pattern):
    """The input of a rule that is its resolved file; a newer one where that does not say what is asked."""

    def resolved_file(wildcards):
        try:
            path = Path(pattern.format_map(wildcards))
            return str(asked.file(rule, path, dict(wildcards.items())))
        except UserError as error:
            stop(error)

    return resolved_file


def stamps(files):
    """What Snakemake waits for before a job reads these files."""
    return list(dict.fromkeys(str(resolve.stamp_of(experiment, f)) for f in files))


def shards_stamp(dataset, split):
    return stamps([experiment.shards(dataset, split) / "index.json"])


# `maect run` asks for a stamp in place of a result's file. Snakemake by itself would take one that is
# there for finished, whatever it was made by.
if workflow.is_main_process and working_folder.is_bare(sys.argv):
    for word, stamp in zip(sys.argv, resolve.targets(experiment, sys.argv)):
        if word != stamp:
            stop(f"{word}: ask Snakemake for {stamp}, or ask `maect run` for the file")


# Snakemake does not miss what lies between images and results that are there: targets name it.
LOST = starting.lost_shards(experiment)
LOST_SHARDS = [stamp for split in LOST for stamp in shards_stamp(*split)]
if workflow.is_main_process:
    for dataset, split in LOST:
        print(
            f"maect: the shards of {dataset} {split} are gone: they are made again",
            file=sys.stderr,
        )


def split_of(wildcards):
    return experiment.datasets[wildcards.dataset].splits[wildcards.split]


def image_folder(wildcards):
    """Passed as a resource, not in `params`: images that moved re-run nothing."""
    return images_at(wildcards.dataset, wildcards.split)


@cache
def images_at(dataset, split):
    warn(starting.missing_images(experiment, [(dataset, split)]))
    return str(experiment.images(dataset, split))


def shards_inputs(wildcards):
    """What shards are made of: images of ours; of a view its split's shards, and its classes.

    A user's folder is not watched.
    """
    split = split_of(wildcards)
    if not split.source.sharded:
        return [*shards_stamp(wildcards.dataset, split.of), *split.files()]
    if experiment.datasets[wildcards.dataset].bundled:
        return [f"{ROOT}/images/{wildcards.dataset}"]
    return []


def weights_file(wildcards):
    """Passed as a resource, not in `params`: weights that moved re-run nothing."""
    warn(starting.missing_weights(experiment, [wildcards.run]))
    return str(experiment.runs[wildcards.run].weights)


def interrupt(*_):
    """Ctrl-C: jobs save and end with an error, which is nothing to explain on three pages."""
    logger.addFilter(lambda record: False)
    print(
        "maect: interrupted: trainings save; the same command goes on from there",
        file=sys.stderr,
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)
    raise KeyboardInterrupt


def finish():
    """After the last job: where to look."""
    page = Path(ROOT, "report.html")
    if page.exists() and page.stat().st_mtime >= began:
        print(f"maect: the report is {page}; open it in a browser", file=sys.stderr)


def is_forced(job):
    """Whether the user wants it to compute: `-F`, `-R RULE` or `-R FILE`, and `-f` of a target."""
    asked_for = workflow.dag_settings
    names = {job.rule.name, *map(os.path.abspath, job.output)}

    def is_among(words):
        return not names.isdisjoint({*words, *map(os.path.abspath, words)})

    is_target = asked_for.forcetargets and is_among(asked_for.targets)
    return asked_for.forceall or is_target or is_among(asked_for.forcerun)


def start():
    """Before the first job; not when the Snakefile is read, since a dry run may look at anything.

    `workflow.dag.needrun_jobs` is the only way to ask Snakemake which jobs will run.
    """
    for given in workflow.resource_settings.overwrite_resources.values():
        account = str(given.get("slurm_account").raw).strip("'")
        if account.startswith("$") and os.path.expandvars(account) == account:
            stop(f"the profile's account is {account}, which is not set: export it")
    jobs = [
        starting.PendingJob(
            job.rule.name,
            dict(job.wildcards.items()),
            [*job.input, *job.output] if job.rule.shellcmd else [],
            Path(job.params.config) if "config" in job.params.keys() else None,
            is_forced(job),
        )
        for job in workflow.dag.needrun_jobs()
    ]
    for fault in starting.faults(experiment, jobs)[:1]:
        stop(fault)
    try:
        if reason := why_public(ROOT):
            stop(f"{reason}; or put `storage` into a folder of your own")
        ownership.enter_context(lock_folder(Path(ROOT), patience=15))
    except UserError as error:
        stop(error)
    if asked.changed:
        few = ", ".join(str(path.relative_to(ROOT)) for path in asked.changed[:3])
        more = f" and {len(asked.changed) - 3} more" if len(asked.changed) > 3 else ""
        print(
            f"maect: not of the settings and inputs that {experiment.file} asks for, and looked at "
            f"again: {few}{more}",
            file=sys.stderr,
        )
    starting.prepare(experiment, jobs)
    signal.signal(signal.SIGINT, interrupt)


def name_of(wildcards, page):
    """Name of a page of a kind."""
    return wildcards.page if page.folder else page.name
