"""The real thing: two ranks, killed and restarted, ends with the bits of one that was not."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from maect.core.files import read_json
from maect.evaluate import fine_tune
from maect.evaluate.fine_tune_settings import FineTune
from maect.evaluate.job import Job
from maect.evaluate.run import evaluate

sys.path.append(str(Path(__file__).parents[1] / "train"))
import ranks
from ranks import run

from .conftest import resolved

ranks._server.set_forkserver_preload(
    ["maect.train.run", "deepspeed", "torch.utils.tensorboard", "maect.evaluate.fine_tune"]
)

SETTINGS = FineTune(
    epochs=2, batch_size=24, base_lr=2e-2, warmup_epochs=0.5, seeds=2, precision="fp32",
    crop_scale=(0.5, 1.0), flip=0.0,
)  # fmt: skip


def evaluated(context: Any, save_seconds: float, config: str) -> str:
    """In every rank; a rank that ends before the others would end them here."""
    fine_tune.SAVE_SECONDS = save_seconds
    verdict = evaluate(context, config=config)
    dist.barrier()
    return verdict


def job(images: Path, out: Path, settings: FineTune = SETTINGS, save_seconds: float = 600):
    shards = images / "shards"
    inputs = {"train": shards / "train", "test": shards / "val"}
    config = resolved(Job(images / "runs" / "mae", out, inputs, resize=16), settings)
    return {"function": evaluated, "save_seconds": save_seconds, "config": str(config)}


@pytest.fixture(scope="module")
def whole(images: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two seeds of 12 steps each, with every component, on two ranks."""
    out = tmp_path_factory.mktemp("whole") / "fine_tune.json"
    assert run(2, job(images, out), log=out.with_suffix(".log")) == ["done"]
    assert sorted(path.name for path in out.parent.iterdir()) == ["fine_tune.json", "fine_tune.log"]
    return read_json(out)


def test_killed_and_restarted(images: Path, tmp_path: Path, whole: dict[str, Any]) -> None:
    out, log = tmp_path / "fine_tune.json", tmp_path / "log"
    always = job(images, out, save_seconds=0)
    with pytest.raises(RuntimeError, match="no rank answered"):
        run(2, always, log=log, kill_at=5)  # in the first training
    assert not out.exists()
    assert run(2, always, log=log, stop_at=17) == ["requeue"]  # in the second
    assert log.read_text().count("going on from step") == 1
    assert run(2, always, log=log) == ["done"]
    assert read_json(out)["metrics"] == whole["metrics"]
    assert not list(tmp_path.glob(".*"))


def test_one_rank_has_the_losses_of_two(
    images: Path, tmp_path: Path, whole: dict[str, Any]
) -> None:
    out = tmp_path / "fine_tune.json"
    assert run(1, job(images, out), log=tmp_path / "log") == ["done"]
    one, two = read_json(out)["metrics"], whole["metrics"]
    for name, losses in two["losses"].items():
        np.testing.assert_allclose(one["losses"][name], losses, rtol=1e-4)
    np.testing.assert_allclose(one["fine_tune_seeds"], two["fine_tune_seeds"], atol=100 / 70 + 1e-9)


def test_what_the_result_says(whole: dict[str, Any]) -> None:
    metrics, subsets = whole["metrics"], whole["provenance"]["subsets"]
    values = metrics["fine_tune_seeds"]
    assert metrics["fine_tune"] == pytest.approx(np.mean(values))
    assert metrics["fine_tune_std"] == pytest.approx(np.std(values, ddof=1))
    assert list(subsets) == ["fine_tune-seed0", "fine_tune-seed1"]
    assert [subset["images"] for subset in subsets.values()] == [150, 150]
    assert len(set(metrics["weights_sha256"].values())) == 2
    assert whole["provenance"]["world_size"] == 2 and whole["provenance"]["test_data"] is None
    assert FineTune.model_validate(
        {k: v for k, v in whole["settings"].items() if k != "resize"}
    ) == SETTINGS  # fmt: skip
    json.dumps(whole, allow_nan=False)


def test_learns_digits_and_stops_at_a_loss_that_is_not_finite(images: Path, tmp_path: Path) -> None:
    plain = {"seeds": 1, "mixup": 0, "cutmix": 0, "random_erasing": 0, "randaugment_layers": 0}
    plain |= {"drop_path": 0, "epochs": 25, "base_lr": 6e-2, "layer_decay": 1.0}
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    settings = SETTINGS.model_copy(update=plain)
    diverges = settings.model_copy(update={"base_lr": 1e30, "warmup_epochs": 0})
    message = run(
        1, job(images, good, settings), job(images, bad, diverges), log=tmp_path / "log"
    )  # fmt: skip
    assert read_json(good)["metrics"]["fine_tune"] > 30  # ten classes
    assert "UserError" in message and "nan in step" in message and not bad.exists()
