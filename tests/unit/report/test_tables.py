import itertools
import json
import math

import pandas as pd
import pytest

from maect.core.errors import UserError
from maect.core.files import read_record, sealed, write_json, write_record
from maect.core.stamps import stamped
from maect.evaluate import EvaluationConfig, load_evaluation
from maect.records import RunRecord
from maect.report.registry import METHODS, TABLES
from maect.report.render import printed, render
from maect.report.tables import (
    UNKNOWN,
    Row,
    build_table,
    labels_behind,
    paper_table,
    printed_tables,
    read_table,
    write_table,
)


def test_a_table_in_the_papers_layout(result, evaluations):
    result("ct_min_large", "knn", knn=77.5, knn_standardized=78.1)
    result("ct_min_large", "low_shot", low_shot_1=50.0, low_shot_2=60.0, low_shot_5=66.0)
    frame = build_table("low_shot", [Row("large", "ct_min", ["ct_min_large"])], evaluations)
    names = ["architecture", "method", "low_shot_1", "low_shot_1_std", "low_shot_1_paper"]
    assert list(frame.columns[:5]) == names
    line = frame.iloc[0]
    assert (line.knn, line.knn_paper) == (77.5, 78.0)
    assert (line.knn_standardized, line.knn_standardized_paper) == (78.1, 78.0)
    assert line.low_shot_1 == 50.0 and line.low_shot_1_paper == 51.8
    assert math.isnan(line.low_shot_1_std)  # one seed
    assert math.isnan(line.linear_probe) and line.linear_probe_paper == 80.2  # not run


LARGE = [Row("large", "ct_min", ["ct_min_large"])]


def test_results_of_an_encoder_that_is_gone_are_left_out(result, evaluations):
    """Trained again with other settings, and only some evaluations asked for since."""
    for name, encoder in (("knn", "new"), ("linear_probe", "old")):
        path = result("ct_min_large", name, **{name: 70.0})
        write_record(path, read_record(path) | {"provenance": {"encoder_sha256": encoder}})
    line = build_table("extended", LARGE, evaluations).iloc[0]
    assert (line.knn, line.linear_probe) == (70.0, 70.0)  # nobody knows the encoder
    record = RunRecord(run="ct_min_large", stage="tune", sha256={"encoder.safetensors": "new"})
    record.write(RunRecord.path(evaluations.parent / "runs/ct_min_large"))
    line = build_table("extended", LARGE, evaluations).iloc[0]
    assert line.knn == 70.0 and math.isnan(line.linear_probe)


def test_results_of_images_that_were_sharded_again_are_left_out(result, evaluations):
    """Its evaluation is not asked for again, and others are made of the new images."""
    shards, run = (evaluations.parent / name for name in ("shards/mine/val", "runs/ct_min_large"))
    path = result("ct_min_large", "linear_probe", linear_probe=70.0).with_suffix(".yaml")
    told = {"evaluation": "linear_probe", "protocol": "linear_probe", "run": run}
    told["settings"] = load_evaluation("linear_probe", "large")[1]
    config = EvaluationConfig(**told, inputs={"train": shards, "test": shards})
    config.write(path)
    write_json(shards / "index.json", {"digest": "before"})
    with stamped(path, config):
        pass
    assert build_table("extended", LARGE, evaluations).iloc[0].linear_probe == 70.0
    write_json(shards / "index.json", {"digest": "after"})
    assert math.isnan(build_table("extended", LARGE, evaluations).iloc[0].linear_probe)


def test_deviation_over_seeds_is_the_samples(result, evaluations):
    for seed, value in enumerate((70.0, 71.0, 73.0)):
        result(f"r{seed}", "clustering", accuracy=value, silhouette=-1.0)
    row = Row("tiny", "ct_min", ["r0", "r1", "r2"])
    line = build_table("clustering", [row], evaluations).iloc[0]
    assert line.accuracy == pytest.approx(214 / 3, abs=1e-4)
    assert line.accuracy_std == pytest.approx(math.sqrt(7 / 3), abs=1e-4)  # ddof = 1
    assert line.silhouette_std == 0.0
    assert math.isnan(line.accuracy_paper)  # the paper has no ViT-Tiny


