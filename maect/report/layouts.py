"""What each table of the paper shows: its columns, where their values come from, what they print.

A column's value is `metrics[key]` of `evaluations/RUN/PROTOCOL.json`, in the paper's units.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from maect.core.errors import UserError


@dataclass(frozen=True)
class Metric:
    """One column: its name in the CSV, its printed title and where its value comes from."""

    name: str
    title: str
    protocol: str
    key: str = ""
    """Name in the JSON's metrics; empty: as the column."""
    paper: str = ""
    """Column of the paper's CSV it is compared with; empty: as the column."""
    group: str = ""
    """Header above several columns."""
    digits: int = 1
    """Decimals, as many as the paper prints."""
    instead: tuple[str, ...] = ()
    """Evaluations that give the value for runs without the first: the paper takes for each model
    the protocol that suits it."""
    deviation: str = ""
    """Metric with the deviation over the seeds of the evaluation itself, for one run."""

    @property
    def source(self) -> str:
        """Name of the value among the JSON's metrics."""
        return self.key or self.name


@dataclass(frozen=True)
class Layout:
    """One table."""

    name: str
    title: str
    paper: str
    """Where it is in the paper."""
    metrics: tuple[Metric, ...]
    protocols: Mapping[str, str] = field(default_factory=dict)
    """Rows (by method) that are evaluated with another protocol than their column's."""
    others: str = ""
    """Pattern of metrics that are columns as well: of sets that stand in for the paper's."""
    other_title: str = ""
    """Title where only such columns are shown."""
    whole: bool = False
    """Beside one model of the paper's show all that the paper prints, also those whose weights are
    not public."""

    def other(self, name: str) -> Metric | None:
        """The column of a metric that stands in for the paper's, titled by its set."""
        found = re.fullmatch(self.others, name) if self.others else None
        if found is None or name in {metric.name for metric in self.metrics}:
            return None
        parts = {"what": "", **found.groupdict()}
        title = ", ".join(filter(None, (_SCORES.get(parts["what"], ""), parts["set"])))
        return Metric(name, title.replace("_", " "), self.metrics[0].protocol)

    def protocols_of(self, metric: Metric, method: str) -> tuple[str, ...]:
        """The evaluations that may give a cell, the first that was run does."""
        if method in self.protocols:
            return (self.protocols[method],)
        return (metric.protocol, *metric.instead)

    @property
    def needs(self) -> tuple[str, ...]:
        """Every evaluation the table reads, without repetition."""
        found = [p for m in self.metrics for p in (m.protocol, *m.instead)]
        return tuple(dict.fromkeys([*found, *self.protocols.values()]))

    def needs_of(self, method: str) -> tuple[str, ...]:
        """Every evaluation that a row reads, without repetition."""
        found = [p for metric in self.metrics for p in self.protocols_of(metric, method)]
        return tuple(dict.fromkeys(found))


_SCORES = {"accuracy": "ACC", "nmi": "NMI", "ami": "AMI", "ari": "ARI"}
_SUBSET = rf"(?P<set>(?!dogs15_)\w+)_(?P<what>{'|'.join(_SCORES)})"
LOW_SHOT = "low-shot evaluations"
FEATURES = "feature evaluations"
PROBE = Metric("linear_probe", "Linear probing", "linear_probe", group=FEATURES)
KNN = (
    Metric("knn", "k-NN", "knn", group=FEATURES),
    # The authors' code standardises the features first; the paper does not say so.
    Metric("knn_standardized", "k-NN, standardised", "knn", paper="knn", group=FEATURES),
)
_SHOTS = ("fine_tune_low_shot",)
_1PCT = (
    "fine_tune_1pct_crop_flip",
    "fine_tune_1pct_crop_flip_high_lr",
    "fine_tune_1pct_mae",
    "low_shot_pct",
)
_10PCT = ("fine_tune_10pct_mae", "low_shot_pct")
SHOTS = (
    Metric("low_shot_1", "1 shot", "low_shot", group=LOW_SHOT, instead=_SHOTS),
    Metric("low_shot_2", "2 shot", "low_shot", group=LOW_SHOT, instead=_SHOTS),
    Metric("low_shot_5", "5 shot", "low_shot", group=LOW_SHOT, instead=_SHOTS),
    Metric("low_shot_1pct", "1 %", "fine_tune_1pct", group=LOW_SHOT, instead=_1PCT),
    Metric("low_shot_10pct", "10 %", "fine_tune_10pct", group=LOW_SHOT, instead=_10PCT),
)


