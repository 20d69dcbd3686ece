"""Settings of how a training is computed: recorded, and no part of its identity."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from maect.core.settings import Settings


class Computing(Settings):
    """Way of computing a training. It may change between attempts and affects rounding only."""

    zero_stage: Literal[1, 2, 3] = 1
    """DeepSpeed partitions over the ranks: 1 optimizer states, 2 also gradients, 3 also
    parameters."""
    overlap_comm: bool = False
    """Average gradients during the backward pass; for a slow network, and not measured."""
    accumulation: int = Field(default=1, gt=0)
    """Forward passes per optimizer step; 1 in contrastive stages, for their batch statistics."""
    compile: bool | None = None
    """Compile the transformer blocks. None: on GPUs for ViT-B and larger, under ZeRO 1 and 2, but
    not in fine-tuning."""
    cuda_graphs: bool | None = None
    """Replay forward and backward pass as CUDA graphs. None: on one GPU, without accumulation and
    activation checkpointing. It is impossible on several."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass, for less memory."""
    attention: Literal["sdpa", "flash_attn"] = "sdpa"
    """Kernel of attention (`maect.models.attention`)."""
    deterministic: bool = False
    """Use deterministic kernels, for the same bits at every start also on GPUs."""

    @property
    def captures_passes(self) -> bool:
        """Return whether a single GPU replays its passes.

        A recomputed pass draws from the generator's state, and the gradients of several passes add
        up in place: neither can be replayed.
        """
        can_be = self.accumulation == 1 and not self.activation_checkpointing
        return can_be and self.cuda_graphs is not False

    @field_validator("zero_stage", mode="before")
    @classmethod
    def _refuse_stage_0(cls, value: object) -> object:
        if value == 0 and not isinstance(value, bool):
            raise ValueError("there is no stage 0: leave it out (1: one rank has nothing to share)")
        return value

    def changes(self, before: "Computing") -> str:
        """Return the settings that differ from another way, as `key: value, …`."""
        values = self.model_dump()
        other = before.model_dump()
        return ", ".join(f"{key}: {value}" for key, value in values.items() if value != other[key])


PLAIN = Computing()


def separate(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split values into settings of a stage and settings of `Computing`."""
    how = {key: value for key, value in values.items() if key in Computing.model_fields}
    return {key: value for key, value in values.items() if key not in how}, how
