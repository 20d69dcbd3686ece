"""The one module that knows DeepSpeed: forward, backward, step, and this rank's shards.

DeepSpeed partitions under ZeRO 2 and 3; under ZeRO 0 and 1 ranks exchange as `exchange.py` says.
What this rank owns are its shards: saving, restoring and averaging work on them, so none of them
gathers anything and none depends on the ZeRO stage.
"""

import importlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from maect.core.context import Context
from maect.core.distributed import STEP_TIMEOUT, any_rank, device_of, join, keep_freed_memory
from maect.core.processes import private_caches
from maect.models.attention import use_attention
from maect.models.decoder import Decoder
from maect.models.heads import QueueHead
from maect.models.precision import mixed_precision
from maect.models.vit import VisionEncoder
from maect.train.checkpoint import AVERAGE, PARAM, Shard
from maect.train.exchange import Exchange, Piece
from maect.train.stage import Training

_BUCKET = 50_000_000
GRAPHS = 32
"""Compiled forms of a transformer block, at most."""
MOMENTS = ("exp_avg", "exp_avg_sq")
Mark = Any
"""A moment of a device: an event of a GPU, or seconds."""


def start(context: Context) -> torch.device:
    """Join the process group for an engine; returns this rank's device."""
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

    # An optimizer that is not ours compiles itself there, which imports the compiler: seconds.
    with patch.object(torch, "compile", lambda function=None, **_: function or (lambda f: f)):
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    deepspeed.utils.logger.setLevel(logging.WARNING)
    # None of its C++ operators is used. To look which ones there are takes a second, and to
    # compile its shared-memory collectives a minute and a compiler.
    deepspeed.ops.__compatible_ops__ = {}
    # The name that torch 2.11 to 2.14 share, for what later versions rename.
    warnings.filterwarnings("ignore", message=".*(all_gather_into|reduce_scatter)_tensor")
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(verbose=False)
    # It would make a group like this one, with its own time limit and more of each GPU's memory.
    groups._WORLD_GROUP = dist.group.WORLD
    return device


