"""Bytes of device memory that a training takes, counted from its settings; no torch needed.

What stays for the whole training, for P weights of which T are trained, on N ranks:

    weights 4 P, gradients 4 T, AdamW's moments and this rank's sums of gradients 12 T / N,
    averages 4 A / N, buffers three times: as they are, and as the last two passes found them

and what the passes add: inputs, bfloat16 copies of the trained weights, activations that wait for
the backward pass, and what its first steps need beside all of these. With c bytes a number in
products (2 in bfloat16) a block of width D keeps for each token

    8 D       the inputs of two norms, in float32
    14 c D    what its products read: two norms' outputs, queries, keys and values (3), attention's
              output, the MLP's hidden layer before and after GELU (4 each)

which is 36 D bytes in bfloat16. With checkpointing it keeps its input, 4 D, and one block at a time
has the rest. The backward pass of a block begins with gradients of its output in both precisions
and of the hidden layer, 4 D + 5 c D. Softmax statistics, indices and the like are left out.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from maect.recipes import Contrastive, Encoder, View
from maect.recipes.flops import parameters

GIB = 2**30
FLOAT = 4
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
    given = re.search(r"\b([0-9]+) ?GB\b", name.replace("-", " "))
    return None if given is None else 0.98 * GIB * int(given[1])


class Computed(Protocol):
    """How a training is computed."""

    @property
    def precision(self) -> str:
        """Of matrix products, bf16 or fp32."""

    @property
    def activation_checkpointing(self) -> bool:
        """Whether blocks are computed again in the backward pass."""

    def view_settings(self) -> tuple[View, ...]:
        """How each view of an image is made."""


@dataclass(frozen=True)
class Activations:
    """Bytes of a part of a model for one view of one image.

    Attributes:
        kept: wait for the backward pass through the part.
        forward, backward: come and go at the worst moment of each pass through it.
    """

    kept: float
    forward: float
    backward: float


@dataclass(frozen=True)
class Footprint:
    """What a rank holds.

    Attributes:
        weights: all parameters.
        trained: those that learn.
        averaged: those with a running average.
        buffers: bytes.
        inputs: bytes of the images.
        prepared: bytes of the next batch, whose images are changed meanwhile.
        activations: bytes at the worst moment of the passes, with copies of weights.
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

    def peak(self, zero_stage: int, ranks: int, accumulation: int = 1) -> float:
        """Bytes of a device at the worst moment of a step."""
        # One rank's sums, and all ranks' without shards, are the gradients themselves.
        whole = zero_stage == 0 or ranks == 1
        states = 8 * self.trained if whole else 12 * self.trained / ranks
        averages = FLOAT * self.averaged / ranks
        gradients = FLOAT * self.trained * (1 / ranks - 1 if zero_stage > 1 else 0)
        gradients += FLOAT * (self.trained if accumulation > 1 else min(BUCKET, self.trained))
        rest = self.prepared + states + averages + gradients + 2 * self.buffers
        return (self.passes + rest) * FRAGMENTS + CONTEXT


def footprint(
    computed: Computed,
    encoder: Encoder,
    images: int,
    parts: Iterable[Activations],
    *,
    weights: float,
    trained: float,
    averaged: float = 0.0,
    buffers: float = 0.0,
    mixes: bool = False,
) -> Footprint:
    """Add up what the parts of a model, in the order of the forward pass, need for its images.

    The backward pass meets the last part first, and frees what each part kept.
    """
    copies = 2 * trained if _product(computed) == 2 else 0
    worst = kept = 0.0
    for part in parts:
        kept += images * part.kept
        forward, backward = copies + images * part.forward, copies + images * part.backward
        worst = max(worst, kept + forward, kept + backward)
    inputs = images * FLOAT * pixels(encoder)
    coloured = any(view.jitter or view.blur for view in computed.view_settings())
    prepared = inputs * (COLOURS if coloured else MIXES if mixes else FLIPS)
    return Footprint(weights, trained, averaged, buffers, inputs, prepared, worst)


def pixels(encoder: Encoder) -> int:
    """Numbers of an image."""
    return encoder.pixels.channels * encoder.image_size**2


