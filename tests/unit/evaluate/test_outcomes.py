"""Held-out images, intervals, paired tests and measures, against second writings."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from maect.core.errors import UserError
from maect.evaluate.base import EvaluationJob
from maect.evaluate.evaluation import evaluate
from maect.evaluate.logistic import best_penalty, fit_logistic, try_penalties
from maect.evaluate.outcomes import (
    accuracy_intervals,
    compare_results,
    difference,
    held_out_by_content,
    held_out_for,
    holm,
    intervals,
    mcnemar,
    pack,
    sign_flips,
    unpack,
)
from maect.evaluate.protocols.stored_features import PENALTIES, Clustering, Knn, Logistic, LowShot
from maect.recipes import KNN_K, KNN_TEMPERATURE
from maect.records import EvaluationRecord
from maect.tools.compare import KNN_BEST, KNN_HELD_OUT, measure_with_labels, measure_without_labels

from .by_hand import clear, scikit_knn
from .conftest import blobs, features_job, given, resolved, store


@pytest.mark.parametrize("trials", [1, 3, 300])
def test_outcomes_are_read_back(trials):
    right = np.random.default_rng(trials).random((trials, 57)) < 0.6
    kept = pack(right)
    assert (kept.images, kept.trials) == (57, trials)
    assert np.array_equal(unpack(kept), right.sum(axis=0) / trials)
    for damage in ({"right": kept.right[:-4]}, {"trials": 0}, {"images": 56}):
        with pytest.raises(ValueError, match="not the outcomes of"):
            unpack(kept.model_copy(update=damage))
    assert unpack(pack(np.ones((65535, 2), bool))).tolist() == [1, 1]
    with pytest.raises(ValueError, match="65536 trials"):
        pack(np.ones((65536, 2), bool))


@pytest.mark.parametrize("protocol, metrics", [
    (Knn(sweep=(1,)), ["knn", "knn_standardized", "knn_held_out", "knn_standardized_held_out"]),
    (LowShot(shots=(1, 5), fractions=(0.1,)), ["low_shot_1", "low_shot_5", "low_shot_10pct"]),
    (Logistic(penalties=(1.0,)), ["logistic"]),
    (Clustering(runs=4, subsets={"two": ("a", "b")}), ["accuracy_mean", "two_accuracy_mean"]),
])  # fmt: skip
def test_a_result_keeps_which_images_were_right(tmp_path, rank, protocol, metrics):
    """Their mean is the metric, and their interval the result's."""
    both = blobs(300, 12, 6, 0), blobs(90, 12, 6, 1)
    job = features_job(tmp_path, *both, class_names=list("abcdef"))
    job = given(job, **{n: job.path(n) if n in protocol.inputs() else None for n in job.inputs})
    assert evaluate(rank, config=resolved(job, protocol)) == "done"
    record = EvaluationRecord.read(job.out)
    assert record.outcomes is not None and sorted(record.outcomes) == sorted(metrics)
    for metric, kept in record.outcomes.items():
        shares = unpack(kept)
        assert 100 * shares.mean() == pytest.approx(record.metrics[metric], abs=1e-9)
        if not isinstance(protocol, Clustering):
            low, high = (record.metrics[f"{metric}_{end}"] for end in ("low", "high"))
            assert low < 100 * shares.mean() < high


def test_two_results_on_the_same_images(job, rank, tmp_path):
    first = replace(job, out=tmp_path / "a/knn.json")
    second = replace(job, out=tmp_path / "b/knn.json")
    for one, protocol in ((first, Knn(k=1)), (second, Knn(k=50))):
        evaluate(rank, config=resolved(one, protocol))
    found = compare_results(first.out, second.out)["knn"]
    one, two = (EvaluationRecord.read(file).metrics["knn"] for file in (first.out, second.out))
    assert found.value == pytest.approx(two - one) and found.gained != found.lost
    assert found.gained - found.lost == pytest.approx(0.9 * found.value)  # of 90 images
    others = store(tmp_path / "other.safetensors", *blobs(90, 12, 6, 2), index_digest="o" * 64)
    third = replace(given(job, test=others), out=tmp_path / "c/knn.json")
    evaluate(rank, config=resolved(third, Knn()))
    with pytest.raises(UserError, match="of other test images; compare results of one split"):
        compare_results(first.out, third.out)
    old = EvaluationRecord.read(first.out).model_copy(update={"outcomes": None})
    old.write(first.out)
    with pytest.raises(UserError, match=r"a/knn.json: keeps no outcomes .*; delete it and evalu"):
        compare_results(first.out, second.out)


@pytest.mark.parametrize("gained, lost", [(0, 0), (0, 5), (9, 2), (4, 4), (30, 12)])
def test_mcnemar_counts_every_way_to_disagree(gained, lost):
    n = gained + lost
    weights = [math.comb(n, i) for i in range(n + 1)]
    as_rare = [weight for weight in weights if weight <= weights[gained]]
    assert mcnemar(gained, lost) == pytest.approx(sum(as_rare) / 2**n)
    first = np.r_[np.zeros(gained), np.ones(lost), 1, 0]
    found = difference(first, np.r_[np.ones(gained), np.zeros(lost), 1, 0])
    assert (found.gained, found.lost) == (gained, lost)
    assert found.p == mcnemar(gained, lost)
    assert found.value == pytest.approx(100 * (gained - lost) / (n + 2))