def _cluster(prefix: str = "", suffix: str = "") -> tuple[Metric, ...]:
    return tuple(Metric(n, t, "clustering", key=prefix + n + suffix) for n, t in _SCORES.items())


_ALL = (
    Layout("low_shot", "Low-shot and feature evaluations", "Table 1", (*SHOTS, PROBE, *KNN)),
    Layout(
        "clustering",
        "k-means cluster accuracy, and silhouette score of the true classes",
        "Table 2",
        (
            Metric("accuracy", "Cluster accuracy", "clustering"),
            Metric("silhouette", "Silhouette", "clustering"),
        ),
    ),
    Layout("ablation", "Components of contrastive tuning", "Table 3", (PROBE, *KNN)),
    Layout("combined", "MAE and NNCLR combined, and tuned afterwards", "Table 4", (PROBE, *KNN)),
    Layout(
        "robustness",
        "Robustness of the linear probe, for the k of the top-k lookup",
        "Table 5",
        (
            # A drop of about 4 points fits the threshold-0.7 set and not the matched-frequency one.
            Metric("imagenet_v2", "V2", "robustness", key="imagenet_v2_threshold"),
            Metric("imagenet_r", "R", "robustness"),
            Metric("imagenet_sketch", "Sketch", "robustness"),
            Metric("imagenet_a", "A", "robustness"),
            Metric("imagenet_v2_matched", "V2, matched frequency", "robustness"),
            Metric("imagenet_v2_top", "V2, top images", "robustness"),
        ),
        others=r"(?P<set>(?!imagenet_)\w+)",
    ),
    Layout("reimplementation", "Public MAE and our own", "Table 6", (PROBE, *KNN)),
    Layout(
        "sensitivity",
        "Sensitivity to hyper-parameters",
        "Table 11",
        (
            Metric("linear_probe", "Linear probing", "linear_probe", digits=2),
            Metric("knn", "k-NN", "knn", digits=2),
            Metric("knn_standardized", "k-NN, standardised", "knn", paper="knn", digits=2),
        ),
    ),
    Layout(
        "concat_probe",
        "Linear probing of concatenated features",
        "Table 12",
        (
            *(
                Metric(f"concat_{n}", f"{n} block{'s' * (n > 1)}", "linear_probe_concat")
                for n in (1, 2, 4, 6)
            ),
            Metric("concat_cls_mean", "CLS and mean", "linear_probe_concat"),
        ),
    ),
    Layout(
        "fine_tune",
        "Fine-tuning with all labels",
        "Table 13",
        (Metric("fine_tune", "Accuracy", "fine_tune", digits=2, deviation="fine_tune_std"),),
    ),
    Layout("huge14", "ViT-H with 16 and 14 pixel patches", "Table 14", (*SHOTS, PROBE, *KNN)),
    Layout(
        "effective_invariance",
        "Effective invariance",
        "Table 15",
        (
            Metric("ei_rotation", "Rotations", "effective_invariance", digits=3),
            Metric("ei_color", "Colour", "effective_invariance", digits=3),
        ),
    ),
    Layout(
        "oracle",
        "Tuning with an oracle against supervised fine-tuning",
        "Table 16",
        (
            Metric("linear_probe", "Linear probing", "linear_probe"),
            Metric("fine_tune", "Fine-tuning", "fine_tune"),
        ),
        protocols={
            "crop_flip": "fine_tune_crop_flip",
            "label_smoothing": "fine_tune_label_smoothing",
            "mixup": "fine_tune_mixup",
            "cutmix": "fine_tune_cutmix",
            "random_erasing": "fine_tune_random_erasing",
            "randaugment": "fine_tune",
        },
    ),
    Layout("extended", "Extended comparison", "Table 17", (PROBE, *KNN), whole=True),
    Layout(
        "clustering_best",
        "Clustering, the run with the lowest inertia",
        "Table 18",
        _cluster(),
    ),
    Layout("clustering_mean", "Clustering, mean of runs", "Table 19", _cluster(suffix="_mean")),
    Layout(
        "dogs15_best",
        "Clustering of Dogs15, the run with the lowest inertia",
        "Table 20",
        _cluster("dogs15_"),
        others=_SUBSET,
        other_title="Clustering of some of the classes, the run with the lowest inertia",
    ),
    Layout(
        "dogs15_mean",
        "Clustering of Dogs15, mean of runs",
        "Table 21",
        _cluster("dogs15_", "_mean"),
        others=f"{_SUBSET}_mean",
        other_title="Clustering of some of the classes, mean of runs",
    ),
)
LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in _ALL}
# What the paper shows as a figure only, as a table for claims; without numbers of the paper.
UNPRINTED: dict[str, Layout] = {
    "color_histogram": Layout(
        "color_histogram",
        "Error of predicting the colour histogram",
        "Figure 5",
        (
            Metric("error_last", "Last block", "color_histogram"),
            Metric("error_mean", "Mean of blocks", "color_histogram"),
        ),
    ),
}

