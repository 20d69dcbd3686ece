"""Training speed on one device, of each stage and of compared methods (paper, figure 2 and B).

As in the paper a short benchmark: random images, bfloat16, the largest batch that is a power of 2
and fits, extrapolated to the published number of epochs. Stages take the trainer's own steps.
Compared methods are their encoder passes: views that learn, local views, and passes of a momentum
teacher.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from maect.core.context import Context
from maect.core.errors import UserError, memory_fault
from maect.evaluate.base import EvaluationJob
from maect.evaluate.protocols.encoders import Throughput
from maect.models.kernels import mixed_precision
from maect.models.vit import build_encoder
from maect.models.weights import load_encoder_weights
from maect.paper import read_paper
from maect.recipes import Encoder, visible_patches
from maect.recipes.settings import Computing
from maect.stages import Training, load_recipe
from maect.stages.base import SelfSupervised
from maect.train.engine import single_rank_group
from maect.train.objective import Objective
from maect.train.timing import step_seconds, unsaved_trainer

CPU_BATCH = 16
SMALLEST, LARGEST = 8, 1024
MASKED = 0.75
"""Mask ratio of masked tuning (paper, table 3)."""

Times = Callable[[int, int], Sequence[float]]
"""For a batch of this many images: seconds of each of so many steps."""


@dataclass(frozen=True)
class MethodPasses:
    """A method's passes through the encoder, for each image and step."""

    learning: int
    """Global views that are learnt from."""
    local: int
    """Small views, 96 of 224 pixels, that are learnt from."""
    teacher: int
    """Global views that a momentum encoder sees, complete and without gradients."""
    mask_ratio: float = 0.0
    """Share of patches that are left out of the views learnt from."""


@dataclass(frozen=True)
class Published:
    """A model of others as it was trained."""

    architecture: str
    """As tables call it."""
    method: str
    epochs: Mapping[str, int]
    """Of each method, one after the other; `mae` is MAE with one view."""
    shape: Mapping[str, int] = field(default_factory=dict)
    """Differences from the benchmark's encoder."""


@dataclass(frozen=True)
class _Measured:
    recipes: dict[str, str]
    own: dict[str, tuple[str, ...]]
    methods: dict[str, MethodPasses]
    models: dict[str, tuple[Published, ...]]
    """By the size of the run that they are measured with."""


_PAPER = read_paper("published", _Measured)
RECIPES, OWN, METHODS, PUBLISHED = _PAPER.recipes, _PAPER.own, _PAPER.methods, _PAPER.models


def evaluate(settings: Throughput, context: Context, job: EvaluationJob) -> dict[str, Any]:
    """Images per second, by stage (`pretrain`, `head`, `tune`, …) and method; device hours.

    docs/reference/throughput.md lists the metrics.
    """
    file = job.encoder
    encoder = load_encoder_weights(file)[1]
    stages = {name: load_recipe(recipe, settings.size) for name, recipe in RECIPES.items()}
    try:
        for stage in stages.values():
            stage.check_encoder(encoder)
    except ValueError as error:
        raise UserError(
            f"throughput: recipes of size {settings.size} do not fit the encoder of {job.run} "
            f"({error}); say which with settings.size=SIZE"
        ) from None
    for name, stage in stages.items():
        head = stage.head if isinstance(stage, SelfSupervised) else None
        if settings.batch_size and head and head.queue_size % settings.batch_size:
            raise UserError(
                f"throughput: batch_size {settings.batch_size} does not divide the queue_size "
                f"{head.queue_size} of {RECIPES[name]}; take a divisor"
            )
    published = PUBLISHED.get(settings.size, ())
    results = {}
    with single_rank_group(context) as device:
        for name, times in _measured(settings, encoder, file, published, device):
            results[name] = measure(times, settings, device)
            context.report({"step": len(results)})
    speed = {name: result["samples_per_second"] for name, result in results.items()}

    def hours(name: str, epochs: int) -> float:
        return epochs * settings.images / speed[name] / 3600

    own = {name: hours(name, stages[name].epochs) for name in RECIPES}
    models: dict[str, dict[str, float]] = {
        settings.size: {model: sum(own[name] for name in names) for model, names in OWN.items()}
    }
    for model in published:
        total = sum(hours(_key(method, model), n) for method, n in model.epochs.items())
        models.setdefault(model.architecture, {})[model.method] = total
    keys = ("samples_per_second", "fastest", "slowest", "batch_size")
    metrics: dict[str, Any] = {k: {n: result[k] for n, result in results.items()} for k in keys}
    metrics["flash_gain"] = 100 * (speed["pretrain"] / speed["pretrain_plain_attention"] - 1)
    grafted = models[settings.size].get("layer_grafting")
    if grafted is not None:  # what follows its MAE
        extra = grafted - models[settings.size]["mae_public"]
        metrics["grafting_ratio"] = extra / (own["head"] + own["tune"])
    cuda = device.type == "cuda"
    if cuda and settings.batch_size is None:
        for name in ("tune", "tune_masked"):
            metrics[f"{name}_fits"] = results[name]["batch_size"] / stages["tune"].batch_size
    return metrics | {
        "device_hours": own | {"maect": models[settings.size]["ct_min"]},
        "model_hours": models,
        "epochs": {name: stage.epochs for name, stage in stages.items()},
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "threads": None if cuda else torch.get_num_threads(),
    }


