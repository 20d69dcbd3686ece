import itertools
import math
import statistics
from pathlib import Path

import pandas as pd
import pytest
from scipy import stats

from maect.core.files import write_record
from maect.records import RunRecord
from maect.report.bounds import Bound, MeasuredModels, Model, Quantity, bound, compare, value
from maect.report.claims import (
    claims_table,
    evidence,
    judge,
    tables_of_runs,
    tables_of_seeds,
    tables_of_sets,
)
from maect.report.configs import ReportConfig, ShownConfig
from maect.report.pages import report_page
from maect.report.render import verdicts
from maect.report.statements import STATEMENTS, Statement
from maect.report.tables import Row, build_table, printed_tables, trained_table, write_table


@pytest.fixture
def tables(result, evaluations):
    """Two sizes; three seeds of each model at the size `tiny`, one at `small`."""
    for seed in range(3):
        result(f"mae-s{seed}", "clustering", accuracy=50.0 + seed, silhouette=-2.0)
        result(f"ct-s{seed}", "clustering", accuracy=60.0 + 2 * seed, silhouette=3.0)
    result("mae_small", "clustering", accuracy=40.0, silhouette=-1.0)
    result("ct_small", "clustering", accuracy=39.0, silhouette=1.0)
    rows = [
        Row("tiny", "mae", [f"mae-s{n}" for n in range(3)]),
        Row("tiny", "ct_min", [f"ct-s{n}" for n in range(3)]),
        Row("small", "mae", ["mae_small"]),
        Row("small", "ct_min", ["ct_small"]),
    ]
    return {"clustering": build_table("clustering", rows, evaluations)}


SEEDS = ("", "-s1", "-s2")
PAIR = [Row("tiny", "mae", ["mae"]), Row("tiny", "ct_min", ["ct"])]


@pytest.fixture
def pair(result, evaluations):
    """Builds tables of PAIR from numbers of both: `pair("clustering", knn={"knn": (50, 60)})`."""

    def build(*tables: str, **measured: dict[str, tuple[float, float]]) -> dict[str, pd.DataFrame]:
        for number, run in enumerate(("mae", "ct")):
            for protocol, metrics in measured.items():
                result(run, protocol, **{name: both[number] for name, both in metrics.items()})
        return {name: build_table(name, PAIR, evaluations) for name in tables}

    return build


def shown_of(evaluations: Path, name: str, rows: list[Row]) -> ShownConfig:
    """A table's resolved file."""
    folders = {"evaluations": evaluations, "runs": evaluations.parent / "runs"}
    return ShownConfig(name=name, rows=rows, **folders)


def of_three_seeds(*models: tuple[str, str]) -> list[Row]:
    """A row of three seeds for each method and its run."""
    return [Row("tiny", method, [f"{run}{seed}" for seed in SEEDS]) for method, run in models]


def given() -> dict[str, pd.DataFrame]:
    """The paper's tables with numbers moved a little, some with a deviation, some lines missing."""
    tables = {}
    for name, frame in printed_tables().items():
        count = 0
        for column in frame.select_dtypes("number").filter(like="_paper").columns:
            metric = column.removesuffix("_paper")
            for line in frame.index:
                count += 1
                paper = frame.at[line, column]
                unit = 0.01 if abs(paper) <= 1 else 1.0
                frame.at[line, metric] = round(paper + unit * 0.6 * (count * 7 % 11 - 5) / 5, 4)
                frame.at[line, f"{metric}_std"] = (math.nan, 0.1 * unit, 0.45 * unit)[count * 5 % 3]
        tables[name] = frame.drop(index=[line for line in frame.index if line % 9 == 8])
    methods = ("mae", "ct_min", "ct_aug", "combined", "combined_ct")
    tables["cost"] = pd.DataFrame(
        {"architecture": size, "method": method, "overhead": cost + n, "overhead_std": 0.25 * m}
        for n, size in enumerate(("base", "large"))
        for m, (method, cost) in enumerate(zip(methods, (0, 4.0, 11.5, 3, 2), strict=True))
    )
    tables["trained"] = tables["cost"]
    tables["pretraining"] = pd.DataFrame(
        {"architecture": "large", "method": method, "nnclr_loss": loss, "nnclr_loss_std": 0.2}
        for method, loss in (("detached_ct_skip", 6.0), ("combined_ct_skip", 4.5))
    )
    methods = ("mae", "ct_min", "combined_ct", "combined", "combined_fine_tuned")
    errors = {"error_last": [60.0, 56.0, 52.0, 48.0, 44.0], "error_last_std": 0.3}
    tables["color_histogram"] = pd.DataFrame({"architecture": "large", "method": methods} | errors)
    return tables


