"""Bytes of device memory that a training takes, added up from what its parts cost; no torch needed.

What stays for the whole training, for P weights of which T are trained, on N ranks:

    weights 4 P, gradients 4 T, AdamW's moments and this rank's sums of gradients 12 T / N,
    averages 4 A / N, buffers three times: as they are, and as the last two passes found them

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
BUCKET = 25_000_000
"""Gradients that leave at once, and are held beside their sums meanwhile: 100 MB take a few
milliseconds between nodes, and the last of them are not hidden."""
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
        copies: bytes of the other weights' copies, which the engine keeps under ZeRO 0 and 1.
    """

    weights: float
    trained: float
    averaged: float
    buffers: float
    inputs: float
    prepared: float
    activations: float
    copies: float = 0.0

    @property
    def passes(self) -> float:
        """Bytes of forward and backward pass, with weights, gradients and buffers."""
        lasting = FLOAT * (self.weights + self.trained) + self.buffers
        return lasting + self.inputs + self.activations

    def peak(self, zero_stage: int, ranks: int, accumulation: int = 1) -> float:
        """Bytes of a device at the worst moment of a step."""
        # One rank's sums, and all ranks' without shards, are the gradients themselves.
        whole = zero_stage == 0 or ranks == 1
        states = 8 * self.trained if whole else 12 * self.trained / ranks
        averages = FLOAT * self.averaged / ranks
        gradients = FLOAT * self.trained * (1 / ranks - 1 if zero_stage > 1 else 0)
        gradients += FLOAT * (self.trained if accumulation > 1 else min(BUCKET, self.trained))
        copies = self.copies if zero_stage < 2 else 0.0
        rest = self.prepared + states + averages + gradients + copies + 2 * self.buffers
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
    frozen = 2 * (weights - trained) if precision == "bf16" else 0
    return Footprint(weights, trained, averaged, buffers, inputs, prepared, worst, frozen)


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
