"""Accuracy of the trained linear probe on shifted data (paper, section 5 and table 5).

A set that has only some of the classes (ImageNet-R and -A have 200) is scored among those: the
other logits do not take part, as in the authors' code.
"""

from typing import Any

import numpy as np
import torch

from maect.core.errors import UserError
from maect.data.index import Index, open_index
from maect.evaluate import ranks
from maect.evaluate.classifier import Classifier
from maect.evaluate.job import Context, Job
from maect.evaluate.protocols import Robustness

INPUTS = ("probe", "splits")
ON_EVERY_RANK = True
TEST_DATA = (
    "the probe's epoch and learning rate were chosen on the unshifted test split; of a shifted "
    "split only the classes among its labels can be predicted"
)


def evaluate(context: Context, job: Job, settings: Robustness) -> dict[str, Any]:
    """Accuracy in percent on each of `settings.splits`, by its name; and how many classes it has.

    Raises:
        UserError: a split that was not given, unlabelled images or those of one class only, or a
            probe that does not fit.
    """
    missing = [name for name in settings.splits if name not in job.splits]
    if missing:
        raise UserError(f"{job.out.stem}: needs --split {missing[0]}=SHARDS")
    classifier = Classifier(job, ranks.device_of(context), settings.precision)
    indexes = {name: open_index(job.splits[name]) for name in settings.splits}
    for index in indexes.values():
        classifier.check(index)
    classes = {name: np.unique(index.labels) for name, index in indexes.items()}
    single = [name for name, found in classes.items() if len(found) < 2]
    if single:
        raise UserError(f"{job.splits[single[0]]}: images of one class, which any classifier finds")
    with ranks.process_group(context):
        accuracies = {
            name: _accuracy(context, job, classifier, index, torch.from_numpy(classes[name]))
            for name, index in indexes.items()
        }
    return {**accuracies, "classes": {name: len(found) for name, found in classes.items()}}


def _accuracy(
    context: Context, job: Job, classifier: Classifier, index: Index, classes: torch.Tensor
) -> float:
    classes = classes.to(classifier.weight.device)
    hits = torch.zeros((), dtype=torch.int64)
    for images, labels, _ in classifier.shares(context, job, index):
        predicted = classes[classifier(images)[:, classes].argmax(dim=1)]
        hits += int((predicted.cpu() == torch.from_numpy(labels)).sum())
    return 100 * int(ranks.sum_ranks(context, hits)) / index.n