def test_every_verdict_text_and_number_on_given_tables(tmp_path):
    """Once written by comparisons with derivatives of our own; `uncertainties` has to agree."""
    write_table(claims_table(given()), tmp_path / "claims.csv")
    expected = Path(__file__).with_name("claims.csv")
    assert (tmp_path / "claims.csv").read_text() == expected.read_text()


def claim(*bounds: Bound) -> Statement:
    return Statement("name", "table 2", "text", lambda _: bounds)


def verdict(tables, *bounds: Bound):
    return judge(tables, [claim(*bounds)])[0]


def number(name: str) -> Quantity:
    """A number by its name, as `clustering.tiny.mae.accuracy`."""
    return value(*name.split("."))


def above(left: str, right: str | float) -> Bound:
    """That a number exceeds another, or a limit."""
    return bound(number(left), ">", number(right) if isinstance(right, str) else right)


def test_differences_are_taken_seed_by_seed(result, evaluations, tmp_path):
    """Seeds that differ much, and tuning that adds nearly the same to each."""
    for seed, run in enumerate(SEEDS):
        result(f"mae{run}", "clustering", accuracy=50.0 + 3 * seed)
        result(f"ct{run}", "clustering", accuracy=51.0 + 3.1 * seed)
    result("ct_k1", "clustering", accuracy=52.0)
    result("ibot", "clustering", accuracy=53.0)
    runs = tmp_path / "runs"
    RunRecord(run="ibot", stage="import", device_hours=0).write(RunRecord.path(runs / "ibot"))
    rows = of_three_seeds(("mae", "mae"), ("ct", "ct"))
    rows += [Row("tiny", method, [method]) for method in ("ct_k1", "ibot")]
    tables = {"clustering": build_table("clustering", rows, evaluations)}
    tables |= tables_of_runs(rows, runs)
    seeds = tables_of_seeds([shown_of(evaluations, "clustering", rows)], rows, runs)

    def difference(left: str, right: str):
        asked = above(f"clustering.tiny.{left}.accuracy", f"clustering.tiny.{right}.accuracy")
        one = compare(asked, tables, seeds=seeds)
        return one.difference, one.std

    assert difference("ct", "mae") == pytest.approx((1.1, 0.1))
    assert difference("mae", "ct") == pytest.approx((-1.1, 0.1))
    assert difference("ct", "ibot") == pytest.approx((54.1 - 53, 3.1))  # the same for every seed
    # Of one seed: compared with that seed, by deviations of independent values.
    assert difference("ct_k1", "mae") == pytest.approx((2.0, math.hypot(3.0, 3.1)))
    twice = bound(2 * number("clustering.tiny.ct.accuracy"), ">", 0)
    assert compare(twice, tables, seeds=seeds).std == pytest.approx(6.2)


def test_of_many_comparisons_some_fail_by_chance(tables):
    """62 ± 2 against 67.4 is 2.7 deviations: one comparison decides it, one of five does not."""
    tuned = "clustering.tiny.ct_min.accuracy"
    holding = [above(tuned, limit) for limit in (50, 51, 52, 53)]
    close, far = (above(tuned, limit) for limit in (67.4, 69))
    assert verdict(tables, close).result == "fails"
    found = verdict(tables, close, *holding)
    assert (found.result, found.significant) == ("within noise", "no")
    assert "> 67.4: 62.00 ± 2.00 (fails; within noise of 5 comparisons)" in found.numbers
    assert verdict(tables, far, *holding).result == "fails"  # 3.5 deviations
    assert verdict(tables, close, close).result == "fails"  # both as surely as one


