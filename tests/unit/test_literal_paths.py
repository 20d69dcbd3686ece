"""A folder whose path submitit or sbatch would read as a template is refused, in one line.

submitit fills `%t`, `%j` and `%a` in the whole path of its folder: from `/scratch/10%tune` it wrote
and executed pickles in `/scratch/100une`, which any user could own.
"""

from pathlib import Path

import pytest
from submitit.core.utils import JobPaths

from maect import cli
from maect.core.errors import UserError
from maect.core.files import check_literal_path
from maect.core.owners import check_working_folder
from maect.data.staging import stage
from maect.launch import Resources, Task, launch
from maect.tools.new_experiment import new_experiment

NAMES = ("10%tune", "5%accuracy", "b%uv", r"a\b", "a\nb", "a\x7fb")


@pytest.mark.parametrize("name", NAMES)
def test_a_path_that_is_a_template_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        check_literal_path(tmp_path / name / "results")
    line = str(refused.value)
    assert len(line.splitlines()) == 1 and line.isprintable()
    assert str(tmp_path) in line and "use a folder without %" in line


def test_every_sign_that_submitit_fills_in_is_refused(tmp_path: Path) -> None:
    """The check is about what submitit does today: it changes these, and leaves the others."""
    for name in ("10%tune", "a%jobs", r"a\b", "plain", "a b", "é", "a=b", "a{b}", "a$b"):
        folder = tmp_path / name
        paths = JobPaths(folder=folder, job_id="7", task_id=0)
        changes = paths.folder != folder or paths.stdout.parent != folder
        if changes:
            with pytest.raises(UserError):
                check_literal_path(folder)
        elif "%" not in name and "\\" not in name:
            check_literal_path(folder)


COMMANDS = (
    ["run", "digits", "-n"],
    ["plan", "--experiment", "digits"],
    ["doctor", "--experiment", "digits", "--no-job"],
    ["doctor", "--experiment", "digits"],
    ["resolve", "digits"],
)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("where", ["working folder", "storage"])
def test_commands_of_an_experiment_refuse_it(
    words: list[str],
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "10%tune"
    folder.mkdir()
    if where == "storage":
        monkeypatch.chdir(tmp_path)
        words = [*words, "--config", f"storage={folder}/results"]
    else:
        monkeypatch.chdir(folder)
    assert cli.main(words) == 2
    shown = capfd.readouterr().err
    # `plan` says first what it does.
    assert len(shown.splitlines()) == (2 if words[0] == "plan" else 1), shown
    assert f"{folder}/results" in shown and "would change '%'" in shown
    assert not list(folder.iterdir()) and {*tmp_path.iterdir()} == {folder}


def test_a_link_does_not_hide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "10%tune").mkdir()
    (tmp_path / "plain").symlink_to(tmp_path / "10%tune")
    monkeypatch.chdir(tmp_path / "plain")
    with pytest.raises(UserError, match="would change '%'"):
        check_working_folder()


@pytest.mark.parametrize("name", NAMES)
def test_no_job_is_launched_there_and_nothing_is_made(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="use a folder without %"):
        launch(Task("a:b"), tmp_path / name, Resources(), is_done=lambda: False, describe="")
    assert not list(tmp_path.iterdir())


def test_shards_are_not_staged_there(tmp_path: Path) -> None:
    storage = tmp_path / "10%tune"
    storage.mkdir()
    with pytest.raises(UserError, match="use a folder without %"):
        stage(tmp_path, str(storage))


def test_no_experiment_is_written_that_could_not_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"10%tune.*has '%'"):
        new_experiment(tmp_path, tmp_path / "10%tune.yaml", None, None)
    assert not list(tmp_path.iterdir())
