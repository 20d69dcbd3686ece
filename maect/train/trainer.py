"""One training from start, or from a saved state, to its completion record; top to bottom."""

import itertools
import logging
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from maect.core.context import Context
from maect.core.distributed import (
    any_rank,
    barrier,
    be_deterministic,
    differing_ranks,
    from_rank_0,
    sum_on_device,
    sum_scalars,
)
from maect.core.entries import entries, log_interval, missing
from maect.core.errors import RankError, UserError, counted
from maect.core.files import sha256_file
from maect.core.kept import keep
from maect.data.index import Index, open_index
from maect.data.loader import Batch, train_batches
from maect.data.staging import stage as stage_shards
from maect.models.attention import flash_kernel
from maect.recipes import Encoder, OnlineEvaluation
from maect.records import RunRecord
from maect.train.attempts import Attempt, note_attempt, threads_before
from maect.train.checkpoint import (
    Saver,
    StateReader,
    find_state,
    read_record,
    remove_incomplete,
    saved,
    snapshot,
)
from maect.train.device_time import DeviceTime
from maect.train.engine import Engine, Mark, build_engine, seconds_between, start
from maect.train.fence import Fence
from maect.train.metrics import Metrics, usage
from maect.train.objective import Objective
from maect.train.online import OnlineEvaluator
from maect.train.replay import Replay, part_of
from maect.train.run_folder import (
    check_not_lost,
    claim,
    fingerprint,
    is_finished,
    noted,
    origin,
    outputs,
    remove_states,
)
from maect.train.scores import Scores, accuracy
from maect.train.stage import RunInputs, Training
from maect.train.trace import Trace, steps_of
from maect.train.watchdog import COMPUTING, EVALUATING, READING, SAVING, SCORING, UPDATING, Watchdog

log = logging.getLogger(__name__)

Verdict = Literal["done", "requeue", "stopped"]
HEALTH_INTERVAL = 10
"""Steps between two checks of the embedding's spread."""


class TrainingFault(UserError):
    """A step after which the training must not go on, and what is left to do."""

    def __init__(self, fault: str, hint: str) -> None:
        super().__init__(f"{fault}; {hint}")
        self.fault = fault


class ReplicaError(RankError):
    """Ranks disagree; another attempt from the last state may succeed."""


