"""A run that is stopped, killed or damaged ends with the bits of one that was not."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import alone, refused, run, train
from safetensors.torch import load_file
from tiny_runs import losses, metrics

from maect.core.files import RUN, read_record, sha256_file
from maect.core.settings import digest
from maect.evaluate.protocols.encoders import Accuracy
from maect.recipes import load_encoder
from maect.recipes.settings import PLAIN, Computing
from maect.records import RunRecord, entries
from maect.stages import load_recipe
from maect.stages.fine_tune import FineTune
from maect.stages.run import RunConfig
from maect.train.checkpoint import StateReader, complete_states
from maect.train.trainer import Trainer

ALWAYS = {"save_every_minutes": 0.0}


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


def bits(folder):
    files = ("encoder.safetensors", "head.safetensors")
    return [(Path(folder) / f).read_bytes() for f in files if (Path(folder) / f).exists()]


def identical(whole, broken):
    assert metrics(whole) == metrics(broken)
    assert bits(whole) == bits(broken)


def steps_saved(folder):
    return sorted(int(f.parent.name[5:]) for f in Path(folder).glob("state/step-*/state.json"))


@pytest.mark.parametrize("zero", [1, slow(2), slow(3)])
def test_killed_and_restarted(job, tmp_path, whole, zero):
    log, undisturbed = tmp_path / "log", whole / "ct_min"
    if zero != 1:
        other = job("undisturbed", "ct_min", whole / "head_min", zero_stage=zero)
        assert run(2, other, log=log) == ["done"]
        undisturbed = other["folder"]
    broken = job("broken", "ct_min", whole / "head_min", zero_stage=zero) | ALWAYS
    with pytest.raises(RuntimeError, match="no rank answered"):
        run(2, broken, log=log, kill_at=7)
    assert not RunRecord.path(Path(broken["folder"])).exists()
    assert steps_saved(broken["folder"])[-1] < 7
    assert run(2, broken, log=log) == ["done"]
    assert "resuming from step" in log.read_text()
    identical(undisturbed, broken["folder"])


def look_at_its_maps(context, **job):
    """A training that fails at a save if it still holds files that have been removed."""

    def saved(step):
        maps = Path("/proc/self/maps").read_text().splitlines()
        assert not [line for line in maps if "/state/step-" in line and "(deleted)" in line]

    context.saved = saved
    return train(context, **job)


def test_stopped_with_half_a_line_in_its_log(job, tmp_path, whole):
    """A resumed run lets go of the state that it came from."""
    broken = job("broken", "ct_min", whole / "head_min")
    log, folder = tmp_path / "log", Path(broken["folder"])
    assert run(2, broken, log=log, stop_at=4) == ["requeue"]
    assert steps_saved(folder) == [4] and len(metrics(folder)) == 4
    assert not (folder / "encoder.safetensors").exists()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 5, "loss": 0.0, "timing": {"device_seconds": 9.0}}) + "\n")
        file.write('{"step": 6, "lo')
    looking = broken | ALWAYS | {"function": look_at_its_maps}
    assert run(2, looking, broken, log=log) == ["done"] * 2  # the second has nothing left to do
    assert "not saved" not in log.read_text()
    identical(whole / "ct_min", folder)


def without(context, *, damaged=None, lost=(), **job):
    """A training whose newest state has a damaged file, or whose outputs were lost."""
    folder = Path(job["folder"])
    if context.rank == 0 and damaged:
        assert steps_saved(folder) == [5, 6]
        with open(folder / damaged, "r+b") as file:
            file.seek(-3, 2)
            file.write(b"\1\2\3")
    if context.rank == 0:
        for name in lost:
            (folder / name).unlink()
    torch.distributed.barrier()
    return train(context, **job)


def test_damaged_state_falls_back_and_lost_outputs_are_exported_again(job, tmp_path, whole):
    broken = job("broken", "mae") | ALWAYS
    log, folder = tmp_path / "log", Path(broken["folder"])
    file = "state/step-000000006/rank-0001.safetensors"
    damaged = broken | {"function": without, "damaged": file}
    lost = broken | {"function": without, "lost": ("encoder.safetensors", RUN)}
    done = run(2, broken | {"stop_at": 6}, damaged, lost, log=log)
    assert done == ["requeue", "done", "done"]
    assert "rank-0001.safetensors: checksum differs; using the state before" in log.read_text()
    assert log.read_text().count("resuming from step 5") == 1
    assert log.read_text().count("resuming from step 10") == 1
    identical(whole / "mae", folder)
    logged = (folder / "metrics.jsonl").read_text().splitlines()
    held = json.loads(logged[-1])["timing"]["held_seconds"]
    assert json.loads(RunRecord.path(folder).read_text())["held_hours"] > held / 3600


def test_another_number_of_ranks_only_when_told(job, tmp_path, whole):
    log, alone = tmp_path / "log", {"head": {"lookup": "none"}}  # see test_world_size
    two, moved = (job(name, "ct_min", whole / "head_min", **alone) for name in ("two", "moved"))
    assert run(2, two, moved | {"stop_at": 5}, log=log) == ["done", "requeue"]
    told = moved | {"convert_world_size": True}
    refusal, verdict = run(1, moved | {"function": refused}, told, log=log)
    assert "2 ranks to 1" in refusal and verdict == "done"
    assert "converted from 2 ranks to 1" in log.read_text()
    # fp32: the sums' order differs after the change, see test_world_size
    np.testing.assert_allclose(losses(moved["folder"]), losses(two["folder"]), rtol=1e-4)
    assert losses(moved["folder"])[:5] == losses(two["folder"])[:5]


def test_a_run_on_one_rank_goes_on_with_the_same_bits(job, tmp_path):
    """Queue, EMA projector, running average and losses of the epochs, from a state of any step."""
    starts = job("mae", "mae", epochs=1), job("head", "head_min", "mae", epochs=1)
    whole, broken = (job(name, "ct_min", "head", epochs=2) for name in ("whole", "broken"))
    assert alone(*starts, whole) == ["done"] * 3
    for step in (2, 4):
        assert alone(broken | ALWAYS | {"stop_at": step}) == ["requeue"]
        assert steps_saved(broken["folder"])[-1] == step
        assert not RunRecord.path(Path(broken["folder"])).exists()
    (tmp_path / "node").mkdir()
    assert alone(broken | {"stage_to": str(tmp_path / "node")}) == ["done"]
    assert len([*(tmp_path / "node").iterdir()]) == 1
    identical(whole["folder"], broken["folder"])
    state = complete_states(Path(broken["folder"]) / "state")[0]
    reader = StateReader(state, read_record(state / "state.json"))
    exported = load_file(tmp_path / "runs/broken/encoder.safetensors")
    for name in reader.names("ema"):
        value = exported.pop(name.removeprefix("encoder."))
        assert torch.equal(value, reader.full("ema", name, value.shape))
    assert not [name for name in exported if name.startswith(("blocks.2.", "blocks.3.", "norm."))]
    records = [RunRecord.of(Path(each["folder"])) for each in (whole, broken)]
    for name, record in zip(("whole", "broken"), records, strict=True):
        # Two and a half steps an epoch: its loss counts where a step begins.
        steps = np.split(losses(whole["folder"]), (3,))
        np.testing.assert_allclose(record.losses, [each.mean() for each in steps])
        assert (record.run, record.world_size, len(record.attempts)) == (name, 1, 1)
        log = tmp_path / f"runs/{name}/metrics.jsonl"
        assert record.log_sha256 == sha256_file(log)
        entry = entries(log)[-1]
        assert record.device_hours == entry["timing"]["device_seconds"] / 3600
        assert record.held_hours > record.device_hours and record.finished.endswith("Z")
        assert record.settings == whole["settings"] and record.source == "head"
        assert record.scores is None
        assert {*record.sha256} == {"encoder.safetensors", "head.safetensors"} == {*record.files}
    assert records[0].sha256 == records[1].sha256
    assert records[0].fingerprint == records[1].fingerprint
    assert 0 < records[1].useful_part <= 1 and records[1].images_per_second > 0


def test_epochs_of_a_classifier_are_scored_over_a_break(job, shards, caplog):
    """Whose states are removed at the end, also those that a kill has left."""
    values = {"batch_size": 16, "epochs": 2, "precision": "fp32", "mixup": 0, "cutmix": 0}
    stage = FineTune.model_validate(values | {"warmup_epochs": 0})
    start = job("mae", "mae", epochs=1)
    tuned = {"stage": "fine_tune", "settings": stage.model_dump(mode="json"), "test": str(shards)}
    whole, broken, late = (job(name, "mae", "mae") | tuned for name in ("whole", "broken", "late"))
    jobs = start, whole, broken | {"stop_at": 4}, broken
    assert alone(*jobs) == ["done", "done", "requeue", "done"]
    identical(whole["folder"], broken["folder"])
    logged = [entry["accuracy"] for entry in metrics(whole["folder"]) if "accuracy" in entry]
    for folder in map(Path, (whole["folder"], broken["folder"])):
        assert list(RunRecord.of(folder).scores.accuracies) == logged and len(logged) == 2
        assert not (folder / "state").exists()
    (folder / "state").mkdir()
    assert alone(broken) == ["done"] and not (folder / "state").exists()
    assert "epochs are scored no more" not in caplog.text
    assert alone(late | {"test": None, "stop_at": 4}, late) == ["requeue", "done"]
    assert f"{late['folder']}: epochs are scored no more" in caplog.text
    assert RunRecord.of(Path(late["folder"])).scores is None


def test_changed_recipe_never_continues_and_deletes_nothing(job, caplog):
    caplog.set_level("INFO")
    old, undisturbed = (job(name, "mae", epochs=2) for name in ("run", "undisturbed"))
    new, fresh = (job(name, "mae", epochs=2, base_lr=2e-3) for name in ("run", "fresh"))
    assert alone(old | {"stop_at": 3}, new) == ["requeue", "done"]
    assert "since it was trained; what it left is kept in stale-" in caplog.text
    assert "resuming" not in caplog.text
    aside = next(Path(new["folder"]).glob("stale-*"))
    assert len(metrics(aside)) == 3 and steps_saved(aside) == [3]
    assert alone(fresh, undisturbed) == ["done"] * 2
    identical(fresh["folder"], new["folder"])
    # Changed back, it goes on from what was set aside.
    assert alone(old) == ["done"]
    assert "resuming from step 3" in caplog.text
    assert [path.name for path in Path(old["folder"]).glob("stale-*")] != [aside.name]
    identical(undisturbed["folder"], old["folder"])
    # And forth: what had finished is put back as it was, also where its states were cleaned.
    finished = next(Path(old["folder"]).glob("stale-*"))
    shutil.rmtree(finished / "state")
    node = (finished / "encoder.safetensors").stat().st_ino
    assert alone(new) == ["done"]
    assert f"what {finished.name} has is put back" in caplog.text
    identical(fresh["folder"], new["folder"])
    assert (Path(new["folder"]) / "encoder.safetensors").stat().st_ino == node


def test_full_disk_keeps_the_state_before_and_says_so(job, tmp_path, whole):
    """A file-size limit stands in for the disk: the write fails half way with an OSError."""
    full = job("full", "ct_min", whole / "head_min") | ALWAYS
    log = tmp_path / "log"
    assert run(2, full, log=log, stop_at=3) == ["requeue"]
    size = (Path(full["folder"]) / "state/step-000000003/rank-0000.safetensors").stat().st_size
    failed = run(2, full, log=log, file_limit=size // 2, limited=[1])
    assert "OSError" in failed and "File too large" in failed
    assert "state of step 4 not saved" in log.read_text()
    assert steps_saved(full["folder"]) == [2, 3]
    assert not list(Path(full["folder"]).glob("state/*/.*tmp"))
    assert run(2, full, log=log) == ["done"]
    identical(whole / "ct_min", full["folder"])


def test_refusals(job, whole):
    wider = job("wider", "ct_min", whole / "head_min")
    wider["encoder"] = wider["encoder"] | {"width": 32}
    other = job("other", "ct_min", whole / "head_min", head={"embedding": 4})
    table = {
        "larger than its 40 images": job("large", "mae", batch_size=64),
        "needs a run to start from": job("alone", "head_min"),
        "is not finished": job("early", "head_min", "nowhere"),
        "head settings differ": other,
        "has width 16, this run has 32": wider,
        "data or source changed since this job was submitted": job("changed", "mae")
        | {"submitted": "another identity"},
    }
    refusing = [value | {"function": refused} for value in table.values()]
    for words, said in zip(table, alone(*refusing), strict=True):
        assert words in said
    assert not Path(table[words]["folder"]).exists()  # nor is anything there set aside


def with_a_flipped_bit(context, *, where, **job):
    """A training in which rank 1's copy has one other bit from step 4 on."""
    update = Trainer._update

    def flipping(self, means, number):
        update(self, means, number)
        if number == 4 and context.rank == 1:
            held = dict(self.objective.named_parameters()) | self.objective.saved_buffers()
            bits = held[where].data.view(torch.int32).flatten()
            bits[3] ^= 1

    Trainer._update = flipping
    try:
        return refused(context, **job)
    finally:
        Trainer._update = update


