"""The tables and figures: an entry for each, with its columns, inputs and title; printed names.

The entries are `paper/tables.yaml` and `paper/figures.yaml`, and the paper's numbers of a table are
in `paper/NAME.csv`; a figure's entry names the function that draws it. The runs are named in the
resolved file beside what is made (`maect.report.configs`). The workflow and the experiment read
this module, so it imports no pandas and no matplotlib. `paper/titles.yaml` has the printed names of
architectures and methods, and explanations of words in tables.
"""

import re
from collections.abc import Mapping
from dataclasses import field

from pydantic.dataclasses import dataclass

from maect.paper import STRICT, read_paper


@dataclass(frozen=True, config=STRICT)
class _Titles:
    architectures: dict[str, str]
    methods: dict[str, str]
    published: frozenset[str]
    """Other methods, by their published checkpoints."""
    sweeps: dict[str, str]
    """Methods that differ in the value at their name's end."""
    glossary: dict[str, str]
    """Words of tables, by a column's or a method's title."""


_TITLES = read_paper("titles", _Titles)
ARCHITECTURES, METHODS = _TITLES.architectures, _TITLES.methods
PUBLISHED, GLOSSARY = _TITLES.published, _TITLES.glossary


def method_title(method: str) -> str:
    """Return how a method is printed; a name that the paper does not have stays unchanged."""
    sweep, _, value = method.rpartition("_")
    if sweep in _TITLES.sweeps:
        return f"{_TITLES.sweeps[sweep]} = {value}"
    return METHODS.get(method, method.replace("_", " "))


def architecture_title(architecture: str) -> str:
    """Return an architecture's name; `tiny_32` is one with images of another size."""
    size, _, pixels = architecture.rpartition("_")
    if architecture not in ARCHITECTURES and size in ARCHITECTURES and pixels.isdecimal():
        return f"{ARCHITECTURES[size]} ({pixels} px)"
    return ARCHITECTURES.get(architecture, architecture)


@dataclass(frozen=True, config=STRICT)
class Metric:
    """A column of a table: `metrics[key]` of `evaluations/RUN/EVALUATION.json`."""

    name: str
    """Its name in the CSV."""
    title: str
    evaluation: str
    key: str = ""
    """Name among the JSON's metrics; empty: as the column."""
    paper: str = ""
    """Column of the paper's CSV it is compared with; empty: as the column."""
    digits: int = 1
    """Decimals, as many as the paper prints."""
    best: str = ""
    """Metric that takes its place for other methods' checkpoints, where the evaluation has it."""
    instead: tuple[str, ...] = ()
    """Evaluations that give the value for runs without the first: the paper takes for each model
    the protocol that suits it."""
    by_model: bool = False
    """Whether the result of any row's run has this of many models, by architecture and method."""
    std: str = ""
    """Metric with the standard deviation over the seeds of the evaluation itself, for one run."""

    @property
    def source(self) -> str:
        """Return the name of the value among the JSON's metrics."""
        return self.key or self.name

    def sources(self, method: str) -> tuple[str, ...]:
        """Return the names of the value for a method; the first that an evaluation has counts."""
        best = (self.best,) if self.best and method in PUBLISHED else ()
        return (*best, self.source)


@dataclass(frozen=True, config=STRICT)
class Detail:
    """A column of text: how a model was trained, by its runs' records and by the paper."""

    name: str
    """Its name in the CSV, and a setting of the stages that train an encoder."""
    title: str


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Shown:
    """A table or figure of the report."""

    title: str
    caption: str
    """Text of the report on it."""
    compared: str = ""
    """Sentence in the caption if the paper is compared with; empty: its place in the paper."""
    paper: str = ""
    """Place in the paper; empty: none."""

    def about(self, compare: bool) -> str:
        """Return the caption. `compare`: mention the paper's numbers."""
        if not (compare and self.paper):
            return self.caption
        number = self.paper.partition(" ")[2]
        where = self.paper.lower() if number.isdecimal() else self.paper
        return f"{self.caption} {self.compared or f'Paper: {where}.'}"


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Table(Shown):
    """A table."""

    metrics: tuple[Metric, ...]
    evaluations: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Rows (by method) that are evaluated by other evaluations than their column's."""
    details: tuple[Detail, ...] = ()
    """Columns before those of numbers."""
    others: str = ""
    """Pattern of metrics that are columns as well: of sets that stand in for the paper's."""
    other_title: str = ""
    """Title where only such columns are shown."""
    of_public: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Columns, by architecture, in which the paper's row `mae` is that of the public weights."""
    printed: str = ""
    """Table with the numbers that the paper prints; empty: this one."""
    all_of_paper: bool = False
    """Show all rows that the paper prints, also those without a run."""

    def other(self, name: str) -> Metric | None:
        """Return the column of a metric that stands in for the paper's, titled by its set."""
        match = re.fullmatch(self.others, name) if self.others else None
        if match is None or name in {metric.name for metric in self.metrics}:
            return None
        parts = {"what": "", "form": "", **match.groupdict()}
        what = _SCORES.get(parts["what"], "")
        what = f"{what} deviation" if parts["form"] == "std" else what
        title = ", ".join(filter(None, (what, parts["set"])))
        return Metric(name, title.replace("_", " "), self.metrics[0].evaluation)

    def evaluations_of(self, metric: Metric, method: str) -> tuple[str, ...]:
        """Return the evaluations that may fill a cell; the first that was run does."""
        if method in self.evaluations:
            return self.evaluations[method]
        return (metric.evaluation, *metric.instead)

    def reads(self, method: str) -> tuple[str, ...]:
        """Return every evaluation that a row reads, without repetition."""
        names = [name for m in self.metrics for name in self.evaluations_of(m, method)]
        return tuple(dict.fromkeys(names))

    @property
    def reads_runs(self) -> bool:
        """Return whether it also reads the records of all runs behind its rows."""
        return bool(self.details)


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Figure(Shown):
    """A figure."""

    draw: str
    """`MODULE:FUNCTION` of `maect.report.figures`: a `ShownConfig` to a matplotlib figure."""
    needs: tuple[str, ...] = ()
    """The evaluations that it shows: it can be drawn of rows that have one of them."""
    besides: tuple[str, ...] = ()
    """Evaluations that it also shows of these rows."""
    reads_runs: bool = False
    """Whether it also reads the records of all runs of its rows."""
    first_seed: bool = False
    """Whether of a row with several seeds it shows the first, and reads no other."""
    names_classes: bool = False
    counts_labels: bool = False
    """Whether it reads how many images and classes the training split has."""
    groups_classes: bool = False
    """Whether it shows groups of classes in place of the classes, where the dataset has any."""
    trained_here: bool = False
    """Whether it leaves out what begins with imported weights, whose cost is not known."""
    unless: str = ""
    """Evaluation that gives this cost: if any row has it, nothing is left out."""

    def reads(self, method: str) -> tuple[str, ...]:
        """Return every evaluation that a row reads."""
        return (*self.needs, *self.besides)


_SCORES = {"accuracy": "ACC", "nmi": "NMI", "ami": "AMI", "ari": "ARI"}
TABLES = read_paper("tables", dict[str, Table])
FIGURES = read_paper("figures", dict[str, Figure])
TABLE_NAMES = tuple(name for name in TABLES if name not in FIGURES)
"""Tables that an experiment may ask for: one of a figure's name is made with the figure."""
