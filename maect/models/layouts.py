"""Layouts of public checkpoints; no torch, because an experiment is checked with it."""

from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from maect.core.yaml_files import read_yaml

_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_STRICT)
class Location:
    """Place in a checkpoint that may hold an encoder.

    Attributes:
        entry: of the checkpoint, with the state dict; "": the checkpoint itself.
        prefix: of the encoder's names in it.
        dropped: patterns of full names that are not the encoder's; any other name is an error.
        renamed: beginnings of names behind the prefix, and our beginnings in place of them.
    """

    entry: str
    prefix: str = ""
    dropped: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    def to_our_name(self, name: str) -> str:
        """Return our name for a full name of the checkpoint."""
        name = name.removeprefix(self.prefix)
        old, new = next((pair for pair in self.renamed if name.startswith(pair[0])), ("", ""))
        return new + name.removeprefix(old)

    def to_layout_name(self, name: str) -> str:
        """Return the checkpoint's full name for one of our names."""
        old, new = next((pair for pair in self.renamed if name.startswith(pair[1])), ("", ""))
        return self.prefix + old + name.removeprefix(new)


@dataclass(frozen=True, config=_STRICT)
class Layout:
    """One way in which weights are published.

    Attributes:
        locations: where the encoder may be.
        pooling: of evaluations: for all sizes, or the size's pooling of MAE or of contrastive
            tuning.
        class_token: whether it has a [CLS] token.
        mae_positions: whether its position embedding is MAE's sine-cosine table, which
            distinguishes layouts with the same names; None: not compared.
        norm: of its blocks, before attention and MLP or behind their sums.
        mark: a name that must be there, which distinguishes layouts that are alike otherwise.
        class_tokens: number of [CLS] tokens; all but the first become registers.
        registers: number of other tokens before the patches, where the layout has some.
        module: name of a model of ours that is no plain ViT.
        final_norm: whether there is a norm behind the blocks; if not, one without weights replaces
            it.
    """

    locations: tuple[Location, ...]
    pooling: Literal["cls", "mean", "mean_cls", "mae_pooling", "ct_pooling"] = "cls"
    class_token: bool = True
    mae_positions: bool | None = None
    norm: Literal["pre", "post"] = "pre"
    mark: str | None = None
    class_tokens: int = 1
    registers: int = 0
    module: Literal["capi"] | None = None
    final_norm: bool = True

    @property
    def shape(self) -> dict[str, Any]:
        """Settings of the encoder's shape that the layout fixes."""
        shape = {"class_token": self.class_token, "norm": self.norm}
        registers = self.registers + self.class_tokens - 1
        more = {"registers": registers, "module": self.module}
        return shape | {key: value for key, value in more.items() if value}


class LeftOut(NamedTuple):
    """Names in a pickle that are neither imported nor built, but replaced by empty objects."""

    names: tuple[str, ...]
    packages: tuple[str, ...]
    of_omegaconf: tuple[str, ...]


class _Known(NamedTuple):
    layouts: dict[str, Layout]
    refined_from: dict[str, str]
    left_out: LeftOut


_KNOWN = TypeAdapter(_Known).validate_python(read_yaml(Path(__file__).with_suffix(".yaml")))
LAYOUTS, REFINED_FROM, LEFT_OUT = _KNOWN
