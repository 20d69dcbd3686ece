"""Efficient probing: attention over the patch tokens with learnt queries (Psomas et al. 2026).

Q queries attend to the frozen patch tokens, which are their own keys; query q sums up its own
D / Q of the D value channels. A BatchNorm without parameters and a linear classifier follow. The
yardstick of masked autoencoders since ICLR 2026, whose information is in the patches: of MAE's
ViT-L/16 (224) the authors report 79.5 by efficient probing, beside 48.1 by k-NN before the final
norm at the best of seven k, and the 76.0 by linear probing of MAE's own repository.

Compared with the authors' code (billpsomas/efficient-probing, the command of that 79.5):

| | there | here |
| --- | --- | --- |
| tokens | patches of the last block without the final norm, no [CLS] | the same |
| queries | 32, N(0, 0.02) | the same; a number that divides the encoder's width |
| projections | none for keys, values D x D without bias, scale D^-0.5, one head | the same |
| values | all tokens are projected, then summed | summed, then projected: equal, D / Q times less |
| classifier | BatchNorm(affine=False, eps 1e-6), Linear with torch's initialisation | the same |
| batch statistics | of each GPU's images, 256 in the log of that 79.5 | of the global batch, on \
any number of ranks |
| optimizer | LARS, momentum 0.9, trust 0.001, no weight decay, biases unscaled | the same |
| rate | 0.1 x 4096 / 256, 10 epochs of warm-up, cosine to 0 over 90, every step | the same, but \
neither 0 nor the peak comes up in the warm-up |
| images | crop of 8 to 100 %, bicubic, flip; 256 / 224 and centre crop to test | the same, but \
a crop that does not fit is drawn again, there it is clipped |
| precision | bfloat16 autocast in training, float16 in testing | encoder in bfloat16, probe in \
float32 |
| number | best epoch on the test split | `efficient_probe`; `efficient_probe_last` is the last's |

Not stated there: the seed of the rows that others ran, and whether Q was chosen for each encoder
(rows from the paper: the best of several; those measured later: 32). Its ten encoders that were
trained on their [CLS] token also attend to that one (`ep_all`), which is not built here.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from maect.core.errors import UserError
from maect.core.settings import digest
from maect.evaluate.base import Encodes, EvaluationJob, Images, Input, Shards, encoder_checksum
from maect.recipes import Encoder
from maect.recipes.cost import encode_flops

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from maect.core.context import Context
    from maect.data.index import Index
    from maect.evaluate.features import Encoding

BN_EPS, BN_MOMENTUM = 1e-6, 0.1
MOMENTUM, TRUST = 0.9, 0.001
POOLING = ("queries", "values")
CLASSIFIER = ("weight", "bias")


class EfficientProbe(Encodes):
    """Attentive probe on the patch tokens: multi-query cross-attention, trained with LARS."""

    name: ClassVar[str] = "efficient_probe"
    title: ClassVar[str] = "efficient probe"
    leaves: ClassVar[bool] = True
    test_data: ClassVar[str | None] = (
        "efficient_probe is the best epoch on the test split, as the authors report it; "
        "efficient_probe_last is the last one"
    )

    queries: int = Field(default=32, gt=0)
    epochs: int = Field(default=90, gt=0)
    batch_size: int = Field(default=4096, gt=0)
    base_lr: float = Field(default=0.1, gt=0)
    """Multiplied by batch_size / 256."""
    warmup_epochs: float = Field(default=10, ge=0)
    weight_decay: float = Field(default=0, ge=0)
    """Of queries, values and the classifier's weight."""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    flip: float = Field(default=0.5, ge=0, le=1)
    seed: int = 0

    def inputs(self) -> dict[str, Input]:
        """Images of both splits."""
        return {"train": Shards(self.train_split), "test": Shards(self.test_split)}

    def flops(self, encoder: Encoder, images: Images) -> float:
        """Encode every training and test image once an epoch."""
        seen = images(self.train_split) + images(self.test_split)
        return encode_flops(encoder) * self.epochs * seen

    def evaluate(self, context: Context, job: EvaluationJob) -> dict[str, Any]:
        """Accuracies in percent: `efficient_probe` (best epoch), `efficient_probe_last`, and all.

        Beside the JSON, a safetensors file of the same name keeps the probe of the best epoch.

        Raises:
            Interrupted: told to stop; the state is saved, and a restart ends with the same bits.
            UserError: unlabelled images, classes that differ between the splits, queries that do
                not divide the width, or a batch that is larger than all epochs together or no
                multiple of the ranks.
        """
        from maect.core import distributed
        from maect.data.index import open_index
        from maect.evaluate.features import Encoding
        from maect.evaluate.probing import Probing, check, labels_of
        from maect.models.weights import save_tensors

        train, test = open_index(job.path("train")), open_index(job.path("test"))
        check(train, test)
        device = distributed.device_of(context)
        encoding = Encoding(job.run / "encoder.safetensors", device, self.precision)
        width = encoding.settings.width
        if width % self.queries:
            raise UserError(
                f"{job.out.stem}: queries {self.queries} do not divide the encoder's width {width}"
            )
        sha256 = encoder_checksum(job.run)
        identity = digest(self, sha256, train.digest, test.digest, str(job.resize))
        with distributed.process_group(context):
            probe = Probe(width, len(train.class_names), self, device)
            training = Probing(
                context,
                job,
                self,
                train,
                encoding,
                {"probe": probe},
                identity,
                encode=lambda images: encoding.tokens(images).float(),
            )
            history: list[float] = training.record.setdefault("accuracies", [])
            for _ in training.epochs(labels_of, probe.step):
                history.append(_accuracy(context, job, test, encoding, probe))
                if history[-1] > max(history[:-1], default=-1.0):
                    kept = {name: getattr(probe, name).detach() for name in probe.SHARED}
                    kept = {n: t for n, t in kept.items() if not n.endswith("_momentum")}
                    training.kept = {name: tensor.clone() for name, tensor in kept.items()}
            if context.rank == 0:
                texts = {"class_names": json.dumps(train.class_names), "encoder_sha256": sha256}
                save_tensors(job.out.with_suffix(".safetensors"), training.kept, texts)
        best = max(history)
        return {
            "efficient_probe": best,
            "efficient_probe_last": history[-1],
            "best_epoch": history.index(best) + 1,
            "by_epoch": history,
        }


