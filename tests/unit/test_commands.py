"""A command is a function: what its parser reads and explains follows from its declaration."""

import argparse
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from maect import cli
from maect.core.commands import Parser, Positive, Word, command


@dataclass
class Place:
    """Where to put it. Not what.

    Attributes:
        room: in which room,
            and where there.
    """

    room: Annotated[Path, Word("ROOM")]
    _: KW_ONLY
    on_top: bool = False


@command(example="put-away kitchen a b --count 2")
def put_away(
    place: Place,
    things: Sequence[str] = (),
    *words: str,
    count: Positive = 1,
    how: Literal["fast", "slow"] | None = None,
    size: float,
    labels: Sequence[int] = (),
) -> int:
    """Put things away.

    Args:
        things: any number.
        size: in metres.

    Returns:
        How many.
    """
    print(place, things, words, count, how, size, labels)
    return 3


def test_words_options_and_groups_are_those_of_the_signature(capsys) -> None:
    given = "kitchen a b --size 2.5 --on-top --labels 1 2 --how slow --labels 3 --unknown"
    options, rest = Parser(prog="maect", of=put_away).parse_known_args(given.split(" "))
    assert put_away.name == "put-away" and put_away.passes_words_on
    assert put_away.run(options, rest) == 3
    place = Place(Path("kitchen"), on_top=True)
    said = f"{place} ['a', 'b'] ('--unknown',) 1 slow 2.5 [1, 2, 3]\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("kitchen", "the following arguments are required: --size"),
        ("kitchen --size 1 --count 0", "'0' is not a whole number above 0"),
        ("kitchen --size 1 --how soon", "invalid choice: 'soon'"),
        ("kitchen --size wide", "invalid float value: 'wide'"),
        ("--size 1", "the following arguments are required: ROOM"),
    ],
)
def test_what_does_not_fit_is_refused(words: str, said: str, capsys) -> None:
    with pytest.raises(SystemExit):
        Parser(prog="maect", of=put_away).parse_args(words.split())
    assert said in capsys.readouterr().err


def test_the_help_is_the_docstring() -> None:
    said = Parser(prog="maect", of=put_away).format_help()
    assert "\nPut things away.\n" in said and "How many" not in said
    assert "\nwhere to put it:\n  ROOM " in said
    assert "in which room, and where there\n" in said
    assert said.endswith("\nexample:\n  maect put-away kitchen a b --count 2\n")


def test_every_word_of_a_docstring_is_a_parameter() -> None:
    """A name that no parameter has would be in no help."""
    from maect.core.commands import documented

    for made in cli.COMMANDS.values():
        parser = argparse.ArgumentParser()
        made.fill(parser)
        known = {action.dest for action in parser._actions}
        assert {*documented(made.call)[1]} <= known, made.name
