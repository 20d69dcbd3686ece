"""`maect clean`: what may go, and what has to stay."""

import shutil
from pathlib import Path

import pytest

from maect import cli, tools
from maect.core.errors import UserError
from maect.core.files import RUN, sha256_file, write_record
from maect.experiment import load
from maect.experiment.start import PendingJob, prepare
from maect.launch.record import Job, write_job
from maect.records import RunRecord
from maect.tools.clean import clean
from maect.train.run_folder import remove_states, replaced


def training(root: Path, name: str, finished: bool = True) -> Path:
    folder = root / "runs" / name
    for state in ("state/step-000000002", "stale-abc/state/step-000000001"):
        (folder / state).mkdir(parents=True)
        (folder / state / "rank-0000.safetensors").write_bytes(bytes(1000))
    if finished:
        encoder = folder / "encoder.safetensors"
        encoder.write_bytes(b"weights")
        files = {encoder.name: sha256_file(encoder)}
        record = RunRecord(run="a", stage="tune", files=tuple(files), sha256=files)
        record.write(RunRecord.path(folder))
    return folder


def test_only_what_no_resume_needs_is_removed(tmp_path, capsys):
    done, stopped = training(tmp_path, "mae"), training(tmp_path, "ct_min", finished=False)
    damaged = training(tmp_path, "head_min")
    write_record(done / "recipe.json", {"fingerprint": "before"})
    kept = "since it was trained; what it left is kept in stale-before"
    assert kept in str(replaced(done, "now"))
    (damaged / "encoder.safetensors").write_bytes(b"weighty")
    clean(tmp_path, remove=False)
    told = capsys.readouterr().out
    assert "1 kB can be freed: the same command with --remove" in told
    assert "ct_min/state  stays: its training is not finished" in told
    assert "head_min/state  stays: what it left is damaged" in told
    assert (done / "state").exists()
    assert cli.main(["clean", str(tmp_path), "--remove"]) == 0
    assert "1 kB freed" in capsys.readouterr().out
    assert not (done / "state").exists() and (done / "encoder.safetensors").exists()
    assert kept in str(replaced(done, "now"))
    for folder in (stopped, damaged):
        assert (folder / "state").exists() and (folder / "stale-abc").exists()
    clean(tmp_path, remove=False)
    assert "nothing can be freed" in capsys.readouterr().out


def test_what_another_recipe_left_stays_unless_it_is_finished(tmp_path, capsys):
    run = training(tmp_path, "mae")
    aside = run / "stale-abc"
    (aside / "metrics.jsonl").write_text("{}")
    record = RunRecord.path(run).read_text()
    for file in (None, RUN):  # and what that promises is gone
        if file:
            (aside / file).write_text(record)
        clean(tmp_path, remove=True)
        assert f"if it may be lost: rm -r {aside}" in capsys.readouterr().out
        assert (aside / "state").exists() and not (run / "state").exists()
    # Its encoder lies beside it: its state goes, that and its logs stay.
    shutil.copy(run / "encoder.safetensors", aside)
    clean(tmp_path, remove=True)
    assert "1 kB freed" in capsys.readouterr().out
    left = ["encoder.safetensors", "metrics.jsonl", RUN]
    assert sorted(path.name for path in aside.iterdir()) == left


def test_the_states_of_a_job_that_may_run_stay(tmp_path, capsys, monkeypatch):
    """Its recipe changed: what is finished there is the other one's until the job begins.

    It is submitted while all weights are read, which takes long.
    """
    run = training(tmp_path, "mae")
    job = Job("slurm", "maect-mae-1", 1, state="submitted", id="7")
    monkeypatch.setattr(tools.clean, "check_weights", lambda run: write_job(run, job))
    clean(tmp_path, remove=True)
    monkeypatch.undo()
    assert "mae/state  stays: slurm job 7 may still write it" in capsys.readouterr().out
    job.state = "ended"
    write_job(run, job)
    clean(tmp_path, remove=True)
    assert not (run / "state").exists()


def test_a_training_without_states_is_not_begun_anew_by_force(tmp_path, capsys):
    found = load("digits", storage=str(tmp_path))
    run = training(tmp_path, "mae_tiny")
    forced = PendingJob("pretrain", {"run": "mae_tiny"}, [], None, forced=True)
    remove_states(run)
    prepare(found, [forced])
    assert "mae_tiny: has no state to go on from" in capsys.readouterr().err
    assert RunRecord.path(run).exists()
    write_record(run / "state/step-000000002/state.json", {"step": 2})
    prepare(found, [forced])
    assert not RunRecord.path(run).exists()


def test_a_folder_without_runs(tmp_path):
    with pytest.raises(UserError, match="no runs there"):
        clean(tmp_path, remove=False)
