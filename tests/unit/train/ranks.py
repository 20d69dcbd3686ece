"""Runs trainings on ranks, each a process forked from one that has imported everything, or here."""

import gc
import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from maect.core.context import Context

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["OMP_NUM_THREADS"] = "1"

# `make mutate` says fork: a rank then has the fault of its test, and imports nothing again.
_server = multiprocessing.get_context(os.environ.get("MAECT_TEST_RANKS", "forkserver"))
# Beside what a rank names, what DeepSpeed imports as late as its first engine: two seconds each.
PRELOAD = [
    "maect.train.trainer", "maect.stages.objectives", "deepspeed", "torch.utils.tensorboard",
    "deepspeed.runtime.zero.stage_1_and_2", "deepspeed.runtime.zero.stage3",
    "deepspeed.module_inject.auto_ep_layer", "torch._inductor.compile_fx",
]  # fmt: skip
_server.set_forkserver_preload(PRELOAD)


@dataclass
class Place(Context):
    """What `maect.launch` would give a rank; can stop, or kill itself, at a given step."""

    rank: int
    local_rank: int
    world_size: int
    stop_at: int | None = None
    kill_at: int | None = None
    cpus: int = 1
    gpus: bool = False
    step: int = 0
    freeze_at: int | None = None
    results: object = None
    wait_at: int | None = None  # the step after which to wait for the file `wait_for`
    wait_for: str = ""
    meeting: str = ""
    began: float = field(default_factory=time.monotonic)
    superseded: bool = False

    def is_current(self):
        return not self.superseded

    @property
    def local_world_size(self):
        return self.world_size

    def stop_requested(self):
        return self.stop_at is not None and self.step + 1 >= self.stop_at

    def report(self, progress):
        self.step = progress["step"]
        if self.kill_at is not None and self.step >= self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        while self.step == self.wait_at and not os.path.exists(self.wait_for):
            time.sleep(0.01)
        if self.freeze_at is not None and self.rank == 1 and self.step >= self.freeze_at:
            os.kill(os.getpid(), signal.SIGSTOP)

    def store(self, timeout):
        from torch.distributed import FileStore

        return FileStore(self.meeting, self.world_size)

    def fail(self, error):
        self.results.put((self.rank, f"{type(error).__name__}: {error}"))
        os._exit(1)


def _rank(rank, world_size, meeting, jobs, results, options):
    # What is imported is no garbage: to look through it would copy it, half a second each time.
    gc.freeze()
    log = open(options.pop("log"), "a")  # noqa: SIM115
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    limit = options.pop("file_limit", None)
    if rank in options.pop("limited", range(world_size)) and limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if "stall_seconds" in options:
        os.environ["MAECT_STALL_SECONDS"] = str(options.pop("stall_seconds"))
    options["results"] = results
    from maect.core.log import rank_log

    rank_log(rank)
    try:
        verdicts = []
        for number, job in enumerate(jobs):
            options["meeting"] = f"{meeting}-{number}"
            arguments = dict(job)
            function = arguments.pop("function", train)
            verdicts.append(function(Place(rank, rank, world_size, **options), **arguments))
        results.put((rank, verdicts))
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        results.put((rank, f"{type(error).__name__}: {error}"))
        os._exit(1)


def train(
    context, *, folder, shards, stage, settings, encoder, seed, source, test=None, resize=None,
    computing=(), stop_at=None, submitted=None, **options,
):  # fmt: skip
    """A training whose parts a test names one by one."""
    from maect.recipes import Encoder, OnlineEvaluation
    from maect.recipes.settings import Computing
    from maect.stages import STAGES
    from maect.train import trainer

    context.stop_at = stop_at or context.stop_at
    if "online" in options:
        options["online"] = OnlineEvaluation.model_validate(options["online"])

    run = trainer.RunInputs(
        Path(folder), Path(shards), STAGES[stage].model_validate(settings),
        Encoder.model_validate(encoder), seed, source and Path(source), test and Path(test), resize,
        Computing.model_validate(dict(computing)), submitted,
    )  # fmt: skip
    return trainer.train(context, run, **options)


def refused(context, **job):
    """What a training says that ends in an error on all ranks, which go on with the next one."""
    from maect.core.errors import RankError, UserError

    try:
        return train(context, **job)
    except (OSError, RankError, UserError) as error:
        return f"{type(error).__name__}: {error}"


class Ranks:
    """Processes of one launch; `finish` gives rank 0's verdicts or its error message."""

    def __init__(self, world_size, jobs, log: Path, **options):
        meeting = str(log.with_name(f".{log.name}-{uuid.uuid4().hex[:8]}"))
        self.results = _server.SimpleQueue()
        self.log = log
        arguments = (meeting, jobs, self.results, options | {"log": str(log)})
        self.processes = [
            _server.Process(target=_rank, args=(rank, world_size, *arguments), daemon=True)
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def finish(self, timeout=240):
        """Wait until all have answered; a rank that died without a word ends the others."""
        answers = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(self.processes) and time.monotonic() < deadline:
            alive = [process.is_alive() for process in self.processes]
            while not self.results.empty():
                rank, answer = self.results.get()
                answers[rank] = answer
            failed = any(isinstance(answer, str) for answer in answers.values())
            if failed or any(rank not in answers and not on for rank, on in enumerate(alive)):
                break
            time.sleep(0.01)
        self.kill()
        if not answers:
            raise RuntimeError(f"no rank answered:\n{self.log.read_text()[-3000:]}")
        return answers.get(0, next(iter(answers.values())))

    def kill(self, ranks=None):
        for number, process in enumerate(self.processes):
            if (ranks is None or number in ranks) and process.is_alive():
                process.kill()
        for number, process in enumerate(self.processes):
            if ranks is None or number in ranks:
                process.join()


def run(world_size, *jobs, log: Path, **options):
    """Verdicts of several trainings in a row on `world_size` ranks, or the first error.

    A job is the arguments of `train`, or of what it names as `function`.
    """
    return Ranks(world_size, list(jobs), log, **options).finish()


class Alone(Place):
    """The only rank, in the process of the test."""

    store = Context.store
    fail = Context.fail


def alone(*jobs, **options):
    """Verdicts of several trainings in a row on one rank in this process, about a second each."""
    from maect.train.engine import single_rank_group

    verdicts = []
    for job in jobs:
        arguments = dict(job)
        function = arguments.pop("function", train)
        place = Alone(0, 0, 1, **options)
        with single_rank_group(place):
            verdicts.append(function(place, **arguments))
    return verdicts
