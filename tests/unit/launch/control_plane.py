"""The launcher's own code against a model of SLURM, of the file system and of time, with faults.

    python control_plane.py HISTORIES [SEED]      as many histories, on all cores

A history is a list of faults, drawn from a seed; it decides everything that happens. The launcher
is run, killed and started again until the run is complete. What must hold:

- never two live trainings of one run, but where a fault makes them inevitable, as a node that SLURM
  takes for dead: then the older one ends at its next save (`train/run_lock.py`);
- no healthy job is cancelled;
- a launcher that ends by itself leaves no live job behind without saying so;
- every history ends, with the run complete.

`check` runs one history; `shrink` leaves out faults as long as it still fails.
"""

import heapq
import json
import multiprocessing
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatch
from types import SimpleNamespace
from unittest.mock import patch

from maect.core import files
from maect.core.files import sealed
from maect.launch import launcher, progress, record, slurm, submit
from maect.launch.resources import LaunchError, Resources, Task

TICK, SAVE, MIN_JOB_AGE, HEALTHY = 10.0, 60.0, 300.0, 6 * 3600.0
UNKNOWN = "slurm_load_jobs error: Invalid job id specified"
AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
LIVE = ("PENDING", "RUNNING", "COMPLETING")
KEPT = (*LIVE, "NODE_FAIL", "PREEMPTED")  # SLURM may put these back


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong at a time, for a while."""

    at: float
    kind: str
    seconds: float = 0.0

    def __repr__(self) -> str:
        return f"Fault({self.at:.0f}, {self.kind!r}, {self.seconds:.0f})"


# Kinds of faults, and how long each may last.
LASTING = {
    "controller away": 1500, "controller hangs": 600, "squeue lists nothing": 4000,
    "squeue lists others only": 4000, "unknown word": 900, "sacct away": 4000, "sacct silent": 9000,
    "sacct lags": 900, "files are seen late": 30, "queue is full": 2000, "clock is off": 7200,
}  # fmt: skip
MOMENTS = (
    "rank dies", "node fails", "node fails for good", "node is taken for dead", "preempted",
    "wall limit", "cancelled by a person", "launcher killed", "launcher stopped", "ids begin again",
    "next submission: no answer", "next submission: accepted late", "next submission: refused",
    "next submission: limit", "controller forgets what has ended",
)  # fmt: skip
TWO_ARE_INEVITABLE = {
    "node is taken for dead", "files are seen late", "next submission: accepted late",
}  # fmt: skip


def draw(seed: int) -> list[Fault]:
    """The faults of a history."""
    dice = random.Random(seed)
    faults: list[Fault] = []
    together = dice.uniform(0, 400)  # troubles seldom come alone
    for _ in range(dice.choice((1, 2, 3, 4, 6, 9))):
        kind = dice.choice((*LASTING, *MOMENTS))
        at = dice.choice((0.0, together, together, together + 100, dice.uniform(0, 1200)))
        faults.append(Fault(at, kind, dice.uniform(1, LASTING.get(kind, 1))))
    return sorted(faults, key=lambda fault: fault.at)


class KilledError(BaseException):
    """kill -9 of the launcher."""


class BrokenError(AssertionError):
    """What must hold does not."""


@dataclass
class Job:
    """A job as SLURM knows it."""

    id: str
    name: str
    state: str = "PENDING"
    ended: float = 0.0
    restarts: int = 0
    training: "Training | None" = None


@dataclass(eq=False)
class Training:
    """The ranks of one attempt of a job."""

    job: Job
    writer: int
    alive: bool = True


class File:
    """As much of `pathlib.Path` as the record of a job needs, on the model's file system."""

    def __init__(self, world: "World", path: str) -> None:
        self.world, self.path = world, path

    def __truediv__(self, name: str) -> "File":
        return File(self.world, f"{self.path}/{name}")

    def __str__(self) -> str:
        return self.path

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def read_text(self, encoding: str = "") -> str:
        return self.world.read(self.path, "login")

    def open(self, mode: str) -> None:
        raise FileNotFoundError(2, "No such file or directory", self.path)

    def unlink(self, missing_ok: bool = False) -> None:
        self.world.files.pop(self.path, None)

    def glob(self, pattern: str) -> list["File"]:
        wanted = f"{self.path}/{pattern}"
        return [File(self.world, path) for path in self.world.files if fnmatch(path, wanted)]


