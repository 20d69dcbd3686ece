"""One training from its start, or from a saved state, to its completion record.

Read it from top to bottom: `train` calls `prepare`, `restore`, `Trainer.run` and `finish`. Whatever
happens beside the steps is a hook (`maect.train.hooks`), in the list that `restore` makes.

The device works while the host is a step behind. For step n, in this order:

    copy the buffers; forward and backward passes, which change the buffers
    complete update n - 1: read its sums, check them, average the encoder, call the hooks, and save
        where that is due, with the buffers as they were copied
    update n: sum over the ranks, AdamW, the heads' own averages

The last step, and one after which a hook reads the model, is completed at once.
"""

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from maect.core.context import Context
from maect.core.distributed import barrier, be_deterministic, from_rank_0, store_barrier
from maect.core.errors import UserError
from maect.core.files import sha256_file
from maect.data.index import Index, open_index
from maect.data.loader import Batch, train_batches
from maect.data.staging import stage as stage_shards
from maect.recipes import OnlineEvaluation
from maect.records import RunRecord, entries, log_interval
from maect.train.attempts import attempts, begin_attempt, compute_as_before, warn_people
from maect.train.checkpoint import (
    Saver,
    StateReader,
    compare_replicas,
    complete_states,
    find_state,
    remove_incomplete,
    snapshot,
    state_record,
)
from maect.train.engine import Engine, random_batch, start
from maect.train.hooks import CheckHealth, ReportProgress, Session, SumLosses, Update
from maect.train.metrics import LogSteps, Metrics
from maect.train.objective import tensors_in
from maect.train.online import EvaluateOnline, OnlineEvaluator
from maect.train.run_folder import (
    RunLock,
    check_not_lost,
    is_finished,
    origin,
    read_notes,
    remove_states,
    reused_sample_fields,
    source_files,
    take_over_folder,
)
from maect.train.scores import ScoreEpochs, scored_split
from maect.train.stage import RunInputs
from maect.train.step import Buffers, DeviceTime, StepSums
from maect.train.watchdog import COMPUTING, READING, SAVING, UPDATING, Watchdog

log = logging.getLogger(__name__)

Verdict = Literal["done", "requeue"]


class TrainingFault(UserError):
    """A fault after which the training must stop, with a hint."""

    def __init__(self, fault: str, hint: str) -> None:
        super().__init__(f"{fault}; {hint}")


def train(
    context: Context,
    run: RunInputs,
    *,
    save_every_minutes: float = 2.0,
    convert_world_size: bool = False,
    stage_to: str | None = None,
    online: OnlineEvaluation | None = None,
) -> Verdict:
    """Run a training, or resume it; called on every rank.

    Args:
        context: this rank's.
        run: its inputs.
        save_every_minutes: time between two states: the most work that a kill loses.
        convert_world_size: resume from a state that another number of ranks saved.
        stage_to: node-local folder to read the shards from, copied there first.
        online: how often to evaluate the encoder meanwhile; no output of the run depends on it.

    Returns:
        "done" once its record is written; "requeue" if asked to stop, with the state saved.

    Raises:
        UserError: settings, data, source and saved state do not go together.
    """
    prepared = prepare(context, run)
    if prepared is None:
        return "done"
    trainer = restore(
        context, run, prepared,
        save_every_minutes=save_every_minutes, convert_world_size=convert_world_size,
        online=online,
    )  # fmt: skip
    try:
        if trainer.step < trainer.steps:
            batches = _batches(context, run, prepared, trainer, stage_to)
            if not trainer.run(batches):
                return "requeue"
    finally:
        trainer.close()
    finish(context, run, prepared, trainer)
    return "done"


# ======== prepare: what is trained, and whether it is done already


@dataclass(frozen=True)
class Prepared:
    """A run that is not finished, and that this job may write.

    Attributes:
        device: of this rank.
        split: all images of the training split.
        images: those of them to train on.
        scored: images to score the epochs on, or None.
        identity: the run's fingerprint.
        lock: rank 0's right to write the run; None on other ranks.
    """

    device: torch.device
    split: Index
    images: Index
    scored: Index | None
    identity: str
    lock: RunLock | None


