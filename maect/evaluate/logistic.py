"""L2-regularised multinomial logistic regression without intercept, by two solvers.

    minimise over W  (1/n) sum_i -log softmax(x_i W)[y_i] + (penalty / 2) |W|^2

A strictly convex problem: both solvers have the same answer, to their tolerance.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from maect.core.errors import UserError

Matrix = NDArray[np.float64]

# MSN's call of cyanure, in the names of cyanure 1.x.
TOLERANCE = 1e-3
MAX_EPOCHS = 300
GAP_INTERVAL = 10
# Of scipy.
GAP = 1e-9  # relative duality gap
MEMORY = 10
MAX_ITERATIONS = 5000


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
    residue = 1e-6 * np.abs(rows).max(axis=1, keepdims=True)
    centred = np.where(length > residue, centred / np.maximum(length, 1e-300), 0.0)
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
    """scipy's L-BFGS, until the duality gap |gradient|^2 / (2 penalty) is small.

    By hand it took 0.5 to 0.8 times as long, since the search along a direction needs no product
    of matrices: 1.0 for 1.3 s at 1,000 samples and classes.
    """
    from scipy.optimize import minimize

    n, shape = len(features), (features.shape[1], classes)
    solution: Matrix | None = None

    def value(flat: Matrix) -> tuple[float, Matrix]:
        nonlocal solution
        weights = flat.reshape(shape)
        loss, residual = _loss(features @ weights, labels)
        loss += penalty / 2 * float(np.vdot(flat, flat))
        gradient = (features.T @ residual / n + penalty * weights).ravel()
        if np.vdot(gradient, gradient) <= 2 * penalty * GAP * loss:
            solution = weights.copy()
            raise StopIteration
        return loss, gradient

    options = {"maxcor": MEMORY, "maxiter": MAX_ITERATIONS, "maxfun": 2 * MAX_ITERATIONS}
    try:
        result = minimize(
            value,
            np.zeros(np.prod(shape)),
            jac=True,
            method="L-BFGS-B",
            options={**options, "ftol": 0.0, "gtol": 0.0},
        )
    except StopIteration:
        assert solution is not None
        return solution, True
    return result.x.reshape(shape), False  # as low as rounding lets it be


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
