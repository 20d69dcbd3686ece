"""What is concluded from what squeue and sacct say, or do not: scripts answer in their place."""

import json
import signal
from types import SimpleNamespace

import pytest
from launching import finish, wait_for
from slurm_commands import UNKNOWN

from maect.core.errors import UserError
from maect.core.files import sealed
from maect.launch import Resources, Task, launcher, record, slurm
from maect.launch.record import Job
from maect.launch.slurm import Slurm


@pytest.fixture
def job(tmp_path):
    return Job("slurm", "maect-a-1", ranks=1, step=0, state="submitted", id="7", submitted=0.0)


@pytest.mark.parametrize(
    "word, phase, grace, final",
    [
        ("RUNNING", "running", 0, False),
        ("COMPLETING", "running", 0, False),
        ("PENDING", "pending", 0, False),
        ("REQUEUED", "pending", 0, False),
        # SLURM puts these back under the same id: later answers have to say so, too.
        ("NODE_FAIL", "unknown", 0, False),
        ("PREEMPTED", "unknown", 0, False),
        ("FAILED", "ended", 1, False),
        ("TIMEOUT", "ended", 1, False),
        ("OUT_OF_MEMORY", "ended", 1, False),
        ("CANCELLED", "ended", 1, True),
        ("DEADLINE", "ended", 1, True),
        ("RESV_DEL_HOLD", "pending", 0, False),
        # Of a later SLURM: nobody here knows whether such a job is over.
        ("HIBERNATED", "unknown", 0, False),
    ],
)
def test_words_of_squeue(tmp_path, commands, job, word, phase, grace, final):
    cluster = Slurm()
    commands.says("squeue", f"7|{word}|None|maect-a-1\n")
    state = cluster.poll(tmp_path, job)
    assert (state.phase, state.grace, state.final) == (phase, grace, final)
    assert not commands.asked("sacct")


def test_a_clock_that_is_set_back_blinds_nobody(tmp_path, commands, job, clock):
    cluster = Slurm()
    job.submitted = clock.time()
    commands.says("squeue", "7|RUNNING|None|maect-a-1\n")
    assert cluster.poll(tmp_path, job).phase == "running"
    clock.set_back(3600)
    clock.sleep(1.1)
    commands.says("squeue", "7|FAILED|None|maect-a-1\n")
    assert cluster.poll(tmp_path, job).phase == "ended"
    cluster.poll(tmp_path, job)
    assert len(commands.asked("squeue")) == 2, "and SLURM is asked no more often"


@pytest.mark.parametrize(
    "says, phase, final",
    [
        ("COMPLETED|maect-a-1\n", "ended", False),
        ("NODE_FAIL|maect-a-1\n", "unknown", False),
        ("CANCELLED by 0|maect-a-1\n", "ended", True),
        # It lags behind: squeue has forgotten the job, so this is no verdict.
        ("RUNNING|maect-a-1\n", "unknown", False),
        # Just submitted, or never: an end that has to last.
        ("", "ended", False),
        # Ids begin again some day.
        ("COMPLETED|another\n", "ended", False),
    ],
)
def test_words_of_sacct(tmp_path, commands, job, clock, says, phase, final):
    cluster = Slurm()
    commands.says("squeue", "")
    commands.says("sacct", says)
    state = cluster.poll(tmp_path, job)
    assert (state.phase, state.final) == (phase, final)
    assert says.endswith("-1\n") or (state.text, state.grace) == ("unknown to SLURM", 1)
    cluster.poll(tmp_path, job)
    assert len(commands.asked("sacct")) == 1, "asked again within the interval"


@pytest.mark.parametrize(
    "scontrol, phase",
    [
        # Our list of jobs lacks it, and it lives: another partition, user or format was listed.
        ("JobId=7 JobName=maect-a-1 UserId=me(1) JobState=RUNNING Reason=None", "running"),
        ("JobId=7 JobName=maect-a-1 UserId=me(1) JobState=FAILED Reason=None", "ended"),
        ("JobId=7 JobName=another UserId=me(1) JobState=RUNNING Reason=None", "ended"),
        ("JobId=7 JobName=maect-a-12 UserId=me(1) JobState=RUNNING Reason=None", "ended"),
        ("", "unknown"),
    ],
)
def test_only_the_controller_knows_that_there_is_no_such_job(
    tmp_path, commands, job, scontrol, phase
):
    commands.says("squeue", "8|RUNNING|None|another\n")
    (commands.folder / "scontrol.fails").unlink()
    commands.says("scontrol", scontrol)
    assert Slurm().poll(tmp_path, job).phase == phase
    commands.fails("scontrol", "slurm_load_jobs error: Unable to contact slurm controller")
    assert Slurm().poll(tmp_path, job).phase == "unknown"


