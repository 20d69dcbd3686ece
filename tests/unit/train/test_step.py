"""One update: buffers as the last one left them, sums with names, and when the host reads them."""

import math
from operator import truediv
from types import SimpleNamespace

import pytest
import torch
from ranks import Place

from maect.data.loader import Batch
from maect.train.hooks import Hook
from maect.train.step import Buffers, DeviceTime, StepSums
from maect.train.trainer import Trainer, TrainingFault
from maect.train.watchdog import COMPUTING, READING, SAVING, UPDATING

CPU = torch.device("cpu")


class Counting:
    """An objective whose forward passes count in a buffer, beside one that does not change."""

    has_health = False

    def __init__(self):
        self.queue = torch.zeros(2)
        self.fixed = torch.full((2,), 7.0)

    def changing_buffers(self):
        return [self.queue]

    def saved_buffers(self):
        return {"queue": self.queue, "fixed": self.fixed}

    def parameters(self):
        return []

    def prepare(self, batch, device):
        return batch.ids

    def after_update(self, gathered):
        self.gathered = gathered


def forward(buffers, objective):
    buffers.copy()
    objective.queue += 1


def test_a_state_has_the_buffers_of_the_last_update():
    objective = Counting()
    buffers = Buffers(objective)
    forward(buffers, objective)
    buffers.commit()
    assert buffers.saved()["queue"].tolist() == [1, 1]
    forward(buffers, objective)  # of the next step, whose update is not made yet
    assert objective.queue.tolist() == [2, 2]
    assert {name: value.tolist() for name, value in buffers.saved().items()} == {
        "queue": [1, 1], "fixed": [7, 7],
    }  # fmt: skip
    buffers.commit()
    assert buffers.saved()["queue"].tolist() == [2, 2]


def sums(loss=2.0, squared_norm=9.0, stop=0.0, save=0.0, world_size=1, **more):
    values = {name: torch.tensor(value) for name, value in {"loss": loss, **more}.items()}
    flags = torch.tensor(stop), torch.tensor(save)
    return StepSums(torch.tensor(squared_norm), *flags, values, world_size, CPU)


def test_sums_have_names():
    found = sums(stop=1.0, lookup=5.0)
    found.start_copy()
    assert found.read() == (3.0, True, False, {"loss": 2.0, "lookup": 5.0})
    assert sums(save=1.0).read()[1:3] == (False, True)
    # The gradient's parts add up; what is logged is a mean over the ranks, or known lookups.
    assert sums(loss=8.0, world_size=4).read() == (3.0, False, False, {"loss": 2.0})
    found = sums(lookup_accuracy=30.0, lookup_known=4.0, world_size=2).read().means
    assert found == {"loss": 1.0, "lookup_accuracy": 30.0}


class Engine:
    """Counts passes and updates; `faults` are values of a step, by name."""

    slices = ()
    captures = False

    def __init__(self, objective, faults):
        self.objective, self.faults = objective, faults
        self.forwards, self.updates = 0, 0
        self.rates, self.momenta = [], []

    def value(self, name, usual):
        step, value = self.faults.get(name, (0, 1.0))
        return torch.tensor(value) if self.forwards == step else usual

    def __call__(self, inputs):
        self.forwards += 1
        self.objective.queue += 1
        loss = self.value("loss", inputs.mean())
        return loss, {"double": 2 * loss, "lookup_accuracy": loss}

    def backward(self, loss):
        pass

    def squared_norm(self):
        return self.value("squared_norm", torch.tensor(1.0))

    def step(self, multiplier):
        self.rates.append(multiplier)
        self.updates += 1

    def update_average(self, momentum):
        self.momenta.append(momentum)

    def gathered(self, module):
        pass

    def close(self):
        self.closed = True


class Saver:
    error, is_writing = None, False

    def __init__(self):
        self.states = []

    def save(self, step, tensors, record):
        queue = tensors.get("buffer|0|queue")
        self.states.append((step, None if queue is None else queue.tolist(), record))

    def wait(self):
        self.waited = True


