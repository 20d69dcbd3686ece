"""A run's encoder from Python: images in, feature vectors out, those of the features file."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import PathLike, cpu_count, fspath
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from maect.core.errors import UserError
from maect.data.decode import UnreadableError, image_size, render, render_decoded
from maect.data.transforms import center_crops
from maect.evaluate.base import encoder_checksum
from maect.evaluate.features import BATCH, Encoding, finite
from maect.models.export import read_export
from maect.stages.run import resize_of

ENCODER = "encoder.safetensors"
ImageLike = str | PathLike[str] | bytes | Image.Image | NDArray[np.uint8]
"""A file, the bytes of one, a Pillow image, or uint8 [H, W] (grey) or [H, W, 3] (RGB)."""


class ImageEncoder:
    """An encoder with the preprocessing that belongs to it.

    Attributes:
        path: of its weights.
        sha256: of that file.
        image_size: S, of the centre crop.
        resize: shorter side before the crop.
        pooling: "cls", "mean" or "fc_norm".
        width: numbers per image.
    """

    def __init__(
        self,
        folder: Path,
        device: str | None = None,
        precision: Literal["fp32", "bf16"] = "fp32",
        resize: int | None = None,
    ) -> None:
        """Load a run, or a folder that `maect export` wrote; see `maect.load`."""
        if (folder / ENCODER).exists() or not (folder / "config.json").exists():
            self.sha256 = encoder_checksum(folder)
            self.path, own = folder / ENCODER, resize_of(folder)
        else:
            self.path, self.sha256, own = read_export(folder)
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.encoding = Encoding(self.path, torch.device(device), precision)
        self.image_size = self.encoding.settings.image_size
        self.resize = resize or own or self.encoding.settings.default_resize
        if self.resize < self.image_size:
            raise UserError(f"resize {self.resize} is smaller than image_size {self.image_size}")
        self.pooling, self.width = self.encoding.pooling, self.encoding.width

    def encode(
        self, images: Sequence[ImageLike], batch_size: int = BATCH, threads: int | None = None
    ) -> NDArray[np.float32]:
        """Feature vectors of images.

        On a CPU a vector depends on its image alone; a GPU may round differently for another
        `batch_size`. Pixels of a JPEG are within one level of Pillow's when it is given as a file.

        Args:
            images: files, bytes of files, Pillow images or arrays, mixed as one likes.
            batch_size: images at once on the device.
            threads: that decode; none: all cores.

        Returns:
            float32 [n, width], in the order of `images`.

        Raises:
            UserError: an image that cannot be read, named, or vectors that are not finite.
        """
        if isinstance(images, (str, bytes, PathLike, Image.Image)):
            raise TypeError("images: give a list, also of a single image")
        out = np.empty((len(images), self.width), np.float32)
        start = 0
        for pixels in self._batches(images, batch_size, threads):
            features = self.encoding(torch.from_numpy(pixels))
            finite(features, self.path.parent)
            out[start : start + len(pixels)] = features.cpu().numpy()
            start += len(pixels)
        return out

    def pixels(self, image: ImageLike) -> NDArray[np.uint8]:
        """What the encoder sees of an image, uint8 [3, S, S].

        Raises:
            UnreadableError: it cannot be decoded.
            OSError: no such file.
        """
        out = np.empty((1, 3, self.image_size, self.image_size), np.uint8)
        if isinstance(image, (str, PathLike)):
            image = Path(fspath(image)).read_bytes()
        if isinstance(image, bytes):
            render(image, self._crop(*image_size(image)), out)
            return out[0]
        if isinstance(image, np.ndarray):
            if (
                image.dtype != np.uint8
                or image.ndim not in (2, 3)
                or image.shape[2:] not in ((), (3,))
            ):
                raise UnreadableError(
                    f"an array {image.dtype} {image.shape}, not uint8 [H, W] or [H, W, 3]"
                )
            image = Image.fromarray(image)
        render_decoded(image, self._crop(*image.size), out)
        return out[0]

    def _crop(self, width: int, height: int) -> NDArray[np.int32]:
        return center_crops(np.array([width]), np.array([height]), self.resize, self.image_size)

    def _batches(
        self, images: Sequence[ImageLike], batch_size: int, threads: int | None
    ) -> Iterator[NDArray[np.uint8]]:
        def one(position: int) -> NDArray[np.uint8]:
            try:
                return self.pixels(images[position])
            except (UnreadableError, OSError) as error:
                image = images[position]
                name = fspath(image) if isinstance(image, (str, PathLike)) else f"image {position}"
                why = getattr(error, "strerror", None) or error
                raise UserError(f"{name!s}: {why}") from None

        parts = [
            range(start, min(start + batch_size, len(images)))
            for start in range(0, len(images), batch_size)
        ]
        with ThreadPoolExecutor(threads or cpu_count() or 1) as pool:
            # The next batch is decoded while the device has this one.
            ahead = [pool.submit(one, position) for part in parts[:1] for position in part]
            for number in range(len(parts)):
                now = ahead
                ahead = [
                    pool.submit(one, position)
                    for part in parts[number + 1 : number + 2]
                    for position in part
                ]
                yield np.stack([task.result() for task in now])
