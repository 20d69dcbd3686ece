"""Gradients and weights between ranks, against one process that has the whole batch."""

import pytest
import torch
import torch.distributed as dist
from ranks import run
from tiny_runs import ENCODER

from maect.models import precision, vit
from maect.train import engine, exchange

RANKS, ROWS, STEPS = 3, 2, 3


def module():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(7, 11), torch.nn.Linear(11, 13), torch.nn.Linear(13, 5)]
    return torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1], torch.nn.Tanh(), layers[2])


def groups(layers):
    """Two groups whose parameters take turns, as weights and biases do."""
    weights = [p for p in layers.parameters() if p.ndim > 1]
    biases = [p for p in layers.parameters() if p.ndim == 1]
    return [
        {"params": weights, "peak_lr": 1e-2, "weight_decay": 0.1},
        {"params": biases, "peak_lr": 1e-3, "weight_decay": 0.0},
    ]


class Settings:
    compile, attention, beta1, beta2 = False, "sdpa", 0.9, 0.95

    def __init__(self, zero_stage, accumulation, precision="fp32"):
        self.zero_stage, self.accumulation = zero_stage, accumulation
        self.precision = precision
        self.batch_size = RANKS * ROWS * accumulation


def inputs(step, part):
    noise = torch.Generator().manual_seed(100 * step + part)
    return torch.randn(ROWS, 7, generator=noise)


def trained(context, zero_stage, accumulation):
    """Weights after some steps, what left in which order, and what a spoilt step changed."""
    engine.start(context)
    exchange.BUCKET = 100  # the middle layer has more
    layers, events = module(), []
    ours = engine.Engine(
        layers, Settings(zero_stage, accumulation), groups(layers), torch.device("cpu")
    )
    ours._exchange.__class__._send = noted(ours._exchange.__class__._send, events)
    layers[0].weight.register_hook(lambda _: events.append("first layer"))

    def step(number, spoilt=None):
        for piece in range(accumulation):
            rows = inputs(number, context.rank * accumulation + piece)
            ours.backward(ours(rows).square().mean())
            if piece < accumulation - 1:
                ours.step(0.0)
        ours.step(1.0, None if spoilt is None else torch.tensor(spoilt))

    for number in range(STEPS):
        events.clear()
        step(number)
    flat = torch.cat([p.detach().flatten() for p in layers.parameters()])
    step(STEPS, 1.0)
    after = torch.cat([p.detach().flatten() for p in layers.parameters()])
    moments = sum(float(s.values["exp_avg"].abs().sum()) for s in ours.shards)
    owned = sorted((s.name, s.start, len(s.values["param"])) for s in ours.shards)
    everyone = [None] * RANKS
    dist.all_gather_object(everyone, owned)
    ours.close()
    return flat.tolist(), events, torch.equal(flat, after) and moments > 0, everyone


def noted(send, events):
    def call(self, bucket):
        events.append("sent")
        return send(self, bucket)

    return call


@pytest.mark.parametrize(("zero", "accumulation"), [(1, 1), (0, 2)])
def test_ranks_update_as_one_would(zero, accumulation, tmp_path):
    job = {"function": trained, "zero_stage": zero, "accumulation": accumulation}
    weights, events, untouched, owned = run(RANKS, job, log=tmp_path / "log")[0]
    layers = module()
    plain = [{**group, "lr": group["peak_lr"]} for group in groups(layers)]
    adam = torch.optim.AdamW(plain, betas=(0.9, 0.95))
    for step in range(STEPS):
        rows = torch.cat([inputs(step, part) for part in range(RANKS * accumulation)])
        adam.zero_grad()
        layers(rows).square().mean().backward()
        adam.step()
    expected = torch.cat([p.detach().flatten() for p in layers.parameters()])
    torch.testing.assert_close(torch.tensor(weights), expected, rtol=1e-4, atol=1e-6)
    # The last layer's gradients are on their way before the first layer's are computed.
    assert events[-4:] == ["sent", "sent", "first layer", "sent"]
    assert untouched
    # Every value is saved by one rank.
    pieces = sorted(tuple(piece) for rank in owned for piece in rank)
    found = {}
    for name, start, length in pieces:
        assert start == found.get(name, 0)
        found[name] = start + length
    assert found == {name: p.numel() for name, p in layers.named_parameters()}
    # And another start gives the same bits.
    assert run(RANKS, job, log=tmp_path / "log")[0][0] == weights


class Encoded(torch.nn.Module):
    """An encoder under autocast, as objectives run it."""

    def __init__(self, checkpointing, frozen):
        super().__init__()
        with vit.seeded(0):
            self.encoder = vit.build_encoder(ENCODER)
        self.encoder.checkpointing = checkpointing
        self.encoder.freeze(frozen)

    def forward(self, images):
        with precision.mixed_precision(images.device, "bf16"):
            return self.encoder(images).tokens.square().mean()


def encoded(context, lending, zero_stage, checkpointing, frozen):
    """Bits of the weights after some steps, and how many weights were lent."""
    engine.start(context)
    precision.bfloat16_on = lambda kind: kind
    exchange.BUCKET = 2000  # not all in one
    if not lending:
        engine._cast_by_autocast = lambda *_: []
    module = Encoded(checkpointing, frozen)
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "peak_lr": 1e-2, "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim == 1], "peak_lr": 1e-2, "weight_decay": 0.0},
    ]
    ours = engine.Engine(module, Settings(zero_stage, 1, "bf16"), groups, torch.device("cpu"))
    side = ENCODER.image_size
    for number in range(STEPS):
        noise = torch.Generator().manual_seed(10 * number + context.rank)
        ours.backward(ours(torch.randn(ROWS, 3, side, side, generator=noise)))
        layer = module.encoder.blocks[-1].mlp.fc1
        assert isinstance(layer.weight, torch.nn.Parameter) and layer.weight.grad is None
        ours.step(1.0)
    lent = sum(len(bucket.lent) for bucket in ours._exchange.buckets)
    flat = torch.cat([p.detach().flatten() for p in module.parameters()])
    ours.close()
    return flat.numpy().tobytes(), lent


@pytest.mark.parametrize(
    ("zero", "checkpointing", "frozen"), [(1, False, 0), (1, True, 1), (0, False, 1)]
)
def test_weights_that_are_lent_give_autocasts_bits(zero, checkpointing, frozen, tmp_path):
    job = {"function": encoded, "zero_stage": zero, "checkpointing": checkpointing}
    found = [
        run(2, job | {"frozen": frozen, "lending": lending}, log=tmp_path / "log")[0]
        for lending in (True, False)
    ]
    assert found[0][0] == found[1][0] and found[1][1] == 0
    # Weight and bias of the four layers of a block, and of the patches where they learn.
    assert found[0][1] == 8 * (ENCODER.depth - frozen) + (0 if frozen else 2)
