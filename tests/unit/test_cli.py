"""The command line: settings, devices, the log beside the terminal, exit statuses."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from maect import cli
from maect.core.errors import UserError
from maect.core.files import write_record
from maect.launch.resources import count_devices
from maect.records import RunRecord
from maect.tools.commands import own_name


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert count_devices("auto") == 2
    assert count_devices("gpus") == 1
    assert count_devices("3") == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,5")
    assert count_devices("auto") == 3
    for wrong in ("0", "-1", "many"):
        with pytest.raises(UserError, match="devices"):
            count_devices(wrong)


@pytest.mark.parametrize(
    "command",
    ["-m maect --help", "-m maect show {}", "-m maect status {}", "-m maect.recipes ct_min"],
)
def test_who_reads_only_the_first_lines(command: str, tmp_path: Path) -> None:
    """`maect ... | head` ends without a word, whenever the other side goes."""
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "low_shot.csv").write_text("architecture,method\n" * 999)
    (tmp_path / "runs" / "mae").mkdir(parents=True)
    write_record(RunRecord.path(tmp_path / "runs" / "mae"), {"run": "mae", "stage": "pretrain"})
    words = [sys.executable, *command.format(tmp_path).split()]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("visible", "count"), [("", 0), ("-1", 0), ("NoDevFiles", 0), ("GPU-5ab, 2", 2), ("1,-1,0", 1)]
)
def test_hidden_devices(
    visible: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What CUDA_VISIBLE_DEVICES hides is not used, whatever the driver lists."""
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\nprintf 'GPU 0: A\\nGPU 1: A\\nGPU 2: A\\n'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert count_devices("auto") == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_devices("auto") == (count or 2)
    assert count_devices("gpus") == (count or 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["shard", "/no/such/folder", "OUT"], "/no/such/folder"),
        (["train", "/no/config.yaml"], "/no/config.yaml: no such file; `maect resolve EXPERIMENT`"),
        (["resolve", "digitz"], "digits"),
        (["resolve", "digits", "--config", "seeds"], "KEY=VALUE"),
        (["features", "/no", "--shards", "/no", "--out", "x.safetensors"], "/no"),
        (["features", "/no", "--shards", "/no", "--out", "x.npy"], "maect embed writes"),
        (["plan", "digits"], "digits is an experiment, not a target: --experiment digits"),
        (["run", "digits", "--profile", "jewels"], "did you mean 'juwels'?"),
        (["doctor", "--profile", "jewels"], "did you mean 'juwels'?"),
        (["run", "digits", "--confg", "seeds=2"], "unknown option --confg; did you mean --config?"),
        (["run", "digits", "--nonsense"], "unknown option --nonsense; see maect run --help"),
        (["run", "digits", "--cores"], "argument --cores"),
        (["run", "digits", "-n", "-C", "seeds=3"], "dropped; write --config seeds=3, before --"),
        (["run", "digits", "tabels", "-n"], "unknown target 'tabels'; did you mean 'tables'?"),
        (["clean", "OUT"], "OUT: no runs there"),
        (["show", "OUT"], "no such results folder"),
        (["retrieve", "digits", "OUT"], "OUT: "),
        (["page", "tables/low_shot.yaml"], "nowhere: no such folder of evaluations"),
        (["evaluate", "/no/knn.yaml"], "/no/knn.yaml: no such file"),
        (["show", "/no"], "/no"),
        (["page", "/no/tables/low_shot.yaml"], "/no/tables/low_shot.yaml: no such file"),
        (["page", "/no/figures/umap.yaml"], "/no/figures/umap.yaml: no such file"),
        (
            ["page", "/no/umap.yaml"],
            "/no/umap.yaml: not the resolved file of a page; they are tables/NAME.yaml",
        ),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "OUT").touch()
    shown = "name: umap\nrows:\n- {architecture: a, method: m, runs: [r]}\nruns: runs\n"
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables/low_shot.yaml").write_text(f"{shown}evaluations: nowhere\n")
    words = [str(tmp_path / word) if word.startswith(("OUT", "tables")) else word for word in words]
    assert cli.main(words) == 2
    _, stderr = capfd.readouterr()
    assert len(stderr.splitlines()) == 1, stderr
    assert stderr.startswith(f"maect {words[0]}: ") and message in stderr


