"""`starting_from: public`: import public weights where there are any, leave the rest out."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml

from maect.core.errors import UserError
from maect.core.files import write_record
from maect.experiment import load
from maect.report.claims import claims_table
from maect.report.tables import build_table

EXPERIMENT: dict[str, Any] = yaml.safe_load("""
datasets: {mine: {splits: {train: {images: /none/train}, val: {images: /none/val}}}}
runs:
  "mae_{size}": {recipe: mae, size: "{size}", each: {size: [base]},
                 public: {weights: "/none/{size}.pth", layout: mae}}
  mae_huge: {recipe: mae, size: huge}
  "ct_{size}": {recipe: ct_min, size: "{size}", from: "mae_{size}", each: {size: [base, huge]}}
  ibot_base: {weights: /none/ibot.pth, layout: ibot, size: base}
evaluate: [{runs: ["*"], protocols: [knn]}]
tables: {low_shot: null, huge14: ["*_huge"]}
figures: [pipeline]
""")


def write(folder: Path, **changes: Any) -> str:
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump(EXPERIMENT | changes, sort_keys=False))
    return str(file)


def test_public_weights_take_the_place_of_pretraining(tmp_path):
    scratch, public = load(write(tmp_path)), load(write(tmp_path), starting_from="public")
    stages = [run.stage for run in scratch.runs.values()]
    assert stages == ["pretrain", "pretrain", "tune", "tune", "import"]
    assert scratch.tables == ["low_shot", "huge14"]
    stages = {name: run.stage for name, run in public.runs.items()}
    assert stages == {"mae_base": "import", "ct_base": "tune", "ibot_base": "import"}
    assert str(public.runs["mae_base"].weights) == "/none/base.pth"
    assert public.runs["ct_base"].settings == scratch.runs["ct_base"].settings
    assert public.evaluated == ("mae_base", "ct_base", "ibot_base")
    assert public.tables == ["low_shot"] and public.figures == ["pipeline"]
    assert [row.method for row in public.rows("low_shot")] == ["mae", "ct", "ibot"]
    # In another folder: 10,000 GPU hours must not be overwritten by a download.
    assert public.root == Path("results/mine-public") != scratch.root


def test_gpu_hours_are_drawn_of_what_was_trained_here(tmp_path):
    asked = [{"runs": ["*"], "protocols": ["linear_probe"]}]
    file = write(tmp_path, evaluate=asked, figures=["gpu_hours", "pipeline"])
    scratch = load(file)
    assert [row.method for row in scratch.rows("gpu_hours")] == ["mae", "mae", "ct", "ct"]
    public = load(file, starting_from="public")
    assert public.figures == ["pipeline"]  # with no line left, it could only fail
    # With a benchmark of training steps the cost of imported weights is known as well.
    timed = [*asked, {"runs": ["mae_base"], "protocols": ["throughput"]}]
    file = write(tmp_path, evaluate=timed, figures=["gpu_hours", "pipeline"])
    public = load(file, starting_from="public")
    assert [row.method for row in public.rows("gpu_hours")] == ["mae", "ct", "ibot"]


def test_weights_are_not_compared_with_themselves(tmp_path):
    """Table 6 holds our own MAE against the public one: with one of them it decides nothing."""
    paper = load("paper", starting_from="public")
    rows = paper.rows("reimplementation")
    assert [row.method for row in rows] == ["mae_public", "ct_min_k1_public"]
    lines = {(row.architecture, row.method) for row in paper.rows("extended")}
    assert ("base", "mae_public") in lines and ("base", "mae") not in lines
    assert ("base", "ct_min") in lines
    assert "ct_min_k1" in {row.method for row in paper.rows("ablation")}
    assert "gpu_hours" in paper.figures
    scratch = [row.method for row in load("paper").rows("reimplementation")]
    assert scratch == ["mae_public", "mae", "ct_min_k1_public", "ct_min_k1"]
    for run, name in itertools.product(paper.runs, ("linear_probe", "knn")):
        (tmp_path / run).mkdir(exist_ok=True)
        write_record(tmp_path / run / f"{name}.json", {"metrics": {name: 75.0}})
    tables = {"reimplementation": build_table("reimplementation", rows, tmp_path)}
    line = claims_table(tables).set_index("claim").loc["reimplementation"]
    assert line.verdict == "not measured"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"starting_from": "pubic"}, "starting_from"),
        ({"tables": {"huge14": ["*_hug"]}}, "no evaluated run is named"),  # which is left out
        ({"runs": {"mae_base": {"recipe": "mae", "size": "base"}}, "tables": []},
         "no run names `public` weights to import"),
    ],
)  # fmt: skip
def test_mistakes_are_named(tmp_path, changes, words):
    assert len(load(write(tmp_path, starting_from="public")).runs) == 3
    with pytest.raises(UserError, match=words):
        load(write(tmp_path, **{"starting_from": "public"} | changes))
