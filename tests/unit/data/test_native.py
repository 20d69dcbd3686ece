"""The native decoder against Pillow, bit for bit, and against hostile input."""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from PIL import Image
from sample_images import jpeg, photographs, random_crop

from maect.core.errors import UserError
from maect.data import native
from maect.data.decode import UnreadableError, decoder_name, read_rgb, render
from maect.data.native import build
from maect.data.transforms import center_crops, random_crops
from maect.train.attempts import Attempt, slow_decoding

sys.path.insert(0, str(Path(__file__).parents[2] / "fuzz"))


def compiled(folder: Path, *flags: str) -> Path:
    path = folder / "libmaect_jpeg.so"
    try:
        build.compile_c([native.SOURCE], path, "-shared", *flags)
    except UserError as error:
        pytest.skip(str(error))
    return path


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build.build(tmp_path_factory.mktemp("native") / "libmaect_jpeg.so")
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture()
def use(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def use(path: Path) -> ctypes.CDLL | None:
        monkeypatch.setattr(native, "LIBRARY", path)
        monkeypatch.setattr(native, "_local", type(native._local)())
        native._library.cache_clear()
        return native.library()

    yield use
    native._library.cache_clear()


@pytest.fixture()
def decoder(fast: Path, use) -> Iterator[None]:  # type: ignore[no-untyped-def]
    assert use(fast) is not None
    yield


def reference(data: bytes, geometries: np.ndarray, size: int) -> np.ndarray:
    """Pillow: decode everything, crop, resize in full, cut the window out."""
    image = read_rgb(data)
    views = []
    for x, y, w, h, *full, left, top in geometries.tolist():
        resized = image.crop((x, y, x + w, y + h)).resize(full, Image.Resampling.BICUBIC)
        views.append(np.asarray(resized.crop((left, top, left + size, top + size))))
    return np.stack(views).transpose(0, 3, 1, 2)


def cases(count: int, seed: int = 0) -> Iterator[tuple[bytes, np.ndarray, int]]:
    rng = np.random.default_rng(seed)
    for number in range(count):
        image = random_crop(rng, 1, 300)
        if number % 5 == 0:
            image = image.convert("L")
        quality, sampling = int(rng.integers(30, 100)), number % 4
        if sampling == 3 and image.mode == "RGB":
            pixels = np.asarray(image)
            data = simplejpeg.encode_jpeg(pixels, quality, "RGB", "440")
        else:
            options = {"restart_marker_rows": 1} if number % 3 == 0 else {}
            data = jpeg(image, quality, subsampling=sampling % 3, **options)
        size = int(rng.choice([1, 7, 16, 33, 96, 224]))
        width, height = np.array([image.width]), np.array([image.height])
        crops = [
            random_crops(width, height, (0.08, 1), size, seed=number, epochs=0, ids=[0], view=v)
            for v in range(2)
        ]
        if max(image.size) < 8 * min(image.size):
            crops.append(center_crops(width, height, round(size * 256 / 224), size))
        yield data, np.concatenate(crops), size


def test_pixels_are_pillows(decoder):
    differing = total = 0
    for data, geometries, size in cases(80):
        out = np.zeros((len(geometries), 3, size, size), np.uint8)
        assert native.render(data, geometries, out)
        error = np.abs(out.astype(int) - reference(data, geometries, size))
        assert error.max() <= 1
        differing, total = differing + int((error > 0).sum()), total + error.size
    # With the same arithmetic only another libjpeg could make a difference.
    assert differing <= 1e-4 * total


def test_without_it_pixels_are_pillows(use, tmp_path):  # type: ignore[no-untyped-def]
    assert use(tmp_path / "missing.so") is None
    for data, geometries, size in cases(30, seed=3):
        out = np.zeros((len(geometries), 3, size, size), np.uint8)
        render(data, geometries, out)
        np.testing.assert_array_equal(out, reference(data, geometries, size))


def test_plain_build_gives_the_same_bits(fast, use, tmp_path):  # type: ignore[no-untyped-def]
    slow = compiled(tmp_path, "-DPLAIN", "-O1", "-Werror")
    results = []
    for path in (fast, slow):
        assert use(path) is not None
        outs = []
        for data, geometries, size in cases(25, seed=1):
            outs.append(np.zeros((len(geometries), 3, size, size), np.uint8))
            assert native.render(data, geometries, outs[-1])
        results.append(outs)
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))


def test_views_of_several_sizes_are_views_apart(decoder, use, tmp_path):  # type: ignore[no-untyped-def]
    """By the native way and by Pillow."""
    data = jpeg(photographs()[0])
    width, height = (np.array([side]) for side in photographs()[0].size)
    sizes = [24, 9, 40, 9]
    crops = [
        random_crops(width, height, (0.05, 1), size, seed=1, epochs=0, ids=[0], view=view)
        for view, size in enumerate(sizes)
    ]
    geometries = np.concatenate(crops)
    outs = [np.zeros((3, size, size), np.uint8) for size in sizes]
    assert native.render(data, geometries, outs)
    for geometry, size, out in zip(geometries, sizes, outs, strict=True):
        assert np.abs(out.astype(int) - reference(data, geometry[None], size)[0]).max() <= 1
    with pytest.raises(ValueError):
        native.render(data, geometries[:3], outs)
    assert use(tmp_path / "missing.so") is None
    pillow = [np.zeros_like(out) for out in outs]
    render(data, geometries, pillow)
    for mine, theirs in zip(outs, pillow, strict=True):
        assert np.abs(mine.astype(int) - theirs).max() <= 1