def test_one_seed_is_no_surer_than_three(tables, result, evaluations):
    result("ct_k1", "clustering", accuracy=64.0, silhouette=3.0)
    result("ibot", "clustering", accuracy=64.0, silhouette=3.0)
    rows = [Row("tiny", "ct_min_k1", ["ct_k1"]), Row("tiny", "ibot", ["ibot"])]
    tables["clustering_best"] = build_table("clustering", rows, evaluations)

    def ahead(method: str, more: float) -> Bound:
        mae = number("clustering.tiny.mae.accuracy")
        return bound(number(f"clustering_best.tiny.{method}.accuracy"), ">", mae + more)

    assert compare(ahead("ct_min_k1", 0), tables).std == pytest.approx(1.0)
    # Of what was trained here `ct_min` varies most.
    tables["dogs15_best"] = tables["clustering"].assign(accuracy_std=50.0)  # of other images
    trained = [("tiny", method) for method in ("mae", "ct_min", "ct_min_k1")]
    tables["trained"] = pd.DataFrame(trained, columns=["architecture", "method"])
    assert compare(ahead("ct_min_k1", 0), tables).std == pytest.approx(math.sqrt(1 + 4))
    assert verdict(tables, ahead("ct_min_k1", 12)).result == "within noise"
    assert compare(ahead("ibot", 0), tables).std == pytest.approx(1.0)


def test_of_one_seed_that_nothing_stands_in_for_only_noise_is_sure(tables, result, evaluations):
    """Six points more, where one side varies by 2 and nobody knows how much the other does."""
    result("ct_k1", "linear_probe", linear_probe=64.0)
    tables["oracle"] = build_table("oracle", [Row("tiny", "ct_k1", ["ct_k1"])], evaluations)
    tables["trained"] = pd.DataFrame({"architecture": ["tiny"] * 2, "method": ["ct_k1", "ct_min"]})
    one, other = number("oracle.tiny.ct_k1.linear_probe"), number("clustering.tiny.ct_min.accuracy")
    far, near = (verdict(tables, bound(one, ">", other + more)) for more in (-4, 1))
    assert (far.result, far.significant) == ("holds", "one seed")
    assert (near.result, near.significant) == ("within noise", "no")
    assert near.numbers.endswith("+1.00 ± 2.00 or more (within noise)")


def test_an_imported_encoder_has_no_seeds_and_counts_as_exact(tables, result, evaluations):
    result("ibot", "clustering", accuracy=55.0, silhouette=1.0)
    imported = build_table("clustering", [Row("tiny", "ibot", ["ibot"])], evaluations)
    tables = {"clustering": pd.concat([tables["clustering"], imported])}
    tuned, ibot = (number(f"clustering.tiny.{method}.accuracy") for method in ("ct_min", "ibot"))
    assert compare(bound(tuned, ">", ibot), tables).std == pytest.approx(2.0)
    assert verdict(tables, bound(tuned, ">", ibot)).significant == "yes"  # 62 ± 2 against 55
    assert verdict(tables, bound(tuned, ">", ibot + 6)).significant == "no"
    alone = bound(ibot, ">", number("clustering.small.mae.accuracy"))
    assert verdict(tables, alone).significant == "one seed"


