"""Fine-tuning with all labels or few of them (paper, B and E), on the training engine.

One job trains once for every seed, or for every number of shots and split, one after the other.
Each is scored once on the test split, after its last epoch. What is finished is kept until the
JSON is written, so that a killed job goes on where it was, with the same bits.
"""

import gc
import hashlib
import shutil
import statistics
import sys
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from maect.core.context import Context as TrainContext
from maect.core.distributed import from_rank_0, share_of
from maect.core.distributed import sum_scalars as summed
from maect.core.errors import UserError
from maect.core.files import read_json, sha256_file, write_json
from maect.core.settings import digest
from maect.data.index import Index, open_index
from maect.data.labelled import Labelled, fraction_name, fraction_rows_of, shots_rows
from maect.data.loader import evaluation_batches, train_batches
from maect.data.transforms import normalize, randaugment
from maect.evaluate.features import BATCH
from maect.evaluate.fine_tune_loop import FineTuneLoop, Part, stage_of
from maect.evaluate.fine_tune_model import Classifier, parameter_groups
from maect.evaluate.fine_tune_settings import FineTune
from maect.evaluate.job import Interrupted, Job
from maect.models.weights import load_encoder_weights
from maect.stages.base import SelfSupervised as Stage
from maect.train.distributed import start
from maect.train.engine import Engine
from maect.train.parameters import total_steps
from maect.train.run import find_state
from maect.train.stages import restore_module
from maect.train.state import Saver, remove_incomplete
from maect.train.watchdog import EVALUATING, Watchdog

SAVE_SECONDS = 600.0
"""How much work a kill may cost."""


class Context(TrainContext, Protocol):
    """One rank's place, with what evaluations and the training engine need to know of it."""

    local_world_size: int


@dataclass(frozen=True)
class Training:
    """One training: the metric that it counts for, its own name, its seed and its samples."""

    metric: str
    name: str
    seed: int
    rows: NDArray[np.int64]


@dataclass(frozen=True)
class Setup:
    """What all trainings of a job have in common."""

    context: Context
    job: Job
    settings: FineTune
    stage: Stage
    train: Index
    test: Index
    identity: str
    device: torch.device


def evaluate(context: Context, job: Job, settings: FineTune) -> dict[str, Any]:
    """Accuracies in percent: `fine_tune`, or `low_shot_N`, `low_shot_Npct`; called on every rank.

    Each is the mean over seeds (with `_std` and `_seeds`) or splits (`_splits`). `losses` has the
    mean training loss of every epoch and `weights_sha256` the final weights of every training.

    Raises:
        Interrupted: told to stop; the state is saved.
        UserError: images without labels, a subset or batch that does not work, or a loss that is
            no longer finite.
    """
    train, test = open_index(job.path("train")), open_index(job.path("test"))
    plan, stage = trainings(train, settings), stage_of(settings)
    check(train, test, plan, settings, context.world_size)
    device = start(context)
    identity = None
    if context.rank == 0:
        subsets = subset_record(train, plan)
        job.notes["subsets"] = subsets
        encoder = sha256_file(job.run / "encoder.safetensors")
        data = (train.digest, test.digest, str(job.resize), subsets)
        identity = digest(settings, encoder, *data)
        _claim(job.state, identity)
    identity = from_rank_0(identity)
    setup = Setup(context, job, settings, stage, train, test, identity, device)
    lengths = [total_steps(stage, len(training.rows)) for training in plan]
    found: dict[str, dict[str, Any]] = {}
    for number, training in enumerate(plan):
        file = job.state / training.name / "result.json"
        result = from_rank_0(read_json(file) if context.rank == 0 and file.exists() else None)
        if result is None:
            part = Part(context, sum(lengths[:number]), sum(lengths))
            result = _train(setup, training, part, lengths[number])
            if context.rank == 0:
                write_json(file, result)
                shutil.rmtree(job.state / training.name / "state")
        found[training.name] = result
    return metrics(plan, found)


def trainings(train: Index, settings: FineTune) -> list[Training]:
    """All trainings of a job, in order."""
    split = Labelled(train.directory, train.labels, train.keys, train.class_names)
    seed, folder = settings.seed, settings.subsets
    if settings.shots:
        return [
            Training(
                f"low_shot_{shots}",
                f"low_shot_{shots}-split{number}",
                seed,
                shots_rows(split, shots, number, seed, folder),
            )
            for shots in settings.shots
            for number in range(1, settings.splits + 1)
        ]
    fraction = settings.fraction
    name = "fine_tune" if fraction == 1 else fraction_name(fraction)
    rows = fraction_rows_of(split, fraction, seed, folder)
    seeds = range(seed, seed + settings.seeds)
    return [Training(name, f"{name}-seed{number}", number, rows) for number in seeds]


def check(
    train: Index, test: Index, plan: list[Training], settings: FineTune, world_size: int
) -> None:
    """Refuse what cannot work, before anything is computed.

    Raises:
        UserError: see `evaluate`.
    """
    for index in (train, test):
        if index.n == 0 or index.labels.min() < 0:
            raise UserError(f"{index.directory}: fine-tuning needs labels; some images have none")
    if train.class_names != test.class_names:
        raise UserError(f"{train.directory} and {test.directory}: their classes differ")
    if len(train.class_names) < 2:
        raise UserError(f"{train.directory}: fine-tuning needs at least two classes")
    settings.check_ranks(world_size)
    for training in plan:
        if len(training.rows) < settings.batch_size:
            raise UserError(
                f"{training.name}: batch_size {settings.batch_size} is larger than its "
                f"{len(training.rows)} images: an image would be in the same batch twice"
            )


