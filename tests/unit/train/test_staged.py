"""A run that reads its images from node-local copies is the same run."""

import json
import shutil
from datetime import timedelta
from pathlib import Path

from ranks import run
from tiny_runs import metrics

from maect.records import RunRecord


def staged_late(context, **job):
    """A training on two ranks, of which one copies for as long as the other one waits."""
    import torch.distributed as dist
    from ranks import train

    from maect.train import trainer

    stage = trainer.stage_shards

    def late(*given):
        if context.rank == 1:
            store = dist.distributed_c10d._get_default_store()
            store.wait(["staged-0"], timedelta(minutes=1))
        return stage(*given)

    trainer.stage_shards = late
    try:
        return train(context, **job)
    finally:
        trainer.stage_shards = stage


def test_a_node_that_copies_for_long_is_waited_for(job, tmp_path):
    """Not in a collective, which would end the training after half an hour."""
    (tmp_path / "node").mkdir()
    late = job("late", "mae", epochs=1) | {"stage_to": str(tmp_path / "node")}
    assert run(2, late | {"function": staged_late}, log=tmp_path / "log") == ["done"]


def test_staged_run_is_bit_identical(job, tmp_path, shards, whole):
    log = tmp_path / "log"
    (tmp_path / "node").mkdir()
    moved = Path(shutil.copytree(shards, tmp_path / "shared" / "train"))
    staged = job("staged", "mae") | {"shards": str(moved), "stage_to": str(tmp_path / "node")}
    assert run(2, staged, log=log, stop_at=4) == ["requeue"]
    (copy,) = (tmp_path / "node").iterdir()
    # With its source's tars emptied, what goes on can only read the copies.
    sizes = {tar: tar.stat().st_size for tar in moved.glob("*.tar")}
    for tar, size in sizes.items():
        tar.write_bytes(bytes(size))
    assert run(2, staged, log=log) == ["done"]
    assert list((tmp_path / "node").iterdir()) == [copy]
    assert metrics(whole / "mae") == metrics(staged["folder"])
    folders = [whole / "mae", Path(staged["folder"])]
    weights, records = zip(
        *(((f / "encoder.safetensors").read_bytes(), json.loads(RunRecord.path(f).read_text()))
          for f in folders), strict=True,
    )  # fmt: skip
    assert weights[0] == weights[1]
    assert records[0]["fingerprint"] == records[1]["fingerprint"]
    # Staged or not, a finished run is finished.
    assert run(2, staged | {"stage_to": None}, log=log) == ["done"]


def test_no_room_on_the_node_is_one_message(job, tmp_path):
    staged = job("staged", "mae") | {"stage_to": "MAECT_NO_SUCH_VARIABLE"}
    message = run(2, staged, log=tmp_path / "log")
    assert message.startswith("UserError: staging to MAECT_NO_SUCH_VARIABLE: not set on ")