def train(
    context: Context,
    run: RunInputs,
    *,
    save_every_minutes: float = 2.0,
    convert_world_size: bool = False,
    stage_to: str | None = None,
    online: OnlineEvaluation | None = None,
    replay: int | None = None,
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
        replay: repeat this step, counted from 1, in a copy of the run: train up to it, save nothing
            and say in `replay.json` what it was.
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
    scores = _scores(run, split)
    identity, fence, said = None, None, list[str]()
    if context.rank == 0:
        split.check_rows()
        identity = fingerprint(stage.name, stage, run.encoder, run.seed, split.digest, run.source)
        claim(folder, identity, _described(run))
        fence = Fence(folder / "state", context)
        remove_incomplete(folder / "state")
    identity = from_rank_0(identity)
    if from_rank_0(context.rank == 0 and is_finished(folder, identity)):
        if context.rank == 0 and not stage.keeps_state:
            remove_states(folder)
        return "done"

    # ---- weights and optimizer, from the source or from a saved state
    reader = find_state(folder / "state", identity, context, convert_world_size, device)
    if reader is None and replay is None and context.rank == 0:
        check_not_lost(folder, context.saved_before)
    step = reader.step if reader else 0
    if not convert_world_size and device.type == "cpu":
        # A step is repeated with what computed it, not what computed those before it.
        said += _as_before(context, folder, step if replay is None else step + 1)
    objective = stage.build(run.encoder, run.seed, run.source, split.class_names)
    if reader:
        objective.restore(reader)
    groups = stage.parameter_groups(objective)
    objective.to(device)
    evaluator = None
    if online:
        evaluator = OnlineEvaluator(online, images, run.resize, objective, context, device)
    engine = build_engine(objective, stage, groups, device, computing)
    if stage.encoder_average is not None:
        engine.start_average("encoder.")
    record: dict[str, Any] = {}
    if reader:
        engine.restore(reader.restore, step)
        # Its mapped files would stay on the disk after the state is removed.
        record, reader = reader.record, None

    # ---- what computes it
    attempt = Attempt.now(context, step, engine.compiled, computing)
    if context.rank == 0:
        said += note_attempt(folder, attempt)
        without = "computed without, which may change the last bits"
        if engine.not_compiled:
            said.append(f"compile: true is not possible here ({engine.not_compiled}): {without}")
        if computing.attention == "flash_attn" and flash_kernel() is None:
            said.append(f"attention: flash_attn is not installed here: {without}")
        for sentence in said:
            log.warning("%s: %s", folder, sentence)
            context.say(sentence)

    # ---- the steps
    steps = stage.total_steps(images.n)
    repeat = None if replay is None else Replay(replay)
    last = steps if repeat is None else repeat.step
    if not step < last <= steps and repeat:
        raise UserError(f"step {last} cannot be repeated: the run has {steps} steps")
    window = Trace(folder, context.rank, steps_of(trace, steps)) if trace else None
    metrics = Metrics(folder, step, steps) if context.rank == 0 else None
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
        saver=Saver(folder, context, fence, resumed=step if record else None),
        metrics=metrics,
        watchdog=Watchdog(folder, context),
        save_seconds=60 * save_every_minutes,
        record={"fingerprint": identity},
        losses=record["losses"] if record else [],
        clock=DeviceTime(
            context, record, metrics.device_seconds if metrics else 0.0, max(8, log_interval(steps))
        ),
        scores=scores.resumed(record.get("scores")) if scores and record else scores,
        evaluator=evaluator,
        replay=repeat,
        trace=window,
        accumulation=computing.accumulation,
    )
    try:
        if step < last:
            near = open_index(stage_shards(run.shards, stage_to)) if stage_to else split
            batches = train_batches(
                replace(near, rows=images.rows),
                global_batch=stage.batch_size,
                rank=context.rank,
                world_size=context.world_size,
                seed=run.seed,
                views=stage.view_settings(),
                image_size=run.encoder.image_size,
                start_step=step,
                steps=last - step,
                threads=max(1, context.cpus),
                change=stage.image_change(run.seed),
                # A part of a batch draws for itself.
                draw=objective.draw if computing.accumulation == 1 else None,
                pinned=device.type == "cuda",
            )
            if not trainer.run(islice(batches, last - step)):
                return "requeue"
    except TrainingFault as error:
        if repeat is None or trainer.step + 1 < last:
            raise
        repeat.fault = error.fault
    finally:
        trainer.watchdog.close()
        trainer.saver.wait()
        if metrics is not None:
            metrics.close()
        if window is not None:
            window.close()
        engine.close()

    # ---- outputs
    if repeat is not None:
        if context.rank == 0:
            repeat.write(folder, images, run.seed, stage.batch_size)
        barrier()
        return "done"
    if fence is not None:
        fence.check()
        _finish(run, identity, images, trainer)
        # A Snakemake that starts anew deletes what no rule of it has finished; then the state is
        # all there is, and the launcher removes it in the end.
        if keep(outputs(folder, stage)) and not stage.keeps_state:
            remove_states(folder)
    barrier()
    return "done"


