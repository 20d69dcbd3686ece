"""Detection of embeddings that have become the same, or a line: training is over then."""

import torch
from torch import Tensor

from maect.measures import uniformity
from maect.train.hooks import Hook, Session, Update

INTERVAL = 10
"""Steps between two checks, which wait for the device."""
UNIFORMITY_LIMIT = -0.02
RANK_LIMIT = 1.2


class CheckHealth(Hook):
    """Checks the embeddings of an objective with heads every `INTERVAL` steps."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def reads_model(self, step: int) -> bool:
        """Return whether the embeddings are checked after a step."""
        return step % INTERVAL == 0

    def after_step(self, update: Update) -> None:
        """Log the spread of the last batch's embeddings; a collapse is a fault."""
        if self.reads_model(update.step):
            values, fault = self._session.objective.health(self._session.stage.batch_size)
            update.values |= values
            if fault is not None:
                update.fault = fault
                update.log_now = True


def spread(vectors: Tensor) -> dict[str, float]:
    """Return how far unit vectors [n, E] spread: `uniformity` and `effective_rank`."""
    return {"uniformity": uniformity(vectors), "effective_rank": effective_rank(vectors)}


def effective_rank(vectors: Tensor) -> float:
    """Return the exponential of the entropy of the covariance's spectrum, from 1 to E.

    Roy and Vetterli 2007; 0 if all vectors [n, E] are the same.
    """
    centred = vectors.double() - vectors.double().mean(0)
    # On the CPU: a GPU's solver is loaded for seconds and is the slower one at this size.
    spectrum = torch.linalg.eigvalsh((centred.T @ centred).cpu()).clamp(min=0)
    total = spectrum.sum()
    if total <= 0:
        return 0.0
    share = spectrum / total
    return float(torch.special.entr(share).sum().exp())


def collapse(spread: dict[str, float]) -> str | None:
    """Return the fault that `uniformity` and `effective_rank` show, or None."""
    if spread["uniformity"] > UNIFORMITY_LIMIT:
        return f"all embeddings are nearly the same (uniformity {spread['uniformity']:.4f})"
    if spread["effective_rank"] < RANK_LIMIT:
        return f"all embeddings lie on a line (effective rank {spread['effective_rank']:.2f})"
    return None
