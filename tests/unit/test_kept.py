"""Second names of what Snakemake deletes before a job can look at it."""

from pathlib import Path

import pytest

from maect.core.errors import UserError
from maect.core.files import write_record
from maect.core.kept import (
    backup_of,
    forget,
    keep,
    kept,
    need_encoder,
    put_back,
    restore,
    set_aside,
    standing,
    tidy,
)
from maect.records import RunRecord
from maect.tools.status import status


def made(folder: Path, text: str = "first") -> list[Path]:
    paths = [folder / "weights", folder / "record"]
    for path in paths:
        path.write_text(text)
    return paths


def test_deleted_and_put_back(tmp_path: Path) -> None:
    paths = made(tmp_path)
    nodes = [path.stat().st_ino for path in paths]
    keep(paths)
    for path in paths:
        path.unlink()
    put_back(paths, lambda: paths[1].read_text() == "another")
    assert not any(path.exists() for path in paths) and kept(tmp_path) == sorted(paths)
    put_back(paths, lambda: paths[1].read_text() == "first")
    assert [path.stat().st_ino for path in paths] == nodes
    forget(paths)
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    forget(paths)


def test_only_a_whole_set_is_kept(tmp_path: Path) -> None:
    paths = made(tmp_path)
    keep(paths)
    paths[1].unlink()
    paths[0].unlink()
    paths[0].write_text("half of a second one")
    assert not keep(paths)  # killed before its record was written
    assert backup_of(paths[0]).read_text() == "first"
    made(tmp_path, "second")
    assert keep(paths)
    assert backup_of(paths[0]).read_text() == "second"


def test_a_file_system_without_links_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("not supported")

    monkeypatch.setattr("maect.core.kept.os.link", refuse)
    assert not keep(made(tmp_path)) and kept(tmp_path) == []


def test_nothing_kept(tmp_path: Path) -> None:
    put_back([tmp_path / "weights"], lambda: True)
    assert kept(tmp_path) == [] and not list(tmp_path.iterdir())


def test_what_is_damaged_is_not_put_back_for_ever(tmp_path: Path) -> None:
    paths = made(tmp_path)
    keep(paths)
    for path in paths:
        path.unlink()

    def asked() -> bool:
        raise UserError("damaged; delete it and start again: it is made again")

    put_back(paths, asked)
    assert not list(tmp_path.iterdir())


def test_what_was_not_deleted_has_one_name_again(tmp_path: Path) -> None:
    folder = tmp_path / "evaluations" / "mae"
    folder.mkdir(parents=True)
    paths = made(folder)
    keep(paths)
    paths[1].unlink()
    tidy(tmp_path)
    assert sorted(folder.iterdir()) == [backup_of(paths[1]), paths[0]]
    put_back(paths[1:], lambda: True)
    tidy(tmp_path)
    assert sorted(folder.iterdir()) == sorted(paths)


def test_what_a_job_writes_meanwhile_stays(tmp_path: Path) -> None:
    paths = made(tmp_path)
    keep(paths)
    for path in paths:
        path.unlink()

    def written() -> bool:
        paths[1].unlink()
        paths[1].write_text("new")
        return False

    put_back(paths, written)
    assert not paths[0].exists() and paths[1].read_text() == "new"


def test_nothing_is_put_back_beside_what_was_written_since(tmp_path: Path) -> None:
    """A job of other settings was killed between two of its files."""
    paths = made(tmp_path)
    keep(paths)
    for path in paths:
        path.unlink()
    paths[0].write_text("other settings")
    put_back(paths, lambda: True)
    assert paths[0].read_text() == "other settings" and not paths[1].exists()


def test_a_file_that_was_never_kept_may_be_there(tmp_path: Path) -> None:
    """Snakemake knows of the outputs that all runs of a stage leave, and deletes those."""
    paths = made(tmp_path)
    beside = tmp_path / "head"
    beside.write_text("first")
    keep(paths)
    for path in paths:
        path.unlink()
    put_back([*paths, beside], lambda: True)
    assert all(path.read_text() == "first" for path in [*paths, beside])


def finished_run(root: Path, made: str = "a", begun: str = "a") -> list[Path]:
    """Encoder and record of a run, made by one recipe where another may have begun since."""
    run = root / "runs/ct_min_tiny"
    run.mkdir(parents=True)
    write_record(run / "recipe.json", {"fingerprint": begun})
    paths = [run / "encoder.safetensors", RunRecord.path(run)]
    paths[0].write_text("weights")
    write_record(paths[1], {"run": "r", "stage": "tune", "fingerprint": made})
    return paths


def test_readers_know_what_was_put_aside(tmp_path: Path) -> None:
    paths = finished_run(tmp_path)
    run = paths[0].parent
    with pytest.raises(UserError, match="train or import the run first"):
        need_encoder(run / "head.safetensors")
    with pytest.raises(UserError, match="ct_min_tini: no such run; did you mean 'ct_min_tiny'"):
        need_encoder(run.parent / "ct_min_tini/encoder.safetensors")
    keep(paths)
    for path in paths:
        path.unlink()
    assert RunRecord.read(standing(paths[1])).fingerprint == "a"
    (line,) = status(tmp_path)[1]
    assert (line.name, line.stage, line.state) == ("ct_min_tiny", "tune", "done")
    need_encoder(paths[0])
    assert paths[0].read_text() == "weights" and paths[1].exists()


def test_a_reader_of_somebody_elses_folder_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = finished_run(tmp_path)
    keep(paths)
    for path in paths:
        path.unlink()

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("maect.core.kept.os.link", refuse)
    with pytest.raises(UserError, match="put aside by its pipeline"):
        need_encoder(paths[0])


def test_what_no_job_looked_at_is_restored(tmp_path: Path) -> None:
    """Each evaluation by itself; not what another one has been written beside."""
    run = finished_run(tmp_path)
    folder = tmp_path / "evaluations/ct_min_tiny"
    folder.mkdir(parents=True)
    names = ("knn.json", "umap.json", "umap.safetensors", "explore.json", "explore.safetensors")
    results = [folder / name for name in names]
    for path in results:
        path.write_text("first")
    for paths in (run, results[:1], results[1:3], results[3:]):
        keep(paths)
        for path in paths:
            path.unlink()
    results[4].write_text("of other settings")
    restore(tmp_path)
    assert [path.exists() for path in results] == [True, True, True, False, True]
    assert results[4].read_text() == "of other settings"
    assert all(path.exists() for path in run)
    tidy(tmp_path)
    assert kept(run[0].parent) == [] and kept(folder) == sorted(results[3:])


def test_a_training_by_another_recipe_keeps_its_folder(tmp_path: Path) -> None:
    paths = finished_run(tmp_path, begun="b")
    keep(paths)
    for path in paths:
        path.unlink()
    restore(tmp_path)
    assert not any(path.exists() for path in paths) and len(kept(paths[0].parent)) == 2


def test_weights_are_set_aside_before_a_forced_training(tmp_path: Path) -> None:
    paths = made(tmp_path)
    for _ in range(2):
        set_aside([*paths, tmp_path / "head"])
    for path in paths:
        path.unlink()
    kept = tmp_path / "before-forcerun"
    assert sorted(path.name for path in kept.iterdir()) == sorted(path.name for path in paths)
    assert all((kept / path.name).read_text() == "first" for path in paths)
