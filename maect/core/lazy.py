"""NumPy, PyTorch and others, imported at their first use, for modules that declare.

Rules, plan and checks read such a module's declarations, and need not wait for what computes.
`NDArray` and `Tensor` are for annotations, which such a module does not evaluate.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["F", "Image", "NDArray", "Tensor", "distributed", "np", "pa", "safetensors", "torch"]

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    import safetensors
    import torch
    from numpy.typing import NDArray
    from PIL import Image
    from torch import Tensor
    from torch.nn import functional as F

    from maect.core import distributed
else:
    NDArray = Tensor = Any

    class _Lazy(ModuleType):
        """A module that is imported when something of it is asked for."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):  # whoever looks through all modules asks for nothing
                raise AttributeError(name)
            return getattr(import_module(self.__name__), name)

    np, torch, F = _Lazy("numpy"), _Lazy("torch"), _Lazy("torch.nn.functional")
    pa, Image, safetensors = _Lazy("pyarrow"), _Lazy("PIL.Image"), _Lazy("safetensors")
    distributed = _Lazy("maect.core.distributed")
