"""Turned, transparent, deep and many-channelled images: in shards, batches and encoders."""

import io
import json
import struct
from pathlib import Path

import numpy as np
import pydicom
import pytest
import torch
from PIL import Image, ImageOps
from pydicom.uid import ExplicitVRLittleEndian
from sample_images import deep_png, encode, jpeg, photographs, tiff, turned, write_all
from torch.nn import functional as F

import maect
from maect.core.errors import UserError
from maect.core.settings import digest
from maect.data.convert import (
    convert_array,
    convert_picture,
    inspect_image,
    make_ready,
    picture_of,
    ready_pixels,
    render_ready,
)
from maect.data.decode import UnreadableError, read_rgb
from maect.data.image_facts import UNTURNED, Facts, warning
from maect.data.index import open_index
from maect.data.loader import evaluation_parts, train_batches
from maect.data.shard_check import verify
from maect.data.shards import shard
from maect.data.subsets import class_view
from maect.data.transforms import augment, center_crops, random_crops
from maect.models.checkpoints import PATCHES, convert
from maect.models.decoder import patchify, reconstruction_loss
from maect.models.vit import build_encoder
from maect.recipes import AUGMENTATIONS, Encoder, Pixels, load_encoder
from maect.stages import load_recipe

EXIF = Pixels(orientation="exif")
BANDS = Pixels(channels=5, mean=(0.5,) * 5, std=(0.25,) * 5, range=(0, 4095))
DEEP = Pixels(channels=1, mean=(0.4,), std=(0.2,), range=(100, 4095))


def levels_of(facts: Facts) -> int:
    return int(facts["deep"]["levels"], 16).bit_count()


@pytest.mark.parametrize("code", range(1, 9))
def test_every_orientation_is_cropped_as_if_it_were_upright(code):
    data = turned(code)
    ready = make_ready(data, EXIF)
    with Image.open(io.BytesIO(data)) as image:
        upright = ImageOps.exif_transpose(image)
        assert upright is not None
    assert ready.data == data and (ready.width, ready.height) == upright.size
    assert ready.turned == (code > 1)
    width, height = (np.array([side] * 3) for side in upright.size)
    crops = random_crops(
        width, height, (0.2, 1.0), 32, seed=3, epochs=range(3), ids=np.full(3, 7), view=0
    )
    geometries = np.concatenate([center_crops(width[:1], height[:1], 40, 32), crops])
    made, expected = (np.empty((4, 3, 32, 32), np.uint8) for _ in range(2))
    render_ready(ready.data, geometries, made, ready.turned)
    render_ready(encode(upright, "PNG"), geometries, expected, False)
    assert abs(made.astype(int) - expected).max() <= 3  # another order of rounding
    assert np.array_equal(np.asarray(picture_of(data, EXIF)), np.asarray(upright))
    with Image.open(io.BytesIO(data)) as image:  # and as a picture, where the data set says so
        assert np.array_equal(convert_picture(image, EXIF).pixels, np.asarray(upright))
        stored = convert_picture(image, Pixels(background=(0, 0, 0)))
        assert stored.size == image.size and (UNTURNED in stored.facts) == (code > 1)
    if code > 1:  # a format without loss is turned for good
        png = make_ready(turned(code, "PNG"), EXIF)
        with Image.open(io.BytesIO(turned(code, "PNG"))) as image:
            expected_png = np.asarray(ImageOps.exif_transpose(image))
        assert not png.turned and np.array_equal(np.asarray(read_rgb(png.data)), expected_png)


