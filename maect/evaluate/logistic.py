"""L2-regularised multinomial logistic regression without intercept, by two independent solvers.

    minimise over W  (1/n) sum_i -log softmax(x_i W)[y_i] + (penalty / 2) |W|^2

A strictly convex problem: both solvers have the same answer, to their tolerance.
"""

from collections import deque
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from maect.core.errors import UserError

Matrix = NDArray[np.float64]

# MSN's call of cyanure, in the names of cyanure 1.x.
TOLERANCE = 1e-3
MAX_EPOCHS = 300
GAP_INTERVAL = 10
# Of our own solver.
GAP = 1e-9  # relative duality gap
MEMORY = 10
MAX_ITERATIONS = 5000
SEARCHES = 30


def prepare(features: NDArray[np.float32]) -> NDArray[np.float64]:
    """Centre each row on its own mean and scale it to length 1 (MSN, MAE-CT); 0 stays 0.

    float64: cyanure warns that weak penalties such as these need it.

    Args:
        features: [n, d].
    """
    rows = features.astype(np.float64)
    centred = rows - rows.mean(axis=1, keepdims=True)
    length = np.sqrt(np.square(centred).sum(axis=1, keepdims=True))
    # What rounding leaves of a constant row is not a direction.
    dust = 1e-6 * np.abs(rows).max(axis=1, keepdims=True)
    centred = np.where(length > dust, centred / np.maximum(length, 1e-300), 0.0)
    return centred


def fit(
    features: Matrix,
    labels: NDArray[np.int64],
    classes: int,
    penalty: float,
    solver: Literal["cyanure", "lbfgs"],
) -> tuple[NDArray[np.float64], bool]:
    """Solve the problem above.

    Args:
        features: [n, d], prepared.
        labels: [n], of at least two classes; classes that do not occur are never predicted.
        classes: number of columns of W.
        penalty: weight of |W|^2 / 2.
        solver: `lbfgs` stops at a relative duality gap of 1e-9, `cyanure` at 1e-3 or after 300
            epochs (MSN's settings).

    Returns:
        W, float64 [d, classes] with NaN in the columns of classes that do not occur, and whether
        the solver reached its tolerance.
    """
    present, dense = np.unique(labels, return_inverse=True)
    if len(present) < 2:
        raise UserError("logistic regression needs samples of at least two classes")
    solve = _cyanure if solver == "cyanure" else _lbfgs
    weights, converged = solve(features, dense, len(present), penalty)
    out = np.full((features.shape[1], classes), np.nan)
    out[:, present] = weights
    return out, converged


