"""Exchange between ranks in an update: gradients while the backward pass runs, then weights.

Parameters lie in buckets, the last ones first, as their gradients come first. A complete bucket
leaves while the rest of the backward pass computes; buckets go in one order, whatever the order of
hooks, so that all ranks sum alike at every start. Under ZeRO 1 a rank gets the sums of its slice of
each bucket, updates that, and all slices are gathered; under ZeRO 0 every rank gets and updates
all. DeepSpeed's ZeRO 1 would wait for the whole device in each backward pass, and make two
exchanges for each group of parameters, of which fine-tuning has 52.

Autocast takes a kernel to cast each weight, and one for each gradient: a quarter of a block's time.
Here all weights of a bucket are cast at once, frozen ones once for all, and given to their layers
for a forward and backward pass; the bits are the same, but where views have two sizes: the patch
embedding's gradients of both are added in bfloat16, as those of every other layer.

Under ZeRO 1 these bfloat16 copies are gathered, half the bytes of the weights. Heads, which nobody
casts, have buckets of their own, in float32. All of it travels while the next forward pass
computes: the first buckets that it needs go first, and each part waits for its own. Every rank
updates all norms, tokens and the first layer, few weights: the forward pass begins without a wait.
`complete` gathers the weights themselves, for whoever reads them elsewhere.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from maect.recipes.memory import BUCKET
from maect.train.optimizer import ParameterGroup

ALIGNED = 32
"""Elements: every parameter begins at 128 bytes, where vectorised kernels can read it."""
SMALLEST = 5
"""What part of a full bucket is room for the parameters that are read first, whose gradients come
last: hardly anything is computed meanwhile."""
FIRST = 25
"""What part of a full bucket the weights of the first layers may be that every rank updates."""
CAST = (nn.Linear, nn.Conv2d)
"""Layers whose parameters autocast casts."""
Entry = tuple[str, nn.Parameter, int]
"""A trained parameter with its name, and its group's number or where it begins in a bucket."""


@dataclass
class Bucket:
    """Some parameters, one behind the other, those of a group together.

    Attributes:
        parameters: each with its name and where it begins.
        weights: of all of them, [n]; the parameters are views of it.
        scattered: a rank updates its own slice alone, and the others' are gathered.
        averaged: gradients over all ranks: of this rank's slice if it is scattered, or of all.
        runs: number of a parameter group and where its parameters begin and end; no gaps between.
        own: this rank's slice.
        borrowed: what layers compute with in place of parameters, by the parameters' numbers.
        cast: all weights in the type of those, [n]; none if nothing is borrowed.
        missing: parameters whose gradients are still to come.
        work: the exchange of gradients under way.
        coming: that of weights.
        whole: whether `weights` has all ranks' slices, once they have come.
    """

    parameters: list[Entry]
    weights: Tensor
    scattered: bool
    averaged: Tensor
    runs: list[tuple[int, int, int]]
    own: slice
    borrowed: dict[int, "Borrowed"]
    cast: Tensor | None
    missing: int = 0
    work: Any = None
    coming: Any = None
    whole: bool = True


@dataclass
class Borrowed:
    """A parameter in another type, a leaf with a gradient of its own.

    Attributes:
        layer: whose it is.
        name: there.
        weight: a view of the bucket's cast weights.
    """

    layer: nn.Module
    name: str
    weight: Tensor


@dataclass
class Piece:
    """Part of a bucket that an optimizer updates as one: of one group, on this rank.

    `weights` [end - start] are the same tensor for ever; gradients are there after the exchange.
    """

    group: int
    bucket: Bucket
    start: int
    end: int
    weights: Tensor
    gradients: Tensor


