"""Files are complete or not there, and readable by those whom the umask lets."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from maect.core.entries import entries, finished_entries, line_of
from maect.core.errors import UserError
from maect.core.files import atomic_write, read_record, seek_record, write_json, write_record
from maect.records import RunRecord, checked_sha256


def test_a_failure_keeps_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(RuntimeError), atomic_write(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("umask", "file", "folder"),
    [(0o000, 0o664, 0o775), (0o022, 0o644, 0o755), (0o007, 0o660, 0o770)],
)
def test_the_umask_counts_but_not_everybody_may_write(
    tmp_path: Path, umask: int, file: int, folder: int
) -> None:
    code = "from maect.core.files import write_record; write_record('f/r.json', {})"
    command = [sys.executable, "-P", "-c", f"import os; os.umask({umask}); {code}"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert (tmp_path / "f/r.json").stat().st_mode & 0o777 == file
    assert (tmp_path / "f").stat().st_mode & 0o777 == folder


def test_a_log_that_a_kill_cut_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    assert entries(path) == []
    text = "".join(line_of(step, {}, {"device_seconds": 1.0}) for step in range(100))
    path.write_text(text + '{"step": 10')
    assert [entry["step"] for entry in entries(path)] == list(range(100))
    two = len(text) // 100 * 2 + 20
    assert [entry["step"] for entry in entries(path, tail=two)] == [98, 99]
    assert not caplog.text
    with pytest.raises(UserError, match=r"metrics\.jsonl:101: damaged"):
        finished_entries(tmp_path, {})
    for damaged in (b"7\n", b"[1]\n", b'{"step": "\xff"}\n', b"[" * 30_000 + b"\n"):
        path.write_bytes(text.encode()[: len(text) // 100] + damaged + b"\n")
        assert [entry["step"] for entry in entries(path)] == [0]
        assert f"{path}: damaged: left out: lines 2" in caplog.text


def test_a_file_that_is_not_the_one_of_its_run(tmp_path: Path) -> None:
    path = tmp_path / "encoder.safetensors"
    with pytest.raises(UserError, match="no such file"):
        checked_sha256(path)
    path.write_bytes(b"x")
    write_record(
        RunRecord.path(tmp_path),
        {"run": "r", "stage": "tune", "sha256": {path.name: checked_sha256(path)}},
    )
    path.write_bytes(b"y")
    with pytest.raises(UserError, match="damaged"):
        checked_sha256(path)


def test_a_record_has_a_format_and_another_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = RunRecord.path(tmp_path)
    write_record(path, {"a": 1})
    assert list(json.loads(path.read_text())) == ["format", "a", "checksum"]
    assert read_record(path) == {"a": 1}
    monkeypatch.setattr("maect.core.files.FORMAT", 2)
    write_record(path, {"a": 1})
    monkeypatch.undo()
    with pytest.raises(UserError) as refused:
        read_record(path)
    assert str(refused.value) == (
        f"{path}: format 2, and this version of maect reads 1: use the version that wrote it, or "
        "delete it and start again"
    )
    assert seek_record(path) == {}


def test_a_record_without_its_checksum_is_refused(tmp_path: Path) -> None:
    """Written by hand, or cut by whoever edited it."""
    path = RunRecord.path(tmp_path)
    RunRecord(run="r", stage="tune").write(path)
    assert RunRecord.of(tmp_path).run == "r"
    value = json.loads(path.read_text())
    for left_out in ("checksum", "run"):
        write_json(path, {key: value[key] for key in value if key != left_out})
        fault = "it has no checksum" if left_out == "checksum" else "its checksum differs"
        with pytest.raises(UserError) as refused:
            RunRecord.of(tmp_path)
        assert str(refused.value) == (
            f"{path}: damaged ({fault}); delete it and start again: it is made again"
        )
        assert RunRecord.find(tmp_path) is None and seek_record(path) == {}
