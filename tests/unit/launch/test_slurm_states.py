"""What is concluded from SLURM's answers, or their absence: scripts answer in its place."""

import json
import os
import signal
from types import SimpleNamespace

import pytest
from launching import finish, wait_for
from slurm_commands import AWAY, UNKNOWN, Clock

from maect.core.errors import UserError
from maect.core.files import sealed
from maect.core.resources import sbatch_options
from maect.launch import Resources, Task, launcher, record, slurm
from maect.launch.record import Job, LaunchError
from maect.launch.shell import command, environment
from maect.launch.slurm import Slurm

NAME = "maect-a-1"
SLURM = {"cluster": "slurm", "cpus_per_task": 1}


@pytest.fixture
def job():
    return Job("slurm", NAME, ranks=1, step=0, state="submitted", id="7")


@pytest.mark.parametrize(
    "state, phase, grace, final",
    [
        ("RUNNING", "running", 0, False),
        ("COMPLETING", "running", 0, False),
        ("PENDING", "pending", 0, False),
        ("REQUEUED", "pending", 0, False),
        ("RESV_DEL_HOLD", "pending", 0, False),
        # SLURM puts these back under the same id: the end has to last.
        ("NODE_FAIL", "ended", 0.6, False),
        ("PREEMPTED", "ended", 0.6, False),
        ("FAILED", "ended", 1, False),
        ("TIMEOUT", "ended", 1, False),
        ("OUT_OF_MEMORY", "ended", 1, False),
        ("CANCELLED", "ended", 1, True),
        ("DEADLINE", "ended", 1, True),
        # Of a later SLURM: nobody here knows whether such a job is over.
        ("HIBERNATED", "unknown", 0, False),
    ],
)
def test_states_of_the_controller(tmp_path, commands, job, state, phase, grace, final):
    commands.shows(state, NAME)
    notice = Slurm().poll(tmp_path, job)
    assert (notice.phase, notice.grace, notice.final) == (phase, grace, final)
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


@pytest.mark.parametrize(
    "shown",
    [
        "JobId=7 JobName=another UserId=me(1) JobState=RUNNING Reason=None Comment=/y",
        f"JobId=7 JobName={NAME}2 UserId=me(1) JobState=RUNNING Reason=None",
    ],
)
def test_ids_begin_again(tmp_path, commands, job, shown):
    job.place = "/x"
    commands.says("scontrol", shown)
    assert Slurm().poll(tmp_path, job).text == "unknown to SLURM"
    assert Slurm().end(tmp_path, job) and not commands.asked("scancel")


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


@pytest.mark.parametrize("name", ["mine", "my JobState=FAILED job", "a|b"])
def test_a_renamed_job_is_the_run_s(tmp_path, commands, job, name):
    """`scontrol update JobId=7 JobName=mine`, by a user or a site: its comment is the folder."""
    job.place = str(tmp_path)
    commands.shows("RUNNING", name, comment=str(tmp_path))
    assert Slurm().poll(tmp_path, job).phase == "running"
    assert Slurm().end(tmp_path, job) and commands.asked("scancel")[-1].endswith(" 7")
    commands.shows("RUNNING", name, comment=f"{tmp_path}2")
    assert Slurm().poll(tmp_path, job).text == "unknown to SLURM"


def test_a_job_without_an_id_is_found_by_its_name(tmp_path, commands, job):
    """Names of other jobs may be in any encoding, and have any sign."""
    job.id = None
    (commands.folder / "squeue").write_bytes(
        b"#!/bin/sh\necho $* > " + os.fsencode(commands.folder / "words") + b"\n"
        b"printf '8|gr\\374n\\n9|a|b\\n7|maect-a-1\\n'\n"
    )
    commands.shows("PENDING", NAME, "Priority")
    assert Slurm().poll(tmp_path, job).text == "PENDING (Priority)" and job.id == "7"
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


