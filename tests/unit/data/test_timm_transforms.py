"""RandAugment, erasing and mixing against timm's own, with its draws replaced by ours."""

import math
import random as python_random
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from timm.data import auto_augment
from timm.data.mixup import Mixup, mixup_target
from timm.data.random_erasing import RandomErasing

from maect.data import random
from maect.data.transforms import (
    MEAN,
    OPERATIONS,
    Mix,
    apply_mix,
    apply_operation,
    draw_mix,
    erase,
    partners,
    randaugment,
    rectangle,
)

HPARAMS = {
    "translate_const": 100,
    "img_mean": tuple(round(255 * x) for x in MEAN),
    "interpolation": Image.Resampling.BICUBIC,
    "magnitude_std": 0.5,
}


def picture(seed: int = 0, size: int = 32) -> np.ndarray:
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    resized = Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC)
    return np.ascontiguousarray(np.asarray(resized).transpose(2, 0, 1))


def test_operations_are_those_of_timms_increasing_policy() -> None:
    assert list(OPERATIONS) == auto_augment._RAND_INCREASING_TRANSFORMS


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("magnitude", [0.0, 3.3, 8.7, 9.0, 10.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_each_operation_is_timms(name: str, magnitude: float, sign: int) -> None:
    """timm negates where `random.random()` is above one half."""
    op = auto_augment.AugmentOp(name, prob=1.0, magnitude=magnitude, hparams=HPARAMS)
    with (
        patch.object(python_random, "random", lambda: 0.25 if sign > 0 else 0.75),
        patch.object(python_random, "gauss", lambda mean, deviation: mean),
    ):
        expected = np.asarray(op(Image.fromarray(picture().transpose(1, 2, 0))))
    image = picture()
    apply_operation(image, name, magnitude / 10, sign)
    assert np.array_equal(image.transpose(1, 2, 0), expected)


def test_randaugment_depends_on_seed_epoch_and_sample_alone() -> None:
    change = randaugment(2, 9.0, seed=3)
    assert change is not None and randaugment(0, 9.0, 3) is None

    def changed(epoch: int, number: int, seed: int = 3) -> bytes:
        views = picture()[None].copy()
        randaugment(2, 9.0, seed)(views, epoch, number)  # type: ignore[misc]
        return views.tobytes()

    python_random.seed(1), np.random.seed(1)
    first = [changed(0, n) for n in range(40)]
    python_random.seed(2), np.random.seed(2)
    assert first == [changed(0, n) for n in range(40)]
    assert len(set(first)) > 20
    assert first != [changed(1, n) for n in range(40)]
    assert first != [changed(0, n, seed=4) for n in range(40)]
    # Two operations at even odds: a quarter of the images stays as it is (autocontrast and others
    # leave some unchanged, too).
    unchanged = sum(x == picture()[None].tobytes() for x in first)
    assert 4 <= unchanged <= 20


@contextmanager
def timms_draws(row: np.ndarray) -> Iterator[None]:
    """Our uniform numbers in the order in which timm asks for them."""
    numbers, place = iter(row[2:]), iter(row[:2])
    with (
        patch.object(python_random, "random", lambda: 0.0),
        patch.object(python_random, "uniform", lambda a, b: a + (b - a) * next(numbers)),
        patch.object(python_random, "randint", lambda a, b: a + int(next(place) * (b + 1))),
    ):
        yield


def test_erasing_has_timms_rectangles() -> None:
    size, ours, theirs = 24, [], []
    draws = random.uniform(0, 0, np.arange(200), 0, random.ERASE, 24)
    for row in draws[:, 1:-1]:
        ours.append(rectangle(row, size, size))
        image = torch.zeros(3, size, size)
        with timms_draws(row):
            RandomErasing(1.0, mode="pixel", device="cpu")(image)
        rows, columns = np.nonzero(image.abs().sum(0).numpy())
        theirs.append((rows.min(), columns.min(), np.ptp(rows) + 1, np.ptp(columns) + 1))
    assert ours == theirs


def test_erasing_changes_a_share_of_the_images_and_only_a_rectangle() -> None:
    ids = np.arange(400)
    images = torch.full((400, 3, 16, 16), 5.0)
    erase(images, 0.25, 1, 0, ids)
    hit = (images != 5).flatten(1).any(1)
    assert 70 <= int(hit.sum()) <= 130
    noise = images[images != 5]
    assert abs(float(noise.mean())) < 0.05 and abs(float(noise.std()) - 1) < 0.05
    part = torch.full((7, 3, 16, 16), 5.0)
    erase(part, 0.25, 1, 0, ids[13:20])
    assert torch.equal(part, images[13:20])
    untouched = torch.full((4, 3, 16, 16), 5.0)
    assert torch.equal(erase(untouched, 0.0, 1, 0, ids[:4]), torch.full((4, 3, 16, 16), 5.0))


def test_no_rectangle_fits_into_a_line() -> None:
    assert rectangle(np.full(22, 0.5), 1, 100) is None


def test_mixing_is_timms() -> None:
    """timm pairs first with last; put each image's partner there and compare pixels and labels."""
    size, classes = 20, 5
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.normal(size=(8, 3, size, size)))
    labels = torch.from_numpy(rng.integers(0, classes, 8))
    order = torch.tensor([0, 2, 4, 6, 7, 5, 3, 1])
    kinds = set()
    for step in range(12):
        mix = draw_mix(0.8, 1.0, size, seed=5, step=step)
        kinds.add(mix.box is None)
        theirs = images[order].clone()
        lam = mix.share
        if mix.box is not None:
            top, bottom, left, right = mix.box
            lam = 1 - (bottom - top) * (right - left) / size**2
        mixup = Mixup(0.8, 1.0, label_smoothing=0.1, num_classes=classes)
        with (
            patch.object(mixup, "_params_per_batch", lambda m=mix: (m.share, m.box is not None)),
            patch("timm.data.mixup.cutmix_bbox_and_lam", lambda *_, m=mix, **__: (m.box, m.share)),
        ):
            theirs, targets = mixup(theirs, labels[order])
        assert mix.share == pytest.approx(lam)
        ours = apply_mix(images, mix)[order]
        np.testing.assert_allclose(ours, theirs, atol=1e-12)
        expected = mixup_target(labels[order], classes, mix.share, 0.1)
        torch.testing.assert_close(targets, expected)
    assert kinds == {True, False}


def test_partners_are_each_others_and_stay_in_an_even_share() -> None:
    rows = torch.arange(12)
    other = partners(rows)
    assert torch.equal(partners(other), rows) and not (other == rows).any()
    assert torch.equal(torch.cat([partners(rows[:4]), partners(rows[4:])]), other)
    assert torch.equal(apply_mix(rows[:3], Mix()), rows[:3])  # nothing to mix: any number


def test_shares_have_the_beta_distribution() -> None:
    shares = [draw_mix(0.8, 0, 32, 0, step).share for step in range(2000)]
    assert stats.kstest(shares, stats.beta(0.8, 0.8).cdf).pvalue > 0.01
    cut = [draw_mix(0, 1.0, 32, 0, step) for step in range(500)]
    assert all(mix.box is not None for mix in cut)
    both = [draw_mix(0.8, 1.0, 32, 0, step).box is None for step in range(1000)]
    assert 440 < sum(both) < 560
    assert draw_mix(0, 0, 32, 0, 3) == Mix()
    assert not math.isnan(min(shares)) and min(shares) >= 0 and max(shares) <= 1
