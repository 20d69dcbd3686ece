"""The one module that knows DeepSpeed: forward, backward, step, and this rank's shards.

Two engines share an interface: `Replicated`, ours, for ZeRO 0 and 1, and `Partitioned`, DeepSpeed's
partitions, for ZeRO 2 and 3. What a rank owns are its shards: saving, restoring and averaging work
on them, so none of them gathers anything and none depends on the ZeRO stage.
"""

import logging
import os
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast
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
from maect.recipes.computing import PLAIN, Computing
from maect.train.checkpoint import AVERAGE, PARAM, Shard
from maect.train.exchange import Exchange, Piece
from maect.train.optimizer import ParameterGroup
from maect.train.stage import Training

_BUCKET = 50_000_000
GRAPHS = 32
"""Compiled forms of a transformer block, at most."""
WIDE = 768
"""Values of a token, from which blocks are compiled by default."""
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


class Engine(ABC):
    """A module under DeepSpeed with AdamW, stepped with the learning rates of a schedule.

    Attributes:
        module: what is trained; call the engine itself to run it.
        shards: what this rank owns, and saves.
        not_compiled: why the blocks are not `compiled` although they were to be.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: Training,
        groups: list[ParameterGroup],
        device: torch.device,
        computing: Computing,
    ) -> None:
        """Prepare a module; the subclass distributes its parameters.

        Args:
            groups: trained parameters with `peak_lr` and `weight_decay`.
        """
        self.module, self.shards = module, list[Shard]()
        self._device, self._on_gpu = device, device.type == "cuda"
        use_attention(module, computing.attention)
        for part in cast_parts(module):
            part.checkpointing = computing.activation_checkpointing
        asked = is_to_be_compiled(module, settings, device, computing)
        self.not_compiled = compile_blocks(module, device) if asked else ""
        self.compiled = asked and not self.not_compiled
        self._peaks, self._multiplier = [group["peak_lr"] for group in groups], 0.0
        self._pieces, self._in_parts = computing.accumulation, computing.accumulation > 1
        names = {id(p): name for name, p in module.named_parameters()}
        self._trained = {names[id(p)]: p for group in groups for p in group["params"]}
        self._distribute(settings, groups, computing)

    @abstractmethod
    def _distribute(
        self, settings: Training, groups: list[ParameterGroup], computing: Computing
    ) -> None:
        """Distribute the parameters, and call `_wrap`."""

    def _wrap(
        self, groups: list[ParameterGroup], settings: Training, partitions: dict[str, Any]
    ) -> Any:
        """Start DeepSpeed's engine, with AdamW for groups of tensors; returns its optimizer."""
        import deepspeed

        betas = (settings.beta1, settings.beta2)
        plain = cast("list[dict[str, Any]]", groups)
        self._adam = GuardedAdamW(plain, lr=0.0, betas=betas, fused=self._on_gpu)
        ranks = dist.get_world_size()
        config = {
            "train_micro_batch_size_per_gpu": settings.batch_size // (ranks * self._pieces),
            "gradient_accumulation_steps": self._pieces,
            "zero_optimization": partitions,
            "gradient_clipping": 0.0,  # 1 by default; the method has none
            "zero_allow_untested_optimizer": True,
            "steps_per_print": None,
            "timers": {"throughput": {"enabled": False}},  # it waits for the device twice a step
        }
        self._engine, optimizer, _, _ = deepspeed.initialize(
            model=self.module, optimizer=self._adam, config=config
        )
        return optimizer

    def _create_moments(self, flat: Iterable[Tensor]) -> None:
        """Create AdamW's state before its first step, to restore a saved one into."""
        for values in flat:
            on = values.device if self._on_gpu else torch.device("cpu")
            moments = {name: torch.zeros_like(values, requires_grad=False) for name in MOMENTS}
            step = torch.zeros((), dtype=torch.float32, device=on)
            self._adam.state[values] = {"step": step, **moments}

    def _shard(self, name: str, start: int, flat: Tensor, offset: int, length: int) -> Shard:
        """Values of a parameter from `start` on, which lie in `flat` from `offset` on."""
        state = self._adam.state[flat]
        values = {PARAM: flat, **{moment: state[moment] for moment in MOMENTS}}
        pieces = {k: v.detach().view(-1)[offset : offset + length] for k, v in values.items()}
        return Shard(name, start, pieces)

    def __call__(self, inputs: Any) -> Any:
        """Forward pass of the module; the backward pass of its loss has to follow."""
        return self._engine(inputs)

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients; the last pass of an update averages them over the ranks."""
        # Dividing by one takes kernels, too.
        self._engine.backward(loss, scale_wrt_gas=self._in_parts)

    @abstractmethod
    def _own_gradients(self) -> list[Tensor]:
        """Averaged gradients of this rank's shards."""

    @abstractmethod
    def _named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The same by the parameter's name."""

    def squared_norm(self) -> Tensor:
        """This rank's part of the global gradient's squared norm, a float64 scalar on the device.

        Between the last backward pass of an update and the update; the sum over the ranks is whole.
        """
        norms = torch._foreach_norm([g.detach().float() for g in self._own_gradients()])
        return torch.stack(norms).double().square().sum()

    def squared_norms(self) -> dict[str, Tensor | float]:
        """The same of each trained parameter, by name, the same names on every rank."""
        norms: dict[str, Tensor | float] = dict.fromkeys(self._trained, 0.0)
        for name, gradient in self._named_gradients():
            norms[name] = gradient.detach().double().square().sum()
        return norms

    def step(self, lr_multiplier: float, skip: Tensor | None = None) -> None:
        """Update the weights with `lr_multiplier` times each group's peak learning rate.

        Call it after every backward pass; only the last one of an accumulation updates. Where
        `skip`, float32 [] on the device, is 1, weights and moments stay as they are.
        """
        for group in self._adam.param_groups:
            group["lr"] = group["peak_lr"] * lr_multiplier
        self._adam.skip = skip
        if self._engine.is_gradient_accumulation_boundary():
            self._multiplier = lr_multiplier
        self._engine.step()

    def learning_rates(self) -> tuple[float, float]:
        """Smallest and largest learning rate of the last update."""
        return min(self._peaks) * self._multiplier, max(self._peaks) * self._multiplier

    def mark(self) -> Mark:
        """A moment of this rank's device, to be read once the host has waited for it."""
        if not self._on_gpu:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @abstractmethod
    def complete(self, part: nn.Module | None = None) -> None:
        """Let parameters, of a part or all, be whole on every rank; on all ranks at once.

        Between updates a rank has those that it updates; the others' come with the next forward
        pass, or here.
        """

    def copies(self) -> Iterator[Tensor]:
        """Yield what layers computed with in place of parameters, the same on every rank."""
        return iter(())

    def gathered(self, module: nn.Module) -> Any:
        """Context in which a part's parameters are complete on every rank, also under ZeRO 3."""
        self.complete(module)
        return nullcontext()

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

    def restore(self, fill: Callable[[list[Shard]], None], step: int) -> None:
        """Let `fill` set the values of all shards, and set the count of updates."""
        fill(self.shards)
        for state in self._adam.state.values():
            state["step"].fill_(step)

    def close(self) -> None:
        """Let go of the module: hooks would keep it and the optimizer."""
        self._engine.destroy()


