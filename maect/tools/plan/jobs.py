"""What each job that is left takes: where it runs, for how long, and after which others."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from maect.experiment import Experiment
from maect.experiment.resolve import features_file, read_by_evaluation, read_by_run
from maect.launch.devices import count_devices
from maect.launch.nodes import fixed_nodes, training_nodes
from maect.recipes.flops import encode_flops
from maect.stages import STAGES, Training
from maect.tools.plan import work
from maect.tools.plan.dag import RuleJob
from maect.tools.plan.speed import FP32, Device, measured

START = 60.0  # seconds until the first step: modules, imports, process group, state; assumed
REQUEUED = 120.0  # seconds for which SLURM holds back a job that was put back into the queue


@dataclass(frozen=True)
class Job:
    """One job of the cluster.

    Attributes:
        stage: of a training; else features, or the evaluation's protocol.
        name: the run, or run and evaluation.
        seconds: of computing, or None where the number of images is not known.
        limit: wall limit of one piece in seconds.
        source: where `seconds` is from.
        makes, needs: files that say what comes after what.
        bytes: what it leaves on disk.
    """

    stage: str
    name: str
    nodes: int
    devices: int
    seconds: float | None
    limit: float
    source: str
    makes: Path
    needs: tuple[Path, ...] = ()
    bytes: int = 0

    @property
    def pieces(self) -> int:
        """Jobs between wall limits that it takes."""
        useful = self.limit - max(20.0, min(300.0, self.limit / 10)) - START
        return max(1, -int(-(self.seconds or 0.0) // useful))

    @property
    def wall(self) -> float:
        """Seconds from its start to its end, were there no waiting in the queue."""
        return (self.seconds or 0.0) + self.pieces * START + (self.pieces - 1) * REQUEUED

    @property
    def node_hours(self) -> float:
        """Node hours that it is billed for."""
        return self.nodes * ((self.seconds or 0.0) + self.pieces * START) / 3600


@dataclass
class Plan:
    """All that is left to do."""

    jobs: list[Job] = field(default_factory=list)
    shard_bytes: dict[str, int] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    others: int = 0
    """Commands on the login node: shards, tables, figures."""


def make_plan(jobs: Iterable[RuleJob], experiment: Experiment, device: Device) -> Plan:
    """Price the jobs of an experiment that Snakemake would run."""
    plan = Plan()
    for job in jobs:
        given = job.wildcards
        if job.rule == "index_shards":
            _note_shards(plan, experiment, given["dataset"], given["split"])
        if "evaluation" in given:
            plan.jobs.append(_evaluation(plan, job, experiment, device))
        elif job.rule == "features":
            plan.jobs.append(_features(plan, job, experiment, device))
        elif job.rule in STAGES:
            plan.jobs.append(_training(plan, job, experiment, device))
        else:
            plan.others += 1
    return plan


def critical_path(jobs: list[Job]) -> list[Job]:
    """The jobs that the last one waits for longest, first to last."""
    by_file = {job.makes: job for job in jobs}
    found: dict[Path, list[Job]] = {}

    def path_to(file: Path) -> list[Job]:
        if file not in by_file:
            return []
        if file not in found:
            before = max(map(path_to, by_file[file].needs), key=wall, default=[])
            found[file] = [*before, by_file[file]]
        return found[file]

    return max(map(path_to, by_file), key=wall, default=[])


def wall(jobs: Iterable[Job]) -> float:
    """Seconds of jobs one after another."""
    return sum(job.wall for job in jobs)


def _note_shards(plan: Plan, experiment: Experiment, dataset: str, split: str) -> None:
    if not experiment.datasets[dataset].splits[split].source.sharded:
        return
    known = work.shards(experiment.shards(dataset, split))
    if known.bytes is None:
        plan.unknown.add(f"bytes of {dataset} {split}")
    else:
        plan.shard_bytes[f"{dataset} {split}"] = known.bytes


def _training(plan: Plan, job: RuleJob, experiment: Experiment, device: Device) -> Job:
    run, resources = experiment.runs[job.wildcards["run"]], job.resources
    stage, encoder = run.settings, run.encoder
    assert isinstance(stage, Training)
    devices, step = devices_of(resources), stage.flops_per_image(encoder) * stage.batch_size
    nodes = training_nodes(str(resources["nodes"]), devices, stage.batch_size, step)
    shards = work.shards(experiment.shards(run.dataset, "train"))
    found = measured(experiment.root, stage.name, run.size, encoder)
    left = 1 - work.part_done(experiment.folder(run.name))
    seconds, source = None, ""
    if shards.images is None:
        plan.unknown.add(f"images of {run.dataset} train")
    else:
        images = left * stage.images_of(shards.images, shards.classes) * stage.epochs
        if found:
            seconds, source = images / (found[0] * nodes * devices), f"measured in {found[1]}"
        else:
            flops = images * stage.flops_per_image(encoder)
            seconds, source = flops / (device.rate * nodes * devices), device.source
    return Job(
        stage.name, run.name, nodes, devices, seconds, 60.0 * float(resources["runtime"]), source,
        makes=experiment.folder(run.name), needs=_makers(read_by_run(experiment, run.name)),
        bytes=stage.state_bytes(encoder),
    )  # fmt: skip


def _features(plan: Plan, job: RuleJob, experiment: Experiment, device: Device) -> Job:
    run, dataset, split = (job.wildcards[name] for name in ("run", "dataset", "split"))
    encoder = experiment.runs[run].encoder
    images = work.shards(experiment.shards(dataset, split)).images
    if images is None:
        plan.unknown.add(f"images of {dataset} {split}")
    flops = None if images is None else images * encode_flops(encoder)
    makes = features_file(experiment, run, dataset, split)
    return _on_devices(
        job, f"{run} {makes.stem}", flops, True, device, makes=makes,
        needs=(experiment.folder(run),), bytes=work.feature_bytes(encoder, images or 0),
    )  # fmt: skip


def _evaluation(plan: Plan, job: RuleJob, experiment: Experiment, device: Device) -> Job:
    run, name = job.wildcards["run"], job.wildcards["evaluation"]
    settings, dataset = experiment.evaluation(run, name), experiment.default_dataset

    def images(split: str) -> int:
        count = work.shards(experiment.shards(dataset, split)).images
        if count is None:
            raise KeyError(f"{dataset} {split}")
        return count

    more = {
        "makes": experiment.root / "evaluations" / run / f"{name}.json",
        "needs": (experiment.folder(run), *_makers(read_by_evaluation(experiment, run, name))),
    }
    flops, title, exact = None, f"{run} {name}", settings.full_precision
    try:
        flops = settings.flops(experiment.runs[run].encoder, images)
    except KeyError as error:
        plan.unknown.add(f"images of {error.args[0]}")
        return _on_devices(job, title, None, exact, device, **more)
    if flops is not None:
        return _on_devices(job, title, flops, exact, device, **more)
    priced = _on_devices(job, title, 0.0, exact, device, **more)
    return replace(priced, seconds=60 * settings.minutes, source="assumed")


def _on_devices(
    job: RuleJob, name: str, flops: float | None, exact: bool, device: Device, **more: Any
) -> Job:
    """A job that encodes images; `exact` in float32, which devices other than CPUs do slower."""
    nodes, devices = fixed_nodes(str(job.resources["nodes"])), devices_of(job.resources)
    rate = device.rate * (FP32 if exact and device.name != "cpu" else 1) * nodes * devices
    seconds = None if flops is None else flops / rate
    limit = 60.0 * float(job.resources["runtime"])
    return Job(job.rule, name, nodes, devices, seconds, limit, device.source, **more)


def devices_of(resources: Mapping[str, Any]) -> int:
    """Devices a node of a job."""
    return count_devices(str(resources["devices"]))


def _makers(files: Iterable[Path]) -> tuple[Path, ...]:
    """What the jobs that make these files are known by (`Job.makes`)."""
    return tuple(
        dict.fromkeys(
            file.parent
            if file.parent.parent.name == "runs"
            else file.with_suffix(".json")
            if file.parent.parent.name == "evaluations"
            else file
            for file in files
        )
    )
