"""Every variant of the paper is a run: settings and a source, no other code."""

from pathlib import Path

import numpy as np
import torch
from ranks import run
from safetensors.torch import load_file
from tiny_runs import job_maker, losses, metrics, noise_shards

from maect.data.index import open_index
from maect.data.shards import shard
from maect.data.subsets import class_view
from maect.models.precision import bfloat16_on
from maect.recipes import Encoder
from maect.stages.objectives import Views
from maect.stages.pretrain import Pretrain
from maect.stages.tune import Head, Tune


def weights(folder, name="encoder"):
    return load_file(Path(folder) / f"{name}.safetensors")


def equal(a, b, prefix=""):
    return all(torch.equal(value, b[key]) for key, value in a.items() if key.startswith(prefix))


def test_lookups_among_images_without_labels_are_not_judged(tmp_path):
    noise_shards(tmp_path, 40)
    shards = tmp_path / "unlabelled"
    shard(tmp_path / "images", shards, "unlabelled", 2)
    both = {"contrastive": "detached", "head": {}, "epochs": 1}
    mae = job_maker(tmp_path, shards)("mae", "mae", **both)
    assert run(1, mae, log=tmp_path / "log") == ["done"]
    logged = {name for entry in metrics(mae["folder"]) for name in entry}
    assert "lookup_similarity" in logged and "lookup_accuracy" not in logged


def test_all_variants_train(job, tmp_path):
    """Combined and detached pre-training, CT_skip, CT after combined, and the ablations."""
    short = {"epochs": 2}
    combined = {"contrastive": "combined", "head": {}, **short}
    jobs = {
        "mae": job("mae", "mae", **short),
        "combined": job("combined", "mae", **combined),
        "detached": job("detached", "mae", **combined | {"contrastive": "detached"}),
        "head": job("head", "head_min", "mae", **short),
        "head_combined": job("head_combined", "head_min", "combined", **short),
        "ct": job("ct", "ct_min", "head", **short),
        "skip_combined": job("skip_combined", "ct_min", "combined", **short),
        "skip_detached": job("skip_detached", "ct_min", "detached", **short),
        "after_combined": job("after_combined", "ct_min", "head_combined", **short),
        "no_init": job("no_init", "ct_min", "mae", **short),
        "masked": job("masked", "ct_min", "head", mask_ratio=0.75, **short),
        "no_lookup": job("no_lookup", "ct_min", "head", head={"lookup": "none"}, **short),
        "oracle": job("oracle", "ct_min", "head", head={"lookup": "oracle"}, **short),
        "half_right": job(
            "half_right",
            "ct_min",
            "head",
            head={"lookup": "oracle", "oracle_right": 0.5},
            epochs=8,
        ),
        "from_scratch": job(
            "from_scratch", "ct_aug", from_scratch=True, frozen_blocks=0, layer_decay=1.0, **short
        ),
        "k1": job("k1", "ct_min", "head", head={"topk": 1}, **short),
        "k30": job("k30", "ct_min", "head", head={"topk": 30}, **short),
        "six_layers": job("six_layers", "ct_min", "head", frozen_blocks=3, **short),
        "no_ema": job("no_ema", "ct_min", "head", encoder_ema=0.0, **short),
        "no_projector_ema": job(
            "no_projector_ema", "ct_min", "head", head={"projector_ema": 0.0}, **short
        ),
        "bf16": job("bf16", "ct_min", "head", precision="bf16", head={"lookup": "none"}, **short),
        "saving": job("saving", "ct_min", "head", activation_checkpointing=True, **short),
    }
    jobs |= {
        "mae_reg": job("mae_reg", "mae", **short),
        "head_reg": job("head_reg", "head_min", "mae_reg", **short),
        "ct_reg": job("ct_reg", "ct_min", "head_reg", **short),
    }
    for name in ("mae_reg", "head_reg", "ct_reg"):
        jobs[name]["encoder"] |= {"registers": 3}
    assert run(2, *jobs.values(), log=tmp_path / "log") == ["done"] * len(jobs)
    at = {name: Path(value["folder"]) for name, value in jobs.items()}

    # A detached head changes nothing about the MAE; a combined one does.
    assert equal(weights(at["mae"]), weights(at["detached"]))
    assert not equal(weights(at["mae"]), weights(at["combined"]))
    mae, both = losses(at["mae"]), metrics(at["combined"])
    assert both[0]["loss_mae"] == mae[0]
    np.testing.assert_allclose(
        [line["loss"] for line in both],
        [line["loss_mae"] + 0.001 * line["loss_nnclr"] for line in both],
        rtol=1e-6,
    )
    # Head initialisation leaves the encoder as it is, to the byte.
    encoder_file = "encoder.safetensors"
    assert (at["head"] / encoder_file).read_bytes() == (at["mae"] / encoder_file).read_bytes()
    # Tuning leaves the frozen half as it is and changes the rest.
    before, after = weights(at["head"]), weights(at["ct"])
    for key in before:
        frozen = key.startswith(("patch_embed", "cls_token", "pos_embed", "blocks.0", "blocks.1"))
        assert torch.equal(before[key], after[key]) == frozen, key
    # Registers are learnt in pre-training and frozen with [CLS] in tuning.
    register = weights(at["mae_reg"])["reg_token"]
    assert register.shape == (1, 3, 16)
    assert torch.equal(register, weights(at["ct_reg"])["reg_token"])
    three = weights(at["six_layers"])
    assert equal(before, three, "blocks.2.") and not equal(before, three, "blocks.3.")
    # Each variant is another experiment: no two tuned encoders are the same ...
    same = {"saving"} | ({"bf16"} if bfloat16_on("cpu") == "float32" else set())
    tuned = [n for n in jobs if jobs[n]["stage"] == "tune" and n not in same]
    for i, name in enumerate(tuned):
        for other in tuned[:i]:
            assert not equal(weights(at[name]), weights(at[other])), (name, other)
    # ... but recomputing activations is none, and bf16 stays close, where no lookup magnifies it.
    assert equal(after, weights(at["saving"]))
    np.testing.assert_allclose(losses(at["bf16"]), losses(at["no_lookup"]), rtol=0.01)
    assert metrics(at["oracle"])[-1]["lookup_accuracy"] == 100
    right = [line["lookup_accuracy"] for line in metrics(at["half_right"])[5:]]
    assert 30 < np.mean(right) < 70 and 0 < max(right) < 100
    assert "lookup_accuracy" not in metrics(at["no_lookup"])[-1]
    # A control begins as MAE's pre-training does, with nothing frozen.
    scratch = jobs["from_scratch"]
    shape = Encoder.model_validate(scratch["encoder"])
    begun = Tune.model_validate(scratch["settings"]).build(shape, 1, None)
    fresh = Pretrain.model_validate(jobs["mae"]["settings"]).build(shape, 1, None)
    assert equal(begun.encoder.state_dict(), fresh.encoder.state_dict())
    assert all(parameter.requires_grad for parameter in begun.encoder.parameters())
    learnt = weights(at["from_scratch"])
    for key, value in begun.encoder.state_dict().items():
        assert torch.equal(value, learnt[key]) == (key == "pos_embed"), key
    # Without an EMA the exported encoder is the trained one; with it, it lags behind.
    start = before["norm.weight"]
    moved = {n: (weights(at[n])["norm.weight"] - start).abs().sum() for n in ("ct", "no_ema")}
    assert 0 < moved["ct"] < 0.2 * moved["no_ema"]
    # Skipping the initialisation starts from a fresh head, CT_skip from the pre-trained one.
    assert metrics(at["no_init"])[0]["queue_filled"] == 0
    assert metrics(at["skip_combined"])[0]["queue_filled"] > 0


