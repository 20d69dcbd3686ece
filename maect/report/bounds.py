"""Comparisons of numbers in tables, with their errors: the basis of the paper's statements."""

import math
import operator
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pandas as pd
from uncertainties import std_dev, ufloat

from maect.report.registry import TABLES
from maect.report.tables import DECIMALS

Tables = Mapping[str, pd.DataFrame]
Seeds = Mapping[int, Tables]
"""The same tables of each seed, or of each set of few labels, alone."""
NOTHING: Seeds = MappingProxyType({})

COST, PRETRAINING, TRAINED = "cost", "pretraining", "trained"
"""Tables beside those that are shown: what training cost, what its first stage logged, and which
models were trained here."""
# What the paper prints as equal is equal.
TOLERANCE = 1e-9
LEVEL = 0.05
"""Level of the paired t-tests, two-sided: three differences exceed 2.5 of their deviations."""
DEVIATIONS = 2.5
"""Standard deviations that a difference of independent values has to exceed."""
SHIFTED = ("imagenet_v2", "imagenet_r", "imagenet_sketch", "imagenet_a")
"""The paper's shifted test sets, as metrics of the table `robustness`."""
ACCURACIES = frozenset({
    "low_shot", "ablation", "combined", "robustness", "reimplementation", "sensitivity", "extended",
    "concat_probe", "fine_tune", "huge14", "oracle", "efficient_probe",
})  # fmt: skip
"""Tables of how many of the evaluated images are classified correctly, in percent."""
CLUSTERED = frozenset({"clustering", "clustering_best", "clustering_mean"})
"""Tables with an `accuracy` of clusters of all evaluated images: it varies more than that error."""


class Key(NamedTuple):
    """The place of a number."""

    table: str
    architecture: str
    method: str
    metric: str


@dataclass(frozen=True)
class Quantity:
    """Arithmetic on numbers of tables."""

    text: str
    """As the table of claims prints it, such as `low_shot.large.mae.knn`."""
    label: str
    """The same without the tables' names."""
    keys: tuple[Key, ...]
    compute: Callable[[Mapping[Key, Any]], Any]
    """From the number of each key."""
    is_sum: bool = False

    def __add__(self, other: "Quantity | float") -> "Quantity":
        return _joined(self, "+", other, operator.add)

    def __sub__(self, other: "Quantity | float") -> "Quantity":
        return _joined(self, "-", other, operator.sub)

    def __rmul__(self, factor: float) -> "Quantity":
        return _joined(factor, "*", self, operator.mul)

    def __truediv__(self, other: "Quantity | float") -> "Quantity":
        return _joined(self, "/", other, operator.truediv)


def value(table: str, architecture: str, method: str, metric: str) -> Quantity:
    """Return the number of a model in a table."""
    key = Key(table, architecture, method, metric)
    # A dot in a method's name would look like the end of the name.
    named = f"['{method}']" if "." in method else f".{method}"
    label = f"{architecture}{named}.{metric}"
    text = f"{table}.{label}".replace("'", '"')
    return Quantity(text, label, (key,), lambda numbers: numbers[key])


def _quantity(number: "Quantity | float") -> Quantity:
    """Return a number as a quantity that reads no table."""
    if isinstance(number, Quantity):
        return number
    return Quantity(f"{number:g}", f"{number:g}", (), lambda _: number)


def _joined(
    left: "Quantity | float",
    sign: str,
    right: "Quantity | float",
    operation: Callable[[Any, Any], Any],
) -> Quantity:
    one, other = _quantity(left), _quantity(right)
    is_sum = sign in "+-"

    def side(quantity: Quantity, text: str, brackets: bool) -> str:
        return f"({text})" if brackets and quantity.is_sum else text

    first, second = (
        f"{side(one, a, not is_sum)} {sign} {side(other, b, sign != '+')}"
        for a, b in ((one.text, other.text), (one.label, other.label))
    )
    return Quantity(
        first,
        second,
        tuple(dict.fromkeys(one.keys + other.keys)),
        lambda numbers: operation(one.compute(numbers), other.compute(numbers)),
        is_sum,
    )