def prepare(context: Context, run: RunInputs) -> Prepared | None:
    """Join the other ranks, check the inputs and take over the run's folder.

    Returns:
        None if the run is finished already.

    Raises:
        UserError: settings, data and source do not go together.
        SupersededError: another job has the right to write the run.
    """
    stage, folder = run.stage, run.folder
    if run.computing.deterministic:
        be_deterministic()
    device = start(context)
    split = open_index(run.shards)
    split.check_channels(run.encoder.pixels.channels)
    stage.check_ranks(context.world_size, run.computing)
    images = stage.training_images(split)
    scored = scored_split(run, split)
    lock: RunLock | None = None
    identity = ""
    done = False
    if context.rank == 0:
        weights = source_files(run.source)
        identity = stage.fingerprint(run.encoder, run.seed, split.digest, weights)
        if run.submitted not in (None, identity):
            raise UserError(
                f"{folder}: its data or source changed since this job was submitted; start again"
            )
        lock = RunLock(folder, context)  # before what another recipe has left is moved
        take_over_folder(folder, identity, run.description)
        remove_incomplete(folder / "state")
        done = is_finished(folder, identity)
        if done and not stage.keeps_state:
            remove_states(folder)  # as at the end, where a kill may have come between
    identity, done = from_rank_0((identity, done))
    if done:
        return None
    return Prepared(device, split, images, scored, identity, lock)


# ======== restore: weights and optimizer, from the source or from a saved state


def restore(
    context: Context,
    run: RunInputs,
    prepared: Prepared,
    *,
    save_every_minutes: float,
    convert_world_size: bool,
    online: OnlineEvaluation | None,
) -> "Trainer":
    """Return a trainer as it was when the last state was saved, or one that begins.

    Arguments are those of `train`.

    Raises:
        UserError: no state is intact, or another number of ranks saved it.
    """
    stage, computing, folder = run.stage, run.computing, run.folder
    device, images = prepared.device, prepared.images

    # ---- the state to resume from
    states = folder / "state"
    reader = find_state(states, prepared.identity, context, convert_world_size, device)
    if reader is None and context.rank == 0:
        check_not_lost(folder)
    step = reader.step if reader else 0
    record = reader.record if reader else None
    if not convert_world_size and device.type == "cpu":
        compute_as_before(context, folder, step)

    # ---- weights and buffers
    objective = stage.build(run.encoder, run.seed, run.source, prepared.split.class_names)
    if reader:
        objective.restore(reader)
    elif run.source is not None:
        fields = reused_sample_fields(run.source, prepared.split) if context.rank == 0 else None
        objective.forget_samples(from_rank_0(fields))
    groups = stage.parameter_groups(objective)
    objective.to(device)
    evaluator: OnlineEvaluator | None = None
    if online:
        evaluator = OnlineEvaluator(online, images, run.resize, objective, context, device)

    # ---- optimizer and running average
    engine = Engine(objective, stage, groups, device, computing)
    if stage.encoder_average is not None:
        engine.start_average("encoder.")
    if reader:
        engine.restore(reader.restore, step)
        reader = None  # its mapped files would stay on the disk after the state is removed
    begin_attempt(context, folder, step, engine, computing)

    # ---- the trainer and its hooks
    steps = stage.total_steps(images.n)
    metrics = Metrics(folder, step, steps) if context.rank == 0 else None
    useful = record.get("useful_seconds", 0.0) if record else 0.0
    logged = metrics.last_timing if metrics else {}
    trainer = Trainer(
        context=context,
        stage=stage,
        encoder=run.encoder,
        objective=objective,
        engine=engine,
        device=device,
        images=images.n,
        step=step,
        steps=steps,
        saver=Saver(folder, context, prepared.lock, resumed=step if record else None),
        save_seconds=60 * save_every_minutes,
        fingerprint=prepared.identity,
        clock=DeviceTime(context, useful, logged, max(8, log_interval(steps))),
        accumulation=computing.accumulation,
        labelled=bool(images.labels.min() >= 0),
    )
    hooks = trainer.hooks
    hooks.append(Watchdog(context))
    if prepared.scored is not None:
        scores = ScoreEpochs(trainer, prepared.scored, run.resize)
        if record is None or scores.resume(record):
            hooks.append(scores)
        else:
            warn_people(
                context,
                folder,
                "epochs are scored no more, since others were before the break, or none: an "
                "evaluation can take the last one alone (settings.epoch=last)",
            )
    if objective.has_health:
        hooks.append(CheckHealth(trainer))
    if evaluator is not None:
        hooks.append(EvaluateOnline(trainer, evaluator))
    hooks.append(SumLosses(trainer, record["losses"] if record else []))
    hooks.append(ReportProgress(trainer))
    if metrics is not None:
        hooks.append(LogSteps(trainer, metrics))
    return trainer