@pytest.mark.parametrize(
    ("differences", "decided"),
    [
        ((1.4, 2.4, 3.4), False),  # 2.4 of their standard deviations
        ((1.6, 2.6, 3.6), True),  # 2.6
        ((-3.6, -2.6, -1.6), True),
        ((8.0, 10.0), False),  # 6.4: of two it has to be 9
        ((9.0, 10.0), True),
        ((2.0, 2.0, 2.0), False),  # 10 of 500 images: scores come in steps, this is no evidence
        ((0.0, 0.0, 0.0), False),
    ],
)
def test_a_paired_test_over_seeds_decides(differences, decided):
    def tables(mae: float, difference: float):
        values = {"architecture": "tiny", "method": ["mae", "ct_min"], "knn_std": math.nan}
        return {"low_shot": pd.DataFrame(values | {"knn": [mae, mae + difference]})}

    seeds = {n: tables(40.0 + 3 * n, difference) for n, difference in enumerate(differences)}
    mean = tables(40.0, statistics.fmean(differences))
    mean["trained"] = mean["low_shot"].assign(hours=1.0)
    asked = above("low_shot.tiny.ct_min.knn", "low_shot.tiny.mae.knn")
    assert compare(asked, mean, seeds=seeds, images={"val": 500}).significant is decided
    by_scipy = stats.ttest_1samp(differences, 0.0).pvalue if len(set(differences)) > 1 else None
    assert by_scipy is None or bool(by_scipy < 0.05) == decided


def test_few_labels_are_decided_over_their_sets_as_well(result, evaluations):
    """Trainings agree on what the sets of labelled images do not."""
    gains = {"low_shot_1": (9.0, -4.0, 7.0), "low_shot_5": (4.0, 5.0, 3.0)}
    for number, run in enumerate(SEEDS):
        for model, gained in (("mae", 0), ("ct", 1)):
            metrics = {}
            for name, of_sets in gains.items():
                values = [30.0 + 5 * n + gained * (g + 0.1 * number) for n, g in enumerate(of_sets)]
                metrics |= {name: statistics.fmean(values), f"{name}_splits": values}
            result(f"{model}{run}", "low_shot", **metrics)
    rows = of_three_seeds(("mae", "mae"), ("ct_min", "ct"))
    shown = [shown_of(evaluations, name, rows) for name in ("low_shot", "clustering")]
    all_sets = tables_of_sets(shown)
    assert list(all_sets) == [0, 1, 2]
    tables = {"low_shot": build_table("low_shot", rows, evaluations)}
    tables["trained"] = pd.DataFrame({"architecture": "tiny", "method": ["mae", "ct_min"]})
    seeds = {
        n: {"low_shot": build_table("low_shot", [row.of_seed(n) for row in rows], evaluations)}
        for n in range(3)
    }

    def of(shots: int, sets):
        models = (f"low_shot.tiny.{method}.low_shot_{shots}" for method in ("ct_min", "mae"))
        return judge(tables, [claim(above(*models))], seeds=seeds, sets=sets)[0]

    assert (of(1, {}).result, of(1, all_sets).result) == ("holds", "within noise")
    assert (of(5, {}).result, of(5, all_sets).result) == ("holds", "holds")
    numbers = of(1, all_sets).numbers
    assert "(within noise; by sets of labels +9.1, -3.9, +7.1)" in numbers


def gain_of(metric: str) -> Bound:
    """That tuning adds to a metric of a table, as `clustering.accuracy`."""
    table, name = metric.split(".")
    return above(f"{table}.tiny.ct_min.{name}", f"{table}.tiny.mae.{name}")


def test_one_seed_has_at_least_the_error_of_so_many_images(pair):
    clusters = {"accuracy": (50.0, 57.0), "silhouette": (0.0, 0.0)}
    probes = {"linear_probe": (50.0, 57.0)}
    tables = pair("low_shot", "clustering", linear_probe=probes, clustering=clusters)
    tables["trained"] = tables["low_shot"]

    def error(metric: str) -> float:
        return compare(gain_of(metric), tables, images={"val": 500}).std

    for metric in ("low_shot.linear_probe", "clustering.accuracy"):
        assert error(metric) == pytest.approx(math.sqrt((50 * 50 + 57 * 43) / 500))  # 3.1 points
    assert math.isnan(error("clustering.silhouette"))
    asked = [claim(gain_of("low_shot.linear_probe"))]
    found = [judge(tables, asked, images={"val": n})[0] for n in (500, 10_000)]
    found.append(judge(tables, asked)[0])
    assert [(one.result, one.significant) for one in found] == [
        ("within noise", "no"), ("holds", "one seed"), ("holds", "one seed"),
    ]  # fmt: skip
    assert found[1].numbers.endswith("+7.00 ± 0.70 or more")