class Replicated(Engine):
    """ZeRO 0 and 1: all parameters on every rank, exchanged beside the passes by `Exchange`."""

    def _distribute(
        self, settings: Training, groups: list[ParameterGroup], computing: Computing
    ) -> None:
        """Move the parameters into buckets."""
        self._exchange = Exchange(
            self.module,
            groups,
            computing.zero_stage == 1,
            _cast_by_autocast(self.module, settings, self._device),
            list(readers(self.module, self.compiled)),
            self._in_parts,
        )
        self._wrap(_as_updated(groups, self._exchange), settings, {"stage": 0})
        self._engine.enable_backward_allreduce = False
        self._engine.zero_grad = _without_gradients([*self.module.parameters()])
        self._create_moments(piece.weights for piece in self._exchange.pieces)
        self._replicas: list[Shard] = []  # updated here too, but saved by another rank
        for piece in self._exchange.pieces:
            self._share_out(piece)

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

    def __call__(self, inputs: Any) -> Any:
        """Forward pass, in which layers compute with the weights they have borrowed."""
        self._exchange.lend()
        return super().__call__(inputs)

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients; those of the last pass leave while it computes."""
        last = self._engine.is_gradient_accumulation_boundary()
        if last:
            self._exchange.begin()
        super().backward(loss)
        self._exchange.take_back()
        if last:
            self._exchange.finish()

    def _own_gradients(self) -> list[Tensor]:
        return self._exchange.own_gradients()

    def _named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        return self._exchange.own_parts()

    def step(self, lr_multiplier: float, skip: Tensor | None = None) -> None:
        """Update this rank's pieces, and start to gather the others'."""
        updates = self._engine.is_gradient_accumulation_boundary()
        super().step(lr_multiplier, skip)
        if updates:
            self._exchange.gather()

    def complete(self, part: nn.Module | None = None) -> None:
        """Wait for the other ranks' weights."""
        self._exchange.complete(part)

    def copies(self) -> Iterator[Tensor]:
        """Weights in bfloat16."""
        return self._exchange.copies()

    def restore(self, fill: Callable[[list[Shard]], None], step: int) -> None:
        """Restore what other ranks save, too."""
        super().restore(lambda shards: fill([*shards, *self._replicas]), step)

    def close(self) -> None:
        """Remove DeepSpeed's hooks, and the exchange's."""
        super().close()
        self._exchange.close()


