"""The tables and figures: one entry each says what it shows, what it reads and how it is called.

The paper's numbers of a table are in `paper/NAME.csv`; a figure's entry names the function that
draws it. The runs are named in the resolved file beside what is made (`maect.report.configs`). The
workflow and the experiment read this module, so it imports no pandas and no matplotlib.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from maect.core.errors import UserError, did_you_mean
from maect.report.configs import Row
from maect.report.titles import PUBLISHED


@dataclass(frozen=True)
class Metric:
    """A column of a table: `metrics[key]` of `evaluations/RUN/EVALUATION.json`."""

    name: str
    """Its name in the CSV."""
    title: str
    evaluation: str
    key: str = ""
    """Name among the JSON's metrics; empty: as the column."""
    paper: str = ""
    """Column of the paper's CSV it is compared with; empty: as the column."""
    digits: int = 1
    """Decimals, as many as the paper prints."""
    best: str = ""
    """Metric that takes its place for other methods' checkpoints, where the evaluation has it."""
    instead: tuple[str, ...] = ()
    """Evaluations that give the value for runs without the first: the paper takes for each model
    the protocol that suits it."""
    by_model: bool = False
    """Whether the result of any row's run has this of many models, by architecture and method."""
    std: str = ""
    """Metric with the standard deviation over the seeds of the evaluation itself, for one run."""

    @property
    def source(self) -> str:
        """Name of the value among the JSON's metrics."""
        return self.key or self.name

    def sources(self, method: str) -> tuple[str, ...]:
        """Likewise, for a method: the first that an evaluation has."""
        best = (self.best,) if self.best and method in PUBLISHED else ()
        return (*best, self.source)


@dataclass(frozen=True)
class Detail:
    """A column of text: how a model was trained, by its runs' records, beside the paper's words."""

    name: str
    """Its name in the CSV, and a setting of the stages that train an encoder."""
    title: str


@dataclass(frozen=True)
class Table:
    """A table."""

    title: str
    paper: str
    """Where it is in the paper."""
    metrics: tuple[Metric, ...]
    caption: str
    """What the report says of it."""
    compared: str = ""
    """What it adds where the paper is compared with; empty: where it is in the paper."""
    evaluations: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Rows (by method) that are evaluated by other evaluations than their column's."""
    details: tuple[Detail, ...] = ()
    """Columns before those of numbers."""
    others: str = ""
    """Pattern of metrics that are columns as well: of sets that stand in for the paper's."""
    other_title: str = ""
    """Title where only such columns are shown."""
    of_public: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Columns, by architecture, in which the paper's row `mae` is that of the public weights."""
    printed: str = ""
    """Table with the numbers that the paper prints; empty: this one."""
    all_of_paper: bool = False
    """Beside one model of the paper's, show all that the paper prints, also those without a run."""

    def other(self, name: str) -> Metric | None:
        """The column of a metric that stands in for the paper's, titled by its set."""
        match = re.fullmatch(self.others, name) if self.others else None
        if match is None or name in {metric.name for metric in self.metrics}:
            return None
        parts = {"what": "", "form": "", **match.groupdict()}
        what = _SCORES.get(parts["what"], "")
        what = f"{what} deviation" if parts["form"] == "std" else what
        title = ", ".join(filter(None, (what, parts["set"])))
        return Metric(name, title.replace("_", " "), self.metrics[0].evaluation)

    def evaluations_of(self, metric: Metric, method: str) -> tuple[str, ...]:
        """The evaluations that may give a cell; the first that was run does."""
        if method in self.evaluations:
            return self.evaluations[method]
        return (metric.evaluation, *metric.instead)

    def reads(self, method: str) -> tuple[str, ...]:
        """Every evaluation that a row reads, without repetition."""
        names = [name for m in self.metrics for name in self.evaluations_of(m, method)]
        return tuple(dict.fromkeys(names))

    @property
    def reads_runs(self) -> bool:
        """Whether it also reads the records of all runs behind its rows."""
        return bool(self.details)

    def label(self, compare: bool) -> dict[str, str]:
        """How the report lists it, `compare`: beside the paper's."""
        beyond = f"Tables beyond the paper: {self.title}"  # sorted behind `Table 21`
        return {"table": (_label(self.title, self.paper) or beyond) if compare else self.title}

    def about(self, compare: bool) -> str:
        """What the report says of it, `compare`: beside the paper's."""
        return _about(self.caption, self.compared, self.paper if compare else "")


