"""A folder whose path submitit or sbatch would read as a template is refused, in one line.

submitit fills `%t`, `%j` and `%a` in the whole path of its folder: from `/scratch/10%tune` it wrote
and executed pickles in `/scratch/100une`, which any user could own.
"""

import pytest

from maect import cli
from maect.core.errors import UserError
from maect.core.files import check_literal_path
from maect.core.owners import check_working_folder
from maect.data.staging import stage
from maect.launch import Resources, Task, launch
from maect.tools.new_experiment import new_experiment

NAMES = ("10%tune", "5%accuracy", "b%uv", r"a\b", "a\nb", "a\x7fb")


@pytest.mark.parametrize("name", NAMES)
def test_a_path_that_is_a_template_is_refused_in_one_line(name, tmp_path):
    """By the check, by a launch and by staging, and nothing is made."""
    storage = tmp_path / name
    storage.mkdir()
    calls = (
        lambda: check_literal_path(storage / "results"),
        lambda: launch(Task("a:b"), storage, Resources(), is_done=bool, describe=""),
        lambda: stage(tmp_path, str(storage)),
    )
    for call in calls:
        with pytest.raises(UserError, match="use a folder without %") as refused:
            call()
        line = str(refused.value)
        assert len(line.splitlines()) == 1 and line.isprintable() and str(tmp_path) in line
    assert not list(storage.iterdir())


COMMANDS = {
    "run digits -n": "storage",
    "plan --experiment digits": "working folder",
    "doctor --experiment digits": "storage",
    "resolve digits": "working folder",
}


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_of_an_experiment_refuse_it(words, tmp_path, monkeypatch, capfd):
    folder = tmp_path / "10%tune"
    folder.mkdir()
    in_storage = COMMANDS[words] == "storage"
    monkeypatch.chdir(tmp_path if in_storage else folder)
    given = ["--config", f"storage={folder}/results"] if in_storage else []
    assert cli.main([*words.split(), *given]) == 2
    shown = capfd.readouterr().err
    # `plan` says first what it does.
    assert len(shown.splitlines()) == (2 if words.startswith("plan") else 1), shown
    assert f"{folder}/results" in shown and "would change '%'" in shown
    assert not list(folder.iterdir()) and {*tmp_path.iterdir()} == {folder}


def test_a_link_does_not_hide_it(tmp_path, monkeypatch):
    (tmp_path / "10%tune").mkdir()
    (tmp_path / "plain").symlink_to(tmp_path / "10%tune")
    monkeypatch.chdir(tmp_path / "plain")
    with pytest.raises(UserError, match="would change '%'"):
        check_working_folder()


def test_no_experiment_is_written_that_could_not_run(tmp_path):
    with pytest.raises(UserError, match=r"10%tune.*has '%'"):
        new_experiment(tmp_path, tmp_path / "10%tune.yaml", None, None)
    assert not list(tmp_path.iterdir())