def test_turned_images_in_shards(tmp_path):
    straight = {f"c/{n}.jpg": turned(1, size=(80 + n, 60)) for n in range(3)}
    plain = write_all(tmp_path / "plain", straight)
    shard(plain, tmp_path / "a", "folder", 1)
    shard(plain, tmp_path / "b", "folder", 1, pixels=EXIF)
    a, b = open_index(tmp_path / "a"), open_index(tmp_path / "b")
    # Where nothing is turned, nothing is different.
    assert b.plain and a.digest == b.digest and not b.turned
    more = {"c/t.jpg": turned(6), "c/s.png": turned(3, "PNG")}
    images = write_all(tmp_path / "turned", straight | more)
    shard(images, tmp_path / "c", "folder", 2, pixels=EXIF)
    shard(images, tmp_path / "d", "folder", 2)
    c, d = open_index(tmp_path / "c"), open_index(tmp_path / "d")
    assert c.turned and c.digest != d.digest and verify(tmp_path / "c") == 5
    row = next(i for i, key in enumerate(c.keys()) if key == "c/t")
    assert c.rows[row, 5:7].tolist() == [61, 90] and c.read(row) == turned(6)
    (batch,) = evaluation_parts(c, image_size=32, parts=[range(5)], threads=2)
    upright = picture_of(turned(6), EXIF)
    resized = np.asarray(upright.resize((37, 54), Image.Resampling.BICUBIC))
    made = batch[0][row].permute(1, 2, 0).numpy().astype(int)
    assert abs(made - resized[11:43, 2:34]).max() <= 3
    assert np.array_equal(maect.shards(tmp_path / "c")[row]["image"], upright)
    class_view(tmp_path / "c", tmp_path / "view", ["c"])
    view = open_index(tmp_path / "view")
    (shown,) = evaluation_parts(view, image_size=32, parts=[range(5)], threads=2)
    assert torch.equal(shown[0], batch[0])
    # A test set that is changed while it is read is turned as its images are.
    shard(images, tmp_path / "e", "contrast", 1, pixels=EXIF)
    assert np.array_equal(open_index(tmp_path / "e").rows[:, 4:], c.rows[:, 4:])


def test_transparent_images_get_a_background():
    logo = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    logo.putpixel((3, 3), (0, 0, 0, 255))
    data = encode(logo, "PNG")
    assert np.asarray(read_rgb(data)).max() == 0  # as it was: black on black
    white = Pixels(background=(255, 250, 240))
    values = np.asarray(read_rgb(make_ready(data, white).data))
    assert values[3, 3].tolist() == [0, 0, 0] and values[0, 0].tolist() == [255, 250, 240]
    opaque = encode(Image.new("RGBA", (8, 8), (9, 8, 7, 255)), "PNG")
    assert make_ready(opaque, white).data == opaque
    photo = jpeg(photographs()[0].resize((20, 20)))
    assert make_ready(photo, white).data == photo
    palette = Image.new("P", (4, 4))
    shown = encode(palette, "GIF", transparency=0)
    assert np.asarray(read_rgb(make_ready(shown, white).data))[0, 0].tolist() == [255, 250, 240]


def said_of(shards: Path) -> str | None:
    record = open_index(shards).record
    return warning(record, Pixels.of_shards(record["options"]))


def test_transparency_without_a_background_is_said(tmp_path, caplog):
    logo, opaque = (Image.new("RGBA", (8, 8), (9, 8, 7, alpha)) for alpha in (0, 255))
    palette = encode(Image.new("P", (4, 4)), "GIF", transparency=0)
    files = {"c/a.png": encode(logo, "PNG"), "c/b.png": encode(opaque, "PNG"), "c/c.gif": palette}
    images = write_all(tmp_path / "in", files)
    shard(images, tmp_path / "plain", "folder", 2, pixels=EXIF)
    assert open_index(tmp_path / "plain").record["transparent"] == 2
    said = said_of(tmp_path / "plain")
    assert said is not None and said in caplog.text
    assert said.startswith("2 images with transparent parts")
    assert said.endswith("pixels: {background: [255, 255, 255]}")
    shard(images, tmp_path / "white", "folder", 2, pixels=Pixels(background=(255, 255, 255)))
    assert "transparent" not in open_index(tmp_path / "white").record
    assert said_of(tmp_path / "white") is None


