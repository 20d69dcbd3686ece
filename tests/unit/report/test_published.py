"""Published results: every page is what its CSV files say."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from maect.core.files import write_json
from maect.experiment import load
from maect.report.tables import Row, build_table, read_table, write_table

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs/results"
PUBLISHED = sorted(path.parent.name for path in RESULTS.glob("*/runs.csv"))
SPEC = importlib.util.spec_from_file_location("publish", RESULTS / "publish.py")
assert SPEC is not None and SPEC.loader is not None
publish = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(publish)


@pytest.mark.parametrize("name", PUBLISHED)
def test_pages_are_what_the_tables_say(name: str) -> None:
    made = publish.pages(RESULTS / name)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if headline := made.pop("headline.md", None):
        assert headline in readme
    else:  # its tables are not there yet
        assert f"<!-- {name} -->" not in readme
    for file, text in made.items():
        committed = (RESULTS / name / file).read_text(encoding="utf-8")
        assert text == committed, f"run docs/results/publish.py page {name}"


@pytest.mark.parametrize("name", [path.parent.name for path in RESULTS.glob("*/pilots.yaml")])
def test_pilots_are_an_experiment(name: str) -> None:
    pilots = RESULTS / name / "pilots.yaml"
    listed = pd.read_csv(RESULTS / name / "recipes.csv")["run"]
    assert list(listed) == [run for run, _ in load(str(pilots)).evaluations]


@pytest.fixture
def folder(tmp_path: Path, result, evaluations) -> Path:
    """A complete experiment of one encoder, three seeds of MAE and one of the others."""
    for number, run in enumerate(("mae", "mae-s1", "mae-s2", "ct")):
        result(run, "knn", knn=40.0 + number)
        result(run, "linear_probe", linear_probe=50.0)
        result(run, "low_shot", low_shot_1=20.0, low_shot_2=25.0, low_shot_5=30.0)
        result(run, "clustering", accuracy=25.0, silhouette=1.0)
    rows = [Row("micro", "mae", ("mae", "mae-s1", "mae-s2")), Row("micro", "ct_min", ("ct",))]
    out = tmp_path / "mine"
    (out / "tables").mkdir(parents=True)
    for name in ("low_shot", "clustering"):
        write_table(build_table(name, rows, evaluations), out / f"tables/{name}.csv")
    values = {
        "mae_micro": 40.0,
        "mae_micro-s1": 41.0,
        "ct_min_micro": 43.0,
        "ct_min_micro-s1": 46.0,
    }
    pd.DataFrame(
        {"run": run, "evaluation": "knn", "metric": "knn", "value": value}
        for run, value in values.items()
    ).to_csv(out / "measured.csv", index=False)
    line = {"stage": "x", "seed": 0, "epochs": 4, "epochs_done": 4.0, "device_hours": 1.5}
    line |= {"finished": True, "revision": "", "encoder_sha256": ""}
    runs = [
        {"run": "mae_micro", "from": None, "operations": 2e15, **line},
        {"run": "head_min_micro", "from": "mae_micro", "operations": 1e14, **line},
        {"run": "ct_min_micro", "from": "head_min_micro", "operations": 3e14, **line},
        {"run": "ct_min_micro-s1", "from": "mae_micro", "operations": 3e14, **line},
    ]
    pd.DataFrame(runs).to_csv(out / "runs.csv", index=False)
    claim = {"statement": "It helps.", "verdict": "holds", "numbers": "+2.00 ± 1.00"}
    claim |= {"significant": "yes", "paper_verdict": "holds", "plain_knn": "fails"}
    open_one = dict.fromkeys(claim, "") | {"verdict": "not measured", "statement": "It is large."}
    pd.DataFrame([claim, open_one]).to_csv(out / "claims.csv", index=False)
    write_json(out / "evaluations.json", {"asked": 16, "made": 16})
    (out / "notes.md").write_text("After {mae_micro.epochs} epochs.\n")
    machine = {"cpu": "C", "cores": 2, "device": "none", "torch": "2", "python": "3"}
    write_json(out / "machine.json", machine)
    return out


def test_a_complete_experiment_has_a_headline(folder: Path) -> None:
    made = publish.pages(folder)
    assert "| 50.0 ± 0.0 | 41.0 ± 1.0 | 25.0 ± 0.0 | 2.00 |" in made["headline.md"]
    assert "| MAE-CT min | 20.0 | 25.0 | 30.0 | 50.0 | 43.0 | 25.0 | 2.40 |" in made["headline.md"]
    page = made["README.md"]
    assert made["headline.md"] in page and "Unfinished" not in page
    assert "2 statements: 1 hold, 1 not measured." in page
    notes = "holds; beyond the standard deviation over seeds; fails by k-NN on features as they are"
    assert f"| It helps. | {notes} | +2.00 ± 1.00 |" in page and "It is large" not in page
    assert "**Low-shot and feature evaluations**" in page and "After 4 epochs." in page
    # 43 - 40 and 46 - 41; 4 of 20, and of 24.
    assert "standard deviation of 2 seeds" in page
    no = publish.MISSING
    assert f"| MAE-CT min | +4.0 ± 1.4 | {no} | {no} | {no} | 20 % | 17 % |" in page
    assert "(fine-tuning, at its best epoch on the test split)" in page


def test_an_unfinished_one_says_so_and_decides_nothing(folder: Path) -> None:
    runs = pd.read_csv(folder / "runs.csv")
    runs.loc[2, "finished"] = False
    runs.to_csv(folder / "runs.csv", index=False)
    page = publish.pages(folder)["README.md"]
    missing = "3 of 4 trainings, 16 of 16 evaluations"
    assert f"**Unfinished: {missing}.**" in page and "It helps" not in page
    assert publish.pages(folder)["headline.md"].endswith(f"In progress: {missing} are finished.")
    (folder / "tables/clustering.csv").unlink()
    assert "headline.md" not in publish.pages(folder)


def test_one_without_a_table_is_unfinished(folder: Path) -> None:
    counts = {"asked": 16, "made": 16, "missing": ["robustness.csv"]}
    write_json(folder / "evaluations.json", counts)
    page = publish.pages(folder)["README.md"]
    assert "**Unfinished: 4 of 4 trainings, 16 of 16 evaluations.**" in page
    assert "It helps" not in page


def test_a_table_that_is_older_than_what_it_shows_is_not_taken(tmp_path: Path) -> None:
    table, result, none = (tmp_path / name for name in ("t.csv", "knn.json", "no.json"))
    assert not publish._is_newest(table, [])
    for number, path in enumerate((result, table)):
        path.touch()
        os.utime(path, (number, number))
    assert publish._is_newest(table, [result, none])
    assert not publish._is_newest(result, [table])


@pytest.mark.parametrize("name", [path.parent.name for path in RESULTS.glob("*/measured.csv")])
def test_tables_are_means_of_what_was_measured(name: str) -> None:
    measured = pd.read_csv(RESULTS / name / "measured.csv")
    if not (RESULTS / name / "tables/low_shot.csv").exists():
        return
    for line in read_table(RESULTS / name / "tables/low_shot.csv").to_dict("records"):
        stem = f"{line['method']}_{line['architecture']}"
        for evaluation in ("knn", "linear_probe"):
            seeds = measured["run"].str.fullmatch(rf"{stem}(-s\d+)?")
            one = (measured["evaluation"] == evaluation) & (measured["metric"] == evaluation)
            values = measured.loc[seeds & one, "value"]
            assert line[evaluation] == pytest.approx(values.mean(), abs=0.005, nan_ok=True)
            std = pytest.approx(values.std(), abs=0.005, nan_ok=True)
            assert line[f"{evaluation}_std"] == std


def test_the_readmes_part_is_replaced() -> None:
    before = "# x\n<!-- mine -->\nold\n<!-- /mine -->\nend\n"
    after = publish.with_headline(before, "mine", "new")
    assert after == "# x\n<!-- mine -->\nnew\n<!-- /mine -->\nend\n"
    assert publish.with_headline(after, "other", "new") == after


def test_what_there_is_is_collected(tmp_path: Path) -> None:
    """Of an experiment of which nothing was run, in a checkout of its own."""
    copy = tmp_path / "docs/results"
    shutil.copytree(RESULTS / "cifar10", copy / "cifar10")
    shutil.copy(RESULTS / "publish.py", copy)
    for what in ("collect", "page"):
        command = [sys.executable, str(copy / "publish.py"), what, "cifar10"]
        subprocess.run(command, check=True, cwd=tmp_path)
    runs = pd.read_csv(copy / "cifar10/runs.csv")
    assert list(runs["run"]) == list(load("cifar10").runs) and not runs["finished"].any()
    missing = f"0 of {len(runs)} trainings, 0 of {len(load('cifar10').evaluations)} evaluations"
    assert f"**Unfinished: {missing}.**" in (copy / "cifar10/README.md").read_text()
