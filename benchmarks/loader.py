"""How fast images load, as ratios measured in one run: `python benchmarks/loader.py`.

Each line compares two ways of doing the same on the same images, round by round in turn, each
first in every other round, and gives the median of the rounds' ratios of processor time (all
threads and worker processes), which is what "per core" means and hardly depends on what else the
machine does; the quartiles show how much. Wall clock is printed beside it. With --check the exit
status says whether every target of docs/reference/loader.md is met.
"""

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from photographs import write_folder
from PIL import Image

from maect.data import loader, native
from maect.data.decode import decoder_name, render
from maect.data.index import ID, Index, open_index
from maect.data.loader import train_batches
from maect.data.order import Order
from maect.data.shards import shard
from maect.data.transforms import random_crops
from maect.recipes import View

SIZE = 224
VIEW = View(crop_scale=(0.2, 1.0))
BATCH = 50


def image_folder_images(folder: Path, count: int, workers: int) -> None:
    """The reference: torchvision's ImageFolder, Pillow transforms, PyTorch's DataLoader."""
    import torch
    from torch.utils.data import DataLoader
    from torchvision import transforms as T
    from torchvision.datasets import ImageFolder

    crop = T.RandomResizedCrop(SIZE, VIEW.crop_scale, interpolation=T.InterpolationMode.BICUBIC)
    normalize = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    change = T.Compose([crop, T.RandomHorizontalFlip(), T.ToTensor(), normalize])
    torch.manual_seed(0)
    data = ImageFolder(str(folder), change)
    loader = DataLoader(data, BATCH, shuffle=True, num_workers=workers)
    seen = sum(len(images) for images, _ in loader)
    assert seen == count


def our_images(index: Index, count: int, threads: int, epoch: int = 0) -> None:
    """The training loader."""
    steps = count // BATCH
    batches = train_batches(
        index, global_batch=BATCH, rank=0, world_size=1, seed=epoch, views=(VIEW,),
        image_size=SIZE, start_step=0, steps=steps, threads=threads,
    )  # fmt: skip
    assert sum(len(batch.ids) for batch in batches) == count


class Samples:
    """All images in memory with fixed crops, for what is measured without a loader."""

    def __init__(self, index: Index) -> None:
        rows = np.asarray(index.rows)
        self.data = [index.read(i) for i in range(index.n)]
        self.crops = np.stack(
            [
                random_crops(
                    rows[:, 5], rows[:, 6], VIEW.crop_scale, SIZE,
                    seed=0, epochs=0, ids=rows[:, ID], view=view,
                )
                for view in range(2)
            ],
            1,
        )  # fmt: skip
        self.out = np.zeros((2, 3, SIZE, SIZE), np.uint8)

    def two_views(self) -> None:
        for data, crops in zip(self.data, self.crops, strict=True):
            render(data, crops, self.out)

    def two_decodes(self) -> None:
        for data, crops in zip(self.data, self.crops, strict=True):
            render(data, crops[:1], self.out[:1])
            render(data, crops[1:], self.out[1:])


def seconds(action: Callable[[], None]) -> tuple[float, float]:
    """Processor time, that of finished worker processes included, and wall clock."""

    def used() -> float:
        usage = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(u.ru_utime + u.ru_stime for u in usage)

    start, wall = used(), time.perf_counter()
    action()
    return used() - start, time.perf_counter() - wall


class Comparison(NamedTuple):
    """Quartiles of the ratios of processor times; each side's best wall clock."""

    quartiles: list[float]
    slow: float
    fast: float


def compare(slow: Callable[[], None], fast: Callable[[], None], rounds: int) -> Comparison:
    """How many times longer `slow` takes than `fast`."""
    slow(), fast()  # warm caches
    times = []
    for number in range(rounds):
        if number % 2:  # what follows finds other caches and another clock rate
            after = seconds(fast)
            times.append((seconds(slow), after))
        else:
            times.append((seconds(slow), seconds(fast)))
    cpu, wall = np.moveaxis(times, 2, 0)
    quartiles = np.quantile(cpu[:, 0] / cpu[:, 1], (0.25, 0.5, 0.75))
    return Comparison(quartiles.tolist(), *wall.min(axis=0).tolist())