def scan(seed: int, high: int = 4095) -> np.ndarray:
    values = np.random.default_rng(seed).integers(100, high + 1, (24, 30)).astype(np.uint16)
    values[0, :2] = 100, high
    return values


def dicom(values: np.ndarray, photometric: str = "MONOCHROME2") -> bytes:
    file = pydicom.Dataset()
    file.Rows, file.Columns = values.shape
    file.SamplesPerPixel, file.PhotometricInterpretation = 1, photometric
    file.BitsAllocated, file.BitsStored, file.HighBit, file.PixelRepresentation = 16, 12, 11, 0
    file.RescaleSlope, file.RescaleIntercept = 2, -200
    file.PixelData = values.tobytes()
    file.file_meta = pydicom.dataset.FileMetaDataset()
    file.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    file.SOPClassUID = file.file_meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.7"
    file.SOPInstanceUID = file.file_meta.MediaStorageSOPInstanceUID = "1.2.3"
    stream = io.BytesIO()
    file.save_as(stream, enforce_file_format=True)
    return stream.getvalue()


def npy(values: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "npy", "float", "DICOM", "inverted"])
def test_deep_images_by_their_range(kind):
    values = scan(1)
    data = {
        "PNG": lambda: encode(Image.fromarray(values), "PNG"),
        "TIFF": lambda: tiff(values),
        "npy": lambda: npy(values),
        "float": lambda: tiff(values.astype(np.float32)),
        "DICOM": lambda: dicom(values // 2 + 100),
        "inverted": lambda: dicom((7990 - values) // 2, "MONOCHROME1"),
    }[kind]()
    ready = make_ready(data, DEEP)
    grey = np.asarray(read_rgb(ready.data))[..., 0].astype(int)
    expected = np.rint(255 * (values.astype(float) - 100) / 3995)
    assert abs(grey - expected).max() <= (1 if kind in ("DICOM", "inverted") else 0)
    assert levels_of(ready.facts) > 200


def colors(seed: int, channels: int = 3) -> np.ndarray:
    return np.stack([scan(seed + 10 * channel) for channel in range(channels)], axis=-1)


@pytest.mark.parametrize(("kind", "pixels"), [("grey", None), ("color", EXIF), ("TIFF", None)])
def test_few_levels_are_a_warning_with_a_hint(tmp_path, kind, pixels):
    make = {
        "grey": lambda n: encode(Image.fromarray(scan(n)), "PNG"),
        "color": lambda n: deep_png(colors(n)),
        "TIFF": lambda n: tiff(colors(n), photometric="rgb"),
    }[kind]
    images = write_all(tmp_path / "in", {f"c/{n}.png": make(n) for n in range(3)})
    shard(images, tmp_path / "dark", "folder", 2, pixels=pixels)
    said = said_of(tmp_path / "dark")
    assert said is not None
    assert said.startswith("3 images of more than 8 bits become 16 of 256 grey levels")
    assert said.partition("pixels: ")[2] == "{range: [0, 4095]}"
    if kind != "grey":  # their bytes stay
        names = open_index(tmp_path / "dark").keys()
        assert open_index(tmp_path / "dark").read(0) == make(int(names[0][-1]))
    stated = Pixels(range=(100, 4095))
    shard(images, tmp_path / "clear", "folder", 2, pixels=stated)
    clear = open_index(tmp_path / "clear")
    assert said_of(tmp_path / "clear") is None and clear.plain and verify(tmp_path / "clear") == 3
    assert clear.record["deep"]["values"] == [100, 4095]
    (batch,) = evaluation_parts(clear, image_size=16, parts=[range(3)], threads=1)
    assert batch[0].float().mean() > 100


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "packed"])
def test_deep_colors_by_their_range(kind, channels):
    """Pillow keeps the upper half of them."""
    values = colors(1, channels)
    expected = np.rint(255 * (values.astype(float) - 100) / 3995)
    if kind == "PNG":
        data = deep_png(values)
    elif kind == "TIFF" or channels == 1:
        data = tiff(values[..., :3], photometric="rgb" if channels > 1 else "minisblack")
    else:  # in a way that only Pillow unpacks
        data = lzw(values[..., :3])
    pixels = Pixels(range=(100, 4095), background=(255, 250, 240))
    ready = make_ready(data, pixels)
    made = np.asarray(read_rgb(ready.data)).astype(float)
    assert ready.facts["deep"]["values"] == (100, 4095) and levels_of(ready.facts) > 200
    if channels == 4 and kind == "PNG":  # nearly transparent: the upper half of 12 bits in 16
        alpha = (values[..., 3:] >> 8) / 255
        expected = expected[..., :3] * alpha + np.array([255, 250, 240]) * (1 - alpha)
        assert abs(made - expected).max() <= 1
    else:
        assert np.array_equal(made, np.broadcast_to(expected[..., :3], made.shape))
    seen = inspect_image(data)
    assert seen.channels == min(channels, 3) and seen.values is not None
    assert 100 <= seen.values[0] < 120 and 4080 < seen.values[1] <= 4095
    if channels == 3 and kind == "PNG":
        assert Image.open(io.BytesIO(make_ready(data, DEEP).data)).mode == "L"


