"""A run that reads its images from node-local copies is the same run."""

import json
import shutil
from datetime import timedelta
from pathlib import Path

from ranks import refused, run
from tiny_runs import metrics

from maect.records import RunRecord


def staged_late(context, **job):
    """A training on two ranks, of which one copies for as long as the other one waits.

    Not in a collective, which would end the training after half an hour.
    """
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


def test_staged_run_is_bit_identical(job, tmp_path, shards, whole):
    log = tmp_path / "log"
    (tmp_path / "node").mkdir()
    moved = Path(shutil.copytree(shards, tmp_path / "shared" / "train"))
    staged = job("staged", "mae") | {"shards": str(moved), "stage_to": str(tmp_path / "node")}
    late = staged | {"function": staged_late, "stop_at": 4}
    nowhere = job("nowhere", "mae") | {"stage_to": "MAECT_NO_SUCH_VARIABLE", "function": refused}
    verdict, said = run(2, late, nowhere, log=log)
    assert verdict == "requeue"
    assert said.startswith("UserError: staging to MAECT_NO_SUCH_VARIABLE: not set on ")
    (copy,) = (tmp_path / "node").iterdir()
    # With its source's tars emptied, what goes on can only read the copies.
    sizes = {tar: tar.stat().st_size for tar in moved.glob("*.tar")}
    for tar, size in sizes.items():
        tar.write_bytes(bytes(size))
    # Staged or not, a finished run is finished.
    assert run(2, staged, staged | {"stage_to": None}, log=log) == ["done"] * 2
    assert list((tmp_path / "node").iterdir()) == [copy]
    assert metrics(whole / "mae") == metrics(staged["folder"])
    folders = [whole / "mae", Path(staged["folder"])]
    weights = [(folder / "encoder.safetensors").read_bytes() for folder in folders]
    records = [json.loads(RunRecord.path(folder).read_text()) for folder in folders]
    assert weights[0] == weights[1]
    assert records[0]["fingerprint"] == records[1]["fingerprint"]
