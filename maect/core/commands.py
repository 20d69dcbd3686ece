"""Commands from typed functions: a parser reads what the signature says, in the docstring's words.

    @command(example="sort groups/clusters.csv photos sorted --link")
    def sort(table: Path, images: Path, out: Path, *, link: bool = False) -> None:
        '''Copy or link images into a folder for each group or class.

        Args:
            table: clusters.csv, or a .csv of maect predict.
        '''

Parameters before `*` are words of the command line, those behind it options. `bool` is a flag,
`Literal` a choice and a sequence several words. A dataclass is a group of them, and `*words` gets
what no option reads.
"""

import argparse
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Hashable, Sequence
from difflib import get_close_matches
from functools import cache
from pkgutil import resolve_name
from typing import Annotated, Any, Literal, NamedTuple, cast

KNOWN = {
    "experiments": "maect.experiment:names",
    "recipes": "maect.recipes:recipe_names",
    "sizes": "maect.recipes:sizes",
    "evaluations": "maect.evaluate:evaluation_names",
    "tables": "maect.report.registry:TABLE_NAMES",
    "figures": "maect.report.registry:FIGURES",
    "layouts": "maect.models.layouts:LAYOUTS",
    "data and weights": "maect.data.retrieve:CATALOGUE",
    "public encoders": "maect.answers.public:PUBLIC",
}
"""Where the names of each kind are, which are looked up when a help lists them."""


class Word(NamedTuple):
    """Says of a word on the command line what its type does not: `Annotated[str, Word("NAME")]`.

    Attributes:
        metavar: stands for it in the help.
        read: makes its value, in place of the type.
        help: in place of the docstring's words; or a function that gives it.
    """

    metavar: str | None = None
    read: Callable[[str], Any] | None = None
    help: str | Callable[[], str] | None = None


def positive(text: str) -> int:
    """Read a number of things."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


Positive = Annotated[int, Word(read=positive)]
Log = Annotated[str | None, Word(help="also write messages to this file")]
"""The option `log`, which is obeyed before a command is called."""


class Command(NamedTuple):
    """A function as a command, with the kinds of names that its help lists and an example."""

    call: Callable[..., int | None]
    name: str
    names: Sequence[str] = ()
    example: str = ""

    def run(self, options: argparse.Namespace, rest: Sequence[str]) -> int:
        """Call the function with what was parsed, and with the words that no option reads."""
        words: list[Any] = []
        named: dict[str, Any] = {}
        for name, kind, parameter in self._parameters():
            if parameter.kind is parameter.VAR_POSITIONAL:
                words += rest
            elif parameter.kind is parameter.KEYWORD_ONLY:
                named[name] = getattr(options, name)
            elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
                names = [field.name for field in dataclasses.fields(kind)]
                words.append(kind(**{name: getattr(options, name) for name in names}))
            else:
                words.append(getattr(options, name))
        return self.call(*words, **named) or 0

    @property
    def passes_words_on(self) -> bool:
        """Return whether words that no option reads are the function's."""
        return any(p.kind is p.VAR_POSITIONAL for *_, p in self._parameters())

    @property
    def about(self) -> str:
        """Its description."""
        return documented(self.call)[0]

    def fill(self, parser: argparse.ArgumentParser) -> None:
        """Add all that it says to its parser."""
        parser.description, said = documented(self.call)
        for name, kind, parameter in self._parameters():
            if dataclasses.is_dataclass(kind):
                title, theirs = documented(cast(Hashable, kind))
                title = title.partition(". ")[0].rstrip(".")
                group = parser.add_argument_group(title[:1].lower() + title[1:])
                hints = typing.get_type_hints(kind, include_extras=True)
                for field in dataclasses.fields(kind):
                    given = field.name, hints[field.name], field.default, bool(field.kw_only)
                    _add(group, *given, theirs.get(field.name))
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                option = parameter.kind is parameter.KEYWORD_ONLY
                _add(parser, name, kind, parameter.default, option, said.get(name))

    def _parameters(self) -> list[tuple[str, Any, inspect.Parameter]]:
        hints = typing.get_type_hints(self.call, include_extras=True)
        parameters = inspect.signature(self.call).parameters
        return [(name, hints[name], parameter) for name, parameter in parameters.items()]