class Exchange:
    """Buckets of a module, in the order of their exchange, and pieces that this rank updates."""

    def __init__(
        self,
        module: nn.Module,
        groups: list[ParameterGroup],
        sharded: bool,
        models: Sequence[nn.Module] = (),
        readers: Sequence[nn.Module] = (),
        adds_up: bool = False,
    ) -> None:
        """Move trained parameters into buckets.

        Args:
            sharded: ZeRO 1 instead of 0.
            models: parts of the module whose parameters autocast would cast to bfloat16.
            readers: parts that read their parameters only while they are called, and wait till
                then.
            adds_up: gradients of several passes do, in float32: autocast casts trained weights.
        """
        cast = [m for model in models for m in model.modules() if isinstance(m, CAST)]
        self._frozen = list(_frozen(cast))
        cast, models = ([], ()) if adds_up else (cast, models)
        self._owners = {id(p): (m, name) for m in cast for name, p in m._parameters.items()}
        self._ranks = dist.get_world_size()
        self._scattered = sharded and self._ranks > 1
        self._next: int | None = None  # bucket to exchange; None: gradients only add up
        self._gathered = False  # the copies are up to date, or will be
        number = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        trained = [(n, p, number[id(p)]) for n, p in module.named_parameters() if id(p) in number]
        self.buckets = [self._bucket(*bundle) for bundle in bundles(trained, models)]
        self.pieces = [piece for bucket in self.buckets for piece in self._pieces(bucket)]
        self._of = {id(p): bucket for bucket in self.buckets for _, p, _ in bucket.parameters}
        self._hooks = [
            leaf.register_post_accumulate_grad_hook(self._hook(bucket))
            for bucket in self.buckets
            for leaf in self._leaves(bucket)
        ]
        waiting = {id(p) for reader in readers for p in reader.parameters()}
        self._first = self._buckets(p for _, p, _ in trained if id(p) not in waiting)
        for reader in readers:
            if buckets := self._buckets(reader.parameters()):
                self._hooks.append(reader.register_forward_pre_hook(self._waiting(buckets)))

    def _buckets(self, parameters: Iterable[Tensor]) -> list[Bucket]:
        """Those in which parameters lie, in the order in which their weights come."""
        found = {id(self._of[id(p)]) for p in parameters if id(p) in self._of}
        return [bucket for bucket in reversed(self.buckets) if id(bucket) in found]

    def _waiting(self, buckets: list[Bucket]) -> Any:
        return lambda *_: _wait(buckets)

    @torch.no_grad()
    def _bucket(self, entries: list[Entry], everywhere: bool) -> Bucket:
        """Move parameters, given with their groups, into a bucket; `everywhere`: not scattered."""
        entries = sorted(entries, key=lambda entry: entry[2])
        parameters: list[Entry] = []
        runs: list[list[int]] = []
        length = 0
        for name, parameter, group in entries:
            parameters.append((name, parameter, length))
            if not runs or runs[-1][0] != group:
                runs.append([group, length, length])
            length += -(-parameter.numel() // ALIGNED) * ALIGNED
            runs[-1][2] = length
        part = -(-length // (ALIGNED * self._ranks)) * ALIGNED
        runs[-1][2] = part * self._ranks
        weights = torch.zeros(part * self._ranks, device=entries[0][1].device)
        for _, parameter, start in parameters:
            where = slice(start, start + parameter.numel())
            weights[where] = parameter.reshape(-1)
            parameter.data = weights[where].view(parameter.shape)
        scattered = self._scattered and not everywhere
        averaged = weights.new_zeros(part if scattered else len(weights))
        own = slice(dist.get_rank() * part, (dist.get_rank() + 1) * part)
        groups = [(group, start, end) for group, start, end in runs]
        cast = None
        if any(id(parameter) in self._owners for _, parameter, _ in parameters):
            cast = weights.bfloat16()
        borrowed = {}
        for number, (_, parameter, start) in enumerate(parameters):
            if cast is not None and id(parameter) in self._owners:
                view = cast[start : start + parameter.numel()].view(parameter.shape).detach()
                borrowed[number] = Borrowed(*self._owners[id(parameter)], view.requires_grad_())
        return Bucket(parameters, weights, scattered, averaged, groups, own, borrowed, cast)

    def _leaves(self, bucket: Bucket) -> Iterator[Tensor]:
        """Yield what gets the gradients of the parameters of a bucket."""
        for number, (_, parameter, _) in enumerate(bucket.parameters):
            borrowed = bucket.borrowed.get(number)
            yield parameter if borrowed is None else borrowed.weight

    def lend(self) -> None:
        """Let layers compute with copies of their weights, which come when they are needed."""
        _wait(self._first)
        for bucket in self.buckets:
            if bucket.cast is not None and not (bucket.scattered and self._gathered):
                bucket.cast.copy_(bucket.weights)
        for borrowed in self._borrowed():
            # Found before the parameter, which stays what it is for everyone else.
            borrowed.layer.__dict__[borrowed.name] = borrowed.weight

    def take_back(self) -> None:
        """Let the layers have their parameters again."""
        for borrowed in self._borrowed():
            del borrowed.layer.__dict__[borrowed.name]

    def _borrowed(self) -> Iterator[Borrowed]:
        yield from self._frozen
        for bucket in self.buckets:
            yield from bucket.borrowed.values()

    def _pieces(self, bucket: Bucket) -> Iterator[Piece]:
        """Yield what this rank updates of a bucket."""
        begin = bucket.own.start if bucket.scattered else 0
        end = bucket.own.stop if bucket.scattered else len(bucket.weights)
        for group, low, high in bucket.runs:
            low, high = max(low, begin), min(high, end)
            if low < high:
                gradients = bucket.averaged[low - begin : high - begin]
                weights = bucket.weights[low:high]
                yield Piece(group, bucket, low, high, weights, gradients)

    def own_gradients(self) -> list[Tensor]:
        """Averaged gradients of this rank's slices; those of all ranks are all there are."""
        found = []
        for piece in self.pieces:
            low = max(piece.start, piece.bucket.own.start) - piece.start
            high = min(piece.end, piece.bucket.own.stop) - piece.start
            if low < high:
                found.append(piece.gradients[low:high])
        return found

    def own_parts(self) -> Iterator[tuple[str, Tensor]]:
        """The same by parameter: its name, and what of its gradient lies in this rank's slices."""
        for bucket in self.buckets:
            own = bucket.own
            first = own.start if bucket.scattered else 0
            for name, parameter, start in bucket.parameters:
                low, high = max(start, own.start), min(start + parameter.numel(), own.stop)
                if low < high:
                    yield name, bucket.averaged[low - first : high - first]

    def begin(self) -> None:
        """Expect the last backward pass before an update: what is complete leaves at once."""
        _wait(self.buckets)  # also for weights that no layer asked for: the update writes them
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)
        self._next = 0

    def finish(self) -> None:
        """Send what has not left yet; on return the device has all sums, or waits for them."""
        for bucket in self.buckets[self._next :]:
            self._send(bucket)
        self._next = None
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
        if self._ranks > 1:
            torch._foreach_div_([bucket.averaged for bucket in self.buckets], self._ranks)

    @torch.no_grad()
    def gather(self) -> None:
        """Start to get what layers need of the other ranks' slices, what they read first first."""
        if not self._scattered:
            return
        scattered = [bucket for bucket in self.buckets if bucket.scattered]
        copies = [(bucket.cast, bucket) for bucket in scattered if bucket.cast is not None]
        if copies:
            torch._foreach_copy_(
                [cast[bucket.own] for cast, bucket in copies],
                [bucket.weights[bucket.own] for _, bucket in copies],
            )
        self._gathered = True
        for bucket in reversed(scattered):
            bucket.whole = bucket.cast is None
            whole = bucket.weights if bucket.cast is None else bucket.cast
            bucket.coming = dist.all_gather_into_tensor(whole, whole[bucket.own], async_op=True)

    def complete(self, module: nn.Module | None = None) -> None:
        """Let every rank have all weights of a part, or of all, in float32; on all ranks at once.

        Between two updates, for whoever reads parameters outside a forward pass.
        """
        buckets = self.buckets if module is None else self._buckets(module.parameters())
        _wait(buckets)
        for bucket in buckets:
            if not bucket.whole:
                own = bucket.weights[bucket.own]
                bucket.coming = dist.all_gather_into_tensor(bucket.weights, own, async_op=True)
                bucket.whole = True
        _wait(buckets)

    def copies(self) -> Iterator[Tensor]:
        """Yield what layers computed with last, the same on every rank."""
        yield from (borrowed.weight for borrowed in self._frozen)
        yield from (bucket.cast for bucket in self.buckets if bucket.cast is not None)

    def close(self) -> None:
        """Remove the hooks, which would keep all this alive, and what a failed pass borrowed."""
        for hook in self._hooks:
            hook.remove()
        for borrowed in self._borrowed():
            borrowed.layer.__dict__.pop(borrowed.name, None)

    def _hook(self, bucket: Bucket) -> Any:
        def count(_: Tensor) -> None:
            bucket.missing -= 1
            while (
                self._next is not None
                and self._next < len(self.buckets)
                and not self.buckets[self._next].missing
            ):
                self._send(self.buckets[self._next])
                self._next += 1

        return count

    @torch.no_grad()
    def _send(self, bucket: Bucket) -> None:
        """Join gradients, and start their exchange."""
        # Let go of once it is exchanged, by NCCL once that is waited for: of other ranks' slices no
        # gradients are kept.
        gradients = torch.empty_like(bucket.weights) if bucket.scattered else bucket.averaged
        starts = [start for *_, start in bucket.parameters[1:]]
        empty: list[Tensor] = []
        # Tensors of one type and where they go: a kernel each.
        found: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        parts = gradients.tensor_split(starts)
        for part, leaf in zip(parts, self._leaves(bucket), strict=True):
            used = leaf.numel() if leaf.grad is not None else 0
            if used < len(part):
                empty.append(part[used:])
            if leaf.grad is not None:
                given, places = found.setdefault(leaf.grad.dtype, ([], []))
                given.append(leaf.grad.reshape(-1))
                places.append(part[:used])
                leaf.grad = None
        if empty:
            torch._foreach_zero_(empty)
        for given, places in found.values():
            torch._foreach_copy_(places, given)
        if bucket.scattered:
            bucket.work = dist.reduce_scatter_tensor(bucket.averaged, gradients, async_op=True)
        elif self._ranks > 1:
            bucket.work = dist.all_reduce(bucket.averaged, async_op=True)


@torch.no_grad()
def _frozen(layers: Iterable[nn.Module]) -> Iterator[Borrowed]:
    """Copies of what layers never learn: autocast would make them anew in every pass."""
    for layer in layers:
        for name, value in layer._parameters.items():
            if value is not None and not value.requires_grad:
                yield Borrowed(layer, name, value.bfloat16())


def bundles(
    trained: list[Entry], models: Iterable[nn.Module] = ()
) -> list[tuple[list[Entry], bool]]:
    """Parameters of each bucket, the last ones first, and whether every rank updates all of it.

    `trained` are in the order of the forward pass. A bucket is complete with its first parameter;
    those that are so sooner come first. What is left to compute hides its exchange: it has at most
    two thirds of the weights in front of it. What autocast casts in `models` and what it does not
    have buckets of their own. One more, of which every rank updates all, has the first layers that
    are cast, and whatever the models have beside those.
    """
    inside = {id(p) for model in models for p in model.parameters()}
    layers = [m for model in models for m in model.modules() if isinstance(m, CAST)]
    cast = {id(p) for layer in layers for p in layer.parameters(recurse=False)}
    everywhere: list[Entry] = []
    found: list[tuple[int, list[Entry], bool]] = []
    open_ones: dict[bool, tuple[list[Entry], int]] = {}
    front, first = 0, BUCKET // FIRST
    for entry in trained:
        key, length = id(entry[1]), entry[1].numel()
        if key in cast:
            first -= length
        if key in inside and (key not in cast or first >= 0):
            bundle, room = everywhere, length
            if not bundle:
                found.append((front, bundle, True))
        else:
            bundle, room = open_ones.get(key in cast, ([], 0))
            if not bundle or length > room:
                bundle, room = [], min(BUCKET, max(BUCKET // SMALLEST, front * 2 // 3))
                found.append((front, bundle, False))
            open_ones[key in cast] = bundle, room - length
        bundle.append(entry)
        front += length
    found.sort(key=lambda each: each[0], reverse=True)
    return [(bundle, alike) for _, bundle, alike in found]


def _wait(buckets: Iterable[Bucket]) -> None:
    """Let the device wait for the weights of buckets; a CPU waits itself."""
    for bucket in buckets:
        if bucket.coming is not None:
            bucket.coming.wait()
            bucket.coming = None
