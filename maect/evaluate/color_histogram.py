"""Probes on every block that predict the image's colour histogram (paper, figure 5 and B).

How much of an image's colours a representation keeps: the error is small where instance
discrimination has learnt the shortcut of comparing colours.
"""

from typing import Any

import torch
from torch import Tensor

from maect.core.errors import UserError
from maect.core.files import sha256_file
from maect.core.settings import digest
from maect.data.index import Index, open_index
from maect.data.loader import Batch, evaluation_batches
from maect.evaluate import ranks
from maect.evaluate.encoding import Encoding, finite
from maect.evaluate.features import BATCH
from maect.evaluate.heads import BN_EPS, BN_MOMENTUM
from maect.evaluate.job import Context, Job
from maect.evaluate.probing import Probing, check
from maect.evaluate.protocols import ColorHistogram
from maect.models.weights import save_tensors

INPUTS = ("train_shards", "test_shards")
ON_EVERY_RANK = True
TEST_DATA = "only scored, after the last epoch"
BINS = 64


def evaluate(context: Context, job: Job, settings: ColorHistogram) -> dict[str, Any]:
    """Errors in percent of a uniform prediction's: `errors` of every block, first to last.

    `error_last` and `error_mean` are of the last block and the mean; `uniform_error` is the mean
    absolute error of predicting 1/64 everywhere on the test split. Called on every rank.

    Raises:
        Interrupted: told to stop; the state is saved, and a restart ends with the same bits.
        UserError: an encoder without [CLS] token, or a batch larger than all epochs together.
    """
    train = open_index(job.need("train_shards"))
    test = open_index(job.need("test_shards"))
    check(train, test, labelled=False)
    path = job.run / "encoder.safetensors"
    device = ranks.device_of(context)
    encoding = Encoding(path, device, settings.precision, blocks=10**9, pooling="cls")
    identity = digest(settings, sha256_file(path), train.digest, test.digest, str(job.resize))
    rank, size, blocks = context.rank, context.world_size, encoding.blocks
    mine = slice(blocks * rank // size, blocks * (rank + 1) // size)
    with ranks.process_group(context):
        heads = HistogramHeads(encoding.settings.width, blocks, settings, device, mine)
        groups = {"heads": heads}
        training = Probing(context, job, settings, train, encoding, groups, identity)
        for _ in training.epochs(_targets, heads.step):
            pass
        trained = {key: training.full("heads", key) for key in ("weight", "bias", "mean", "var")}
        errors, uniform = _errors(context, job, test, encoding, trained)
        if rank == 0:
            save_tensors(job.out.with_suffix(".safetensors"), trained, {})
    if uniform == 0:
        raise UserError(f"{test.directory}: every image's colours are spread uniformly")
    relative = [100 * error / uniform for error in errors]
    return {
        "errors": relative,
        "error_last": relative[-1],
        "error_mean": sum(relative) / len(relative),
        "uniform_error": uniform,
    }


def histograms(images: Tensor) -> Tensor:
    """Share of each channel's pixels in 64 bins of four levels: uint8 [b, 3, S, S] to [b, 3, 64].

    Of the image as the encoder sees it before normalization; a flip changes nothing.
    """
    places = (images >> 2).long().flatten(2)
    counts = torch.zeros(*images.shape[:2], BINS, device=images.device)
    counts.scatter_add_(2, places, torch.ones((), device=images.device).expand_as(places))
    return counts / places.shape[2]


def _targets(batch: Batch, images: Tensor) -> Tensor:
    return histograms(images)


class HistogramHeads:
    """A BatchNorm1d(affine=False) and Linear on each block, with SGD on the mean absolute error.

    Each block's loss is the mean over the batch and 192 bins of |softmax over a channel's bins −
    histogram|; its gradient is written out, one batched product forward and one backward.

    Attributes:
        weight: [L, D, 192], bias: [L, 192], of this rank's L blocks; the momenta alike.
        mean, var: running statistics of the features, [L, D].
        rows: which blocks of all these are.
    """

    SPLIT: tuple[str, ...] = ("weight", "bias", "weight_momentum", "bias_momentum", "mean", "var")
    SHARED: tuple[str, ...] = ()

    def __init__(
        self,
        width: int,
        blocks: int,
        settings: ColorHistogram,
        device: torch.device,
        mine: slice = slice(None),
    ) -> None:
        """Initialise from a normal distribution of deviation 0.01; biases are 0."""
        generator = torch.Generator().manual_seed(settings.seed)
        weight = torch.empty(blocks, width, 3 * BINS)
        torch.nn.init.trunc_normal_(weight, std=0.01, generator=generator)
        self.width, self.total, self.rows = width, blocks, mine
        self.weight = weight[mine].to(device)
        count = len(self.weight)
        self.bias = torch.zeros(count, 3 * BINS, device=device)
        self.weight_momentum = torch.zeros_like(self.weight)
        self.bias_momentum = torch.zeros_like(self.bias)
        self.mean = torch.zeros(count, width, device=device)
        self.var = torch.ones(count, width, device=device)
        self.momentum = settings.momentum
        self.peak = settings.learning_rate * settings.batch_size / 256

    @torch.no_grad()
    def step(self, features: Tensor, targets: Tensor, factor: float) -> Tensor:
        """One update of every head on the global batch.

        Args:
            features: float32 [B, all blocks · D], of all ranks.
            targets: histograms, [B, 3, 64].
            factor: of the peak rate, at this update.

        Returns:
            Loss of each head before the update, [L].
        """
        size = len(features)
        x = features.view(size, self.total, self.width)[:, self.rows].transpose(0, 1)
        var, mean = torch.var_mean(x, dim=1, correction=0)
        self.mean.lerp_(mean, BN_MOMENTUM)
        self.var.lerp_(var * size / max(size - 1, 1), BN_MOMENTUM)
        x = (x - mean[:, None]) * torch.rsqrt(var + BN_EPS)[:, None]
        p = _predict(x, self.weight, self.bias)
        difference = p - targets
        slope = difference.sign() / (size * 3 * BINS)
        gradient = p * (slope - (p * slope).sum(dim=3, keepdim=True))
        gradient = gradient.flatten(2)
        self.weight_momentum.mul_(self.momentum).baddbmm_(x.transpose(1, 2), gradient)
        self.bias_momentum.mul_(self.momentum).add_(gradient.sum(dim=1))
        self.weight.sub_(self.weight_momentum, alpha=self.peak * factor)
        self.bias.sub_(self.bias_momentum, alpha=self.peak * factor)
        return difference.abs_().mean(dim=(1, 2, 3))


def _predict(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Histograms [L, b, 3, 64] from normalized features [L, b, D]."""
    logits = torch.baddbmm(bias[:, None], x, weight)
    return logits.unflatten(2, (3, BINS)).softmax(dim=3)


def _errors(
    context: Context, job: Job, test: Index, encoding: Encoding, heads: dict[str, Tensor]
) -> tuple[list[float], float]:
    """Mean absolute error of each block's head on the test split, and of a uniform prediction."""
    sums = torch.zeros(encoding.blocks + 1, dtype=torch.float64)
    scale = torch.rsqrt(heads["var"] + BN_EPS)[:, None]
    for images, _, _ in evaluation_batches(
        test,
        image_size=encoding.settings.image_size,
        resize=job.resize,
        rows=ranks.share_of(context, test.n, BATCH),
        batch_size=BATCH,
        threads=context.cpus,
    ):
        features = encoding(images).view(len(images), encoding.blocks, -1).transpose(0, 1)
        finite(features, job.run)
        target = histograms(images.to(encoding.device))
        p = _predict((features - heads["mean"][:, None]) * scale, heads["weight"], heads["bias"])
        sums[:-1] += (p - target).abs().mean(dim=(2, 3)).double().sum(dim=1).cpu()
        sums[-1] += (1 / BINS - target).abs().mean(dim=(1, 2)).double().sum().cpu()
    *errors, uniform = (ranks.sum_ranks(context, sums) / test.n).tolist()
    return errors, uniform
