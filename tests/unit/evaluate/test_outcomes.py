"""Paired tests, against second writings by enumeration and by loops."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from maect.core.errors import UserError
from maect.evaluate.evaluation import evaluate
from maect.evaluate.outcomes import (
    accuracy_intervals,
    compare_results,
    difference,
    held_out_for,
    holm,
    intervals,
    mcnemar,
    pack,
    sign_flips,
    unpack,
)
from maect.evaluate.protocols.stored_features import Clustering, Knn, Logistic, LowShot
from maect.records import EvaluationRecord, Outcome

from .conftest import blobs, features_job, given, resolved, store


@pytest.mark.parametrize("trials", [1, 3, 300])
def test_outcomes_are_read_back(trials):
    right = np.random.default_rng(trials).random((trials, 57)) < 0.6
    kept = pack(right)
    assert (kept.images, kept.trials) == (57, trials)
    assert np.array_equal(unpack(kept), right.sum(axis=0) / trials)
    with pytest.raises(ValueError, match="not the outcomes"):
        unpack(kept.model_copy(update={"right": kept.right[:-4]}))
    with pytest.raises(ValueError, match="of 57 images in 0 trials"):
        unpack(Outcome(images=57, trials=0, right=kept.right))
    with pytest.raises(ValueError, match="of 56 images"):
        unpack(Outcome(images=56, trials=trials, right=kept.right))


def test_outcomes_are_kept_of_up_to_65535_trials():
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
    """Against a loop of its own, with other draws."""
    rng = np.random.default_rng(3)
    first = (rng.random(400) < 0.7).astype(float)
    second = np.where(rng.random(400) < 0.1, 1 - first, first)
    found = difference(first, second)
    means = []
    for _ in range(4000):
        rows = [int(400 * u) for u in rng.random(400)]
        means.append(100 * (second[rows].sum() - first[rows].sum()) / 400)
    low, high = np.percentile(means, [2.5, 97.5])
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
    """His step-down procedure, written as it is usually told: stop at the first not rejected."""
    chances = [0.01, 0.04, 0.03, 0.005, 0.6]
    assert holm(chances) == pytest.approx([0.04, 0.09, 0.09, 0.025, 0.6])
    assert holm([]) == [] and holm([0.5, 0.9]) == [1, 1]
    for level in (0.02, 0.025, 0.04, 0.05, 0.1):
        rejected: list[int] = []
        for rank, number in enumerate(sorted(range(5), key=chances.__getitem__)):
            if chances[number] > level / (5 - rank):
                break
            rejected.append(number)
        assert sorted(rejected) == [i for i, p in enumerate(holm(chances)) if p <= level + 1e-12]