def lzw(values: np.ndarray) -> bytes:
    """A TIFF of 16-bit colours in LZW: one of 8 bits and the same bytes, of which tags change."""
    height, width, _ = values.shape
    twice = np.ascontiguousarray(values).view(np.uint8).reshape(height, 2 * width, 3)
    data = bytearray(encode(Image.fromarray(twice), "TIFF", compression="tiff_lzw"))
    (start,) = struct.unpack_from("<I", data, 4)
    for at in range(start + 2, start + 2 + 12 * data[start], 12):
        tag, *_, value = struct.unpack_from("<HHII", data, at)
        if tag == 256:  # width
            struct.pack_into("<HHII", data, at, tag, 3, 1, width)
        elif tag == 258:  # bits of each sample, which lie elsewhere
            struct.pack_into("<HHH", data, value, 16, 16, 16)
    return bytes(data)


def bands(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 4096, (20, 26, 5)).astype(np.uint16)


@pytest.fixture(scope="module")
def multispectral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bands")
    files = {f"c/{n}.tif": tiff(bands(n), photometric="minisblack") for n in range(3)}
    files["c/planes.tif"] = tiff(np.moveaxis(bands(3), -1, 0), photometric="minisblack")
    files["c/array.npy"] = npy(bands(4))
    own = write_all(root / "in", files)
    (own / "own.csv").write_text("path,label\n" + "".join(f"{name},x\n" for name in files))
    shard(own / "own.csv", root / "out", "list", 2, pixels=BANDS)
    return root / "out"


def test_images_of_five_channels(multispectral):
    index = open_index(multispectral)
    assert (index.channels, index.n) == (5, 5) and verify(multispectral) == 5
    (batch,) = evaluation_parts(index, image_size=20, parts=[range(5)], threads=2, resize=20)
    names = ["0", "1", "2", "planes", "array"]
    for i, key in enumerate(index.keys()):
        expected = np.rint(bands(names.index(key.partition("/")[2])) / 4095 * 255)
        assert np.array_equal(batch[0][i].numpy(), expected[:, 3:23].transpose(2, 0, 1))
    shown = ready_pixels(index.read(0), False, 5)  # as if it were no file
    number = names.index(index.key(0).partition("/")[2])
    assert np.array_equal(convert_array(bands(number), BANDS).pixels, shown)
    samples = maect.shards(multispectral, image="tensor")
    assert np.array_equal(samples[0]["image"].numpy(), shown.transpose(2, 0, 1))
    with pytest.raises(UserError, match=r'5 channels .*image="tensor"'):
        maect.shards(multispectral)
    with pytest.raises(UserError, match="images of 5 channels, where 3 are expected"):
        index.check_channels(3)
    view = AUGMENTATIONS["min"][0]
    (train,) = train_batches(
        index, global_batch=4, rank=0, world_size=1, seed=0, views=[view], image_size=16,
        start_step=0, steps=1, threads=1,
    )  # fmt: skip
    encoder = load_encoder("tiny", 16, BANDS)
    images = augment(train.images[0][0], view, 0, 0, train.epochs, train.ids, BANDS)
    assert images.shape == (4, 5, 16, 16)
    assert build_encoder(encoder)(images).tokens.shape == (4, 17, encoder.width)
    order = torch.arange(16).repeat(4, 1)
    exact = reconstruction_loss(patchify(images, 4), images, order, 4, normalize=False)
    assert exact == 0


