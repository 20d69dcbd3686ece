"""One training from start, or from a saved state, to its completion record; top to bottom."""

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch

from maect.core.context import Context
from maect.core.distributed import (
    barrier,
    be_deterministic,
    from_rank_0,
    store_barrier,
    sum_on_device,
)
from maect.core.entries import log_interval
from maect.core.errors import UserError
from maect.data.index import open_index
from maect.data.loader import Batch, train_batches
from maect.data.staging import stage as stage_shards
from maect.models.attention import flash_kernel
from maect.recipes import Encoder, OnlineEvaluation
from maect.train.attempts import Attempt, compute_as_before, note_attempt, slow_decoding
from maect.train.buffers import Buffers
from maect.train.checkpoint import (
    Saver,
    find_state,
    remove_incomplete,
    snapshot,
)
from maect.train.device_time import DeviceTime
from maect.train.engine import Engine, start
from maect.train.evaluations import TrainingEvaluations, first_scores
from maect.train.final_record import described, write_final_record
from maect.train.metrics import Metrics, usage
from maect.train.noise import random_batch
from maect.train.objective import Objective, tensors_in
from maect.train.online import OnlineEvaluator
from maect.train.replicas import compare_replicas
from maect.train.run_folder import (
    check_not_lost,
    is_finished,
    remove_states,
    reused_sample_fields,
    source_files,
    take_over_folder,
)
from maect.train.run_lock import RunLock
from maect.train.stage import RunInputs, Training
from maect.train.sums import Sums
from maect.train.trace import Trace, steps_of
from maect.train.watchdog import COMPUTING, READING, SAVING, UPDATING, Watchdog

log = logging.getLogger(__name__)

Verdict = Literal["done", "requeue", "stopped"]
HEALTH_INTERVAL = 10
"""Steps between two checks of the embedding's spread."""


