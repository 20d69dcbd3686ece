"""One training stage from start or saved state to its completion record."""

import json
import time
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from maect.core.context import Context
from maect.core.distributed import from_rank_0
from maect.core.distributed import sum_scalars as summed
from maect.core.errors import UserError
from maect.core.files import sha256_file, write_json
from maect.data.index import open_index
from maect.data.loader import train_batches
from maect.data.staging import stage as stage_shards
from maect.recipes import Encoder
from maect.stages.base import SelfSupervised as Stage
from maect.stages.head import Head
from maect.stages.pretrain import Pretrain
from maect.stages.tune import Tune
from maect.train.distributed import start
from maect.train.ema import start_ema
from maect.train.engine import Engine
from maect.train.loop import Loop
from maect.train.metrics import Metrics, entries
from maect.train.parameters import parameter_groups, total_steps
from maect.train.record import claim, fingerprint, is_finished, origin
from maect.train.stages import build_objective, export, restore_module
from maect.train.state import Saver, StateReader, damage, read_record, remove_incomplete, saved
from maect.train.watchdog import Watchdog

STAGES: dict[str, type[Stage]] = {"pretrain": Pretrain, "head": Head, "tune": Tune}
Verdict = Literal["done", "requeue", "stopped"]


def train(
    context: Context,
    *,
    folder: str | Path,
    shards: str | Path,
    stage: Literal["pretrain", "head", "tune"],
    settings: dict[str, Any],
    encoder: dict[str, Any],
    seed: int,
    source: str | Path | None = None,
    save_every_minutes: float = 15.0,
    convert_world_size: bool = False,
    stage_to: str | None = None,
) -> Verdict:
    """Run a stage, or go on with it; called on every rank.

    Args:
        context: this rank's place, from `maect.launch`.
        folder: the run folder, `runs/RUN`.
        shards: shard folder of the train split.
        stage: which of the three.
        settings: the recipe, as of `Stage.model_dump`.
        encoder: the encoder's shape, likewise.
        seed: of everything random.
        source: run folder to start from.
        save_every_minutes: how much work a kill may cost.
        convert_world_size: go on with a state that another number of ranks saved.
        stage_to: node-local folder to read the shards from, copied there first.

    Returns:
        "done" once `run.json` is written; "requeue" if told to stop, with the state saved.

    Raises:
        UserError: settings, data, source and saved state do not go together.
    """
    folder = Path(folder)
    origin_run = Path(source) if source is not None else None
    recipe, shape = STAGES[stage].model_validate(settings), Encoder.model_validate(encoder)
    device = start(context)
    index = open_index(Path(shards))
    check(recipe, index.n, context.world_size)
    identity = None
    if context.rank == 0:
        identity = fingerprint(stage, recipe, shape, seed, index.digest, origin_run)
        about: dict[str, Any] = {
            "stage": stage,
            "recipe": recipe.model_dump(mode="json"),
            "seed": seed,
        }
        about |= {"encoder": shape.model_dump(mode="json"), "source": _name(origin_run)}
        claim(folder, identity, about)
        remove_incomplete(folder / "state")
    identity = from_rank_0(identity)
    if from_rank_0(context.rank == 0 and is_finished(folder, identity)):
        return "done"

    steps = total_steps(recipe, index.n)
    reader = find_state(folder / "state", context, convert_world_size, device)
    step = reader.step if reader else 0
    objective = build_objective(recipe, shape, seed, origin_run)
    if reader:
        restore_module(objective, reader)
    groups = parameter_groups(objective, recipe)
    engine = Engine(objective.to(device), recipe, groups, device)
    if isinstance(recipe, Tune):
        start_ema(engine.fragments)
    if reader:
        reader.restore([*engine.fragments, *engine.replicas])
        engine.restore_moments(step)

    metrics = Metrics(folder, step) if context.rank == 0 else None
    saver = Saver(folder, context)
    watchdog = Watchdog(folder, context)
    loop = Loop(
        context, engine, recipe, shape, seed, device, step, steps, index.n, saver, metrics,
        60 * save_every_minutes, {"fingerprint": identity}, watchdog,
    )  # fmt: skip
    try:
        if step < steps:
            if stage_to:
                index = open_index(stage_shards(Path(shards), stage_to))
            batches = train_batches(
                index,
                global_batch=recipe.batch_size,
                rank=context.rank,
                world_size=context.world_size,
                seed=seed,
                views=recipe.view_settings(),
                image_size=shape.image_size,
                start_step=step,
                steps=steps - step,
                threads=max(1, context.cpus),
            )
            if not loop.run(islice(batches, steps - step)):
                return "requeue"
    finally:
        watchdog.close()
        saver.wait()
        if metrics is not None:
            metrics.close()
    if context.rank == 0:
        _finish(folder, stage, recipe, shape, seed, origin_run, identity, context.world_size)
    dist.barrier()
    return "done"