@pytest.mark.parametrize(
    "other",
    [
        {"settings": {"runs": 3, "resize": 16}},
        {"settings": {"resize": 20}},
        {"provenance": {"protocol": "clustering", "splits": {"test": {"index_digest": "b"}}}},
    ],
    ids=["settings", "resize", "images"],
)
def test_results_of_other_settings_or_images_are_not_averaged(result, evaluations, other):
    """A row's seeds of which one was evaluated again; what is not said is no difference."""
    provenance = {"protocol": "clustering", "splits": {"test": {"index_digest": "a"}}}
    said = {"settings": {"resize": 16}, "provenance": provenance}
    paths = [result(run, "clustering", accuracy=70.0) for run in ("r0", "r1")]
    write_record(paths[0], read_record(paths[0]) | said)

    def table(runs: tuple[str, ...], **told: object):
        write_record(paths[1], read_record(paths[1]) | said | told)
        return build_table("clustering", [Row("tiny", "ct_min", runs)], evaluations)

    table(("r0", "r1"), settings={}, provenance={})
    table(("r0", "r1"), settings={"seed": 0})
    with pytest.raises(UserError, match=r"r1/clustering\.json: made with other settings or images"):
        table(("r0", "r1"), **other)
    assert table(("r1",), **other).iloc[0].accuracy == 70.0


def test_what_was_not_run_is_an_empty_cell(evaluations, tmp_path):
    """Whatever a method is called."""
    path = tmp_path / "clustering.csv"
    rows = [Row("tiny", method, []) for method in ("50", "0.50", "None", "NA")]
    for some in (rows, rows[:2]):
        frame = build_table("clustering", some, evaluations)
        write_table(frame, path)
        assert path.read_text().splitlines()[1] == "tiny,50,,,,,,"
        read = read_table(path)
        pd.testing.assert_frame_equal(read, frame, check_dtype=False)
        assert read["method"].tolist() == [row.method for row in some]
        assert read.iloc[:, 2:].isna().all(axis=None)
    assert [line.method for line in printed(read, "clustering").lines] == ["50", "0.50"]


def test_how_a_model_was_trained_is_told_by_its_runs(evaluations, tmp_path):
    runs = tmp_path / "runs"
    for run, stage, source, recipe in (
        ("mae", "pretrain", None, {"epochs": 800, "views": 2, "mask_ratio": 0.75}),
        ("head", "head", "mae", {"epochs": 20, "views": 2, "mask_ratio": 0.0}),
        ("ct", "tune", "head", {"epochs": 25, "views": 2, "mask_ratio": 0.0}),
        ("public", "import", None, {"layout": "mae"}),
        ("ct_public", "tune", "public", {"epochs": 20, "views": 2, "mask_ratio": 0.0}),
    ):
        record = RunRecord(run=run, stage=stage, source=source, settings=recipe)
        record.write(RunRecord.path(runs / run))
    behind = {"ct_min": "ct", "mae_public": "public", "ct_public": "ct_public", "ibot": "none"}
    rows = [Row("large", method, [run]) for method, run in behind.items()]
    frame = build_table("extended", rows, evaluations, runs=runs)
    write_table(frame, tmp_path / "extended.csv")
    read = read_table(tmp_path / "extended.csv").fillna("")
    read = read[read.architecture == "large"].set_index("method").loc[[*behind]]
    names = ["epochs", "views", "mask_ratio"]
    unknown = [f"{UNKNOWN}; {value}" for value in (20, 2, 0)]
    own = [["800; 25", "2", "0.75; 0"], [""] * 3, unknown, [""] * 3]
    assert read[names].to_numpy().tolist() == own
    paper = read[[f"{name}_paper" for name in names]].to_numpy().tolist()
    assert paper[0] == ["800; 20", "2", "0.75; 0"] and paper[1] == ["1600", "1", "0.75"]
    assert paper[3] == ["250", "2 / 10 / 2", "≈ 0.15†"]
    text = printed(frame, "extended")
    assert text.columns[:3] == ["Epochs", "GV/LV/T", "Mask ratio"]
    cells = [str(cell) for cell in text.lines[0].cells[:3]]
    assert cells == ["800; 25 (800; 20)", "2 (2)", "0.75; 0 (0.75; 0)"]
    assert r"$\approx$ 0.15$\dagger$" in render(text, "tex")
    # Nothing is known of models that are not compared: no empty columns.
    alone = build_table("extended", rows[3:], evaluations, paper=False)
    assert printed(alone, "extended").columns == []