@dataclass
class Trainer:
    """Everything that a step touches.

    Attributes:
        step: updates done so far; with the settings it is the whole position of the run.
        images: of the training set, for the epoch that is shown.
        metrics: rank 0's, None elsewhere.
        save_seconds: between two states.
        record: what every state says beside its step.
        losses: sum and number of the losses of each epoch so far, part of the state.
        clock: times the steps; part of the state.
        scores: of the epochs so far, if they are scored.
        evaluator: of the online evaluation, if there is one.
        replay: of the step that is repeated, if one is: then nothing is saved.
        trace: profiles some of the steps, if it is asked for.
        accumulation: forward passes of an update.
    """

    context: Context
    stage: Training
    encoder: Encoder
    objective: Objective
    engine: Engine
    device: torch.device
    step: int
    steps: int
    images: int
    saver: Saver
    metrics: Metrics | None
    watchdog: Watchdog
    save_seconds: float
    record: dict[str, Any]
    losses: list[tuple[float, int]]
    clock: DeviceTime
    scores: Scores | None = None
    evaluator: OnlineEvaluator | None = None
    replay: Replay | None = None
    trace: Trace | None = None
    accumulation: int = 1

    def __post_init__(self) -> None:
        self._saved_at = time.monotonic()
        self._changing = self.objective.changing_buffers()
        # As the last two forward passes found them.
        self._before, self._earlier = ([b.clone() for b in self._changing] for _ in range(2))
        self._forwarded = False  # a forward pass has run since the last update
        self._beside = _side_stream() if self.device.type == "cuda" else None
        self._flags = torch.arange(2, dtype=torch.float64, device=self.device)
        self._unread: _Sums | None = None
        self._knn: float | None = None

    def run(self, batches: Iterator[Batch]) -> bool:
        """Train until the last step, or until a rank was asked to stop.

        Returns:
            Whether all steps are done. Either way the state of the last step is saved.

        Raises:
            TrainingFault: the loss is no longer a finite number, or the embedding has collapsed.
        """
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
        return self.step >= (self.replay.step if self.replay else self.steps)

    def _compute(self, batch: Batch) -> "_Sums":
        """Forward and backward passes: in parts, as far as gradients are accumulated."""
        self._before, self._earlier = self._earlier, self._before
        if self._changing:
            torch._foreach_copy_(self._before, self._changing)
        self._forwarded = True
        means: dict[str, Any] = {}
        pieces, marks = self.accumulation, list[Mark]()
        for number in range(pieces):
            inputs = self._prepare(_piece(batch, number, pieces))
            marks.append(self.engine.mark())
            loss, values = self.engine(inputs)
            marks.append(self.engine.mark())
            self.engine.backward(loss)
            for name, value in {"loss": loss.detach(), **values}.items():
                part = value if pieces == 1 else value / pieces
                part = part.double() if name == "loss" else part
                means[name] = means[name] + part if number else part
            if number < pieces - 1:
                self.engine.step(0.0)
        return _Sums([*means], [*means.values()], marks)

    def _prepare(self, batch: Batch) -> Any:
        """Return the objective's inputs; a GPU makes them while it computes the step before."""
        if self._beside is None:
            return self.objective.prepare(batch, self.device)
        with torch.cuda.stream(self._beside):
            inputs = self.objective.prepare(batch, self.device)
        current = torch.cuda.current_stream()
        current.wait_stream(self._beside)
        for value in vars(inputs).values():
            if isinstance(value, Tensor):
                value.record_stream(current)
        return inputs

    def _update(self, sums: "_Sums", number: int) -> None:
        """Agree on loss, gradient and what every rank has to do at the same step; update.

        The device keeps the weights as they are if loss or gradient is not finite, which the host
        learns when it settles the step.
        """
        flags = [self.context.stop_requested(), self._is_due()]
        squared_norm = self.engine.squared_norm()
        raised = [self._flags[int(flag)] for flag in flags]
        total = sum_on_device([squared_norm, *raised, *sums.values], self.device)
        if self.replay and self.replay.step == number:
            self.replay.gradients = self._gradient_norms()
        skip = ((total[0] + total[3]) * 0 != 0).float()  # no number is, times 0
        self.engine.step(self.stage.lr_multiplier(number - 1, self.steps), skip)
        self.objective.after_update(self.engine.gathered)
        self._forwarded = False
        sums.read(total)
        self._unread = sums
        self.clock.step()

    def _is_read_at_once(self, number: int) -> bool:
        """Return whether the model is read between this step and the next one."""
        batch = self.stage.batch_size
        last = number == self.steps
        return (
            last
            or (self.objective.has_health and number % HEALTH_INTERVAL == 0)
            or (self.scores is not None and self._ends_an_epoch(number))
            or (
                self.evaluator is not None
                and self.evaluator.due((number - 1) * batch, number * batch, last)
            )
        )

    def _settle(self) -> bool:
        """Read what the last update gave, check and log it; returns whether to stop.

        The forward pass of the next step may have run, but not its update.
        """
        assert self._unread is not None
        total, names, marks = self._unread.numbers(), self._unread.names, self._unread.marks
        self._unread = None
        # With a head, whoever is early waits for the others in its forward pass.
        passes = [] if self.objective.has_health else map(seconds_between, marks[::2], marks[1::2])
        self.watchdog.stepped(sum(passes))
        norm = math.sqrt(total[0])
        stop, save_now = (value > 0 for value in total[1:3])
        means = [value / self.context.world_size for value in total[3:]]
        named = dict(zip(names, means, strict=True))
        if self.replay and self.replay.step == self.step + 1:
            self.replay.values = named | {"grad_norm": norm}
        if not math.isfinite(means[0]):
            self._not_finite("loss", means[0])
        if not math.isfinite(norm):
            self._not_finite("gradient norm", norm)
        self.step += 1

        # ---- average
        if self.stage.encoder_average is not None:
            self.engine.update_average(self.stage.encoder_average)

        # ---- log
        if self.scores is not None and self._ends_an_epoch(self.step):
            named["accuracy"] = self._score(self.scores)
        fault = None
        if self.step % HEALTH_INTERVAL == 0:
            health, fault = self.objective.health(self.stage.batch_size)
            named |= health
        self._log(named | self._evaluate(), norm, always=fault is not None)
        if fault:
            self._collapsed(fault)
        if save_now and not stop and self.step < self.steps:
            self.save()
        return stop

    def _ends_an_epoch(self, step: int) -> bool:
        """Return whether an update does; the rest of the last epoch is dropped."""
        done = step * self.stage.batch_size
        before = done - self.stage.batch_size
        return step == self.steps or done // self.images > before // self.images

    def _saved_buffers(self) -> dict[str, Tensor]:
        """The objective's, as they were after the last update."""
        buffers = self.objective.saved_buffers()
        if not self._forwarded:
            return buffers
        before = {id(b): old for b, old in zip(self._changing, self._before, strict=True)}
        return {name: before.get(id(buffer), buffer) for name, buffer in buffers.items()}

    def _score(self, scores: Scores) -> float:
        """Add the accuracy after an epoch, in percent; its time is not that of steps."""
        self.watchdog.at(SCORING, self.step)
        self.engine.complete()
        size, predict = self.encoder.image_size, self.objective.predict
        with self.clock.aside(useful=True):
            scores.accuracies.append(
                accuracy(self.context, scores.index, self.device, size, scores.resize, predict)
            )
        return scores.accuracies[-1]

    def _is_due(self) -> bool:
        """Return whether rank 0 wants a state; one that is being written is not waited for."""
        if self.context.rank or time.monotonic() - self._saved_at <= self.save_seconds:
            return False
        return not (self.save_seconds and self.saver.is_writing)

    def save(self, wait: bool = False) -> None:
        """Save this step's state, in the background unless asked to wait.

        Raises:
            UserError: it was to be waited for, and failed.
        """
        if self.replay:
            return
        with self.clock.aside(useful=False):
            self._compare_replicas()
            self.watchdog.at(SAVING, self.step + 1)
            if self.metrics is not None:
                self.metrics.sync()
            buffers = self._saved_buffers() if self.context.rank == 0 else {}
            record = self.record | {"losses": list(self.losses)}
            record |= {} if self.scores is None else {"scores": self.scores.record}
            record |= self.clock.record
            self.saver.save(self.step, snapshot(self.engine.shards, buffers), record)
        self._saved_at = time.monotonic()
        if wait:
            self.saver.wait()
            # Rank 0 knows the cause; the others' errors may come of its having cleaned up.
            error = from_rank_0(self.saver.error)
            if error:
                raise UserError(error)

    def _evaluate(self) -> dict[str, float]:
        """Return the values of an online evaluation, if one is due."""
        size, last = self.stage.batch_size, self.step == self.steps
        done = self.step * size
        if not (self.evaluator and self.evaluator.due(done - size, done, last)):
            return {}
        self.watchdog.at(EVALUATING, self.step)
        with self.clock.aside(useful=True, online=True):
            found = self.evaluator.evaluate(self.engine.shards)
            if self.metrics is not None:
                self.metrics.show(self.step, self.evaluator.pictures)
        self._knn = found.get("online_knn")
        return found

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
                "knn": self._knn,
                "slow": self.watchdog.straggler,
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

    def _compare_replicas(self) -> None:
        """Stop before a state is saved if ranks hold other bits of what all should hold alike.

        Raises:
            ReplicaError: they do; the state before it was sound.
        """
        self.engine.complete()
        held = itertools.chain(
            self.objective.parameters(), self.engine.copies(), self._saved_buffers().values()
        )
        if ranks := differing_ranks(held):
            few = 2 * len(ranks) < self.context.world_size
            raise ReplicaError(
                f"after step {self.step} the weights or buffers of rank "
                f"{', '.join(map(str, ranks))} of {self.context.world_size} differ from the "
                "others': a flipped bit, or a fault of a device; the state before is sound",
                ranks if few else (),
            )

    def _not_finite(self, what: str, value: float) -> None:
        """Stop; the weights are sound, but forward passes have changed the queue."""
        old = self._earlier if self._forwarded else self._before
        for before, buffer in zip(old, self._changing, strict=True):
            buffer.copy_(before)
        self._forwarded = False
        self.save(wait=True)
        raise TrainingFault(
            f"{what} {value} in step {self.step + 1}",
            "the state before it is saved; a lower learning rate or fp32 precision may help, and "
            f"`maect replay --step {self.step + 1}` shows what it was",
        )

    def _collapsed(self, fault: str) -> None:
        """Stop: embeddings that are the same do not become others again."""
        self.save(wait=True)
        raise TrainingFault(f"step {self.step}: {fault}", "the state is saved")

    def _gradient_norms(self) -> dict[str, float]:
        """Norm of the gradient of each part of the module; of all ranks at once."""
        squares: dict[str, float | Tensor] = {}
        for name, square in self.engine.squared_norms().items():
            squares[part_of(name)] = squares.get(part_of(name), 0.0) + square
        total = sum_scalars(list(squares.values()), self.device)
        return {name: math.sqrt(square) for name, square in zip(squares, total, strict=True)}


