"""The processes of gpu.py: each prints a line of JSON for whatever it finds, as soon as it does.

On a CPU, and with `--small`, all shapes are tiny.
"""

import argparse
import gc
import itertools
import json
import math
import os
import platform
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from photographs import write_folder
from PIL import Image
from plain_loop import PlainLoop
from safetensors.torch import load_file
from sklearn.cluster import KMeans
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from maect.core.context import Context
from maect.core.distributed import driver
from maect.data.bundled import CLASSES, draw
from maect.data.decode import decoder_name
from maect.data.index import open_index
from maect.data.loader import train_batches
from maect.data.shards import shard
from maect.evaluate.clustering import scores
from maect.evaluate.features import Encoding, extract
from maect.evaluate.knn import votes_by_setting
from maect.evaluate.store import moments, open_features, standardize
from maect.models.vit import build_encoder
from maect.models.weights import save_encoder
from maect.recipes import KNN_K, KNN_TEMPERATURE, load_encoder
from maect.recipes.cost import peak_flops
from maect.recipes.settings import Computing
from maect.stages import load_recipe
from maect.stages.fine_tune import FineTune
from maect.train import engine
from maect.train.engine import random_batch, start
from maect.train.hooks import Hook, Update
from maect.train.stage import RunInputs
from maect.train.timing import packed, step_seconds, unsaved_trainer
from maect.train.trainer import train

GIB = 2**30


@dataclass
class Machine:
    """Where a process computes.

    Attributes:
        device: of torch.
        small: tiny shapes.
        work: folder of models, images and trainings, which stays on the machine.
        out: folder of what comes back: the report and a trace.
        images: CIFAR-10 as a tar archive of train/CLASS/IMAGE and test/CLASS/IMAGE, or None.
    """

    device: Any
    small: bool
    work: Path
    out: Path
    images: Path | None

    @property
    def cuda(self) -> bool:
        """Whether it is a GPU."""
        return bool(self.device.type == "cuda")

    def wait(self) -> None:
        """Wait until the device has nothing left to do."""
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, action: Callable[[], Any], rounds: int = 3) -> float:
        """Return the shortest of some rounds, after one that does not count."""
        times = []
        for _ in range(rounds + 1):
            self.wait()
            began = time.perf_counter()
            action()
            self.wait()
            times.append(time.perf_counter() - began)
        return min(times[1:])

    def free(self) -> None:
        """Give back what earlier models held, and count the peak of memory anew."""
        gc.collect()
        torch.compiler.reset()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def say(name: str, **values: Any) -> None:
    """Add a line to the report."""
    print(json.dumps({"name": name, **rounded(values)}), flush=True)


def rounded(value: Any) -> Any:
    """Four digits of each number, for JSON, which knows no infinity."""
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else str(value)
    return value


@contextmanager
def reported(name: str) -> Iterator[None]:
    """Report an error of a block, and go on behind it."""
    try:
        yield
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        print(text, file=sys.stderr, flush=True)
        say(name, error=text[-900:])


# ---- models, built on the device -----------------------------------------------------------------


def stage_and_encoder(machine: Machine, recipe: str, size: str, batch: int, **changes: Any) -> Any:
    """Settings of a stage with another batch, and its encoder."""
    if machine.small:
        size, batch = "tiny", 8
    if recipe == "fine_tune":
        stage: Any = FineTune.model_validate(changes)
    else:
        stage = load_recipe(recipe, size, changes)
    return stage.model_copy(update={"batch_size": batch}), load_encoder(size)


def build(machine: Machine, stage: Any, encoder: Any) -> Any:
    """Return a stage's objective on the device, with weights of no value."""
    torch.manual_seed(0)
    with torch.device(machine.device):
        source = None
        if stage.starts_from:
            source = machine.work / f"source-{encoder.width}-{encoder.depth}-{encoder.image_size}"
            if not (source / "encoder.safetensors").exists():
                source.mkdir(parents=True, exist_ok=True)
                weights = build_encoder(encoder).state_dict()
                save_encoder(source / "encoder.safetensors", weights, encoder, "cls")
        classes = [str(number) for number in range(10)]
        return stage.build(encoder, 0, source, classes).to(machine.device)


