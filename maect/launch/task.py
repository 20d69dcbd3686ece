"""A task to run, and the error of a job that cannot run."""

from dataclasses import dataclass, field
from typing import Any

from maect.core.errors import UserError


class LaunchError(UserError):
    """A job that cannot be started or that ended for good without its result."""


@dataclass(frozen=True)
class Task:
    """Function that every rank calls, by name, so that a start imports nothing heavy.

    Attributes:
        function: `package.module:function`; called as `function(context=..., **arguments)`.
        arguments: keyword arguments; they travel as JSON.
        identity: of the result that they ask for: a live job of another one is not waited for.
    """

    function: str
    arguments: dict[str, Any] = field(default_factory=dict)
    identity: str = ""
