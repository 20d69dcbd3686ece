"""Speed of training against a plain PyTorch loop, as ratios within one run; its memory, counted.

    python benchmarks/training.py [overhead] [memory] [--size small] [--batch 32] ...

overhead: the engine's step and that of a loop written by hand around the same model, in turn, in
bfloat16. `refine` has views of two sizes and several heads.
memory: a pass of head initialisation, and of tuning with half of the blocks frozen and with none,
as counted on a pretended GPU (fake_gpu.py).
On a GPU if there is one (`--device cpu`: not even then); see also gpu.py.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
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
from maect.stages import load_recipe
from maect.train.engine import random_batch, start
from maect.train.metrics import LogSteps, Metrics
from maect.train.timing import unsaved_trainer

WARM_UP = 3  # steps that are not counted: compilation, first allocations
ALONE = Context(len(os.sched_getaffinity(0)))


def clock(device: torch.device) -> float:
    """Seconds: of the clock on a GPU, of the processor otherwise, which other jobs disturb less."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def stage_of(recipe: str, options: argparse.Namespace, **changes: Any) -> Any:
    """A recipe with another batch size."""
    stage = load_recipe(recipe, options.size, changes)
    return stage.model_copy(update={"batch_size": options.batch})


def objective_of(stage: Any, shape: Encoder) -> Any:
    """A stage's new objective; random weights are what it starts from."""
    with tempfile.TemporaryDirectory() as name:
        with seeded(0):
            weights = build_encoder(shape).state_dict()
        save_encoder(Path(name, "encoder.safetensors"), weights, shape, "cls")
        return stage.build(shape, 0, Path(name) if stage.starts_from else None)


def paired_steps(
    stage: Any, shape: Encoder, device: torch.device, steps: int
) -> list[tuple[float, float]]:
    """Seconds of each step of the engine, as `maect` runs it, and of the loop's before it."""
    plain = PlainLoop(stage, shape, objective_of(stage, shape).to(device), device)
    objective, pairs = objective_of(stage, shape), []
    batch = random_batch(stage, shape, stage.batch_size)

    def batches() -> Iterator[Batch]:
        for _ in range(steps):
            first = clock(device)
            plain.step()
            second = clock(device)
            yield batch
            pairs.append((clock(device) - second, second - first))

    with (
        tempfile.TemporaryDirectory() as folder,
        unsaved_trainer(stage, objective, ALONE, device, steps) as trainer,
    ):
        trainer.hooks.append(LogSteps(trainer, Metrics(Path(folder), 0, steps)))
        trainer.run(batches())
    return pairs


def overhead(options: argparse.Namespace, device: torch.device) -> None:
    """Median over pairs of neighbouring steps of engine : plain, for each stage."""
    shape = load_encoder(options.size)
    for recipe in options.recipes:
        stage = stage_of(recipe, options, precision="bf16")
        pairs = paired_steps(stage, shape, device, options.steps + WARM_UP)[WARM_UP:]
        low, middle, high = statistics.quantiles((a / b for a, b in pairs), method="inclusive")
        step = statistics.median(b for _, b in pairs)
        print(
            f"{recipe:<9} plain step {1000 * step:8.1f} ms, engine : plain {middle:.3f} "
            f"(quartiles {low:.3f} to {high:.3f}, {len(pairs)} pairs)",
            flush=True,
        )


def memory(options: argparse.Namespace, device: torch.device) -> None:
    """Bytes at the worst moment of a forward and backward pass, without the optimizer."""
    shape = load_encoder(options.size)
    for recipe, frozen in (("head_min", 0), ("ct_min", shape.depth // 2), ("ct_min", 0)):
        changes = {} if recipe == "head_min" else {"frozen_blocks": frozen}
        peak = count(stage_of(recipe, options, **changes), shape, options.batch).peak
        print(f"{recipe:<9} {frozen:2d} frozen blocks: {peak / 2**30:.3f} GiB", flush=True)


def main() -> None:
    parts = {"overhead": overhead, "memory": memory}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", help=", ".join(parts))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--size", default="small", help="column of the recipes")
    parser.add_argument("--batch", type=int, default=32, help="images; twice as many views")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--recipes", nargs="+", default=["mae", "head_min", "ct_min"])
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    device = start(ALONE)
    for name in options.parts or parts:
        parts[name](options, device)


if __name__ == "__main__":
    main()
