"""A vision transformer written plainly over a dict of weights, and weights as others publish them.

Nothing here uses the code under test.
"""

import argparse
import math

import numpy as np
import torch
from torch.nn import functional as F

# The encoder size `tiny`.
PATCH, WIDTH, DEPTH, HEADS, GRID = 4, 64, 4, 2, 4


def plain_tokens(weights, images, heads=HEADS):
    """All tokens after the final norm, in float64. `weights` are under timm's names.

    With `norm_pre` among them each norm stands behind a sum, as in data2vec 2.0, and none is last.
    """
    w = {name: value.double() for name, value in weights.items()}
    x = embedded(images, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"])
    if "cls_token" in w:
        x = torch.cat([w["cls_token"].repeat(len(x), 1, 1), x], dim=1)
    positions = w["pos_embed"]
    if positions.shape[1] == x.shape[1]:
        x = x + positions
    else:
        x = torch.cat([x[:, :1], x[:, 1:] + positions], dim=1)
    post = "norm_pre.weight" in w
    if post:
        x = plain_norm(x, w["norm_pre.weight"], w["norm_pre.bias"])
    for number in range(len([name for name in w if name.endswith("attn.qkv.weight")])):
        p = f"blocks.{number}."
        y = x if post else plain_norm(x, w[p + "norm1.weight"], w[p + "norm1.bias"])
        y = y @ w[p + "attn.qkv.weight"].T + w[p + "attn.qkv.bias"]
        width = x.shape[2]
        mixed = []
        for head in range(heads):
            d = width // heads
            q, k, v = (y[..., i * width + head * d : i * width + (head + 1) * d] for i in range(3))
            mixed.append(torch.softmax(q @ k.transpose(1, 2) / math.sqrt(d), dim=-1) @ v)
        y = torch.cat(mixed, dim=-1)
        x = x + y @ w[p + "attn.proj.weight"].T + w[p + "attn.proj.bias"]
        x = plain_norm(x, w[p + "norm1.weight"], w[p + "norm1.bias"]) if post else x
        y = x if post else plain_norm(x, w[p + "norm2.weight"], w[p + "norm2.bias"])
        y = y @ w[p + "mlp.fc1.weight"].T + w[p + "mlp.fc1.bias"]
        y = y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))
        x = x + y @ w[p + "mlp.fc2.weight"].T + w[p + "mlp.fc2.bias"]
        x = plain_norm(x, w[p + "norm2.weight"], w[p + "norm2.bias"]) if post else x
    return x if post else plain_norm(x, w["norm.weight"], w["norm.bias"])


def embedded(images, kernel, bias):
    """Patches of images as tokens."""
    patch = kernel.shape[-1]
    pieces = F.unfold(images.double(), patch, stride=patch).transpose(1, 2)
    return pieces @ kernel.flatten(1).T + bias


