"""The real thing: two ranks, killed and restarted, end with the bits of ranks that were not."""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from maect.cli import main
from maect.core.errors import UserError
from maect.core.files import read_record, sha256_file, write_record
from maect.data.index import open_index
from maect.evaluate.accuracy import FineTuned
from maect.evaluate.base import EvaluationJob
from maect.evaluate.evaluation import evaluate
from maect.evaluate.features import Encoding
from maect.evaluate.protocols.encoders import Accuracy
from maect.models.weights import load_encoder_weights
from maect.records import RunRecord, entries
from maect.stages.fine_tune import FineTune
from maect.stages.run import RunConfig

sys.path.append(str(Path(__file__).parents[1] / "train"))
import ranks
from ranks import run

from .by_hand import all_images, blocks_of, clear
from .conftest import Rank, resolved
from .test_real import real_of, write

ranks._server.set_forkserver_preload(
    [*ranks.PRELOAD, "maect.stages.classifier", "maect.evaluate.accuracy"]
)

SETTINGS = Accuracy(
    epochs=2, batch_size=24, base_lr=2e-2, warmup_epochs=0.5, seeds=2, precision="fp32",
    crop_scale=(0.5, 1.0), flip=0.0, pooling="fc_norm",
)  # fmt: skip
WITH_TWIN = SETTINGS.model_copy(update={"seeds": 1, "held_out": 0.2})
ALWAYS = {"save_every_minutes": 0.0}


def trainings(images: Path, folder: Path, settings: Accuracy = SETTINGS) -> dict[str, Any]:
    """Arguments of each training, by its suffix."""
    encoder = load_encoder_weights(images / "runs" / "mae" / "encoder.safetensors")[1]
    return {
        suffix: {
            "folder": str(folder / suffix), "shards": str(images / "shards" / "train"),
            "stage": "fine_tune", "settings": stage.model_dump(mode="json"),
            "encoder": encoder.model_dump(mode="json"), "seed": seed,
            "source": str(images / "runs" / "mae"), "test": str(images / "shards" / "val"),
            "resize": 16,
        }
        for suffix, (stage, seed) in settings.trainings().items()
    }  # fmt: skip


def scored(images: Path, folder: Path, settings: Accuracy = SETTINGS) -> dict[str, Any]:
    """The result of the protocol on one rank."""
    out, test = folder / "fine_tune.json", images / "shards" / "val"
    inputs = {"trained": [folder / suffix for suffix in settings.trainings()], "test": test}
    config = resolved(EvaluationJob(images / "runs" / "mae", out, inputs, resize=16), settings)
    assert evaluate(Rank(), config=config) == "done"
    return read_record(out)


