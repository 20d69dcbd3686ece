"""The one module that knows DeepSpeed: forward, backward, step, and this rank's slices.

DeepSpeed partitions optimizer states (ZeRO 1), gradients (2) or parameters (3) over the ranks. What
a rank owns are its slices: saving, restoring and averaging work on them, so none of these gathers
anything and none depends on the ZeRO stage. One rank has nothing to partition: there DeepSpeed's
stage 0 updates the parameters in place, whichever stage was asked for.
"""

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from maect.core.context import Context
from maect.core.distributed import STEP_TIMEOUT, device_of, join, keep_freed_memory
from maect.data.loader import Batch
from maect.models.decoder import Decoder
from maect.models.kernels import use_attention
from maect.models.vit import VisionEncoder
from maect.recipes import Encoder, views_by_size
from maect.recipes.cost import BUCKET
from maect.recipes.settings import PLAIN, Computing
from maect.train.checkpoint import AVERAGE, PARAM, ParameterSlice
from maect.train.objective import Objective
from maect.train.passes import compile_blocks, is_to_be_captured, is_to_be_compiled
from maect.train.stage import ParameterGroup, Training

MOMENTS = ("exp_avg", "exp_avg_sq")
Mark = Any
"""A moment of a device: an event of a GPU, or seconds on a CPU."""


def start(context: Context) -> torch.device:
    """Join the process group and prepare DeepSpeed; return this rank's device."""
    device = device_of(context)
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported
        keep_freed_memory()
    else:
        # DeepSpeed takes the device of this number; srun may show each rank only its own.
        os.environ["LOCAL_RANK"] = str(device.index)
        # It compares that with an outer mpirun's number of the rank, which is none of a device.
        os.environ.pop("OMPI_COMM_WORLD_LOCAL_RANK", None)
    join(context, "nccl" if device.type == "cuda" else "gloo", STEP_TIMEOUT)
    import deepspeed
    from deepspeed.utils import groups

    deepspeed.utils.logger.setLevel(logging.WARNING)
    # None of its C++ operators is used. To look which ones there are takes a second, and to
    # compile its shared-memory collectives a minute and a compiler (0.19.8: no setting for it).
    deepspeed.ops.__compatible_ops__ = {}
    # The name that torch 2.11 to 2.14 share, for what later versions rename.
    warnings.filterwarnings("ignore", message=".*(all_gather_into|reduce_scatter)_tensor")
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(verbose=False)
    # It would make a group like this one, with its own time limit and more of each GPU's memory
    # (0.19.8: `initialize` takes no group, only the parts of Megatron's parallel training).
    groups._WORLD_GROUP = dist.group.WORLD
    return device


