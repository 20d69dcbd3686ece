"""The experiment file as it is written: its keys, and helpers to read its values."""

import os
import re
from collections.abc import Callable, Collection, Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from maect.core.errors import UserError, did_you_mean
from maect.core.settings import Settings
from maect.core.yaml_files import parse_yaml
from maect.data.sources import BUNDLED, SOURCES
from maect.data.sources.base import CLASS_LISTS, Source
from maect.data.sources.image_files import Folder
from maect.evaluate import evaluation_names
from maect.recipes import OnlineEvaluation, Pixels, recipe_names, sizes
from maect.report.configs import Groups
from maect.report.registry import FIGURES, TABLE_NAMES

NAME = re.compile(r"\w[\w.-]*")


def _known(what: str, kinds: Collection[str]) -> AfterValidator:
    """Refuse another kind than these (ValueError)."""

    def check(kind: str) -> str:
        if kind not in kinds:
            raise ValueError(f"unknown kind of {what}; {did_you_mean(kind, kinds)}")
        return kind

    return AfterValidator(check)


class Split(Settings):
    """One split of a dataset: where its images are and into how many tars they go."""

    images: str | None = None
    """The source; `~` and environment variables are filled in where they are set."""
    kind: Annotated[str, _known("source", SOURCES)] = Folder.kind
    """Kind of the source, one of `maect.data.sources` (`docs/data.md`)."""
    of: str | None = None
    """Split of this data set whose shards a view shows a part of."""
    classes: str | None = None
    """Classes of a view: `dogs15`, or a file of class names, one a line."""
    labels: str | None = None
    """Labels of the source, for the kinds that need them."""
    only: str | None = None
    """File of the names of the images to take, one a line; others are counted, and left out."""
    exclude: str | None = None
    """File of image names to leave out, one a line."""
    skip_unreadable: bool = False
    """Leave out what cannot be read, and listed names that are gone; the index lists them."""
    shards: int = Field(default=1, gt=0)
    """Number of tars; a few hundred MB each is a good size."""

    @property
    def source(self) -> type[Source]:
        """The kind's declaration."""
        return SOURCES[self.kind]

    def files(self) -> list[str]:
        """Files that say something about the images."""
        lists = None if self.classes in CLASS_LISTS else self.classes
        return [fill_path(name) for name in (self.labels, self.only, self.exclude, lists) if name]

    @model_validator(mode="after")
    def _kind(self) -> "Split":
        given = self.model_dump(exclude={"kind"}, exclude_unset=True, exclude_none=True)
        for name in sorted(given.keys() - {*self.source.takes}):
            raise ValueError(f"kind {self.kind} takes no `{name}`")
        for name in self.source.needs:
            if name not in given:
                raise ValueError(f"kind {self.kind} needs `{name}`")
        return self


class Dataset(Settings):
    """Images by split; those that come with a library are written out first."""

    kind: Annotated[str, _known("dataset", ("images", *BUNDLED))] = "images"
    """`images`, or which of `maect.data.sources.BUNDLED`."""
    splits: dict[str, Split]
    """Splits by name, usually `train` and `val`."""
    resize: int | None = Field(default=None, gt=0)
    """Shorter side before the centre crop of evaluations; none: 256/224 of the image size."""
    pixels: Pixels = Pixels()
    """Conversion of images, which encoders trained on them share."""
    groups: Groups | None = None
    """Groups of the classes, which figure 1 is coloured by: a mapping, or `imagenet`."""

    @property
    def bundled(self) -> bool:
        """Return whether its images are written out first."""
        return self.kind in BUNDLED

    @model_validator(mode="after")
    def _images(self) -> "Dataset":
        for name, split in self.splits.items():
            if not split.source.sharded:
                origin = self.splits.get(str(split.of))
                if origin is None or not origin.source.sharded:
                    raise ValueError(f"{name}: `of`: {split.of!r} is no split with shards")
                continue
            given = split.images is not None
            if given == self.bundled:
                wants = "brings its own images" if given else "needs its source as `images`"
                raise ValueError(f"{name}: kind {self.kind} {wants}")
        return self


class Weights(Settings):
    """A public checkpoint."""

    weights: str
    layout: str | None = None


