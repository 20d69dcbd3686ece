"""The trained probe on shifted splits, and how far rotations and colours move it."""

import json
import shutil
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from maect.core.errors import UserError
from maect.data import random
from maect.data.index import open_index
from maect.data.shards import shard
from maect.evaluate.base import EvaluationJob
from maect.evaluate.features import Encoding
from maect.evaluate.protocols.encoders import EffectiveInvariance, Robustness
from maect.models.weights import load_tensors, save_tensors

from .by_hand import clear
from .conftest import Rank, given
from .test_linear_probe import SETTINGS, job_of

FULL = {"precision": "fp32"}


@pytest.fixture(scope="module")
def probed(images: Path, tmp_path_factory: pytest.TempPathFactory) -> EvaluationJob:
    """A trained probe, and further splits: the same images, and with three digits turned around."""
    root = tmp_path_factory.mktemp("probed")
    job = job_of(images, root / "linear_probe.json")
    SETTINGS.evaluate(Rank(), job)
    for path in sorted((images / "images" / "val").rglob("*.png")):
        label = int(path.parent.name)
        target = root / "images" / str(label) / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if label in (1, 3, 7):
            Image.open(path).transpose(Image.Transpose.ROTATE_180).save(target)
        else:
            shutil.copy(path, target)
    shard(root / "images", root / "mixed", "folder", 1)
    shards = {"val": images / "shards" / "val", "mixed": root / "mixed"}
    return given(job, probe=root / "linear_probe.safetensors", **shards)


def plain(job: EvaluationJob, index, change=lambda image: image) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities in float64 and labels, image by image, with the probe as it was saved."""
    encoding = Encoding(job.run / "encoder.safetensors", torch.device("cpu"))
    kept = {name: value.double() for name, value in load_file(job.path("probe")).items()}
    pictures = []
    for row in range(index.n):
        image = np.asarray(Image.open(BytesIO(index.read(row))).convert("RGB"))
        pictures.append(change(torch.from_numpy(image.copy()).permute(2, 0, 1)))
    x = encoding(torch.stack(pictures)).double()
    x = (x - kept["mean"]) / (kept["var"] + 1e-5).sqrt()
    logits = x @ kept["weight"].T + kept["bias"]
    clear(logits, 2e-5)
    return logits.softmax(1).numpy(), np.asarray(index.labels)


def test_accuracy_on_splits(probed, rank):
    settings = Robustness(splits=("val", "mixed"), **FULL)
    metrics = settings.evaluate(rank, probed)
    for name in settings.splits:
        p, labels = plain(probed, open_index(probed.path(name)))
        assert metrics[name] == pytest.approx(100 * np.mean(p.argmax(1) == labels))
    assert metrics["mixed"] < metrics["val"]
    # On the unshifted split it is what the probe reported.
    assert metrics["val"] == SETTINGS.evaluate(rank, probed)["linear_probe"]


def test_only_the_classes_that_occur_take_part(probed, rank, monkeypatch):
    index = open_index(probed.path("val"))
    occur = [0, 1, 4]  # of which others would be taken for every third image
    rows = index.rows[np.isin(index.labels, occur)]
    monkeypatch.setattr(
        "maect.evaluate.trained_probe.open_index", lambda _: replace(index, rows=rows)
    )
    settings = Robustness(splits=("val",), **FULL)
    metrics = settings.evaluate(rank, probed)
    p, labels = plain(probed, replace(index, rows=rows))
    clear(np.log(p[:, occur]), 1e-4)
    predicted = np.array(occur)[p[:, occur].argmax(1)]
    assert metrics["val"] == pytest.approx(100 * np.mean(predicted == labels))
    assert metrics["val"] > 100 * np.mean(p.argmax(1) == labels) + 20
    assert metrics["classes"] == {"val": 3}
    rows = index.rows[index.labels == 7]  # read when the index is opened
    with pytest.raises(UserError, match="val: images of one class"):
        settings.evaluate(rank, probed)


def test_a_probe_says_how_files_like_its_images_are_read(probed):
    texts = load_tensors(probed.path("probe"))[1]
    read = {"orientation": "exif", "background": [255, 255, 255], "range": None}
    assert json.loads(texts["reading"]) == read


def test_what_does_not_belong_together_is_refused(probed, rank, tmp_path):
    settings, other = Robustness(splits=("val",)), tmp_path / "other.safetensors"
    with pytest.raises(UserError, match="lacks the input 'probe'"):
        settings.evaluate(rank, given(probed, probe=None))
    tensors, texts = load_tensors(probed.path("probe"))
    bias = tensors["bias"].clone()
    bias[3] = torch.nan
    for kept, told, words in (
        (tensors, {"encoder_sha256": "0" * 64}, "trained on another encoder"),
        (tensors, {"class_names": '["a", "b"]'}, "not those that the probe was trained on"),
        ({"concat_1.weight": tensors["weight"]}, {}, "no linear probe of one representation"),
        (tensors | {"bias": bias}, {}, "predictions are not finite"),
    ):
        save_tensors(other, kept, texts | told)
        with pytest.raises(UserError, match=words):
            settings.evaluate(rank, given(probed, probe=other))


def both_formulas(p: np.ndarray, q: np.ndarray) -> tuple[float, float]:
    """The code's and the paper's, sample by sample."""
    code, paper = [], []
    for a, b in zip(p, q, strict=True):
        same = a.argmax() == b.argmax()
        code.append(np.sqrt(sum(x * y for x, y in zip(a, b, strict=True))) if same else 0.0)
        paper.append(np.sqrt(a.max() * b.max()) if same else 0.0)
    return float(np.mean(code)), float(np.mean(paper))


def test_effective_invariance(probed, rank):
    settings = EffectiveInvariance(draws=2, seed=5, **FULL)
    metrics = settings.evaluate(rank, probed)
    index = open_index(probed.path("test"))
    p, _ = plain(probed, index)
    turned = [
        plain(probed, index, lambda x, angle=angle: tv.rotate(x, angle))[0]
        for angle in (90, 180, 270)
    ]
    rotation = np.mean([both_formulas(p, q) for q in turned], axis=0)
    assert metrics["ei_rotation"] == pytest.approx(rotation[0], abs=1e-5)
    assert metrics["ei_rotation_paper"] == pytest.approx(rotation[1], abs=1e-5)
    agreement = np.mean([p.argmax(1) == q.argmax(1) for q in turned])
    assert metrics["agreement_rotation"] == pytest.approx(100 * agreement)
    # Colour operations of torchvision in the order and strength that the numbers say.
    operations = (tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue)
    widths, centers = (0.4, 0.4, 0.2, 0.1), (1, 1, 1, 0)
    normal = v2.Normalize((0.5, 0.3, 0.4), (0.3, 0.2, 0.25))
    found = []
    for draw in range(2):
        u = random.uniform(5, draw, np.arange(index.n), 0, random.COLOR, 8)
        numbers = iter(u)

        def change(x: torch.Tensor, numbers=numbers) -> torch.Tensor:
            row, x = next(numbers), x.float() / 255
            for place in np.argsort(row[4:], kind="stable"):
                factor = (2 * row[place] - 1) * widths[place] + centers[place]
                x = operations[place](x, float(factor))
            return normal(x)

        found.append(both_formulas(p, plain(probed, index, change)[0]))
    code, paper = np.mean(found, axis=0)
    assert metrics["ei_color"] == pytest.approx(code, abs=1e-4)
    assert metrics["ei_color_paper"] == pytest.approx(paper, abs=1e-4)
    assert 0 < metrics["ei_color_paper"] < metrics["ei_color"] < 1
