import math
from pathlib import Path

import pytest

from maect.core.errors import UserError
from maect.core.files import read_record, write_record
from maect.recipes import load_encoder
from maect.records import RunRecord, line_of
from maect.report.bounds import MeasuredModels, Model
from maect.report.claims import judge
from maect.report.statements import STATEMENTS
from maect.report.tables import (
    Row,
    chain,
    cost_table,
    flops_of_step,
    pretraining_table,
    trained_table,
)
from maect.stages import load_recipe


def record(runs: Path, name: str, stage: str, hours: float, source: str | None = None) -> None:
    value = {"run": name, "stage": stage, "device_hours": hours, "source": source}
    write_record(RunRecord.path(runs / name), value)


@pytest.fixture
def runs(tmp_path):
    record(tmp_path, "mae", "pretrain", 100.0)
    record(tmp_path, "head", "head", 2.0, "mae")
    record(tmp_path, "ct", "tune", 6.0, "head")
    record(tmp_path, "public", "import", 0.0)
    record(tmp_path, "ct_public", "tune", 6.0, "public")
    return tmp_path


def test_all_training_behind_a_model_is_counted(runs):
    methods = {"mae": "mae", "ct_min": "ct", "public": "ct_public", "ct_aug": "not_finished"}
    rows = [Row("base", method, [run]) for method, run in methods.items()]
    rows.append(Row("base", "mae_public", ["public"]))  # imported weights
    costs = cost_table(rows, runs)
    frame = costs.set_index("method")
    assert frame.loc["mae", ["hours", "overhead"]].tolist() == [100.0, 0.0]
    assert frame.loc["ct_min", ["hours", "overhead"]].tolist() == [108.0, 8.0]
    # What public weights cost, no run will tell.
    assert list(frame.index) == ["mae", "ct_min", "ct_aug"]
    assert math.isnan(frame.loc["ct_aug", "hours"])
    record(runs, "unknown", "pretrain", 0.0)  # no job of it was timed
    assert cost_table([Row("base", "mae", ["unknown"])], runs).empty
    hours = trained_table(rows, runs).set_index("method")["hours"]
    assert hours.dropna().to_dict() == {"mae": 100.0, "ct_min": 6.0, "public": 6.0}
    assert list(hours.index) == ["mae", "ct_min", "public", "ct_aug"]
    (overhead,) = (one for one in STATEMENTS if one.name == "overhead")
    (verdict,) = judge({"cost": costs}, [overhead])
    assert verdict.result == "holds"
    assert [one.text.split(".")[0] for one in verdict.comparisons] == ["base"]


def test_a_run_that_is_not_finished_is_still_waited_for(runs):
    rows = [Row("base", "ct_min", ["ct"]), Row("large", "ct_min", ["ct_public", "not_finished"])]
    measured = MeasuredModels({"cost": cost_table(rows, runs)})
    assert measured.sizes(Model("cost", "ct_min")) == ["base", "large"]


def test_operations_of_a_step_are_those_of_its_images():
    mae = load_recipe("mae", "tiny")
    trained = RunRecord(
        run="mae", stage="pretrain", settings=mae.model_dump(), encoder=load_encoder("tiny")
    )
    an_image = mae.flops_per_image(load_encoder("tiny"))
    assert flops_of_step(trained) == an_image * mae.batch_size > an_image > 0
    for other in ({"encoder": None}, {"stage": "import", "settings": {}}):
        with pytest.raises(UserError, match="run mae: trained nothing"):
            flops_of_step(trained.model_copy(update=other))


def test_the_nnclr_loss_of_the_first_tenth(tmp_path):
    rows = []
    for start, loss in (("combined", 4.0), ("detached", 6.0), ("mae", None)):
        record(tmp_path, start, "pretrain", 100.0)
        record(tmp_path, f"{start}_ct_skip", "tune", 6.0, start)
        path = RunRecord.path(tmp_path / start)
        write_record(path, read_record(path) | {"settings": {"epochs": 40}})
        lines = [{"epoch": n / 2, "loss": 1.0} for n in range(1, 81)]
        if loss:  # 7 steps below `loss`, the last of a tenth above it, 72 far above
            more = {4.0: 7.0}
            lines = [
                line | {"loss_nnclr": loss + more.get(line["epoch"], 50 * (line["epoch"] > 4) - 1)}
                for line in lines
            ]
        text = "".join(line_of(n, line, {"device_seconds": 1.0}) for n, line in enumerate(lines, 1))
        (tmp_path / start / "metrics.jsonl").write_text(text)
        rows.append(Row("large", f"{start}_ct_skip", [f"{start}_ct_skip"]))
    frame = pretraining_table(rows, tmp_path).set_index("method")
    assert frame.nnclr_loss.to_dict() == {"combined_ct_skip": 4.0, "detached_ct_skip": 6.0}


def test_seeds(runs):
    record(runs, "mae-s1", "pretrain", 104.0)
    frame = cost_table([Row("base", "mae", ["mae", "mae-s1"])], runs)
    assert frame.loc[0, "hours"] == 102.0
    assert frame.loc[0, "hours_std"] == pytest.approx(math.sqrt(8))
    assert frame.select_dtypes(float).shape == (1, 6)  # also those that the paper does not print


def test_wrong_records_are_named(runs):
    with pytest.raises(UserError, match=r"none/run.json: no such file"):
        chain("none", runs)
    RunRecord.path(runs / "head").write_text("[]")
    with pytest.raises(
        UserError, match=r"head/run.json: damaged \(it has no checksum\); delete it and"
    ):
        chain("ct", runs)