def _measured(
    settings: Throughput,
    encoder: Encoder,
    file: Path,
    published: Sequence[Published],
    device: torch.device,
) -> Iterator[tuple[str, Times]]:
    """Yield the name of each measurement and a function that times its steps."""

    def times_of(stage: Training, **how: Any) -> Times:
        # Kept by what is yielded alone: another model beside it would take its memory.
        with TemporaryDirectory() as folder:  # the head beside it may be of another recipe
            Path(folder, file.name).symlink_to(file.absolute())
            objective = stage.build(encoder, 0, Path(folder))
        return partial(stage_seconds, stage, objective, device, **how)

    for name, recipe in RECIPES.items():
        yield name, times_of(load_recipe(recipe, settings.size))
    plain = load_recipe("mae", settings.size)
    yield "pretrain_plain_attention", times_of(plain, plain_attention=True)
    yield "tune_masked", times_of(load_recipe("ct_min", settings.size, {"mask_ratio": MASKED}))
    for method, passes in METHODS.items():
        yield method, partial(method_seconds, passes, encoder, device)
    others = {_key(method, one): (method, one) for one in published for method in one.epochs}
    for key in [key for key in others if key not in METHODS]:
        method, model = others[key]
        shape = encoder.model_copy(update=dict(model.shape))
        if method == "mae":
            stage = load_recipe("mae", settings.size, {"views": 1})
            yield key, partial(stage_seconds, stage, stage.build(shape, 0, None), device)
        else:
            yield key, partial(method_seconds, METHODS[method], shape, device)


def _key(method: str, model: Published) -> str:
    """Name of a measurement of a method: with the architecture where it is not the benchmark's."""
    return f"{method} {model.architecture}" if model.shape else method


def measure(times: Times, settings: Throughput, device: torch.device) -> dict[str, float]:
    """Images per second of a training step: median, fastest and slowest of the repeats."""
    batch = settings.batch_size or largest_batch(times, device)
    seconds = times(batch, settings.warmup + settings.repeats)[settings.warmup :]
    return {
        "samples_per_second": batch / statistics.median(seconds),
        "fastest": batch / min(seconds),
        "slowest": batch / max(seconds),
        "batch_size": batch,
    }


def largest_batch(times: Times, device: torch.device) -> int:
    """Return the largest power of 2 (8 to 1024) that fits into the device's memory."""
    if device.type != "cuda":
        return CPU_BATCH
    fitting = 0
    size = SMALLEST
    while size <= LARGEST and _fits(times, size):
        fitting = size
        size = 2 * size
    if not fitting:
        raise UserError(f"throughput: {SMALLEST} images do not fit into the device's memory")
    return fitting


def _fits(times: Times, size: int) -> bool:
    try:
        times(size, 2)  # the second step has the batch of the next one beside it
    except RuntimeError as error:
        if memory_fault(error) is None:
            raise
        return False
    finally:
        gc.collect()  # an engine is held in circles
        torch.cuda.empty_cache()
    return True


def stage_seconds(
    stage: Training,
    objective: Objective,
    device: torch.device,
    batch: int,
    steps: int,
    plain_attention: bool = False,
) -> list[float]:
    """Seconds of each of the trainer's own steps of a stage (`maect.train.timing`).

    `plain_attention`: by matrix products instead of one fused kernel. Blocks are not compiled, as
    those of compared methods; compiled ones would keep the kernel that they were compiled with.
    """
    settings = stage.model_copy(update={"batch_size": batch})
    rank = Context(gpus=device.type == "cuda")
    with (
        unsaved_trainer(
            settings, objective, rank, device, steps, Computing(compile=False)
        ) as trainer,
        sdpa_kernel(SDPBackend.MATH) if plain_attention else nullcontext(),
    ):
        return step_seconds(trainer, steps)


def method_seconds(
    passes: MethodPasses, encoder: Encoder, device: torch.device, batch: int, steps: int
) -> list[float]:
    """Seconds of updates with a method's passes through the encoder, without projection heads."""
    student = build_encoder(encoder).to(device)
    teacher = None
    if passes.teacher:
        teacher = build_encoder(encoder).to(device).requires_grad_(False)
    # In full patches, as near as they come to 96 of 224 pixels.
    patch = encoder.patch_size
    size = encoder.image_size
    channels = encoder.pixels.channels
    side = max(1, round(size * 96 / 224 / patch)) * patch
    optimizer = torch.optim.AdamW(student.parameters(), fused=device.type == "cuda")
    views = max(passes.learning, passes.teacher)
    images = torch.randn(views * batch, channels, size, size, device=device)
    local = torch.randn(passes.local * batch, channels, side, side, device=device)
    kept = None
    if passes.mask_ratio:
        visible = visible_patches(encoder.patches, passes.mask_ratio)
        order = torch.rand(passes.learning * batch, encoder.patches, device=device).argsort(dim=1)
        kept = order[:, :visible]

    def step() -> None:
        optimizer.zero_grad()
        with mixed_precision(device, "bf16"):
            target = torch.zeros((), device=device)
            if teacher is not None:
                with torch.no_grad():
                    tokens = teacher(images[: passes.teacher * batch]).tokens
                    target = tokens[:, 0].float().mean(dim=0)
            loss = _distance(student(images[: passes.learning * batch], kept).tokens, target)
            if passes.local:
                loss = loss + _distance(student(local).tokens, target)
        loss.backward()
        optimizer.step()
        if teacher is not None:
            average = [p.detach() for p in teacher.parameters()]
            torch._foreach_lerp_(average, [p.detach() for p in student.parameters()], 0.004)

    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds


def _distance(tokens: Tensor, target: Tensor) -> Tensor:
    """Compute a scalar of the tokens as a loss: its cost is negligible next to the encoder's."""
    return (tokens[:, 0].float() - target).square().mean()