class Partitioned(Engine):
    """ZeRO 2 and 3: DeepSpeed's partitions, and all that is private to DeepSpeed about them."""

    def _distribute(
        self, settings: Training, groups: list[ParameterGroup], computing: Computing
    ) -> None:
        """Let DeepSpeed partition the parameters; find where they went."""
        self._whole = computing.zero_stage == 2  # parameters are; gradients are partitioned
        bucket = min(_BUCKET, 2 * sum(p.numel() for p in self._trained.values()))
        partitions: dict[str, Any] = {
            "stage": computing.zero_stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "overlap_comm": False,
            # It would replace the layer for the whole process, and round before the bias is added.
            "memory_efficient_linear": False,
        }
        if self._whole:
            # One norm of all gradients, ours, in place of one per group, each with an exchange.
            partitions["compute_grad_norm"] = False
        self._zero = self._wrap(groups, settings, partitions)
        self._flat = (
            self._zero.single_partition_of_fp32_groups
            if self._whole
            else self._zero.fp32_partitioned_groups_flat
        )
        self._create_moments(self._flat)
        for name, parameter in self._trained.items():
            if (found := self._place(parameter)) is not None:
                start, group, offset, length = found
                self.shards.append(self._shard(name, start, self._flat[group], offset, length))

    def _place(self, parameter: Any) -> tuple[int, int, int, int] | None:
        """Find this rank's part: its begin in the parameter, group, place there, and length.

        None if it has no part of it.
        """
        if self._whole:
            mapping = parameter._hp_mapping
            if mapping is None:
                return None
            address = mapping.get_hp_fragment_address()
            start = mapping.lp_fragment_address.start
            return start, mapping.param_group_index, address.start, address.numel
        group, offset, padded = self._zero.grad_position[self._zero.get_param_id(parameter)]
        start = dist.get_rank() * padded
        length = min(padded, parameter.ds_numel - start)
        return (start, group, offset, length) if length > 0 else None

    def _own_gradients(self) -> list[Tensor]:
        return [g for group in self._zero.averaged_gradients.values() for g in group]

    def _named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        names = {id(p): name for name, p in self._trained.items()}
        parts = self._zero.params_in_partition if self._whole else self._zero.fp16_groups
        for group, gradients in self._zero.averaged_gradients.items():
            for parameter, gradient in zip(parts[group], gradients, strict=False):  # padding
                yield names[id(parameter)], gradient

    def complete(self, part: nn.Module | None = None) -> None:
        """Do nothing: ZeRO 2 keeps parameters whole, and ZeRO 3 only lets them be `gathered`."""

    def gathered(self, module: nn.Module) -> Any:
        """Context in which a part's parameters are complete on every rank."""
        import deepspeed

        parameters = list(module.parameters())
        return deepspeed.zero.GatheredParameters(parameters, enabled=not self._whole)

    def close(self) -> None:
        """Remove DeepSpeed's hooks, and empty what its closures hold, which autograd keeps."""
        super().close()
        if self._whole:
            return
        parameters: Iterable[Any] = self.module.parameters()
        for parameter in parameters:
            for tensor in (parameter, parameter.ds_tensor):
                tensor.data = tensor.new_empty(0)
        self._engine.optimizer = None
        vars(self._zero).clear()
        self._adam.state.clear()


