"""Gradients and weights between ranks, against one process that has the whole batch."""

import pytest
import torch
import torch.distributed as dist
from ranks import run
from tiny_runs import ENCODER

from maect.models import precision, vit
from maect.models.decoder import Decoder
from maect.recipes import load_encoder
from maect.recipes.computing import Computing
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
    beta1, beta2 = 0.9, 0.95

    def __init__(self, accumulation, precision="fp32"):
        self.precision = precision
        self.batch_size = RANKS * ROWS * accumulation


def inputs(step, part):
    noise = torch.Generator().manual_seed(100 * step + part)
    return torch.randn(ROWS, 7, generator=noise)


def trained(context, zero_stage, accumulation):
    """Weights after some steps, what left in which order, and what a skipped step changed."""
    engine.start(context)
    exchange.BUCKET = 100  # the middle layer has more
    layers, events = module(), []
    ours = engine.build_engine(
        layers, Settings(accumulation), groups(layers), torch.device("cpu"),
        Computing(zero_stage=zero_stage, accumulation=accumulation),
    )  # fmt: skip
    ours._exchange.__class__._send = noted(ours._exchange.__class__._send, events)
    layers[0].weight.register_hook(lambda _: events.append("first layer"))

    def step(number, skip=None):
        for piece in range(accumulation):
            rows = inputs(number, context.rank * accumulation + piece)
            ours.backward(ours(rows).square().mean())
            if piece < accumulation - 1:
                ours.step(0.0)
        ours.step(1.0, None if skip is None else torch.tensor(skip))

    for number in range(STEPS):
        events.clear()
        step(number)
    ours.complete()
    flat = torch.cat([p.detach().flatten() for p in layers.parameters()])
    step(STEPS, 1.0)
    ours.complete()
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


@pytest.mark.parametrize("size", ["base", "large", "huge14"])
def test_the_last_buckets_are_small(size):
    """Behind each bucket of gradients enough is left to compute, but for the first weights'."""
    with torch.device("meta"):
        encoder = vit.build_encoder(load_encoder(size))
    learning = [(name, weight, 0) for name, weight in encoder.named_parameters()]
    found = exchange.bundles(learning, [encoder])
    bundles = [bundle for bundle, _ in found]
    assert sorted(name for b in bundles for name, *_ in b) == sorted(name for name, *_ in learning)
    front, fronts = 0, {}
    for name, weight, _ in learning:
        fronts[name], front = front, front + weight.numel()
    order = [fronts[bundle[0][0]] for bundle in bundles]
    assert order == sorted(order, reverse=True) and order[-1] == 0
    for (bundle, everywhere), before in zip(found, order, strict=True):
        length = sum(weight.numel() for _, weight, _ in bundle)
        room = min(exchange.BUCKET, max(0.67 * before, exchange.BUCKET / 5))
        assert length <= room or len(bundle) == 1
        # What every rank updates is little, and leaves last.
        assert everywhere == (before == 0) and (not everywhere or length < exchange.BUCKET / 15)
    # Few are, since each costs a collective's latency.
    assert len(bundles) <= 1.5 * front / exchange.BUCKET + 5


