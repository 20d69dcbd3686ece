"""Pixio: features of a second writing, strict names, and what is refused."""

import numpy as np
import plain_vit
import pytest
import torch

from maect.core.errors import UserError
from maect.core.files import read_record
from maect.evaluate.encoding import Encoding
from maect.models.checkpoints import convert, find_layout
from maect.models.export import export_run
from maect.models.weights import load_any_encoder
from maect.recipes import Encoder, Pixels, load_encoder
from maect.records import RunRecord
from maect.stages.imported import Import, import_weights


def imported(folder):
    checkpoint, weights = plain_vit.pixio()
    torch.save(checkpoint, folder / "pixio.pth")
    layout, new = import_weights(folder / "pixio.pth", folder / "run")
    assert (layout, new.size) == ("pixio", "tiny")
    return weights, load_any_encoder(folder / "run/encoder.safetensors")


def test_features_are_those_of_a_plain_forward_pass(tmp_path):
    weights, (module, settings, pooling) = imported(tmp_path)
    assert (pooling, settings.registers, settings.prefix_tokens) == ("mean_cls", 7, 8)
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    expected = plain_vit.plain_tokens(weights, images)
    with torch.no_grad():
        found = module.double()(images)
    torch.testing.assert_close(found.tokens, expected, rtol=1e-6, atol=1e-6)
    features = Encoding(tmp_path / "run/encoder.safetensors", torch.device("cpu"))(images.float())
    np.testing.assert_allclose(features, expected[:, :8].mean(1), rtol=1e-4, atol=1e-4)


def test_every_name_is_used():
    checkpoint, _ = plain_vit.pixio()
    assert not convert(checkpoint, "pixio", "x").left_out
    for key, value in checkpoint.items():
        fewer = {other: x for other, x in checkpoint.items() if other != key}
        with pytest.raises(UserError):
            convert(fewer, "pixio", "x")
        if value.shape[-1] > 1:
            with pytest.raises(UserError, match=r"should be|none of the sizes|no pos_"):
                convert({**checkpoint, key: value[..., :1]}, "pixio", "x")
    with pytest.raises(UserError, match=r"unexpected other\.weight"):
        convert({**checkpoint, "other.weight": torch.ones(2)}, "pixio", "x")


def test_names_tell_it_apart():
    assert find_layout(plain_vit.pixio()[0], "x") == "pixio"
    full = {"model": plain_vit.pixio()[0] | {"mask_token": torch.ones(1, 1, 8)}}
    assert find_layout(full, "x") == "pixio"


def test_shapes_are_known_before_the_file_is_read():
    pixio = load_encoder("base", 256).model_copy(update=Import(layout="pixio").shape)
    assert (pixio.prefix_tokens, pixio.patches, pixio.class_token) == (8, 256, True)
    for size, shape in (("oneb16", (1536, 48, 24)), ("fiveb16", (3072, 48, 32))):
        encoder = load_encoder(size)
        assert (encoder.width, encoder.depth, encoder.heads) == shape and encoder.patch_size == 16
    pixio.check_trainable()


def test_several_cls_tokens_are_no_export(tmp_path):
    imported(tmp_path)
    with pytest.raises(UserError, match=r"mean of several \[CLS\] tokens"):
        export_run(tmp_path / "run", tmp_path / "out")
    assert read_record(RunRecord.path(tmp_path / "run"))["pooling"] == "mean_cls"


def test_channels_are_adapted_and_other_image_sizes_work():
    checkpoint, _ = plain_vit.pixio()
    grey = Pixels(channels=1, mean=(0.5,), std=(0.5,))
    new = convert(checkpoint, "pixio", "x", image_size=32, pixels=grey)
    summed = checkpoint["patch_embed.proj.weight"].sum(1, keepdim=True)
    torch.testing.assert_close(new.tensors["patch_embed.proj.weight"], summed)
    assert new.encoder.image_size == 32


def test_files_of_earlier_revisions_have_an_empty_module():
    values = load_encoder("tiny").model_dump()
    assert Encoder.model_validate(values | {"module": None}) == load_encoder("tiny")