def _train(setup: Setup, training: Training, part: Part, steps: int) -> dict[str, Any]:
    """Train once, or go on with it, and score it."""
    settings, stage, device = setup.settings, setup.stage, setup.device
    folder = setup.job.state / training.name
    if part.rank == 0:
        remove_incomplete(folder / "state")
    from_rank_0(None)  # nobody looks for a state before
    reader = find_state(folder / "state", part, True, device)
    step = reader.step if reader else 0
    encoder, shape, pooling = load_encoder_weights(setup.job.run / "encoder.safetensors")
    model = Classifier(encoder, len(setup.train.class_names), settings, pooling, training.seed)
    if reader:
        restore_module(model, reader)
    engine = Engine(model.to(device), stage, parameter_groups(model, settings), device)
    record: dict[str, Any] = {"fingerprint": setup.identity}
    losses: list[tuple[float, int]] = []
    if reader:
        reader.restore([*engine.fragments, *engine.replicas])
        engine.restore_moments(step)
        losses = [(total, count) for total, count in reader.record["losses"]]
    samples = len(training.rows)
    saver = Saver(folder, part)
    watchdog = Watchdog(folder, part)
    loop = FineTuneLoop(
        part, engine, stage, shape, training.seed, device, step, steps, samples, saver, None,
        SAVE_SECONDS, record | {"losses": losses}, watchdog, settings, losses,
    )  # fmt: skip
    try:
        if step < steps:
            batches = train_batches(
                replace(setup.train, rows=setup.train.rows[training.rows]),
                global_batch=stage.batch_size,
                rank=part.rank,
                world_size=part.world_size,
                seed=training.seed,
                views=stage.view_settings(),
                image_size=shape.image_size,
                start_step=step,
                steps=steps - step,
                threads=max(1, part.cpus),
                change=randaugment(
                    settings.randaugment_layers, settings.randaugment_magnitude, training.seed
                ),
            )
            if not loop.run(islice(batches, steps - step)):
                raise Interrupted
        watchdog.at(EVALUATING, steps)
        accuracy = _accuracy(setup, model)
        weights = _weights_digest(model) if part.rank == 0 else None
    finally:
        watchdog.close()
        saver.wait()
    means = [total / max(count, 1) for total, count in loop.losses]
    del loop, engine, model
    gc.collect()  # engine and module refer to each other, and the next training needs the room
    return {"accuracy": accuracy, "losses": means, "weights_sha256": weights}


def _accuracy(setup: Setup, model: Classifier) -> float:
    """Of the test split, in percent; every rank scores its share."""
    size, resize = model.encoder.settings.image_size, setup.job.resize
    rows = share_of(setup.context, setup.test.n, BATCH)
    hits, threads = 0, max(1, setup.context.cpus)
    for images, labels, _ in evaluation_batches(
        setup.test, image_size=size, resize=resize, rows=rows, batch_size=BATCH, threads=threads
    ):
        found = model.predict(normalize(images.to(setup.device, non_blocking=True)))
        hits += int((found.cpu() == torch.from_numpy(labels)).sum())
    return 100 * summed([float(hits)], setup.device)[0] / setup.test.n


def metrics(plan: list[Training], found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What stands in the JSON: a mean for every metric, and what it is the mean of."""
    out: dict[str, Any] = {}
    for metric in dict.fromkeys(training.metric for training in plan):
        group = [training for training in plan if training.metric == metric]
        values = [found[training.name]["accuracy"] for training in group]
        out[metric] = statistics.fmean(values)
        repeated = "splits" if group[0].seed == group[-1].seed else "seeds"
        if len(values) > 1:
            out[f"{metric}_std"] = statistics.stdev(values)
            out[f"{metric}_{repeated}"] = values
    for key in ("losses", "weights_sha256"):
        out[key] = {name: result[key] for name, result in found.items()}
    return out


def _claim(folder: Path, identity: str) -> None:
    """Make the folder that of this evaluation; another one's state is of no use any more."""
    known = folder / "identity.json"
    if folder.exists() and (not known.exists() or read_json(known) != {"identity": identity}):
        print(f"{folder}: of another encoder, subset or other settings; anew", file=sys.stderr)
        shutil.rmtree(folder)
    write_json(known, {"identity": identity})


def _weights_digest(model: Classifier) -> str:
    """sha256 of all parameters and buffers in the order of their names."""
    hashed = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        hashed.update(name.encode())
        hashed.update(value.cpu().contiguous().numpy().data)
    return hashed.hexdigest()


def subset_record(train: Index, plan: list[Training]) -> dict[str, dict[str, Any]]:
    """Size of each training's subset, and sha256 of its samples' names in the split's order."""
    names = train.keys()
    found = {}
    for training in plan:
        text = "".join(f"{names[row]}\n" for row in training.rows)
        digest = hashlib.sha256(text.encode()).hexdigest()
        found[training.name] = {"images": len(training.rows), "sha256": digest}
    return found
