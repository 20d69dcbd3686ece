"""What a training step asks of a GPU, counted without one; tests compare plans of memory with it.

Tensors without data go through the objectives as on a GPU: in bfloat16, with the fused attention
that keeps bfloat16. Every operation that makes or changes a tensor is a kernel, every storage an
allocation in blocks of 512 bytes, as PyTorch's allocator rounds. They pretend to be on the CPU,
because autograd asks a driver for the streams of tensors on `cuda`. The engine is not in it: its
shards and buckets are plain arithmetic (`maect.recipes.cost`).
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from maect.data import transforms
from maect.data.loader import Batch
from maect.models import kernels, vit
from maect.recipes import Encoder, views_by_size
from maect.recipes.settings import PLAIN, Computing
from maect.stages.base import WithoutLabels
from maect.stages.classifier import Classifier
from maect.stages.fine_tune import FineTune
from maect.train.engine import cast_parts
from maect.train.stage import Training

BLOCK = 512  # bytes: PyTorch's allocator rounds up to it
# These make no kernel: views by another name, and memory that nothing has written to yet.
FREE = ("aten.empty", "aten.new_empty", "aten.detach", "aten.lift", "prim.")


class Counting(TorchDispatchMode):
    """Bytes that are allocated, and kernels by name, since the last `reset`.

    Attributes:
        now: bytes that are alive.
        peak: the most so far.
        kernels: how often each operation that makes or changes a tensor was called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.kernels: Counter[str] = Counter()
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def reset(self) -> None:
        """Count kernels, and look for the peak, from here on."""
        self.peak = self.now
        self.kernels.clear()

    def hold(self, tensors: Any) -> None:
        """Count tensors that were there before."""
        for tensor in tensors:
            self._add(tensor)

    def _add(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._alive and self._alive[key][1]() is storage:
            return False
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        self._alive[key] = (size, weakref.ref(storage, lambda _: self._free(key)))
        self.now += size
        self.peak = max(self.peak, self.now)
        return True

    def _free(self, key: int) -> None:
        self.now -= self._alive.pop(key)[0]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        made = [self._add(t) for t in tree_leaves(out) if isinstance(t, Tensor)]
        writes = any(a.alias_info and a.alias_info.is_write for a in function._schema.arguments)
        if (any(made) or writes) and not str(function).startswith(FREE):
            self.kernels[str(function)] += 1
        return out


def flash_attention(qkv: Tensor) -> Tensor:
    """The fused kernels of a GPU: [b, N, 3, heads, d] to [b, N, heads, d]."""
    query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
    ops = torch.ops.aten
    if qkv.dtype == torch.float32:
        kernel = ops._scaled_dot_product_efficient_attention
        return kernel(query, key, value, None, qkv.requires_grad)[0].transpose(1, 2)
    return ops._scaled_dot_product_flash_attention(query, key, value)[0].transpose(1, 2)


@contextmanager
def pretended() -> Iterator[Counting]:
    """Tensors made in this block have no data, and are counted as a GPU's."""
    with (
        patch.object(kernels, "fused_attention", flash_attention),
        patch.object(kernels, "bfloat16_on", lambda device_type: "cuda"),
        # Made on the CPU and copied.
        patch.object(transforms, "_blur_table", lambda sigma: torch.empty(len(sigma), 52)),
        FakeTensorMode(allow_non_fake_inputs=True),
        Counting() as counting,
    ):
        constants = (transforms._constant, transforms._blur_index)
        for constant in constants:  # a fake one must not stay, nor a real one be met
            constant.cache_clear()
        yield counting
        for constant in constants:
            constant.cache_clear()


def without_data(module: nn.Module) -> nn.Module:
    """A module whose parameters and buffers are on `meta`, with fake ones in their place."""
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None:
                fake = nn.Parameter(torch.empty(value.shape, dtype=value.dtype), False)
                part._parameters[name] = fake.requires_grad_(value.requires_grad)
        for name, value in part._buffers.items():
            if value is not None:
                part._buffers[name] = torch.empty(value.shape, dtype=value.dtype)
    return module


@dataclass(frozen=True)
class Step:
    """One rank's forward and backward pass.

    Attributes:
        peak: bytes, with weights, buffers and inputs, without the optimizer.
        prepared: bytes at the worst moment of making the inputs.
        prepare, forward, backward: kernels.
    """

    peak: int
    prepared: int
    prepare: Counter[str]
    forward: Counter[str]
    backward: Counter[str]


def count(
    stage: Training, encoder: Encoder, images: int, classes: int = 1000,
    computing: Computing = PLAIN,
) -> Step:  # fmt: skip
    """Count a step of so many images of one rank."""
    with torch.device("meta"):
        objective = build(stage, encoder, classes)
    for part in cast_parts(objective):
        part.checkpointing = computing.activation_checkpointing
    ids = np.arange(images, dtype=np.int64)
    sizes = views_by_size(stage.view_settings(), encoder.image_size).items()
    with pretended() as gpu:
        without_data(objective)
        for side, _ in sizes:  # made once, on the CPU
            objective.encoder.positions(*[side // encoder.patch_size] * 2)
        # Gradients have their memory before a step, as the engine's.
        learning = [p for p in objective.parameters() if p.requires_grad]
        for parameter in learning:
            parameter.grad = torch.empty_like(parameter)
        gpu.hold([*objective.parameters(), *objective.buffers(), *(p.grad for p in learning)])
        before = gpu.now
        pixels = tuple(
            torch.empty(len(views), images, 3, side, side, dtype=torch.uint8)
            for side, views in sizes
        )
        batch = Batch(0, ids, ids * 0, ids % classes, pixels)
        gpu.reset()
        inputs = objective.prepare(batch, torch.device("cpu"))
        prepare, prepared = gpu.kernels.copy(), gpu.peak - before
        del batch, pixels
        if computing.captures_passes:
            peak = captured_peak(objective, inputs, gpu)
            return Step(peak, prepared, prepare, Counter(), Counter())
        gpu.reset()
        loss, _ = objective(inputs)
        forward = gpu.kernels.copy()
        gpu.kernels.clear()
        loss.backward()
        return Step(gpu.peak, prepared, prepare, forward, gpu.kernels.copy())


def captured_peak(objective: Any, inputs: Any, gpu: Counting) -> int:
    """Bytes at the worst moment if the passes keep their memory, each of them its own."""
    for parameter in objective.parameters():
        parameter.grad = None
    read = nn.ModuleList(objective.passes._parts).parameters()
    own = [parameter for parameter in read if parameter.requires_grad]
    found, reserved = [], 0
    for tensors in objective.inputs_of_passes(inputs):
        before = gpu.now
        gpu.reset()
        samples = tuple(tensor.clone() for tensor in tensors)
        outputs = objective.compute(*samples)
        if learning := [output for output in outputs if output.requires_grad]:
            given = [torch.empty_like(output) for output in learning]
            torch.autograd.grad(learning, own, given, allow_unused=True)
        found.append(tuple(o.detach().requires_grad_(o.requires_grad) for o in outputs))
        reserved += gpu.peak - before
        del samples, outputs, learning
    gpu.reset()
    replayed = iter(found)
    with patch.object(objective, "passes", lambda *_: next(replayed)):
        loss, _ = objective(inputs)
        loss.backward()
    return gpu.peak + reserved


def build(stage: Training, encoder: Encoder, classes: int) -> Any:
    """The objective of a stage with weights of no value."""
    if isinstance(stage, WithoutLabels):
        return stage.objective(encoder, 0)
    assert isinstance(stage, FineTune)
    return Classifier(stage, vit.build_encoder(encoder), classes, "mean", 0)
