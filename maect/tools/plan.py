"""`maect plan`: where each job that is left runs, for how long, and after which others."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from maect.core.errors import UserError
from maect.core.files import seek_record
from maect.core.resources import Resources, count_devices, fixed_nodes
from maect.data.sources import open_source
from maect.experiment import Experiment, resolve
from maect.experiment import start as starting
from maect.paper import read_paper
from maect.recipes import Encoder
from maect.recipes.cost import encode_flops, gpu_memory, peak_flops, relative_speed
from maect.recipes.settings import Computing
from maect.records import RunRecord, lineage
from maect.stages import STAGES, Training, recorded
from maect.stages.pretrain import Pretrain
from maect.stages.tune import Tune
from maect.tools.train import training_nodes

IMAGENET_VAL = 50_000  # images, which protocols without operations state their minutes for
LEAST = 10.0  # seconds of any other job that is no training; assumed
START = 60.0  # seconds until the first step: modules, imports, process group, state; assumed
START_HERE = 15.0  # likewise on one machine
SAMPLES = 100  # images whose size is read
REQUEUED = 120.0  # seconds for which SLURM holds back a job that was put back into the queue
UTILISATION = 0.35
# Images/s by precision, in those of bfloat16: ViT-L's features on an H200 (docs/evaluation.md).
SPEEDS = {"bf16": 1.0, "tf32": 0.12 / 0.23, "fp32": 0.12}
TUNED_BEST = (0.25, 0.5)
"""Parts of a model's operations for head and tuning that did best on CIFAR-10 (results page
`same_operations`)."""
CPU_RATE = 2e10  # FLOP/s of a CPU process of a few cores in PyTorch, where there is no GPU: a guess
# Numbers of images and bytes of archives, by data set and split.
KNOWN = read_paper("datasets", dict[str, dict[str, dict[str, int]]])


@dataclass(frozen=True)
class RuleJob:
    """A job that Snakemake would run: its rule, inputs and resources."""

    rule: str
    wildcards: dict[str, str]
    resources: dict[str, Any]


@dataclass(frozen=True)
class SplitFacts:
    """Knowledge of a split: an index, a plan, a publication, or nothing (None)."""

    images: int | None
    bytes: int | None
    written: bool
    classes: int = 1000
    """ImageNet's, where they are not known."""


def shards_of(folder: Path) -> SplitFacts:
    """Read the index of `shards/DATASET/SPLIT`."""
    index = seek_record(folder / "index.json")
    plan = seek_record(folder / "plan.json")
    if index:
        size = sum(shard["size"] for shard in index.get("shards", []))
        return SplitFacts(index["n"], size, True, len(index.get("class_names", [])) or 1000)
    dataset = folder.parent.name
    split = folder.name
    images = plan.get("n") or KNOWN["images"].get(dataset, {}).get(split)
    return SplitFacts(images, KNOWN["bytes"].get(dataset, {}).get(split), False)


