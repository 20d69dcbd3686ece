"""Corrupted test sets: what they do to photographs, and that it never changes."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sample_images import encode, jpeg, photographs, write_all

from maect.data.decode import read_rgb
from maect.data.index import open_index
from maect.data.shards import shard
from maect.data.sources import corrupted, open_source
from maect.recipes import Pixels

KINDS = ["noise", "blur", "contrast", "pixelate", "jpeg"]


def small_photographs(root: Path, count: int = 12) -> Path:
    """ROOT/cN/NN.jpg: 32 x 32 pixels each, cut from photographs at an eighth of their size."""
    images = {}
    for label, photo in enumerate(photographs()):
        photo = photo.resize((photo.width // 4, photo.height // 4))
        for number in range(count):
            x, y = 32 * (number % 4), 32 * (number // 4)
            piece = photo.crop((x, y, x + 32, y + 32))
            images[f"c{label}/{number:02d}.jpg"] = jpeg(piece, quality=95)
    return write_all(root, images)


def read(kind: str, images: Path) -> np.ndarray:
    source = open_source(kind, images)
    decoded = [read_rgb(source.read(entry)) for entry in source.listing().entries]
    return np.stack([np.asarray(image).astype(float) for image in decoded])


def test_each_takes_away_what_it_says(tmp_path):
    images = small_photographs(tmp_path / "images")
    plain = read("folder", images)
    found = {kind: read(kind, images) for kind in KINDS}
    assert all(changed.shape == plain.shape for changed in found.values())

    noise = (found["noise"] - plain)[(plain > 90) & (plain < 165)]
    assert abs(noise.mean()) < 0.5 and noise.std() == pytest.approx(25.5, abs=0.5)
    mean = plain.mean((1, 2), keepdims=True)
    assert np.abs(found["contrast"] - (mean + 0.15 * (plain - mean))).max() <= 0.5

    def steepness(pixels: np.ndarray) -> float:
        return float(np.square(np.diff(pixels, axis=1)).mean())

    assert steepness(found["blur"]) < 0.5 * steepness(plain)
    # 32 pixels made of 21: eleven rows of each image repeat the one above.
    repeated = (np.diff(found["pixelate"], axis=1) == 0).all((2, 3)).sum(1)
    assert (repeated >= 11).all() and np.abs(found["pixelate"].mean() - plain.mean()) < 1
    assert 2 < np.abs(found["jpeg"] - plain).mean() < 20


def test_noise_is_an_images_own(tmp_path):
    grey = encode(Image.new("RGB", (32, 32), (128, 128, 128)), "PNG")
    write_all(tmp_path, dict.fromkeys(("a/1.png", "a/2.png", "b/1.png"), grey))
    first, *others = read("noise", tmp_path)
    assert all(abs(np.corrcoef(first.ravel(), other.ravel())[0, 1]) < 0.1 for other in others)
    # The same on every machine, and for ever: accuracies are compared with published ones.
    digest = hashlib.sha256(first.astype(np.uint8).tobytes()).hexdigest()
    assert digest[:16] == "0c18d5ee44c98144"
    # Of large images it is drawn part by part: at once it took 800 bytes a pixel.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corrupted, "_VALUES", 100)
        assert np.array_equal(read("noise", tmp_path)[0], first)


@pytest.mark.parametrize("kind", KINDS)
def test_shards_of_a_corrupted_set(kind, tmp_path):
    images = small_photographs(tmp_path / "images", 2)
    shard(images, tmp_path / "plain", "folder", 1, split="val")
    for out, threads in (("a", 1), ("b", 3)):
        assert shard(images, tmp_path / out, kind, 2, split="val", threads=threads) == 4
    plain, first, again = (open_index(tmp_path / name) for name in ("plain", "a", "b"))
    assert first.digest == again.digest != plain.digest
    assert first.labels.tolist() == plain.labels.tolist() and first.keys() == plain.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_images_are_made_ready_before_they_are_changed(kind, tmp_path):
    """A logo on its background, and grey by its range: neither is black."""
    logo = Image.new("RGBA", (32, 32), (0, 0, 0, 0))
    logo.putpixel((3, 3), (200, 0, 0, 255))
    deep = Image.fromarray(np.full((32, 32), 2048, np.uint16))
    files = {"logo/1.png": encode(logo, "PNG"), "deep/1.png": encode(deep, "PNG")}
    pixels = Pixels(background=(255, 255, 255), range=(0, 4095), orientation="exif")
    source = write_all(tmp_path / "in", files)
    shard(source, tmp_path / "out", kind, 1, split="val", pixels=pixels)
    index = open_index(tmp_path / "out")
    means = {index.key(i): np.asarray(read_rgb(index.read(i))).mean() for i in range(2)}
    assert means["logo/1"] > 235 and means["deep/1"] == pytest.approx(128, abs=3)
