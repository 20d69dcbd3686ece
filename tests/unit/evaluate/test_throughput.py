from contextlib import nullcontext

import pytest
import torch

from maect.core.errors import UserError
from maect.evaluate import throughput
from maect.evaluate.base import EvaluationJob
from maect.evaluate.protocols.encoders import Throughput
from maect.evaluate.throughput import METHODS, PUBLISHED, MethodPasses, Published, method_seconds
from maect.models.vit import VisionEncoder, build_encoder
from maect.models.weights import save_encoder
from maect.recipes import Encoder, Pixels
from maect.report.tables import paper_table
from maect.stages import load_recipe

SMALL = Encoder(
    image_size=28, patch_size=4, width=16, depth=4, heads=2, decoder_width=8, decoder_depth=1,
    decoder_heads=1, mae_pooling="cls", ct_pooling="cls",
)  # fmt: skip
CPU = torch.device("cpu")
STAGES = {"pretrain", "head", "tune", "head_aug", "tune_aug"}


@pytest.fixture
def job(tmp_path):
    save_encoder(tmp_path / "encoder.safetensors", build_encoder(SMALL).state_dict(), SMALL, "cls")
    return EvaluationJob(tmp_path, tmp_path / "out.json")


def test_every_stage_and_method_is_measured(job, rank, monkeypatch):
    models = (
        Published("tiny", "mae_public", {"mae": 50}),
        Published("tiny", "layer_grafting", {"mae": 50, "moco_v3": 30}),
        Published("tiny2", "msn", {"msn": 20}, {"patch_size": 2}),
        Published("tiny2", "mae_public", {"mae": 10}, {"patch_size": 2}),
    )
    monkeypatch.setattr(throughput, "PUBLISHED", {"tiny": models})
    settings = Throughput(size="tiny", batch_size=2, warmup=1, repeats=2, images=3600)
    metrics = settings.evaluate(rank, job)
    speed, hours = metrics["samples_per_second"], metrics["device_hours"]
    others = {"mae", "mae tiny2", "msn tiny2"}
    assert {*STAGES, "pretrain_plain_attention", "tune_masked", *METHODS, *others} == {*speed}
    for name, middle in speed.items():
        assert 0 < metrics["slowest"][name] <= middle <= metrics["fastest"][name]
    # 45 epochs of 3,600 images.
    assert hours["pretrain"] == pytest.approx(45 / speed["pretrain"])
    assert set(hours) == {*STAGES, "maect"}
    assert hours["maect"] == pytest.approx(hours["pretrain"] + hours["head"] + hours["tune"])
    assert metrics["flash_gain"] == pytest.approx(
        100 * (speed["pretrain"] / speed["pretrain_plain_attention"] - 1)
    )
    grafted = 50 / speed["mae"] + 30 / speed["moco_v3"]
    assert metrics["model_hours"] == {
        "tiny": {
            "mae": hours["pretrain"],
            "ct_min": hours["maect"],
            "ct_aug": pytest.approx(hours["pretrain"] + hours["head_aug"] + hours["tune_aug"]),
            "mae_public": pytest.approx(50 / speed["mae"]),
            "layer_grafting": pytest.approx(grafted),
        },
        "tiny2": {
            "msn": pytest.approx(20 / speed["msn tiny2"]),
            "mae_public": pytest.approx(10 / speed["mae tiny2"]),
        },
    }
    tuning = hours["head"] + hours["tune"]
    assert metrics["grafting_ratio"] == pytest.approx(30 / speed["moco_v3"] / tuning)
    assert not {"tune_fits", "tune_masked_fits"} & set(metrics)  # a CPU has no largest batch
    for values, message in (
        ({"size": "tiny", "batch_size": 3}, "batch_size 3 does not divide the queue_size 1024 of"),
        ({"batch_size": 4}, "recipes of size large do not fit"),
    ):
        with pytest.raises(UserError, match=message):
            Throughput(**values).evaluate(rank, job)