class Seen(Hook):
    """Notes how many forward passes and updates had run at each call, and what it was told."""

    def __init__(self, engine, reads=()):
        self.engine, self.reads, self.calls = engine, reads, []
        self.begun, self.updates, self.closed = [], [], False

    def begin(self, activity, step):
        self.begun.append((activity, step))

    def reads_model(self, step):
        return step in self.reads

    def after_step(self, update):
        self.calls.append((update.step, self.engine.forwards, self.engine.updates))
        self.updates.append(update)

    def before_save(self, record):
        record["calls"] = len(self.calls)

    def close(self):
        self.closed = True


def trainer(faults=(), reads=(), steps=4):
    objective = Counting()
    engine = Engine(objective, dict(faults))
    place = Place(0, 0, 1)
    stage = SimpleNamespace(batch_size=2, encoder_average=None, lr_multiplier=truediv)
    return Trainer(
        context=place, stage=stage, encoder=None, objective=objective, engine=engine, device=CPU,
        images=100, step=0, steps=steps, saver=Saver(), save_seconds=math.inf, fingerprint="ours",
        clock=DeviceTime(place, 0.0), hooks=[Seen(engine, reads)],
    )  # fmt: skip


def batches(count):
    """Of four samples each."""
    four = torch.tensor([1.0, 2.0, 3.0, 6.0])
    return (Batch(0, *[four] * 3, (torch.zeros(1, 4),)) for _ in range(count))


def test_the_host_is_a_step_ahead_unless_a_hook_reads_the_model():
    training = trainer(reads=(2,))
    assert training.run(batches(4))
    # Of step 1 and 3 the next forward pass has run; of step 2, which is read, and the last it has
    # not. No update is ever ahead.
    assert training.hooks[0].calls == [(1, 2, 1), (2, 2, 2), (3, 4, 3), (4, 4, 4)]
    (state,) = training.saver.states
    assert state[:2] == (4, [4, 4])
    assert (state[2]["fingerprint"], state[2]["calls"]) == ("ours", 4)


def test_an_update_is_made_as_its_stage_says():
    training = trainer(steps=2)
    training.stage.encoder_average = 0.75
    assert training.run(batches(2))
    assert training.engine.rates == [0.0, 0.5]  # step / steps, from 0
    assert training.engine.momenta == [0.75] * 2
    assert training.objective.gathered == training.engine.gathered
    (seen,) = training.hooks
    assert [(update.step, update.grad_norm) for update in seen.updates] == [(1, 1.0), (2, 1.0)]
    assert seen.updates[1].values == {"loss": 3.0, "double": 6.0, "lookup_accuracy": 3.0}
    steps = [(READING, 1), (COMPUTING, 1), (UPDATING, 1), (READING, 2), (COMPUTING, 2)]
    assert seen.begun == [*steps, (UPDATING, 2), (READING, 3), (SAVING, 3)]
    assert training.saver.waited and not seen.closed
    training.close()
    assert seen.closed and training.engine.closed


def test_an_update_in_parts_has_the_mean_of_their_losses():
    training = trainer(steps=2)
    training.accumulation, training.labelled = 2, False
    assert training.run(batches(2))
    assert training.engine.rates == [0.0, 0.0, 0.0, 0.5]  # the first of two only accumulates
    # Parts of 1.5 and 4.5; without labels nobody knows which lookups are right.
    (seen,) = training.hooks
    assert [update.values for update in seen.updates] == [{"loss": 3.0, "double": 6.0}] * 2


@pytest.mark.parametrize("reads", [(), (3,)])
def test_a_training_that_is_asked_to_stop_saves_its_step(reads):
    training = trainer(reads=reads)
    training.save_seconds = 0.0
    training.context.stop_requested = lambda: training.engine.updates == 2
    assert not training.run(batches(4)) and training.step == 3
    assert [state[:2] for state in training.saver.states[-1:]] == [(3, [3, 3])]
    assert [state[0] for state in training.saver.states] == [1, 2, 3]