def join(machine: Machine) -> None:
    """Form a process group of one rank, as a training on one GPU has it."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    machine.device = start(Context(cpus(), machine.cuda))


def cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


# ---- speed ---------------------------------------------------------------------------------------

STEPS = 12
"""Steps of each way to compute, of which the later half counts."""


def rate(machine: Machine, stage: Any, encoder: Any, seconds: list[float]) -> dict[str, float]:
    """Median step of the later half, images and operations a second, share of the peak, memory."""
    warm = sorted(seconds[len(seconds) // 2 :])
    step = warm[len(warm) // 2]
    found = {"step_ms": 1e3 * step, "first_s": seconds[0]}
    found["images_per_second"] = stage.batch_size / step
    flops = stage.flops_per_image(encoder) * found["images_per_second"]
    found["tflops"] = flops / 1e12
    if machine.cuda:
        if peak := peak_flops(torch.cuda.get_device_name()):
            found["share_of_peak"] = flops / peak
        found["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        found["planned_gib"] = stage.peak_memory(encoder, 1) / GIB
    return found


def engine_steps(
    machine: Machine, stage: Any, encoder: Any, partitioned: bool = False, **how: Any
) -> list[float]:
    """Seconds of steps of the trainer, with the copy of each batch from the CPU.

    Args:
        partitioned: with DeepSpeed's partitions, as on a rank of several, and without graphs.
        how: settings of `Computing`.
    """
    machine.free()
    if partitioned:
        how["cuda_graphs"] = False
    objective, context = build(machine, stage, encoder), Context(cpus(), machine.cuda)
    stage_of = (lambda computing: computing.zero_stage) if partitioned else engine.deepspeed_stage
    with (
        patch.object(engine, "deepspeed_stage", stage_of),
        unsaved_trainer(
            stage, objective, context, machine.device, STEPS, Computing(**how)
        ) as trainer,
    ):
        if trainer.engine.not_compiled:
            raise RuntimeError(f"not compiled: {trainer.engine.not_compiled}")
        return step_seconds(trainer, STEPS)


def loop_steps(
    machine: Machine, stage: Any, encoder: Any, compiled: Any = "no", explicit: bool = False
) -> list[float]:
    """Seconds of steps of a plain loop, by the device's clock."""
    machine.free()
    objective = build(machine, stage, encoder)
    loop = PlainLoop(stage, encoder, objective, machine.device, compiled, explicit)
    if not machine.cuda:
        return [machine.seconds(loop.step, 1) for _ in range(2)]
    marks = []
    for _ in range(STEPS + 1):
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        loop.step()
    machine.wait()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]


WAYS: dict[str, Callable[..., list[float]]] = {
    "engine": engine_steps,
    "engine, plain": lambda *given: engine_steps(*given, compile=False, cuda_graphs=False),
    "engine, compiled": lambda *given: engine_steps(*given, compile=True, cuda_graphs=False),
    "engine, graphs": lambda *given: engine_steps(*given, compile=False),
    "engine, compiled, graphs": lambda *given: engine_steps(*given, compile=True),
    "ZeRO 1, plain": lambda *given: engine_steps(*given, True, compile=False),
    "ZeRO 1, compiled": lambda *given: engine_steps(*given, True, compile=True),
    "loop, plain": loop_steps,
    "loop, blocks compiled": lambda *given: loop_steps(*given, "blocks"),
    "loop, compiled": lambda *given: loop_steps(*given, "passes"),
    "loop, compiled, graphs": lambda *given: loop_steps(*given, "graphs"),
    "facebookresearch/mae": lambda *given: loop_steps(*given, explicit=True),
}
"""Ways to compute a step. `ZeRO 1`: DeepSpeed's partitions on one rank, which are not needed there
and show what its hooks cost a rank of several."""


def speed(machine: Machine, recipe: str, size: str, batch: int, ways: list[str]) -> None:
    """Report how fast a stage is in each way; on a CPU, what compiles is left out."""
    for way in ways if machine.cuda else [way for way in ways if "compiled" not in way]:
        name = f"speed: {recipe} {size} {batch}: {way}"
        with reported(name):
            stage, encoder = stage_and_encoder(machine, recipe, size, batch)
            say(name, **rate(machine, stage, encoder, WAYS[way](machine, stage, encoder)))


