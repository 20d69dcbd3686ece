"""What is concluded from SLURM's answers, or their absence: scripts answer in its place."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from launching import finish, wait_for
from slurm_commands import AWAY, UNKNOWN, Clock

from maect.core.errors import UserError
from maect.core.files import write_record
from maect.core.resources import sbatch_options
from maect.launch import Resources, Task, launcher, record, slurm
from maect.launch.record import Job, LaunchError
from maect.launch.shell import command, environment
from maect.launch.slurm import Slurm
from maect.launch.state import Notice

NAME = "maect-a-1"
SLURM = {"cluster": "slurm", "cpus_per_task": 1}


@pytest.fixture
def job():
    return Job("slurm", NAME, ranks=1, step=0, site="here", state="submitted", id="7")


@pytest.mark.parametrize(
    "state, reason, phase, grace, final",
    [
        ("RUNNING", "None", "running", 0, False),
        ("COMPLETING", "None", "running", 0, False),
        ("PENDING", "Priority", "pending", 0, False),
        ("REQUEUED", "None", "pending", 0, False),
        # Held, until a person releases them.
        ("RESV_DEL_HOLD", "None", "pending", 0, False),
        ("REQUEUE_HOLD", "None", "pending", 0, False),
        ("PENDING", "JobHeldUser", "pending", 0, False),
        ("PENDING", "launch_failed_requeued_held", "pending", 0, False),
        # SLURM puts these back under the same id: the end has to last.
        ("NODE_FAIL", "None", "ended", 0.6, False),
        ("PREEMPTED", "None", "ended", 0.6, False),
        ("FAILED", "None", "ended", 1, False),
        ("TIMEOUT", "None", "ended", 1, False),
        ("OUT_OF_MEMORY", "None", "ended", 1, False),
        ("CANCELLED", "None", "ended", 1, True),
        ("DEADLINE", "None", "ended", 1, True),
        # Of a later SLURM: nobody here knows whether such a job is over.
        ("HIBERNATED", "None", "unknown", 0, False),
    ],
)
def test_states_of_the_controller(tmp_path, commands, job, state, reason, phase, grace, final):
    commands.shows(state, NAME, reason)
    notice = Slurm().poll(tmp_path, job)
    assert (notice.phase, notice.grace, notice.final) == (phase, grace, final)
    is_held = "HOLD" in state or "held" in reason.lower()
    assert ("`scontrol release 7`" in notice.hint) == is_held == bool(notice.hint)
    assert not commands.asked("sacct")


@pytest.mark.parametrize(
    "says, text, final",
    [
        (f"COMPLETED|{NAME}\n", "COMPLETED (sacct)", False),
        (f"CANCELLED by 0|{NAME}\n", "CANCELLED (sacct)", True),
        (f"RUNNING|{NAME}\n", "unknown to SLURM", False),  # it is behind the controller
        ("", "unknown to SLURM", False),
        ("COMPLETED|another\n", "unknown to SLURM", False),  # ids begin again some day
        (None, "unknown to SLURM", False),  # accounting is switched off, or away
    ],
)
def test_accounting_is_asked_about_what_the_controller_forgot(
    tmp_path, commands, job, says, text, final
):
    if says is None:
        commands.fails("sacct", "Slurm accounting storage is disabled")
    else:
        commands.says("sacct", says)
    notice = Slurm().poll(tmp_path, job)
    assert (notice.phase, notice.text, notice.final) == ("ended", text, final)


def test_silence_is_no_verdict(tmp_path, commands, job):
    commands.says("sacct", f"FAILED|{NAME}\n")
    for answer in (lambda: commands.fails("scontrol", AWAY), lambda: commands.says("scontrol", "")):
        answer()
        assert Slurm().poll(tmp_path, job).phase == "unknown"
        assert not Slurm().end(tmp_path, job)
    commands.fails("squeue", AWAY)
    job.id = None
    assert Slurm().poll(tmp_path, job).phase == "unknown"
    assert not commands.asked("sacct") and not commands.asked("scancel")


@pytest.mark.parametrize(
    "name, comment, is_ours",
    [
        (NAME, "/y", True),
        # Renamed by a user or a site: its comment is the folder.
        ("mine", "/x", True),
        ("my JobState=FAILED job", "/x", True),
        ("a|b", "/x", True),
        # Ids begin again.
        ("another", "/x2", False),
        (f"{NAME}2", "/y", False),
    ],
)
def test_whose_a_job_is(tmp_path, commands, job, name, comment, is_ours):
    job.place = "/x"
    commands.shows("RUNNING", name, comment=comment)
    notice = Slurm().poll(tmp_path, job)
    assert (notice.phase, notice.text) == (
        ("running", "RUNNING") if is_ours else ("ended", "unknown to SLURM")
    )
    assert Slurm().end(tmp_path, job)
    assert [line.endswith(" 7") for line in commands.asked("scancel")] == [True] * is_ours


def test_a_job_without_an_id_is_found_by_its_name(tmp_path, commands, job, monkeypatch):
    """Its launcher was killed while it submitted, which may go on without it.

    Names of other jobs may be in any encoding, and have any sign.
    """
    job.id, job.state = None, "submitting"
    with monkeypatch.context() as patch:
        patch.setattr(slurm, "find_processes", lambda name: [name])
        assert Slurm().poll(tmp_path, job).text == "being submitted"
    (commands.folder / "squeue").write_bytes(
        b"#!/bin/sh\necho $* > " + os.fsencode(commands.folder / "words") + b"\n"
        b"printf '8|gr\\374n\\n9|a|b\\n7|maect-a-1\\n'\n"
    )
    commands.shows("PENDING", NAME, "Priority")
    one = launch_of(tmp_path)
    one.write(job)
    one.next_poll = 0.0
    assert one.poll(job).text == "PENDING (Priority)"
    assert record.read_job(tmp_path) == replace(job, id="7", state="submitted")
    assert f"-u {os.getuid()} " in (commands.folder / "words").read_text(), "LOGNAME may be another"


def test_another_cluster_is_refused_by_name(tmp_path, commands, job):
    (commands.folder / "scontrol").write_text(
        '#!/bin/sh\n[ "$2" = config ] && echo "ClusterName             = there" && exit\n'
        f"echo {UNKNOWN} >&2\nexit 1\n"
    )
    job.site = "there"
    assert Slurm().poll(tmp_path, job).text == "unknown to SLURM"
    job.site = "here"
    for job.id in ("7", None):
        with pytest.raises(UserError, match="was started on here, and this is there"):
            Slurm().poll(tmp_path, job)


@pytest.mark.parametrize(
    "says, over",
    [
        ("scancel: error: Kill job error on job id 7: Invalid job id specified", True),
        ("scancel: error: Unable to contact slurm controller (connect failure)", False),
    ],
)
def test_whether_a_job_was_cancelled(tmp_path, commands, job, says, over):
    commands.shows("RUNNING", NAME)
    commands.fails("scancel", says)
    assert Slurm().end(tmp_path, job) is over


SETTINGS = {
    "SQUEUE_PARTITION": "elsewhere", "SLURM_CLUSTERS": "other", "SBATCH_ARRAY_INX": "0-2",
    "SBATCH_JOB_NAME": "mine", "SACCT_FORMAT": "jobid", "SCANCEL_INTERACTIVE": "yes",
    "SLURM_JOB_ID": "3",
}  # fmt: skip


def test_settings_of_a_shell_change_nothing(commands, monkeypatch):
    for key, value in SETTINGS.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("SLURM_CONF", "/etc/here.conf")
    (commands.folder / "squeue").write_text("#!/bin/sh\nenv\n")
    code, out, _ = command("squeue")
    seen = {line.partition("=")[0] for line in out.splitlines()}
    assert code == 0 and not seen & SETTINGS.keys() and {"SLURM_CONF", "PATH"} <= seen
    assert not environment(NAME, 1).keys() & SETTINGS.keys()
    monkeypatch.setenv("RANK", "3")
    given = environment(NAME, cpus=2)
    assert "RANK" not in given and given["SLURM_CONF"] == "/etc/here.conf"
    assert (given["MAECT_JOB"], given["SRUN_CPUS_PER_TASK"]) == (NAME, "2")


@pytest.mark.parametrize(
    "argument",
    ["array=0-2", "clusters=a", "M=a", "job_name=x", "--output=x", "wait", "ntasks=3", "--arr=0-2"],
)
def test_arguments_that_would_lose_the_job_are_refused(argument):
    with pytest.raises(UserError, match=rf"slurm_extra: {argument}: .* is set by maect"):
        Resources(**SLURM, slurm_extra=argument).resolved()


def test_a_site_may_forbid_requeues():
    options = Resources(**SLURM, slurm_extra="--no-requeue").options
    assert "no-requeue" in options and "requeue" not in options


def test_blanks_separate_options():
    text = "--exclude=n1,n[3-5,7] qos=default  --exclusive gres=gpu:4,nvme:1 --export=ALL,A=1"
    text += " '--constraint=a b' --acctg-freq=task=30,energy=60"
    assert sbatch_options(text) == {
        "exclude": "n1,n[3-5,7]", "qos": "default", "exclusive": True, "gres": "gpu:4,nvme:1",
        "export": "ALL,A=1", "constraint": "a b", "acctg-freq": "task=30,energy=60",
    }  # fmt: skip
    assert sbatch_options("") == {}
    for other in ("gres=gpu:4,threads-per-core=1", "exclusive,qos=a", "qos=a, hold",
                  "export=ALL,qos=a", "--qos a"):  # fmt: skip
        with pytest.raises(UserError, match="write options as in --qos=A"):
            sbatch_options(other)
    with pytest.raises(UserError, match="No closing quotation"):
        sbatch_options("--constraint='a|b")


def take_over(run) -> str:
    """Leave the record of a launcher that was killed after it had submitted job 7."""
    run.folder.mkdir()
    run.resources["cluster"] = "slurm"
    name = f"maect-{run.folder.name}-1"
    job = Job("slurm", name, 1, state="submitted", id="7")
    record.write_job(run.folder, job)
    return name


def complete(run) -> None:
    """Let the job on record return with its result."""
    (run.folder / "done.json").write_text("{}")
    run.returns("done")


def launch_of(folder):
    """A launch that notes what it says, and that may be interrupted."""
    line = SimpleNamespace(said=[], title="")
    line.say = line.said.append
    people = SimpleNamespace(stops=0, reason_to_leave=lambda: None)
    return launcher._Launch(Task("a:b"), folder, Resources(**SLURM), lambda: False, line, people)


ANSWERS = {
    "as it is": b"41\n",
    "another cluster's form": b"41;there\n",
    "without --parsable": b"Submitted batch job 41\n",
    "after a banner": b"Welcome, job 7 is your best\n7 users online\n12\n41\n",
    "not UTF-8": b"\377 gr\374\303\n41\n",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_the_job_s_id_is_sbatch_s_own(tmp_path, commands, job, answer, monkeypatch, caplog):
    monkeypatch.setenv("SLURM_CLUSTERS", "elsewhere")
    (commands.folder / "sbatch.says").write_bytes(answer)
    record.make_job_folder(tmp_path / "run", job.name)
    Slurm().submit(tmp_path / "run", job, Resources(**SLURM))
    assert job.id == "41"
    assert "--parsable" in commands.asked("sbatch")[0]
    assert "SLURM_CLUSTERS=elsewhere is ignored" in caplog.text


def test_nothing_is_submitted_to_a_cluster_that_nobody_could_name(tmp_path, commands, job):
    """Another cluster's login node would not find the job, and start it a second time."""
    (commands.folder / "scontrol").write_text(f"#!/bin/sh\necho {AWAY} >&2\nexit 1\n")
    job.site = Slurm().site()
    record.make_job_folder(tmp_path / "run", job.name)
    with pytest.raises(LaunchError) as refused:
        Slurm().submit(tmp_path / "run", job, Resources(**SLURM))
    assert slurm.is_transient(str(refused.value)) and not commands.asked("sbatch")


