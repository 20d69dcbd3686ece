"""Updates, slices and states of an engine of one rank, and of two under each ZeRO stage."""

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import nn

from maect.recipes.settings import Computing
from maect.stages import load_recipe
from maect.train import engine

CPU = torch.device("cpu")
RATES = (0.5, 1.0, 0.25)
PARTS = 2  # forward passes of an update
KINDS = ("param", "exp_avg", "exp_avg_sq")


class Layers(nn.Module):
    """Parameters of 15, 3, 1, 9 and 3 values: two ranks halve none of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(3, 3)

    def forward(self, inputs):
        return 9 * (self.scale * self.head(self.encoder(inputs).tanh())).square().mean()

    def groups(self):
        first = {"params": [*self.encoder.parameters(), self.scale]}
        second = {"params": [*self.head.parameters()]}
        return [
            first | {"peak_lr": 1e-2, "weight_decay": 0.1},
            second | {"peak_lr": 3e-3, "weight_decay": 0.0},
        ]


def inputs(number, part, rank):
    drawn = torch.Generator().manual_seed(100 * number + 10 * part + rank)
    return torch.randn(4, 5, generator=drawn)


def start(model, computing):
    settings = load_recipe("mae", "base", {"batch_size": 16})
    ours = engine.Engine(model, settings, model.groups(), CPU, computing)
    ours.start_average("encoder.")
    return ours


def update(ours, number, rank):
    """Squared norm of the gradient, and the learning rates before and after the last pass."""
    for part in range(PARTS - 1):
        ours.backward(ours(inputs(number, part, rank)))
        ours.step(0.0)
    ours.backward(ours(inputs(number, PARTS - 1, rank)))
    squared, before = ours.squared_norm(), ours.learning_rates()
    dist.all_reduce(squared)
    ours.step(RATES[number])
    ours.update_average(0.75)
    return squared.item(), before, ours.learning_rates()


def held(ours):
    """Values of a rank by parameter and place."""
    return [
        (piece.name, piece.start, {kind: value.tolist() for kind, value in piece.values.items()})
        for piece in ours.slices
    ]


def three_updates(context, zero_stage):
    """What the ranks hold after them, and after the last one again, from what they held before."""
    engine.start(context)
    computing = Computing(zero_stage=zero_stage, accumulation=PARTS)
    model, other = Layers(), Layers()
    ours = start(model, computing)
    said = [update(ours, number, context.rank) for number in range(2)]
    with ours.gathered(model):
        weights = {name: value.clone() for name, value in model.state_dict().items()}
    before = [{kind: v.clone() for kind, v in piece.values.items()} for piece in ours.slices]
    said.append(update(ours, 2, context.rank))
    last = held(ours)
    ours.close()

    def fill(slices):
        for piece, values in zip(slices, before, strict=True):
            for kind, value in values.items():
                piece.values[kind].copy_(value)

    other.load_state_dict(weights)
    again = start(other, computing)
    again.restore(fill, 2)
    update(again, 2, context.rank)
    assert held(again) == last
    with again.gathered(other.head):
        last.append(("whole", 0, {"param": other.head.weight.flatten().tolist()}))
    again.close()
    ranks = [None] * context.world_size
    dist.all_gather_object(ranks, last)
    return said, ranks


def plain_updates(world_size):
    """Squared norms, parameters with AdamW's moments, and the encoder's average."""
    model, norms = Layers(), []
    settings = [{k: v for k, v in group.items() if k != "peak_lr"} for group in model.groups()]
    peaks = [group["peak_lr"] for group in model.groups()]
    adam = torch.optim.AdamW(settings, betas=(0.9, 0.95))
    named = dict(model.named_parameters())
    average = {name: value.detach().clone() for name, value in named.items()}
    for number, rate in enumerate(RATES):
        adam.zero_grad()
        for part in range(PARTS):
            for rank in range(world_size):
                (model(inputs(number, part, rank)) / (world_size * PARTS)).backward()
        norms.append(sum(value.grad.square().sum().item() for value in named.values()))
        for group, peak in zip(adam.param_groups, peaks, strict=True):
            group["lr"] = rate * peak
        adam.step()
        for name, value in named.items():
            average[name] = 0.75 * average[name] + 0.25 * value.detach()
    values = {}
    for name, value in named.items():
        values[name] = {"param": value.detach(), **adam.state[value]}
        if name.startswith("encoder."):
            values[name]["ema"] = average[name]
    return norms, values


@pytest.mark.parametrize(("world_size", "zero_stages"), [(1, (1,)), (2, (1, 2, 3))])
def test_each_zero_stage_makes_the_updates_of_adamw(world_size, zero_stages, tmp_path):
    """Each value is in one slice of one rank; a state restores the same bits."""
    norms, expected = plain_updates(world_size)
    assert max(norms) > 1  # clipping would show
    jobs = [{"function": three_updates, "zero_stage": zero} for zero in zero_stages]
    for said, ranks in run(world_size, *jobs, log=tmp_path / "log"):
        squared, before, after = zip(*said, strict=True)
        assert squared == pytest.approx(norms, rel=1e-5)
        rates = [(3e-3 * rate, 1e-2 * rate) for rate in RATES]
        assert [*after] == [pytest.approx(rate) for rate in rates]
        assert [*before] == [(0, 0), *after[:-1]]
        found = {}
        for name, start_at, values in (entry for slices in ranks for entry in slices):
            if name == "whole":
                weight = expected["head.weight"]["param"].flatten().tolist()
                assert values["param"] == pytest.approx(weight, abs=1e-6)
                continue
            assert len({*map(len, values.values())}) == 1 <= len(values["param"])
            places = found.setdefault(name, {kind: {} for kind in values})
            for kind, numbers in values.items():
                for place, number in enumerate(numbers, start_at):
                    assert place not in places[kind]
                    places[kind][place] = number
        assert found.keys() == expected.keys()
        for name, places in found.items():
            kinds = {*KINDS, *(["ema"] if name.startswith("encoder.") else [])}
            assert places.keys() == kinds
            for kind, values in places.items():
                wanted = expected[name][kind].flatten().tolist()
                joined = [values[place] for place in sorted(values)]
                assert sorted(values) == [*range(len(wanted))]
                assert joined == pytest.approx(wanted, rel=1e-4, abs=1e-6), (name, kind)
