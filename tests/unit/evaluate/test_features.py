from itertools import pairwise

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


def test_features_are_those_of_a_plain_loop(images, tmp_path, rank):
    encoder, out = images / "runs" / "mae" / "encoder.safetensors", tmp_path / "a.safetensors"
    shards = images / "shards" / "val"
    assert extract(rank, encoder=encoder, shards=shards, out=out, resize=16) == "done"
    found = open_features(out)
    module, _, _ = load_encoder_weights(encoder)
    index = open_index(shards)
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
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_features_before_the_final_norm(images, tmp_path, rank):
    encoder, shards = images / "runs" / "mae" / "encoder.safetensors", images / "shards" / "val"
    files = [tmp_path / f"{name}.safetensors" for name in ("after", "before", "several")]
    given = {"encoder": encoder, "shards": shards, "resize": 16}
    for file, norm, blocks in zip(files, (True, False, False), (1, 1, 2), strict=True):
        assert extract(rank, **given, out=file, norm=norm, blocks=blocks) == "done"
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


def test_a_restart_goes_on_with_the_same_bits(images, tmp_path, monkeypatch):
    options = {
        "encoder": images / "runs" / "mae" / "encoder.safetensors",
        "shards": images / "shards" / "train",
    }
    assert extract(Rank(), out=tmp_path / "whole.safetensors", **options) == "done"
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
    assert out.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


@pytest.mark.parametrize("n", [1, 15, 16, 17, 1297, 1_281_167])
def test_parts_cover_every_row_once(n):
    ranges = part_ranges(n)
    assert ranges[0].start == 0 and ranges[-1].stop == n
    assert all(a.stop == b.start for a, b in pairwise(ranges))
    assert max(map(len, ranges)) <= features.PART_ROWS
    assert len(ranges) >= min(n, 8)


def test_an_encoder_that_diverged_is_named(images, tmp_path, rank):
    module, settings, pooling = load_encoder_weights(
        images / "runs" / "mae" / "encoder.safetensors"
    )
    module.blocks[1].mlp.fc1.weight.data[0, 0] = float("nan")
    path = tmp_path / "encoder.safetensors"
    save_encoder(path, module.state_dict(), settings, pooling)
    with pytest.raises(UserError, match=r"features of sample 0 \(.*\) are not finite"):
        extract(
            rank, encoder=path, shards=images / "shards" / "val", out=tmp_path / "a.safetensors"
        )
    with pytest.raises(UserError, match="no such encoder"):
        Encoding(tmp_path / "none.safetensors", torch.device("cpu"))


def test_representations(images):
    """Concatenated blocks and [CLS] with mean, against a walk through the blocks."""
    path = images / "runs" / "mae" / "encoder.safetensors"
    module, _, _ = load_encoder_weights(path)
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    outputs = blocks_of(module, x)
    with torch.inference_mode():
        outputs[-1] = module.norm(outputs[-1])
    cpu = torch.device("cpu")
    for blocks in (1, 2, 3):
        encoding = Encoding(path, cpu, blocks=blocks)
        expected = torch.cat([o[:, 1:].mean(1) for o in outputs[-blocks:]], 1)
        torch.testing.assert_close(encoding(x), expected)
        assert encoding.width == expected.shape[1] == 16 * blocks
    both = Encoding(path, cpu, other_pooling=True)
    expected = torch.cat([outputs[-1][:, 1:].mean(1), outputs[-1][:, 0]], 1)
    torch.testing.assert_close(both(x), expected)
    every = Encoding(path, cpu, blocks=100, pooling="cls")
    assert every.blocks == 3 and every.width == 48
    torch.testing.assert_close(every(x), torch.cat([o[:, 0] for o in outputs], 1))


def test_the_other_pooling_of_several_class_tokens_is_the_mean_of_patches(images, tmp_path):
    """Pixio's: the mean of its [CLS] tokens stood beside the first of them."""
    _, settings, _ = load_encoder_weights(images / "runs" / "mae" / "encoder.safetensors")
    settings = settings.model_copy(update={"registers": 7})
    path, cpu = tmp_path / "encoder.safetensors", torch.device("cpu")
    save_encoder(path, build_encoder(settings).state_dict(), settings, "mean_cls")
    encoding = Encoding(path, cpu, other_pooling=True)
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    tokens = encoding.output(x, "last").tokens.float()
    expected = torch.cat([tokens[:, :8].mean(1), tokens[:, 8:].mean(1)], 1)
    torch.testing.assert_close(encoding(x), expected)
    assert list(representations(encoding)) == ["concat_1", "concat_cls_mean", "concat_mean"]


def test_norm_after_the_mean_is_of_the_last_block(images, tmp_path):
    """A fine-tuned encoder: the means of earlier blocks are as they are, as without that norm."""
    original = images / "runs" / "mae" / "encoder.safetensors"
    module, settings, _ = load_encoder_weights(original)
    module.norm_after_pooling()
    torch.nn.init.normal_(module.fc_norm.weight, generator=torch.Generator().manual_seed(0))
    path = tmp_path / "encoder.safetensors"
    save_encoder(path, module.state_dict(), settings, "fc_norm")
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    cpu = torch.device("cpu")
    plain, normed = (Encoding(file, cpu, blocks=3)(x) for file in (original, path))
    assert torch.equal(normed[:, :32], plain[:, :32])
    assert torch.equal(normed[:, 32:], Encoding(path, cpu)(x))


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


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match="no such features file"):
        open_features(tmp_path / "b.safetensors")
    with pytest.raises(MissingFileError):
        open_record(tmp_path / "b.safetensors")


def test_too_few_rows_leave_no_file(tmp_path):
    features, labels = blobs(10, 3, 2, 0)
    with pytest.raises(ValueError, match="9 rows of features for 10 labels"):
        write_features(
            tmp_path / "a.safetensors", [features[:9]], width=3, labels=labels, keys=[],
            record=RECORD,
        )  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_empty_or_unlabelled_is_named(tmp_path):
    empty = store(tmp_path / "a.safetensors", np.ones((0, 3)), [])
    with pytest.raises(UserError, match=r"a\.safetensors: holds no samples"):
        open_features(empty)
    features, labels = blobs(20, 3, 2, 0)
    labels[4] = -1
    found = open_features(store(tmp_path / "b.safetensors", features, labels))
    with pytest.raises(UserError, match="sample 4 has no label"):
        check_labelled(found)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("encoder_sha256", "f" * 64), ("pooling", "mean"), ("precision", "bf16"), ("norm", False),
        ("blocks", 2), ("class_names", ["a", "b"]), ("image_size", 32), ("resize", 99),
    ],
)  # fmt: skip
def test_features_of_two_encoders_do_not_mix(field, value, tmp_path):
    a = open_features(store(tmp_path / "a.safetensors", *blobs(20, 3, 2, 0), norm=True, blocks=1))
    check_same_encoder(a, a)
    b = store(tmp_path / "b.safetensors", *blobs(20, 3, 2, 0), **(a.record | {field: value}))
    with pytest.raises(UserError, match=f"{field} differs"):
        check_same_encoder(a, open_features(b))