def test_changes_of_colours_are_refused():
    encoder = load_encoder("tiny", 16, BANDS)
    with pytest.raises(ValueError, match=r"jitter and gray .* colours, .* 3 channels and not 5"):
        load_recipe("ct_aug", "tiny").check_encoder(encoder)
    load_recipe("ct_min", "tiny").check_encoder(encoder)
    load_recipe("ct_aug", "tiny").check_encoder(load_encoder("tiny", 16, EXIF))


def test_pixels_are_part_of_an_encoder_only_where_they_are_stated():
    plain = load_encoder("tiny")
    own = load_encoder("tiny", 16, BANDS)
    for encoder, stated in ((plain, False), (own, True)):
        assert ("pixels" in json.loads(encoder.header)) == stated
        without = encoder.model_dump(mode="json", exclude={"pixels"}, exclude_defaults=True)
        assert (digest(encoder) != digest(without)) == stated
        assert Encoder.model_validate_json(encoder.header) == encoder
        assert Encoder.model_validate_json(encoder.model_dump_json()) == encoder
    for wrong, message in (
        ({"channels": 2}, "channels 2: mean of each must be given"),
        ({"mean": (0.5,)}, "mean: 1 values for 3 channels"),
        ({"std": (0.5, 0.0, 0.5)}, "std: 0.0 is not above 0"),
        ({"range": (5, 5)}, "range: 5.0 is not below 5.0"),
        ({"background": (0, 0, 256)}, "less than or equal to 255"),
    ):
        with pytest.raises(ValueError, match=message):
            Pixels.model_validate(wrong)


@pytest.mark.parametrize("pixels", [BANDS, DEEP, Pixels(mean=(0.1, 0.2, 0.3))])
def test_public_weights_see_other_channels(pixels):
    weights = dict(build_encoder(load_encoder("tiny")).state_dict())
    made = convert({"model": weights}, "mae", "mae_x.pth", "tiny", None, pixels)
    old, new = weights[PATCHES], made.tensors[PATCHES]
    assert made.encoder.pixels == pixels and new.shape[1] == pixels.channels
    if pixels.channels == 1:  # a grey image gives what it gave as three equal channels
        x = torch.rand(1, 1, 16, 16)
        torch.testing.assert_close(
            F.conv2d(x, new, stride=4), F.conv2d(x.expand(-1, 3, -1, -1), old, stride=4),
            rtol=1e-4, atol=1e-4,
        )  # fmt: skip
    elif pixels.channels == 5:
        torch.testing.assert_close(new, old[:, [0, 1, 2, 0, 1]] * 3 / 5)
    else:
        assert torch.equal(new, old)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_a_band_beyond_the_colours_is_kept(kind):
    """Near infrared behind red, green and blue: of 8 bits it was dropped, as if it were alpha."""
    values = np.random.default_rng(0).integers(0, 256, (20, 30, 4)).astype(kind)
    data = tiff(values, photometric="rgb", extrasamples=["unspecified"])
    assert inspect_image(data).channels == 4
    four = EXIF.model_copy(update={"channels": 4, "mean": (0.5,) * 4, "std": (0.5,) * 4})
    shown = ready_pixels(make_ready(data, four).data, False, 4)
    assert np.array_equal(shown, values if kind is np.uint8 else values >> 8)
    if kind is np.uint8:  # of which a data set in colours reads the colours
        ready = make_ready(data, EXIF.model_copy(update={"range": (0, 255)}))
        colors = ready_pixels(ready.data, False, 3)
        assert np.array_equal(colors, values[..., :3])