class Decoded(torch.nn.Module):
    """An encoder and a decoder under autocast, as pre-training runs them."""

    def __init__(self, checkpointing, frozen):
        super().__init__()
        with vit.seeded(0):
            self.encoder, self.decoder = vit.build_encoder(ENCODER), Decoder(ENCODER)
        self.encoder.checkpointing = self.decoder.checkpointing = checkpointing
        self.encoder.freeze(frozen)

    def forward(self, images):
        patches = (ENCODER.image_size // ENCODER.patch_size) ** 2
        order = torch.arange(patches).expand(len(images), -1)
        with precision.mixed_precision(images.device, "bf16"):
            tokens = self.encoder(images, order[:, : patches // 2]).tokens
            return self.decoder(tokens, order).square().mean()


class Late:
    """A gathering that arrives as late as it may, when it is waited for; until then it is NaN.

    Attributes:
        events: bytes that each one brings, and the blocks that begin.
    """

    def __init__(self, events):
        self.events, self.gather = events, dist.all_gather_into_tensor

    def __call__(self, whole, own, async_op):
        arrived = torch.empty_like(whole)
        self.gather(arrived, own.clone())
        kept = own.clone()
        whole.fill_(torch.nan)
        own.copy_(kept)
        self.events.append("leaves")

        class Coming:
            def wait(_):
                whole.copy_(arrived)
                self.events.append(whole.nbytes)

        return Coming()


def encoded(context, lending, zero_stage, checkpointing, frozen, passes):
    """Bits of the weights after some steps, how many were lent, and what came when."""
    engine.start(context)
    precision.bfloat16_on = lambda kind: kind
    exchange.BUCKET = 2000  # not all in one
    events = []
    if not lending:
        engine._cast_by_autocast = lambda *_: []
    exchange.dist.all_gather_into_tensor = Late(events)
    module = Decoded(checkpointing, frozen)
    for number, block in enumerate(module.encoder.blocks):
        block.attn.register_forward_pre_hook(lambda *_, n=number: events.append(f"block {n}"))
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "peak_lr": 1e-2, "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim == 1], "peak_lr": 1e-2, "weight_decay": 0.0},
    ]
    ours = engine.build_engine(
        module, Settings(passes, "bf16"), groups, torch.device("cpu"),
        Computing(
            zero_stage=zero_stage, accumulation=passes, activation_checkpointing=checkpointing
        ),
    )  # fmt: skip
    side = ENCODER.image_size
    for number in range(STEPS):
        for part in range(passes):
            noise = torch.Generator().manual_seed(100 * part + 10 * number + context.rank)
            ours.backward(ours(torch.randn(ROWS, 3, side, side, generator=noise)))
            if part < passes - 1:
                ours.step(0.0)
        layer = module.encoder.blocks[-1].mlp.fc1
        assert isinstance(layer.weight, torch.nn.Parameter) and layer.weight.grad is None
        if number == STEPS - 2:
            events.clear()
        ours.step(1.0)
    seen = list(events)
    buckets = ours._exchange.buckets
    lent = sum(len(bucket.borrowed) for bucket in buckets), len(ours._exchange._frozen)
    gathered = sum(
        p.numel() for bucket in buckets if bucket.scattered for _, p, _ in bucket.parameters
    )
    assert zero_stage == 0 or gathered > 0.95 * sum(p.numel() for p in trained)
    ours.complete()
    flat = torch.cat([p.detach().flatten() for p in module.parameters()])
    ours.close()
    return flat.numpy().tobytes(), lent, seen, gathered


@pytest.mark.parametrize(
    ("zero", "checkpointing", "frozen", "passes"),
    [(1, False, 0, 1), (1, True, 1, 1), (0, False, 1, 1), (1, False, 1, 2)],
)
def test_weights_that_are_lent_give_autocasts_bits(zero, checkpointing, frozen, passes, tmp_path):
    job = {"function": encoded, "zero_stage": zero, "checkpointing": checkpointing}
    job |= {"frozen": frozen, "passes": passes}
    lent, plain = (
        run(2, job | {"lending": lending}, log=tmp_path / "log")[0] for lending in (True, False)
    )
    assert lent[0] == plain[0] and plain[1] == (0, 0)
    # Weight and bias of the four layers of a block, of the patches, and around the decoder's block.
    learning, still = 8 * (ENCODER.depth - frozen) + 8 + 4, 8 * frozen
    if passes > 1:  # gradients add up in float32
        learning = 0
    assert lent[1] == ((learning, still + 2) if frozen else (learning + 2, 0))
    for found, size in ((lent, 2 if learning else 4), (plain, 4)):
        events, weights = found[2], found[3]
        came = [event for event in events if isinstance(event, int)]
        if zero == 0:
            assert not came and "leaves" not in events
            continue
        # Half the bytes, but for padding.
        assert size * weights <= sum(came) <= 1.25 * size * weights
        # All leave before anything of the next pass computes, and each layer waits for its own.
        first = {
            n: events.index(f"block {n}", events.index("leaves")) for n in range(ENCODER.depth)
        }
        arrivals = [i for i, event in enumerate(events) if isinstance(event, int)]
        assert len(came) == events[: arrivals[0]].count("leaves")
        for block in range(frozen, ENCODER.depth - 1):
            assert any(first[block] < i < first[block + 1] for i in arrivals), (block, events)
        # The encoder does not wait for the decoder.
        assert first[ENCODER.depth - 1] < arrivals[-1]
