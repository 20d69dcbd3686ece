"""Speed of training against a plain PyTorch loop, as ratios within one run; its memory, counted.

    python benchmarks/training.py [overhead] [memory] [--size small] [--batch 32] ...

overhead: the engine's step and that of a loop written by hand around the same model, in turn.
memory: a pass of head initialisation, and of tuning with half of the blocks frozen and with none,
as counted on a pretended GPU (fake_gpu.py).
On a GPU if there is one (`--device cpu`: not even then); see also gpu.py.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from fake_gpu import count
from plain_loop import PlainLoop

from maect.core.context import Context
from maect.data.loader import Batch
from maect.models.vit import build_encoder, seeded
from maect.models.weights import save_encoder
from maect.recipes import Encoder, load_encoder
from maect.recipes.settings import PLAIN
from maect.stages import load_recipe
from maect.stages.base import SelfSupervised as Stage
from maect.train.engine import random_batch, start
from maect.train.metrics import LogSteps, Metrics
from maect.train.timing import unsaved_trainer

WARM_UP = 3  # steps that are not counted: compilation, first allocations


ALONE = Context(len(os.sched_getaffinity(0)))


def join(device: str) -> torch.device:
    """A process group of one, on the CPU if that is asked for."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    return start(ALONE)


def settings(recipe: str, size: str, batch: int, **changes: Any) -> Stage:
    """A recipe with another batch size."""
    return load_recipe(recipe, size, changes).model_copy(update={"batch_size": batch})


def source_run(folder: Path, shape: Encoder) -> Path:
    """What head initialisation and tuning start from."""
    with seeded(0):
        save_encoder(
            folder / "encoder.safetensors", build_encoder(shape).state_dict(), shape, "cls"
        )
    return folder


def engine_steps(
    stage: Stage, shape: Encoder, device: torch.device, steps: int, between: Callable[[], None]
) -> list[float]:
    """Seconds of each step of the engine, as `maect` runs it; `between` is called before each."""
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = source_run(folder, shape) if stage.starts_from else None
        objective, metrics = stage.build(shape, 0, source), Metrics(folder, 0, steps)
        batch = random_batch(stage, shape, stage.batch_size)

        def batches() -> Iterator[Batch]:
            for _ in range(steps):
                between()
                began = clock(device)
                yield batch
                seconds.append(clock(device) - began)

        with unsaved_trainer(stage, objective, ALONE, device, steps, PLAIN) as trainer:
            trainer.hooks.append(LogSteps(trainer, metrics))
            trainer.run(batches())
    return seconds


def clock(device: torch.device) -> float:
    """Seconds: of the clock on a GPU, of the processor otherwise, which other jobs disturb less."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def plain_loop(stage: Stage, shape: Encoder, device: torch.device) -> PlainLoop:
    """A loop around a new objective."""
    with tempfile.TemporaryDirectory() as name:
        source = source_run(Path(name), shape) if stage.starts_from else None
        objective = stage.build(shape, 0, source)
    return PlainLoop(stage, shape, objective.to(device), device)


def overhead(options: argparse.Namespace, device: torch.device) -> None:
    """Median over pairs of neighbouring steps of engine : plain, for each stage.

    `refine` has views of two sizes and several heads.
    """
    shape = load_encoder(options.size)
    for recipe in options.recipes:
        stage = settings(recipe, options.size, options.batch, precision=options.precision)
        plain = plain_loop(stage, shape, device)
        seconds: list[float] = []

        def step(plain: PlainLoop = plain, seconds: list[float] = seconds) -> None:
            began = clock(device)
            plain.step()
            seconds.append(clock(device) - began)

        ours = engine_steps(stage, shape, device, options.steps + WARM_UP, step)
        pairs = list(zip(ours, seconds, strict=True))[WARM_UP:]
        ratios = sorted(a / b for a, b in pairs)
        low, middle, high = (ratios[int(q * (len(ratios) - 1))] for q in (0.25, 0.5, 0.75))
        step = statistics.median(b for _, b in pairs)
        print(
            f"{recipe:<9} plain step {1000 * step:8.1f} ms, engine : plain {middle:.3f} "
            f"(quartiles {low:.3f} to {high:.3f}, {len(ratios)} pairs)",
            flush=True,
        )


def memory(options: argparse.Namespace, device: torch.device) -> None:
    """Bytes at the worst moment of a forward and backward pass, without the optimizer."""
    shape = load_encoder(options.size)
    for recipe, frozen in (("head_min", 0), ("ct_min", shape.depth // 2), ("ct_min", 0)):
        changes = {} if recipe == "head_min" else {"frozen_blocks": frozen}
        stage = settings(recipe, options.size, options.batch, **changes)
        peak = count(stage, shape, options.batch).peak
        print(f"{recipe:<9} {frozen:2d} frozen blocks: {peak / 2**30:.3f} GiB", flush=True)


def main() -> None:
    parts = {"overhead": overhead, "memory": memory}
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    arguments.add_argument("--batch", type=int, default=32, help="images; twice as many views")
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    arguments.add_argument("parts", nargs="*", help=", ".join(parts))
    arguments.add_argument("--size", default="small", help="column of the recipes")
    arguments.add_argument("--recipes", nargs="+", default=["mae", "head_min", "ct_min"])
    options = arguments.parse_args()
    device = join(options.device)
    for name in options.parts or parts:
        parts[name](options, device)


if __name__ == "__main__":
    main()
