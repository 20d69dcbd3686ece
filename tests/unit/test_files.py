"""Files are complete or not there, and readable by those whom the umask lets."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from maect.core.errors import UserError
from maect.core.files import atomic_write, read_record, seek_record, write_json, write_record
from maect.records import (
    EvaluationRecord,
    RunRecord,
    checked_sha256,
    entries,
    line_of,
    lineage,
    need_encoder,
    of_seed,
    seed_of,
    seedless,
    weights_checksum,
)
from maect.train.run_folder import WRITER_LOCK


def test_a_failure_keeps_what_was_there(tmp_path):
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
def test_the_umask_counts_but_not_everybody_may_write(tmp_path, umask, file, folder):
    code = """
from pathlib import Path
from maect.core.context import Context
from maect.core.files import write_record
from maect.launch.owner import lock_folder
from maect.train.run_folder import RunLock
write_record("f/r.json", {})
RunLock(Path("f"), Context())
lock_folder(Path("f")).__enter__()
"""
    command = [sys.executable, "-P", "-c", f"import os; os.umask({umask}){code}"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert (tmp_path / "f/r.json").stat().st_mode & 0o777 == file
    assert (tmp_path / "f").stat().st_mode & 0o777 == folder
    # Whoever can open a lock can hold it: nobody but the group.
    for lock in ("owner.lock", WRITER_LOCK):
        assert (tmp_path / "f" / lock).stat().st_mode & 0o777 == file & 0o660


def test_a_log_that_a_kill_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert entries(path) == []
    text = "".join(line_of(step, {}, {"device_seconds": 1.0}) for step in range(100))
    path.write_text(text + '{"step": 10')
    assert [entry["step"] for entry in entries(path)] == list(range(100))
    two = len(text) // 100 * 2 + 20
    assert [entry["step"] for entry in entries(path, tail=two)] == [98, 99]
    for damaged in (b"7\n", b"[1]\n", b'{"step": "\xff"}\n'):
        path.write_bytes(text.encode()[: len(text) // 100] + damaged + b"\n")
        assert [entry["step"] for entry in entries(path)] == [0]


def test_a_log_of_an_earlier_version(tmp_path):
    """Each of its entries has a checksum of its own."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(line_of(1, {"loss": 2.0}, {"device_seconds": 1.0, "crc32": "89abcdef"}))
    entry = {"step": 1, "loss": 2.0, "timing": {"device_seconds": 1.0}}
    assert entries(path) == [entry]


def test_a_file_that_is_not_the_one_of_its_record(tmp_path):
    """The record of a run names its files; that of an evaluation lies beside its tensors."""
    encoder, tensors = tmp_path / "run/encoder.safetensors", tmp_path / "knn.safetensors"
    encoder.parent.mkdir()
    with pytest.raises(UserError, match=r"encoder\.safetensors: no such encoder"):
        need_encoder(encoder)
    for path in (encoder, tensors):
        with pytest.raises(UserError, match=rf"{path.name}: no such file"):
            checked_sha256(path)
        path.write_bytes(b"x")
    need_encoder(encoder)
    sha256 = checked_sha256(tensors)  # which no record promises
    files = {encoder.name: sha256, "head.safetensors": "0"}
    RunRecord(run="r", stage="tune", sha256=files).write(RunRecord.path(encoder.parent))
    EvaluationRecord(metrics={}, left_sha256=sha256).write(tensors.with_suffix(".json"))
    for path, record in ((encoder, r"run\.json"), (tensors, r"knn\.json")):
        assert checked_sha256(path) == sha256
        path.write_bytes(b"y")
        with pytest.raises(UserError, match=f"{path.name}: damaged .*{record}"):
            checked_sha256(path)


def test_other_weights_have_another_identity(tmp_path):
    weights = [{"a": "1", "b": "2"}, {"b": "2", "a": "1"}, {"a": "1", "b": "3"}, {"a": "1"}, {}]
    for number, sha256 in enumerate(weights):
        record = RunRecord(run="r", stage="tune", sha256=sha256)
        record.write(RunRecord.path(tmp_path / str(number)))
    first, again, *others = (weights_checksum(tmp_path / str(n)) for n in range(len(weights) + 1))
    assert first == again and None not in others[:2] and len({first, *others[:2]}) == 3
    assert others[2:] == [None, None]  # a run that left nothing, and one that is not finished


def test_runs_of_a_recipe_differ_in_their_seed_by_name():
    for name, seed in (("mae", 0), ("mae", 12), ("ct-small", 0), ("ct-s1-small", 3)):
        assert seedless(of_seed(name, seed)) == name and seed_of(of_seed(name, seed)) == seed
    assert [of_seed("mae", 0), of_seed("mae", 1)] == ["mae", "mae-s1"]


def test_what_a_run_comes_of_is_followed_once():
    sources = {"ct": "head", "head": "mae", "mae": None, "a": "b", "b": "a", "lost": "gone"}
    runs = {name: RunRecord(run=name, stage="tune", source=of) for name, of in sources.items()}
    for name, found in (("ct", ["ct", "head", "mae"]), ("a", ["a", "b"]), ("lost", ["lost"])):
        assert [run.run for run in lineage(name, runs.get)] == found
    assert list(lineage(None, runs.get)) == []


def test_a_record_has_a_format_and_another_one_is_refused(tmp_path, monkeypatch):
    path = RunRecord.path(tmp_path)
    write_record(path, {"a": 1})
    assert list(json.loads(path.read_text())) == ["format", "a", "checksum"]
    assert read_record(path) == {"a": 1}
    monkeypatch.setattr("maect.core.files.FORMAT", 2)
    write_record(path, {"a": 1})
    monkeypatch.undo()
    said = f"{path}: format 2, and this version of maect reads 1: use the version that wrote it"
    with pytest.raises(UserError, match=said):
        read_record(path)
    assert seek_record(path) == {}


def test_a_record_without_its_checksum_is_refused(tmp_path):
    """Written by hand, or cut by whoever edited it."""
    path = RunRecord.path(tmp_path)
    RunRecord(run="r", stage="tune", settings={"from": Path("a/b")}).write(path)
    assert RunRecord.of(tmp_path).settings == {"from": "a/b"}
    value = json.loads(path.read_text())
    faults = {"checksum": "it has no checksum", "run": "its checksum differs"}
    for left_out, fault in faults.items():
        write_json(path, {key: value[key] for key in value if key != left_out})
        with pytest.raises(UserError, match=rf"{path}: damaged \({fault}\); delete it and start"):
            RunRecord.of(tmp_path)
        assert RunRecord.find(tmp_path) is None and seek_record(path) == {}
    write_record(path, {"run": "r"})  # what is needed is not there
    with pytest.raises(UserError, match=rf"{path}: stage: .*remove the file"):
        RunRecord.of(tmp_path)
    assert RunRecord.find(tmp_path) is None is RunRecord.find(tmp_path / "none")