def plain_norm(x, weight, bias):
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred / (centred.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight + bias


def mae_table(width, grid, cls):
    """MAE's position embedding by loops: first half of the channels the column, then the row."""
    axis = []
    for position in range(grid):
        angles = [position / 10000 ** (i / (width // 4)) for i in range(width // 4)]
        axis.append([math.sin(a) for a in angles] + [math.cos(a) for a in angles])
    rows = [axis[column] + axis[row] for row in range(grid) for column in range(grid)]
    return torch.tensor([[0.0] * width] * cls + rows)[None]


def moco_table(width, grid):
    """MoCo v3's: the same numbers with row and column exchanged, and a zero row for [CLS]."""
    table = mae_table(width, grid, False)[0].reshape(grid, grid, width).transpose(0, 1)
    return torch.cat([torch.zeros(1, width), table.reshape(grid * grid, width)])[None]


def normal_numbers(seed):
    """A function that draws tensors, one after the other."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, mean=0.0, std=0.2):
        return mean + std * torch.randn(*shape, generator=generator)

    return normal


def encoder_weights(seed, positions, cls=True, width=WIDTH, depth=DEPTH, patch=PATCH):
    """Random weights under timm's names."""
    normal = normal_numbers(seed)
    weights = {"cls_token": normal(1, 1, width)} if cls else {}
    weights |= {
        "pos_embed": positions,
        "patch_embed.proj.weight": normal(width, 3, patch, patch),
        "patch_embed.proj.bias": normal(width),
    }
    for block in range(depth):
        p = f"blocks.{block}."
        for norm in ("norm1", "norm2"):
            weights[p + norm + ".weight"] = normal(width, mean=1)
            weights[p + norm + ".bias"] = normal(width)
        for name, out, into in (
            ("attn.qkv", 3 * width, width),
            ("attn.proj", width, width),
            ("mlp.fc1", 4 * width, width),
            ("mlp.fc2", width, 4 * width),
        ):
            weights[p + name + ".weight"] = normal(out, into, std=0.1)
            weights[p + name + ".bias"] = normal(out)
    weights |= {"norm.weight": normal(width, mean=1), "norm.bias": normal(width)}
    return weights


def prefixed(prefix, weights):
    return {prefix + name: value for name, value in weights.items()}


def fixed(seed=0, cls_row=True):
    return encoder_weights(seed, mae_table(WIDTH, GRID, cls_row))


def learned(seed=0):
    return encoder_weights(seed, normal_numbers(99)(1, 1 + GRID**2, WIDTH, std=1))


def mlp(prefix, *names):
    return {prefix + name: torch.ones(3, 3) for name in names}


def training_state(**more):
    """What training checkpoints hold beside the weights, with numpy's scalars and options."""
    options = argparse.Namespace(lr=1e-3, seed=np.int64(3), epochs=[1, 2], name="x")
    optimizer = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 1e-4}]}
    return {"optimizer": optimizer, "epoch": 7, "args": options} | more


def mae():
    """mae_pretrain_vit_*.pth"""
    weights = fixed()
    return {"model": dict(weights)}, weights


def mae_full():
    """mae_pretrain_vit_*_full.pth, a training checkpoint of that code, and dBOT's."""
    weights = fixed()
    decoder = mlp("decoder_", "pos_embed", "embed.weight", "norm.weight", "pred.bias")
    decoder |= mlp("", "mask_token", "decoder_blocks.0.attn.qkv.weight")
    return {"model": weights | decoder, "scaler": {}} | training_state(), weights


def crossmae():
    """imagenet-mae-cross-vitl-pretrain-*.pth: norms before each layer of the decoder, none last."""
    weights = fixed(8)
    weights |= {"norm.weight": torch.ones(WIDTH), "norm.bias": torch.zeros(WIDTH)}
    state = {name: value for name, value in weights.items() if not name.startswith("norm.")}
    state |= mlp("decoder_", "pos_embed", "norm.weight", "pred.bias")
    state |= mlp("", "mask_token", "decoder_blocks.0.cross_attn.kv.weight")
    state |= mlp("", "dec_norms.0.weight", "wfm.linear.weight")
    return {"model": state} | training_state(), weights


def data2vec2():
    """large_imagenet.pt of fairseq: norms behind sums, positions without a row for [CLS]."""
    weights = post_norm(fixed(9, cls_row=False))
    image = "modality_encoders.IMAGE."
    names = {
        "patch_embed.proj.weight": f"{image}local_encoder.proj.weight",
        "patch_embed.proj.bias": f"{image}local_encoder.proj.bias",
        "cls_token": f"{image}extra_tokens",
        "pos_embed": f"{image}fixed_positional_encoder.positions",
        "norm_pre.weight": f"{image}context_encoder.norm.weight",
        "norm_pre.bias": f"{image}context_encoder.norm.bias",
    }
    state = {names.get(name, name): value for name, value in weights.items()}
    state |= {
        f"{image}decoder.blocks.0.0.weight": torch.ones(8, 8, 3, 3),
        f"{image}decoder.proj.bias": torch.ones(WIDTH),
        "_ema": {"blocks.0.norm1.weight": torch.ones(WIDTH)},
    }
    more = {"last_optimizer_state": None, "extra_state": {"metrics": [("train", {"n": 3})]}}
    return {"args": None, "cfg": {"model": {"depth": 4}}, "model": state} | more, weights


def data2vec2_fine_tuned():
    """fairseq's fine-tuned model: the encoder is a part of it, and a classifier lies beside it."""
    checkpoint, weights = data2vec2()
    state = {f"model.{name}": value for name, value in checkpoint["model"].items()}
    classifier = {"head.weight": torch.ones(3, WIDTH), "fc_norm.weight": torch.ones(WIDTH)}
    return {"model": state | classifier}, weights


def mae_reimpl():
    """mae_reimpl_*.th: the state dict in an entry, positions without a row for [CLS]."""
    weights = fixed(cls_row=False)
    return {"state_dict": dict(weights)}, weights


def mae_ct_legacy():
    """maectaug_*.th in the older form: the state dict itself, 1 + L positions."""
    weights = fixed()
    return dict(weights), weights


def moco(base, momentum):
    projector = ("head.0.weight", "head.1.running_mean", "head.6.weight", "head.7.running_var")
    state = mlp("module.predictor.", "0.weight", "1.bias", "3.weight")
    for name, weights in (("base", base), ("momentum", momentum)):
        state |= prefixed(f"module.{name}_encoder.", weights)
        state |= mlp(f"module.{name}_encoder.", *projector)
    return {"arch": "vit_base", "state_dict": state} | training_state()


def moco_v3():
    """vit-b-300ep.pth.tar"""
    table = moco_table(WIDTH, GRID)
    base, momentum = encoder_weights(1, table), encoder_weights(2, table)
    return moco(base, momentum), base


def moco_v3_linear():
    """linear-vit-b-300ep.pth.tar"""
    weights = encoder_weights(1, moco_table(WIDTH, GRID))
    state = prefixed("module.", weights) | mlp("module.head.", "weight", "bias")
    more = {"best_acc1": torch.tensor(76.7), "optimizer": {}}
    return {"epoch": 90, "arch": "vit_base", "state_dict": state} | more, weights


def layer_grafting():
    """checkpoint_final.pth.tar: MoCo v3's names, MAE's positions."""
    base, momentum = fixed(1), fixed(2)
    return moco(base, momentum), momentum


def msn():
    """vitb16_600ep.pth.tar"""
    weights = learned()
    head = mlp("module.fc.", "fc1.weight", "bn1.running_mean", "fc3.bias")
    state = prefixed("module.", weights) | head
    return {"target_encoder": state, "prototypes": torch.ones(5, 5)}, weights


def ibot():
    """checkpoint_teacher.pth"""
    weights = learned()
    more = {"masked_embed": torch.ones(1, WIDTH)} | mlp("head.", "mlp.0.weight", "last_layer.bias")
    return {"state_dict": weights | more}, weights


def ibot_full():
    """checkpoint.pth"""
    teacher, student = learned(3), learned(4)
    head = mlp("head.", "mlp.0.weight", "last_layer.weight_v", "last_layer2.weight_g")
    student = prefixed("module.backbone.", student | {"masked_embed": torch.ones(1, WIDTH)})
    state = {"student": student, "teacher": prefixed("backbone.", teacher) | head}
    more = training_state(ibot_loss={"center": torch.ones(1, 8)}, fp16_scaler={"scale": 2.0})
    return state | more, teacher


def dino():
    """dino_vitbase16_pretrain.pth"""
    weights = learned()
    return dict(weights), weights


def post_norm(weights):
    """With a norm behind the embedding in place of the last one."""
    for part in ("weight", "bias"):
        weights[f"norm_pre.{part}"] = weights.pop(f"norm.{part}")
    return weights


def as_refined(weights):
    """Under the names of MIM-Refiner's code."""
    state, grid = dict(weights), weights["pos_embed"].unflatten(1, (GRID, GRID))
    del state["pos_embed"]
    state |= {"cls_tokens.tokens": state.pop("cls_token"), "pos_embed.embed": grid}
    for part in ("weight", "bias"):
        if f"norm_pre.{part}" in state:
            state[f"embed_norm.{part}"] = state.pop(f"norm_pre.{part}")
    return {"state_dict": state, "ctor_kwargs": {"drop_path_rate": 0.0}, "epoch": 30}


def mim_refiner():
    """maerefined_l16.th, dbotrefined_h14.th"""
    weights = fixed(cls_row=False)
    return as_refined(weights), weights


def mim_refiner_post():
    """d2v2refined_l16.th"""
    weights = post_norm(fixed(1, cls_row=False))
    return as_refined(weights), weights


def ijepa():
    """IN1K-vit.h.14-300e.pth.tar"""
    target = encoder_weights(5, mae_table(WIDTH, GRID, False), cls=False)
    context = encoder_weights(6, mae_table(WIDTH, GRID, False), cls=False)
    state = {
        "encoder": prefixed("module.", context),
        "predictor": mlp("module.", "predictor_embed.weight", "mask_token"),
        "target_encoder": prefixed("module.", target),
        "opt": {"state": {}, "param_groups": [{"lr": np.float64(1e-3)}]},
    }
    return state | training_state(loss=0.2), target


def pixio():
    """pixio_vitb16.pth: eight [CLS] tokens, each with a position."""
    positions = normal_numbers(98)(1, 8 + GRID**2, WIDTH, std=1)
    weights = encoder_weights(10, positions)
    several = normal_numbers(97)(1, 8, WIDTH, std=1)
    # An import adds their positions to them: of such numbers that is exact in float32.
    weights["cls_token"] = (several * 64).round() / 256
    positions[:, :8] = (positions[:, :8] * 256).round() / 256
    return dict(weights), weights


def capi(registers=16, width=WIDTH, depth=DEPTH, heads=HEADS):
    """capi_vitl14_*.pth, with beginnings of the predictor and the head beside the encoder."""
    normal = normal_numbers(11)
    weights = {
        "registers": normal(1, registers, width, std=0.5),
        "patch_embed.weight": normal(width, 3, PATCH, PATCH),
        "patch_embed.bias": normal(width),
    }
    for block in range(depth):
        p = f"encoder.blocks.{block}."
        for part in ("residual1", "residual2"):
            weights[f"{p}{part}.norm.weight"] = normal(width, mean=1)
        for name in ("q_proj", "k_proj", "v_proj", "proj"):
            weights[f"{p}residual1.fn.{name}.weight"] = normal(width, width, std=0.1)
        weights[f"{p}residual1.fn.rope.freqs"] = normal(2, width // heads, std=3.0)
        weights[f"{p}residual2.fn.fc1.weight"] = normal(4 * width, width, std=0.1)
        weights[f"{p}residual2.fn.fc2.weight"] = normal(width, 4 * width, std=0.1)
    beside = {
        "backbone.decoder.blocks.0.residual1.norm.weight": torch.ones(width),
        "backbone.mask_token": torch.ones(1, width),
        "head.last_layer.weight_v": torch.ones(7, width),
    }
    return prefixed("backbone.", weights) | beside, weights


def capi_tokens(weights, images, heads=HEADS):
    """Registers and patches behind the final norm, in float64, one token after the other."""
    w = {name: value.double() for name, value in weights.items()}
    x = embedded(images, w["patch_embed.weight"], w["patch_embed.bias"])
    x = torch.cat([w["registers"].repeat(len(x), 1, 1), x], dim=1)
    rows, columns = (side // w["patch_embed.weight"].shape[-1] for side in images.shape[2:])
    side = w["registers"].shape[1] // 4
    where = [(i / side, 0.0) for i in range(side)] + [(1.0, i / side) for i in range(side)]
    where += [(1 - i / side, 1.0) for i in range(side)] + [(0.0, 1 - i / side) for i in range(side)]
    where += [(r / (rows - 1), c / (columns - 1)) for r in range(rows) for c in range(columns)]

    def rms(y, weight=None):
        y = y / (y.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
        return y if weight is None else y * weight

    def turned(y, freqs):
        """Channels c and c + d / 2 of each token, by the angle of each."""
        half = y.shape[2] // 2
        other = torch.cat([-y[..., half:], y[..., :half]], dim=2)
        angles = torch.stack([row * freqs[0] + column * freqs[1] for row, column in where])
        return y * angles.cos() + other * angles.sin()

    for number in range(len([name for name in w if name.endswith("fc1.weight")])):
        p = f"encoder.blocks.{number}."
        y, width = rms(x, w[p + "residual1.norm.weight"]), x.shape[2] // heads
        mixed = []
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            q, k, v = (
                y @ w[f"{p}residual1.fn.{name}_proj.weight"][part].T for name in ("q", "k", "v")
            )
            freqs = w[p + "residual1.fn.rope.freqs"]
            scores = turned(q, freqs) @ turned(k, freqs).transpose(1, 2) / math.sqrt(width)
            mixed.append(torch.softmax(scores, dim=-1) @ v)
        x = x + torch.cat(mixed, dim=-1) @ w[p + "residual1.fn.proj.weight"].T
        y = rms(x, w[p + "residual2.norm.weight"]) @ w[p + "residual2.fn.fc1.weight"].T
        y = y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))
        x = x + y @ w[p + "residual2.fn.fc2.weight"].T
    return rms(x)
