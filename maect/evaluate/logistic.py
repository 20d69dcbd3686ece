"""L2-regularised multinomial logistic regression without intercept, by two independent solvers.

    minimise over W  (1/n) sum_i -log softmax(x_i W)[y_i] + (penalty / 2) |W|^2

A strictly convex problem: both solvers have the same answer, to their tolerance.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from maect.errors import UserError

Matrix = NDArray[np.float64]

# MSN's call of cyanure, in the names of cyanure 1.x.
TOLERANCE = 1e-3
MAX_EPOCHS = 300
GAP_INTERVAL = 10


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
        solver: `cyanure` stops at a relative duality gap of 1e-3 or after 300 epochs (MSN's
            settings); `lbfgs` (SciPy, float64) stops at a gradient of 1e-6 of its first.

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
    return _value_and_gradient(weights.ravel(), features, dense, penalty)[0]


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
) -> tuple[NDArray[np.float64], bool]:
    from scipy.optimize import minimize

    rows = features
    start = np.zeros(rows.shape[1] * classes)
    steepest = np.abs(_value_and_gradient(start, rows, labels, penalty)[1]).max()
    result = minimize(
        _value_and_gradient,
        start,
        (rows, labels, penalty),
        "L-BFGS-B",
        jac=True,
        options={"maxiter": 5000, "maxfun": 10000, "ftol": 0, "gtol": 1e-6 * steepest},
    )
    return result.x.reshape(-1, classes), bool(result.success)


def _value_and_gradient(
    flat: NDArray[np.float64], rows: NDArray[np.float64], labels: NDArray[np.int64], penalty: float
) -> tuple[float, NDArray[np.float64]]:
    weights = flat.reshape(rows.shape[1], -1)
    logits = rows @ weights
    logits -= logits.max(axis=1, keepdims=True)
    at = (np.arange(len(rows)), labels)
    target = logits[at].copy()
    np.exp(logits, out=logits)
    total = logits.sum(axis=1, keepdims=True)
    loss = float(np.mean(np.log(total[:, 0]) - target) + penalty / 2 * np.vdot(weights, weights))
    logits /= total
    logits[at] -= 1
    return loss, (rows.T @ logits / len(rows) + penalty * weights).ravel()