def test_seeds_and_sets_of_labels_can_be_read_alone(result, evaluations):
    """A cell of one seed or one set, where that has a number; two seeds have a deviation."""
    for run, first in (("r", 10.0), ("r-s1", 20.0)):
        result(run, "low_shot", low_shot_1=first + 1, low_shot_1_splits=[first, first + 2])
    result("r-s1", "knn", knn=50.0)
    rows = [Row("tiny", "ct_min", ["r", "r-s1"])]

    def cells(column, **of):
        line = build_table("low_shot", rows, evaluations, **of).iloc[0]
        return [None if math.isnan(line[c]) else line[c] for c in (column, f"{column}_std")]

    assert cells("low_shot_1") == [16.0, pytest.approx(math.sqrt(50), abs=1e-4)]
    assert cells("low_shot_1", seed=0) == [11.0, None] and cells("low_shot_1", seed=1)[0] == 21.0
    assert cells("low_shot_1", part=0) == [15.0, None] and cells("low_shot_1", part=1)[0] == 17.0
    assert cells("low_shot_1", part=2) == [None, None] == cells("knn", part=0)
    assert cells("knn") == [50.0, None] == cells("knn", seed=1) and cells("knn", seed=0)[0] is None


def test_one_result_may_have_a_deviation_or_numbers_of_many_models(result, evaluations):
    result("mae", "fine_tune", fine_tune=83.0, fine_tune_std=1 / 3)
    line = build_table("fine_tune", [Row("base", "mae", ["mae"])], evaluations).iloc[0]
    assert (line.fine_tune, line.fine_tune_std) == (83.0, 0.3333)
    result("mae", "throughput", model_hours={"large": {"mae": 5.0, "ct_min": 6.0}, "base": {}})
    rows = [Row("large", "mae", ["mae"]), Row("large", "ct_min", []), Row("base", "mae", [])]
    frame = build_table("gpu_hours", rows, evaluations)
    assert frame.hours.tolist()[:2] == [5.0, 6.0] and math.isnan(frame.hours[2])
    assert frame.hours_std.isna().all()


def test_how_many_labels_are_behind_a_metric(result):
    path = result("mae", "low_shot", low_shot_1=50.0)
    assert labels_behind(path, "low_shot_1") is None
    subsets = {"low_shot_1-1": {"images": 10}, "low_shot_1-2": {"images": 13}}
    subsets |= {"low_shot_10": {"images": 100}, "knn": None}
    write_record(path, read_record(path) | {"provenance": {"subsets": subsets}})
    found = [labels_behind(path, name) for name in ("low_shot_1", "low_shot_10", "knn", "low_shot")]
    assert found == [11.5, 100, None, None]


def test_how_much_clusters_vary(result, evaluations):
    values = {"accuracy_mean": 58.0, "accuracy_std": 0.35, "dogs15_accuracy_std": 2.5}
    result("mae", "clustering", **values, even_accuracy_mean=70.0, even_accuracy_std=3.0)
    rows = [Row("tiny", "mae", ["mae"])]
    best, mean, dogs = (
        build_table(name, rows, evaluations)
        for name in ("clustering_best", "clustering_mean", "dogs15_mean")
    )
    assert "deviation" not in best
    assert (mean.deviation[0], dogs.deviation[0]) == (0.35, 2.5)
    assert (dogs.even_accuracy_mean[0], dogs.even_accuracy_std[0]) == (70.0, 3.0)
    columns = printed(dogs, "dogs15_mean").columns
    assert columns == ["ACC deviation", "ACC, even", "ACC deviation, even"]


def test_the_extended_comparison_has_models_without_a_run(evaluations):
    rows = [Row("tiny", "mae", []), Row("base", "dino", [])]
    table = build_table("extended", rows, evaluations)
    assert list(table["method"][:2]) == ["mae", "dino"]
    assert len(table) == 1 + len(paper_table("extended"))
    printed = table.set_index(["architecture", "method"])
    assert printed.at[("base", "nnclr"), "linear_probe_paper"] == 76.5
    assert math.isnan(printed.at[("base", "nnclr"), "linear_probe"])
    own = build_table("extended", rows[:1], evaluations)
    assert len(own) == 1  # nothing of the paper's is compared


