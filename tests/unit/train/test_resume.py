"""A run that is stopped, killed or damaged ends with the bits of one that was not."""

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from lookups import clearly
from ranks import Ranks, run, train
from safetensors.torch import load_file
from tiny_runs import ENCODER, losses, metrics

from maect.core.files import RUN
from maect.records import RunRecord
from maect.stages.pretrain import Pretrain

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
    log = tmp_path / "log"
    stages = [("mae", None), ("head_min", whole / "mae"), ("ct_min", whole / "head_min")]
    for recipe, source in stages if zero == 1 else stages[2:]:
        undisturbed = whole / recipe
        if zero != 1:
            other = job("undisturbed", recipe, source, zero_stage=zero)
            assert run(2, other, log=log) == ["done"]
            undisturbed = other["folder"]
        broken = job(f"{recipe}-broken", recipe, source, zero_stage=zero) | ALWAYS
        for kill_at in (4, 7):
            with pytest.raises(RuntimeError, match="no rank answered"):
                run(2, broken, log=log, kill_at=kill_at)
            assert not RunRecord.path(Path(broken["folder"])).exists()
            assert steps_saved(broken["folder"])[-1] < kill_at
        assert run(2, broken, log=log) == ["done"]
        assert "resuming from step" in log.read_text()
        identical(undisturbed, broken["folder"])


def train_and_look_at_its_maps(context, **job):
    """A training that fails at a save if it still holds files that have been removed."""

    def saved(step):
        maps = Path("/proc/self/maps").read_text().splitlines()
        assert not [line for line in maps if "/state/step-" in line and "(deleted)" in line]

    context.saved = saved
    return train(context, **job)


def test_a_resumed_run_lets_go_of_the_state_that_it_came_from(job, tmp_path):
    log, value = tmp_path / "log", job("mae", "mae") | ALWAYS
    assert run(1, value, log=log, stop_at=3) == ["requeue"]
    assert run(1, value | {"function": train_and_look_at_its_maps}, log=log) == ["done"]
    assert "not saved" not in log.read_text()


@pytest.mark.slow
def test_one_rank_killed_at_random_moments(job, tmp_path, whole):
    broken = job("broken", "ct_min", whole / "head_min") | ALWAYS
    log = tmp_path / "log"
    folder = Path(broken["folder"])
    for rank, delay in ((0, 0.0), (1, 0.05), (0, 0.13)):
        before = steps_saved(folder)
        ranks = Ranks(2, [broken], log)
        while steps_saved(folder) == before and any(p.is_alive() for p in ranks.processes):
            time.sleep(0.002)
        time.sleep(delay)
        ranks.kill([rank])
        ranks.kill()
    assert run(2, broken, log=log) == ["done"]
    identical(whole / "ct_min", folder)
    assert len(steps_saved(folder)) <= 2


def test_stopped_by_one_rank(job, tmp_path, whole):
    broken = job("broken", "ct_min", whole / "head_min")
    log = tmp_path / "log"
    assert run(2, broken, log=log, stop_at=4) == ["requeue"]
    assert steps_saved(broken["folder"]) == [4] and len(metrics(broken["folder"])) == 4
    assert not (Path(broken["folder"]) / "encoder.safetensors").exists()
    assert run(2, broken, broken, log=log) == ["done"] * 2  # the second has nothing left to do
    identical(whole / "ct_min", broken["folder"])


