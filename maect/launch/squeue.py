"""One squeue answer for all launchers of a user: at most one question in half a minute."""

import fcntl
import getpass
import hashlib
import json
import os
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INTERVAL_VARIABLE = "MAECT_SQUEUE_SECONDS"  # shorter for tests
TIMEOUT = 60.0


@dataclass(frozen=True)
class Answer:
    """What squeue said.

    Attributes:
        time: Unix time at which it was asked.
        jobs: id to (state, reason, name).
        queries: how often the controller was asked since the cache was made.
    """

    time: float
    jobs: dict[str, tuple[str, str, str]]
    queries: int


def interval() -> float:
    """Seconds between two questions to the controller."""
    return float(os.environ.get(INTERVAL_VARIABLE, "30"))


class Squeue:
    """squeue's answer, shared with other processes through a file as far as that can be written."""

    def __init__(self) -> None:
        self._own: dict[str, Any] | None = None  # our last answer

    def ask(self, newer_than: float) -> Answer | None:
        """The state of all jobs of this user at some moment after `newer_than` (Unix time).

        None is no verdict: the controller did not answer, or its last answer is older and it is too
        early to ask again.
        """
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "maect"
        # Two clusters seen from one home do not share their answers.
        cluster = os.environ.get("SLURM_CONF", "") + os.environ.get("SLURM_CLUSTERS", "")
        file = folder / f"squeue-{hashlib.sha256(cluster.encode()).hexdigest()[:12]}.json"
        if not self._is_fresh(file):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with file.with_suffix(".lock").open("a") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if not self._is_fresh(file):
                        self._refresh(file)
            except BlockingIOError:
                pass  # another launcher is asking; what there is must do until then
            except OSError:  # a home that is full, or mounted without locks: each asks for itself
                self._refresh(file)
        value = self._read(file)
        if value is None or value["answered"] <= newer_than:
            return None
        jobs = {key: (state, reason, name) for key, (state, reason, name) in value["jobs"].items()}
        return Answer(value["answered"], jobs, value["queries"])

    def _refresh(self, file: Path) -> None:
        before = self._read(file) or {"answered": 0.0, "jobs": {}, "queries": 0}
        now = time.time()
        code, out, _ = command(
            "squeue", "-h", "-t", "all", "-u", getpass.getuser(), "-o", "%i|%T|%r|%j"
        )
        # A question that failed counts as asked: a sick controller must not be stormed.
        value = {**before, "asked": now, "queries": before["queries"] + 1}
        if code == 0:
            rows = (line.split("|", 3) for line in out.splitlines())
            value |= {"answered": now, "jobs": {row[0]: row[1:] for row in rows if len(row) == 4}}
        self._own = value
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        try:
            temporary.write_text(json.dumps(value), encoding="utf-8")
            temporary.replace(file)
        except OSError:
            with suppress(OSError):
                temporary.unlink()

    def _is_fresh(self, file: Path) -> bool:
        value = self._read(file)
        # A time in the future (another login node's clock) is as good as none.
        return value is not None and 0 <= time.time() - value["asked"] < interval()

    def _read(self, file: Path) -> dict[str, Any] | None:
        """The last answer: the shared one, or our own if it could not be written."""
        own = self._own
        try:
            value: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            if not value.keys() >= {"asked", "answered", "jobs", "queries"}:
                return own
        except (OSError, ValueError, AttributeError):
            return own
        return own if own is not None and own["asked"] > value["asked"] else value


def command(*words: str) -> tuple[int, str, str]:
    """Run a SLURM command: (exit status, stdout, stderr); a Ctrl-C does not reach it."""
    try:
        result = subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",  # job names may be anything
            timeout=TIMEOUT,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return 124, "", f"{words[0]} did not answer in {TIMEOUT:.0f} s"
    except OSError as error:
        return 127, "", f"{words[0]}: {error.strerror}"
    return result.returncode, result.stdout.strip(), result.stderr.strip()