# ======== run: the steps


def _batches(
    context: Context, run: RunInputs, prepared: Prepared, trainer: "Trainer", stage_to: str | None
) -> Iterator[Batch]:
    """Return this rank's batches from the trainer's step on; copy the shards first if asked to."""
    split = prepared.split
    if stage_to:
        split = open_index(stage_shards(run.shards, stage_to))
        store_barrier("staged")  # one node may have all there already, and another one nothing
    return train_batches(
        replace(split, rows=prepared.images.rows),
        global_batch=run.stage.batch_size,
        rank=context.rank,
        world_size=context.world_size,
        seed=run.seed,
        views=run.stage.view_settings(),
        image_size=run.encoder.image_size,
        start_step=trainer.step,
        steps=trainer.steps - trainer.step,
        threads=max(1, context.cpus),
        change=run.stage.image_change(run.seed),
        # A part of a batch draws for itself.
        draw=trainer.objective.draw if trainer.accumulation == 1 else None,
        pinned=prepared.device.type == "cuda",
    )


@dataclass(kw_only=True)
class Trainer(Session):
    """The steps of a training, and its hooks.

    Attributes:
        step: updates done so far; with the settings it is the whole position of the run.
        saver: writes states; None saves nothing.
        save_seconds: between two states.
        fingerprint: of the run, in each state.
        accumulation: forward passes of an update.
        labelled: whether all images have labels; else it is unknown which lookups are right.
    """

    step: int
    saver: Saver | None
    save_seconds: float
    fingerprint: str
    accumulation: int = 1
    labelled: bool = True

    def __post_init__(self) -> None:
        self._saved_at = time.monotonic()
        self._buffers = Buffers(self.objective)
        self._input_stream = _input_stream() if self.device.type == "cuda" else None
        self._zero, self._one = torch.arange(2, dtype=torch.float64, device=self.device)
        self._unread: StepSums | None = None

    def run(self, batches: Iterator[Batch]) -> bool:
        """Train until the last step, or until a rank was asked to stop.

        Returns:
            Whether all steps are done. Either way the state of the last step is saved.

        Raises:
            TrainingFault: the loss is no longer a finite number, or the embedding has collapsed.
        """
        if self.engine.captures:
            self._capture_passes()
        self._saved_at = time.monotonic()
        self.clock.start()
        self.begin(READING, self.step + 1)
        for number, batch in enumerate(batches, self.step + 1):
            # ---- forward and backward passes
            self.begin(COMPUTING, number)
            means = self._compute(batch)

            # ---- results of the update before this one: read only now, when the device has more
            # to do. So the host is ahead of it and never keeps it waiting.
            if self._unread is not None and self._complete_update():
                break

            # ---- update
            self.begin(UPDATING, number)
            self._update(means, number)
            if self._is_read_at_once(number) and self._complete_update():
                break
            self.begin(READING, number + 1)
        if self._unread is not None:
            self._complete_update()
        self.save(wait=True)
        return self.step >= self.steps

    def close(self) -> None:
        """Close the hooks, wait for the last save and release the engine."""
        for hook in self.hooks:
            hook.close()
        if self.saver is not None:
            self.saver.wait()
        self.engine.close()

    def _capture_passes(self) -> None:
        """Capture the passes with noise, before the loader's threads pin memory of the device."""
        images = self.stage.batch_size // self.context.world_size
        batch = random_batch(self.stage, self.encoder, images)
        self.engine.capture(self.objective.prepare(batch, self.device))

    # ---- forward and backward passes

    def _compute(self, batch: Batch) -> dict[str, Tensor]:
        """Compute loss and gradients of a batch, in `accumulation` equal parts.

        Returns:
            The objective's scalars to log, means over the parts, [] on the device: `loss`, in
            float64, first.
        """
        self._buffers.copy()
        means: dict[str, Tensor] = {}
        parts = self.accumulation
        size = len(batch.ids) // parts
        for number in range(parts):
            rows = slice(number * size, (number + 1) * size)
            inputs = self._inputs(batch if parts == 1 else batch.part(rows))
            loss, scalars = self.engine(inputs)
            self.engine.backward(loss)
            for name, value in {"loss": loss.detach(), **scalars}.items():
                mean = value if parts == 1 else value / parts
                mean = mean.double() if name == "loss" else mean
                means[name] = means[name] + mean if number else mean
            if number < parts - 1:
                self.engine.step(0.0)  # accumulates only
        return means

    def _inputs(self, batch: Batch) -> Any:
        """Return the objective's inputs; a GPU makes them while it computes the step before."""
        if self._input_stream is None:
            inputs = self.objective.prepare(batch, self.device)
            tensors_in(inputs)  # refuses here, too, what would be missed on a GPU
            return inputs
        with torch.cuda.stream(self._input_stream):
            inputs = self.objective.prepare(batch, self.device)
        current = torch.cuda.current_stream()
        current.wait_stream(self._input_stream)
        for tensor in tensors_in(inputs):
            # Later batches are made in other memory until this step has read it.
            tensor.record_stream(current)
        return inputs

    # ---- update

    def _update(self, means: dict[str, Tensor], number: int) -> None:
        """Sum over the ranks the values that they must agree on, and update."""
        sums = StepSums(
            squared_norm=self.engine.squared_norm(),
            stop=self._one if self.context.stop_requested() else self._zero,
            save=self._one if self._is_save_due() else self._zero,
            means=means,
            world_size=self.context.world_size,
            device=self.device,
        )
        self.engine.step(self.stage.lr_multiplier(number - 1, self.steps))
        self.objective.after_update(self.engine.gathered)
        self._buffers.commit()
        sums.start_copy()
        self._unread = sums
        self.clock.step()

    def _is_read_at_once(self, number: int) -> bool:
        """Return whether the model is read between this step and the next one."""
        return number == self.steps or any(hook.reads_model(number) for hook in self.hooks)

    # ---- results

    def _complete_update(self) -> bool:
        """Read the results of the last update, check them and call the hooks.

        The forward pass of the next step may have run, but not its update.

        Returns:
            Whether to stop.

        Raises:
            TrainingFault: loss or gradient is not finite, or a hook found a fault.
        """
        assert self._unread is not None
        results = self._unread.read()
        self._unread = None
        # Before anything is saved, averaged or read by a hook: the weights are not finite, either.
        for name, value in (("loss", results.means["loss"]), ("gradient norm", results.grad_norm)):
            if not math.isfinite(value):
                raise TrainingFault(
                    f"{name} {value} in step {self.step + 1}",
                    "the last saved state is older; a lower learning rate or fp32 precision may "
                    "help",
                )
        self.step += 1
        if self.stage.encoder_average is not None:
            self.engine.update_average(self.stage.encoder_average)

        values = results.means
        if not self.labelled:
            known = [name for name in values if not name.startswith("lookup_accuracy")]
            values = {name: values[name] for name in known}
        update = Update(self.step, values, results.grad_norm)
        for hook in self.hooks:
            hook.after_step(update)
        if update.fault is not None:
            # Without a state of this step, the check is made again whenever the run is resumed.
            raise TrainingFault(
                f"step {self.step}: {update.fault}", "the last saved state is older"
            )

        if results.save and not results.stop and self.step < self.steps:
            self.save()
        return results.stop

    # ---- states

    def _is_save_due(self) -> bool:
        """Return whether rank 0 wants a state; one that is being written is not waited for."""
        if self.context.rank or self.saver is None:
            return False
        if time.monotonic() - self._saved_at <= self.save_seconds:
            return False
        return self.save_seconds == 0 or not self.saver.is_writing

    def save(self, wait: bool = False) -> None:
        """Save this step's state, in the background unless asked to wait.

        Raises:
            ReplicaError: ranks hold other weights or buffers.
            OSError: it was to be waited for, and failed; the next attempt may save it.
        """
        if self.saver is None:
            return
        with self.clock.outside_steps(useful=False):
            buffers = self._buffers.saved()
            compare_replicas(self.step, self.objective.parameters(), buffers)
            self.begin(SAVING, self.step + 1)
            record: dict[str, Any] = {"fingerprint": self.fingerprint}
            for hook in self.hooks:
                hook.before_save(record)
            record["useful_seconds"] = self.clock.useful
            own = buffers if self.context.rank == 0 else {}
            self.saver.save(self.step, snapshot(self.engine.slices, own), record)
        self._saved_at = time.monotonic()
        if wait:
            self.saver.wait()
            # Rank 0 knows the cause; the others' errors may come of its having cleaned up.
            error = from_rank_0(self.saver.error)
            if error:
                raise OSError(error)