def test_status_of_all_experiments_names_those_without_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("results/early/runs").mkdir(parents=True)
    Path("results/later/runs/mae").mkdir(parents=True)
    write_record(
        RunRecord.path(Path("results/later/runs/mae")), {"run": "mae", "stage": "pretrain"}
    )
    assert cli.main(["status"]) == 0
    told = capsys.readouterr().out
    assert "results/early: no run has started yet\n" in told and "results/later: 1 run: " in told
    assert cli.main(["status", "results/early"]) == 2


def test_options_that_do_not_exist_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["shard", "a", "b", "--foo"])
    assert "maect: error: shard: unknown --foo; maect shard --help" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["search", "run", "index", "image", "--cuont=5"])
    assert "search: unknown --cuont=5; did you mean --count?" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["plan", "--utilisation", "5"])
    assert "'5' is not a number above 0 and up to 1" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "run",
            "experiments: cifar10, cifar10_controls, cifar10_grey, cifar10_ladder, cifar10_law, "
            "cifar10_no_lookup, cifar10_refined, digits, digits_controls, digits_ladder, "
            "digits_law, digits_no_lookup, digits_refined, paper, refined, refined_ablations, ",
        ),
        ("train", "recipes: "),
        ("evaluate", "evaluations: "),
        ("import", "layouts: mae, mae_ct"),
        ("retrieve", "data and weights: "),
    ],
)
def test_help_lists_names(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert words in " ".join(capsys.readouterr().out.split())


def test_help_has_every_command_once_in_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    said = capsys.readouterr().out
    (commands,) = (
        action.choices for action in cli.build_parser()._actions if isinstance(action.choices, dict)
    )
    listed = [line.split()[0] for line in said.splitlines() if re.match(r"  [a-z]", line)]
    assert sorted(listed) == sorted(commands)
    for title, names in cli.GROUPS.items():
        assert re.search(rf"^{title}:\n  {names[0]} ", said, flags=re.M)
        assert {*names} < {*commands}
    assert all(len(line) <= 100 for line in said.splitlines())


CTRL_C_COUNTS = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL);"
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def test_help_ends_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["embed", "--help"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.split()[:2] == ["maect", "embed"]
    parser = cli.build_parser()
    examples = {name: made.example for name, made in cli.COMMANDS.items() if made.example}
    assert len(examples) > 20
    for name, example in examples.items():
        assert parser.parse_known_args(example.split())[0].command == name


@pytest.mark.parametrize("end", ["Ctrl-C", "kill"])
def test_an_interruption_before_the_first_job_is_a_line(end: str, tmp_path: Path) -> None:
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


def test_a_signal_does_not_find_half_of_a_module() -> None:
    """A second signal during an import in the first one's handler stopped nothing."""
    code = "import sys, maect.tools.commands; assert 'psutil' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_waits_for_nothing() -> None:
    code = "import sys; from maect import cli; cli.build_parser().format_help();"
    code += "assert not {'torch', 'numpy', 'pydantic', 'yaml'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("called", "printed"),
    [("bin/maect", "{}/bin/maect"), ("lib/maect/__main__.py", "{python} -P -m maect")],
)
def test_printed_commands_are_called_as_this_one(
    called: str, printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/maect").write_text("#!/bin/sh\n")
    (tmp_path / "bin/maect").chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / called)])
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert own_name() == printed.format(tmp_path, python=sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin")
    assert (own_name() == "maect") == (called == "bin/maect")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["embedd", "a", "b"], "unknown command 'embedd'; did you mean embed?"),
        (["xyzzy"], "unknown command 'xyzzy'; maect --help lists all"),
        (["plan", "--experiment", "things"], "experiment 'things'; did you mean things.yaml?"),
        (["plan", "--experiment", "photos"], "a folder of images? `maect new-experiment` writes"),
    ],
)  # fmt: skip
def test_the_nearest_name_is_said(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    (tmp_path / "things.yaml").touch()
    try:
        assert cli.main(arguments) == 2
    except SystemExit as end:
        assert end.code == 2
    said = capsys.readouterr().err
    assert words in said and len(said.splitlines()) <= 2


def test_a_shell_completes_commands_and_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["completion", "bash"]) == 0
    (tmp_path / "maect.bash").write_text(capsys.readouterr().out)
    (tmp_path / "photos").mkdir()
    asked = """source maect.bash
for line in "maect exp" "maect export --li" "maect embed --precision b" "maect embed pho"; do
    COMP_WORDS=($line); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
    _shtab_maect; echo "${COMPREPLY[@]}"
done"""
    done = subprocess.run(["bash", "-c", asked], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["export", "--licence", "bf16", "photos"], done.stderr
