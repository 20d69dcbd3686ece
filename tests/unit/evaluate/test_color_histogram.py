import numpy as np
import pytest
import torch
from torch import nn

from maect.core.errors import UserError
from maect.data.index import open_index
from maect.data.transforms import augment
from maect.evaluate.color_histogram import HistogramHeads, histograms
from maect.evaluate.features import Encoding
from maect.evaluate.protocols.probes import ColorHistogram
from maect.recipes import Pixels, View
from maect.train.stage import schedule

from .by_hand import all_images, crops
from .test_linear_probe import job_of

SETTINGS = ColorHistogram(
    epochs=3, batch_size=32, learning_rate=80.0, crop_scale=(0.6, 1.0), flip=0.0, precision="fp32"
)
CPU = torch.device("cpu")


def plain_histogram(image: np.ndarray) -> np.ndarray:
    """Of uint8 [3, S, S], channel by channel."""
    return np.stack([np.histogram(c, bins=64, range=(0, 256))[0] / c.size for c in image])


def test_histograms_count_pixels():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (5, 3, 12, 12)).astype(np.uint8)
    images[0] = 255
    images[1] = np.arange(256).repeat(3)[:432].reshape(3, 12, 12)
    found = histograms(torch.from_numpy(images)).numpy()
    np.testing.assert_allclose(found, [plain_histogram(image) for image in images], atol=1e-7)
    flipped = histograms(torch.from_numpy(images).flip(3)).numpy()
    assert np.array_equal(found, flipped)
    # De-normalised floats, as the authors count them, are in the same bins (up to rounding).
    view = View(crop_scale=(1, 1), flip=0.0)
    normal = augment(torch.from_numpy(images), view, 0, 0, np.zeros(5, int), np.arange(5), Pixels())
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    levels = (normal * std.view(3, 1, 1) + mean.view(3, 1, 1)) * 255
    assert np.array_equal(histograms(levels.round().byte()).numpy(), found)


class Model(nn.Module):
    """One block's head as modules, in float64."""

    def __init__(self, heads: HistogramHeads, block: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(heads.mean.shape[1], affine=False)
        self.linear = nn.Linear(heads.mean.shape[1], 192)
        self.linear.weight.data = heads.weight[block].detach().T.clone()
        nn.init.zeros_(self.linear.bias)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x.double())).view(-1, 3, 64).softmax(2)


def test_protocol_is_the_plain_loop(images, tmp_path, rank):
    probes = 2
    job = job_of(images, tmp_path / "color_histogram.json")
    settings = SETTINGS.model_copy(update={"probes": probes})
    metrics = settings.evaluate(rank, job)
    train, test = open_index(job.path("train")), open_index(job.path("test"))
    encoding = Encoding(job.run / "encoder.safetensors", CPU, blocks=3, pooling="cls")
    heads = HistogramHeads(16, 3 * probes, 10.0, 0.9, 0, CPU)
    models = [Model(heads, number) for number in range(3 * probes)]
    optimizers = [torch.optim.SGD(m.parameters(), 1.0, 0.9) for m in models]
    steps = 3 * 150 // 32
    for batch, cropped in crops(train, steps, encoding.settings.pixels):
        x = encoding(cropped).repeat(1, probes)
        y = torch.from_numpy(np.stack([plain_histogram(i) for i in batch.images[0][0].numpy()]))
        factor = schedule(batch.step, steps, 150 / 32)
        losses = heads.step(x, y.float(), factor)
        for block, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.param_groups[0]["lr"] = 10 * factor
            optimizer.zero_grad()
            loss = nn.functional.l1_loss(model(x[:, 16 * block : 16 * block + 16]), y)
            loss.backward()
            optimizer.step()
            assert float(losses[block]) == pytest.approx(loss.item(), rel=1e-4)
    for block, model in enumerate(models):
        for found, expected, rtol, atol in (
            (heads.weight[block].T, model.linear.weight, 1e-3, 1e-5),
            (heads.bias[block], model.linear.bias, 1e-3, 1e-5),
            (heads.mean[block], model.norm.running_mean, 1e-5, 1e-6),
            (heads.var[block], model.norm.running_var, 1e-5, 1e-6),
        ):
            torch.testing.assert_close(found.double(), expected.detach(), rtol=rtol, atol=atol)
    x_test, _ = all_images(test)
    y = torch.from_numpy(np.stack([plain_histogram(image) for image in x_test.numpy()]))
    uniform = float((y - 1 / 64).abs().mean())
    assert metrics["uniform_error"] == pytest.approx(uniform, rel=1e-5)
    features = encoding(x_test).repeat(1, probes)
    errors = [
        100 * float((m.eval()(features[:, 16 * i : 16 * i + 16]) - y).abs().mean()) / uniform
        for i, m in enumerate(models)
    ]
    of_each = np.reshape(errors, (probes, 3))
    assert metrics["errors"] == pytest.approx(of_each.mean(0).tolist(), rel=1e-3)
    assert metrics["error_last"] == pytest.approx(metrics["errors"][-1]) and max(errors) < 100
    assert metrics["error_mean"] == pytest.approx(np.mean(errors), rel=1e-3)
    differences = of_each[0] - of_each[1]
    assert np.abs(differences).max() > 1e-3  # each begins elsewhere
    expected = abs(differences[-1]) / np.sqrt(2)
    assert metrics["error_last_std"] == pytest.approx(expected, abs=0.2)
    with pytest.raises(UserError, match=r"1 epochs of 150 images are less than one batch of 160"):
        ColorHistogram(epochs=1, warmup_epochs=0, batch_size=160).evaluate(rank, job)
