"""Bytes of device memory that a training takes, added up from what its parts cost; no torch needed.

What stays for the whole training, for P weights of which T are trained, on N ranks:

    weights 4 P, gradients 4 T (4 T / N under ZeRO 2), on several ranks also 4 T / N of weights that
    DeepSpeed updates, AdamW's moments 8 T / N, averages 4 A / N, buffers three times: as they are,
    and as the last two passes found them

ZeRO 3 is counted as 2: DeepSpeed keeps whole weights that are read again before 10^9 others
(`stage3_max_reuse_distance`), so that at the end of the forward pass of ViT-B and L all are whole.

and what the passes add: inputs, bfloat16 copies of the weights, activations that wait for the
backward pass (`maect.recipes.cost`), and what its first steps need beside all of these.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from maect.recipes import Encoder, View, views_by_size
from maect.recipes.cost import FLOAT, Cost

GIB = 2**30
BUCKET = 50_000_000
"""Values that DeepSpeed exchanges at once, at most."""
CONTEXT = 1.5 * GIB
"""CUDA, two communicators of NCCL, cuBLAS' and cuDNN's workspaces: assumed."""
FLIPS, MIXES, COLOURS = 2.2, 3.2, 6.4
"""Memory of augmentation at its worst moment in that of its result: counted as `passes` is."""
FRAGMENTS = 1.05
"""What the allocator cannot use between blocks: assumed."""


def gpu_memory(name: str) -> float | None:
    """Bytes of a GPU that a name such as A100-40GB gives, less what the driver takes; or None."""
    given = re.search(r"\b([0-9]+) ?GB?\b", name.replace("-", " "))
    if given is None:
        return None
    # These name the memory of the CPU beside them.
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

    def peak(self, zero_stage: int, ranks: int) -> float:
        """Bytes of a device at the worst moment of a step."""
        states = (8 if ranks == 1 else 12) * self.trained / ranks
        averages = FLOAT * self.averaged / ranks
        gradients = 0.0  # those of all parameters are among `passes`
        if ranks > 1:
            gradients += FLOAT * min(BUCKET, 2 * self.trained)
        if ranks > 1 and zero_stage > 1:
            gradients -= FLOAT * self.trained * (1 - 1 / ranks)
        rest = self.prepared + states + averages + gradients + 2 * self.buffers
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
) -> Footprint:
    """Add up what the parts of an objective, in the order of the forward pass, need for its images.

    The backward pass meets the last part first, and frees what each part kept. `averaged` are
    weights with a running average; `mixes`: images are mixed in pairs.
    """
    weights, trained = sum(part.weights for part in parts), sum(part.trained for part in parts)
    copies = 2 * trained if precision == "bf16" else 0
    worst = kept = 0.0
    for memory in (memory for part in parts for memory in part.passes):
        kept += images * memory.kept
        forward, backward = copies + images * memory.forward, copies + images * memory.backward
        worst = max(worst, kept + forward, kept + backward)
    buffers = sum(part.buffers for part in parts)
    inputs, prepared = _inputs(views, encoder, images, mixes)
    return Footprint(weights, trained, averaged, buffers, inputs, prepared, worst)


def _inputs(
    views: Sequence[View], encoder: Encoder, images: int, mixes: bool
) -> tuple[float, float]:
    """Bytes of the views of some images, and at the worst moment of making them, size by size."""
    inputs = prepared = 0.0
    for size, numbers in views_by_size(views, encoder.image_size).items():
        own = images * len(numbers) * FLOAT * encoder.pixels.channels * size**2
        coloured = any(views[number].jitter or views[number].blur for number in numbers)
        factor = COLOURS if coloured else MIXES if mixes else FLIPS
        prepared = max(prepared, inputs + factor * own)
        inputs += own
    return inputs, prepared
