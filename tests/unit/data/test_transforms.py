import numpy as np
import pytest
import torch
import torchvision.transforms.functional as F
from PIL import Image, ImageFilter, ImageOps
from sample_images import photographs, random_crop
from scipy.ndimage import gaussian_filter

from maect.data import random
from maect.data import transforms as ours
from maect.data.transforms import PAPER, augment, normalize
from maect.recipes import AUGMENTATIONS, View


def tensor(images: list[Image.Image]) -> torch.Tensor:
    return torch.stack([torch.from_numpy(np.array(i)).permute(2, 0, 1) for i in images])


@pytest.fixture(scope="module")
def pieces() -> torch.Tensor:
    rng = np.random.default_rng(0)
    return tensor([random_crop(rng).resize((48, 40)) for _ in range(24)])


def column(values: list[float]) -> torch.Tensor:
    return torch.tensor(values).view(-1, 1, 1, 1)


def test_normalize_is_torchvisions(pieces: torch.Tensor) -> None:
    expected = F.normalize(pieces.float() / 255, list(ours.MEAN), list(ours.STD))
    torch.testing.assert_close(normalize(pieces, PAPER), expected)
    torch.testing.assert_close(normalize(pieces.float() / 255, PAPER), expected)


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
def test_each_colour_change(change, reference, low, high, pieces: torch.Tensor) -> None:
    x = pieces.float() / 255
    factors = np.linspace(low, high, len(x)).tolist()
    found = change(x, column(factors))
    for one, before, raw, factor in zip(found, x, pieces, factors, strict=True):
        torch.testing.assert_close(one, reference(before, factor), atol=2e-5, rtol=0)
        picture = Image.fromarray(raw.permute(1, 2, 0).numpy())
        pillow = np.asarray(reference(picture, factor)).transpose(2, 0, 1)
        # Pillow rounds to eight bits between its steps; its hue has only 256 values.
        error = np.abs(one.numpy() * 255 - pillow)
        assert error.mean() < (2.5 if change is ours.hue else 0.7)


def test_jitter_applies_each_samples_own_order(pieces: torch.Tensor) -> None:
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


def test_blur_is_gaussian_with_each_samples_sigma(pieces: torch.Tensor) -> None:
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


def test_grey_and_solarize_are_pillows() -> None:
    photo = photographs()[0]
    x = tensor([photo])
    view = View(crop_scale=(0.2, 1), flip=0, gray=1)
    pixels = undo(augment(x, view, 0, 0, [0], [0], PAPER))[0]
    assert np.abs(pixels - np.asarray(ImageOps.grayscale(photo), np.float32)).max() <= 1
    view = View(crop_scale=(0.2, 1), flip=0, solarize=1)
    pixels = undo(augment(x, view, 0, 0, [0], [0], PAPER))[0]
    expected = np.asarray(ImageOps.solarize(photo, 128), np.float32).transpose(2, 0, 1)
    assert np.abs(pixels - expected).max() < 1e-2


def undo(x: torch.Tensor) -> np.ndarray:
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (ours.MEAN, ours.STD))
    return ((x * std + mean) * 255).numpy()


def test_order_is_jitter_blur_grey_solarize() -> None:
    x = torch.randint(0, 256, (1, 3, 24, 24), dtype=torch.uint8)
    view = View(crop_scale=(0.2, 1), flip=1, jitter=1, blur=1, gray=1, solarize=1)
    u = random.uniform(7, 3, [11], 1, random.COLOR, 13)
    y = (x.float() / 255).flip(3)
    y = ours.jitter(y, np.array([True]), u[:, 1:5], u[:, 5:9])
    y = ours.blur(y, 0.1 + 1.9 * u[:, 10])
    y = ours.luma(y).expand(-1, 3, -1, -1)
    y = torch.where(y >= 128 / 255, 1 - y, y)
    torch.testing.assert_close(augment(x, view, 1, 7, [3], [11], PAPER), normalize(y, PAPER))


def test_probabilities_and_asymmetry_of_the_two_views() -> None:
    n = 4000
    ids = np.arange(n)
    x = torch.randint(0, 256, (1, 3, 8, 8), dtype=torch.uint8).expand(n, -1, -1, -1)
    for number, view in enumerate(AUGMENTATIONS["aug"]):
        only = {
            name: View(crop_scale=(1, 1), flip=0, **{name: getattr(view, name)})
            for name in ("jitter", "blur", "gray", "solarize")
        }
        only["flip"] = View(crop_scale=(1, 1), flip=view.flip)
        for name, one in only.items():
            same = augment(x, one, number, 0, np.zeros(n, int), ids, PAPER) == normalize(x, PAPER)
            share = 1 - same.all(3).all(2).all(1).float().mean().item()
            p = getattr(view, name)
            # Of all blurs, the weakest 3 % change no bit of a float.
            tolerance = 4 * (p * (1 - p) / n) ** 0.5 + (0.035 if name == "blur" else 1e-3)
            assert abs(share - p) < tolerance, name


def test_sample_does_not_depend_on_its_batch(pieces: torch.Tensor) -> None:
    view = AUGMENTATIONS["aug"][1]
    ids, epochs = np.arange(24) + 100, np.arange(24) % 2
    together = augment(pieces, view, 1, 9, epochs, ids, PAPER)
    for i in (0, 5, 23):
        alone = augment(pieces[i : i + 1], view, 1, 9, epochs[i : i + 1], ids[i : i + 1], PAPER)
        torch.testing.assert_close(together[i : i + 1], alone, atol=1e-5, rtol=0)
    again = augment(pieces, view, 1, 9, epochs, ids, PAPER)
    assert torch.equal(together, again)


def test_input_is_left_alone(pieces: torch.Tensor) -> None:
    before = pieces.clone()
    augment(pieces, AUGMENTATIONS["aug"][0], 0, 0, np.zeros(24, int), np.arange(24), PAPER)
    assert torch.equal(before, pieces)
