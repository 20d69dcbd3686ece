"""Batches of decoded crops: the same for every rank count, thread count and restart.

Threads decode straight into the batch (the decoders release Python's lock); a few batches are in
flight. Nothing is kept between steps: step s of a run is a function of its arguments.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maect.core.distributed import to_device_async
from maect.core.errors import UserError
from maect.data.decode import UnreadableError
from maect.data.index import HEIGHT, ID, LABEL, WIDTH, Index
from maect.data.native import Images, crops
from maect.data.order import Order
from maect.data.packed import Packed, Packing
from maect.data.pixels import open_pixels
from maect.data.transforms import Change, center_crops, random_crops, whole_images
from maect.recipes import View, views_by_size

_IN_FLIGHT = 3
_PER_TASK = 8
_Note = TypeVar("_Note")
Draw = Callable[[NDArray[np.int64], NDArray[np.int64]], dict[str, Tensor]]
"""What is drawn for a batch, by name, of epochs [b] and ids [b]; always of the same shapes."""


@dataclass(frozen=True)
class Batch:
    """One rank's part of a step's global batch."""

    step: int
    ids: NDArray[np.int64]
    """Stable sample ids, [b]."""
    epochs: NDArray[np.int64]
    """Epoch of each sample, [b]; a batch may straddle two."""
    labels: NDArray[np.int64]
    """[b], -1 where unlabelled."""
    images: tuple[Tensor, ...]
    """Of each size of views uint8 [views, b, C, S, S] on the CPU: cropped, not yet flipped or
    normalized. Sizes come in the order of `views_by_size`."""
    packed: Packed | None = None
    """Images, ids, labels and what was drawn for the batch, if that was asked for."""

    def on(self, device: torch.device, draw: Draw) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Images of each size, and `ids`, `labels` and what is drawn for them, on a device."""
        names = image_names(len(self.images))
        if self.packed is not None:
            values = self.packed.on(device)
        else:
            values = dict(zip(names, self.images, strict=True))
            values |= _numbers(self.ids, self.labels) | draw(self.epochs, self.ids)
            values = {name: to_device_async(value, device) for name, value in values.items()}
        return [values.pop(name) for name in names], values

    def part(self, rows: slice) -> "Batch":
        """Some of the samples, unpacked."""
        images = tuple(group[:, rows] for group in self.images)
        return Batch(self.step, self.ids[rows], self.epochs[rows], self.labels[rows], images)


def image_names(sizes: int) -> list[str]:
    """Return what images of each size are called in packed memory."""
    return ["images", *(f"images.{number}" for number in range(1, sizes))]


def _numbers(ids: NDArray[np.int64], labels: NDArray[np.int64]) -> dict[str, Tensor]:
    return {"ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}


@dataclass(frozen=True)
class _Job(Generic[_Note]):
    note: _Note
    rows: NDArray[np.int64]
    """Row numbers of the samples, [b]."""
    geometries: NDArray[np.int32]
    """[b, views, 8], in the order of `out`."""
    out: Images
    """Of each view uint8 [b, C, S, S], to be filled."""
    change: Callable[[Sequence[NDArray[np.uint8]], int], None] | None = None
    """Called with a decoded sample's views and its row in the batch."""
    beside: Callable[[], None] | None = None
    """What else is to be done for the batch, in a thread."""


def train_batches(
    index: Index,
    *,
    global_batch: int,
    rank: int,
    world_size: int,
    seed: int,
    views: Sequence[View],
    image_size: int,
    start_step: int,
    steps: int,
    threads: int,
    change: Change | None = None,
    draw: Draw | None = None,
    pinned: bool = False,
) -> Iterator[Batch]:
    """Batches of steps `start_step` to `start_step + steps - 1`.

    Rank r gets rows r·b to (r+1)·b of the global batch, b = global_batch / world_size. Steps run
    on from epoch to epoch without a remainder: over n steps exactly n·global_batch samples come,
    every sample once an epoch. `change` and `draw` run in the decoding threads; with `draw`,
    batches are packed, in `pinned` memory if a GPU is to copy them.
    """
    if global_batch % world_size:
        raise UserError(f"batch_size {global_batch} is not a multiple of {world_size} ranks")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size}")
    order = Order(index.n, seed)
    share = global_batch // world_size

    sizes = views_by_size(views, image_size).items()
    shapes = [(len(numbers), share, index.channels, size, size) for size, numbers in sizes]
    layout = None if draw is None else layout_of(shapes, draw)

    def jobs() -> Iterator[_Job[Batch]]:
        for step in range(start_step, start_step + steps):
            rows, epochs = order.take(step * global_batch + rank * share, share)
            packed = None if layout is None else Packed(layout, pinned)
            job = _views(index, step, rows, epochs, seed, views, image_size, change, packed)
            yield job if draw is None else replace(job, beside=partial(fill, job.note, draw))

    yield from _decoded(index, jobs(), threads)


