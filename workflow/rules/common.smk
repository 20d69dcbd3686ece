import itertools
import os
import re
import sys
from contextlib import ExitStack
from pathlib import Path

from maect import experiment as experiments
from maect.data import shard_name
from maect.data.sources import open_source
from maect.data.sources.view import check_classes
from maect.core.errors import UserError
from maect.experiment.schema import fill_path, flatten, yaml_scalar
from maect.launch.owner import SNAKEMAKE, own, this_process
from maect.report import registry

# Held while this Snakemake runs: a second one on the same results folder is refused.
ownership = ExitStack()

# The rules call `maect`: the one of the environment that Snakemake itself runs in.
shell.prefix(f"set -euo pipefail; export PATH={Path(sys.executable).parent}:$PATH; ")

# Launchers let go of their jobs once this process is gone. (A subprocess of it reads this, too.)
os.environ.setdefault(SNAKEMAKE, this_process())

# For those who let Snakemake make the environment (--software-deployment-method conda).
ENVIRONMENT = "../../envs/environment.yaml"


def stop(message):
    """One line, no traceback: the user can fix this."""
    print(f"maect: {message}", file=sys.stderr)
    raise SystemExit(2)


try:
    changes = {key: value for key, value in config.items() if key != "experiment"}
    experiment = experiments.load(config.get("experiment", "paper"), **changes)
except UserError as error:
    stop(error)


def check_views():
    """Look for the classes of views before anything is sharded."""
    for name, dataset in experiment.datasets.items():
        for view in dataset.splits.values():
            if not view.source.sharded:
                check_classes(
                    fill_path(view.classes),
                    experiment.shards(name, view.of),
                    open_source(dataset.splits[view.of].kind, experiment.images(name, view.of)),
                )


try:
    check_views()
except UserError as error:
    stop(f"{experiment.file}: {error}")

ROOT = str(experiment.root)
RUN = f"{ROOT}/runs/{{run}}"
EVALUATION = f"{ROOT}/evaluations/{{run}}"
LOGS = f"{ROOT}/logs"
BENCHMARKS = f"{ROOT}/benchmarks"
DATASET = experiment.default_dataset
ASKED = set(experiment.evaluations)
warned = set()


def shown(names, figure):
    """Of tables or figures those that have anything to show, where less is evaluated than the
    file asks for."""
    return [
        name
        for name in names
        if not experiment.partial
        or registry.can_show(name, figure, experiment.rows(name), ASKED)
    ]


FIGURES = shown(experiment.figures, True)
# A table of a figure's name has the numbers behind it, for the claims.
TABLES = [
    *shown(experiment.tables, False),
    *(name for name in FIGURES if name in registry.TABLES),
]

# Where and how a command runs: defaults for one machine, set by the profile with `set-resources`.
# Read in the shell command, not in `params`, so that changing them re-runs nothing.
CLUSTER = dict(
    cluster="local",
    nodes=1,
    devices=1,
    cpus_per_task="auto",
    mem_mb=0,
    runtime=1440,
    slurm_partition="",
    slurm_account="",
    slurm_extra="",
    setup="",
    save_every_minutes=10,
    stage_to="",
)


def on_devices(command):
    """The shell command that runs a `maect` command where the profile says."""
    return (
        f"{command} --cluster {{resources.cluster}} --nodes {{resources.nodes}}"
        " --devices {resources.devices} --cpus {resources.cpus_per_task}"
        " --memory-mb {resources.mem_mb} --minutes {resources.runtime}"
        " --partition={resources.slurm_partition:q} --account={resources.slurm_account:q}"
        " --sbatch={resources.slurm_extra:q} --setup={resources.setup:q} --log {log:q}"
    )


def one_of(names):
    """A wildcard constraint: exactly these names, or nothing at all."""
    return "|".join(map(re.escape, names)) or "(?!)"


def run_of(wildcards):
    return experiment.runs[wildcards.run]


def shard_index(dataset, split):
    return str(experiment.shards(dataset, split) / "index.json")


def resize_of(dataset):
    """How evaluations resize a dataset's images, as an argument."""
    resize = experiment.datasets[dataset].resize
    return f"--resize {resize}" if resize else ""


def evaluations_with(*protocols):
    """Names of the evaluations of these protocols: themselves, and their variants."""
    return [
        name for name, protocol in experiment.protocols.items() if protocol in protocols
    ]


def protocol_of(wildcards):
    return experiment.protocols[wildcards.evaluation]


def settings_of(wildcards):
    return experiment.evaluation(wildcards.run, wildcards.evaluation)[1]


def protocol_arguments(wildcards):
    """The settings that differ from the protocol's defaults, as arguments."""
    warn(experiment.missing_lists([(wildcards.run, wildcards.evaluation)]))
    changed = settings_of(wildcards).model_dump(mode="json", exclude_defaults=True)
    return [
        p
        for key, value in flatten(changed)
        for p in ("--set", f"{key}={yaml_scalar(value)}")
    ]


def results_of(runs, names):
    """Result files of the evaluations that the experiment asks for, among runs and names."""
    return [
        f"{ROOT}/evaluations/{run}/{name}.json"
        for run, name in experiment.evaluations
        if run in runs and name in names
    ]


