"""Jobs on SLURM: the truth is in squeue, then in sacct; a question that fails is no verdict.

Nor is a word that nobody here knows, and "unknown" only from the cluster that took the job, asked
about its id alone.
"""

import fcntl
import hashlib
import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypedDict

from maect.launch import record
from maect.launch.local import marked
from maect.launch.record import Job
from maect.launch.resources import LaunchError
from maect.launch.state import Cluster, Notice
from maect.launch.submit import ATTEMPT, NO_ANSWER, of_slurm

INTERVAL_VARIABLE = "MAECT_SQUEUE_SECONDS"  # shorter for tests
TIMEOUT = 60.0
LOG_BYTES = 65536
RUNNING = {"RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "STAGE_OUT"}
RUNNING |= {"SIGNALING", "RESIZING", "POWER_UP_NODE"}
PENDING = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
MAY_RETURN = {"NODE_FAIL", "PREEMPTED"}  # SLURM puts such jobs back under the same id
OVER = {"COMPLETED", "FAILED", "TIMEOUT", "OUT_OF_MEMORY", "BOOT_FAIL", "REVOKED", "LAUNCH_FAILED"}
OVER |= {"RECONFIG_FAIL"}
BY_A_PERSON = {"CANCELLED", "DEADLINE"}
TEARDOWN = 30.0  # seconds for the ranks to return after the completion record was written
BROKEN_GRACE = 60.0  # seconds for SLURM to end a job that has lost a rank
BEGUN = re.compile(rf"^{ATTEMPT} (\d+)".encode(), re.MULTILINE)
TASK_ENDED = re.compile(rb"^srun: error: (?P<node>\S+): tasks? [\d,-]+: (?P<how>.*)", re.MULTILINE)
FORGOTTEN = 600.0  # seconds after which sacct is no longer waited for
FORMAT = "%i|%T|%r|%j"
COMMENT_IS = "comment "  # before what a job was submitted with, which is its folder
COMMENT = f"{COMMENT_IS}%k"
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
LIMITS = ("MaxSubmitJob", "GrpSubmitJobs")
"""On jobs in the queue, of a QOS or an account: until one of the jobs before it has ended."""
LAGS = "SLURM is catching up"
ALREADY_OVER = ("Invalid job id", "already completing or completed", "already finished")


class Slurm(Cluster):
    """SLURM, and what it has said about the jobs that one process watches."""

    interval = 2.0  # between two reads of the shared answer
    out_of_reach = "SLURM does not answer"
    record_patience = 90.0  # a client of NFS may believe for a minute that it is not there

    def __init__(self) -> None:
        self._squeue = Squeue()
        # When something was first seen, by job: patience counts from there. By this process's own
        # clock, like every time here: that of the machine may be set.
        self._first_poll: dict[str, float] = {}
        self._missing_since: dict[str, float] = {}
        self._broken_since: dict[str, float] = {}
        self._may_return_since: dict[str, float] = {}
        self._asked: dict[tuple[str, str], tuple[float, Notice | None]] = {}

    def site(self) -> str | None:
        """Name of the cluster that takes jobs here; None if it does not answer."""
        _, out, _ = command("scontrol", "show", "config")
        match = re.search(r"^ClusterName\s*=\s*(\S+)", out, re.MULTILINE)
        return match[1] if match else None

    def poll(self, folder: Path, job: Job) -> Notice:
        """Return the state of a SLURM job, through the shared answer of squeue."""
        # The submission may still be under way although the launcher that began it was killed.
        if job.id is None and marked(job.name):
            return Notice("unknown", "being submitted")
        # Whoever knows a job's id polls after its submission, whatever the submitter's clock said.
        newer_than = self._first_poll.setdefault(job.name, time.monotonic())
        if job.id is not None:
            newer_than = min(newer_than, time.monotonic() - max(0, time.time() - job.submitted))
        answer = self._squeue.ask(newer_than)
        if answer is None:
            return Notice("unknown", "no answer from SLURM")
        if job.id is None:
            return self._find(job, answer)
        # Patience is measured by what SLURM has said since: while it is silent, nothing gets worse.
        # Ids begin again some day: the job of another name under this id is not ours.
        if job.id in answer.jobs and answer.jobs[job.id][2] == job.name:
            self._missing_since.pop(job.id, None)
            word, reason, _ = answer.jobs[job.id]
            if word == "RUNNING" and _lost_a_rank(folder, job):
                since = self._broken_since.setdefault(job.id, time.monotonic())
                if answer.time - since > BROKEN_GRACE and self._is_that_attempt(folder, job):
                    return Notice("ended", "it lost a rank, and SLURM did not end it")
            else:
                self._broken_since.pop(job.id, None)
            return self._word(job.id, word, reason, answer.time)
        return self._missing(job, answer.time)

    def waits(self, folder: Path, job: Job) -> bool:
        """Return whether a job that squeue listed as pending has not begun since."""
        notice = self._seldom(self._ask_controller, job)
        return notice is not None and notice.phase == "pending"

    def suspects(self, folder: Path, job: Job, failure: record.Failure) -> list[str]:
        """The node of the rank that failed, that others blame, or that srun says was lost.

        Else a job's only one.
        """
        ranks = record.ranks(folder, job)
        nodes = {report.node for report in ranks.values() if report.node}
        lost = TASK_ENDED.search(_attempt_log(folder, job))
        # What a signal ended says nothing; those who waited for it raise.
        if lost and not (failure.kind and lost["how"].startswith(b"Exited")):
            nodes = {lost["node"].decode(errors="replace")}
        elif failure.blames is not None:
            nodes &= {ranks[rank].node for rank in failure.blames if rank in ranks}
        elif failure.kind:
            nodes &= {ranks[failure.rank].node}
        elif not nodes and job.id:
            known, _ = _controllers(job)
            listed = re.fullmatch(r"[\w.-]+", known.get("NodeList", ""))
            nodes = {listed[0]} if listed else set()
        return sorted(nodes) if len(nodes) == 1 else []

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
        """Cancel a job, by its unique name; False if SLURM does not answer.

        Raises:
            LaunchError: SLURM says that it is another folder's.
        """
        code, out, _ = command("squeue", "-h", "-t", "all", "-u", str(os.getuid()),
                               f"--name={job.name}", "-o", COMMENT)  # fmt: skip
        for line in out.splitlines() if code == 0 else []:
            theirs = line.removeprefix(COMMENT_IS)
            if theirs != line and os.path.isdir(theirs) and not os.path.samefile(theirs, folder):
                raise LaunchError(
                    f"{folder}: job {job.id or job.name} is that of {theirs}: it is not cancelled; "
                    f"delete {folder / 'job.json'} and start again"
                )
        code, _, error = command("scancel", f"--name={job.name}", *([job.id] if job.id else []))
        return code == 0 or any(text in error for text in ALREADY_OVER)

    def _find(self, job: Job, answer: "Answer") -> Notice:
        """A job whose launcher died before it learnt the id: its name is unique."""
        rows = {key: row for key, row in answer.jobs.items() if row[2] == job.name}
        if not rows:
            # Not the shared answer, which another cluster's login node may have written.
            code, out, _ = command("squeue", *_all_jobs(), f"--name={job.name}")
            if code:
                return Notice("unknown", "no answer from SLURM")
            rows = {key: row for key, row in _rows(out).items() if row[2] == job.name}
        if not rows:
            if not self._is_its_cluster(job):
                return Notice("unknown", "no answer from SLURM")
            # What squeue does not list is not alive, so that submitting again runs nothing twice.
            return Notice("ended", "never submitted", grace=1.0)
        job.id = min(rows)
        word, reason, _ = rows[job.id]
        return self._word(job.id, word, reason, answer.time)

    def _missing(self, job: Job, now: float) -> Notice:
        """A job that squeue does not list: how it ended, as far as SLURM knows."""
        assert job.id is not None
        waited = now - self._missing_since.setdefault(job.id, time.monotonic())
        notice = self._seldom(self._ask_sacct, job)
        if notice is not None and notice.text == LAGS:
            known = self._seldom(self._ask_controller, job)
            if known is not None and known.phase in ("pending", "running"):
                return known  # another user's, of whom squeue was not asked
        if notice is not None and (notice.phase == "ended" or waited <= FORGOTTEN):
            return notice
        return self._seldom(self._ask_controller, job) or Notice("unknown", "no answer from SLURM")

    def _seldom(self, question: Callable[[Job], Notice | None], job: Job) -> Notice | None:
        """The answer to a question about a job, asked as seldom as squeue."""
        key = (question.__name__, job.name)
        asked, notice = self._asked.get(key, (float("-inf"), None))
        if time.monotonic() - asked >= squeue_seconds():
            notice = question(job)
            self._asked[key] = (time.monotonic(), notice)
        return notice

    def _word(self, job_id: str, word: str, reason: str, now: float) -> Notice:
        """Return what a word of SLURM, said at this time, means."""
        text = f"{word} ({reason})" if reason not in ("", "None") else word
        if word in MAY_RETURN:
            since = self._may_return_since.setdefault(job_id, now)
            return Notice("ended" if now - since >= 2 * squeue_seconds() else "unknown", text)
        self._may_return_since.pop(job_id, None)
        if word in PENDING:
            return Notice("pending", text)
        if word in RUNNING:
            return Notice("running", text)
        if word in OVER or word in BY_A_PERSON:
            return Notice("ended", text, grace=1.0, final=word in BY_A_PERSON)
        return Notice("unknown", text)

    def _ask_sacct(self, job: Job) -> Notice | None:
        """Return what the accounting says; None if it does not know the job, or is not there."""
        assert job.id is not None
        code, out, error = command("sacct", "-n", "-X", "-P", "-o", "State,JobName", "-j", job.id)
        rows = [line.partition("|") for line in out.splitlines()]
        words = [state.split()[0] for state, _, name in rows if state and name == job.name]
        if code == 0 and words:
            notice = self._word(job.id, words[-1], "sacct", time.monotonic())
            # The two databases contradict each other: one of them is behind.
            lags = notice.phase in ("pending", "running")
            return Notice("unknown", LAGS) if lags else notice
        if code in (0, 127) or "disabled" in error:
            return None
        return Notice("unknown", "no answer from sacct")

    def _ask_controller(self, job: Job) -> Notice | None:
        """Return what the controller says about this very id; None if it does not answer."""
        assert job.id is not None
        known, answers = _controllers(job)
        if "JobState" in known:  # no list of jobs that we see has it
            word, reason = known["JobState"], known.get("Reason", "")
            return self._word(job.id, word, reason, time.monotonic())
        if not answers or not self._is_its_cluster(job):
            return None
        return Notice("ended", "unknown to SLURM", grace=squeue_seconds())

    def _is_that_attempt(self, folder: Path, job: Job) -> bool:
        """Return whether the log's last attempt runs: a new one may wait for its prolog."""
        known, _ = _controllers(job)
        attempts = BEGUN.findall(record.log(folder, job, 0).read_bytes())
        restarts = known.get("Restarts")
        return bool(restarts and attempts and int(restarts) <= int(attempts[-1]))

    def _is_its_cluster(self, job: Job) -> bool:
        """Return whether a cluster that does not know a job took it; LaunchError: another did."""
        here = self.site() if job.site else None
        if here is not None and here != job.site:
            raise LaunchError(
                f"job {job.id or job.name} was submitted to the cluster {job.site}, and this is "
                f"{here}: start on a login node of {job.site}"
            )
        return here == job.site


def _controllers(job: Job) -> tuple[dict[str, str], bool]:
    """The controller's fields of a job, none if its id is another name's; whether it answered."""
    assert job.id is not None
    code, out, error = command("scontrol", "--oneliner", "show", "job", job.id)
    _, _, shown = out.partition(f" JobName={job.name} ")  # names may have blanks
    # The last fields are paths, in which anything may stand: the first of a name is it.
    known = dict(reversed(re.findall(r"(?:^| )(\w+)=(\S*)", shown)))
    return known, (code == 0 and "JobName=" in out) or "Invalid job id" in error


def passes(error: str) -> bool:
    """Return whether a submission failed for a reason that goes away by itself."""
    return any(text in error for text in SUBMISSION_FAILURES_THAT_PASS)


def is_limit(error: str) -> bool:
    """Return whether SLURM itself has refused a job, and takes it later."""
    return any(text in error for text in LIMITS)


def _lost_a_rank(folder: Path, job: Job) -> bool:
    """Return whether srun said that a rank of this attempt ended badly.

    It asks the controller only once to end the others, which keep waiting if that is away.
    """
    return TASK_ENDED.search(_attempt_log(folder, job)) is not None


def _attempt_log(folder: Path, job: Job) -> bytes:
    """The end of the log of rank 0 and srun, from the last attempt's beginning."""
    try:
        with record.log(folder, job, 0).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
            return file.read().rpartition(ATTEMPT.encode())[2]
    except OSError:
        return b""


class Answer(NamedTuple):
    """Answer of squeue, at a time of this process's clock: jobs as id to (state, reason, name)."""

    time: float
    jobs: dict[str, tuple[str, str, str]]


def squeue_seconds() -> float:
    """Seconds between two questions to the controller."""
    return float(os.environ.get(INTERVAL_VARIABLE, "30"))


class Shared(TypedDict):
    """squeue's last answer in a file: when it was asked and answered (Unix time), and the jobs."""

    asked: float
    answered: float
    jobs: dict[str, tuple[str, str, str]]
    queries: int


class Squeue:
    """squeue's answer, shared with other processes through a file as far as that can be written."""

    def __init__(self) -> None:
        self._own: Shared | None = None  # our last answer
        self._answered = float("-inf")  # when that was, by this process's clock
        self._blocked: float | None = None  # since when another process asks instead, likewise
        home = os.path.expanduser("~")
        if not os.path.isabs(home):  # a container's user has none: it is shared with nobody
            home = os.devnull
        folder = Path(os.environ.get("XDG_CACHE_HOME") or f"{home}/.cache") / "maect"
        # Two clusters seen from one home do not share their answers, if that is known.
        question = "|".join([os.environ.get("SLURM_CONF", ""), *_all_jobs()])
        self._file = folder / f"squeue-{hashlib.sha256(question.encode()).hexdigest()[:12]}.json"

    def ask(self, newer_than: float) -> Answer | None:
        """The state of all jobs of this user at some moment after `newer_than` (monotonic time).

        None is no verdict: the controller did not answer, or its last answer is older and it is too
        early to ask again.
        """
        if self._is_fresh():
            self._blocked = None
        else:
            try:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                with self._file.with_suffix(".lock").open("a") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._blocked = None
                    if not self._is_fresh():
                        self._refresh()
            except BlockingIOError:  # another launcher is asking; what there is must do until then
                self._blocked = time.monotonic() if self._blocked is None else self._blocked
                if time.monotonic() - self._blocked > squeue_seconds() + TIMEOUT:  # it is suspended
                    self._refresh()
            except OSError:  # a home that is full, or mounted without locks: each asks for itself
                self._refresh()
        value = self._read()
        if value is None or not value["answered"] or self._when(value) <= newer_than:
            return None
        jobs = {key: (state, reason, name) for key, (state, reason, name) in value["jobs"].items()}
        return Answer(self._when(value), jobs)

    def _when(self, value: Shared) -> float:
        """Return when a value was answered, by this process's clock."""
        if value is self._own:
            return self._answered
        return time.monotonic() - max(0, time.time() - value["answered"])

    def _refresh(self) -> None:
        before = self._read() or Shared(asked=0.0, answered=0.0, jobs={}, queries=0)  # 0: never
        now, began, self._answered = time.time(), time.monotonic(), self._when(before)
        code, out, _ = command("squeue", *_all_jobs())
        # A question that failed counts as asked: a sick controller must not be stormed.
        value: Shared = {**before, "asked": now, "queries": before["queries"] + 1}
        if code == 0:
            value |= {"answered": now, "jobs": _rows(out)}
            self._answered = began
        self._own = value
        temporary = self._file.with_suffix(f".{os.getpid()}.tmp")
        try:
            temporary.write_text(json.dumps(value), encoding="utf-8")
            temporary.replace(self._file)
        except OSError:
            with suppress(OSError):
                temporary.unlink()

    def _is_fresh(self) -> bool:
        value = self._read()
        # A time in the future (another login node's clock) is as good as none.
        return value is not None and 0 <= time.time() - value["asked"] < squeue_seconds()

    def _read(self) -> Shared | None:
        """The last answer: the shared one, or our own if it could not be written."""
        own = self._own
        try:
            value: Shared = json.loads(self._file.read_text(encoding="utf-8"))
            if not value.keys() >= {"asked", "answered", "jobs", "queries"}:
                return own
        except (OSError, ValueError, AttributeError):
            return own
        return own if own is not None and own["asked"] >= value["asked"] else value


def _all_jobs() -> tuple[str, ...]:
    """Options of squeue; the user by number, since LOGNAME may be another's."""
    return ("-h", "-t", "all", "-u", str(os.getuid()), "-o", FORMAT)


def _rows(out: str) -> dict[str, tuple[str, str, str]]:
    """Id to state, reason and name."""
    rows = (line.split("|", 3) for line in out.splitlines())
    return {row[0]: (row[1], row[2], row[3]) for row in rows if len(row) == 4}


def command(*words: str, timeout: float = TIMEOUT) -> tuple[int, str, str]:
    """Run a SLURM command: (exit status, stdout, stderr); a Ctrl-C does not reach it.

    It sees nothing of the settings that a user's shell may have for it.
    """
    shell = {key: value for key, value in os.environ.items() if not of_slurm(key)}
    try:
        result = subprocess.run(
            words,
            env=shell,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # job names may be anything
            timeout=timeout,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return 124, "", f"{words[0]} did not answer in {timeout:.0f} s"
    except OSError as error:
        return 127, "", f"{words[0]}: {error.strerror}"
    return result.returncode, result.stdout.strip(), result.stderr.strip()