@pytest.mark.parametrize(
    "state, reason",
    [
        ("PENDING", "JobHeldUser"),
        ("PENDING", "JobHeldAdmin"),
        ("PENDING", "launch_failed_requeued_held"),
        ("REQUEUE_HOLD", "None"),
    ],
)
def test_a_held_job_is_named_with_its_cure(tmp_path, commands, job, state, reason):
    commands.shows(state, NAME, reason)
    notice = Slurm().poll(tmp_path, job)
    assert notice.phase == "pending" and "`scontrol release 7`" in notice.hint
    commands.shows("PENDING", NAME, "Priority")
    assert Slurm().poll(tmp_path, job).hint == ""


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


def answering(run, commands, answer: str, state: str = "CANCELLED", more: str = "") -> None:
    """Let sbatch accept a job and say something; its id is 41."""
    run.resources["cluster"] = "slurm"
    shown = f"JobId=41 JobName=$name UserId=me(1) JobState={state} Reason=None"
    (commands.folder / "sbatch").write_text(
        f'#!/bin/sh\necho "$0 $*" >> {commands.folder}/asked\n'
        f"name=$(grep -o 'maect-{run.folder.name}-[0-9a-f]*' {run.folder}/job.json | head -1)\n"
        f"rm -f {commands.folder}/scontrol.fails\n"
        f'echo "41|$name" > {commands.folder}/squeue.says\n'
        f'echo "{shown}" > {commands.folder}/scontrol.says\nprintf "{answer}"\n{more}\n'
    )


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


def test_submission_that_broke_off_is_looked_for(run, commands):
    """sbatch has accepted a job of a run; the launcher that called it dies before its answer."""
    take_over(run)
    commands.shows("NODE_FAIL", run.job().name)
    answering(run, commands, "", "PENDING", "kill -9 $PPID")
    run.start().wait(60)
    assert run.state() == "submitting"
    launcher = run.start()
    wait_for(lambda: run.read("job.json").get("id") == "41")
    assert run.state() == "submitted"
    complete(run)
    words = finish(launcher)
    assert launcher.returncode == 0 and len(commands.asked("sbatch")) == 1, words


def test_a_job_of_other_settings_is_waited_for_until_slurm_cancels_it(run, commands):
    name = take_over(run)
    run.change_job(identity="before")
    answering(run, commands, "41\\n", "RUNNING")
    commands.shows("RUNNING", name)
    commands.fails("scancel", "scancel: error: Unable to contact slurm controller")
    launcher = run.start(identity="after")
    wait_for(lambda: commands.asked("scancel"))
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


@pytest.mark.parametrize("step", [0, 3])
def test_a_fault_of_a_node_ends_only_what_has_not_worked_elsewhere(run, commands, step):
    """As without a GPU: a setting's fault at first, this node's in a run that has saved a step."""
    told = {"rank": 0, "end": "error", "kind": "NodeError", "message": "no GPU here"}
    told |= {"traceback": "NodeError: no GPU here", "time": 0.0, "saved": step}
    report = f"echo '{json.dumps(sealed(told))}' > {run.folder}/jobs/$name/rank-0.json"
    answering(run, commands, "41\\n", "FAILED", report)
    words = finish(run.start())
    assert "no GPU here" in words
    if not step:
        assert len(commands.asked("sbatch")) == 1 and "gave up" not in words
        return
    # The first saved a step.
    assert "gave up after 3 attempts" in words and len(commands.asked("sbatch")) == 4


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


