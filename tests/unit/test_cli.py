"""The command line: settings, devices, the log beside the terminal, exit statuses."""

import dataclasses
import inspect
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from maect import cli
from maect.core.errors import UserError
from maect.core.files import write_record
from maect.core.resources import Resources, count_devices
from maect.records import RunRecord


@pytest.mark.parametrize("command", ["-m maect show {}", "-m maect.recipes ct_min"])
def test_who_reads_only_the_first_lines(command, tmp_path):
    """`maect ... | head` ends without a word, whenever the other side goes."""
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "low_shot.csv").write_text("architecture,method\n" * 999)
    words = [sys.executable, *command.format(tmp_path).split()]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert done.stderr == ""


def test_devices(tmp_path, monkeypatch):
    """What CUDA_VISIBLE_DEVICES hides is not used, whatever the driver lists."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert [count_devices(asked) for asked in ("auto", "gpus", "3")] == [2, 1, 3]
    for wrong in ("0", "-1", "many"):
        with pytest.raises(UserError, match="devices"):
            count_devices(wrong)
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\nprintf 'A, 40960\\nA, 40960\\nA, [N/A]\\n'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert count_devices("auto") == 3
    hidden = {"": 0, "-1": 0, "NoDevFiles": 0, "GPU-5ab, 2": 2, "1,-1,0": 1, "0,1,5": 3}
    for visible, count in hidden.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert count_devices("auto") == (count or 2), visible
        assert count_devices("gpus") == (count or 1), visible


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("shard /no/such/folder OUT", "/no/such/folder"),
        ("train /no/config.yaml", "/no/config.yaml: no such file; `maect resolve EXPERIMENT`"),
        ("resolve digitz", "digits"),
        ("resolve digits --config seeds", "KEY=VALUE"),
        ("features /no --shards /no --out x.npy", "maect embed writes"),
        ("plan digits", "digits is an experiment, not a target: --experiment digits"),
        ("run digits --profile jewels", "did you mean 'juwels'?"),
        ("run digits -n -C seeds=3", "dropped; write --config KEY=VALUE, before --"),
        ("run digits -- --config seeds=3", "dropped; write --config KEY=VALUE"),
        ("clean OUT", "OUT: no runs there"),
        ("show OUT", "no such results folder"),
        ("retrieve digits OUT", "OUT: "),
        ("page tables/low_shot.yaml", "nowhere: no such folder of evaluations"),
        ("evaluate /no/knn.yaml", "/no/knn.yaml: no such file"),
        ("page /no/umap.yaml", "/no/umap.yaml: not the resolved file of a page; they are"),
        ("search run index image --cuont=5", "Unknown option: --cuont=5. Did you mean --count?"),
        ("plan --utilisation 5", 'Invalid value "5.0" for --utilisation. Must be <= 1.'),
        ("duplicates --out a", 'Command "duplicates" parameter WHAT requires an argument.'),
        ("embed a b --precision x", 'Choose from: "fp32", "bf16".'),
        ("embedd a b", 'maect: Unknown command "embedd". Did you mean "embed"? See maect --help.'),
        ("clean x --rem", "Unknown option: --rem. "),
        ("train x --det", "Unknown option: --det. "),
    ],
)
def test_mistakes_are_one_line(words, message, tmp_path, capfd):
    """Also an option that is not written out: `--rem` deleted."""
    (tmp_path / "OUT").touch()
    shown = "name: umap\nrows:\n- {architecture: a, method: m, runs: [r]}\nruns: runs\n"
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables/low_shot.yaml").write_text(f"{shown}evaluations: nowhere\n")
    given = re.sub(r"\b(OUT|tables)\b", rf"{tmp_path}/\1", words).split()
    assert cli.main(given) == 2
    _, stderr = capfd.readouterr()
    assert len(stderr.splitlines()) == 1, stderr
    assert stderr.startswith((f"maect {given[0]}: ", "maect: Unknown command "))
    assert message in stderr
    if words.startswith(("shard /no", "train /no")):
        assert cli.main([*given, "--log", str(tmp_path / "logs/one.log")]) == 2
        assert (tmp_path / "logs/one.log").read_text() == stderr


def test_status_of_all_experiments_names_those_without_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("results/early/runs").mkdir(parents=True)
    later = RunRecord.path(Path("results/later/runs/mae"))
    write_record(later, {"run": "mae", "stage": "pretrain"})
    assert cli.main(["status"]) == 0
    told = capsys.readouterr().out
    assert "results/early: no run has started yet\n" in told and "results/later: 1 run: " in told
    assert cli.main(["status", "results/early"]) == 2


def test_words_for_snakemake_are_passed_on(monkeypatch):
    passed: list[tuple[object, ...]] = []
    monkeypatch.setattr("maect.tools.commands.snakemake", lambda *given: passed.append(given) or 3)
    monkeypatch.chdir("/")
    words = "run digits -n --config seeds=2 epochs=3 --cores 4 tables -j1 --profile juwels"
    command, bound, _ = cli.build_app().parse_args(words, exit_on_error=False, print_error=False)
    given = {"experiment": "digits", "words": ("-n", "--cores", "4", "tables", "-j1")}
    assert bound.arguments == given | {"profile": "juwels", "config": ["seeds=2", "epochs=3"]}
    with pytest.raises(UserError, match="unknown"):  # `epochs` is no key of an experiment
        command(*bound.args, **bound.kwargs)
    assert cli.main(["run", "digits", "-n", "--cores", "4", "--config", "seeds=2"]) == 3
    ((experiment, profile, config, words_on),) = passed
    assert (experiment, profile, config) == ("digits", "local", ["seeds=2"])
    assert list(words_on)[:3] == ["-n", "--cores", "4"]


COMMANDS = [cli.name_of(function) for group in cli.GROUPS.values() for function in group]


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_help_has_every_command_once_in_a_group(words, capsys):
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert re.findall(r"^│ ([a-z][a-z-]*)  ", said, flags=re.M) == COMMANDS
    assert len(set(COMMANDS)) == len(COMMANDS) > 25
    assert all(f"─ {title} ─" in said for title in cli.GROUPS)


def test_options_of_0_2_0_are_accepted():
    words = ["evaluate", "x.yaml", "--cpus=2", "--minutes", "5", "--sbatch=--qos=a", "--nodes=1..3"]
    _, bound, _ = cli.build_app().parse_args([cli._renamed(word) for word in words])
    given = Resources(cpus_per_task=2, runtime=5, slurm_extra="--qos=a", nodes="1..3")
    assert bound.arguments["resources"] == given
    assert cli._renamed("--out=--cpus") == "--out=--cpus" and cli._renamed("cpus") == "cpus"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_every_word_in_80_columns_and_its_examples_are_understood(
    command, monkeypatch, capsys
):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([command, "--help"]) == 0
    said = capsys.readouterr().out
    assert all(len(line) <= 80 for line in said.splitlines())
    app = cli.build_app()
    arguments = app[command].assemble_argument_collection()
    function = app[command].default_command
    words = inspect.getdoc(function).partition("Args:")[2] + inspect.getdoc(Resources)
    documented = re.findall(r"^    (\w+): ", words, re.M)
    known = {argument.field_info.name: argument.parameter.help for argument in arguments}
    assert [name for name, text in known.items() if not text and name not in documented] == []
    assert {*documented} <= {*known} | {field.name for field in dataclasses.fields(Resources)}
    for example in re.findall(rf"^maect ({command} .*)", said, re.M):
        given = example.partition(">")[0].split()
        assert app.parse_args(given, exit_on_error=False, print_error=False)[0] is function


@pytest.mark.parametrize(("seconds", "said"), [(0.0, True), (60.0, False)])
def test_a_command_that_takes_its_time_says_what_it_does(seconds, said, monkeypatch, capsys):
    told = threading.Event()

    def work() -> None:
        told.wait(60 if said else 0)

    monkeypatch.setattr("maect.cli.is_watched", lambda: True)
    monkeypatch.setattr("maect.cli.QUIET_SECONDS", seconds)
    monkeypatch.setattr("maect.cli.log.info", lambda message: (print(message), told.set()))
    monkeypatch.setattr("maect.experiment.schema.json_schema", work)
    assert cli.main(["schema"]) == 0
    line = "maect schema: print the JSON schema of experiment files, for editors"
    assert (line in capsys.readouterr().out) == said


CTRL_C_COUNTS = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL);"
    "os.execv(sys.argv[1], sys.argv[1:])"
)


@pytest.mark.parametrize("end", ["Ctrl-C", "kill"])
def test_an_interruption_before_the_first_job_is_a_line(end, tmp_path):
    # A shell that starts tests in the background has them ignore it.
    command = [sys.executable, "-c", CTRL_C_COUNTS, sys.executable, "-m", "maect", "run", "digits"]
    with subprocess.Popen(
        [*command, "-n"], cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        assert "Using profile" in process.stderr.readline()
        if end == "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.terminate()
        said = process.stderr.read()
    assert process.returncode == 130
    assert said.splitlines()[-1] == "maect: interrupted before any job began"
    assert "Traceback" not in said


def test_a_signal_does_not_find_half_of_a_module():
    """A second signal during an import in the first one's handler stopped nothing."""
    code = """
import signal, sys
from maect.tools.commands import snakemake
def install(number, handler):
    assert "psutil" in sys.modules
    raise SystemExit
signal.signal = install
snakemake("digits", "local", (), ["--version"])
raise AssertionError("no handler")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_shell_completes_commands_and_options(tmp_path, capsys):
    assert cli.main(["completion", "bash"]) == 0
    (tmp_path / "maect.bash").write_text(capsys.readouterr().out)
    (tmp_path / "photos").mkdir()
    asked = """source maect.bash
for line in "maect exp" "maect export --li" "maect embed --precision b" "maect embed pho"; do
    COMP_WORDS=($line); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=(); COMP_LINE=$line
    _maect; echo "${COMPREPLY[@]}"
done"""
    done = subprocess.run(["bash", "-c", asked], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["export", "--licence", "bf16", "photos"], done.stderr