def listed(experiment: Experiment, dataset: str, split: str) -> SplitFacts | None:
    """Count the images of a split that is not planned yet; its bytes by some of them.

    None where they cannot be listed: sharding will say why.
    """
    from maect.data.shard_plan import plan_shards

    given = experiment.datasets[dataset].splits[split]
    images = experiment.images(dataset, split)
    if given.images is None or not given.source.sharded:
        return None
    try:
        config = experiment.shards_config(dataset, split)
        source = open_source(config.kind, images, config.labels, config.pixels)
        entries = source.listing().entries
        some = [len(source.read(entry)) for entry in entries[:: len(entries) // SAMPLES + 1]]
        plan = plan_shards(images, config.kind, Path(split), config.shards, **config.options).record
    except (UserError, OSError):
        return None
    size = plan["n"] * sum(some) // len(some)
    return SplitFacts(plan["n"], size, False, len(plan["class_names"]) or 1000)


def feature_bytes(encoder: Encoder, images: int, blocks: int = 1) -> int:
    """Return the bytes of a features file: float32, of `blocks` blocks, and labels."""
    return images * (4 * encoder.width * blocks + 8)


@dataclass(frozen=True)
class Device:
    """Device of one rank: its driver's name (A100, cpu), and the part of its peak reached."""

    name: str
    utilisation: float = UTILISATION

    @property
    def rate(self) -> float:
        """FLOP/s of a training in bfloat16; UserError if the device's peak is not known."""
        if self.name == "cpu":
            return CPU_RATE
        peak = peak_flops(self.name)
        if peak is None:
            raise UserError(f"--device {self.name}: its peak is not known; name one like A100")
        return peak * self.utilisation

    @property
    def source(self) -> str:
        """Return where `rate` is from, for people."""
        if self.name == "cpu":
            return f"operations at {CPU_RATE / 1e9:.0f} GFLOP/s a process"
        return f"operations at {self.utilisation:.0%} of an {self.name}'s peak"

    def together(self, processes: int) -> float:
        """FLOP/s of this many processes."""
        return self.rate * processes

    def images_per_second(self, stage: Training, encoder: Encoder, processes: int = 1) -> float:
        """Speed of a training on this many processes."""
        return self.together(processes) / stage.flops_per_image(encoder)


def measured(
    root: Path, stage: Training, encoder: Encoder, on_cpu: bool
) -> tuple[float, str] | None:
    """Return the measured images/s of one device in a stage, and its source for people.

    That of the finished run with the same encoder whose images take the most similar operations:
    other views or frozen blocks are priced in proportion. A CPU's speed is not taken for a GPU's,
    nor a GPU's for a CPU's.
    """
    found = []
    for folder in sorted(root.glob("runs/*")):
        record = RunRecord.find(folder)
        if record is None or record.stage != stage.name or record.encoder != encoder:
            continue
        if {one.get("threads") is not None for one in record.attempts} != {on_cpu}:
            continue
        if record.images_per_second and record.world_size:
            speed = record.images_per_second / record.world_size
            source = f"{RunRecord.path(folder)} on {record.attempts[-1]['device']}"
            with suppress(UserError):  # of another version
                work = recorded(record).flops_per_image(encoder) / stage.flops_per_image(encoder)
                found.append((work, speed, source))
    if not found:
        return None
    work, speed, source = min(found, key=lambda one: abs(one[0] - 1))
    return work * speed, source


@dataclass(frozen=True)
class PlannedJob:
    """One job of the cluster.

    Attributes:
        stage: of a training; else features, or the evaluation's protocol.
        name: the run, or run and evaluation.
        seconds: of computing, or None where the number of images is not known.
        limit: wall limit of one piece in seconds.
        source: where `seconds` is from.
        makes, needs: files that say what comes after what.
        bytes: of its outputs on disk.
        memory: bytes of each GPU, of a training.
        fitted: what is changed to fit into them, or why nothing would.
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
    here: bool = False
    """Whether it runs on this machine, and not in a queue."""
    memory: float = 0.0
    fitted: str = ""

    @property
    def start(self) -> float:
        """Return the seconds until its first step."""
        return START_HERE if self.here else START

    @property
    def pieces(self) -> int:
        """Return the number of jobs that wall limits cut it into."""
        useful = self.limit - max(20.0, min(300.0, self.limit / 10)) - self.start
        return max(1, -int(-(self.seconds or 0.0) // useful))

    @property
    def wall(self) -> float:
        """Return the seconds from start to end, without waiting in the queue."""
        return (self.seconds or 0.0) + self.pieces * self.start + (self.pieces - 1) * REQUEUED

    @property
    def node_hours(self) -> float:
        """Return the node hours that it is billed for."""
        return self.nodes * ((self.seconds or 0.0) + self.pieces * self.start) / 3600


@dataclass
class Plan:
    """All that is left to do."""

    jobs: list[PlannedJob] = field(default_factory=list)
    shard_bytes: dict[str, int] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    others: int = 0
    """Commands on the login node: shards, tables, figures."""
    tuned: dict[str, float] = field(default_factory=dict)
    """Part of a model's operations that head and tuning take, by run."""
    listed: dict[Path, SplitFacts] = field(default_factory=dict)
    """Numbers of images of splits that are not sharded yet, by their folders."""

    def shards(self, folder: Path) -> SplitFacts:
        """Return the known number of a split's images."""
        known = shards_of(folder)
        return known if known.images is not None else self.listed.get(folder.absolute(), known)


def all_jobs(experiment: Experiment) -> list[RuleJob]:
    """Return every split, training, features file and evaluation of an experiment as jobs here.

    Needs no Snakemake, so it does not know what is done already.
    """
    here: dict[str, Any] = {"cluster": "local", "nodes": "1", "runtime": Resources().runtime}
    jobs = [
        RuleJob("write_shards", {"dataset": dataset, "split": split}, {})
        for dataset, split in experiment.splits
    ]
    jobs += [
        RuleJob(run.stage, {"run": name}, here | {"devices": "auto"})
        for name, run in experiment.runs.items()
        if run.settings.trains
    ]
    alone = here | {"devices": "1"}
    for run, name in experiment.evaluations:
        protocol = experiment.evaluation(run, name).name
        jobs.append(RuleJob(protocol, {"run": run, "evaluation": name}, alone))
    for run, dataset, kind in resolve.features_read(experiment):
        given = {"run": run, "dataset": dataset, "split": kind.split, "norm": resolve.ending(kind)}
        jobs.append(RuleJob("features", given, alone))
    return jobs


def make_plan(
    jobs: Iterable[RuleJob],
    experiment: Experiment,
    device: Device,
    known: Mapping[Path, SplitFacts] | None = None,
) -> Plan:
    """Price the jobs of an experiment that Snakemake would run.

    Args:
        jobs: in any order.
        known: what was counted of splits, by the folder of their shards; the others are counted.
    """
    jobs = list(jobs)
    plan = Plan(listed={folder.absolute(): shards for folder, shards in (known or {}).items()})
    for job in jobs:
        if job.rule == "write_shards":
            split = job.wildcards["dataset"], job.wildcards["split"]
            folder = experiment.shards(*split)
            unknown = plan.shards(folder).images is None
            if unknown and (counted := listed(experiment, *split)):
                plan.listed[folder.absolute()] = counted
    for job in jobs:
        given = job.wildcards
        if job.rule == "write_shards":
            _note_shards(plan, experiment, given["dataset"], given["split"])
        if "evaluation" in given:
            plan.jobs.append(_evaluation(plan, job, experiment, device))
        elif job.rule == "features":
            plan.jobs.append(_features(plan, job, experiment, device))
        elif job.rule in STAGES and STAGES[job.rule].trains:
            plan.jobs.append(_training(plan, job, experiment, device))
            if (part := tuned_part(experiment, given["run"])) is not None:
                plan.tuned[given["run"]] = part
        else:
            plan.others += 1
    return plan


def tuned_part(experiment: Experiment, name: str) -> float | None:
    """Return the part of a tuned encoder's operations that head and tuning take.

    None of another run, and where the experiment does not pre-train it on the same images.
    """
    chain = list(lineage(name, experiment.runs.get))
    spent = [
        run.settings.flops_per_image(run.encoder) * run.settings.epochs
        for run in chain
        if isinstance(run.settings, Training)
    ]
    of_one = len(spent) == len(chain) and len({(run.dataset, run.split) for run in chain}) == 1
    if not of_one or (chain[0].stage, chain[-1].stage) != (Tune.name, Pretrain.name):
        return None
    return sum(spent[:-1]) / sum(spent)


def critical_path(jobs: list[PlannedJob]) -> list[PlannedJob]:
    """Return the longest chain of jobs that wait for each other, first to last."""
    by_file = {job.makes: job for job in jobs}

    @cache
    def path_to(file: Path) -> list[PlannedJob]:
        if file not in by_file:
            return []
        return [*max(map(path_to, by_file[file].needs), key=wall, default=[]), by_file[file]]

    return max(map(path_to, by_file), key=wall, default=[])


def wall(jobs: Iterable[PlannedJob]) -> float:
    """Return the seconds of jobs one after another."""
    return sum(job.wall for job in jobs)


def _note_shards(plan: Plan, experiment: Experiment, dataset: str, split: str) -> None:
    source = experiment.datasets[dataset].splits[split].source
    if not source.sharded:
        return
    known = plan.shards(experiment.shards(dataset, split))
    if known.bytes is None:
        plan.unknown.add(f"bytes of {dataset} {split}")
    else:
        plan.shard_bytes[f"{dataset} {split}"] = known.bytes


def _training(plan: Plan, job: RuleJob, experiment: Experiment, device: Device) -> PlannedJob:
    run = experiment.runs[job.wildcards["run"]]
    resources = job.resources
    config = resolve.run_config(experiment, run.name)
    encoder = run.encoder
    (stage, computing, folder) = config.training(run.name)
    devices = devices_of(resources)
    step = stage.flops_per_image(encoder) * stage.batch_size
    gpu = str(resources.get("gpu") or "")
    asked = str(resources["nodes"])
    relative = relative_speed(gpu)
    nodes = training_nodes(asked, devices, stage.batch_size, step, relative)
    online = experiment.spec.online_evaluation is not None
    computing, fitted = _fitted(stage, computing, encoder, nodes, devices, gpu, online)
    shards = plan.shards(folder)
    speed = measured(experiment.root, stage, encoder, device.name == "cpu")
    seconds = None
    source = ""
    if shards.images is None:
        plan.unknown.add(f"images of {run.dataset} {run.split}")
    else:
        images: float = stage.images_of(shards.images, shards.classes) * stage.epochs
        if config.test is not None:  # in training images that cost as much
            scored = stage.epochs * (plan.shards(config.test).images or 0)
            images += scored * encode_flops(encoder) / stage.flops_per_image(encoder)
        if speed:
            seconds = images / (speed[0] * nodes * devices)
            source = f"measured in {speed[1]}"
        else:
            seconds = images / device.images_per_second(stage, encoder, nodes * devices)
            source = device.source
    return PlannedJob(
        stage.name, run.name, nodes, devices, seconds, 60.0 * float(resources["runtime"]), source,
        makes=experiment.folder(run.name), bytes=stage.state_bytes(encoder),
        needs=_makers(resolve.inputs_of_run(experiment, run.name)), here=is_here(job),
        memory=stage.peak_memory(encoder, nodes * devices, computing), fitted=fitted,
    )  # fmt: skip


def _fitted(
    stage: Training, computing: Computing, encoder: Encoder, nodes: int, devices: int, gpu: str,
    online: bool,
) -> tuple[Computing, str]:  # fmt: skip
    """Return how a training would be computed on its GPUs, and the settings that change."""
    try:
        stage.check_ranks(nodes * devices, computing)
    except UserError as error:
        return computing, f"will be refused: {error}"
    memory = gpu_memory(gpu)
    if memory is None:
        return computing, ""
    try:
        chosen = stage.fitted(encoder, computing, nodes, devices, memory, online)
    except UserError as error:
        return computing, f"does not fit: {error}"
    changed = chosen.changes(computing)
    return chosen, f"{changed}, to fit into {gpu}" if changed else ""


def _features(plan: Plan, job: RuleJob, experiment: Experiment, device: Device) -> PlannedJob:
    run, dataset, split = (job.wildcards[name] for name in ("run", "dataset", "split"))
    encoder = experiment.runs[run].encoder
    images = plan.shards(experiment.shards(dataset, split)).images
    if images is None:
        plan.unknown.add(f"images of {dataset} {split}")
    flops = None if images is None else images * encode_flops(encoder)
    precision = resolve.precision(experiment, run)
    kind = resolve.of_ending(split, job.wildcards["norm"])
    makes = resolve.features_file(experiment, run, dataset, kind)
    return _on_devices(
        job, f"{run} {makes.stem}", flops, precision, device, makes=makes,
        needs=(experiment.folder(run),), bytes=feature_bytes(encoder, images or 0, kind.blocks),
    )  # fmt: skip


def _evaluation(plan: Plan, job: RuleJob, experiment: Experiment, device: Device) -> PlannedJob:
    run = job.wildcards["run"]
    name = job.wildcards["evaluation"]
    settings = experiment.evaluation(run, name)
    dataset = experiment.dataset_of(name)

    def images(split: str) -> int:
        count = plan.shards(experiment.shards(dataset, split)).images
        if count is None:
            raise KeyError(f"{dataset} {split}")
        return count

    flops = None
    unknown = False
    try:
        flops = settings.flops(experiment.runs[run].encoder, images)
    except KeyError as error:
        plan.unknown.add(f"images of {error.args[0]}")
        unknown = True
    reads = resolve.inputs_of_evaluation(experiment, run, name)
    priced = _on_devices(
        job, f"{run} {name}", flops, "fp32" if settings.full_precision else "bf16", device,
        makes=experiment.root / "evaluations" / run / f"{name}.json",
        needs=(experiment.folder(run), *_makers(reads)),
    )  # fmt: skip
    if unknown or flops is not None:
        return priced
    try:
        part = min(1.0, images(settings.test_split) / IMAGENET_VAL)
    except KeyError:
        part = 1.0
    return replace(
        priced, seconds=settings.least_seconds + part * 60 * settings.minutes, source="assumed"
    )


def _on_devices(
    job: RuleJob, name: str, flops: float | None, precision: str, device: Device, **more: Any
) -> PlannedJob:
    """Estimate a job that encodes images; its precision decides the speed of all but CPUs."""
    nodes = fixed_nodes(str(job.resources["nodes"]))
    devices = devices_of(job.resources)
    rate = device.together(nodes * devices)
    rate *= 1 if device.name == "cpu" else SPEEDS[precision]
    start = LEAST if is_here(job) else 0.0  # hours elsewhere, which do not show it
    seconds = None if flops is None else start + flops / rate
    limit = 60.0 * float(job.resources["runtime"])
    more |= {"here": is_here(job)}
    return PlannedJob(job.rule, name, nodes, devices, seconds, limit, device.source, **more)


def all_here(jobs: Iterable[RuleJob]) -> bool:
    """Return whether there is something to compute, and all of it on this machine."""
    computing = [
        job
        for job in jobs
        if (job.rule in STAGES and STAGES[job.rule].trains) or "evaluation" in job.wildcards
    ]
    return bool(computing) and all(map(is_here, computing))


def missing(jobs: Iterable[RuleJob], experiment: Experiment) -> list[str]:
    """Return a line for each missing file that jobs would read: images, weights, lists."""
    splits = []
    imports = []
    evaluations = []
    for job in jobs:
        given = job.wildcards
        if job.rule == "write_shards":
            splits.append((given["dataset"], given["split"]))
        elif "evaluation" in given:
            evaluations.append((given["run"], given["evaluation"]))
        elif job.rule in STAGES:
            imports.append(given["run"])
    return [
        *starting.missing_images(experiment, splits, again=True),
        *starting.missing_weights(experiment, imports, again=True),
        *starting.missing_lists(experiment, evaluations),
    ]


def is_here(job: RuleJob) -> bool:
    """Return whether a job runs on this machine."""
    return job.resources.get("cluster") == "local"


def devices_of(resources: Mapping[str, Any]) -> int:
    """Return the devices of a job on each node."""
    return count_devices(str(resources["devices"]))


def _makers(files: Iterable[Path]) -> tuple[Path, ...]:
    """Return the names that identify the jobs that make these files (`PlannedJob.makes`)."""

    def maker(file: Path) -> Path:
        kind = file.parent.parent.name
        if kind == "runs":
            return file.parent
        return file.with_suffix(".json") if kind == "evaluations" else file

    return tuple(dict.fromkeys(map(maker, files)))
