"""How much of the device time that a training holds leads to steps that are kept."""

import inspect
import math
import random
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from ranks import Place

from maect.tools.job_commands import train
from maect.train import device_time, trainer
from maect.train.device_time import DeviceTime
from maect.train.hooks import CheckHealth, ReportProgress
from maect.train.trainer import Trainer

HOUR = 3600.0
STEP = 5.0
# Assumed for some GPUs of a cluster, none of it measured on one.
START = 60.0  # imports, process group, reading of the state
COMPILING = 20.0  # more than others that an attempt's first step takes
COPYING, WRITING = 0.5, 20.0  # what a save takes from the training, and until it is complete


class KilledError(Exception):
    """A node fails."""


@dataclass
class Machine:
    """A clock, what fails on it, and the states that survive."""

    now: float = 0.0
    held: float = 0.0
    fails_at: float = 2 * HOUR
    writing: float = WRITING
    states: list[tuple[float, int, dict]] = field(default_factory=list)
    dice: random.Random = field(default_factory=lambda: random.Random(0))

    def pass_time(self, seconds: float) -> None:
        self.now, self.held = self.now + seconds, self.held + seconds
        if self.now >= self.fails_at:
            # Exactly every two hours would always be as long after a save.
            self.fails_at += 2 * HOUR * self.dice.uniform(0.9, 1.1)
            raise KilledError

    @property
    def state(self) -> tuple[int, dict]:
        """The last one that was complete."""
        complete = [state[1:] for state in self.states if state[0] <= self.now]
        return complete[-1] if complete else (0, {})


class Engine:
    """Steps take time, and nothing else."""

    shards = ()
    captures = False

    def __init__(self, machine: Machine) -> None:
        self.machine, self.seconds = machine, STEP + COMPILING

    def __call__(self, inputs):
        self.machine.pass_time(self.seconds)
        self.seconds = STEP
        return torch.zeros(()), {}

    def backward(self, loss):
        pass

    def step(self, multiplier, skip):
        pass

    def squared_norm(self):
        return torch.zeros(())

    def gathered(self, module):
        pass


class Saver:
    """One save at a time, in the background."""

    error = None

    def __init__(self, machine: Machine) -> None:
        self.machine, self.free = machine, 0.0

    @property
    def is_writing(self):
        return self.free > self.machine.now

    def save(self, step, tensors, record):
        self.machine.pass_time(max(0.0, self.free - self.machine.now) + COPYING)
        self.free = self.machine.now + self.machine.writing
        self.machine.states.append((self.free, step, record))

    def wait(self):
        self.machine.pass_time(max(0.0, self.free - self.machine.now))


def attempt(machine: Machine, steps: int, minutes: float, **spied) -> Trainer:
    """From the last state to the end, if nothing fails."""
    step, record = machine.state
    place = Place(0, 0, 1)
    vars(place).update(spied)
    place.held_seconds = lambda: machine.held
    objective = torch.nn.Module()
    objective.changing_buffers = list
    objective.saved_buffers = dict
    objective.prepare = objective.after_update = lambda *_: None
    objective.health, objective.has_health = lambda size: ({}, None), True
    stage = SimpleNamespace(
        batch_size=8, epochs=1, encoder_average=None, lr_multiplier=lambda *_: 1.0
    )
    machine.pass_time(START)
    training = Trainer(
        context=place, stage=stage, encoder=None, objective=objective, engine=Engine(machine),
        device=torch.device("cpu"), images=8 * steps, step=step, steps=steps,
        saver=Saver(machine), save_seconds=60 * minutes, fingerprint="",
        clock=DeviceTime(place, record),
    )  # fmt: skip
    training.hooks = [CheckHealth(training), ReportProgress(training)]
    batch = trainer.Batch(0, *[torch.zeros(8)] * 3, (torch.zeros(1, 8),))
    assert training.run(batch for _ in range(steps - step))
    return training


def simulate(
    monkeypatch, minutes: float, hours: float = 24.0, **faults: float
) -> tuple[float, Machine]:
    """Useful part of the time held by a job of so many hours of steps, and the machine after it."""
    machine = Machine(**faults)
    clock = SimpleNamespace(monotonic=lambda: machine.now)
    monkeypatch.setattr(trainer, "time", clock)
    monkeypatch.setattr(device_time, "time", clock)
    steps, training = int(hours * HOUR / STEP), None
    while training is None:
        with suppress(KilledError):
            training = attempt(machine, steps, minutes)
    # Each step counts once; an attempt's first counts as its second.
    assert training.clock.useful == pytest.approx(steps * STEP)
    return training.clock.useful / machine.held, machine


def test_a_day_with_a_failure_every_two_hours(monkeypatch):
    """What the default interval costs: docs/reference/cluster.md."""
    minutes = inspect.signature(train).parameters["save_every_minutes"].default
    part, machine = simulate(monkeypatch, minutes)
    print(f"{machine.held / HOUR:.2f} h held, {part:.4f} of it useful")
    assert machine.held > 24 * HOUR + 11 * (START + COMPILING)
    assert part >= 0.97


def test_a_disk_slower_than_the_interval_is_not_waited_for(monkeypatch):
    limits = {"fails_at": math.inf, "writing": 400.0}
    _, machine = simulate(monkeypatch, 2.0, hours=2.0, **limits)
    assert machine.held < 2 * HOUR + START + COMPILING + 20 * COPYING + 2 * 400.0  # at the end
    assert 2 * HOUR / 410 - 1 < len(machine.states) <= 2 * HOUR / 400 + 1


def test_steps_that_are_read_early_seem_no_faster(monkeypatch):
    machine, told = Machine(fails_at=math.inf), []
    clock = SimpleNamespace(monotonic=lambda: machine.now)
    monkeypatch.setattr(trainer, "time", clock)
    monkeypatch.setattr(device_time, "time", clock)
    attempt(machine, 40, 2.0, report=told.append)
    speeds = [line["images_per_second"] for line in told]
    assert len(speeds) == 40 and speeds[0] == pytest.approx(8 / (STEP + COMPILING))
    assert speeds[8:] == pytest.approx([8 / STEP] * 32)


def test_what_counts_as_useful(monkeypatch):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(device_time, "time", clock)
    steps = DeviceTime(Place(0, 0, 1), {"useful_seconds": 100.0})
    for seconds in (60.0, 2.0, 3.0):  # the first compiles
        clock.now += seconds
        assert steps.step() == seconds
    assert steps.useful == 107.0
    with steps.outside_steps(useful=False):
        clock.now += 4.0
    with steps.outside_steps(useful=True):
        clock.now += 1.0
    clock.now += 2.0
    assert (steps.step(), steps.useful) == (2.0, 110.0)
