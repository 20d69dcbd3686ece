"""Tensors of a batch in one piece of memory: one copy brings them all to a device."""

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

_ALIGNED = 64


class Packing:
    """Places of tensors of some shapes in one block of memory: begin, end, type and shape."""

    def __init__(self, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self.fields: dict[str, tuple[int, int, torch.dtype, tuple[int, ...]]] = {}
        self.size = 0
        for name, (dtype, shape) in shapes.items():
            end = self.size + prod(shape) * dtype.itemsize
            self.fields[name] = (self.size, end, dtype, shape)
            self.size = -(-end // _ALIGNED) * _ALIGNED


class Packed:
    """One piece of memory with that layout, and the tensors in it by name."""

    def __init__(self, layout: Packing, pinned: bool) -> None:
        """Reserve memory, of which a GPU can copy by itself if it is pinned."""
        self._layout = layout
        self._memory = torch.empty(layout.size, dtype=torch.uint8, pin_memory=pinned)
        self.tensors = self._views(self._memory)

    def on(self, device: torch.device) -> dict[str, Tensor]:
        """The tensors on a device, in one copy; on the CPU these, without one."""
        return self._views(self._memory.to(device, non_blocking=True))

    def _views(self, memory: Tensor) -> dict[str, Tensor]:
        return {
            name: memory[begin:end].view(dtype).view(shape)
            for name, (begin, end, dtype, shape) in self._layout.fields.items()
        }