@dataclass(frozen=True)
class Bound:
    """One comparison, not decided yet: `left` > `right`, for example."""

    left: Quantity
    sign: str
    """One of <, <=, >, >=."""
    right: Quantity

    def __str__(self) -> str:
        return f"{self.left.text} {self.sign} {self.right.text}"

    @property
    def label(self) -> str:
        """Return it without the tables' names."""
        sign = self.sign.replace(">=", "≥").replace("<=", "≤")
        return f"{self.left.label} {sign} {self.right.label}"

    @property
    def keys(self) -> tuple[Key, ...]:
        """Return the places of its numbers, in the order in which they are named."""
        return tuple(dict.fromkeys(self.left.keys + self.right.keys))

    def sides(self, numbers: Mapping[Key, Any]) -> tuple[Any, Any]:
        """Compute both sides."""
        return self.left.compute(numbers), self.right.compute(numbers)


def bound(left: Quantity, sign: str, right: "Quantity | float") -> Bound:
    """Return a comparison with a quantity or a number."""
    return Bound(left, sign, _quantity(right))


class Model(NamedTuple):
    """A method in a table, at any size."""

    table: str
    method: str

    def value(self, architecture: str, metric: str) -> Quantity:
        """Return a number of this model at one size."""
        return value(self.table, architecture, self.method, metric)


class MeasuredModels:
    """The models and test sets of tables, which statements compare."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def sizes(self, *models: Model) -> Sequence[str]:
        """Return the architectures that have a row of each model: others cannot be compared.

        `any` stands for none, so that what is missing is named.
        """
        have = [architectures(self._tables, *model) for model in models]
        return [one for one in have[0] if all(one in others for others in have)] or ["any"]

    def shifts(self) -> Sequence[str]:
        """Return the paper's shifted test sets, or those measured in their place if none was."""
        frame = self._tables.get("robustness", pd.DataFrame())
        measured = [c for c in frame if f"{c}_std" in frame and frame[c].notna().any()]
        of_paper = {metric.name for metric in TABLES["robustness"].metrics}
        others = tuple(str(name) for name in measured if name not in of_paper)
        return others if others and not set(SHIFTED) & set(measured) else SHIFTED


class AnySize(MeasuredModels):
    """Stands for all tables: a statement is printed once for all sizes and shifted test sets."""

    def __init__(self) -> None:
        super().__init__({})

    def sizes(self, *models: Model) -> Sequence[str]:
        """Return `*`."""
        return ["*"]

    def shifts(self) -> Sequence[str]:
        """Return `each_shift`."""
        return ["each_shift"]


def architectures(tables: Tables, table: str, method: str) -> list[str]:
    """Return the architectures for which a table has a row of a method, in its order."""
    if table not in tables:
        return []
    lines = zip(tables[table]["architecture"], tables[table]["method"], strict=True)
    return list(dict.fromkeys(architecture for architecture, of in lines if of == method))


@dataclass(frozen=True)
class Comparison:
    """One comparison with its numbers; `difference` is positive if it holds."""

    text: str
    holds: bool | None
    """None: a value was not measured."""
    left: float
    right: float
    difference: float
    std: float
    """Standard deviation of the difference over seeds; NaN if unknown."""
    at_least: bool
    """Whether `std` is a lower limit, because the deviation of some values is unknown."""
    missing: tuple[Key, ...]
    decimals: int = 2
    """To print the difference with."""
    limit: bool = False
    """Whether the right side is a number, so that the left one is printed."""
    chance: float = math.nan
    """Probability that chance makes such a difference; NaN if its error is unknown."""
    exact: bool = False
    """Whether nothing in it is random."""
    of_sets: tuple[float, ...] = ()
    """The difference with each set of few labels alone, where these are known."""
    seeds: int = 1
    """Seeds that the numbers are means of: those that all models have in common."""
    epochs: tuple[float, ...] = ()
    """Epochs of the models' pre-trainings, if they differ: then the comparison is not fair."""

    @property
    def significant(self) -> bool | None:
        """Return whether the difference is more than chance; None if that is not known."""
        if self.holds is None or math.isnan(self.chance):
            return None
        if self.chance > LEVEL:
            return False
        return None if self.at_least else True