def test_a_job_of_other_settings_is_waited_for_until_slurm_cancels_it(run, commands):
    name = take_over(run)
    run.change_job(identity="before")
    commands.shows("RUNNING", name, comment=str(run.folder))  # by which the next job is known
    commands.says("sbatch", "41\n")
    commands.fails("scancel", "scancel: error: Unable to contact slurm controller")
    launcher = run.start(identity="after")
    wait_for(lambda: len(commands.asked("scancel")) > 1)
    assert launcher.poll() is None and not commands.asked("sbatch")
    commands.says("scancel", "")
    wait_for(lambda: run.read("job.json").get("id") == "41")
    complete(run)
    words = finish(launcher)
    assert launcher.returncode == 0 and "cancelled slurm job 7: its settings" in words, words


def test_job_that_could_not_be_cancelled_is_not_called_so(run, commands):
    name = take_over(run)
    commands.shows("PENDING", name)
    commands.fails("scancel", "scancel: error: Unable to contact slurm controller")
    launcher = run.start()
    wait_for(lambda: commands.asked("scontrol"))
    launcher.send_signal(signal.SIGINT)
    words = finish(launcher)
    assert launcher.returncode == 130 and "was not cancelled" in words
    assert run.state() == "submitted" and run.job().stop


def test_a_fault_of_a_node_ends_only_what_has_not_worked_elsewhere(tmp_path, job):
    """As without a GPU: a setting's fault at first, this node's in a run that has saved a step."""
    told = {"rank": 0, "end": "error", "kind": "NodeError", "message": "no GPU here"}
    told |= {"traceback": "NodeError: no GPU here", "time": 0.0}
    file = record.make_job_folder(tmp_path, NAME) / "rank-0.json"
    one, ended = launch_of(tmp_path), Notice("ended", "FAILED")
    write_record(file, told)
    with pytest.raises(LaunchError, match=r"^no GPU here$"):
        one.judge(job, ended)
    write_record(file, told | {"saved": 3})
    one.judge(job, ended)
    job.step = 3
    for _ in range(launcher.ATTEMPTS - 1):
        one.judge(job, ended)
    with pytest.raises(LaunchError, match=r"(?s)gave up after 3 attempts .*no GPU here"):
        one.judge(job, ended)


