import os
import re
import signal
import sys
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from snakemake.logging import logger

from maect import experiment as experiments
from maect.core.errors import UserError
from maect.core.files import read_mapping, write_record
from maect.core.kept import forget, keep, tidy
from maect.data import shard_name
from maect.data.sources import open_source
from maect.data.sources.view import check_classes
from maect.evaluate import PROTOCOLS
from maect.experiment import resolve
from maect.experiment.load import TAKEN, index_digest
from maect.experiment.schema import fill_path
from maect.launch.owner import SNAKEMAKE, own, this_process
from maect.launch.resources import PROFILE, PROFILE_OF_TRAININGS
from maect.report import registry
from maect.stages import STAGES

# Held while this Snakemake runs: a second one on the same results folder is refused.
ownership = ExitStack()

# The rules call the `maect` of the environment that Snakemake itself runs in.
shell.prefix(f"set -euo pipefail; export PATH={Path(sys.executable).parent}:$PATH; ")

# Launchers leave their jobs running once this process is gone. (A subprocess of it reads this, too.)
os.environ.setdefault(SNAKEMAKE, this_process())

# For those who let Snakemake make the environment (--software-deployment-method conda).
ENVIRONMENT = "../../envs/environment.yaml"


def stop(message):
    """One line, no traceback: the user can fix this."""
    print(f"maect: {message}", file=sys.stderr)
    raise SystemExit(2)


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


def one_of(names):
    """A wildcard constraint: exactly these names, or nothing at all."""
    return "|".join(map(re.escape, names)) or "(?!)"


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
    for note in resolve.changed_images(experiment):
        print(f"maect: warning: {note}", file=sys.stderr)


def shard_index(dataset, split):
    return str(experiment.shards(dataset, split) / "index.json")


# Snakemake does not miss what lies between images and results that are there: targets name it.
LOST = resolve.lost_shards(experiment)
LOST_SHARDS = [shard_index(*split) for split in LOST]
if workflow.is_main_process:
    for dataset, split in LOST:
        print(
            f"maect: the shards of {dataset} {split} are gone: they are made again",
            file=sys.stderr,
        )


def split_of(wildcards):
    return experiment.datasets[wildcards.dataset].splits[wildcards.split]


def source_arguments(wildcards):
    return split_of(wildcards).arguments(experiment.datasets[wildcards.dataset].pixels)


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
    warn(resolve.missing_images(experiment, [(dataset, split)]))
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


def run_digest(wildcards):
    return resolve.run_config(experiment, wildcards.run).digest


def weights_file(wildcards):
    """Passed as a resource, not in `params`: weights that moved re-run nothing."""
    warn(resolve.missing_weights(experiment, [wildcards.run]))
    return str(experiment.runs[wildcards.run].weights)


def evaluation_digest(wildcards):
    pair = wildcards.run, wildcards.evaluation
    warn(resolve.missing_lists(experiment, [pair]))
    return resolve.evaluation_config(experiment, *pair).digest


def resize_of(wildcards):
    """How evaluations resize a dataset's images, as an argument."""
    resize = resolve.resize(experiment, wildcards.run, wildcards.dataset)
    return f"--resize {resize}" if resize else ""


def stated_resize(wildcards):
    """The number itself, passed as a resource: where nothing says one, features are not made again."""
    return resolve.resize_stated(experiment, wildcards.run, wildcards.dataset)


def precision_of(wildcards):
    """In which precision features are computed, as an argument."""
    precision = experiment.spec.features
    return "" if precision == "fp32" else f"--precision {precision}"


def resolved(job):
    """All that a job is told, or None where its command line says it."""
    name, given = job.rule.name, job.wildcards
    if name in PROTOCOLS:
        return resolve.evaluation_config(experiment, given.run, given.evaluation)
    if name in STAGES:
        return resolve.run_config(experiment, given.run)
    if name in ("table", "figure"):
        return resolve.shown_config(experiment, given[0], figure=name == "figure")
    pages = dict(
        claims=resolve.claims_config,
        images=resolve.images_config,
        summary=resolve.summary_config,
    )
    return pages[name](experiment) if name in pages else None