def test_the_error_of_a_shifted_set_is_that_of_its_own_images(pair):
    shifted = dict.fromkeys(("imagenet_v2_threshold", "noisy"), (60.0, 61.2))
    tables = pair("robustness", robustness=shifted)
    images = {"val": 50_000, "imagenet_v2_threshold": 10_000, "noisy": 2_500}
    for column, count in (("imagenet_v2", 10_000), ("noisy", 2_500)):
        error = compare(gain_of(f"robustness.{column}"), tables, images=images).std
        assert error == pytest.approx(math.sqrt(2 * 60 * 40 / count), rel=0.01)
    assert math.isnan(compare(gain_of("robustness.noisy"), tables, images={"val": 50_000}).std)


def test_every_seed_is_read_by_the_evaluation_that_the_table_shows(result, evaluations, tmp_path):
    for seed, suffix in enumerate(SEEDS):
        for model, knn in (("mae", 40.0), ("ct", 45.0)):
            result(f"{model}{suffix}", "fine_tune_1pct_mae", low_shot_1pct=knn + seed)
    result("ct", "fine_tune_1pct", low_shot_1pct=60.0)  # of the first seed alone
    rows = of_three_seeds(("mae", "mae"), ("ct", "ct"))

    def cell(tables, method: str) -> float:
        return tables["low_shot"].set_index("method").at[method, "low_shot_1pct"]

    whole = {"low_shot": build_table("low_shot", rows, evaluations, paper=False)}
    assert (cell(whole, "ct"), cell(whole, "mae")) == (60.0, 41.0)
    seeds = tables_of_seeds([shown_of(evaluations, "low_shot", rows)], rows, tmp_path)
    of_ct = [cell(seeds[n], "ct") for n in range(3)]
    assert of_ct[0] == 60.0 and math.isnan(of_ct[1]) and math.isnan(of_ct[2])


def test_what_claims_are_decided_by(result, evaluations, tmp_path):
    """Tables, those of each seed and each set of labels, and how many images a split has."""
    runs, firsts = tmp_path / "runs", (40.0, 44.0)
    for run, first in zip(("mae", "mae-s1"), firsts, strict=True):
        result(run, "low_shot", low_shot_1=first, low_shot_1_splits=[first, first + 1])
        record = RunRecord(run=run, stage="pretrain", device_hours=first)
        record.write(RunRecord.path(runs / run))
    rows = [Row("large", "mae", ["mae", "mae-s1"])]
    csv, index = tmp_path / "tables/low_shot.csv", tmp_path / "val/index.json"
    shown = shown_of(evaluations, "low_shot", rows)
    shown.write(csv.with_suffix(".yaml"))
    write_table(build_table("low_shot", rows, evaluations), csv)
    write_record(index, {"n": 500})
    indices = {"val": index, "gone": tmp_path / "gone/index.json"}
    tables, more = evidence([csv], rows, runs, indices)
    assert tables.keys() == {"low_shot", "cost", "trained", "pretraining"}
    assert more.keys() == {"seeds", "sets", "images"} and more["images"] == {"val": 500}
    assert tables["low_shot"].low_shot_1.tolist() == [42.0] == tables["cost"].hours.tolist()
    assert tables["trained"].hours.tolist() == [42.0] and "nnclr_loss" in tables["pretraining"]
    assert {*more["sets"]} == {0, 1}
    for number, first in enumerate(firsts):
        of_seed, of_set = more["seeds"][number], more["sets"][number]
        assert of_seed.keys() == tables.keys() and of_set.keys() == {"low_shot"}
        assert of_seed["cost"].hours.tolist() == [first] == of_seed["low_shot"].low_shot_1.tolist()
        assert of_set["low_shot"].low_shot_1.tolist() == [42.0 + number]
        for one in (of_seed, of_set):
            assert one["low_shot"].filter(like="_paper").isna().all(axis=None)
    assert tables_of_seeds([shown], [row.of_seed(0) for row in rows], runs) == {}


