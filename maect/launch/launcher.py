"""The launcher: submit or re-attach, wait, judge, resubmit, until the completion record exists."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from maect.core.errors import reason
from maect.core.files import check_literal_path, make_folder, with_retries
from maect.core.owners import refuse_public
from maect.core.resources import Resources
from maect.launch import progress, record, slurm
from maect.launch.local import Local
from maect.launch.owner import Interruption, lock_folder
from maect.launch.record import Job, LaunchError, Task
from maect.launch.slurm import Slurm
from maect.launch.state import NOT_ACCEPTED_YET, STOPPED, Cluster, Notice, notice_of, outcome

TICK = 0.5  # seconds between two reads of the files
ATTEMPTS = 3  # attempts without progress before giving up
LONGEST_WAIT = 600.0  # seconds between two submissions that SLURM refuses for now
REFUSAL_PATIENCE = 3600.0  # seconds for which a refusal that is not the job's fault may last
STOP_PATIENCE = 900.0  # seconds that a job has after Ctrl-C until it has saved: a slow disk


def launch(
    task: Task,
    folder: Path,
    resources: Resources,
    *,
    is_done: Callable[[], bool],
    describe: str,
) -> None:
    """Run `task` on every rank and return once its completion record exists.

    A live job of this folder is taken over, never started twice. A job that ends without the
    record is submitted again as long as it saves further steps. Ctrl-C or SIGTERM asks it to save
    and stop; a later one cancels it; SIGHUP, SIGKILL or the death of the calling Snakemake leave
    it running. To be called in the main thread.

    Args:
        task: function to run; it must be able to resume from its own files.
        resources: as `Resources.resolved` returns them.
        is_done: whether the completion record exists; cheap, called twice a second.

    Raises:
        UserError: no job can run in a folder of this path.
        LaunchError: gave up; the message has the last lines of the failing rank's log.
        SystemExit: status 130, stopped by a signal, or its Snakemake is gone.
    """
    folder = Path(folder).absolute()
    if is_done() and not _may_be_overwritten(folder, task.identity):
        return
    check_literal_path(folder)
    make_folder(folder)
    refuse_public(folder)
    with lock_folder(folder), Interruption() as interruption:
        line = progress.ProgressLine(describe)
        try:
            _Launch(
                task, folder, resources, partial(with_retries, is_done), line, interruption
            ).run()
        except OSError as error:  # a full disk, a file system that is away
            raise LaunchError(
                f"{describe}: {error}; a running job is left alone: start again to re-attach to it"
            ) from error


def _may_be_overwritten(folder: Path, identity: str) -> bool:
    """Return whether a live job with other settings could still write over the result."""
    try:
        job = record.read_job(folder)
    except LaunchError:  # damaged: nothing is asked of the job any more
        return False
    if job is None or job.state == "ended" or record.verdict(folder, job) == "done":
        return False
    return not job.computes(identity)


def clusters() -> dict[str, Cluster]:
    """Return the clusters by name."""
    return {"local": Local(), "slurm": Slurm()}


@dataclass
class _Launch:
    """One call of `launch`.

    Attributes:
        asked_at: when the job was asked to save and stop (monotonic seconds).
        failures: attempts without progress, one after another.
        refused_since: when SLURM began to take no job.
        wait: seconds to wait before the next submission.
        watched: whether the job was submitted or seen alive by this launcher.
        recorded: name of the job on record, as far as this launcher knows.
        notice: the cluster's last one.
        next_poll: when to ask for the next (monotonic seconds).
    """

    task: Task
    folder: Path
    resources: Resources
    is_done: Callable[[], bool]
    line: progress.ProgressLine
    interruption: Interruption
    asked_at: float | None = field(default=None, init=False)
    failures: int = field(default=0, init=False)
    refused_since: float | None = field(default=None, init=False)
    wait: float = field(default=0.0, init=False)
    watched: bool = field(default=False, init=False)
    recorded: str | None = field(default=None, init=False)
    notice: Notice = field(default=Notice("unknown", "waiting"), init=False)
    next_poll: float = field(default=0.0, init=False)
    clusters: dict[str, Cluster] = field(default_factory=clusters, init=False)

    def run(self) -> None:
        """Attach to the job on record, or submit one, until the completion record exists."""
        job = self.attach()
        while True:
            if job is None or job.state == "ended":
                if job is not None and self.is_done():  # a replaced job had not written yet
                    self.line.say("done")
                    return
                self.wait_before_submission()
                job = self.submit(job)
                if job.state == "ended":
                    continue
            notice = self.watch(job)
            if notice is None or self.completes(job, notice):
                self.close(job, "done")
                # A short job may end between two polls; its last report still says how far it came.
                last = progress.describe(record.progress(self.folder, job))
                self.line.say(f"done: {last}" if last else "done")
                return
            self.close(job, notice.text)
            if self.watched:  # how a job ended while nobody watched is not held against it
                self.judge(job, notice)

    def attach(self) -> Job | None:
        """Take over the job on record; end one that computes other settings."""
        job = record.read_job(self.folder)
        if job is None:
            return None
        self.recorded = job.name
        if job.ending == record.of_another_place(job):
            self.line.say(f"{job} is that of {job.place}, and left alone")
        if job.state == "ended":
            return job
        if not job.computes(self.task.identity):
            self.replace(job)
            return job
        # A request to stop that an earlier launcher left behind is not meant for this one.
        job.stop = False
        self.write(job)
        self.line.say(f"re-attached to {job}")
        return job

    def replace(self, job: Job) -> None:
        """Cancel a job whose settings have changed since; what it saves is no step of this run.

        Raises:
            SystemExit: a signal came while SLURM did not answer.
        """
        tried = 0.0
        while True:
            notice = self.poll(job)
            if notice.phase != "unknown" and tried != self.next_poll:
                tried = self.next_poll
                if self.end(job):
                    break
            reason = self.interruption.reason_to_leave()
            if reason or self.interruption.stops:
                self.line.say(f"{reason or 'stopped'}; {job}, of other settings, is not cancelled")
                raise SystemExit(130)
            if self.line.is_due():
                self.line.show(f"{job}, whose settings have changed, cannot be cancelled yet")
            time.sleep(TICK)
        self.close(job, "its settings have changed")
        self.line.say(f"cancelled {job}: its settings have changed")

    def wait_before_submission(self) -> None:
        """Wait as long as the last refusal asks for; leave if a signal came."""
        until = time.monotonic() + self.wait
        while True:
            reason = self.interruption.reason_to_leave()
            if reason or self.interruption.stops:
                self.line.say(f"{reason or 'stopped'}; no job is running")
                raise SystemExit(130)
            if time.monotonic() >= until:
                return
            time.sleep(TICK)

    def submit(self, previous: Job | None) -> Job:
        """Submit a job, on record before and after; without an id if it was not accepted for now.

        Raises:
            LaunchError: refused.
        """
        job = record.new_job(self.folder, self.task, self.resources, previous)
        cluster = self.clusters[job.cluster]
        job.site = cluster.site()
        record.make_job_folder(self.folder, job.name)
        self.write(job)
        self.watched = True
        try:
            cluster.submit(self.folder, job, self.resources)
        except (LaunchError, RuntimeError, ValueError) as error:
            self.refuse(job, " ".join(str(error).split()))
            return job
        self.refused_since = None
        self.wait = 0.0
        job.state = "submitted"
        try:
            self.write(job)
        except LaunchError:  # another launcher's job is on record, without this one
            cluster.end(self.folder, job)
            raise
        self.line.say(f"submitted {job} at step {job.step}")
        return job

    def refuse(self, job: Job, error: str) -> None:
        """Set the wait before the next submission; LaunchError if there is no sense in one."""
        again = self.may_try_again(job, error)
        # After a transient error sbatch may have submitted the job: its unique name will show it.
        if job.cluster == "local" or not slurm.is_transient(error):
            self.close(job, f"{NOT_ACCEPTED_YET if again else 'not accepted'}: {error}")
            record.remove_job_folder(self.folder, job.name)
        if not again:
            raise LaunchError(f"{self.line.title}: {job.cluster} job not accepted: {error}")
        self.wait = min(max(2 * self.wait, slurm.squeue_seconds()), LONGEST_WAIT)
        self.line.say(f"SLURM takes no job for now; trying again: {error}")

    def may_try_again(self, job: Job, error: str) -> bool:
        """Return whether SLURM may take a job later that it has not taken, without anybody's help.

        A limit on jobs in the queue ends whenever one of them does. Any other error is tried again
        for an hour if it has nothing to do with the job: SLURM says so, or has taken a job of this
        run before.
        """
        if job.cluster != "slurm":
            return False
        if slurm.is_limit(error):
            return True
        if self.refused_since is None:
            self.refused_since = time.monotonic()
        is_late = time.monotonic() - self.refused_since >= REFUSAL_PATIENCE
        return not is_late and (slurm.is_transient(error) or bool(job.earlier))

    def watch(self, job: Job) -> Notice | None:
        """Wait for a job's end; return it, or None when the job is complete."""
        cluster = self.clusters[job.cluster]
        self.next_poll = 0.0
        ended = float("inf")
        while True:
            self.show_job_messages(job)
            if self.is_done():
                cluster.finish(self.folder, job)
                return None
            notice = self.poll(job)
            self.watched = self.watched or notice.phase in ("pending", "running")
            if notice.hint:
                self.line.say(notice.hint)
            self.leave_if_asked(job)
            if self.interruption.stops:
                self.stop(job, notice)
            now = time.monotonic()
            ended = min(ended, now) if notice.phase == "ended" else float("inf")
            # Nothing of it must run beside the next job.
            if now - ended >= notice.grace and self.end(job):
                self.show_job_messages(job)
                return notice
            if self.line.is_due():
                self.line.show(self.progress_line(job, notice))
            time.sleep(TICK)

    def poll(self, job: Job) -> Notice:
        """Return the cluster's notice about a job, asked for now and then.

        Raises:
            LaunchError: `check_record`.
        """
        self.check_record()
        now = time.monotonic()
        if now >= self.next_poll:
            self.next_poll = now + self.clusters[job.cluster].interval
            self.notice = notice_of(self.folder, job, self.clusters)
            if job.id is not None and job.state == "submitting":
                job.state = "submitted"
                self.write(job)
        return self.notice

    def show_job_messages(self, job: Job) -> None:
        """Print messages from the job."""
        for sentence in record.rank_0(self.folder, job).said:
            self.line.say(sentence)

    def progress_line(self, job: Job, notice: Notice) -> str:
        """Return a line on the job's progress."""
        if self.asked_at is not None:
            return "saving and stopping"
        if notice.phase != "running":
            return notice.text
        return progress.describe(record.progress(self.folder, job)) or notice.text or "running"

    def leave_if_asked(self, job: Job) -> None:
        """Leave the job running (SystemExit) if a signal asked for that, or Snakemake is gone."""
        reason = self.interruption.reason_to_leave()
        # A second interrupt cancels, also where Snakemake has gone by the first one.
        if reason and self.interruption.stops < 2:
            then = "saves and stops" if job.stop else "keeps running: start again to re-attach"
            self.line.say(f"{reason}; {job} {then}")
            raise SystemExit(130)

    def stop(self, job: Job, notice: Notice) -> None:
        """Ask a job to save and stop, and leave once it has.

        Raises:
            SystemExit: status 130: it has stopped, or SLURM does not answer.
        """
        if self.asked_at is None:
            self.asked_at = time.monotonic()
            job.stop = True
            try:
                self.write(job)
            except OSError as error:  # a full disk, on which it could not save either
                how = "cancelled" if self.end(job) else "not cancelled: SLURM does not answer"
                self.line.say(f"{job} cannot be asked to save ({reason(error)}): {how}")
                raise SystemExit(130) from None
            self.line.say("asked the job to save and stop; interrupt again to cancel it at once")
            self.next_poll = 0.0  # it may have begun since
            return
        cluster = self.clusters[job.cluster]
        if record.verdict(self.folder, job) == "stopped":
            cluster.finish(self.folder, job)
            how = "saved and stopped"
        else:
            is_late = time.monotonic() - self.asked_at > STOP_PATIENCE
            at_once = is_late or self.interruption.stops > 1
            if not at_once and notice.phase not in ("pending", "ended"):
                return
            if not self.end(job):
                self.line.say(
                    f"{job} was not cancelled: SLURM does not answer, or it is another user's; "
                    "when it runs, it will save and stop; start again to re-attach to it"
                )
                raise SystemExit(130)
            how = "cancelled"
        self.close(job, STOPPED)
        self.line.say(f"{how} at step {record.saved_step(self.folder, job)}; start again to resume")
        raise SystemExit(130)

    def end(self, job: Job) -> bool:
        """End a job; return False if the cluster does not answer, or hides another user's jobs."""
        return record.is_ours(self.folder, job) and self.clusters[job.cluster].end(self.folder, job)

    def completes(self, job: Job, notice: Notice) -> bool:
        """Return whether a job that has ended is complete after all."""
        is_said = outcome(self.folder, job, notice) == "done"
        patience = self.clusters[job.cluster].record_patience if is_said else 0.0
        deadline = time.monotonic() + patience
        while not self.is_done():
            if time.monotonic() < deadline:
                time.sleep(TICK)
                continue
            if is_said and self.watched:
                raise LaunchError(
                    f"{self.line.title}: job {job.id} returned 'done' but left no completion record"
                )
            if is_said:
                # Somebody has deleted its results; the saved state still has all of it.
                self.line.say(
                    f"job {job.id} had finished, but its files are gone: starting it again"
                )
            return False
        return True

    def judge(self, job: Job, notice: Notice) -> None:
        """Count attempts without progress; LaunchError if no further one is worth it."""
        if job.id is None:
            return  # SLURM did not answer; nothing was tried
        step = record.saved_step(self.folder, job)
        title = self.line.title
        how_ended = outcome(self.folder, job, notice)
        if how_ended == "stopped":
            raise LaunchError(
                f"{title}: job {job.id} was cancelled by a person ({notice.text}) "
                f"at step {step}; start again to resume"
            )
        error = record.first_error(self.folder, job)
        # A run that has worked elsewhere may fail because of its node, and there are others.
        elsewhere = step > 0 and job.cluster == "slurm"
        if error and (error.kind == "UserError" or (error.kind == "NodeError" and not elsewhere)):
            raise LaunchError(error.message)
        self.failures = 0 if step > job.step else self.failures + 1
        saved = how_ended == "saved"
        how = "saved and returned before its end" if saved else f"ended: {notice.text}"
        if self.failures >= ATTEMPTS:
            rank = error.rank if error else 0
            log = record.log(self.folder, job, rank)
            text = error.traceback.strip() if error else record.tail(log)
            last = "\n".join(text.splitlines()[-record.LOG_TAIL :])
            raise LaunchError(
                f"{title}: gave up after {self.failures} attempts without progress (step {step}; "
                f"the last one {how}). Rank {rank} reported:\n{last}\nFull log: {log}"
            )
        why = f" ({error.message.splitlines()[0]})" if error and error.message else ""
        self.line.say(f"job {job.id} {how}{why}, at step {step}; submitting it again")

    def close(self, job: Job, ending: str) -> None:
        """Note a job's end."""
        job.state = "ended"
        job.ending = ending
        job.stop = False
        self.write(job)

    def write(self, job: Job) -> None:
        """Write `job.json`; LaunchError as in `check_record`."""
        self.check_record()
        record.write_job(self.folder, job)
        self.recorded = job.name

    def check_record(self) -> None:
        """Leave if the record on disk is not the one that this launcher has read or written.

        Raises:
            LaunchError: the folder was moved or removed; or another launcher has started a job, on
                a file system without locks.
        """
        found = record.read_job(self.folder)
        if found is None and self.recorded is not None:
            path = self.folder / "job.json"
            raise LaunchError(f"{path}: gone, with its folder; start again where that is now")
        if found is not None and found.name != self.recorded:
            raise LaunchError(
                f"{self.folder}: job.json names another job, {found}; start again to wait for that"
            )
