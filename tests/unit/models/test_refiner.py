"""MIM-Refiner's heads against loops over samples, pairs of views and heads, in float64."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from maect.models import refiner
from maect.models.refiner import RefinerHeads, head_weights, pair_counts
from maect.models.vit import seeded
from maect.recipes import Refiner

WIDTH, BATCH = 7, 6
SHAPE = {
    "queue_size": 18, "projector_hidden": 8, "predictor_hidden": 9, "embedding": 5,
    "temperature": 0.3, "topk": 3, "head_lr": 1e-3, "head_weight_decay": 0.0,
}  # fmt: skip


def heads_of(blocks=(1, 2, 4), views=6, **changes):
    settings = Refiner(**SHAPE | {"blocks": blocks} | changes)
    with seeded(3):
        return RefinerHeads(WIDTH, settings, settings.read(max(blocks) + 1), views).double()


def batch(heads=3, views=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(heads, views, BATCH, WIDTH, generator=generator, dtype=torch.float64)
    numbers = torch.randint(0, 3, (2 * heads, BATCH), generator=generator)
    ids = torch.arange(100, 100 + BATCH)
    return features.requires_grad_(), ids, torch.arange(BATCH) % 3, numbers


def second_norm(rows, weight, bias):
    """BatchNorm of rows [n, C] by its definition."""
    mean = rows.sum(0) / len(rows)
    variance = (rows - mean).square().sum(0) / len(rows)
    return (rows - mean) / (variance + 1e-5).sqrt() * weight + bias


def keep_statistics(layer, channels, rows):
    """Running statistics by their definition, the variance without bias."""
    rows = rows.detach()
    mean = rows.mean(0)
    variance = (rows - mean).square().sum(0) / (len(rows) - 1)
    layer.running_mean[channels] = 0.9 * layer.running_mean[channels] + 0.1 * mean
    layer.running_var[channels] = 0.9 * layer.running_var[channels] + 0.1 * variance


def second_layers(layers, x, head, joint):
    """Layers of one head on views [V, b, C]; running statistics as they become."""
    for layer in layers:
        if isinstance(layer, nn.GELU):
            x = x * (1 + torch.erf(x / math.sqrt(2))) / 2
        elif hasattr(layer, "running_mean"):
            channels = slice(head * x.shape[2], (head + 1) * x.shape[2])
            weight, bias = layer.weight[channels], layer.bias[channels]
            for rows in [x.flatten(0, 1)] if joint else x:
                keep_statistics(layer, channels, rows)
            if joint:
                x = second_norm(x.flatten(0, 1), weight, bias).view(x.shape)
            else:
                x = torch.stack([second_norm(view, weight, bias) for view in x])
        else:
            x = x @ layer.weight[head].T
    return x


def pairs_of(views, terms):
    """The authors' two loops, and what the formula says."""
    local = views - 2
    between = [(i, j) for i in range(2) for j in range(2) if i != j]
    if terms == "released":
        return between + [(i, j) for i in range(2) for j in range(local)]
    return between + [(i, 2 + j) for i in range(2) for j in range(local)]