@pytest.mark.parametrize("is_first", [True, False])
def test_a_refusal_for_a_moment_is_tried_again(run, commands, is_first):
    """Any, of a run whose settings were accepted once."""
    refusal = LIMIT if is_first else "sbatch: error: no more of this"
    if not is_first:
        commands.shows("NODE_FAIL", take_over(run))
    run.resources["cluster"] = "slurm"
    commands.fails("sbatch", refusal)
    launcher = run.start()
    wait_for(lambda: len(commands.asked("sbatch")) > 1)
    commands.says("sbatch", "8\n")
    wait_for(lambda: run.state() == "submitted" and run.job().id == "8")
    commands.shows("RUNNING", run.job().name, id="8")
    complete(run)
    words = finish(launcher)
    assert launcher.returncode == 0 and "gave up" not in words, words
    said = " ".join(refusal.split())
    assert words.count(f"takes no job for now; trying again: {said}") == 1, words
    assert run.job().earlier == ([] if is_first else ["7"])


def test_an_interrupt_ends_the_wait_for_a_limit(run, commands):
    run.resources["cluster"] = "slurm"
    commands.fails("sbatch", LIMIT)
    launcher = run.start()
    wait_for(lambda: len(commands.asked("sbatch")) > 1)
    launcher.send_signal(signal.SIGINT)
    words = finish(launcher)
    assert launcher.returncode == 130 and "no job is running" in words, words
    assert run.state() == "ended" and run.job().ending.startswith("not accepted for now: sbatch")
    assert run.job().earlier == [] and not list((run.folder / "jobs").iterdir())


def test_nothing_is_submitted_beside_the_job_of_another_launcher(run, commands):
    """Its record appears while this one waits, on a file system without locks."""
    run.resources |= {"cluster": "slurm", "devices": 1}
    commands.fails("sbatch", LIMIT)
    launcher = run.start()
    wait_for(lambda: run.state() == "ended")
    run.change_job(name="maect-other-1", state="submitted", id="9")
    words = finish(launcher)
    assert launcher.returncode == 2, words
    assert "names another job, slurm job 9" in words


def test_a_job_that_is_off_the_record_when_it_is_submitted_is_ended(tmp_path, monkeypatch):
    """Another launcher wrote its own between this one's record and sbatch's answer."""
    ended = []

    def submit(self, folder, job, resources):
        job.id = "7"
        record.write_job(folder, Job("slurm", "maect-other-1", 1, 0, id="9"))

    monkeypatch.setattr(Slurm, "site", lambda self: None)
    monkeypatch.setattr(Slurm, "submit", submit)
    monkeypatch.setattr(Slurm, "end", lambda self, folder, job: ended.append(job.id))
    one = launcher._Launch(Task("a:b"), tmp_path, Resources(**SLURM), lambda: False, None, None)
    with pytest.raises(LaunchError, match="names another job, slurm job 9"):
        one.submit(None)
    assert ended == ["7"] and record.read_job(tmp_path).id == "9"


def test_refusals_are_tried_again_for_an_hour(tmp_path, monkeypatch):
    """A first job's settings may be wrong: it is tried once."""
    clock = Clock()
    monkeypatch.setattr(launcher, "time", clock)
    one = launcher._Launch(Task("a:b"), tmp_path, Resources(**SLURM), lambda: False, None, None)
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


def test_each_wait_is_longer(tmp_path, monkeypatch):
    """Half a minute, then twice as long each time, up to ten minutes."""
    monkeypatch.delenv(slurm.INTERVAL_VARIABLE, raising=False)
    clock = Clock()
    monkeypatch.setattr(launcher, "time", clock)
    monkeypatch.setattr(Slurm, "site", lambda self: None)

    def refuse(*_):
        raise LaunchError(LIMIT)

    monkeypatch.setattr(Slurm, "submit", refuse)
    people = SimpleNamespace(stops=0, reason_to_leave=lambda: None)
    line = SimpleNamespace(say=lambda text: None, title="")
    one = launcher._Launch(Task("a:b"), tmp_path, Resources(**SLURM), lambda: False, line, people)
    waited = []
    job = None
    for _ in range(7):
        job = one.submit(job)
        start = clock.now
        one.wait_before_submission()
        waited.append(round(clock.now - start))
    assert waited == [30, 60, 120, 240, 480, 600, 600]


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