def compare(
    asked: Bound,
    tables: Tables,
    suffix: str = "",
    seeds: Seeds = NOTHING,
    sets: Seeds = NOTHING,
    images: Mapping[str, int] = MappingProxyType({}),
) -> Comparison:
    """Decide one comparison.

    A tuned encoder of a seed begins with the MAE of this seed. So the difference is computed seed
    by seed where all models that were trained here have seeds in common, and its mean and standard
    deviation are over these: a paired t-test decides, and beside it the deviations that come with
    imported models. With fewer than two of them the deviation is
    that of a function of independent values, to first order: a model of one seed has the largest
    that any of its architecture has in this metric, and the binomial error of an accuracy beside
    it; `DEVIATIONS` of them decide. They also decide where all seeds have the same difference:
    scores come in steps, so that is no evidence. An imported model counts as exact where no
    deviation comes with it. With few labels the difference also has to pass a paired t-test over
    the sets of labels.

    Args:
        asked: the comparison.
        tables: all tables by name.
        suffix: `_paper` decides it with the paper's own numbers.
        seeds: the tables of each seed alone.
        sets: the tables of each set of few labels alone.
        images: number of evaluated images of each split.
    """
    values = {key: look_up(tables, key, suffix) for key in asked.keys}
    missing = tuple(key for key, number in values.items() if math.isnan(number))
    left, right = asked.sides(values)
    if missing:
        return Comparison(asked.label, None, left, right, math.nan, math.nan, False, missing)
    varying = {} if suffix else _varying(tables, values)
    imported = [key for key in varying if TRAINED in tables and not _is_trained(tables, key)]
    of_seeds = [asked.sides(values | own) for own in _in_common(varying.keys() - imported, seeds)]
    if of_seeds:
        left, right = (statistics.fmean(side) for side in zip(*of_seeds, strict=True))
    margin = left - right if asked.sign.startswith(">") else right - left
    std = math.nan
    at_least = False
    chance = math.nan
    if len(of_seeds) > 1:
        differences = [one - other for one, other in of_seeds]
        std = statistics.stdev(differences)
        chance = chance_of(differences)
        if imported and not math.isnan(chance):
            of_imported = _propagated(asked, values, {key: varying[key] for key in imported})
            std = math.hypot(std, of_imported)
            chance = max(chance, _chance_of(margin, of_imported))
    if math.isnan(chance) and not suffix:
        std = math.nan
        errors = {
            key: _error(varying.get(key, math.nan), error_of_images(key, number, images))
            for key, number in values.items()
        }
        if max(errors.values()) > TOLERANCE:
            std = _propagated(asked, values, errors)
            at_least = any(map(math.isnan, varying.values()))
            chance = _chance_of(margin, std)
    of_sets = _of_sets(asked, values, sets)
    by_labels = chance_of(of_sets) if len(of_sets) > 1 else math.nan
    if by_labels > LEVEL or not math.isnan(chance):
        chance = max(p for p in (chance, by_labels) if not math.isnan(p))
    return Comparison(
        asked.label,
        margin >= -TOLERANCE if asked.sign.endswith("=") else margin > TOLERANCE,
        left,
        right,
        margin,
        std,
        at_least,
        (),
        decimals=_decimals(margin, values.values()),
        limit=not asked.right.keys,
        chance=chance,
        exact=math.isnan(std) and all(key.table == COST for key in values),
        of_sets=of_sets,
        seeds=max(1, len(of_seeds)),
        epochs=() if suffix else _epochs(tables, values),
    )


def look_up(tables: Tables, key: Key, suffix: str = "") -> float:
    """Return a number of a table; NaN if the table has no such line or column."""
    if key.table not in tables or f"{key.metric}{suffix}" not in tables[key.table]:
        return math.nan
    # Not by masks of pandas: there are thousands of questions, each about a dozen lines.
    frame = tables[key.table]
    columns = (frame[column] for column in ("architecture", "method", f"{key.metric}{suffix}"))
    for architecture, method, number in zip(*columns, strict=True):
        if (architecture, method) == (key.architecture, key.method):
            return float(number)
    return math.nan


def _varying(tables: Tables, keys: Iterable[Key]) -> dict[Key, float]:
    """Return the standard deviation over seeds of each value that would vary; NaN if unknown.

    With one seed it is the largest of the same architecture. What was not trained here and comes
    without a deviation is left out.
    """
    found: dict[Key, float] = {}
    for key in keys:
        own = look_up(tables, key, "_std")
        if not math.isnan(own):
            found[key] = own
        elif _is_trained(tables, key):
            found[key] = _largest_deviation(tables, key)
    return found


def _largest_deviation(tables: Tables, key: Key) -> float:
    """Return the largest deviation of a metric at one architecture; NaN if none is known.

    Columns of other tables count if they show the same result of the same evaluation.
    """
    column = f"{key.metric}_std"
    known = [
        float(spread)
        for table, frame in tables.items()
        if column in frame and _origin(table, key.metric) == _origin(key.table, key.metric)
        for architecture, spread in zip(frame["architecture"], frame[column], strict=True)
        # What is the same for all seeds says nothing of others.
        if architecture == key.architecture and spread > 0
    ]
    return max(known, default=math.nan)


