"""Odd files are kept and decoded as docs/reference/odd_images.md says, or reported by name."""

import io
import struct
import tarfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pillow_heif
import pytest
from PIL import Image
from sample_images import encode, jpeg, photographs, tiff, turned, write_all

from maect.core.errors import UserError
from maect.data import decode
from maect.data.decode import UnreadableError, read_rgb, render
from maect.data.index import open_index
from maect.data.loader import evaluation_parts
from maect.data.shards import shard
from maect.data.transforms import center_crops


def photo(size: tuple[int, int] = (96, 64)) -> Image.Image:
    return photographs()[0].resize(size)


def transparent() -> bytes:
    image = photo().convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return encode(image, "PNG")


def heic() -> bytes:
    stream = io.BytesIO()
    pillow_heif.from_pillow(photo()).save(stream, quality=-1)
    return stream.getvalue()


def bomb() -> bytes:
    """A PNG that claims 60,000 x 60,000 pixels."""
    data = bytearray(encode(Image.new("L", (8, 8)), "PNG"))
    data[16:24] = struct.pack(">II", 60_000, 60_000)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


DEEP = np.arange(0, 1 << 16, 16, np.uint16).reshape(64, 64)
KEPT = {
    "cmyk.jpg": lambda: jpeg(photo().convert("CMYK")),
    "a_png_named.JPEG": lambda: encode(photo(), "PNG"),
    "a_jpeg_named.png": lambda: jpeg(photo()),
    "rotated.jpg": lambda: turned(6),
    "grey.jpg": lambda: jpeg(photo().convert("L")),
    "sixteen_bit.png": lambda: encode(Image.fromarray(DEEP), "PNG"),
    "one_pixel.jpg": lambda: jpeg(Image.new("RGB", (1, 1), (200, 30, 90))),
    "one_pixel_grey.png": lambda: encode(Image.new("L", (1, 1), 77), "PNG"),
    "thin.jpg": lambda: jpeg(Image.new("RGB", (2000, 1), (1, 2, 3))),
    "thin.png": lambda: encode(Image.new("RGB", (1, 3000), (1, 200, 3)), "PNG"),
    "progressive.jpg": lambda: jpeg(photo(), progressive=True),
    "420.jpg": lambda: jpeg(photo((97, 63)), subsampling=2),
    "palette.png": lambda: encode(photo().quantize(), "PNG"),
    "bits.png": lambda: encode(photo().convert("1"), "PNG"),
    "transparent.png": transparent,
    "web.webp": lambda: encode(photo(), "WEBP", lossless=True),
    "anim.gif": lambda: encode(
        photo().quantize(), "GIF", save_all=True, append_images=[photo((96, 64)).quantize()]
    ),
    "trailing.jpg": lambda: jpeg(photo()) + b"garbage behind the end",
    "new.avif": lambda: encode(photo(), "AVIF", quality=100),
    "wavelets.jp2": lambda: encode(photo(), "JPEG2000"),
    "phone.HEIC": heic,
    "commented.ppm": lambda: encode(photo(), "PPM").replace(b"P6\n", b"P6\n# by hand\n#\n"),
}

