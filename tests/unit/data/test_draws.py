"""Masks, lookup numbers and drop path: made of each sample's own numbers, and pinned."""

import numpy as np
import torch

from maect.data import random
from maect.data.random import drop_path_factors, ids_shuffle, lookup_numbers, wrong_lookups


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
