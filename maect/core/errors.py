"""Exceptions, such as `UserError` (fix the input), and helpers for their messages."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

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
