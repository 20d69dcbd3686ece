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
"""

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
from maect.recipes.timm_encoders import find_timm

FLOAT = 4
"""Bytes of a float32 number."""
PEAKS: dict[str, float] = read_yaml(Path(__file__).with_name("flops.yaml"))
"""Dense bfloat16 FLOP/s of devices, by words of their drivers' names."""


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