REFUSED = {
    "zero.jpg": lambda: b"",
    "cut.jpg": lambda: jpeg(photo())[:-400],
    "header_only.jpg": lambda: jpeg(photo())[:300],
    "cut.png": lambda: encode(photo(), "PNG")[:-500],
    "text.jpg": lambda: b"<html>404 not found</html>",
    "float.tif": lambda: encode(Image.new("F", (4, 4), 0.5), "TIFF"),
    "bomb.png": bomb,
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("odd")
    write_all(root / "images", {f"c/{name}": make() for name, make in KEPT.items()})
    shard(root / "images", root / "shards", "folder", 2)
    return root / "images", root / "shards"


def test_odd_images_are_kept_under_what_they_are(kept):
    names = []
    for tar in kept[1].glob("*.tar"):
        with tarfile.open(tar) as file:
            names += [name for name in file.getnames() if not name.endswith(".cls")]
    assert {"c/a_png_named.png", "c/a_jpeg_named.jpg", "c/cmyk.jpg", "c/web.webp"} < {*names}
    assert len(names) == len(KEPT)


def test_odd_images_load_as_pillow_shows_them(kept):
    index = open_index(kept[1])
    (batch,) = evaluation_parts(index, image_size=32, parts=[range(index.n)], threads=2)
    originals = {Path(name).stem: name for name in KEPT if "thin" not in name}
    for i in range(index.n):
        key = index.key(i).removeprefix("c/").split("-")[0]
        if key not in originals:
            continue
        with Image.open(kept[0] / "c" / originals[key]) as image:
            if image.mode.startswith("I;16"):
                rgb = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
            else:
                rgb = image.convert("RGB")
        error = batch[0][i].permute(1, 2, 0).numpy() - middle(rgb, 37, 32)
        assert abs(error).max() <= 2, key


def middle(image: Image.Image, resize: int, size: int) -> np.ndarray:
    """The middle of an image that is resized in full, [size, size, 3]."""
    sides = (np.array([side]) for side in image.size)
    *_, w, h, left, top = center_crops(*sides, resize, size)[0].tolist()
    whole = image.resize((w, h), Image.Resampling.BICUBIC)
    return np.asarray(whole.crop((left, top, left + size, top + size)), int)


def test_thin_images_do_not_need_the_whole_enlargement(kept):
    # Resized in full, 1 x 65,500 pixels would be 256 x 16.8 million.
    out = np.zeros((1, 3, 224, 224), np.uint8)
    for size in ((65_500, 1), (1, 65_500)):
        data = jpeg(Image.new("RGB", size, (10, 200, 90)))
        geometry = center_crops(np.array([size[0]]), np.array([size[1]]), 256, 224)
        render(data, geometry, out)
        assert abs(out[0].astype(int) - np.array([10, 200, 90])[:, None, None]).max() <= 3


def test_window_of_an_elongated_image_is_that_of_the_whole():
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (9, 400, 3), np.uint8))
    out = np.zeros((1, 3, 16, 16), np.uint8)
    render(encode(image, "PNG"), center_crops(np.array([400]), np.array([9]), 18, 16), out)
    assert abs(out[0].transpose(1, 2, 0) - middle(image, 18, 16)).max() <= 1


def test_deep_colours_in_planes_are_refused():
    """Pillow took each byte of an uncompressed one for a value: stripes, and nothing said so."""
    planes = np.random.default_rng(0).integers(0, 1 << 16, (3, 20, 30)).astype(np.uint16)
    colors = planes.transpose(1, 2, 0)
    whole = tiff(colors, photometric="rgb")
    packed = tiff(planes, photometric="rgb", planarconfig="separate", compression="zlib")
    for data in (whole, packed):
        assert np.array_equal(read_rgb(data), colors >> 8)
    with pytest.raises(UnreadableError, match=r"16-bit colours in planes, .*`range`"):
        read_rgb(tiff(planes, photometric="rgb", planarconfig="separate"))


def test_all_of_them_are_reported_by_name(tmp_path):
    makers = REFUSED | {"good.jpg": lambda: jpeg(photo())}
    write_all(tmp_path / "images", {f"c/{name}": make() for name, make in makers.items()})
    with pytest.raises(UserError, match=f"{len(REFUSED)} unreadable"):
        shard(tmp_path / "images", tmp_path / "out", "folder", 1)
    report = (tmp_path / "out/unreadable.txt").read_text()
    assert all(f"c/{name}\t" in report for name in REFUSED)
    assert "cannot identify image file" in report and "0x" not in report  # no address in memory
    assert "good" not in report


def test_large_pictures_are_decoded_one_at_a_time(monkeypatch):
    """A few kilobytes may declare gigabytes; several threads decode at once."""
    at_work, most, convert = 0, 0, decode.to_rgb

    def counted(image: Image.Image) -> Image.Image:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        time.sleep(0.05)
        at_work -= 1
        return convert(image)

    monkeypatch.setattr(decode, "to_rgb", counted)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read_rgb, [encode(Image.new("1", (4097, 4097)), "PNG")] * 4))
    assert most == 1
