"""A fine-tuned run's classes, and the folder of a hub repository, read by timm and transformers."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import timm
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

import maect
from maect.cli import main
from maect.core.files import read_record, sha256_file, write_record
from maect.models.weights import save_tensors
from maect.records import RunRecord

CLASSES = ["a hen", "b", "c"]


@pytest.fixture(scope="module")
def tuned(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run as a fine-tuned one, with a classifier and a result."""
    root = tmp_path_factory.mktemp("tuned")
    folder = shutil.copytree(run, root / "runs/ct.fine_tune.seed0")
    generator, width = torch.Generator().manual_seed(0), maect.load(run).width
    shapes = {"weight": (3, width), "bias": (3,)}
    head = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_tensors(folder / "head.safetensors", head, {"classes": json.dumps(CLASSES)})
    record = read_record(RunRecord.path(folder)) | {"stage": "fine_tune", "run": folder.name}
    record["sha256"]["head.safetensors"] = sha256_file(folder / "head.safetensors")
    write_record(RunRecord.path(folder), record)
    (root / "evaluations" / folder.name).mkdir(parents=True)
    metrics = {"knn": 91.25, "knn_best": 95.5, "k": 3}
    result = {"metrics": metrics, "settings": {"test_split": "val"}, "provenance": {}}
    write_record(root / "evaluations" / folder.name / "knn.json", result)
    return folder


@torch.inference_mode()
def test_the_folder_of_a_repository(tuned, photographs, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoImageProcessor, AutoModel, AutoModelForImageClassification

    out = tmp_path / "hub"
    out.mkdir()
    (out / ".gitattributes").write_text("*.bin filter=lfs\n")
    words = [str(tuned), str(out), "--repository", "me/birds", "--licence", "cc-by-4.0"]
    for _ in range(2):  # a second time changes nothing
        assert main(["publish", *words]) == 0
    assert (out / ".gitattributes").read_text().splitlines() == [
        "*.bin filter=lfs", "*.safetensors filter=lfs diff=lfs merge=lfs -text",
    ]  # fmt: skip
    card = (out / "README.md").read_text(encoding="utf-8")
    front = yaml.safe_load(card.split("---")[1])
    assert (front["license"], front["pipeline_tag"]) == ("cc-by-4.0", "image-classification")
    (result,) = front["model-index"][0]["results"]
    assert result["metrics"] == [
        {"type": "knn_accuracy", "name": "k-NN accuracy (%)", "value": 91.25}
    ]
    assert "hf-hub:me/birds" in card and 'snapshot_download("me/birds")' in card
    assert "a classifier of 3 classes" in card and "PATH_OF_THIS_FOLDER" not in card

    # One image, one vector and one class, for whoever loads it.
    files = sorted(photographs.rglob("*.png"))[:3]
    encoder = maect.load(tuned)
    vectors = encoder.encode(files)
    published = maect.load(out)
    np.testing.assert_array_equal(published.encode(files), vectors)
    assert published.sha256 == encoder.sha256
    head = torch.nn.Linear(encoder.width, 3)
    head.load_state_dict(load_file(tuned / "head.safetensors"))
    logits = head(torch.from_numpy(vectors))
    model = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    bare = timm.create_model(f"local-dir:{out}", pretrained=True, num_classes=0).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    images = torch.stack([transform(Image.open(file)) for file in files])
    torch.testing.assert_close(model(images), logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(bare(images), torch.from_numpy(vectors), rtol=1e-4, atol=1e-4)
    given = AutoImageProcessor.from_pretrained(out)(
        [Image.open(file) for file in files], return_tensors="pt"
    )
    classifier = AutoModelForImageClassification.from_pretrained(out).eval()
    torch.testing.assert_close(classifier(**given).logits, logits, rtol=1e-4, atol=1e-4)
    assert [classifier.config.id2label[n] for n in range(3)] == CLASSES
    pooled = AutoModel.from_pretrained(out).eval()(**given).pooler_output
    torch.testing.assert_close(pooled, torch.from_numpy(vectors), rtol=1e-4, atol=1e-4)


def test_classes_by_the_head_of_a_fine_tuned_run(tuned, photographs, tmp_path, capsys):
    out = tmp_path / "classes.csv"
    assert main(["predict", str(tuned), str(photographs), "--out", str(out)]) == 0
    frame, head = pd.read_csv(out), load_file(tuned / "head.safetensors")
    vectors = torch.from_numpy(maect.load(tuned).encode([photographs / f for f in frame["file"]]))
    probable = (vectors @ head["weight"].T + head["bias"]).softmax(1).max(1)
    assert frame["class"].tolist() == [CLASSES[n] for n in probable.indices]
    np.testing.assert_allclose(frame["probability"], probable.values, atol=1e-3)
    damaged = shutil.copytree(tuned, tmp_path / "runs/damaged")
    left = damaged / "head.safetensors"
    left.write_bytes(left.read_bytes()[:-1] + b"x")
    assert main(["predict", str(damaged), str(photographs), "--out", str(out)]) == 2
    assert "head.safetensors: damaged" in capsys.readouterr().err
