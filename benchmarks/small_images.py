"""A training of small images on the CPU, before and after, in one run.

    python benchmarks/small_images.py [--shards DIR] [--batch 256] [--steps 12] [--rounds 5]

loader: images a second and core, decoded from the tars and cropped from the array beside them.
step: of pre-training and of tuning, with the loader in it: "before" reads the tars, gathers tokens
number by number and casts queries, keys and values each for itself, as this package once did. Both
take turns, step by step, on the same batches, and must give the same losses to the last bit.
beside: how much longer a thread of small operations takes (as the one that starts a GPU's kernels)
while the loader makes its batches; wall-clock time, on a quiet machine of two cores or more.
evaluate: seconds of an online evaluation (5,000 images) against those of the images trained on
between two of them (five epochs of 50,000).

Times are of the processor, all threads: images a second and core, hardly disturbed by other jobs.
DIR holds the shards of images of 32 x 32 pixels, such as CIFAR-10's; without it noise.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from training import ALONE, join, source_run

from maect.data import loader
from maect.data.index import Index, open_index
from maect.data.loader import train_batches
from maect.data.shards import shard
from maect.models import decoder, vit
from maect.models.attention import FusedAttention
from maect.recipes import OnlineEvaluation, load_encoder
from maect.stages import load_recipe
from maect.stages.base import SelfSupervised as Stage
from maect.train.engine import Engine
from maect.train.online import OnlineEvaluator

SIZE = {"width": 128, "depth": 6, "heads": 4, "decoder_width": 64, "decoder_depth": 1,
        "decoder_heads": 4}  # fmt: skip
WARM_UP = 2


def noise(folder: Path, count: int) -> Path:
    """JPEGs of 32 x 32 pixels, smooth as photographs."""
    random = np.random.default_rng(0)
    for number in range(count):
        path = folder / str(number % 10) / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(random.integers(0, 256, (6, 6, 3), dtype=np.uint8))
        coarse.resize((32, 32), Image.Resampling.BICUBIC).save(path, quality=92)
    return folder


def gather(ids: Tensor, *tokens: Tensor) -> list[Tensor]:
    """Tokens, as they were taken before."""
    return [x.gather(1, ids[:, :, None].expand(-1, -1, x.shape[2])) for x in tokens]


def attention(self: FusedAttention, x: Tensor, **_: object) -> Tensor:
    """Attention on a CPU, as it was before."""
    b, n = x.shape[:2]
    qkv = self.qkv(x).view(b, n, 3, self.num_heads, self.head_dim)
    query, key, value = (part.float() for part in qkv.permute(2, 0, 3, 1, 4).unbind(0))
    with torch.autocast("cpu", enabled=False):
        out = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    return self.proj(out.reshape(b, n, -1))


@contextmanager
def before() -> Iterator[None]:
    """The code as it was; gradients of what was computed inside go back through it, too."""
    with ExitStack() as stack:
        for module in (vit, decoder):
            stack.enter_context(patch.object(module, "take_tokens", gather))
        stack.enter_context(patch.object(FusedAttention, "forward", attention))
        yield


def batches(index: Index, stage: Stage, steps: int, from_tar: bool) -> Iterator[loader.Batch]:
    """A training's, on one thread; nothing is decoded ahead, so that a step's time has its own."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(loader, "_IN_FLIGHT", 0))
        if from_tar:
            stack.enter_context(patch.object(loader, "open_pixels", lambda index: None))
        for step in range(steps):
            yield from train_batches(
                index, global_batch=stage.batch_size, rank=0, world_size=1, seed=0,
                views=stage.view_settings(), image_size=32, start_step=step, steps=1, threads=1,
            )  # fmt: skip


def seconds(action: Callable[[], object]) -> float:
    began = time.process_time()
    action()
    return time.process_time() - began


def show(name: str, pairs: list[tuple[float, float]], images: int) -> None:
    """Images a second and core of both, and the median of the ratios with quartiles."""
    ratios = np.quantile([slow / fast for slow, fast in pairs], (0.25, 0.5, 0.75))
    slow, fast = (images / statistics.median(times) for times in zip(*pairs, strict=True))
    print(f"{name:<9}{slow:10.1f}{fast:10.1f}   x {ratios[1]:.3f} "
          f"({ratios[0]:.3f} to {ratios[2]:.3f}, {len(pairs)} pairs)", flush=True)  # fmt: skip


