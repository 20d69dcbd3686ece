"""Evaluations while a training runs: accuracy after each epoch, and online evaluation."""

from dataclasses import dataclass
from typing import Any

import torch

from maect.core.context import Context
from maect.core.errors import UserError
from maect.data.index import Index, open_index
from maect.train.device_time import DeviceTime
from maect.train.engine import Engine
from maect.train.metrics import Metrics
from maect.train.objective import Objective
from maect.train.online import OnlineEvaluator
from maect.train.scores import Scores, accuracy
from maect.train.stage import RunInputs
from maect.train.watchdog import EVALUATING, SCORING, Watchdog


@dataclass
class TrainingEvaluations:
    """Evaluations of an encoder while it trains. Their time is not that of steps.

    Attributes:
        image_size: of the images that the encoder is given.
        images: of the training set.
        steps: of the whole training.
        scores: of the epochs so far, if they are scored.
        online: of the online evaluation, if there is one.
        knn: accuracy of the last online evaluation in percent, if it has one.
    """

    context: Context
    device: torch.device
    objective: Objective
    engine: Engine
    watchdog: Watchdog
    clock: DeviceTime
    metrics: Metrics | None
    image_size: int
    batch_size: int
    images: int
    steps: int
    scores: Scores | None
    online: OnlineEvaluator | None
    knn: float | None = None

    def due(self, step: int) -> bool:
        """Return whether something is evaluated after a step."""
        return self._scored(step) or self._evaluated(step)

    def accuracy(self, step: int) -> dict[str, float]:
        """Return the accuracy after an epoch, in percent, if a step ends one that is scored."""
        if self.scores is None or not self._scored(step):
            return {}
        self.watchdog.at(SCORING, step)
        size, predict = self.image_size, self.objective.predict
        index, resize = self.scores.index, self.scores.resize
        with self.clock.aside(useful=True):
            found = accuracy(self.context, index, self.device, size, resize, predict)
            self.scores.accuracies.append(found)
        return {"accuracy": found}

    def online_values(self, step: int) -> dict[str, float]:
        """Return the values of an online evaluation, if one is due."""
        if self.online is None or not self._evaluated(step):
            return {}
        self.watchdog.at(EVALUATING, step)
        with self.clock.aside(useful=True, online=True):
            found = self.online.evaluate(self.engine.shards)
            if self.metrics is not None:
                self.metrics.show(step, self.online.pictures)
        self.knn = found.get("online_knn")
        return found

    @property
    def record(self) -> dict[str, Any]:
        """Part of a state's record."""
        return {} if self.scores is None else {"scores": self.scores.record}

    def _scored(self, step: int) -> bool:
        """Return whether a step ends an epoch to score; the rest of the last epoch is dropped."""
        before, done = self._images(step)
        ends = step == self.steps or done // self.images > before // self.images
        return self.scores is not None and ends

    def _evaluated(self, step: int) -> bool:
        last = step == self.steps
        return self.online is not None and self.online.due(*self._images(step), last)

    def _images(self, step: int) -> tuple[int, int]:
        """Return the images trained on before and after a step."""
        return (step - 1) * self.batch_size, step * self.batch_size


def first_scores(run: RunInputs, split: Index) -> Scores | None:
    """No epoch scored yet, on held-out images or the split that the run names.

    Raises:
        UserError: it has other classes than the training images.
    """
    if (held := run.stage.scored_images(split)) is not None:
        return Scores(held, run.resize)
    if run.test is None:
        return None
    index = open_index(run.test)
    if index.class_names != split.class_names:
        raise UserError(f"{run.test}: its classes differ from those of {run.shards}")
    return Scores(index, run.resize)
