"""Read YAML strictly: refuse duplicate keys, YAML 1.1 surprises and endless aliases.

A key given twice is an error. `yes`, `no`, `on`, `off`, `010`, `1:30` and dates are texts.
"""

import re
import reprlib
from pathlib import Path
from typing import Any

import yaml

from maect.core.errors import UserError
from maect.core.files import open_file

MOST_BYTES = 8 << 20
MOST_VALUES = 1_000_000
"""In a file whose aliases are filled in."""
PLAIN = {
    "tag:yaml.org,2002:bool": (re.compile("true|True|TRUE|false|False|FALSE"), "tTfF"),
    "tag:yaml.org,2002:int": (re.compile("[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)"), "-+0123456789"),
    "tag:yaml.org,2002:float": (
        re.compile(
            r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+][0-9]+)?|\.[0-9][0-9_]*([eE][-+][0-9]+)?"
            r"|\.(inf|Inf|INF))|\.(nan|NaN|NAN)"
        ),
        "-+0123456789.",
    ),
}
"""Values without quotes that are no text: how they are written, and their first letters."""
OTHERS = {"tag:yaml.org,2002:null", "tag:yaml.org,2002:merge"}

DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Loader(_BASE):
    """Reads plain values as `PLAIN` says, and no key twice."""

    yaml_implicit_resolvers: Any = {  # noqa: RUF012
        letter: [(tag, pattern) for tag, pattern in known if tag in OTHERS]
        for letter, known in _BASE.yaml_implicit_resolvers.items()
    }

    def get_single_node(self) -> Any:
        """Return the document's root node.

        Raises:
            yaml.composer.ComposerError: a key occurs twice, an alias contains itself, there are
                too many values, or one would name a run otherwise than it is written.
        """
        node = super().get_single_node()
        if node is not None and self._count(node, {}, False) > MOST_VALUES:
            raise _fault(f"more than {MOST_VALUES:,} values with its aliases filled in", node)
        return node

    def _count(self, node: Any, known: dict[int, int], names: bool) -> int:
        """Count the values of a node, aliases each time."""
        if isinstance(node, yaml.ScalarNode):
            made = str(self.construct_object(node)) if names and not node.style else node.value
            if made != node.value:
                text = f"{node.value} in `each` would name a run {made!r}"
                raise _fault(f"{text}; put it in quotes, or write what the run is called", node)
            return 1
        if id(node) in known:
            if not known[id(node)]:
                raise _fault("an alias inside of what it names", node)
            return known[id(node)]
        known[id(node)] = 0
        count = 1
        keys = set()
        for item in node.value:
            if isinstance(node, yaml.MappingNode):
                key, item = item
                if isinstance(key, yaml.ScalarNode) and key.tag not in OTHERS:
                    if (key.tag, key.value) in keys:
                        raise _fault(f"the key {key.value!r} is there twice", key)
                    keys.add((key.tag, key.value))
                names_item = names or key.value == "each"
            else:
                names_item = names
            count += self._count(item, known, names_item)
        known[id(node)] = count
        return count


def _fault(text: str, node: Any) -> yaml.YAMLError:
    return yaml.composer.ComposerError(None, None, text, node.start_mark)


for _tag, (_pattern, _letters) in PLAIN.items():
    Loader.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern.pattern})$"), [*_letters])


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML; UserError if it is invalid, has a key twice, or is too deep or too large."""
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{where}: not valid YAML ({' '.join(str(error).split())})") from None
    except RecursionError:
        raise UserError(f"{where}: not valid YAML (nested too deeply)") from None


def read_yaml(path: Path) -> Any:
    """Read a YAML file: FileNotFoundError if there is none, UserError for all other faults."""
    return parse_yaml(read_yaml_text(path), str(path))


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """Read a YAML file of keys and values; UserError if it is missing or none."""
    try:
        values = read_yaml(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such {what} file") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a mapping of keys to values")
    return values


def read_yaml_text(path: Path) -> str:
    """Return the text of a YAML file; raises as `read_yaml`."""
    try:
        with open_file(path) as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise UserError(f"{path}: larger than {MOST_BYTES >> 20} MiB; is it the right file?")
        return data.decode()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file in UTF-8 ({error.reason})") from None


_short = reprlib.Repr()
_short.maxlevel = 4
_short.maxstring = 300
_short.maxother = 300
_short.maxlong = 60
_short.maxlist = _short.maxdict = _short.maxtuple = 12
shortened = _short.repr
"""`repr` of what may be large, as a message quotes it."""
