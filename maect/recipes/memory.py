"""Device memory of a training, in bytes, added up from the costs of its parts; no torch needed.

What stays for the whole training, for P weights of which T are trained, on N ranks:

    weights 4 P, AdamW's moments 8 T / N, on several ranks also 4 T / N of weights that DeepSpeed
    updates, averages 4 A / N, buffers three times: as they are, and as the last two passes found
    them

What a step adds: gradients 4 T (4 T / N under ZeRO 2), on several ranks a bucket that DeepSpeed
exchanges (two with `overlap_comm`), and what the passes take: inputs, bfloat16 copies of the
weights, activations that wait for the backward pass (`maect.recipes.cost`).

Captured passes keep their memory between steps, those over each size of view their own, with a copy
of their inputs and gradients of their own: neither heads nor the update may use it.

ZeRO 3 is counted as 2: DeepSpeed keeps whole weights that are read again before 10^9 others
(`stage3_max_reuse_distance`), so that at the end of the forward pass of ViT-B and L all are whole.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from maect.recipes import Encoder, View, views_by_size
from maect.recipes.computing import Computing
from maect.recipes.cost import FLOAT, Activations, Cost

GIB = 2**30
BUCKET = 50_000_000
"""Values that DeepSpeed exchanges at once, at most."""
CONTEXT = 1.5 * GIB
"""CUDA, two communicators of NCCL, cuBLAS' and cuDNN's workspaces: assumed."""
FLIPS, MIXES, COLOURS = 2.2, 3.2, 6.4
"""Memory of augmentation at its worst moment in that of its result: counted as `passes` is."""
FRAGMENTS = 1.05
"""Factor for memory that the allocator cannot use between blocks: assumed."""


def gpu_memory(name: str) -> float | None:
    """Return the usable bytes of a GPU by a name such as A100-40GB; None: it has no size."""
    given = re.search(r"\b([0-9]+) ?GB?\b", name.replace("-", " "))
    if given is None:
        return None
    # These names have the memory of the CPU.
    size = 96 if "GH200" in name and int(given[1]) in (120, 480) else int(given[1])
    return 0.98 * GIB * size


@dataclass(frozen=True)
class Footprint:
    """Device memory of a rank.

    Attributes:
        weights: all parameters.
        trained: those that learn.
        averaged: those with a running average.
        buffers: bytes.
        inputs: bytes of the images.
        prepared: bytes of the next batch, whose images are changed meanwhile.
        activations: bytes at the worst moment of the passes, with copies of weights that learn.
    """

    weights: float
    trained: float
    averaged: float
    buffers: float
    inputs: float
    prepared: float
    activations: float

    @property
    def passes(self) -> float:
        """Bytes of forward and backward pass, with weights, gradients and buffers."""
        lasting = FLOAT * (self.weights + self.trained) + self.buffers
        return lasting + self.inputs + self.activations

    def states(self, ranks: int) -> float:
        """Return the bytes of optimizer states and averages on a rank."""
        updated = (8 if ranks == 1 else 12) * self.trained
        return (updated + FLOAT * self.averaged) / ranks

    def peak(self, computing: Computing, ranks: int) -> float:
        """Return the bytes of a device at the worst moment of a step."""
        exchanged = 0.0
        if ranks > 1:
            exchanged = FLOAT * min(BUCKET, 2 * self.trained) * (1 + computing.overlap_comm)
        if ranks > 1 and computing.zero_stage > 1:
            exchanged -= FLOAT * self.trained * (1 - 1 / ranks)
        rest = self.prepared + self.states(ranks) + exchanged + 2 * self.buffers
        return (self.passes + rest) * FRAGMENTS + CONTEXT


def footprint(
    encoder: Encoder,
    views: Sequence[View],
    images: int,
    parts: Sequence[Cost],
    *,
    precision: str,
    averaged: int = 0,
    mixes: bool = False,
    captured: int = 0,
) -> Footprint:
    """Add up the memory of an objective's parts.

    The backward pass meets the last part first, and frees what each part kept.

    Args:
        encoder: its shape.
        views: of an image.
        images: of a rank in a pass.
        parts: costs, in the order of the forward pass.
        precision: `bf16` or `fp32`.
        averaged: number of weights with a running average.
        mixes: whether images are mixed in pairs.
        captured: number of first parts that are captured, each size of view by itself.
    """
    weights, trained = sum(part.weights for part in parts), sum(part.trained for part in parts)
    copied = 2 if precision == "bf16" else 0
    buffers = sum(part.buffers for part in parts)
    inputs, prepared = _inputs(views, encoder, images, mixes)
    first, others = parts[:captured], parts[captured:]
    activations = 0.0
    if captured:
        own = sum(part.trained for part in first)
        sizes = list(zip(*(part.passes for part in first), strict=True))
        activations = sum(copied * own + images * _worst(passes) for passes in sizes)
        activations += FLOAT * own * (len(sizes) - 1) + inputs
    passes = [memory for part in others for memory in part.passes]
    activations += copied * sum(part.trained for part in others) + images * _worst(passes)
    return Footprint(weights, trained, averaged, buffers, inputs, prepared, activations)


def _worst(passes: Sequence[Activations]) -> float:
    """Return the bytes of an image at the worst moment of passes in turn, and back."""
    worst = kept = 0.0
    for memory in passes:
        kept += memory.kept
        worst = max(worst, kept + memory.forward, kept + memory.backward)
    return worst


def _inputs(
    views: Sequence[View], encoder: Encoder, images: int, mixes: bool
) -> tuple[float, float]:
    """Return the bytes of the views of images, and at the worst moment of making them."""
    inputs = prepared = 0.0
    for size, numbers in views_by_size(views, encoder.image_size).items():
        own = images * len(numbers) * FLOAT * encoder.pixels.channels * size**2
        coloured = any(views[number].jitter or views[number].blur for number in numbers)
        factor = COLOURS if coloured else MIXES if mixes else FLIPS
        prepared = max(prepared, inputs + factor * own)
        inputs += own
    return inputs, prepared