def test_models_of_other_pretrainings_are_not_compared(result, evaluations, tmp_path):
    """Combined pre-training of 15 epochs beside a MAE of 30."""
    for run, source, epochs in (
        ("mae", None, 30), ("ct", "mae", 2), ("combined", None, 15), ("combined_ct", "combined", 2)
    ):  # fmt: skip
        result(run, "clustering", accuracy=50.0 + epochs, silhouette=1.0)
        record = {"run": run, "stage": "tune" if source else "pretrain", "source": source}
        record |= {"device_hours": 1.0, "settings": {"epochs": epochs}}
        write_record(RunRecord.path(tmp_path / "runs" / run), record)
    rows = [Row("tiny", run, [run]) for run in ("mae", "ct", "combined", "combined_ct")]
    tables = {"clustering": build_table("clustering", rows, evaluations)}
    tables["trained"] = trained_table(rows, tmp_path / "runs")

    def ahead(better: str, worse: str) -> Bound:
        return above(f"clustering.tiny.{better}.accuracy", f"clustering.tiny.{worse}.accuracy")

    for tuned, start in (("ct", "mae"), ("combined_ct", "combined")):
        assert verdict(tables, ahead(tuned, start)).result == "fails"
    found = verdict(tables, ahead("mae", "combined_ct"), ahead("ct", "mae"))
    assert (found.result, found.significant) == ("not comparable", "")
    assert "+28.00 (pre-trained for 15 and 30 epochs)" in found.numbers
    frame = claims_table(tables).assign(verdict="not comparable")
    assert verdicts(frame)["summary"].endswith(": 50 not comparable")


def test_seeds_are_compared_whatever_comes_with_an_imported_encoder(result, evaluations):
    """Its own deviation, over fine-tunings, does not make a seed of it."""
    for run, accuracy in zip(SEEDS, (84.9, 85.3, 85.3), strict=True):
        result(f"ct{run}", "fine_tune", fine_tune=accuracy)
    result("mae", "fine_tune", fine_tune=85.0, fine_tune_std=0.05)
    rows = [Row("tiny", "mae", ["mae"]), *of_three_seeds(("ct_min", "ct"))]

    def of(rows):
        trained = pd.DataFrame({"architecture": ["tiny"], "method": ["ct_min"]})
        return {"fine_tune": build_table("fine_tune", rows, evaluations), "trained": trained}

    seeds = {n: of([row.of_seed(n) for row in rows]) for n in range(3)}
    asked = above("fine_tune.tiny.ct_min.fine_tune", "fine_tune.tiny.mae.fine_tune")
    found = compare(asked, of(rows), seeds=seeds)
    assert found.holds and found.difference == pytest.approx(0.5 / 3, abs=1e-3)
    # It is an error of the difference, as it is without seeds.
    result("mae", "fine_tune", fine_tune=81.0, fine_tune_std=7.0)
    for known in (seeds, {}):
        found = compare(asked, of(rows), seeds=known)
        assert found.difference > 4 and found.std > 7 and found.significant is False


def test_a_size_without_a_row_of_every_model_is_left_out(tables):
    tables = tables | {"other": tables["clustering"].drop(index=[0])}  # without MAE at `tiny`
    sizes = MeasuredModels(tables).sizes
    assert sizes(Model("other", "ct_min"), Model("other", "mae")) == ["small"]
    assert sizes(Model("other", "mae"), Model("clustering", "ct_min")) == ["small"]
    assert sizes(Model("other", "ct_min")) == ["tiny", "small"]
    assert sizes(Model("none", "ct_min")) == ["any"]