class TrainingFault(UserError):
    """A step after which the training must not go on, and what is left to do."""

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
    trace: str | None = None,
) -> Verdict:
    """Run a training, or resume it; called on every rank.

    Args:
        context: this rank's.
        run: what is trained on what.
        save_every_minutes: how much work a kill may cost.
        convert_world_size: resume from a state that another number of ranks saved.
        stage_to: node-local folder to read the shards from, copied there first.
        online: how often to evaluate the encoder meanwhile; no output of the run depends on it.
        trace: first and last step to profile into `traces/`, such as `100-105`.

    Returns:
        "done" once its record is written; "requeue" if asked to stop, with the state saved.

    Raises:
        UserError: settings, data, source and saved state do not go together.
    """
    # ---- what is trained, and whether it is done already
    stage, computing, folder = run.stage, run.computing, run.folder
    if computing.deterministic:
        be_deterministic()
    device = start(context)
    split = open_index(run.shards)
    split.check_channels(run.encoder.pixels.channels)
    stage.check_ranks(context.world_size, computing)
    images = stage.training_images(split)
    scores = first_scores(run, split)
    identity: str | None = None
    lock: RunLock | None = None
    said: list[str] = []
    if context.rank == 0:
        split.check_rows()
        begins_with = source_files(run.source)
        identity = stage.fingerprint(run.encoder, run.seed, split.digest, begins_with)
        lock = RunLock(folder, context)  # before what another recipe has left is set aside
        take_over_folder(folder, identity, described(run))
        remove_incomplete(folder / "state")
    identity = from_rank_0(identity)
    if from_rank_0(context.rank == 0 and is_finished(folder, identity)):
        if context.rank == 0 and not stage.keeps_state:
            remove_states(folder)  # as at the end, where a kill may have come between
        return "done"

    # ---- weights and optimizer, from the source or from a saved state
    reader = find_state(folder / "state", identity, context, convert_world_size, device)
    if reader is None and context.rank == 0:
        check_not_lost(folder)
    step = reader.step if reader else 0
    if not convert_world_size and device.type == "cpu":
        said += compute_as_before(context, folder, step)
    objective = stage.build(run.encoder, run.seed, run.source, split.class_names)
    if reader:
        objective.restore(reader)
    elif run.source is not None:
        what = reused_sample_fields(run.source, split) if context.rank == 0 else None
        objective.forget_samples(from_rank_0(what))
    groups = stage.parameter_groups(objective)
    objective.to(device)
    evaluator = None
    if online:
        evaluator = OnlineEvaluator(online, images, run.resize, objective, context, device)
    engine = Engine(objective, stage, groups, device, computing)
    if stage.encoder_average is not None:
        engine.start_average("encoder.")
    record: dict[str, Any] = {}
    if reader:
        engine.restore(reader.restore, step)
        # Its mapped files would stay on the disk after the state is removed.
        record, reader = reader.record, None

    if scores and record:
        scores = scores.resumed(record.get("scores"))
        if scores is None:
            said.append(
                "epochs are scored no more, since others were before the break, or none: an "
                "evaluation can take the last one alone (settings.epoch=last)"
            )

    # ---- what computes it
    attempt = Attempt.now(context, step, engine.compiled, computing)
    without_native = slow_decoding(attempt)
    if context.rank == 0:
        said += note_attempt(folder, attempt)
        without = "computed without, which may change the last bits"
        if without_native:
            said.append(without_native)
        if engine.not_compiled:
            said.append(f"nothing can be compiled here ({engine.not_compiled}): {without}")
        if computing.attention == "flash_attn" and flash_kernel() is None:
            said.append(f"attention: flash_attn is not installed here: {without}")
        for sentence in said:
            log.warning("%s: %s", folder, sentence)
            context.say(sentence)

    # ---- the steps
    steps = stage.total_steps(images.n)
    window = Trace(folder, context.rank, steps_of(trace, steps)) if trace else None
    metrics = Metrics(folder, step, steps) if context.rank == 0 else None
    watchdog, least = Watchdog(folder, context), max(8, log_interval(steps))
    clock = DeviceTime(context, record, metrics.device_seconds if metrics else 0.0, least)
    evaluations = TrainingEvaluations(
        context=context,
        device=device,
        objective=objective,
        engine=engine,
        watchdog=watchdog,
        clock=clock,
        metrics=metrics,
        image_size=run.encoder.image_size,
        batch_size=stage.batch_size,
        images=images.n,
        steps=steps,
        scores=scores,
        online=evaluator,
    )
    trainer = Trainer(
        context=context,
        stage=stage,
        encoder=run.encoder,
        objective=objective,
        engine=engine,
        device=device,
        step=step,
        steps=steps,
        images=images.n,
        saver=Saver(folder, context, lock, resumed=step if record else None),
        metrics=metrics,
        watchdog=watchdog,
        save_seconds=60 * save_every_minutes,
        record={"fingerprint": identity},
        losses=record["losses"] if record else [],
        clock=clock,
        trace=window,
        accumulation=computing.accumulation,
        labelled=bool(images.labels.min() >= 0),
        evaluations=evaluations,
    )
    try:
        if step < steps:
            near = split
            if stage_to:
                near = open_index(stage_shards(run.shards, stage_to))
                store_barrier(
                    "staged"
                )  # one node may have all there already, and another one nothing
            batches = train_batches(
                replace(near, rows=images.rows),
                global_batch=stage.batch_size,
                rank=context.rank,
                world_size=context.world_size,
                seed=run.seed,
                views=stage.view_settings(),
                image_size=run.encoder.image_size,
                start_step=step,
                steps=steps - step,
                threads=max(1, context.cpus),
                change=stage.image_change(run.seed),
                # A part of a batch draws for itself.
                draw=objective.draw if computing.accumulation == 1 else None,
                pinned=device.type == "cuda",
            )
            if not trainer.run(batches):
                return "requeue"
    finally:
        trainer.watchdog.close()
        trainer.saver.wait()
        if metrics is not None:
            metrics.close()
        if window is not None:
            window.close()
        engine.close()

    # ---- outputs
    if lock is not None:
        lock.check()
        write_final_record(run, identity, images, context, clock, trainer.losses, scores)
        if not stage.keeps_state:
            remove_states(folder)
    barrier()
    return "done"


