"""Masks, lookup numbers and drop path: what they depend on, and their distributions."""

import math

import numpy as np
import torch

from maect.data.random import drop_path_factors, ids_shuffle, lookup_numbers, wrong_lookups


def test_masks_depend_on_seed_epoch_id_and_view_alone() -> None:
    ids, epochs = np.arange(40, dtype=np.int64), np.zeros(40, np.int64)
    order = ids_shuffle(16, 1, epochs, ids, range(2))
    assert order.shape == (2, 40, 16)
    assert torch.equal(order.sort(2).values, torch.arange(16).expand(2, 40, 16))
    part = ids_shuffle(16, 1, epochs[30:33], ids[30:33], range(2))
    assert torch.equal(part, order[:, 30:33])
    for other in (
        ids_shuffle(16, 2, epochs, ids, range(2)),
        ids_shuffle(16, 1, epochs + 1, ids, range(2)),
        ids_shuffle(16, 1, epochs, ids + 40, range(2)),
        order.flip(0),
    ):
        assert (other == order).all(2).float().mean() < 0.05


def test_every_patch_is_equally_often_visible() -> None:
    ids = np.arange(20_000, dtype=np.int64)
    visible = ids_shuffle(16, 0, ids * 0, ids, range(1))[0, :, :4]
    counts = torch.bincount(visible.flatten(), minlength=16) / len(ids)
    assert (counts - 0.25).abs().max() < 5 * math.sqrt(0.25 * 0.75 / len(ids))


def test_lookup_numbers_are_uniform_and_independent_of_rank() -> None:
    ids = np.arange(30_000, dtype=np.int64)
    numbers = lookup_numbers(5, 0, ids * 0, ids, 2)
    assert numbers.min() == 0 and numbers.max() == 4
    counts = torch.bincount(numbers[0], minlength=5) / len(ids)
    assert (counts - 0.2).abs().max() < 5 * math.sqrt(0.2 * 0.8 / len(ids))
    assert abs((numbers[0] == numbers[1]).float().mean() - 0.2) < 0.02
    assert torch.equal(lookup_numbers(5, 0, ids[:9] * 0, ids[100:109], 2), numbers[:, 100:109])


def test_an_oracle_errs_as_often_as_it_is_told() -> None:
    ids = np.arange(4000)
    wrong = wrong_lookups(0.75, 0, ids * 0, ids, 2)
    assert wrong.shape == (2, 4000) and (wrong[0] != wrong[1]).any()
    np.testing.assert_allclose(wrong.double().mean(dim=1), 0.25, atol=0.03)
    assert torch.equal(wrong_lookups(0.75, 0, ids[:9] * 0, ids[100:109], 2), wrong[:, 100:109])
    # What is right at a lower part is right at a higher one; at 0 and 1 nothing is drawn.
    assert (wrong <= wrong_lookups(0.5, 0, ids * 0, ids, 2)).all()
    assert wrong_lookups(0.0, 0, ids * 0, ids, 2).all()
    assert not wrong_lookups(1.0, 0, ids * 0, ids, 2).any()


def test_drop_path_keeps_the_mean_and_depends_on_the_sample_alone() -> None:
    ids, rates = np.arange(20_000, dtype=np.int64), np.array([0.0, 0.1, 0.4])
    factors = drop_path_factors(rates, 0, ids * 0, ids)
    assert factors.shape == (3, 20_000) and factors.dtype == torch.float32
    dropped = (factors == 0).float().mean(1)
    assert dropped[0] == 0 and (dropped - torch.tensor(rates)).abs().max() < 0.015
    assert (factors.mean(1) - 1).abs().max() < 0.02
    assert torch.equal(drop_path_factors(rates, 0, ids[:9] * 0, ids[50:59]), factors[:, 50:59])


def test_draws_are_pinned() -> None:
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
