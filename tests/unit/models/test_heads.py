"""The NNCLR head against loops over the paper's equations, in float64."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from maect.models import heads
from maect.models.heads import GlobalBatchNorm, NNCLRHead, info_nce, topk_nn
from maect.models.vit import seeded
from maect.recipes import Contrastive


def settings(**changes):
    values = {
        "queue_size": 32, "projector_hidden": 12, "predictor_hidden": 14, "embedding": 6,
        "temperature": 0.2, "topk": 3, "projector_ema": 0.9, "head_lr": 1e-3,
        "head_weight_decay": 0.0,
    }  # fmt: skip
    return Contrastive(**(values | changes))


def head_of(**changes):
    with seeded(3):
        return NNCLRHead(10, settings(**changes)).double()


def batch(b=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(2, b, 10, generator=generator, dtype=torch.float64)
    numbers = torch.randint(0, 3, (2, b), generator=generator)
    return features, torch.arange(100, 100 + b), torch.arange(b) % 3, numbers


def test_batch_norm_is_torchs_for_each_view():
    torch.manual_seed(0)
    ours = GlobalBatchNorm(5).double()
    theirs = nn.BatchNorm1d(5).double()
    with torch.no_grad():
        for norm in (ours, theirs):
            norm.weight.copy_(torch.linspace(0.5, 2, 5))
            norm.bias.copy_(torch.linspace(-1, 1, 5))
    x = (torch.randn(2, 7, 5, dtype=torch.float64) * 3 + 1).requires_grad_()
    y = x.detach().clone().requires_grad_()
    actual, expected = ours(x), torch.stack([theirs(y[0]), theirs(y[1])])
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    weights = torch.randn_like(actual)
    for output in (actual, expected):
        (output * weights).sum().backward()
    for one, other in ((x, y), (ours.weight, theirs.weight), (ours.bias, theirs.bias)):
        torch.testing.assert_close(one.grad, other.grad)
    torch.testing.assert_close(ours.eval()(x[0]), theirs.eval()(y[0]))


def test_batch_norm_of_two_ranks_is_that_of_all_rows(monkeypatch):
    """Two threads in place of two processes, each with half of the rows."""
    torch.manual_seed(0)
    norm, rows, slopes = GlobalBatchNorm(5).double(), torch.randn(2, 8, 5), torch.randn(2, 8, 5)

    def normalised(part):
        mine, x = copy.deepcopy(norm), rows[:, part].double().requires_grad_()
        y = mine(x)
        (y * slopes[:, part]).sum().backward()
        gradients = torch.stack([mine.weight.grad, mine.bias.grad])
        return y, x.grad, gradients, mine.running_mean, mine.running_var

    expected = normalised(slice(None))
    this, meeting, sent = threading.local(), threading.Barrier(2, timeout=10), {}

    def exchanged(tensor):
        meeting.wait()
        sent[this.rank] = tensor.clone()
        meeting.wait()
        return [sent[0], sent[1]]

    monkeypatch.setattr(heads, "rank_and_size", lambda: (this.rank, 2))
    monkeypatch.setattr(
        heads.dist, "all_gather_into_tensor", lambda out, x: out.copy_(torch.cat(exchanged(x)))
    )
    monkeypatch.setattr(heads.dist, "all_reduce", lambda x: x.copy_(sum(exchanged(x))))

    def on_rank(rank):
        this.rank = rank
        return normalised(slice(4 * rank, 4 * rank + 4))

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(on_rank, range(2))
    for number in range(2):
        torch.testing.assert_close(torch.cat([first[number], second[number]], 1), expected[number])
    torch.testing.assert_close(first[2] + second[2], expected[2])
    for number in (3, 4):
        torch.testing.assert_close(first[number], expected[number])
        assert torch.equal(first[number], second[number])


def test_layers_are_those_of_the_paper():
    head = head_of()
    kinds = [type(layer).__name__ for layer in head.projector]
    assert kinds == ["Linear", "GlobalBatchNorm", "ReLU"] * 2 + ["Linear", "GlobalBatchNorm"]
    assert [type(layer).__name__ for layer in head.predictor] == [
        "Linear", "GlobalBatchNorm", "ReLU", "Linear",
    ]  # fmt: skip
    linears = [m for m in head.modules() if isinstance(m, nn.Linear)]
    assert len(linears) == 5 + 3 and all(layer.bias is None for layer in linears)
    shapes = [tuple(p.shape) for p in head.parameters() if p.ndim == 2]
    assert shapes == [(12, 10), (12, 12), (6, 12), (14, 6), (6, 14)]


def mlp(layers, x):
    """A stack of linear, BatchNorm and ReLU layers in numpy; statistics of these rows."""
    for layer in layers:
        if isinstance(layer, nn.Linear):
            x = x @ layer.weight.detach().numpy().T
        elif isinstance(layer, GlobalBatchNorm):
            x = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)
            x = x * layer.weight.detach().numpy() + layer.bias.detach().numpy()
        else:
            x = np.maximum(x, 0)
    return x


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def anchors(head, features):
    """Vectors of the lookup path, [2, b, E]."""
    ema = head.slow_projector if head.slow_projector is not None else head.projector
    return np.stack([unit(mlp(ema, view)) for view in features.numpy()])


def reference(head, features, ids, labels, numbers):
    """Paper, equations 1 and 2, sample by sample; the loss and the queue indices looked up."""
    config = head.settings
    p = [unit(mlp(head.predictor, mlp(head.projector, view))) for view in features.numpy()]
    z = anchors(head, features)
    queue, owner = head.queue.numpy(), head.queue_ids.numpy()
    total, taken = 0.0, np.zeros((2, len(ids)), int)
    for view in range(2):
        other = p[1 - view]
        for i in range(len(ids)):
            entries = [entry for entry in range(len(queue)) if owner[entry] != ids[i]]
            if config.lookup == "oracle":
                wrong = int(numbers[view, i]) >= config.topk
                same = (head.queue_labels == labels[i]).tolist()
                known = ((head.queue_labels >= 0) & (labels[i] >= 0)).tolist()
                mine = [n for n in range(len(queue)) if known[n] and same[n] != wrong]
                if mine:  # its own entry only where the class has no other
                    entries = [entry for entry in mine if entry in entries] or mine
            nearest = sorted(entries, key=lambda entry: -float(z[view][i] @ queue[entry]))
            nearest = nearest[: config.topk]
            taken[view, i] = nearest[int(numbers[view, i]) % config.topk % len(nearest)]
            query = z[view][i] if config.lookup == "none" else queue[taken[view, i]]
            logits = [
                float(query @ other[j]) / config.temperature
                for j in range(len(ids))
                if j == i or ids[j] != ids[i]  # a copy of the image is no negative
            ]
            own = float(query @ other[i]) / config.temperature
            total -= own - np.log(np.sum(np.exp(logits)))
    return total / (2 * len(ids)), taken


@pytest.mark.parametrize("lookup", ["topk", "none", "oracle", "oracle_right"])
@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_loss_and_lookup_against_loops(lookup, ema):
    half = {"lookup": "oracle", "oracle_right": 0.5}
    head = head_of(**half if lookup == "oracle_right" else {"lookup": lookup}, projector_ema=ema)
    if head.slow_projector is not None:  # another set of weights than the projector's
        for buffer in head.slow_projector.buffers():
            buffer.mul_(1.1)
    features, ids, labels, numbers = batch()
    head.queue_ids[:8] = ids  # own entries, to be left out
    head.queue[:8] = F.normalize(torch.randn(8, 6, dtype=torch.float64), dim=1)
    head.queue_ids[8] = 0  # an image like others
    head.queue_labels[:] = torch.arange(32) % 3
    head.queue_labels[::2] = -1
    # An unknown class, one of which the queue has no entry, the sample's own alone, or one more.
    labels[3:7] = torch.tensor([-1, 4, 5, 6])
    head.queue_labels[5], head.queue_labels[[6, 9]], numbers[:, 6] = 5, 6, 1
    if lookup == "oracle_right":  # every third lookup is to be wrong
        numbers = numbers + head.settings.topk * (torch.arange(16).reshape(2, 8) % 3 == 0)
    for copies in (False, True):
        if copies:  # as in a batch over the end of an epoch
            ids, head.pointer[()] = torch.cat([ids[:6], ids[:2]]), 0
        before = head.queue.clone(), head.queue_ids.clone(), head.queue_labels.clone()
        expected, taken = reference(head, features, ids, labels, numbers)
        out = head(features, ids, labels, numbers)
        assert out.loss.item() == pytest.approx(expected, rel=1e-10)
        filled = np.mean(before[1].numpy() >= 0)
        assert float(out.metrics["queue_filled"]) == pytest.approx(filled)
        if lookup != "none":
            similarity = (anchors(head, features) * before[0].numpy()[taken]).sum(2).mean()
            assert float(out.metrics["lookup_similarity"]) == pytest.approx(float(similarity))
            found, own = before[2].numpy()[taken], np.stack([labels.numpy()] * 2)
            known = (found >= 0) & (own >= 0)
            accuracy = 100 * np.mean(found[known] == own[known])
            assert float(out.metrics["lookup_accuracy"]) == pytest.approx(accuracy)
        head.queue[:], head.queue_ids[:], head.queue_labels[:] = before


def test_only_an_oracle_is_wrong_at_will():
    with pytest.raises(ValueError, match=r"oracle_right 0.5: only `lookup: oracle` has one"):
        head_of(oracle_right=0.5)
    assert "oracle_right" not in head_of(lookup="oracle").settings.header


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_lookup_and_loss_are_float32_in_mixed_precision(precision, monkeypatch):
    """Their products in bfloat16, as in the authors' autocast, are a setting."""
    seen = []

    def noted(real):
        return lambda x, *rest: seen.append(x) or real(x, *rest)

    monkeypatch.setattr("maect.models.kernels.bfloat16_on", lambda kind: kind)
    monkeypatch.setattr(heads, "topk_nn", noted(topk_nn))
    monkeypatch.setattr(F, "cross_entropy", noted(F.cross_entropy))
    features, ids, labels, numbers = batch()
    for lookup in ("oracle", "topk"):
        head = head_of(precision=precision, lookup=lookup).float()
        head.queue_labels[:] = torch.arange(32) % 3
        with torch.autocast("cpu", torch.bfloat16):
            out = head(features.float(), ids, labels, numbers)
    products = torch.float32 if precision == "fp32" else torch.bfloat16
    assert [x.dtype for x in seen[3:]] == [products] * 3
    # An oracle's keep their order, with 4 added to those of the class.
    same = (labels[:, None] - torch.arange(32)) % 3 == 0
    torch.testing.assert_close(seen[0], seen[3].float() + 4 * same)
    assert head.queue.dtype == out.metrics["lookup_similarity"].dtype == torch.float32
    out.loss.backward()
    assert head.projector[0].weight.grad.dtype == torch.float32


