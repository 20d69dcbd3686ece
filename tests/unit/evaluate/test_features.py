from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file

from maect.core.errors import MissingFileError, UserError
from maect.data.index import open_index
from maect.data.transforms import normalize
from maect.evaluate import features
from maect.evaluate.features import Encoding, extract, part_ranges
from maect.evaluate.linear_probe import representations
from maect.evaluate.store import (
    check_labelled,
    check_same_encoder,
    open_features,
    open_record,
    write_features,
)
from maect.models.vit import build_encoder
from maect.models.weights import load_encoder_weights, save_encoder

from .by_hand import all_images, blocks_of
from .conftest import RECORD, Rank, blobs, store

MEAN, STD = [0.5, 0.3, 0.4], [0.3, 0.2, 0.25]
CPU = torch.device("cpu")


@pytest.fixture
def encoder(images: Path) -> Path:
    return images / "runs/mae/encoder.safetensors"


def test_features_are_those_of_a_plain_loop(images, encoder, extracted):
    found = open_features(extracted["val"])
    module, _, _ = load_encoder_weights(encoder)
    index = open_index(images / "shards/val")
    expected = []
    for key in index.keys():  # noqa: SIM118
        pixels = np.asarray(Image.open(images / "images" / "val" / f"{key}.png"), np.float32) / 255
        x = torch.from_numpy((pixels - MEAN) / STD).permute(2, 0, 1)[None].float()
        with torch.inference_mode():
            expected.append(module(x).patch_tokens().mean(1)[0].numpy())
    np.testing.assert_allclose(found.values, np.array(expected), atol=1e-5)
    assert np.array_equal(found.labels, index.labels)
    assert found.names() == index.keys()
    assert found.record["pooling"] == "mean"
    assert found.record["index_digest"] == index.digest
    assert found.record["class_names"] == list(index.class_names)
    assert {*extracted["val"].parent.iterdir()} == {*extracted.values()}


