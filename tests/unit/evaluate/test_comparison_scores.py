"""Held-out images, intervals and measures, compared with scipy's and scikit-learn's."""

import numpy as np
import pytest
from scipy import stats
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from maect.core.errors import UserError
from maect.evaluate.base import EvaluationJob
from maect.evaluate.logistic import best_penalty, fit_logistic, try_penalties
from maect.evaluate.outcomes import held_out_by_content, interval_metrics, intervals
from maect.evaluate.protocols.stored_features import PENALTIES, Logistic
from maect.recipes import KNN_K, KNN_TEMPERATURE
from maect.tools.compare import KNN_BEST, KNN_HELD_OUT, measure_with_labels, measure_without_labels

from .by_hand import scikit_knn
from .conftest import blobs, given, store
from .margins import clear


def clouds(n: int, seed: int, spread: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Points of four classes around the corners of a tetrahedron, and noise beside them."""
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % 4
    values = rng.normal(0, spread, (n, 8))
    values[:, :4] += 2.0 * np.eye(4)[labels]
    return values.astype(np.float32), labels


def test_held_out_images_depend_on_content_alone():
    labels = np.array([0] * 30 + [1] * 12 + [2] * 2 + [3])
    contents = [f"{17 * i % 101:03d}" for i in range(len(labels))]
    contents[5] = contents[7]  # the same image twice
    chosen = held_out_by_content(labels, contents, 5)
    assert [int(chosen[labels == label].sum()) for label in (1, 2, 3)] == [2, 1, 0]
    assert 5 <= chosen[labels == 0].sum() <= 6 and chosen[5] == chosen[7]
    order = np.random.default_rng(0).permutation(len(labels))
    again = held_out_by_content(labels[order], [contents[i] for i in order], 5)
    np.testing.assert_array_equal(again, chosen[order])


def test_intervals_are_those_of_scipy():
    rng = np.random.default_rng(3)
    scores = 100.0 * (rng.random((300, 2)) < [0.9, 0.6])
    low, high = intervals(scores, 9999)
    for column in range(2):
        theirs = stats.bootstrap(
            (scores[:, column],), np.mean, method="percentile", n_resamples=9999, rng=rng
        ).confidence_interval
        assert abs(low[column] - theirs.low) < 0.5 and abs(high[column] - theirs.high) < 0.5
    assert high[0] - low[0] < high[1] - low[1]  # nearer to 100 is surer
    both = intervals(np.stack([scores[:, 0], scores[:, 0] - 1.0], axis=1))
    np.testing.assert_allclose(both[0][0] - both[0][1], 1.0)  # resampled together


def test_where_all_are_right_the_interval_is_wilsons():
    right = np.arange(20) < 13
    found = interval_metrics({"all": np.ones(20, bool), "none": np.zeros(20, bool), "some": right})
    for name, count in (("all", 20), ("none", 0)):
        theirs = stats.binomtest(count, 20).proportion_ci(method="wilson")
        mine = found[f"{name}_low"], found[f"{name}_high"]
        assert mine == pytest.approx((100 * theirs.low, 100 * theirs.high), abs=0.01)
    low, high = intervals(100.0 * right[:, None])
    assert (found["some_low"], found["some_high"]) == (low[0], high[0])


def test_measures_are_those_of_a_second_implementation():
    (train, labels), (test, wanted) = clouds(200, 1), clouds(120, 2)
    contents = [f"{i:04d}" for i in range(len(train))]
    scores = measure_with_labels(train, labels, contents, test, wanted, threads=1)

    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (train.astype("f8"), test)]
    cosines = unit[1] @ unit[0].T
    clear(cosines, 1e-6, chosen=KNN_K)
    predicted = scikit_knn(train, labels, test, KNN_K, KNN_TEMPERATURE, least=1e-4)
    np.testing.assert_array_equal(scores["knn"].per_image, 100.0 * (predicted == wanted))

    held = held_out_by_content(labels, contents)
    assert held.sum() == 20
    c = float(scores["logistic"].chosen.split()[1])
    assert min(abs(c / p - 1) for p in PENALTIES) < 0.01
    model = make_pipeline(StandardScaler(), LogisticRegression(C=c, max_iter=1000))
    theirs = 100 * model.fit(train, labels).score(test, wanted)
    assert abs(scores["logistic"].value - theirs) < 1.0
    assert scores[KNN_BEST].value >= max(scores[KNN_HELD_OUT].value, scores["knn"].value)
    assert scores["shots_1"].value < scores["shots_10"].value < scores["logistic"].value + 10
    assert len(scores["shots_2"].sets) == 5 and scores["shots_2"].deviation is not None
    mean = np.mean(scores["shots_2"].sets)
    assert scores["shots_2"].value == pytest.approx(mean)


def test_the_penalty_is_chosen_on_what_is_held_out():
    train, labels = clouds(80, 4, spread=2.0)
    held = held_out_by_content(labels, [f"{i:03d}" for i in range(80)], 4)
    tried = try_penalties(train, labels, held)
    c, accuracies = best_penalty(tried), {one["c"]: one["accuracy"] for one in tried}
    assert len(tried) == 8 and accuracies[c] == max(accuracies.values())
    predict = fit_logistic(train[~held], labels[~held], c)
    assert accuracies[c] == pytest.approx(
        100 * float((predict(train[held]) == labels[held]).mean())
    )
    wrong = labels.copy()
    wrong[held] = (labels[held] + 1) % 4
    others = try_penalties(train, wrong, held)
    assert max(one["accuracy"] for one in others) < max(accuracies.values())


def test_what_is_too_little_is_refused_or_left_out():
    (train, labels), (test, wanted) = clouds(40, 1), clouds(20, 2)
    contents = [str(i) for i in range(40)]
    labels = np.where(labels == 3, 2, labels)
    labels[[0, 1, 2]] = 3  # three images of a class
    scores = measure_with_labels(train, labels, contents, test, wanted)
    assert "shots_2" in scores and "shots_5" not in scores
    with pytest.raises(UserError, match="9 training images, too few"):
        measure_with_labels(train[:9], labels[:9], contents[:9], test, wanted)
    with pytest.raises(UserError, match="one class"):
        measure_with_labels(train, np.zeros(40, int), contents, test, wanted)
    with pytest.raises(UserError, match="no class has two"):
        measure_with_labels(train, np.arange(40), contents, test, wanted)


def test_spread_needs_no_labels():
    values, _ = clouds(300, 5)
    line = values[:, :1] @ np.ones((1, 8), np.float32)
    spread, flat = measure_without_labels(values), measure_without_labels(line)
    assert flat["rank_me"].value < 1.1 < spread["rank_me"].value <= 8.01
    assert spread["uniformity"].value < flat["uniformity"].value


def test_a_choice_is_of_the_features_that_it_was_made_on(tmp_path, rank):
    """A killed evaluation kept it; since then images are resized otherwise."""
    inputs = {"test": store(tmp_path / "test.safetensors", *blobs(90, 12, 6, 1))}
    job = EvaluationJob(tmp_path / "run", tmp_path / "out.json", inputs)
    first = store(tmp_path / "16.safetensors", *blobs(300, 12, 6, 0, spread=0.2))
    Logistic().evaluate(rank, given(job, train=first))
    second = store(tmp_path / "20.safetensors", *blobs(300, 12, 6, 0, spread=3.0), resize=20)
    test = store(tmp_path / "test20.safetensors", *blobs(90, 12, 6, 1), resize=20)
    found = Logistic().evaluate(rank, given(job, train=second, test=test))
    alone = EvaluationJob(tmp_path / "run", tmp_path / "alone.json", inputs)
    assert found == Logistic().evaluate(rank, given(alone, train=second, test=test))