@pytest.mark.parametrize("kind", ["cmyk", "progressive", "rgb", "411"])
def test_what_it_refuses_is_still_decoded(kind, decoder):
    photo = photographs()[0].resize((120, 90))
    data = {
        "cmyk": jpeg(photo.convert("CMYK")),
        "progressive": jpeg(photo, progressive=True),
        "rgb": jpeg(photo, keep_rgb=True),
        "411": simplejpeg.encode_jpeg(np.asarray(photo), 90, "RGB", "411"),
    }[kind]
    geometry = center_crops(np.array([120]), np.array([90]), 36, 32)
    out = np.zeros((1, 3, 32, 32), np.uint8)
    if kind != "rgb":
        assert not native.render(data, geometry, out)
    render(data, geometry, out)
    assert np.abs(out.astype(int) - reference(data, geometry, 32)).max() <= 1


def test_a_corrupt_file_goes_to_the_referee(decoder):
    data = jpeg(photographs()[0])
    geometry = center_crops(np.array([640]), np.array([427]), 36, 32)
    out = np.zeros((1, 3, 32, 32), np.uint8)
    assert not native.render(data[: len(data) // 2], geometry, out)
    with pytest.raises(UnreadableError):
        render(data[: len(data) // 2], geometry, out)
    damaged = bytearray(data)
    damaged[len(data) // 2 : len(data) // 2 + 40] = bytes(40)
    try:
        render(bytes(damaged), geometry, out)
    except UnreadableError:
        return
    assert np.abs(out.astype(int) - reference(bytes(damaged), geometry, 32)).max() <= 1


@pytest.mark.parametrize(
    "geometry",
    [
        (0, 0, 641, 427, 32, 32, 0, 0),
        (1, 0, 640, 427, 32, 32, 0, 0),
        (-1, 0, 640, 427, 32, 32, 0, 0),
        (0, 0, 0, 427, 32, 32, 0, 0),
        (0, 0, 640, 427, 31, 32, 0, 0),
        (0, 0, 640, 427, 64, 64, 33, 0),
        (0, 0, 640, 427, 2**31 - 1, 64, 0, 0),
        (2**31 - 1, 0, 2**31 - 1, 427, 32, 32, 0, 0),
    ],
)
def test_impossible_crops_are_refused(geometry, decoder):
    out = np.zeros((1, 3, 32, 32), np.uint8)
    assert not native.render(jpeg(photographs()[0]), np.array([geometry], np.int32), out)


def test_a_library_that_is_broken_or_of_another_source_is_not_used(use, tmp_path):  # type: ignore[no-untyped-def]
    old = compiled(tmp_path, "-O0", "-USOURCE", "-DSOURCE=0123456789abcdef")
    assert use(old) is None and native.fault() == "built from another source"
    assert decoder_name().startswith("Pillow ")
    (tmp_path / "lib.so").write_bytes(b"not a library")
    assert use(tmp_path / "lib.so") is None
    assert "lib.so" in str(native.fault())
    assert use(tmp_path / "missing.so") is None and native.fault() == "not built"
    said = slow_decoding(Attempt.model_construct(versions={"decoder": decoder_name()}))
    assert said == f"no native decoder here (not built): JPEGs load slowly, by {decoder_name()}"


def test_a_libjpeg_lies_beside_what_was_built(fast, use, tmp_path):  # type: ignore[no-untyped-def]
    """A node without libjpeg decoded by other code, more slowly, and nothing said so."""
    asked = subprocess.run(["readelf", "-d", fast], capture_output=True, text=True).stdout
    if "libjpeg" not in asked:
        pytest.skip("libjpeg is inside the library")
    moved = shutil.copytree(fast.parent, tmp_path / "elsewhere")
    environment = os.environ | {"LD_LIBRARY_PATH": str(fast.parent)}
    command = ["ldd", moved / fast.name]
    loaded = subprocess.run(command, capture_output=True, text=True, env=environment).stdout
    assert f"=> {moved}/libjpeg.so" in loaded
    assert use(moved / fast.name) is not None and native.fault() is None
    assert decoder_name().startswith("native (libjpeg-turbo ")


def test_without_compiler_the_message_has_a_hint(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    with pytest.raises(UserError, match=r"no-compiler: No such file.*libjpeg62-turbo-dev"):
        build.build(tmp_path / "lib.so")
    assert not list(tmp_path.iterdir())


def test_short_fuzz_under_sanitizers(fast):
    from fuzz import fuzz

    try:
        record = fuzz(8_000, seed=int(os.environ.get("MAECT_FUZZ_SEED", "1")))
    except UserError as error:
        pytest.skip(f"the compiler has no AddressSanitizer: {error}")
    assert record["inputs"] == 8_000
    # Far enough into the decoder to mean something.
    assert record["made"] > 1200 and record["unreadable"] > 800 and record["bad geometry"] > 200