@dataclass
class World:
    """SLURM, files and time."""

    faults: Sequence[Fault]
    steps: int = 8
    now: float = 0.0
    files: dict[str, list[tuple[float, str, str]]] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    done: bool = False
    saved: int = 0
    writer: int = 0
    trainings: list[Training] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._count, self._ids, self._names = 0, 0, 0
        self._kills = [fault.at for fault in self.faults if fault.kind == "launcher killed"]
        self._pending = [f for f in self.faults if f.kind.startswith("next submission")]
        self.strict = not any(fault.kind in TWO_ARE_INEVITABLE for fault in self.faults)
        last = max([fault.at + fault.seconds for fault in self.faults], default=0.0)
        self.end_by = last + HEALTHY
        for fault in self.faults:
            if fault.kind in MOMENTS:
                self.at(fault.at, lambda kind=fault.kind: self.happens(kind))

    # Time

    def at(self, when: float, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._agenda, (when, self._count, what))

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        while self._agenda and self._agenda[0][0] <= until:
            self.now, _, what = heapq.heappop(self._agenda)
            what()
        self.now = until

    def sleep(self, seconds: float) -> None:
        """The launcher waits; here it may be killed."""
        self.pass_time(max(seconds, TICK) if seconds >= launcher.TICK else seconds)
        if self.now > self.end_by:
            raise BrokenError(f"no end at {self.now:.0f}: {self.jobs}")
        if self._kills and self.now >= self._kills[0]:
            self._kills.pop(0)
            raise KilledError

    def pause(self, seconds: float) -> None:
        """Nobody is there."""
        self.pass_time(seconds)
        while self._kills and self.now >= self._kills[0]:
            self._kills.pop(0)

    def time(self) -> float:
        late = self.lasting("clock is off")
        return 1e9 + self.now + (0 if late is None else (3600 - late.seconds))

    def lasting(self, kind: str) -> Fault | None:
        for fault in self.faults:
            if fault.kind == kind and fault.at <= self.now < fault.at + fault.seconds:
                return fault
        return None

    # Files

    def write(self, path: str, text: str, node: str) -> None:
        self.files.setdefault(path, []).append((self.now, node, text))

    def read(self, path: str, node: str) -> str:
        """What a node sees: its own writes at once, those of others perhaps later."""
        late = self.lasting("files are seen late")
        for when, writer, text in reversed(self.files.get(path, [])):
            if writer == node or when <= self.now - (late.seconds if late else 0):
                return text
        raise FileNotFoundError(2, "No such file or directory", path)

    def note(self, job: Job, **values: object) -> None:
        """What rank 0 says of itself."""
        path = f"run/jobs/{job.name}/rank-0.json"
        try:
            before = json.loads(self.read(path, job.name))
        except FileNotFoundError:
            before = {"rank": 0, "id": job.id, "end": None, "time": 0.0}
        before.pop("checksum", None)
        self.write(path, json.dumps(sealed(before | values)), job.name)

    # Jobs

    def accept(self, name: str) -> Job:
        self._ids += 1
        job = Job(str(self._ids), name)
        self.jobs[job.id] = job
        self.at(self.now + (2000 if self.lasting("queue is full") else 20), lambda: self.start(job))
        return job

    def start(self, job: Job) -> None:
        if job.state == "PENDING":
            job.state = "RUNNING"
            restart = job.restarts
            self.at(self.now + 5, lambda: self.begin(job, restart))

    def begin(self, job: Job, restart: int) -> None:
        """The ranks check whether they are meant, and take the right to write."""
        if job.state != "RUNNING" or job.restarts != restart:
            return
        if self.done or not self.is_meant(job):  # a training checks whether it is complete
            self.end(job, "COMPLETED")
            return
        others = [training for training in self.trainings if training.alive]
        if others and self.strict:
            raise BrokenError(f"{self.now:.0f}: {job} begins beside {others[0].job}")
        self.writer += 1
        job.training = Training(job, self.writer)
        self.trainings.append(job.training)
        self.note(job, end=None, saved=self.saved)
        self.at(self.now + SAVE, lambda training=job.training: self.save(training, self.saved + 1))

    def is_meant(self, job: Job) -> bool:
        """Whether the record that a job sees names it."""
        try:
            asked = json.loads(self.read("run/job.json", job.name))
        except FileNotFoundError:
            return False
        return bool(asked["name"] == job.name and asked["state"] != "ended")

    def stopping(self, node: str) -> bool:
        """Whether the record asks the job to stop, as a node sees it."""
        return bool(json.loads(self.read("run/job.json", node))["stop"])

    def save(self, training: Training, step: int) -> None:
        if not training.alive:
            return
        job = training.job
        if training.writer != self.writer or not self.is_meant(job):
            training.alive = False  # superseded: it says nothing, and nothing may follow
            if job.training is training:
                self.end(job, "FAILED")
            return
        self.saved = max(self.saved, step)
        self.note(job, saved=self.saved, progress={"step": step, "steps": self.steps})
        if self.saved >= self.steps or self.stopping(job.name):
            self.done = self.saved >= self.steps
            self.note(job, end="done" if self.done else "stopped")
            self.at(self.now + 2, lambda: self.end(job, "COMPLETED"))
            training.alive = False
            return
        self.at(self.now + SAVE, lambda: self.save(training, step + 1))

    def end(self, job: Job, state: str) -> None:
        if job.state not in LIVE:
            return
        job.state, job.ended = state, self.now
        if job.training is not None:
            job.training.alive, job.training = False, None

    def requeue(self, job: Job, word: str, back: bool = True) -> None:
        """SLURM takes a job off its nodes and, after a while, puts it back under the same id."""
        self.end(job, word)

        def again() -> None:
            if job.state == word:
                job.state, job.restarts = "PENDING", job.restarts + 1
                self.at(self.now + 20, lambda: self.start(job))

        if back:
            self.at(self.now + 25, again)

    def happens(self, kind: str) -> None:
        running = [job for job in self.jobs.values() if job.state == "RUNNING"]
        live = [job for job in self.jobs.values() if job.state in LIVE]
        for job in running[:1]:
            if kind == "rank dies":
                if job.training is not None:
                    self.note(job, end="error", kind="OSError", message="", traceback="", time=1.0)
                self.end(job, "FAILED")
            elif kind in ("node fails", "node fails for good"):
                self.requeue(job, "NODE_FAIL", kind == "node fails")
            elif kind == "preempted":
                self.requeue(job, "PREEMPTED")
            elif kind == "node is taken for dead" and job.training is not None:
                job.training = None  # its ranks go on
                self.requeue(job, "NODE_FAIL")
            elif kind == "wall limit" and job.training is not None:
                self.note(job, end="requeue")
                self.end(job, "TIMEOUT")
        if kind == "cancelled by a person" and live:
            self.end(live[0], "CANCELLED")
        for job in [job for job in self.jobs.values() if job.state not in KEPT]:
            if kind == "ids begin again":
                self.jobs[job.id] = Job(job.id, "another", "RUNNING")
            elif kind == "controller forgets what has ended":
                del self.jobs[job.id]

    # Commands

    def known(self) -> list[Job]:
        """What the controller still has in memory."""
        jobs = self.jobs.values()
        return [job for job in jobs if job.state in KEPT or self.now - job.ended < MIN_JOB_AGE]

    def command(self, *words: str, timeout: float = 60.0) -> tuple[int, str, str]:
        self.sleep(0.1)
        if words[0] == "sacct":
            return self.sacct(words[-1])
        if self.lasting("controller hangs"):
            self.sleep(timeout)
            return 124, "", f"{words[0]} did not answer"
        if self.lasting("controller away"):
            return 1, "", AWAY
        if words[0] == "squeue":
            return 0, self.squeue(), ""
        if words[0] == "scancel":
            return self.scancel(words[1])
        if words[1:] == ("show", "config"):
            return 0, "ClusterName             = here\n", ""
        job = next((job for job in self.known() if job.id == words[-1]), None)
        if job is None:
            return 1, "", UNKNOWN
        return 0, f"JobId={job.id} JobName={job.name} JobState={job.state} Reason=None", ""

    def squeue(self) -> str:
        if self.lasting("squeue lists nothing"):
            return ""
        if self.lasting("squeue lists others only"):
            return "900|RUNNING|None|another\n901|RUNN"
        word = "HIBERNATED" if self.lasting("unknown word") else ""
        rows = (f"{job.id}|{word or job.state}|None|{job.name}" for job in self.known())
        return "\n".join(rows)

    def sacct(self, job_id: str) -> tuple[int, str, str]:
        if self.lasting("sacct away"):
            return 1, "", "sacct: error: Connection refused"
        job = self.jobs.get(job_id)
        if job is None or self.lasting("sacct silent"):
            return 0, "", ""
        lags = self.lasting("sacct lags")
        over = job.state not in LIVE and not (lags and self.now - job.ended < lags.seconds)
        return 0, f"{job.state if over else 'RUNNING'}|{job.name}", ""

    def scancel(self, which: str) -> tuple[int, str, str]:
        """Cancel by an id, or by `--name=NAME`."""
        name = which.removeprefix("--name=")
        jobs = [job for job in self.known() if job.state in KEPT and name in (job.id, job.name)]
        if name == which and not jobs:
            return 1, "", "scancel: error: Kill job error: Invalid job id specified"
        for job in jobs:
            if job.name == "another":
                raise BrokenError(f"{self.now:.0f}: the launcher cancels somebody else's job")
            healthy = job.training is not None and job.training.alive
            if healthy and self.strict and not self.stopping("login"):
                raise BrokenError(f"{self.now:.0f}: the launcher cancels a healthy job")
            self.end(job, "CANCELLED")
            job.state = "CANCELLED"
        return 0, "", ""

    def submit(self, folder: File, job: record.Job, watch: Callable[[], None]) -> dict[str, object]:
        """The process that calls sbatch; it outlives a launcher that is killed."""
        fault = None
        if self._pending and self._pending[0].at <= self.now:
            fault = self._pending.pop(0).kind
        answer: dict[str, object] = {}

        def accepted() -> None:
            answer["id"] = self.accept(job.name).id

        if fault == "next submission: refused":
            return {"error": "Invalid account", "refused": True}
        if fault == "next submission: limit":
            return {"error": "sbatch: error: QOSMaxSubmitJobPerUserLimit", "refused": True}
        if self.lasting("controller away") or self.lasting("controller hangs"):
            self.sleep(100)
            return {"error": AWAY, "refused": True}
        if fault == "next submission: accepted late":
            self.at(self.now + 90, lambda: self.accept(job.name) and None)
            self.sleep(30)
            return {"error": "sbatch: error: Socket timed out on send/recv operation"}
        if fault == "next submission: no answer":
            self.accept(job.name)
            self.sleep(2)
            return {"error": "the submission broke off"}
        self.at(self.now + 2, accepted)
        self.sleep(3)
        return answer