@pytest.mark.parametrize(
    ("number", "state", "step", "again"),
    [
        (signal.SIGUSR2, "RUNNING", 0, True),
        (signal.SIGUSR2, "RUNNING", 3, False),  # it has come no further
        (signal.SIGUSR2, "COMPLETING", 0, False),
        (signal.SIGTERM, "RUNNING", 0, False),  # it is being cancelled, or SLURM requeues it
    ],
)
def test_a_job_at_its_limit_goes_back_into_the_queue(run, commands, number, state, step, again):
    run.hold(2)
    run.folder.mkdir()
    count = {"folder": str(run.folder), "steps": 9, "gates": str(run.gates)}
    record.write_job(run.folder, Job("slurm", NAME, 1, step, "counting:count", count, id="7"))
    record.make_job_folder(run.folder, NAME)
    commands.says("squeue", state)
    commands.says("scontrol", "")
    words = [sys.executable, "-P", "-m", "maect.launch.worker", str(run.folder), NAME, "0", "1"]
    given = run.environment() | {"MAECT_JOB": NAME, "SLURM_JOB_ID": "7"}
    with subprocess.Popen(words, env=given, stderr=subprocess.DEVNULL) as worker:
        run.reaches(2)
        worker.send_signal(number)
    assert worker.returncode == 0 and run.returned() == "requeue"
    assert [line.endswith(" requeue 7") for line in commands.asked("scontrol")] == [True] * again