def test_a_name_with_blanks_is_read_whole(tmp_path, commands, job):
    """That of a folder with blanks; accounting is switched off."""
    job.name = "maect-my JobState=x run-1"
    commands.says("squeue", "")
    commands.fails("sacct", "Slurm accounting storage is disabled")
    (commands.folder / "scontrol.fails").unlink()
    shown = "JobId=7 JobName={} UserId=me(1) JobState=PENDING Reason=Priority Restarts=0"
    commands.says("scontrol", shown.format(job.name))
    notice = Slurm().poll(tmp_path, job)
    assert (notice.phase, notice.text) == ("pending", "PENDING (Priority)")
    assert Slurm().waits(tmp_path, job)
    commands.says("scontrol", shown.format("maect-my JobState=x run-2"))
    assert Slurm().poll(tmp_path, job).text == "unknown to SLURM"


@pytest.mark.parametrize("word, phase", [("RUNNING", "running"), ("PENDING", "pending")])
def test_a_job_of_another_user(tmp_path, commands, job, clock, word, phase):
    """squeue was asked about one's own alone; accounting and controller know it."""
    cluster = Slurm()
    commands.says("squeue", "")
    commands.says("sacct", f"{word}|maect-a-1\n")
    (commands.folder / "scontrol.fails").unlink()
    commands.says("scontrol", f"JobId=7 JobName=maect-a-1 UserId=b(2) JobState={word} Reason=None")
    for _ in range(3):
        assert cluster.poll(tmp_path, job).phase == phase
    assert len(commands.asked("sacct")) == len(commands.asked("scontrol")) == 1
    # What it says of an end is accounting's to say.
    commands.says("scontrol", "JobId=7 JobName=maect-a-1 UserId=b(2) JobState=FAILED Reason=None")
    assert Slurm().poll(tmp_path, job).phase == "unknown"


def test_unknown_to_another_cluster_is_no_verdict(tmp_path, commands, job):
    commands.says("squeue", "")
    (commands.folder / "scontrol").write_text(
        '#!/bin/sh\n[ "$2" = config ] && echo "ClusterName             = there" && exit\n'
        f"echo {UNKNOWN} >&2\nexit 1\n"
    )
    job.site = "there"
    assert Slurm().poll(tmp_path, job).text == "unknown to SLURM"
    job.site = "here"
    for job.id in ("7", None):
        with pytest.raises(UserError, match=r"submitted to the cluster here, and this is there"):
            Slurm().poll(tmp_path, job)


@pytest.mark.parametrize(
    "error, phase",
    [
        ("sacct: error: Connection refused", "unknown"),
        ("sacct: error: slurm_persist_conn_open: Something happened", "unknown"),
        ("Slurm accounting storage is disabled", "ended"),
    ],
)
def test_sacct_that_fails(tmp_path, commands, job, error, phase):
    cluster = Slurm()
    commands.says("squeue", "")
    commands.fails("sacct", error)
    assert cluster.poll(tmp_path, job).phase == phase


def test_no_sacct_on_this_cluster(tmp_path, commands, job, monkeypatch):
    cluster = Slurm()
    commands.says("squeue", "")
    (commands.folder / "sacct").unlink()
    monkeypatch.setenv("PATH", str(commands.folder))
    (commands.folder / "squeue").write_text("#!/bin/sh\n")
    (commands.folder / "scontrol").write_text(f"#!/bin/sh\necho {UNKNOWN} >&2\nexit 1\n")
    state = cluster.poll(tmp_path, job)
    assert (state.phase, state.grace) == ("ended", 1)


def test_squeue_that_fails_is_no_verdict_whatever_sacct_says(tmp_path, commands, job):
    cluster = Slurm()
    commands.fails("squeue", "slurm_load_jobs error: Unable to contact slurm controller")
    commands.says("sacct", "FAILED\n")
    assert cluster.poll(tmp_path, job).phase == "unknown"
    assert not commands.asked("sacct")


