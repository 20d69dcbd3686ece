"""Make a run: train it, by hand or by a rule, or import public weights as one.

A training is checked before anything is queued, and then launched.

`maect.tools.evaluate` launches its jobs by the same functions.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Group, Parameter

from maect.core.errors import UserError, counted
from maect.core.files import need, read_record, with_retries
from maect.core.resources import Resources, gpus_here, node_range
from maect.data.commands import StatedPixels

if TYPE_CHECKING:
    from maect.core.settings import SettingsFile
    from maect.evaluate import EvaluationConfig
    from maect.launch import Task
    from maect.models.checkpoints import Converted
    from maect.recipes.settings import Computing
    from maect.stages import Training
    from maect.stages.run import RunConfig

logger = logging.getLogger(__name__)

# Operations that a step must leave to each rank: about 90 ms of an A100. With less, what a step
# costs on any number of ranks (gradients, launches) soon is most of it: docs/scaling.md.
WORTH_A_RANK = 1e13
PLACE = Group("Place and resources")
LOCAL = Resources()
"""This machine, one rank."""
File = TypeVar("File", "RunConfig", "EvaluationConfig")
Changes = Annotated[Sequence[str], Parameter(metavar="KEY=VALUE")]
Out = Annotated[
    Path | None,
    Parameter(metavar="FILE", help="write the changed file here; results go beside it"),
]
Where = Annotated[Resources, Parameter(name="*", group=PLACE)]
Log = Annotated[Path | None, Parameter(group=PLACE, help="also write messages to this file.")]


def train(
    config: Path,
    changes: Changes = (),
    /,
    *,
    out: Out = None,
    resources: Where = LOCAL,
    save_every_minutes: float = 2.0,
    convert_world_size: bool = False,
    gpu: str = "",
    stage_to: Annotated[str, Parameter(metavar="DIR")] = "",
    log: Log = None,
) -> None:
    """Train a run, or resume it.

    `maect train runs/mae/config.yaml settings.epochs=9 --out runs/mae9/config.yaml`

    Args:
        config: the run's resolved file; results go beside it.
        changes: in place of what the file says, such as settings.epochs=10 settings.head.topk=1
            seed=1; this is another run, which needs --out.
        resources: where to run.
        save_every_minutes: default 2.
        convert_world_size: resume on another number of ranks.
        gpu: model of the GPUs, such as A100-40GB: a step that is too large for one is computed in
            parts, or refused (default: this machine's, if the job runs here).
        stage_to: first copy the shards to this folder of each node; or to that in an environment
            variable of the node, by its name (TMPDIR).
    """
    from maect.core.stamps import stamped
    from maect.data.index import open_index
    from maect.launch import Task
    from maect.recipes.cost import relative_speed
    from maect.records import RunRecord
    from maect.stages.run import RunConfig
    from maect.train import run_folder

    path = out or config
    owner = path.parent / "config.yaml"
    if path.name != owner.name and owner.exists():
        raise UserError(f"{path}: its folder belongs to the run in {owner.name}; choose another")
    run, path = read_job(RunConfig, config, changes, out)
    folder = path.parent
    stage, computing, shards = run.training(path)
    data = need_shards(shards)
    if run.source is not None:
        need(RunRecord.path(run.source), "finished run")
    identity = run.fingerprint(data, run_folder.source_files(run.source))
    is_done = partial(run_folder.is_finished, folder, identity)
    finished = is_done()
    change = run_folder.replaced(folder, identity)

    least, _ = node_range(resources.nodes)
    place = resources.resolved(least)
    devices = int(place.devices)
    if place.cluster == "local" and not gpu:
        gpu = next(iter(gpus_here()), "")
    step = stage.flops_per_image(run.encoder) * stage.batch_size
    speed = relative_speed(gpu)
    nodes = training_nodes(resources.nodes, devices, stage.batch_size, step, speed)
    if not (finished or convert_world_size or change):
        nodes = _as_saved(folder, nodes, devices, resources.nodes)
    place = replace(place, nodes=nodes)
    stage.check_ranks(place.ranks, computing)
    computing = _fitted(run, stage, computing, place, gpu)
    if finished:
        run_folder.check_weights(folder)
    else:
        stage.training_images(open_index(shards))  # before a job waits for a GPU
    if change:
        logger.warning("%s", change)

    arguments = arguments_of(
        run, path, identity=identity, save_every_minutes=save_every_minutes,
        convert_world_size=convert_world_size, stage_to=stage_to or None,
        computing=computing.model_dump(mode="json"),
    )  # fmt: skip
    task = Task("maect.stages.run:train", arguments, identity)
    with stamped(path, run):
        run_job("train", folder, task, is_done, place, RunRecord.path(folder))
    # A rank may have been killed after the record was written: no other one is started then.
    if not stage.keeps_state and is_done():
        run_folder.remove_states(folder)


def _fitted(
    run: "RunConfig", stage: "Training", computing: "Computing", place: Resources, gpu: str
) -> "Computing":
    """Return how a step is computed so that it fits into the memory of such a GPU."""
    from maect.recipes.cost import gpu_memory

    memory = gpu_memory(gpu)
    if memory is None:
        return computing
    online = run.online_evaluation is not None
    nodes, devices = int(place.nodes), int(place.devices)
    fitted = stage.fitted(run.encoder, computing, nodes, devices, memory, online)
    if said := fitted.changes(computing):
        logger.info("%s: %s, so that it fits into the memory of %s", run.run, said, gpu)
    return fitted


def training_nodes(
    nodes: int | str, devices: int, batch_size: int, step_flops: float, speed: float = 1.0
) -> int:
    """Return the nodes for a training: as many of the range as its batch is worth.

    That is the largest number with which the ranks divide the batch evenly and each has
    `WORTH_A_RANK` of the step's operations, times the speed relative to an A100's; else the
    smallest that divides it.

    Raises:
        UserError: no number of the range divides the batch.
    """
    least, most = node_range(nodes)
    fitting = [n for n in range(least, most + 1) if batch_size % (n * devices) == 0]
    if not fitting:
        many = f"{least * devices} ranks" if least == most else f"ranks on {nodes} nodes"
        raise UserError(f"batch_size {batch_size} is not a multiple of {many}")
    worth = [n for n in fitting if step_flops / (n * devices) >= WORTH_A_RANK * speed]
    return max(worth, default=min(fitting))


def _as_saved(run: Path, nodes: int, devices: int, allowed: int | str) -> int:
    """Return the nodes with as many ranks as saved a run's state; without a state those given.

    Raises:
        UserError: the allowed range has no such number, or the state is lost.
    """
    from maect.launch.record import read_job as job_on_record
    from maect.train import run_folder

    if not (run / "state").is_dir():
        run_folder.check_not_lost(run)
        return nodes
    from maect.train.checkpoint import complete_states

    states = complete_states(run / "state")
    if not states:
        run_folder.check_not_lost(run)
    before = None
    if states:
        before = int(with_retries(read_record, states[0] / "state.json")["world_size"])
    if before in (None, nodes * devices):
        return nodes
    least, most = node_range(allowed)
    if before % devices == 0 and least <= before // devices <= most:
        logger.info("%s: on %s, as its state", run.name, counted(before // devices, "node"))
        return before // devices
    job = job_on_record(run)
    if job is not None and job.state != "ended":
        return nodes  # it may be running still, and is looked after
    raise UserError(
        f"{states[0]}: resuming would change from {before} ranks to {nodes * devices}, and the "
        f"sums' rounding with it; change --nodes and --devices (`nodes` and `devices` of a "
        f"profile), or, if that is meant, run `maect train {run / 'config.yaml'} "
        "--convert-world-size` with these once"
    )


def read_job(
    kind: type[File], config: Path, changes: Sequence[str] = (), out: Path | None = None
) -> tuple[File, Path]:
    """Read a resolved file with changes and write it to where it belongs.

    Args:
        kind: class of the file.
        config: the resolved file.
        changes: `KEY=VALUE` in place of what it says.
        out: where to write the changed file; needed with changes, which make another job.

    Returns:
        The config, and the file that describes the job; results go beside it.

    Raises:
        UserError: changes without `out`, or `out` belongs to another job.
    """
    from maect.recipes.few_labels import FewLabels

    read = kind.read(config, changes)
    if out is None:
        if changes:
            raise UserError(
                f"{config}: {changes[0]} makes this another job; name its file with --out"
            )
        return read, config
    read = read.named(out)
    if isinstance(read.settings, FewLabels):
        read = read.model_copy(update={"settings": read.settings.read_lists()})
    check_free(out, read.text(out))
    read.write(out)
    return read, out


def check_free(path: Path, text: str) -> None:
    """Refuse to write a config over a different file (UserError)."""
    if path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
        raise UserError(f"{path}: exists and says something else; choose another --out")


def run_job(
    what: str,
    folder: Path,
    task: "Task",
    is_done: Callable[[], bool],
    resources: Resources,
    result: Path,
) -> None:
    """Run a function on every rank until its result exists; say so if it did before."""
    from maect.launch import launch

    name = folder.name
    if name.endswith(".job"):  # beside those of other runs
        name = f"{folder.parent.name} {name.removesuffix('.job')}".strip()
    if is_done():
        logger.info("%s %s: %s is there", what, name, result)
    launch(task, folder, resources, is_done=is_done, describe=f"{what} {name}")


def arguments_of(config: "SettingsFile", path: Path, **more: Any) -> dict[str, Any]:
    """Return the arguments of a job of a resolved file."""
    return {"config": str(path.absolute()), "digest": config.digest, **more}


def need_shards(folder: Path) -> str:
    """Return the digest of the shards in a folder."""
    index = need(folder / "index.json", "index of shards (make it with maect shard)")
    return str(read_record(index)["digest"])


def import_weights(
    weights: Path,
    run: Path | None = None,
    /,
    *,
    layout: str | None = None,
    timm: Annotated[str | None, Parameter(metavar="NAME")] = None,
    size: str | None = None,
    image_size: int | None = None,
    pixels: StatedPixels = None,
) -> None:
    """Turn downloaded weights into a run.

    `maect import weights/mae_pretrain_vit_base.pth results/mine/runs/mae_base`

    Args:
        weights: a checkpoint, as published; or the resolved file of a run that imports one, alone.
        run: folder to write, for a checkpoint.
        layout: of the checkpoint, one of docs/weights.md (default: detected).
        timm: the model's name in timm, in place of layout and size
            (docs/reference/timm_encoders.md).
        size: encoder size (default: detected).
        image_size: pixels to use it at (default: its own).
    """
    from maect.core.settings import validated
    from maect.recipes import Pixels
    from maect.stages.imported import import_weights as convert

    if weights.suffix == ".yaml":
        _import_as_resolved(weights)
        return
    if run is None:
        raise UserError(f"{weights}: name the run's folder, too")
    if timm is not None and (layout or size):
        raise UserError(f"--timm {timm} says everything: leave out --layout and --size")
    read = validated(Pixels, pixels or {}, "--pixels")
    layout, imported = convert(weights, run, layout, size, image_size, read, timm)
    _say_imported(run, layout, imported)


def _import_as_resolved(path: Path) -> None:
    """Import by the resolved file of a run, next to it, unless that is done."""
    from maect.core.stamps import stamped
    from maect.stages.imported import Import, is_imported
    from maect.stages.imported import import_weights as convert
    from maect.stages.run import RunConfig

    config = RunConfig.read(path)
    run = path.parent
    if config.weights is None or not isinstance(config.settings, Import):
        raise UserError(f"{path}: no `weights`: this run is not an import")
    shape = config.encoder
    settings = config.settings
    with stamped(path, config):
        if is_imported(run, config.weights, settings, shape):
            print(f"{run}: imported before")
            return
        layout, imported = convert(
            config.weights, run, settings.layout, config.size, shape.image_size, shape.pixels,
            settings.timm,
        )  # fmt: skip
    _say_imported(run, layout, imported)


def _say_imported(run: Path, layout: str | None, imported: "Converted") -> None:
    """Print the name, size and pooling of an imported encoder."""
    what = imported.timm or f"layout {layout}, size {imported.size}"
    print(
        f"{run}: {what}, {imported.encoder.image_size} pixels, "
        f"pooling {imported.pooling}; {sum(imported.left_out.values())} tensors left out"
    )
