"""Batches of decoded crops: the same for every number of ranks and threads, and after a restart.

Threads decode straight into the batch (the decoders release Python's lock); a few batches are in
flight. Nothing is kept between steps: step s of a run is a function of its arguments.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import prod
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
from maect.data.pixels import open_pixels
from maect.data.transforms import Change, center_crops, random_crops, whole_images
from maect.recipes import View, views_by_size

_ALIGNMENT = 64
_IN_FLIGHT = 3
_ROWS_PER_TASK = 8
_Item = TypeVar("_Item")
Draw = Callable[[NDArray[np.int64], NDArray[np.int64]], dict[str, Tensor]]
"""Draws random numbers for a batch, by name, from epochs [b] and ids [b]; shapes never change."""

# --- Batches in one piece of memory ---------------------------------------------------------------


@dataclass(frozen=True)
class _Field:
    """Place of a tensor in a block of memory; `begin` and `end` in bytes."""

    begin: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class BatchLayout:
    """Places of tensors, by name, in one block of memory of `size` bytes."""

    def __init__(self, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self.fields: dict[str, _Field] = {}
        self.size = 0
        for name, (dtype, shape) in shapes.items():
            end = self.size + prod(shape) * dtype.itemsize
            self.fields[name] = _Field(self.size, end, dtype, shape)
            self.size = -(-end // _ALIGNMENT) * _ALIGNMENT


class Packed:
    """A block of memory with such a layout; `tensors` are views on it by name."""

    def __init__(self, layout: BatchLayout, pinned: bool) -> None:
        """Reserve the memory; pinned, a GPU copies it without the CPU."""
        self._layout = layout
        self._memory = torch.empty(layout.size, dtype=torch.uint8, pin_memory=pinned)
        self.tensors = self._views(self._memory)

    def to(self, device: torch.device) -> dict[str, Tensor]:
        """Return the tensors on a device, in one copy; on the CPU these, without a copy."""
        return self._views(self._memory.to(device, non_blocking=True))

    def _views(self, memory: Tensor) -> dict[str, Tensor]:
        return {
            name: memory[field.begin : field.end].view(field.dtype).view(field.shape)
            for name, field in self._layout.fields.items()
        }


@dataclass(frozen=True)
class Batch:
    """One rank's part of a step's global batch.

    Attributes:
        ids: stable sample ids, [b].
        epochs: epoch of each sample, [b]; a batch may straddle two.
        labels: [b], -1 where unlabelled.
        images: for each size of views uint8 [views, b, C, S, S] on the CPU: cropped, not yet
            flipped or normalized. Sizes come in the order of `views_by_size`.
        packed: images, ids, labels and random draws in one piece of memory, if asked for.
    """

    step: int
    ids: NDArray[np.int64]
    epochs: NDArray[np.int64]
    labels: NDArray[np.int64]
    images: tuple[Tensor, ...]
    packed: Packed | None = None

    def to(self, device: torch.device, draw: Draw) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return on a device the images of each size, and `ids`, `labels` and random draws."""
        names = image_names(len(self.images))
        if self.packed is not None:
            values = self.packed.to(device)
        else:
            values = dict(zip(names, self.images, strict=True))
            values |= _numbers(self.ids, self.labels) | draw(self.epochs, self.ids)
            values = {name: to_device_async(value, device) for name, value in values.items()}
        images = [values.pop(name) for name in names]
        return images, values

    def part(self, rows: slice) -> "Batch":
        """Return some of the samples, unpacked."""
        images = tuple(group[:, rows] for group in self.images)
        return Batch(self.step, self.ids[rows], self.epochs[rows], self.labels[rows], images)


def image_names(sizes: int) -> list[str]:
    """Return the names of the images of each size in packed memory."""
    return ["images", *(f"images.{number}" for number in range(1, sizes))]