LIMIT = (
    "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: "
    "Job violates accounting/QOS policy"
)
FAILED = "sbatch: error: Batch job submission failed: "
LIMITS = (LIMIT, "sbatch: error: AssocGrpSubmitJobsLimit")
REFUSALS = (  # munge is away, the controller is away, its disk is full
    f"{FAILED}Protocol authentication error",
    f"{FAILED}Unable to contact slurm controller (connect failure)",
    f"{FAILED}I/O error writing script/environment to file",
)


def test_a_refusal_for_a_moment_is_tried_again(run, commands):
    """Any, of a run whose settings were accepted once."""
    commands.shows("NODE_FAIL", take_over(run))
    commands.fails("sbatch", "sbatch: error: no\nmore of this")
    launcher = run.start()
    wait_for(lambda: len(commands.asked("sbatch")) > 1)
    commands.says("sbatch", "8\n")
    wait_for(lambda: run.state() == "submitted" and run.job().id == "8")
    commands.shows("RUNNING", run.job().name, id="8")
    complete(run)
    words = finish(launcher)
    assert launcher.returncode == 0 and "gave up" not in words, words
    assert words.count("takes no job for now; trying again: sbatch: error: no more of this") == 1
    assert run.job().earlier == ["7"]


def test_a_job_that_is_off_the_record_when_it_is_submitted_is_ended(tmp_path, monkeypatch):
    """Another launcher wrote its own between this one's record and sbatch's answer."""
    ended = []

    def submit(self, folder, job, resources):
        job.id = "7"
        record.write_job(folder, Job("slurm", "maect-other-1", 1, 0, id="9"))

    monkeypatch.setattr(Slurm, "site", lambda self: None)
    monkeypatch.setattr(Slurm, "submit", submit)
    monkeypatch.setattr(Slurm, "end", lambda self, folder, job: ended.append(job.id))
    one = launch_of(tmp_path)
    for _ in range(2):  # at the second time nothing is submitted
        with pytest.raises(LaunchError, match="names another job, slurm job 9"):
            one.submit(None)
    assert ended == ["7"] and record.read_job(tmp_path).id == "9"


