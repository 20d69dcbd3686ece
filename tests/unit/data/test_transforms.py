import math

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as F
from PIL import Image, ImageFilter, ImageOps
from sample_images import photographs, random_crop
from scipy.ndimage import gaussian_filter

from maect.data import random
from maect.data import transforms as ours
from maect.data.transforms import augment, denormalize, normalize
from maect.recipes import AUGMENTATIONS, Pixels, View


def tensor(images: list[Image.Image]) -> torch.Tensor:
    return torch.stack([torch.from_numpy(np.array(i)).permute(2, 0, 1) for i in images])


@pytest.fixture(scope="module")
def pieces() -> torch.Tensor:
    rng = np.random.default_rng(0)
    return tensor([random_crop(rng).resize((48, 40)) for _ in range(24)])


def test_normalize_is_torchvisions(pieces):
    expected = F.normalize(pieces.float() / 255, list(ours.MEAN), list(ours.STD))
    torch.testing.assert_close(normalize(pieces, Pixels()), expected)
    torch.testing.assert_close(normalize(pieces.float() / 255, Pixels()), expected)
    assert torch.equal(denormalize(expected, Pixels()), pieces)
    beyond = torch.tensor([-9.0, 9.0])[:, None, None, None]
    assert denormalize(beyond, Pixels()).unique().tolist() == [0, 255]


def test_images_stay_on_their_device(pieces):
    images, ids = pieces.to("meta"), np.arange(24)
    for device_of in (normalize, denormalize):
        assert device_of(images, Pixels()).is_meta
    assert augment(images, AUGMENTATIONS["aug"][0], 0, 0, ids * 0, ids, Pixels()).is_meta
    assert ours.erase(images.float(), 1.0, 0, ids * 0, ids).is_meta


def test_crops_have_the_distribution_of_torchvision():
    from scipy.stats import ks_2samp
    from torchvision.transforms import RandomResizedCrop

    torch.manual_seed(0)
    n = 2000
    for width, height, scale in ((500, 375, (0.08, 1.0)), (60, 300, (0.2, 1.0))):
        picture = Image.new("RGB", (width, height))
        theirs = np.array(
            [RandomResizedCrop.get_params(picture, list(scale), [3 / 4, 4 / 3]) for _ in range(n)]
        )
        size = np.full(n, width), np.full(n, height)
        found = ours.random_crops(*size, scale, 32, seed=0, epochs=0, ids=np.arange(n), view=0)
        for mine, column in zip(found.T[:4], (1, 0, 3, 2), strict=True):
            assert ks_2samp(mine, theirs[:, column]).pvalue > 1e-3


def crop_by_hand(width: int, height: int, scale: tuple[float, float], u: list[float]):  # type: ignore[no-untyped-def]
    """One image's random resized crop from its uniform numbers, try by try."""
    for number in range(10):
        area = width * height * (scale[0] + (scale[1] - scale[0]) * u[2 * number])
        ratio = math.exp(math.log(4 / 3) * (2 * u[2 * number + 1] - 1))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(u[20] * (width - w + 1)), int(u[21] * (height - h + 1)), w, h
    w = max(1, min(width, round(height * (4 / 3))))
    h = max(1, min(height, round(width / (3 / 4))))
    return (width - w) // 2, (height - h) // 2, w, h


def test_crops_are_those_of_a_loop_over_tries():
    """Of images of all shapes, tiny and extreme ones too."""
    rng = np.random.default_rng(0)
    sides = np.concatenate(
        [rng.integers(1, 5, (200, 2)), rng.integers(1, 700, (200, 2)), [[65_500, 65_500]]]
    )
    sides = np.concatenate([sides, [[65_500, 3], [2, 50_000]], np.exp(rng.uniform(0, 9, (200, 2)))])
    width, height = sides.astype(np.int64).T
    ids, epochs = np.arange(len(sides)) + 7, np.arange(len(sides)) % 3
    for scale, view in (((0.08, 1.0), 0), ((0.9, 1.0), 2)):
        u = random.uniform(5, epochs, ids, view, random.CROP, 22).tolist()
        found = ours.random_crops(
            width, height, scale, 24, seed=5, epochs=epochs, ids=ids, view=view
        )
        for row, w, h, numbers in zip(found.tolist(), width, height, u, strict=True):
            assert row == [*crop_by_hand(int(w), int(h), scale, numbers), 24, 24, 0, 0]
            assert 0 <= row[0] <= w - row[2] and 0 <= row[1] <= h - row[3]


