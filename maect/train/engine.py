"""The DeepSpeed engine, and this rank's fragments of masters, moments and EMA.

A fragment is a contiguous piece of one parameter that this rank alone updates: with ZeRO 1 to 3
whatever lies in its partition, with ZeRO 0 every world_size-th parameter. Saving, restoring and
averaging work on fragments, so none of them gathers anything and none depends on the ZeRO stage.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from maect.models.vit import use_attention
from maect.stages.base import SelfSupervised as Stage
from maect.train.objectives import Objective

_BUCKET = 50_000_000


@dataclass
class Fragment:
    """A piece of a parameter: `name` in the objective, offset `start` in its flattened values.

    Attributes:
        master: fp32 values, 1-D, a view on what the optimizer updates.
        exp_avg, exp_avg_sq: AdamW's moments, likewise.
        ema: running average of `master`, or None.
    """

    name: str
    start: int
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    ema: Tensor | None = None


class Engine:
    """One stage's objective under DeepSpeed, stepped with the learning rates of a schedule.

    Attributes:
        module: the objective; call the engine itself to run it.
        fragments: what this rank owns, and saves.
        replicas: what it updates too, but another rank saves; with ZeRO 0 only.
    """

    def __init__(
        self, objective: Objective, stage: Stage, groups: list[dict[str, Any]], device: torch.device
    ) -> None:
        import deepspeed

        self.module, self.stage = objective, stage
        use_attention(objective, stage.attention)
        if stage.compile:
            compile_blocks(objective, device)
        self._adam = torch.optim.AdamW(
            groups, lr=0.0, betas=(stage.beta1, stage.beta2), fused=device.type == "cuda"
        )
        names = {id(p): name for name, p in objective.named_parameters()}
        trained = [p for group in groups for p in group["params"]]
        elements = sum(p.numel() for p in trained)
        config = {
            "train_micro_batch_size_per_gpu": stage.batch_size
            // (dist.get_world_size() * stage.accumulation),
            "gradient_accumulation_steps": stage.accumulation,
            "zero_optimization": {
                "stage": stage.zero_stage,
                "reduce_bucket_size": min(_BUCKET, 2 * elements),
                "allgather_bucket_size": min(_BUCKET, 2 * elements),
                "overlap_comm": False,
            },
            "gradient_clipping": 0.0,  # 1 by default; the method has none
            "zero_allow_untested_optimizer": True,
            "steps_per_print": None,
        }
        self._engine, self._zero, _, _ = deepspeed.initialize(
            model=objective, optimizer=self._adam, config=config
        )
        self._create_moments(trained)
        self.replicas: list[Fragment] = []
        self.fragments = self._find_fragments(trained, names)

    def __call__(self, *args: Any) -> Any:
        """Forward pass of the objective."""
        return self._engine(*args)

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients, averaged over the ranks."""
        self._engine.backward(loss)

    def step(self, rate: float) -> tuple[float, bool]:
        """Update the weights with `rate` times each group's peak learning rate.

        Call it after every backward pass; only the last one of an accumulation updates.

        Returns:
            Norm of the global gradient, and whether this was an update. With a norm that is no
            finite number nothing is updated (ZeRO 1 to 3 see to that themselves).
        """
        update = self._engine.is_gradient_accumulation_boundary()
        for group in self._adam.param_groups:
            group["lr"] = group["peak_lr"] * rate
        norm = self._plain_norm() if update and not self.stage.zero_stage else None
        if norm is not None and not norm.isfinite():
            return float(norm), True
        self._engine.step()
        if norm is None and update:
            norm = self._engine.get_global_grad_norm()
        return (float("nan") if norm is None else float(norm)), update

    def learning_rates(self) -> tuple[float, float]:
        """Smallest and largest learning rate of the last update."""
        rates = [group["lr"] for group in self._adam.param_groups]
        return min(rates), max(rates)

    def full_parameters(self, module: torch.nn.Module) -> Any:
        """Context in which a part's parameters are whole on every rank, also under ZeRO 3."""
        import deepspeed

        sharded = self.stage.zero_stage == 3
        return deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=sharded)

    def restore_moments(self, step: int) -> None:
        """Set AdamW's count of updates; the moments themselves are restored by fragment."""
        for state in self._adam.state.values():
            state["step"].fill_(step)

    def _plain_norm(self) -> Tensor:
        gradients = [p.grad for g in self._adam.param_groups for p in g["params"]]
        return torch.nn.utils.get_total_norm([g for g in gradients if g is not None])

    def _create_moments(self, trained: list[Tensor]) -> None:
        """Create AdamW's state before its first step, as the place to restore one into."""
        if self.stage.zero_stage == 0:
            flat = trained
        elif self.stage.zero_stage == 3:
            flat = self._zero.fp32_partitioned_groups_flat
        else:
            flat = self._zero.single_partition_of_fp32_groups
        for values in flat:
            on = values.device if self._adam.defaults["fused"] else torch.device("cpu")
            self._adam.state[values] = {
                "step": torch.zeros((), dtype=torch.float32, device=on),
                "exp_avg": torch.zeros_like(values, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(values, requires_grad=False),
            }

    def _find_fragments(self, trained: list[Tensor], names: dict[int, str]) -> list[Fragment]:
        rank, size = dist.get_rank(), dist.get_world_size()
        found: list[Fragment] = []
        for number, parameter in enumerate(trained):
            if self.stage.zero_stage == 0:
                mine = found if number % size == rank else self.replicas
                mine.append(self._fragment(parameter, names, 0, parameter, 0))
            elif self.stage.zero_stage == 3:
                group, offset, padded = self._zero.grad_position[self._zero.get_param_id(parameter)]
                start = rank * padded
                length = min(padded, parameter.ds_numel - start)  # type: ignore[attr-defined]
                if length > 0:
                    flat = self._zero.fp32_partitioned_groups_flat[group]
                    found.append(self._fragment(parameter, names, start, flat, offset, length))
            else:
                mapping = parameter._hp_mapping  # type: ignore[attr-defined]
                if mapping is not None:
                    flat = self._zero.single_partition_of_fp32_groups[mapping.param_group_index]
                    place = mapping.get_hp_fragment_address()
                    start = mapping.lp_fragment_address.start
                    found.append(
                        self._fragment(parameter, names, start, flat, place.start, place.numel)
                    )
        return found

    def _fragment(
        self,
        parameter: Tensor,
        names: dict[int, str],
        start: int,
        flat: Tensor,
        offset: int,
        length: int | None = None,
    ) -> Fragment:
        def piece(values: Tensor) -> Tensor:
            line = values.detach().view(-1)
            return line if length is None else line[offset : offset + length]

        state = self._adam.state[flat]
        return Fragment(
            names[id(parameter)],
            start,
            piece(flat),
            piece(state["exp_avg"]),
            piece(state["exp_avg_sq"]),
        )


def compile_blocks(objective: Objective, device: torch.device) -> None:
    """Compile the transformer blocks; where nothing can be compiled, say so once and do not."""
    try:
        torch.compile(torch.nn.functional.gelu)(torch.ones(8, device=device))
    except Exception as error:  # no C++ compiler, no Triton: the compiler has many kinds of errors
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(f"compile: not possible here ({reason}); going on without", stacklevel=2)
        return
    for part in (objective.encoder, getattr(objective, "decoder", None)):
        for block in getattr(part, "blocks", []):
            block.compile()
