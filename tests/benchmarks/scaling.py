"""Step time of each stage from 1 to 1,024 GPUs by a model, and the model against 1, 2 and 4 ranks.

    python tests/benchmarks/scaling.py [--size large] [--stage pretrain] [--zero 1] [--gpu A100]
    python tests/benchmarks/scaling.py --measure [--rounds 3]                 times, here

docs/scaling.md says where each constant is from.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from fake_gpu import GPUS, build, count
from torch import Tensor

from maect.recipes import Encoder, load_encoder
from maect.stages import Stage, load_recipe
from maect.stages.pretrain import Pretrain
from maect.stages.run import RunConfig
from maect.train.engine import cast_parts, readers
from maect.train.exchange import CAST, bundles

RECIPES = {"pretrain": "mae", "head": "head_min", "tune": "ct_min"}
GLOO, GLOO_LATENCY = 0.4e9, 200e-6  # bytes/s and seconds of gloo here, from `maect doctor`
IMAGE_BYTES = 147_897_477_120 / 1_281_167  # ILSVRC2012_img_train.tar


@dataclass(frozen=True)
class Machine:
    """Constants of a machine; the defaults are JUWELS Booster's.

    Attributes:
        gpu: what computes, by `fake_gpu.py`'s roofline; none: a CPU of `rate`.
        rate: FLOP/s of a rank, where there is no GPU.
        launch: seconds that the host needs for one kernel, Python and dispatch included.
        node: ranks of a node.
        inside, between: bus bandwidth of collectives within a node and between nodes, bytes/s.
        beside: part of the backward pass that exchanging beside it costs.
        latency: seconds of the smallest collective between two ranks, and of each doubling.
        cores: CPU cores of a rank, each decoding `decode` images (two views) a second.
        read: bytes/s that a node reads from the file system; `shared`: that all nodes read.
        zero: ZeRO stage.
    """

    gpu: str = "A100"
    rate: float = 0.0
    launch: float = 50e-6
    node: int = 4
    inside: float = 200e9
    between: float = 80e9
    beside: float = 0.05
    latency: float = 15e-6
    cores: int = 12
    decode: float = 590.0
    read: float = 2e9
    shared: float = 200e9
    zero: int = 1


@dataclass(frozen=True)
class Part:
    """A bucket.

    Attributes:
        size: weights of it.
        front: what part of the weights that learn lies in front of the first of them.
        everywhere: whether every rank updates all of it.
        cast: whether layers read copies in bfloat16.
        read: what part of all weights lies in front of the first that a pass waits for; below 0: it
            does so at its start.
    """

    size: int
    front: float
    everywhere: bool
    cast: bool
    read: float


@cache
def buckets(stage: Stage, encoder: Encoder) -> tuple[list[Part], int]:
    """Buckets as an engine makes them, the first gradients' first, and the number of weights."""
    with torch.device("meta"):
        objective = build(stage, encoder, 1000)
    learning = [(n, w, 0) for n, w in objective.named_parameters() if w.requires_grad]
    adds_up = stage.precision != "bf16"
    models = () if adds_up else list(cast_parts(objective))
    layers = [layer for model in models for layer in model.modules() if isinstance(layer, CAST)]
    cast = {id(w) for layer in layers for w in layer.parameters(recurse=False)}
    fronts, weights = in_front(objective.parameters())
    learnt, _ = in_front(weight for _, weight, _ in learning)
    # A reader waits for its buckets when it is called: with the first of its weights.
    waited = dict.fromkeys(fronts, -1.0)
    for reader in readers(objective):
        own = [id(weight) for weight in reader.parameters()]
        waited.update(dict.fromkeys(own, min((fronts[key] for key in own), default=0.0)))
    found = []
    for entries, everywhere in bundles(learning, models):
        keys = [id(weight) for _, weight, _ in entries]
        size = sum(weight.numel() for _, weight, _ in entries)
        read = min(waited[key] for key in keys)
        found.append(Part(size, learnt[keys[0]], everywhere, keys[0] in cast, read))
    return found, weights


def in_front(weights: Iterable[Tensor]) -> tuple[dict[int, float], int]:
    """What part of tensors lies in front of each, and how much all have."""
    fronts, total = dict[int, int](), 0
    for weight in weights:
        fronts[id(weight)] = total
        total += weight.numel()
    return {key: front / total for key, front in fronts.items()}, total


