"""A user's shell, banners and odd names do not change what a launcher asks or is told."""

import os

import pytest
from launching import finish

from maect.core.errors import UserError
from maect.launch import Resources, slurm, submit
from maect.launch.resources import sbatch_arguments

SETTINGS = {
    "SQUEUE_PARTITION": "elsewhere", "SQUEUE_FORMAT": "%i", "SQUEUE_USERS": "another",
    "SLURM_TIME_FORMAT": "relative", "SLURM_CLUSTERS": "other", "SBATCH_ARRAY_INX": "0-2",
    "SBATCH_JOB_NAME": "mine", "SBATCH_PARTITION": "elsewhere", "SACCT_FORMAT": "jobid",
    "SCANCEL_NAME": "mine", "SCANCEL_INTERACTIVE": "yes", "SLURM_JOB_ID": "3",
}  # fmt: skip


def test_no_command_sees_settings_of_the_shell(tmp_path, commands, monkeypatch):
    for key, value in SETTINGS.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("SLURM_CONF", "/etc/here.conf")
    (commands.folder / "squeue").write_text("#!/bin/sh\nenv\n")
    code, out, _ = slurm.command("squeue")
    seen = {line.partition("=")[0] for line in out.splitlines()}
    assert code == 0 and not seen & SETTINGS.keys() and {"SLURM_CONF", "PATH"} <= seen
    assert not submit.environment("maect-a-1", 1).keys() & SETTINGS.keys()


def test_the_user_is_asked_for_by_number(tmp_path, commands, monkeypatch):
    monkeypatch.setenv("LOGNAME", "another")
    monkeypatch.setenv("USER", "another")
    commands.says("squeue", "")
    slurm.Squeue().ask(0.0)
    assert f"-u {os.getuid()} " in commands.asked("squeue")[0]


def test_another_cluster_in_the_shell_is_refused_by_name(commands, run, monkeypatch):
    monkeypatch.setenv("SLURM_CLUSTERS", "other")
    run.resources |= {"cluster": "slurm", "devices": 1}
    launcher = run.start()
    words = finish(launcher)
    assert launcher.returncode == 2 and "SLURM_CLUSTERS=other is set" in words
    assert not commands.asked("sbatch")


def test_settings_that_do_not_count_are_named(monkeypatch, caplog):
    monkeypatch.setenv("SBATCH_PARTITION", "elsewhere")
    with caplog.at_level("INFO", "maect"):
        submit.check_shell()
    assert "SBATCH_PARTITION: not used" in caplog.text


@pytest.mark.parametrize(
    "argument", ["array=0-2", "clusters=a", "M=a", "job_name=x", "--output=x", "wait", "ntasks=3"]
)
def test_arguments_that_would_lose_the_job_are_refused(argument):
    with pytest.raises(UserError, match=rf"slurm_extra: {argument}: .* is set by maect"):
        Resources("slurm", sbatch=(argument,))


def test_a_list_is_one_argument():
    text = "exclude=n1,n[3-5,7],qos=default,exclusive, gres=gpu:4,nvme:1"
    assert sbatch_arguments(text) == (
        "exclude=n1,n[3-5,7]", "qos=default", "exclusive", "gres=gpu:4,nvme:1",
    )  # fmt: skip
    assert sbatch_arguments("") == ()


ANSWERS = {
    "as it is": "41\\n",
    "another cluster's form": "41;there\\n",
    "without --parsable": "Submitted batch job 41\\n",
    "after a banner": "Welcome, job 7 is your best\\n7 users online\\nquota: 12\\n41\\n",
    "not UTF-8": "\\377 gr\\374\\303\\n41\\n",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_the_job_s_id_is_sbatch_s_own(run, commands, answer):
    run.resources |= {"cluster": "slurm", "devices": 1}
    (commands.folder / "sbatch").write_text(
        f'#!/bin/sh\necho "$0 $*" >> {commands.folder}/asked\nprintf "{answer}"\n'
        f"name=$(grep -o 'maect-{run.folder.name}-[0-9a-f]*' {run.folder}/job.json | tail -1)\n"
        f'echo "41|CANCELLED|None|$name" > {commands.folder}/squeue.says\n'
    )
    words = finish(run.start())
    assert run.job().id == "41" and "job 41 was cancelled" in words
    assert "--parsable" in commands.asked("sbatch")[0]


def test_an_answer_without_an_id_is_looked_for(run, commands):
    run.resources |= {"cluster": "slurm", "devices": 1}
    (commands.folder / "sbatch").write_text(
        f'#!/bin/sh\necho "$0 $*" >> {commands.folder}/asked\necho accepted\n'
        f"name=$(grep -o 'maect-{run.folder.name}-[0-9a-f]*' {run.folder}/job.json | tail -1)\n"
        f'echo "41|CANCELLED|None|$name" > {commands.folder}/squeue.says\n'
    )
    words = finish(run.start())
    assert "not sure that it was submitted" in words and "job 41 was cancelled" in words
    assert len(commands.asked("sbatch")) == 1


def test_names_in_any_encoding(tmp_path, commands):
    (commands.folder / "squeue").write_bytes(
        b"#!/bin/sh\nprintf '8|RUNNING|None|gr\\374n\\n7|RUNNING|None|maect-a-1\\n'\n"
    )
    answer = slurm.Squeue().ask(0.0)
    assert answer is not None and answer.jobs["7"][2] == "maect-a-1"