@pytest.fixture(scope="module")
def whole(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of 12 steps each, with every component, on two ranks, and the first one's twin."""
    folder = tmp_path_factory.mktemp("whole")
    jobs = trainings(images, folder).values()
    twin = trainings(images, folder, WITH_TWIN)["seed0_held_out"]
    halves = twin | ALWAYS | {"stop_at": 6}, twin
    verdicts = run(2, *jobs, *halves, log=folder / "log")
    assert verdicts == ["done", "done", "requeue", "done"]
    return folder


def test_killed_and_restarted(images, tmp_path, whole):
    job, log = trainings(images, tmp_path)["seed0"] | ALWAYS, tmp_path / "log"
    with pytest.raises(RuntimeError, match="no rank answered"):
        run(2, job, log=log, kill_at=5)
    assert run(2, job | {"stop_at": 9}, job, log=log) == ["requeue", "done"]
    assert log.read_text().count("resuming from step") == 2
    ours, theirs = tmp_path / "seed0", whole / "seed0"
    for name in ("encoder.safetensors", "head.safetensors"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    for key in ("losses", "scores"):
        assert read_record(RunRecord.path(ours))[key] == read_record(RunRecord.path(theirs))[key]
    logged = [step["accuracy"] for step in entries(ours / "metrics.jsonl") if "accuracy" in step]
    assert logged == read_record(RunRecord.path(theirs))["scores"]["accuracies"]


def test_a_finished_run_keeps_no_states_whenever_it_was_killed(images, tmp_path, whole):
    """Here as between its record and the end of its states; the command starts no rank then."""
    job, folder = trainings(images, tmp_path)["seed0"], tmp_path / "seed0"
    shutil.copytree(whole / "seed0", folder)
    record, left = RunRecord.path(folder).read_bytes(), folder / "state"
    assert not left.exists()
    (left / "step-000000012").mkdir(parents=True)
    assert run(1, job, log=tmp_path / "log") == ["done"]
    assert not left.exists()
    (left / "step-000000012").mkdir(parents=True)
    source = shutil.copytree(job["source"], tmp_path / "mae")
    sums = {"encoder.safetensors": sha256_file(source / "encoder.safetensors")}
    write_record(RunRecord.path(source), {"run": "mae", "stage": "pretrain", "sha256": sums})
    config = RunConfig(
        run="seed0", stage="fine_tune", size="tiny", seed=job["seed"], shards=job["shards"],
        source=source, encoder=job["encoder"],
        settings=FineTune.model_validate(job["settings"]),
    )  # fmt: skip
    config.write(folder / "config.yaml")
    assert main(["train", str(folder / "config.yaml")]) == 0
    assert not left.exists() and RunRecord.path(folder).read_bytes() == record


def test_one_rank_has_the_losses_of_two(images, tmp_path, whole):
    job = trainings(images, tmp_path)["seed0"]
    assert run(1, job, log=tmp_path / "log") == ["done"]
    one, two = (
        read_record(RunRecord.path(folder / "seed0"))["losses"] for folder in (tmp_path, whole)
    )
    np.testing.assert_allclose(one, two, rtol=1e-4)


def test_the_best_epoch_is_scored_and_the_last_beside_it(images, tmp_path, whole):
    """MIM-Refiner, finetune/run/mae_large16.yaml: `best_checkpoint_callback`, `every_n_epochs: 1`,
    `metric_key: accuracy1/test/main`."""
    record, result = read_record(RunRecord.path(whole / "seed0")), scored(images, whole)
    assert [one["images"] for one in result["provenance"]["subsets"].values()] == [150, 150]
    first, second = result["metrics"]["losses"].values()
    assert len(first) == len(second) and first != second
    last = result["metrics"]["fine_tune_last_seeds"][0]
    # Two ranks during the training, one here, from the exported weights.
    test = open_index(images / "shards" / "val")
    pictures, _ = all_images(test)
    encoding = Encoding(whole / "seed0/encoder.safetensors", torch.device("cpu"))
    classifier = load_file(whole / "seed0/head.safetensors")
    clear(torch.nn.functional.linear(encoding(pictures), **classifier), 1e-5)
    assert record["scores"]["accuracies"][-1] == pytest.approx(last) and len(record["losses"]) == 2
    assert len(record["scores"]["accuracies"]) == 2
    shutil.copytree(whole, tmp_path / "copy")
    for seed, accuracies in enumerate(([91.0, 20.0], [30.0, 93.0])):
        path = RunRecord.path(tmp_path / f"copy/seed{seed}")
        value = read_record(path)
        value["scores"]["accuracies"] = accuracies
        write_record(path, value)
    (tmp_path / "copy/fine_tune.json").unlink()
    metrics = scored(images, tmp_path / "copy")["metrics"]
    assert (metrics["fine_tune"], metrics["fine_tune_seeds"]) == (92.0, [91.0, 93.0])
    assert metrics["fine_tune_last_seeds"][0] == last
    assert metrics["accuracies"]["fine_tune-seed0"] == [91.0, 20.0]
    # A training that was not scored.
    write_record(path, {key: value[key] for key in value if key != "scores"})
    (tmp_path / "copy/fine_tune.json").unlink()
    with pytest.raises(UserError, match=r"seed1: its epochs were not scored on .*epoch=last"):
        scored(images, tmp_path / "copy")
    only = SETTINGS.model_copy(update={"epoch": "last"})
    metrics = scored(images, tmp_path / "copy", only)["metrics"]
    assert metrics["fine_tune_seeds"][0] == last and "fine_tune_last" not in metrics


def test_a_resumed_run_whose_first_epochs_were_not_scored_tells_none(images, tmp_path):
    job, log = trainings(images, tmp_path)["seed0"] | ALWAYS, tmp_path / "log"
    assert run(1, job | {"test": None, "stop_at": 9}, job, log=log) == ["requeue", "done"]
    assert "epochs are scored no more" in log.read_text(), "said before hours are spent"
    assert "scores" not in read_record(RunRecord.path(tmp_path / "seed0"))


def test_any_protocol_can_encode_with_what_it_leaves(images, whole):
    """Its file holds the norm behind the pooling, so features classify as the run itself does."""
    stage, seed = SETTINGS.trainings()["seed0"]
    test = open_index(images / "shards" / "val")
    trained = FineTuned(whole / "seed0", stage, seed, test, torch.device("cpu"))
    encoder, _, pooling = load_encoder_weights(whole / "seed0/encoder.safetensors")
    assert trained.encoding.pooling == pooling == "fc_norm"
    x = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    features = encoder.fc_norm(blocks_of(encoder, x)[-1][:, 1:].mean(1)).detach()
    logits = torch.nn.functional.linear(features, **trained.classifier)
    clear(logits, 1e-5)
    assert torch.equal(logits.argmax(1), trained.predict(x))


def test_learns_digits_and_stops_at_a_loss_that_is_not_finite(images, tmp_path):
    plain = {"seeds": 1, "mixup": 0, "cutmix": 0, "random_erasing": 0, "randaugment_layers": 0}
    plain |= {"drop_path": 0, "epochs": 25, "base_lr": 6e-2, "layer_decay": 1.0}
    settings = SETTINGS.model_copy(update=plain)
    diverges = settings.model_copy(update={"base_lr": 1e30, "warmup_epochs": 0})
    good = trainings(images, tmp_path / "good", settings)["seed0"]
    bad = trainings(images, tmp_path / "bad", diverges)["seed0"]
    message = run(1, good, bad, log=tmp_path / "log")
    assert scored(images, tmp_path / "good", settings)["metrics"]["fine_tune"] > 30  # ten classes
    assert message.startswith("TrainingFault") and "nan in step" in message
    assert not RunRecord.path(tmp_path / "bad/seed0").exists()


def test_the_last_epoch_is_scored_by_reals_labels(images, imagenet_val, tmp_path, whole):
    index = open_index(imagenet_val)
    labels = [each if row % 2 else [] for row, each in enumerate(real_of(imagenet_val))]
    real = {"real_labels": write(tmp_path / "real.json", labels).real_labels}
    settings = SETTINGS.model_copy(update={"epoch": "last"} | real)
    trained = [whole / suffix for suffix in settings.trainings()]
    inputs = {"test": imagenet_val, "trained": trained}
    job = EvaluationJob(images / "runs" / "mae", tmp_path / "x.json", inputs, 16)
    metrics = settings.evaluate(Rank(), job)
    stage, seed = settings.trainings()["seed0"]
    run = FineTuned(trained[0], stage, seed, index, torch.device("cpu"))
    found = run.predicted(Rank(), index, 16)
    odd = np.array([int(key[-8:]) % 2 == 0 for key in index.keys()])  # noqa: SIM118
    expected = 100 * float((found == index.labels)[odd].mean())
    assert metrics["fine_tune_real_seeds"][0] == pytest.approx(expected)
    assert metrics["fine_tune_real"] == pytest.approx(np.mean(metrics["fine_tune_real_seeds"]))


def test_a_twin_is_scored_on_what_it_leaves_out(images, whole):
    assert [*WITH_TWIN.trainings()] == ["seed0", "seed0_held_out"]
    metrics = scored(images, whole, WITH_TWIN)["metrics"]
    record = read_record(RunRecord.path(whole / "seed0_held_out"))
    scores, own = record["scores"]["accuracies"], metrics["accuracies"]["fine_tune-seed0"]
    assert metrics["held_out"] == {"fine_tune-seed0": scores} and len(scores) == 2
    assert metrics["fine_tune_held_out"] == own[scores.index(max(scores))]
    # The last epoch's score is that of the encoder that was left, on the held-out images.
    index = open_index(images / "shards" / "train")
    stage, seed = WITH_TWIN.trainings()["seed0_held_out"]
    held = stage.scored_images(index)
    assert held is not None and record["subset"]["images"] == index.n - held.n
    left = FineTuned(whole / "seed0_held_out", stage, seed, index, torch.device("cpu"))
    found = left.predicted(Rank(), held, 16)
    assert scores[-1] == pytest.approx(100 * float((found == held.labels).mean()))
