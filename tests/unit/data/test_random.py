import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maect.data import random
from maect.data.random import drop_path_factors, ids_shuffle, lookup_numbers, wrong_lookups


def test_first_words_follow_splitmix64():
    # From state 0 the generator's published first outputs.
    words = random.mix(np.array([1, 2, 3], np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    assert [hex(w) for w in words] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


def test_streams_differ():
    streams = [value for name, value in vars(random).items() if name.isupper() and name[0] != "_"]
    assert len(streams) > 10 and len(set(streams)) == len(streams)


def test_bits_are_pinned():
    # A change of these values changes every run: never update them.
    words = random.bits(5, [0, 1], [7, 8], 1, random.CROP, 2)
    assert words.tolist() == [
        [10144255542820365049, 9580809202707078609],
        [3352415301950461236, 11560008063984983409],
    ]
    # A seed below 0, an id above 2^63, and words behind the first four.
    ids = np.array([2**63 + 5], np.uint64)
    assert random.bits(-3, 0, ids, 0, random.CROP, 1, 4).tolist() == [[15418824374037924557]]
    u = random.uniform(1, [0, 3], [7, 1000], 0, random.CROP, 2)
    assert u.tolist() == [
        [0.3542450866248359, 0.3913170927591353],
        [0.2143439086410498, 0.5195297379165521],
    ]


@given(st.integers(0, 2**63), st.integers(0, 10**6), st.integers(1, 40), st.integers(0, 39))
def test_sample_is_independent_of_its_batch(seed, epoch, n, which):
    ids = np.arange(n)
    which %= n
    together = random.bits(seed, np.full(n, epoch), ids, 0, random.COLOR, 5)
    alone = random.bits(seed, epoch, ids[which], 0, random.COLOR, 5)
    longer = random.bits(seed, epoch, ids[which], 0, random.COLOR, 9)
    assert (together[which] == alone[0]).all()
    assert (longer[0, :5] == alone[0]).all()


@pytest.mark.parametrize("change", ["seed", "epoch", "view", "stream"])
def test_every_argument_matters(change):
    base = {"seed": 1, "epoch": 2, "view": 0, "stream": random.CROP}
    other = dict(base, **{change: base[change] + 1})

    def draw(a: dict[str, int]) -> np.ndarray:
        ids = np.arange(20_000)
        return random.uniform(a["seed"], a["epoch"], ids, a["view"], a["stream"], 1)[:, 0]

    x, y = draw(base), draw(other)
    assert abs(np.corrcoef(x, y)[0, 1]) < 0.03  # 4 standard deviations
    assert len(np.intersect1d(x, y)) == 0


def test_uniform_has_a_uniform_distribution():
    from scipy.stats import kstest

    u = random.uniform(3, 0, np.arange(50_000), 0, random.MASK, 4)
    assert u.min() >= 0 and u.max() < 1
    for column in u.T:
        assert kstest(column, "uniform").pvalue > 1e-4
    neighbours = np.corrcoef(u.T) - np.eye(4)
    assert abs(neighbours).max() < 0.02
    assert abs(np.corrcoef(u[:-1, 0], u[1:, 0])[0, 1]) < 0.02


def test_ids_must_be_integers():
    with pytest.raises(TypeError, match="integers expected, not float64"):
        random.bits(0, 0, [0.5], 0, random.CROP, 1)


def test_each_draw_is_made_of_the_samples_own_numbers():
    """What these depend on, and that they are uniform, is tested with the generator."""
    ids, epochs, rates = np.arange(40) + 5, np.arange(40) % 3, np.array([0.0, 0.1, 0.4])
    order = ids_shuffle(16, 1, epochs, ids, [0, 2])
    for row, view in zip(order.tolist(), (0, 2), strict=True):
        words = random.bits(1, epochs, ids, view, random.MASK, 16).tolist()
        assert row == [sorted(range(16), key=each.__getitem__) for each in words]
    numbers, wrong = (
        draw(part, 1, epochs, ids, 2).tolist()
        for draw, part in ((lookup_numbers, 5), (wrong_lookups, 0.75))
    )
    for view in range(2):
        u = random.uniform(1, epochs, ids, view, random.LOOKUP, 1)[:, 0].tolist()
        assert numbers[view] == [int(5 * each) for each in u]
        u = random.uniform(1, epochs, ids, view, random.WRONG, 1)[:, 0].tolist()
        assert wrong[view] == [not each < 0.75 for each in u]
    # Of an oracle that is never or always right nothing depends on the draw.
    assert wrong_lookups(0.0, 1, epochs, ids, 2).all()
    assert not wrong_lookups(1.0, 1, epochs, ids, 2).any()
    factors = drop_path_factors(rates, 1, epochs, ids)
    u = random.uniform(1, epochs, ids, 0, random.DROP_PATH, 3).T
    kept = np.where(u < rates[:, None], 0, 1 / (1 - rates[:, None]))
    assert 0 < np.mean(kept[2] == 0) < 0.7
    torch.testing.assert_close(factors, torch.from_numpy(kept).float())


def test_draws_are_pinned():
    # A change of these values changes every run: never update them.
    ids, epochs = np.array([7, 8, 1000]), np.array([0, 0, 3])
    assert ids_shuffle(6, 1, epochs, ids, range(2)).tolist() == [
        [[5, 4, 0, 1, 3, 2], [3, 4, 0, 2, 1, 5], [0, 1, 5, 3, 4, 2]],
        [[4, 0, 2, 3, 5, 1], [3, 1, 0, 5, 2, 4], [5, 1, 4, 0, 2, 3]],
    ]
    numbers = lookup_numbers(20, 1, epochs, ids, 2)
    assert numbers.dtype == torch.int64
    assert numbers.tolist() == [[19, 15, 16], [15, 7, 3]]
    wrong = wrong_lookups(0.5, 1, epochs, ids, 2)
    assert wrong.tolist() == [[False, True, True], [False, True, False]]
    factors = drop_path_factors(np.array([0.2, 0.5]), 1, epochs, ids)
    assert factors.tolist() == [[0.0, 1.25, 1.25], [2.0, 2.0, 0.0]]
