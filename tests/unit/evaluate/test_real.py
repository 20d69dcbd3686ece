"""ImageNet-ReaL: right is whatever people saw; images that they could not name do not count."""

import json

import numpy as np
import pytest

from maect.core.errors import UserError
from maect.evaluate.base import EvaluationJob
from maect.evaluate.knn import Knn
from maect.evaluate.logistic import Logistic
from maect.evaluate.real import RealLabels, read_real

from .conftest import blobs, store

KEYS = [f"n0{i % 3}/ILSVRC2012_val_{i + 1:08d}" for i in range(90)]


def write(path, labels):
    path.write_text(json.dumps(labels))
    return RealLabels(real_labels=str(path))


def test_any_of_the_labels_is_right_and_none_does_not_count(tmp_path):
    settings = write(tmp_path / "real.json", [[1, 2], [], [0], [5], [2]])
    keys = [f"ILSVRC2012_val_{number:08d}" for number in (4, 1, 2, 3)]
    # 5 is right, 2 is right, the third has no label, 1 is wrong.
    real = settings.real("it", np.array([5, 2, 0, 1]), keys)
    assert real == {"it_real": pytest.approx(200 / 3)}
    assert RealLabels().real("it", np.array([5]), ["x"]) == {}


def test_what_does_not_fit_is_said(tmp_path):
    settings = write(tmp_path / "real.json", [[1]])
    with pytest.raises(UserError, match="'b/c' is none of the 1 images"):
        settings.real("it", np.array([1]), ["b/c"])
    with pytest.raises(UserError, match="is none of the 1 images"):
        settings.real("it", np.array([1]), ["ILSVRC2012_val_00000002"])
    settings = write(tmp_path / "real.json", [[]])
    with pytest.raises(UserError, match="gives no label"):
        settings.real("it", np.array([1]), ["ILSVRC2012_val_00000001"])
    with pytest.raises(UserError, match=r"real\.json of google-research"):
        read_real(tmp_path / "none.json")
    for text in ("[[1], 2]", "{}", "no", '[["a"]]'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(UserError, match="not"):
            read_real(tmp_path / "bad.json")


@pytest.mark.parametrize("protocol", [Knn, Logistic])
def test_with_the_labels_themselves_it_is_the_accuracy(tmp_path, rank, protocol):
    test, labels = blobs(90, 12, 6, 1)
    inputs = {
        "train": store(tmp_path / "train.safetensors", *blobs(300, 12, 6, 0)),
        "test": store(tmp_path / "test.safetensors", test, labels, KEYS),
    }
    job = EvaluationJob(tmp_path / "run", tmp_path / "out.json", inputs)
    same = write(tmp_path / "same.json", [[int(label)] for label in labels]).real_labels
    metrics = protocol(real_labels=same).evaluate(rank, job)
    names = ["knn", "knn_standardized"] if protocol is Knn else ["logistic"]
    for name in names:
        assert metrics[f"{name}_real"] == pytest.approx(metrics[name])
    every = write(tmp_path / "every.json", [[*range(6)] for _ in labels]).real_labels
    assert protocol(real_labels=every).evaluate(rank, job)[f"{names[0]}_real"] == 100
    assert not any(key.endswith("_real") for key in protocol().evaluate(rank, job))
    assert "real_labels" not in protocol().model_dump()