class Probe:
    """Attentive pooling, BatchNorm and classifier, the same on every rank.

    Attributes:
        queries: [Q, D]; values: [D, D], rows q D / Q to (q + 1) D / Q are query q's.
        weight: [C, D]; bias: [C].
        mean, var: running statistics of what is pooled, [D].
    """

    SPLIT: tuple[str, ...] = ()
    SHARED: tuple[str, ...] = (
        *POOLING,
        *CLASSIFIER,
        *(f"{name}_momentum" for name in (*POOLING, *CLASSIFIER)),
        "mean",
        "var",
    )
    rows = slice(0)
    total = 0

    def __init__(
        self, width: int, classes: int, settings: EfficientProbe, device: torch.device
    ) -> None:
        """Initialise as the authors' modules are, from `settings.seed`."""
        import torch
        from torch import nn

        from maect.models.vit import seeded

        with seeded(settings.seed):
            values, classifier = nn.Linear(width, width, bias=False), nn.Linear(width, classes)
            self.queries = 0.02 * torch.randn(settings.queries, width)
        self.values, self.weight, self.bias = values.weight, classifier.weight, classifier.bias
        for name in (*POOLING, *CLASSIFIER):
            tensor = getattr(self, name).detach().to(device)
            setattr(self, f"{name}_momentum", torch.zeros_like(tensor))
            setattr(self, name, tensor.requires_grad_())
        self.mean = torch.zeros(width, device=device)
        self.var = torch.ones(width, device=device)
        self.peak = settings.base_lr * settings.batch_size / 256
        self.weight_decay = settings.weight_decay

    def pool(self, tokens: Tensor) -> Tensor:
        """What the queries see of tokens [b, N, D]: [b, D]."""
        count, width = self.queries.shape
        attention = (tokens @ (self.queries.T * width**-0.5)).softmax(dim=1)  # [b, N, Q]
        seen = attention.transpose(1, 2) @ tokens  # [b, Q, D]
        # For each query a product of its own: [Q, b, D] with [Q, D, D / Q].
        values = self.values.view(count, -1, width).transpose(1, 2)
        return (seen.transpose(0, 1) @ values).transpose(0, 1).flatten(1)

    def step(self, tokens: Tensor, labels: Tensor, lr_multiplier: float) -> Tensor:
        """One update on the global batch; called on every rank.

        The classifier is trained on all ranks' rows by every rank; only what is pooled and the
        gradients of the pooling are exchanged.

        Args:
            tokens: float32 [b, N, D], this rank's.
            labels: int64 [b], this rank's.
            lr_multiplier: of the peak rate at this update.

        Returns:
            The mean cross-entropy before the update, [1].
        """
        from torch.nn import functional as F

        from maect.core import distributed

        mine = self.pool(tokens)
        pooled = distributed.gather_rows(mine.detach()).requires_grad_()
        normal = F.batch_norm(
            pooled, self.mean, self.var, training=True, momentum=BN_MOMENTUM, eps=BN_EPS
        )
        logits = F.linear(normal, self.weight, self.bias)
        loss = F.cross_entropy(logits, distributed.gather_rows(labels))
        loss.backward()
        assert pooled.grad is not None
        rank = distributed.rank_and_size()[0]
        mine.backward(pooled.grad[rank * len(mine) : (rank + 1) * len(mine)])
        for name in (*POOLING, *CLASSIFIER):
            parameter = getattr(self, name)
            if name in POOLING:
                distributed.sum_over_ranks(parameter.grad)
            momentum = getattr(self, f"{name}_momentum")
            lars(parameter, momentum, self.peak * lr_multiplier, self.weight_decay)
        return loss.detach()[None]

    def predict(self, tokens: Tensor) -> Tensor:
        """Class of each image, with the running statistics: int64 [n]."""
        import torch
        from torch.nn import functional as F

        with torch.no_grad():
            normal = (self.pool(tokens) - self.mean) * torch.rsqrt(self.var + BN_EPS)
            return F.linear(normal, self.weight, self.bias).argmax(dim=1)


