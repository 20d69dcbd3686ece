"""Jobs on SLURM: the truth is in squeue, then in sacct; a question that fails is no verdict."""

import fcntl
import getpass
import hashlib
import json
import os
import re
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maect.launch import record
from maect.launch.local import marked
from maect.launch.record import Job
from maect.launch.state import Cluster, Look
from maect.launch.submit import ATTEMPT, NO_ANSWER

INTERVAL_VARIABLE = "MAECT_SQUEUE_SECONDS"  # shorter for tests
TIMEOUT = 60.0
LOG_BYTES = 65536
RUNNING = {"RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "STAGE_OUT"}
RUNNING |= {"SIGNALING", "RESIZING"}
PENDING = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
MAY_RETURN = {"NODE_FAIL", "PREEMPTED"}  # SLURM puts such jobs back under the same id
TEARDOWN = 30.0  # seconds for the ranks to return after the completion record was written
BROKEN_GRACE = 60.0  # seconds for SLURM to end a job that has lost a rank
TASK_ENDED = re.compile(rb"^srun: error: .*\btasks? [\d,-]+: ", re.MULTILINE)
FORGOTTEN = 600.0  # seconds after which a job that squeue does not know is gone, whatever sacct
SUBMISSION_FAILURES_THAT_PASS = (
    "Unable to contact slurm controller",
    "Socket timed out",
    "Connection refused",
    "Zero Bytes were transmitted",
    "Transport endpoint is not connected",
    "temporarily unable to accept job",
    "Resource temporarily unavailable",
    NO_ANSWER,
)
ALREADY_OVER = ("Invalid job id", "already completing or completed", "already finished")


class Slurm(Cluster):
    """SLURM, and what it has said about the jobs that one process looks after."""

    interval = 2.0  # of looks at the shared answer
    record_patience = 30.0

    def __init__(self) -> None:
        self._squeue = Squeue()
        # Unix times at which something was first seen, by job: patience counts from there.
        self._first_look: dict[str, float] = {}
        self._missing_since: dict[str, float] = {}
        self._broken_since: dict[str, float] = {}
        self._may_return_since: dict[str, float] = {}
        self._sacct: dict[str, tuple[float, Look]] = {}

    def look(self, folder: Path, job: Job) -> Look:
        """Look at a SLURM job, through the shared answer of squeue."""
        # The submission may still be under way although the launcher that began it was killed.
        if job.id is None and marked(job.name):
            return Look("unknown", "being submitted")
        # Whoever knows a job's id looks after its submission, whatever the submitter's clock said.
        newer_than = self._first_look.setdefault(job.name, time.time())
        if job.id is not None:
            newer_than = min(newer_than, job.submitted)
        answer = self._squeue.ask(newer_than)
        if answer is None:
            return Look("unknown", "no answer from SLURM")
        if job.id is None:
            return self._find(job, answer)
        # Patience is measured by what SLURM has said since: while it is silent, nothing gets worse.
        # Ids begin again some day: the job of another name under this id is not ours.
        if job.id in answer.jobs and answer.jobs[job.id][2] == job.name:
            self._missing_since.pop(job.id, None)
            word, reason, _ = answer.jobs[job.id]
            if word != "RUNNING" or not _lost_a_rank(folder, job):
                self._broken_since.pop(job.id, None)
            elif answer.time - self._broken_since.setdefault(job.id, time.time()) > BROKEN_GRACE:
                return Look("ended", "it lost a rank, and SLURM did not end it")
            return self._word(job.id, word, reason, answer.time)
        if answer.time - self._missing_since.setdefault(job.id, time.time()) > FORGOTTEN:
            return Look("ended", "unknown to SLURM")
        return self._ask_sacct(job.id)

    def finish(self, folder: Path, job: Job) -> None:
        """Wait for a job that has its completion record to return; cancel it if it does not.

        A signal in its last second may have put a complete job back into the queue.
        """
        deadline = time.monotonic() + TEARDOWN
        while record.verdict(folder, job) not in ("done", "stopped"):
            if time.monotonic() > deadline:
                self.end(folder, job)
                return
            time.sleep(0.5)

    def end(self, folder: Path, job: Job) -> bool:
        """Cancel a job, by its unique name if need be; False if SLURM does not answer."""
        code, _, error = command("scancel", *([job.id] if job.id else ["--name", job.name]))
        return code == 0 or any(text in error for text in ALREADY_OVER)

    def _find(self, job: Job, answer: "Answer") -> Look:
        """A job whose launcher died before it learnt the id: its name is unique."""
        ids = [key for key, (_, _, name) in answer.jobs.items() if name == job.name]
        if not ids:
            # What squeue does not list is not alive, so that submitting again runs nothing twice.
            return Look("ended", "never submitted", grace=1.0)
        job.id = ids[0]
        word, reason, _ = answer.jobs[job.id]
        return self._word(job.id, word, reason, answer.time)

    def _word(self, job_id: str, word: str, reason: str, now: float) -> Look:
        """What a word of SLURM, said at this time, means."""
        text = f"{word} ({reason})" if reason not in ("", "None") else word
        if word in MAY_RETURN:
            since = self._may_return_since.setdefault(job_id, now)
            return Look("ended" if now - since >= 2 * squeue_seconds() else "unknown", text)
        self._may_return_since.pop(job_id, None)
        if word in PENDING:
            return Look("pending", text)
        if word in RUNNING:
            return Look("running", text)
        return Look("ended", text, grace=1.0, final=word.startswith("CANCELLED"))

    def _ask_sacct(self, job_id: str) -> Look:
        asked, last = self._sacct.get(job_id, (float("-inf"), Look("unknown")))
        if time.monotonic() - asked < squeue_seconds():
            return last
        code, out, error = command("sacct", "-n", "-X", "-P", "-o", "State", "-j", job_id)
        if code == 0 and out:
            look = self._word(job_id, out.splitlines()[-1].split()[0], "sacct", time.time())
            # The two databases contradict each other: one of them is behind.
            if look.phase in ("pending", "running"):
                look = Look("unknown", "SLURM is catching up")
        elif code == 0 or code == 127 or "disabled" in error:
            look = Look("ended", "unknown to SLURM", grace=squeue_seconds())
        else:
            look = Look("unknown", "no answer from sacct")
        self._sacct[job_id] = (time.monotonic(), look)
        return look


def passes(error: str) -> bool:
    """Whether a submission failed for a reason that goes away by itself."""
    return any(text in error for text in SUBMISSION_FAILURES_THAT_PASS)


def _lost_a_rank(folder: Path, job: Job) -> bool:
    """Whether srun said that a rank of this attempt ended badly.

    It then asks the controller to end the others, and only once: while the controller is away they
    keep waiting for the lost one.
    """
    try:
        with record.log(folder, job, 0).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
            attempt = file.read().rpartition(ATTEMPT.encode())[2]
    except OSError:
        return False
    return TASK_ENDED.search(attempt) is not None


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


def squeue_seconds() -> float:
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
        return value is not None and 0 <= time.time() - value["asked"] < squeue_seconds()

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
