"""A stamp says what a result was made by and of: checksums decide, and a folder may be moved."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from test_experiment import write

from maect.core.files import read_record
from maect.core.settings import LocalPath
from maect.core.stamps import StampedFile, file_checksum, is_current, stamp_path, stamped
from maect.experiment import load
from maect.experiment.pipeline import Asked
from maect.experiment.resolve import run_config, stamp_of, targets


class Copy(StampedFile):
    """Settings of a job that copies a text."""

    times: int = 1
    source: LocalPath

    def made_of(self) -> Mapping[Path, str | None]:
        """Return the checksum of the text."""
        return {self.source: file_checksum(self.source)}

    def result(self, path: Path) -> str | None:
        """Return the checksum of the copy."""
        return file_checksum(path.with_suffix(".txt"))


def job(folder: Path, times: int = 1) -> tuple[Path, Copy]:
    """Resolved file of a job, and its content; its input is there."""
    folder.mkdir(parents=True, exist_ok=True)
    config = Copy(times=times, source=folder / "source.txt")
    if not config.source.exists():
        config.source.write_text("text")
    return folder / "copy.yaml", config


def finish(path: Path, config: Copy) -> None:
    with stamped(path, config):
        path.with_suffix(".txt").write_text(config.source.read_text() * config.times)


def test_a_job_is_finished_once_its_stamp_is_there(tmp_path):
    path, config = job(tmp_path)
    assert not is_current(path, config)
    with pytest.raises(ZeroDivisionError), stamped(path, config):
        raise ZeroDivisionError
    assert not stamp_path(path).exists()
    finish(path, config)
    assert is_current(path, config)
    before = stamp_path(path).read_bytes()
    finish(path, config)
    assert stamp_path(path).read_bytes() == before, "nothing in it depends on when"


@pytest.mark.parametrize("seconds", [-9999, 9999])
def test_checksums_decide_and_not_times(tmp_path, seconds):
    path, config = job(tmp_path)
    finish(path, config)
    time = stamp_path(path).stat().st_mtime + seconds
    for file in (config.source, path.with_suffix(".txt")):
        os.utime(file, (time, time))
    assert is_current(path, config)
    for file, text in ((config.source, "next"), (path.with_suffix(".txt"), "next")):
        kept = file.read_text()
        file.write_text(text)
        os.utime(file, (time + 1, time + 1))
        assert not is_current(path, config), file
        file.write_text(kept)
    assert is_current(path, config)
    assert not is_current(*job(tmp_path, times=2))


def test_inputs_are_those_of_when_the_job_began(tmp_path):
    path, config = job(tmp_path)
    with stamped(path, config):
        path.with_suffix(".txt").write_text(config.source.read_text())
        config.source.write_text("replaced meanwhile")
    assert not is_current(path, config)


def test_what_is_gone_is_no_difference_but_the_result(tmp_path):
    path, config = job(tmp_path)
    finish(path, config)
    config.source.unlink()
    assert is_current(path, config)
    path.with_suffix(".txt").unlink()
    assert not is_current(path, config)


def test_a_folder_may_be_moved(tmp_path):
    finish(*job(tmp_path / "before"))
    (tmp_path / "before").rename(tmp_path / "after")
    path, config = job(tmp_path / "after")
    assert is_current(path, config)
    config.source.write_text("other")
    assert not is_current(path, config)


def test_a_stamp_names_what_it_is_of(tmp_path):
    path, config = job(tmp_path)
    finish(path, config)
    assert read_record(stamp_path(path)) == {
        "asked": config.digest,
        "result": file_checksum(path.with_suffix(".txt")),
        "made_of": {"source.txt": file_checksum(config.source)},
    }
    names = ("runs/mae/config.yaml", "evaluations/mae/knn.on.birds.yaml", "tables/x.yaml")
    stamps = ["runs/mae/done", "evaluations/mae/knn.on.birds.done", "tables/x.done"]
    assert [str(stamp_path(Path(name))) for name in names] == stamps


@pytest.mark.parametrize(
    ("file", "stamp"),
    [
        ("runs/mae_tiny/encoder.safetensors", "runs/mae_tiny/done"),
        ("evaluations/mae_tiny/knn.json", "evaluations/mae_tiny/knn.done"),
        ("features/mae_tiny/mine-val.safetensors", "features/mae_tiny/mine-val.done"),
        ("features/mae_tiny/mine-val.last_2.safetensors", "features/mae_tiny/mine-val.last_2.done"),
        ("shards/mine/train/index.json", "shards/mine/train/done"),
        ("report.html", "report.html"),
    ],
)
def test_a_result_is_asked_for_by_its_name(tmp_path, file, stamp):
    found = load(write(tmp_path, storage=str(tmp_path / "results")))
    assert stamp_of(found, found.root / file) == found.root / stamp
    index = tmp_path / "other/shards/mine/train/index.json"
    assert stamp_of(found, index) == index, "of another experiment"
    asked, other = f"{found.root}/{file}", f"{tmp_path}/elsewhere/{file}"
    expected = ["-n", f"{found.root}/{stamp}", other, "knn"]
    assert targets(found, ["-n", asked, other, "knn"]) == expected


def test_a_resolved_file_that_is_to_be_written_is_newer_than_all_stamps(tmp_path):
    found = load(write(tmp_path, storage=str(tmp_path / "results")))
    path = found.folder("mae_tiny") / "config.yaml"
    job = "pretrain", path, {"run": "mae_tiny"}
    asked = Asked(found)  # the newer file is there as long as this
    newer = asked.file(*job)
    assert newer != path and newer.exists() and not path.exists()
    config = run_config(found, "mae_tiny")
    for seed in (1, 0):
        config.model_copy(update={"seed": seed}).write(path)
        asked = Asked(found)
        is_asked = asked.file(*job) == path
        assert is_asked == (seed == 0), "without a stamp it runs if it has changed or is read"
    stamp_path(path).touch()
    for ahead in (-180, 180):  # seconds of a file server's clock: what it dates next is newer still
        dated = time.time() + ahead
        for each in found.root.rglob("*"):
            os.utime(each, (dated, dated))
        asked = Asked(found)
        newer = asked.file(*job)
        assert newer != path and dated < newer.stat().st_mtime < dated + 0.1
