"""Buffers that forward passes change, such as a queue, as they were after the last update."""

import torch
from torch import Tensor

from maect.train.objective import Objective


class Buffers:
    """An objective's buffers, with copies of those that the last two forward passes changed."""

    def __init__(self, objective: Objective) -> None:
        self._objective, self._changing = objective, objective.changing_buffers()
        # As the last two forward passes found them.
        self._before, self._earlier = ([b.clone() for b in self._changing] for _ in range(2))
        self._forwarded = False  # a forward pass has run since the last update

    def keep(self) -> None:
        """Copy them, before a forward pass."""
        self._before, self._earlier = self._earlier, self._before
        if self._changing:
            torch._foreach_copy_(self._before, self._changing)
        self._forwarded = True

    def settle(self) -> None:
        """Accept what the forward pass changed: its update has been made."""
        self._forwarded = False

    def saved(self) -> dict[str, Tensor]:
        """Return the buffers of a state, as they were after the last update."""
        buffers = self._objective.saved_buffers()
        if not self._forwarded:
            return buffers
        before = {id(b): old for b, old in zip(self._changing, self._before, strict=True)}
        return {name: before.get(id(buffer), buffer) for name, buffer in buffers.items()}

    def restore(self) -> None:
        """Undo the forward passes of an update that was not made, and of the next one."""
        old = self._earlier if self._forwarded else self._before
        for before, buffer in zip(old, self._changing, strict=True):
            buffer.copy_(before)
        self._forwarded = False
