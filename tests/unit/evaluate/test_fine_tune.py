"""Which trainings there are, on which images, and what is refused before anything is computed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from maect.core.errors import UserError
from maect.data.index import open_index
from maect.data.labelled import fraction_rows_of
from maect.data.subsets import fraction_rows
from maect.evaluate import fine_tune
from maect.evaluate.features import extract
from maect.evaluate.fine_tune_settings import FineTune
from maect.evaluate.job import Job
from maect.evaluate.low_shot import LowShot, choose, labelled
from maect.evaluate.store import open_features

from .conftest import Rank, given

FEW = {"batch_size": 10, "mixup": 0, "cutmix": 0}


@pytest.fixture
def job(images: Path, tmp_path: Path) -> Job:
    shards = images / "shards"
    return Job(
        run=images / "runs" / "mae", out=tmp_path / "out.json", resize=16,
        inputs={"train": shards / "train", "test": shards / "val"},
    )  # fmt: skip


def test_the_images_are_those_of_logistic_regression(
    images: Path, tmp_path: Path, rank: Rank
) -> None:
    encoder, shards = images / "runs" / "mae" / "encoder.safetensors", images / "shards" / "train"
    extract(rank, encoder=encoder, shards=shards, out=tmp_path / "train.safetensors", resize=16)
    features, index = open_features(tmp_path / "train.safetensors"), open_index(shards)
    plan = fine_tune.trainings(index, FineTune(shots=(1, 2), seed=4))
    names = [(t.metric, t.name) for t in plan]
    assert names[:2] == [("low_shot_1", f"low_shot_1-split{n}") for n in (1, 2)]
    assert names[5] == ("low_shot_2", "low_shot_2-split3") and len(plan) == 6
    for number, training in enumerate(plan):
        shots, split = 1 + number // 3, 1 + number % 3
        assert training.rows.tolist() == choose(features, shots, split, LowShot(seed=4)).tolist()
        assert np.bincount(index.labels[training.rows]).tolist() == [shots] * 10
    (ten,) = fine_tune.trainings(index, FineTune(fraction=0.1, seed=4))
    assert ten.metric == "low_shot_10pct"
    assert ten.rows.tolist() == fraction_rows_of(labelled(features), 0.1, 4, None).tolist()
    both = fine_tune.trainings(index, FineTune(fraction=0.1, seeds=2, seed=4))
    assert [t.seed for t in both] == [4, 5] and both[1].rows.tolist() == ten.rows.tolist()
    names = index.keys()
    listed = tmp_path / "simclr_10percent.txt"
    listed.write_text("".join(f"{names[row].split('/')[1]}.JPEG\n" for row in ten.rows[::-1]))
    (again,) = fine_tune.trainings(index, FineTune(fraction=0.1, subsets=str(tmp_path)))
    assert again.rows.tolist() == ten.rows.tolist()
    assert [*fine_tune.subset_record(index, [again]).values()] == [
        *fine_tune.subset_record(index, [ten]).values()
    ]
    with pytest.raises(UserError, match="simclr_1percent"):
        fine_tune.trainings(index, FineTune(fraction=0.01, subsets=str(tmp_path)))


def test_shots_need_images_of_every_class_that_the_split_names(
    images: Path, tmp_path: Path
) -> None:
    """A view names its own classes, so those that it leaves out are not missed."""
    from maect.data.subsets import class_view

    class_view(images / "shards" / "train", tmp_path / "view", ["3", "1"])
    view, settings = open_index(tmp_path / "view"), FineTune(shots=(2,), splits=1)
    (plan,) = fine_tune.trainings(view, settings)
    assert np.bincount(view.labels[plan.rows]).tolist() == [2, 2]
    whole = open_index(images / "shards" / "train")
    without = replace(whole, rows=whole.rows[whole.labels != 7])
    with pytest.raises(UserError, match=r"train: class 7: 0 samples, 2 wanted"):
        fine_tune.trainings(without, settings)


def test_fractions_of_every_class() -> None:
    labels = np.repeat([0, 1, 2, -1], [100, 37, 3, 20])
    tenth, half = fraction_rows(labels, 0.1, 7), fraction_rows(labels, 0.5, 7)
    assert np.bincount(labels[tenth]).tolist() == [10, 4, 1]
    assert np.bincount(labels[half]).tolist() == [50, 18, 2]
    assert set(tenth) < set(half) and (np.diff(half) > 0).all()
    assert tenth.tolist() != fraction_rows(labels, 0.1, 8).tolist()


@pytest.mark.parametrize(
    ("values", "ranks", "message"),
    [
        ({"shots": (1,), "batch_size": 16}, 1, "low_shot_1-split1: batch_size 16 is larger than"),
        ({"shots": (30,), **FEW}, 1, "30 wanted"),
        ({"batch_size": 10}, 4, "batch_size 10 is not a multiple of 4 ranks"),
        ({"batch_size": 12}, 4, "leave 3 each, an odd number"),
        ({"batch_size": 12, "accumulation": 4}, 1, "leave 3 each, an odd number"),
    ],
)
def test_what_does_not_work(job: Job, values: dict, ranks: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fine_tune.evaluate(Rank(world_size=ranks), job, FineTune(**values))
    assert not job.state.exists()


def test_splits_that_do_not_fit(job: Job, images: Path, tmp_path: Path) -> None:
    from maect.data.subsets import class_view

    class_view(images / "shards" / "val", tmp_path / "two", ["3", "4"])
    with pytest.raises(UserError, match="their classes differ"):
        fine_tune.evaluate(Rank(), given(job, test=tmp_path / "two"), FineTune(**FEW))
    class_view(images / "shards" / "train", tmp_path / "one", ["3"])
    one = given(job, train=tmp_path / "one", test=tmp_path / "one")
    with pytest.raises(UserError, match="at least two classes"):
        fine_tune.evaluate(Rank(), one, FineTune(**FEW))
    with pytest.raises(UserError, match="lacks the input 'test'"):
        fine_tune.evaluate(Rank(), given(job, test=None), FineTune(**FEW))


def test_a_mean_and_what_it_is_the_mean_of() -> None:
    rows = np.arange(3)
    plan = [fine_tune.Training("low_shot_1", f"low_shot_1-split{n}", 0, rows) for n in (1, 2)]
    found = {
        training.name: {"accuracy": 40.0 + n, "losses": [1.0], "weights_sha256": "a"}
        for n, training in enumerate(plan)
    }
    metrics = fine_tune.metrics(plan, found)
    assert metrics["low_shot_1"] == 40.5 and metrics["low_shot_1_splits"] == [40.0, 41.0]
    assert metrics["low_shot_1_std"] == pytest.approx(0.5**0.5)
    alone = fine_tune.metrics(plan[:1], found)
    assert set(alone) == {"low_shot_1", "losses", "weights_sha256"}


def test_state_of_another_evaluation_is_dropped(tmp_path: Path, capsys) -> None:
    folder = tmp_path / ".fine_tune.state"
    fine_tune._claim(folder, "a")
    (folder / "fine_tune-seed0").mkdir()
    fine_tune._claim(folder, "a")
    assert (folder / "fine_tune-seed0").exists() and not capsys.readouterr().err
    fine_tune._claim(folder, "b")
    assert not (folder / "fine_tune-seed0").exists()
    assert "other settings; anew" in capsys.readouterr().err