def test_random_signs_are_all_ways_to_flip():
    """Of twelve images with averaged trials: near the share of all 4,096 signs."""
    change = np.array([3, -1, 2, 2, 1, -2, 3, 1, -1, 2, 1, 3]) / 3
    flips = np.array(list(itertools.product((-1, 1), repeat=12)))
    as_far = np.abs(flips @ change) >= abs(change.sum()) - 1e-9
    between = (np.abs(flips @ change) > abs(change.sum()) + 1e-9).mean(), as_far.mean()
    assert between[0] < sign_flips(change) < between[1]
    assert sign_flips(np.zeros(3)) == 1
    found = difference(np.full(12, 0.5), 0.5 + change / 4)
    assert found.gained is None and found.p == pytest.approx(sign_flips(change))


def test_a_paired_interval_is_narrower_than_two_apart():
    """Against scipy's, with other draws."""
    rng = np.random.default_rng(3)
    first = (rng.random(400) < 0.7).astype(float)
    second = np.where(rng.random(400) < 0.1, 1 - first, first)
    found = difference(first, second)
    changes = (100 * (second - first),)
    low, high = stats.bootstrap(changes, np.mean, method="percentile", rng=rng).confidence_interval
    assert found.low == pytest.approx(low, abs=0.4) and found.high == pytest.approx(high, abs=0.4)
    apart = 2 * 1.96 * 100 * np.sqrt(first.var() / 400 + second.var() / 400)
    assert high - low < 0.6 * apart
    with pytest.raises(ValueError, match="of 2 and 3 images"):
        difference(np.zeros(2), np.zeros(3))


@pytest.mark.parametrize("images", [4, 300])
def test_all_right_or_all_wrong_has_wilsons_interval(images):
    """Its end is where the share found is as unlikely as 1.96 standard errors."""
    low, high = accuracy_intervals(np.tile([100.0, 0.0], (images, 1)))
    p = low[0] / 100
    assert 1 - p == pytest.approx(1.96 * math.sqrt(p * (1 - p) / images))
    assert [*low[1:], *high] == pytest.approx([0, 100, 100 - low[0]])
    some = 100 * np.random.default_rng(0).random(images)  # resampled alike whenever it is asked
    both = accuracy_intervals(np.stack([some, np.zeros(images)], 1))
    alone = [ends[0] for ends in intervals(some[:, None])]
    assert [ends[0] for ends in both] == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize(("tests", "held"), [(10**6, 400), (400, 400), (100, 100), (2, 2), (1, 1)])
def test_a_tenth_is_held_out_or_as_many_as_test_images(tests, held):
    contents = np.random.default_rng(0).permutation(4000).tolist()
    assert held_out_for(np.zeros(4000, int), contents, tests).sum() == held
    # The only image of a class teaches.
    assert held_out_for(np.array([3, 5, 3]), [7, 1, 8], tests).tolist() == [True, False, False]


def test_holm():
    assert holm([0.01, 0.04, 0.03, 0.005, 0.6]) == pytest.approx([0.04, 0.09, 0.09, 0.025, 0.6])
    assert holm([]) == [] and holm([0.5, 0.9]) == [1, 1]


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
    # What one class has of another's is not held out where it has nothing else.
    twice = [*contents, contents[chosen.argmax()]]
    assert not held_out_by_content(np.append(labels, 4), twice, 5)[-1]


def test_series_of_a_scene_are_held_out_no_more_than_single_images():
    """Two classes, each of 10 scenes of 20 frames and of 200 single images."""
    rng = np.random.default_rng(0)
    scenes = np.repeat(np.arange(20), 20)
    groups = np.concatenate([scenes, np.arange(20, 420)])
    labels = np.concatenate([scenes // 10, np.arange(400) // 200])
    shares, counts = [], []
    for _ in range(200):
        words = rng.permutation(420)[groups].tolist()
        held = held_out_by_content(labels, words, 10)
        counts.append(held.sum())
        shares.append(held[:400].mean())
        assert all(len({*held[groups == group]}) == 1 for group in range(20))
    assert {*counts} == {80}
    assert 0.04 < np.mean(shares) < 0.11


def test_a_class_of_two_scenes_gives_the_smaller_one():
    labels, words = np.zeros(9, np.int64), [*"bbbbbaaaa"]
    assert held_out_by_content(labels, words, 5).tolist() == [False] * 5 + [True] * 4
    assert not held_out_by_content(labels, ["a"] * 9, 5).any()


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
    (train, labels), test = clouds(40, 1), clouds(20, 2)
    contents = [str(i) for i in range(40)]
    labels = np.where(labels == 3, 2, labels)
    labels[[0, 1, 2]] = 3  # three images of a class
    scores = measure_with_labels(train, labels, contents, *test)
    assert "shots_2" in scores and "shots_5" not in scores
    for n, wrong, message in (
        (9, labels[:9], "9 training images, too few"),
        (40, np.zeros(40, int), "one class"),
        (40, np.arange(40), "no class has two"),
    ):
        with pytest.raises(UserError, match=message):
            measure_with_labels(train[:n], wrong, contents[:n], *test)


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
    later = given(job, train=second, test=test)
    found = Logistic().evaluate(rank, later)
    assert found == Logistic().evaluate(rank, replace(later, out=tmp_path / "alone.json"))