def test_refusals_are_tried_again_for_an_hour(tmp_path, monkeypatch):
    """A first job's settings may be wrong: it is tried once."""
    clock = Clock()
    monkeypatch.setattr(launcher, "time", clock)
    one = launch_of(tmp_path)
    first = Job("slurm", "maect-a-1", 1, 0)
    later = Job("slurm", "maect-a-2", 1, 0, earlier=["7"])
    refusal = "sbatch: error: Invalid account"
    assert not one.may_try_again(first, refusal)
    for error in (*LIMITS, *REFUSALS):
        assert one.may_try_again(first, error), error
    assert one.may_try_again(later, refusal)
    clock.sleep(launcher.REFUSAL_PATIENCE - 1)
    assert one.may_try_again(later, refusal)
    clock.sleep(2)
    assert not one.may_try_again(later, refusal)
    for limit in LIMITS:
        assert one.may_try_again(later, limit), "it ends whenever a job before it does"


def test_each_wait_for_a_limit_is_longer_until_a_signal_comes(tmp_path, commands, monkeypatch):
    """Half a minute, then twice as long each time, up to ten minutes."""
    monkeypatch.delenv(slurm.INTERVAL_VARIABLE)
    clock, waited, job = Clock(), [], None
    monkeypatch.setattr(launcher, "time", clock)
    commands.fails("sbatch", LIMIT)
    one = launch_of(tmp_path)
    for _ in range(7):
        job = one.submit(job)
        start = clock.now
        one.wait_before_submission()
        waited.append(round(clock.now - start))
    assert waited == [30, 60, 120, 240, 480, 600, 600]
    assert job.state == "ended" and job.ending.startswith("not accepted for now: sbatch")
    assert job.earlier == [] and not list((tmp_path / "jobs").iterdir())
    one.interruption.stops, one.is_done = 1, iter([False, True]).__next__
    with pytest.raises(SystemExit, match="130"):
        one.run()
    assert one.line.said[-1] == "stopped; no job is running"


def test_a_job_that_slurm_puts_back_and_holds_is_waited_for(run, commands, monkeypatch):
    monkeypatch.setenv("MAECT_SQUEUE_SECONDS", "1")
    name = take_over(run)
    commands.shows("NODE_FAIL", name)
    launcher = run.start()
    wait_for(lambda: commands.asked("scontrol"))
    commands.shows("PENDING", name, "JobHeldUser")
    count = len(commands.asked("scontrol"))
    wait_for(lambda: len(commands.asked("scontrol")) > count + 1)
    commands.shows("RUNNING", name)
    complete(run)
    words = finish(launcher)
    assert launcher.returncode == 0 and words.count("`scontrol release 7`") == 1, words
    assert not commands.asked("sbatch") and not commands.asked("scancel")