@dataclass(frozen=True)
class Figure:
    """A figure."""

    title: str
    paper: str
    """Where it is in the paper; empty: nowhere."""
    draw: str
    """`MODULE:FUNCTION` of `maect.report.figures`: a `ShownConfig` to a matplotlib figure."""
    caption: str
    """What the report says of it."""
    compared: str = ""
    """What it adds where the paper is compared with; empty: where it is in the paper."""
    needs: tuple[str, ...] = ()
    """The evaluations that it shows: it can be drawn of rows that have one of them,"""
    besides: tuple[str, ...] = ()
    """and then also shows these."""
    reads_runs: bool = False
    """Whether it also reads the records of all runs behind its rows."""
    first_seed: bool = False
    """Whether of a row with several seeds it shows the first, and reads no other."""
    names_classes: bool = False
    groups_classes: bool = False
    """Whether it shows groups of classes in place of the classes, where the dataset has any."""
    trained_here: bool = False
    """Whether it leaves out what begins with imported weights, whose cost is not known,"""
    unless: str = ""
    """unless any row has this evaluation, which tells it."""

    def reads(self, method: str) -> tuple[str, ...]:
        """Every evaluation that a row reads."""
        return (*self.needs, *self.besides)

    def label(self, compare: bool) -> dict[str, str]:
        """How the report lists it, `compare`: beside the paper's."""
        beyond = f"{self.title} (not in the paper)"
        return {"figure": (_label(self.title, self.paper) or beyond) if compare else self.title}

    def about(self, compare: bool) -> str:
        """What the report says of it, `compare`: beside the paper's."""
        return _about(self.caption, self.compared, self.paper if compare else "")


def can_show(
    name: str,
    figure: bool,
    rows: Iterable[Row],
    made: Collection[tuple[str, str]],
) -> bool:
    """Whether a table or figure has anything to show.

    Args:
        name: which.
        figure: not a table.
        rows: its lines.
        made: evaluations that are made, as (run, name).
    """
    needs = FIGURES[name].needs if figure else ()
    if figure and not needs:
        return True
    return any(
        (run, need) in made
        for row in rows
        for run in row.runs
        for need in (needs or TABLES[name].reads(row.method))
    )


def _label(title: str, paper: str) -> str:
    """Sorted as text, this is the paper's order; empty for what is not in the paper.

    One label only: of two, Snakemake makes one a switch where there are two results, and then shows
    nothing.
    """
    kind, _, number = paper.partition(" ")
    # A space sorts before a digit.
    return f"{kind} {number:>2}: {title}" if number.isdecimal() else ""


def _about(caption: str, compared: str, paper: str) -> str:
    """A caption, and what is compared with; `paper`: where that is, empty for nothing."""
    if not paper:
        return caption
    number = paper.partition(" ")[2]
    where = paper.lower() if number.isdecimal() else paper
    return f"{caption} {compared or f'Paper: {where}.'}"


_SCORES = {"accuracy": "ACC", "nmi": "NMI", "ami": "AMI", "ari": "ARI"}
_SUBSET = rf"(?P<set>(?!dogs15_)\w+)_(?P<what>{'|'.join(_SCORES)})"
_PROBE = Metric("linear_probe", "Linear probing", "linear_probe", instead=("linear_probe_forms",))
_KNN = (
    Metric("knn", "k-NN", "knn", best="knn_best_k"),
    # The authors' code standardises the features first; the paper does not say so.
    Metric(
        "knn_standardized",
        "k-NN, standardised",
        "knn",
        paper="knn",
        best="knn_standardized_best_k",
    ),
)
_FEATURES = (_PROBE, *_KNN)
_SHOTS = ("fine_tune_low_shot",)
_1PCT = (
    "fine_tune_1pct_crop_flip",
    "fine_tune_1pct_crop_flip_mae",
    "fine_tune_1pct_crop_flip_high_lr",
    "fine_tune_1pct_mae",
    "fine_tune_1pct_mim",
    "low_shot_pct",
)
_10PCT = ("fine_tune_10pct_mae", "fine_tune_10pct_refined", "fine_tune_10pct_mim", "low_shot_pct")
_LOW_SHOT = (
    Metric("low_shot_1", "1 shot", "low_shot", instead=_SHOTS),
    Metric("low_shot_2", "2 shot", "low_shot", instead=_SHOTS),
    Metric("low_shot_5", "5 shot", "low_shot", instead=_SHOTS),
    Metric("low_shot_1pct", "1 %", "fine_tune_1pct", instead=_1PCT),
    Metric("low_shot_10pct", "10 %", "fine_tune_10pct", instead=_10PCT),
)
_FINE_TUNE = Metric(
    "fine_tune",
    "Accuracy",
    "fine_tune",
    digits=2,
    instead=("fine_tune_patch_mean",),
    std="fine_tune_std",
)