def layout_of(images: Sequence[tuple[int, ...]], draw: Draw) -> Packing:
    """Return the layout of batches with images uint8 [views, b, C, S, S] of these shapes."""
    none = np.zeros(images[0][1], np.int64)
    values = _numbers(none, none) | draw(none, none)
    shapes = {name: (value.dtype, tuple(value.shape)) for name, value in values.items()}
    named = zip(image_names(len(images)), images, strict=True)
    return Packing({name: (torch.uint8, shape) for name, shape in named} | shapes)


def fill(batch: Batch, draw: Draw) -> None:
    """Put beside a batch's images what they are and what is drawn for them."""
    assert batch.packed is not None
    for name, value in (_numbers(batch.ids, batch.labels) | draw(batch.epochs, batch.ids)).items():
        # PyTorch would copy by a team of threads for each of the decoding ones.
        np.copyto(batch.packed.tensors[name].numpy(), value.numpy())


def view_parts(
    index: Index,
    *,
    views: Sequence[View],
    image_size: int,
    seed: int,
    parts: Sequence[range],
    threads: int,
) -> Iterator[Batch]:
    """Views of the rows of each of `parts`, in order, as a training has them in its first epoch."""

    def jobs() -> Iterator[_Job[Batch]]:
        for number, part in enumerate(parts):
            rows = np.array(part, np.int64)
            yield _views(index, number, rows, np.zeros_like(rows), seed, views, image_size)

    yield from _decoded(index, jobs(), threads)


def _views(
    index: Index,
    step: int,
    rows: NDArray[np.int64],
    epochs: NDArray[np.int64],
    seed: int,
    views: Sequence[View],
    image_size: int,
    change: Change | None = None,
    packed: Packed | None = None,
) -> _Job[Batch]:
    """Random crops of some rows."""
    record = np.asarray(index.rows[rows])
    groups, sides = views_by_size(views, image_size), (record[:, WIDTH], record[:, HEIGHT])
    crop = partial(random_crops, *sides, seed=seed, epochs=epochs, ids=record[:, ID])
    geometries = [
        crop(views[number].crop_scale, size, view=number)
        for size, numbers in groups.items()
        for number in numbers
    ]
    if packed is None:
        images = [
            torch.empty(len(numbers), len(rows), index.channels, size, size, dtype=torch.uint8)
            for size, numbers in groups.items()
        ]
    else:
        images = [packed.tensors[name] for name in image_names(len(groups))]
    batch = Batch(step, record[:, ID], epochs, record[:, LABEL], tuple(images), packed)
    out = [view for group in images for view in group.numpy()]
    job = _Job(batch, rows, np.stack(geometries, 1), out)
    if change is None:
        return job
    return replace(job, change=lambda views, i: change(views, int(epochs[i]), int(batch.ids[i])))


