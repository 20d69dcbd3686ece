"""The jobs behind a list of commands: where each runs, for how long, and after which others."""

from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from maect.data.sources import find_source
from maect.experiment import Experiment
from maect.recipes.flops import encode_flops
from maect.stages import Training as Stage
from maect.tools.plan import work
from maect.tools.plan.nodes import fixed_nodes, training_nodes
from maect.tools.plan.speed import FP32, Device, measured

START = 60.0  # seconds until the first step: modules, imports, process group, state; assumed
REQUEUED = 120.0  # seconds for which SLURM holds back a job that was put back into the queue
STAGES = {"pretrain": "pretrain", "init-head": "head", "tune": "tune"}


@dataclass(frozen=True)
class Job:
    """One job of the cluster.

    Attributes:
        stage: pretrain, head, tune, features or the evaluation's protocol.
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


def make_plan(commands: Iterable[Namespace], experiment: Experiment, device: Device) -> Plan:
    """Price parsed `maect` commands (`maect.tools.plan.dag`), their `devices` already numbers."""
    plan = Plan()
    for options in commands:
        if options.command == "shard" and options.only == "index":
            _note_shards(plan, options)
        if options.command in STAGES:
            plan.jobs.append(_training(plan, options, experiment, device))
        elif options.command in ("features", "evaluate"):
            plan.jobs.append(_evaluation(plan, options, experiment, device))
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


def _note_shards(plan: Plan, options: Namespace) -> None:
    known, name = work.shards(options.out), f"{options.out.parent.name} {options.out.name}"
    if not find_source(options.kind).sharded:
        return
    if known.bytes is None:
        plan.unknown.add(f"bytes of {name}")
    else:
        plan.shard_bytes[name] = known.bytes


def _training(plan: Plan, options: Namespace, experiment: Experiment, device: Device) -> Job:
    run = experiment.runs[options.folder.name]
    settings, encoder = run.settings, run.encoder
    assert isinstance(settings, Stage)
    devices, stage = int(options.devices), STAGES[options.command]
    nodes = training_nodes(options.nodes, devices, settings, encoder)
    images = work.shards(options.shards).images
    found = measured(experiment.root, stage, run.size, encoder)
    left = 1 - work.part_done(options.folder)
    seconds, source = None, ""
    if images is None:
        plan.unknown.add(f"images of {run.dataset} train")
    elif found:
        seconds = left * images * settings.epochs / (found[0] * nodes * devices)
        source = f"measured in {found[1]}"
    else:
        flops = left * settings.flops_per_image(encoder) * images * settings.epochs
        seconds, source = flops / (device.rate * nodes * devices), device.source
    return Job(
        stage, run.name, nodes, devices, seconds, 60.0 * options.minutes, source,
        makes=options.folder, needs=(options.source,) if options.source else (),
        bytes=settings.state_bytes(encoder),
    )  # fmt: skip


def _evaluation(plan: Plan, options: Namespace, experiment: Experiment, device: Device) -> Job:
    run = experiment.runs[options.run.name]
    nodes, devices = fixed_nodes(options.nodes), int(options.devices)
    dataset = experiment.default_dataset

    def images(split: str) -> int:
        count = work.shards(experiment.shards(dataset, split)).images
        if count is None:
            raise KeyError(f"{dataset} {split}")
        return count

    stage = options.command
    seconds, source, left = None, "", 0
    try:
        exact, minutes = True, 0.0
        if options.command == "evaluate":
            stage, settings = experiment.evaluation(run.name, options.out.stem)
            flops = settings.flops(run.encoder, images)
            exact, minutes = settings.full_precision, settings.minutes
        else:
            dataset = options.shards.parent.name
            flops = encode_flops(run.encoder) * images(options.shards.name)
        if flops is None:
            seconds, source = 60 * minutes, "assumed"
        else:
            exact = exact and device.name != "cpu"
            seconds = flops / (device.rate * (FP32 if exact else 1) * nodes * devices)
            source = device.source
        if options.command == "features":
            left = work.feature_bytes(run.encoder, work.shards(options.shards).images or 0)
    except KeyError as error:
        plan.unknown.add(f"images of {error.args[0]}")
    given = ("train_features", "test_features", "probe", "clusters")
    inputs = [getattr(options, name, None) for name in given]
    needs = [path.with_suffix(".json") if path.parent.parent.name == "evaluations" else path
             for path in inputs if path]  # fmt: skip
    return Job(
        stage, f"{run.name} {options.out.stem}", nodes, devices, seconds,
        60.0 * options.minutes, source, makes=options.out, needs=(options.run, *needs), bytes=left,
    )  # fmt: skip
