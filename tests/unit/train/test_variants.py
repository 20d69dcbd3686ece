"""Every variant of the paper is a run: settings and a source, no other code."""

from pathlib import Path

import numpy as np
import torch
from ranks import alone, run
from safetensors.torch import load_file
from tiny_runs import losses, metrics, noise_shards

from maect.data.index import open_index
from maect.data.shards import shard
from maect.data.subsets import class_view
from maect.models.kernels import bfloat16_on
from maect.recipes import Encoder
from maect.stages.pretrain import Pretrain
from maect.stages.tune import Tune


def weights(folder, name="encoder"):
    return load_file(Path(folder) / f"{name}.safetensors")


def equal(a, b, prefix=""):
    return all(torch.equal(value, b[key]) for key, value in a.items() if key.startswith(prefix))


def test_all_variants_train(job, tmp_path):
    """Combined and detached pre-training, CT_skip, CT after combined, and the ablations."""
    combined = {"contrastive": "combined", "head": {}}
    scratch = {"from_scratch": True, "frozen_blocks": 0, "layer_decay": 1.0}
    half = {"lookup": "oracle", "oracle_right": 0.5}
    asked = {
        "mae": ("mae", None, {}), "combined": ("mae", None, combined),
        "detached": ("mae", None, combined | {"contrastive": "detached"}),
        "head": ("head_min", "mae", {}), "head_combined": ("head_min", "combined", {}),
        "ct": ("ct_min", "head", {}), "skip_combined": ("ct_min", "combined", {}),
        "after_combined": ("ct_min", "head_combined", {}), "no_init": ("ct_min", "mae", {}),
        "masked": ("ct_min", "head", {"mask_ratio": 0.75}),
        "no_lookup": ("ct_min", "head", {"head": {"lookup": "none"}}),
        "oracle": ("ct_min", "head", {"head": {"lookup": "oracle"}}),
        "half_right": ("ct_min", "head", {"head": half, "epochs": 4}),
        "from_scratch": ("ct_aug", None, scratch),
        "k30": ("ct_min", "head", {"head": {"topk": 30}}),
        "six_layers": ("ct_min", "head", {"frozen_blocks": 3}),
        "no_ema": ("ct_min", "head", {"encoder_ema": 0.0}),
        "no_projector_ema": ("ct_min", "head", {"head": {"projector_ema": 0.0}}),
        "bf16": ("ct_min", "head", {"precision": "bf16", "head": {"lookup": "none"}}),
        "saving": ("ct_min", "head", {"activation_checkpointing": True}),
        "mae_reg": ("mae", None, {}), "head_reg": ("head_min", "mae_reg", {}),
        "ct_reg": ("ct_min", "head_reg", {}),
    }  # fmt: skip
    jobs = {
        name: job(name, recipe, source, **{"epochs": 2} | changes)
        for name, (recipe, source, changes) in asked.items()
    }
    for name in ("mae_reg", "head_reg", "ct_reg"):
        jobs[name]["encoder"] |= {"registers": 3}
    assert run(1, *jobs.values(), log=tmp_path / "log") == ["done"] * len(jobs)
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

    A view has the ids of its images, and other numbers for their classes. Lookups among images
    without labels are not judged.
    """
    other = {"shards": str(noise_shards(tmp_path / "other", 48))}
    shard(tmp_path / "other/images", tmp_path / "unlabelled", "unlabelled", 2)
    class_view(shards, tmp_path / "view", open_index(shards).class_names[::-1])
    oracle = {"head": {"lookup": "oracle"}, "epochs": 1}
    jobs = [
        job("mae", "mae", epochs=1),
        job("head", "head_min", "mae", epochs=2),  # 5 steps fill the queue of 4 batches
        job("same", "ct_min", "head", **oracle),
        job("others", "ct_min", "head", **oracle) | other,
        job("view", "ct_min", "head", **oracle) | {"shards": str(tmp_path / "view")},
        job("unlabelled", "ct_min", "head", epochs=1) | {"shards": str(tmp_path / "unlabelled")},
    ]
    assert alone(*jobs) == ["done"] * 6
    logged = metrics(tmp_path / "runs/unlabelled")[-1].keys()
    assert "lookup_similarity" in logged and "lookup_accuracy" not in logged
    left = weights(tmp_path / "runs/view", "head")
    assert (left["queue_ids"] >= 0).all() and 0 < (left["queue_labels"] < 0).sum() < 64
    for name, unknown in (("same", 0), ("others", 16)):  # 48 images are three batches
        left = weights(tmp_path / "runs" / name, "head")
        first = metrics(tmp_path / "runs" / name)[0]
        for key in ("queue_ids", "queue_labels"):
            assert (left[key] < 0).sum() == unknown, (name, key)
        assert first["queue_filled"] == (name == "same")
        assert first["lookup_accuracy"] == 100 * (name == "same")
