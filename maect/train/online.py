"""Online evaluation: k-NN and measures without labels of an encoder while it trains.

A fixed part of the training images is split into a bank and queries, so the test images stay
unseen. The evaluation reads a copy of the encoder, draws from the counter-based generator only and
writes nothing but numbers and pictures: the training's bits are those of one without it.
"""

import logging
from copy import deepcopy
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.utils import make_grid

from maect.core.context import Context
from maect.core.distributed import rank_and_size, sum_over_ranks
from maect.data import random
from maect.data.index import ID, LABEL, Index
from maect.data.loader import evaluation_parts, view_parts
from maect.data.transforms import augment, denormalize, normalize
from maect.measures import alignment, knn, rank_me, same_class, uniformity
from maect.recipes import AUGMENTATIONS, OnlineEvaluation
from maect.train.checkpoint import AVERAGE, PARAM, ParameterSlice
from maect.train.hooks import Hook, Session, Update
from maect.train.objective import Objective
from maect.train.watchdog import EVALUATING

log = logging.getLogger(__name__)

LEAST = 10  # images, of which two are queries
QUERIES = 0.2  # part of the images
BLOCK = 250  # images encoded together, whatever the number of ranks
SEED = 0  # the same images and views for every run
PICTURED = 8  # images in pictures
GREY = 128
NEAREST = 5  # neighbours of each in pictures
SIDE = 96  # pixels of an image in a picture, at most


class EvaluateOnline(Hook):
    """Evaluates the encoder at intervals; no output of the run depends on it."""

    def __init__(self, session: Session, evaluator: "OnlineEvaluator") -> None:
        self._session = session
        self._evaluator = evaluator

    def reads_model(self, step: int) -> bool:
        """Return whether the encoder is evaluated after a step."""
        session = self._session
        before, after = session.images_after(step - 1), session.images_after(step)
        return self._evaluator.is_due(before, after, step == session.steps)

    def after_step(self, update: Update) -> None:
        """Log the values of an evaluation, if one is due, and show its pictures."""
        if not self.reads_model(update.step):
            return
        clock = self._session.clock
        self._session.begin(EVALUATING, update.step)
        with clock.outside_steps(useful=True, online=True):
            found = self._evaluator.evaluate(self._session.engine.slices)
        update.pictures |= self._evaluator.pictures
        update.values |= found
        if found:
            update.log_now = True
            update.timing["online_part"] = clock.online_part


