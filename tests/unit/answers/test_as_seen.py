"""Every command sees of a file what a person sees: upright, on white, of any depth."""

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

import maect
from maect.answers import duplicates
from maect.answers.classes import fit_classifier
from maect.answers.encoder import ImageEncoder
from maect.answers.groups import thumbnail
from maect.answers.vectors import Vectors
from maect.cli import main
from maect.core.context import Context
from maect.data.convert import decode, picture_of
from maect.data.decode import resample
from maect.data.image_facts import full_scale, merged, warning
from maect.data.index import open_index
from maect.data.shards import shard
from maect.data.sources import open_source
from maect.data.transforms import center_crops
from maect.evaluate.features import Encoding, extract
from maect.evaluate.pictures import pictures
from maect.recipes import Pixels
from maect.tools.own_images import inspect_images

from .conftest import TINY, Files, photograph, rewritten

SEEN = "orientation=exif background=255,255,255"
"""What `new-experiment` writes for such images, and the other commands do without being told."""
Picture = NDArray[np.uint8]


@dataclass(frozen=True)
class Case:
    """A file, the picture that a viewer shows, and what has to be stated for it."""

    data: bytes
    suffix: str
    picture: Picture
    stated: str = ""
    tolerance: int = 1

    def folder(self, root: Path, others: int = 0) -> Path:
        """Write the file, as the first, and others."""
        root.mkdir(parents=True)
        (root / f"000.{self.suffix}").write_bytes(self.data)
        for number in range(1, others + 1):
            photograph(number, 24, 20).save(root / f"{number:03d}.png")
        return root

    @property
    def option(self) -> list[str]:
        """The option of the commands that read files."""
        return ["--pixels", self.stated] if self.stated else []


def scene() -> Image.Image:
    """A photograph with all levels from black to white, wider than high and not symmetric."""
    values = np.asarray(photograph(3, 60, 40)).astype(float)
    values[:4, :30], values[-4:, 30:] = 0, 255
    return Image.fromarray(values.astype(np.uint8))


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def rgb(image: Image.Image) -> Picture:
    return np.asarray(image.convert("RGB"))


