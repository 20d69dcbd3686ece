from pathlib import Path

import pytest
import torch

from maect.core.errors import UserError
from maect.evaluate import throughput
from maect.evaluate.base import Job
from maect.evaluate.throughput import METHODS, Passes, Throughput, method_step
from maect.models.vit import VisionEncoder, build_encoder
from maect.models.weights import save_encoder
from maect.recipes import Encoder
from maect.stages import load_recipe

from .conftest import Rank

SMALL = Encoder(
    image_size=28, patch_size=4, width=16, depth=4, heads=2, decoder_width=8, decoder_depth=1,
    decoder_heads=1, mae_pooling="cls", ct_pooling="cls",
)  # fmt: skip
CPU = torch.device("cpu")


def test_every_stage_and_method_is_measured(tmp_path: Path, rank: Rank) -> None:
    save_encoder(tmp_path / "encoder.safetensors", build_encoder(SMALL).state_dict(), SMALL, "cls")
    job = Job(tmp_path, tmp_path / "out.json")
    settings = Throughput(size="tiny", batch_size=2, warmup=1, repeats=2, images=3600)
    metrics = settings.evaluate(rank, job)
    names = {"pretrain", "head", "tune", *METHODS}
    assert set(metrics["samples_per_second"]) == names
    for name in names:
        slow, middle, fast = (
            metrics[key][name] for key in ("slowest", "samples_per_second", "fastest")
        )
        assert 0 < slow <= middle <= fast
    speed, hours = metrics["samples_per_second"], metrics["device_hours"]
    # 45 epochs of 3,600 images; no compared method was published at this size.
    assert hours["pretrain"] == pytest.approx(45 / speed["pretrain"])
    assert set(hours) == {"pretrain", "head", "tune", "maect"}
    assert hours["maect"] == pytest.approx(hours["pretrain"] + hours["head"] + hours["tune"])
    with pytest.raises(UserError, match="recipes of size large do not fit"):
        Throughput(batch_size=4).evaluate(rank, job)


def test_steps_train_what_the_stage_trains() -> None:
    stage = load_recipe("ct_min", "tiny")
    objective = stage.objective(SMALL, 0)
    step = throughput.stage_step(stage, objective, 8, CPU)
    before = {name: p.detach().clone() for name, p in objective.named_parameters()}
    step()
    after = dict(objective.named_parameters())
    # Peak rates of the first groups may be tiny, but no trained weight stands still.
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert "encoder.blocks.3.attn.qkv.weight" in moved and "head.predictor.0.weight" in moved
    assert not any(name.startswith(("encoder.blocks.0", "encoder.patch_embed")) for name in moved)


def test_a_method_passes_the_views_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    plain = VisionEncoder.forward

    def counted(self, images, kept=None):
        tokens = plain(self, images, kept)
        seen.append((len(images), tokens.shape[1] - 1, tokens.requires_grad))
        return tokens

    monkeypatch.setattr(VisionEncoder, "forward", counted)
    step = method_step(Passes(2, 10, 1, mask_ratio=0.15), SMALL, 3, CPU)
    step()
    # Teacher: 49 patches; learning views: 41 of them; local views: 12 of 28 pixels, 9 patches.
    assert seen == [(3, 49, False), (6, 41, True), (30, 9, True)]


def test_the_largest_power_of_two_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(batch: int):
        def step() -> None:
            if batch > 64:
                raise torch.cuda.OutOfMemoryError("too large")

        return step

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert throughput.largest_batch(steps, torch.device("cuda")) == 64
    assert throughput.largest_batch(lambda _: lambda: None, torch.device("cuda")) == 1024
    assert throughput.largest_batch(steps, CPU) == 16
