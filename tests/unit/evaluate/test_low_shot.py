import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from maect.core.errors import UserError
from maect.data.subsets import fraction_rows
from maect.evaluate import low_shot
from maect.evaluate.protocols.stored_features import LowShot
from maect.evaluate.store import open_features

from .by_hand import clear
from .conftest import Rank, blobs, given, store


def objective(features: np.ndarray, labels: np.ndarray, weights: np.ndarray, penalty: float):
    """The problem's value at W, of classes that occur."""
    present = np.flatnonzero(~np.isnan(weights[0]))
    logits, weights = features @ weights[:, present], weights[:, present]
    shifted = logits - logits.max(axis=1, keepdims=True)
    own = shifted[np.arange(len(labels)), np.searchsorted(present, labels)]
    loss = np.mean(np.log(np.exp(shifted).sum(axis=1)) - own)
    return float(loss) + penalty / 2 * float(np.vdot(weights, weights))


def problem(n: int = 60, width: int = 10, classes: int = 4, seed: int = 0):
    features, labels = blobs(n, width, classes, seed, spread=1.5)
    return low_shot.center_and_scale(features), labels


def scikit(features, labels, penalty: float):
    """The same objective by scikit-learn: C = 1 / (n penalty), to a tight tolerance."""
    model = LogisticRegression(
        C=1 / (len(labels) * penalty), fit_intercept=False, tol=1e-10, max_iter=100_000
    )
    return model.fit(features, labels).coef_.T


@pytest.mark.parametrize("penalty", [1e-1, 1e-3, 0.00025 / 60])
def test_lbfgs_solves_the_problem_of_scikit_learn(penalty):
    features, labels = problem()
    weights, converged = low_shot.fit(features, labels, 4, penalty)
    expected = scikit(features, labels, penalty)
    assert converged
    ours = objective(features, labels, weights, penalty)
    assert ours <= objective(features, labels, expected, penalty) * (1 + 1e-6)
    # The tolerance is a duality gap, |gradient|^2 / (2 penalty), of 1e-9 of the value.
    odds = np.exp(features @ weights)
    residual = odds / odds.sum(axis=1, keepdims=True) - np.eye(4)[labels]
    gradient = features.T @ residual / len(labels) + penalty * weights
    assert np.vdot(gradient, gradient) <= 2 * penalty * 1.001e-9 * ours
    if penalty >= 1e-3:
        np.testing.assert_allclose(weights, expected, atol=1e-3 * np.abs(expected).max())


def test_a_solver_that_gives_up_says_so(monkeypatch):
    monkeypatch.setattr(low_shot, "MAX_ITERATIONS", 2)
    assert not low_shot.fit(*problem(), 4, 1e-3)[1]


def test_two_classes_with_gaps_between():
    features, labels = problem(classes=2)
    weights, _ = low_shot.fit(features, 3 * labels + 1, 6, 1e-3)
    assert set(low_shot.predict(features, weights)) == {1, 4}
    dense, _ = low_shot.fit(features, labels, 2, 1e-3)
    clear(features @ dense, 1e-5)
    assert np.array_equal(
        low_shot.predict(features, weights), 3 * low_shot.predict(features, dense) + 1
    )


def test_rows_are_centred_and_of_length_1():
    features, _ = blobs(20, 8, 3, 0)
    expected = []
    for row in features.astype(np.float64):
        centred = row - sum(row) / len(row)
        expected.append(centred / sum(value**2 for value in centred) ** 0.5)
    np.testing.assert_allclose(low_shot.center_and_scale(features), expected, atol=1e-12)
    # However short a row is beside the others.
    small = np.concatenate([features[:10] * np.float32(1e-9), features[10:]])
    np.testing.assert_allclose(low_shot.center_and_scale(small), expected, atol=1e-6)
    assert not low_shot.center_and_scale(np.full((6, 5), 0.1, np.float32)).any()