def turned() -> Case:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(scene(), "JPEG", quality=95, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert upright.size == (40, 60)
    return Case(data, "jpg", rgb(upright), tolerance=3)


def transparent() -> Case:
    image = scene().convert("RGBA")
    alpha = np.full((40, 60), 255, np.uint8)
    alpha[:, 30:] = 0
    image.putalpha(Image.fromarray(alpha))
    shown = rgb(scene()).copy()
    shown[:, 30:] = 255
    return Case(encoded(image, "PNG"), "png", shown)


def deep(bits: int) -> Case:
    grey = np.asarray(scene().convert("L")).astype(np.uint16)
    values = grey * 257 if bits == 16 else grey << (bits - 8)
    stated = "" if bits == 16 else f"range=0,{(1 << bits) - 1}"
    data = encoded(Image.fromarray(values), "TIFF")
    return Case(data, "tif", np.repeat(grey[..., None], 3, 2).astype(np.uint8), stated)


def cmyk() -> Case:
    data = encoded(scene().convert("CMYK"), "JPEG", quality=95)
    return Case(data, "jpg", rgb(Image.open(io.BytesIO(data))), tolerance=3)


CASES: dict[str, Callable[[], Case]] = {
    "plain": lambda: Case(encoded(scene(), "PNG"), "png", rgb(scene())),
    "rotated": turned,
    "transparent": transparent,
    **{f"bits{bits}": lambda bits=bits: deep(bits) for bits in (10, 12, 14, 16)},
    "grey": lambda: Case(encoded(scene().convert("L"), "PNG"), "png", rgb(scene().convert("L"))),
    "cmyk": cmyk,
}


def crop(picture: Picture, resize: int, size: int) -> Picture:
    """The centre crop of a whole picture, [3, S, S]."""
    height, width, _ = picture.shape
    out = np.empty((1, 3, size, size), np.uint8)
    resample(
        Image.fromarray(picture),
        center_crops(np.array([width]), np.array([height]), resize, size),
        out,
    )
    return out[0]


def assert_close(made: Picture, expected: Picture, tolerance: int) -> None:
    assert made.shape == expected.shape
    assert abs(made.astype(int) - expected).max() <= tolerance


def assert_seen(encoder: ImageEncoder, case: Case) -> None:
    expected = crop(case.picture, encoder.resize, encoder.image_size)
    assert_close(encoder.see(case.data).pixels, expected, 2 * case.tolerance)


@pytest.fixture
def encoded_images(monkeypatch: pytest.MonkeyPatch) -> list[Picture]:
    """All images that encoders are given, uint8 [3, S, S]."""
    own, given = Encoding.__call__, list[Picture]()

    def call(self: Encoding, images: Any) -> Any:
        given.extend(images.numpy())
        return own(self, images)

    monkeypatch.setattr(Encoding, "__call__", call)
    return given


def embed(case: Case, run: Path, root: Path, _: Files) -> list[str]:
    return ["embed", str(run), str(case.folder(root / "i")), "--out", str(root / "v.parquet")]


def search(case: Case, run: Path, root: Path, files: Files) -> list[str]:
    image = case.folder(root / "i") / f"000.{case.suffix}"
    return ["search", str(run), str(files[0]), str(image)]


def predict(case: Case, run: Path, root: Path, files: Files) -> list[str]:
    words = ["predict", str(run), str(case.folder(root / "i")), "--out", str(root / "p.csv")]
    return [*words, "--classifier", str(files[1])]


def compare(case: Case, run: Path, root: Path, _: Files) -> list[str]:
    words = ["compare", str(run), "--images", str(case.folder(root / "i", 40))]
    return [*words, "--out", str(root / "c"), "--threads", "1"]


def find_duplicates(case: Case, run: Path, root: Path, _: Files) -> list[str]:
    return ["duplicates", str(case.folder(root / "i", 2)), "--out", str(root / "d")]


ENCODING = (embed, search, predict, compare)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("command", ENCODING, ids=lambda command: command.__name__)
def test_encoders_see_what_a_person_sees(
    command, name, run, fitted, tmp_path, encoded_images, caplog
):
    case = CASES[name]()
    assert main([*command(case, run, tmp_path, fitted), *case.option]) == 0
    assert_close(encoded_images[0], crop(case.picture, 20, 16), case.tolerance)
    assert "--pixels" not in caplog.text


@pytest.mark.parametrize("name", CASES)
def test_python_and_pages_see_the_same(name, run, tmp_path):
    case = CASES[name]()
    pixels = Pixels.model_validate({"range": (0, (1 << int(name[4:])) - 1)} if case.stated else {})
    encoder = maect.load(run, pixels={"range": pixels.range})
    expected = crop(case.picture, 20, 16)
    assert_close(encoder.see(case.data).pixels, expected, case.tolerance)
    assert_close(encoder.see(Image.open(io.BytesIO(case.data))).pixels, expected, case.tolerance)
    source = open_source("unlabelled", case.folder(tmp_path / "i"))
    entry = source.listing().entries[0]
    small = base64.b64decode(thumbnail(source, entry, pixels).partition(",")[2])
    shown = rgb(Image.open(io.BytesIO(small))).astype(int)
    assert shown.shape == case.picture.shape and abs(shown - case.picture).mean() < 10


@pytest.mark.parametrize("name", CASES)
def test_duplicates_compare_what_a_person_sees(name, run, fitted, tmp_path, monkeypatch):
    case, hashed = CASES[name](), list[Picture]()
    own = duplicates.perceptual_hash

    def spied(image: Image.Image) -> Any:
        hashed.append(rgb(image))
        return own(image)

    monkeypatch.setattr(duplicates, "perceptual_hash", spied)
    assert main([*find_duplicates(case, run, tmp_path, fitted), *case.option]) == 0
    # The other image may be read before it.
    (seen, *_) = [picture for picture in hashed if picture.shape == case.picture.shape]
    assert_close(seen, case.picture, case.tolerance)


@pytest.mark.parametrize("name", CASES)
def test_shards_have_what_a_person_sees(name, tmp_path):
    """And what reads them: training, features, `duplicates`, and people's own code."""
    case, out = CASES[name](), tmp_path / "shards"
    words = ["shard", str(case.folder(tmp_path / "i")), str(out), "--kind", "unlabelled"]
    assert main([*words, "--pixels", f"{SEEN} {case.stated}".strip()]) == 0
    index = open_index(out)
    assert warning(index.record, Pixels.of_shards(index.record["options"])) is None
    expected = crop(case.picture, 20, 16)
    (shown,) = pictures(index, np.array([0]), 20, 16)
    assert_close(shown.transpose(2, 0, 1), expected, case.tolerance)
    assert_close(rgb(maect.shards(out)[0]["image"]), case.picture, case.tolerance)


@pytest.mark.parametrize("name", CASES)
def test_new_experiments_read_what_a_person_sees(name, tmp_path):
    case = CASES[name]()
    images = case.folder(tmp_path / "i")
    pixels = inspect_images(images, 1).pixels
    # The range is that of the images, from their darkest to their brightest.
    assert_close(rgb(picture_of(case.data, pixels)), case.picture, case.tolerance + 1)
    stated = {"range": full_scale(0, pixels.range[1])} if case.stated and pixels.range else {}
    pixels = inspect_images(images, 1, stated=stated).pixels
    assert_close(rgb(picture_of(case.data, pixels)), case.picture, case.tolerance)


@pytest.mark.parametrize("bits", [10, 12, 14])
@pytest.mark.parametrize("command", [*ENCODING, find_duplicates], ids=lambda one: one.__name__)
def test_a_missing_range_is_proposed(command, bits, run, fitted, tmp_path, caplog):
    """Also by a resumed comparison, though what was read before is not read again."""
    case = deep(bits)
    words = command(case, run, tmp_path, fitted)
    for _ in range(2 if command is compare else 1):
        caplog.clear()
        assert main(words) == 0
        (said,) = (one.getMessage() for one in caplog.records if one.levelname == "WARNING")
        assert said.endswith(f"state the range: --pixels {case.stated}")
        assert f"the values go from 0 to {255 << (bits - 8)}, and 65535 is white" in said


def test_dark_images_among_bright_ones_are_counted_over_parts():
    """Together their values go up to white."""
    facts = [decode(deep(bits).data, Pixels()).facts for bits in (10, 12, 14, 16)]
    said = warning(merged(facts), Pixels(), option=True)
    assert "3 of 4 images of more than 8 bits have no value above half of 65535" in said
    assert "--pixels range=0,4095 for 12 bits" in said
    dark = {"deep": {"images": 2, "values": [0, 4095], "levels": "ff"}}
    bright = {"deep": {"images": 3, "values": [0, 65535], "levels": "ff"}}
    part = merged([dark, bright])
    assert merged([part, dark, bright])["deep"] == {
        "images": 10, "values": [0, 65535], "levels": "ff", "dark": 4
    }  # fmt: skip
    assert "dark" not in merged([dark, dark])["deep"] | merged([bright, bright])["deep"]
    assert warning(part, Pixels(range=(0, 65535))) is None


def test_what_is_proposed_fits_the_values():
    assert full_scale(0, 16320) == (0, 16383) and full_scale(100, 4095) == (0, 4095)
    assert full_scale(30000, 35000) == (30000, 35000)  # far from black
    binary = {"deep": {"images": 3, "values": [0, 65535], "levels": f"{1 | 1 << 255:x}"}}
    assert warning(binary, Pixels()) is None  # no range shows more of it
    assert full_scale(-200, 900) == (-200, 900) and full_scale(0.1, 0.7) == (0.1, 0.7)


def test_shards_of_turned_or_deep_images_say_so(tmp_path, caplog):
    """Sharding reads as torchvision does, whose numbers are the paper's, but not in silence."""
    hints = {f"bits{bits}": f"pixels: {{range: [0, {2**bits - 1}]}}" for bits in (10, 12, 14)}
    for name, hint in (hints | {"rotated": "pixels: {orientation: exif}"}).items():
        images, out = CASES[name]().folder(tmp_path / name), tmp_path / f"{name}-shards"
        assert main(["shard", str(images), str(out), "--kind", "unlabelled"]) == 0
        assert hint in caplog.text
    record = open_index(out).record
    assert record["unturned"] == 1 and "pixels" not in record
    assert "1 image is not turned as EXIF says" in caplog.text


@pytest.fixture
def every_encoder(run: Path, tiny: str) -> dict[str, str]:
    """An imported run, an exported one, a public encoder, and a trained one that states pixels."""
    assert main(["export", str(run), "exported"]) == 0
    rewritten(run, Path("trained"), pixels=Pixels(background=(0, 0, 0), range=(0, 4095)))
    return {"imported": str(run), "exported": "exported", "public": tiny, "trained": "trained"}


def test_encoders_of_all_kinds_read_alike(every_encoder):
    for kind, folder in every_encoder.items():
        encoder, clear = maect.load(folder), transparent()
        if kind == "trained":  # its data set states a black background and the range of 12 bits
            clear.picture[:, 30:] = 0
            assert_seen(encoder, deep(12))
        else:
            assert encoder.see(deep(12).data).pixels.max() < 20
            assert_seen(maect.load(folder, pixels={"range": (0, 4095)}), deep(12))
            assert_seen(encoder, deep(16))
        for case in (clear, *(CASES[name]() for name in ("plain", "rotated", "grey", "cmyk"))):
            assert_seen(encoder, case)


def test_a_comparison_reads_deep_images_by_one_range(
    every_encoder, tmp_path, encoded_images, caplog
):
    """The range that one of them states is taken for the others."""
    images = deep(12).folder(tmp_path / "i", 40)
    both = [every_encoder["imported"], every_encoder["trained"]]
    assert main(["compare", *both, "--images", str(images), "--out", "c", "--threads", "1"]) == 0
    assert len(encoded_images) == 82
    assert np.array_equal(encoded_images[0], encoded_images[41])
    assert_close(encoded_images[0], crop(deep(12).picture, 20, 16), 1)
    assert "reads images of more than 8 bits by the range 0 to 4095" in caplog.text
    assert "by another background" in caplog.text and "--pixels background=" in caplog.text


def test_the_reading_is_recorded_and_followed(run, tmp_path, encoded_images, capsys):
    case, out = deep(12), tmp_path / "v.parquet"
    images = case.folder(tmp_path / "i", 3)
    words = ["embed", str(run), str(images), "--out", str(out)]
    assert main([*words, *case.option]) == 0
    read = {"orientation": "exif", "background": (255, 255, 255), "range": (0, 4095)}
    assert Vectors.read(out).pixels == Pixels.model_validate(read)
    # Another reading makes other vectors, which are not mixed with these.
    assert main(words) == 2
    assert "made with pixels" in capsys.readouterr().err
    # A search reads its image as the index was, and a classifier what it was fitted to.
    encoded_images.clear()
    assert main(["search", str(run), str(out), str(images / "000.tif"), "--count", "1"]) == 0
    assert capsys.readouterr().out.startswith("1.0000  000.tif")
    labelled = tmp_path / "l.parquet"
    for number, kind in enumerate("ab"):
        case.folder(tmp_path / "classes" / kind, 2 + number)
    classes = str(tmp_path / "classes")
    embedded = ["embed", str(run), classes, "--kind", "folder", "--out", str(labelled)]
    assert main([*embedded, *case.option]) == 0
    kept = ["--classifier", str(tmp_path / "c.safetensors"), "--out", str(tmp_path / "p.csv")]
    assert main(["predict", str(run), classes, *kept, "--labelled", str(labelled)]) == 0
    encoded_images.clear()
    assert main(["predict", str(run), str(images), *kept]) == 0
    assert_close(encoded_images[0], crop(case.picture, 20, 16), 1)


def test_a_classifier_of_features_reads_files_as_their_data_set_says(run, tmp_path):
    """It may be another one than the encoder's."""
    for number, kind in enumerate("ab"):
        deep(12).folder(tmp_path / "images" / kind, 2 + number)
    shard(tmp_path / "images", tmp_path / "train", "folder", 1, pixels=Pixels(range=(0, 4095)))
    out = tmp_path / "train.safetensors"
    encoder = run / "encoder.safetensors"
    assert extract(Context(), encoder=encoder, shards=tmp_path / "train", out=out) == "done"
    seen = maect.load(run, pixels=fit_classifier(out).reading).reading
    assert seen == Pixels(range=(0, 4095)).as_seen


def test_vectors_of_an_earlier_version_are_read_as_they_were_made(run, tmp_path, encoded_images):
    case, out = turned(), tmp_path / "v.parquet"
    images = case.folder(tmp_path / "i")
    stored = ["--pixels", "orientation=stored background=none"]
    words = ["embed", str(run), str(images), "--out", str(out)]
    assert main([*words, *stored]) == 0
    found = Vectors.read(out)
    assert found.about["pixels"] == {}  # as nothing was said then
    assert main(["search", str(run), str(out), str(images / "000.jpg"), "--count", "1"]) == 0
    lying = np.asarray(Image.open(io.BytesIO(case.data)))
    assert_close(encoded_images[-1], crop(lying, 20, 16), case.tolerance)
    encoder = maect.load(run, pixels={"orientation": "stored"})
    for form in (case.data, Image.open(io.BytesIO(case.data))):
        assert_close(encoder.see(form).pixels, crop(lying, 20, 16), case.tolerance)
    assert main([*words, *stored]) == 0  # what is there is kept


def test_an_import_keeps_the_range(every_encoder):
    words = ["import", "weights/tiny.safetensors", "deep", "--timm", TINY, "--image-size", "64"]
    assert main([*words, "--pixels", "range=0,4095"]) == 0
    encoder = maect.load("deep")
    assert encoder.reading.range == (0, 4095)
    assert_seen(encoder, deep(12))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("range", "write KEY=VALUE, such as range=0,4095"),
        ("range=9,2", "range: 9.0 is not below 2.0"),
        ("rnage=0,1", "unknown key 'rnage'; did you mean 'range'"),
        ("channels=1", "channels belongs to the encoder"),
        ('{"range": [0', "--pixels"),
    ],
)
def test_what_cannot_be_stated_is_said_in_a_line(text, fault, run, photographs, capsys):
    assert main(["embed", str(run), str(photographs), "--pixels", text, "--out", "x.parquet"]) == 2
    error = capsys.readouterr().err
    assert fault in error and error.count("\n") == 1
