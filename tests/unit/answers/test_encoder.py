"""One image, one vector: from Python, from a features file and from an exported folder."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

import maect
from maect.cli import main
from maect.core.errors import UserError
from maect.core.files import RUN
from maect.evaluate.store import open_features


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in (".jpg", ".png"))


@pytest.fixture(scope="module")
def vectors(run: Path, photographs: Path) -> NDArray[np.float32]:
    return maect.load(run).encode(files_of(photographs))


@pytest.mark.usefixtures("at_once")
def test_vectors_are_the_bits_of_the_features_file(run, photographs, vectors, tmp_path, caplog):
    shards, out = tmp_path / "shards", tmp_path / "ct.safetensors"
    assert main(["shard", str(photographs), str(shards), "--kind", "unlabelled"]) == 0
    assert main(["features", str(run), "--shards", str(shards), "--out", str(out)]) == 0
    features = open_features(out)
    assert features.record["resize"] == 20  # that of the run
    by_key = dict(zip(features.names(), features.values, strict=True))
    for file, vector in zip(files_of(photographs), vectors, strict=True):
        key = f"{file.parent.name}/{file.stem.replace('.', '_')}"
        np.testing.assert_array_equal(vector, by_key[key])
    # Their resolved file makes the same, and refuses what cannot be.
    resolved, before = out.with_suffix(".yaml"), out.read_bytes()
    out.unlink()
    assert main(["features", str(resolved)]) == 0
    assert out.read_bytes() == before
    resolved.write_text(resolved.read_text().replace("blocks: 1", "blocks: 2"))
    assert main(["features", str(resolved)]) == 2
    assert "blocks 2 are read before the final norm: set norm: false" in caplog.text
    assert main(["features", str(run)]) == 2
    assert f"{run}: name the shards with --shards" in caplog.text


def test_an_export_is_the_same_and_not_imported(run, photographs, vectors, tmp_path, caplog):
    exported = tmp_path / "ct"
    assert main(["export", str(run), str(exported)]) == 0
    encoder = maect.load(exported)
    assert (encoder.resize, encoder.pooling) == (20, "mean")
    np.testing.assert_array_equal(encoder.encode(files_of(photographs)), vectors)
    for weights in (exported, exported / "model.safetensors"):
        assert main(["import", str(weights), str(tmp_path / "back")]) == 2
    assert caplog.text.count(f"{exported}: written by `maect export`") == 2
    assert not (tmp_path / "back").exists()


@pytest.mark.usefixtures("at_once")
def test_features_of_a_resize_replace_nothing_else(run, photographs, tmp_path, caplog):
    shards, experiment = tmp_path / "shards", tmp_path / "birds.yaml"
    assert main(["shard", str(photographs), str(shards), "--kind", "unlabelled"]) == 0
    bare = tmp_path / "bare"  # which says nothing of the resizing of images
    bare.mkdir()
    for name in ("encoder.safetensors", RUN):
        shutil.copy(run / name, bare)
    words = ["features", str(bare), "--shards", str(shards), "--out"]
    for stated, made in ((["--resize", "24"], 24), ([], 18)):
        out = tmp_path / f"{made}.safetensors"
        assert main([*words, str(out), *stated]) == 0
        assert open_features(out).record["resize"] == made
    resolved = out.with_suffix(".yaml")
    experiment.write_text("runs: {}\n")
    copy = Path(shutil.copy(run / "encoder.safetensors", tmp_path))
    kept = {path: path.read_bytes() for path in (out, resolved, experiment, copy)}
    for file, said in (
        (out, f"{resolved}: exists and says something else; choose another --out"),
        (experiment.with_suffix(".safetensors"), f"{experiment}: exists"),
        (copy, f"{copy}: exists"),
    ):
        assert main([*words, str(file), "--resize", "20"]) == 2
        assert said in caplog.text
    assert kept == {path: path.read_bytes() for path in kept}
    assert not copy.with_suffix(".yaml").exists()
    resolved.write_text(resolved.read_text().replace("resize: 18", "resize: 20"))
    assert main(["features", str(resolved)]) == 0
    assert open_features(out).record["resize"] == 20


def test_other_batches_and_other_forms_of_an_image(run, photographs, vectors):
    files, encoder = files_of(photographs), maect.load(run)
    np.testing.assert_array_equal(encoder.encode(files, batch_size=7, threads=1), vectors)
    np.testing.assert_array_equal(encoder.encode([f.read_bytes() for f in files]), vectors)
    lossless = [i for i, file in enumerate(files) if file.suffix == ".png"]
    images = [Image.open(files[i]) for i in lossless]
    np.testing.assert_array_equal(encoder.encode(images), vectors[lossless])
    arrays = [np.asarray(image) for image in images]
    np.testing.assert_array_equal(encoder.encode(arrays), vectors[lossless])
    assert encoder.encode([]).shape == (0, encoder.width)


def test_what_cannot_be_encoded_is_named(run, photographs, tmp_path):
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(files_of(photographs)[0].read_bytes()[:200])
    refused: list[tuple[dict[str, Any], Any, str]] = [
        ({}, [broken], r"broken\.jpg: .*truncated"),
        ({}, [tmp_path / "gone.jpg"], r"gone\.jpg: No such file"),
        ({}, [np.zeros((4, 4))], r"image 0: values of type float64 .*--pixels range"),
        ({}, str(broken), "give a list"),
        ({"precision": "fp16"}, [], "precision 'fp16': features are computed in fp32 and bf16"),
        ({"pixels": {"mean": (0.5,) * 3}}, [], "pixels: mean belongs to the encoder"),
    ]
    for options, images, words in refused:
        with pytest.raises((UserError, TypeError), match=words):
            maect.load(run, **options).encode(images)