def test_features_before_the_final_norm(images, encoder, extracted, tmp_path, rank):
    shards = images / "shards/val"
    files = [extracted["val"], tmp_path / "before.safetensors", tmp_path / "several.safetensors"]
    given = {"encoder": encoder, "shards": shards, "resize": 16, "norm": False}
    for blocks, file in enumerate(files[1:], 1):
        assert extract(rank, **given, out=file, blocks=blocks) == "done"
    after, before, several = map(open_features, files)
    module, settings, _ = load_encoder_weights(encoder)
    pictures = all_images(open_index(shards))[0][:8]
    with torch.inference_mode():
        raw = blocks_of(module, normalize(pictures, settings.pixels))
        means = [tokens[:, 1:].mean(1) for tokens in raw]
        expected = means[-1], module.norm(raw[-1])[:, 1:].mean(1)
    assert len(means) == 3
    both = torch.cat(means[-2:], dim=1)
    np.testing.assert_allclose(several.values[:8], both, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(before.values[:8], expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(after.values[:8], expected[1], rtol=1e-5, atol=1e-5)


def test_a_restart_goes_on_with_the_same_bits(images, encoder, extracted, tmp_path, monkeypatch):
    options = {"encoder": encoder, "shards": images / "shards/train", "resize": 16}
    out = tmp_path / "a.safetensors"
    assert extract(Rank(patience=5), out=out, **options) == "requeue"
    parts = sorted((tmp_path / ".a.safetensors.parts").glob("*.safetensors"))
    assert len(parts) == 5 and not out.exists()
    # A damaged part is made again, a whole one is not.
    parts[1].write_bytes(parts[1].read_bytes()[:-3])
    encoded = []
    plain = features.evaluation_parts

    def remember(*arguments, parts, **options):
        encoded.extend(parts)
        return plain(*arguments, parts=parts, **options)

    monkeypatch.setattr(features, "evaluation_parts", remember)
    assert extract(Rank(), out=out, **options) == "done"
    ranges = part_ranges(150)
    assert encoded == [ranges[1], *ranges[5:]]
    assert out.read_bytes() == extracted["train"].read_bytes()


@pytest.mark.parametrize("n", [1, 15, 16, 17, 1297, 1_281_167])
def test_parts_cover_every_row_once(n):
    ranges = part_ranges(n)
    assert ranges[0].start == 0 and ranges[-1].stop == n
    assert all(a.stop == b.start for a, b in pairwise(ranges))
    assert max(map(len, ranges)) <= features.PART_ROWS
    assert len(ranges) >= min(n, 8)


PICTURES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_representations(encoder):
    """Concatenated blocks and [CLS] with mean, against a walk through the blocks."""
    module, _, _ = load_encoder_weights(encoder)
    outputs = blocks_of(module, PICTURES)
    with torch.inference_mode():
        outputs[-1] = module.norm(outputs[-1])
    for blocks in (1, 2, 3):
        encoding = Encoding(encoder, CPU, blocks=blocks)
        expected = torch.cat([o[:, 1:].mean(1) for o in outputs[-blocks:]], 1)
        torch.testing.assert_close(encoding(PICTURES), expected)
        assert encoding.width == expected.shape[1] == 16 * blocks
    both = Encoding(encoder, CPU, other_pooling=True)
    expected = torch.cat([outputs[-1][:, 1:].mean(1), outputs[-1][:, 0]], 1)
    torch.testing.assert_close(both(PICTURES), expected)
    every = Encoding(encoder, CPU, blocks=100, pooling="cls")
    assert every.blocks == 3 and every.width == 48
    torch.testing.assert_close(every(PICTURES), torch.cat([o[:, 0] for o in outputs], 1))


def test_the_other_pooling_of_several_class_tokens_is_the_mean_of_patches(encoder, tmp_path):
    """Pixio's: the mean of its [CLS] tokens stood beside the first of them."""
    settings = load_encoder_weights(encoder)[1].model_copy(update={"registers": 7})
    path = tmp_path / "encoder.safetensors"
    save_encoder(path, build_encoder(settings).state_dict(), settings, "mean_cls")
    encoding = Encoding(path, CPU, other_pooling=True)
    tokens = encoding.output(PICTURES, "last").tokens.float()
    expected = torch.cat([tokens[:, :8].mean(1), tokens[:, 8:].mean(1)], 1)
    torch.testing.assert_close(encoding(PICTURES), expected)
    assert list(representations(encoding)) == ["concat_1", "concat_cls_mean", "concat_mean"]


def test_norm_after_the_mean_is_of_the_last_block(encoder, tmp_path):
    """A fine-tuned encoder: the means of earlier blocks are as they are, as without that norm."""
    module, settings, _ = load_encoder_weights(encoder)
    module.norm_after_pooling()
    torch.nn.init.normal_(module.fc_norm.weight, generator=torch.Generator().manual_seed(0))
    path = tmp_path / "encoder.safetensors"
    save_encoder(path, module.state_dict(), settings, "fc_norm")
    plain, normed = (Encoding(file, CPU, blocks=3)(PICTURES) for file in (encoder, path))
    assert torch.equal(normed[:, :32], plain[:, :32])
    assert torch.equal(normed[:, 32:], Encoding(path, CPU)(PICTURES))


def test_what_was_written_is_read(tmp_path):
    features, labels = blobs(50, 7, 4, 0)
    path = store(
        tmp_path / "a.safetensors", features, labels, class_names=["a", "b", "c", "d", "e"]
    )
    found = open_features(path)
    assert (found.n, found.width, found.classes) == (50, 7, 5)
    assert np.array_equal(found.values, features) and np.array_equal(found.labels, labels)
    with pytest.raises(ValueError, match="read-only"):
        found.values[0] = 1
    assert found.names()[:2] == ["c/0000", "c/0001"]
    # Any other reader of the format sees the same.
    assert np.array_equal(load_file(path)["features"], features)


def test_what_cannot_be_extracted_written_or_read_is_named(images, encoder, tmp_path, rank):
    module, settings, pooling = load_encoder_weights(encoder)
    module.blocks[1].mlp.fc1.weight.data[0, 0] = float("nan")
    diverged, none = tmp_path / "encoder.safetensors", tmp_path / "none.safetensors"
    save_encoder(diverged, module.state_dict(), settings, pooling)
    features, labels = blobs(20, 3, 2, 0)
    labels[4] = -1
    empty = store(tmp_path / "empty.safetensors", np.ones((0, 3)), [])
    some = open_features(store(tmp_path / "some.safetensors", features, labels))
    given = {"encoder": diverged, "shards": images / "shards/val", "out": none}
    few = {"width": 3, "labels": labels, "keys": [], "record": RECORD}
    for error, message, refused in (
        (UserError, r"features of sample 0 \(.*\) are not finite", lambda: extract(rank, **given)),
        (UserError, "no such encoder", lambda: Encoding(none, CPU)),
        (ValueError, "19 rows of features for 20 labels",
         lambda: write_features(none, [features[:19]], **few)),
        (UserError, "no such features file", lambda: open_features(none)),
        (MissingFileError, "none", lambda: open_record(none)),
        (UserError, r"empty\.safetensors: holds no samples", lambda: open_features(empty)),
        (UserError, "sample 4 has no label", lambda: check_labelled(some)),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            refused()
    assert not none.exists()


def test_features_of_two_encoders_do_not_mix(tmp_path):
    a = open_features(store(tmp_path / "a.safetensors", *blobs(20, 3, 2, 0), norm=True, blocks=1))
    check_same_encoder(a, a)
    other = {
        "encoder_sha256": "f" * 64, "pooling": "mean", "precision": "bf16", "norm": False,
        "blocks": 2, "class_names": ["a", "b"], "image_size": 32, "resize": 99,
    }  # fmt: skip
    for field, value in other.items():
        path = tmp_path / f"{field}.safetensors"
        b = store(path, *blobs(20, 3, 2, 0), **a.record | {field: value})
        with pytest.raises(UserError, match=f"{field} differs"):
            check_same_encoder(a, open_features(b))
