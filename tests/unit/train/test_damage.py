"""What decides how a run goes on is damaged, another run's, or refused by the file system."""

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Place

from maect.core.errors import UserError
from maect.core.files import sha256_file, write_record
from maect.records import RunRecord, entries
from maect.train import checkpoint
from maect.train.checkpoint import (
    Saver,
    StateReader,
    check_files,
    complete_states,
    find_state,
    remove_incomplete,
    state_record,
)
from maect.train.metrics import Metrics
from maect.train.run_folder import RunLock, check_not_lost, check_weights, read_notes

CPU = torch.device("cpu")


def saver_of(run: Path, resumed: int | None = None) -> Saver:
    """Of one rank that has just taken the run over."""
    place = Place(0, 0, 1)
    return Saver(run, place, RunLock(run, place), resumed)


def save(run: Path, step: int, **record: object) -> Path:
    """The state of a step of the run "ours"."""
    saver = saver_of(run)
    saver.save(step, {"param|0|w": torch.full([4], float(step))}, {"fingerprint": "ours"} | record)
    saver.wait()
    assert saver.error is None
    return run / "state" / f"step-{step:09d}"


def find(run: Path) -> StateReader | None:
    return find_state(run / "state", "ours", Place(0, 0, 1), False, CPU)


def steps(run: Path) -> list[int]:
    return [int(state.name[5:]) for state in complete_states(run / "state")]


def test_no_bit_of_a_record_changes_what_is_read(tmp_path):
    state = save(tmp_path, 36)
    file, whole = state / "state.json", (state / "state.json").read_bytes()
    record = state_record(state, "ours")
    refused = 0
    for place in range(len(whole)):
        for bit in (1, 4, 32):
            damaged = whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :]
            file.write_bytes(damaged)
            try:
                assert state_record(state, "ours") == record  # a space more or less
            except UserError as error:
                refused += 1
                assert str(error).startswith(f"{file}: damaged (") and "\n" not in str(error)
    assert refused > len(whole)


def test_a_record_that_says_something_else_is_refused(tmp_path):
    state = save(tmp_path, 36)
    record = state_record(state, "ours")
    assert record["world_size"] == 1 and [*record["files"]] == ["rank-0000"]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"step": 37}, r"damaged \(it says step 37\)"),
        ({"fingerprint": "theirs"}, "the state of another run"),
    ]
    for key, value in (("step", "36"), ("world_size", "1"), ("files", {}), ("files", ["a"])):
        wrong.append(({key: value}, "damaged"))
    for change, fault in wrong:
        write_record(state / "state.json", record | change)
        with pytest.raises(UserError, match=rf"state\.json: {fault}"):
            state_record(state, "ours")
    with pytest.raises(UserError, match="no such file"):
        state_record(tmp_path / "state" / "step-000000099", "ours")


def test_a_state_of_other_ranks_is_resumed_from_only_when_told(tmp_path, caplog):
    state = save(tmp_path, 5)
    write_record(state / "state.json", state_record(state, "ours") | {"world_size": 2})
    with pytest.raises(UserError, match=r"2 ranks to 1.*--convert-world-size"):
        find(tmp_path)
    with caplog.at_level("INFO"):
        reader = find_state(tmp_path / "state", "ours", Place(0, 0, 1), True, CPU)
    assert reader is not None and reader.step == 5
    assert f"{state}: converted from 2 ranks to 1" in caplog.text


def test_each_rank_checks_its_share_of_the_files(tmp_path):
    state = save(tmp_path, 5)
    sha256 = sha256_file(state / "rank-0000.safetensors")
    record = {"files": {f"rank-{rank:04d}": sha256 for rank in range(3)}}
    check_files(state, record, 0, 3)
    for rank, ranks in ((1, 3), (2, 3), (0, 2)):
        with pytest.raises(UserError, match="no such file"):
            check_files(state, record, rank, ranks)


