"""Exceptions, such as `UserError` (fix the input), and helpers for their messages."""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

_NO_MEMORY = re.compile(r"out[ _]of[ _]memory|_ALLOC(ATION)?_FAILED", re.IGNORECASE)

T = TypeVar("T")


class UserError(Exception):
    """Wrong input, named in one message: what is wrong, where, and the hint.

    The command line prints the text as a single line and exits with status 2, without a traceback.
    """


class MissingFileError(UserError):
    """A file that is read is not there."""


class OtherFormatError(ValueError):
    """A record that another version of maect wrote."""


class NodeError(UserError):
    """Error caused by a setting or, in a run that has worked elsewhere, by a node."""


class RankError(RuntimeError):
    """Another rank failed, and this one can only tell."""


class SupersededError(Exception):
    """Another job has taken over this one's folder: it ends and changes nothing."""


def out_of_memory_advice(said: str) -> str:
    """Return advice for memory that is too small, whatever computes on it."""
    return f"out of memory: {said}; end other programs on the GPU, or take one with more memory"


@contextmanager
def explain_out_of_memory(explain: Callable[[str], str] = out_of_memory_advice) -> Iterator[None]:
    """Turn every error of memory that is too small, pinned or a device's, into one line.

    Args:
        explain: makes the line of what PyTorch, cuBLAS, cuDNN, NCCL or CUDA itself said.

    Raises:
        NodeError: with that line; another attempt would end the same.
    """
    try:
        yield
    except RuntimeError as error:
        if (said := memory_fault(error)) is None:
            raise
        raise NodeError(explain(said)) from error


def memory_fault(error: RuntimeError) -> str | None:
    """Return an error's words about memory that is too small, in one line; None: it has none.

    Only PyTorch's own allocator raises `torch.OutOfMemoryError`, known by its name: jobs that need
    no PyTorch do not import it.
    """
    said = next((line for line in str(error).splitlines() if _NO_MEMORY.search(line)), None)
    if said is None and type(error).__name__ != "OutOfMemoryError":
        return None
    said = said or str(error)
    return ". ".join(said.split(". ")[1:3]) or said


def reason(error: Exception) -> str:
    """Return an error's text; of an OSError without number and path."""
    return getattr(error, "strerror", None) or str(error)


def counted(count: int, thing: str) -> str:
    """Return a count and its noun, whose plural ends in s: `1 run`, `20 runs`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def did_you_mean(name: str, known: Iterable[str], label: str = "known") -> str:
    """Return a hint about an unknown name: the nearest known one, else all of them."""
    known = list(dict.fromkeys(known))
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"{label}: {', '.join(known) or 'none'}"


def entry(name: str, known: Mapping[str, T], kind: str) -> T:
    """Return the entry of a name; UserError with a hint if there is none of this `kind`."""
    if name not in known:
        raise UserError(f"unknown {kind} {name!r}; {did_you_mean(name, known)}")
    return known[name]


def check_names(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse the first name that is not known, by a UserError with a hint."""
    known = list(known)
    for name in given:
        if name not in known:
            raise UserError(f"{where}: unknown {name!r}; {did_you_mean(name, known)}")
