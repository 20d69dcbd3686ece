"""Settings of how a training is computed: on record, and no part of what it is."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from maect.core.settings import Settings


class Computing(Settings):
    """A way of computing a training. It may change at any time; only rounding depends on it."""

    zero_stage: Literal[1, 2, 3] = 1
    """What DeepSpeed partitions over the ranks: optimizer states, gradients too, parameters too."""
    overlap_comm: bool = False
    """DeepSpeed averages gradients beside the backward pass; for a slow network, and unmeasured."""
    accumulation: int = Field(default=1, gt=0)
    """Forward passes per optimizer step. Batch statistics forbid it in contrastive stages."""
    compile: bool | None = None
    """The transformer blocks. None: on GPUs, of ViT-B and larger, under ZeRO 1 and 2, except in
    fine-tuning."""
    cuda_graphs: bool | None = None
    """Replay forward and backward pass as CUDA graphs. None: on one GPU, without accumulation and
    activation checkpointing; with several it cannot be."""
    activation_checkpointing: bool = False
    attention: Literal["sdpa", "packed", "flash_attn"] = "sdpa"
    """PyTorch's choice; a kernel with one gradient for short sequences; the package's."""
    deterministic: bool = False
    """The same bits at every start also on GPUs; on CPUs they are so anyway."""

    @property
    def captures_passes(self) -> bool:
        """Say if a rank alone on a GPU replays its passes: not where one differs from the others.

        A recomputed one draws from the generator's state; gradients of several add up in place.
        """
        fixed = self.accumulation == 1 and not self.activation_checkpointing
        return fixed and self.cuda_graphs is not False

    @field_validator("zero_stage", mode="before")
    @classmethod
    def _refuse_stage_0(cls, value: object) -> object:
        if value == 0 and not isinstance(value, bool):
            raise ValueError("there is no stage 0: leave it out (1: one rank has nothing to share)")
        return value

    def changes(self, before: "Computing") -> str:
        """Return what differs from another way, as `key: value, …`."""
        values = self.model_dump()
        other = before.model_dump()
        return ", ".join(f"{key}: {value}" for key, value in values.items() if value != other[key])


PLAIN = Computing()


def separate(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split what was written side by side into settings and how they are computed."""
    how = {key: value for key, value in values.items() if key in Computing.model_fields}
    return {key: value for key, value in values.items() if key not in how}, how