def second(heads, features, ids, labels, numbers):
    """Loss of each head, the vectors that enter its queue, and the metrics."""
    settings, losses, entering = heads.settings, [], []
    metrics, alignment = {}, {"global": [], "local": []}
    for head in range(len(features)):
        joint = settings.statistics == "joint"
        z = second_layers(heads.projector, features[head], head, joint)
        p = second_layers(heads.predictor, z, head, joint)
        p = p / p.norm(dim=2, keepdim=True)
        z = (z / z.norm(dim=2, keepdim=True)).detach()
        queue, terms, looked_up = heads.queue[head].clone(), [], {}
        pairs = pairs_of(len(features[head]), settings.terms)
        for i, j in pairs:
            for a in range(BATCH):
                others = [n for n in range(len(queue)) if heads.queue_ids[n] != ids[a]]
                others.sort(key=lambda n, z=z[i, a], queue=queue: -float(z @ queue[n]))
                looked_up[i, a] = others[int(numbers[2 * head + i, a])]
                neighbor = queue[looked_up[i, a]]
                query = z[i, a] if settings.negatives == "own" else neighbor
                logits = [
                    (neighbor if b == a else query) @ p[j, b] / settings.temperature
                    for b in range(BATCH)
                    if b == a or ids[b] != ids[a]
                ]
                own = neighbor @ p[j, a] / settings.temperature
                terms.append(torch.stack(logits).exp().sum().log() - own)
                alignment["global" if j < 2 else "local"].append(math.exp(-terms[-1].item()))
        losses.append(torch.stack(terms).sum() / (BATCH * len(pairs)))
        entering.append(z[0])
        similar = [float(z[i, a] @ queue[n]) for (i, a), n in looked_up.items()]
        pairs = [(int(labels[a]), int(heads.queue_labels[n])) for (_, a), n in looked_up.items()]
        right = [own == other for own, other in pairs if min(own, other) >= 0]
        metrics[f"lookup_similarity.{heads.numbers[head]}"] = np.mean(similar)
        metrics[f"lookup_accuracy.{heads.numbers[head]}"] = 100 * np.mean(right) if right else 0
    metrics |= {f"alignment_{kind}": np.mean(values) for kind, values in alignment.items()}
    metrics["queue_filled"] = np.mean(heads.queue_ids.numpy() >= 0)
    return torch.stack(losses), torch.stack(entering), metrics


@pytest.mark.parametrize(
    ("terms", "negatives", "statistics"),
    [
        ("released", "own", "joint"),
        ("released", "neighbour", "per_view"),
        ("all", "own", "per_view"),
        ("all", "neighbour", "joint"),
    ],
)
def test_loss_and_gradients_against_loops(terms, negatives, statistics):
    heads = heads_of(terms=terms, negatives=negatives, statistics=statistics)
    with torch.no_grad():  # not ones and zeros
        for name, value in heads.named_parameters():
            if value.ndim == 1:
                value.copy_(torch.linspace(0.5, 1.5, len(value)) - 1.0 * name.endswith("bias"))
    other = copy.deepcopy(heads)
    for step in range(3):
        features, ids, labels, numbers = batch(seed=step)
        if step == 2:  # as in a batch over the end of an epoch
            ids = torch.cat([ids[:4], ids[:2]])
        labels[step] = -1
        out = heads(features, ids, labels, numbers)
        out.loss.backward()
        theirs = features.detach().clone().requires_grad_()
        losses, entering, metrics = second(other, theirs, ids, labels, numbers)
        losses.sum().backward()
        torch.testing.assert_close(out.loss, losses.sum(), rtol=1e-11, atol=0)
        logged = [out.metrics[f"loss.{block}"] for block in (1, 2, 4)]
        torch.testing.assert_close(torch.stack(logged), losses.detach(), rtol=1e-11, atol=0)
        found = {name: float(value) for name, value in out.metrics.items() if name in metrics}
        assert found == pytest.approx(metrics)
        torch.testing.assert_close(features.grad, theirs.grad, rtol=1e-9, atol=1e-12)
        for (name, ours), value in zip(
            heads.named_parameters(), other.parameters(), strict=True
        ):  # summed over the steps
            torch.testing.assert_close(ours.grad, value.grad, rtol=1e-9, atol=1e-12, msg=name)
        rows = slice(step * BATCH % 18, step * BATCH % 18 + BATCH)
        torch.testing.assert_close(heads.queue[:, rows], entering)
        assert heads.queue_ids[rows].equal(ids) and heads.queue_labels[rows].equal(labels)
        newest = heads.newest(BATCH)
        assert [*newest] == [".1", ".2", ".4"]
        assert torch.equal(torch.stack([*newest.values()]), heads.queue[:, rows])
        for name, buffer in other.named_buffers():
            if "running" in name:
                torch.testing.assert_close(heads.get_buffer(name), buffer, msg=name)
            buffer.copy_(heads.get_buffer(name))


