"""What the model card of an export says of data, training, results and licence."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from maect.answers.card import results_of
from maect.cli import main
from maect.core.files import read_record, write_record
from maect.data.index import open_index
from maect.evaluate import EvaluationConfig, load_evaluation
from maect.recipes import load_encoder
from maect.records import RunRecord
from maect.stages import FineTune, Import, load_recipe
from maect.stages.run import RunConfig


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
        made = {"run": name, "stage": stage, "recipe": recipe, "source": source}
        settings = load_recipe(recipe, "tiny", {"epochs": epochs})
        config = RunConfig(**made, settings=settings, **told)
        config.write(tmp_path / "runs" / name / "config.yaml")
    # On other images than those that it was trained on.
    splits = {"train": "train", "test": "val"}.items()
    given = {name: tmp_path / f"features/ct/owls-{split}.safetensors" for name, split in splits}
    knn = {"knn": 93.512, "knn_best": 95.0, "sweep": [1.5], "k": 3}
    write_result(tmp_path, "knn", knn, given, test_data="knn_best is chosen on it")
    return tmp_path


def write_result(
    root: Path, name: str, metrics: dict[str, Any], inputs: dict[str, Path] | None = None,
    settings: Any = None, **provenance: str,
) -> None:  # fmt: skip
    """Write a result of the run `ct`; with inputs also the file that it was computed from."""
    run, out = root / "runs/ct", root / "evaluations/ct"
    result = {"metrics": metrics, "settings": {"test_split": "val"}, "provenance": provenance}
    write_record(out / f"{name}.json", result)
    if inputs is not None:
        settings = settings or load_evaluation(name, "tiny")[1]
        told = {"evaluation": name, "protocol": name, "run": run, "inputs": inputs}
        EvaluationConfig(**told, settings=settings).write(out / f"{name}.yaml")


def test_the_card_says_data_training_results_and_licence(root):
    out = root / "hub"
    assert main(["export", str(root / "runs/ct"), str(out), "--licence", "cc-by-4.0"]) == 0
    card = (out / "README.md").read_text(encoding="utf-8")
    assert yaml.safe_load(card.split("---")[1])["license"] == "cc-by-4.0"
    for line in (
        "- `birds`, split `train`: 30 images in 3 classes",
        "| k-NN accuracy (%) | owls | val | 93.51 |",
        "- knn: knn_best is chosen on it",
    ):
        assert line in card.splitlines()
    assert card.index("| mae | pretrain | mae | 17 |") < card.index("| ct | tune | ct_min | 5 |")
    assert "sweep" not in card.split("## Where it comes from")[0]
    # Settings, deviations and what was chosen on the test split are no results of the model.
    (result,) = results_of(root / "runs/ct")
    assert (result.metric_type, result.metric_value) == ("knn_accuracy", 93.51)
    assert (result.dataset_name, result.dataset_split) == ("owls", "val")
    for word in ("## Intended use", "@inproceedings{lehner2024contrastive,", "{he2022masked,"):
        assert card.count(word) == 1


@pytest.mark.parametrize(
    ("origin", "tuning", "words"),
    [
        ("pretrain", {}, "trained without labels"),
        ("pretrain", {"head": {"lookup": "oracle"}}, "trained with labels"),
        ("import", {}, ""),  # whoever trained these may have had labels
        ("import", {"head": {"lookup": "oracle"}}, "trained with labels"),
    ],
)
def test_the_card_says_with_labels_if_any_stage_read_them(root, origin, tuning, words):
    changes: dict[str, dict[str, Any]] = {"ct": {"settings": load_recipe("ct_min", "tiny", tuning)}}
    if origin == "import":
        changes["mae"] = {"stage": "import", "recipe": None, "settings": Import(layout="dino")}
    for run, change in changes.items():
        file = root / "runs" / run / "config.yaml"
        RunConfig.read(file).model_copy(update=change).write(file)
    shutil.rmtree(root / "shards")  # results may have been freed of them
    assert main(["export", str(root / "runs/ct"), str(root / "hub")]) == 0
    card = (root / "hub/README.md").read_text(encoding="utf-8")
    assert "license" not in yaml.safe_load(card.split("---")[1]) and "None is stated." in card
    assert "- `birds`, split `train`" in card.splitlines()
    said = words.removeprefix("trained")
    assert f"without a classifier{words and ', '}{words}: 4 blocks" in card
    assert f"The encoder learnt{said} from them." in card
    assert card.count("with labels") + card.count("without labels") == 2 * bool(words)


def test_the_hub_reads_the_card(root):
    """By its own client: a dozen numbers at most, each with task, data set and metric."""
    from huggingface_hub import ModelCard

    scores = {
        "clustering": {"accuracy": 69.6, "accuracy_std": 4.2, "nmi": 63.5, "ari": 52.0},
        "linear_probe": {"linear_probe": 82.8, "best_rate": 0.09, "linear_probe_last": 82.0},
        "low_shot": {"low_shot_1": 55.0, "low_shot_1_splits": [50.0, 60.0]},
        "fine_tune": {"fine_tune": 97.0},  # of encoders that were trained from this one
    }  # fmt: skip
    for name, metrics in scores.items():
        write_result(root, name, metrics)
    words = ["--repository", "me/birds", "--base-model", "facebook/vit-mae-base"]
    assert main(["publish", str(root / "runs/ct"), str(root / "hub"), *words]) == 0
    data = ModelCard.load(root / "hub/README.md").data
    assert data.base_model == "facebook/vit-mae-base" and data.model_name == "ct"
    found = {one.metric_name: one for one in data.eval_results}
    assert set(found) == {
        "k-NN accuracy (%)", "Linear probe accuracy (%)", "1-shot accuracy (%)",
        "Cluster accuracy, without labels (%)", "Normalised mutual information of clusters (%)",
        "Adjusted Rand index of clusters (%)",
    }  # fmt: skip
    clusters = found["Cluster accuracy, without labels (%)"]
    assert clusters.task_type == "image-feature-extraction"
    assert clusters.metric_type != "accuracy" == found["Linear probe accuracy (%)"].metric_type


def test_what_the_hub_would_not_take_is_refused(root, capsys):
    for repository, *words, said in (
        ("me/birds", "--licence", "cc-by-4", "did you mean 'cc-by-4.0'"),
        ("birds", "birds: not a name of a repository"),
        ("me/birds", "--base-model", "a/b/c", "a/b/c: not a name of a repository"),
    ):
        command = ["publish", str(root / "runs/ct"), str(root / "hub"), "--repository", repository]
        assert main([*command, *words]) == 2
        assert said in capsys.readouterr().err and not (root / "hub").exists()


def test_each_number_is_of_its_own_split_or_of_no_images(root):
    """A shifted test set has its own, and a speed has none."""
    evaluations = root / "evaluations/ct"
    settings = load_evaluation("robustness", "tiny", {"splits": ["fog"]})[1]
    given = {"probe": evaluations / "linear_probe.safetensors", "fog": root / "shards/owls/fog"}
    write_result(root, "robustness", {"fog": 33.25}, given, settings)
    write_result(root, "throughput", {"flash_gain": 21.5}, {})
    found = {one.metric_value: one.dataset_split for one in results_of(root / "runs/ct")}
    assert found == {93.51: "val", 33.25: "fog"}


def test_only_test_images_give_the_accuracy_of_a_classifier(root):
    """No held-out training images, which a twin is scored on, nor others under the split's name."""
    test = root / "shards/birds/test"
    shutil.copytree(root / "shards/birds/train", test)
    of_test, of_train = open_index(test).digest, "of others"

    def results(held_out: float, digest: str) -> list[tuple[str | None, float]]:
        run = root / "runs/ct"
        settings = FineTune(shots=2, held_out=held_out)
        told = {"run": "ct", "stage": "fine_tune", "size": "tiny", "source": root / "runs/mae"}
        given = {"shards": test.parent / "train", "test": test, "encoder": load_encoder("tiny")}
        RunConfig(**told, **given, settings=settings).write(run / "config.yaml")
        record = read_record(RunRecord.path(run)) | {"stage": "fine_tune"}
        scores = {"index_digest": digest, "resize": None, "accuracies": [50.0, 75.0]}
        write_record(RunRecord.path(run), record | {"scores": scores})
        found = [one for one in results_of(run) if one.metric_type == "accuracy"]
        return [(one.dataset_split, one.metric_value) for one in found]

    assert results(0.0, of_test) == [("test", 75.0)]
    assert results(0.5, of_train) == results(0.0, of_train) == []
    shutil.rmtree(test)
    assert results(0.0, of_test) == [("test", 75.0)] and results(0.5, of_train) == []