def evaluation_parts(
    index: Index,
    *,
    image_size: int,
    parts: Sequence[range],
    threads: int,
    resize: int | None = None,
    squeezed: bool = False,
) -> Iterator[tuple[Tensor, NDArray[np.int64], NDArray[np.int64]]]:
    """Images uint8 [b, C, S, S], labels [b] and ids [b] of the rows of each of `parts`, in order.

    The shorter side is resized to `resize` (256/224 of `image_size` by default), bicubic, and the
    centre is cut out; or whole images are `squeezed` into a square.
    """
    resize = round(image_size * 256 / 224) if resize is None else resize
    if resize < image_size:
        raise UserError(f"resize {resize} is smaller than image_size {image_size}")
    cut = whole_images if squeezed else partial(center_crops, resize=resize)
    Item = tuple[Tensor, NDArray[np.int64], NDArray[np.int64]]

    def jobs() -> Iterator[_Job[Item]]:
        for rows in parts:
            part = np.array(rows, np.int64)
            record = np.asarray(index.rows[part])
            geometries = cut(record[:, WIDTH], record[:, HEIGHT], size=image_size)
            images = torch.empty(
                len(part), index.channels, image_size, image_size, dtype=torch.uint8
            )
            item = images, record[:, LABEL], record[:, ID]
            yield _Job(item, part, geometries[:, None], images.numpy()[None])

    yield from _decoded(index, jobs(), threads)


def _decoded(index: Index, jobs: Iterator[_Job[_Note]], threads: int) -> Iterator[_Note]:
    """Decode jobs with `threads` threads, a few jobs ahead; yields their notes in order."""
    pixels = open_pixels(index)
    pool = ThreadPoolExecutor(max(1, threads), thread_name_prefix="decode")

    def begun(job: _Job[_Note]) -> tuple[_Note, list[Future[None]]]:
        # Few enough for small images, whose decoding is as quick as a task's start. Of images that
        # are decoded already one call makes the batch: each task takes Python's lock from the step.
        length = max(_PER_TASK, len(job.rows) // (4 * max(1, threads)))
        if pixels is not None and job.change is None:
            length = max(1, len(job.rows))
        parts = [] if job.beside is None else [pool.submit(job.beside)]
        parts += [
            pool.submit(_decode, index, pixels, job, slice(i, i + length))
            for i in range(0, len(job.rows), length)
        ]
        return job.note, parts

    yield from ahead(map(begun, jobs), pool)


def ahead(
    jobs: Iterable[tuple[_Note, list[Future[None]]]], pool: ThreadPoolExecutor
) -> Iterator[_Note]:
    """Yield what tasks of a pool make, in order; a few jobs are begun before they are asked for."""
    pending: deque[tuple[_Note, list[Future[None]]]] = deque()
    try:
        for job in jobs:
            pending.append(job)
            if len(pending) > _IN_FLIGHT:
                yield _wait(*pending.popleft())
        while pending:
            yield _wait(*pending.popleft())
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _wait(note: _Note, parts: list[Future[None]]) -> _Note:
    for part in parts:
        part.result()
    return note


def _decode(
    index: Index,
    pixels: NDArray[np.uint8] | None,
    job: _Job[_Note],
    part: slice,
) -> None:
    """Make some samples of a batch in the job's `out`: read, decode, crop."""
    rows, done = job.rows[part], False
    if pixels is not None:
        record = index.rows[rows]
        sides = record[:, [WIDTH, HEIGHT]]
        out = [view[part] for view in job.out]
        done = crops(pixels, record[:, ID], sides, job.geometries[part], out)
    for i, row in zip(range(*part.indices(len(job.rows))), rows.tolist(), strict=True):
        views = [view[i] for view in job.out]
        try:
            if not done:
                index.render(row, job.geometries[i], views)
            if job.change is not None:
                job.change(views, i)
        except UnreadableError as error:
            raise index.undecodable(row, error) from None