def test_weights_of_samples_in_each_heads_loss():
    """The gradient of the sum over heads and samples, each with its weight."""
    heads, weights = heads_of(), torch.rand(3, BATCH, dtype=torch.float64)
    features, *rest = batch()
    start = copy.deepcopy(heads.state_dict())
    whole = heads(features, *rest, torch.ones_like(weights))
    heads.load_state_dict(start)
    assert whole.loss.item() == pytest.approx(heads(features, *rest).loss.item(), rel=1e-12)
    expected, gradient = 0.0, torch.zeros_like(features)
    for head in range(3):
        for sample in range(BATCH):
            one = torch.zeros_like(weights)
            one[head, sample] = weights[head, sample]
            heads.load_state_dict(start)
            loss = heads(features, *rest, one).loss
            expected += loss.item()
            gradient += torch.autograd.grad(loss, features)[0]
    heads.load_state_dict(start)
    found = heads(features, *rest, weights)
    assert found.loss.item() == pytest.approx(expected, rel=1e-12)
    assert found.metrics["loss.1"] == whole.metrics["loss.1"]
    (ours,) = torch.autograd.grad(found.loss, features)
    torch.testing.assert_close(ours, gradient, rtol=1e-9, atol=1e-12)


# The authors' eight heads and 20 epochs: the epoch after which the lower heads end.
ENDS = (4, 6, 8, 10, 12, 14, 16)


def falling(epoch, start):
    return (1 + math.cos(math.pi * (epoch - start) / (20 - start))) / 2 if epoch >= start else 1


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("staggered_step", lambda epoch, end, _: float(epoch < end)),
        ("staggered_cosine", lambda epoch, end, _: falling(epoch, end)),
        ("one_hot", lambda epoch, end, before: 0.1 if epoch < before else float(epoch < end)),
        ("uniform", lambda epoch, *_: falling(epoch, 4)),
    ],
)
def test_schedules_of_the_heads_weights(schedule, expected):
    epochs = np.arange(20)
    for ends in ((4, 16), ENDS):
        found = head_weights(schedule, len(ends) + 1, 20, epochs)
        for row, end in enumerate(ends):
            before = ends[row - 1] if row else 0
            values = [expected(epoch, end, before) for epoch in range(20)]
            np.testing.assert_allclose(found[row], values, rtol=1e-6, atol=1e-7)
        assert (found[-1] == 1).all() and found.dtype == np.float32
    assert np.array_equal(head_weights(schedule, 8, 20, np.array([3, 15])), found[:, [3, 15]])
    assert (head_weights(schedule, 1, 20, epochs) == 1).all()
    assert head_weights(schedule, 2, 20, epochs)[0, 3] == 1


@pytest.mark.parametrize("negatives", ["own", "neighbour"])
def test_a_ranks_losses_are_its_rows_of_the_global_batchs(negatives, monkeypatch):
    heads = heads_of(negatives=negatives)
    anchor, positive, prediction = (
        F.normalize(torch.randn(3, views, BATCH, 5, dtype=torch.float64), dim=3)
        for views in (2, 2, 6)
    )
    ids, mine = torch.tensor([4, 5, 6, 7, 5, 9]), slice(3, None)  # one image twice
    whole = heads._losses(anchor, positive, prediction, ids, ids)
    monkeypatch.setattr(refiner, "rank_and_size", lambda: (1, 2))
    monkeypatch.setattr(refiner, "gather_rows", lambda _: prediction.permute(2, 0, 1, 3))
    part = [rows[:, :, mine] for rows in (anchor, positive, prediction)]
    torch.testing.assert_close(heads._losses(*part, ids[mine], ids), whole[:, :, mine])


