"""The launcher: submit or re-attach, wait, judge, resubmit, until the completion record exists."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from maect.core.files import check_literal_path, make_folder, watch_folder, with_retries
from maect.core.owners import refuse_public
from maect.launch import progress, record, slurm, submit
from maect.launch.local import Local
from maect.launch.owner import Interruption, own
from maect.launch.record import Job
from maect.launch.resources import LaunchError, Resources, Task
from maect.launch.slurm import Slurm
from maect.launch.state import (
    NOT_ACCEPTED_YET,
    STOPPED,
    Cluster,
    Notice,
    State,
    classify_notice,
    state_of,
)

TICK = 0.5  # seconds between two reads of the files
ATTEMPTS = 3  # attempts without progress before giving up
LONGEST_WAIT = 600.0  # seconds between two submissions that SLURM refuses for now
REFUSAL_PATIENCE = 3600.0  # seconds for which a refusal that is not the job's fault may last
STOP_PATIENCE = 60.0  # seconds that a job has after Ctrl-C until it saves, at least
STOP_STEPS = 5  # as long as this many steps: it hears of it in one, and computes the next meanwhile


def launch(
    task: Task,
    folder: Path,
    resources: Resources,
    *,
    is_done: Callable[[], bool],
    describe: str,
    detach: bool = False,
) -> None:
    """Run `task` on every rank and return once its completion record exists.

    A live job of this folder is taken over, never started twice. A job that ends without the
    record is submitted again as long as it saves further steps. Ctrl-C or SIGTERM asks it to save
    and stop; a later one cancels it; SIGHUP, SIGKILL or the death of the calling Snakemake leave
    it running. To be called in the main thread.

    Args:
        task: what to run; it must be able to resume from its own files.
        is_done: whether the completion record exists; cheap, called twice a second.
        detach: let Ctrl-C and SIGTERM leave the job running too.

    Raises:
        UserError: no job can run in a folder of this path.
        LaunchError: gave up; the message has the last lines of the failing rank's log.
        SystemExit: status 130, stopped or detached by a signal.
    """
    folder = Path(folder).absolute()
    if is_done() and not _is_endangered(folder, task.identity):
        return
    check_literal_path(folder)
    if resources.cluster == "slurm":
        submit.check_shell()
    make_folder(folder)
    refuse_public(folder)
    with own(folder), watch_folder(folder) as is_there, Interruption(detach) as interruption:
        line = progress.ProgressLine(describe)
        try:
            done = partial(with_retries, is_done)
            _Launch(task, folder, resources, done, line, interruption, is_there).run()
        except OSError as error:  # a full disk, a file system that is away
            raise LaunchError(
                f"{describe}: {error}; a running job is left alone: start again to re-attach to it"
            ) from error
        finally:
            line.close()


def _is_endangered(folder: Path, identity: str) -> bool:
    """Return whether a job of other settings may still write over what is there."""
    try:
        job = record.read_job(folder)
    except LaunchError:  # damaged: nothing is asked of the job any more
        return False
    if job is None or job.state == "ended" or record.verdict(folder, job) == "done":
        return False
    return record.is_of(folder, job) and not job.computes(identity)


def clusters() -> dict[str, Cluster]:
    """The clusters by name, with nothing seen yet."""
    return {"local": Local(), "slurm": Slurm()}


@dataclass
class _Launch:
    task: Task
    folder: Path
    resources: Resources
    is_done: Callable[[], bool]
    line: progress.ProgressLine
    interruption: Interruption
    is_there: Callable[[], bool]  # whether the folder is the one that it was
    asked_at: float | None = field(default=None, init=False)
    shown: set[str] = field(default_factory=set, init=False)  # sentences of jobs, for people
    broken: int = field(default=0, init=False)  # submissions of which neither id nor refusal came
    refusal: str = field(default="", init=False)  # why SLURM last took no job
    refused_since: float | None = field(default=None, init=False)
    wait: float = field(default=0.0, init=False)  # seconds that were last waited after a refusal
    hint: str = field(default="", init=False)  # what a person was last told to do for SLURM
    clusters: dict[str, Cluster] = field(default_factory=clusters, init=False)

    def run(self) -> None:
        job = record.read_job(self.folder)
        if job is not None and job.state != "ended" and not record.is_of(self.folder, job):
            self.line.say(f"{job} is that of {job.place}, and left alone")
            self.close(job, f"it is the job of {job.place}")
        if job is not None and job.stop:
            # A request to stop that an earlier launcher left behind is not meant for this one.
            job.stop = False
            record.write_job(self.folder, job)
        failures, ours = 0, False  # failures: attempts without progress, one after another
        if job is not None and job.state != "ended":
            self.line.say(f"re-attached to {job}")
            if not job.computes(self.task.identity):
                self.replace(job)
        while True:
            if job is None or job.state == "ended":
                if job is not None and self.is_done():  # what was replaced had not written yet
                    self.line.say("done")
                    return
                self.leave_before_submission()
                job, ours = self.submit(job), True
                if job.state == "ended":
                    self.wait_after_refusal()
                    continue
            end, seen = self.watch(job)
            if end is None or self.completes(job, end, ours):
                self.close(job, "done")
                # A short job may end between two polls; its last report still says how far it came.
                last = progress.describe(job.progress)
                self.line.say(f"done: {last}" if last else "done")
                return
            self.close(job, end.notice.text)
            if ours or seen:  # how a job ended while nobody watched is not held against it
                failures = self.judge(job, end, failures)

    def check_place(self) -> None:
        """Refuse to begin anew in the place of a folder that was moved (LaunchError)."""
        if not self.is_there():
            raise LaunchError(
                f"{self.line.title}: {self.folder} was moved, removed or replaced; a job that runs "
                "there ends by itself; start again where the folder is now"
            )

    def replace(self, job: Job) -> None:
        """Let a job whose result nobody asks for any more save and stop."""
        self.line.say("it computes what the settings were before they changed")
        how = ""
        while not how:
            self.check_place()
            record.learn_id(self.folder, job)
            notice = state_of(self.folder, job, self.clusters).notice
            self.handle_interrupt(job, notice)
            how = self.stop(job, notice)
            time.sleep(TICK)
        self.asked_at = None
        self.close(job, "its settings have changed")
        self.line.say(f"{how} at step {job.saved}")

    def leave_before_submission(self) -> None:
        reason = self.interruption.reason_to_leave()
        if reason or self.interruption.stops:
            self.line.say(f"{reason or 'stopped'}; no job is running")
            raise SystemExit(130)

    def submit(self, previous: Job | None) -> Job:
        """Submit a job, noting it before and after; it is ended if SLURM takes no more of them.

        Raises:
            LaunchError: refused; or another launcher is at work, on a file system without locks.
        """
        self.check_place()
        known = record.read_job(self.folder)
        if known is not None and (previous is None or known.name != previous.name):
            raise LaunchError(
                f"{self.folder}: another launcher has submitted job {known.id or known.name}: "
                "start again to watch it"
            )
        where = self.resources
        job = record.new_job(self.folder, where.cluster, where.ranks, previous, self.task.identity)
        job.site = self.clusters[job.cluster].site()
        job.place = os.path.realpath(self.folder)
        job.request = submit.request(job, self.folder, self.task, where)
        record.make_job_folder(self.folder, job.name)
        record.write_job(self.folder, job)
        answer = submit.submit(self.folder, job, self.leave_submission)
        if "id" in answer:
            self.broken, self.refusal, self.refused_since, self.wait = 0, "", None, 0.0
            job.accepted(answer["id"])
            record.write_job(self.folder, job)
            again = f", attempt {job.attempt}" if job.attempt > 1 else ""
            self.line.say(f"submitted {job} at step {job.step}{again}")
            return job
        error = answer["error"].strip()
        passes = job.cluster == "slurm" and slurm.passes(error)
        refused = answer.get("refused") and not passes
        if refused and self.may_be_taken_later(job, error):
            # There is no such job, nor will there be: the next one has another name.
            said = " ".join(error.split())
            self.close(job, f"{NOT_ACCEPTED_YET}: {said}")
            record.remove_job_folder(self.folder, job.name)
            if said != self.refusal:
                self.refusal = said
                self.line.say(f"SLURM takes no job for now; trying again: {said}")
            return job
        self.broken += not passes
        if passes or (not refused and self.broken < ATTEMPTS):
            # It may have been accepted all the same: the caller searches for the unique name.
            what = "SLURM does not answer" if passes else "not sure that it was submitted"
            self.line.say(f"{what}, searching for it: {' '.join(error.split())}")
            return job
        self.close(job, f"not accepted: {error}")
        raise LaunchError(f"{self.line.title}: {job.cluster} job not accepted: {error}")

    def may_be_taken_later(self, job: Job, error: str) -> bool:
        """Return whether SLURM may take a job that it has refused, without anybody's help.

        A limit on jobs in the queue ends whenever one of them does. Any other refusal may be tried
        again for an hour, if it is none of the job's: SLURM says so, or has taken a job of this
        run before, with the same settings.
        """
        if job.cluster != "slurm":
            return False
        if slurm.is_limit(error):
            return True
        if not (slurm.is_refused_for_now(error) or job.earlier):
            return False
        if self.refused_since is None:
            self.refused_since = time.monotonic()
        return time.monotonic() - self.refused_since < REFUSAL_PATIENCE

    def wait_after_refusal(self) -> None:
        """Wait until SLURM may take a job, longer each time; leave if that is asked for."""
        self.wait = min(max(2 * self.wait, slurm.squeue_seconds()), LONGEST_WAIT)
        until = time.monotonic() + self.wait
        while time.monotonic() < until:
            self.check_place()
            self.leave_before_submission()
            time.sleep(TICK)

    def leave_submission(self) -> None:
        """Go without waiting for the submission; the next launcher finds the job by its name."""
        if reason := self.interruption.reason_to_leave():
            self.line.say(f"{reason}; the submission continues: start again to re-attach")
            raise SystemExit(130)

    def watch(self, job: Job) -> tuple[State | None, bool]:
        """Wait for the job's end: (its end or None when it is complete, whether it was live)."""
        cluster = self.clusters[job.cluster]
        notice, seen, next_poll, ended = Notice("unknown", "waiting"), False, 0.0, float("inf")
        while True:
            self.check_place()
            self.show_job_messages(job)
            if self.is_done():
                cluster.finish(self.folder, job)
                return None, seen
            now = time.monotonic()
            if now >= next_poll:
                record.learn_id(self.folder, job)
                notice = state_of(self.folder, job, self.clusters).notice
                next_poll = now + cluster.interval
                seen = seen or notice.phase in ("pending", "running")
                if job.id is not None and job.state == "submitting":
                    job.state = "submitted"
                    record.write_job(self.folder, job)
            if notice.hint and notice.hint != self.hint:
                self.hint = notice.hint
                self.line.say(notice.hint)
            self.handle_interrupt(job, notice)
            ended = min(ended, now) if notice.phase == "ended" else float("inf")
            # What is left of it must not run beside the next job.
            if now - ended >= notice.grace and cluster.end(self.folder, job):
                self.show_job_messages(job)
                return classify_notice(self.folder, job, notice), seen
            if self.line.is_due():
                self.line.show(*self.progress_line(job, notice))
            time.sleep(TICK)

    def show_job_messages(self, job: Job) -> None:
        """Show what the job says to people, each sentence once."""
        for sentence in record.rank_0(self.folder, job).said:
            if sentence not in self.shown:
                self.shown.add(sentence)
                self.line.say(sentence)

    def progress_line(self, job: Job, notice: Notice) -> tuple[str, float | None]:
        """Return what to show, and the part of the steps that is done."""
        if notice.phase == "running" and self.asked_at is None:
            report = record.progress(self.folder, job)
            return progress.describe(report) or notice.text or "running", progress.part(report)
        return "saving and stopping" if self.asked_at else notice.text, None

    def handle_interrupt(self, job: Job, notice: Notice) -> None:
        """Leave the job running, or stop it, if that was asked for."""
        # A second interrupt cancels, also where Snakemake has gone by the first one.
        reason = self.interruption.reason_to_leave()
        if reason and self.interruption.stops < 2:
            then = "saves and stops" if job.stop else "keeps running: start again to re-attach"
            self.line.say(f"{reason}; {job} {then}")
            raise SystemExit(130)
        if not self.interruption.stops:
            return
        if how := self.stop(job, notice, at_once=self.interruption.stops > 1):
            self.close(job, STOPPED)
            self.line.say(f"{how} at step {job.saved}; start again to resume")
            raise SystemExit(130)

    def stop(self, job: Job, notice: Notice, at_once: bool = False) -> str:
        """Ask a job to save and stop: how it ended, or "" as long as it has not."""
        if self.asked_at is None:
            self.asked_at = time.monotonic()
            job.stop = True
            record.write_job(self.folder, job)
            self.line.say("asked the job to save and stop; interrupt again to cancel it at once")
        cluster = self.clusters[job.cluster]
        if record.verdict(self.folder, job) == "stopped":
            cluster.finish(self.folder, job)
            return "saved and stopped"
        step = progress.seconds_a_step(record.progress(self.folder, job)) or 0.0
        late = time.monotonic() - self.asked_at > max(STOP_PATIENCE, STOP_STEPS * step)
        # However long the file system takes for a state; the ranks themselves give up one day.
        late = late and not record.is_saving(self.folder, job)
        waits = notice.phase == "pending" and cluster.waits(self.folder, job)
        if not (at_once or late or waits or notice.phase == "ended"):
            return ""
        if not cluster.end(self.folder, job):
            self.line.say(
                f"{cluster.out_of_reach}: job {job.id or job.name} was not cancelled; when it "
                "runs, it will save and stop; start again to re-attach to it"
            )
            raise SystemExit(130)
        return "cancelled"

    def completes(self, job: Job, end: State, ours: bool) -> bool:
        """Return whether a job that has ended is complete after all."""
        deadline = time.monotonic() + self.clusters[job.cluster].record_patience
        while end.outcome == "done":
            if self.is_done():
                return True
            if time.monotonic() > deadline:
                if not ours:
                    # Snakemake deletes what an interrupted rule has written before it runs again;
                    # the saved state still has all of it.
                    self.line.say(
                        f"job {job.id} had finished, but its files are gone: starting it again"
                    )
                    return False
                raise LaunchError(
                    f"{self.line.title}: job {job.id} returned 'done' but left no completion record"
                )
            time.sleep(TICK)
        return self.is_done()

    def judge(self, job: Job, end: State, failures: int) -> int:
        """Count attempts without progress so far; LaunchError if no further one is worth it."""
        step, title, failure = job.saved or 0, self.line.title, end.failure
        if job.id is None or failure is None:
            return failures  # SLURM did not answer; nothing was tried
        if end.outcome == "stopped":
            raise LaunchError(
                f"{title}: job {job.id} was cancelled by a person ({end.notice.text}) "
                f"at step {step}; start again to resume"
            )
        # What a run that has worked elsewhere fails of may be its node's: there are others.
        elsewhere = step > 0 and job.cluster == "slurm"
        if failure.kind == "UserError" or (failure.kind == "NodeError" and not elsewhere):
            raise LaunchError(failure.message)
        failures = 0 if step > job.step else failures + 1
        saved = end.outcome == "saved"
        how = "saved and returned before its end" if saved else f"ended: {end.notice.text}"
        if failures >= ATTEMPTS:
            raise LaunchError(
                f"{title}: gave up after {failures} attempts without progress (step {step}; "
                f"the last one {how}). Rank {failure.rank} reported:\n{failure.text}\n"
                f"Full log: {failure.log}"
            )
        why = f" ({failure.message.splitlines()[0]})" if failure.message else ""
        self.line.say(f"job {job.id} {how}{why}, at step {step}; submitting it again")
        return failures

    def close(self, job: Job, ending: str) -> None:
        record.learn_id(self.folder, job)
        # The ranks' own files go with the job's folder; what counts of them stays in the record.
        job.verdict = record.verdict(self.folder, job)
        job.saved = record.saved_step(self.folder, job)
        job.progress = record.progress(self.folder, job)
        job.held = record.held_seconds(self.folder, job)
        job.state, job.ending, job.stop = "ended", ending, False
        record.write_job(self.folder, job)