def test_damaged_state_falls_back_and_lost_outputs_are_exported_again(job, tmp_path, whole):
    broken = job("broken", "mae") | ALWAYS
    log = tmp_path / "log"
    assert run(2, broken, log=log, stop_at=6) == ["requeue"]
    assert steps_saved(broken["folder"]) == [5, 6]
    state = Path(broken["folder"]) / "state"
    with open(state / "step-000000006" / "rank-0001.safetensors", "r+b") as file:
        file.seek(-3, 2)
        file.write(b"\1\2\3")
    log.write_text("")
    assert run(2, broken, log=log) == ["done"]
    assert "rank-0001.safetensors: checksum differs; using the state before" in log.read_text()
    assert "resuming from step 5" in log.read_text()
    identical(whole / "mae", broken["folder"])
    record = RunRecord.path(Path(broken["folder"]))
    for name in ("encoder.safetensors", RUN):
        (Path(broken["folder"]) / name).unlink()
    log.write_text("")
    assert run(2, broken, log=log) == ["done"]
    logged = (Path(broken["folder"]) / "metrics.jsonl").read_text().splitlines()
    held = json.loads(logged[-1])["timing"]["held_seconds"]
    assert json.loads(record.read_text())["held_hours"] > held / 3600
    assert "resuming from step 10" in log.read_text()
    identical(whole / "mae", broken["folder"])


def test_another_number_of_ranks_only_when_told(job, tmp_path, whole):
    log = tmp_path / "log"
    for seed in range(40, 72):  # up to one of which no lookup behind the change hangs on a last bit
        alone, moved = (
            job(f"{name}-{seed}", "ct_min", whole / "head_min") | {"seed": seed}
            for name in ("alone", "moved")
        )
        assert run(2, moved, log=log, stop_at=5) == ["requeue"]
        refusal = run(1, moved, log=log)
        assert "UserError" in refusal and "2 ranks to 1" in refusal
        assert "--convert-world-size" in refusal
        # The change moves a cosine by up to 1e-4.
        checked = moved | {"function": clearly, "of": train, "least": 2e-4}
        verdict = run(1, checked | {"convert_world_size": True}, log=log)
        if "candidates of a lookup" not in verdict:
            break
    assert verdict == ["done"]
    assert run(2, alone, log=log) == ["done"]
    assert "converted from 2 ranks to 1" in log.read_text()
    # fp32: the sums' order differs after the change, see test_world_size
    np.testing.assert_allclose(losses(moved["folder"]), losses(alone["folder"]), rtol=1e-4)
    assert losses(moved["folder"])[:5] == losses(alone["folder"])[:5]


def test_changed_recipe_never_continues_and_deletes_nothing(job, tmp_path):
    log = tmp_path / "log"
    old, new = job("run", "mae"), job("run", "mae", base_lr=2e-3)
    fresh = job("fresh", "mae", base_lr=2e-3)
    assert run(1, old, log=log, stop_at=5) == ["requeue"]
    log.write_text("")
    assert run(1, new, log=log) == ["done"]
    assert "since it was trained; what it left is kept in stale-" in log.read_text()
    assert "resuming" not in log.read_text()
    aside = next(Path(new["folder"]).glob("stale-*"))
    assert len(metrics(aside)) == 5 and steps_saved(aside) == [5]
    assert run(1, fresh, log=log) == ["done"]
    identical(fresh["folder"], new["folder"])
    # Changed back, it goes on from what was set aside.
    assert run(1, old, log=log) == ["done"]
    assert "resuming from step 5" in log.read_text()
    assert [path.name for path in Path(old["folder"]).glob("stale-*")] != [aside.name]
    undisturbed = job("undisturbed", "mae")
    assert run(1, undisturbed, log=log) == ["done"]
    identical(undisturbed["folder"], old["folder"])
    # And forth: what had finished is put back as it was, also where its states were cleaned.
    finished = next(Path(old["folder"]).glob("stale-*"))
    shutil.rmtree(finished / "state")
    node = (finished / "encoder.safetensors").stat().st_ino
    assert run(1, new, log=log) == ["done"]
    assert f"what {finished.name} has is put back" in log.read_text()
    identical(fresh["folder"], new["folder"])
    assert (Path(new["folder"]) / "encoder.safetensors").stat().st_ino == node


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]], ids=str)
def test_full_disk_keeps_the_state_before_and_says_so(job, tmp_path, whole, ranks):
    """A file-size limit stands in for the disk: the write fails half way with an OSError."""
    full = job("full", "ct_min", whole / "head_min") | ALWAYS
    log = tmp_path / "log"
    assert run(2, full, log=log, stop_at=3) == ["requeue"]
    before = steps_saved(full["folder"])
    size = (Path(full["folder"]) / "state/step-000000003/rank-0000.safetensors").stat().st_size
    log.write_text("")
    failed = run(2, full, log=log, file_limit=size // 2, limited=ranks)
    assert "OSError" in failed and "File too large" in failed
    text = log.read_text()
    assert "state of step 4 not saved" in text and "the one before it stays" in text
    assert steps_saved(full["folder"]) == before
    assert not list(Path(full["folder"]).glob("state/*/.*tmp"))
    assert run(2, full, log=log) == ["done"]
    identical(whole / "ct_min", full["folder"])


def test_metrics_cut_off_in_the_middle_of_a_line(job, tmp_path, whole):
    broken, log = job("broken", "mae"), tmp_path / "log"
    assert run(2, broken, log=log, stop_at=4) == ["requeue"]
    with open(Path(broken["folder"]) / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 5, "loss": 0.0, "timing": {"device_seconds": 9.0}}) + "\n")
        file.write('{"step": 6, "lo')
    assert run(2, broken, log=log) == ["done"]
    identical(whole / "mae", broken["folder"])