def _clustering(prefix: str = "", suffix: str = "") -> tuple[Metric, ...]:
    return tuple(Metric(n, t, "clustering", key=prefix + n + suffix) for n, t in _SCORES.items())


def _deviation(prefix: str = "") -> Metric:
    """Of cluster accuracy over the runs of k-means: the paper prints its ranges, in the text."""
    return Metric("deviation", "ACC deviation", "clustering", key=f"{prefix}accuracy_std")


TABLES: dict[str, Table] = {
    "low_shot": Table(
        "Low-shot and feature evaluations",
        "Table 1",
        (*_LOW_SHOT, *_FEATURES),
        caption=(
            "Low-shot classification with 1, 2 and 5 labels a class (logistic regression on frozen "
            "features, mean of the label subsets) and with 1 % and 10 % of the labels "
            "(fine-tuning, at its best epoch on the test split), and evaluations of the frozen "
            "features with all labels. k-NN is given for the features as they are and standardised "
            "with the training set's mean and standard deviation."
        ),
        compared=(
            "Which k-NN the paper used, it does not say; its code standardises. Of other methods' "
            "checkpoints it is the best over k, and the linear probe the best of several forms, as "
            "the paper reports them. The paper's row MAE is in part that of the public weights "
            "(probe of ViT-B; probe and k-NN of ViT-L): these numbers stand beside those, not "
            "beside the MAE trained here. Fine-tuning is scored as by the authors. Paper: table 1."
        ),
        of_public={"base": ("linear_probe",), "large": ("linear_probe", "knn")},
    ),
    "clustering": Table(
        "k-means cluster accuracy, and silhouette score of the true classes",
        "Table 2",
        (
            Metric("accuracy", "Cluster accuracy", "clustering"),
            Metric("silhouette", "Silhouette", "clustering"),
        ),
        caption=(
            "Accuracy of mini-batch k-means on the standardised features of the evaluation split, "
            "with as many clusters as classes, for the run of lowest inertia; and the silhouette "
            "score of the true classes (from -100 to 100; below 0 the classes overlap)."
        ),
    ),
    "ablation": Table(
        "Components of contrastive tuning",
        "Table 3",
        _FEATURES,
        caption=(
            "What each component of contrastive tuning is worth: with masked inputs, with a head "
            "that was not trained first, with the sample's own second view in place of its "
            "neighbour."
        ),
        compared="ViT-L/16, k = 1. Paper: table 3.",
    ),
    "combined": Table(
        "MAE and NNCLR combined, and tuned afterwards",
        "Table 4",
        _FEATURES,
        caption=(
            "MAE and NNCLR trained together, without and with contrastive tuning afterwards, "
            "against one after the other."
        ),
        compared=(
            "ViT-L/16, k = 1. The paper's row MAE is that of the public weights. Paper: table 4."
        ),
        of_public={"large": ("linear_probe", "knn")},
    ),
    "robustness": Table(
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
        caption=(
            "The linear probe on shifted test sets, for several k of the top-k lookup: four of "
            "ImageNet, and others under their own names."
        ),
        compared=(
            "V2 is the threshold-0.7 variant, whose difficulty fits the paper's numbers; the paper "
            "does not name its variant. ViT-L/16. Paper: table 5."
        ),
        others=r"(?P<set>(?!imagenet_)\w+)",
    ),
    "reimplementation": Table(
        "Public MAE and our own",
        "Table 6",
        _FEATURES,
        caption=("MAE as published and as trained here, and each after contrastive tuning."),
        compared="Trained for 800 epochs of two views. ViT-L/16, k = 1. Paper: table 6.",
    ),
    "sensitivity": Table(
        "Sensitivity to hyper-parameters",
        "Table 11",
        tuple(replace(metric, digits=2) for metric in _FEATURES),
        caption="One hyper-parameter of contrastive tuning changed at a time.",
        compared=(
            "From 20 epochs, 12 trainable blocks, encoder EMA 0.9999, temperature 0.2, k = 1 and "
            "projector EMA 0.99. ViT-L/16. Paper: table 11."
        ),
    ),
    "concat_probe": Table(
        "Linear probing of concatenated features",
        "Table 12",
        (
            *(
                Metric(f"concat_{n}", f"{n} block{'s' * (n > 1)}", "linear_probe_concat")
                for n in (1, 2, 4, 6)
            ),
            Metric("concat_cls_mean", "CLS and mean", "linear_probe_concat"),
        ),
        caption=(
            "Linear probing on the concatenated features of the last blocks (the encoder's own: "
            "CLS token, or mean of the patch tokens), and on CLS and mean of the last."
        ),
    ),
    "fine_tune": Table(
        "Fine-tuning with all labels",
        "Table 13",
        (
            _FINE_TUNE,
            replace(
                _FINE_TUNE, name="fine_tune_last", title="Last epoch", std="fine_tune_last_std"
            ),
        ),
        caption=(
            "Fine-tuning of the whole encoder with all labels, at each training's best epoch on "
            "the test split, and after its last."
        ),
        compared=(
            "The authors score the best epoch. The public MAE's numbers are those of its own code, "
            "which reads the mean of the patches with a norm of its own, means of four trainings; "
            "so is it fine-tuned here. Paper: table 13."
        ),
    ),
    "huge14": Table(
        "ViT-H with 16 and 14 pixel patches",
        "Table 14",
        (*_LOW_SHOT, *_FEATURES),
        caption=(
            "ViT-H with patches of 16 and of 14 pixels. Fine-tuning is scored at its best epoch on "
            "the test split."
        ),
        compared=(
            "MAE with 14, from which the tuned ones begin, is the published one. Paper: table 14."
        ),
    ),
    "effective_invariance": Table(
        "Effective invariance",
        "Table 15",
        (
            Metric("ei_rotation", "Rotations", "effective_invariance", digits=3),
            Metric("ei_color", "Colour", "effective_invariance", digits=3),
        ),
        caption=(
            "Effective invariance, from 0 (no prediction survives the change of the image) to 1, "
            "to rotations and to changes of colour."
        ),
    ),
    "oracle": Table(
        "Tuning with an oracle against supervised fine-tuning",
        "Table 16",
        (_PROBE, Metric("fine_tune", "Fine-tuning", "fine_tune")),
        caption=(
            "Linear probing after tuning with an oracle, whose neighbours are always of the same "
            "class, against fine-tuning with more and more augmentation and regularisation: every "
            "line adds to the one above, each at its best epoch on the test split."
        ),
        compared="ViT-L/16. Paper: table 16.",
        evaluations={
            "crop_flip": ("fine_tune_crop_flip",),
            "label_smoothing": ("fine_tune_label_smoothing",),
            "mixup": ("fine_tune_mixup",),
            "cutmix": ("fine_tune_cutmix",),
            "random_erasing": ("fine_tune_random_erasing",),
            "randaugment": ("fine_tune_randaugment", "fine_tune"),  # the same, trained again
        },
    ),
    "extended": Table(
        "Extended comparison",
        "Table 17",
        _FEATURES,
        caption=(
            "Linear probing and k-NN beside published models: epochs (of pre-training; of tuning), "
            "global and local views and passes of a teacher for each image, and the share of "
            "patches left out. * I-JEPA sees one context block and four target blocks, which "
            "overlap. † iBOT masks every other time, between 10 and 50 %."
        ),
        details=(
            Detail("epochs", "Epochs"),
            Detail("views", "GV/LV/T"),
            Detail("mask_ratio", "Mask ratio"),
        ),
        all_of_paper=True,
    ),
    "clustering_best": Table(
        "Clustering, the run with the lowest inertia",
        "Table 18",
        _clustering(),
        caption=(
            "Cluster accuracy, normalised and adjusted mutual information and adjusted Rand index "
            "of k-means, for the run of lowest inertia."
        ),
    ),
    "clustering_mean": Table(
        "Clustering, mean of runs",
        "Table 19",
        (*_clustering(suffix="_mean"), _deviation()),
        caption=(
            "The same measures, as the mean over all runs of k-means, and the standard deviation "
            "of the accuracy over them."
        ),
        compared="The deviation is 0.2 to 0.7 in the paper. Paper: table 19.",
    ),
    "dogs15_best": Table(
        "Clustering of Dogs15, the run with the lowest inertia",
        "Table 20",
        _clustering("dogs15_"),
        caption=(
            "Clustering of some of the classes, for the run of lowest inertia; the subset is named "
            "in its columns."
        ),
        compared="Where none is named, it is ImageNet-Dogs15, 15 breeds of dogs. Paper: table 20.",
        others=_SUBSET,
        other_title="Clustering of some of the classes, the run with the lowest inertia",
    ),
    "dogs15_mean": Table(
        "Clustering of Dogs15, mean of runs",
        "Table 21",
        (*_clustering("dogs15_", "_mean"), _deviation("dogs15_")),
        caption=(
            "Clustering of some of the classes, as the mean over all runs of k-means; the subset "
            "is named in its columns. The deviation is that of the accuracy over the runs."
        ),
        compared=(
            "Where no subset is named, it is the 15 dog breeds of ImageNet-Dogs15, for which the "
            "deviation is 0.6 to 4.3 in the paper. Paper: table 21."
        ),
        others=rf"{_SUBSET}_(?P<form>mean|(?<=accuracy_)std)",
        other_title="Clustering of some of the classes, mean of runs",
    ),
    "dense": Table(
        "Classes of patches",
        "Darcet et al. 2025",
        (
            Metric("patch_knn", "mIoU, k-NN of patches", "patch_knn"),
            Metric("patch_logistic", "mIoU, logistic regression", "patch_logistic"),
        ),
        caption=(
            "Segmentation by frozen patch tokens: mean intersection over union. Settings of both "
            "classifiers are chosen on held-out training images."
        ),
        compared=(
            "No number is quoted: the paper's encoders and images are others. Paper: Darcet et al. "
            "2025."
        ),
    ),
    "efficient_probe": Table(
        "Efficient probing of the patch tokens",
        "Psomas et al. 2026",
        (
            _PROBE,
            Metric("efficient_probe", "Efficient probing", "efficient_probe"),
            Metric(
                "knn_before_norm",
                "k-NN before the final norm, best k",
                "knn_before_norm",
                key="knn_best_k",
                paper="knn",
            ),
        ),
        caption=(
            "Attentive probing of the patch tokens beside linear probing: what a masked "
            "autoencoder knows is in its patches, where a probe of one token misses it."
        ),
        compared=(
            "The numbers to compare with are those of Psomas et al. 2026 for the public MAE, by "
            "their own k-NN, before the final norm and at its best k, and linear probes that they "
            "quote; the paper of MAE-CT has none. Paper: Psomas et al. 2026."
        ),
    ),
    "refined": Table(
        "MIM-Refiner",
        "Alkin et al. 2025",
        (
            *(
                replace(column, evaluation="low_shot_before_norm", instead=("low_shot", *_SHOTS))
                for column in _LOW_SHOT[:3]
            ),
            *_LOW_SHOT[3:],
            replace(
                _PROBE,
                evaluation="linear_probe_refiner",
                instead=("linear_probe", "linear_probe_forms"),
            ),
            Metric("knn", "k-NN", "knn_before_norm", key="knn_standardized"),
            Metric("knn_hub", "k-NN, 20, after the norm", "knn_hub", key="knn_standardized"),
            Metric("knn_last_4", "k-NN, four blocks", "knn_last_4", key="knn_standardized"),
            *_clustering(),
            Metric("silhouette", "Silhouette", "clustering"),
        ),
        caption=(
            "Encoders before and after refinement: few labels and k-NN on standardised features, "
            "both before the final norm; the best of 52 linear probes, or of those after the norm "
            "where these were not trained; clusters of k-means, and the silhouette of the classes."
        ),
        compared=(
            "Printed are the numbers of the authors' project page. MAE-CT's row there has the "
            "better of its two forms in most cells. How they clustered is not in their code; here "
            "it is done as for MAE-CT. Paper: Alkin et al. 2025."
        ),
        all_of_paper=True,
    ),
    # Figures only, in the paper; as tables for the claims.
    "gpu_hours": Table(
        "Cost of training",
        "Figure 2",
        (
            Metric("hours", "Device hours", "throughput", key="model_hours", by_model=True),
            _PROBE,
            Metric("flash_gain", "Gain of fused attention, %", "throughput"),
            Metric("grafting_ratio", "Layer Grafting's second part : tuning", "throughput"),
            Metric("tune_fits", "Part of the batch on one device", "throughput", digits=2),
            Metric("tune_masked_fits", "The same, masked", "throughput", digits=2),
        ),
        caption=(
            "Device hours by a short benchmark of training steps, extrapolated to the epochs of "
            "each model, beside its linear probing accuracy: the numbers behind figure 2. And what "
            "the text says of cost: by how much fused attention speeds up pre-training, what Layer "
            "Grafting takes after MAE against head initialisation and tuning, and how much of the "
            "batch of tuning fits on one device."
        ),
        compared="Paper: figure 2, sections 2 and 4.4, appendix A.1.",
        printed="extended",
        all_of_paper=True,
    ),
    "neighbor_retrieval": Table(
        "Nearest neighbours of the query's class",
        "Figure 11",
        (Metric("query_precision", "Neighbours of the class, %", "retrieval"),),
        caption="Percent of the nearest neighbours of the query images that are of the same class.",
    ),
    "color_histogram": Table(
        "Error of predicting the colour histogram",
        "Figure 5",
        (
            Metric("error_last", "Last block", "color_histogram", std="error_last_std"),
            Metric("error_mean", "Mean of blocks", "color_histogram", std="error_mean_std"),
        ),
        caption=(
            "Error of a linear probe that predicts an image's colour histogram from one token "
            "(CLS, or the mean of the patches), after the last block and as the mean over blocks, "
            "in percent of the error of a uniform prediction."
        ),
        compared="The numbers behind figure 5, which the paper does not print. Paper: figure 5.",
    ),
}

