"""Convert images that are not 8-bit RGB: EXIF orientation, transparency, 16 bits, more channels.

A data set's `pixels` (`maect.recipes.Pixels`) say how. A file keeps its bytes if decoding alone
gives the right pixels, as of ordinary photographs. Others become PNG, or an array of NumPy if a
PNG has too few channels; nothing is lost beyond eight bits a value. A finished encoder's images
are converted in the same way. Images that cannot be decoded or converted raise `UnreadableError`.

A JPEG that has to be rotated keeps its bytes and is rotated whenever it is read (`render_ready`).
"""

import io
import math
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from maect.data.decode import (
    UnreadableError,
    image_size,
    is_16_bit_color,
    lower_bytes,
    one_at_a_time,
    open_image,
    read_rgb,
    render,
    resample,
    to_rgb,
    unreadable_on_error,
)
from maect.data.image_facts import TRANSPARENT, TURNED, UNTURNED, Facts, deep_facts
from maect.data.native import Images
from maect.recipes import MOST_CHANNELS, Pixels

ARRAY = b"\x93NUMPY"
_JPEG = b"\xff\xd8"
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_DICOM = slice(128, 132)
_SAMPLE, _ROWS = 4096, 256
_ORIENTATION = 0x0112  # of EXIF, and of TIFF
_ANY = Pixels(channels=4, mean=(0.5,) * 4, std=(0.5,) * 4, range=(0, 1))
"""Settings that read everything that a file has."""
_ALPHA = (1, 2)  # kinds of TIFF's extra samples
_PICTURE = "YXSCIQ"  # TIFF's axes within a picture, and those (I, Q) that may be its channels
# How an orientation's stored picture becomes upright: whether it is transposed, then mirrored left
# to right, then top to bottom.
_TURNS = {
    2: (False, True, False),
    3: (False, True, True),
    4: (False, False, True),
    5: (True, False, False),
    6: (True, True, False),
    7: (True, True, True),
    8: (True, False, True),
}


@dataclass(frozen=True)
class Ready:
    """An image as it goes into a shard.

    Attributes:
        data: bytes of the file: the original's, or a PNG or array of 8 bits.
        width, height: of the upright image.
        facts: about the image (`maect.data.image_facts`).
    """

    data: bytes
    extension: str
    width: int
    height: int
    facts: Facts = field(default_factory=dict)

    @property
    def turned(self) -> bool:
        """Return whether it is rotated upright whenever it is read."""
        return TURNED in self.facts


@dataclass(frozen=True)
class DecodedImage:
    """Pixels of a whole image, converted by the `pixels` of its data set.

    Attributes:
        pixels: upright, uint8 [H, W, C], or [H, W] of one channel.
        facts: about the image.
    """

    pixels: NDArray[np.uint8]
    facts: Facts

    @property
    def size(self) -> tuple[int, int]:
        """Return width and height."""
        height, width, *_ = self.pixels.shape
        return width, height

    def render(self, geometries: NDArray[np.int32], out: Images) -> None:
        """Resample every view into `out`, as `maect.data.decode.render` does.

        Args:
            geometries: [v, 8].
            out: uint8 [C, S, S] of each view, whose sizes S may differ; overwritten.
        """
        if len(out[0]) in (1, 3):
            resample(Image.fromarray(self.pixels), geometries, out)
        else:
            _resample_channels(self.pixels, geometries, out)


@dataclass(frozen=True)
class Inspected:
    """Properties of an upright image from which settings for images like it are proposed.

    Attributes:
        channels: their number, without transparency.
        values: of more than 8 bits the range of nearly all values (all but one in 10,000 at each
            end), else None.
        sample: some pixels, unconverted, [n, C].
        colors: largest difference between channels in the reduced image, in levels.
    """

    width: int
    height: int
    channels: int
    turned: bool
    values: tuple[float, float] | None
    sample: NDArray[Any]
    colors: int