def images_of(wildcards):
    """The image folder if a rule of this workflow makes it; a user's folder is not watched."""
    if experiment.datasets[wildcards.dataset].kind == "digits":
        return f"{ROOT}/images/{wildcards.dataset}"
    return []


def image_folder(wildcards):
    """Passed as a resource, not in `params`: images that moved re-run nothing."""
    split = wildcards.dataset, wildcards.split
    warn(experiment.missing_images([split]))
    return str(experiment.images(*split))


def weights_file(wildcards):
    """Likewise, the checkpoint that a run imports."""
    warn(experiment.missing_weights([wildcards.run]))
    return str(run_of(wildcards).weights)


def warn(faults):
    """In a dry run: what a real one would refuse, each once."""
    for fault in faults:
        if workflow.dryrun and fault not in warned:
            warned.add(fault)
            print(f"maect: warning: {fault}", file=sys.stderr)


def missing():
    """What the jobs that are to run would not find."""
    jobs = list(workflow.dag.needrun_jobs())
    splits = {
        (job.wildcards.dataset, job.wildcards.split)
        for job in jobs
        if job.rule.name == "plan_shards"
    }
    imports = {job.wildcards.run for job in jobs if job.rule.name == "import_weights"}
    evaluations = {
        (job.wildcards.run, job.wildcards.evaluation)
        for job in jobs
        if hasattr(job.wildcards, "evaluation")
    }
    return [
        *experiment.missing_images(sorted(splits)),
        *experiment.missing_weights(sorted(imports)),
        *experiment.missing_lists(sorted(evaluations)),
    ]


def split_of(wildcards):
    return experiment.datasets[wildcards.dataset].splits[wildcards.split]


def parts_of(wildcards):
    """What an index is made of: plan and tars; for a view the whole's index, and its classes."""
    split = split_of(wildcards)
    if not split.source.sharded:
        return [shard_index(wildcards.dataset, split.of), *split.files()]
    folder = experiment.shards(wildcards.dataset, wildcards.split)
    tars = [shard_name(wildcards.split, number) for number in range(split.shards)]
    return [f"{folder}/{name}" for name in ("plan.json", *tars)]


def source_files(wildcards):
    """What a stage reads of the run it starts from."""
    source = run_of(wildcards).source
    names = ["encoder.safetensors", "run.json"]
    # Only some pre-trainings leave a head, so that it is no output of their rule; run.json is last.
    if experiment.runs[source].stage in ("head", "tune"):
        names.append("head.safetensors")
    return [f"{ROOT}/runs/{source}/{name}" for name in names]


def features_of(split):
    """Input function: the features of an evaluation's train or test split."""
    return lambda w: (
        f"{ROOT}/features/{w.run}/{DATASET}-{getattr(settings_of(w), split)}.safetensors"
    )


def shards_of(split):
    """Input function: the shard index of an evaluation's train or test split."""
    return lambda w: shard_index(DATASET, getattr(settings_of(w), split))


def left_by(wildcards, setting):
    """What the evaluation that a setting names left beside its JSON."""
    name = getattr(settings_of(wildcards), setting)
    return f"{ROOT}/evaluations/{wildcards.run}/{name}.safetensors"


def run_records(names):
    """Completion records of runs and of all that they start from."""
    return [f"{ROOT}/runs/{name}/run.json" for name in experiment.behind(names)]


def runs_in(*shown):
    """The runs in the lines of tables and figures."""
    return [
        run for name in shown for _, _, runs in experiment.rows(name) for run in runs
    ]


def results_in(shown, needs):
    """Result files that a table or figure shows, of those that the experiment asks for.

    `needs` gives the evaluations of a line by its method.
    """
    return [
        f"{ROOT}/evaluations/{run}/{name}.json"
        for _, method, runs in experiment.rows(shown)
        for run in runs
        for name in needs(method)
        if (run, name) in ASKED
    ]


def rows_of(*shown):
    """The lines of tables and figures as arguments: ARCHITECTURE:METHOD:RUN[,RUN]."""
    rows = dict.fromkeys(
        f"{size}:{method}:{','.join(runs)}"
        for name in shown
        for size, method, runs in experiment.rows(name)
    )
    return [part for row in rows for part in ("--row", row)]


def classes_of(figure):
    """The index that names the classes a figure shows, if it shows any."""
    shown = registry.FIGURES[figure]
    for _, method, runs in experiment.rows(figure) if shown.names_classes else ():
        for run, name in itertools.product(runs, shown.reads(method)):
            if (run, name) in ASKED:
                split = experiment.evaluation(run, name)[1].test_split
                return shard_index(DATASET, split)
    return []


wildcard_constraints:
    run=one_of(experiment.runs),
    dataset=one_of(experiment.datasets),
    split="[a-z0-9_]+",
    number="[0-9]{6}",


onstart:
    # Here and not on reading, since a dry run may look at anything.
    for fault in missing()[:1]:
        stop(fault)
    for asked in workflow.resource_settings.overwrite_resources.values():
        account = str(asked.get("slurm_account").raw)
        if account.startswith("$") and os.path.expandvars(account) == account:
            stop(f"the profile's account is {account}, which is not set: export it")
    try:
        ownership.enter_context(own(Path(ROOT), patience=15))
    except UserError as error:
        stop(error)
