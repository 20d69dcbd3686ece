"""States are saved whole; what decides how a run goes on is damaged, another run's, or refused."""

import errno
import shutil
import threading
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from ranks import Place

from maect.core.errors import UserError
from maect.core.files import sha256_file, write_record
from maect.records import RunRecord, entries
from maect.train import checkpoint
from maect.train.checkpoint import (
    ParameterSlice,
    Saver,
    StateReader,
    check_files,
    complete_states,
    find_state,
    remove_incomplete,
    snapshot,
    state_record,
)
from maect.train.metrics import Metrics
from maect.train.run_folder import RunLock, check_not_lost, check_weights, read_notes

CPU = torch.device("cpu")


def saver_of(run: Path, resumed: int | None = None) -> Saver:
    """Of one rank that has just taken the run over."""
    place = Place(0, 0, 1)
    return Saver(run, place, RunLock(run, place), resumed)


def two_savers(run: Path) -> list[Saver]:
    """Of the two ranks of a job."""
    places = [Place(rank, rank, 2) for rank in range(2)]
    return [Saver(run, places[0], RunLock(run, places[0])), Saver(run, places[1], None)]


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
    write_record(state / "state.json", record)
    text = (state / "state.json").read_text()
    (state / "state.json").write_text(text.replace('"world_size": 1', '"world_size": 2'))
    with pytest.raises(UserError, match=r"state\.json: damaged"):
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
    saver, other = two_savers(tmp_path)
    saver.save(5, {"param|0|w": torch.zeros(4)}, {"fingerprint": "ours"})
    saver.wait()
    assert saver.error is not None and "rank 1 did not write its part" in saver.error
    assert not (tmp_path / "state/step-000000005").exists()
    other.save(5, {"param|1|w": torch.zeros(4)}, {"fingerprint": "ours"})
    other.wait()
    assert other.error is None and read_notes(tmp_path) == {}  # rank 0 alone writes them


def test_a_save_waits_for_the_one_before_it_and_overtakes_nothing(tmp_path, monkeypatch):
    """The second state is asked for while the first is being written; both are whole."""
    started, go_on, order = threading.Event(), threading.Event(), []
    real = checkpoint.save_file

    def slow(tensors, path):
        order.append(float(tensors["param|0|x"][0]))
        if len(order) == 1:
            started.set()
            assert go_on.wait(30)
        real(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", slow)
    saver, complete = saver_of(tmp_path), []
    saver.context.saved = complete.append
    saver.save(1, {"param|0|x": torch.full((3,), 1.0)}, {"fingerprint": "ours"})
    assert started.wait(30) and saver.is_writing
    threading.Timer(0.2, go_on.set).start()
    saver.save(2, {"param|0|x": torch.full((3,), 2.0)}, {"fingerprint": "ours"})
    assert complete[:1] == [1]  # nothing of the second began before
    saver.wait()
    assert (order, complete, saver.error) == ([1.0, 2.0], [1, 2], None)
    states = complete_states(tmp_path / "state")
    assert [state.name for state in states] == ["step-000000002", "step-000000001"]
    for state, value in zip(states, (2.0, 1.0), strict=True):
        reader = StateReader(state, state_record(state, "ours"))
        assert reader.values("param", "x", 0, 3).tolist() == [value] * 3


def test_what_a_rank_wrote_of_a_save_that_failed_fills_no_disk(tmp_path, monkeypatch):
    """Rank 0 has given up, and freed space, before rank 1 writes its part."""
    savers, real = two_savers(tmp_path), checkpoint.save_file

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def save(step, ranks):
        for rank in ranks:
            part = {f"param|{3 * rank}|x": torch.ones(3)}
            savers[rank].save(step, part, {"fingerprint": "ours"})
        for saver in savers:
            saver.wait()

    monkeypatch.setattr(checkpoint, "save_file", full)
    save(1, (0,))
    monkeypatch.setattr(checkpoint, "save_file", real)
    save(1, (1,))
    assert (tmp_path / "state/step-000000001").exists()
    save(2, (1, 0))
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["step-000000002"]


def test_a_second_save_of_a_step_that_fails_spoils_nothing(tmp_path, monkeypatch):
    """Step 2 was spoilt: step 1 is saved once more, and the disk of rank 1 is full by then."""
    savers, real = two_savers(tmp_path), checkpoint.save_file

    def save():
        for rank in (1, 0):
            savers[rank].save(1, {f"param|{3 * rank}|x": torch.ones(3)}, {"fingerprint": "ours"})
        for saver in savers:
            saver.wait()

    def full(tensors, path):
        if "param|3|x" in tensors:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, path)

    save()
    monkeypatch.setattr(checkpoint, "save_file", full)
    save()
    assert all("No space left" in saver.error for saver in savers)
    (state,) = complete_states(tmp_path / "state")
    for rank in range(2):
        check_files(state, state_record(state, "ours"), rank, 2)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_people_are_told_that_nothing_is_saved(tmp_path, monkeypatch, caplog):
    """Once, and whatever becomes of their message."""
    saver, said = saver_of(tmp_path), []

    def say(sentence):
        said.append(sentence)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    def full(*_):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(saver.context, "say", say)
    monkeypatch.setattr(checkpoint, "save_file", full)
    for step in (1, 2, 3):
        saver.save(step, {"param|0|x": torch.zeros(3)}, {})
        saver.wait()
        assert len(said) == 1
    assert "state of step 1 not saved" in said[0] and "quota exceeded" in said[0]
    assert "state of step 3" in saver.error and saver.error in caplog.text


