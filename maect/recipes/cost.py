"""Cost of the parts of a training: weights, operations and memory; no torch needed.

The cost of each part of an objective (encoder, decoder, head) for one image of a step follows from
its settings. A stage names its parts, and everything else adds them up.

Operations are the method's own matrix products, forward and backward; a multiplication and an
addition count as two. Recomputed activations are not counted, nor is what is linear in the tokens
(norms, softmax, optimizer). The backward pass of a product costs one more product for each factor
that needs a gradient.

Memory: with c bytes a number in products (2 in bfloat16) a block of width D keeps for each token

    8 D       the inputs of two norms, in float32
    14 c D    what its products read: two norms' outputs, queries, keys and values (3), attention's
              output, the MLP's hidden layer before and after GELU (4 each)

which is 36 D bytes in bfloat16. With checkpointing it keeps its input, 4 D, and one block at a time
has the rest. The backward pass of a block begins with gradients of its output in both precisions
and of the hidden layer, 4 D + 5 c D. Softmax statistics, indices and the like are left out.

What stays on a device for the whole training, for P weights of which T are trained, on N ranks:

    weights 4 P, AdamW's moments 8 T / N, on several ranks also 4 T / N of weights that DeepSpeed
    updates, averages 4 A / N, buffers twice: as they are, and as the last pass found them

What a step adds: gradients 4 T (4 T / N under ZeRO 2), on several ranks a bucket that DeepSpeed
exchanges (two with `overlap_comm`), and what the passes take: inputs, bfloat16 copies of the
weights, activations that wait for the backward pass.

Captured passes keep their memory between steps, those over each size of view their own, with a copy
of their inputs and gradients of their own: neither heads nor the update may use it.

ZeRO 3 is counted as 2: DeepSpeed keeps whole weights that are read again before 10^9 others
(`stage3_max_reuse_distance`), so that at the end of the forward pass of ViT-B and L all are whole.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch
from pathlib import Path

from maect.core.yaml_files import read_yaml
from maect.recipes import (
    Contrastive,
    Encoder,
    HeadSettings,
    Refiner,
    View,
    views_by_size,
    visible_patches,
)
from maect.recipes.settings import Computing
from maect.recipes.timm_encoders import find_timm

FLOAT = 4
"""Bytes of a float32 number."""
PEAKS: dict[str, float] = read_yaml(Path(__file__).with_name("flops.yaml"))
"""Dense bfloat16 FLOP/s of devices, by words of their drivers' names."""
GIB = 2**30
BUCKET = 50_000_000
"""Values that DeepSpeed exchanges at once, at most."""
CONTEXT = 1.5 * GIB
"""CUDA, two communicators of NCCL, cuBLAS' and cuDNN's workspaces: assumed."""
FLIPS, MIXES, COLOURS = 2.2, 3.2, 6.4
"""Memory of augmentation at its worst moment in that of its result: counted as `passes` is."""
FRAGMENTS = 1.05
"""Factor for memory that the allocator cannot use between blocks: assumed."""


@dataclass(frozen=True)
class PassMode:
    """Bytes of a number in products, and whether the backward pass recomputes blocks."""

    product: int
    checkpointing: bool


@dataclass(frozen=True)
class Activations:
    """Bytes of one pass through a part of a model, for one image.

    Attributes:
        kept: wait for the backward pass through the part.
        forward, backward: come and go at the worst moment of each pass through it.
    """

    kept: float
    forward: float
    backward: float

    def times(self, views: int) -> "Activations":
        """Return the memory of so many views of an image."""
        return Activations(views * self.kept, views * self.forward, views * self.backward)


@dataclass(frozen=True)
class Cost:
    """Cost of a part of an objective.

    Attributes:
        weights: number of parameters.
        trained: number of those that learn.
        operations: of an image in a step, forward and backward, all views.
        passes: memory of each of its passes, in the order of the forward pass.
        buffers: bytes beside the weights.
        exported: numbers in the file that a finished run exports of it; 0: there is none.
    """

    weights: int
    trained: int
    operations: float
    passes: tuple[Activations, ...]
    buffers: int = 0
    exported: int = 0