def test_a_flipped_bit_stops_the_run_before_it_is_saved(job, tmp_path, whole):
    """Of weights, and of a buffer."""
    weights, buffer = job("weights", "mae") | ALWAYS, job("buffer", "mae") | ALWAYS
    flips = [
        value | {"function": with_a_flipped_bit, "where": where}
        for value, where in (
            (weights, "encoder.blocks.2.attn.proj.weight"), (buffer, "encoder.pos_embed")
        )
    ]  # fmt: skip
    *messages, verdict = run(2, *flips, buffer, log=tmp_path / "log")
    for message in messages:
        assert "ReplicaError: after step 4 the weights or buffers of rank 1 of 2 differ" in message
    assert 1 <= steps_saved(weights["folder"])[-1] <= 3
    assert verdict == "done"
    identical(whole / "mae", buffer["folder"])


OTHERWISE = {
    3: {"zero_stage": 2, "attention": "flash_attn"},
    6: {"accumulation": 2, "activation_checkpointing": True, "zero_stage": 3},
}
"""By the step after which a run goes on so."""


def test_a_run_goes_on_computed_otherwise(job, whole, tmp_path):
    log, ways = tmp_path / "log", [{}, *OTHERWISE.values()]
    jobs = [job("mae", "mae", **changes) for changes in ways]
    folder = Path(jobs[0]["folder"])
    parts = [value | {"stop_at": at} for value, at in zip(jobs, (*OTHERWISE, None), strict=True)]
    # Finished is finished, however it would be computed now.
    assert run(2, *parts, jobs[0], log=log) == ["requeue", "requeue", "done", "done"]
    assert not list(folder.glob("stale-*"))
    before = PLAIN.model_dump()
    for step, changes in OTHERWISE.items():
        assert f"resuming from step {step}" in log.read_text()
        for name, value in changes.items():
            assert f"resumes with {name} {value}, it was {before[name]}" in log.read_text()
        before |= changes
    undisturbed = losses(whole / "mae")
    assert losses(folder)[:3] == undisturbed[:3]
    np.testing.assert_allclose(losses(folder), undisturbed, rtol=1e-4)
    record = json.loads(RunRecord.path(folder).read_text())
    assert record["computing"].items() >= OTHERWISE[6].items()


def test_identities_know_nothing_of_it():
    told = {
        "run": "mae", "stage": "pretrain", "size": "base", "encoder": load_encoder("base"),
        "settings": load_recipe("mae", "base"),
    }  # fmt: skip
    other = RunConfig(**told, computing=Computing(compile=True, deterministic=True))
    longer = RunConfig(**told | {"settings": load_recipe("mae", "base", {"epochs": 3})})
    assert RunConfig(**told).digest == other.digest != longer.digest
    assert digest(Accuracy()) != digest(Accuracy(precision="fp32"))