def blended(contrast: float, saturation: float):  # type: ignore[no-untyped-def]
    """`blend_` of one kind, that leaves its argument alone."""

    def change(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        of_each = (torch.full_like(factor, share) for share in (contrast, saturation))
        return ours.blend_(x.clone(), factor, *of_each)

    return change


@pytest.mark.parametrize(
    ("change", "reference", "low", "high"),
    [
        (blended(0, 0), F.adjust_brightness, 0.6, 1.4),
        (blended(1, 0), F.adjust_contrast, 0.6, 1.4),
        (blended(0, 1), F.adjust_saturation, 0.8, 1.2),
        (ours.hue, F.adjust_hue, -0.1, 0.1),
    ],
)
def test_each_colour_change(change, reference, low, high, pieces):
    x = pieces.float() / 255
    factors = np.linspace(low, high, len(x)).tolist()
    found = change(x, torch.tensor(factors).view(-1, 1, 1, 1))
    for one, before, raw, factor in zip(found, x, pieces, factors, strict=True):
        torch.testing.assert_close(one, reference(before, factor), atol=2e-5, rtol=0)
        picture = Image.fromarray(raw.permute(1, 2, 0).numpy())
        pillow = np.asarray(reference(picture, factor)).transpose(2, 0, 1)
        # Pillow rounds to eight bits between its steps; its hue has only 256 values.
        error = np.abs(one.numpy() * 255 - pillow)
        assert error.mean() < (2.5 if change is ours.hue else 0.7)


def test_jitter_applies_each_samples_own_order(pieces):
    x = pieces.float() / 255
    u = np.random.default_rng(0).random((len(x), 8))
    chosen = np.arange(len(x)) % 3 != 0
    found = ours.jitter(x, chosen, u[:, :4], u[:, 4:])
    changes = [F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue]
    widths = [0.4, 0.4, 0.2, 0.1]
    orders = set()
    for i in range(len(x)):
        expected = x[i]
        if chosen[i]:
            order = np.argsort(u[i, 4:])
            orders.add(tuple(order))
            for number in order:
                centre = 0 if number == 3 else 1
                factor = centre + widths[number] * (2 * u[i, number] - 1)
                expected = changes[number](expected, factor)
        torch.testing.assert_close(found[i], expected, atol=1e-4, rtol=0)
    assert len(orders) > 8


def test_blur_is_gaussian_with_each_samples_sigma(pieces):
    x = pieces.float() / 255
    sigma = np.linspace(0.1, 2.0, len(x))
    found = ours.blur(x, sigma)
    for one, before, raw, s in zip(found, x, pieces, sigma, strict=True):
        expected = gaussian_filter(before.numpy(), (0, s, s), mode="nearest", radius=8)
        assert np.abs(one.numpy() - expected).max() < 1e-5
        picture = Image.fromarray(raw.permute(1, 2, 0).numpy())
        pillow = np.asarray(picture.filter(ImageFilter.GaussianBlur(s))).transpose(2, 0, 1)
        error = np.abs(one.numpy() * 255 - pillow)
        assert error.mean() < 1.0  # Pillow approximates the Gaussian by three box filters


def test_grey_and_solarize_are_pillows():
    photo = photographs()[0]
    x = tensor([photo])
    view = View(crop_scale=(0.2, 1), flip=0, gray=1)
    pixels = undo(augment(x, view, 0, 0, [0], [0], Pixels()))[0]
    assert np.abs(pixels - np.asarray(ImageOps.grayscale(photo), np.float32)).max() <= 1
    view = View(crop_scale=(0.2, 1), flip=0, solarize=1)
    pixels = undo(augment(x, view, 0, 0, [0], [0], Pixels()))[0]
    expected = np.asarray(ImageOps.solarize(photo, 128), np.float32).transpose(2, 0, 1)
    assert np.abs(pixels - expected).max() < 1e-2


def undo(x: torch.Tensor) -> np.ndarray:
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (ours.MEAN, ours.STD))
    return ((x * std + mean) * 255).numpy()


def test_order_is_jitter_blur_grey_solarize():
    x = torch.randint(0, 256, (1, 3, 24, 24), dtype=torch.uint8)
    view = View(crop_scale=(0.2, 1), flip=1, jitter=1, blur=1, gray=1, solarize=1)
    u = random.uniform(7, 3, [11], 1, random.COLOR, 13)
    y = (x.float() / 255).flip(3)
    y = ours.jitter(y, np.array([True]), u[:, 1:5], u[:, 5:9])
    y = ours.blur(y, 0.1 + 1.9 * u[:, 10])
    y = ours.luma(y).expand(-1, 3, -1, -1)
    y = torch.where(y >= 128 / 255, 1 - y, y)
    torch.testing.assert_close(augment(x, view, 1, 7, [3], [11], Pixels()), normalize(y, Pixels()))


def test_sample_does_not_depend_on_its_batch(pieces):
    view = AUGMENTATIONS["aug"][1]
    ids, epochs, before = np.arange(24) + 100, np.arange(24) % 2, pieces.clone()
    together = augment(pieces, view, 1, 9, epochs, ids, Pixels())
    for i in (0, 5, 23):
        alone = augment(pieces[i : i + 1], view, 1, 9, epochs[i : i + 1], ids[i : i + 1], Pixels())
        torch.testing.assert_close(together[i : i + 1], alone, atol=1e-5, rtol=0)
    again = augment(pieces, view, 1, 9, epochs, ids, Pixels())
    assert torch.equal(together, again) and torch.equal(before, pieces)


def test_changes_of_several_views_are_those_of_each():
    views = {0: AUGMENTATIONS["aug"][0], 3: AUGMENTATIONS["min"][0], 1: AUGMENTATIONS["aug"][1]}
    ids, epochs = np.arange(50), np.arange(50) % 2
    together = vars(ours.draw_changes(views, 4, epochs, ids))
    each = [vars(ours.draw_changes({n: view}, 4, epochs, ids)) for n, view in views.items()]
    for name, values in together.items():
        assert np.array_equal(values, np.concatenate([one[name] for one in each])), name
    # Each is decided on by a number of its own, which is no strength or place of another.
    u = random.uniform(4, epochs, ids, 0, random.FLIP, 1)[:, 0]
    assert np.array_equal(each[0]["flipped"], u < views[0].flip)
    u, view = random.uniform(4, epochs, ids, 1, random.COLOR, 13), views[1]
    kinds = {"jittered": view.jitter, "blurred": view.blur, "grey": view.gray}
    for number, (name, odds) in zip((0, 9, 11), kinds.items(), strict=True):
        assert np.array_equal(each[2][name], u[:, number] < odds)
    assert np.array_equal(each[2]["solarized"], u[:, 12] < view.solarize)
