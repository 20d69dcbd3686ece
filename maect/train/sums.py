"""Sums over the ranks of what a step gives, read while the device computes the next one."""

import torch
from torch import Tensor


class Sums:
    """Sums over the ranks that the host reads when it has the time.

    Attributes:
        names: of the values.
        values: of this rank, scalars on the device.
    """

    def __init__(self, names: list[str], values: list[Tensor]) -> None:
        self.names, self.values = names, values

    def read(self, total: Tensor) -> None:
        """Start copying the sums to the host, into pinned memory."""
        self._copied = None
        if total.is_cuda:
            self._host = torch.empty_like(total, device="cpu", pin_memory=True)
            self._host.copy_(total, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._host = total

    def numbers(self) -> list[float]:
        """The sums; waits until the device has come to their copy."""
        if self._copied is not None:
            self._copied.synchronize()
        return [float(value) for value in self._host.tolist()]