def command(
    *, name: str = "", names: Sequence[str] = (), example: str = ""
) -> Callable[[Callable[..., int | None]], Command]:
    """Declare that a function is a command, called as the function if no other name is given."""
    return lambda call: Command(call, name or call.__name__.replace("_", "-"), names, example)


@cache
def documented(thing: Hashable) -> tuple[str, dict[str, str]]:
    """Read a docstring: its first part in one line, and what it says of parameters or fields."""
    text = inspect.getdoc(thing) or ""
    about, *sections = re.split(r"^(Args|Attributes|Returns|Raises):\n", text, flags=re.M)
    said: dict[str, str] = {}
    for title, section in zip(sections[::2], sections[1::2], strict=True):
        if title in ("Args", "Attributes"):
            items = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", section, flags=re.M)
            said |= {name: " ".join(words.split()).removesuffix(".") for name, words in items}
    return " ".join(about.split()), said


def _add(
    parser: argparse._ActionsContainer,
    name: str,
    hint: Any,
    default: Any,
    option: bool,
    help: str | None,
) -> None:
    """Add a word or an option as its type says."""
    kind, word = _unwrapped(hint)
    needed = default in (inspect.Parameter.empty, dataclasses.MISSING)
    given: dict[str, Any] = {"help": word.help() if callable(word.help) else help or word.help}
    if option:
        given["dest"], called = name, "--" + name.replace("_", "-")
        given["required"] = needed
    else:
        called = name
    if not needed:
        given["default"] = default
    if kind is bool:
        parser.add_argument(called, **given | {"action": "store_true"})
        return
    if typing.get_origin(kind) is Sequence:
        (kind,) = typing.get_args(kind)
        given["nargs"] = "+" if option or needed else "*"
        if option:  # a second one adds to the first
            given |= {"action": "extend"} if needed else {"action": "extend", "default": [*default]}
    elif not option and not needed:
        given["nargs"] = "?"
    if typing.get_origin(kind) is Literal:
        given["choices"], kind = typing.get_args(kind), str
    parser.add_argument(called, metavar=word.metavar, type=word.read or kind, **given)


def _unwrapped(hint: Any) -> tuple[Any, Word]:
    """A type without `Annotated` and `| None`, and what was annotated."""
    word = Word()
    while True:
        inner = typing.get_args(hint)
        if typing.get_origin(hint) is Annotated:
            hint, word = inner[0], next((m for m in inner[1:] if isinstance(m, Word)), word)
        elif typing.get_origin(hint) in (types.UnionType, typing.Union):
            (hint,) = (kind for kind in inner if kind is not types.NoneType)
        else:
            return hint, word


class Parser(argparse.ArgumentParser):
    """Parser of all commands, or of one, whose words are added when they are asked for.

    An option is written out: `--re` may be another one tomorrow than `--remove` today.
    """

    def __init__(
        self, *, of: Command | None = None, listed: Callable[[], str] = str, **options: Any
    ) -> None:
        super().__init__(**options | {"allow_abbrev": False})
        self._of, self._listed, self._filled = of, listed, of is None

    def fill(self) -> None:
        """Add the words of the command."""
        if not self._filled and self._of is not None:
            self._filled = True
            self._of.fill(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, as argparse does."""
        self.fill()
        return super().parse_known_args(args, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse an unknown command with the nearest ones, and not with all."""
        if action.dest == "command" and action.choices is not None and value not in action.choices:
            near = get_close_matches(value, list(action.choices), n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "maect --help lists all"
            raise argparse.ArgumentError(None, f"unknown command {value!r}; {hint}")
        super()._check_value(action, value)

    def format_help(self) -> str:
        """Return the help, as printed: for all commands their list, for one names and example."""
        self.fill()
        self.epilog = self._listed() or None
        if self._of is None:
            return super().format_help()
        lists = []
        for kind in self._of.names:
            known = resolve_name(KNOWN[kind])
            lists.append(f"{kind}: {', '.join(known() if callable(known) else known)}")
        self.epilog = ". ".join(lists) or None
        example = f"\nexample:\n  maect {self._of.example}\n" if self._of.example else ""
        return super().format_help() + example