@dataclass(kw_only=True)
class Trainer:
    """Everything that the steps and evaluations of a training under way touch.

    Attributes:
        steps: of the whole training.
        images: of the training set.
        metrics: rank 0's, None elsewhere.
        clock: times the steps; part of the state.
        step: updates done so far; with the settings it is the whole position of the run.
        save_seconds: between two states.
        record: what every state says beside its step.
        losses: sum and number of the losses of each epoch so far, part of the state.
        evaluations: of the encoder while it trains, if there are any.
        trace: profiles some of the steps, if it is asked for.
        accumulation: forward passes of an update.
        labelled: whether all images have labels; else it is unknown which lookups are right.
    """

    context: Context
    stage: Training
    encoder: Encoder
    objective: Objective
    engine: Engine
    device: torch.device
    steps: int
    images: int
    metrics: Metrics | None
    watchdog: Watchdog
    clock: DeviceTime
    step: int
    saver: Saver
    save_seconds: float
    record: dict[str, Any]
    losses: list[tuple[float, int]]
    evaluations: TrainingEvaluations | None = None
    trace: Trace | None = None
    accumulation: int = 1
    labelled: bool = True

    def __post_init__(self) -> None:
        self._saved_at = time.monotonic()
        self._buffers = Buffers(self.objective)
        self._beside = _side_stream() if self.device.type == "cuda" else None
        self._flags = torch.arange(2, dtype=torch.float64, device=self.device)
        self._unread: Sums | None = None

    def run(self, batches: Iterator[Batch]) -> bool:
        """Train until the last step, or until a rank was asked to stop.

        Returns:
            Whether all steps are done. Either way the state of the last step is saved.

        Raises:
            TrainingFault: the loss is no longer a finite number, or the embedding has collapsed.
        """
        if self.engine.captures:
            self._capture()
        self._saved_at = time.monotonic()
        self.clock.start()
        self.watchdog.at(READING, self.step + 1)
        for number, batch in enumerate(batches, self.step + 1):
            self.watchdog.at(COMPUTING, number)
            if self.trace is not None:
                self.trace.begin(number)
            sums = self._compute(batch)
            # What the step before gave is read only now, when the device has more to do: the host
            # is ahead of it and never keeps it waiting.
            if self._unread is not None and self._settle():
                break
            self.watchdog.at(UPDATING, number)
            self._update(sums, number)
            if self._is_read_at_once(number) and self._settle():
                break
            self.watchdog.at(READING, number + 1)
        if self._unread is not None:
            self._settle()
        self.save(wait=True)
        return self.step >= self.steps

    def _capture(self) -> None:
        """Capture the passes with noise, before the loader's threads pin memory of the device."""
        images = self.stage.batch_size // self.context.world_size
        batch = random_batch(self.stage, self.encoder, images)
        self.engine.capture(self.objective.prepare(batch, self.device))

    def _compute(self, batch: Batch) -> Sums:
        """Forward and backward passes: in equal parts, as far as gradients are accumulated."""
        self._buffers.keep()
        means: dict[str, Any] = {}
        pieces = self.accumulation
        share = len(batch.ids) // pieces
        for number in range(pieces):
            rows = slice(number * share, (number + 1) * share)
            inputs = self._prepare(batch if pieces == 1 else batch.part(rows))
            loss, values = self.engine(inputs)
            self.engine.backward(loss)
            for name, value in {"loss": loss.detach(), **values}.items():
                part = value if pieces == 1 else value / pieces
                part = part.double() if name == "loss" else part
                means[name] = means[name] + part if number else part
            if number < pieces - 1:
                self.engine.step(0.0)
        return Sums([*means], [*means.values()])

    def _prepare(self, batch: Batch) -> Any:
        """Return the objective's inputs; a GPU makes them while it computes the step before."""
        if self._beside is None:
            inputs = self.objective.prepare(batch, self.device)
            tensors_in(inputs)  # refuses here, too, what would be missed on a GPU
            return inputs
        with torch.cuda.stream(self._beside):
            inputs = self.objective.prepare(batch, self.device)
        current = torch.cuda.current_stream()
        current.wait_stream(self._beside)
        for tensor in tensors_in(inputs):
            # Later batches are made in other memory until this step has read it.
            tensor.record_stream(current)
        return inputs

    def _update(self, sums: Sums, number: int) -> None:
        """Agree on loss, gradient and what every rank has to do at the same step; update.

        The device keeps the weights as they are if loss or gradient is not finite, which the host
        learns when it settles the step.
        """
        flags = [self.context.stop_requested(), self._is_due()]
        squared_norm = self.engine.squared_norm()
        raised = [self._flags[int(flag)] for flag in flags]
        total = sum_on_device([squared_norm, *raised, *sums.values], self.device)
        skip = ((total[0] + total[3]) * 0 != 0).float()  # no number is, times 0
        self.engine.step(self.stage.lr_multiplier(number - 1, self.steps), skip)
        self.objective.after_update(self.engine.gathered)
        self._buffers.settle()
        sums.read(total)
        self._unread = sums
        self.clock.step()

    def _is_read_at_once(self, number: int) -> bool:
        """Return whether the model is read between this step and the next one."""
        return (
            number == self.steps
            or (self.objective.has_health and number % HEALTH_INTERVAL == 0)
            or (self.evaluations is not None and self.evaluations.due(number))
        )

    def _settle(self) -> bool:
        """Read what the last update gave, check and log it; returns whether to stop.

        The forward pass of the next step may have run, but not its update.
        """
        assert self._unread is not None
        total, names = self._unread.numbers(), self._unread.names
        self._unread = None
        norm = math.sqrt(total[0])
        stop, save_now = (value > 0 for value in total[1:3])
        means = [value / self.context.world_size for value in total[3:]]
        named = dict(zip(names, means, strict=True))
        if not self.labelled:
            named = {k: v for k, v in named.items() if not k.startswith("lookup_accuracy")}
        if not math.isfinite(means[0]):
            self._not_finite("loss", means[0])
        if not math.isfinite(norm):
            self._not_finite("gradient norm", norm)
        self.step += 1

        # ---- average
        if self.stage.encoder_average is not None:
            self.engine.update_average(self.stage.encoder_average)

        # ---- log
        if self.evaluations is not None:
            named |= self.evaluations.accuracy(self.step)
        fault = None
        if self.step % HEALTH_INTERVAL == 0:
            health, fault = self.objective.health(self.stage.batch_size)
            named |= health
        if self.evaluations is not None:
            named |= self.evaluations.online_values(self.step)
        self._log(named, norm, always=fault is not None)
        if fault:
            self._collapsed(fault)
        if save_now and not stop and self.step < self.steps:
            self.save()
        return stop

    def _is_due(self) -> bool:
        """Return whether rank 0 wants a state; one that is being written is not waited for."""
        if self.context.rank or time.monotonic() - self._saved_at <= self.save_seconds:
            return False
        return not (self.save_seconds and self.saver.is_writing)

    def save(self, wait: bool = False) -> None:
        """Save this step's state, in the background unless asked to wait.

        Raises:
            OSError: it was to be waited for, and failed; the next attempt may save it.
        """
        with self.clock.aside(useful=False):
            compare_replicas(self.step, self.objective.parameters(), self._buffers.saved())
            self.watchdog.at(SAVING, self.step + 1)
            if self.metrics is not None:
                self.metrics.sync()
            buffers = self._buffers.saved() if self.context.rank == 0 else {}
            record = self.record | {"losses": list(self.losses)}
            record |= self.evaluations.record if self.evaluations else {}
            record |= self.clock.record
            self.saver.save(self.step, snapshot(self.engine.shards, buffers), record)
        self._saved_at = time.monotonic()
        if wait:
            self.saver.wait()
            # Rank 0 knows the cause; the others' errors may come of its having cleaned up.
            error = from_rank_0(self.saver.error)
            if error:
                raise OSError(error)

    def _log(self, values: dict[str, float], norm: float, always: bool = False) -> None:
        """Show the step, add it to its epoch's loss and, if its turn has come, to the metrics."""
        size, stage = self.stage.batch_size, self.stage
        done, speed = self.step * size, self.clock.steps_per_second * size
        self.context.report(
            {
                "epoch": min(done // self.images + 1, stage.epochs),
                "epochs": stage.epochs,
                "step": self.step,
                "steps": self.steps,
                "loss": values["loss"],
                "images_per_second": speed,
                "knn": self.evaluations and self.evaluations.knn,
            }
        )
        epoch = (done - size) // self.images
        self.losses += [(0.0, 0)] * (epoch + 1 - len(self.losses))
        loss, count = self.losses[epoch]
        self.losses[epoch] = (loss + values["loss"], count + 1)
        every = log_interval(self.steps)
        evaluated = "online_rank_me" in values
        due = self.step % every == 0 or self.step == self.steps or evaluated or "accuracy" in values
        if self.metrics is None or not (due or always):
            return
        low, high = self.engine.learning_rates()
        more = {"epoch": done / self.images, "lr": high, "lr_lowest": low, "grad_norm": norm}
        timing = {"images_per_second": speed} | self.clock.timing(evaluated)
        flops = stage.flops_per_image(self.encoder) * speed / self.context.world_size
        timing |= usage(flops, stage.precision, self.device)
        self.metrics.log(self.step, values | more, timing)

    def _not_finite(self, what: str, value: float) -> None:
        """Stop; the weights are sound, but forward passes have changed the queue."""
        self._buffers.restore()
        self.save(wait=True)
        raise TrainingFault(
            f"{what} {value} in step {self.step + 1}",
            "the state before it is saved; a lower learning rate or fp32 precision may help",
        )

    def _collapsed(self, fault: str) -> None:
        """Stop: embeddings that are the same do not become others again."""
        self.save(wait=True)
        raise TrainingFault(f"step {self.step}: {fault}", "the state is saved")


@cache
def _side_stream() -> torch.cuda.Stream:
    """On which inputs are made, one for all trainings of a process.

    PyTorch keeps cuBLAS' workspace of each stream that multiplies matrices for as long as a process
    lives, and the blur of an augmentation does.
    """
    return torch.cuda.Stream()