def _product(computed: Computed) -> int:
    """Bytes of a number in matrix products."""
    return 2 if computed.precision == "bf16" else 4


def blocks(computed: Computed, tokens: int, width: int, trained: int) -> Activations:
    """This many blocks that learn, or none that do, and the norm behind them.

    A block that keeps nothing has the inputs of itself and of its MLP, a norm's output, and the
    hidden layer before and after GELU; with checkpointing its own input is kept.
    """
    c, checkpointing = _product(computed), computed.activation_checkpointing
    block, norm, begin = (8 + 14 * c) * width, 4 * width, (4 + 5 * c) * width
    passing = (12 + 8 * c) * width - norm if checkpointing or not trained else 0
    passing -= norm if checkpointing and trained else 0
    kept = norm + trained * (norm if checkpointing else block)
    # The norm behind the blocks is over then, and the input of the block is kept.
    backward = begin - norm + (block - norm if checkpointing else 0) if trained else 0
    return Activations(tokens * kept, tokens * passing, tokens * backward)


def encoder_activations(
    computed: Computed, encoder: Encoder, tokens: int, trained: int
) -> Activations:
    """The encoder, of which this many blocks learn, with the patch embedding if these are all."""
    own = blocks(computed, tokens, encoder.width, trained)
    patches = _product(computed) * pixels(encoder) if trained == encoder.depth else 0
    return Activations(own.kept + patches, own.forward, own.backward)


def decoder_activations(
    computed: Computed, encoder: Encoder, visible: int, mask_ratio: float
) -> Activations:
    """MAE's decoder, given this many tokens, and the loss.

    The loss keeps the difference on masked patches in float32. While it is computed there are its
    two sides, and the prediction in both precisions.
    """
    c, tokens, width = _product(computed), 1 + encoder.patches, encoder.decoder_width
    own = blocks(computed, tokens, width, encoder.decoder_depth)
    masked = FLOAT * mask_ratio * pixels(encoder)
    loss = (c + FLOAT) * pixels(encoder) + 2 * masked
    behind = c * tokens * width + masked  # the blocks
    kept = own.kept + c * visible * encoder.width + behind
    return Activations(kept, max(own.forward - behind, loss), own.backward - behind)


def head_activations(computed: Computed, head: Contrastive, width: int) -> Activations:
    """The NNCLR head.

    A hidden layer keeps what BatchNorm normalised and gave, in float32, and what the next product
    reads. The lookup has similarities to the queue twice, and which entries are one's own.
    """
    c = _product(computed)
    hidden = (8 + c) * (2 * head.projector_hidden + head.predictor_hidden)
    ends = c * width + (20 + c) * head.embedding
    exact = FLOAT if head.precision == "fp32" else 2
    lookup = (2 * exact + 0.5) * head.queue_size if head.lookup != "none" else 0
    return Activations(hidden + ends, lookup, 0)


def decoder_parameters(encoder: Encoder) -> int:
    """Weights of MAE's decoder, near enough."""
    width = encoder.decoder_width
    ends = encoder.width * width + encoder.pixels.channels * encoder.patch_size**2 * width
    return ends + encoder.decoder_depth * (12 * width**2 + 13 * width)


def head_weights(head: Contrastive, width: int) -> int:
    """Trained weights of the NNCLR head, near enough."""
    hidden = head.projector_hidden
    projector = hidden * (width + hidden + head.embedding)
    return projector + 2 * head.embedding * head.predictor_hidden


def head_buffers(head: Contrastive, width: int) -> int:
    """Bytes of the queue, its ids and labels, and of the EMA projector."""
    hidden = head.projector_hidden
    slow = hidden * (width + hidden + head.embedding) if head.projector_ema else 0
    return FLOAT * slow + head.queue_size * (FLOAT * head.embedding + 16)


def trained_parameters(encoder: Encoder, trained: int) -> float:
    """Weights of the last blocks, this many; of all of the encoder, if these are all."""
    if trained == encoder.depth:
        return parameters(encoder)
    return trained * (12 * encoder.width**2 + 13 * encoder.width)