class RunSpec(Settings):
    """One line of `runs`, before expansion."""

    recipe: str | None = None
    """A name, or a file whose path is relative to the experiment's."""
    weights: str | None = None
    """Instead of a recipe: a public checkpoint to import, its path written as that of images."""
    layout: str | None = None
    """Layout of `weights` (`docs/weights.md`); None: detected from their content."""
    timm: str | None = None
    """Model's name in timm, in place of size and layout of `weights`."""
    public: Weights | None = None
    """Public weights to import in place of training with `starting_from: public`."""
    size: str = ""
    """An encoder size of `maect/recipes/encoders.yaml`."""
    dataset: str | None = None
    """Data set to train on; none: the experiment's first."""
    source: str | None = Field(default=None, alias="from")
    """Written `from`: the run to start from."""
    image_size: int | None = Field(default=None, gt=0)
    """Pixels of the encoder's input, if not the size's."""
    encoder: dict[str, int | bool | str] = Field(default_factory=dict)
    """Changes to the size's shape: `width`, `depth`, `heads`, `patch_size` and so on."""
    method: str | None = None
    """Method's name in tables, if not the run's."""
    overrides: dict[str, Any] = Field(default_factory=dict, alias="set")
    """Written `set`: settings that differ from the recipe's; also those of `computing`."""
    computing: dict[str, Any] = Field(default_factory=dict)
    """Way of computing: `zero_stage`, `compile` and so on. It may change at any time."""
    each: dict[str, list[str | int | float]] = Field(default_factory=dict)
    """Values by name: a run for every combination, filled in where `{name}` is written."""
    seeds: int | None = Field(default=None, gt=0)
    """At most this many of the experiment's seeds."""

    @model_validator(mode="after")
    def _origin(self) -> "RunSpec":
        if (self.recipe is None) == (self.weights is None):
            raise ValueError("needs `recipe`, to train by, or `weights`, to import: one of them")
        given = self.model_fields_set
        if self.timm is not None:
            for name in ("size", "layout"):
                if name in given:
                    raise ValueError(f"`timm` says everything: a run with it takes no `{name}`")
        elif not self.size:
            raise ValueError("size: Field required")
        trained = {"dataset", "source", "overrides", "computing", "public", "encoder"}
        foreign = {"layout", "timm"} if self.weights is None else trained
        for name in sorted(foreign & given):
            key = type(self).model_fields[name].alias or name
            what = "a recipe" if self.weights is None else "weights to import"
            raise ValueError(f"a run of {what} takes no `{key}`")
        return self

    def from_public(self) -> "RunSpec":
        """Return the run that imports the public weights instead, if it has any."""
        if self.public is None:
            return self
        kept = self.model_dump(include={"size", "image_size", "method", "each", "seeds"})
        return RunSpec.model_validate(kept | self.public.model_dump())


class Evaluations(Settings):
    """Protocols and the runs to evaluate; a run may be a pattern such as `ct_*`."""

    runs: list[str]
    """Names or patterns of runs."""
    protocols: list[str]
    """Names of evaluations."""
    datasets: list[str] = Field(default_factory=list)
    """Data sets to evaluate on; None: the first of the experiment."""
    seeds: int | None = Field(default=None, gt=0)
    """At most this many seeds of each run."""

    @field_validator("runs", mode="before", json_schema_input_type=list[str | list[Any]])
    @classmethod
    def _runs(cls, value: Any) -> Any:
        return _flat(value)


# The lines of a table or figure: runs by name or pattern; METHOD: RUN gives the line another name.
Rows = list[str | dict[str, str]]
WrittenRows = list[str | dict[str, str] | list[Any]]
WrittenTables = list[str] | dict[str, WrittenRows | None]


def _flat(value: Any) -> Any:
    """Flatten a list of lists, so that a file can name a list once and use it in others."""
    if not isinstance(value, list):
        return value
    return [one for item in value for one in (_flat(item) if isinstance(item, list) else [item])]