def test_submitter_whose_clock_was_ahead_is_answered(tmp_path, commands, job, clock):
    cluster = Slurm()
    job.submitted = clock.time() + 3600
    commands.says("squeue", "7|RUNNING|None|maect-a-1\n")
    cluster.poll(tmp_path, job)
    clock.sleep(1.1)
    assert cluster.poll(tmp_path, job).phase == "running"


@pytest.mark.parametrize(
    "log, phase",
    [
        ("maect: attempt 0 on n1\nsrun: error: n1: task 3: Killed\n", "ended"),
        (
            "maect: attempt 0 on n1\nsrun: error: n1: tasks 0-1,3: Exited with exit code 1\n",
            "ended",
        ),
        ("maect: attempt 0 on n1\nsrun: error: n1: task 3: Killed\nmaect: attempt 1\n", "running"),
        # Attempt 2 runs, and its node's prolog has not ended.
        ("maect: attempt 1 on n1\nsrun: error: n1: task 0: Terminated\n", "running"),
        ("maect: attempt 0 on n1\ntasks 3: srun: error: of mine\n", "running"),
    ],
)
def test_job_that_lost_a_rank_and_is_not_ended(
    tmp_path, commands, job, clock, log, phase, monkeypatch
):
    cluster = Slurm()
    monkeypatch.setattr(slurm, "BROKEN_GRACE", 0.2)
    commands.says("squeue", "7|RUNNING|None|maect-a-1\n")
    (commands.folder / "scontrol.fails").unlink()
    restarts = 2 if "attempt 1 on" in log else 0
    commands.says("scontrol", f"JobId=7 JobName=maect-a-1 Requeue=1 Restarts={restarts} Reboot=0")
    record.make_job_folder(tmp_path, job.name)
    record.log(tmp_path, job, 0).write_text(log)
    assert cluster.poll(tmp_path, job).phase == "running"
    clock.sleep(0.3)
    # The same answer says nothing new.
    assert cluster.poll(tmp_path, job).phase == "running"
    clock.sleep(1)
    assert cluster.poll(tmp_path, job).phase == phase


@pytest.mark.parametrize("word", ["RUNNING", "NODE_FAIL"])
def test_silence_of_slurm_ends_no_job(tmp_path, commands, job, clock, monkeypatch, word):
    """The last answer grows old while the controller is away: that makes nothing of it true."""
    cluster = Slurm()
    monkeypatch.setattr(slurm, "BROKEN_GRACE", 0.2)
    commands.says("squeue", f"7|{word}|None|maect-a-1\n")
    record.make_job_folder(tmp_path, job.name)
    record.log(tmp_path, job, 0).write_text("maect: attempt 0\nsrun: error: n1: task 3: Killed\n")
    (commands.folder / "scontrol.fails").unlink()
    commands.says("scontrol", "JobId=7 JobName=maect-a-1 Requeue=1 Restarts=0 Reboot=0")
    cluster.poll(tmp_path, job)
    commands.fails("squeue", "slurm_load_jobs error: Unable to contact slurm controller")
    for _ in range(4):
        clock.sleep(1)
        assert cluster.poll(tmp_path, job).phase in ("running", "unknown")
    (commands.folder / "squeue.fails").unlink()
    clock.sleep(1)
    assert cluster.poll(tmp_path, job).phase == "ended"


@pytest.mark.parametrize(
    "says, over",
    [
        ("scancel: error: Kill job error on job id 7: Invalid job id specified", True),
        ("scancel: error: Unable to contact slurm controller (connect failure)", False),
    ],
)
def test_whether_a_job_was_cancelled(tmp_path, commands, job, says, over):
    cluster = Slurm()
    (commands.folder / "scontrol.fails").unlink()
    commands.says("scontrol", "JobId=7 JobName=maect-a-1 UserId=me(1) JobState=RUNNING Reason=None")
    commands.fails("scancel", says)
    assert cluster.end(tmp_path, job) is over
    assert commands.asked("scancel")[-1].endswith(" 7")
    (commands.folder / "scancel.fails").unlink()
    job.id = None
    assert cluster.end(tmp_path, job)
    assert commands.asked("scancel")[-1].endswith("--name=maect-a-1")