def test_pairs_as_the_released_code_sums_them():
    """Of ten local views the last two in no pair, each global view once with itself."""
    released = pair_counts(12, "released")
    assert released == [[1, 2] + [1] * 8 + [0] * 2, [2, 1] + [1] * 8 + [0] * 2]
    assert pair_counts(12, "all") == [[0] + [1] * 11, [1, 0] + [1] * 10]
    for terms in ("released", "all"):
        for local in range(6):
            counts = [[0.0] * (2 + local) for _ in range(2)]
            for i, j in pairs_of(2 + local, terms):
                counts[i][j] += 1
            assert pair_counts(2 + local, terms) == counts
            assert sum(map(sum, counts)) == 2 + 2 * local


def test_heads_are_drawn_one_after_the_other():
    one, three = heads_of((4,)), heads_of((1, 2, 4))
    for name, value in one.named_parameters():
        if value.ndim == 3:
            assert torch.equal(value[0], three.get_parameter(name)[0])
            limit = math.sqrt(6 / sum(value.shape[1:]))  # Xavier's
            assert 0.8 * limit < value.abs().max() <= limit
    assert torch.equal(one.queue[0], three.queue[0])
    assert not torch.equal(three.queue[1], three.queue[0])
    assert len({*three.queue[:, 0, 0].tolist()}) == 3 == three.lookups
    layer = ["HeadsLinear", "HeadsBatchNorm"]
    kinds = [[type(part).__name__ for part in way] for way in (one.projector, one.predictor)]
    assert kinds == [[*layer, "GELU"] * 2 + layer, [*layer, "GELU", *layer]]


def test_some_heads_of_a_run_go_on():
    there, here = heads_of((1, 2, 4)), heads_of((2, 4))
    features, ids, labels, numbers = batch()
    there(features, ids, labels, numbers)
    here.take_over(there.exported())
    expected = there(features, ids, labels, numbers).metrics
    found = here(features[1:], ids, labels, numbers[2:]).metrics
    for name in ("loss.2", "loss.4", "lookup_similarity.4", "queue_filled"):
        torch.testing.assert_close(found[name], expected[name])
    torch.testing.assert_close(here.queue, there.queue[1:])
    assert here.blocks.tolist() == [2, 4] and int(here.pointer) == int(there.pointer)
    statistics = there.predictor[-1].running_var.view(3, -1)[1:].flatten()
    torch.testing.assert_close(here.predictor[-1].running_var, statistics)
    for tensors, message in ((there.exported(), r"3, but on \[1, 2, 4\]"), ({}, r"3, but on \[\]")):
        with pytest.raises(ValueError, match=f"no head on block {message}"):
            heads_of((3, 4)).take_over(tensors)
    with pytest.raises(ValueError, match=r"queue is \[3, 18, 5\], this recipe needs \[3, 36, 5\]"):
        heads_of(queue_size=36).take_over(there.exported())


def test_similarities_in_bfloat16_are_asked_for():
    """As the authors compute them: steps of 0.004 above a half."""
    losses = {}
    for precision in ("fp32", "bf16"):
        heads = heads_of(precision=precision).float()
        features, *rest = batch()
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            losses[precision] = heads(features.float(), *rest).loss.item()
    on_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert (losses["fp32"] != losses["bf16"]) == on_bf16
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.02)


def test_blocks():
    last = Refiner(**SHAPE, blocks=8)
    assert last.read(24) == tuple(range(16, 24)) and last.count == 8
    assert Refiner(**SHAPE, blocks=[19, 23]).read(24) == (19, 23)
    with pytest.raises(ValueError, match="blocks 8: the encoder has 4"):
        last.read(4)
    for wrong in ([19, 22], [23, 19], [23, 23], [-1, 23], [24]):
        with pytest.raises(ValueError, match=r"not rising numbers from 0 up to .* last block 23"):
            Refiner(**SHAPE, blocks=wrong).read(24)
