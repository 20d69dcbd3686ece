"""A run whose states are gone ends in a line, and keeps what says so."""

from pathlib import Path
from typing import Any

import pytest
from ranks import run

from maect.core.errors import UserError
from maect.core.files import write_record
from maect.records import RunRecord
from maect.tools import clean
from maect.tools.train import _as_saved
from maect.train.run_folder import check_not_lost, read_notes, remove_states


@pytest.fixture
def purged(half: dict[str, Any]) -> dict[str, Any]:
    """Arguments of that run, without the files of its states."""
    for path in (Path(half["folder"]) / "state").rglob("*"):
        if path.is_file():
            path.unlink()
    return half


def entries(folder: Path) -> int:
    return len((folder / "metrics.jsonl").read_text().splitlines())


def test_a_purge_took_the_states(purged, tmp_path):
    """Audit 5: all files below `state` are gone, and the run says that it saved one."""
    folder = Path(purged["folder"])
    ended = run(1, purged, log=tmp_path / "log")
    assert ended.startswith("UserError") and str(folder / "state") in ended
    assert "step 3" in ended and "recipe.json" in ended and "\n" not in ended
    assert entries(folder) == 3 and read_notes(folder)["saved"] == 3


def test_a_damaged_recipe(half, tmp_path):
    """Its cure was to delete it, which was refused next, and then to delete the log."""
    folder = Path(half["folder"])
    recipe = folder / "recipe.json"
    recipe.write_text(recipe.read_text().replace('"stage"', '"stags"'))
    said = run(1, half, log=tmp_path / "log")
    assert "recipe.json: damaged" in said and "move recipe.json and metrics.jsonl away" in said
    for name in ("recipe.json", "metrics.jsonl"):
        (folder / name).rename(tmp_path / name)
    assert run(1, half, log=tmp_path / "log", stop_at=5) == ["requeue"]
    assert entries(folder) == 2, "it went on at the third step"


def test_it_ends_before_it_queues(purged):
    """Audit 5: the command itself ends; no job waits for a node to find it out."""
    with pytest.raises(UserError, match="no state"):
        _as_saved(Path(purged["folder"]), 1, 1, "1")


def test_a_kill_before_the_first_save(stopped, tmp_path):
    """Control: a run that has a log and saved nothing begins anew by itself."""
    told = stopped[1]("mae", "mae", folder=tmp_path / "runs")
    with pytest.raises(RuntimeError):
        run(1, told, log=tmp_path / "log", kill_at=2)
    assert entries(tmp_path / "runs/mae") and "saved" not in read_notes(tmp_path / "runs/mae")
    assert run(1, told, log=tmp_path / "log", stop_at=1) == ["requeue"]


@pytest.mark.parametrize("how", ["the training itself", "maect clean"])
def test_states_that_were_removed_on_purpose(tmp_path, how):
    """Control: a finished run whose states maect has removed may be trained again."""
    folder = tmp_path / "runs/mae"
    (folder / "state/step-000000003").mkdir(parents=True)
    (folder / "state/step-000000003/state.json").write_text("{}")
    write_record(folder / "recipe.json", {"fingerprint": "f", "saved": 3})
    write_record(RunRecord.path(folder), {"run": "r", "stage": "tune"})
    if how == "maect clean":
        clean.clean(tmp_path, remove=True)
    else:
        remove_states(folder)
    assert not (folder / "state").exists() and read_notes(folder) == {"fingerprint": "f"}
    check_not_lost(folder)
