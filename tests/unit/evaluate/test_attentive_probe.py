"""CAPI's classifiers, a second time as modules of their own with torch's AdamW."""

import itertools
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from maect.core.errors import UserError
from maect.data.index import ID
from maect.evaluate.attentive_probe import Classifiers, Probes
from maect.evaluate.probe_training import ProbeBatch
from maect.evaluate.protocols.probes import AttentiveProbe, LinearProbe

from .by_hand import all_images, task_of
from .conftest import Rank
from .test_linear_probe import job_of

CPU = torch.device("cpu")
SETTINGS = AttentiveProbe(
    updates=12, warmup_updates=3, period=5, batch_size=32, learning_rates=(1e-2, 0.3),
    weight_decays=(0.0, 0.5), head_width=8, held_out=0.2, crop_scale=(0.8, 1.0), flip=0.0,
)  # fmt: skip


class Attentive(nn.Module):
    """One query over all tokens, keys and values from one projection, as there."""

    def __init__(self, width: int, classes: int, head: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(width))
        self.kv = nn.Linear(width, 2 * width)
        self.linear = nn.Linear(width, classes)
        self.head = head

    def forward(self, tokens: Tensor) -> Tensor:
        b, n, d = tokens.shape
        q = self.query.view(1, 1, -1, self.head).expand(b, -1, -1, -1).transpose(1, 2)
        k, v = self.kv(tokens).view(b, n, 2, -1, self.head).permute(2, 0, 3, 1, 4)
        return self.linear(F.scaled_dot_product_attention(q, k, v).reshape(b, d))


def reference(group: Classifiers, head: int) -> nn.Module:
    """A classifier as a module, with its values."""
    values = {name: getattr(group, name)[head].detach().clone() for name in group.names}
    classes, width = values["weight"].shape
    if "query" not in values:
        module: nn.Module = nn.Linear(width, classes)
        module.load_state_dict(values)
        return module
    module = Attentive(width, classes, group.head_width)
    bias = torch.cat([torch.zeros(width), values["value_bias"]])
    kv = torch.cat([values["key"], values["value"]])
    names = {"query": values["query"], "kv.weight": kv, "kv.bias": bias}
    names |= {"linear.weight": values["weight"], "linear.bias": values["bias"]}
    module.load_state_dict(names)
    return module


def test_classifiers_learn_as_modules_with_torchs_adamw(images, tmp_path, monkeypatch):
    task = task_of(job_of(images, tmp_path / "a.json"))
    torch.set_default_dtype(torch.float64)
    try:
        probes = Probes(task, SETTINGS)
        modules, groups = {}, []
        for name, group in probes.groups.items():
            assert float(group.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
            assert not torch.equal(group.weight[0], group.weight[1])
            for head, (rate, decay) in enumerate(probes.pairs):
                module = modules[name, head] = reference(group, head)
                for key, parameter in module.named_parameters():
                    groups.append(
                        {
                            "params": [parameter],
                            "peak": rate * 32 / 256,
                            "weight_decay": 0.0 if "bias" in key else decay,
                        }
                    )
        optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95))
        rng = torch.Generator().manual_seed(0)
        for step in range(6):
            tokens = torch.randn(8, 17, 16, generator=rng)
            labels = torch.randint(10, (8,), generator=rng)
            cls, mean = tokens[:, 0], tokens[:, 1:].mean(1)
            given = {"cls": cls, "mean": mean, "cls_mean": torch.cat([cls, mean], 1)}
            given["patches"] = tokens[:, 1:]
            logits = torch.stack([m(given[name]) for (name, _), m in modules.items()], -1)
            loss = F.cross_entropy(logits, labels[:, None].expand(-1, logits.shape[-1]))
            factor = 1 / (1 + step)
            for param_group in optimizer.param_groups:
                param_group["lr"] = factor * param_group["peak"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            nothing = np.zeros(8, np.int64)
            losses = probes.step(tokens, ProbeBatch(tokens, labels, nothing, nothing), factor)
            assert float(losses.mean()) == pytest.approx(loss.item(), rel=1e-9)
        for (name, head), module in modules.items():
            logits = probes.groups[name].logits(given[name])[:, head]
            torch.testing.assert_close(logits, module(given[name]), rtol=1e-6, atol=1e-8)
            kept = reference(probes.groups[name], head).state_dict()
            for key, value in module.state_dict().items():
                if key == "kv.bias":  # that of the keys changes nothing
                    value, kept[key] = value[16:], kept[key][16:]
                torch.testing.assert_close(kept[key], value, rtol=1e-5, atol=1e-7)
    finally:
        torch.set_default_dtype(torch.float32)


def test_held_out_images_choose_and_nothing_learns_from_them(images, tmp_path):
    job = job_of(images, tmp_path / "attentive_probe.json")
    metrics = SETTINGS.evaluate(Rank(), job)
    task = task_of(job)
    train, test, probes = task.train, task.test, Probes(task, SETTINGS)
    held, learnt = probes.choosing, probes.training_images
    assert held.n == 30 and not np.isin(held.rows[:, ID], learnt.rows[:, ID]).any()
    assert held.n + learnt.n == train.n
    assert {*metrics["chosen"]} == {"cls", "mean", "cls_mean", "patches"}
    pairs = list(itertools.product((1e-2, 0.3), (0.0, 0.5)))
    kept = load_file(job.out.with_suffix(".safetensors"))
    given = probes._readings(probes.read(all_images(test)[0]))
    for name, tried in metrics["held_out"].items():
        assert [(row["rate"], row["decay"]) for row in tried] == pairs
        best = max(tried, key=lambda row: row["accuracy"])
        assert metrics["chosen"][name] == best
        # What is kept scores as the result says.
        group = probes.groups[name]
        for key in group.names:
            getattr(group, key).data[0] = kept[f"{name}.{key}"]
        predicted = group.logits(given[name], slice(0, 1))[:, 0].argmax(1).numpy()
        metric = "attentive_probe" + ("" if name == "patches" else f"_{name}")
        assert metrics[metric] == pytest.approx(100 * np.mean(predicted == test.labels))


def test_rates_rise_and_fall_as_there(images, tmp_path):
    plan = SETTINGS.schedule(None)  # type: ignore[arg-type]  # of any number of images
    assert (plan.steps, plan.ends, plan.warmup) == (12, [5, 10, 12], 3)
    rates = [Probes.rate(step, plan) for step in range(12)]
    assert rates[:3] == [0.25, 0.5, 0.75] and rates[3] == 1.0
    assert rates[4] == pytest.approx(0.5 * (1 + math.cos(math.pi / 9)))
    with pytest.raises(UserError, match="head_width 64 does not divide the encoder's width 16"):
        AttentiveProbe().evaluate(Rank(), job_of(images, tmp_path / "other.json"))
    with pytest.raises(ValueError, match="warmup_updates 12 of 12 updates"):
        AttentiveProbe(updates=12, warmup_updates=12)
    with pytest.raises(ValueError, match="warmup_epochs 5 of 5 epochs"):
        LinearProbe(epochs=5)
