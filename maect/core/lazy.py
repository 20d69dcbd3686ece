"""NumPy, PyTorch and others, imported at their first use, for modules that declare.

Rules, plan and checks read such a module's declarations, and need not wait for what computes.
`NDArray` and `Tensor` are for annotations, which such a module does not evaluate. What threads use
is best imported before they start.
"""

import sys
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
            # Whoever looks through all modules asks for names like __file__, and for no import.
            if name.startswith("__") and self.__name__ not in sys.modules:
                raise AttributeError(f"{self.__name__} is not imported yet, and has no {name}")
            module = self.__dict__.get("_module")
            if module is None:
                module = self.__dict__["_module"] = import_module(self.__name__)
            return getattr(module, name)

    np, torch, F = _Lazy("numpy"), _Lazy("torch"), _Lazy("torch.nn.functional")
    pa, Image, safetensors = _Lazy("pyarrow"), _Lazy("PIL.Image"), _Lazy("safetensors")
    distributed = _Lazy("maect.core.distributed")
