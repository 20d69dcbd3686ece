"""Jobs on SLURM: the truth is in squeue, then in sacct; a question that fails is no verdict.

Nor is a word that nobody here knows, and "unknown" only from the cluster that took the job, asked
about its id alone.
"""

import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

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
HELD = {"REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
"""Words of a held job. With others the reason says so, such as `JobHeldUser`."""
TEARDOWN = 30.0  # seconds for the ranks to return after the completion record was written
BROKEN_GRACE = 60.0  # seconds for SLURM to end a job that has lost a rank
BEGUN = re.compile(rf"^{ATTEMPT} (\d+)".encode(), re.MULTILINE)
TASK_ENDED = re.compile(rb"^srun: error: (?P<node>\S+): tasks? [\d,-]+: (?P<how>.*)", re.MULTILINE)
FORGOTTEN = 600.0  # seconds after which sacct is no longer waited for
FORMAT = "%i|%T|%r|%j|%k"
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
HELD_HINT = (
    "SLURM holds job {0}, which does not start by itself: `scontrol release {0}`, or Ctrl-C and "
    "start again"
)
ALREADY_OVER = ("Invalid job id", "already completing or completed", "already finished")
REFUSED_FOR_NOW = ("authentication error", "I/O error writing script/environment to file")
"""By SLURM, for reasons that are not the job's: munge is away, the controller's disk is full."""


class Slurm(Cluster):
    """SLURM, and what it has said about the jobs that one process watches."""

    interval = 2.0  # between two looks at what SLURM has said
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
        """Return the state of a SLURM job, as of squeue's last answer."""
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
        if job.id in answer.jobs and _is_ours(job, answer.jobs[job.id][2]):
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
        """Cancel a job: by its id if it has one, else by its name; False if SLURM says nothing."""
        which = f"--name={job.name}"
        if job.id is not None:
            known, answers = _controllers(job)
            if not known:
                return answers  # SLURM has no such job any more
            which = job.id
        code, _, error = command("scancel", which)
        return code == 0 or any(text in error for text in ALREADY_OVER)

    def _find(self, job: Job, answer: "Answer") -> Notice:
        """A job whose launcher died before it learnt the id: its name is unique."""
        rows = {key: row for key, row in answer.jobs.items() if _is_named(job, row[2])}
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
            held = word in HELD or "held" in reason.lower()
            return Notice("pending", text, hint=HELD_HINT.format(job_id) if held else "")
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
    """The controller's fields of a job, none if its id is another's; whether it answered."""
    assert job.id is not None
    code, out, error = command("scontrol", "--oneliner", "show", "job", job.id)
    _, _, shown = out.partition(f" JobName={job.name} ")  # names may have blanks
    if not shown and (place := _comment(job)) and f" Comment={place} " in f"{out} ":
        _, _, shown = out.partition(" JobName=")  # it was given another name
    # The last fields are paths, in which anything may stand: the first of a name is it.
    known = dict(reversed(re.findall(r"(?:^| )(\w+)=(\S*)", shown)))
    return known, (code == 0 and "JobName=" in out) or "Invalid job id" in error


def _comment(job: Job) -> str:
    """Return the comment that a job was submitted with, which is its folder."""
    return str(job.request.get("parameters", {}).get("comment", ""))


def _is_named(job: Job, about: str) -> bool:
    """Return whether `NAME|COMMENT` of squeue has a job's unique name."""
    return about == job.name or about.startswith(f"{job.name}|")


def _is_ours(job: Job, about: str) -> bool:
    """Return whether `NAME|COMMENT` of squeue, of a job's id, is that of the job.

    People and sites rename jobs; the comment is left. Ids begin again some day: a job of another
    name and another comment is somebody else's.
    """
    place = _comment(job)
    return _is_named(job, about) or bool(place and about.endswith(f"|{place}"))


def passes(error: str) -> bool:
    """Return whether a submission failed for a reason that goes away by itself."""
    return any(text in error for text in SUBMISSION_FAILURES_THAT_PASS)


def is_limit(error: str) -> bool:
    """Return whether SLURM itself has refused a job, and takes it later."""
    return any(text in error for text in LIMITS)


def is_refused_for_now(error: str) -> bool:
    """Return whether SLURM has refused a job for a reason that is none of the job's."""
    return any(text in error for text in REFUSED_FOR_NOW)


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
    """Answer of squeue, at a time of this process's clock.

    Attributes:
        jobs: id to state, reason and `NAME|COMMENT`.
    """

    time: float
    jobs: dict[str, tuple[str, str, str]]


def squeue_seconds() -> float:
    """Seconds between two questions to the controller."""
    return float(os.environ.get(INTERVAL_VARIABLE, "30"))


class Squeue:
    """squeue's answer about this user's jobs, asked for now and then.

    Each launcher asks for itself. With 64 jobs in the queue a question took the test cluster's
    controller 0.44 ms (`sdiag`): 64 launchers that ask twice a minute are a thousandth of its time.
    """

    def __init__(self) -> None:
        self._asked = float("-inf")
        self._answer: Answer | None = None

    def ask(self, newer_than: float) -> Answer | None:
        """The state of all jobs of this user at some moment after `newer_than` (monotonic time).

        None is no verdict: the controller did not answer, or its last answer is older and it is too
        early to ask again.
        """
        now = time.monotonic()
        if now - self._asked >= squeue_seconds():
            # A question that failed counts as asked: a sick controller must not be stormed.
            self._asked = now
            code, out, _ = command("squeue", *_all_jobs())
            if code == 0:
                self._answer = Answer(now, _rows(out))
        if self._answer is None or self._answer.time <= newer_than:
            return None
        return self._answer


def _all_jobs() -> tuple[str, ...]:
    """Options of squeue; the user by number, since LOGNAME may be another's."""
    return ("-h", "-t", "all", "-u", str(os.getuid()), "-o", FORMAT)


def _rows(out: str) -> dict[str, tuple[str, str, str]]:
    """Id to state, reason and `NAME|COMMENT`."""
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
