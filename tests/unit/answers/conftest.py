"""Photographs that nobody took, and runs whose encoder has random weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from maect.cli import main
from maect.core.files import sha256_file, write_record
from maect.models.vit import build_encoder, seeded
from maect.models.weights import save_encoder
from maect.recipes import load_encoder
from maect.records import RunRecord


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
    with seeded(1):
        module = build_encoder(encoder).eval()
        with torch.no_grad():  # norms and biases that are not ones and zeros
            for parameter in module.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape))
    save_encoder(folder / "encoder.safetensors", module.state_dict(), encoder, "mean")
    record = {
        "run": "ct", "stage": "import", "source": None, "seed": 3, "source_revision": "abc",
        "finished": "2026-01-01T00:00:00Z", "encoder": encoder.model_dump(mode="json"),
        "sha256": {"encoder.safetensors": sha256_file(folder / "encoder.safetensors")},
    }  # fmt: skip
    write_record(RunRecord.path(folder), record)
    (folder / "config.yaml").write_text(
        f"run: ct\nstage: import\nsize: tiny\nresize: 20\nencoder: {encoder.model_dump_json()}\n"
    )
    return folder


@pytest.fixture
def predicted(run: Path, photographs: Path, tmp_path: Path) -> tuple[list[str], Path, Path]:
    """Words of a predict whose classifier was fitted to the photographs, that, and its table."""
    labelled, kept, out = (tmp_path / n for n in ("l.parquet", "c.safetensors", "p.csv"))
    embed = ["embed", str(run), str(photographs), "--kind", "folder", "--out", str(labelled)]
    assert main(embed) == 0
    words = ["predict", str(run), str(photographs), "--classifier", str(kept), "--out", str(out)]
    assert main([*words, "--labelled", str(labelled)]) == 0
    return words, kept, out