@contextmanager
def single_rank_group(context: Context) -> Iterator[torch.device]:
    """Start a process group of one rank, and leave it at the end; yields the rank's device."""
    with patch.dict(os.environ, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1"):
        device = start(context)
        try:
            yield device
        finally:
            dist.destroy_process_group()


def seconds_between(first: Mark, second: Mark) -> float:
    """Return the seconds between two marks of an engine."""
    if isinstance(first, torch.cuda.Event):
        return first.elapsed_time(second) / 1000
    return second - first


def deepspeed_stage(computing: Computing) -> int:
    """Return the ZeRO stage that DeepSpeed is started with: 0 on one rank."""
    return computing.zero_stage if dist.get_world_size() > 1 else 0


class Engine:
    """A module under DeepSpeed with AdamW, stepped with the learning rates of a schedule.

    Attributes:
        module: that is trained; call the engine itself to run it.
        slices: weights, moments and averages that this rank updates and saves.
        compiled: whether the transformer blocks are compiled.
        not_compiled: why they are not, although they should be; else empty.
        captures: whether `capture` is to be called before the first step.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: Training,
        groups: list[ParameterGroup],
        device: torch.device,
        computing: Computing = PLAIN,
    ) -> None:
        """Prepare a module, and let DeepSpeed distribute its parameters.

        Args:
            module: to train, on the device.
            settings: of the training.
            groups: trained parameters with `peak_lr` and `weight_decay`.
            device: of this rank.
            computing: how it is computed.
        """
        self.module = module
        self._device = device
        self._on_gpu = device.type == "cuda"
        use_attention(module, computing.attention)
        for part in cast_parts(module):
            part.checkpointing = computing.activation_checkpointing
        asked = is_to_be_compiled(module, settings.labelled, device, computing)
        self.not_compiled = compile_blocks(module, device) if asked else ""
        self.compiled = asked and not self.not_compiled
        self.captures = is_to_be_captured(module, device, computing)
        self._peaks = [group["peak_lr"] for group in groups]
        self._multiplier = 0.0
        self._accumulates = computing.accumulation > 1
        names = {id(p): name for name, p in module.named_parameters()}
        self._trained: dict[str, Any] = {
            names[id(p)]: p for group in groups for p in group["params"]
        }
        self._stage = deepspeed_stage(computing)
        self._start_deepspeed(settings, groups, computing)
        if self._stage:
            self._create_moments(self._flat_tensors())
        else:
            self._create_moments(self._trained.values())
        self.slices = list(self._own_slices())

    def _start_deepspeed(
        self, settings: Training, groups: list[ParameterGroup], computing: Computing
    ) -> None:
        """Start DeepSpeed's engine around the module, with AdamW for its parameters."""
        import deepspeed

        betas = (settings.beta1, settings.beta2)
        plain = cast("list[dict[str, Any]]", groups)
        self._adam = torch.optim.AdamW(plain, lr=0.0, betas=betas, fused=self._on_gpu)
        passes = dist.get_world_size() * computing.accumulation
        config = {
            "train_micro_batch_size_per_gpu": settings.batch_size // passes,
            "gradient_accumulation_steps": computing.accumulation,
            "zero_optimization": self._partitions(computing),
            "gradient_clipping": 0.0,  # 1 by default; the method has none
            "steps_per_print": None,
            "timers": {"throughput": {"enabled": False}},  # it waits for the device twice a step
        }
        self._engine, self._zero, _, _ = deepspeed.initialize(
            model=self.module, optimizer=self._adam, config=config
        )

    def _partitions(self, computing: Computing) -> dict[str, Any]:
        """Return DeepSpeed's settings for partitioning."""
        bucket = min(BUCKET, 2 * sum(p.numel() for p in self._trained.values()))
        partitions: dict[str, Any] = {
            "stage": self._stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "overlap_comm": computing.overlap_comm,
            # It would replace the layer for the whole process, and round before the bias is added.
            "memory_efficient_linear": False,
        }
        if self._stage in (1, 2):
            # One norm of all gradients, ours, in place of one per group, each with an exchange.
            partitions["compute_grad_norm"] = False
        return partitions

    # ---- Where DeepSpeed keeps a rank's values and gradients. Its public functions
    # (`deepspeed.utils.safe_get_full_fp32_param`, …) gather whole parameters, or give values
    # without their place in the parameter: all names of `_zero`, `ds_…` and `_hp_mapping` are
    # its own (0.19.8).

    def _flat_tensors(self) -> list[Tensor]:
        """Return the float32 tensors that the optimizer updates on this rank, one a group."""
        if self._stage == 3:
            return list(self._zero.fp32_partitioned_groups_flat)
        return list(self._zero.single_partition_of_fp32_groups)

    def _own_slices(self) -> Iterator[ParameterSlice]:
        """Yield the slice of each parameter that this rank updates."""
        flat = self._flat_tensors() if self._stage else []
        for name, parameter in self._trained.items():
            if self._stage == 0:
                yield self._slice(name, 0, parameter, 0, parameter.numel())
            elif self._stage == 3:
                group, offset, padded = self._zero.grad_position[self._zero.get_param_id(parameter)]
                start = dist.get_rank() * padded
                length = min(padded, parameter.ds_numel - start)
                if length > 0:
                    yield self._slice(name, start, flat[group], offset, length)
            elif parameter._hp_mapping is not None:
                mapping = parameter._hp_mapping
                start = mapping.lp_fragment_address.start
                place = mapping.get_hp_fragment_address()
                updated = flat[mapping.param_group_index]
                yield self._slice(name, start, updated, place.start, place.numel)

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the averaged gradients of this rank's slices, by the parameter's name."""
        if self._stage == 0:
            for name, parameter in self._trained.items():
                if parameter.grad is not None:
                    yield name, parameter.grad
            return
        names = {id(p): name for name, p in self._trained.items()}
        parts = self._zero.fp16_groups if self._stage == 3 else self._zero.params_in_partition
        for group, gradients in self._zero.averaged_gradients.items():
            for parameter, gradient in zip(parts[group], gradients, strict=False):  # padding
                yield names[id(parameter)], gradient

    # ---- one step

    def capture(self, inputs: Any) -> None:
        """Capture the passes of the module for inputs of these shapes, and no others, as graphs.

        No other thread may use the device meanwhile.
        """
        objective = cast(Objective, self.module)
        assert objective.passes is not None
        for tensors in objective.inputs_of_passes(inputs):
            objective.passes.capture(*tensors)

    def __call__(self, inputs: Any) -> Any:
        """Run the module's forward pass; the backward pass of its loss has to follow."""
        return self._engine(inputs)

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients; the last pass of an update averages them over the ranks."""
        # A single rank exchanges nothing.
        with self._engine.no_sync() if self._stage == 0 else nullcontext():
            # Dividing by one takes kernels, too.
            self._engine.backward(loss, scale_wrt_gas=self._accumulates)

    @torch.no_grad()
    def squared_norm(self) -> Tensor:
        """Return this rank's part of the gradient's squared norm, float64 [] on the device.

        To be called between the last backward pass of an update and the update. The sum over the
        ranks is that of the whole gradient.
        """
        norms = torch._foreach_norm([gradient for _, gradient in self._gradients()])
        return torch.stack(norms).double().square().sum()

    def step(self, lr_multiplier: float) -> None:
        """Update the weights; called after every backward pass, of which the last one updates.

        Args:
            lr_multiplier: times each group's peak learning rate is its learning rate.
        """
        for group in self._adam.param_groups:
            group["lr"] = group["peak_lr"] * lr_multiplier
        if self._engine.is_gradient_accumulation_boundary():
            self._multiplier = lr_multiplier
        self._engine.step()

    def learning_rates(self) -> tuple[float, float]:
        """Return the smallest and the largest learning rate of the last update."""
        return min(self._peaks) * self._multiplier, max(self._peaks) * self._multiplier

    def mark(self) -> Mark:
        """Return a moment of this rank's device, to be read once the host has waited for it."""
        if not self._on_gpu:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def gathered(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which a part is whole on every rank, also under ZeRO 3."""
        import deepspeed

        context: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(
            list(module.parameters()), enabled=self._stage == 3
        )
        return context

    # ---- state

    def _create_moments(self, updated: Iterable[Tensor]) -> None:
        """Create AdamW's state before its first step, to restore a saved one into."""
        for values in updated:
            on = values.device if self._on_gpu else torch.device("cpu")
            moments = {name: torch.zeros_like(values, requires_grad=False) for name in MOMENTS}
            step = torch.zeros((), dtype=torch.float32, device=on)
            self._adam.state[values] = {"step": step, **moments}

    def _slice(
        self, name: str, start: int, flat: Tensor, offset: int, length: int
    ) -> ParameterSlice:
        """Return values of a parameter with their moments, as views of the optimizer's tensors.

        Args:
            name: of the parameter in the module.
            start: of the values in the parameter, flattened.
            flat: tensor that the optimizer updates, which has them from `offset` on.
            offset: of the values in it.
            length: how many there are.
        """
        state = self._adam.state[flat]
        values = {PARAM: flat, **{moment: state[moment] for moment in MOMENTS}}
        pieces = {k: v.detach().view(-1)[offset : offset + length] for k, v in values.items()}
        return ParameterSlice(name, start, pieces)

    def start_average(self, prefix: str) -> None:
        """Start a running average of the parameters whose names begin with `prefix`."""
        for piece in self.slices:
            if piece.name.startswith(prefix):
                piece.values[AVERAGE] = piece.values[PARAM].clone()

    @torch.no_grad()
    def update_average(self, momentum: float) -> None:
        """Set each average to momentum * average + (1 - momentum) * float32 weights."""
        averaged = [piece.values for piece in self.slices if AVERAGE in piece.values]
        if averaged:
            averages = [values[AVERAGE] for values in averaged]
            weights = [values[PARAM] for values in averaged]
            torch._foreach_lerp_(averages, weights, 1 - momentum)

    def restore(self, fill: Callable[[list[ParameterSlice]], None], step: int) -> None:
        """Restore all slices by `fill`, and AdamW's count of updates to `step`."""
        fill(self.slices)
        for state in self._adam.state.values():
            state["step"].fill_(step)

    def close(self) -> None:
        """Release the module: DeepSpeed's hooks and closures would keep it and the optimizer."""
        passes = cast(Objective, self.module).passes if self.captures else None
        if passes is not None:
            passes.release()
        self._engine.destroy()
        if self._stage < 3:
            return
        for parameter in cast("Iterable[Any]", self.module.parameters()):
            for tensor in (parameter, parameter.ds_tensor):
                tensor.data = tensor.new_empty(0)
        # `destroy` leaves cycles of stage 3 that the collector does not find soon (0.19.8).
        self._engine.optimizer = None
        vars(self._zero).clear()
        self._adam.state.clear()


def cast_parts(module: nn.Module) -> Iterator[VisionEncoder | Decoder]:
    """Yield the parts whose layers compute in bfloat16 under autocast."""
    return (part for part in module.modules() if isinstance(part, VisionEncoder | Decoder))


def random_batch(stage: Training, encoder: Encoder, images: int, seed: int = 0) -> Batch:
    """Return a rank's batch of noise on the CPU, as the loader decodes it: only shapes matter."""
    noise = torch.Generator().manual_seed(seed)
    sizes = views_by_size(stage.view_settings(), encoder.image_size)
    channels = encoder.pixels.channels
    pixels = tuple(
        torch.randint(
            256, (len(views), images, channels, side, side), dtype=torch.uint8, generator=noise
        )
        for side, views in sizes.items()
    )
    ids = np.arange(images, dtype=np.int64)
    return Batch(0, ids, ids * 0, ids % 10, pixels)