def test_what_shows_through_is_no_channel_of_a_tiff():
    values = colors(1, 4)
    data = tiff(values, photometric="rgb", extrasamples=["unassalpha"])
    assert inspect_image(data).channels == 3
    made = np.asarray(read_rgb(make_ready(data, Pixels(range=(100, 4095))).data))
    assert np.array_equal(made, np.rint(255 * (values[..., :3].astype(float) - 100) / 3995))
    bands = tiff(values, photometric="minisblack", planarconfig="contig")  # say nothing of it
    assert inspect_image(bands).channels == 4
    for depths in (scan(1), (scan(1) >> 4).astype(np.uint8)):  # nor is another depth or time
        values = np.stack([depths, depths // 2, depths // 3])
        stack = tiff(values, photometric="minisblack", metadata={"axes": "ZYX"})
        assert not inspect_image(stack).colors
        made = np.asarray(read_rgb(make_ready(stack, Pixels(range=(0, 255))).data))[..., 0]
        assert np.array_equal(made, np.clip(depths, 0, 255))


@pytest.mark.parametrize("code", range(1, 9))
def test_a_deep_tiff_is_upright_as_pillow_turns_it(code):
    values = scan(1)[:20, :12]
    data = tiff(values, extratags=[(274, "H", 1, code, True)])
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        upright = np.asarray(image)
    for pixels in (DEEP, DEEP.model_copy(update={"orientation": "exif"})):
        ready = make_ready(data, pixels)
        assert (ready.height, ready.width) == upright.shape
        grey = np.asarray(read_rgb(ready.data))[..., 0]
        assert np.array_equal(grey, np.rint(255 * (upright.astype(float) - 100) / 3995))
    assert (inspect_image(data).height, inspect_image(data).width) == upright.shape


def test_one_bit_is_black_and_white_whatever_the_range():
    data = tiff(scan(1) > 2000, photometric="minisblack")
    assert inspect_image(data).values is None
    made = np.asarray(read_rgb(make_ready(data, Pixels(range=(0, 4095))).data))
    assert np.array_equal(made[..., 0] == 255, scan(1) > 2000) and set(np.unique(made)) == {0, 255}


GREY = Pixels(orientation="exif", channels=1, mean=(0.5,), std=(0.5,))


@pytest.mark.parametrize(
    ("data", "pixels", "message"),
    [
        (lambda: tiff(scan(1).astype(np.float32)), GREY, "float32 from 100 to 4095 .*`range`"),
        (lambda: npy(np.zeros((8, 9, 5), np.uint8)), EXIF, "5 channels, 3 expected; state `chan"),
        (lambda: deep_png(colors(1, 2)), Pixels(range=(100, 4095)), "only the upper half can be"),
        (lambda: tiff(scan(1).astype(np.complex64)), DEEP, "values of type complex64"),
        (lambda: npy(scan(1) > 2000), DEEP, "values of type bool"),
    ],
)
def test_values_that_have_no_brightness_are_refused(data, pixels, message):
    with pytest.raises(UnreadableError, match=message):
        make_ready(data(), pixels)
    if pixels is DEEP:
        with pytest.raises(UnreadableError, match=message):
            inspect_image(data())
    assert levels_of(make_ready(deep_png(colors(1, 2)), EXIF).facts) == 16