def _numbers(ids: NDArray[np.int64], labels: NDArray[np.int64]) -> dict[str, Tensor]:
    return {"ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}


def batch_layout(images: Sequence[tuple[int, ...]], draw: Draw) -> BatchLayout:
    """Return the layout of batches with images uint8 [views, b, C, S, S] of these shapes."""
    none = np.zeros(images[0][1], np.int64)
    names = image_names(len(images))
    shapes = {name: (torch.uint8, shape) for name, shape in zip(names, images, strict=True)}
    for name, value in (_numbers(none, none) | draw(none, none)).items():
        shapes[name] = value.dtype, tuple(value.shape)
    return BatchLayout(shapes)


def add_draws(batch: Batch, draw: Draw) -> None:
    """Add ids, labels and random draws to a packed batch of images."""
    assert batch.packed is not None
    values = _numbers(batch.ids, batch.labels) | draw(batch.epochs, batch.ids)
    for name, value in values.items():
        # PyTorch would copy by a team of threads for each of the decoding ones.
        np.copyto(batch.packed.tensors[name].numpy(), value.numpy())


# --- Batches of a split ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job(Generic[_Item]):
    """Samples to decode.

    Attributes:
        item: what is yielded when all is decoded.
        rows: rows of the index, [b].
        geometries: [b, views, 8], in the order of `out`.
        out: for each view uint8 [b, C, S, S], to be filled.
        change: called with a decoded sample's views and its position in the batch.
        task: done once for the batch, in a thread.
    """

    item: _Item
    rows: NDArray[np.int64]
    geometries: NDArray[np.int32]
    out: Images
    change: Callable[[Sequence[NDArray[np.uint8]], int], None] | None = None
    task: Callable[[], None] | None = None


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
    """Yield this rank's batches of steps `start_step` to `start_step + steps - 1`.

    Rank r gets rows r·b to (r+1)·b of the global batch, b = global_batch / world_size. Steps run
    on from epoch to epoch without a remainder: over n steps exactly n·global_batch samples come,
    every sample once an epoch.

    Args:
        change: changes decoded views, in the decoding threads.
        draw: draws random numbers, in the decoding threads; batches are then packed.
        pinned: pack them into pinned memory, for a GPU.

    Raises:
        UserError: `global_batch` is not a multiple of `world_size`, or an image is damaged.
    """
    if global_batch % world_size:
        raise UserError(f"batch_size {global_batch} is not a multiple of {world_size} ranks")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size}")
    order = Order(index.n, seed)
    share = global_batch // world_size
    sizes = views_by_size(views, image_size).items()
    shapes = [(len(numbers), share, index.channels, size, size) for size, numbers in sizes]
    layout = None if draw is None else batch_layout(shapes, draw)

    def jobs() -> Iterator[_Job[Batch]]:
        for step in range(start_step, start_step + steps):
            rows, epochs = order.take(step * global_batch + rank * share, share)
            packed = None if layout is None else Packed(layout, pinned)
            job = _views_job(index, step, rows, epochs, seed, views, image_size, change, packed)
            if draw is not None:
                job = replace(job, task=partial(add_draws, job.item, draw))
            yield job

    yield from _decode_jobs(index, jobs(), threads)


def view_parts(
    index: Index,
    *,
    views: Sequence[View],
    image_size: int,
    seed: int,
    parts: Sequence[range],
    threads: int,
) -> Iterator[Batch]:
    """Yield views of the rows of each of `parts`, in order, as in a training's first epoch."""

    def jobs() -> Iterator[_Job[Batch]]:
        for number, part in enumerate(parts):
            rows = np.array(part, np.int64)
            yield _views_job(index, number, rows, np.zeros_like(rows), seed, views, image_size)

    yield from _decode_jobs(index, jobs(), threads)