def test_other_images_are_not_compared_with_the_paper(result, evaluations):
    result("mae_base", "knn", knn=33.0)
    rows = [Row("base", "mae", ["mae_base"])]
    compared = build_table("extended", rows, evaluations)
    own = build_table("extended", rows, evaluations, paper=False)
    assert list(own.columns) == list(compared.columns)
    assert compared.loc[0, "knn_paper"] == 51.1 and len(compared) > 1
    assert own.filter(like="_paper").isna().all(axis=None) and list(own["knn"]) == [33.0]


def test_rows_may_have_a_protocol_of_their_own(result, evaluations):
    result("mae_large", "fine_tune", fine_tune=85.4)
    result("mae_large", "fine_tune_randaugment", fine_tune=85.5)
    result("mae_large", "fine_tune_mixup", fine_tune=84.4)
    rows = [Row("large", name, ["mae_large"]) for name in ("mixup", "randaugment")]
    frame = build_table("oracle", rows, evaluations).set_index("method")
    assert frame.fine_tune.to_dict() == {"mixup": 84.4, "randaugment": 85.5}
    # The full recipe is `fine_tune` itself, where it was not trained again.
    (evaluations / "mae_large/fine_tune_randaugment.json").unlink()
    frame = build_table("oracle", rows, evaluations).set_index("method")
    assert frame.fine_tune["randaugment"] == 85.4


def test_seeds_are_averaged_within_one_protocol(result, evaluations):
    result("ct", "fine_tune_10pct", low_shot_10pct=60.0)
    for run, value in (("ct", 40.0), ("ct-s1", 41.0), ("ct-s2", 42.0)):
        result(run, "low_shot_pct", low_shot_10pct=value, low_shot_1pct=value - 20)
    rows = [Row("tiny", "ct_min", ["ct", "ct-s1", "ct-s2"])]
    (line,) = build_table("low_shot", rows, evaluations).to_dict("records")
    assert line["low_shot_10pct"] == 60.0 and math.isnan(line["low_shot_10pct_std"])
    assert (line["low_shot_1pct"], line["low_shot_1pct_std"]) == (21.0, 1.0)


def test_numbers_of_the_public_mae_stand_beside_the_public_mae(result, evaluations):
    """Table 6: MAE L/16 public 75.8 and 60.6, reimplemented 75.9 and 57.6; table 1: 76.0 and 60.6.

    The authors' PROBING.md gives their own ViT-B 66.7; table 1 prints 68.0, which is the public's.
    """
    models = itertools.product(("base", "large"), ("mae", "mae_public"))
    rows = [Row(size, method, [f"{method}_{size}"]) for size, method in models]
    result("mae_large", "knn", knn=44.0, knn_standardized=57.6)
    result("mae_public_large", "knn", knn=45.0, knn_standardized=60.6)
    result("mae_public_large", "linear_probe", linear_probe=76.0)
    names = ["linear_probe_paper", "knn_standardized_paper"]
    frames = {}
    for table in ("combined", "low_shot"):
        frame = build_table(table, rows, evaluations).set_index(["architecture", "method"])
        public = frame.loc[("large", "mae_public")]
        assert public[names].tolist() == [76.0, 60.6]
        assert (public.linear_probe, public.knn_standardized) == (76.0, 60.6)
        assert frame.loc[("large", "mae"), names].isna().all()
        frames[table] = frame
    low_shot = frames["low_shot"]
    assert low_shot.loc[("base", "mae_public"), "linear_probe_paper"] == 68.0
    assert low_shot.loc[("base", "mae"), "knn_standardized_paper"] == 51.1
    assert low_shot.loc[("large", "mae"), "low_shot_1_paper"] == 14.3
    as_printed = printed_tables()["low_shot"].set_index(["architecture", "method"])
    assert as_printed.loc[("large", "mae"), names].tolist() == [76.0, 60.6]