def lars(parameter: Tensor, momentum: Tensor, rate: float, weight_decay: float) -> None:
    """One step of LARS (You et al. 2017), in place; the gradient is used up.

    As in MAE's code: weights over decayed gradient, vectors neither scaled nor decayed. timm's
    `Lars` adds the lengths of gradient and decay (without decay its bits are the same), scales
    vectors, too, and keeps the momenta to itself; here they are saved with the probe.
    """
    import torch

    with torch.no_grad():
        update = parameter.grad
        assert update is not None
        if parameter.ndim > 1:
            update = update + weight_decay * parameter
            length, change = parameter.norm(), update.norm()
            scaled = (length > 0) & (change > 0)
            update = update * torch.where(scaled, TRUST * length / change, 1.0)
        momentum.mul_(MOMENTUM).add_(update)
        parameter.sub_(momentum, alpha=rate)
        parameter.grad = None


def _accuracy(
    context: Context, job: EvaluationJob, test: Index, encoding: Encoding, probe: Probe
) -> float:
    """In percent, on the test split; the tokens of all its images would not fit into memory.

    Raises:
        UserError: tokens that are not finite.
    """
    from maect.evaluate.features import finite
    from maect.train.accuracy import accuracy

    def predict(images: Tensor) -> Tensor:
        tokens = encoding.tokens(images).float()
        finite(tokens, job.run)
        return probe.predict(tokens)

    size = encoding.settings.image_size
    return accuracy(context, test, encoding.device, size, job.resize, predict)
