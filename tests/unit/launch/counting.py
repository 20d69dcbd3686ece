"""A plain function with the manners of training: steps in lockstep, saves, resumes, stops."""

import hashlib
import json
import os
import time
from pathlib import Path

from maect.core.errors import UserError
from maect.core.files import read_json, write_json
from maect.launch import worker


def count(
    *,
    context,
    folder: str,
    steps: int,
    seconds: float = 0.02,
    save_every: int = 5,
    save_seconds: float = 0.0,
    fail_at: int | None = None,
    stuck_at: int | None = None,
    complain: str | None = None,
    gates: str | None = None,
) -> str:
    """Count to `steps` on all ranks together; the result depends on every step exactly once.

    Each file STEP.closed in the folder `gates` holds the count after that step until it is gone,
    or until the count is asked to stop.
    """
    worker.REPORT_SECONDS = 0.1
    root = Path(folder)
    if complain:
        raise UserError(complain)
    state = {"step": 0, "chain": ""}
    if (root / "state.json").exists():
        state = read_json(root / "state.json")
    with (root / f"started-{context.rank}.jsonl").open("a") as file:
        keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
        seen = {key: os.environ[key] for key in keys}
        seen |= {"step": state["step"], "pid": os.getpid(), "name": context.name}
        seen |= {
            "instead": os.environ.get("INSTEAD"),
            "attempt": context.attempt,
            "blocks": os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
            "cuda": os.environ.get("CUDA_VISIBLE_DEVICES"),
        }
        file.write(json.dumps(seen | {"cpus": len(os.sched_getaffinity(0))}) + "\n")
    meeting = root / "meetings" / f"{context.name}-{context.attempt}"
    meeting.mkdir(parents=True, exist_ok=True)
    while state["step"] < steps:
        time.sleep(seconds)
        state["step"] += 1
        chain = f"{state['chain']}{state['step']}"
        state["chain"] = hashlib.sha256(chain.encode()).hexdigest()
        if state["step"] == fail_at:
            raise RuntimeError(f"step {fail_at} cannot be done")
        if state["step"] == stuck_at and context.rank == 0:
            os.kill(os.getpid(), 9)
        stop = _any(meeting, context, state["step"], context.stop_requested())
        progress = {"step": state["step"], "steps": steps, "epoch": 1, "epochs": 1, "loss": 0.5,
                    "images_per_second": 1 / max(seconds, 1e-3), "unknown": [1]}  # fmt: skip
        context.report(progress)
        gate = Path(gates or root) / f"{state['step']}.closed"
        while gate.exists() and not context.stop_requested():
            time.sleep(0.05)
            context.report(progress)  # what is reported often is written now and then
        if context.rank == 0 and (stop or state["step"] % save_every == 0):
            time.sleep(save_seconds)
            write_json(root / "state.json", state)
            context.saved(state["step"])
        if stop:
            return "requeue"
    if context.rank == 0:
        write_json(root / "done.json", state)
    return "done"


def _any(meeting: Path, context, step: int, flag: bool) -> bool:
    """All-reduce (or) at a step: it hangs for ever when a rank is missing, as the real one does."""
    with (meeting / str(context.rank)).open("a") as file:
        file.write(f"{step} {int(flag)} {time.time()}\n")
    flags = []
    for rank in range(context.world_size):
        while True:
            try:
                lines = (meeting / str(rank)).read_text().splitlines(keepends=True)
            except FileNotFoundError:
                lines = []
            written = [
                line for line in lines if line.startswith(f"{step} ") and line.endswith("\n")
            ]
            if written:
                flags.append(written[0].split()[1] == "1")
                break
            time.sleep(0.005)
    return any(flags)


def expected(steps: int) -> dict:
    """What an undisturbed run leaves."""
    chain = ""
    for step in range(1, steps + 1):
        chain = hashlib.sha256(f"{chain}{step}".encode()).hexdigest()
    return {"step": steps, "chain": chain}