ARCHITECTURES = {
    "tiny": "ViT-Tiny/4",
    "small": "ViT-Small/4",
    "base": "ViT-B/16",
    "large": "ViT-L/16",
    "huge": "ViT-H/16",
    "huge14": "ViT-H/14",
    "small8": "ViT-S/8",
    "base8": "ViT-B/8",
    "large7": "ViT-L/7",
    "large7_bn": "ViT-L/7-BN",
    "huge14_bn": "ViT-H/14-BN",
    "huge_448": "ViT-H/16 (448 px)",
}
METHODS = {
    "mae": "MAE",
    "mae_public": "MAE (public weights)",
    "moco_v3": "MoCo v3",
    "msn": "MSN",
    "ibot": "iBOT",
    "dino": "DINO",
    "i_jepa": "I-JEPA",
    "simmim": "SimMIM",
    "nnclr": "NNCLR",
    "cmae": "CMAE",
    "layer_grafting": "Layer Grafting",
    "ct_min": "MAE-CT min",
    "ct_aug": "MAE-CT aug",
    "ct_min_k1": "MAE-CT min, k = 1",
    "ct_min_k10": "MAE-CT min, k = 10",
    "ct_min_k30": "MAE-CT min, k = 30",
    "ct_min_k1_masked": "… with 75 % masking",
    "ct_min_k1_no_head": "… without head initialisation",
    "ct_min_k1_no_lookup": "… without nearest-neighbour lookup",
    "ct_min_k1_public": "MAE-CT min, k = 1 (public weights)",
    "combined": "combined pre-training",
    "combined_ct": "combined + CT",
    "combined_ct_skip": "combined + CT, its own head",
    "detached_ct_skip": "detached + CT, its own head",
    "ct_oracle": "MAE-CT oracle",
    "crop_flip": "MAE fine-tuned, crop and flip",
    "label_smoothing": "+ label smoothing",
    "mixup": "+ Mixup",
    "cutmix": "+ CutMix",
    "random_erasing": "+ random erasing",
    "randaugment": "+ RandAugment (full recipe)",
}
_SWEEPS = {
    "epochs": "epochs",
    "trainable": "trainable blocks",
    "encoder_ema": "encoder EMA",
    "temperature": "temperature",
    "topk": "k of the lookup",
    "projector_ema": "projector EMA",
}


def layout(name: str) -> Layout:
    """The layout of a table.

    Raises:
        UserError: no such table.
    """
    known = LAYOUTS | UNPRINTED
    if name not in known:
        raise UserError(f"unknown table {name!r}; known: {', '.join(known)}")
    return known[name]


def method_title(method: str) -> str:
    """How a method is printed; a name that the paper does not have is printed as it is."""
    sweep, _, value = method.rpartition("_")
    if sweep in _SWEEPS:
        return f"{_SWEEPS[sweep]} = {value}"
    return METHODS.get(method, method.replace("_", " "))


def architecture_title(architecture: str) -> str:
    """How an architecture is printed."""
    return ARCHITECTURES.get(architecture, architecture)
