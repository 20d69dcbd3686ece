"""What `maect export` writes, loaded by timm itself without a network."""

import errno
import json
import math
import re
import sys

import numpy as np
import pytest
import timm
import torch
from encoder_runs import finished_run
from PIL import Image
from sklearn.datasets import load_sample_image

import maect
import maect.models.export
from maect.cli import main
from maect.models.export import architecture_of, crop_fraction, read_export
from maect.models.vit import build_encoder
from maect.recipes import Pixels, load_encoder


def features_of(module, encoder, pooling):
    """Return random images and their features."""
    images = torch.rand(2, encoder.pixels.channels, encoder.image_size, encoder.image_size)
    with torch.no_grad():
        return images, module.pool(module(images).tokens, pooling)


def same(model, images, features):
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(images), features, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("pooling", "change"),
    [("cls", {}), ("mean", {"class_token": False}), ("mean", {"registers": 3})],
)
def test_what_is_printed_makes_model_and_transform(pooling, change, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    encoder = load_encoder("tiny").model_copy(update={"resize": 20} | change)
    module = finished_run(tmp_path / "ct", encoder, pooling)
    images, features = features_of(module, encoder, pooling)
    assert main(["export", str(tmp_path / "ct"), str(tmp_path / "out")]) == 0
    names = {"timm": timm}
    exec(capsys.readouterr().out, names)
    same(names["model"], images, features)
    resize, crop = names["transform"].transforms[:2]
    assert (resize.size, crop.size) == (20, (16, 16))
    file = str(tmp_path / "out/model.safetensors")
    with pytest.raises(RuntimeError, match="Missing key"):  # loading is strict
        timm.create_model("vit_tiny_patch16_224", checkpoint_path=file, num_classes=10)


def test_any_resize_survives_timms_fraction():
    for size, resize in ((16, 16), (32, 32), (98, 112), (224, 256)):
        for side in range(resize, 3 * resize):
            assert math.floor(size / crop_fraction(size, side)) == side


@pytest.mark.parametrize(
    ("size", "name"),
    [
        ("base", "vit_base_patch16_224"),
        ("large", "vit_large_patch16_224"),
        ("huge14", "vit_huge_patch14_224"),
    ],
)
def test_the_papers_sizes_are_timms(size, name):
    encoder = load_encoder(size)
    assert architecture_of(encoder) == name
    with torch.device("meta"):
        theirs = timm.create_model(name, num_classes=0).state_dict()
        ours = build_encoder(encoder).state_dict()
    assert {k: v.shape for k, v in theirs.items()} == {k: v.shape for k, v in ours.items()}


def test_onnx_gives_the_same_vectors(tmp_path, capsys, monkeypatch):
    """By onnxruntime, for any number of images; without what writes it, a line says what to do."""
    finished_run(tmp_path / "ct", load_encoder("tiny"), "mean")
    out = tmp_path / "out"
    words = ["export", str(tmp_path / "ct"), str(out), "--onnx"]
    runtime = pytest.importorskip("onnxruntime")
    assert main(words) == 0
    session = runtime.InferenceSession(out / "model.onnx", providers=["CPUExecutionProvider"])
    told = session.get_modelmeta().custom_metadata_map
    assert json.loads(told["input_size"]) == [3, 16, 16] and len(json.loads(told["mean"])) == 3
    model = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    for n in (1, 3):
        images = torch.randn(n, 3, 16, 16, generator=torch.Generator().manual_seed(n))
        (vectors,) = session.run(["vectors"], {"images": images.numpy()})
        with torch.inference_mode():
            np.testing.assert_allclose(vectors, model(images), rtol=1e-4, atol=1e-4)
    files = ["README.md", "config.json", "model.onnx", "model.safetensors"]
    assert sorted(path.name for path in out.iterdir()) == files
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert main(words) == 2
    assert "install maect[onnx]" in capsys.readouterr().err


def test_a_later_export_leaves_no_model_of_an_earlier_encoder(tmp_path):
    out = tmp_path / "out"
    finished_run(tmp_path / "ct", load_encoder("tiny"), "cls")
    refused = ["export", str(tmp_path / "ct"), str(out), "--resize", "10"]
    assert main(refused[:3]) == 0
    for name in ("model.onnx", "model.onnx.data", "mine.txt"):
        (out / name).write_text("of before")
    assert main(refused) == 2 and len([*out.iterdir()]) == 6
    assert main(refused[:3]) == 0
    left = {"config.json", "mine.txt", "model.safetensors", "README.md"}
    assert {path.name for path in out.iterdir()} == left


OTHERS = '{"model_type": "vit"}'


@pytest.mark.parametrize("name", ["README.md", "model.safetensors", "model.onnx"])
def test_files_of_others_are_not_replaced(name, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text(OTHERS)
    finished_run(tmp_path / "ct", load_encoder("tiny"), "cls")
    words = [str(tmp_path / "ct"), str(out)]
    assert main(["export", *words]) == 2
    assert f"{out}: has {name}, not written by maect export" in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [(name, OTHERS)]
    # A README of a clone is its repository's own.
    published = main(["publish", *words, "--repository", "me/birds"])
    assert published == (0 if name == "README.md" else 2)


def test_an_export_that_broke_off_is_repeated(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    finished_run(tmp_path / "ct", load_encoder("tiny"), "cls")
    words = ["export", str(tmp_path / "ct"), str(tmp_path / "out")]
    with monkeypatch.context() as patch:
        patch.setattr(maect.models.export, "model_card", full)
        assert main(words) == 2
    assert main(words) == 0
    assert read_export(tmp_path / "out")[0].exists()


@pytest.mark.parametrize(("channels", "pooling"), [(3, "mean"), (1, "cls")])
def test_the_cards_code_reads_files_as_the_run_does(channels, pooling, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    own = {} if channels == 3 else {"channels": 1, "mean": (0.4,), "std": (0.2,)}
    pixels = Pixels(orientation="exif", background=(255, 250, 240), **own)
    encoder = load_encoder("tiny", 16, pixels).model_copy(update={"resize": 20})
    finished_run(tmp_path / "ct", encoder, pooling)
    assert main(["export", str(tmp_path / "ct"), str(tmp_path / "out")]) == 0
    card = (tmp_path / "out/README.md").read_text()
    reading, *ways = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(ways) == 3  # by timm, by transformers and by maect
    photo = Image.fromarray(load_sample_image("china.jpg")).resize((90, 61))
    exif = Image.Exif()
    exif[0x0112] = 6
    photo.save(tmp_path / "turned.jpg", quality=95, subsampling=0, exif=exif)
    photo.save(tmp_path / "plain.png")
    photo.putalpha(Image.linear_gradient("L").resize(photo.size))
    photo.save(tmp_path / "logo.png")
    for file, least in (("plain.png", 1 - 1e-6), ("turned.jpg", 0.999), ("logo.png", 0.999)):
        (expected,) = maect.load(tmp_path / "ct").encode([tmp_path / file])
        for code in ways:
            names = {}
            for part in (reading, code):
                part = part.replace("PATH_OF_THIS_FOLDER", str(tmp_path / "out"))
                exec(part.replace("IMAGE", str(tmp_path / file)), names)
            found = names["vectors"] if "vectors" in names else names["vector"].detach().numpy()
            vector = found[0]
            cosine = vector @ expected / np.linalg.norm(vector) / np.linalg.norm(expected)
            assert cosine > least, (file, code, cosine)


def test_other_channels_are_loaded_as_they_are(tmp_path):
    bands = Pixels(channels=5, mean=(0.5,) * 5, std=(0.25,) * 5)
    encoder = load_encoder("tiny", 16, bands)
    images, features = features_of(finished_run(tmp_path / "ct", encoder, "cls"), encoder, "cls")
    assert main(["export", str(tmp_path / "ct"), str(tmp_path / "out")]) == 0
    same(timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True), images, features)
    assert "vector = model(image[None])" in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize(
    ("shape", "pooling", "record", "words", "message"),
    [
        ({"norm": "post"}, "cls", {}, [], "norms behind the sums"),
        ({}, "mean_cls", {}, [], "or gives the mean of several [CLS] tokens"),
        ({}, "cls", {}, ["--resize", "10"], "resize 10 is smaller than image_size 16"),
        ({}, "cls", {"sha256": {"encoder.safetensors": "0"}}, [], "encoder.safetensors: damaged"),
        ({}, None, {}, [], "run.json: no such finished run"),
    ],
)
def test_refusals(shape, pooling, record, words, message, tmp_path, capsys):
    if pooling is not None:
        encoder = load_encoder("tiny").model_copy(update=shape)
        finished_run(tmp_path / "ct", encoder, pooling, **record)
    assert main(["export", str(tmp_path / "ct"), str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
