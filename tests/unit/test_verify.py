"""`maect verify`: published numbers, made again by a pipeline that is written here."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from maect.core.errors import UserError
from maect.core.files import write_json, write_record
from maect.experiment import load
from maect.records import RunRecord
from maect.tools.verify import cells, chosen, tolerance, verify

PUBLISHED = Path(__file__).parents[2] / "docs/results/digits"
KNN = "low_shot.mae.knn"


@pytest.fixture
def published(tmp_path: Path) -> Path:
    folder = tmp_path / "docs/digits"
    shutil.copytree(PUBLISHED / "tables", folder / "tables")
    shutil.copy(PUBLISHED / "runs.csv", folder)
    return folder


def pipeline(published: Path, metrics: dict[str, float], sha256: str | None = None):
    """Makes what is asked for, with these metrics, by encoders of the published checksums."""
    known = pd.read_csv(published / "runs.csv", index_col="run")["encoder_sha256"]

    def run(file: Path, targets: list[str]) -> int:
        experiment = load(str(file))
        for target in map(Path, targets):
            assert target.is_relative_to(experiment.root) and target.suffix == ".done"
            name = target.parent.name
            assert (name, target.stem) in experiment.evaluations
            write_record(target.with_suffix(".json"), {"metrics": metrics})
            sums = {"encoder.safetensors": sha256 or known[name]}
            record = RunRecord(run=name, stage="tune", sha256=sums)
            record.write(RunRecord.path(experiment.root / "runs" / name))
        write_record(experiment.root / "shards/digits/val/index.json", {"n": 500})
        return 0

    return run


def test_a_number_that_is_the_same_agrees(published, tmp_path, capsys):
    run = pipeline(published, {"knn": 86.4, "linear_probe": 71.0})
    assert verify(published, [KNN, "low_shot.mae.linear_probe"], tmp_path / "out", run) == 0
    told = capsys.readouterr().out
    assert f"{KNN}: 86.4 published, 86.4 now: same; the same bits" in told
    assert "linear_probe: 70.6 published, 71 now: +0.4, at most 0.6 (3 of 500" in told
    assert "2 cells by 2 evaluations" in told and "2 of 2 cells agree" in told


@pytest.mark.parametrize(
    ("value", "sha256", "status"),
    [(85.8, None, 0), (85.6, None, 1), (83.0, "0", 0), (79.0, "0", 1), (86.4, "0", 0)],
)
def test_what_a_number_may_differ_by(published, tmp_path, capsys, value, sha256, status):
    """Three predictions of the same encoder; of another one 2.5 errors of two accuracies, 5.4."""
    run = pipeline(published, {"knn": value}, sha256)
    assert verify(published, [KNN], tmp_path / "out", run) == status
    told = capsys.readouterr().out
    assert ("OUTSIDE" in told) == (status == 1)
    assert ("another encoder" in told) == (sha256 is not None)
    assert f"{1 - status} of 1 cells agree" in told


def test_what_cannot_be_verified(published, tmp_path):
    """A failure is no agreement; an earlier call's experiment is written anew, another is not."""

    def fail(file: Path, targets: list[str]) -> int:
        return 3

    out, theirs = tmp_path / "out", tmp_path / "digits.yaml"
    assert verify(published, [KNN], out, fail) == 3
    (out / "digits.yaml").write_text(f"storage: {out / 'digits'}\nruns: {{}}\n")
    assert verify(published, [KNN], out, pipeline(published, {"knn": 86.4})) == 0
    theirs.write_text("runs: {}\n")
    with pytest.raises(UserError, match=r"digits.yaml: an experiment of yours"):
        verify(published, [KNN], tmp_path, fail)
    assert theirs.read_text() == "runs: {}\n"
    shutil.rmtree(published / "tables")
    with pytest.raises(UserError, match="no number that the experiment digits makes"):
        verify(published, [], out, fail)
    with pytest.raises(UserError, match="no published results"):
        verify(tmp_path, [], out, fail)


def test_cells_are_named_or_drawn(published, tmp_path):
    found = cells(published, load("digits"))
    names = [cell.name for cell in found]
    assert len(found) > 200 and KNN in names and len(names) == len(set(names))
    assert {"robustness.mae.inverted", "dogs15_best.ct_min.even_accuracy"} < set(names)
    assert [cell.name for cell in chosen(found, [KNN, KNN])] == [KNN]
    larger = [replace(c, row=replace(c.row, architecture="small")) for c in found if c.name == KNN]
    assert [c.row.architecture for c in chosen([*found, *larger], [KNN])] == ["tiny", "small"]
    drawn = [cell.name for cell in chosen(found, (), seed=1)]
    assert len(set(drawn)) == 10 and drawn == [c.name for c in chosen(found, (), seed=1)]
    assert drawn != [cell.name for cell in chosen(found, (), seed=2)]
    with pytest.raises(UserError, match=r"low_shot.mae.kn: no such cell .*'low_shot\.mae\.knn'"):
        chosen(found, ["low_shot.mae.kn"])


def test_deviations_over_seeds_come_first_and_of_one_seed_only_accuracies_are_judged():
    found = {cell.name: cell for cell in cells(PUBLISHED, load("digits"))}
    knn, silhouette = found[KNN], found["clustering.mae.silhouette"]
    several = replace(knn, std=0.5)
    assert tolerance(several, False, 500)[0] == pytest.approx(1.25)
    assert tolerance(several, True, 500)[0] == pytest.approx(0.6)
    for std in (math.nan, 0.0):
        assert 0 < tolerance(replace(knn, value=100.0, std=std), False, 500)[0] < 1
    for same in (False, True):
        assert math.isinf(tolerance(silhouette, same, 500)[0])
    assert tolerance(replace(silhouette, std=0.5), False, 500)[0] == pytest.approx(1.25)


def test_seeds_that_are_not_published_are_not_made(tmp_path):
    folder = tmp_path / "digits_refined"
    shutil.copytree(PUBLISHED.with_name("digits_refined"), folder)
    experiment = load("digits_refined")
    (whole,) = (c for c in cells(folder, experiment) if c.name == KNN)
    file = folder / "evaluations.json"
    told = json.loads(file.read_text())
    told["results"].pop(f"{whole.row.runs[-1]}/knn")
    write_json(file, told)
    (part,) = (c for c in cells(folder, experiment) if c.name == KNN)
    assert len(whole.row.runs) > 1 and part.row.runs == whole.row.runs[:-1]