def test_a_file_that_is_cut_is_named(tmp_path):
    state = save(tmp_path, 5)
    file = state / "rank-0000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"rank-0000\.safetensors: damaged state"):
        StateReader(state, state_record(state, "ours"))


def test_the_state_that_a_run_resumed_from_is_not_written_again(tmp_path):
    state = save(tmp_path, 5)
    assert read_notes(tmp_path)["saved"] == 5  # if it is lost, nothing begins anew
    written = (state / "state.json").stat().st_ino
    saver, saved = saver_of(tmp_path, resumed=5), list[int]()
    saver.context.saved = saved.append  # type: ignore[method-assign]
    for step in (5, 6):
        saver.save(step, {"param|0|w": torch.zeros(4)}, {"fingerprint": "ours"})
        saver.wait()
    assert saved == [5, 6] == steps(tmp_path)[::-1]
    assert (state / "state.json").stat().st_ino == written


def test_what_an_interrupted_save_left_is_removed(tmp_path):
    save(tmp_path, 5)
    for name in ("step-000000009", "damaged-step-000000003"):
        (tmp_path / "state" / name).mkdir()
    remove_incomplete(tmp_path / "state")
    left = {path.name for path in (tmp_path / "state").iterdir()}
    assert left == {"step-000000005", "damaged-step-000000003"}


def test_a_rank_that_never_writes_is_not_waited_for_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_WAIT_FOR_RANKS", 0.1)
    place = Place(0, 0, 2)
    saver = Saver(tmp_path, place, RunLock(tmp_path, place))
    saver.save(5, {"param|0|w": torch.zeros(4)}, {"fingerprint": "ours"})
    saver.wait()
    assert saver.error is not None and "rank 1 did not write its part" in saver.error
    assert not (tmp_path / "state/step-000000005").exists()
    other = Saver(tmp_path, Place(1, 1, 2), None)
    other.save(5, {"param|1|w": torch.zeros(4)}, {"fingerprint": "ours"})
    other.wait()
    assert other.error is None and read_notes(tmp_path) == {}  # rank 0 alone writes them


def test_damaged_state_is_set_aside_and_does_not_push_out_new_ones(tmp_path):
    save(tmp_path, 5)
    newest = save(tmp_path, 9)
    (newest / "rank-0000.safetensors").write_bytes(b"damaged")
    reader = find(tmp_path)
    assert reader is not None and reader.step == 5
    assert (tmp_path / "state/damaged-step-000000009/rank-0000.safetensors").exists()
    for step in (6, 7, 9):
        save(tmp_path, step)
    assert steps(tmp_path) == [9, 7]
    (newest / "rank-0000.safetensors").write_bytes(b"damaged again")
    reader = find(tmp_path)
    assert reader is not None and reader.step == 7


def test_a_state_that_another_rank_finds_damaged_is_set_aside(tmp_path, monkeypatch):
    newest = [save(tmp_path, step) for step in (5, 9)][-1]
    faults = [1.0, 0.0, 1.0]
    monkeypatch.setattr(checkpoint, "sum_scalars", lambda *_: [faults.pop(0)])
    reader = find(tmp_path)
    assert reader is not None and reader.step == 5 and not newest.exists()
    with pytest.raises(UserError, match="step-000000005: damaged, as another rank says"):
        find(tmp_path)


def test_another_run_s_state_is_not_gone_on_from(tmp_path):
    save(tmp_path, 5)
    save(tmp_path, 9, fingerprint="theirs")
    reader = find(tmp_path)
    assert reader is not None and reader.step == 5


