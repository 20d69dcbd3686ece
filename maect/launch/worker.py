"""What runs in every rank: environment, signals, progress, and the verdict at the end."""

import faulthandler
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from maect.core.files import read_json, write_json
from maect.launch import rendezvous
from maect.launch.record import is_asked_to_stop
from maect.launch.squeue import command

REPORT_SECONDS = 0.5
TEARDOWN_SECONDS = 60  # a rank that hangs after its function has returned is ended by force
VERDICTS = ("done", "requeue", "stopped")


@dataclass
class Context:
    """One rank's place in the job, and its line to the launcher.

    Attributes:
        rank: global rank; 0 reports and writes the verdict.
        node: index of this rank's node.
        master_addr, master_port: where rank 0 listens; also in the environment.
        cpus: CPUs of this rank.
        attempt: how often SLURM has restarted the job under the same id.
        record: what this rank's file says about it.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node: int
    master_addr: str
    master_port: int
    cpus: int
    folder: Path
    name: str
    attempt: int = 0
    reasons: set[str] = field(default_factory=set)
    record: dict[str, Any] = field(default_factory=dict)
    _pending: dict[str, Any] | None = None
    _reported: float = float("-inf")
    _first: tuple[int, float] | None = None

    def stop_requested(self) -> bool:
        """Whether this rank was told to save and return ("requeue").

        The ranks learn of it at different moments: agree on it (all-reduce) at a step boundary.
        """
        return bool(self.reasons)

    def report(self, progress: dict[str, Any]) -> None:
        """Tell the launcher how far the job is; cheap, and ignored on ranks other than 0.

        Known keys: epoch, epochs, step, steps, loss, images_per_second. `step` is what counts as
        progress when it is decided whether a failed job is worth another attempt.
        """
        if self.rank:
            return
        now = time.monotonic()
        if "step" in progress:
            self._first = self._first or (int(progress["step"]), now)
            progress = {**progress, "first_step": self._first[0], "seconds": now - self._first[1]}
        self._pending = progress
        if now - self._reported >= REPORT_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the last report; neither durable nor sure, since it is only ever a hint."""
        if self._pending is None:
            return
        with suppress(OSError):
            temporary = self.folder / f".progress.{self.name}.tmp"
            temporary.write_text(json.dumps(self._pending), encoding="utf-8")
            temporary.replace(self.folder / "progress.json")
        self._pending, self._reported = None, time.monotonic()

    def fail(self, error: BaseException) -> NoReturn:
        """End this rank at once with an error, from beside a main thread that is stuck."""
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        self.flush()
        with suppress(OSError):
            _note(self.folder / "jobs" / self.name, self.record, error)
        os._exit(1)

    def saved_step(self) -> int:
        """The step of the last report on disk, or 0."""
        try:
            return int(read_json(self.folder / "progress.json").get("step") or 0)
        except Exception:
            return 0


def run(request: dict[str, Any]) -> None:
    """Entry point of each rank, called by submitit.

    Args:
        request: function, arguments, folder (of the run), name (of the job), cpus, and the
            CUDA_VISIBLE_DEVICES of the launcher for local jobs.
    """
    import submitit

    place = submitit.JobEnvironment()
    folder, name = Path(request["folder"]), request["name"]
    jobs = folder / "jobs" / name
    # Only the job that `job.json` names may run: one submitted twice by a crash ends here, and one
    # that was given up while nobody could cancel it.
    noted = read_json(folder / "job.json")
    if noted["name"] != name or noted["state"] == "ended":
        why = "replaced by another one" if noted["name"] != name else f"over: {noted['ending']}"
        print(f"job {name} was {why}; nothing to do", file=sys.stderr)
        return
    record: dict[str, Any] = {
        "rank": place.global_rank,
        "id": place.job_id,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "time": time.time(),
        "end": None,
    }
    file = jobs / f"rank-{place.global_rank}.json"
    write_json(file, record)
    reasons: set[str] = set()
    _listen(reasons, folder, name, place.global_rank, place.num_tasks)
    context = None
    try:
        context = _join(place, request, jobs, reasons)
        context.record = record
        before = context.saved_step()
        verdict = _call(request, context)
        if context.rank == 0:
            context.flush()
            value = {"name": name, "attempt": context.attempt, "verdict": verdict}
            write_json(folder / "verdict.json", {**value, "step": context.saved_step()})
    except BaseException as error:
        if context is not None:
            context.flush()
        # Destroying a broken process group may hang, and with it the partners for ever.
        faulthandler.dump_traceback_later(TEARDOWN_SECONDS, exit=True)
        with suppress(OSError):  # a full disk: the log has it too
            _note(jobs, record, error)
        raise
    write_json(file, record | {"end": verdict, "time": time.time()})
    gc.freeze()  # at its end the interpreter would search all modules for garbage: 1.5 s
    faulthandler.dump_traceback_later(TEARDOWN_SECONDS, exit=True)
    if verdict == "requeue" and context.rank == 0 and place.name() == "slurm":
        # A job without progress must not requeue itself for ever: the launcher counts attempts.
        # One that SLURM terminates is either being cancelled, or requeued by SLURM itself.
        fruitful = context.saved_step() > before
        if fruitful and "terminate" not in reasons:
            faulthandler.cancel_dump_traceback_later()  # a slow controller may take its time
            requeue(place.job_id)
            faulthandler.dump_traceback_later(TEARDOWN_SECONDS, exit=True)


