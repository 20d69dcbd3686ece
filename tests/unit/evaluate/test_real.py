"""ImageNet-ReaL: right is whatever people saw; images that they could not name do not count."""

import json
from pathlib import Path

import numpy as np
import pytest

from maect.core.errors import UserError
from maect.data.index import open_index
from maect.evaluate.base import Interrupted, RealLabels
from maect.evaluate.evaluation import Completion, evaluate
from maect.evaluate.protocols.stored_features import Knn, Logistic, LowShot
from maect.evaluate.real import read_real, real_labels_of, real_sha256

from .conftest import Rank, blobs, features_job, given, resolved
from .test_attentive_probe import SETTINGS as ATTENTIVE
from .test_lars_probes import SETTINGS as LARS
from .test_linear_probe import SETTINGS as LINEAR
from .test_linear_probe import job_of

KEYS = [f"n0{i % 3}/ILSVRC2012_val_{i + 1:08d}" for i in range(90)]


def write(path, labels):
    path.write_text(json.dumps(labels))
    return RealLabels(real_labels=str(path))


def test_any_of_the_labels_is_right_and_none_does_not_count(tmp_path):
    settings = write(tmp_path / "real.json", [[1, 2], [], [0], [5], [2]])
    keys = [f"ILSVRC2012_val_{number:08d}" for number in (4, 1, 2, 3)]
    # 5 is right, 2 is right, the third has no label, 1 is wrong.
    real = real_labels_of(settings, lambda: keys)
    assert real is not None and real.accuracy(np.array([5, 2, 0, 1])) == pytest.approx(200 / 3)
    assert real_labels_of(RealLabels(), lambda: ["x"]) is None


def test_what_does_not_fit_is_said(tmp_path):
    names = ["bird", "cat", "ant"]
    for labels, known, message in (
        ([[1]], [["b/c"]], "'b/c' is none of the 1 images"),
        ([[1]], [KEYS[1:2]], "is none of the 1 images"),
        ([[]], [KEYS[:1]], "gives no label"),
        ([[7]], [KEYS[:1], ["a", "b"]], "labels of 8 classes, the images have 2"),
        # Classes in another order.
        ([[0], [1], [2]], [KEYS[:3], names, np.array([2, 0, 1])], "only 0 % of the images' own"),
    ):
        settings = write(tmp_path / "real.json", labels)
        with pytest.raises(UserError, match=message):
            real_labels_of(settings, lambda keys=known[0]: keys, *known[1:])
    with pytest.raises(UserError, match="maect retrieve imagenet_real"):
        read_real(tmp_path / "none.json")
    for text in ("[[1], 2]", "{}", "no", '[["a"]]', "[[-1]]"):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(UserError, match="not"):
            read_real(tmp_path / "bad.json")


@pytest.mark.parametrize(("protocol", "names"), [
    (Knn, ["knn", "knn_standardized"]), (Logistic, ["logistic"]),
    (LowShot, ["low_shot_1", "low_shot_2", "low_shot_5"]),
])  # fmt: skip
def test_with_the_labels_themselves_it_is_the_accuracy(tmp_path, rank, protocol, names):
    test, labels = blobs(90, 12, 6, 1)
    both = blobs(300, 12, 6, 0), (test, labels, KEYS)
    job = features_job(tmp_path, *both, class_names=list("abcdef"))
    same = write(tmp_path / "same.json", [[int(label)] for label in labels]).real_labels
    metrics = protocol(real_labels=same).evaluate(rank, job)
    for name in names:
        assert metrics[f"{name}_real"] == pytest.approx(metrics[name])
    every = write(tmp_path / "every.json", [[*range(6)] for _ in labels]).real_labels
    assert protocol(real_labels=every).evaluate(rank, job)[f"{names[0]}_real"] == 100
    assert not any(key.endswith("_real") for key in protocol().evaluate(rank, job))
    for numbers, message in (((labels + 1) % 6, "own labels"), (labels + 1, "the images have 6")):
        wrong = write(tmp_path / "wrong.json", [[int(number)] for number in numbers]).real_labels
        with pytest.raises(UserError, match=message):
            protocol(real_labels=wrong).evaluate(rank, job)


def real_of(shards: Path) -> list[list[int]]:
    """The labels of the images themselves, in ReaL's order."""
    index = open_index(shards)
    named = zip(index.keys(), index.labels.tolist(), strict=True)
    return [[label] for _, label in sorted(named, key=lambda pair: pair[0][-8:])]


PROBES = [
    LINEAR.model_copy(update={"held_out": 0.2, "epochs": 3, "concat": True}),
    LARS.model_copy(update={"held_out": 0.2}),
    ATTENTIVE,
]


@pytest.mark.parametrize("settings", PROBES, ids=lambda settings: settings.name)
def test_probes_are_scored_by_them_after_every_epoch(images, imagenet_val, tmp_path, settings):
    job = given(job_of(images, tmp_path / "probe.json"), test=imagenet_val)
    own = real_of(imagenet_val)
    asked = {"real_labels": write(tmp_path / "same.json", own).real_labels}
    same = settings.model_copy(update=asked)
    with pytest.raises(Interrupted):
        same.evaluate(Rank(patience=6), job)
    metrics = same.evaluate(Rank(), job)
    # They are those of the same epochs and rates as the accuracies beside them.
    scored = {name for name in metrics if name.endswith("_real")}
    assert {f"{settings.name}_real"} < scored
    for name in scored:
        assert metrics[name] == pytest.approx(metrics[name.removesuffix("_real")])
    assert settings.evaluate(Rank(), job) == {
        name: value for name, value in metrics.items() if name not in scored
    }
    every = write(tmp_path / "every.json", [[*range(10)] for _ in own]).real_labels
    found = settings.model_copy(update={"real_labels": every}).evaluate(Rank(), job)
    assert {found[name] for name in scored} == {100}


def test_a_result_is_of_the_labels_that_it_was_scored_by(images, imagenet_val, tmp_path):
    file, own = tmp_path / "real.json", real_of(imagenet_val)
    settings = LARS.model_copy(update={"real_labels": write(file, own).real_labels})
    job = given(job_of(images, tmp_path / "lars_linear_probe.json"), test=imagenet_val)
    config = resolved(job, settings)
    before = Completion(config).identity
    assert evaluate(Rank(), config=config) == "done"
    assert Completion(config).is_there()
    result = json.loads(job.out.read_text())
    assert result["provenance"]["inputs"]["real_labels"] == real_sha256(settings)
    # An interrupted training does not go on by other labels.
    with pytest.raises(Interrupted):
        settings.evaluate(Rank(patience=6), job)
    file.write_text(json.dumps([[*each, 3] for each in own]))
    assert not Completion(config).is_there() and Completion(config).identity != before
    # The same labels elsewhere are the same.
    moved = write(tmp_path / "moved.json", own).real_labels
    again = resolved(job, settings.model_copy(update={"real_labels": moved}))
    assert Completion(again).is_there() and Completion(again).identity == before
    metrics = settings.evaluate(Rank(), job)
    fresh = settings.evaluate(Rank(), given(job_of(images, tmp_path / "b.json"), test=imagenet_val))
    assert metrics == fresh