class Person:
    """Ctrl-C, if the history has one; once."""

    def __init__(self, world: World, used: set[Fault]) -> None:
        self.world = world
        self.asked = [f for f in world.faults if f.kind == "launcher stopped" and f not in used]
        self.used = used

    @property
    def stops(self) -> int:
        due = [fault for fault in self.asked if fault.at <= self.world.now]
        self.used |= set(due)
        return len(due)

    def reason_to_leave(self) -> None:
        return None


class Silent(progress.ProgressLine):
    """What a launcher says, for who reads a failing history."""

    def __init__(self, world: World) -> None:
        self.title, self.world = "run", world

    def say(self, text: str) -> None:
        self.world.log.append(f"{self.world.now:6.0f} {text}")

    def is_due(self) -> bool:
        return False

    def close(self) -> None:
        pass


def check(faults: Sequence[Fault]) -> World:
    """Run a history.

    Raises:
        BrokenError: what must hold does not.
    """
    world = World(faults)
    clock = SimpleNamespace(time=world.time, monotonic=lambda: world.now, sleep=world.sleep)
    folder = File(world, "run")
    names = iter(range(10**6))
    stands_in = {
        (launcher, "time"): clock, (slurm, "time"): clock, (record, "time"): clock,
        (slurm, "command"): world.command, (slurm, "marked"): lambda name: [],
        (slurm, "_lost_a_rank"): lambda folder, job: False,
        (submit, "submit"): world.submit, (submit, "request"): lambda *_: {"cpus": 1},
        (record, "write_record"): lambda file, value: world.write(
            file.path, json.dumps(sealed(value)), "login"
        ),
        (record, "make_job_folder"): record.job_folder,
        (record, "remove_job_folder"): lambda folder, name: None,
        (launcher.os.path, "realpath"): str,
        (record, "read_text"): lambda path: path.read_text(),
        (files, "read_text"): lambda path: path.read_text(),
        (record, "uuid"): SimpleNamespace(
            uuid4=lambda: SimpleNamespace(hex=f"{next(names):010d}")
        ),
    }  # fmt: skip
    used: set[Fault] = set()
    with ExitStack() as stack:
        for (owner, name), value in stands_in.items():
            stack.enter_context(patch.object(owner, name, value))
        while not world.done:
            if world.now > world.end_by:
                raise BrokenError(f"no end at {world.now:.0f}: {world.log[-3:]}")
            _launch(world, folder, Person(world, used))
            world.pause(30.0)
        world.pass_time(60.0)
    if left := [job for job in world.jobs.values() if job.training and job.training.alive]:
        raise BrokenError(f"complete, and {left} live")
    return world