def exposed(
    stage: Stage, encoder: Encoder, seconds: float, byte: float, latency: float, zero: int
) -> tuple[float, float]:
    """Seconds for which a step waits for gradients, and for weights, one bucket behind the other.

    Args:
        stage, encoder: what is trained.
        seconds: of the passes, spread evenly: over all weights, and twice over those that learn.
        byte: seconds of each that is reduced to slices, or gathered from them.
        latency: seconds of a collective beside that.
        zero: ZeRO stage, 0 or 1.
    """
    parts, weights = buckets(stage, encoder)
    backward = seconds / (1 + weights / 2 / sum(part.size for part in parts))
    forward = seconds - backward
    sent = arrived = stalled = 0.0
    for part in parts:
        there_and_back = part.everywhere or not zero
        sent = max(sent, backward * (1 - part.front))
        sent += (8 if there_and_back else 4) * part.size * byte + latency
    for part in reversed(parts):
        if zero and not part.everywhere:
            arrived += (2 if part.cast else 4) * part.size * byte + latency
            stalled = max(stalled, arrived - forward * max(part.read, 0))
    return sent - backward, stalled


@cache
def passes(stage: Stage, encoder: Encoder, gpu: str) -> tuple[float, float, int]:
    """Forward and backward pass: seconds of no images and of each one more, and the kernels."""
    few, many = 64, 128
    counted = [count(stage, encoder, n, lent=True) for n in (few, many)]
    seconds = [sum(work.seconds(GPUS[gpu]) for work in step.work) for step in counted]
    image = (seconds[1] - seconds[0]) / (many - few)
    kernels = sum(part.total() for part in (counted[0].forward, counted[0].backward))
    return max(0.0, seconds[0] - few * image), image, kernels


def terms(stage: Stage, encoder: Encoder, ranks: int, machine: Machine) -> dict[str, float]:
    """Seconds of each part of a step."""
    m, images = machine, stage.batch_size / ranks
    bandwidth = GPUS[m.gpu].bandwidth if m.gpu else math.inf
    if m.gpu:
        fixed, image, kernels = passes(stage, encoder, m.gpu)
        compute = fixed + image * images
    else:
        compute, kernels = stage.flops_per_image(encoder) * images / m.rate, 0
    others = (ranks - 1) / ranks
    bus = m.inside if ranks <= m.node else m.between
    latency = m.latency * math.log2(ranks) if ranks > 1 else 0.0
    launches = m.launch * kernels
    trained = sum(part.size for part in buckets(stage, encoder)[0])
    exchange = 4 * trained * others / bus
    work = max(compute, launches)
    if ranks == 1:
        late = 0.0
    elif m.zero < 2:
        late = sum(exposed(stage, encoder, work, others / bus, latency, m.zero))
        late += m.beside * min((2 - m.zero) * exchange, 2 / 3 * work)
    else:
        late = 3 * (exchange + 2 * latency)
    late += latency  # loss, norm and flags are summed before an update
    own = ranks if m.zero else 1
    # Gradients into buckets, 6 bytes each; of a slice their mean, AdamW and the cast: 8 + 28 + 6.
    update = trained * (6 + 42 / own) / bandwidth
    out = {
        "compute": compute,
        "launches": launches,
        "update": update,
        "ZeRO": late,
        "BatchNorm": 0.0,
        "negatives": 0.0,
        "queue": 0.0,
        "loader": images / (m.cores * m.decode) * stage.views / 2,
        "reading": max(
            images * min(ranks, m.node) * IMAGE_BYTES / m.read,
            stage.batch_size * IMAGE_BYTES / m.shared,
        ),
    }
    head = getattr(stage, "head", None)
    if head is not None:
        norms = 2 * 4 + (3 if head.projector_ema else 0)  # there and back; an EMA only there
        out["BatchNorm"] = norms * latency
        rows = stage.batch_size * head.embedding * 4
        # Predictions of two views gathered, their gradients reduced, one view into the queue.
        out["negatives"] = (2 + 2 * 2 + 1) * rows * others / bus + 4 * latency
        # Its products are counted as computing; what is left is reading it once a view.
        out["queue"] = stage.views * head.queue_size * head.embedding * 4 / bandwidth
    return out


def step(parts: dict[str, float]) -> float:
    """Seconds of a step: the loader and the file system work ahead, the rest follows itself."""
    device = max(parts["compute"], parts["launches"])
    device += sum(parts[name] for name in ("update", "ZeRO", "BatchNorm", "negatives", "queue"))
    return max(device, parts["loader"], parts["reading"])


def table(name: str, size: str, machine: Machine) -> list[str]:
    """A line for each number of ranks that divides the batch."""
    stage, encoder = load_recipe(RECIPES[name], size), load_encoder(size)
    rows = []
    for ranks in (2**power for power in range(11)):
        if stage.batch_size % ranks:
            continue
        parts = terms(stage, encoder, ranks, machine)
        seconds = step(parts)
        one = step(terms(stage, encoder, 1, machine))
        first = max(parts, key=lambda part: parts[part])
        flops = stage.flops_per_image(encoder) * stage.batch_size / ranks
        used = flops / seconds / GPUS[machine.gpu].peak
        shown = " ".join(f"{1000 * value:9.2f}" for value in parts.values())
        rows.append(
            f"{ranks:5d} {stage.batch_size // ranks:6d} {shown} {1000 * seconds:9.2f} "
            f"{one / seconds / ranks:6.0%} {used:6.1%}  {first}"
        )
    names = " ".join(f"{part:>9}" for part in parts)
    head = f"ranks images {names}      step  effic    MFU  largest"
    return [f"{name} {size} on {machine.gpu}, ms", head, *rows]


