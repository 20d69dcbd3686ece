"""Published results: every page is what its CSV files say."""

import functools
import importlib
import math
import os
import re
import runpy
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from maect.core.files import read_json, read_record, write_json, write_record
from maect.core.stamps import stamp_path, stamped
from maect.evaluate import EvaluationConfig
from maect.experiment import load
from maect.experiment.resolve import evaluation_config, run_config
from maect.records import RunRecord, line_of
from maect.report.render import MISSING
from maect.report.tables import Row, build_table, write_table
from maect.stages.run import RunConfig

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs/results"
ENCODER = "encoder.safetensors"
sys.path.insert(0, str(RESULTS))  # it imports what lies beside it
publish = importlib.import_module("publish")
pages = importlib.import_module("pages")
GAINS = pages.GAINS
MADE_TABLES = publish._tables
cifar10 = functools.cache(functools.partial(load, "cifar10"))
SOURCES = sorted(publish.SOURCES.glob("*.md"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_pages_are_what_the_tables_say(source):
    text = publish.page(source)
    committed = (RESULTS / source.name).read_text(encoding="utf-8")
    assert text == committed, "run docs/results/publish.py pages"
    assert "{" not in text and "<!--" not in text


def test_the_readmes_table_is_what_the_numbers_say():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    made = publish.headline(RESULTS / "digits")
    assert f"<!-- digits -->\n{made}\n<!-- /digits -->" in text


def readme() -> str:
    """The project's README, with a space for each break."""
    return " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def test_the_readme_says_what_cifar10_measured():
    values = pages._measured(RESULTS / "cifar10")
    runs = pd.read_csv(RESULTS / "cifar10/runs.csv", keep_default_na=False)

    def knn(stem: str) -> str:
        found = [values[one, "knn", "knn"] for one in pages._seeds(stem, runs)]
        return f"{statistics.fmean(found):.1f}"

    mae, colours, crops = map(knn, ("mae_micro", "ct_aug_micro", "ct_min_micro"))
    said = f"rose from {mae} to {colours} % with changed colours, and to {crops} % with"
    assert said in readme()


def test_readme_says_what_neighbours_cost():
    """The sentence is about photographs and the clean control, where only the lookup differs."""
    frame = pd.read_csv(RESULTS / "no_lookup/differences.csv")
    rows = frame[(frame["data"] == "CIFAR-10") & (frame["comparison"] == "neighbours")]
    found = rows.set_index(["views", "metric"])["value"]
    cost = [f"{-found[views, 'knn']:.1f}" for views in ("colours", "crops")]
    said = f"{cost[0]} points of k-NN with colours and {cost[1]} without"
    assert f"cost an encoder of 0.2 million parameters {said}" in readme()
    assert rows[rows["metric"] == "nmi_mean"]["value"].abs().max() < 0.5


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
    names = ["mae_micro", "mae_micro-s1", "ct_min_micro", "ct_min_micro-s1"]
    knn = {"run": names, "evaluation": "knn", "metric": "knn", "value": [40.0, 41.0, 43.0, 46.0]}
    runs = {
        "run": ["mae_micro", "head_min_micro", "ct_min_micro", "ct_min_micro-s1"],
        "from": [None, "mae_micro", "head_min_micro", "mae_micro"],
        "operations": [2e15, 1e14, 3e14, 3e14],
        "stage": "x", "seed": 0, "epochs": 4, "epochs_done": 4.0, "device_hours": 1.5,
        "finished": True, "revision": "", "encoder_sha256": "", "machine": "2 cores of C",
    }  # fmt: skip
    claims = {
        "statement": ["It helps.", "It is large."], "verdict": ["holds", "not measured"],
        "numbers": ["+2.00 ± 1.00", ""], "significant": ["yes", ""],
        "paper_verdict": ["holds", ""], "plain_knn": ["fails", ""],
        "expression": ["low_shot.*.ct_min.knn > low_shot.*.mae.knn", ""],
    }  # fmt: skip
    curves = {"run": "mae_micro", "step": [1, 2], "online_knn": [40.25, 41.5]}
    for name, values in {"measured": knn, "runs": runs, "claims": claims, "curves": curves}.items():
        pd.DataFrame(values).to_csv(out / f"{name}.csv", index=False)
    write_json(out / "evaluations.json", {"asked": 16, "made": 16})
    (out / "after_tests.csv").write_text("methods,what\nct_min.*,its length\n")
    return out


def test_an_experiment_has_a_headline(folder):
    """One that is not complete says so."""
    made = publish.headline(folder)
    assert "| 50.0 ± 0.0 | 41.0 ± 1.0 | 25.0 ± 0.0 | 2.00 | 1 |" in made
    assert "| MAE-CT min† | 20.0 | 25.0 | 30.0 | 50.0 | 43.0 | 25.0 | 2.40 | 2 |" in made
    assert "In progress" not in made
    runs = pd.read_csv(folder / "runs.csv")
    runs.loc[2, "finished"] = False
    runs.to_csv(folder / "runs.csv", index=False)
    missing = "In progress: 3 of 4 trainings, 16 of 16 evaluations are finished."
    assert publish.headline(folder).endswith(missing)
    assert "| [mine](mine/runs.csv) | 3 of 4 | 16 of 16 |" in pages.experiments_table(folder.parent)


def test_numbers_of_a_text_are_those_of_the_files(folder):
    text = (
        "After {mae_micro.epochs} epochs k-NN {ct_min_micro/knn/knn}, of both "
        "{mean ct_min_micro/knn/knn} ({seeds ct_min_micro/knn/knn}), {gain ct_min_micro/knn/knn}; "
        "{spread ct_min_micro/knn/knn}; {gained ct_min_micro/knn/knn}; "
        "online {mae_micro:online_knn}; {gain ct_min_micro/umap/x}; "
        "{claims holds} of {claims not measured}"
    )
    assert pages._filled(text, folder) == (
        "After 4 epochs k-NN 43.0, of both 44.5 (43.0, 46.0), +4.0; 44.5 ± 2.1; "
        f"+4.0 ± 1.4, undecided; online 41.5; {MISSING}; 1 of 1"
    )


def test_the_table_of_gains_has_the_papers_numbers_beside(folder):
    page, no = pages._filled("{gains}", folder), MISSING
    # Of the paper's own MAE (table 17), not the 68.0 of table 1, from which nothing was tuned.
    assert f"| linear probe | {no} | {no} | {no} | 66.7, +6.8, +10.2 |" in page
    # 43 - 40 and 46 - 41; 4 of 20.
    assert f"| k-NN | 40.0 | +4.0 ± 1.4, undecided | {no} | 51.1, +13.0, +22.3 |" in page
    assert f"| operations after MAE, of MAE's | | 20 % | {no} | |" in page
    assert page.startswith("| | MAE | + crops and flips† | + colours | paper")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What was published of CIFAR-10, in a checkout whose results folder is empty."""
    copy = tmp_path / "docs/results/cifar10"
    shutil.copytree(RESULTS / "cifar10", copy)
    monkeypatch.setattr(publish, "HERE", copy.parent)
    monkeypatch.setattr(publish, "ROOT", tmp_path)
    monkeypatch.setattr(publish, "OF_NUMBERS", ())  # drawing takes longest, then the claims
    monkeypatch.setattr(publish, "_tables", lambda *_: [])
    monkeypatch.chdir(tmp_path)
    cifar10.cache_clear()
    shutil.copy(ROOT / "README.md", tmp_path)
    return copy


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file but figures, which fonts change."""
    files = (path for path in folder.rglob("*.*") if path.suffix != ".png")
    return {path.relative_to(folder): path.read_bytes() for path in files}


def test_what_was_published_stays_where_there_is_nothing_new(elsewhere, monkeypatch):
    """So every table and claim is what `measured.csv` and `runs.csv` say."""
    monkeypatch.setattr(publish, "OF_NUMBERS", ("knn_compute",))
    monkeypatch.setattr(publish, "_tables", MADE_TABLES)
    (elsewhere / "figures/knn_compute.png").unlink()
    before = contents(elsewhere)
    publish.collect("cifar10")
    publish.write_pages()
    assert contents(elsewhere) == before
    assert (elsewhere.parents[2] / "README.md").read_text() == (ROOT / "README.md").read_text()
    assert (elsewhere / "figures/knn_compute.png").exists()


def test_of_an_experiment_of_which_nothing_was_run_there_is_nothing(elsewhere, monkeypatch):
    monkeypatch.setattr(publish, "_tables", MADE_TABLES)
    for name in ("runs.csv", "measured.csv", "evaluations.json"):
        (elsewhere / name).unlink()
    publish.collect("cifar10")
    publish.collect("cifar10")  # from files without a line
    publish.write_pages()
    runs = pd.read_csv(elsewhere / "runs.csv")
    assert list(runs["run"]) == list(cifar10().runs) and not runs["finished"].any()
    made = f"| 0 of {len(runs)} | 0 of {len(cifar10().evaluations)} |"
    assert made in pages.experiments_table(elsewhere.parent)


def train_here(
    run: str, checksum: str, versions: dict[str, str] | None = None, **changes: Any
) -> None:
    """Leave what a run leaves that this machine trained."""
    config = run_config(cifar10(), run)
    told = {name: getattr(config, name).model_dump(mode="json") for name in ("settings", "encoder")}
    source = config.source.name if config.source else None
    record = {"run": run, "stage": config.stage, "source": source, "seed": config.seed}
    record |= {"settings": told["settings"] | changes, "encoder": told["encoder"]}
    record |= {"device_hours": 1.0, "sha256": {ENCODER: checksum}, "versions": versions or {}}
    folder = Path("results/cifar10/runs", run).absolute()
    write_record(RunRecord.path(folder), record)
    settings = config.settings.model_copy(update=changes)
    leave_stamp(folder / "config.yaml", config.model_copy(update={"settings": settings}))
    step = line_of(5859, {"epoch": 30.0, "loss": 0.4}, {"device_seconds": 3600.0})
    (folder / "metrics.jsonl").write_text(step)


def evaluate_here(
    run: str, name: str, checksum: str, inputs: dict[str, str] | None = None, **metrics: Any
) -> None:
    """Leave what an evaluation leaves that this machine made."""
    config = evaluation_config(cifar10(), run, name)
    settings = config.settings.model_dump(mode="json") | {"resize": config.resize}
    result = {"metrics": metrics, "settings": settings, "left_sha256": "0" * 64}
    result |= {"provenance": {"encoder_sha256": checksum, "inputs": inputs or {}}}
    path = Path(f"results/cifar10/evaluations/{run}/{name}.yaml").absolute()
    write_record(path.with_suffix(".json"), result)
    path.with_suffix(".safetensors").touch()
    made_of = {config.path(key): left for key, left in (inputs or {}).items()}
    leave_stamp(path, config, made_of | {RunRecord.path(config.run): checksum})


def leave_stamp(
    path: Path, config: RunConfig | EvaluationConfig, made_of: dict[Path, str] | None = None
) -> None:
    """Leave the resolved file at `path`, and its stamp, which says that it was made of these."""
    config.write(path)
    with stamped(path, config):
        pass
    stamp = read_record(stamp_path(path))
    for file, checksum in (made_of or {}).items():
        stamp["made_of"][os.path.relpath(file, path.parent)] = checksum
    write_record(stamp_path(path), stamp)


def known(folder: Path, evaluation: str = "knn") -> dict[tuple[str, str], float]:
    """What is published of an evaluation, by run and metric."""
    frame = pd.read_csv(folder / "measured.csv")
    frame = frame[frame["evaluation"] == evaluation]
    return frame.set_index(["run", "metric"])["value"].to_dict()


def test_results_of_a_machine_come_beside_those_of_others(elsewhere):
    before, runs = known(elsewhere), pd.read_csv(elsewhere / "runs.csv", index_col="run")
    assert runs.at["ct_min_micro", "finished"]
    same = runs.at["mae_micro", "encoder_sha256"]
    train_here("mae_micro", same)
    evaluate_here("mae_micro", "knn", same, knn=11.0, list=[1.5], deep={"a": {"b": 2.5}}, no=[True])
    publish.collect("cifar10")
    after = known(elsewhere)
    assert after["mae_micro", "knn"] == 11.0
    assert ("mae_micro", "no/0") not in after and after["mae_micro", "list/0"] == 1.5
    assert after["mae_micro", "deep/a/b"] == 2.5
    assert {k: v for k, v in after.items() if k[0] != "mae_micro"} == {
        k: v for k, v in before.items() if k[0] != "mae_micro"
    }
    again = pd.read_csv(elsewhere / "runs.csv", index_col="run")
    assert again.at["mae_micro", "device_hours"] == 1.0
    assert again.drop("mae_micro").astype(str).equals(runs.drop("mae_micro").astype(str))
    # Evaluated elsewhere, trained again here.
    assert known(elsewhere, "low_shot")["mae_micro", "low_shot_1"] > 10
    # And from yet another machine.
    left = contents(elsewhere)
    shutil.rmtree("results")
    publish.collect("cifar10")
    assert contents(elsewhere) == left


def test_another_encoder_of_the_name_refutes_what_came_of_the_first(elsewhere, capsys):
    train_here("mae_micro", "0" * 64)
    publish.collect("cifar10")
    runs = {run for run, _ in known(elsewhere)}
    assert {"mae_micro-s1", "ct_min_micro-s1"} <= runs
    assert runs.isdisjoint({"mae_micro", "ct_min_micro", "ct_aug_micro"})
    finished = pd.read_csv(elsewhere / "runs.csv", index_col="run")["finished"]
    assert finished["mae_micro"] and finished["ct_min_micro-s1"] and not finished["ct_min_micro"]
    told = capsys.readouterr().err
    assert "ct_min_micro: not what was published" in told and "mae_micro/knn: not" in told
    assert not (elsewhere / "figures/umap.png").exists()
    # What tuning costs is that of a seed that is there.
    page = pages._filled("{gains}", elsewhere)
    assert "| operations after MAE, of MAE's | | 33 % | 105 % | |" in page


def test_other_settings_and_other_images_refute(elsewhere):
    told = elsewhere / "resolved/ct_min_micro.yaml"
    told.write_text(told.read_text().replace("epochs: 2", "epochs: 3"))
    evaluations = read_json(elsewhere / "evaluations.json")
    for name in ("mae_micro/knn", "ct_aug_micro/linear_probe"):
        evaluations["results"][name]["settings"] = "another"
    write_json(elsewhere / "evaluations.json", evaluations)
    publish.collect("cifar10")
    runs = {run for run, _ in known(elsewhere)}
    assert "ct_aug_micro" in runs and runs.isdisjoint({"ct_min_micro", "mae_micro"})
    # Which tests that linear probe.
    robust = {run for run, _ in known(elsewhere, "robustness")}
    assert "mae_micro" in robust and "ct_aug_micro" not in robust
    index = Path("results/cifar10/shards/cifar10/val/index.json")
    write_record(index, {"n": 1, "digest": "another"})
    publish.collect("cifar10")
    assert not known(elsewhere)


def test_what_this_machine_has_of_something_else_is_not_taken(elsewhere):
    """A run of other settings and what started from it, evaluations of other encoders or probes."""
    runs = pd.read_csv(elsewhere / "runs.csv", index_col="run")["encoder_sha256"]
    before, of_probe = known(elsewhere), known(elsewhere, "robustness")
    own = runs["mae_micro-s1"]
    train_here("mae_micro", runs["mae_micro"], epochs=31)
    train_here("head_min_micro", "0" * 64)
    train_here("ct_min_micro", "1" * 64)
    evaluate_here("ct_min_micro", "knn", "1" * 64, knn=11.0)
    train_here("mae_micro-s1", own)
    evaluate_here("mae_micro-s1", "knn", "0" * 64, knn=11.0)
    assert publish.what_is_here(cifar10()).runs.keys() == {"mae_micro-s1"}
    publish.collect("cifar10")
    assert known(elsewhere) == before
    assert pd.read_csv(elsewhere / "runs.csv", index_col="run").at["mae_micro", "device_hours"] > 1
    # The probe is another, so what tested it is of none.
    evaluate_here("mae_micro-s1", "linear_probe", own, linear_probe=51.0)
    evaluate_here("mae_micro-s1", "robustness", own, {"probe": "of another"}, noise=1.0)
    publish.collect("cifar10")
    now = known(elsewhere, "robustness")
    assert now.items() < of_probe.items() and "mae_micro-s1" not in {run for run, _ in now}
    evaluate_here("mae_micro-s1", "robustness", own, {"probe": "0" * 64}, noise=1.0)
    publish.collect("cifar10")
    assert known(elsewhere, "robustness")["mae_micro-s1", "noise"] == 1.0


def test_operations_and_machine_are_those_of_what_was_trained_here(elsewhere):
    """With the CPU's model and what computed bfloat16."""
    kinds = {"mae_micro": "cpu", "head_min_micro": "float32", "ct_min_micro": "float32"}
    for run, kind in kinds.items():
        train_here(run, "0" * 64, versions={"bfloat16": kind})
    (elsewhere / "runs.csv").unlink()
    here = publish.what_is_here(cifar10())
    lines = pd.DataFrame(publish._runs(here, publish.counts(here, elsewhere)))
    machines = lines.set_index("run")["machine"]
    assert machines["mae_micro"].endswith(", bfloat16 on the CPU")
    assert machines["ct_min_micro"].endswith(", float32 for bfloat16")
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = re.search(r"^model\s*: (.*)$", cpu, re.MULTILINE)
    assert model is None or f" model {model[1]} (" in machines["mae_micro"]
    first = publish.operations_behind(["mae_micro"], lines)
    assert publish.operations_behind(["ct_min_micro"], lines) > first > 0
    assert publish.operations_behind(["ct_min_micro"], lines, only_first=True) == first
    # What was imported cost nothing here, and tuning is no part of it.
    lines.loc[lines["run"] == "mae_micro", "operations"] = 0.0
    assert math.isnan(publish.operations_behind(["ct_min_micro"], lines, only_first=True))
    rows = [Row("micro", "ct_min", ("ct_min_micro",))]
    assert publish._cost(rows, lines)["overhead"].isna().all()


def test_what_tuning_adds_is_decided_over_seeds_and_sets_of_labels():
    """As the claims decide it: a table says no more than the verdicts below it."""
    gains = pages._filled("{gains}", RESULTS / "cifar10")
    lines = {line.split("|")[1].strip(): line for line in gains.splitlines() if "| " in line}
    undecided = {name: line.count("undecided") for name, line in lines.items() if name in GAINS}
    assert undecided == {
        "1 shot": 2, "2 shot": 1, "5 shot": 1, "linear probe": 0, "k-NN": 0, "cluster accuracy": 1,
    }  # fmt: skip
    claims = pd.read_csv(RESULTS / "cifar10/claims.csv", index_col="claim")
    judged = {"low_shot_gain", "cluster_gain", "aug_gain"}
    assert set(claims.loc[list(judged), "verdict"]) == {"within noise"}
    assert set(claims.loc[["probe_gain", "knn_gain"], "significant"]) == {"yes"}
    unequal = ["combined_helps_little", "sequential_wins", "shortcut_features"]
    assert set(claims.loc[unequal, "verdict"]) == {"not comparable"}


NOTE = runpy.run_path(str(ROOT / "docs/paper/build.py"))


def test_the_note_has_the_published_numbers():
    """As the results' pages have them, which are made of the same files another way."""
    text = " ".join(NOTE["note"]().split())
    assert "| CIFAR-10: k-NN | 49.6 ± 0.5 | 53.4 ± 0.2 | 61.7 ± 0.6 |" in text
    assert "gives 95.7 ± 0.8 k-NN instead of 85.2 ± 1.3" in text
    assert "What is not measured" in text and "nan" not in text
    with pytest.raises(ValueError, match="not enough values"):
        NOTE["cell"]("cifar10/tables/low_shot", "ct_other", "knn")