def _launch(world: World, folder: File, person: Person) -> None:
    """One start of the launcher."""
    task, resources, line = Task("a:b"), Resources("slurm"), Silent(world)
    try:
        launcher._Launch(
            task, folder, resources, lambda: world.done, line, person, lambda: True
        ).run()
    except KilledError:
        world.log.append(f"{world.now:6.0f} launcher killed")
    except (LaunchError, SystemExit) as error:
        world.log.append(f"{world.now:6.0f} {error}")
        told = any("not cancelled" in line for line in world.log[-2:])
        left = [job for job in world.jobs.values() if job.training and job.training.alive]
        if left and not told and world.strict:
            raise BrokenError(f"{world.now:.0f}: it ended ({error}), and {left} live") from None


def shrink(faults: Sequence[Fault]) -> list[Fault]:
    """The faults without which a failing history would no longer fail."""
    left = list(faults)
    for fault in faults:
        fewer = [other for other in left if other is not fault]
        if fails(fewer):
            left = fewer
    return left


def fails(faults: Sequence[Fault]) -> str:
    """Why a history fails, or nothing."""
    try:
        check(faults)
    except BrokenError as error:
        return str(error)
    return ""


def many(first: int, count: int) -> list[tuple[int, str]]:
    """Seeds of a range whose histories fail, and why."""
    found = ((seed, fails(draw(seed))) for seed in range(first, first + count))
    return [(seed, why) for seed, why in found if why]


def main() -> None:
    """The command line."""
    total, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    share = 500
    starts = range(first, first + total, share)
    with multiprocessing.Pool() as pool:
        broken = 0
        for found in pool.starmap(many, [(start, share) for start in starts], chunksize=1):
            for seed, why in found:
                broken += 1
                if broken <= 5:
                    print(f"seed {seed}: {why}\n  {shrink(draw(seed))}")
    print(f"{len(starts) * share} histories from seed {first}: {broken} fail")


if __name__ == "__main__":
    main()