def test_published_models_are_those_of_table_17():
    """Epochs, views and masked share as printed; MoCo v3 with ViT-B is the public file's."""
    printed = paper_table("extended")
    for model in (one for models in PUBLISHED.values() for one in models):
        line = printed.loc[(model.architecture, model.method)]
        epochs = "; ".join(map(str, model.epochs.values()))
        if (model.architecture, model.method) == ("base", "moco_v3"):
            assert (epochs, line.epochs) == ("300", "600")
        else:
            assert epochs == line.epochs
        passes = METHODS.get(model.method)
        if model.method in ("dino", "ibot", "msn"):
            views = f"{passes.learning} / {passes.local} / {passes.teacher}"
            assert views == line.views
        elif model.method == "cmae":
            assert f"{passes.learning} / - / {passes.teacher}" == line.views == "1 / - / 1"
        elif model.method in ("simmim", "nnclr"):
            assert (str(passes.learning), passes.teacher) == (line.views, 0)
        if model.method in ("msn", "cmae"):
            assert str(passes.mask_ratio) == line.mask_ratio
    # Table 17 has nothing beside them but our own.
    known = {(one.architecture, one.method) for models in PUBLISHED.values() for one in models}
    assert {method for _, method in set(printed.index) - known} == {"mae", "ct_min", "ct_aug"}


def test_a_gpu_tells_how_much_of_a_batch_fits(job, rank, monkeypatch):
    batches = {"tune": 64, "tune_masked": 128}

    def measured(self, *args: object):
        names = [*STAGES, "pretrain_plain_attention", "tune_masked"]
        yield from ((name, name) for name in names)

    def fitting(name: str, *args: object) -> dict[str, float]:
        keys = ("samples_per_second", "fastest", "slowest")
        return dict.fromkeys(keys, 1.0) | {"batch_size": batches.get(name, 8)}

    monkeypatch.setattr(throughput, "_measured", measured)
    monkeypatch.setattr(throughput, "measure", fitting)
    monkeypatch.setattr(
        throughput, "single_rank_group", lambda context: nullcontext(torch.device("cuda"))
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    metrics = Throughput(size="tiny").evaluate(rank, job)
    whole = load_recipe("ct_min", "tiny").batch_size
    assert metrics["tune_fits"] == 64 / whole and metrics["tune_masked_fits"] == 128 / whole
    # A batch that was given says nothing of the largest.
    assert "tune_fits" not in Throughput(size="tiny", batch_size=8).evaluate(rank, job)


def test_a_method_passes_the_views_it_says(monkeypatch):
    seen = []
    plain = VisionEncoder.forward

    def counted(self, images, kept=None):
        found = plain(self, images, kept)
        patches = found.patch_tokens()
        seen.append((len(images), patches.shape[1], patches.requires_grad))
        return found

    monkeypatch.setattr(VisionEncoder, "forward", counted)
    method_seconds(MethodPasses(2, 10, 1, mask_ratio=0.15), SMALL, CPU, 3, 1)
    # Teacher: 49 patches; learning views: 41 of them; local views: 12 of 28 pixels, 9 patches.
    assert seen == [(3, 49, False), (6, 41, True), (30, 9, True)]
    pixels = Pixels(channels=5, mean=(0.5,) * 5, std=(0.25,) * 5)
    shape = SMALL.model_copy(update={"pixels": pixels})
    assert len(method_seconds(MethodPasses(2, 10, 1), shape, CPU, 3, 2)) == 2


def test_the_largest_power_of_two_that_fits(monkeypatch):
    def times(batch: int, steps: int) -> list[float]:
        if batch > 64:
            raise torch.cuda.OutOfMemoryError("too large")
        return [1.0] * steps

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert throughput.largest_batch(times, torch.device("cuda")) == 64
    assert throughput.largest_batch(lambda *_: [], torch.device("cuda")) == 1024
    assert throughput.largest_batch(times, CPU) == 16
