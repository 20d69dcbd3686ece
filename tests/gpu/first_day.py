"""What has to hold on a GPU, and what nobody can know without one: the first thing to run there.

    python -u tests/gpu/first_day.py --out FOLDER [--packages FOLDER] [--only 0,5]

Every check is a process with its own limit and one line of JSON. `report.json` is written after
each of them, and all logs are in `log.txt`; a table comes last. The exit status is 1 if a check
fails that must hold. No check begins that may not end within `--seconds` (540). Nothing is
downloaded: images are made here, and packages that the machine lacks are carried along
(docs/gpu.md). On a CPU, and with `--small`, shapes are tiny; what needs a GPU says so.

`hour.py` runs all of this and more, in calls of nine minutes.
"""

import argparse
import ctypes
import gc
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "benchmarks"), str(Path(__file__).parent)]
from maect.core.context import Context  # noqa: E402

SECONDS = 540
START = 45
"""Seconds for the start of a process."""
LIMIT_FACTOR = 2
"""How much longer than planned a check may take, beside its start."""
SLOWLY = 600
"""Seconds that a check may take on a CPU."""
MIB = 2**20


@dataclass
class Here:
    """Where a check runs.

    Attributes:
        device: of torch.
        small: tiny shapes: to see that the script works.
        folder: of this check alone.
        out: what comes back of this machine; few files.
        built: folder of models that all checks share; None: each builds its own.
    """

    device: Any
    small: bool
    folder: Path
    out: Path | None = None
    built: Path | None = None

    @property
    def cuda(self) -> bool:
        """Whether it is a GPU."""
        return bool(self.device.type == "cuda")

    def size(self, name: str) -> str:
        """A size of encoder, or the tiny one."""
        return "tiny" if self.small else name


@dataclass
class Outcome:
    """What a check found.

    Attributes:
        values: numbers for the report.
        must: what has to hold, and whether it does.
        should: what was expected, and whether it is so.
    """

    values: dict[str, Any]
    must: dict[str, bool] = field(default_factory=dict)
    should: dict[str, bool] = field(default_factory=dict)


class Needs(Exception):
    """This machine lacks something; the text says what."""


class Alone(Context):
    """The context of a rank that nobody watches; may be told to stop after a step."""

    cpus = len(os.sched_getaffinity(0))

    def __init__(
        self, rank: int = 0, ranks: int = 1, gpus: bool = False, meeting: str = "", stop_at: int = 0
    ) -> None:
        super().__init__(self.cpus, gpus)
        self.rank, self.world_size, self.local_world_size = rank, ranks, ranks
        self._meeting, self._stop_at, self._step = meeting, stop_at, 0

    def stop_requested(self) -> bool:
        return bool(self._stop_at) and self._step + 1 >= self._stop_at

    def report(self, progress: dict[str, Any], /) -> None:
        self._step = progress["step"]

    def store(self, timeout: timedelta, /) -> Any:
        from torch.distributed import FileStore

        if not self._meeting:
            return super().store(timeout)
        return FileStore(self._meeting, self.world_size)


def join(here: Here) -> None:
    """A process group of one rank, as a training has it."""
    from maect.train.engine import start

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    here.device = start(Alone(gpus=here.cuda))


def wait(here: Here) -> None:
    """Until the device has nothing left to do."""
    import torch

    if here.cuda:
        torch.cuda.synchronize()


def seconds(here: Here, action: Callable[[], Any], rounds: int = 5) -> float:
    """The shortest of some rounds, after one that does not count."""
    times = []
    for _ in range(rounds + 1):
        wait(here)
        began = time.perf_counter()
        action()
        wait(here)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def stage_of(here: Here, recipe: str, size: str, batch: int, **changes: Any) -> tuple[Any, Any]:
    """Settings of a stage with another batch, and its encoder."""
    from maect.recipes import load_encoder
    from maect.stages import load_recipe
    from maect.stages.fine_tune import FineTune

    size = here.size(size)
    if recipe == "fine_tune":
        if find_spec("scipy") is None:  # which mixing draws with
            changes = {"mixup": 0, "cutmix": 0, **changes}
        stage: Any = FineTune.model_validate(changes)
    else:
        stage = load_recipe(recipe, size, changes)
    return stage.model_copy(update={"batch_size": batch}), load_encoder(size)