def test_whole_protocol_agrees_with_scikit_learn(job, rank):
    train, test = open_features(job.path("train")), open_features(job.path("test"))
    settings = LowShot(fractions=(0.1, 1.0), l2=0.05)
    metrics = settings.evaluate(rank, job)

    def accuracy(ids):
        rows = train.values[ids] - train.values[ids].mean(1, keepdims=True)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        weights = scikit(rows.astype(np.float64), train.labels[ids], 0.05 / len(ids))
        # The authors preprocess only the train rows: the classes found are the same.
        clear(low_shot.center_and_scale(test.values) @ weights, 1e-5)
        return 100 * np.mean((test.values @ weights).argmax(1) == test.labels)

    for shots in (1, 2, 5):
        splits = [low_shot.choose_samples(train, shots, split, settings) for split in (1, 2, 3)]
        expected = [accuracy(ids) for ids in splits]
        assert metrics[f"low_shot_{shots}_splits"] == pytest.approx(expected)
        assert metrics[f"low_shot_{shots}"] == pytest.approx(np.mean(expected))
        assert job.notes["subsets"][f"low_shot_{shots}-1"] == {"images": 6 * shots}
    assert metrics["low_shot_5"] > metrics["low_shot_1"]
    tenth = fraction_rows(train.labels, 0.1, 0)
    for name, ids in (("low_shot_10pct", tenth), ("low_shot_100pct", np.arange(train.n))):
        assert metrics[name] == pytest.approx(accuracy(ids)) and metrics[f"{name}_converged"]
        assert job.notes["subsets"][name] == {"images": len(ids)}
    assert metrics["low_shot_100pct"] > metrics["low_shot_10pct"] > 30


def test_threads_do_not_matter(job):
    runs = [LowShot().evaluate(Rank(cpus=n), job) for n in (1, 4)]
    assert runs[0] == runs[1]


def test_splits_and_seeds_draw_other_subsets_and_fewer_shots_a_part(job):
    train = open_features(job.path("train"))

    def chosen(shots, split, seed=0):
        return {*low_shot.choose_samples(train, shots, split, LowShot(seed=seed)).tolist()}

    others = [chosen(2, 1), chosen(2, 2), chosen(2, 3), chosen(2, 1, seed=1)]
    assert len({frozenset(ids) for ids in others}) == 4
    assert chosen(1, 2) < chosen(2, 2) < chosen(5, 2)


def test_classes_with_too_few_samples(tmp_path, job, rank):
    rows, labels = blobs(12, 4, 2, 0)[0], [0] * 8 + [2] * 4
    plain = store(tmp_path / "plain.safetensors", rows, labels)
    named = store(tmp_path / "named.safetensors", rows, labels, class_names=["ant", "bee", "cat"])
    one = store(tmp_path / "one.safetensors", rows, [3] * 12)
    half = LowShot(shots=(), fractions=(0.5,))
    assert len(low_shot.choose_samples(open_features(plain), 4, 1, LowShot())) == 8
    for path, settings, message in (
        (plain, LowShot(), "class 2: 4 samples, 5 wanted"),
        (named, LowShot(), r"named\.safetensors: class bee: 0 samples, 1 wanted; ask for"),
        (one, LowShot(), r"one\.safetensors: low_shot needs at least two"),
        (one, half, r"one\.safetensors: low_shot needs at least two"),
    ):
        with pytest.raises(UserError, match=message):
            settings.evaluate(rank, given(job, train=path, test=path))
    # What a fraction of a class is can be said of none.
    half.evaluate(rank, given(job, train=named, test=named))


def test_lists_name_the_samples(tmp_path):
    features, labels = blobs(30, 6, 3, 0)
    keys = [f"n{label:08d}/n{label:08d}_{i}" for i, label in enumerate(labels)]
    train = store(tmp_path / "t.safetensors", features, labels, keys)
    ids = [int(np.flatnonzero(labels == label)[2]) for label in range(3)]
    path = tmp_path / "msn_1shot_split1.txt"
    path.write_text("".join(f"{keys[i].split('/')[1]}.JPEG\n" for i in reversed(ids)))
    settings = LowShot(shots=(1,), splits=1, subsets=str(tmp_path)).read_lists()
    found = low_shot.choose_samples(open_features(train), 1, 1, settings)
    assert found.tolist() == sorted(ids)
    path.write_text("n1_77.JPEG\n")
    with pytest.raises(UserError, match=r"split1\.txt: .* lacks 1 listed images, n1_77"):
        low_shot.choose_samples(open_features(train), 1, 1, settings)
    with pytest.raises(UserError, match=r"split2\.txt: No such file"):
        low_shot.choose_samples(open_features(train), 1, 2, settings)
