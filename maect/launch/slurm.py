"""Jobs on SLURM: their script, and what SLURM says of them.

The controller is asked first, then accounting. A question that fails is no verdict.
The controller is asked about one job by its id; while a job has no id yet, squeue finds it by name.
Each launcher asks for itself: with 64 jobs in the queue a question took the test cluster's
controller 0.44 ms (`sdiag`), and a launcher asks twice a minute.
"""

import logging
import os
import re
import shlex
import sys
from pathlib import Path

from maect.core.files import write_text
from maect.core.owners import SAFE_PATH
from maect.core.resources import Resources
from maect.launch import record
from maect.launch.local import find_processes
from maect.launch.record import Job, LaunchError
from maect.launch.shell import MARK, command, environment
from maect.launch.state import Cluster, Notice, check_site

log = logging.getLogger(__name__)

SUBMISSION = 300.0  # seconds for sbatch, which itself gives up on a controller after about 100
ID = re.compile(r"^(?:Submitted batch job )?(\d+)(?:;\S+)?$", re.MULTILINE)
EXPORTED = (MARK, "PYTHONPATH", SAFE_PATH, "OMP_NUM_THREADS", "SRUN_CPUS_PER_TASK")
"""Variables of a job that its script sets: a site may start jobs without the submitter's."""
INTERVAL_VARIABLE = "MAECT_SQUEUE_SECONDS"  # shorter for tests
RUNNING = {"RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "STAGE_OUT"}
RUNNING |= {"SIGNALING", "RESIZING", "POWER_UP_NODE"}
HELD = {"REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
"""States of a held job. In others the reason says so, such as `JobHeldUser`."""
PENDING = {"PENDING", "REQUEUED", "REQUEUE_FED", *HELD}
MAY_RETURN = {"NODE_FAIL", "PREEMPTED"}  # SLURM puts such jobs back under the same id
OVER = {"COMPLETED", "FAILED", "TIMEOUT", "OUT_OF_MEMORY", "BOOT_FAIL", "REVOKED", "LAUNCH_FAILED"}
OVER |= {"RECONFIG_FAIL"}
BY_A_PERSON = {"CANCELLED", "DEADLINE"}
NO_SITE = "scontrol does not say which cluster this is"
TRANSIENT = (
    NO_SITE,
    "Unable to contact slurm controller",
    "Socket timed out",
    "Connection refused",
    "Zero Bytes were transmitted",
    "Transport endpoint is not connected",
    "temporarily unable to accept job",
    "Resource temporarily unavailable",
    "did not answer in",
    "no job id in what sbatch answered",
    "authentication error",  # munge is away
    "I/O error writing script/environment to file",  # the controller's disk is full
)
"""Messages of sbatch that have nothing to do with the job."""
LIMITS = ("MaxSubmitJob", "GrpSubmitJobs")
"""Limits of a QOS or an account on jobs in the queue: they pass once one of these has ended."""
HELD_HINT = (
    "SLURM holds job {0}, which does not start by itself: `scontrol release {0}`, or Ctrl-C and "
    "start again"
)
UNKNOWN_ID = "Invalid job id"
ALREADY_OVER = (UNKNOWN_ID, "already completing or completed", "already finished")
NO_ANSWER = Notice("unknown", "no answer from SLURM")


class Slurm(Cluster):
    """SLURM, as seen from a login node."""

    record_patience = 90.0  # a client of NFS may take a minute to see the file

    def __init__(self) -> None:
        self.interval = squeue_seconds()

    def site(self) -> str | None:
        """Return the name of the cluster that takes jobs here; None if it does not answer."""
        _, out, _ = command("scontrol", "show", "config")
        match = re.search(r"^ClusterName\s*=\s*(\S+)", out, re.MULTILINE)
        return match[1] if match else None

    def submit(self, folder: Path, job: Job, resources: Resources) -> None:
        """Submit the script of the job on record and set the job's id."""
        if clusters := os.environ.get("SLURM_CLUSTERS"):
            log.warning("SLURM_CLUSTERS=%s is ignored: jobs go to this machine's cluster", clusters)
        file = record.job_folder(folder, job.name) / "job.sh"
        write_text(file, script(folder, job.name, resources))
        if job.site is None:
            raise LaunchError(NO_SITE)
        words = ("sbatch", "--parsable", str(file))
        code, out, error = command(*words, timeout=SUBMISSION, env=environment(job.name, job.cpus))
        if code:
            raise LaunchError(error or f"sbatch: exit status {code}")
        ids = ID.findall(out)  # a site's banner may stand before it
        if not ids:
            raise LaunchError(f"no job id in what sbatch answered: {out[:200]!r}")
        job.id = ids[-1]

    def poll(self, folder: Path, job: Job) -> Notice:
        """Ask the controller about a job, and accounting if the controller has forgotten it."""
        if job.id is None:
            # The submission may go on although the launcher that began it was killed.
            if find_processes(job.name):
                return Notice("unknown", "being submitted")
            code, job.id = _find_id(job.name)
            if code:
                return NO_ANSWER
        known = {} if job.id is None else _show_job(job)
        if known is None:
            return NO_ANSWER
        if known:
            return _notice(job, known["JobState"], known.get("Reason", ""))
        here = self.site()
        if here is None:
            return NO_ANSWER
        check_site(job, here)
        if job.id is None:
            # The controller does not have it, so that submitting again runs nothing twice.
            return Notice("ended", "never submitted", grace=1.0)
        return _ask_accounting(job) or Notice("ended", "unknown to SLURM", grace=self.interval)

    def has_left(self, folder: Path, job: Job) -> bool:
        """Return whether the function of a job has returned: SLURM ends what is left."""
        return record.verdict(folder, job) in ("done", "stopped")

    def end(self, folder: Path, job: Job) -> bool:
        """Cancel a job by its id, or by its name; return False if SLURM does not answer."""
        which = f"--name={job.name}"
        if job.id is not None:
            known = _show_job(job)
            if not known:
                return known is not None
            which = job.id
        code, _, error = command("scancel", which)
        return code == 0 or any(text in error for text in ALREADY_OVER)


def script(folder: Path, name: str, resources: Resources) -> str:
    """Return the text of a job's script, by submitit.

    Raises:
        RuntimeError, ValueError: submitit's, such as of a machine without SLURM.
    """
    from submitit import SlurmExecutor

    variables = environment(name, int(resources.cpus_per_task))
    setup = ['echo "maect: attempt ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST"']
    setup += [f"export {key}={shlex.quote(variables[key])}" for key in EXPORTED]
    if resources.setup:
        setup.append(f"source {shlex.quote(resources.setup)} || exit 1")
    executor = SlurmExecutor(record.job_folder(folder, name))
    executor.update_parameters(
        job_name=name,
        comment=str(folder),
        partition=resources.slurm_partition or None,
        account=resources.slurm_account or None,
        time=resources.runtime,
        nodes=resources.nodes,
        ntasks_per_node=resources.devices,
        cpus_per_task=resources.cpus_per_task,
        mem=f"{resources.mem_mb}MB" if resources.mem_mb else None,
        setup=setup,
        # A job that was submitted with --export=NONE would give its ranks nothing of the script's.
        srun_args=["--kill-on-bad-exit=1", "--export=ALL"],
        # submitit would take the signal's name from the shell.
        additional_parameters={**resources.options, "signal": f"USR2@{resources.warning_seconds}"},
        stderr_to_stdout=True,
        wckey=None,
    )
    python = resources.python or shlex.quote(sys.executable)
    # Imports nothing from the folder that the job begins in, where others may write.
    rank = f"{python} -P -u -m maect.launch.worker {shlex.quote(str(folder))} {shlex.quote(name)}"
    # submitit 1.5.4 has no public method for it.
    return str(executor._make_submission_file_text(rank, ""))


def _notice(job: Job, state: str, reason: str) -> Notice:
    """Translate a state of SLURM; one that nobody here knows is no verdict."""
    text = f"{state} ({reason})" if reason not in ("", "None") else state
    if state in PENDING:
        held = state in HELD or "held" in reason.lower()
        return Notice("pending", text, hint=HELD_HINT.format(job.id) if held else "")
    if state in RUNNING:
        return Notice("running", text)
    if state in MAY_RETURN:
        return Notice("ended", text, grace=2 * squeue_seconds())
    if state in OVER or state in BY_A_PERSON:
        return Notice("ended", text, grace=1.0, final=state in BY_A_PERSON)
    return Notice("unknown", text)


def _find_id(name: str) -> tuple[int, str | None]:
    """Find the job of a unique name: squeue's exit status, and the job's id or None."""
    # The user by number, since LOGNAME may be another's.
    code, out, _ = command("squeue", "-h", "-t", "all", "-u", str(os.getuid()), "-o", "%i|%j")
    rows = (line.split("|", 1) for line in out.splitlines() if "|" in line)
    return code, min((row[0] for row in rows if row[1] == name), default=None)


def _show_job(job: Job) -> dict[str, str] | None:
    """Return the controller's fields of a job: none if it has no such job, None if no answer.

    People and sites rename jobs: then the comment, which is the folder, shows that it is ours. Ids
    begin again some day, so a job of another name and comment is somebody else's.
    """
    assert job.id is not None
    code, out, error = command("scontrol", "--oneliner", "show", "job", job.id)
    if code != 0 or "JobName=" not in out:
        return {} if UNKNOWN_ID in error else None
    is_named = f" JobName={job.name} UserId=" in out
    if not is_named and not (job.place and f" Comment={job.place} " in f"{out} "):
        return {}
    # A name may have blanks, and the last fields are paths, which may hold anything.
    _, _, fields = out.partition(" UserId=")
    return dict(reversed(re.findall(r" (\w+)=(\S*)", fields)))


def _ask_accounting(job: Job) -> Notice | None:
    """Ask sacct how a job ended; None if it does not know, or not yet."""
    assert job.id is not None
    _, out, _ = command("sacct", "-n", "-X", "-P", "-o", "State,JobName", "-j", job.id)
    rows = [line.partition("|") for line in out.splitlines()]
    states = [state.split()[0] for state, _, name in rows if state and name == job.name]
    if not states:
        return None
    notice = _notice(job, states[-1], "sacct")
    return notice if notice.phase == "ended" else None


def is_transient(error: str) -> bool:
    """Return whether a submission failed for a reason that has nothing to do with the job."""
    return any(text in error for text in TRANSIENT)


def is_limit(error: str) -> bool:
    """Return whether a limit on jobs in the queue is reached, so that SLURM takes the job later."""
    return any(text in error for text in LIMITS)


def squeue_seconds() -> float:
    """Return the seconds between two questions to the controller."""
    return float(os.environ.get(INTERVAL_VARIABLE, "30"))