class OnlineEvaluator:
    """Evaluates the encoder that a training would export if it ended now; on all ranks together."""

    def __init__(
        self,
        settings: OnlineEvaluation,
        index: Index,
        resize: int | None,
        objective: Objective,
        context: Context,
        device: torch.device,
    ) -> None:
        """Choose the images and copy the evaluated parts, before an engine wraps the objective.

        Args:
            settings: interval and number of images.
            index: the training images.
            resize: their shorter side before the centre crop; None: 256/224 of the image size.
            objective: that trains.
            context: this rank's.
            device: that computes.
        """
        self.every = settings.every_epochs * index.n
        self.resize = resize
        count = min(settings.images, index.n, int(settings.part * self.every))
        rank = random.bits(SEED, 0, index.rows[:, ID], 0, random.ONLINE, 1)[:, 0]
        self.index = replace(index, rows=index.rows[rank.argsort(kind="stable")[:count]])
        self.queries = int(QUERIES * count)
        self.objective = objective
        self.context = context
        self.device = device
        self.encoder = objective.encoder.settings
        if count < LEAST:
            log.warning("online evaluation: %s of %s images are too few", count, index.n)
            self.every = 0
            return
        copies = {name: deepcopy(part) for name, part in objective.parts_read().items()}
        self.parts = nn.ModuleDict(copies).eval()
        self._trained = [name for name, p in self.parts.named_parameters() if p.requires_grad]
        self.parts.requires_grad_(False)
        self.pictures: dict[str, NDArray[np.uint8]] = {}
        """Of the last evaluation, on rank 0: `neighbors` and, of a decoder, `reconstructions`."""

    def is_due(self, before: int, after: int, last: bool) -> bool:
        """Return whether to evaluate, once the images trained on went from `before` to `after`."""
        if self.every == 0:
            return False
        return before // self.every < after // self.every or last

    @torch.no_grad()
    def evaluate(self, slices: list[ParameterSlice]) -> dict[str, float]:
        """Return `measures` of the fixed images with the weights in all ranks' slices.

        Called on every rank.
        """
        self._copy_weights(slices)
        n, size, width = self.index.n, self.encoder.image_size, self.encoder.width
        rank, ranks = rank_and_size()
        pixels = self.encoder.pixels
        threads = max(1, self.context.cpus)

        def own_rows(count: int) -> list[range]:
            blocks = [range(i, min(i + BLOCK, count)) for i in range(0, count, BLOCK)]
            return blocks[rank::ranks]

        features = torch.zeros(n, width, device=self.device)
        read = evaluation_parts(
            self.index, image_size=size, parts=own_rows(n), threads=threads, resize=self.resize
        )
        for rows, (images, _, _) in zip(own_rows(n), read, strict=True):
            features[rows.start : rows.stop] = self._features(
                normalize(images.to(self.device), pixels)
            )
        pairs = torch.zeros(2, self.queries, width, device=self.device)
        views = AUGMENTATIONS["min"]
        batches = view_parts(
            self.index, views=views, image_size=size, seed=SEED, parts=own_rows(self.queries),
            threads=threads,
        )  # fmt: skip
        for rows, batch in zip(own_rows(self.queries), batches, strict=True):
            for number, view in enumerate(views):
                raw = batch.images[0][number].to(self.device)
                images = augment(raw, view, number, SEED, batch.epochs, batch.ids, pixels)
                pairs[number, rows.start : rows.stop] = self._features(images)
        sum_over_ranks(features)
        sum_over_ranks(pairs)
        if rank == 0:
            self.pictures = self._pictures(features)
        labels = torch.from_numpy(self.index.rows[:, LABEL].copy())
        return measures(features.cpu(), pairs.cpu(), labels)

    def _pictures(self, features: Tensor) -> dict[str, NDArray[np.uint8]]:
        """Return sheets of the first images: their neighbours, and reconstructions if any."""
        count = min(PICTURED, self.queries)
        unit = F.normalize(features, dim=1)
        similarity = unit[:count] @ unit[self.queries :].T
        near = similarity.topk(min(NEAREST, similarity.shape[1]), dim=1).indices + self.queries
        first = torch.arange(count, device=near.device)
        images = self._images(torch.cat([first[:, None], near], dim=1).flatten())
        sheets = {"neighbors": sheet(images, 1 + near.shape[1])}
        ids = self.index.rows[:count, ID]
        order = random.ids_shuffle(self.encoder.patches, SEED, np.zeros_like(ids), ids, [0])[0]
        pixels = self.encoder.pixels
        normal = normalize(images[:: 1 + near.shape[1]].to(self.device), pixels)
        made = self.objective.reconstruct(self.parts, normal, order.to(self.device))
        if made is not None:
            rows = [denormalize(part, pixels) for part in (*made, normal)]
            sheets["reconstructions"] = sheet(torch.cat(rows).cpu(), count)
        return sheets

    def _images(self, rows: Tensor) -> Tensor:
        """Return some of the images as evaluations crop them, uint8 [n, C, S, S]."""
        chosen = replace(self.index, rows=self.index.rows[rows.cpu().numpy()])
        read = evaluation_parts(
            chosen, image_size=self.encoder.image_size, parts=[range(len(rows))],
            threads=max(1, self.context.cpus), resize=self.resize,
        )  # fmt: skip
        return torch.cat([images for images, _, _ in read])

    def _features(self, images: Tensor) -> Tensor:
        return self.objective.features(self.parts, images).float()

    def _copy_weights(self, slices: list[ParameterSlice]) -> None:
        """Set the copies to the running averages where there are any, else to the weights."""
        parameters = dict(self.parts.named_parameters())
        for name in self._trained:
            parameters[name].zero_()
        for piece in slices:
            if piece.name in parameters:
                values = piece.values.get(AVERAGE, piece.values[PARAM])
                part = parameters[piece.name].view(-1)[piece.start : piece.start + len(values)]
                part.copy_(values)
        for name in self._trained:
            sum_over_ranks(parameters[name])


def sheet(images: Tensor, columns: int) -> NDArray[np.uint8]:
    """Return images uint8 [n, C, S, S] as one picture, uint8 [H, W, 3]; large ones are reduced.

    Grey lines are between them. Unless there are three channels, the first is shown in grey.
    """
    if images.shape[1] != 3:
        images = images[:, :1]  # make_grid repeats it three times
    shrink = -(-images.shape[-1] // SIDE)
    small = F.avg_pool2d(images.float(), shrink).round().to(torch.uint8)
    width = max(1, small.shape[-1] // 12)
    page: NDArray[np.uint8] = (
        make_grid(small, columns, width, pad_value=GREY).permute(1, 2, 0).numpy()
    )
    return page


def measures(features: Tensor, pairs: Tensor, labels: Tensor) -> dict[str, float]:
    """Return measures of features, with the first ones as queries and the others as the bank.

    Args:
        features: [n, D].
        pairs: of two views of each query, [2, q, D].
        labels: int64 [n]; -1 where unknown.

    Returns:
        `online_knn`, if all labels are known: accuracy in percent of weighted k-NN (Wu et al.
        2018), and `online_neighbors`: percent of the queries whose nearest image is of their class;
        `online_rank_me`: see `rank_me`; `online_uniformity` of the queries and `online_alignment`
        of the pairs (Wang and Isola 2020), of unit vectors. Nothing, if a feature is not finite.
    """
    if not (features.isfinite().all() and pairs.isfinite().all()):
        log.warning("online evaluation: the features are not finite")
        return {}
    queries = pairs.shape[1]
    unit = F.normalize(features, dim=1)
    values = {}
    if len(labels) and int(labels.min()) >= 0:
        given = unit[:queries], unit[queries:], labels[:queries], labels[queries:]
        values["online_knn"], values["online_neighbors"] = knn(*given), same_class(*given)
    values["online_rank_me"] = rank_me(features)
    values["online_uniformity"] = uniformity(unit[:queries])
    values["online_alignment"] = alignment(pairs)
    return values