def test_passes_are_captured_for_the_images_of_a_rank():
    training, captured = trainer(), []
    training.context.world_size, training.stage.batch_size = 2, 6
    training.stage.view_settings = tuple
    training.encoder = SimpleNamespace(image_size=8, pixels=SimpleNamespace(channels=3))
    training.engine.captures = True
    training.engine.capture = lambda inputs: captured.append(inputs.tolist())
    assert training.run(batches(4)) and captured == [[0, 1, 2]]


def test_a_last_state_that_is_not_saved_is_an_error():
    """Another attempt may save it. A training without states has none."""
    training = trainer()
    training.saver.error = "the disk is full"
    with pytest.raises(OSError, match="the disk is full"):
        training.run(batches(4))
    training = trainer()
    training.saver = None
    assert training.run(batches(4))
    training.close()


def test_other_ranks_leave_states_and_buffers_to_the_first():
    training = trainer()
    training.context.rank, training.save_seconds = 1, 0.0
    assert training.run(batches(4))
    assert [state[:2] for state in training.saver.states] == [(4, None)]


@pytest.mark.parametrize(
    ("interval", "is_writing", "saved"),
    [(0.0, True, [1, 2, 3, 4]), (1e-9, True, [4]), (1e-9, False, [1, 2, 3, 4])],
)
def test_a_disk_slower_than_the_interval_is_not_waited_for(interval, is_writing, saved):
    """Unless a state is asked for after every step."""
    training = trainer()
    training.save_seconds, training.saver.is_writing = interval, is_writing
    assert training.run(batches(4))
    assert [step for step, *_ in training.saver.states] == saved


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("step", [1, 3, 4])
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("loss", math.nan, "loss nan"),
        ("loss", -math.inf, "loss -inf"),
        ("squared_norm", math.inf, "gradient norm inf"),
        ("squared_norm", math.nan, "gradient norm nan"),
    ],
)
def test_what_is_not_finite_ends_the_run_and_enters_nothing(name, value, said, step, is_read):
    """Neither a state, although one is due after each step, nor a hook, nor an average."""
    training = trainer({name: (step, value)}, (step,) if is_read else ())
    training.save_seconds = 0.0
    training.stage.encoder_average = 0.75
    with pytest.raises(TrainingFault, match=f"^{said} in step {step}; the last saved state is old"):
        training.run(batches(4))
    sound = range(1, step)
    assert [call[0] for call in training.hooks[0].calls] == [*sound]
    assert len(training.engine.momenta) == step - 1
    assert [state[:2] for state in training.saver.states] == [(s, [s, s]) for s in sound]


@pytest.fixture
def clock(monkeypatch):
    """The time of the steps, in seconds."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("maect.train.step.time", clock)
    return clock


def test_the_time_of_attempts_before_is_that_of_the_log(clock):
    clock.now = 50.0
    place = Place(0, 0, 2)
    place.began = 40.0
    logged = {"device_seconds": 300.0, "held_seconds": 400.0, "useful_seconds": 280.0}
    timing = DeviceTime(place, 200.0, logged)
    clock.now += 5.0
    assert timing.timing == {
        "device_seconds": 310.0, "held_seconds": 430.0, "useful_seconds": 200.0,
    }  # fmt: skip


def test_what_counts_as_useful(clock):
    steps = DeviceTime(Place(0, 0, 1), 100.0)
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


def test_the_speed_is_that_of_the_last_eight_steps(clock):
    place = Place(0, 0, 2)
    place.began = 0.0
    steps = DeviceTime(place, 0.0)
    for seconds in (10.0, *[0.5] * 8):
        clock.now += seconds
        assert steps.step() == seconds
    assert steps.steps_per_second == 2.0
    # On two ranks; the second step counts for the first, too.
    assert steps.timing == {"device_seconds": 28.0, "held_seconds": 28.0, "useful_seconds": 9.0}
    assert steps.step() > 0 and steps.steps_per_second > 0  # between two ticks of the clock


def test_the_share_of_online_evaluations_is_of_the_time_of_the_attempt(clock):
    steps = DeviceTime(Place(0, 0, 1), 0.0)
    assert steps.online_part == 0.0
    with steps.outside_steps(useful=True, online=True):
        clock.now += 2.0
    with steps.outside_steps(useful=True):
        clock.now += 6.0
    assert steps.online_part == 0.25