def test_topk_takes_the_kth_nearest():
    similarity = torch.tensor([[0.1, 0.9, 0.5, 0.7], [4.0, 3.0, 2.0, 1.0]])
    for k, expected in enumerate([[1, 0], [3, 1], [2, 2]]):
        numbers = torch.full((2,), k)
        assert topk_nn(similarity, 3, numbers).tolist() == expected
    assert topk_nn(similarity, 1, torch.zeros(2, dtype=torch.int64)).tolist() == [1, 0]


def test_queue_is_a_ring_of_first_views():
    head = head_of()
    start = head.queue.clone()
    seen = []
    for step in range(5):
        features, ids, labels, numbers = batch(seed=step)
        expected = torch.from_numpy(anchors(head, features))
        seen.append(expected[0])
        out = head(features, ids + 8 * step, labels, numbers)
        torch.testing.assert_close(out.anchors, expected)
    assert int(head.pointer) == 8
    torch.testing.assert_close(head.queue[:8], seen[4])  # the fifth batch overwrote the first
    torch.testing.assert_close(head.queue[8:16], seen[1])
    torch.testing.assert_close(head.newest(16)[""], torch.cat(seen[3:]))
    assert head.queue_ids.tolist() == list(range(132, 140)) + list(range(108, 132))
    assert not torch.equal(head.queue, start)
    torch.testing.assert_close(start.norm(dim=1), torch.ones(32, dtype=torch.float64))