def interrupt(*_):
    """Ctrl-C: jobs save and end with an error, which is nothing to explain on three pages."""
    logger.addFilter(lambda record: False)
    tidy(Path(ROOT))
    print(
        "maect: interrupted: trainings save; the same command goes on from there",
        file=sys.stderr,
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)
    raise KeyboardInterrupt


def finish():
    """After the last job: where to look."""
    tidy(Path(ROOT))
    page = Path(ROOT, "report.html")
    made = {job.rule.name for job in workflow.dag.jobs}
    if "report_html" in made and page.exists():
        print(f"maect: the report is {page}; open it in a browser", file=sys.stderr)


LOOKS_FIRST = {
    *(name for name, stage in STAGES.items() if stage.trains),
    *PROTOCOLS,
    *("features", "plan_shards", "write_shard", "index_shards"),
}


def start():
    """Before the first job: refuse what would fail, own the folder, write the resolved files.

    Not when the Snakefile is read, since a dry run may look at anything. The jobs that are to run
    are those of `workflow.dag`, an internal of Snakemake, which has no other way to ask for them.
    """
    jobs = list(workflow.dag.needrun_jobs())

    def those_of(rule, *wildcards):
        return sorted(
            tuple(job.wildcards[w] for w in wildcards)
            for job in jobs
            if job.rule.name == rule
        )

    planned = those_of("plan_shards", "dataset", "split")
    commands = [job for job in jobs if job.rule.shellcmd]  # others only name files
    files = [str(file) for job in commands for file in (*job.input, *job.output)]
    faults = [
        *resolve.other_shards(
            experiment,
            [
                pair
                for pair in resolve.shards_of(experiment, files)
                # One that is planned again before it was finished is refused by its plan.
                if pair not in planned or Path(shard_index(*pair)).exists()
            ],
        ),
        *resolve.missing_images(experiment, planned),
        *resolve.missing_weights(
            experiment,
            [run for name in STAGES for (run,) in those_of(name, "run")],
        ),
        *resolve.missing_lists(
            experiment,
            [
                pair
                for name in PROTOCOLS
                for pair in those_of(name, "run", "evaluation")
            ],
        ),
    ]
    for fault in faults[:1]:
        stop(fault)
    for asked in workflow.resource_settings.overwrite_resources.values():
        account = str(asked.get("slurm_account").raw)
        if account.startswith("$") and os.path.expandvars(account) == account:
            stop(f"the profile's account is {account}, which is not set: export it")
    try:
        ownership.enter_context(own(Path(ROOT), patience=15))
    except UserError as error:
        stop(error)
    resolve.refresh_runs(experiment)
    tidy(Path(ROOT))
    for job in jobs:
        if told := resolved(job):
            told.write(job.params.config)
        # What Snakemake deletes now, the job may find to be what it is asked for.
        if job.rule.name in LOOKS_FIRST:
            outputs = [Path(file) for file in job.output]
            (forget if workflow.dag.reason(job).forced else keep)(outputs)
    for split in planned:
        folder = experiment.shards(*split)
        given = experiment.datasets[split[0]].splits[split[1]]
        # Beside a finished index it says what that was made of, which stays so if this plan fails.
        if given.images is not None and not (folder / "index.json").exists():
            asked = experiment.asked_of(*split) | {TAKEN: ""}
            write_record(folder / "asked.json", asked)
    for dataset, split in experiment.splits:
        folder = experiment.shards(dataset, split)
        if Path(ROOT) not in folder.parents:
            print(
                f"maect: {dataset} {split} is sharded already: {folder}",
                file=sys.stderr,
            )
            # What these were made of is from now on what this experiment asks for.
            own_folder = experiment.own_shards(dataset, split)
            asked = read_mapping(folder / "asked.json") | {TAKEN: index_digest(folder)}
            write_record(own_folder / "asked.json", asked)
    signal.signal(signal.SIGINT, interrupt)
