"""The three stages against a second writing of the authors' procedure, in float64.

It shares with the stages their first weights and what is drawn: views, masks, which neighbour.
"""

import math
from pathlib import Path

import float64
import pytest
import torch
from lookups import clear
from torch.nn import functional as F

from maect.data.index import open_index
from maect.recipes import Encoder
from maect.stages import STAGES

STEPS, DEPTH, HEADS, FROZEN = 8, 4, 2, 2
PEAK, HEAD_PEAK = 1e-3 * 16 * 2 / 256, 2e-3 * 16 * 2 / 256
# Its gradient is zero: BatchNorm does not see what all rows have in common. So is that of the keys'
# bias, for softmax. What is computed instead is rounding noise, which Adam makes steps of.
BLIND = ("head.projector.7.bias",)
BLIND_IN_TUNING = ("head.projector.7.bias", "encoder.norm.bias")


def seen(name, value):
    """A parameter without the part whose gradient is zero: of qkv's bias the keys'."""
    if not name.endswith("attn.qkv.bias"):
        return value
    query, _, values = value.detach().chunk(3)
    return torch.cat([query, values])


def layer_norm(x, w, name):
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return centred / scale * w[f"{name}.weight"] + w[f"{name}.bias"]


def linear(x, w, name):
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def block(x, w, name):
    b, n, width = x.shape
    y = linear(layer_norm(x, w, f"{name}.norm1"), w, f"{name}.attn.qkv")
    q, k, v = y.reshape(b, n, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
    y = (q @ k.transpose(2, 3) / math.sqrt(width // HEADS)).softmax(-1) @ v
    x = x + linear(y.transpose(1, 2).reshape(b, n, width), w, f"{name}.attn.proj")
    y = linear(layer_norm(x, w, f"{name}.norm2"), w, f"{name}.mlp.fc1")
    return x + linear(y * (1 + torch.erf(y / math.sqrt(2))) / 2, w, f"{name}.mlp.fc2")


def encode(images, w, keep=None):
    """Tokens after each block, and the encoder's output: those after its norm."""
    kernel = w["encoder.patch_embed.proj.weight"].flatten(1)
    x = F.unfold(images, 4, stride=4).transpose(1, 2) @ kernel.T
    table, side = w["encoder.pos_embed"][:, 1:], images.shape[2] // 4
    if side != 4:
        grid = table.float().reshape(1, 4, 4, -1).permute(0, 3, 1, 2)
        grid = F.interpolate(grid, size=(side, side), mode="bicubic", align_corners=False)
        table = grid.flatten(2).transpose(1, 2).double()
    x = x + w["encoder.patch_embed.proj.bias"] + table
    if keep is not None:
        x = torch.stack([rows[index] for rows, index in zip(x, keep, strict=True)])
    x = torch.cat([w["encoder.cls_token"].expand(len(x), 1, -1), x], dim=1)
    blocks = []
    for number in range(DEPTH):
        x = block(x, w, f"encoder.blocks.{number}")
        blocks.append(x)
    return blocks, layer_norm(x, w, "encoder.norm")


def mae(views, w, _):
    """mae_vit_trainer.py: the mean over hidden patches of all views."""
    total, count = 0, 0
    for images, shuffle in zip(views.images[0], views.ids_shuffle, strict=True):
        visible, hidden = shuffle[:, :4], shuffle[:, 4:]
        y = linear(encode(images, w, visible)[1], w, "decoder.embed")
        x = w["decoder.mask_token"].expand(len(y), 16, -1).clone()
        for row, index in enumerate(visible):
            x[row, index] = y[row, 1:]
        x = torch.cat([y[:, :1], x], dim=1) + w["decoder.pos_embed"]
        x = layer_norm(block(x, w, "decoder.blocks.0"), w, "decoder.norm")
        prediction = linear(x, w, "decoder.pred")[:, 1:]
        patches = F.unfold(images, 4, stride=4).transpose(1, 2)
        patches = patches.unflatten(2, (3, 16)).transpose(2, 3).flatten(2)  # channels last
        target = patches - patches.mean(2, keepdim=True)
        target = target / (patches.var(2, keepdim=True) + 1e-6).sqrt()
        for row, index in enumerate(hidden):
            total = total + (prediction[row, index] - target[row, index]).square().mean(1).sum()
            count += len(index)
    return total / count


def mlp(x, w, name, last):
    for number in range(0, last + 1, 3):
        x = x @ w[f"{name}.{number}.weight"].T
        norm = f"{name}.{number + 1}"
        if f"{norm}.weight" in w:
            x = (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt()
            x = x * w[f"{norm}.weight"] + w[f"{norm}.bias"]
        if number < last:
            x = x.relu()
    return x


def nnclr(views, w, queue):
    """contrastive_head_base.py and nnclr_loss.py; images that come twice are no negatives."""
    features = [encode(images, w)[1][:, 1:].mean(1) for images in views.images[0]]
    if not w["encoder.norm.weight"].requires_grad:
        features = [x.detach() for x in features]
    predicted = [F.normalize(mlp(mlp(x, w, "head.projector", 6), w, "head.predictor", 3), dim=1)
                 for x in features]  # fmt: skip
    with torch.no_grad():
        name = "head.slow_projector" if "head.slow_projector.0.weight" in w else "head.projector"
        anchors = [F.normalize(mlp(x, w, name, 6), dim=1) for x in features]
    loss = 0
    for view in range(2):
        for row, own in enumerate(views.ids):
            similarity = queue["vectors"] @ anchors[view][row]
            similarity[queue["ids"] == own] = -1
            place = views.neighbors[view, row]
            clear(similarity, int(place) + 1, place, least=1e-9)
            nearest = similarity.argsort(descending=True)[int(place)]
            logits = predicted[1 - view] @ queue["vectors"][nearest].clone() / 0.15
            others = (views.ids != own) | (torch.arange(len(views.ids)) == row)
            loss = loss + logits[others].logsumexp(0) - logits[row]
    size = len(views.ids)
    for key, value in (("vectors", anchors[0]), ("ids", views.ids)):
        queue[key][queue["at"] : queue["at"] + size] = value
    queue["at"] = (queue["at"] + size) % len(queue["ids"])
    return loss / (2 * size)


def rate(name):
    """Peak learning rate in tuning: layer decay 0.65, the last block at 0.65 of the norm's."""
    if name.startswith("head."):
        return HEAD_PEAK
    if not name.startswith("encoder.blocks."):
        return PEAK
    return PEAK * 0.65 ** (DEPTH - int(name.split(".")[2]))


def adam(w, moments, step, rates, lowest=0.0, undecayed=(), warmup=2, total=STEPS):
    """AdamW of PyTorch, written out: betas 0.9 and 0.95, eps 1e-8, decay apart from the moments.

    Args:
        lowest: last learning rate, as a share of the peak.
        undecayed: parameters without weight decay, beside those of one dimension.
    """
    factor = (step + 1) / (warmup + 1)
    if step >= warmup:
        cosine = (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2
        factor = lowest + (1 - lowest) * cosine
    for name, value in w.items():
        if value.grad is None:
            continue
        m, v = moments.setdefault(name, (torch.zeros_like(value), torch.zeros_like(value)))
        m.mul_(0.9).add_(0.1 * value.grad)
        v.mul_(0.95).add_(0.05 * value.grad.square())
        decay = 1e-5 if name.startswith("head") else 0.05
        decay = 0.0 if value.ndim == 1 or name in undecayed else decay
        with torch.no_grad():
            value -= factor * rates(name) * decay * value
            m_hat, v_hat = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.95 ** (step + 1))
            value -= factor * rates(name) * m_hat / (v_hat.sqrt() + 1e-8)
        value.grad = None


@pytest.mark.parametrize("recipe", ["mae", "head_min", "ct_min", "ct_aug"])
def test_the_same_steps_at_adams_own_epsilon(job, recipe):
    head = {"head_lr": 2e-3, "topk": 1 if recipe == "head_min" else 3}
    changes = {} if recipe == "mae" else {"head": head}
    value = job("run", recipe, warmup_fraction=2 / STEPS, **changes)
    stage = STAGES[value["stage"]].model_validate(value["settings"])
    encoder, seed = Encoder.model_validate(value["encoder"]), value["seed"]
    objective = stage.objective(encoder, seed).double()
    w, moments = float64.copied(objective), {}
    trained = {name for name, value in w.items() if value.requires_grad}
    queue = {"at": 0}
    if "head.queue" in w:
        queue |= {"vectors": w["head.queue"].clone(), "ids": w["head.queue_ids"].clone()}
    assert (recipe == "mae") == ("encoder.cls_token" in trained)
    frozen = tuple(f"encoder.blocks.{number}." for number in range(FROZEN))
    assert recipe == "mae" or not any(name.startswith(frozen) for name in trained)
    for group in stage.parameter_groups(objective):
        for name in group["names"]:
            decay = 1e-5 if name.startswith("head.") else 0.05
            assert group["weight_decay"] == (decay if w[name].ndim > 1 else 0.0), name
    twice, noise = 0, 0.0
    index = open_index(Path(value["shards"]))
    for step, views, loss, _ in float64.trained(objective, stage, index, STEPS, seed):
        twice += len(views.ids) - len(views.ids.unique())
        ours = (mae if recipe == "mae" else nnclr)(views, w, queue)
        ours.backward()
        assert ours.item() == pytest.approx(loss.item(), rel=1e-9), step
        for name, parameter in objective.named_parameters():
            if name in trained:
                scale = float(parameter.grad.abs().max()) + 1e-12
                grads = w[name].grad, parameter.grad
                assert torch.allclose(*grads, rtol=1e-6, atol=1e-9 * scale + 1e-14), name
        if "head.projector.7.bias" in w:
            noise = max(noise, float(w["head.projector.7.bias"].grad.abs().max()))
        adam(w, moments, step, rate if recipe != "mae" else lambda name: PEAK)
        if "head.slow_projector.0.weight" in w:
            for name, tensor in w.items():
                fast = name.replace("slow_projector", "projector")
                if name != fast and fast in trained:
                    tensor.mul_(0.9).add_(0.1 * w[fast].detach())
    assert recipe == "mae" or (twice > 0 and noise < 1e-13)
    moved = 0
    for name, parameter in objective.named_parameters():
        if name in trained and name not in (BLIND_IN_TUNING if "ct" in recipe else BLIND):
            both = seen(name, parameter.data), seen(name, w[name].detach())
            torch.testing.assert_close(*both, rtol=1e-8, atol=1e-10, msg=name)
            moved += 1
    assert moved > 10
