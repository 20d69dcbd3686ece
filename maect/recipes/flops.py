"""Floating-point operations of a training step, counted from its settings; no torch needed.

Model operations: what the method itself computes, a multiplication and an addition being two.
Recomputing activations is not counted, nor is what is linear in the tokens (norms, softmax,
optimizer). The backward pass of a product costs one more product for each factor that needs a
gradient.
"""

from maect.recipes import Contrastive, Encoder

# Dense bfloat16 rates of one device in FLOP/s (NVIDIA's data sheets), by words of the name that
# the driver gives; of several that fit, the first.
PEAKS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
}


def peak_flops(device: str) -> float | None:
    """Dense bfloat16 FLOP/s of a whole device by its driver's name, or None if unknown."""
    words = f" {device.replace('-', ' ')} "  # as words: an RTX A4000 is no A40
    if " MIG " in words:
        return None
    return next((peak for name, peak in PEAKS.items() if f" {name} " in words), None)


def relative_speed(device: str) -> float:
    """Peak of a device relative to an A100's; 1 where it is not known."""
    return (peak_flops(device) or PEAKS["A100"]) / PEAKS["A100"]


def block_flops(tokens: int, width: int) -> float:
    """Forward operations of a transformer block: four projections, MLP of 4 x width, attention."""
    return 24 * tokens * width**2 + 4 * tokens**2 * width


def view_flops(encoder: Encoder, tokens: int, frozen: int = 0) -> float:
    """Forward and backward operations of the encoder for one view, its lowest blocks frozen."""
    embed = 2 * encoder.patches * (encoder.pixels.channels * encoder.patch_size**2) * encoder.width
    blocks = encoder.depth * block_flops(tokens, encoder.width)
    # The pixels need no gradient: one product in the backward pass, not two.
    return (1 if frozen else 2) * embed + (1 + 2 * (1 - frozen / encoder.depth)) * blocks


def parameters(encoder: Encoder) -> int:
    """Weights of an encoder, near enough for its size on disk."""
    embed = encoder.pixels.channels * encoder.patch_size**2 * encoder.width
    return embed + encoder.depth * (12 * encoder.width**2 + 13 * encoder.width)


def encode_flops(encoder: Encoder) -> float:
    """Forward operations of encoding one whole image."""
    embed = 2 * encoder.patches * encoder.pixels.channels * encoder.patch_size**2 * encoder.width
    tokens = encoder.prefix_tokens + encoder.patches
    return embed + encoder.depth * block_flops(tokens, encoder.width)


def decoder_flops(encoder: Encoder, visible: int) -> float:
    """Forward operations of MAE's decoder for a view, given this many tokens; without registers."""
    tokens, width = 1 + encoder.patches, encoder.decoder_width
    embed = 2 * (visible - encoder.registers) * encoder.width * width
    pixels = 2 * tokens * width * encoder.pixels.channels * encoder.patch_size**2
    return embed + encoder.decoder_depth * block_flops(tokens, width) + pixels


def head_flops(head: Contrastive, width: int, batch_size: int, encoder_learns: bool) -> float:
    """Forward and backward operations of the NNCLR head for one view."""
    first = 2 * width * head.projector_hidden
    rest = 2 * head.projector_hidden * (head.projector_hidden + head.embedding)
    predictor = 4 * head.embedding * head.predictor_hidden
    total = (3 if encoder_learns else 2) * first + 3 * (rest + predictor)
    if head.projector_ema:
        total += first + rest
    if head.lookup != "none":
        total += 2 * head.embedding * head.queue_size
    logits = 2 * head.embedding * batch_size
    # Neighbours get no gradient; the other view gets one where something behind it learns.
    if head.lookup == "none" and not head.stop_gradient:
        if encoder_learns and head.projector_ema:
            total += first + rest
        if encoder_learns or not head.projector_ema:
            total += logits
    return total + 2 * logits


def head_parameters(head: Contrastive, width: int) -> int:
    """Weights and queue of the NNCLR head, near enough for their size on disk."""
    hidden = head.projector_hidden
    projector = hidden * (width + hidden + head.embedding)
    return projector + 2 * head.embedding * head.predictor_hidden + head.embedding * head.queue_size