def check(stage: Stage, samples: int, world_size: int) -> None:
    """Refuse what cannot work, before anything is computed.

    Raises:
        UserError: with the numbers.
    """
    if stage.batch_size % (world_size * stage.accumulation):
        parts = f"{world_size} ranks x accumulation {stage.accumulation}"
        raise UserError(f"batch_size {stage.batch_size} is not a multiple of {parts}")
    if samples < stage.batch_size:
        raise UserError(
            f"batch_size {stage.batch_size} is larger than the train split's {samples} images: "
            "an image would be in the same batch twice"
        )


def find_state(
    folder: Path, context: Context, convert_world_size: bool, device: Any
) -> StateReader | None:
    """The newest undamaged state, the same on all ranks.

    Raises:
        UserError: it was saved by another number of ranks, and `convert_world_size` is not given.
    """
    places = from_rank_0([p.name for p in saved(folder)])
    for name in places:
        record = read_record(folder / name)
        fault = f"{folder / name / 'state.json'}: damaged"
        if record is not None:
            fault = damage(folder / name, record, context.rank, context.world_size) or ""
        if fault:
            print(f"warning: {fault}; using the state before it, if any", flush=True)
        if summed([float(bool(fault))], device)[0]:
            continue
        assert record is not None
        if record["world_size"] != context.world_size:
            change = f"{record['world_size']} ranks to {context.world_size}"
            if not convert_world_size:
                raise UserError(
                    f"{folder / name}: going on would change from {change}, and the sums' rounding "
                    "with it; pass --convert-world-size if that is meant"
                )
            if context.rank == 0:
                print(f"{folder / name}: converted from {change}", flush=True)
        if context.rank == 0:
            print(f"going on from step {record['step']}", flush=True)
        return StateReader(folder / name, record)
    return None


def _finish(
    folder: Path,
    name: str,
    stage: Stage,
    encoder: Encoder,
    seed: int,
    source: Path | None,
    identity: str,
    world_size: int,
) -> None:
    """Export the weights and write the completion record, last."""
    place = saved(folder / "state")[0]
    reader = StateReader(place, json.loads((place / "state.json").read_text()))
    pooling = export(folder, stage, encoder, reader, source)
    timing = [entry["timing"] for entry in entries(folder / "metrics.jsonl")]
    speeds = sorted(t["images_per_second"] for t in timing)
    files = ["encoder.safetensors"] + (["head.safetensors"] if getattr(stage, "head", None) else [])
    write_json(
        folder / "run.json",
        {
            "run": folder.name,
            "stage": name,
            "fingerprint": identity,
            "recipe": stage.model_dump(mode="json"),
            "encoder": encoder.model_dump(mode="json"),
            "pooling": pooling,
            "seed": seed,
            "source": _name(source),
            "files": files,
            "sha256": {name: sha256_file(folder / name) for name in files},
            "world_size": world_size,
            "device_hours": timing[-1]["device_seconds"] / 3600 if timing else 0.0,
            "images_per_second": speeds[len(speeds) // 2] if speeds else 0.0,
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **origin(),
        },
    )


def _name(source: Path | None) -> str | None:
    return source.name if source is not None else None


def train_resolved(context: Context, *, config: str, **options: Any) -> Verdict:
    """Train as a run's resolved file says, in its folder; called on every rank."""
    from maect.stages.config import RunConfig

    told = RunConfig.read(config)
    assert told.shards is not None
    return train(
        context,
        folder=Path(config).parent,
        shards=told.shards,
        stage=told.stage,  # type: ignore[arg-type]
        settings=told.settings.model_dump(mode="json"),
        encoder=told.encoder.model_dump(mode="json"),
        seed=told.seed,
        source=told.source,
        **options,
    )