def test_somebody_elses_job_of_the_same_id_is_not_cancelled(tmp_path, commands, job):
    """Ids begin again some day; a controller that does not answer says nothing."""
    (commands.folder / "scontrol.fails").unlink()
    commands.says("scontrol", "JobId=7 JobName=another UserId=me(1) JobState=RUNNING Comment=/x")
    assert Slurm().end(tmp_path, job) and not commands.asked("scancel")
    commands.fails("scontrol", "slurm_load_jobs error: Unable to contact slurm controller")
    assert not Slurm().end(tmp_path, job) and not commands.asked("scancel")


@pytest.mark.parametrize("name", ["mine", "my JobState=FAILED job", "a|b"])
def test_a_job_that_was_renamed_is_still_the_run_s(tmp_path, commands, job, name):
    """`scontrol update JobId=7 JobName=mine`, by a user or a site: its comment is the folder."""
    job.request["parameters"] = {"comment": str(tmp_path)}
    commands.says("squeue", f"7|RUNNING|None|{name}|{tmp_path}\n")
    assert Slurm().poll(tmp_path, job).phase == "running"
    commands.says("squeue", f"7|RUNNING|None|{name}|{tmp_path}2\n")
    assert Slurm().poll(tmp_path, job).phase != "running"
    (commands.folder / "scontrol.fails").unlink()
    about = f"JobId=7 JobName={name} UserId=me(1) JobState=RUNNING Comment={tmp_path}"
    commands.says("scontrol", about)
    assert Slurm().end(tmp_path, job) and commands.asked("scancel")[-1].endswith(" 7")


@pytest.mark.parametrize(
    "word, reason",
    [
        ("PENDING", "JobHeldUser"),
        ("PENDING", "JobHeldAdmin"),
        ("PENDING", "launch_failed_requeued_held"),
        ("REQUEUE_HOLD", "None"),
    ],
)
def test_a_held_job_is_named_with_its_cure(tmp_path, commands, job, word, reason):
    commands.says("squeue", f"7|{word}|{reason}|maect-a-1|/x\n")
    notice = Slurm().poll(tmp_path, job)
    assert notice.phase == "pending" and "`scontrol release 7`" in notice.hint
    commands.says("squeue", "7|PENDING|Priority|maect-a-1|/x\n")
    assert Slurm().poll(tmp_path, job).hint == ""


def test_a_held_job_is_said_once(run, commands):
    take_over(run)
    commands.says("squeue", f"7|PENDING|JobHeldUser|{run.job().name}|/x\n")
    launcher = run.start()
    wait_for(lambda: len(commands.asked("squeue")) > 2)
    (run.folder / "done.json").write_text("{}")
    run.returns("done")
    words = finish(launcher)
    assert words.count("`scontrol release 7`") == 1, words


def test_submission_that_broke_off_is_looked_for(run, commands):
    """sbatch has accepted the job; the process that called it dies before it can say so."""
    run.resources |= {"cluster": "slurm", "devices": 1}
    name = f"maect-{run.folder.name}-"
    (commands.folder / "sbatch").write_text(
        f'#!/bin/sh\necho "$0 $*" >> {commands.folder}/asked\n'
        f"name=$(grep -o '{name}[0-9a-f]*' {run.folder}/job.json | tail -1)\n"
        f'echo "7|PENDING|None|$name" > {commands.folder}/squeue.says\n'
        "kill -9 $PPID\n"
    )
    launcher = run.start()
    wait_for(lambda: run.read("job.json").get("id") == "7")
    assert run.read("job.json")["state"] == "submitted"
    (run.folder / "done.json").write_text("{}")
    run.returns("done")
    words = finish(launcher)
    assert launcher.returncode == 0 and len(commands.asked("sbatch")) == 1, words


def test_submission_that_breaks_off_each_time_is_given_up(run, commands):
    run.resources |= {"cluster": "slurm", "devices": 1}
    (commands.folder / "sbatch").write_text(
        f'#!/bin/sh\necho "$0 $*" >> {commands.folder}/asked\nkill -9 $PPID\n'
    )
    launcher = run.start()
    words = finish(launcher)
    assert launcher.returncode == 2 and "the submission broke off" in words
    assert len(commands.asked("sbatch")) == 3