def predict(features: Matrix, weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """Most probable class of each row, int64 [n]; the first among equals."""
    present = np.flatnonzero(~np.isnan(weights[0]))
    return present[(features @ weights[:, present]).argmax(axis=1)]


def objective(
    features: Matrix, labels: NDArray[np.int64], weights: NDArray[np.float64], penalty: float
) -> float:
    """Value of the objective at W in float64; all classes must occur."""
    dense = np.searchsorted(np.flatnonzero(~np.isnan(weights[0])), labels)
    weights = weights[:, ~np.isnan(weights[0])]
    return _loss(features @ weights, dense)[0] + penalty / 2 * float(np.vdot(weights, weights))


def _cyanure(
    features: Matrix, labels: NDArray[np.int64], classes: int, penalty: float
) -> tuple[NDArray[np.float64], bool]:
    try:
        from cyanure.estimators import Classifier
    except ImportError as error:
        raise UserError(
            f"cyanure does not load ({error}); set solver=lbfgs for the same problem without it"
        ) from None

    # Two columns -w / 2 and w / 2: the optimum is symmetric, and |W|^2 is half of |w|^2.
    binary = classes == 2
    model = Classifier(
        loss="logistic" if binary else "multiclass-logistic",
        penalty="l2",
        fit_intercept=False,
        lambda_1=penalty / 2 if binary else penalty,
        tol=TOLERANCE,
        max_iter=MAX_EPOCHS,
        duality_gap_interval=GAP_INTERVAL,
        solver="auto",
        random_state=0,
        n_threads=1,
        verbose=False,
    )
    model.fit(np.ascontiguousarray(features), labels)
    converged = bool(np.max(model.n_iter_) < MAX_EPOCHS)
    weights = np.asarray(model.coef_, np.float64)
    if binary:
        half = weights.reshape(-1, 1) / 2
        weights = np.hstack([-half, half])
    if weights.shape != (features.shape[1], classes):
        raise RuntimeError(f"cyanure returned weights {weights.shape} for {classes} classes")
    return weights, converged


def _lbfgs(
    features: Matrix, labels: NDArray[np.int64], classes: int, penalty: float
) -> tuple[Matrix, bool]:
    """L-BFGS (Nocedal and Wright, algorithm 7.5): two matrix products an iteration.

    The search along a direction needs none, since logits are linear in the weights. The duality
    gap of this problem is |gradient|^2 / (2 penalty).
    """
    n = len(features)
    weights = np.zeros((features.shape[1], classes))
    logits = np.zeros((n, classes))
    value, residual = _loss(logits, labels)
    gradient = features.T @ residual / n
    history: deque[tuple[Matrix, Matrix, float]] = deque(maxlen=MEMORY)
    for _ in range(MAX_ITERATIONS):
        if np.vdot(gradient, gradient) <= 2 * penalty * GAP * value:
            return weights, True
        direction = _direction(gradient, history)
        slopes = features @ direction
        before = value, float(np.vdot(gradient, direction))
        squares = [float(np.vdot(x, y)) for x, y in
                   ((weights, weights), (weights, direction), (direction, direction))]  # fmt: skip
        found = _search(logits, slopes, labels, penalty, squares, before)
        if found is None:
            return weights, False  # as low as rounding lets it be
        step, value, residual, logits = found
        weights = weights + step * direction
        new = features.T @ residual / n + penalty * weights
        change = step * direction, new - gradient
        curvature = float(np.vdot(*change))
        if curvature > 0:
            history.append((*change, 1 / curvature))
        gradient = new
    return weights, False


def _direction(gradient: Matrix, history: deque[tuple[Matrix, Matrix, float]]) -> Matrix:
    """Downhill, by the two loops over the last steps and the changes of the gradient there."""
    out = -gradient
    weights = []
    for step, change, inverse in reversed(history):
        weights.append(inverse * np.vdot(step, out))
        out -= weights[-1] * change
    if history:
        step, change, inverse = history[-1]
        out /= inverse * np.vdot(change, change)
    for (step, change, inverse), weight in zip(history, reversed(weights), strict=True):
        out += (weight - inverse * np.vdot(change, out)) * step
    return out


def _search(
    logits: Matrix,
    slopes: Matrix,
    labels: NDArray[np.int64],
    penalty: float,
    squares: list[float],
    before: tuple[float, float],
) -> tuple[float, float, Matrix, Matrix] | None:
    """A step that meets the strong Wolfe conditions, by secants within a bracket.

    Args:
        logits: before the step, [n, classes].
        slopes: their change along the whole direction.
        labels: [n].
        penalty: weight of the squares.
        squares: weights . weights, weights . direction, direction . direction.
        before: value and slope at the beginning.

    Returns:
        Step, value, residual and logits there; None where no step goes lower.
    """
    step, low, high = 1.0, 0.0, np.inf
    value, slope = before
    for _ in range(SEARCHES):
        there = logits + step * slopes
        loss, residual = _loss(there, labels)
        found = loss + penalty / 2 * (squares[0] + step * (2 * squares[1] + step * squares[2]))
        new = float(np.vdot(residual, slopes)) / len(labels)
        new += penalty * (squares[1] + step * squares[2])
        lower = found <= value + 1e-4 * step * slope
        if lower and abs(new) <= 0.9 * abs(slope):
            return step, found, residual, there
        low, high = (low, step) if new > 0 or not lower else (step, high)
        secant = step * slope / (slope - new) if new > slope else np.inf
        within = (low + 0.1 * (high - low), high - 0.1 * (high - low))
        step = float(np.clip(secant, *(within if high < np.inf else (1.1 * step, 10 * step))))
    return None


def _loss(logits: Matrix, labels: NDArray[np.int64]) -> tuple[float, Matrix]:
    """Mean cross-entropy, and softmax minus the one-hot labels, [n, classes]."""
    at = (np.arange(len(logits)), labels)
    largest = logits.max(axis=1, keepdims=True)
    residual = np.exp(logits - largest)
    total = residual.sum(axis=1, keepdims=True)
    loss = float(np.mean(np.log(total[:, 0]) + largest[:, 0] - logits[at]))
    residual /= total
    residual[at] -= 1
    return loss, residual
