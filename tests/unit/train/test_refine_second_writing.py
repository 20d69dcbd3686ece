"""Whole trainings of MIM-Refiner on digits against a second writing of the authors' procedure.

Both stages of 8 updates each, the second from the first, in float64. Shared are the first weights
and what is drawn: views, and which of the nearest neighbours. Files of the authors that are named
are those of ml-jku/MIM-Refiner.
"""

import math
from dataclasses import replace

import float64
import pytest
import torch
from lookups import clear
from test_second_writing import DEPTH, adam, encode, seen
from torch.nn import functional as F

from maect.data.bundled import write_digits
from maect.data.index import open_index
from maect.data.shards import shard
from maect.recipes import load_encoder
from maect.stages import load_recipe

BATCH, STEPS = 30, 8
PEAK, HEAD_PEAK, LOWEST, TEMPERATURE = 4e-3 * BATCH / 256, 2e-3 * BATCH / 256, 1e-6, 0.2
SETTINGS = {
    "batch_size": BATCH, "epochs": 2, "warmup_epochs": 0.5, "flip": 0.0, "precision": "fp32",
    "local_views": 4, "head": {"head_lr": 2e-3, "queue_size": 150},
}  # fmt: skip
READ = (2, 3)
# Their gradients are zero: a BatchNorm behind does not see what all rows have in common.
BLIND = ("encoder.norm.bias", "heads.projector.7.bias")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Shards of 120 of the digits of `val`."""
    root = tmp_path_factory.mktemp("digits")
    write_digits(root / "images")
    shard(root / "images" / "val", root / "shards", "folder", 2)
    index = open_index(root / "shards")
    return replace(index, rows=index.rows[:120])


def pooled(images, w):
    """The mean of the patch tokens that each head reads: of a raw block, and of the output."""
    blocks, output = encode(images, w)
    read = [*(blocks[number] for number in READ[:-1]), output]
    return [tokens[:, 1:].mean(1) for tokens in read]


def batch_norm(x, w, name, head):
    """Of one head's rows, all views together; channels of all heads lie side by side."""
    x = (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt()
    channels = slice(head * x.shape[1], (head + 1) * x.shape[1])
    return x * w[f"{name}.weight"][channels] + w[f"{name}.bias"][channels]


def layers(x, w, name, head, last):
    """nnclr_head.py: Linear without bias, BatchNorm, and between two of them GELU."""
    for number in range(0, last + 1, 3):
        x = x @ w[f"{name}.{number}.weight"][head].T
        x = batch_norm(x, w, f"{name}.{number + 1}", head)
        x = x if number == last else x * (1 + torch.erf(x / math.sqrt(2))) / 2
    return x


def one_head(features, head, w, queue, numbers, ids):
    """nnclr_loss.py: of views [v][b, D], global ones first; returns what enters the queue, too."""
    count, size = len(features), len(ids)
    z = layers(torch.cat(features), w, "heads.projector", head, 6)
    p = F.normalize(layers(z, w, "heads.predictor", head, 3), dim=1).split(size)
    z = F.normalize(z.detach(), dim=1).split(size)
    neighbours = []
    for view in range(2):
        similarity = z[view] @ queue["vectors"][head].T
        similarity[ids[:, None] == queue["ids"]] = -1
        places = numbers[2 * head + view]
        clear(similarity, int(places.max()) + 1, places, least=1e-9)
        chosen = similarity.argsort(dim=1, descending=True)[torch.arange(size), places]
        neighbours.append(queue["vectors"][head][chosen].clone())
    losses = []
    # Global with global, then the loop over as many views as are local, from the first of all.
    pairs = [(0, 1), (1, 0), *[(i, j) for i in range(2) for j in range(count - 2)]]
    for i, j in pairs:
        logits = z[i] @ p[j].T
        own = (neighbours[i] * p[j]).sum(1)
        diagonal = torch.eye(size, dtype=torch.bool)
        logits = torch.where(diagonal, own[:, None], logits) / TEMPERATURE
        losses.append((logits.logsumexp(1) - own / TEMPERATURE).mean())
    return sum(losses) / len(pairs), z[0]


def refiner(views, w, queue):
    """The sum over heads; then global view 0 enters their queues."""
    by_view = [pooled(images, w) for group in views.images for images in group]
    loss, entering = 0, []
    for head in range(len(READ)):
        features = [view[head] for view in by_view]
        if not w["encoder.norm.weight"].requires_grad:
            features = [x.detach() for x in features]
        value, vectors = one_head(features, head, w, queue, views.neighbors, views.ids)
        loss = loss + value
        entering.append(vectors)
    at = (queue["at"] + torch.arange(len(views.ids))) % len(queue["ids"])
    queue["vectors"][:, at] = torch.stack(entering)
    queue["ids"][at] = views.ids
    queue["at"] += len(views.ids)
    return loss


def rate(name):
    """Peak learning rate: of the encoder by the layer's depth."""
    if name.startswith("heads."):
        return HEAD_PEAK
    if name.startswith("encoder.blocks."):
        return PEAK * 0.65 ** (DEPTH - int(name.split(".")[2]))
    return PEAK if name.startswith("encoder.norm.") else PEAK * 0.65 ** (DEPTH + 1)


def train(recipe, digits, w, queue, before=None):
    """A whole training by the stage, and by the second writing, which changes w and queue.

    Returns:
        The stage's objective, and its trained parameters by name.
    """
    stage, encoder = load_recipe(recipe, "tiny", SETTINGS), load_encoder("tiny")
    assert stage.total_steps(digits.n) == STEPS and stage.head.read(DEPTH) == READ
    objective = stage.objective(encoder, 0).double()
    if before is None:
        w |= float64.copied(objective)
        queue |= {"vectors": w["heads.queue"].clone(), "ids": w["heads.queue_ids"].clone()}
    else:
        objective.encoder.load_state_dict(before.encoder.state_dict())
        objective.heads.take_over(dict(before.heads.state_dict()))
    trained = {n: p for n, p in objective.named_parameters() if p.requires_grad}
    for name, value in w.items():
        value.requires_grad_(name in trained)
    lowest = LOWEST / (HEAD_PEAK if before is None else PEAK)
    moments = {}
    for step, views, loss, _ in float64.trained(objective, stage, digits, STEPS, 0):
        ours = refiner(views, w, queue)
        ours.backward()
        assert ours.item() == pytest.approx(loss.item(), rel=1e-7), step
        adam(w, moments, step, rate, lowest=lowest, undecayed=("encoder.cls_token",))
    return objective, trained


def test_whole_trainings_of_both_stages(digits):
    w, queue = {}, {"at": 0}
    heads, trained = train("refine_heads", digits, w, queue)
    assert trained and all(name.startswith("heads.") for name in trained)
    assert not heads.encoder.training and heads.heads.training
    start = {n: v.detach().clone() for n, v in w.items()}
    refined, trained = train("refine", digits, w, queue, before=heads)
    assert {"encoder.cls_token", "encoder.patch_embed.proj.weight"} < set(trained)
    for name, parameter in trained.items():
        if name in BLIND:
            continue
        ours, theirs = seen(name, parameter.detach()), seen(name, w[name].detach())
        assert float((ours - theirs).abs().max()) <= 1e-5, name
        assert float((theirs - seen(name, start[name])).abs().max()) > 1e-4, name
    assert torch.equal(refined.heads.queue_ids, queue["ids"])
    assert float((refined.heads.queue - queue["vectors"]).abs().max()) <= 1e-5
