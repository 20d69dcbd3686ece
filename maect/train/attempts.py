"""Record of what computes each attempt of a run, compared when the run resumes.

`recipe.json` and, once finished, the run's record have the history: an entry holds from its step
on. None of it is part of the run's identity. Where all of it is the same, so are the bits.
"""

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import Field

from maect.core.context import Context
from maect.core.distributed import any_rank, from_all, from_rank_0, uses_gpus
from maect.core.errors import counted
from maect.core.settings import Settings, validated
from maect.data import native
from maect.data.decode import decoder_name
from maect.recipes.computing import Computing
from maect.train.run_folder import noted, origin, write_noted

VARIABLES = (
    "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE",
    "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG",
    "NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS", "TORCHINDUCTOR_DETERMINISTIC",
)  # fmt: skip
"""Of the environment: each changes which instructions, or which order of sums, libraries take."""
_NOTED_LATER = ("ranks_a_node", "scipy")
"""What older histories lack."""


class Attempt(Settings):
    """Record of what computes a run from a step on."""

    step: int = Field(ge=0)
    """Updates that were done before."""
    revision: str | None
    """Of the source, where it is a checkout, with a checksum of what is not committed."""
    versions: dict[str, str]
    """Of packages, and the ranks' JPEG decoders, each once."""
    ranks: int = Field(gt=0)
    ranks_a_node: int | None = None
    """Exchanges take another order with others. None: not noted then."""
    threads: int | None
    """Of each rank on a CPU: sums are split among them. None on GPUs."""
    device: str
    """Names of the ranks' devices, each once."""
    instructions: str
    """What PyTorch's own kernels use of the CPU, likewise."""
    environment: dict[str, str]
    """Those of `VARIABLES` that are set."""
    compiled: bool
    """Whether the blocks are compiled."""
    computing: Computing
    """What is asked for."""

    @classmethod
    def now(cls, context: Context, step: int, compiled: bool, computing: Computing) -> Self:
        """Return what computes here; called on every rank."""
        on_gpu = uses_gpus()
        device = torch.cuda.get_device_name() if on_gpu else _cpu_name()
        seen = from_all([device, torch.backends.cpu.get_cpu_capability(), decoder_name()])
        devices, instructions, decoders = (
            ", ".join(sorted(set(each))) for each in zip(*seen, strict=True)
        )
        made = origin()
        return cls(
            step=step,
            revision=made["source_revision"],
            versions=made["versions"] | {"decoder": decoders},
            ranks=context.world_size,
            ranks_a_node=context.local_world_size,
            threads=None if on_gpu else torch.get_num_threads(),
            device=devices,
            instructions=instructions,
            environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
            compiled=compiled,
            computing=computing,
        )

    def differences(self, before: "Attempt") -> Iterator[str]:
        """Say how this attempt differs from the one before it, a sentence for each value."""
        now, then = _flat(self), _flat(before)
        for name in now | then:
            values = now.get(name), then.get(name)
            if values[0] != values[1] and (values[1] is not None or name not in _NOTED_LATER):
                new, old = ("not set" if value is None else value for value in values)
                last = "" if name in ("revision", "maect", "decoder") else " in the last bits"
                yield f"resumes with {name} {new}, it was {old}: the result may differ{last}"


def attempts(folder: Path, step: int) -> list[Attempt]:
    """Return what computed the first steps of a run; an attempt that saved none of them did not."""
    where = f"{folder / 'recipe.json'}: attempts"
    given = noted(folder).get("attempts", [])
    history = [validated(Attempt, entry, where) for entry in given]
    return [attempt for attempt in history if attempt.step < step]


def threads_before(folder: Path, step: int) -> int | None:
    """Return the threads of each rank that computed a run up to a step, if that is known."""
    before = attempts(folder, step)
    return before[-1].threads if before else None


def compute_as_before(context: Context, folder: Path, step: int) -> list[str]:
    """Let the CPU compute with as many threads as before a run was interrupted, for the same bits.

    Args:
        context: this rank's.
        folder: of the run.
        step: up to which it was computed.

    Returns:
        What rank 0 has to tell people: that they are others than this rank was given.
    """
    given = torch.get_num_threads()
    before = from_rank_0(threads_before(folder, step) if context.rank == 0 else None)
    if before in (None, given) or any_rank(before > len(os.sched_getaffinity(0))):
        return []
    torch.set_num_threads(before)
    return [
        f"{counted(before, 'thread')} a rank, as before, for the same bits, although {given} would "
        "do (--convert-world-size takes these)"
    ]


def slow_decoding(attempt: Attempt) -> str | None:
    """Say where the native decoder is missing, and why; None: nowhere. Called on every rank."""
    faults = from_all(native.fault())
    missing = [fault for fault in faults if fault]
    if not missing:
        return None
    where = "here" if len(missing) == len(faults) else f"on {len(missing)} of {len(faults)} ranks"
    decoder = attempt.versions["decoder"]
    return f"no native decoder {where} ({missing[0]}): JPEGs load slowly, by {decoder}"


def note_attempt(folder: Path, attempt: Attempt) -> list[str]:
    """Add an attempt to a run's history; return how it differs from the one before it."""
    before = attempts(folder, attempt.step)
    sentences = list(attempt.differences(before[-1])) if before else []
    if sentences or not before:
        before.append(attempt)
    write_noted(folder, attempts=[one.model_dump(mode="json") for one in before])
    return sentences


def _flat(attempt: Attempt) -> dict[str, Any]:
    parts = "versions", "environment", "computing"
    values = attempt.model_dump(mode="json", exclude={"step", *parts})
    how = attempt.computing.model_dump(exclude={"compile"})  # `compiled` is what came of it
    return values | attempt.versions | attempt.environment | how


def _cpu_name() -> str:
    """The processor's model, as the kernel calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
