"""Read YAML strictly: refuse duplicate keys and the surprises of YAML 1.1.

A key given twice is an error. `yes`, `no`, `on`, `off`, `010`, `1:30` and dates are texts.
"""

import re
import reprlib
from pathlib import Path
from typing import Any

import yaml

from maect.core.errors import UserError
from maect.core.files import read_text

PLAIN_VALUES = {
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
    """Reads plain values by `PLAIN_VALUES`, and refuses a key given twice."""

    yaml_implicit_resolvers: Any = {  # noqa: RUF012
        letter: [(tag, pattern) for tag, pattern in known if tag in OTHERS]
        for letter, known in _BASE.yaml_implicit_resolvers.items()
    }

    def get_single_node(self) -> Any:
        """Return the document's root node; ComposerError if a key occurs twice."""
        node = super().get_single_node()
        _check_keys(node, set())
        return node


def _check_keys(node: Any, seen: set[int]) -> None:
    """Refuse a key that a mapping below a node has twice; `seen`: aliases are looked at once."""
    if node is None or isinstance(node, yaml.ScalarNode) or id(node) in seen:
        return
    seen.add(id(node))
    keys = set()
    for item in node.value:
        if not isinstance(node, yaml.MappingNode):
            _check_keys(item, seen)
            continue
        key, value = item
        if isinstance(key, yaml.ScalarNode) and key.tag not in OTHERS:
            if (key.tag, key.value) in keys:
                text = f"the key {key.value!r} is there twice"
                raise yaml.composer.ComposerError(None, None, text, key.start_mark)
            keys.add((key.tag, key.value))
        _check_keys(value, seen)


for _tag, (_pattern, _letters) in PLAIN_VALUES.items():
    Loader.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern.pattern})$"), [*_letters])


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML; UserError if it is invalid, has a key twice, or is nested too deeply."""
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
        return read_text(path)
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
