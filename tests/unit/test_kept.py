"""Second names of what Snakemake deletes before a job can look at it."""

from pathlib import Path

from maect.core.kept import FOLDER, forget, keep, kept, put_back


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
    keep(paths)  # killed before its record was written
    assert (tmp_path / FOLDER / "weights").read_text() == "first"
    made(tmp_path, "second")
    keep(paths)
    assert (tmp_path / FOLDER / "weights").read_text() == "second"


def test_nothing_kept(tmp_path: Path) -> None:
    put_back([tmp_path / "weights"], lambda: True)
    assert kept(tmp_path) == [] and not list(tmp_path.iterdir())