def test_a_queue_of_other_images_has_no_id_or_label_of_them(job, shards, tmp_path):
    """Images and classes there have the same numbers: an oracle would take them for its own.

    A view has the ids of its images, and other numbers for their classes.
    """
    other = {"shards": str(noise_shards(tmp_path / "other", 48))}
    class_view(shards, tmp_path / "view", open_index(shards).class_names[::-1])
    oracle = {"head": {"lookup": "oracle"}, "epochs": 1}
    jobs = [
        job("mae", "mae", epochs=1),
        job("head", "head_min", "mae", epochs=2),  # 5 steps fill the queue of 4 batches
        job("same", "ct_min", "head", **oracle),
        job("others", "ct_min", "head", **oracle) | other,
        job("view", "ct_min", "head", **oracle) | {"shards": str(tmp_path / "view")},
    ]
    assert run(2, *jobs, log=tmp_path / "log") == ["done"] * 5
    left = weights(tmp_path / "runs/view", "head")
    assert (left["queue_ids"] >= 0).all() and 0 < (left["queue_labels"] < 0).sum() < 64
    for name, unknown in (("same", 0), ("others", 16)):  # 48 images are three batches
        left = weights(tmp_path / "runs" / name, "head")
        first = metrics(tmp_path / "runs" / name)[0]
        for key in ("queue_ids", "queue_labels"):
            assert (left[key] < 0).sum() == unknown, (name, key)
        assert first["queue_filled"] == (name == "same")
        assert first["lookup_accuracy"] == 100 * (name == "same")


def test_head_initialisation_builds_no_graph_of_the_encoder(job, tmp_path):
    only = job("mae", "mae", epochs=1)
    assert run(1, only, log=tmp_path / "log") == ["done"]
    value = job("head", "head_min", "mae")
    shape = Encoder.model_validate(value["encoder"])
    stage = Head.model_validate(value["settings"])
    objective = stage.build(shape, 0, Path(only["folder"]))
    seen = []
    objective.encoder.register_forward_hook(
        lambda _, __, out: seen.append(out.tokens.requires_grad)
    )
    ids = torch.arange(4)
    neighbors = torch.zeros(2, 4, dtype=torch.int64)
    views = Views((torch.randn(2, 4, 3, 16, 16),), None, ids, ids, neighbors)
    loss, _ = objective(views)
    loss.backward()
    assert seen == [False]
    assert all(p.grad is None for p in objective.encoder.parameters())
    assert all(p.grad is not None for p in objective.head.parameters())


def test_only_a_combined_head_reaches_the_encoder(job):
    gradients = {}
    order = torch.stack([torch.stack([torch.randperm(16) for _ in range(4)]) for _ in range(2)])
    ids = torch.arange(4)
    neighbors = torch.zeros(2, 4, dtype=torch.int64)
    views = Views((torch.randn(2, 4, 3, 16, 16),), order, ids, ids, neighbors)
    for how in ("none", "detached", "combined"):
        head = {} if how == "none" else {"head": {}}
        value = job(how, "mae", batch_size=4, contrastive=how, contrastive_weight=1.0, **head)
        stage = Pretrain.model_validate(value["settings"])
        shape = Encoder.model_validate(value["encoder"])
        objective = stage.build(shape, 0, None)
        objective(views)[0].backward()
        gradients[how] = objective.encoder.blocks[0].mlp.fc1.weight.grad
        if how != "none":
            assert objective.head.projector[0].weight.grad.abs().max() > 0
    assert torch.equal(gradients["none"], gradients["detached"])
    assert not torch.allclose(gradients["none"], gradients["combined"])