def test_a_batch_that_does_not_divide_the_queue_is_refused():
    features, ids, labels, numbers = batch(b=7)
    with pytest.raises(ValueError, match="does not divide"):
        head_of()(features, ids, labels, numbers)


def test_projector_ema():
    head = head_of(projector_ema=0.9)
    before = {n: b.clone() for n, b in head.slow_projector.named_buffers()}
    weights = dict(head.projector.named_parameters())
    for name in weights:
        assert torch.equal(before[name], weights[name])
    with torch.no_grad():
        for parameter in head.projector.parameters():
            parameter.add_(1.0)
        head.projector[1].running_mean.fill_(7.0)
    head.update_ema()
    for name, value in head.slow_projector.named_buffers():
        if name in weights:
            torch.testing.assert_close(value, 0.9 * before[name] + 0.1 * weights[name].detach())
    assert torch.equal(head.slow_projector[1].running_mean, head.projector[1].running_mean)
    assert not list(head.slow_projector.parameters())


def test_gradients_of_the_loss():
    """The prediction path, numerically; two of the rows are of one image."""
    torch.manual_seed(0)
    ids = torch.tensor([5, 6, 7, 5])
    positive = F.normalize(torch.randn(4, 3, dtype=torch.float64), dim=1)
    raw = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x: info_nce(positive, F.normalize(x, dim=1), 0.3, ids, ids), (raw,)
    )


@pytest.mark.parametrize("ema", [0.0, 0.9])
@pytest.mark.parametrize("stop", [False, True])
def test_without_lookup_the_positive_has_a_gradient(ema, stop):
    """Algorithm 1 (tex 587): `z1, z2 = g_m(y1), g_m(y2)` has no stop-gradient; the queue has none.

    The authors' `nnclr_noqueue_head.py` normalises the projection and takes it as the positive.
    """
    changes = {"stop_gradient": True} if stop else {}
    head = head_of(lookup="none", projector_ema=ema, **changes)
    features, ids, labels, numbers = batch(b=4)
    features.requires_grad_()
    if stop:  # the anchors depend on the features without a gradient: hold them
        held = torch.from_numpy(anchors(head, features.detach()))
        head._positives = lambda *_: (held, {})
    assert torch.autograd.gradcheck(lambda x: head(x, ids, labels, numbers).loss, (features,))
    assert head.settings.stop_gradient == stop