def test_without_a_sound_state_nothing_begins_at_step_0(tmp_path):
    write_record(tmp_path / "recipe.json", {"fingerprint": "ours", "saved": 9})
    for step in (5, 9):
        (save(tmp_path, step) / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"step-000000009.*to train from the beginning") as error:
        find(tmp_path)
    assert steps(tmp_path) == [9, 5]
    # What it says to delete is enough: nothing else refuses to begin.
    _, _, advice = str(error.value).partition(" or delete ")
    assert advice.startswith(f"{tmp_path / 'state'} with ")
    shutil.rmtree(tmp_path / "state")
    with pytest.raises(UserError, match="the state of step 9 was saved"):
        check_not_lost(tmp_path)
    for name in ("recipe.json", "job.json", "metrics.jsonl"):
        assert name in advice
        (tmp_path / name).unlink(missing_ok=True)
    assert find(tmp_path) is None
    check_not_lost(tmp_path)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Path, "read_bytes"), (checkpoint, "sha256_file"), (checkpoint.os, "listdir")],
)
def test_what_cannot_be_read_now_is_no_damage(owner, name, tmp_path, monkeypatch):
    """The attempt ends, and the next one finds the newest state."""
    save(tmp_path, 5)
    save(tmp_path, 9)
    with monkeypatch.context() as patch:

        def refused(*_: object) -> None:
            raise OSError(errno.ESTALE, "refused")

        patch.setattr(owner, name, refused)
        with pytest.raises(OSError, match="refused"):
            find(tmp_path)
    assert steps(tmp_path) == [9, 5]


def logged(folder: Path, count: int) -> list[bytes]:
    """Lines of a log of `count` steps."""
    metrics = Metrics(folder, 0, 20)
    for step in range(1, count + 1):
        metrics.log(step, {"loss": 1 / step}, {"device_seconds": float(step)})
    metrics.close()
    return (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize(
    "damage",
    [b"17\n", b"\n", b'{"loss": 1}\n', b"\xff\xfe\n", b'{"step": 3, "timing": 3}\n', b"[]\n"],
)
def test_damaged_lines_are_dropped_and_counted(tmp_path, damage, caplog):
    file, lines = tmp_path / "metrics.jsonl", logged(tmp_path, 9)
    file.write_bytes(b"".join([*lines[:2], damage, damage, *lines[4:]]) + damage)
    metrics = Metrics(tmp_path, 8, 20)
    assert f"{file}: 2 entries are lost; the training is not" in caplog.text
    assert metrics.last_timing["device_seconds"] == 9
    metrics.close()
    assert file.read_bytes().splitlines(keepends=True) == [*lines[:2], *lines[4:8]]
    assert [entry["step"] for entry in entries(file)] == [1, 2, 5, 6, 7, 8]


def test_entries_of_two_trainings_count_once(tmp_path):
    file, lines = tmp_path / "metrics.jsonl", logged(tmp_path, 5)
    file.write_bytes(b"".join([*lines[:4], *lines[2:]]))
    Metrics(tmp_path, 5, 20).close()
    assert [entry["step"] for entry in entries(file)] == [1, 2, 3, 4, 5]


def test_who_still_writes_to_a_log_that_was_taken_over_writes_to_nowhere(tmp_path):
    logged(tmp_path, 3)
    before = Metrics(tmp_path, 3, 20)
    after = Metrics(tmp_path, 3, 20)
    for metrics in (after, before):
        metrics.log(4, {"loss": 1.0}, {"device_seconds": 4.0})
        metrics.close()
    assert [entry["step"] for entry in entries(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_log_that_is_gone_is_said(tmp_path, caplog):
    Metrics(tmp_path, 4, 20).close()
    assert "4 entries are lost" in caplog.text


def test_damaged_weights_of_a_finished_run_are_named(tmp_path):
    file = tmp_path / "encoder.safetensors"
    file.write_bytes(b"weights")
    write_record(
        RunRecord.path(tmp_path),
        {"run": "r", "stage": "tune", "sha256": {file.name: sha256_file(file)}},
    )
    check_weights(tmp_path)
    file.write_bytes(b"weighty")
    with pytest.raises(UserError, match=r"encoder\.safetensors: damaged .*delete it"):
        check_weights(tmp_path)