def inspect_image(data: bytes) -> Inspected:
    """Return the properties of an unknown image."""
    turned = False
    colors = 0
    values = _read_array(data, _ANY)
    if values is None:
        with open_image(data) as (image, extension):
            turned = orientation(image) in _TURNS
            if image.mode.startswith("I;16") or image.mode in ("I", "F"):
                values = np.asarray(_to_eight_bits(image, Pixels()))
            else:
                rgb = to_rgb(image)
                deep = is_16_bit_color(data, extension) and image.mode in ("RGB", "RGBA")
                values = np.asarray(rgb)
                with suppress(UnreadableError):  # grey with alpha: its upper half is all there is
                    values = _sixteen_bits(image, data)[..., :3] if deep else values
                colors = int(np.ptp(np.asarray(rgb.resize((8, 8)), np.int16), axis=2).max())
    values = _planes(values)
    height, width, channels = values.shape
    if channels > MOST_CHANNELS:
        raise UnreadableError(
            f"an array {list(values.shape)}: a stack of pages, or more than {MOST_CHANNELS} "
            "channels; save one page a file"
        )
    step = max(1, width * height // _SAMPLE)
    sample = values.reshape(-1, channels)[::step]
    found = None
    if values.dtype != np.uint8:
        known = values[np.isfinite(values)] if values.dtype.kind == "f" else values
        if not known.size:
            raise UnreadableError("has no value that is a number")
        low, high = np.percentile(known, [0.01, 99.99])
        whole = values.dtype.kind != "f"
        found = (math.floor(low), math.ceil(high)) if whole else (float(low), float(high))
        if channels == 3:
            colors = int(np.ptp(scaled(sample, found).astype(np.int16), axis=1).max())
    size = (height, width) if turned else (width, height)
    return Inspected(*size, channels, turned, found, sample, colors)


def make_ready(data: bytes, pixels: Pixels) -> Ready:
    """Convert an image's bytes for a shard of a data set; keep them where that is possible."""
    if not pixels.files:
        return _ready_unconverted(data)
    read = _read(data, pixels, keep=True)
    if isinstance(read, Ready):
        return read
    return _encode(read)


def decode(data: bytes, pixels: Pixels) -> DecodedImage:
    """Decode and convert a whole image."""
    read = _read(data, pixels, keep=False)
    assert isinstance(read, DecodedImage)
    return read


def _read(data: bytes, pixels: Pixels, keep: bool) -> Ready | DecodedImage:
    """Convert an image by the `pixels` of its data set.

    Args:
        keep: return the file's own bytes where decoding them gives the same pixels.
    """
    values = _read_array(data, pixels)
    if values is not None:
        return convert_array(values, pixels)
    with open_image(data) as (image, extension):
        code, facts = _turn(image, pixels)
        given: Image.Image = image
        if is_16_bit_color(data, extension):
            given, deep = _scale_16_bit_color(image, data, pixels.range)
            facts |= deep
        changed = _to_eight_bits(given, pixels)
        if isinstance(changed, np.ndarray):
            return convert_array(_upright(changed, code), pixels, facts)
        facts |= _transparency(image, pixels)
        same = keep and changed is image
        if same and code not in _TURNS:
            return Ready(data, extension, *image.size, facts)
        if same and extension == "jpg":
            size = image.size[::-1] if _TURNS[code][0] else image.size
            return Ready(data, extension, *size, facts | {TURNED: 1})
        return convert_array(_upright(_to_array(changed, pixels), code), pixels, facts)


def _turn(image: Image.Image, pixels: Pixels) -> tuple[int, Facts]:
    """Return the orientation by which to turn an image, and the fact that it is ignored."""
    code = orientation(image)
    if pixels.orientation == "exif":
        return code, {}
    if code in _TURNS:
        return 1, {UNTURNED: 1}
    return 1, {}


def _transparency(image: Image.Image, pixels: Pixels) -> Facts:
    """Return the fact that a picture is transparent, and no background is stated."""
    if pixels.background is None and _is_transparent(image):
        return {TRANSPARENT: 1}
    return {}


def _scale_16_bit_color(
    image: Image.Image, data: bytes, span: tuple[float, float] | None
) -> tuple[Image.Image, Facts]:
    """Scale a 16-bit colour picture, of which Pillow keeps the upper bytes, by its range.

    Without a range the upper bytes stay. Transparency keeps its upper bytes, too.

    Returns:
        The 8-bit picture, and the facts about its values.
    """
    if span is None:
        upper = np.asarray(to_rgb(image))
        found = (256.0 * int(upper.min()), 256.0 * int(upper.max()) + 255)
        return image, deep_facts(found, _levels(upper))
    values = _sixteen_bits(image, data)
    colors = scaled(values[..., :3], span)
    facts = deep_facts(_extremes(values[..., :3]), _levels(colors))
    made = Image.fromarray(colors)
    if image.has_transparency_data:
        made.putalpha(image.convert("RGBA").getchannel("A"))
    return made, facts


def _sixteen_bits(image: Image.Image, data: bytes) -> NDArray[np.uint16]:
    """Return all 16 bits of a colour picture of which Pillow keeps the upper bytes, [H, W, C]."""
    lower = np.asarray(lower_bytes(data))
    return np.asarray(image).astype(np.uint16) << 8 | lower


def _levels(values: NDArray[np.uint8]) -> int:
    """Return an integer whose bit n is set if any value is n."""
    return sum(1 << int(level) for level in np.unique(values))


def _is_transparent(image: Image.Image) -> bool:
    """Return whether any pixel of a loaded picture is transparent, even slightly."""
    if not image.has_transparency_data:
        return False
    return int(np.asarray(image.convert("RGBA").getchannel("A")).min()) < 255


def _to_array(image: Image.Image, pixels: Pixels) -> NDArray[np.uint8]:
    """Return a picture as an array of the data set's one or three channels."""
    return np.asarray(image.convert("L") if pixels.channels == 1 else to_rgb(image))


def _ready_unconverted(data: bytes) -> Ready:
    """Return an image of a data set without `pixels`; a deep one is read by its upper 8 bits."""
    with open_image(data) as (image, extension):
        rgb = to_rgb(image)
        _, facts = _turn(image, Pixels())
        if image.mode.startswith("I;16"):
            found = _extremes(np.asarray(image, dtype=np.uint16))
            facts |= deep_facts(found, _levels(np.asarray(rgb)))
            return Ready(data, extension, *rgb.size, facts)
        if is_16_bit_color(data, extension):
            _, deep = _scale_16_bit_color(image, data, None)
            facts |= deep
        return Ready(data, extension, *rgb.size, facts | _transparency(image, Pixels()))


def ready_jpeg(data: bytes, pixels: Pixels) -> Ready | None:
    """Do as `make_ready` for a JPEG and RGB, by its header alone; return None for all others."""
    if data[:2] != _JPEG or pixels.channels != 3:
        return None
    width, height = image_size(data)
    code = _orientation_of(data) if pixels.orientation == "exif" else 1
    size = (height, width) if code in _TURNS and _TURNS[code][0] else (width, height)
    return Ready(data, "jpg", *size, {TURNED: 1} if code in _TURNS else {})


def convert_picture(image: Image.Image, pixels: Pixels) -> DecodedImage:
    """Convert a picture of Pillow, with the EXIF orientation that it carries."""
    image.load()  # some formats are upright once they are decoded
    code, facts = _turn(image, pixels)
    changed = _to_eight_bits(image, pixels)
    if isinstance(changed, Image.Image):
        facts |= _transparency(image, pixels)
        changed = _to_array(changed, pixels)
    return convert_array(_upright(changed, code), pixels, facts)


def convert_array(values: NDArray[Any], pixels: Pixels, facts: Facts | None = None) -> DecodedImage:
    """Convert an upright array [H, W] or [H, W, C] of any type; `facts` are known already."""
    values = _planes(values)
    channels = values.shape[2]
    if channels != pixels.channels and (channels, pixels.channels) != (1, 3):
        hint = "; state `channels` in the data set's `pixels`" if channels <= 16 else ""
        raise UnreadableError(f"{channels} channels, {pixels.channels} expected{hint}")
    found = dict(facts or {})
    if values.dtype != np.uint8:
        extremes = _extremes(values)
        values = scaled(values, pixels.range)
        found |= deep_facts(extremes, _levels(values))
    if channels < pixels.channels:
        values = values.repeat(3, axis=2)
    if pixels.channels == 1:
        values = values[..., 0]
    return DecodedImage(np.ascontiguousarray(values), found)


def _encode(image: DecodedImage) -> Ready:
    """Encode a converted image for a shard: as PNG, or as an array for unusual channel counts."""
    stream = io.BytesIO()
    if image.pixels.shape[2:] in ((), (3,)):
        extension = "png"
        Image.fromarray(image.pixels).save(stream, "PNG")
    else:
        extension = "npy"
        np.save(stream, image.pixels)
    return Ready(stream.getvalue(), extension, *image.size, image.facts)


def _planes(values: NDArray[Any]) -> NDArray[Any]:
    """Return an array [H, W] or [H, W, C] as [H, W, C]; refuse others and those of no numbers."""
    if values.ndim not in (2, 3) or not values.size:
        raise UnreadableError(f"an array {list(values.shape)}, not [H, W] or [H, W, C]")
    if values.dtype.kind not in "uif":
        raise UnreadableError(f"values of type {values.dtype}, which are not brightness values")
    return values if values.ndim == 3 else values[..., None]


def scaled(values: NDArray[Any], span: tuple[float, float] | None) -> NDArray[np.uint8]:
    """Scale values to 0 to 255; the ends of the range `span` and values beyond become 0 and 255."""
    if span is None:
        if values.dtype == np.uint16:
            return (values >> 8).astype(np.uint8)
        low, high = _extremes(values)
        raise UnreadableError(
            f"values of type {values.dtype} from {low:g} to {high:g} have no defined range; state "
            "it: `range` in the data set's `pixels`, or --pixels range=LOW,HIGH"
        )
    low, high = span
    levels = np.empty(values.shape, np.uint8)
    for row in range(0, len(values), _ROWS):  # not all at once: float64 takes eight bytes a value
        part = (values[row : row + _ROWS].astype(np.float64) - low) / (high - low)
        levels[row : row + _ROWS] = np.rint(255 * np.clip(np.nan_to_num(part), 0, 1))
    return levels


def _extremes(values: NDArray[Any]) -> tuple[float, float]:
    """Return the smallest and largest value that is a number; 0 and 0 if none is."""
    known = values[np.isfinite(values)] if values.dtype.kind == "f" else values
    return (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)


def _read_array(data: bytes, pixels: Pixels) -> NDArray[Any] | None:
    """Read an array of NumPy, DICOM, or a TIFF that Pillow would reduce; None for other files."""
    with unreadable_on_error():
        if data[:6] == ARRAY:
            return np.load(io.BytesIO(data), allow_pickle=False)
        if data[_DICOM] == b"DICM":
            return _dicom(data)
        if data[:4] in _TIFF and (pixels.channels != 3 or pixels.range is not None):
            return _tiff(data, pixels.channels > 3)
    return None


def _tiff(data: bytes, bands: bool) -> NDArray[Any] | None:
    """Read the first picture of a TIFF, upright, channels last, without transparency.

    It is rotated whatever the data set says, as Pillow does.

    Args:
        bands: count a fourth channel of 8 bits that the file does not describe.

    Returns:
        None for pictures that Pillow reads better: of 1 or 8 bits, or with a compression that only
        Pillow knows.
    """
    import tifffile

    try:
        with tifffile.TiffFile(io.BytesIO(data)) as file:
            series = file.series[0]
            page = file.pages[0]
            colors = page.photometric.name  # type: ignore[union-attr]
            # Of several pictures, such as depths (Z) or times (T), the first.
            kept = [slice(None) if axis in _PICTURE else slice(1) for axis in series.axes]
            sides = [range(n)[part] for n, part in zip(series.shape, kept, strict=True)]
            shape = [len(side) for side in sides if len(side) > 1]
            extra = page.extrasamples  # type: ignore[union-attr]
            count = page.samplesperpixel - sum(kind in _ALPHA for kind in extra)  # type: ignore[union-attr]
            pictures = len(shape) == 2 or colors in ("PALETTE", "SEPARATED", "YCBCR")
            pictures |= colors == "RGB" and not (bands and count > 3)
            if series.dtype == bool or (series.dtype == np.uint8 and (pictures or len(shape) != 3)):
                return None
            pixels = math.prod(series.shape) // page.samplesperpixel  # type: ignore[union-attr]
            with one_at_a_time(pixels):
                values = np.squeeze(series.asarray()[tuple(kept)])
            code = int(page.tags.valueof(_ORIENTATION, default=1))  # type: ignore[union-attr]
    except ValueError as error:
        if "imagecodecs" in str(error):
            return None
        raise
    # Planes may come one after another, and where nothing says so, the shortest axis is theirs.
    if values.ndim == 3 and values.shape[0] < min(values.shape[1:]) and values.shape[0] <= 16:
        values = np.moveaxis(values, 0, -1)
    if values.ndim == 3 and any(kind in _ALPHA for kind in extra):
        first = values.shape[-1] - len(extra)
        seen = [n for n in range(values.shape[-1]) if n < first or extra[n - first] not in _ALPHA]
        values = values[..., seen]
    return _upright(values, code) if values.ndim in (2, 3) else values


def _dicom(data: bytes) -> NDArray[Any]:
    """Read the first frame of a DICOM file in the units of its rescale slope; dense is bright."""
    try:
        import pydicom
        from pydicom.pixels import apply_modality_lut
    except ImportError:
        raise UnreadableError("DICOM needs the package pydicom: uv pip install pydicom") from None
    file = pydicom.dcmread(io.BytesIO(data))
    values = file.pixel_array
    if int(getattr(file, "NumberOfFrames", 1) or 1) > 1:
        values = values[0]
    if values.ndim == 3:
        return values
    shown = np.asarray(apply_modality_lut(values, file))
    if file.PhotometricInterpretation == "MONOCHROME1":
        # About the middle of what can be stored, whatever this image has.
        levels, signed = 1 << int(file.BitsStored), int(file.PixelRepresentation)
        ends = np.array([0, levels - 1]) - signed * levels // 2
        low, high = np.asarray(apply_modality_lut(ends.astype(values.dtype), file)).tolist()
        shown = low + high - shown
    return shown


def orientation(image: Image.Image) -> int:
    """Return a picture's EXIF orientation, 1 to 8; 1 (upright) where none is stated."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # EXIF that is damaged says nothing
        return 1


def _upright(values: NDArray[Any], code: int) -> NDArray[Any]:
    """Turn pixels [H, W, …] of this orientation upright."""
    transposed, left_right, up_down = _TURNS.get(code, (False, False, False))
    if transposed:
        values = values.swapaxes(0, 1)
    if left_right:
        values = values[:, ::-1]
    if up_down:
        values = values[::-1]
    return values


def _to_eight_bits(image: Image.Image, pixels: Pixels) -> Image.Image | NDArray[Any]:
    """Convert a loaded picture but for its orientation; return itself if `render` needs no more."""
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        dtype = {"I": np.int32, "F": np.float32}.get(image.mode, np.uint16)
        return np.asarray(image, dtype=dtype)
    if pixels.channels not in (1, 3):
        return np.asarray(image.convert("RGB") if image.mode == "P" else image)
    changed = image
    if pixels.background is not None and _is_transparent(image):
        behind = Image.new("RGBA", image.size, (*pixels.background, 255))
        changed = Image.alpha_composite(behind, image.convert("RGBA")).convert("RGB")
    if pixels.channels == 1 and changed.mode not in ("L", "1"):
        return changed.convert("RGB").convert("L")
    return changed


def render_ready(data: bytes, geometries: NDArray[np.int32], out: Images, turned: bool) -> None:
    """Resample views of an image from a shard, of any number of channels, as `decode.render`.

    Args:
        geometries: [v, 8], of the upright image.
        out: uint8 [C, S, S] of each view, whose sizes S may differ; overwritten.
    """
    if data[:6] == ARRAY:
        _resample_channels(np.load(io.BytesIO(data), allow_pickle=False), geometries, out)
        return
    if len(out[0]) == 1:
        colored = [np.empty((3, *view.shape[1:]), np.uint8) for view in out]
        render_ready(data, geometries, colored, turned)
        for view, three in zip(out, colored, strict=True):
            view[:] = three[:1]
        return
    code = _orientation_of(data) if turned else 1
    if code not in _TURNS:
        render(data, geometries, out)
        return
    stored = [np.empty(view.shape, np.uint8) for view in out]
    sizes = np.array([view.shape[-1] for view in out])
    render(data, _as_stored(geometries, code, *image_size(data), sizes), stored)
    for view, turned_view in zip(out, stored, strict=True):
        view[:] = _upright(turned_view.transpose(1, 2, 0), code).transpose(2, 0, 1)


def _resample_channels(
    values: NDArray[np.uint8], geometries: NDArray[np.int32], out: Images
) -> None:
    """Resample views of an array [H, W, C] channel by channel."""
    for channel in range(len(out[0])):
        plane = Image.fromarray(np.ascontiguousarray(values[..., channel]))
        resample(plane, geometries, [view[channel : channel + 1] for view in out])


def upright_rgb(ready: Ready) -> Image.Image:
    """Return the whole upright picture; UnreadableError if it has not three channels."""
    if ready.extension == "npy":
        raise UnreadableError("only pictures of three channels can be recompressed")
    return Image.fromarray(ready_pixels(ready.data, ready.turned, 3))


def ready_pixels(data: bytes, turned: bool, channels: int) -> NDArray[np.uint8]:
    """Return all pixels of an image from a shard, upright, uint8 [H, W, channels]."""
    if data[:6] == ARRAY:
        return np.asarray(_read_array(data, Pixels()))
    pixels = np.asarray(read_rgb(data))
    return _upright(pixels, _orientation_of(data) if turned else 1)[..., :channels]


def picture_of(data: bytes, pixels: Pixels) -> Image.Image:
    """Return an image in RGB to look at; of unusual numbers of channels the first channel."""
    values = decode(data, pixels).pixels
    if values.shape[2:] not in ((), (3,)):
        values = np.ascontiguousarray(values[..., 0])
    return Image.fromarray(values).convert("RGB")


def _orientation_of(data: bytes) -> int:
    if data[:2] != _JPEG:  # others were turned when they were made ready
        return 1
    with Image.open(io.BytesIO(data)) as image:
        return orientation(image)


def _as_stored(
    geometries: NDArray[np.int32], code: int, width: int, height: int, sizes: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Return geometries [v, 8] of an upright image as those of the stored one.

    Args:
        code: EXIF orientation of the stored image.
        width, height: of the stored image, in pixels.
        sizes: sides of the views' outputs, [v].
    """
    transposed, left_right, up_down = _TURNS[code]
    width, height = (height, width) if transposed else (width, height)
    x, y, w, h, full_w, full_h, left, top = geometries.T
    if left_right:
        x, left = width - x - w, full_w - left - sizes
    if up_down:
        y, top = height - y - h, full_h - top - sizes
    columns = [x, y, w, h, full_w, full_h, left, top]
    if transposed:
        columns = [y, x, h, w, full_h, full_w, top, left]
    return np.stack(columns, axis=1).astype(np.int32)