def small_index(folder: Path, count: int = 1000) -> Index:
    """Shards of images of 32 x 32 pixels, with the array of decoded images beside the tars."""
    random = np.random.default_rng(0)
    for number in range(count):
        path = folder / "small" / str(number % 10) / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(random.integers(0, 256, (6, 6, 3), dtype=np.uint8))
        coarse.resize((32, 32), Image.Resampling.BICUBIC).save(path, quality=92)
    shard(folder / "small", folder / "small_shards", "folder", 1)
    return open_index(folder / "small_shards")


def small_images(index: Index) -> None:
    """The training loader on one thread."""
    steps = index.n // BATCH
    batches = train_batches(
        index, global_batch=BATCH, rank=0, world_size=1, seed=0, views=(VIEW,), image_size=32,
        start_step=0, steps=steps, threads=1,
    )  # fmt: skip
    assert sum(len(batch.ids) for batch in batches) == steps * BATCH


def overhead(index: Index, count: int) -> float:
    """Microseconds a sample for everything but decoding: order, crops and reading.

    The order is that of ImageNet's training images, folded onto the images that are here.
    """
    order = Order(1_281_167, 0)

    def run() -> None:
        for start in range(0, 4 * count, BATCH):
            rows, epochs = order.take(start, BATCH)
            rows %= index.n
            record = np.asarray(index.rows[rows])
            random_crops(
                record[:, 5], record[:, 6], VIEW.crop_scale, SIZE,
                seed=0, epochs=epochs, ids=record[:, ID], view=0,
            )  # fmt: skip
            for row in rows.tolist():
                index.read(row)

    run()
    return statistics.median(seconds(run)[0] for _ in range(9)) / (4 * count) * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, help="an image folder; made if not given")
    parser.add_argument("--count", type=int, default=400, help="images to make")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        met = measure(options, Path(name))
    return 0 if met or not options.check else 1


def measure(options: argparse.Namespace, scratch: Path) -> bool:
    """Print all lines; whether every target is met."""
    folder = options.images or write_folder(scratch / "images", options.count)
    shard(folder, scratch / "shards", "folder", 4)
    index = open_index(scratch / "shards")
    count = index.n // BATCH * BATCH
    cores = len(os.sched_getaffinity(0))
    samples, small = Samples(index), small_index(scratch)
    size = np.asarray(index.rows)[:, 3].mean() / 1000
    print(f"{index.n} images, {size:.0f} kB mean; {cores} cores; {decoder_name()}\n")
    every_met = []

    def from_tars() -> None:
        with mock.patch.object(loader, "open_pixels", lambda index: None):
            small_images(small)

    def add(name: str, value: float, target: str, spread: str = "") -> None:
        sense, number = target.split()
        met = value >= float(number) if sense == ">=" else value <= float(number)
        every_met.append(met)
        print(f"{name:<62}{value:8.2f}   {target:<9}{spread}{'' if met else '  MISSED'}")

    def add_ratio(name: str, found: Comparison, target: str, scale: float = 1.0) -> None:
        low, middle, high = (scale * ratio for ratio in found.quartiles)
        add(name, middle, target, f"quartiles {low:.2f} to {high:.2f}")

    if native.library() is not None:
        found = compare(
            lambda: image_folder_images(folder, index.n, cores),
            lambda: our_images(index, count, cores),
            options.rounds,
        )
        rates = f"{count / found.fast:.0f} images/s, ImageFolder {index.n / found.slow:.0f}"
        print(f"  native loader: {rates} by the clock on {cores} cores")
        scale = count / index.n
        add_ratio("native loader : ImageFolder + Pillow", found, ">= 2.7", scale)
    found = compare(samples.two_decodes, samples.two_views, options.rounds)
    add_ratio("two views from one decode : from two decodes", found, ">= 1.5")
    found = compare(from_tars, lambda: small_images(small), options.rounds)
    add_ratio("images of 32 x 32: from the tars : from the array", found, ">= 1")
    add("order, crops and reading, microseconds a sample", overhead(index, count), "<= 20")
    return all(every_met)


if __name__ == "__main__":
    sys.exit(main())