@cache
def _input_stream() -> torch.cuda.Stream:
    """Return the stream on which inputs are made, one for all trainings of a process.

    PyTorch keeps cuBLAS' workspace of each stream that multiplies matrices for as long as a process
    lives, and the blur of an augmentation does.
    """
    return torch.cuda.Stream()


# ======== finish: outputs


def finish(context: Context, run: RunInputs, prepared: Prepared, trainer: Trainer) -> None:
    """Export the weights and write the completion record; remove states that nothing needs."""
    if prepared.lock is not None:
        prepared.lock.check()
        _write_final_record(context, run, prepared, trainer.clock)
        if not run.stage.keeps_state:
            remove_states(run.folder)
    barrier()


def _write_final_record(
    context: Context, run: RunInputs, prepared: Prepared, clock: DeviceTime
) -> None:
    """Export the weights of the final state and write the completion record, last; on rank 0."""
    images = prepared.images
    state = complete_states(run.folder / "state")[0]
    reader = StateReader(state, state_record(state, prepared.identity))
    exported = run.stage.export(run, reader, images)
    log = run.folder / "metrics.jsonl"
    timing = [entry["timing"] for entry in entries(log)]
    speeds = sorted(t["images_per_second"] for t in timing if "images_per_second" in t)
    held = clock.device_seconds
    trained = attempts(run.folder, reader.record["step"])
    record = {
        "run": run.folder.name,
        "fingerprint": prepared.identity,
        **run.description,
        "index_digest": images.digest,
        "view_of": images.view_of,
        **exported,
        "files": run.stage.outputs,
        "sha256": {name: sha256_file(run.folder / name) for name in run.stage.outputs},
        "world_size": context.world_size,
        "device_hours": timing[-1]["device_seconds"] / 3600 if timing else 0.0,
        "held_hours": held / 3600,
        "useful_part": min(1.0, clock.useful / held) if held else None,
        "images_per_second": speeds[len(speeds) // 2] if speeds else 0.0,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        # The software that is installed by now may be newer.
        **(trained[-1].origin if trained else origin()),
        "attempts": read_notes(run.folder).get("attempts", []),
        "losses": [loss / max(count, 1) for loss, count in reader.record["losses"]],
        "scores": reader.record.get("scores"),
        "log_sha256": sha256_file(log),
    }
    RunRecord.model_validate(record).write(RunRecord.path(run.folder))
