import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maect.data import random


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
