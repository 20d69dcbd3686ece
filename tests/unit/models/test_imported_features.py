"""Imported weights through `maect features` and an evaluation that needs a [CLS] token."""

import numpy as np
import plain_vit
import pytest
import torch
from PIL import Image

from maect.cli import main
from maect.core.context import Context
from maect.core.errors import UserError
from maect.data.shards import shard
from maect.evaluate.encoding import Encoding
from maect.evaluate.features import extract
from maect.evaluate.store import open_features
from maect.models.weights import load_encoder_weights


@pytest.mark.parametrize("published", ["mae_full", "ijepa"])
def test_features_of_imported_weights(published, tmp_path):
    checkpoint, weights = getattr(plain_vit, published)()
    torch.save(checkpoint, tmp_path / "x.pth")
    assert main(["import", str(tmp_path / "x.pth"), str(tmp_path / "run")]) == 0
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (6, 16, 16, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        path = tmp_path / "images" / str(number % 2) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    shard(tmp_path / "images", tmp_path / "val", "folder", 1)
    out = tmp_path / "features.safetensors"
    encoder = tmp_path / "run/encoder.safetensors"
    assert (
        extract(Context(), encoder=encoder, shards=tmp_path / "val", out=out, resize=16) == "done"
    )
    features = open_features(out)
    order = [int(name.rpartition("/")[2].partition(".")[0]) for name in features.names()]
    images = torch.tensor(pixels[order]).permute(0, 3, 1, 2).double() / 255
    mean, std = (
        torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    tokens = plain_vit.plain_tokens(weights, (images - mean) / std)
    expected = tokens[:, int("cls_token" in weights) :].mean(dim=1)
    np.testing.assert_allclose(features.all(), expected, rtol=1e-3, atol=1e-3)


def test_what_needs_a_cls_token_says_so(tmp_path):
    torch.save(plain_vit.ijepa()[0], tmp_path / "x.pth")
    assert main(["import", str(tmp_path / "x.pth"), str(tmp_path / "run")]) == 0
    with pytest.raises(UserError, match=r"has no \[CLS\] token"):
        Encoding(tmp_path / "run/encoder.safetensors", torch.device("cpu"), pooling="cls")
    encoder = load_encoder_weights(tmp_path / "run/encoder.safetensors")[0]
    with pytest.raises(UserError, match=r"no \[CLS\] token"):
        encoder.pool(torch.zeros(2, 16, 64), "cls")
