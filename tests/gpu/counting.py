"""Counts what a training step asks of a device, without one.

    python tests/gpu/counting.py [--ranks 2] [--size large] [mae ct_min ct_aug fine_tune]

A real trainer and engine take steps on the CPU, with all blocks and parameter groups and little
width; each call of PyTorch that is no view is a kernel (one of many tensors is one, too). On a GPU
the numbers of a trace differ somewhat; what waits, and what ranks exchange, does not.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = ("kernels", "waits", "copies", "collectives")
COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast")
VIEWS = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "detach", "empty",
    "empty_like", "empty_strided", "expand", "flatten", "is_same_size", "lift_fresh", "narrow",
    "new_empty", "permute", "promote_types", "reshape", "select", "slice", "split",
    "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view",
    "view_as",
}  # fmt: skip


class Counts:
    """Numbers by phase and kind.

    Attributes:
        numbers: of each phase and kind.
        kernels: of each name.
    """

    def __init__(self) -> None:
        self.numbers: Counter[tuple[str, str]] = Counter()
        self.kernels: Counter[str] = Counter()
        self.phase, self.on = "other", False

    def add(self, kind: str) -> None:
        """One more, if this step counts."""
        if self.on:
            self.numbers[self.phase, kind] += 1

    def total(self, kind: str) -> int:
        """Over all phases."""
        return sum(n for (_, other), n in self.numbers.items() if other == kind)

    def table(self) -> dict[str, dict[str, int]]:
        """Phases of each kind, and their total."""
        found = {}
        for kind in KINDS:
            phases = {phase: n for (phase, other), n in self.numbers.items() if other == kind}
            found[kind] = phases | {"total": sum(phases.values())}
        return found


class _Kernels(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
        space, _, name = function.name().partition("::")
        name = name.partition(".")[0]
        if name == "_local_scalar_dense":
            self.counts.add("waits")
        elif space == "aten" and name not in VIEWS and self.counts.on:
            self.counts.add("kernels")
            self.counts.kernels[name] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def _calls_counted(counts: Counts) -> Iterator[None]:
    """Copies to the device, reading of tensors, and exchange between ranks."""
    to, tolist, tensor = torch.Tensor.to, torch.Tensor.tolist, torch.tensor

    def counted_to(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device") or next((a for a in args if isinstance(a, torch.device)), 0)
        if device and counts.phase == "prepare":
            counts.add("copies")
        return to(self, *args, **kwargs)

    def counted_tolist(self: Any) -> Any:
        counts.add("waits")
        return tolist(self)

    def counted_tensor(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            counts.add("copies")
        return tensor(*args, **kwargs)

    def exchange(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts.add("collectives")
            return function(*args, **kwargs)

        return call

    with (
        patch.object(torch.Tensor, "to", counted_to),
        patch.object(torch.Tensor, "tolist", counted_tolist),
        patch.object(torch, "tensor", counted_tensor),
        patch.multiple(dist, **{name: exchange(getattr(dist, name)) for name in COLLECTIVES}),
        _Kernels(counts),
    ):
        yield


def _in_phase(counts: Counts, owner: Any, name: str, phase: str) -> None:
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        before, counts.phase = counts.phase, phase
        try:
            return function(*args, **kwargs)
        finally:
            counts.phase = before

    object.__setattr__(owner, name, call)


def counted(trainer: Any, batches: list[Any], step: int) -> Counts:
    """Train on batches, and count in the given step (from 1)."""
    counts = Counts()
    adam = trainer.engine._adam
    if not adam.defaults["fused"]:  # as on a GPU
        adam.defaults["fused"] = True
        for group in adam.param_groups:
            group["fused"] = True
    for owner, name, phase in (
        (trainer.objective, "prepare", "prepare"),
        (trainer.objective, "forward", "forward"),
        (trainer.engine, "backward", "backward"),
        (trainer.engine, "squared_norm", "agree"),
        (trainer.engine, "step", "update"),
        (trainer.objective, "after_update", "averages"),
        (trainer.engine, "update_average", "averages"),
    ):
        _in_phase(counts, owner, name, phase)
    compute, update, calls = trainer._compute, trainer._update, Counter[str]()

    def first(batch: Any) -> Any:
        calls["compute"] += 1
        counts.on = calls["compute"] == step
        return compute(batch)

    def last(*args: Any) -> None:
        update(*args)
        counts.on = False

    trainer._compute, trainer._update = first, last
    with _calls_counted(counts):
        trainer.run(iter(batches))
    return counts


def main() -> None:
    """The command line; each of several ranks is a process that runs it, too."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipes", nargs="*", default=["mae", "ct_min", "ct_aug", "fine_tune"])
    parser.add_argument("--size", default="large")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--zero", type=int, default=1)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is None:
        with tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, *sys.argv, "--meeting", f"{folder}/store", "--rank"]
            jobs = [subprocess.Popen([*words, str(rank)]) for rank in range(options.ranks)]
            sys.exit(max(job.wait() for job in jobs))
    from first_day import Alone, Here, stage_of, trainer_of

    from maect.models import attention, precision
    from maect.recipes.computing import Computing
    from maect.train.engine import start
    from maect.train.noise import random_batch
    from maect.train.timing import packed

    os.environ.update(RANK=str(options.rank), LOCAL_RANK="0", WORLD_SIZE=str(options.ranks))
    os.environ["DS_ACCELERATOR"] = "cpu"
    torch.set_num_threads(1)
    # As on a GPU.
    precision.bfloat16_on, attention.fused_attention = lambda kind: kind, attention.attend
    context = Alone(options.rank, options.ranks, meeting=options.meeting)
    context.cpus = 1
    here = Here(start(context), False, Path(tempfile.mkdtemp()))
    for recipe in options.recipes:
        stage, encoder = stage_of(here, recipe, options.size, 4 * options.ranks)
        how = Computing(zero_stage=options.zero)
        stage, encoder = narrow(stage, encoder)
        with trainer_of(here, stage, encoder, 8, context, how) as trainer:
            batch = random_batch(trainer.stage, trainer.encoder, 4)
            batch = packed(batch, trainer.objective.draw, pinned=False)
            counts = counted(trainer, [batch] * 8, 7)
        if options.rank == 0:
            print(f"{recipe} {options.size}: {len(trainer.engine._peaks)} groups")
            for kind, numbers in counts.table().items():
                print(f"  {kind:<12}", numbers)


def narrow(stage: Any, encoder: Any) -> tuple[Any, Any]:
    """The same blocks and parameter groups with little width, and a small head."""
    encoder = encoder.model_copy(
        update={
            "width": 8 * encoder.heads, "decoder_width": 4 * encoder.decoder_heads,
            "image_size": 4 * encoder.patch_size,
        }
    )  # fmt: skip
    if getattr(stage, "head", None) is not None:
        small = {"queue_size": 64, "projector_hidden": 32, "predictor_hidden": 32, "embedding": 16}
        stage = stage.model_copy(update={"head": stage.head.model_copy(update=small)})
    if hasattr(stage, "local_size"):
        stage = stage.model_copy(update={"local_size": 2 * encoder.patch_size})
    return stage, encoder


if __name__ == "__main__":
    main()