@contextmanager
def quick_weights() -> Iterator[None]:
    """Initial values on the CPU come from a million that are drawn once: the same in every process.

    Drawing those of ViT-L takes a thread ten seconds, and a dozen models are built.
    """
    import torch

    noise = torch.Generator().manual_seed(0)
    pools = {
        "normal_": torch.randn(1_000_003, generator=noise),
        "uniform_": torch.rand(1_000_003, generator=noise),
    }
    before = {name: getattr(torch.Tensor, name) for name in pools}

    def quick(name: str, first: float, second: float) -> Callable[..., Any]:
        def fill(x: Any, a: float = first, b: float = second, *, generator: Any = None) -> Any:
            if x.device.type != "cpu" or generator is not None or not x.is_floating_point():
                return before[name](x, a, b, generator=generator)
            scale = b if name == "normal_" else b - a
            pool = pools[name].mul(scale).add_(a)
            with torch.no_grad():
                return x.copy_(pool.repeat(-(-x.numel() // len(pool)))[: x.numel()].view(x.shape))

        return fill

    try:
        for name, numbers in {"normal_": (0.0, 1.0), "uniform_": (0.0, 1.0)}.items():
            setattr(torch.Tensor, name, quick(name, *numbers))
        yield
    finally:
        for name, method in before.items():
            setattr(torch.Tensor, name, method)


def objective_of(stage: Any, encoder: Any, classes: int = 10, built: Path | None = None) -> Any:
    """A stage's objective on the CPU, with weights of no value, the same at every start.

    Args:
        stage: its settings.
        encoder: its shape.
        classes: of labels.
        built: folder of what was built before by any process: each size once. None: built anew.
    """
    import torch

    from maect.models.vit import build_encoder, seeded
    from maect.models.weights import save_encoder

    if built is not None:
        of_a_step = {"batch_size", "compile", "attention", "deterministic"}
        told = stage.model_dump_json(exclude=of_a_step) + encoder.model_dump_json()
        file = built / f"{stage.name}-{zlib.crc32(told.encode()):08x}.pt"
        if not file.exists():
            built.mkdir(parents=True, exist_ok=True)
            new = file.with_suffix(".new")
            torch.save(objective_of(stage, encoder, classes), new)
            new.replace(file)
        objective = torch.load(file, mmap=True, weights_only=False)
        objective.stage = stage
        return objective
    with tempfile.TemporaryDirectory() as name, quick_weights():
        source = None
        if stage.starts_from:
            source = Path(name)
            with seeded(0):
                weights = build_encoder(encoder).state_dict()
            save_encoder(source / "encoder.safetensors", weights, encoder, "cls")
        return stage.build(encoder, 0, source, [str(i) for i in range(classes)])


@contextmanager
def trainer_of(
    here: Here, stage: Any, encoder: Any, steps: int, context: Any = None, how: Any = None
) -> Iterator[Any]:
    """A trainer around a new engine that saves nothing."""
    from maect.recipes.computing import Computing
    from maect.train.timing import trainer_alone

    how = how or Computing(compile=False)
    objective = objective_of(stage, encoder, built=here.built)
    with trainer_alone(stage, objective, context or Alone(), here.device, steps, how) as trainer:
        yield trainer


def step_times(here: Here, stage: Any, encoder: Any, steps: int, **how: Any) -> dict[str, float]:
    """Median seconds of a step of the trainer from batches on the CPU, the first one, memory."""
    import torch

    from maect.recipes.computing import Computing
    from maect.train.timing import step_seconds

    if here.cuda:
        gc.collect()  # engines before this one are held in circles
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with trainer_of(
        here, stage, encoder, steps, how=Computing(**{"compile": False} | how)
    ) as trainer:
        if trainer.engine.not_compiled:
            raise Needs(f"what compiles: {trainer.engine.not_compiled}")
        lengths = step_seconds(trainer, steps)
    warm = sorted(lengths[len(lengths) // 2 :])
    found = {"step_ms": 1e3 * warm[len(warm) // 2], "first_s": lengths[0]}
    if here.cuda:
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.empty_cache()
    return found


# --- The checks, numbered as in docs/gpu.md -------------------------------------------------------


def environment(here: Here) -> Outcome:
    """Versions, driver, architectures, memory."""
    import platform

    import torch

    from maect.core.distributed import driver
    from maect.train.engine import start  # before DeepSpeed, which chooses its device once

    assert start
    if not here.cuda:
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    values: dict[str, Any] = {
        "python": platform.python_version(), "torch": torch.__version__,
        "deepspeed": deepspeed.__version__, "accelerator": type(get_accelerator()).__name__,
        "cpus": Alone.cpus, "gpus": torch.cuda.device_count(), "cuda": torch.version.cuda,
        "compiled_for": torch.cuda.get_arch_list(),
    }  # fmt: skip
    if not here.cuda:
        return Outcome(values)
    major, minor = torch.cuda.get_device_capability()
    free, total = torch.cuda.mem_get_info()
    values |= {
        "device": torch.cuda.get_device_name(), "capability": f"{major}.{minor}",
        "driver": driver(), "nccl": torch.cuda.nccl.version(),
        "bf16": torch.cuda.is_bf16_supported(), "free_gib": free / 2**30, "gib": total / 2**30,
    }  # fmt: skip
    # Kernels for a GPU run on later ones of its generation.
    names = [f"sm_{major}{older}" for older in range(minor + 1)]
    known = any(name in values["compiled_for"] for name in names)
    return Outcome(
        values,
        must={"bf16": values["bf16"], "compiled for it": known},
        should={"deepspeed computes on it": "CUDA" in values["accelerator"].upper()},
    )


ONE_VISIBLE = """
import sys; sys.path[:0] = {path!r}
import os
import torch
from first_day import Alone
from maect.core.distributed import device_of
from maect.stages import load_recipe
from maect.train.engine import Engine, start
os.environ.update(RANK="0", LOCAL_RANK="3", WORLD_SIZE="1")
rank = Alone(gpus={gpus})
rank.local_rank = 3
chosen = device_of(rank)
rank.local_rank = 0  # whoever joins alone is the first of its node
device = start(rank)
assert device == chosen
layer = torch.nn.Linear(8, 8).to(device)
group = {{"params": list(layer.parameters()), "peak_lr": 1e-3, "weight_decay": 0.0}}
engine = Engine(layer, load_recipe("mae", "base", {{"batch_size": 4}}), [group], device)
engine.backward(engine(torch.ones(2, 8, device=device)).sum())
engine.step(1.0)
print("trains on", device)
"""


def device_choice(here: Here) -> Outcome:
    """A rank that sees one GPU and has local rank 3 trains; without a usable GPU it refuses."""
    import torch

    def run(gpus: bool, **environment: str) -> list[str]:
        code = ONE_VISIBLE.format(path=sys.path[:3], gpus=gpus)
        kept = {k: v for k, v in os.environ.items() if k != "DS_ACCELERATOR"}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=kept | environment
        )
        return [*done.stdout.splitlines(), *done.stderr.splitlines()]

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    trains = run(here.cuda, CUDA_VISIBLE_DEVICES=visible if here.cuda else "")
    refuses = run(True, CUDA_VISIBLE_DEVICES="")
    expected = torch.device("cuda", 0) if here.cuda else torch.device("cpu")
    return Outcome(
        {"one_visible": trains[-1:], "none_usable": refuses[-1:]},
        must={
            "trains where it sees one": f"trains on {expected}" in trains,
            "refuses without": any("the job was given GPUs" in line for line in refuses),
        },
    )


def gradients(objective: Any, batch: Any, device: Any, kind: Any) -> tuple[float, Any]:
    """Loss, and gradients as one float64 vector on the CPU."""
    import torch

    objective.to(device, kind)
    inputs = objective.prepare(batch, device)
    groups = inputs.images
    if isinstance(groups, tuple):
        inputs.images = tuple(group.to(kind) for group in groups)
    else:
        inputs.images = groups.to(kind)
    for buffer in objective.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(kind)
    loss, _ = objective(inputs)
    loss.backward()
    found = [p.grad for p in objective.parameters() if p.grad is not None]
    return float(loss.detach()), torch.cat([g.detach().double().cpu().flatten() for g in found])


def numerics(here: Here) -> Outcome:
    """Losses and gradients: float32 here against float64 on the CPU, bfloat16 against float32."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from maect.train.noise import random_batch

    torch.set_num_threads(Alone.cpus)
    seen: set[str] = set()

    class Types(TorchDispatchMode):
        """Notes what lookups and losses are computed in."""

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            if function.name() in ("aten::topk", "aten::argmax", "aten::_log_softmax"):
                seen.add(f"{function.name()} {args[0].dtype}")
            return function(*args, **(kwargs or {}))

    values: dict[str, Any] = {}
    must: dict[str, bool] = {}
    for recipe in ("mae", "ct_min", "fine_tune"):
        found = {}
        # A classifier computes in float32 whatever it is given: there only the device differs.
        best = torch.float32 if recipe == "fine_tune" else torch.float64
        for name, kind, device, precision in (
            ("exact", best, torch.device("cpu"), "fp32"),
            ("float32", torch.float32, here.device, "fp32"),
            ("bfloat16", torch.float32, here.device, "bf16"),
        ):
            stage, encoder = stage_of(here, recipe, "base", 8, precision=precision)
            if not here.small:
                encoder = encoder.model_copy(update={"depth": 4, "decoder_depth": 2})
                stage = stage.model_copy(update={"frozen_blocks": 2} if recipe == "ct_min" else {})
            if recipe == "ct_min":
                head = stage.head.model_copy(update={"queue_size": 1024})
                stage = stage.model_copy(update={"head": head})
            objective = objective_of(stage, encoder)
            with Types() if name == "bfloat16" else nullcontext():
                found[name] = gradients(objective, random_batch(stage, encoder, 8), device, kind)
        for name, exact, loss_limit, limit in (
            ("float32", "exact", 1e-5, 1e-4), ("bfloat16", "float32", 1e-2, 1e-1),
        ):  # fmt: skip
            loss, gradient = found[name]
            expected, direction = found[exact]
            off = abs(loss / expected - 1)
            turned = float((gradient - direction).norm() / direction.norm())
            values[f"{recipe} {name}"] = {"loss": off, "gradient": turned}
            # A lookup may take another of two equal neighbours: what follows from it is no fault.
            if not (recipe == "ct_min" and name == "bfloat16"):
                must[f"{recipe} {name}"] = off <= loss_limit and turned <= limit
    values["computed in"] = sorted(seen)
    must["lookups and losses in float32"] = all("float32" in entry for entry in seen)
    return Outcome(values, must)


def packing(here: Here, shape: tuple[int, int, int, int]) -> dict[str, Any]:
    """Seconds of attention from packed values to their one gradient, and how the two ways differ.

    Args:
        here: a GPU.
        shape: images, tokens, heads, values of a head.
    """
    import torch

    from maect.models.attention import attend, packed_attention

    b, n, heads, width = shape
    qkv = torch.randn(b, n, 3, heads, width, device=here.device, dtype=torch.bfloat16)
    qkv.requires_grad_()
    weights = torch.randn(b, n, heads, width, device=here.device, dtype=torch.bfloat16)
    found: dict[str, Any] = {}
    gradients = []
    for name, way in (("stacked", attend), ("packed", packed_attention)):

        def both(way: Any = way) -> None:
            qkv.grad = None
            (way(qkv) * weights).sum().backward()

        try:
            found[name] = seconds(here, both)
        except (RuntimeError, TypeError) as error:
            return found | {name: str(error).splitlines()[0]}
        gradients.append(qkv.grad.float())
    first, second = gradients
    return found | {"apart": float((first - second).norm() / first.norm())}


def attention(here: Here) -> Outcome:
    """Which kernels attention takes, and what others would cost."""
    import torch
    from torch.nn import functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * here.cuda
    dtype = torch.bfloat16 if here.cuda else torch.float32
    values, names = {}, set()
    # With 64 images the host took longer than a kernel of an H200.
    for width, tokens in ((64, 50), (64, 197), (32, 197), (80, 257)):
        shape = (2 if here.small else 512, 4 if here.small else 16, tokens, width)
        q, k, v = (
            torch.randn(shape, device=here.device, dtype=dtype, requires_grad=True)
            for _ in range(3)
        )

        def both(q: Any = q, k: Any = k, v: Any = v) -> None:
            F.scaled_dot_product_attention(q, k, v).sum().backward()

        with profile(activities=kinds) as seen:
            both()
            wait(here)
        names |= {e.key for e in seen.key_averages() if "attention" in e.key or "fmha" in e.key}
        times = {"chosen": seconds(here, both)}
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION) * here.cuda:
            with sdpa_kernel(backend):
                try:
                    times[backend.name.lower()] = seconds(here, both)
                except RuntimeError as error:
                    times[backend.name.lower()] = str(error).splitlines()[0]  # type: ignore[assignment]
        if here.cuda:
            times |= packing(here, (shape[0], tokens, shape[1], width))  # type: ignore[arg-type]
        values[f"{width} wide, {tokens} tokens"] = times
    values["kernels"] = sorted(names)
    return Outcome(values, must={"no mathematical one": not any("_math" in n for n in names)})


def augmentation(here: Here) -> Outcome:
    """Colours here against those of the CPU, and the same bits twice."""
    import numpy as np
    import torch

    from maect.data.transforms import PAPER, augment
    from maect.recipes import AUGMENTATIONS

    count, side = (8, 32) if here.small else (64, 224)
    noise = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=noise)
    ids, worst, same = np.arange(count), 0.0, True
    spent = {}
    for number, view in enumerate(AUGMENTATIONS["aug"]):
        there = augment(raw, view, number, 0, ids * 0, ids, PAPER)
        moved = raw.to(here.device)
        found = [augment(moved, view, number, 0, ids * 0, ids, PAPER) for _ in range(2)]
        same &= torch.equal(*found)
        worst = max(worst, float((found[0].cpu() - there).abs().max()))
        spent[f"view {number} ms"] = 1e3 * seconds(
            here, lambda v=view, n=number, m=moved: augment(m, v, n, 0, ids * 0, ids, PAPER), 3
        )
    # A value beside the threshold of solarization may fall on its other side: count what is far.
    return Outcome(
        {"largest_difference": worst, **spent},
        must={"same bits": same},
        should={"as on a CPU": worst <= 1e-3},
    )


def audit(here: Here) -> Outcome:
    """Kernels, waits, copies and collectives of a step, and a trace to look at."""
    import torch
    from counting import counted

    from maect.train.noise import random_batch
    from maect.train.timing import packed

    join(here)
    values: dict[str, Any] = {}
    should: dict[str, bool] = {}
    for recipe, most in (("mae", 3000), ("ct_aug", 2500), ("fine_tune", 2600)):
        stage, encoder = stage_of(here, recipe, "large", 8)
        steps = 9  # from 10 on, every tenth checks the embedding, too
        batch = random_batch(stage, encoder, 8)
        with trainer_of(here, stage, encoder, steps + 5) as trainer:
            batch = packed(batch, trainer.objective.draw, here.cuda)
            counts = counted(trainer, [batch] * steps, steps - 1)
            values[recipe] = counts.table()
            if here.cuda:
                trace = here.out / "step.json.gz" if here.out and recipe == "mae" else None
                values[recipe] |= profiled(here, trainer, batch, trace)
        should[f"{recipe}: at most one wait"] = counts.total("waits") <= 1
        should[f"{recipe}: kernels"] = values[recipe].get("launched", 0) <= most
    if here.cuda:
        torch.cuda.empty_cache()
    return Outcome(values, should=should)


def profiled(here: Here, trainer: Any, batch: Any, trace: Path | None) -> dict[str, Any]:
    """Three steps under the profiler and the check of waits."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for number in range(3):
            trainer._update(trainer._compute(batch), trainer.step + number + 2)
        torch.cuda.set_sync_debug_mode("default")
    wait(here)
    places: dict[str, int] = {}
    for warning in said:
        if "synchroniz" in str(warning.message):
            place = f"{Path(warning.filename).name}:{warning.lineno}"
            places[place] = places.get(place, 0) + 1
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        trainer._update(trainer._compute(batch), trainer.step + 5)
        wait(here)
    if trace is not None:
        seen.export_chrome_trace(str(trace))
    events = [e for e in seen.events() if str(e.device_type).endswith("CUDA")]
    copies = sum("Memcpy HtoD" in e.name for e in events)
    pageable = sum("Memcpy HtoD" in e.name and "Pageable" in e.name for e in events)
    kernels = [e for e in events if "Memcpy" not in e.name and "Memset" not in e.name]
    return {
        "launched": len(kernels), "copies_to_device": copies, "pageable": pageable,
        "waits_seen": places,
    }  # fmt: skip


def memory(here: Here) -> Outcome:
    """Bytes that an image and the weights take, against the plan's."""
    if not here.cuda:
        raise Needs("a GPU")
    join(here)
    expected = {"mae": 151, "ct_min": 173, "fine_tune": 170, "fine_tune, checkpointing": 24}
    values, should = {}, {}
    for name, mib in expected.items():
        recipe, _, saving = name.partition(", ")
        peaks = []
        for batch in (16, 32):
            changes = {"activation_checkpointing": True} if saving else {}
            stage, encoder = stage_of(here, recipe, "large", batch)
            peaks.append(step_times(here, stage, encoder, 2, **changes)["peak_gib"] * 1024)
        slope = (peaks[1] - peaks[0]) / 16
        values[name] = {"mib_an_image": slope, "mib_without": peaks[0] - 16 * slope, "plan": mib}
        should[name] = here.small or abs(slope / mib - 1) <= 0.1
    return Outcome(values, should=should)


CASES = (
    ("mae", "large", 128),
    ("ct_min", "large", 128),
    ("mae", "base", 128),
    ("mae", "large", 64),
)
BY_HAND = "as in facebookresearch/mae"


def times_by_hand(here: Here, stage: Any, encoder: Any, steps: int) -> dict[str, float]:
    """Median step as facebookresearch/mae writes it, and memory."""
    from training import PlainLoop, peak_memory

    objective = objective_of(stage, encoder, built=here.built)
    loop = PlainLoop(stage, encoder, here.device, explicit=True, objective=objective)
    for _ in range(steps):
        loop.step()
    warm = sorted(loop.seconds[steps // 2 :])
    found = {"step_ms": 1e3 * warm[len(warm) // 2]}
    return found | ({"peak_gib": peak_memory(here.device) / 2**30} if here.cuda else {})


def speed_of(here: Here, recipe: str, size: str, batch: int, how: str) -> dict[str, float]:
    """Step, memory and model FLOP utilisation from batches on the CPU."""
    import torch

    from maect.core.distributed import be_deterministic
    from maect.recipes.flops import peak_flops

    if how == "deterministic":
        be_deterministic()
    join(here)
    batch, steps = (8, 4) if here.small else (batch, 12)
    changes = {"compile": "compiled" in how, "attention": "packed" if "packed" in how else "sdpa"}
    stage, encoder = stage_of(here, recipe, size, batch)
    if how == BY_HAND:
        found = times_by_hand(here, stage, encoder, steps)
    else:
        found = step_times(here, stage, encoder, steps, **changes)
    found["images_per_second"] = batch / found["step_ms"] * 1e3
    flops = stage.flops_per_image(encoder) * found["images_per_second"]
    found["tflops"] = flops / 1e12
    peak = peak_flops(torch.cuda.get_device_name()) if here.cuda else None
    return found | ({"mfu": flops / peak} if peak else {})


def speed(here: Here) -> Outcome:
    """Model FLOP utilisation, plain and compiled; `hour.py` has more ways, each by itself."""
    values: dict[str, Any] = {}
    should: dict[str, bool] = {}
    for recipe, size, batch in CASES[: 2 if here.small else None]:
        case, rates = f"{recipe} {size} {batch}", {}
        for how in ("plain", "compiled") if here.cuda else ("plain",):
            try:
                found = speed_of(here, recipe, size, batch, how)
            except Needs as needs:
                values[f"{case}, {how}"] = f"needs {needs}"
                continue
            values[f"{case}, {how}"], rates[how] = found, found["images_per_second"]
            if "mfu" in found:
                should[f"{case} {how}: 28 %"] = found["mfu"] >= 0.28
        if "compiled" in rates and not here.small:
            should[f"{case}: 1.05 compiled"] = rates["compiled"] >= 1.05 * rates["plain"]
    return Outcome(values, should=should)


def compilation(here: Here) -> Outcome:
    """Graphs, breaks, recompilations and the time of the first step."""
    import torch

    join(here)
    stage, encoder = stage_of(here, "mae", "base", 8)
    torch._dynamo.utils.counters.clear()
    found = step_times(here, stage, encoder, 3, compile=True)
    counters = torch._dynamo.utils.counters
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    values = {"graphs": graphs, "breaks": breaks, **found}
    return Outcome(
        values,
        should={
            "no breaks": not breaks, "few graphs": graphs <= 5, "first step": found["first_s"] <= 90
        },
    )  # fmt: skip


def jpegs(folder: Path, count: int, side: int) -> Path:
    """Shards of smooth noise as JPEGs, in ten classes."""
    import numpy as np
    from PIL import Image

    from maect.data.shards import shard

    random = np.random.default_rng(0)
    for number in range(count):
        file = folder / "images" / str(number % 10) / f"{number:04d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        coarse = random.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        size = (side * 4 // 3, side)
        Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(file, quality=95)
    shard(folder / "images", folder / "shards", "folder", 1)
    return folder / "shards"


def trained(here: Here, name: str, shards: Path, size: str, stop_at: int = 0) -> Path:
    """A training of MAE of 12 steps on 96 images, or the rest of one."""
    from maect.train.trainer import RunInputs, train

    stage, encoder = stage_of(here, "mae", size, 16)
    stage = stage.model_copy(update={"epochs": 2})
    folder = here.folder / name
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    train(Alone(gpus=here.cuda, stop_at=stop_at), RunInputs(folder, shards, stage, encoder, 0))
    return folder


def apart(one: Path, other: Path) -> float:
    """Largest difference of two runs' encoders, relative to each tensor's largest value."""
    from safetensors.torch import load_file

    a, b = (load_file(folder / "encoder.safetensors") for folder in (one, other))
    return max(float((a[k] - b[k]).abs().max() / b[k].abs().max().clamp(min=1e-12)) for k in a)


def resume(here: Here) -> Outcome:
    """12 steps at once against 6, a state and 6; and two at once against each other."""
    values, same = {}, {}
    shards = jpegs(here.folder, 96, 64 if here.small else 256)
    for size in ("tiny",) if here.small else ("tiny", "base"):
        whole = trained(here, f"{size}-whole", shards, size)
        again = trained(here, f"{size}-again", shards, size)
        trained(here, f"{size}-broken", shards, size, stop_at=6)
        broken = trained(here, f"{size}-broken", shards, size)
        plain, resumed = apart(whole, again), apart(whole, broken)
        values[size] = {"twice": plain, "resumed": resumed}
        same[size] = resumed <= max(plain, 1e-5 if here.cuda else 0.0)
    # Where kernels add in any order, weights without a gradient differ by chance (`same_bits`).
    return Outcome(values, should=same) if here.cuda else Outcome(values, same)


ANEW = """
import sys; sys.path[:0] = {path!r}
from first_day import leave_weights
leave_weights({device!r}, {small}, {out!r})
"""


def leave_weights(kind: str, small: bool, out: str) -> None:
    """Write the weights of each stage after four steps, computed as it is by default."""
    import torch

    from maect.core.distributed import be_deterministic
    from maect.recipes.computing import Computing
    from maect.train.noise import random_batch
    from maect.train.timing import packed

    if kind == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        torch.set_num_threads(max(1, Alone.cpus))
    be_deterministic()
    here = Here(torch.device(kind), small, Path(out).parent)
    join(here)
    found = {}
    for recipe in ("mae", "head_min", "ct_aug", "fine_tune"):
        stage, encoder = stage_of(here, recipe, "base", 16)
        with trainer_of(here, stage, encoder, 4, how=Computing()) as trainer:
            batch = random_batch(stage, encoder, 16)
            batch = packed(batch, trainer.objective.draw, here.cuda)
            trainer.run(iter([batch] * 4))
            weights = [p.detach().flatten() for p in trainer.objective.parameters()]
            found[recipe] = torch.cat(weights).cpu()
    torch.save(found, out)


def same_bits(here: Here) -> Outcome:
    """Two starts of each stage with `deterministic: true`, each compiling anew, bit for bit."""
    import torch

    left = []
    for name in ("first", "second"):
        out = here.folder / name
        code = ANEW.format(
            path=sys.path[:3], device=here.device.type, small=here.small, out=str(out)
        )
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{out}.graphs", "TRITON_CACHE_DIR": f"{out}.kernels"}
        subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, **caches})
        left.append(torch.load(out, weights_only=True))
    first, second = left
    return Outcome(
        {}, must={recipe: torch.equal(first[recipe], second[recipe]) for recipe in first}
    )


def beside(here: Here) -> Outcome:
    """Losses with inputs made beside the step before, and without: the same bits.

    The GPU begins each step late. Meanwhile inputs are made of other batches, all at once: they
    take whatever memory the inputs of this step do not hold.
    """
    import torch

    from maect.core.distributed import be_deterministic
    from maect.train.noise import random_batch
    from maect.train.timing import packed

    be_deterministic()
    join(here)
    count, steps, others, late = (8, 3, 1, 0) if here.small else (128, 5, 3, 10**9)  # clock cycles

    def losses(stage: Any, encoder: Any, on_side_stream: bool) -> list[float]:
        found: list[float] = []
        with trainer_of(here, stage, encoder, steps) as trainer:
            objective = trainer.objective
            prepare = objective.prepare

            def with_others(batch: Any, device: Any) -> Any:
                inputs = prepare(batch, device)
                more = [prepare(other, device) for other in batches[:others]]
                del more
                return inputs

            batches = [random_batch(stage, encoder, count, seed) for seed in range(steps)]
            batches = [packed(batch, objective.draw, here.cuda) for batch in batches]
            objective.prepare = with_others
            if not on_side_stream:
                trainer._beside = None
            elif late and here.cuda:
                objective.register_forward_pre_hook(lambda *_: torch.cuda._sleep(late))
            trainer._log = lambda values, norm, always=False: found.append(values["loss"])
            trainer.run(iter(batches))
        return found

    values, must = {}, {}
    for recipe in ("mae", "ct_aug", "refine", "fine_tune"):
        stage, encoder = stage_of(here, recipe, "base", count)
        values[recipe] = [
            losses(stage, encoder, on_side_stream) for on_side_stream in (False, True)
        ]
        must[recipe] = values[recipe][0] == values[recipe][1] and len(values[recipe][1]) == steps
    return Outcome(values, must)


def leak(here: Here) -> Outcome:
    """Memory after each of four fine-tunings in a row."""
    import torch

    join(here)

    def live() -> int:
        gc.collect()
        if here.cuda:
            return torch.cuda.memory_allocated()
        tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
        storages = {x.untyped_storage() for x in tensors if x.device.type != "meta"}
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    seen = []
    for _ in range(4):
        stage, encoder = stage_of(here, "fine_tune", "base", 8)
        step_times(here, stage, encoder, 3)
        seen.append(live() / MIB)
    return Outcome({"mib": seen}, must={"none kept": seen[-1] - seen[0] < 20})


def too_large(here: Here) -> Outcome:
    """What a job says whose GPU is too small."""
    if not here.cuda:
        raise Needs("a GPU")
    from maect.core.errors import UserError
    from maect.stages.run import RunConfig, train

    shards = jpegs(here.folder, 1024, 64)
    stage, encoder = stage_of(here, "mae", "huge14", 1024)
    folder = here.folder / "huge"
    folder.mkdir()
    RunConfig(
        run="huge", stage=stage.name, size="huge14", shards=shards, encoder=encoder, settings=stage
    ).write(folder / "config.yaml")
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    began, message = time.perf_counter(), "it fits"
    try:
        train(Alone(gpus=True), config=folder / "config.yaml")
    except UserError as error:
        message = str(error)
    took = time.perf_counter() - began
    return Outcome(
        {"message": message, "seconds": took},
        must={"one line": "out of GPU memory with 1024 images" in message},
        should={"soon": took < 40},
    )


def saving(here: Here) -> Outcome:
    """How long a save holds the steps up, and how long it takes beside them."""
    from maect.core.distributed import barrier
    from maect.train.checkpoint import Saver, saved, snapshot
    from maect.train.noise import random_batch
    from maect.train.run_lock import RunLock

    join(here)
    stage, encoder = stage_of(here, "mae", "large", 8)
    batch = random_batch(stage, encoder, 8)
    with trainer_of(here, stage, encoder, 1000) as trainer:
        trainer._update(trainer._compute(batch), 1)
        trainer._settle()
        barrier()
        lock = RunLock(here.folder, Alone())
        saver = Saver(here.folder, Alone(), lock)
        wait(here)
        began = time.perf_counter()
        tensors = snapshot(trainer.engine.shards, trainer.objective.saved_buffers())
        saver.save(1, tensors, {})
        stall = time.perf_counter() - began
        steps = 0
        while saver._thread is not None and saver._thread.is_alive() and steps < 500:
            trainer._update(trainer._compute(batch), 2 + steps)
            trainer._settle()
            steps += 1
        saver.wait()
        took = time.perf_counter() - began
    size = sum(t.nbytes for t in tensors.values()) / 2**30
    return Outcome(
        {"gib": size, "stall_s": stall, "all_s": took, "steps_meanwhile": steps},
        must={"saved": bool(saved(here.folder / "state"))},
        should={"stall": stall < 3},
    )


def features(here: Here) -> Outcome:
    """Speed of an encoder's features in each precision, and how far they turn."""
    import torch
    from torch.nn import functional as F

    from maect.evaluate.encoding import Encoding
    from maect.models.vit import build_encoder, seeded
    from maect.models.weights import save_encoder

    _, encoder = stage_of(here, "mae", "large", 1)
    path = here.folder / "encoder.safetensors"
    with seeded(0):
        save_encoder(path, build_encoder(encoder).state_dict(), encoder, "cls")
    count = 16 if here.small else 256
    shape = (count, 3, encoder.image_size, encoder.image_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8)
    found, values, should = {}, {}, {}
    ways: list[tuple[str, Literal["fp32", "bf16"], bool, float]] = [
        ("fp32", "fp32", False, 0.999999), ("tf32", "fp32", True, 0.9999),
        ("bf16", "bf16", False, 0.999),
    ]  # fmt: skip
    for name, precision, tf32, least in ways:
        model = Encoding(path, here.device, precision)
        torch.backends.cuda.matmul.allow_tf32 = tf32
        found[name] = model(images).float().cpu()
        rate = count / seconds(here, lambda m=model: m(images), 2)
        cosine = float(F.cosine_similarity(found[name], found["fp32"]).min())
        values[name] = {"images_per_second": rate, "least_cosine": cosine}
        should[name] = cosine > least
    return Outcome(values, should=should)


def from_loader(
    here: Here, index: Any, stage: Any, encoder: Any, steps: int, draw: Any
) -> Iterator[Any]:
    """So many batches of a training on this machine."""
    from maect.data.loader import train_batches

    return train_batches(
        index, global_batch=stage.batch_size, rank=0, world_size=1, seed=0,
        views=stage.view_settings(), image_size=encoder.image_size, start_step=0, steps=steps,
        threads=Alone.cpus, draw=draw, pinned=here.cuda,
    )  # fmt: skip


def step_from_loader(
    here: Here, index: Any, stage: Any, encoder: Any, steps: int, most: float = math.inf
) -> float:
    """Seconds of a training's step with the loader beside it: a mean of the later half.

    Args:
        here: where.
        index: of the images.
        stage: its settings.
        encoder: its shape.
        steps: so many.
        most: seconds after which fewer will do, but four.
    """
    stamps: list[float] = []
    with trainer_of(here, stage, encoder, steps + 1) as trainer:

        def stamped() -> Iterator[Any]:
            draw = trainer.objective.draw
            for batch in from_loader(here, index, stage, encoder, steps, draw):
                stamps.append(time.perf_counter())
                if stamps[-1] - stamps[0] > most and len(stamps) > 4:
                    return
                yield batch

        trainer.run(stamped())
        wait(here)
    half = len(stamps) // 2
    return (stamps[-1] - stamps[half]) / (len(stamps) - 1 - half)


def loading(here: Here) -> Outcome:
    """Photographs through the loader into steps: what it gives, and whether the device waits."""
    from maect.data.decode import decoder_name
    from maect.data.index import open_index

    join(here)
    count, batch = (32, 8) if here.small else (400, 64)
    index = open_index(jpegs(here.folder, count, 64 if here.small else 375))
    stage, encoder = stage_of(here, "mae", "large", batch)
    steps = 3 if here.small else 20
    draw = objective_of(stage, encoder, built=here.built).draw
    began = time.perf_counter()
    loaded = sum(len(b.ids) for b in from_loader(here, index, stage, encoder, steps, draw))
    rate = loaded / (time.perf_counter() - began)
    still = step_times(here, stage, encoder, 8)["step_ms"]
    step = 1e3 * step_from_loader(here, index, stage, encoder, steps)
    return Outcome(
        {
            "decoder": decoder_name(), "threads": Alone.cpus, "images_per_second": rate,
            "step_ms": step, "step_from_memory_ms": still,
        },
        should={"device busy": step <= still / 0.9, "2,000 images/s": here.small or rate >= 2000},
    )  # fmt: skip


RANK = """
import sys; sys.path[:0] = {path!r}
from first_day import two_steps
two_steps({rank}, {ranks}, {meeting!r}, {device!r}, {backend!r}, {out!r}, {small})
"""


def two_steps(
    rank: int, ranks: int, meeting: str, kind: str, backend: str, out: str, small: bool
) -> None:
    """Some steps of contrastive tuning on one of several ranks; rank 0 leaves the weights."""
    import torch
    import torch.distributed as dist

    from maect.train.engine import Engine
    from maect.train.noise import random_batch

    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(ranks))
    if kind == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    own = rank if kind == "cuda" and backend == "nccl" else 0
    device = torch.device(kind, own) if kind == "cuda" else torch.device("cpu")
    os.environ["LOCAL_RANK"] = str(own)
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}  # as `start` does: it would compile one of them
    context = Alone(rank, ranks, meeting=meeting)
    dist.init_process_group(
        backend, store=context.store(timedelta(minutes=1)), rank=rank, world_size=ranks
    )
    here = Here(device, small, Path(out).parent)
    stage, encoder = stage_of(here, "ct_min", "base", 16, precision="fp32")
    objective = objective_of(stage, encoder).to(device)
    engine = Engine(objective, stage, stage.parameter_groups(objective), device)
    batch = random_batch(stage, encoder, 16)
    part = batch.part(slice(rank * 16 // ranks, (rank + 1) * 16 // ranks))
    for _ in range(3):
        loss, _ = engine(objective.prepare(part, device))
        engine.backward(loss)
        engine.step(1e-2)
        objective.after_update(engine.gathered)
    if rank == 0:
        torch.save({k: v.cpu() for k, v in objective.state_dict().items()}, out)
    dist.barrier()


def several_ranks(here: Here) -> Outcome:
    """Two ranks against one: on one GPU over gloo; on two, if they are there, over NCCL, twice."""
    import torch

    def weights(ranks: int, backend: str, name: str) -> Any:
        out = here.folder / name
        commands = [
            RANK.format(
                path=sys.path[:3], rank=rank, ranks=ranks, meeting=str(out) + ".store",
                device=here.device.type, backend=backend, out=str(out), small=here.small,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        jobs = [subprocess.Popen([sys.executable, "-c", c], **pipes) for c in commands]  # type: ignore[call-overload]
        errors = [job.communicate()[1] for job in jobs]
        if any(job.returncode for job in jobs):
            raise RuntimeError("\n".join(error[-600:] for error in errors))
        return torch.load(out, weights_only=True)

    def difference(a: Any, b: Any) -> float:
        # Some biases have no gradient but noise: of keys, and before batch normalisation.
        kinds = [k for k in a if a[k].is_floating_point() and a[k].ndim > 1]
        apart = {k: (a[k].double() - b[k].double()).abs().max() for k in kinds}
        return max(float(apart[k] / b[k].double().abs().max().clamp(min=1e-6)) for k in kinds)

    one = weights(1, "gloo", "one")
    values: dict[str, Any] = {"gloo": difference(weights(2, "gloo", "gloo"), one)}
    must = {"gloo": values["gloo"] <= 1e-3}
    if here.cuda and torch.cuda.device_count() > 1:
        first, second = weights(2, "nccl", "nccl"), weights(2, "nccl", "again")
        values |= {"nccl": difference(first, one), "nccl twice": difference(first, second)}
        must |= {"nccl": values["nccl"] <= 1e-3, "same bits": values["nccl twice"] == 0}
    else:
        values["nccl"] = "needs two GPUs"
    return Outcome(values, must)


CHECKS: list[tuple[Callable[[Here], Outcome], int]] = [
    (environment, 40),
    (device_choice, 25),
    (numerics, 45),
    (attention, 10),
    (augmentation, 20),
    (audit, 45),
    (memory, 60),
    (speed, 120),
    (compilation, 15),
    (resume, 60),
    (leak, 20),
    (too_large, 15),
    (saving, 15),
    (features, 40),
    (loading, 30),
    (several_ranks, 25),
    (same_bits, 60),
    (beside, 60),
]
"""With the seconds that each may be expected to take."""
FIRST = (0, 1, 2, 17, 5, 10, 9, 16, 3, 4, 15, 6, 7, 14, 8, 12, 13, 11)
"""In this order: what must hold, then what is measured."""


def check(number: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run one check in this process."""
    import torch

    torch.manual_seed(0)
    cuda = options.device == "cuda" or (options.device is None and torch.cuda.is_available())
    if not cuda:
        os.environ["DS_ACCELERATOR"] = "cpu"
        torch.set_num_threads(max(1, Alone.cpus))
    function = CHECKS[number][0]
    line: dict[str, Any] = {"check": number, "name": function.__name__}
    with tempfile.TemporaryDirectory() as name:
        device = torch.device("cuda" if cuda else "cpu")
        small = options.small or not cuda
        here = Here(device, small, Path(name), options.out, options.built)
        try:
            found = function(here)
        except Needs as needs:
            return line | {"status": f"needs {needs}"}
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            return line | {"status": "error", "must": True, "error": text[-1500:]}
    failed = [name for name, holds in found.must.items() if not holds]
    missed = [name for name, holds in found.should.items() if not holds]
    status = "failed" if failed else "missed" if missed else "passed"
    return line | {
        "status": status, "must": bool(failed), "failed": failed, "missed": missed,
        "values": found.values,
    }  # fmt: skip


def run(number: int, options: argparse.Namespace, environment: dict[str, str]) -> dict[str, Any]:
    """Run one check in a process of its own."""
    function, planned = CHECKS[number]
    command = [sys.executable, "-u", __file__, "--check", str(number), "--out", str(options.out)]
    command += ["--small"] * options.small
    command += ["--device", options.device] if options.device else []
    line = {"check": number, "name": function.__name__}
    return line | result(command, options.out, environment, limit(planned, options.device))


def limit(planned: float, device: str | None) -> float:
    """Seconds that a check may take, the start of its process included."""
    return SLOWLY if device == "cpu" else START + LIMIT_FACTOR * planned


def result(
    command: list[str], out: Path, environment: dict[str, str], seconds: float
) -> dict[str, Any]:
    """What the last line of a process says, in JSON; its log is added to the others'."""
    began, log = time.perf_counter(), out / "log.txt"
    line: dict[str, Any] = {}
    with open(log, "a") as errors, tempfile.TemporaryFile("w+") as said:
        print(f"--- {' '.join(command[2:])}", file=errors, flush=True)
        start = errors.tell()
        # A file and no pipe: what outlives the process could hold that open.
        job = subprocess.Popen(
            command, stdout=said, stderr=errors, env=environment, process_group=0,
            preexec_fn=end_with_parent,
        )  # fmt: skip
        try:
            job.wait(seconds)
            said.seek(0)
            line = json.loads((said.read().splitlines() or [""])[-1])
        except subprocess.TimeoutExpired:
            line = {"status": "too slow", "must": True}
        except ValueError:
            tail = log.read_bytes()[start:].decode(errors="replace")[-1500:]
            line = {"status": "died", "must": True, "code": job.returncode, "error": tail}
        finally:  # with all that it started, which may compute on the GPU
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    return line | {"seconds": round(time.perf_counter() - began, 1)}


def end_with_parent() -> None:
    """Let this process be killed when the one that started it is gone, however that ended."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def end_with_children() -> None:
    """Let a command that is told to end, end what it started, too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def write(report: Path, lines: list[dict[str, Any]]) -> None:
    """Write the report whole: what is killed meanwhile leaves the one before."""
    new = report.with_suffix(".new")
    new.write_text(json.dumps(lines, indent=1) + "\n")
    new.replace(report)


def surroundings(packages: Path | None, device: str | None) -> dict[str, str]:
    """Environment of a check, as jobs have it."""
    path = [str(packages.resolve())] if packages else []
    path += [str(ROOT)]  # nothing of ours may be installed
    path += [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    found.setdefault("OMP_WAIT_POLICY", "passive")
    found.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    return found | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})


def finite(value: Any) -> Any:
    """The same for JSON, which knows no infinity."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else str(value)
    return value


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the report")
    parser.add_argument("--packages", type=Path, help="folder of packages that are not installed")
    parser.add_argument("--only", help="numbers of checks, with commas between")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="begin no check after so many")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--check", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--built", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.check is not None:
        print(json.dumps(finite(check(options.check, options))), flush=True)
        return 0
    end_with_children()
    environment = surroundings(options.packages, options.device)
    wanted = [int(n) for n in options.only.split(",")] if options.only else list(FIRST)
    began, lines = time.perf_counter(), []
    for number in wanted:
        longest = limit(CHECKS[number][1], "cuda")
        if time.perf_counter() - began + longest > options.seconds and lines:
            name = CHECKS[number][0].__name__
            lines.append({"check": number, "name": name, "status": "not begun: out of time"})
        else:
            lines.append(run(number, options, environment))
        write(options.out / "report.json", lines)
        print(json.dumps(lines[-1]), flush=True)
    print()
    for line in sorted(lines, key=lambda line: int(line["check"])):
        why = ", ".join([*line.get("failed", []), *line.get("missed", [])])
        spent = f"{line.get('seconds', 0):6.1f} s"
        print(f"{line['check']:2d} {line['name']:<14} {spent}  {line['status']:<12} {why}")
    return 1 if any(line.get("must") for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
