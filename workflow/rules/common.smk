import os
import re
import shlex
import signal
import sys
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from snakemake.logging import logger

# Snakemake puts the Snakefile's folder first: the rules call the installed maect, and so it is here.
sys.path.sort(key=str(workflow.basedir).__eq__)

from maect import experiment as experiments
from maect.core.errors import UserError
from maect.core.kept import restore, tidy
from maect.core.owners import why_public
from maect.core.processes import SAFE_PATH
from maect.data import shard_name
from maect.data.sources import open_source
from maect.data.sources.view import check_classes
from maect.evaluate import PROTOCOLS
from maect.experiment import outdated, resolve
from maect.experiment import start as starting
from maect.experiment import working_folder
from maect.experiment.pages import PAGES, report_inputs
from maect.experiment.schema import fill_path, one_of
from maect.launch.owner import SNAKEMAKE, own, this_process
from maect.launch.resources import PROFILE, PROFILE_OF_TRAININGS
from maect.stages import STAGES

# Held while this Snakemake runs: a second one on the same results folder is refused.
ownership = ExitStack()

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
    number="[0-9]{6}",


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


def shard_index(dataset, split):
    return str(experiment.shards(dataset, split) / "index.json")


# Snakemake does not miss what lies between images and results that are there: targets name it.
LOST = starting.lost_shards(experiment)
LOST_SHARDS = [shard_index(*split) for split in LOST]
if workflow.is_main_process:
    for dataset, split in LOST:
        print(
            f"maect: the shards of {dataset} {split} are gone: they are made again",
            file=sys.stderr,
        )


# What is not what the file asks for, by what lies in the results folder: the memory of Snakemake, in
# the folder that one stands in, is not asked. It is forced where a target needs it: Snakemake has no
# other way to say that, and `--forcerun` would make it a target.
try:
    OUTDATED = outdated.outdated(experiment) if workflow.is_main_process else []
except UserError as error:
    stop(error)
# Shards that are finished a start does not make again: the warning above says what to do.
REMADE = [
    path
    for path in OUTDATED
    if path.name != "plan.json" or not path.with_name("index.json").exists()
]
if REMADE:
    few = ", ".join(str(path.relative_to(ROOT)) for path in REMADE[:3])
    more = f" and {len(REMADE) - 3} more" if len(REMADE) > 3 else ""
    print(
        f"maect: made by other settings, or of other files, than {experiment.file} asks for, and made "
        f"again where a target needs it: {few}{more}",
        file=sys.stderr,
    )


prepare_dag = workflow._prepare_dag


def prepare_and_force(*given, **named):
    """Make Snakemake's graph of jobs, in which these are forced."""
    prepare_dag(*given, **named)
    workflow.dag.forcefiles.update(map(str, OUTDATED))


workflow._prepare_dag = prepare_and_force


def split_of(wildcards):
    return experiment.datasets[wildcards.dataset].splits[wildcards.split]


def images_of(wildcards):
    """The image folder if a rule of this workflow makes it; a user's folder is not watched."""
    if experiment.datasets[wildcards.dataset].bundled:
        return f"{ROOT}/images/{wildcards.dataset}"
    return []


def image_folder(wildcards):
    """Passed as a resource, not in `params`: images that moved re-run nothing."""
    return images_at(wildcards.dataset, wildcards.split)


@cache  # a split may have a thousand shards
def images_at(dataset, split):
    warn(starting.missing_images(experiment, [(dataset, split)]))
    return str(experiment.images(dataset, split))


def parts_of(wildcards):
    """What an index is made of: plan and tars; for a view the index of its split, and its classes."""
    split = split_of(wildcards)
    if not split.source.sharded:
        return [shard_index(wildcards.dataset, split.of), *split.files()]
    folder = experiment.shards(wildcards.dataset, wildcards.split)
    if split.source.in_place:
        return f"{folder}/plan.json"
    tars = [shard_name(wildcards.split, number) for number in range(split.shards)]
    return [f"{folder}/{name}" for name in ("plan.json", *tars)]


def weights_file(wildcards):
    """Passed as a resource, not in `params`: weights that moved re-run nothing."""
    warn(starting.missing_weights(experiment, [wildcards.run], again=True))
    return str(experiment.runs[wildcards.run].weights)


def evaluation_file(wildcards):
    pair = wildcards.run, wildcards.evaluation
    warn(starting.missing_lists(experiment, [pair]))
    return f"{ROOT}/evaluations/{wildcards.run}/{wildcards.evaluation}.yaml"


def interrupt(*_):
    """Ctrl-C: jobs save and end with an error, which is nothing to explain on three pages."""
    logger.addFilter(lambda record: False)
    print(
        "maect: interrupted: trainings save; the same command goes on from there",
        file=sys.stderr,
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)
    raise KeyboardInterrupt


def give_back():
    """After an interruption or a failure: what was finished before is there again."""
    restore(Path(ROOT))
    tidy(Path(ROOT))


def finish():
    """After the last job: where to look."""
    tidy(Path(ROOT))
    page = Path(ROOT, "report.html")
    made = {job.rule.name for job in workflow.dag.jobs}
    if "report_html" in made and page.exists():
        print(f"maect: the report is {page}; open it in a browser", file=sys.stderr)


def is_forced(job):
    """Whether the user wants it to run: Snakemake forces what was interrupted, too.

    `-f` asks for the targets alone, though it holds for all that is run for them.
    """
    asked = workflow.dag_settings
    called = {job.rule.name, *map(os.path.abspath, job.output)}
    named = {*asked.forcerun, *map(os.path.abspath, asked.forcerun)}
    target = asked.forcetargets and job in workflow.dag.targetjobs
    asked_for = asked.forceall or target or called & named
    return bool(workflow.dag.reason(job).forced and asked_for)


def start():
    """Before the first job; not when the Snakefile is read, since a dry run may look at anything.

    The jobs that are to run are those of `workflow.dag`, an internal of Snakemake, which has no
    other way to ask for them.
    """
    for asked in workflow.resource_settings.overwrite_resources.values():
        account = str(asked.get("slurm_account").raw).strip("'")
        if account.startswith("$") and os.path.expandvars(account) == account:
            stop(f"the profile's account is {account}, which is not set: export it")
    jobs = [
        starting.PendingJob(
            job.rule.name,
            dict(job.wildcards.items()),
            [*job.input, *job.output] if job.rule.shellcmd else [],
            [Path(file) for file in job.output],
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
        ownership.enter_context(own(Path(ROOT), patience=15))
    except UserError as error:
        stop(error)
    starting.prepare(experiment, jobs)
    signal.signal(signal.SIGINT, interrupt)


def name_of(wildcards, page):
    """Name of a page of a kind."""
    return wildcards.page if page.folder else page.name
