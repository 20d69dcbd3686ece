"""What the model card of an export says of data, training, results and licence."""

import shutil
from pathlib import Path

import pytest
import yaml

from maect.answers.card import results_of
from maect.cli import main
from maect.core.files import write_record
from maect.evaluate import EvaluationConfig, load_evaluation
from maect.recipes import load_encoder
from maect.stages import load_recipe
from maect.stages.run import RunConfig

SPLITS = (("train", "train"), ("test", "val"))


@pytest.fixture
def root(run: Path, photographs: Path, tmp_path: Path) -> Path:
    """Results of a MAE and what was tuned from it, evaluated once."""
    shards = tmp_path / "shards/birds/train"
    assert main(["shard", str(photographs), str(shards)]) == 0
    shutil.copytree(run, tmp_path / "runs/ct")
    told = {"size": "tiny", "shards": shards, "encoder": load_encoder("tiny")}
    for name, stage, recipe, source, epochs in (
        ("mae", "pretrain", "mae", None, 17),
        ("ct", "tune", "ct_min", tmp_path / "runs/mae", 5),
    ):
        settings = load_recipe(recipe, "tiny", {"epochs": epochs})
        config = RunConfig(
            run=name, stage=stage, recipe=recipe, source=source, settings=settings, **told
        )
        config.write(tmp_path / "runs" / name / "config.yaml")
    knn = {
        "metrics": {"knn": 93.512, "knn_best": 95.0, "sweep": [1.5], "k": 3},
        "settings": {"test_split": "val"},
        "provenance": {"test_data": "knn_best is chosen on it"},
    }
    write_record(tmp_path / "evaluations/ct/knn.json", knn)
    # On other images than those that it was trained on.
    given = {name: tmp_path / f"features/ct/owls-{split}.safetensors" for name, split in SPLITS}
    told = {"evaluation": "knn", "protocol": "knn", "run": tmp_path / "runs/ct", "inputs": given}
    config = EvaluationConfig(**told, settings=load_evaluation("knn", "tiny")[1])
    config.write(tmp_path / "evaluations/ct/knn.yaml")
    return tmp_path


def test_the_card_says_data_training_results_and_licence(root: Path) -> None:
    out = root / "hub"
    assert main(["export", str(root / "runs/ct"), str(out), "--licence", "cc-by-4.0"]) == 0
    card = (out / "README.md").read_text(encoding="utf-8")
    assert yaml.safe_load(card.split("---")[1])["license"] == "cc-by-4.0"
    for line in (
        "- `birds`, split `train`: 30 images in 3 classes",
        "| knn | knn | owls | val | 93.51 |",
        "- knn: knn_best is chosen on it",
    ):
        assert line in card.splitlines()
    assert card.index("| mae | pretrain | mae | 17 |") < card.index("| ct | tune | ct_min | 5 |")
    assert "sweep" not in card.split("## Where it comes from")[0]
    first = results_of(root / "runs/ct")[0]
    assert first["dataset"] == {"name": "owls", "type": "owls", "split": "val"}


def test_an_unsaid_licence_is_said_to_be_none(root: Path) -> None:
    shutil.rmtree(root / "shards")  # results may have been freed of them
    out = root / "hub"
    assert main(["export", str(root / "runs/ct"), str(out)]) == 0
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "license" not in yaml.safe_load(card.split("---")[1])
    assert "None is stated." in card
    assert "- `birds`, split `train`" in card.splitlines()


def test_each_number_is_of_its_own_split_or_of_no_images(root: Path) -> None:
    """A shifted test set has its own, and a speed has none."""
    evaluations = root / "evaluations/ct"
    for name, metrics in (("robustness", {"fog": 33.25}), ("throughput", {"flash_gain": 21.5})):
        settings = load_evaluation(name, "tiny", {"splits": ["fog"]} if "fog" in metrics else {})[1]
        given = {"probe": evaluations / "linear_probe.safetensors", "fog": root / "shards/owls/fog"}
        inputs = {key: given[key] for key in settings.inputs()}
        told = {"evaluation": name, "protocol": name, "run": root / "runs/ct", "inputs": inputs}
        EvaluationConfig(**told, settings=settings).write(evaluations / f"{name}.yaml")
        about = {"settings": settings.model_dump(mode="json"), "provenance": {}}
        write_record(evaluations / f"{name}.json", {"metrics": metrics} | about)
    found = {one["metrics"][0]["type"]: one["dataset"] for one in results_of(root / "runs/ct")}
    assert found["fog"] == {"name": "owls", "type": "owls", "split": "fog"}
    assert "flash_gain" not in found and found["knn"]["split"] == "val"
