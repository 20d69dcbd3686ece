"""`starting_from: public`: import public weights where there are any, leave the rest out."""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from maect.core.errors import UserError
from maect.core.files import write_record
from maect.experiment import load
from maect.report.claims import claims_table
from maect.report.tables import build_table

ROOT = Path(__file__).parents[2]
PUBLIC = {"weights": "/none/{size}.pth", "layout": "mae"}
EXPERIMENT: dict[str, Any] = {
    "datasets": {"mine": {"splits": {s: {"images": f"/none/{s}"} for s in ("train", "val")}}},
    "runs": {
        "mae_{size}": {"recipe": "mae", "size": "{size}", "public": PUBLIC,
                       "each": {"size": ["base"]}},
        "mae_huge": {"recipe": "mae", "size": "huge"},
        "ct_{size}": {"recipe": "ct_min", "size": "{size}", "from": "mae_{size}",
                      "each": {"size": ["base", "huge"]}},
        "ibot_base": {"weights": "/none/ibot.pth", "layout": "ibot", "size": "base"},
    },
    "evaluate": [{"runs": ["*"], "protocols": ["knn"]}],
    "tables": {"low_shot": None, "huge14": ["*_huge"]},
    "figures": ["pipeline"],
}  # fmt: skip


def write(folder: Path, **changes: Any) -> str:
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump(EXPERIMENT | changes, sort_keys=False))
    return str(file)


def test_from_scratch_everything_is_trained(tmp_path):
    scratch = load(write(tmp_path))
    assert [run.stage for run in scratch.runs.values()] == [
        "pretrain", "pretrain", "tune", "tune", "import",
    ]  # fmt: skip
    assert scratch.tables == ["low_shot", "huge14"]


def test_public_weights_take_the_place_of_pretraining(tmp_path):
    public = load(write(tmp_path), starting_from="public")
    assert {name: run.stage for name, run in public.runs.items()} == {
        "mae_base": "import",
        "ct_base": "tune",
        "ibot_base": "import",
    }
    assert str(public.runs["mae_base"].weights) == "/none/base.pth"
    assert public.runs["ct_base"].settings == load(write(tmp_path)).runs["ct_base"].settings
    assert public.evaluated == ("mae_base", "ct_base", "ibot_base")
    assert public.tables == ["low_shot"] and public.figures == ["pipeline"]
    assert [row.method for row in public.rows("low_shot")] == ["mae", "ct", "ibot"]
    # In another folder: 10,000 GPU hours must not be overwritten by a download.
    assert public.root == Path("results/mine-public") != load(write(tmp_path)).root


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


def snakemake(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile")]
    command += ["--directory", str(folder), "--cores", "1", *words]
    config = ["--config", f"experiment={folder / 'mine.yaml'}", "starting_from=public"]
    return subprocess.run([*command, *config], capture_output=True, text=True, check=False)


def test_what_is_missing_is_a_warning_in_a_dry_run_and_an_error_in_a_real_one(tmp_path):
    write(tmp_path)
    target = "results/mine-public/runs/ct_base/done"
    dry = snakemake(tmp_path, "-n", target)
    assert dry.returncode == 0, dry.stderr
    warnings = [line for line in dry.stderr.splitlines() if line.startswith("maect: warning")]
    assert sorted(word for line in warnings for word in line.split() if "/none" in word) == [
        "/none/base.pth;",
        "/none/train",
    ]  # not of val, and not iBOT's: this target does not need them
    for run, said in (("ct_base", "no images at /none/train"), ("mae_base", "no weights at /none")):
        real = snakemake(tmp_path, f"results/mine-public/runs/{run}/done")
        assert real.returncode != 0
        (line,) = [line for line in real.stderr.splitlines() if line.startswith("maect")]
        assert said in line
    assert not (tmp_path / "results/mine-public/shards").exists()
