"""DINOv3's linear head: its settings, and its parts a second time as its code writes them."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torchvision import transforms as T
from torchvision.transforms import functional as Fv

from maect.core.errors import UserError
from maect.data.index import ID, open_index
from maect.data.transforms import normalize
from maect.evaluate.dense import MaskSplit, miou
from maect.evaluate.patch_linear import (
    IGNORED,
    PatchHead,
    Segmenter,
    crop,
    crops,
    distorted,
    picture,
    resized,
    resized_mask,
    windows,
)
from maect.evaluate.probe_training import HELD_OUT, ProbeBatch
from maect.evaluate.protocols.probes import PatchLinear

from .by_hand import task_of
from .conftest import Rank, masked_job

CPU = torch.device("cpu")
SETTINGS = PatchLinear(
    updates=14, warmup_updates=3, period=5, batch_size=4, size=32, stride=20, learning_rate=0.05
)


def test_rates_are_those_of_its_schedule():
    settings = PatchLinear(updates=50, warmup_updates=8)
    plan = settings.schedule(None)
    assert plan.ends == [50]
    number, theirs = 0, []
    for update in range(50):
        if number < 8:
            k = (1 - number / 8) * (1 - 1e-6)
            theirs.append((1 - k) * (1 - number / 50))
        else:  # annealed from the peak to 0
            theirs.append((math.cos(math.pi * (number + 1) / 50) + 1) / 2)
        if update > 0:  # there the first update makes no step of the schedule
            number += 1
    assert [Segmenter.rate(update, plan) for update in range(50)] == pytest.approx(theirs)
    assert theirs[0] == theirs[1] == pytest.approx(1e-6)


@pytest.mark.parametrize("shape", [(40, 60), (60, 40), (50, 50)])
def test_images_and_masks_are_resized_as_by_torchvision(shape):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (*shape, 3), dtype=np.uint8)
    mask = rng.integers(0, 200, shape, dtype=np.uint8)
    for short in (17, 32, 75):
        image = resized(Image.fromarray(pixels), short)
        height, width = image.size[::-1]
        assert min(image.size) == short
        assert max(image.size) == int(short * max(shape) / min(shape) + 0.5)
        theirs = T.Resize((height, width), T.InterpolationMode.BILINEAR)(Image.fromarray(pixels))
        assert np.array_equal(np.asarray(image), np.asarray(theirs))
        nearest = F.interpolate(torch.from_numpy(mask)[None, None].float(), size=(height, width))
        assert np.array_equal(resized_mask(mask, image.size), nearest[0, 0].numpy())


def test_colours_are_distorted_as_there():
    rng = np.random.default_rng(1)
    pixels = rng.integers(0, 256, (24, 20, 3), dtype=np.uint8)

    def plain(draws):
        x = pixels.astype(np.float32)
        early, (b, c, s, h) = draws[0] >= 0.5, draws[1:].reshape(4, 2)

        def contrast(x):
            return np.floor(np.clip(x * (0.5 + c[1]), 0, 255)) if c[0] >= 0.5 else x

        if b[0] >= 0.5:
            x = np.floor(np.clip(x + 32 * (2 * b[1] - 1), 0, 255))
        x = contrast(x) if early else x
        y = torch.from_numpy(x.astype(np.uint8)).permute(2, 0, 1)
        y = Fv.adjust_saturation(y, 0.5 + s[1]) if s[0] >= 0.5 else y
        y = Fv.adjust_hue(y, h[1] - 0.5) if h[0] >= 0.5 else y
        x = y.permute(1, 2, 0).numpy().astype(np.float32)
        return x if early else contrast(x)

    changed = 0
    for _ in range(40):
        draws = rng.random(9)
        ours = distorted(pixels, draws)
        off = np.abs(ours.astype(float) - plain(draws))
        # A level where a channel lies on the border of two: contrast may then double it.
        assert off.max() <= 3 and (off > 0).mean() < 0.02
        changed += not np.array_equal(ours, pixels)
    assert changed > 30
    assert np.array_equal(distorted(pixels, np.zeros(9)), pixels)


def test_crops_show_more_than_one_class_if_that_can_be_found():
    mask = np.full((60, 60), 3, np.uint8)
    mask[40:, 40:] = 7
    image = Image.fromarray(np.stack([mask * 20] * 3, 2))
    draws = np.zeros(1 + 22 + 1 + 9)  # of a sample
    draws[0] = 0.5  # between 1 and 1: the crop's size
    draws[1:23] = np.tile([0.0, 0.0], 11)
    draws[1 + 2 * 4 : 3 + 2 * 4] = 0.999  # the fifth try shows a corner of the other class
    settings = PatchLinear(size=30, ratios=(2.0, 2.0), flip=0.0)
    pixels, part = crop(image.resize((60, 60)), mask, draws, settings)
    counts = np.bincount(part.ravel(), minlength=8)
    assert part.shape == (30, 30) and counts[7] and counts.max() < 0.75 * counts.sum()
    assert np.array_equal(pixels[..., 0] > 100, part == 7)
    mirrored, other = crop(image, mask, draws, settings.model_copy(update={"flip": 1.0}))
    assert np.array_equal(mirrored[:, ::-1], pixels) and np.array_equal(other[:, ::-1], part)
    # Never found: the last try. What does not count is no class.
    mask[:] = np.where(mask == 7, IGNORED, mask)
    draws[1 + 2 * 10 :][:2] = 0.999
    _, part = crop(image, mask, draws, settings)
    assert (part[10:, 10:] == IGNORED).all()


def test_small_images_are_padded_and_draws_do_not_depend_on_ranks(drawn):
    index = open_index(drawn / "shards/train")
    split = MaskSplit(index, open_index(drawn / "shards/train_masks"))
    places = np.arange(256, dtype=np.uint8)

    def made(rank, ranks, start, steps):
        settings = PatchLinear(batch_size=4, seed=3, size=48)
        return list(crops(split, places, settings, Rank(rank, ranks), start, steps))

    whole = made(0, 1, 0, 4)
    for step, both in enumerate(zip(made(0, 2, 0, 4), made(1, 2, 0, 4), strict=True)):
        for name in ("images", "targets"):
            joined = torch.cat([getattr(part, name) for part in both])
            assert torch.equal(joined, getattr(whole[step], name))
    (later,) = made(0, 1, 3, 1)
    assert torch.equal(later.images, whole[3].images)
    assert min(out.sides.min() for out in whole) < 48
    for out in whole:
        for image, target, (height, width) in zip(out.images, out.targets, out.sides, strict=True):
            assert (target[height:] == IGNORED).all() and not image[:, :, width:].any()


def test_the_head_learns_as_modules_of_torch():
    settings = SETTINGS.model_copy(update={"dropout": 0.0})
    torch.set_default_dtype(torch.float64)
    try:
        head = PatchHead(12, 3, settings, CPU)
        norm, conv = nn.BatchNorm2d(12), nn.Conv2d(12, 3, 1)
        conv.weight.data = head.weight.detach().clone()[:, :, None, None]
        conv.bias.data.zero_()
        assert float(head.weight.detach().std()) == pytest.approx(0.01, rel=0.3)
        model = nn.Sequential(norm, conv)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=1e-3)
        rng = torch.Generator().manual_seed(0)
        for step in range(5):
            tokens = 2 * torch.randn(4, 16, 12, generator=rng) + 1
            targets = torch.randint(0, 4, (4, 32, 32), generator=rng)
            targets[targets == 3] = IGNORED
            image = tokens.transpose(1, 2).unflatten(2, (4, 4))
            pred = F.interpolate(model(image), size=(32, 32), mode="bilinear", align_corners=False)
            # Averaged over all pixels, also those that do not count.
            loss = F.cross_entropy(pred, targets, reduction="none", ignore_index=IGNORED).mean()
            optimizer.param_groups[0]["lr"] = 0.05 / (1 + step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            own = head.update(tokens, targets, 1 / (1 + step))
            assert own.item() == pytest.approx(loss.item(), rel=1e-9)
        for found, expected in (
            (head.weight, conv.weight[:, :, 0, 0]), (head.offset, conv.bias),
            (head.gain, norm.weight), (head.shift, norm.bias),
            (head.mean, norm.running_mean), (head.var, norm.running_var),
        ):  # fmt: skip
            torch.testing.assert_close(found, expected)
        model.eval()
        with torch.no_grad():
            pred = F.interpolate(model(image), size=(32, 32), mode="bilinear")
        torch.testing.assert_close(head.outputs(tokens, 32), pred)
    finally:
        torch.set_default_dtype(torch.float32)


def segmenter_of(drawn, tmp_path, settings=SETTINGS):
    return Segmenter(task_of(masked_job(drawn, tmp_path / "a.json")), settings)


@pytest.mark.parametrize(("height", "width"), [(32, 32), (32, 70), (53, 32), (40, 90)])
def test_windows_cover_an_image_as_there(height, width):
    size, stride = 32, 20
    theirs = []
    for row in range(max(height - size + stride - 1, 0) // stride + 1):
        for column in range(max(width - size + stride - 1, 0) // stride + 1):
            bottom = min(row * stride + size, height)
            right = min(column * stride + size, width)
            theirs.append((max(bottom - size, 0), max(right - size, 0)))
    assert windows(height, width, size, stride) == theirs
    seen = np.zeros((height, width), bool)
    for top, left in theirs:
        seen[top : top + size, left : left + size] = True
    assert seen.all()


def test_images_are_segmented_by_windows(drawn, tmp_path):
    probe = segmenter_of(drawn, tmp_path, SETTINGS.model_copy(update={"size": 16, "stride": 10}))
    head = probe.groups["head"]
    rng = torch.Generator().manual_seed(0)
    head.weight.data = torch.randn(head.weight.shape, generator=rng)
    row, encoder = 3, probe.task.encoding
    truth = probe.test.read(row)
    found = probe.segmented(head, probe.test, row, truth.shape)
    image = np.asarray(resized(picture(probe.test, row), 16)).copy()
    x = normalize(torch.from_numpy(image).permute(2, 0, 1)[None], encoder.settings.pixels)
    height, width = x.shape[2:]
    total, count = torch.zeros(1, len(probe.classes), height, width), torch.zeros(height, width)
    for top, left in windows(height, width, 16, 10):
        tokens = encoder.encoder(x[:, :, top : top + 16, left : left + 16]).patch_tokens()
        out = (tokens - head.mean) / (head.var + 1e-5).sqrt() * head.gain + head.shift
        out = (out @ head.weight.T + head.offset).transpose(1, 2).unflatten(2, (4, 4))
        out = F.interpolate(out, size=(16, 16), mode="bilinear")
        right, bottom = width - left - 16, height - top - 16
        total += F.pad(out, (left, right, top, bottom)).detach()
        count[top : top + 16, left : left + 16] += 1
    whole = F.interpolate(total / count, size=truth.shape, mode="bilinear").softmax(1)
    expected = probe.classes[whole.argmax(1)[0].numpy()]
    assert (found == expected).mean() > 0.999  # a pixel may lie between two classes


def test_it_learns_shapes(drawn, tmp_path):
    settings = SETTINGS.model_copy(update={"updates": 60, "period": 20, "held_out": 0.2})
    job = masked_job(drawn, tmp_path / "patch_linear.json")
    metrics = settings.evaluate(Rank(), job)
    assert len(metrics["by_period"]) == len(metrics["held_out"]) == 3
    assert metrics["patch_linear"] == max(metrics["by_period"])
    assert metrics["patch_linear_last"] == metrics["by_period"][-1]
    best = metrics["held_out"].index(max(metrics["held_out"]))
    assert metrics["patch_linear_held_out"] == metrics["by_period"][best]
    # More than the most frequent class everywhere.
    probe = segmenter_of(drawn, tmp_path, settings)
    masks = [probe.test.read(row) for row in range(20)]
    truth = np.concatenate([mask.ravel() for mask in masks])
    most = np.bincount(truth[~np.isin(truth, (0, 255))]).argmax()
    assert metrics["patch_linear"] > miou(truth, np.full_like(truth, most), (0, 255))[0]
    # What is kept scores as the result says.
    head, kept = probe.groups["head"], load_file(job.out.with_suffix(".safetensors"))
    for name, value in kept.items():
        getattr(head, name).data.copy_(value)
    predicted = [
        probe.segmented(head, probe.test, row, mask.shape).ravel() for row, mask in enumerate(masks)
    ]
    mean, _, accuracy = miou(truth, np.concatenate(predicted), (0, 255))
    assert mean == pytest.approx(metrics["patch_linear"])
    assert accuracy == pytest.approx(metrics["patch_linear_accuracy"])


def test_the_twin_learns_nothing_of_held_out_images(drawn, tmp_path):
    probe = segmenter_of(drawn, tmp_path, SETTINGS.model_copy(update={"held_out": 0.2}))
    held = probe.scored[HELD_OUT].rows[:, ID]
    everything = probe.task.train.rows[:, ID]
    ids, epochs = np.array([held[0], everything[~np.isin(everything, held)][0]]), np.zeros(2, int)
    width = probe.task.encoding.settings.width
    features, targets = torch.randn(2, 64, width), torch.zeros(2, 32, 32)
    probe.step(features, ProbeBatch(features, targets, epochs, ids), 1.0)
    alone = segmenter_of(drawn, tmp_path, SETTINGS)
    part = ProbeBatch(features[1:], targets[1:], epochs[1:], ids[1:])
    alone.step(part.images, part, 1.0)
    twin, other = probe.groups[f"head{HELD_OUT}"], alone.groups["head"]
    for name in (*PatchHead.NAMES, "mean", "var"):
        torch.testing.assert_close(getattr(twin, name), getattr(other, name))
    assert not torch.equal(probe.groups["head"].mean, twin.mean)


def test_what_cannot_be_trained_is_said(drawn, tmp_path):
    job = masked_job(drawn, tmp_path / "a.json")
    for change, message in (
        ({"size": 30}, "size 30 is no multiple of the patches' 4 pixels; set size=28"),
        ({"ignore": (0, 1, 2, 3, 4, 5, 255)}, "masks of one class only"),
    ):
        with pytest.raises(UserError, match=message):
            SETTINGS.model_copy(update=change).evaluate(Rank(), job)
    with pytest.raises(UserError, match="batch_size 4 is not a multiple of 3 ranks"):
        SETTINGS.check_ranks(3)