class ExperimentSpec(Settings):
    """The file as written."""

    description: str = ""
    """One line for readers."""
    storage: str | None = None
    """Folder of results, without blanks; variables are filled in. None: `results/NAME`."""
    datasets: dict[str, Dataset] = Field(min_length=1)
    """The first one is what runs train on and what is evaluated, unless they say otherwise."""
    seeds: int = Field(default=1, gt=0)
    """Number of seeds: 3 makes `NAME`, `NAME-s1` and `NAME-s2` of every run."""
    runs: dict[str, RunSpec]
    """Trainings and imports by name."""
    online_evaluation: OnlineEvaluation | None = None
    """Interval of the online evaluation of every training; changing it trains nothing again."""
    features: Literal["auto", "fp32", "tf32", "bf16"] = "auto"
    """Precision of stored features; `auto`: TF32 from ViT-B's width on, float32 below. CPUs compute
    TF32 as float32."""
    starting_from: Literal["scratch", "public"] = "scratch"
    """`public`: pre-trainings with `public` weights import them, the others are left out."""
    evaluate: list[Evaluations] = Field(default_factory=list)
    """Evaluations, and their runs."""
    protocols: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings of evaluations that differ; a new name with `protocol` is a new evaluation."""
    compare_with_paper: bool = True
    """Whether tables and figures show the paper's numbers; they are of ImageNet-1k."""
    tables: dict[str, Rows] = Field(default_factory=dict)
    """Tables of the report: names, or for each name its lines (runs or `METHOD: RUN`)."""
    figures: dict[str, Rows] = Field(default_factory=dict)
    """Figures of the report, written like tables."""

    @field_validator("tables", "figures", mode="before", json_schema_input_type=WrittenTables)
    @classmethod
    def _rows(cls, value: Any) -> Any:
        """Read a list of names, or a name without rows, as every evaluated run."""
        if isinstance(value, list):
            value = dict.fromkeys(value)
        if isinstance(value, dict):
            return {name: ["*"] if rows is None else _flat(rows) for name, rows in value.items()}
        return value


def fill_path(text: str) -> str:
    """`~` and the environment variables that are set, filled in."""
    return os.path.expanduser(os.path.expandvars(text))


def filled(value: Any, fill: Callable[[str], str]) -> Any:
    """Nested values with `{key}` filled in their strings, which are then read as YAML scalars."""
    if isinstance(value, dict):
        return {key: filled(inner, fill) for key, inner in value.items()}
    return parse_yaml(fill(value), value) if isinstance(value, str) else value


def check_name(where: str, text: str) -> None:
    """Refuse names that need quotes in a shell command (UserError)."""
    if not NAME.fullmatch(text):
        raise UserError(f"{where}: {text!r} is not a name (letters, digits, _ . and -)")


def check_plain(where: str, text: str) -> None:
    """Refuse a path that commands cannot say without quotes: the UserError names the sign."""
    sign = re.search(r"""[\s"'`$&|;<>(){}\[\]*?!#%\\]""", text)
    if sign:
        raise UserError(
            f"{where}: {text!r} has {sign[0]!r}; "
            "choose one without blanks, % and signs of the shell"
        )


def expand_path(text: str, where: str) -> str:
    """`~` and environment variables filled in; UserError if a variable or home is not there."""
    filled = fill_path(text)
    home = os.path.expanduser(text.split("/")[0])
    if text.startswith("~") and not os.path.isdir(home):
        raise UserError(f"{where}: {text!r}: there is no folder {home}")
    unset = re.search(r"\$\{?(\w+)", filled)
    if unset:
        raise UserError(f"{where}: environment variable {unset[1]} in {text!r} is not set")
    return filled


def one_of(names: Iterable[str]) -> str:
    """Return a regular expression, for a wildcard: exactly these names, or nothing at all.

    Common beginnings are written once: Snakemake searches the expression whenever it fills in a
    file's name, which makes a dry run with thousands of names slow.
    """
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        groups.setdefault(name[:1], []).append(name)
    words = []
    for group in groups.values():
        start = os.path.commonprefix(group)  # noqa: RUF071 - of characters is what is meant
        ends = one_of(name[len(start) :] for name in group) if len(group) > 1 else ""
        words.append(re.escape(start) + (f"({ends})" if ends else ""))
    return "|".join(words) or "(?!)"


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of experiment files, by which editors complete and check them.

    Known names are suggestions, since others may be written as well.
    """
    schema = ExperimentSpec.model_json_schema(by_alias=True, mode="validation")
    parts = schema["$defs"]
    _suggest(parts["RunSpec"]["properties"], "recipe", recipe_names())
    _suggest(parts["RunSpec"]["properties"], "size", sizes())
    _suggest(parts["Evaluations"]["properties"]["protocols"], "items", evaluation_names())
    for name, known in (("tables", TABLE_NAMES), ("figures", tuple(FIGURES))):
        listed, mapped = schema["properties"][name]["anyOf"]
        listed["items"] = {"enum": list(known)}
        mapped["propertyNames"] = {"enum": list(known)}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _suggest(parts: dict[str, Any], name: str, known: Any) -> None:
    parts[name] = {"anyOf": [{"enum": list(known)}, parts[name]]}