def piece(values, start, stop):
    return ParameterSlice(
        "encoder.w", start, {kind: value[start:stop].clone() for kind, value in values.items()}
    )


def test_a_state_of_two_ranks_is_read_by_any_number_of_them(tmp_path):
    """Training waits for no save, and what it changes meanwhile is not in the state."""
    whole = {"param": torch.arange(12.0), "exp_avg": torch.arange(12.0) / 7}
    parts = [piece(whole, 0, 5), piece(whole, 5, 12)]
    buffers = {"encoder.mean": torch.tensor([3]), "head.queue": torch.ones(2)}
    taken = [snapshot([parts[0]], buffers), snapshot([parts[1]], {})]
    for value in (*parts[0].values.values(), *parts[1].values.values(), *buffers.values()):
        value.zero_()
    savers = two_savers(tmp_path)
    savers[0].save(1, taken[0], {"fingerprint": "ours"})  # waits in its thread for rank 1
    assert savers[0].is_writing and not complete_states(tmp_path / "state")
    savers[1].save(1, taken[1], {"fingerprint": "ours"})
    for saver in savers:
        saver.wait()
    assert savers[0].error is None and not savers[0].is_writing
    (state,) = complete_states(tmp_path / "state")
    reader = StateReader(state, state_record(state, "ours"))
    assert (state.name, reader.step, reader.record["world_size"]) == ("step-000000001", 1, 2)
    assert reader.names("param") == ["encoder.w"]
    three = [piece(whole, *ends) for ends in ((0, 4), (4, 6), (6, 12))]
    for part in three:
        for value in part.values.values():
            value.zero_()
    reader.restore(three)
    for kind, value in whole.items():
        assert torch.equal(torch.cat([part.values[kind] for part in three]), value)
    # A part of the objective, without the buffers that it does not have.
    like = {"w": torch.empty(3, 4), "mean": torch.empty(1), "queue": torch.empty(2)}
    found = reader.part("exp_avg", "encoder.", like)
    assert found.keys() == {"w", "mean"} and found["mean"].tolist() == [3]
    assert torch.equal(found["w"], whole["exp_avg"].view(3, 4))
    assert reader.part("exp_avg", "encoder.", {"w": like["w"]}).keys() == {"w"}
    for kind, start, missing in (("param", 10, 2), ("ema", 0, 4)):
        with pytest.raises(UserError, match=f"{missing} values of {kind} encoder.w are missing"):
            reader.values(kind, "encoder.w", start, 4)


def test_ranks_that_hold_other_bits_save_nothing(monkeypatch):
    compared = []
    monkeypatch.setattr(checkpoint, "rank_and_size", lambda: (0, 4))
    monkeypatch.setattr(checkpoint, "differing_ranks", lambda them: compared.extend(them) or [1, 3])
    weights, buffer = torch.ones(2), torch.zeros(3)
    with pytest.raises(checkpoint.ReplicaError, match=r"after step 7 .* rank 1, 3 of 4 differ"):
        checkpoint.compare_replicas(7, [weights], {"queue": buffer})
    assert compared[0] is weights and compared[1] is buffer
    monkeypatch.setattr(checkpoint, "differing_ranks", lambda them: [])
    checkpoint.compare_replicas(7, [weights], {})


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


def test_a_run_that_was_moved_is_not_made_again_by_its_pictures(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", MagicMock())
    metrics, pictures = Metrics(tmp_path / "run", 0, 20), {"masked": np.zeros((8, 8, 3), np.uint8)}
    metrics.show(1, pictures)
    (tmp_path / "run").rename(tmp_path / "moved")
    metrics.show(2, pictures)
    assert not (tmp_path / "run").exists() and "masked-00000002.jpg not written" in caplog.text
    assert [file.name for file in (tmp_path / "moved/online").iterdir()] == ["masked-00000001.jpg"]


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
