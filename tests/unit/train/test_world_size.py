"""Ranks, ZeRO stages and accumulation change nothing about the steps of a plain PyTorch loop."""

import math
from pathlib import Path

import float64
import numpy as np
import pytest
import torch
from ranks import run
from safetensors.torch import load_file
from tiny_runs import job_maker, losses, metrics

from maect.data.index import open_index
from maect.recipes import Encoder
from maect.stages import STAGES, load_recipe

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


def plain(value, steps):
    """Losses, gradient norms and the final encoder of a run, by a loop without DeepSpeed."""
    stage = STAGES[value["stage"]].model_validate(value["settings"])
    source = value["source"] and Path(value["source"])
    objective = stage.build(Encoder.model_validate(value["encoder"]), value["seed"], source)
    trained = {n: p for n, p in objective.named_parameters() if p.requires_grad}
    final = {n: p.detach() for n, p in trained.items() if n.startswith("encoder.")}
    average = None if stage.encoder_average is None else {n: v.clone() for n, v in final.items()}
    found, norms = [], []
    index = open_index(Path(value["shards"]))
    for _, _, loss, _ in float64.trained(objective, stage, index, steps, value["seed"], average):
        found.append(loss.item())
        norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in trained.values())))
    return found, norms, average or final


def test_one_rank_takes_the_steps_of_a_plain_loop(job, alone):
    mae, _, tune = stages(job, alone)
    for value in (mae, tune):
        found, norms, final = plain(value, 10)
        assert max(norms) > 1.2  # gradients are not clipped, which would show from here on
        np.testing.assert_allclose(losses(value["folder"]), found, rtol=1e-5)
        logged = [line["grad_norm"] for line in metrics(value["folder"])]
        np.testing.assert_allclose(logged, norms, rtol=1e-4)
        saved = load_file(f"{value['folder']}/encoder.safetensors")
        for name, parameter in final.items():
            torch.testing.assert_close(
                saved[name.removeprefix("encoder.")], parameter, rtol=0, atol=1e-5, msg=name
            )


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
    for ranks in (1, 2):
        each = [
            value | {"function": float64.steps, "out": str(tmp_path / f"{recipe}-{ranks}.pt")}
            for recipe, value in jobs.items()
        ]
        assert run(ranks, *each, log=tmp_path / "log") == ["done"] * len(jobs)
    for recipe in jobs:
        alone, found = (torch.load(tmp_path / f"{recipe}-{ranks}.pt") for ranks in (1, 2))
        head = "heads" if recipe == "refine" else "head"
        assert alone[f"{head}.queue_ids"].unique().numel() == 40  # all samples came
        for name, value in alone.items():
            message = f"{recipe} {name}"
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11, msg=message)


def test_zero_stages_and_accumulation(job, tmp_path, alone):
    """On two ranks; accumulation only where no loss is one of the whole batch."""
    log, folders = tmp_path / "log", {zero: tmp_path / f"zero{zero}" for zero in (1, 2, 3)}
    jobs = []
    for zero, folder in folders.items():
        mae, head, tune = stages(job, folder, alone, zero_stage=zero)
        jobs += [mae, head, tune] if zero == 3 else [mae, tune]
    # In bfloat16, too: DeepSpeed's own linear layer would add the bias to what is rounded.
    rounded = [job(f"bf16-{zero}", "mae", precision="bf16", zero_stage=zero) for zero in (1, 3)]
    parts = job("parts", "mae", accumulation=4)
    jobs += [*rounded, parts]
    assert run(2, *jobs, log=log) == ["done"] * len(jobs)
    assert "untested optimizer" not in log.read_text()
    for folder in folders.values():
        for name in sorted(path.name for path in folder.iterdir()):
            ours, theirs = (metrics(f / name) for f in (alone, folder))
            assert len(ours) == 10
            for key, tolerance in (("loss", TOLERANCE), ("grad_norm", 1e-3)):
                both = [[line[key] for line in lines] for lines in (ours, theirs)]
                np.testing.assert_allclose(*both, rtol=tolerance)
            ours, theirs = (load_file(f / name / "encoder.safetensors") for f in (alone, folder))
            for key, value in ours.items():
                np.testing.assert_allclose(value, theirs[key], atol=1e-4, err_msg=f"{name} {key}")
        # The queue holds the same samples in the same places.
        ours, theirs = (load_file(f / "ct/head.safetensors") for f in (alone, folder))
        for name in ("queue_ids", "queue_labels"):
            assert (ours[name] == theirs[name]).all()
    assert losses(rounded[0]["folder"]) == losses(rounded[1]["folder"])
    np.testing.assert_allclose(losses(parts["folder"]), losses(alone / "mae"), rtol=TOLERANCE)
    rates = [[line["lr"] for line in metrics(f)] for f in (parts["folder"], alone / "mae")]
    assert rates[0] == rates[1]
