# What all rules share: the experiment, its folders, and the inputs that stand for the files of jobs.
# The functions are in maect/experiment/pipeline.py.
import os
import re
import shlex
import sys
import time
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.logging import logger

# Import the maect that is installed, as the rules call it, not a folder beside the Snakefile.
sys.path.sort(key=str(workflow.basedir).__eq__)

try:
    from maect.core.errors import UserError
    from maect.core.owners import SAFE_PATH
    from maect.evaluate import PROTOCOLS
    from maect.experiment import pipeline, resolve
    from maect.experiment import start as starting
    from maect.experiment.pages import (
        PAGES,
        report_inputs,
        shown_evaluations,
    )
    from maect.experiment.pipeline import Asked
    from maect.experiment.profile import CLUSTER, on_devices
    from maect.experiment.schema import one_of
    from maect.launch.owner import SNAKEMAKE, lock_folder, this_process
    from maect.stages import STAGES
except ModuleNotFoundError as error:
    raise WorkflowError(
        f"no module {error.name}: install maect beside Snakemake (config/README.md)"
    ) from None

began = time.time()

# Rules run in the environment of Snakemake itself, and import nothing from the working folder.
# They name a conda environment only because Snakemake's lint asks for one.
shell.prefix(
    f"set -euo pipefail; export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH; "
)
os.environ[SAFE_PATH] = "1"
ENVIRONMENT = "../../envs/environment.yaml"

# Tell launchers which Snakemake they serve: if it dies, they leave their jobs running.
os.environ.setdefault(SNAKEMAKE, this_process())

experiment = pipeline.load_experiment(config)
asked = Asked(experiment)

if workflow.is_main_process:
    pipeline.check_targets(experiment, sys.argv)
    for note in starting.changed_images(experiment):
        pipeline.say(f"warning: {note}")

ROOT = str(experiment.root)
RUN = f"{ROOT}/runs/{{run}}"
LOGS = f"{ROOT}/logs"
BENCHMARKS = f"{ROOT}/benchmarks"


wildcard_constraints:
    run=one_of(experiment.runs),
    dataset=one_of(experiment.datasets),
    split=one_of(dict.fromkeys(split for _, split in experiment.splits)),


# The only output of a rule that computes is a stamp, because Snakemake deletes outputs before a job,
# and results take hours. Its inputs are its resolved file and the stamps of what it is made of.
# A job whose result is already what is asked for ends at once (maect/core/stamps.py).
def resolved(rule, pattern):
    resolved_file = pipeline.resolved_input(asked, rule, pattern)

    def joined(wildcards):
        join_handlers()
        return resolved_file(wildcards)

    return resolved_file if IS_MAIN else joined


def stamps(files):
    return pipeline.stamps(experiment, files)


def shards_stamp(dataset, split):
    return pipeline.shards_stamp(experiment, dataset, split)


def warn_in_dry_run(faults):
    if workflow.dryrun:
        for fault in faults:
            pipeline.say(f"warning: {fault}")


# Paths are resources, not `params`, so that moving images or weights re-runs nothing.
def image_folder(wildcards):
    split = wildcards.dataset, wildcards.split
    warn_in_dry_run(starting.missing_images(experiment, [split]))
    return str(experiment.images(*split))


def weights_file(wildcards):
    warn_in_dry_run(starting.missing_weights(experiment, [wildcards.run]))
    return str(experiment.runs[wildcards.run].weights)


def evaluation_inputs(wildcards):
    pair = wildcards.run, wildcards.evaluation
    warn_in_dry_run(starting.missing_lists(experiment, [pair]))
    return stamps(resolve.inputs_of_evaluation(experiment, *pair))


def name_of(wildcards, page):
    """Return the name of a page; without a folder, a kind has one page, of its own name."""
    return wildcards.page if page.folder else page.name


IS_MAIN = workflow.modifier.is_main_snakefile()
# Our names of the rules, by the names that a workflow gives them if it uses this one as a module.
OWN_NAMES = {
    workflow.modifier.modify_rulename(name): name for name in pipeline.rule_names()
}

# The lock of the results folder, held while this Snakemake runs; a second Snakemake is refused.
ownership = ExitStack()


def start():
    if workflow.touch:  # nothing is computed after this
        pipeline.say("--touch changes no result: stamps say which ones are current")
        return
    jobs = pipeline.pending_jobs(workflow, OWN_NAMES)
    profile = workflow.resource_settings.overwrite_resources.values()
    pipeline.check_jobs(experiment, jobs, profile)
    try:
        ownership.enter_context(lock_folder(Path(ROOT), patience=15))
        starting.prepare(experiment, jobs)
    except (UserError, OSError) as error:
        pipeline.fail(error)
    pipeline.end_quietly_at_ctrl_c(logger)


def finish():
    pipeline.say_where_the_report_is(experiment, began)


# Snakemake runs the handlers of the main workflow alone. If this one is a module, its handlers are
# added to those when Snakemake plans the first job.
@cache
def join_handlers():
    theirs = {
        key: workflow.globals.get(key, lambda: None) for key in ("onstart", "onsuccess")
    }

    def on_start(log):
        start()
        theirs["onstart"]()

    def on_success(log):
        finish()
        theirs["onsuccess"]()

    workflow.onstart(on_start)
    workflow.onsuccess(on_success)