def build_engine(
    module: nn.Module,
    settings: Training,
    groups: list[ParameterGroup],
    device: torch.device,
    computing: Computing = PLAIN,
) -> Engine:
    """The engine of a ZeRO stage; arguments as `Engine` has them."""
    kind = Replicated if computing.zero_stage < 2 else Partitioned
    return kind(module, settings, groups, device, computing)


class GuardedAdamW(torch.optim.AdamW):
    """AdamW that leaves everything as it is where `skip`, float32 [] on the device, is 1.

    A GPU decides that by itself: nothing waits.
    """

    skip: Tensor | None = None

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update, or not."""
        if self.defaults["fused"]:
            self.found_inf = self.skip
        elif self.skip is not None and self.skip:
            return
        super().step(closure)


def _cast_by_autocast(
    module: nn.Module, settings: Training, device: torch.device
) -> list[nn.Module]:
    return [*cast_parts(module)] if mixed_precision(device, settings.precision)._enabled else []


def cast_parts(module: nn.Module) -> Iterator[VisionEncoder | Decoder]:
    """Parts whose layers compute in bfloat16 under autocast."""
    return (part for part in module.modules() if isinstance(part, VisionEncoder | Decoder))


def readers(module: nn.Module, compiled: bool = False) -> Iterator[nn.Module]:
    """Yield what reads parameters only while it is called: layers, `compiled` blocks, heads."""
    if isinstance(module, QueueHead) or (compiled and isinstance(module, Block)):
        yield module
    elif isinstance(module, Block):
        yield from (part for part in module.modules() if part._parameters)
    elif isinstance(module, nn.Linear | nn.LayerNorm):
        yield module
    else:
        for child in module.children():
            yield from readers(child, compiled)


def _as_updated(groups: list[ParameterGroup], exchange: Exchange) -> list[ParameterGroup]:
    """Parameter groups of the pieces that this rank updates; groups of which it has none go."""
    found: dict[int, ParameterGroup] = {}
    for piece in exchange.pieces:
        piece.weights.grad = piece.gradients
        found.setdefault(piece.group, {**groups[piece.group], "params": []})
        found[piece.group]["params"].append(piece.weights)
    return list(found.values())


def _without_gradients(parameters: list[nn.Parameter]) -> Callable[[], None]:
    """DeepSpeed's `zero_grad`, which looks for parameters in every module each time."""

    def forget() -> None:
        for parameter in parameters:
            parameter.grad = None

    return forget


def is_to_be_compiled(
    module: nn.Module, settings: Training, device: torch.device, computing: Computing
) -> bool:
    """Return whether to compile the blocks: as asked, or by default (`Computing.compile`)."""
    if computing.compile is not None:
        return computing.compile
    widths = (cast(Any, block).attn.qkv.in_features for block in _blocks(module))
    wide: bool = max(widths, default=0) >= WIDE
    whole = computing.zero_stage < 2  # DeepSpeed's hooks on what a block has were not tried
    return device.type == "cuda" and wide and whole and not settings.labelled


def compile_blocks(module: nn.Module, device: torch.device) -> str:
    """Compile the transformer blocks on every rank, or on none; return why not."""
    if not (blocks := _blocks(module)):
        return "it has no blocks with their norms in front"
    private_caches()
    # All blocks of a process share these: sizes of views, learning and frozen ones, online
    # evaluations, and their last batches. Beyond PyTorch's 8, blocks would run uncompiled
    # without a warning.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    reason = ""
    try:
        torch.compile(torch.nn.functional.gelu)(torch.ones(8, device=device))
    except Exception as error:  # no C++ compiler, no Triton: the compiler has many kinds of errors
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
    if any_rank(bool(reason)):
        return reason or "another rank cannot"
    for block in blocks:
        # Encoder and decoder share the code of a block: each gets one for its own shapes. The
        # hooks of a block are not compiled: one waits for its weights.
        block.forward = torch.compile(block.forward, dynamic=False)  # type: ignore[method-assign]
    return ""


def _blocks(module: nn.Module) -> list[Block]:
    """Return what can be compiled: all blocks but data2vec's, with norms behind the sums."""
    return [part for part in module.modules() if isinstance(part, Block)]