def _origin(table: str, metric: str) -> tuple[str, str]:
    """Return the evaluation and the name there of a table's metric; else the table and its name."""
    metrics = TABLES[table].metrics if table in TABLES else ()
    for one in metrics:
        if one.name == metric:
            return (table, metric) if one.by_model else (one.evaluation, one.source)
    return table, metric


def _is_trained(tables: Tables, key: Key) -> bool:
    """Return whether a model was trained here; an imported one has one seed."""
    return key.architecture in architectures(tables, TRAINED, key.method)


def _in_common(varying: Collection[Key], seeds: Seeds) -> list[dict[Key, float]]:
    """Return these values of each seed, or set of labels, that has all of them."""
    of_each = ({key: look_up(tables, key) for key in varying} for tables in seeds.values())
    return [own for own in of_each if own and not any(map(math.isnan, own.values()))]


def _of_sets(asked: Bound, values: Mapping[Key, float], sets: Seeds) -> tuple[float, ...]:
    """Return the difference with each set of few labels."""
    few = [
        key
        for key in values
        if any(not math.isnan(look_up(tables, key)) for tables in sets.values())
    ]
    both = (asked.sides({**values, **own}) for own in _in_common(few, sets))
    return tuple(left - right for left, right in both)


def chance_of(differences: Sequence[float]) -> float:
    """Return the probability of such a mean of paired differences if it were zero.

    By a two-sided t-test; NaN where all are the same but not zero.
    """
    from scipy.stats import t as student  # takes a while

    mean = abs(statistics.fmean(differences))
    error = statistics.stdev(differences)
    if mean <= TOLERANCE:
        return 1.0
    if error <= TOLERANCE:
        return math.nan
    return 2 * float(student.sf(mean / error * math.sqrt(len(differences)), len(differences) - 1))


def _chance_of(difference: float, std: float) -> float:
    """Return that of one difference, where `DEVIATIONS` of its standard deviations are `LEVEL`."""
    if abs(difference) <= DEVIATIONS * std:
        return 1.0
    if not std:
        return 0.0
    normal = statistics.NormalDist()
    return LEVEL * normal.cdf(-abs(difference) / std) / normal.cdf(-DEVIATIONS)


def _error(*parts: float) -> float:
    """Return the standard deviation of a sum of independent errors; unknown ones count as zero."""
    return math.hypot(*filter(math.isfinite, parts))


def _propagated(asked: Bound, values: Mapping[Key, float], errors: Mapping[Key, float]) -> float:
    """Return the standard deviation of the difference, to first order."""
    uncertain = {key: ufloat(values[key], error) for key, error in errors.items() if error}
    left, right = asked.sides({**values, **uncertain})
    return float(std_dev(left - right))


def error_of_images(key: Key, number: float, images: Mapping[str, int]) -> float:
    """Return the standard deviation of an accuracy over other images, in percent; NaN: unknown.

    That of 0 and of 100 % is as if about one image were otherwise.
    """
    counts = key.table in ACCURACIES or (key.table in CLUSTERED and key.metric == "accuracy")
    n = images.get(split_of(key.table, key.metric))
    if not counts or not n or not 0 <= number <= 100:
        return math.nan
    one = 100 / (n + 2)
    number = min(max(number, one), 100 - one)
    return math.sqrt(number * (100 - number) / n)


def split_of(table: str, metric: str) -> str:
    """Return the split whose images a number is of."""
    if table != "robustness":
        return "val"
    return next((one.source for one in TABLES[table].metrics if one.name == metric), metric)


def _epochs(tables: Tables, keys: Iterable[Key]) -> tuple[float, ...]:
    """Return the epochs of the pre-trainings that the models begin with, if they differ."""
    frame = tables.get(TRAINED)
    if frame is None or "pretraining_epochs" not in frame:
        return ()
    places = (Key(TRAINED, key.architecture, key.method, "pretraining_epochs") for key in keys)
    known = (look_up(tables, place) for place in places)
    found = sorted({epochs for epochs in known if not math.isnan(epochs)})
    return tuple(found) if len(found) > 1 else ()


def _decimals(difference: float, values: Iterable[float]) -> int:
    """Return two for percents, all for parts of 1, and as many as show a difference."""
    if all(abs(number) <= 1 for number in values):
        return DECIMALS
    if abs(difference) <= TOLERANCE:
        return 2
    return next((n for n in range(2, DECIMALS) if round(difference, n)), DECIMALS)
