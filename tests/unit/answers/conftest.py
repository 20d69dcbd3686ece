"""Photographs that nobody took, and runs whose encoder has random weights."""

import shutil
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest
from encoder_runs import finished_run
from PIL import Image
from safetensors.torch import save_file

from maect.answers.public import PUBLIC, Public
from maect.cli import main
from maect.core.context import Context
from maect.core.files import sha256_file
from maect.data.retrieve import CATALOGUE, Remote
from maect.launch import Task
from maect.models.foreign import create
from maect.models.weights import load_encoder_weights, save_encoder
from maect.recipes import load_encoder
from maect.records import RunRecord

TINY = "vit_tiny_patch16_dinov3_qkvb.eupe_lvd1689m"


def photograph(number: int, width: int, height: int) -> Image.Image:
    """A bright disc in front of a slope of two colours, with grain: one kind for each third."""
    rng = np.random.default_rng(number)
    y, x = np.mgrid[:height, :width] / max(width, height)
    color = np.eye(3)[number % 3]
    scene = 60 + 100 * x[..., None] * color + 60 * y[..., None] * (1 - color)
    center = rng.uniform(0.3, 0.6, 2)
    disc = (x - center[0]) ** 2 + (y - center[1]) ** 2 < 0.04
    scene[disc] = 40 + 190 * color
    return Image.fromarray((scene + rng.normal(0, 6, scene.shape)).clip(0, 255).astype(np.uint8))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs are computed in this process."""

    def launch(task: Task, *_: Any, **__: Any) -> None:
        resolve_name(task.function)(Context(), **task.arguments)

    monkeypatch.setattr("maect.launch.launch", launch)


@pytest.fixture(scope="session")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty in folders by kind, with blanks and dots in their names, as PNG and JPEG."""
    root = tmp_path_factory.mktemp("photographs")
    for number in range(30):
        suffix = "jpg" if number % 2 else "png"
        file = root / "abc"[number % 3] / f"No. {number:02d}.x.{suffix}"
        file.parent.mkdir(exist_ok=True)
        photograph(number, 40 + number, 64 - number).save(file)
    (root / "notes.txt").write_text("not an image")
    return root


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that resizes images to 20 pixels for an encoder of 16."""
    folder = tmp_path_factory.mktemp("results") / "runs" / "ct"
    encoder = load_encoder("tiny")
    finished_run(folder, encoder, "mean", stage="import", source=None, settings={}, versions={})
    (folder / "config.yaml").write_text(
        f"run: ct\nstage: import\nsize: tiny\nresize: 20\nencoder: {encoder.model_dump_json()}\n"
    )
    return folder


def rewritten(run: Path, folder: Path, factor: float = 1, **settings: Any) -> Path:
    """Copy a run with its encoder's weights times `factor` and with other settings of it."""
    shutil.copytree(run, folder)
    file = folder / "encoder.safetensors"
    module, own, pooling = load_encoder_weights(file)
    weights = {name: factor * value for name, value in module.state_dict().items()}
    own = own.model_copy(update=settings)
    save_encoder(file, weights, own, pooling)
    changes = {"sha256": {file.name: sha256_file(file)}, "encoder": own}
    RunRecord.of(folder).model_copy(update=changes).write(RunRecord.path(folder))
    return folder


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A public encoder of few parameters, whose file lies where `maect retrieve` puts it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(CATALOGUE, "tiny", (Remote("https://example.org/x", "tiny.safetensors"),))
    monkeypatch.setitem(PUBLIC, "tiny", Public(TINY, 64))
    (tmp_path / "weights").mkdir()
    save_file(create(TINY, img_size=64).state_dict(), tmp_path / "weights/tiny.safetensors")
    return "tiny"


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three kinds of photographs: with a split, without one, and without classes."""
    root = tmp_path_factory.mktemp("folders")
    for number in range(120):
        split = "train" if number < 75 else "val"
        kind = "abc"[number % 3]
        for file in (
            root / "split" / split / kind / f"{number}.png",
            root / "whole" / kind / f"{number}.png",
            root / "flat" / f"{number}.png",
        ):
            file.parent.mkdir(parents=True, exist_ok=True)
            photograph(number, 30, 24).save(file)
    shutil.copy(root / "split/train/a/0.png", root / "split/val/a/again.png")
    return root


Files = tuple[Path, Path]
"""Vectors with labels, and a classifier that was fitted to them."""


@pytest.fixture(scope="session")
def fitted(run: Path, photographs: Path, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Of the photographs; `p.csv` beside them is what the fitting `predict` wrote."""
    root = tmp_path_factory.mktemp("fitted")
    index, classifier = root / "l.parquet", root / "c.safetensors"
    assert main(["embed", str(run), str(photographs), "--kind", "folder", "--out", str(index)]) == 0
    words = ["predict", str(run), str(photographs), "--out", str(root / "p.csv")]
    assert main([*words, "--labelled", str(index), "--classifier", str(classifier)]) == 0
    return index, classifier


@pytest.fixture
def predicted(
    run: Path, photographs: Path, fitted: Files, tmp_path: Path
) -> tuple[list[str], Path, Path]:
    """Words of a predict by the fitted classifier, that, and the table."""
    kept, out = fitted[1], tmp_path / "p.csv"
    words = ["predict", str(run), str(photographs), "--classifier", str(kept), "--out", str(out)]
    assert main(words) == 0
    return words, kept, out
