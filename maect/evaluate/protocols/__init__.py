"""Declarations of the package's protocols: settings, inputs, cost and titles; torch-free.

Rules and plans read them. `work` names the module and function that compute the metrics. A new
protocol is a module of its own beside this package; `maect.evaluate` registers it.
"""

from maect.evaluate.base import RealLabels
from maect.evaluate.protocols.encoders import (
    TWIN,
    Accuracy,
    EffectiveInvariance,
    KnnPerBlock,
    Robustness,
    Throughput,
)
from maect.evaluate.protocols.patches import (
    Masked,
    PatchClassifier,
    PatchKnn,
    PatchLinear,
    PatchLogistic,
)
from maect.evaluate.protocols.probes import (
    AttentiveProbe,
    ByEpochs,
    ByUpdates,
    ColorHistogram,
    EfficientProbe,
    LarsLinearProbe,
    LinearProbe,
    OnCrops,
    TrainsByLars,
    TrainsProbe,
    UpdateSchedule,
    epoch_ends,
)
from maect.evaluate.protocols.stored_features import (
    PENALTIES,
    REMOVED,
    SHRINKAGES,
    Clustering,
    Explore,
    Geometry,
    Knn,
    Logistic,
    LowShot,
    Retrieval,
    Umap,
    columns_of,
)

__all__ = [
    "PENALTIES",
    "REMOVED",
    "SHRINKAGES",
    "TWIN",
    "Accuracy",
    "AttentiveProbe",
    "ByEpochs",
    "ByUpdates",
    "Clustering",
    "ColorHistogram",
    "EffectiveInvariance",
    "EfficientProbe",
    "Explore",
    "Geometry",
    "Knn",
    "KnnPerBlock",
    "LarsLinearProbe",
    "LinearProbe",
    "Logistic",
    "LowShot",
    "Masked",
    "OnCrops",
    "PatchClassifier",
    "PatchKnn",
    "PatchLinear",
    "PatchLogistic",
    "RealLabels",
    "Retrieval",
    "Robustness",
    "Throughput",
    "TrainsByLars",
    "TrainsProbe",
    "Umap",
    "UpdateSchedule",
    "columns_of",
    "epoch_ends",
]
