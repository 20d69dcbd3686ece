"""The number of ranks, the ZeRO stage and accumulation do not change the experiment."""

from pathlib import Path

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


@pytest.mark.parametrize("recipe", ["mae", "head_min", "ct_min", "ct_aug", "refine"])
def test_ranks_in_float64(job, tmp_path, recipe):
    """Losses, weights, statistics and queue agree to rounding, which no neighbour hangs on.

    BatchNorm's statistics of a rank's own rows, or rows gathered in another order, do not.
    """
    found = {}
    changes = {"contrastive": "combined", "head": {}} if recipe == "mae" else {}
    one, head = job("run", "ct_aug" if recipe == "refine" else recipe, **changes), "head"
    if recipe == "refine":
        small = {"batch_size": 16, "precision": "fp32", "head": {"queue_size": 64, "topk": 3}}
        settings = load_recipe("refine", "tiny", small).model_dump(mode="json")
        one, head = one | {"stage": "refine", "settings": settings}, "heads"
    for ranks in (1, 2, 4):
        out = tmp_path / f"{ranks}.pt"
        one |= {"function": float64.steps, "out": str(out)}
        assert run(ranks, one, log=tmp_path / "log") == ["done"]
        found[ranks] = torch.load(out)
    assert found[1][f"{head}.queue_ids"].unique().numel() == 40  # all samples came
    for ranks in (2, 4):
        for name, value in found[1].items():
            torch.testing.assert_close(found[ranks][name], value, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks(job, tmp_path, alone, ranks):
    folder = tmp_path / "several"
    done = run(ranks, *stages(job, folder, alone), log=tmp_path / "several.log")
    assert done == ["done"] * 3
    same(alone, folder)
    # The queue holds the same samples in the same places.
    ours, theirs = (load_file(f / "ct/head.safetensors") for f in (alone, folder))
    assert (ours["queue_ids"] == theirs["queue_ids"]).all()
    assert (ours["queue_labels"] == theirs["queue_labels"]).all()


@pytest.mark.parametrize("zero", [2, 3])
def test_zero_stages(job, tmp_path, alone, zero):
    folder = tmp_path / "zero"
    jobs = stages(job, folder, alone, zero_stage=zero)
    assert run(2, *jobs, log=tmp_path / "zero.log") == ["done"] * 3
    same(alone, folder)
    norms = [[line["grad_norm"] for line in metrics(f / "ct")] for f in (alone, folder)]
    np.testing.assert_allclose(*norms, rtol=1e-3)


def test_layers_of_partitioned_weights_round_as_all_others(job, tmp_path):
    """In bfloat16, too: DeepSpeed's own linear layer would add the bias to what is rounded."""
    found = []
    for zero in (1, 3):
        one = job(f"zero{zero}", "mae", precision="bf16", zero_stage=zero)
        assert run(2, one, log=tmp_path / "log") == ["done"]
        found.append(losses(one["folder"]))
    assert found[0] == found[1]


def test_accumulation_gives_the_same_mae(job, tmp_path, alone):
    folder = tmp_path / "parts"
    for ranks in (1, 2):
        name = f"mae{ranks}"
        only = job(name, "mae", folder=folder, accumulation=4)
        assert run(ranks, only, log=tmp_path / "parts.log") == ["done"]
        np.testing.assert_allclose(losses(folder / name), losses(alone / "mae"), rtol=TOLERANCE)
        rates = [[line["lr"] for line in metrics(f)] for f in (folder / name, alone / "mae")]
        assert rates[0] == rates[1]


def test_same_ranks_same_bits(job, tmp_path, whole):
    jobs = [
        job("mae", "mae"), job("head_min", "head_min", "mae"), job("ct_min", "ct_min", "head_min"),
    ]  # fmt: skip
    assert run(2, *jobs, log=tmp_path / "log") == ["done"] * 3
    for value in jobs:
        b = Path(value["folder"])
        a = whole / b.name
        assert metrics(a) == metrics(b)
        assert (a / "encoder.safetensors").read_bytes() == (b / "encoder.safetensors").read_bytes()
