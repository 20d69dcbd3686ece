"""One job by hand: it is checked here, before anything is queued, and then launched."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from maect.core.errors import MissingFileError, UserError, counted
from maect.core.files import need, read_record, sha256_file, with_retries
from maect.core.settings import SettingsFile, digest
from maect.core.stamps import stamped
from maect.data.index import open_index
from maect.evaluate import EvaluationConfig, FeaturesConfig
from maect.evaluate.evaluation import Completion
from maect.launch import Resources, Task, launch
from maect.launch.record import read_job
from maect.launch.resources import gpus_here
from maect.recipes.cost import gpu_memory, relative_speed
from maect.records import RunRecord
from maect.stages.run import RunConfig
from maect.tools.launching import Launching, fixed_nodes, node_range, training_nodes
from maect.train import run_folder

log = logging.getLogger(__name__)


def run_job(
    what: str,
    folder: Path,
    task: Task,
    is_done: Callable[[], bool],
    resources: Resources,
    result: Path,
) -> None:
    """Run a function on every rank until its result exists; say so if it did before."""
    name = folder.name
    if name.endswith(".job"):  # beside those of other runs
        name = f"{folder.parent.name} {name.removesuffix('.job')}".strip()
    if is_done():
        log.info("%s %s: %s is there", what, name, result)
    launch(task, folder, resources, is_done=is_done, describe=f"{what} {name}")


def _given(config: SettingsFile, path: Path, **more: Any) -> dict[str, Any]:
    """Return the arguments of a job of a resolved file."""
    return {"config": str(path.absolute()), "digest": config.digest, **more}


def need_shards(folder: Path) -> str:
    """Return the digest of the shards in a folder."""
    index = need(folder / "index.json", "index of shards (make it with maect shard)")
    return str(read_record(index)["digest"])


def train(
    config: RunConfig,
    path: Path,
    launching: Launching,
    *,
    gpu: str = "",
    save_every_minutes: float,
    convert_world_size: bool = False,
    stage_to: str = "",
) -> None:
    """Train by a resolved file, on GPUs of the given model; results go next to the file.

    Raises:
        UserError: what cannot work, and what would be another run than the one that lies there.
    """
    stage, computing, shards = config.training(path)
    data = need_shards(shards)
    if config.source is not None:
        need(RunRecord.path(config.source), "finished run")
    identity = config.fingerprint(data, run_folder.source_files(config.source))
    finished = run_folder.is_finished(path.parent, identity)
    resources = launching.resources(node_range(launching.nodes)[0])
    devices = resources.devices
    step = stage.flops_per_image(config.encoder) * stage.batch_size
    if launching.cluster == "local" and not gpu:
        gpu = next(iter(gpus_here()), "")
    nodes = training_nodes(launching.nodes, devices, stage.batch_size, step, relative_speed(gpu))
    if not (finished or convert_world_size or run_folder.replaced(path.parent, identity)):
        nodes = _as_saved(path.parent, nodes, devices, launching.nodes)
    stage.check_ranks(nodes * devices, computing)
    if (memory := gpu_memory(gpu)) is not None:
        online = config.online_evaluation is not None
        fitted = stage.fitted(config.encoder, computing, nodes, devices, memory, online)
        if said := fitted.changes(computing):
            log.info("%s: %s, so that it fits into the memory of %s", config.run, said, gpu)
        computing = fitted
    if finished:
        run_folder.check_weights(path.parent)
    else:
        stage.training_images(open_index(shards))  # before a job waits for a GPU
    if change := run_folder.replaced(path.parent, identity):
        log.warning("%s", change)
    arguments = _given(
        config, path, save_every_minutes=save_every_minutes, convert_world_size=convert_world_size,
        stage_to=stage_to or None, computing=computing.model_dump(mode="json"),
    )  # fmt: skip
    task = Task("maect.stages.run:train", arguments, identity)
    is_done = partial(run_folder.is_finished, path.parent, identity)
    with stamped(path, config):
        run_job(
            "train", path.parent, task, is_done, replace(resources, nodes=nodes),
            RunRecord.path(path.parent),
        )  # fmt: skip
    # A rank may have been killed after the record was written: no other one is started then.
    if not stage.keeps_state and is_done():
        run_folder.remove_states(path.parent)


def _as_saved(run: Path, nodes: int, devices: int, allowed: str) -> int:
    """Return the nodes with as many ranks as saved a run's state; without a state those given.

    Raises:
        UserError: the allowed range has no such number, or the state is lost.
    """
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
        log.info("%s: on %s, as its state", run.name, counted(before // devices, "node"))
        return before // devices
    job = read_job(run)
    if job is not None and job.state != "ended":
        return nodes  # it may be running still, and is looked after
    raise UserError(
        f"{states[0]}: resuming would change from {before} ranks to {nodes * devices}, and the "
        f"sums' rounding with it; change --nodes and --devices (`nodes` and `devices` of a "
        f"profile), or, if that is meant, run `maect train {run / 'config.yaml'} "
        "--convert-world-size` with these once"
    )


def extract_features(config: FeaturesConfig, path: Path, launching: Launching) -> None:
    """Write the features of a split next to their file; UserError if inputs are missing."""
    encoder = need(config.run / "encoder.safetensors", "encoder")
    out = path.with_suffix(".safetensors")
    wanted = config.how | {
        "encoder_sha256": sha256_file(encoder),
        "index_digest": need_shards(config.shards),
    }

    def is_done() -> bool:
        from maect.evaluate.store import open_record

        try:
            return wanted.items() <= open_record(out).items()
        except MissingFileError:
            return False

    config.write(path)
    task = Task("maect.evaluate.features:features", _given(config, path), digest(wanted))
    resources = launching.resources(fixed_nodes(launching.nodes))
    job = out.with_suffix(".job")
    with stamped(path, config):
        run_job("features", job, task, is_done, resources, out)


def evaluate(config: EvaluationConfig, path: Path, launching: Launching) -> None:
    """Evaluate by a resolved file; the result goes next to it.

    Raises:
        UserError: an input that is missing, or ranks that the protocol cannot use.
    """
    resources = launching.resources(fixed_nodes(launching.nodes))
    config.settings.check_ranks(resources.ranks)
    need(config.run / "encoder.safetensors", "encoder")
    for name in config.settings.inputs():
        if name not in config.inputs:
            raise UserError(f"{path}: inputs: {name!r} is missing")
        for given in config.paths(name):
            need(given, f"input {name!r}")
    result = Completion(path)
    task = Task("maect.evaluate.evaluation:evaluate", _given(config, path), result.identity)
    out = path.with_suffix(".json")
    job = path.with_suffix(".job")
    with stamped(path, config):
        run_job("evaluate", job, task, result.is_there, resources, out)