@contextmanager
def alone(context: Context) -> Iterator[torch.device]:
    """Have engines in this process for as long as the block runs; gives the only rank's device."""
    with patch.dict(os.environ, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1"):
        device = start(context)
        try:
            yield device
        finally:
            dist.destroy_process_group()


def seconds_between(first: Mark, second: Mark) -> float:
    """Between two marks of an engine."""
    if isinstance(first, torch.cuda.Event):
        return first.elapsed_time(second) / 1000
    return second - first


class Engine:
    """A module under DeepSpeed with AdamW, stepped with the learning rates of a schedule.

    Attributes:
        module: what is trained; call the engine itself to run it.
        shards: what this rank owns, and saves.
        compiled: whether the blocks are compiled.
        not_compiled: why they are not although the settings ask for it.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: Training,
        groups: list[dict[str, Any]],
        device: torch.device,
    ) -> None:
        """Wrap a module.

        Args:
            module: on the device.
            settings: precision of the steps apart, all that says how they are computed.
            groups: trained parameters with `peak_lr` and `weight_decay`.
            device: this rank's.
        """
        import deepspeed

        self.module, self.zero_stage = module, settings.zero_stage
        self._on_gpu = device.type == "cuda"
        use_attention(module, settings.attention)
        self.not_compiled = compile_blocks(module, device) if settings.compile else ""
        self.compiled = settings.compile and not self.not_compiled
        self._peaks, self._multiplier = [group["peak_lr"] for group in groups], 0.0
        names = {id(p): name for name, p in module.named_parameters()}
        trained = [p for group in groups for p in group["params"]]
        elements = sum(p.numel() for p in trained)
        self._exchange: Exchange | None = None
        if settings.zero_stage < 2:
            self._exchange = Exchange(
                module,
                groups,
                settings.zero_stage == 1,
                _cast_by_autocast(module, settings, device),
                [part for part in module.modules() if isinstance(part, Block | QueueHead)],
                settings.accumulation > 1,
            )
            groups = _as_updated(groups, self._exchange)
        self._adam = GuardedAdamW(
            groups, lr=0.0, betas=(settings.beta1, settings.beta2), fused=device.type == "cuda"
        )
        self._backwards = self._accumulation = settings.accumulation
        config = {
            "train_micro_batch_size_per_gpu": settings.batch_size
            // (dist.get_world_size() * settings.accumulation),
            "gradient_accumulation_steps": settings.accumulation,
            "zero_optimization": {
                "stage": 0 if self._exchange else settings.zero_stage,
                "reduce_bucket_size": min(_BUCKET, 2 * elements),
                "allgather_bucket_size": min(_BUCKET, 2 * elements),
                "overlap_comm": False,
                # One norm of all gradients, ours, in place of one per group, each with an exchange.
                **({"compute_grad_norm": False} if settings.zero_stage == 2 else {}),
            },
            "gradient_clipping": 0.0,  # 1 by default; the method has none
            "zero_allow_untested_optimizer": True,
            "steps_per_print": None,
            "timers": {"throughput": {"enabled": False}},  # it waits for the device twice a step
        }
        self._engine, self._zero, _, _ = deepspeed.initialize(
            model=module, optimizer=self._adam, config=config
        )
        self._engine.enable_backward_allreduce = self._exchange is None
        self._create_moments()
        self.shards: list[Shard] = []
        self._replicas: list[Shard] = []  # updated here too, but saved by another rank: ZeRO 0
        self._names = {id(p): names[id(p)] for p in trained}
        self._find_shards(trained, names)

    def __call__(self, inputs: Any) -> Any:
        """Forward pass of the module; the backward pass of its loss has to follow."""
        if self._exchange is not None:
            self._exchange.lend()
        return self._engine(inputs)

    def mark(self) -> Mark:
        """A moment of this rank's device, to be read once the host has waited for it."""
        if not self._on_gpu:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients; the last pass of an update averages them over the ranks."""
        self._backwards -= 1
        last = self._backwards == 0
        parts = self._accumulation > 1  # dividing by one takes kernels, too
        if self._exchange is None:
            self._engine.backward(loss, scale_wrt_gas=parts)
        else:
            if last:
                self._exchange.begin()
            self._engine.backward(loss, scale_wrt_gas=parts)
            self._exchange.take_back()
            if last:
                self._exchange.finish()
        if last:
            self._backwards = self._accumulation

    def squared_norm(self) -> Tensor:
        """This rank's part of the global gradient's squared norm, a float64 scalar on the device.

        Between the last backward pass of an update and the update; the sum over the ranks is whole.
        """
        if self._exchange is not None:
            gradients = self._exchange.own_gradients()
        else:
            groups = self._zero.averaged_gradients.values()
            gradients = [gradient for group in groups for gradient in group]
        norms = torch._foreach_norm([gradient.detach().float() for gradient in gradients])
        return torch.stack(norms).double().square().sum()

    def squared_norms(self) -> dict[str, Tensor | float]:
        """The same of each trained parameter, by name, the same names on every rank."""
        if self._exchange is not None:
            pairs = list(self._exchange.own_parts())
        else:
            parts = (
                self._zero.fp16_groups if self.zero_stage == 3 else self._zero.params_in_partition
            )
            pairs = [
                (self._names[id(parameter)], gradient)
                for group, gradients in self._zero.averaged_gradients.items()
                for parameter, gradient in zip(parts[group], gradients, strict=False)  # padding
            ]
        norms: dict[str, Tensor | float] = dict.fromkeys(self._names.values(), 0.0)
        for name, gradient in pairs:
            norms[name] = gradient.detach().double().square().sum()
        return norms

    def step(self, lr_multiplier: float, spoilt: Tensor | None = None) -> None:
        """Update the weights with `lr_multiplier` times each group's peak learning rate.

        Call it after every backward pass; only the last one of an accumulation updates.

        Args:
            lr_multiplier: of the schedule.
            spoilt: float32 [], on the device: where it is 1, weights and moments stay as they are.
        """
        for group in self._adam.param_groups:
            group["lr"] = group["peak_lr"] * lr_multiplier
        self._adam.spoilt = spoilt
        updates = self._engine.is_gradient_accumulation_boundary()
        if updates:
            self._multiplier = lr_multiplier
        self._engine.step()
        if self._exchange is not None and updates:
            self._exchange.gather()

    def learning_rates(self) -> tuple[float, float]:
        """Smallest and largest learning rate of the last update."""
        return min(self._peaks) * self._multiplier, max(self._peaks) * self._multiplier

    def complete(self) -> None:
        """Let the module's parameters be whole on every rank; on all of them at once.

        Between updates a rank has those that it updates; the others' come with the next forward
        pass, or here. Under ZeRO 3 see `gathered`.
        """
        if self._exchange is not None:
            self._exchange.complete()

    def copies(self) -> Iterator[Tensor]:
        """What layers computed with in place of their parameters, the same on every rank."""
        return self._exchange.copies() if self._exchange is not None else iter(())

    def gathered(self, module: nn.Module) -> Any:
        """Context in which a part's parameters are complete on every rank, also under ZeRO 3."""
        import deepspeed

        if self._exchange is not None:
            self._exchange.complete(module)
        sharded = self.zero_stage == 3
        return deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=sharded)

    def start_average(self, prefix: str) -> None:
        """Let a running average of the parameters whose names begin so start at their values."""
        for shard in self.shards:
            if shard.name.startswith(prefix):
                shard.values[AVERAGE] = shard.values[PARAM].clone()

    @torch.no_grad()
    def update_average(self, momentum: float) -> None:
        """average <- momentum * average + (1 - momentum) * fp32 weights."""
        averaged = [shard.values for shard in self.shards if AVERAGE in shard.values]
        if averaged:
            averages = [values[AVERAGE] for values in averaged]
            weights = [values[PARAM] for values in averaged]
            torch._foreach_lerp_(averages, weights, 1 - momentum)

    def close(self) -> None:
        """Let go of the module: DeepSpeed's hooks and ours would keep it and the optimizer."""
        self._engine.destroy()
        if self._exchange is not None:
            self._exchange.close()

    def restore(self, fill: Callable[[list[Shard]], None], step: int) -> None:
        """Let `fill` set the values of all shards, and set the count of updates."""
        fill([*self.shards, *self._replicas])
        for state in self._adam.state.values():
            state["step"].fill_(step)

    def _create_moments(self) -> None:
        """Create AdamW's state before its first step, to restore a saved one into."""
        if self._exchange is not None:
            flat = [piece.weights for piece in self._exchange.pieces]
        elif self.zero_stage == 3:
            flat = self._zero.fp32_partitioned_groups_flat
        else:
            flat = self._zero.single_partition_of_fp32_groups
        for values in flat:
            on = values.device if self._adam.defaults["fused"] else torch.device("cpu")
            moments = {name: torch.zeros_like(values, requires_grad=False) for name in MOMENTS}
            step = torch.zeros((), dtype=torch.float32, device=on)
            self._adam.state[values] = {"step": step, **moments}

    def _find_shards(self, trained: list[Tensor], names: dict[int, str]) -> None:
        """Find where the optimizer keeps this rank's part of each parameter."""
        if self._exchange is not None:
            for piece in self._exchange.pieces:
                self._share_out(piece)
            return
        rank = dist.get_rank()
        for parameter in trained:
            name = names[id(parameter)]
            if self.zero_stage == 3:
                group, offset, padded = self._zero.grad_position[self._zero.get_param_id(parameter)]
                start = rank * padded
                length = min(padded, parameter.ds_numel - start)  # type: ignore[attr-defined]
                if length > 0:
                    flat = self._zero.fp32_partitioned_groups_flat[group]
                    self.shards.append(self._shard(name, start, flat, offset, length))
            else:
                mapping = parameter._hp_mapping  # type: ignore[attr-defined]
                if mapping is not None:
                    flat = self._zero.single_partition_of_fp32_groups[mapping.param_group_index]
                    address = mapping.get_hp_fragment_address()
                    start = mapping.lp_fragment_address.start
                    self.shards.append(self._shard(name, start, flat, address.start, address.numel))

    def _share_out(self, piece: Piece) -> None:
        """Shards of a piece: what lies in this rank's slice is its own to save, the rest is not."""
        own = piece.bucket.own
        for mine, low, high in (
            (False, piece.start, own.start),
            (True, own.start, own.stop),
            (False, own.stop, piece.end),
        ):
            for name, parameter, first in piece.bucket.parameters:
                start = max(first, low, piece.start)
                length = min(first + parameter.numel(), high, piece.end) - start
                if length > 0:
                    offset = start - piece.start
                    shard = self._shard(name, start - first, piece.weights, offset, length)
                    (self.shards if mine else self._replicas).append(shard)

    def _shard(self, name: str, start: int, flat: Tensor, offset: int, length: int) -> Shard:
        state = self._adam.state[flat]
        values = {PARAM: flat, **{moment: state[moment] for moment in MOMENTS}}
        pieces = {k: v.detach().view(-1)[offset : offset + length] for k, v in values.items()}
        return Shard(name, start, pieces)


