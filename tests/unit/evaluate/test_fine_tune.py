"""Which trainings there are, on which images, what is refused, and what a score is the mean of."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maect.core.errors import UserError
from maect.core.files import write_record
from maect.data.index import ID, Index, open_index
from maect.data.subsets import class_view, fraction_rows, fraction_rows_of, subset_record
from maect.evaluate.accuracy import FineTuned
from maect.evaluate.base import EvaluationJob
from maect.evaluate.low_shot import as_split, choose_samples
from maect.evaluate.protocols.encoders import Accuracy
from maect.evaluate.protocols.stored_features import LowShot
from maect.evaluate.store import open_features
from maect.recipes.settings import Computing
from maect.records import RunRecord
from maect.stages.fine_tune import FineTune

from .conftest import Rank

FEW: dict[str, Any] = {"batch_size": 10, "mixup": 0, "cutmix": 0}


def rows_of(split: Index, images: Index) -> list[int]:
    """Which rows of a split are trained on."""
    return np.flatnonzero(np.isin(split.rows[:, ID], images.rows[:, ID])).tolist()


def test_the_images_are_those_of_logistic_regression(images, extracted, tmp_path):
    features, index = open_features(extracted["train"]), open_index(images / "shards/train")
    plan = Accuracy(shots=(1, 2), seed=4, **FEW).trainings()
    assert list(plan)[::5] == ["1shot-split1", "2shot-split3"] and len(plan) == 6
    for number, (stage, seed) in enumerate(plan.values()):
        shots, split = 1 + number // 3, 1 + number % 3
        chosen = stage.training_images(index)
        wanted = choose_samples(features, shots, split, LowShot(seed=4))
        assert rows_of(index, chosen) == wanted.tolist()
        assert np.bincount(chosen.labels).tolist() == [shots] * 10 and seed == 4
    tenth = Accuracy(fraction=0.1, seed=4, seeds=2, **FEW).trainings()
    assert [seed for _, seed in tenth.values()] == [4, 5]
    ten, again = (stage.training_images(index) for stage, _ in tenth.values())
    assert rows_of(index, ten) == fraction_rows_of(as_split(features), 0.1, 4, None).tolist()
    assert rows_of(index, again) == rows_of(index, ten)
    names = index.keys()
    listed = [f"{names[row].split('/')[1]}.JPEG\n" for row in rows_of(index, ten)[::-1]]
    (tmp_path / "simclr_10percent.txt").write_text("".join(listed))
    official = FineTune(fraction=0.1, subsets=str(tmp_path), **FEW).read_lists()
    assert subset_record(official.training_images(index)) == subset_record(ten)
    with pytest.raises(UserError, match="simclr_1percent"):
        official.model_copy(update={"fraction": 0.01}).training_images(index)


def test_fractions_of_every_class():
    labels = np.repeat([0, 1, 2, -1], [100, 37, 3, 20])
    tenth, half = fraction_rows(labels, 0.1, 7), fraction_rows(labels, 0.5, 7)
    assert np.bincount(labels[tenth]).tolist() == [10, 4, 1]
    assert np.bincount(labels[half]).tolist() == [50, 18, 2]
    assert set(tenth) < set(half) and (np.diff(half) > 0).all()
    assert tenth.tolist() != fraction_rows(labels, 0.1, 8).tolist()


def test_what_cannot_be_trained_on(images, tmp_path):
    """A view names its own classes, so those that it leaves out are not missed."""
    whole = open_index(images / "shards" / "train")
    without = replace(whole, rows=whole.rows[whole.labels != 7])
    for names in (["3"], ["3", "1"]):
        class_view(whole.directory, tmp_path / str(len(names)), names)
    one, two = open_index(tmp_path / "1"), open_index(tmp_path / "2")
    some = FineTune(shots=2, **FEW | {"batch_size": 4}).training_images(two)
    assert np.bincount(some.labels).tolist() == [2, 2]
    for index, values, message in (
        (without, {"shots": 2, **FEW}, r"train: class 7: 0 samples, 2 wanted"),
        (whole, {"shots": 1, "batch_size": 16}, "batch_size 16 is larger than its 10 labelled"),
        (whole, {"shots": 30, **FEW}, "30 wanted"),
        (whole, {"shots": 1, "held_out": 0.1, **FEW}, "held_out leaves no image of"),
        (one, FEW, "at least two classes"),
    ):
        with pytest.raises(UserError, match=message):
            FineTune(**values).training_images(index)
    for size, ranks, accumulation, message in (
        (10, 4, 1, "batch_size 10 is not a multiple of 4 ranks"),
        (12, 4, 1, "leave 3 each, an odd number"),
        (12, 1, 4, "leave 3 each, an odd number"),
    ):
        with pytest.raises(UserError, match=message):
            how = Computing(accumulation=accumulation)
            FineTune(batch_size=size).check_ranks(ranks, how)


def test_a_mean_and_what_it_is_the_mean_of(images, tmp_path, monkeypatch):
    accuracies = iter([40.0, 41.0, 50.0])

    class Trained:
        def __init__(self, folder: Path, *rest: Any) -> None:
            self.folder = folder

        def result(self, *rest: Any) -> dict[str, Any]:
            result = {"losses": [self.folder.name], "subset": {"images": 3}}
            return result | {"accuracy": next(accuracies)}

        def accuracies(self, *rest: Any) -> list[float]:
            return [70.0, 60.0]

    monkeypatch.setattr("maect.evaluate.accuracy.FineTuned", Trained)
    inputs = {"test": images / "shards" / "val", "trained": [tmp_path / "a", tmp_path / "b"]}
    job = EvaluationJob(tmp_path, tmp_path / "x.json", inputs)
    metrics = Accuracy(shots=(1,), splits=2, **FEW).evaluate(Rank(), job)
    assert metrics["low_shot_1_last_splits"] == [40.0, 41.0] and metrics["low_shot_1_last"] == 40.5
    assert metrics["low_shot_1_last_std"] == pytest.approx(0.5**0.5)
    assert metrics["low_shot_1"] == 70.0 and metrics["low_shot_1_splits"] == [70.0, 70.0]
    assert metrics["losses"] == {"low_shot_1-split1": ["a"], "low_shot_1-split2": ["b"]}
    assert list(job.notes["subsets"]) == ["low_shot_1-split1", "low_shot_1-split2"]
    alone = EvaluationJob(tmp_path, tmp_path / "x.json", inputs | {"trained": [tmp_path / "a"]})
    metrics = Accuracy(seed=2, **FEW).evaluate(Rank(), alone)
    assert set(metrics) == {"fine_tune", "fine_tune_last", "losses", "accuracies"}
    assert list(metrics["losses"]) == ["fine_tune-seed2"]
    with pytest.raises(UserError, match=r"x: asks for 2 fine-tuned runs, .* names 1"):
        Accuracy(seeds=2, **FEW).evaluate(Rank(), alone)


def test_only_the_runs_that_were_asked_for_are_scored(images, tmp_path):
    stage, test = FineTune(**FEW), open_index(images / "shards" / "val")
    record = {
        "run": "r", "stage": "fine_tune", "settings": stage.model_dump(mode="json"), "seed": 0,
        "sha256": {"a": "b"},
    }  # fmt: skip
    write_record(RunRecord.path(tmp_path), record)
    (tmp_path / "a").touch()
    for other, seed in ((FineTune(epochs=7, **FEW), 0), (stage, 1)):
        with pytest.raises(UserError, match="trained with other settings"):
            FineTuned(tmp_path, other, seed, test, torch.device("cpu"))
    with pytest.raises(UserError, match="damaged"):
        FineTuned(tmp_path, stage, 0, test, torch.device("cpu"))


def test_twins_leave_out_a_part_of_every_class(images):
    settings = Accuracy(shots=(2, 5), splits=1, held_out=0.2, **FEW)
    plan, index = settings.trainings(), open_index(images / "shards" / "train")
    assert list(plan) == [
        "2shot-split1", "5shot-split1", "2shot-split1_held_out", "5shot-split1_held_out"
    ]  # fmt: skip
    for suffix in ("2shot-split1", "5shot-split1"):
        plain, twin = plan[suffix][0], plan[f"{suffix}_held_out"][0]
        every, rest = plain.training_images(index), twin.training_images(index)
        held = twin.scored_images(index)
        assert held is not None and plain.scored_images(index) is None
        assert sorted([*rows_of(index, rest), *rows_of(index, held)]) == rows_of(index, every)
        assert np.bincount(held.labels).tolist() == [1] * 10
        assert twin.images_of(index.n, 10) == rest.n
    for values, message in (
        ({"shots": (1, 2)}, "of one label per class"),
        ({"epoch": "last"}, "leave out epoch=last"),
    ):
        with pytest.raises(ValueError, match=message):
            Accuracy(held_out=0.1, **FEW, **values)