def test_other_methods_by_their_best_k_and_form(result, evaluations):
    """tex 756: "For public checkpoints that do not report k-NN accuracies in their original
    publication, we report the best accuracy over different k"."""
    for run in ("ibot_large", "ct_aug_large"):
        result(
            run, "knn", knn=70.0, knn_best_k=71.0, knn_standardized=72.0,
            knn_standardized_best_k=73.0,
        )  # fmt: skip
    result("ibot_large", "linear_probe_forms", linear_probe=81.0, concat_1=80.0)
    result("msn_large", "knn", knn=76.0, knn_standardized=76.1)  # of an older version
    rows = [Row("large", name, [f"{name}_large"]) for name in ("ibot", "msn", "ct_aug")]
    frame = build_table("low_shot", rows, evaluations).set_index("method")
    assert frame.knn.to_dict() == {"ibot": 71.0, "msn": 76.0, "ct_aug": 70.0}
    assert frame.knn_standardized.to_dict() == {"ibot": 73.0, "msn": 76.1, "ct_aug": 72.0}
    assert frame.linear_probe["ibot"] == 81.0


@pytest.mark.parametrize("name", printed_tables())
def test_the_papers_numbers_fit_the_layout(name):
    table = paper_table(name)
    assert table.index.is_unique
    columns = {metric.paper or metric.name for metric in TABLES[name].metrics}
    extra = {"fine_tune_std", "epochs", "views", "mask_ratio"}
    assert set(table.columns) - extra <= columns
    assert name == "sensitivity" or set(table.index.get_level_values("method")) <= set(METHODS)


def test_wrong_input_is_named(result, evaluations):
    with pytest.raises(UserError, match="unknown table 'lowshot'; did you mean 'low_shot'"):
        build_table("lowshot", [], evaluations)
    path, row = result("r", "clustering", accuracy=1.0), Row("tiny", "mae", ["r"])
    with pytest.raises(UserError, match="tiny mae is there twice"):
        build_table("clustering", [row, row], evaluations)
    for text, fault in (
        (json.dumps(sealed({"metrics": {"accuracy": math.nan}})), r"json: metric accuracy is nan"),
        (json.dumps(sealed({"metrics": {"accuracy": "high"}})), "'high', not a finite number"),
        (json.dumps(sealed({"accuracy": 1.0})), "metrics: Field required; remove the file, and"),
        ("{", "not valid JSON"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=fault):
            build_table("clustering", [row], evaluations)
    path.write_text("a,b\n1,2\n")
    for table, fault in ((path, "not a table"), (evaluations / "none.csv", "no such table")):
        with pytest.raises(UserError, match=fault):
            read_table(table)


def test_stand_ins_are_columns_under_their_own_names(result, evaluations, tmp_path):
    result("a", "robustness", imagenet_r=30.0, samples=500, **{"imagenet_c-1.5": 40.0})
    clusters = {"accuracy": 50.0, "nmi": 60.0, "accuracy_mean": 45.0, "silhouette": 1.0}
    result("a", "clustering", accuracy=9.0, **{f"dogs15_7-bent_{m}": clusters[m] for m in clusters})
    rows = [Row("tiny", "mae", ["a"]), Row("tiny", "ct_min", ["not_run"])]
    shifted = build_table("robustness", rows, evaluations)
    assert shifted.loc[0, ["imagenet_r", "imagenet_c-1.5"]].tolist() == [30.0, 40.0]
    assert "samples" not in shifted  # a count, not an accuracy
    assert "| ViT-Tiny/4 | MAE | 30.0 | 40.0 |" in render(printed(shifted, "robustness"), "md")
    best = build_table("dogs15_best", rows, evaluations)
    write_table(best, tmp_path / "best.csv")
    text = render(printed(read_table(tmp_path / "best.csv"), "dogs15_best"), "md")
    assert "Clustering of some of the classes, the run with the lowest inertia" in text
    assert "| Architecture | Method | ACC, dogs15 7-bent | NMI, dogs15 7-bent |" in text
    mean = build_table("dogs15_mean", rows, evaluations)
    assert mean.loc[0, "dogs15_7-bent_accuracy_mean"] == 45.0
    assert "dogs15_7-bent_nmi_mean" not in mean