def measure(rounds: int) -> list[str]:
    """Steps of `tiny` on 1, 2 and 4 gloo ranks of this machine against the model.

    On a CPU the host's part of a step is not hidden behind a device, and ranks and their loaders
    share the cores. Three constants come from one rank, none from more: the host's part and an
    image's (from two batch sizes), and the processor time of decoding an image.
    """
    stage, encoder = load_recipe("mae", "tiny", {}), load_encoder("tiny")
    batch, small, cores = stage.batch_size, stage.batch_size // 4, os.cpu_count() or 1
    seconds: dict[tuple[int, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as place:
        images, shards = Path(place, "images"), Path(place, "shards")
        run("retrieve", "digits", str(images))
        run("shard", str(images / "train"), str(shards))
        decode = statistics.median(decoding(shards, stage) for _ in range(rounds))
        for number in range(rounds):
            for ranks, size in ((1, batch), (1, small), (2, batch), (4, batch)):
                out = Path(place, f"run-{ranks}-{size}-{number}")
                RunConfig(
                    run=out.name, stage="pretrain", size="tiny", shards=shards, encoder=encoder,
                    settings=load_recipe("mae", "tiny", {"epochs": 4, "batch_size": size}),
                ).write(out / "config.yaml")  # fmt: skip
                run("train", str(out / "config.yaml"), "--devices", str(ranks), "--cpus", "1")
                lines = (out / "metrics.jsonl").read_text().splitlines()
                speeds = [json.loads(line)["timing"]["images_per_second"] for line in lines]
                value = size / statistics.median(speeds[len(speeds) // 2 :])
                seconds.setdefault((ranks, size), []).append(value)
    middle = {key: statistics.median(values) for key, values in seconds.items()}
    image = (middle[1, batch] - middle[1, small]) / (batch - small)
    host = middle[1, batch] - image * batch
    rate = stage.flops_per_image(encoder) / image
    out_lines = [
        f"host {1000 * host:.1f} ms a step; an image {1000 * image:.3f} ms ({rate / 1e9:.1f} "
        f"GFLOP/s), its decoding {1000 * decode:.3f} ms; {cores} cores",
        f"{'ranks':>5} {'measured ms':>12} {'model ms':>9} {'measured':>9} {'model':>6}  rounds",
    ]
    for ranks in (1, 2, 4):
        here = Machine(
            "", rate, 0.0, 8, inside=GLOO, latency=GLOO_LATENCY, cores=1, decode=1 / decode
        )
        one = host + step(terms(stage, encoder, ranks, here))
        shared = (ranks * host + batch * (image + decode)) / cores
        model, value = max(one, shared), middle[ranks, batch]
        rounds_ms = ", ".join(f"{1000 * each:.0f}" for each in seconds[ranks, batch])
        out_lines.append(
            f"{ranks:5d} {1000 * value:12.1f} {1000 * model:9.1f} "
            f"{middle[1, batch] / value:8.2f}x {middle[1, batch] / model:5.2f}x  {rounds_ms}"
        )
    return out_lines


def decoding(shards: Path, stage: Pretrain) -> float:
    """Processor seconds of an image in the loader: read, decoded and cropped for all views."""
    from maect.data.index import open_index
    from maect.data.loader import train_batches

    index, steps = open_index(shards), 20
    start = time.process_time()
    for _ in train_batches(
        index, global_batch=stage.batch_size, rank=0, world_size=1, seed=0,
        views=stage.view_settings(), image_size=16, start_step=0, steps=steps, threads=1,
    ):  # fmt: skip
        pass
    return (time.process_time() - start) / steps / stage.batch_size


def run(*words: str) -> None:
    """A `maect` command that must succeed."""
    subprocess.run([sys.executable, "-m", "maect", *words], check=True, capture_output=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--size", default="large")
    parser.add_argument("--stage", choices=RECIPES, action="append")
    parser.add_argument("--zero", type=int, default=1)
    parser.add_argument("--gpu", choices=GPUS, default="A100")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.measure:
        print(*measure(options.rounds), sep="\n")
        return
    for name in options.stage or RECIPES:
        print(*table(name, options.size, Machine(options.gpu, zero=options.zero)), "", sep="\n")


if __name__ == "__main__":
    main()