def _note(jobs: Path, record: dict[str, Any], error: BaseException) -> None:
    """Write into the rank's file what it failed of."""
    names = {cls.__name__ for cls in type(error).__mro__}
    record |= {
        "end": "error",
        "kind": "UserError" if "UserError" in names else type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "time": time.time(),
    }
    write_json(jobs / f"rank-{record['rank']}.json", record)


def _join(place: Any, request: dict[str, Any], jobs: Path, reasons: set[str]) -> Context:
    attempt = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    hosts = list(place.hostnames)
    address, port = rendezvous.meet(jobs, attempt, place.global_rank, hosts)
    context = Context(
        rank=place.global_rank,
        local_rank=place.local_rank,
        world_size=place.num_tasks,
        local_world_size=place.num_tasks // place.num_nodes,
        node=place.node,
        master_addr=address,
        master_port=port,
        cpus=int(request["cpus"]),
        folder=Path(request["folder"]),
        name=request["name"],
        attempt=attempt,
        reasons=reasons,
    )
    os.environ |= {
        "RANK": str(context.rank),
        "LOCAL_RANK": str(context.local_rank),
        "WORLD_SIZE": str(context.world_size),
        "LOCAL_WORLD_SIZE": str(context.local_world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(context.cpus),
    }
    if place.name() == "local":
        # submitit numbers the GPUs of a local job itself; what the user made visible counts.
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if request.get("visible") is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = request["visible"]
    return context


def _call(request: dict[str, Any], context: Context) -> str:
    module, name = request["function"].split(":")
    # Searching what is being imported for garbage would take a sixth of the time.
    gc.disable()
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    gc.enable()
    verdict = function(context=context, **request["arguments"]) or "done"
    if verdict not in VERDICTS:
        raise ValueError(f"{request['function']} returned {verdict!r}, not one of {VERDICTS}")
    if verdict == "requeue" and is_asked_to_stop(context.folder, context.name):
        return "stopped"
    return str(verdict)


def _listen(reasons: set[str], folder: Path, name: str, rank: int, ranks: int) -> None:
    """Turn signals and the stop file into reasons to stop.

    submitit's own handler would requeue at once from rank 0, in the middle of a step.
    """

    def note(number: int, frame: FrameType | None) -> None:
        reasons.add("limit" if number == signal.SIGUSR2 else "terminate")

    signal.signal(signal.SIGUSR2, note)
    signal.signal(signal.SIGTERM, note)

    def watch() -> None:
        while not is_asked_to_stop(folder, name):
            # A thousand ranks asking twice a second would be a load on a shared file system.
            time.sleep(0.5 if rank == 0 else max(0.5, ranks / 64))
        reasons.add("stop")

    threading.Thread(target=watch, daemon=True, name="maect-stop").start()


def requeue(job_id: str, tries: int = 5) -> None:
    """Put this SLURM job back into the queue, as its last act.

    A job that is being cancelled is left alone: a requeue would bring it back to life.
    """
    for _ in range(tries):
        _, state, _ = command("squeue", "-h", "-j", job_id, "-o", "%T")
        if state and state != "RUNNING":
            return
        if state and command("scontrol", "requeue", job_id)[0] == 0:
            print(f"job {job_id}: saved and put back into the queue", file=sys.stderr)
            return
        time.sleep(5)  # the controller is away; without it the launcher submits anew
