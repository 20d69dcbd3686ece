"""Speed and memory of training against a plain PyTorch loop, as ratios within one run.

    python benchmarks/training.py [overhead] [frozen] [head] [--size small] [--batch 32] ...

overhead: the engine's step and that of a loop written by hand around the same model, in turn.
frozen: peak memory of tuning with the lower half frozen, and with nothing frozen.
head: what head initialisation and tuning keep for their backward passes.
On a GPU if there is one (`--device cpu`: not even then); see also gpu.py.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from plain_loop import PlainLoop

from maect.core.context import Context
from maect.data.loader import Batch
from maect.models.vit import build_encoder, seeded
from maect.models.weights import save_encoder
from maect.recipes import Encoder, load_encoder
from maect.recipes.computing import PLAIN, Computing, separate
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
    stage: Stage, shape: Encoder, device: torch.device, steps: int, between: Callable[[], None],
    how: Computing = PLAIN,
) -> list[float]:  # fmt: skip
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

        with unsaved_trainer(stage, objective, ALONE, device, steps, how) as trainer:
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


def in_own_process(
    options: argparse.Namespace, size: str, recipe: str, **changes: Any
) -> dict[str, float]:
    """`measure` in a fresh process, for its peak memory; {} if that was not enough."""
    changes = {"precision": options.precision, **changes}
    value = {"recipe": recipe, "size": size, "changes": changes}
    value |= {"batch": options.batch, "steps": options.steps, "device": options.device}
    words = [sys.executable, str(Path(__file__).with_name("training.py"))]
    result = subprocess.run(
        [*words, "--measure", json.dumps(value)], capture_output=True, text=True
    )
    if result.returncode and "OutOfMemoryError" in result.stderr:
        return {}
    if result.returncode:
        sys.exit(result.stderr)
    return json.loads(result.stdout.splitlines()[-1])


def measure(value: dict[str, Any]) -> None:
    """Print speed, operations a second and peak memory of one variant as JSON."""
    device, shape = join(value["device"]), load_encoder(value["size"])
    changes, how = separate(value["changes"])
    stage = settings(value["recipe"], value["size"], value["batch"], **changes)
    before, steps = peak_memory(device), value["steps"] + WARM_UP
    seconds = engine_steps(stage, shape, device, steps, lambda: None, Computing(**how))
    speed = stage.batch_size / statistics.median(seconds[WARM_UP:])
    found = {
        "images_per_second": speed,
        "flops": stage.flops_per_image(shape) * speed,
        "gib": (peak_memory(device) - before) / 2**30,
    }
    print(json.dumps(found))


def peak_memory(device: torch.device) -> int:
    """Most bytes in use so far: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split("VmHWM:")[1].split()[0])


def frozen(options: argparse.Namespace, device: torch.device) -> None:
    """Peak memory of tuning with half of the blocks frozen and with none."""
    shape, peaks = load_encoder(options.size), {}
    half = shape.depth // 2
    for blocks in (half, 0):
        peaks[blocks] = in_own_process(options, options.size, "ct_min", frozen_blocks=blocks)["gib"]
        print(f"{blocks:2d} frozen blocks: peak {peaks[blocks]:.3f} GiB", flush=True)
    vit = build_encoder(shape)
    vit.freeze(half)
    count = sum(p.numel() for p in vit.parameters() if not p.requires_grad)
    less = (peaks[0] - peaks[half]) * 2**30 / count
    print(f"{count / 1e6:.1f} M frozen parameters, {less:.1f} bytes less for each: of master,")
    print("gradient, average and moments (20 bytes) none is stored, and no activations are")


def head(options: argparse.Namespace, device: torch.device) -> None:
    """Bytes that autograd keeps between forward and backward pass, per image."""
    shape = load_encoder(options.size)
    for recipe in ("head_min", "ct_min"):
        stage = settings(recipe, options.size, options.batch, precision=options.precision)
        loop, kept = plain_loop(stage, shape, device), {}

        def keep(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        weights = {p.untyped_storage().data_ptr() for p in loop.objective.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loop.step()
        total = sum(size for place, size in kept.items() if place not in weights)
        print(f"{recipe:<9} keeps {total / stage.batch_size / 2**20:8.2f} MiB an image", flush=True)


def parser() -> argparse.ArgumentParser:
    """What both benchmarks are told."""
    found = argparse.ArgumentParser()
    found.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    found.add_argument("--batch", type=int, default=32, help="images; twice as many views")
    found.add_argument("--steps", type=int, default=20)
    found.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    return found


def main() -> None:
    parts = {"overhead": overhead, "frozen": frozen, "head": head}
    arguments = parser()
    arguments.add_argument("parts", nargs="*", help=", ".join(parts))
    arguments.add_argument("--size", default="small", help="column of the recipes")
    arguments.add_argument("--recipes", nargs="+", default=["mae", "head_min", "ct_min"])
    arguments.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.measure:
        return measure(options.measure)
    device = join(options.device)
    for name in options.parts or parts:
        parts[name](options, device)


if __name__ == "__main__":
    main()
