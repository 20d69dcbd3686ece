"""Records of the machine and software of each attempt of a run, compared on a resume.

`recipe.json` and, once finished, the run's record have the history: an entry holds from its step
on. None of it is part of the run's identity. Where all of it is the same, so are the bits.
"""

import logging
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
from maect.models.kernels import flash_kernel
from maect.recipes.settings import Computing
from maect.train.engine import Engine
from maect.train.run_folder import origin, read_notes, write_notes

log = logging.getLogger(__name__)

VARIABLES = (
    "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE",
    "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG",
    "NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS", "TORCHINDUCTOR_DETERMINISTIC",
)  # fmt: skip
"""Environment variables that change the instructions, or the order of sums, of libraries."""


class Attempt(Settings):
    """Machine and software that compute a run from a step on."""

    step: int = Field(ge=0)
    """Updates that were done before."""
    revision: str | None
    """Revision of the source if it is a checkout, with a checksum of uncommitted changes."""
    versions: dict[str, str]
    """Versions of packages, and the ranks' JPEG decoders, each once."""
    ranks: int = Field(gt=0)
    ranks_a_node: int | None = None
    """Ranks on a node, which the order of an exchange depends on; None: not noted then."""
    threads: int | None
    """Threads of each rank on a CPU, among which sums are split; None on GPUs."""
    device: str
    """Names of the ranks' devices, each once."""
    instructions: str
    """Instructions that PyTorch's kernels use on the ranks' CPUs, each once."""
    environment: dict[str, str]
    """Those of `VARIABLES` that are set."""
    compiled: bool
    """Whether the blocks are compiled."""
    computing: Computing
    """Way of computing that was asked for."""

    @classmethod
    def now(cls, context: Context, step: int, compiled: bool, computing: Computing) -> Self:
        """Return the record of this attempt; called on every rank."""
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

    @property
    def origin(self) -> dict[str, Any]:
        """Return versions and revision, as `maect.train.run_folder.origin`."""
        return {"versions": self.versions, "source_revision": self.revision}

    def differences(self, before: "Attempt") -> Iterator[str]:
        """Yield a sentence for each value that differs from the attempt before."""
        now, then = _flat(self), _flat(before)
        for name in now | then:
            new, old = now.get(name), then.get(name)
            if new == old:
                continue
            new = "not set" if new is None else new
            old = "not set" if old is None else old
            last = "" if name in ("revision", "maect", "decoder") else " in the last bits"
            yield f"resumes with {name} {new}, it was {old}: the result may differ{last}"


def attempts(folder: Path, step: int) -> list[Attempt]:
    """Return the attempts that computed the first `step` steps of a run, oldest first.

    An attempt that saved none of them is left out.
    """
    where = f"{folder / 'recipe.json'}: attempts"
    given = read_notes(folder).get("attempts", [])
    history = [validated(Attempt, entry, where) for entry in given]
    return [attempt for attempt in history if attempt.step < step]


def threads_before(folder: Path, step: int) -> int | None:
    """Return the threads of each rank that computed a run up to a step, if that is known."""
    before = attempts(folder, step)
    return before[-1].threads if before else None


def compute_as_before(context: Context, folder: Path, step: int) -> None:
    """Use as many CPU threads as before a run was interrupted, for the same bits, and say so.

    Args:
        context: this rank's.
        folder: of the run.
        step: up to which the run was computed.
    """
    given = torch.get_num_threads()
    before = from_rank_0(threads_before(folder, step) if context.rank == 0 else None)
    if before in (None, given) or any_rank(before > len(os.sched_getaffinity(0))):
        return
    torch.set_num_threads(before)
    warn_people(
        context,
        folder,
        f"{counted(before, 'thread')} a rank, as before, for the same bits, although {given} would "
        "do (--convert-world-size takes these)",
    )


def begin_attempt(
    context: Context, folder: Path, step: int, engine: Engine, computing: Computing
) -> None:
    """Record machine and software from a step on; warn of changes that affect result or speed.

    Called on every rank.
    """
    attempt = Attempt.now(context, step, engine.compiled, computing)
    sentences = [slow_decoding(attempt)]
    if context.rank:
        return
    sentences = [*note_attempt(folder, attempt), *sentences]
    without = "computed without, which may change the last bits"
    if engine.not_compiled:
        sentences.append(f"nothing can be compiled here ({engine.not_compiled}): {without}")
    if computing.attention == "flash_attn" and flash_kernel() is None:
        sentences.append(f"attention: flash_attn is not installed here: {without}")
    for sentence in sentences:
        if sentence is not None:
            warn_people(context, folder, sentence)


def warn_people(context: Context, folder: Path, sentence: str) -> None:
    """Warn people of something about a run, in the log and in the launcher's terminal."""
    if context.rank == 0:
        log.warning("%s: %s", folder, sentence)
        context.say(sentence)


def slow_decoding(attempt: Attempt) -> str | None:
    """Return a sentence on the nodes without the native decoder and the reason; None: none.

    Called on every rank.
    """
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
    write_notes(folder, attempts=[one.model_dump(mode="json") for one in before])
    return sentences


def _flat(attempt: Attempt) -> dict[str, Any]:
    parts = "versions", "environment", "computing"
    values = attempt.model_dump(mode="json", exclude={"step", *parts})
    how = attempt.computing.model_dump(exclude={"compile"})  # `compiled` has the outcome
    return values | attempt.versions | attempt.environment | how


def _cpu_name() -> str:
    """Return the processor's model, as the kernel calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
