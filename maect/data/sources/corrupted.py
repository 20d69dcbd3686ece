"""Corrupt the images of a folder while they are read: test sets under common corruptions.

After ImageNet-C and CIFAR-10-C (Hendrycks and Dietterich 2019), with strengths like the highest of
their five for images of 32 pixels. Those are files of their own, which these do not reproduce.
"""

from __future__ import annotations

import io
import zlib
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from maect.core.errors import UserError
from maect.data.sources.base import Entry, Listing
from maect.data.sources.image_files import Folder
from maect.recipes import Pixels

if TYPE_CHECKING:
    from PIL import Image

_VALUES = 1 << 16
"""Values for which noise is drawn at once."""


class Corrupted(Folder):
    """The images of a folder, changed; what happens to one depends on its name and pixels alone.

    They are changed as they are seen: turned, on a background, and by a range as their data set
    says.
    """

    encoding: ClassVar[dict[str, Any]] = {"format": "PNG"}

    @abstractmethod
    def change(self, image: Image.Image, name: str) -> Image.Image:
        """Return the changed RGB image of this name."""

    def list_images(self) -> Listing:
        """List images as `folder` does; refuse other than one or three channels."""
        if self.pixels is not None and self.pixels.channels not in (1, 3):
            raise UserError(
                f"{self.path}: kind {self.kind} changes pictures in colour or grey, and the data "
                f"set's `pixels` have {self.pixels.channels} channels; leave this split out"
            )
        return super().list_images()

    def read(self, entry: Entry) -> bytes:
        """Read an image, change it and encode it."""
        from maect.data.convert import picture_of

        stated = self.pixels or Pixels()
        seen = Pixels(
            orientation=stated.orientation, background=stated.background, range=stated.range
        )
        stream = io.BytesIO()
        image = picture_of(super().read(entry), seen)
        self.change(image, entry.name).save(stream, **self.encoding)
        return stream.getvalue()


class Noise(Corrupted):
    """Normal noise in every value, cut off at black and white."""

    kind = "noise"
    about = "as `folder`, with normal noise of standard deviation 0.1 (of 1) in every value"
    deviation = 0.1

    def change(self, image: Image.Image, name: str) -> Image.Image:
        """Add noise: a normal number is the sum of twelve uniform integers, exact everywhere."""
        import numpy as np
        from PIL import Image

        from maect.data import random

        values = np.array(image)
        number = np.array([zlib.crc32(name.encode("utf-8", "surrogateescape"))])
        flat = values.reshape(-1)
        for start in range(0, flat.size, _VALUES):  # twelve words each: not all at once
            part = flat[start : start + _VALUES]
            words = random.bits(0, 0, number, 0, random.CORRUPT, 12 * part.size, 12 * start)
            sums = (words >> np.uint64(32)).reshape(part.size, 12).sum(-1)
            normal = sums.astype(np.float64) / 2**32 - 6.0
            noisy = np.rint(part + 255 * self.deviation * normal)
            part[:] = np.clip(noisy, 0, 255).astype(np.uint8)
        return Image.fromarray(values)


class Blur(Corrupted):
    """Out of focus."""

    kind = "blur"
    about = "as `folder`, blurred by Pillow's Gaussian of 1 pixel"
    sigma = 1.0

    def change(self, image: Image.Image, name: str) -> Image.Image:
        """Blur the image."""
        from PIL import ImageFilter

        return image.filter(ImageFilter.GaussianBlur(self.sigma))


class Contrast(Corrupted):
    """Nearly grey."""

    kind = "contrast"
    about = (
        "as `folder`, all values moved towards their channel's mean, of whose distance 0.15 remains"
    )
    remains = 0.15

    def change(self, image: Image.Image, name: str) -> Image.Image:
        """Reduce the contrast."""
        import numpy as np
        from PIL import Image

        values = np.asarray(image).astype(np.float64)
        mean = values.mean((0, 1))
        return Image.fromarray(np.rint(mean + self.remains * (values - mean)).astype(np.uint8))


class Pixelate(Corrupted):
    """Coarse."""

    kind = "pixelate"
    about = "as `folder`, reduced to 0.65 of its sides and enlarged again, without smoothing"
    part = 0.65

    def change(self, image: Image.Image, name: str) -> Image.Image:
        """Average over boxes, then repeat."""
        from PIL import Image

        size = max(1, round(self.part * image.width)), max(1, round(self.part * image.height))
        small = image.resize(size, Image.Resampling.BOX)
        return small.resize(image.size, Image.Resampling.NEAREST)


class JPEG(Corrupted):
    """Compressed too much."""

    kind = "jpeg"
    about = "as `folder`, as JPEG of quality 40"
    encoding: ClassVar[dict[str, Any]] = {"format": "JPEG", "quality": 40}

    def change(self, image: Image.Image, name: str) -> Image.Image:
        """Return the image itself: its encoding changes it."""
        return image