class GuardedAdamW(torch.optim.AdamW):
    """AdamW that leaves everything as it is where a gradient is spoilt.

    Attributes:
        spoilt: float32 [], on the device; 1: leave it. A GPU decides that by itself: nothing waits.
    """

    spoilt: Tensor | None = None

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update, or not."""
        if self.defaults["fused"]:
            self.found_inf = self.spoilt
        elif self.spoilt is not None and self.spoilt:
            return
        super().step(closure)


def _cast_by_autocast(
    module: nn.Module, settings: Training, device: torch.device
) -> list[nn.Module]:
    """Parts in which autocast casts layers' weights."""
    if not mixed_precision(device, settings.precision)._enabled:
        return []
    return [part for part in module.modules() if isinstance(part, VisionEncoder | Decoder)]


def _as_updated(groups: list[dict[str, Any]], exchange: Exchange) -> list[dict[str, Any]]:
    """Parameter groups of the pieces that this rank updates; groups of which it has none go."""
    found: dict[int, dict[str, Any]] = {}
    for piece in exchange.pieces:
        piece.weights.grad = piece.gradients
        found.setdefault(piece.group, {**groups[piece.group], "params": []})
        found[piece.group]["params"].append(piece.weights)
    return list(found.values())


def compile_blocks(module: nn.Module, device: torch.device) -> str:
    """Compile the transformer blocks on every rank, or on none; return why not."""
    private_caches()
    # All blocks of a process share these: sizes of views, learning and frozen ones, looks and their
    # last batches. Beyond PyTorch's 8 blocks would run as they are, without a word.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    reason = ""
    try:
        torch.compile(torch.nn.functional.gelu)(torch.ones(8, device=device))
    except Exception as error:  # no C++ compiler, no Triton: the compiler has many kinds of errors
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
    if any_rank(bool(reason)):
        return reason or "another rank cannot"
    for block in module.modules():
        if isinstance(block, Block):
            # Encoder and decoder share the code of a block: each gets one for its own shapes. The
            # hooks of a block are not compiled: one waits for its weights.
            block.forward = torch.compile(block.forward, dynamic=False)  # type: ignore[method-assign]
    return ""
