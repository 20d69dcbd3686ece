"""The number of ranks, the ZeRO stage and accumulation do not change the experiment."""

import float64
import numpy as np
import pytest
import torch
from ranks import run
from safetensors.numpy import load_file
from tiny_runs import job_maker, losses, metrics

from maect.stages import load_recipe

# fp32: sums over the batch are taken in another order on another number of ranks, which moves a
# loss by a few units of 2^-24 a step; ten steps of Adam amplify that by less than a hundred.
TOLERANCE = 1e-4


def stages(job, folder, start=None, **changes):
    """The three stages, each from its own predecessor or from that in the folder `start`.

    Without lookup: of two neighbours that are nearly equally near in fp32 another sum may take the
    other one, and nothing after that can be compared. The lookup is compared in float64.
    """
    start, alone = start or folder, {"head": {"lookup": "none"}}
    return [
        job("mae", "mae", folder=folder, **changes),
        job("head", "head_min", start / "mae", folder=folder, **alone, **changes),
        job("ct", "ct_min", start / "head", folder=folder, **alone, **changes),
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, shards):
    """Runs of one rank, to compare others with."""
    root = tmp_path_factory.mktemp("alone")
    job, folder = job_maker(root, shards), root / "one"
    assert run(1, *stages(job, folder), log=root / "log") == ["done"] * 3
    return folder


def same(folder, other, tolerance=TOLERANCE):
    for name in ("mae", "head", "ct"):
        assert len(losses(folder / name)) == 10
        np.testing.assert_allclose(losses(folder / name), losses(other / name), rtol=tolerance)
        ours, theirs = (load_file(f / name / "encoder.safetensors") for f in (folder, other))
        for key, value in ours.items():
            np.testing.assert_allclose(value, theirs[key], atol=2e-3, err_msg=f"{name} {key}")


def test_ranks_in_float64(job, tmp_path):
    """Losses, weights, statistics and queue agree to rounding, which no neighbour hangs on.

    BatchNorm's statistics of a rank's own rows, or rows gathered in another order, do not.
    """
    jobs = {
        "mae": job("run", "mae", contrastive="combined", head={}),
        **{recipe: job("run", recipe) for recipe in ("head_min", "ct_min", "ct_aug")},
    }
    small = {"batch_size": 16, "precision": "fp32", "head": {"queue_size": 64, "topk": 3}}
    settings = load_recipe("refine", "tiny", small).model_dump(mode="json")
    jobs["refine"] = jobs["ct_aug"] | {"stage": "refine", "settings": settings}
    for ranks in (1, 2, 4):
        each = [
            value | {"function": float64.steps, "out": str(tmp_path / f"{recipe}-{ranks}.pt")}
            for recipe, value in jobs.items()
        ]
        assert run(ranks, *each, log=tmp_path / "log") == ["done"] * len(jobs)
    for recipe in jobs:
        alone, *others = (torch.load(tmp_path / f"{recipe}-{ranks}.pt") for ranks in (1, 2, 4))
        head = "heads" if recipe == "refine" else "head"
        assert alone[f"{head}.queue_ids"].unique().numel() == 40  # all samples came
        for found in others:
            for name, value in alone.items():
                message = f"{recipe} {name}"
                torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11, msg=message)


def test_zero_stages_and_accumulation(job, tmp_path, alone):
    """On two ranks; accumulation only where no loss is one of the whole batch."""
    jobs = []
    for zero in (2, 3):
        jobs += stages(job, tmp_path / f"zero{zero}", alone, zero_stage=zero)
    # In bfloat16, too: DeepSpeed's own linear layer would add the bias to what is rounded.
    rounded = [job(f"bf16-{zero}", "mae", precision="bf16", zero_stage=zero) for zero in (1, 3)]
    parts = job("parts", "mae", accumulation=4)
    jobs += [*rounded, parts]
    assert run(2, *jobs, log=tmp_path / "log") == ["done"] * len(jobs)
    for folder in (tmp_path / "zero2", tmp_path / "zero3"):
        same(alone, folder)
        norms = [[line["grad_norm"] for line in metrics(f / "ct")] for f in (alone, folder)]
        np.testing.assert_allclose(*norms, rtol=1e-3)
        # The queue holds the same samples in the same places.
        ours, theirs = (load_file(f / "ct/head.safetensors") for f in (alone, folder))
        for name in ("queue_ids", "queue_labels"):
            assert (ours[name] == theirs[name]).all()
    assert losses(rounded[0]["folder"]) == losses(rounded[1]["folder"])
    np.testing.assert_allclose(losses(parts["folder"]), losses(alone / "mae"), rtol=TOLERANCE)
    rates = [[line["lr"] for line in metrics(f)] for f in (parts["folder"], alone / "mae")]
    assert rates[0] == rates[1]