@cache
def _side_stream() -> torch.cuda.Stream:
    """On which inputs are made, one for all trainings of a process.

    PyTorch keeps cuBLAS' workspace of each stream that multiplies matrices for as long as a process
    lives, and the blur of an augmentation does.
    """
    return torch.cuda.Stream()


class _Sums:
    """Sums over the ranks that the host reads when it has the time.

    Attributes:
        names: of the values.
        values: of this rank, scalars on the device.
        marks: beginning and end of each forward pass.
    """

    def __init__(self, names: list[str], values: list[Tensor], marks: list[Mark]) -> None:
        self.names, self.values, self.marks = names, values, marks

    def read(self, total: Tensor) -> None:
        """Start copying the sums to the host, into pinned memory."""
        self._copied = None
        if total.is_cuda:
            self._host = torch.empty_like(total, device="cpu", pin_memory=True)
            self._host.copy_(total, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._host = total

    def numbers(self) -> list[float]:
        """The sums; waits until the device has come to their copy."""
        if self._copied is not None:
            self._copied.synchronize()
        return [float(value) for value in self._host.tolist()]


def _scores(run: RunInputs, split: Index) -> Scores | None:
    """No epoch scored yet, on held-out images or the split that the run names.

    Raises:
        UserError: it has other classes than the training images.
    """
    if (held := run.stage.scored_images(split)) is not None:
        return Scores(held, run.resize)
    if run.test is None:
        return None
    index = open_index(run.test)
    if index.class_names != split.class_names:
        raise UserError(f"{run.test}: its classes differ from those of {run.shards}")
    return Scores(index, run.resize)


def _piece(batch: Batch, number: int, pieces: int) -> Batch:
    """One of `pieces` equal parts of a batch."""
    if pieces == 1:
        return batch
    share = len(batch.ids) // pieces
    return batch.part(slice(number * share, (number + 1) * share))


def _as_before(context: Context, folder: Path, step: int) -> list[str]:
    """Let the CPU compute with as many threads as before a run was interrupted, for the same bits.

    Args:
        context: this rank's.
        folder: of the run.
        step: up to which it was computed.

    Returns:
        What rank 0 has to tell people: that they are others than this rank was given.
    """
    given = torch.get_num_threads()
    before = from_rank_0(threads_before(folder, step) if context.rank == 0 else None)
    if before in (None, given) or any_rank(before > len(os.sched_getaffinity(0))):
        return []
    torch.set_num_threads(before)
    return [
        f"{counted(before, 'thread')} a rank, as before, for the same bits, although {given} would "
        "do (--convert-world-size takes these)"
    ]


def _described(run: RunInputs) -> dict[str, Any]:
    """Return what `recipe.json` says about a run, and its record."""
    return {
        "stage": run.stage.name,
        "settings": run.stage.model_dump(mode="json"),
        "computing": run.computing.model_dump(mode="json"),
        "seed": run.seed,
        "encoder": run.encoder.model_dump(mode="json"),
        "source": run.source.name if run.source is not None else None,
    }


def _finish(
    run: RunInputs,
    identity: str,
    images: Index,
    trainer: Trainer,
) -> None:
    """Export the weights and write the completion record, last."""
    state = saved(run.folder / "state")[0]
    reader = StateReader(state, read_record(state, identity))
    exported = run.stage.export(run, reader, images)
    logged = entries(run.folder / "metrics.jsonl")
    timing = [entry["timing"] for entry in logged]
    speeds = sorted(t["images_per_second"] for t in timing)
    held, useful = trainer.clock.held, trainer.clock.useful
    steps = run.stage.total_steps(images.n)
    unlogged = missing({entry["step"] for entry in logged}, steps, steps)
    record = {
        "run": run.folder.name,
        "fingerprint": identity,
        **_described(run),
        **exported,
        "files": run.stage.outputs,
        "sha256": {name: sha256_file(run.folder / name) for name in run.stage.outputs},
        "world_size": trainer.context.world_size,
        "device_hours": timing[-1]["device_seconds"] / 3600 if timing else 0.0,
        "held_hours": held / 3600,
        "useful_part": min(1.0, useful / held) if held else None,
        "images_per_second": speeds[len(speeds) // 2] if speeds else 0.0,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **origin(),
        "attempts": noted(run.folder).get("attempts", []),
        "losses": [loss / max(count, 1) for loss, count in trainer.losses],
        "scores": trainer.scores and trainer.scores.record,
        "unlogged_steps": unlogged or None,
    }
    RunRecord.model_validate(record).write(RunRecord.path(run.folder))