def measure_loader(index: Index, batch: int, rounds: int) -> None:
    stage = load_recipe("mae", "small").model_copy(update={"batch_size": batch})

    def read(from_tar: bool) -> None:
        for _ in batches(index, stage, 8, from_tar):
            pass

    read(True), read(False)
    pairs = [(seconds(lambda: read(True)), seconds(lambda: read(False))) for _ in range(rounds)]
    show("loader", pairs, 8 * batch)


def measure_beside(index: Index, batch: int, rounds: int) -> None:
    stage, x = load_recipe("ct_aug", "small"), torch.zeros(8)

    def step_ms(threads: int) -> float:
        given = {"global_batch": batch, "rank": 0, "world_size": 1, "seed": 0, "image_size": 32}
        made = train_batches(
            index, views=stage.view_settings(), start_step=0, steps=30, threads=threads, **given
        )
        times = []
        for _ in made if threads else range(30):
            began = time.perf_counter()
            for _ in range(12_000):
                x.add_(1.0)
            times.append(time.perf_counter() - began)
        return 1e3 * statistics.median(times)

    for threads in (1, 8):
        ratios = [step_ms(threads) / step_ms(0) for _ in range(rounds)]
        low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
        print(f"beside   {threads} threads x {middle:.3f} ({low:.3f} to {high:.3f})", flush=True)


class Training:
    """Steps of one training with the engine, one at a time."""

    def __init__(self, recipe: str, index: Index, batch: int, steps: int, old: bool) -> None:
        shape = load_encoder("small").model_copy(update=SIZE)
        stage = load_recipe(recipe, "small").model_copy(update={"batch_size": batch})
        if recipe != "mae":
            stage = stage.model_copy(update={"frozen_blocks": shape.depth // 2})
        with tempfile.TemporaryDirectory() as name:
            source = source_run(Path(name), shape) if stage.starts_from else None
            self.objective = stage.build(shape, 0, source)
        device, groups = torch.device("cpu"), stage.parameter_groups(self.objective)
        self.online = OnlineEvaluator(OnlineEvaluation(), index, 32, self.objective, ALONE, device)
        self.engine = Engine(self.objective, stage, groups, device)
        self.batches, self.old = batches(index, stage, steps, old), old
        self.losses: list[float] = []

    def step(self) -> None:
        with ExitStack() as stack:
            if self.old:
                stack.enter_context(before())
            inputs = self.objective.prepare(next(self.batches), torch.device("cpu"))
            loss, _ = self.engine(inputs)
            self.engine.backward(loss)
            self.engine.step(1.0)
            self.objective.after_update(self.engine.gathered)
            self.losses.append(float(loss))


def measure_step(recipe: str, index: Index, batch: int, steps: int) -> None:
    old, new = (Training(recipe, index, batch, steps, was) for was in (True, False))
    pairs = []
    for number in range(steps):
        turns = (old, new) if number % 2 else (new, old)
        took = {training.old: seconds(training.step) for training in turns}
        pairs.append((took[True], took[False]))
    if old.losses != new.losses:
        sys.exit(f"{recipe}: the losses differ: {old.losses} {new.losses}")
    show(recipe, pairs[WARM_UP:], batch)
    took = statistics.median(seconds(lambda: new.online.evaluate(new.engine.shards)) for _ in "123")
    images = new.online.index.n
    step = statistics.median(fast for _, fast in pairs[WARM_UP:])
    # As many images as the rule allows are evaluated, of whatever number there is.
    between = new.online.every / batch * step
    print(f"{recipe:<9}an evaluation of {images} images {took:.2f} s: "
          f"{100 * took / between:.2f} % of what lies between two", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=Path)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    ALONE.cpus = 1
    join("cpu")
    with tempfile.TemporaryDirectory() as name:
        if options.shards is None:
            options.shards = Path(name) / "shards"
            shard(noise(Path(name) / "images", 4096), options.shards, "folder", 4)
        index = open_index(options.shards)
        print(f"{index.n} images; images/s and core: before, after, ratio (quartiles)")
        measure_loader(index, options.batch, options.rounds)
        measure_beside(index, options.batch, options.rounds)
        for recipe in ("mae", "ct_min"):
            measure_step(recipe, index, options.batch, options.steps)


if __name__ == "__main__":
    main()