def _views_job(
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
    """Return the job of decoding random crops of some rows."""
    record = np.asarray(index.rows[rows])
    ids = record[:, ID]
    groups = views_by_size(views, image_size)
    crop = partial(
        random_crops, record[:, WIDTH], record[:, HEIGHT], seed=seed, epochs=epochs, ids=ids
    )
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
    batch = Batch(step, ids, epochs, record[:, LABEL], tuple(images), packed)
    out = [view for group in images for view in group.numpy()]
    job = _Job(batch, rows, np.stack(geometries, 1), out)
    if change is None:
        return job
    return replace(job, change=lambda views, i: change(views, int(epochs[i]), int(ids[i])))


def evaluation_parts(
    index: Index,
    *,
    image_size: int,
    parts: Sequence[range],
    threads: int,
    resize: int | None = None,
    squeezed: bool = False,
) -> Iterator[tuple[Tensor, NDArray[np.int64], NDArray[np.int64]]]:
    """Yield images uint8 [b, C, S, S], labels [b] and ids [b] of the rows of each of `parts`.

    Args:
        resize: pixels of the shorter side before the centre is cut out, bicubic; 256/224 of
            `image_size` by default.
        squeezed: resize whole images to a square instead.

    Raises:
        UserError: `resize` is smaller than `image_size`, or an image is damaged.
    """
    if resize is None:
        resize = round(image_size * 256 / 224)
    if resize < image_size:
        raise UserError(f"resize {resize} is smaller than image_size {image_size}")
    cut = whole_images if squeezed else partial(center_crops, resize=resize)
    Item = tuple[Tensor, NDArray[np.int64], NDArray[np.int64]]

    def jobs() -> Iterator[_Job[Item]]:
        for part in parts:
            rows = np.array(part, np.int64)
            record = np.asarray(index.rows[rows])
            geometries = cut(record[:, WIDTH], record[:, HEIGHT], size=image_size)
            shape = (len(rows), index.channels, image_size, image_size)
            images = torch.empty(shape, dtype=torch.uint8)
            item = images, record[:, LABEL], record[:, ID]
            yield _Job(item, rows, geometries[:, None], images.numpy()[None])

    yield from _decode_jobs(index, jobs(), threads)


# --- Threads --------------------------------------------------------------------------------------


def _decode_jobs(index: Index, jobs: Iterator[_Job[_Item]], threads: int) -> Iterator[_Item]:
    """Decode jobs with `threads` threads, a few jobs ahead; yield their items in order."""
    pixels = open_pixels(index)
    pool = ThreadPoolExecutor(max(1, threads), thread_name_prefix="decode")

    def submit(job: _Job[_Item]) -> tuple[_Item, list[Future[None]]]:
        count = len(job.rows)
        # Few tasks for small images, whose decoding is as quick as a task's start. One call makes
        # the whole batch of decoded images: each task takes Python's lock from the step.
        length = max(_ROWS_PER_TASK, count // (4 * max(1, threads)))
        if pixels is not None and job.change is None:
            length = max(1, count)
        tasks = []
        if job.task is not None:
            tasks.append(pool.submit(job.task))
        for start in range(0, count, length):
            end = min(start + length, count)
            tasks.append(pool.submit(_decode_rows, index, pixels, job, start, end))
        return job.item, tasks

    yield from results_in_order(map(submit, jobs), pool)


def results_in_order(
    jobs: Iterable[tuple[_Item, list[Future[None]]]], pool: ThreadPoolExecutor
) -> Iterator[_Item]:
    """Yield items in order, each when its tasks are done; submit a few jobs ahead.

    Args:
        jobs: submits an item's tasks to the pool when it is advanced.
        pool: shut down at the end.
    """
    pending: deque[tuple[_Item, list[Future[None]]]] = deque()
    try:
        for job in jobs:
            pending.append(job)
            if len(pending) > _IN_FLIGHT:
                yield _wait(*pending.popleft())
        while pending:
            yield _wait(*pending.popleft())
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _wait(item: _Item, tasks: list[Future[None]]) -> _Item:
    for task in tasks:
        task.result()
    return item


def _decode_rows(
    index: Index, pixels: NDArray[np.uint8] | None, job: _Job[_Item], start: int, end: int
) -> None:
    """Read, decode and crop samples `start` to `end` of a batch into the job's `out`."""
    rows = job.rows[start:end]
    cropped = False
    if pixels is not None:
        record = index.rows[rows]
        sides = record[:, [WIDTH, HEIGHT]]
        out = [view[start:end] for view in job.out]
        cropped = crops(pixels, record[:, ID], sides, job.geometries[start:end], out)
    for i, row in enumerate(rows.tolist(), start):
        views = [view[i] for view in job.out]
        try:
            if not cropped:
                index.render(row, job.geometries[i], views)
            if job.change is not None:
                job.change(views, i)
        except UnreadableError as error:
            raise index.undecodable(row, error) from None