def test_job_that_could_not_be_cancelled_is_not_called_so(run, commands):
    take_over(run)
    name = run.read("job.json")["name"]
    commands.says("squeue", f"7|PENDING|None|{name}\n")
    (commands.folder / "scontrol.fails").unlink()
    commands.says("scontrol", f"JobId=7 JobName={name} JobState=PENDING Reason=None")
    commands.fails("scancel", "scancel: error: Unable to contact slurm controller")
    launcher = run.start()
    wait_for(lambda: commands.asked("squeue"))
    launcher.send_signal(signal.SIGINT)
    words = finish(launcher)
    assert launcher.returncode == 130 and "was not cancelled" in words
    assert run.state() == "submitted" and run.job().stop


def take_over(run) -> None:
    """A launcher was killed after it had submitted job 7."""
    run.folder.mkdir()
    run.resources |= {"cluster": "slurm", "devices": 1}
    name = f"maect-{run.folder.name}-1"
    job = Job("slurm", name, 1, 0, {"cpus": 1}, state="submitted", id="7", submitted=0.0)
    record.write_job(run.folder, job)


@pytest.mark.parametrize("step", [0, 3])
def test_a_fault_of_a_node_ends_only_what_has_not_worked_elsewhere(run, commands, step):
    """As without a GPU: a setting's fault at first, this node's in a run that has saved a step."""
    run.resources |= {"cluster": "slurm", "devices": 1}
    count = f"$(ls {commands.folder} | grep -c script-)"
    jobs = f"{run.folder}/jobs"
    told = {"rank": 0, "node": "n7", "end": "error", "kind": "NodeError", "message": "no GPU here"}
    told |= {"traceback": "NodeError: no GPU here", "time": 0.0, "saved": step}
    (commands.folder / "sbatch").write_text(
        f"#!/bin/sh\nname=$(ls -t {jobs} | head -1)\n"
        f'cp "$2" {commands.folder}/script-{count}\nid={count}\n'
        f"echo '{json.dumps(sealed(told))}' > {jobs}/$name/rank-0.json\n"
        f'echo "$id|FAILED|None|$name" > {commands.folder}/squeue.says\necho $id\n'
    )
    words = finish(run.start())
    scripts = sorted(commands.folder.glob("script-*"))
    assert "no GPU here" in words
    if not step:
        assert len(scripts) == 1 and "gave up" not in words
        return
    assert "gave up after 3 attempts" in words and len(scripts) == 4  # the first saved a step


def test_a_limit_on_submitted_jobs_is_waited_for(run, commands):
    run.resources |= {"cluster": "slurm", "devices": 1}
    commands.says("squeue", "")
    (commands.folder / "scontrol").write_text(
        '#!/bin/sh\n[ "$2" = config ] && echo "ClusterName             = here" && exit\nexit 1\n'
    )
    commands.fails("sbatch", "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job "
                   "submission failed: Job violates accounting/QOS policy")  # fmt: skip
    launcher = run.start()
    wait_for(lambda: len(commands.asked("sbatch")) > 2)
    launcher.send_signal(signal.SIGINT)
    words = finish(launcher)
    assert launcher.returncode == 130 and "no job is running" in words, words
    assert words.count("SLURM takes no job for now") == 1
    assert "QOSMaxSubmitJobPerUserLimit" in words and "does not answer" not in words
    assert run.state() == "ended" and run.job().ending.startswith(
        "not accepted for now: sbatch: error: QOS"
    )
    assert run.job().earlier == [] and not list((run.folder / "jobs").iterdir())
    launcher = run.start()
    wait_for(lambda: len(commands.asked("sbatch")) > 4)
    commands.says("sbatch", "7\n")
    (commands.folder / "sbatch.fails").unlink()
    wait_for(lambda: run.state() == "submitted")
    commands.says("squeue", f"7|RUNNING|None|{run.job().name}\n")
    run.returns("done")
    (run.folder / "done.json").write_text("{}")
    words = finish(launcher)
    assert launcher.returncode == 0 and "gave up" not in words, words
    assert run.job().attempt == 1 and run.job().earlier == []


REFUSALS = {
    "munge is away": "sbatch: error: Batch job submission failed: Protocol authentication error",
    "the controller's disk is full": "sbatch: error: Batch job submission failed: "
    "I/O error writing script/environment to file",
    "anything, of a run whose settings were accepted": "sbatch: error: no more of this",
}