def test_corruptions_stand_in_for_the_papers_shifted_sets(pair, result):
    (statement,) = (one for one in STATEMENTS if one.name == "robustness")
    tables = pair("robustness", robustness={"imagenet_c": (30.0, 35.0), "blur": (50.0, 50.0)})
    numbers = judge(tables, [statement])[0].numbers
    assert "tiny.ct_min.imagenet_c > tiny.mae.imagenet_c: +5.00" in numbers
    assert "tiny.ct_min.blur > tiny.mae.blur: +0.00 (fails)" in numbers
    result("ct", "robustness", noise=35.0, imagenet_r=30.0)
    tables = pair("robustness")
    keys = [one.keys[0] for one in statement.bounds(MeasuredModels(tables))]
    asked = [key.metric for key in keys if key.method == "ct_min"]
    assert asked == ["imagenet_v2", "imagenet_r", "imagenet_sketch", "imagenet_a"]
    assert judge(tables, [statement])[0].result == "not measured"


def test_every_statement_holds_for_the_papers_own_numbers_and_can_fail():
    """Turned round, each is false for them: none is true whatever is measured."""
    turned = {">": "<", ">=": "<=", "<": ">", "<=": ">="}
    tables, not_printed = printed_tables(), set()
    assert len(STATEMENTS) >= 25
    for statement in STATEMENTS:
        bounds = statement.bounds(MeasuredModels(tables))
        opposite = claim(*(Bound(one.left, turned[one.sign], one.right) for one in bounds))
        results = [one.result for one in judge(tables, [statement, opposite], "_paper")]
        if results == ["not measured", "not measured"]:
            not_printed.add(statement.name)
        else:
            assert results == ["holds", "fails"], statement.name
    # Only the paper's figures and text say these: nothing printed decides them.
    assert not_printed == {
        "neighbours_are_of_the_class", "layer_grafting_costs_more", "masked_on_one_device",
        "less_compute_than_others", "fused_attention", "overhead", "nnclr_loss_falls_at_once",
        "shortcut_features", "fine_tuning_keeps_shortcuts", "clusters_vary_little",
    }  # fmt: skip


def test_a_verdict_that_hangs_on_standardised_features_says_so(pair):
    """Authors' knn_metrics_logger.py: `for batch_normalize in [True]: # [False, True]`."""
    measured = {"knn": (40.0, 39.0), "knn_standardized": (50.0, 60.0)}
    frame = claims_table(pair("low_shot", knn=measured))
    line = frame.set_index("claim").loc["knn_gain"]
    assert (line.verdict, line.plain_knn, line.paper_verdict) == ("holds", "fails", "holds")
    notes = [note for one in verdicts(frame)["decided"] for note in one["notes"]]
    assert "fails by k-NN on features as they are" in notes
    assert frame.set_index("claim").loc["probe_gain"].plain_knn == ""


def test_the_table_of_claims(tables, tmp_path):
    frame = claims_table(tables)
    lines = frame.set_index("claim")
    assert [*lines.index] == [statement.name for statement in STATEMENTS]
    line = lines.loc["cluster_gain"]
    assert (line.verdict, line.paper_verdict) == ("fails", "holds")
    assert lines.loc["knn_gain"].verdict == "not measured"
    write_table(frame, tmp_path / "claims.csv")
    again = pd.read_csv(tmp_path / "claims.csv", keep_default_na=False)
    assert again.to_dict() == frame.to_dict()
    page = report_page(ReportConfig(name="mine", claims=tmp_path / "claims.csv"))
    assert "&gt;" in page and "39.00 > " not in page  # escaped


def test_a_verdict_of_one_seed_says_so_and_is_counted_apart():
    """`holds: one seed, which cannot tell` said both that it can be told and that it cannot."""
    known = dict.fromkeys(claims_table({}).columns, "") | {"paper_verdict": "holds"}
    both = itertools.product(("fails", "holds"), ("one seed", "yes"))
    shown = verdicts(pd.DataFrame(known | {"verdict": one, "significant": of} for one, of in both))
    assert [(line["verdict"], *line["notes"]) for line in shown["decided"]] == [
        ("holds", "beyond chance"), ("fails", "beyond chance"),
        ("holds in one seed", "others may differ"), ("fails in one seed", "others may differ"),
    ]  # fmt: skip
    assert shown["summary"].endswith(": 1 holds, 1 fails, 1 holds in one seed, 1 fails in one seed")