KINDS = (
    ("attention", ("fmha", "flash", "sdpa", "attention")),
    ("optimizer", ("adam", "multi_tensor_apply")),
    ("fused by the compiler", ("triton",)),
    ("products", ("gemm", "nvjet", "cutlass", "cublas", "xmma", "splitK")),
    ("norms", ("layer_norm", "LayerNorm", "GammaBeta")),
    ("sums", ("reduce",)),
    ("casts and copies", ("copy", "Memcpy", "CatArray", "Memset")),
)
"""Kinds of kernels by parts of their names; the first that fits."""


def profiled(machine: Machine, recipe: str, size: str, batch: int, trace: bool, **how: Any) -> None:
    """Report where the time of a step goes: kernels by kind, busy and idle time, launches."""
    machine.free()
    stage, encoder = stage_and_encoder(machine, recipe, size, batch)
    objective, steps = build(machine, stage, encoder), 3
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * machine.cuda
    watch = profile(activities=kinds)
    context = Context(cpus(), machine.cuda)
    with unsaved_trainer(
        stage, objective, context, machine.device, STEPS, Computing(**how)
    ) as trainer:
        given = random_batch(stage, encoder, stage.batch_size)
        given = packed(given, trainer.objective.draw, machine.cuda)

        def batches() -> Iterator[Any]:
            for _ in range(STEPS // 2):
                yield given
            machine.wait()
            watch.start()
            for _ in range(steps):
                yield given
            machine.wait()
            watch.stop()

        trainer.run(batches())
    events = [e for e in watch.events() if str(e.device_type).endswith("CUDA")]
    if trace:
        watch.export_chrome_trace(str(machine.out / "step.json.gz"))
    times: dict[str, float] = {}
    names: dict[str, float] = {}
    for event in events:
        fits = (kind for kind, parts in KINDS if any(part in event.name for part in parts))
        if "#" in event.name:  # a range of the host's, such as an optimizer's step
            continue
        kind, length = next(fits, "other"), event.time_range.elapsed_us() / 1e3 / steps
        times[kind] = times.get(kind, 0.0) + length
        names[event.name[:90]] = names.get(event.name[:90], 0.0) + length
    busy, end, begin = 0.0, 0.0, 0.0
    for event in sorted(events, key=lambda e: e.time_range.start):
        begin = begin or event.time_range.start
        busy += max(0.0, event.time_range.end - max(end, event.time_range.start))
        end = max(end, event.time_range.end)
    longest = sorted(names.items(), key=lambda item: -item[1])[:20]
    say(
        f"profile: {recipe} {size} {batch}: {how}",
        kernels=len(events) // steps, busy_ms=busy / 1e3 / steps,
        idle_ms=(end - begin - busy) / 1e3 / steps,
        kinds_ms=dict(sorted(times.items(), key=lambda item: -item[1])), longest_ms=dict(longest),
    )  # fmt: skip


# ---- the processes -------------------------------------------------------------------------------


def correct(machine: Machine) -> None:
    """Report whether losses, gradients, captured passes and restarts are right on this device."""
    about(machine)
    for recipe in ("mae", "head_min", "ct_aug", "refine", "fine_tune"):
        with reported(f"numerics: {recipe}"):
            numerics(machine, recipe)
    with reported("restarts"):
        restarts(machine)
    join(machine)
    with reported("inputs beside a step: refine"):
        beside(machine, "refine")


def about(machine: Machine) -> None:
    """Report versions, and the ceilings of this card."""
    values: dict[str, Any] = {
        "python": platform.python_version(), "torch": torch.__version__, "cpus": cpus(),
        "deepspeed": version("deepspeed"), "timm": version("timm"),
    }  # fmt: skip
    if machine.cuda:
        values |= {"device": torch.cuda.get_device_name(), "driver": driver()}
        values["cuda"] = torch.version.cuda
        x = torch.randn(8192, 8192, device=machine.device, dtype=torch.bfloat16)
        values["product_tflops"] = 2 * 8192**3 / machine.seconds(lambda: x @ x, 5) / 1e12
        y = torch.ones(2**30, device=machine.device)
        z = torch.empty_like(y)
        values["copy_tb_per_s"] = 2 * y.nbytes / machine.seconds(lambda: z.copy_(y), 5) / 1e12
    say("machine", **values)


def numerics(machine: Machine, recipe: str) -> None:
    """Compare float32 here with float64 on the CPU, and bfloat16 with float32."""
    cpu = Machine(torch.device("cpu"), machine.small, machine.work, machine.out, None)
    torch.set_num_threads(cpus())
    # A classifier computes in float32 whatever it is given: there only the device differs.
    best = torch.float32 if recipe == "fine_tune" else torch.float64
    found: dict[str, Any] = {}
    for name, kind, device, precision in (
        ("exact", best, cpu.device, "fp32"),
        ("float32", torch.float32, machine.device, "fp32"),
        ("bfloat16", torch.float32, machine.device, "bf16"),
    ):
        stage, encoder = stage_and_encoder(machine, recipe, "base", 8, precision=precision)
        if not machine.small and recipe != "refine":  # whose heads read upper blocks
            encoder = encoder.model_copy(update={"depth": 4, "decoder_depth": 2})
        if recipe == "ct_aug":
            head = stage.head.model_copy(update={"queue_size": 1024})
            stage = stage.model_copy(update={"head": head, "frozen_blocks": 2})
        objective = build(cpu, stage, encoder)
        batch = random_batch(stage, encoder, 8, seed=1)  # with 0 a ReLU of the head is at its kink
        found[name] = gradients(objective, batch, device, kind)
    values, holds = {}, True
    for name, exact, loss_limit, limit in (
        ("float32", "exact", 1e-5, 1e-4), ("bfloat16", "float32", 1e-2, 1e-1),
    ):  # fmt: skip
        loss, gradient = found[name]
        expected, direction = found[exact]
        values[f"{name}_loss"] = off = abs(loss / expected - 1)
        values[f"{name}_gradient"] = turned = float(
            (gradient - direction).norm() / direction.norm()
        )
        # In bfloat16 a lookup may take another of two near neighbours: what follows is no fault.
        if name == "float32" or recipe in ("mae", "fine_tune"):
            holds &= off <= loss_limit and turned <= limit
    say(f"numerics: {recipe}", holds=holds, **values)


def gradients(objective: Any, batch: Any, device: Any, kind: Any) -> tuple[float, Any]:
    """Return the loss, and all gradients as one float64 vector on the CPU."""
    objective.to(device, kind)
    inputs = objective.prepare(batch, device)
    groups = inputs.images
    if isinstance(groups, tuple):
        inputs.images = tuple(group.to(kind) for group in groups)
    else:
        inputs.images = groups.to(kind)
    loss, _ = objective(inputs)
    loss.backward()
    found = [p.grad for p in objective.parameters() if p.grad is not None]
    return float(loss.detach()), torch.cat([g.detach().double().cpu().flatten() for g in found])


def restarts(machine: Machine) -> None:
    """Report whether two starts, a captured and a plain one, and a resumed training are the same.

    12 steps of MAE on JPEGs, `deterministic`; the resumed training saved its state after 6.
    """

    class StopsEarly(Context):
        """A context that asks for the end after six steps."""

        step = 0

        def report(self, progress: dict[str, Any], /) -> None:
            self.step = progress["step"]

        def stop_requested(self) -> bool:
            return self.step + 1 >= 6

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    shards = photographs(machine)
    stage, encoder = stage_and_encoder(machine, "mae", "base", 16, epochs=2)
    stage = stage.model_copy(update={"batch_size": 16})
    folder = Path(tempfile.mkdtemp(dir=machine.work))

    def trained(name: str, context: type[Context] = Context, **how: Any) -> Any:
        run = RunInputs(
            folder / name, shards, stage, encoder, 0,
            computing=Computing(deterministic=True, **how),
        )  # fmt: skip
        train(context(cpus(), machine.cuda), run)
        file = run.folder / "encoder.safetensors"
        return load_file(file) if file.exists() else None

    def apart(one: Any, other: Any) -> float:
        return max(float((one[k] - other[k]).abs().max()) for k in one)

    whole, again = trained("whole"), trained("again")
    trained("broken", StopsEarly)
    resumed = trained("broken")
    plain = trained("plain", cuda_graphs=False)
    values = {"twice": apart(whole, again), "resumed": apart(whole, resumed)}
    values["captured_and_not"] = apart(whole, plain)
    say("restarts", holds=values["twice"] == values["resumed"] == 0, largest_difference=values)


def photographs(machine: Machine) -> Path:
    """Return shards of 96 JPEGs with ImageNet's sizes and bytes, in ten classes."""
    out, count = machine.work / "photographs", 32 if machine.small else 96
    if not (out / "shards" / "index.json").exists():
        write_folder(out / "images", count)
        shard(out / "images", out / "shards", "folder", 1, threads=cpus())
    return out / "shards"


def beside(machine: Machine, recipe: str) -> None:
    """Compare losses with inputs made beside the step before, and without: the same bits.

    The device begins each step late. Meanwhile inputs are made of other batches, all at once: they
    take whatever memory the inputs of this step do not hold.
    """
    steps, late = 3, 10**9  # clock cycles
    stage, encoder = stage_and_encoder(machine, recipe, "base", 64)

    class Losses(Hook):
        def __init__(self, found: list[float]) -> None:
            self.found = found

        def after_step(self, update: Update) -> None:
            self.found.append(update.values["loss"])

    def losses(on_side_stream: bool) -> list[float]:
        machine.free()
        found: list[float] = []
        objective = build(machine, stage, encoder)
        context = Context(cpus(), machine.cuda)
        with unsaved_trainer(stage, objective, context, machine.device, steps) as trainer:
            size = stage.batch_size
            batches = [random_batch(stage, encoder, size, seed) for seed in range(steps)]
            batches = [packed(batch, objective.draw, machine.cuda) for batch in batches]
            prepare = objective.prepare

            def with_others(batch: Any, device: Any) -> Any:
                inputs = prepare(batch, device)
                for other in batches[1:]:
                    prepare(other, device)
                return inputs

            objective.prepare = with_others
            if not on_side_stream:
                trainer._input_stream = None
            elif machine.cuda:
                objective.register_forward_pre_hook(lambda *_: torch.cuda._sleep(late))
            trainer.hooks.append(Losses(found))
            trainer.run(iter(batches))
        return found

    first, second = losses(False), losses(True)
    say(f"inputs beside a step: {recipe}", holds=first == second and len(first) == steps)


def fast(machine: Machine) -> None:
    """Report the speed of MAE in several ways, and where its time goes."""
    join(machine)
    first = ["engine", "engine, compiled", "ZeRO 1, compiled", "loop, blocks compiled"]
    first += ["engine, plain", "loop, plain", "facebookresearch/mae"]
    speed(machine, "mae", "large", 128, first)
    with reported("profile"):
        profiled(machine, "mae", "large", 128, trace=True)
    small = ["engine", "ZeRO 1, compiled", "loop, blocks compiled", "loop, plain"]
    speed(machine, "mae", "large", 32, small)
    speed(machine, "mae", "base", 128, ["engine", "engine, compiled", "loop, blocks compiled"])
    speed(machine, "mae", "micro8", 256, ["engine", "engine, plain", "loop, plain"])


def stages(machine: Machine) -> None:
    """Report the speed of what comes after pre-training."""
    join(machine)
    speed(machine, "ct_min", "large", 128, ["engine", "engine, plain", "loop, blocks compiled"])
    with reported("profile"):
        profiled(machine, "ct_min", "large", 128, trace=False)
    speed(machine, "head_min", "large", 128, ["engine", "engine, plain", "loop, plain"])
    tuned = ["engine", "engine, plain", "engine, compiled, graphs"]
    speed(machine, "fine_tune", "large", 64, tuned)
    speed(machine, "refine", "large", 32, ["engine", "engine, plain"])


def machine_wide(machine: Machine) -> None:
    """Report the speed of features and of the loader, alone and beside steps."""
    with reported("features"):
        features(machine)
    join(machine)
    with reported("loader"):
        loader(machine)


def features(machine: Machine) -> None:
    """Report images a second of ViT-L's features in each precision."""
    stage, encoder = stage_and_encoder(machine, "ct_min", "large", 128)
    build(machine, stage, encoder)
    file = machine.work / f"source-{encoder.width}-{encoder.depth}-{encoder.image_size}"
    count = 16 if machine.small else 256
    shape = (count, 3, encoder.image_size, encoder.image_size)
    images, values = torch.randint(0, 256, shape, dtype=torch.uint8), {}
    for name, precision in (("fp32", "fp32"), ("tf32", "fp32"), ("bf16", "bf16")):
        model = Encoding(file / "encoder.safetensors", machine.device, precision)  # type: ignore[arg-type]
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        values[name] = count / machine.seconds(lambda m=model: m(images), 2)  # type: ignore[misc]
    torch.backends.cuda.matmul.allow_tf32 = False
    say("features: images a second", **values)


def loader(machine: Machine) -> None:
    """Report JPEGs a second, and a step of ViT-B with the loader beside it and without."""
    index = open_index(photographs(machine))
    stage, encoder = stage_and_encoder(machine, "mae", "base", 128)
    steps = 3 if machine.small else 30

    def batches(objective: Any, number: int) -> Iterator[Any]:
        return train_batches(
            index, global_batch=stage.batch_size, rank=0, world_size=1, seed=0,
            views=stage.view_settings(), image_size=encoder.image_size, start_step=0,
            steps=number, threads=cpus(), draw=objective.draw, pinned=machine.cuda,
        )  # fmt: skip

    objective = build(machine, stage, encoder)
    began = time.perf_counter()
    loaded = sum(len(batch.ids) for batch in batches(objective, steps))
    values = {"images_per_second": loaded / (time.perf_counter() - began)}
    stamps: list[float] = []
    context = Context(cpus(), machine.cuda)
    with unsaved_trainer(stage, objective, context, machine.device, 2 * steps + 1) as trainer:
        seconds = sorted(step_seconds(trainer, steps))
        values["step_ms"] = 1e3 * seconds[len(seconds) // 2]

        def stamped() -> Iterator[Any]:
            for batch in batches(objective, steps):
                stamps.append(time.perf_counter())
                yield batch

        trainer.run(stamped())
        machine.wait()
    half = len(stamps) // 2
    spent = (stamps[-1] - stamps[half]) / max(1, len(stamps) - 1 - half)
    values["step_with_loader_ms"] = 1e3 * spent
    say("loader", decoder=decoder_name(), threads=cpus(), **values)


# ---- a training ----------------------------------------------------------------------------------

COLOURS: dict[str, Any] = {"blur": 0.0, "crop_scale": (0.2, 1.0), "encoder_ema": 0.996}
STAGES = (
    ("mae", "mae", None, 60, {}),
    ("head_aug", "head_aug", "mae", 8, {"blur": 0.0}),
    ("ct_aug", "ct_aug", "head_aug", 25, COLOURS),
    ("head_min", "head_min", "mae", 8, {}),
    ("ct_min", "ct_min", "head_min", 10, {"encoder_ema": 0.996}),
)
"""Of CIFAR-10: name, recipe, the run that it starts from, epochs, and settings as in
workflow/experiments/cifar10.yaml. The average of the encoder reaches back over as many images as
the recipe's 0.999 with batches of 512."""
CONTROL = (("ct_aug_no_lookup", "ct_aug", "head_aug", 25, {**COLOURS, "head": {"lookup": "none"}}),)
"""Tuning with colours whose positive is the other view of the image itself."""
LONGER = (
    ("mae_100", "mae", None, 100, {}),
    ("head_aug_100", "head_aug", "mae_100", 8, {"blur": 0.0}),
    ("ct_aug_100", "ct_aug", "head_aug_100", 25, COLOURS),
)
"""The longer MAE of the record, tuned with colours."""
BATCH = 2048


def train_all(machine: Machine, stages: Sequence[tuple[Any, ...]]) -> None:
    """Train on CIFAR-10 and evaluate, one stage after the other."""
    splits = cifar10_shards(machine)
    for name, recipe, source, epochs, changes in stages:
        with reported(f"cifar10: {name}"):
            train_and_evaluate(machine, splits, name, recipe, source, epochs, changes)


def cifar10_shards(machine: Machine) -> dict[str, Path]:
    """Return shards of both splits; without the archive, of drawn shapes."""
    began, out = time.perf_counter(), {}
    images = machine.work / "cifar10"
    if not images.exists():
        if machine.images is None or machine.small:
            for split, first in (("train", 0), ("test", 10_000)):
                draw_shapes(images / split, first, 60 if machine.small else 5000)
        else:
            with tarfile.open(machine.images) as archive:
                archive.extractall(machine.work / "unpacked", filter="data")
            (train,) = (machine.work / "unpacked").rglob("train")
            train.parent.rename(images)
    for split in ("train", "test"):
        out[split] = machine.work / f"cifar10-{split}"
        if not (out[split] / "index.json").exists():
            shard(images / split, out[split], "folder", 1, threads=cpus())
    say("cifar10: shards", seconds=time.perf_counter() - began)
    return out


def draw_shapes(out: Path, first: int, count: int) -> None:
    """Draw shapes, sorted by which of them has most of an image."""
    for number in range(first, first + count):
        image, mask = draw(number)
        kind = CLASSES[1 + int(np.bincount(mask.ravel(), minlength=6)[2:].argmax())]
        (out / kind).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(out / kind / f"{number:05d}.png")


def train_and_evaluate(
    machine: Machine, splits: dict[str, Path], name: str, recipe: str, source: str | None,
    epochs: int, changes: dict[str, Any],
) -> None:  # fmt: skip
    """Train a stage, and report its losses, its time and what its encoder is worth."""
    size, batch = ("tiny8", 32) if machine.small else ("small", BATCH)
    stage = load_recipe(recipe, size, {"epochs": 1 if machine.small else epochs, **changes})
    stage, encoder = stage.model_copy(update={"batch_size": batch}), load_encoder(size)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    runs, began = machine.work / "runs", time.perf_counter()
    run = RunInputs(
        runs / name, splits["train"], stage, encoder, 0, runs / source if source else None,
        resize=encoder.image_size,
    )  # fmt: skip
    train(Context(cpus(), machine.cuda), run, save_every_minutes=1.0)
    spent = time.perf_counter() - began
    log = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    curve = [(line["epoch"], line["loss"]) for line in log if "loss" in line]
    values: dict[str, Any] = {"curve": curve[:: max(1, len(curve) // 20)]}
    if stage.trains_encoder:
        values |= quality(machine, run.folder / "encoder.safetensors", splits, encoder.image_size)
    say(f"cifar10: {name}", epochs=stage.epochs, seconds=spent, **values)


def quality(
    machine: Machine, encoder: Path, splits: dict[str, Path], resize: int
) -> dict[str, float]:
    """Return k-NN, a linear classifier and clusters of the test images, in percent."""
    context = Context(cpus(), machine.cuda)
    files = {split: encoder.parent / f"{split}.safetensors" for split in splits}
    for split, shards in splits.items():
        extract(context, encoder=encoder, shards=shards, out=files[split], resize=resize)
    train, test = map(open_features, files.values())
    pair, scale = (min(KNN_K, train.n), KNN_TEMPERATURE), moments(train.values)
    found: dict[str, float] = {}
    for key, by in (("knn", None), ("knn_standardized", partial(standardize, scale=scale))):
        votes = votes_by_setting(train.values, train.labels, test.values, [pair], by, cpus())[pair]
        found[key] = 100 * float(np.mean(votes == test.labels))
    rows = [torch.from_numpy(standardize(part.values, scale)).float() for part in (train, test)]
    x, y = (part.to(machine.device) for part in rows)
    labels = torch.from_numpy(train.labels).to(machine.device)
    layer = torch.nn.Linear(x.shape[1], train.classes).to(machine.device)
    search = torch.optim.LBFGS(layer.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Any:
        search.zero_grad()
        value = F.cross_entropy(layer(x), labels) + 1e-4 * layer.weight.square().sum()
        value.backward()
        return value

    search.step(loss)
    predicted = layer(y).argmax(1).cpu().numpy()
    found["linear"] = 100 * float(np.mean(predicted == test.labels))
    clusters = KMeans(test.classes, n_init=3, random_state=0).fit_predict(rows[1].numpy())
    return found | {f"cluster_{k}": v for k, v in scores(test.labels, clusters).items()}


def huge(machine: Machine) -> None:
    """Report the speed and memory of MAE ViT-H/14."""
    join(machine)
    speed(machine, "mae", "huge14", 64, ["engine, plain", "engine"])


FUNCTIONS: dict[str, Callable[[Machine], None]] = {
    "correct": correct,
    "fast": fast,
    "cifar10": partial(train_all, stages=STAGES),
    "stages": stages,
    "machine": machine_wide,
    "control": partial(train_all, stages=CONTROL),
    "longer": partial(train_all, stages=LONGER),
    "huge": huge,
}


def main() -> None:
    """Do the part that is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=[*FUNCTIONS])
    for option in ("--out", "--work", "--images"):
        parser.add_argument(option, type=Path)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    small = options.small or device.type == "cpu"
    FUNCTIONS[options.name](Machine(device, small, options.work, options.out, options.images))


if __name__ == "__main__":
    main()
