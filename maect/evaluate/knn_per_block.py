"""k-NN on the output of every block, from one forward pass: which blocks know the classes.

The best block of a large masked autoencoder is below its last ones, which work for the decoder
(MIM-Refiner, Alkin et al. 2025); tuning and refinement are to move it to the end.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from maect.core.context import Context
from maect.core.errors import UserError
from maect.data.index import Index, open_index
from maect.evaluate.base import Encodes, EvaluationJob, Images
from maect.evaluate.knn import nearest
from maect.recipes import KNN_K, KNN_TEMPERATURE

if TYPE_CHECKING:
    from maect.evaluate.encoding import Encoding
    from maect.evaluate.store import Array


class KnnPerBlock(Encodes):
    """k-NN on the raw output of every block, from one forward pass over both splits."""

    name: ClassVar[str] = "knn_per_block"
    title: ClassVar[str] = "k-NN per block"
    test_data: ClassVar[str | None] = (
        "best_block is chosen on the test split, held_out_block on training images"
    )

    k: int = Field(default=KNN_K, gt=0)
    temperature: float = Field(default=KNN_TEMPERATURE, gt=0)
    pooling: Literal["cls", "mean"] | None = None
    """What is read of a block: [CLS], or the mean of the patch tokens; none: what the encoder's
    file says."""
    train_images: int = Field(default=131072, gt=0)
    """At most this many training images, evenly spaced: a tenth of ImageNet."""

    def encoded(self, images: Images) -> float:
        """Count the training images that take part, and every test image, once."""
        train = evenly(images(self.train_split), self.train_images)
        return len(train) + images(self.test_split)

    def headline(self) -> dict[str, str]:
        """Accuracies of the last block and of the one that held-out training images choose."""
        blocks = {"last": "last block", "held_out": "block chosen on held-out training images"}
        return {f"knn_standardized_{key}": f"{self.title}, {of}" for key, of in blocks.items()}

    def evaluate(self, context: Context, job: EvaluationJob) -> dict[str, Any]:
        """Accuracies in percent: lists `knn` and `knn_standardized`, a value a block, in order.

        `knn_last` and `knn_standardized_last` are of the last block, before the final norm;
        `best_block`, from 1, is the first of the highest standardised accuracy. `held_out_block` is
        that of held-out training images, found among the others; `knn_standardized_held_out` is
        its accuracy on the test images.
        """
        import numpy as np
        import torch

        from maect.core import distributed
        from maect.evaluate.encoding import Encoding
        from maect.evaluate.sampling import held_out, held_out_share
        from maect.evaluate.store import in_memory, moments
        from maect.evaluate.trained import check_splits
        from maect.measures import vote
        from maect.train.scores import BATCH

        train, test = open_index(job.path("train")), open_index(job.path("test"))
        check_splits(train, test)
        chosen = evenly(train.n, self.train_images)
        if self.k > len(chosen):
            raise UserError(
                f"{train.directory}: {len(chosen)} of its images are compared with, and k is "
                f"{self.k}; lower k or raise train_images"
            )
        path, device = job.run / "encoder.safetensors", distributed.device_of(context)
        encoding = Encoding(
            path, device, self.precision, blocks=10**9, pooling=self.pooling, norm=False
        )
        labels = train.labels[chosen.start : chosen.stop : chosen.step]
        contents = train.contents[chosen.start : chosen.stop : chosen.step].tolist()
        held = held_out(labels, contents, held_out_share(len(chosen), test.n))
        held &= len(chosen) - held.sum() >= self.k
        inner = np.zeros(encoding.blocks)
        share = distributed.share_of(context, test.n, BATCH)
        truth = test.labels[share.start : share.stop]
        hits = torch.zeros(2, encoding.blocks, dtype=torch.float64)
        with distributed.process_group(context):
            known = _encoded(context, job, train, encoding, chosen)
            asked = _encoded(context, job, test, encoding, range(test.n))
            for number in range(encoding.blocks):
                parts = torch.from_numpy(known[number])
                values = distributed.gather_rows(parts)[: len(chosen)].numpy()
                rows = in_memory(values)
                scales = None, moments(rows)
                if context.rank == 0 and held.any():
                    others, queries = in_memory(values[~held]), values[held]
                    near, ids = nearest(others, queries, self.k, scales[1], max(1, context.cpus))
                    votes = vote(near, labels[~held][ids], self.temperature)
                    inner[number] = 100 * (votes == labels[held]).mean()
                for kind, scale in enumerate(scales) if len(truth) else ():
                    threads = max(1, context.cpus)
                    near, ids = nearest(rows, asked[number, : len(share)], self.k, scale, threads)
                    votes = vote(near, labels[ids], self.temperature)
                    hits[kind, number] = int((votes == truth).sum())
            plain, standardized = (100 * distributed.sum_over_ranks(hits) / test.n).tolist()
        best = int(inner.argmax())
        chosen_inside = {
            "knn_standardized_held_out": standardized[best],
            "held_out_block": 1 + best,
            "held_out": inner.tolist(),
        }
        return {
            "knn": plain,
            "knn_standardized": standardized,
            "knn_last": plain[-1],
            "knn_standardized_last": standardized[-1],
            "best_block": 1 + standardized.index(max(standardized)),
            **(chosen_inside if held.any() else {}),
        }


def evenly(n: int, most: int) -> range:
    """At most this many rows of n, evenly spaced from the first."""
    return range(0, n, max(1, -(-n // most)))


def _encoded(
    context: Context, job: EvaluationJob, index: Index, encoding: Encoding, rows: range
) -> Array:
    """This rank's share of some images after every block, float32 [blocks, m, width].

    As many rows on every rank, with zeros behind the last image.
    """
    import numpy as np

    from maect.evaluate.encoding import finite
    from maect.train.scores import BATCH, share

    part = replace(index, rows=index.rows[rows.start : rows.stop : rows.step])
    blocks, width = encoding.blocks, encoding.settings.width
    count = -(-part.n // (context.world_size * BATCH)) * BATCH
    out, start = np.zeros((blocks, count, width), np.float32), 0
    size, device = encoding.settings.image_size, encoding.device
    for images, _, _ in share(context, part, device, size, job.resize):
        features = encoding(images)
        finite(features, job.run)
        by_block = features.view(len(images), blocks, width).transpose(0, 1)
        out[:, start : start + len(images)] = by_block.cpu().numpy()
        start += len(images)
    return out
