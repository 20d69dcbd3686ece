"""A folder whose path submitit or sbatch would read as a template is refused, in one line.

submitit fills `%t`, `%j` and `%a` in the whole path of its folder: from `/scratch/10%tune` it wrote
and executed pickles in `/scratch/100une`, which any user could own.
"""

import pytest

from maect import cli
from maect.core.errors import UserError
from maect.core.files import check_literal_path
from maect.data.staging import stage
from maect.launch import Resources, Task, launch
from maect.tools.new_experiment import new_experiment

NAMES = ("10%tune", "5%accuracy", "b%uv", r"a\b", "a\nb", "a\x7fb")


@pytest.mark.parametrize("name", NAMES)
def test_a_path_that_is_a_template_is_refused_in_one_line(name, tmp_path):
    """By the check, by a launch and by staging; for an experiment's file; and nothing is made."""
    storage = tmp_path / name
    storage.mkdir()
    for call, words in (
        (lambda: check_literal_path(storage / "results"), "use a folder without %"),
        (lambda: launch(Task("a:b"), storage, Resources(), is_done=bool, describe=""), "without %"),
        (lambda: stage(tmp_path, str(storage)), "use a folder without %"),
        (lambda: new_experiment(tmp_path, tmp_path / "10%tune.yaml", None, None), "has '%'"),
    ):
        with pytest.raises(UserError, match=words) as refused:
            call()
        line = str(refused.value)
        assert len(line.splitlines()) == 1 and line.isprintable()
    assert not list(storage.iterdir()) and list(tmp_path.iterdir()) == [storage]


@pytest.mark.parametrize(
    ("words", "stand"),
    [
        ("run digits -n --config storage=10%tune/results", "."),
        ("doctor --experiment digits --config storage=10%tune/results", "."),
        ("run digits -n --config storage=results", "link"),  # the working folder itself
        ("plan --experiment digits", "10%tune"),
        ("resolve digits", "10%tune"),
    ],
)
def test_commands_of_an_experiment_refuse_it(words, stand, tmp_path, monkeypatch, capfd):
    """As storage and as the working folder, which a link does not hide."""
    folder = tmp_path / "10%tune"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path / stand)
    assert cli.main(words.replace("=", f"={tmp_path}/").split()) == 2
    shown = capfd.readouterr().err
    # `plan` says first what it does.
    assert len(shown.splitlines()) == (2 if words.startswith("plan") else 1), shown
    assert str(folder) in shown and "would change '%'" in shown
    assert not list(folder.iterdir()) and {*tmp_path.iterdir()} == {folder, tmp_path / "link"}
