"""Reads other people's checkpoints without running anything that is in them."""

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from maect.core.errors import UserError
from maect.models.weights import load_tensors


class _LeftOut:
    """Stands for what is no tensor and is not needed; takes anything and keeps nothing."""

    def __new__(cls, *_: Any) -> "_LeftOut":
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


# What public training checkpoints hold beside tensors: the options of the training (MAE, iBOT) and
# numpy's scalars. None of these is built: `_LeftOut` takes their place.
_LEFT_OUT = (
    "argparse.Namespace",
    "numpy.dtype",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
)


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a PyTorch checkpoint (`.pth`, `.pth.tar`, `.th`, `.pt`) or a `.safetensors` file.

    Tensors, containers and plain values are read, on the CPU and, where the format allows it,
    page by page from the file as they are used. The pickle in a PyTorch checkpoint is not run: it
    may only ask for tensors and for what is listed above.

    Returns:
        What the file holds, as it holds it.

    Raises:
        UserError: missing, damaged, or a pickle that asks for anything else.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file of weights")
    if path.suffix == ".safetensors":
        return dict(load_tensors(path)[0])
    stands_for = [(_LeftOut, name) for name in _LEFT_OUT]
    try:
        with torch.serialization.safe_globals(stands_for):  # type: ignore[arg-type]
            found = torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL:? (\S+)", str(error)) or re.search(r"got (.+)", str(error))
        if wanted is None:
            raise UserError(f"{path}: not a checkpoint that can be read ({_line(error)})") from None
        raise UserError(
            f"{path}: refused, since reading it would run {wanted[1]}; a checkpoint may hold "
            "tensors and plain values only"
        ) from None
    except Exception as error:  # a damaged file fails anywhere in the reader
        raise UserError(f"{path}: damaged or no checkpoint ({_line(error)})") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: holds a {type(found).__name__}, not named weights")
    return found


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