@pytest.mark.parametrize("why", REFUSALS)
def test_a_refusal_for_a_moment_is_tried_again(run, commands, why):
    if why.startswith("anything"):
        take_over(run)
    run.resources |= {"cluster": "slurm", "devices": 1}
    commands.says("squeue", "")
    commands.fails("sbatch", REFUSALS[why])
    launcher = run.start()
    wait_for(lambda: len(commands.asked("sbatch")) > 1)
    commands.says("sbatch", "8\n")
    (commands.folder / "sbatch.fails").unlink()
    wait_for(lambda: run.state() == "submitted" and run.job().id == "8")
    commands.says("squeue", f"8|RUNNING|None|{run.job().name}|/x\n")
    run.returns("done")
    (run.folder / "done.json").write_text("{}")
    words = finish(launcher)
    assert launcher.returncode == 0, words
    assert words.count(f"takes no job for now; trying again: {REFUSALS[why]}") == 1, words


def test_a_refusal_is_tried_again_for_an_hour_and_no_longer(tmp_path, monkeypatch, clock):
    """A first job's settings may be wrong: it is tried once."""
    monkeypatch.setattr(launcher, "time", clock)
    given = Task("a:b"), tmp_path, Resources("slurm"), lambda: False, None, None, lambda: True
    one, refusal = launcher._Launch(*given), "sbatch: error: Invalid account"
    first = Job("slurm", "maect-a-1", 1, 0)
    later = Job("slurm", "maect-a-2", 1, 0, earlier=[{"name": "maect-a-1", "id": "7"}])
    assert not one.may_be_taken_later(first, refusal)
    assert one.may_be_taken_later(later, refusal)
    clock.sleep(launcher.REFUSAL_PATIENCE - 1)
    assert one.may_be_taken_later(later, refusal)
    clock.sleep(2)
    assert not one.may_be_taken_later(later, refusal)
    assert one.may_be_taken_later(later, "sbatch: error: QOSMaxSubmitJobPerUserLimit")


def test_each_wait_for_a_limit_is_longer(tmp_path, monkeypatch, clock):
    """Half a minute, then twice as long each time, up to ten minutes."""
    monkeypatch.delenv(slurm.INTERVAL_VARIABLE, raising=False)
    monkeypatch.setattr(launcher, "time", clock)
    people = SimpleNamespace(stops=0, reason_to_leave=lambda: None)
    given = Task("a:b"), tmp_path, Resources("slurm"), lambda: False, None, people, lambda: True
    one, began = launcher._Launch(*given), clock.now
    waited = []
    for _ in range(7):
        one.wait_after_refusal()
        waited.append(round(clock.now - began))
        began = clock.now
    assert waited == [30, 60, 120, 240, 480, 600, 600]


@pytest.mark.parametrize("word", ["NODE_FAIL", pytest.param("PREEMPTED", marks=pytest.mark.slow)])
def test_job_that_slurm_puts_back_is_waited_for(run, commands, word):
    take_over(run)
    row = f"7|{{}}|None|{run.read('job.json')['name']}\n"
    commands.says("squeue", row.format(word))
    launcher = run.start()
    wait_for(lambda: commands.asked("squeue"))
    commands.says("squeue", row.format("PENDING"))
    count = len(commands.asked("squeue"))
    wait_for(lambda: len(commands.asked("squeue")) > count + 2)
    commands.says("squeue", row.format("RUNNING"))
    run.returns("done")
    (run.folder / "done.json").write_text("{}")
    words = finish(launcher)
    assert launcher.returncode == 0, words
    assert not commands.asked("sbatch") and not commands.asked("scancel")


def test_lost_job_that_does_not_come_back_is_submitted_again(run, commands):
    take_over(run)
    commands.says("squeue", f"7|NODE_FAIL|None|{run.read('job.json')['name']}\n")
    commands.fails("sbatch", "sbatch: error: no more of this")
    launcher = run.start()
    wait_for(lambda: commands.asked("sbatch"))
    launcher.send_signal(signal.SIGINT)
    words = finish(launcher)
    assert launcher.returncode == 130 and "trying again: sbatch: error: no more of this" in words
    assert run.read("job.json")["earlier"][0]["ending"] == "NODE_FAIL"