@dataclass(frozen=True)
class ViewGroup:
    """Views of one size, which pass through the encoder together.

    Attributes:
        views: number of views of an image.
        size: height and width in pixels.
        patches: of a view.
        tokens: of a view in the encoder's blocks, with [CLS] and registers.
    """

    views: int
    size: int
    patches: int
    tokens: int


def view_groups(
    encoder: Encoder, views: Sequence[View], mask_ratio: float = 0.0
) -> tuple[ViewGroup, ...]:
    """Return the views of an image by size; a fraction of each view's patches is masked."""
    groups = []
    for size, numbers in views_by_size(views, encoder.image_size).items():
        patches = (size // encoder.patch_size) ** 2
        tokens = encoder.prefix_tokens + visible_patches(patches, mask_ratio)
        groups.append(ViewGroup(len(numbers), size, patches, tokens))
    return tuple(groups)


# --- transformer blocks ---------------------------------------------------------------------------


def block_weights(width: int) -> int:
    """Return the number of weights of a transformer block."""
    return 12 * width**2 + 13 * width


def block_flops(tokens: int, width: int) -> float:
    """Return the forward operations of a transformer block, with an MLP of 4 x width."""
    return 24 * tokens * width**2 + 4 * tokens**2 * width


def blocks_memory(passes: PassMode, tokens: int, width: int, trained: int) -> Activations:
    """Return the memory of blocks and the norm after them, for one view.

    A block that keeps nothing has the inputs of itself and of its MLP, a norm's output, and the
    hidden layer before and after GELU. With checkpointing its own input is kept.

    Args:
        passes: precision and checkpointing.
        tokens: of the view.
        width: of the blocks.
        trained: number of blocks that learn.
    """
    c, checkpointing = passes.product, passes.checkpointing
    block, norm, begin = (8 + 14 * c) * width, 4 * width, (4 + 5 * c) * width
    passing = (12 + 8 * c) * width - norm if checkpointing or not trained else 0
    passing -= norm if checkpointing and trained else 0
    kept = norm + trained * (norm if checkpointing else block)
    # By then the norm behind the blocks is over, and the input of the block is kept.
    backward = begin - norm + (block - norm if checkpointing else 0) if trained else 0
    return Activations(tokens * kept, tokens * passing, tokens * backward)


# --- encoder --------------------------------------------------------------------------------------


def _patch_values(encoder: Encoder) -> int:
    """Return the values of a patch of pixels."""
    return encoder.pixels.channels * encoder.patch_size**2


def encoder_weights(encoder: Encoder, blocks: int | None = None) -> int:
    """Return the approximate weights of the last `blocks` blocks; None or all: of the encoder."""
    blocks = encoder.depth if blocks is None else blocks
    embedding = _patch_values(encoder) * encoder.width if blocks == encoder.depth else 0
    return embedding + blocks * block_weights(encoder.width)


def encode_flops(encoder: Encoder) -> float:
    """Return the forward operations of encoding one whole image.

    Those of timm's models were counted at their own image size. Attention grows with the square of
    the tokens, everything else with the tokens.
    """
    tokens = encoder.prefix_tokens + encoder.patches
    if encoder.timm is None:
        embed = 2 * encoder.patches * _patch_values(encoder) * encoder.width
        return embed + encoder.depth * block_flops(tokens, encoder.width)
    known = find_timm(encoder.timm)
    counted = encoder.prefix_tokens + (known.image_size // known.patch_size) ** 2
    attention = 4 * encoder.depth * encoder.width
    others = (1e9 * known.gflops - attention * counted**2) / counted
    return tokens * others + attention * tokens**2


def encoder_cost(
    passes: PassMode, encoder: Encoder, groups: Sequence[ViewGroup], trained_blocks: int
) -> Cost:
    """Return the cost of the encoder.

    Args:
        passes: precision and checkpointing.
        encoder: its shape.
        groups: views that it encodes.
        trained_blocks: number of last blocks that learn; if all do, the patch embedding does, too.
    """
    whole = trained_blocks == encoder.depth
    operations, memories = 0.0, []
    for group in groups:
        embed = 2 * group.patches * _patch_values(encoder) * encoder.width
        blocks = encoder.depth * block_flops(group.tokens, encoder.width)
        # The pixels need no gradient: one product in the backward pass, not two.
        view = (2 if whole else 1) * embed + (1 + 2 * trained_blocks / encoder.depth) * blocks
        operations += group.views * view
        own = blocks_memory(passes, group.tokens, encoder.width, trained_blocks)
        pixels = passes.product * group.patches * _patch_values(encoder) if whole else 0
        memory = Activations(own.kept + pixels, own.forward, own.backward)
        memories.append(memory.times(group.views))
    weights = encoder_weights(encoder)
    trained = encoder_weights(encoder, trained_blocks)
    return Cost(weights, trained, operations, tuple(memories), exported=weights)


# --- MAE's decoder --------------------------------------------------------------------------------


def decoder_cost(passes: PassMode, encoder: Encoder, group: ViewGroup, mask_ratio: float) -> Cost:
    """Return the cost of MAE's decoder on the views of one size, and of the loss.

    Registers do not reach the decoder. The loss keeps the difference on masked patches in float32.
    While it is computed, memory holds both sides and the prediction in both precisions.
    """
    c, tokens, width = passes.product, 1 + group.patches, encoder.decoder_width
    values, pixels = _patch_values(encoder), group.patches * _patch_values(encoder)
    embed = 2 * (group.tokens - encoder.registers) * encoder.width * width
    predict = 2 * tokens * width * values
    forward = embed + encoder.decoder_depth * block_flops(tokens, width) + predict
    own = blocks_memory(passes, tokens, width, encoder.decoder_depth)
    masked = FLOAT * mask_ratio * pixels
    loss = (c + FLOAT) * pixels + 2 * masked
    behind = c * tokens * width + masked  # the blocks
    kept = own.kept + c * group.tokens * encoder.width + behind
    memory = Activations(kept, max(own.forward - behind, loss), own.backward - behind)
    weights = (encoder.width + values) * width + encoder.decoder_depth * block_weights(width)
    return Cost(weights, weights, 3 * group.views * forward, (memory.times(group.views),))


# --- heads ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadInputs:
    """Inputs of heads: passes, width, views, batch, and whether the encoder gets a gradient."""

    passes: PassMode
    width: int
    groups: Sequence[ViewGroup]
    batch_size: int
    encoder_learns: bool


@singledispatch
def head_cost(head: HeadSettings, given: HeadInputs) -> Cost:
    """Return the cost of a head on the views of an image, by the class of its settings."""
    raise NotImplementedError(f"{type(head).__name__} registers no cost")


@head_cost.register
def nnclr_cost(head: Contrastive, given: HeadInputs) -> Cost:
    """Return the cost of the NNCLR head; only views of the first size look up and have a loss.

    A hidden layer keeps BatchNorm's normalised values and output in float32, and the input of the
    next product. The lookup has the similarities to the queue twice, and a mask of own entries.
    """
    width, hidden, embedding = given.width, head.projector_hidden, head.embedding
    first, rest = width * hidden, hidden * (hidden + embedding)
    projector, predictor = first + rest, 2 * embedding * head.predictor_hidden
    looks_up = head.lookup != "none"
    views, others = given.groups[0].views, sum(group.views for group in given.groups[1:])

    passed = (3 if given.encoder_learns else 2) * first + 3 * (rest + predictor)
    products = passed + (projector if head.projector_ema else 0)
    products += embedding * head.queue_size if looks_up else 0
    logits = embedding * given.batch_size
    # Neighbours get no gradient; without lookup, the other view gets one if something learns.
    if not looks_up and not head.stop_gradient:
        if given.encoder_learns and head.projector_ema:
            products += projector
        if given.encoder_learns or not head.projector_ema:
            products += logits
    operations = 2 * views * (products + 2 * logits) + 2 * others * passed

    c = given.passes.product
    kept = (8 + c) * (2 * hidden + head.predictor_hidden) + c * width + (20 + c) * embedding
    exact = FLOAT if head.precision == "fp32" else 2
    lookup = (2 * exact + 0.5) * head.queue_size if looks_up else 0
    slow = projector if head.projector_ema else 0
    weights = projector + predictor
    return Cost(
        weights,
        weights,
        operations,
        (Activations((views + others) * kept, views * lookup, 0),),
        buffers=FLOAT * slow + head.queue_size * (FLOAT * embedding + 16),
        exported=weights + embedding * head.queue_size,
    )


@head_cost.register
def refiner_cost(head: Refiner, given: HeadInputs) -> Cost:
    """Return the cost of MIM-Refiner's heads on global and local views.

    A hidden layer keeps BatchNorm's normalised values and output in float32, and the input of the
    next product. The loss keeps the softmax of all pairs. Heads look up in turn.
    """
    width, hidden, embedding = given.width, head.projector_hidden, head.embedding
    heads, querying = head.count, given.groups[0].views
    views = sum(group.views for group in given.groups)
    first, rest = width * hidden, hidden * (hidden + embedding)
    predictor = 2 * embedding * head.predictor_hidden
    pairs = querying * views

    products = views * ((3 if given.encoder_learns else 2) * first + 3 * (rest + predictor))
    products += querying * embedding * head.queue_size
    # Projections and neighbours get no gradient, predictions do.
    products += 2 * pairs * embedding * given.batch_size
    products += 2 * pairs * embedding if head.negatives == "own" else 0

    c, exact = given.passes.product, FLOAT if head.precision == "fp32" else 2
    vector = (8 + c) * (2 * hidden + head.predictor_hidden) + c * width + (20 + c) * embedding
    kept = heads * (views * vector + pairs * FLOAT * given.batch_size)
    lookup = querying * (2 * exact + 0.5) * head.queue_size
    logits = heads * pairs * 2 * exact * given.batch_size
    weights = heads * (first + rest + predictor)
    return Cost(
        weights,
        weights,
        2 * heads * products,
        (Activations(kept, max(lookup, logits), logits),),
        buffers=head.queue_size * (FLOAT * heads * embedding + 16),
        exported=weights + heads * embedding * head.queue_size,
    )


# --- devices --------------------------------------------------------------------------------------


def peak_flops(device: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of a whole device by its driver's name; None if unknown."""
    words = f" {device.replace('-', ' ')} "  # as words: an RTX A4000 is no A40
    if " MIG " in words:
        return None
    return next((peak for name, peak in PEAKS.items() if f" {name} " in words), None)


def relative_speed(device: str) -> float:
    """Return the peak of a device relative to an A100's; 1 if it is unknown."""
    return (peak_flops(device) or PEAKS["A100"]) / PEAKS["A100"]


def gpu_memory(name: str) -> float | None:
    """Return the usable bytes of a GPU by a name such as A100-40GB; None: it has no size."""
    given = re.search(r"\b([0-9]+) ?GB?\b", name.replace("-", " "))
    if given is None:
        return None
    # These names have the memory of the CPU.
    size = 96 if "GH200" in name and int(given[1]) in (120, 480) else int(given[1])
    return 0.98 * GIB * size


# --- memory of a training -------------------------------------------------------------------------


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
        rest = self.prepared + self.states(ranks) + exchanged + self.buffers
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