def test_refusals(job, tmp_path, whole):
    log = tmp_path / "log"
    assert "not a multiple of 3 ranks" in run(3, job("a", "mae"), log=log)
    assert "larger than its 40 images" in run(1, job("b", "mae", batch_size=64), log=log)
    assert "needs a run to start from" in run(1, job("c", "head_min"), log=log)
    assert "is not finished" in run(1, job("d", "head_min", "nowhere"), log=log)
    other = job("e", "ct_min", whole / "head_min", head={"embedding": 4})
    assert "head settings differ" in run(1, other, log=log)
    wider = job("f", "ct_min", whole / "head_min")
    wider["encoder"] = wider["encoder"] | {"width": 32}
    assert "has width 16, this run has 32" in run(1, wider, log=log)


def saved_tensors(folder, step):
    files = sorted(Path(folder).glob(f"state/step-{step:09d}/*.safetensors"))
    return [load_file(file) for file in files]


def test_not_a_number_stops_the_run_and_spoils_no_state(job, tmp_path, whole):
    log = tmp_path / "log"
    wild = {"base_lr": 1e30, "head": {"head_lr": 1e30}}
    spoilt, sound = (
        job(name, "ct_min", whole / "head_min", **wild) for name in ("spoilt", "sound")
    )
    message = run(2, spoilt, log=log)
    assert message.startswith("TrainingFault") and "in step 2" in message
    assert steps_saved(spoilt["folder"]) == [1]
    assert run(2, sound, log=log, stop_at=1) == ["requeue"]
    # Not even the queue and the statistics, which the forward pass of step 2 changed.
    for ours, theirs in zip(*(saved_tensors(j["folder"], 1) for j in (spoilt, sound)), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("zero", [1, 2, slow(3)])
def test_an_infinite_gradient_is_not_stepped_with(job, tmp_path, zero):
    # 1e37 times the loss is still a float32; the norm of its gradient is not.
    steep = {"contrastive": "combined", "contrastive_weight": 1e37, "head": {}, "zero_stage": zero}
    value = job("steep", "mae", **steep)
    message = run(2, value, log=tmp_path / "log")
    assert "gradient norm" in message and "in step 1" in message
    stage, shape = (Pretrain.model_validate(value["settings"]), ENCODER)
    initial = stage.build(shape, value["seed"], None).state_dict()
    for tensors in saved_tensors(value["folder"], 0):
        for key, found in tensors.items():
            kind, offset, name = key.split("|")
            if kind == "param":
                begin = int(offset)
                expected = initial[name].flatten()[begin : begin + found.numel()]
                assert torch.equal(found, expected), name
