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


def test_operations_are_those_of_timms_increasing_policy():
    assert list(OPERATIONS) == auto_augment._RAND_INCREASING_TRANSFORMS


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("magnitude", [0.0, 3.3, 8.7, 9.0, 10.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_each_operation_is_timms(name, magnitude, sign):
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


def test_randaugment_applies_what_is_drawn_for_the_sample():
    """Each of its operations at even odds, as strong as a normal distribution says."""
    change, left, clipped = randaugment(2, 9.8, seed=3), 0, 0
    assert change is not None and randaugment(0, 9.8, 3) is None
    for number in range(60):
        views = np.stack([picture(), picture(1)])
        change(views, 1, number)
        expected = picture()
        for operation, odds, strength, sign in random.uniform(
            3, 1, number, 0, random.RAND_AUGMENT, 8
        ).reshape(2, 4):
            drawn = stats.norm(9.8, 0.5).ppf(strength) / 10
            name = OPERATIONS[int(operation * 15)]
            if odds < 0.5:
                apply_operation(expected, name, min(max(drawn, 0), 1), 1 if sign < 0.5 else -1)
            left, clipped = left + (odds >= 0.5), clipped + (drawn > 1)
        assert np.array_equal(views, np.stack([expected, picture(1)]))
    assert 40 < left < 80 and clipped


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


def test_erasing_has_timms_rectangles():
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


def test_erasing_fills_the_rectangle_that_is_drawn_for_the_sample():
    ids, epochs = np.arange(80) + 5, np.arange(80) % 2
    images = torch.full((80, 3, 16, 12), 5.0)
    expected, erased = images.clone(), 0
    assert torch.equal(erase(images.clone(), 0.0, 1, epochs, ids), images)
    for image, row in zip(
        expected, random.uniform(1, epochs, ids, 0, random.ERASE, 24), strict=True
    ):
        box = rectangle(row[1:-1], 16, 12)
        if row[0] < 0.25 and box is not None:
            top, left, height, width = box
            generator = torch.Generator().manual_seed(int(row[-1] * 2**53))
            noise = torch.randn(3 * height * width, generator=generator)
            image[:, top : top + height, left : left + width] = noise.view(3, height, width)
            erased += 1
    assert 10 < erased < 35 and torch.equal(erase(images, 0.25, 1, epochs, ids), expected)


def test_no_rectangle_fits_into_a_line():
    assert rectangle(np.full(22, 0.5), 1, 100) is None


def test_mixing_is_timms():
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


def test_partners_are_each_others_and_stay_in_an_even_share():
    rows = torch.arange(12)
    other = partners(rows)
    assert torch.equal(partners(other), rows) and not (other == rows).any()
    assert torch.equal(torch.cat([partners(rows[:4]), partners(rows[4:])]), other)
    assert torch.equal(apply_mix(rows[:3], Mix()), rows[:3])  # nothing to mix: any number


def test_mixtures_are_drawn_by_step():
    """Shares of a beta distribution; boxes cover the rest, but for what is outside."""
    size, kinds = 20, set()
    for mixup, cutmix in ((0.8, 1.0), (0.8, 0), (0, 0.5)):
        for step in range(40):
            kind, amount, *center = random.uniform(5, 0, step, 0, random.MIX, 4)[0]
            mix = draw_mix(mixup, cutmix, size, 5, step)
            cut = kind < 0.5 if mixup and cutmix else bool(cutmix)
            alpha = cutmix if cut else mixup
            share = stats.beta(alpha, alpha).ppf(amount)
            kinds.add((mixup, cutmix, cut))
            if not cut:
                assert mix.box is None and mix.share == pytest.approx(share)
                continue
            side = int(size * math.sqrt(1 - share))
            covered = []
            for place in center:
                first = int(place * size) - side // 2
                covered.append([x for x in range(first, first + side) if 0 <= x < size])
            top, bottom, left, right = mix.box
            assert [[*range(top, bottom)], [*range(left, right)]] == covered
            assert mix.share == pytest.approx(1 - len(covered[0]) * len(covered[1]) / size**2)
    assert len(kinds) == 4 and draw_mix(0, 0, size, 5, 3) == Mix()