FIGURES: dict[str, Figure] = {
    "cluster_formation": Figure(
        "Formation of clusters",
        "Figure 1",
        "embedding:cluster_formation",
        caption=(
            "UMAP embeddings of all classes before and after contrastive tuning; in the paper "
            "coarse groups come apart into classes. Colours are groups of classes, where the "
            "dataset has any (for ImageNet by WordNet). Of several seeds, the first."
        ),
        needs=("umap_all", "umap"),  # where `umap` shows some classes only, there is one of all
        besides=("clustering",),
        names_classes=True,
        groups_classes=True,
        first_seed=True,
    ),
    "gpu_hours": Figure(
        "Probing accuracy against GPU hours",
        "Figure 2",
        "lines:gpu_hours",
        caption=(
            "Linear probing accuracy against the device hours of all training behind a model: by a "
            "short benchmark, extrapolated to the epochs of each model, and as recorded where a "
            "model was trained here."
        ),
        needs=(_PROBE.evaluation, *_PROBE.instead),
        besides=("throughput",),
        reads_runs=True,
        trained_here=True,
        unless="throughput",
    ),
    "label_efficiency": Figure(
        "Accuracy against labels",
        "Figure 3",
        "lines:label_efficiency",
        caption=(
            "Accuracy with 1, 2 and 5 labels a class (logistic regression, if not fine-tuning), "
            "and of fine-tuning with 1 %, 10 % and all labels, at each training's best epoch on "
            "the test split."
        ),
        needs=(
            *(
                name
                for metric in (*_LOW_SHOT, _FINE_TUNE)
                for name in (metric.evaluation, *metric.instead)
            ),
        ),
    ),
    "pipeline": Figure(
        "Runs and what starts from what",
        "Figure 4",
        "schematic:pipeline",
        caption="The runs of this experiment and what starts from what.",
        reads_runs=True,
        first_seed=True,
    ),
    "color_histogram": Figure(
        "Colour histogram error by block",
        "Figure 5",
        "lines:color_histogram",
        caption=(
            "Error of a linear probe that predicts an image's colour histogram from one token "
            "(CLS, or the mean of the patches) after each block, in percent of the error of a "
            "uniform prediction. A lower error means that more of the colours is kept: a sign of "
            "shortcut features."
        ),
        needs=("color_histogram",),
        first_seed=True,
    ),
    "umap": Figure(
        "UMAP embeddings",
        "Figure 6",
        "embedding:umap",
        caption=(
            "UMAP embeddings of the evaluation split's features, coloured by true class, with the "
            "accuracy of k-means on the features themselves (not on the picture), of the first "
            "seed. Distances between groups and their sizes mean little in such an embedding; "
            "whether a class is one group is what counts."
        ),
        compared="Paper: figures 6 and 8.",
        needs=("umap",),
        besides=("clustering",),
        names_classes=True,
        first_seed=True,
    ),
    "confusion": Figure(
        "Clusters against classes",
        "Figure 9",
        "grids:confusion",
        caption=(
            "Clusters of k-means (columns, matched to the classes one to one) against true classes "
            "(rows), in percent of the class. Of several seeds, the first."
        ),
        needs=("clustering",),
        names_classes=True,
        first_seed=True,
    ),
    "cluster_retrieval": Figure(
        "Images nearest to cluster centres",
        "Figure 10",
        "grids:cluster_retrieval",
        caption=(
            "The images nearest to each cluster's centre, one row a cluster. A frame marks images "
            "that are not of the class that the cluster was matched to. Where the evaluation is "
            "of some of the classes, so are the clusters."
        ),
        compared="Paper: figures 7 and 10.",
        needs=("retrieval",),
        names_classes=True,
        first_seed=True,
    ),
    "neighbor_retrieval": Figure(
        "Nearest neighbours",
        "Figure 11",
        "grids:neighbor_retrieval",
        caption=(
            "The nearest neighbours of an image (first column) by cosine similarity, one row a "
            "model. A frame marks images of another class."
        ),
        needs=("retrieval",),
        names_classes=True,
        first_seed=True,
    ),
    "neighbors_in_training": Figure(
        "Nearest neighbours while it trains",
        "",
        "grids:neighbors_in_training",
        caption=(
            "A few training images (left) and, of a fixed part of the others, those nearest to "
            "them by cosine similarity, at the first, a middle and the last look."
        ),
        reads_runs=True,
        first_seed=True,
    ),
    "reconstructions": Figure(
        "Reconstructions while it trains",
        "",
        "grids:reconstructions",
        caption=(
            "A few training images, always with the same mask: what the encoder sees, what the "
            "decoder makes of it, and the image; at the first, a middle and the last look. "
            "Predicted patches are shown with the mean and standard deviation of the true ones "
            "where the model predicts normalised pixels."
        ),
        reads_runs=True,
        first_seed=True,
    ),
    "training_curves": Figure(
        "Training curves",
        "",
        "lines:training_curves",
        caption=(
            "Loss over epochs, one panel a stage, and what looks at the encoders found meanwhile; "
            "long curves are averaged to 200 points."
        ),
        reads_runs=True,
        first_seed=True,
    ),
    "gain_by_precision": Figure(
        "What tuning gains, by how often its look-up is right",
        "",
        "lines:gain_by_precision",
        caption=(
            "k-NN accuracy (standardised) that tuning adds to its MAE's, against the part of its "
            "look-ups that were of the right class, over the whole training. Lines: an oracle "
            "that is right as often as it is told, and otherwise takes the nearest of another "
            "class. Hollow: the look-up itself. Dotted: without look-up, where the other view is "
            "the positive. Deviations are over seeds, paired."
        ),
        needs=("knn",),
        reads_runs=True,
    ),
    "knn_compute": Figure(
        "k-NN accuracy against compute",
        "",
        "lines:knn_compute",
        caption=(
            "k-NN accuracy against the operations of all training behind a model, counted from its "
            "settings. Markers: on the test images, with the standard deviation over seeds. Lines: "
            "on a part of the training images, while the first seed was trained; with fewer "
            "images to compare with they lie lower. A tuned model's line begins where its MAE's "
            "ends."
        ),
        needs=("knn",),
        reads_runs=True,
        trained_here=True,
    ),
    "knn_per_block": Figure(
        "k-NN accuracy by block",
        "",
        "lines:knn_per_block",
        caption=(
            "k-NN accuracy on the output of each block ([CLS], or the mean of the patches, as the "
            "encoder is read; before the final norm, standardised), from one forward pass, with "
            "the standard deviation over seeds. Where a line falls at its end, the last blocks "
            "work for something else than classes."
        ),
        needs=("knn_per_block",),
    ),
}


TABLE_NAMES = tuple(name for name in TABLES if name not in FIGURES)
"""Tables that an experiment may ask for: one of a figure's name is made with the figure."""


def named_table(name: str) -> Table:
    """The table of a name.

    Raises:
        UserError: no such table.
    """
    if name not in TABLES:
        raise UserError(f"unknown table {name!r}; {did_you_mean(name, TABLES)}")
    return TABLES[name]


def named_figure(name: str) -> Figure:
    """The figure of a name.

    Raises:
        UserError: no such figure.
    """
    if name not in FIGURES:
        raise UserError(f"unknown figure {name!r}; {did_you_mean(name, FIGURES)}")
    return FIGURES[name]
