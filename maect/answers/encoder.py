"""A run's encoder from Python: images in, feature vectors out."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import PathLike, fspath, sched_getaffinity
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from maect.answers.public import find_run
from maect.core.arrays import seek_arrays, write_arrays
from maect.core.distributed import use_full_float32
from maect.core.errors import UserError, counted, reason
from maect.core.settings import validated
from maect.data.convert import (
    convert_array,
    convert_picture,
    decode,
    ready_jpeg,
    render_ready,
)
from maect.data.decode import UnreadableError
from maect.data.image_facts import Facts, merged, warning
from maect.data.sources.base import Entry, ImageSource
from maect.data.transforms import center_crops
from maect.evaluate.base import encoder_checksum
from maect.evaluate.features import ON_CPU, Encoding, check_finite
from maect.models.export import read_export
from maect.models.kernels import Precision
from maect.recipes import Pixels
from maect.stages.run import resize_of
from maect.train.scores import BATCH

log = logging.getLogger(__name__)

ENCODER = "encoder.safetensors"
ImageLike = str | PathLike[str] | bytes | Image.Image | NDArray[Any]
"""A file, the bytes of one, a Pillow image, or an array [H, W] (grey) or [H, W, C].

Files and pictures are read as viewers show them: upright by their EXIF, and what is transparent in
front of the background of the encoder's data set, else of white. Values of more than 8 bits are
scaled by the `range` of the data set. Arrays are upright."""


@dataclass(frozen=True)
class SeenImage:
    """An image as the encoder sees it, uint8 [C, S, S], and facts about it."""

    pixels: NDArray[np.uint8]
    facts: Facts


class ImageEncoder:
    """An encoder with the preprocessing that belongs to it.

    Attributes:
        image_size: S, of the centre crop.
        resize: shorter side before the crop.
        pooling: "cls", "mean" or "fc_norm".
        reading: how images are read.
        facts: of the images that were read so far and are not yet warned of.
    """

    def __init__(
        self,
        folder: Path,
        device: str | None = None,
        precision: Precision = "fp32",
        resize: int | None = None,
        pixels: Mapping[str, Any] | None = None,
    ) -> None:
        """Load a run, an export or a public encoder; see `maect.load`."""
        folder = find_run(folder)
        if (folder / ENCODER).exists() or not (folder / "config.json").exists():
            self.sha256 = encoder_checksum(folder)
            self.path = folder / ENCODER
            own = resize_of(folder)
        else:
            self.path, self.sha256, own = read_export(folder)
        if precision not in get_args(Precision):
            known = " and ".join(get_args(Precision))
            raise UserError(f"precision {precision!r}: features are computed in {known}")
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        use_full_float32()
        self.encoding = Encoding(self.path, torch.device(device), precision)
        self.image_size = self.encoding.settings.image_size
        self.resize = resize or own or self.encoding.settings.default_resize
        if self.resize < self.image_size:
            raise UserError(f"resize {self.resize} is smaller than image_size {self.image_size}")
        self.read_as(pixels or {})
        self.facts: Facts = {}
        self.pooling = self.encoding.pooling
        self.width = self.encoding.width
        # A CPU reads the next images while it computes: few at once, so that it has some to read.
        self.batch_size = ON_CPU if self.encoding.device.type == "cpu" else self.encoding.batch_size

    def read_as(self, stated: Mapping[str, Any]) -> None:
        """Set how images are read: as viewers show them and by the data set, unless stated."""
        own = self.encoding.settings.pixels.as_seen
        if other := sorted(stated.keys() - own.reading):
            raise UserError(
                f"pixels: {other[0]} belongs to the encoder; {', '.join(own.reading)} can be stated"
            )
        self.reading = validated(Pixels, own.model_dump() | dict(stated), "pixels")

    def warn(self, where: str | Path) -> None:
        """Warn of information lost from the images read since the last call, if it was much."""
        if said := warning(self.facts, self.reading, option=True):
            log.warning("%s: %s", where, said)
        self.facts = {}

    @property
    def about(self) -> dict[str, Any]:
        """Return all but the images that vectors depend on, as in a features file's header."""
        return {
            "run": self.path.parent.name,
            "encoder_sha256": self.sha256,
            "pooling": self.pooling,
            "image_size": self.image_size,
            "resize": self.resize,
            "precision": self.encoding.precision,
            "pixels": self.reading.model_dump(mode="json", exclude_defaults=True),
        }

    @property
    def identity(self) -> dict[str, Any]:
        """Return `about` without the run's name."""
        return {key: value for key, value in self.about.items() if key != "run"}

    def encode(
        self,
        images: Sequence[ImageLike],
        batch_size: int | None = None,
        threads: int | None = None,
    ) -> NDArray[np.float32]:
        """Compute feature vectors of images.

        On a CPU a vector depends on its image alone; a GPU may round differently for another
        `batch_size`. Pixels of a JPEG are within one level of Pillow's when it is given as a file.

        Args:
            images: files, bytes of files, Pillow images or arrays, mixed as one likes.
            batch_size: images at once on the device; none: as many as suit it.
            threads: that decode; none: one for each core that this process may use.

        Returns:
            float32 [n, width], in the order of `images`.

        Raises:
            UserError: an image that cannot be read, named, or vectors that are not finite.

        Examples:
            >>> maect.load("dinov2_small").encode(["a.jpg", "b.png"]).shape
            (2, 384)
        """
        if isinstance(images, (str, bytes, PathLike, Image.Image)):
            raise TypeError("images: give a list, also of a single image")
        values, faults = self.readable(
            images.__getitem__, len(images), batch_size or self.batch_size, threads, strict=True
        )
        for number, why in faults.items():
            image = images[number]
            name = fspath(image) if isinstance(image, (str, PathLike)) else f"image {number}"
            raise UserError(f"{name}: {why}")
        self.warn(counted(len(images), "image"))
        return values

    def readable(
        self,
        read: Callable[[int], ImageLike],
        n: int,
        batch_size: int = BATCH,
        threads: int | None = None,
        *,
        strict: bool = False,
        progress: Callable[[int], None] = lambda done: None,
    ) -> tuple[NDArray[np.float32], dict[int, str]]:
        """Compute vectors of the images that can be read.

        Args:
            read: gives image number i; called by several threads.
            strict: stop after the first batch with an image that cannot be read.

        Returns:
            float32 [readable, width], in order, and why the others cannot be read, by number.

        Raises:
            UserError: vectors that are not finite.
        """
        out = np.empty((n, self.width), np.float32)
        faults: dict[int, str] = {}
        done = 0
        for numbers, images in self._batches(read, n, batch_size, threads):
            good = [image.pixels for image in images if not isinstance(image, str)]
            faults |= {i: x for i, x in zip(numbers, images, strict=True) if isinstance(x, str)}
            self.facts = merged([self.facts, *(i.facts for i in images if not isinstance(i, str))])
            if faults and strict:
                break
            if good:
                features = self.encoding(torch.from_numpy(np.stack(good)))
                check_finite(features, self.path.parent)
                out[done : done + len(good)] = features.cpu().numpy()
                done += len(good)
            progress(numbers.stop)
        return out[:done], faults

    def kept(
        self,
        file: Path,
        source: ImageSource,
        entries: Sequence[Entry],
        batch_size: int | None = None,
        progress: Callable[[int], None] = lambda done: None,
    ) -> tuple[NDArray[np.float32], dict[int, str]]:
        """Return `readable` of some images of a source, from a file if it has them; else write it.

        Args:
            file: its name is that of the encoder and the images. Made again once an image is
                readable that was not.
        """
        if (known := seek_arrays(file, "vectors")) is not None:
            # What could not be read may be readable now: a package is installed, a disk is back.
            faults = [number for number, _ in json.loads(known[1]["faults"])]
            tried = self._batches(
                lambda n: source.read(entries[faults[n]]), len(faults), BATCH, None
            )
            reasons = [one for _, batch in tried for one in batch if isinstance(one, str)]
            if len(reasons) == len(faults):
                self.facts = merged([self.facts, json.loads(known[1].get("facts", "{}"))])
                return known[0]["vectors"], dict(zip(faults, reasons, strict=True))
        size = batch_size or self.batch_size
        before, self.facts = self.facts, {}
        values, found = self.readable(
            lambda number: source.read(entries[number]), len(entries), size, progress=progress
        )
        texts = {"faults": json.dumps([*found.items()]), "facts": json.dumps(self.facts)}
        write_arrays(file, {"vectors": values}, texts)
        self.facts = merged([before, self.facts])
        return values, found

    def see(self, image: ImageLike) -> "SeenImage":
        """Return an image as the encoder sees it; raise UnreadableError if it cannot be read."""
        out = np.empty((1, self.reading.channels, self.image_size, self.image_size), np.uint8)
        if isinstance(image, (str, PathLike)):
            image = Path(fspath(image)).read_bytes()
        if isinstance(image, bytes):
            # Of a JPEG the crop alone is decoded.
            if (jpeg := ready_jpeg(image, self.reading)) is not None:
                crop = self._crop(jpeg.width, jpeg.height)
                render_ready(jpeg.data, crop, out, jpeg.turned)
                return SeenImage(out[0], jpeg.facts)
            seen = decode(image, self.reading)
        elif isinstance(image, Image.Image):
            seen = convert_picture(image, self.reading)
        else:
            seen = convert_array(image, self.reading)
        seen.render(self._crop(*seen.size), out)
        return SeenImage(out[0], seen.facts)

    def _crop(self, width: int, height: int) -> NDArray[np.int32]:
        return center_crops(np.array([width]), np.array([height]), self.resize, self.image_size)

    def _batches(
        self, read: Callable[[int], ImageLike], n: int, batch_size: int, threads: int | None
    ) -> Iterator[tuple[range, "list[SeenImage | str]"]]:
        """Yield the numbers of each batch's images, and their pixels or the reason for none."""

        def one(number: int) -> SeenImage | str:
            try:
                return self.see(read(number))
            except (UnreadableError, OSError) as error:
                return reason(error)

        batches = [range(n)[start : start + batch_size] for start in range(0, n, batch_size)]
        with ThreadPoolExecutor(threads or len(sched_getaffinity(0))) as pool:
            ahead = [pool.submit(one, number) for number in range(n)[:batch_size]]
            for batch in batches:
                following = range(n)[batch.stop : batch.stop + batch_size]
                # The next batch is decoded while the device has this one.
                tasks, ahead = ahead, [pool.submit(one, number) for number in following]
                yield batch, [task.result() for task in tasks]
