"""Statements of the paper that its tables can decide, in our own words, in the paper's order.

Each is a function that yields the comparisons that decide it. Every statement that rests on printed
numbers holds for the paper's own.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from maect.report.bounds import (
    SHIFTED,
    AnySize,
    Bound,
    MeasuredModels,
    Model,
    Quantity,
    bound,
    value,
)

Bounds = Iterable[Bound]
Decides = Callable[[MeasuredModels], Bounds]
SHOTS = ("low_shot_1", "low_shot_2", "low_shot_5")
FEW_LABELS = (*SHOTS, "low_shot_1pct", "low_shot_10pct")
FEATURES = ("linear_probe", "knn_standardized")
SIZES = ("base", "large", "huge")
MAE, MINIMAL, EXTENSIVE = (Model("low_shot", method) for method in ("mae", "ct_min", "ct_aug"))
"""Before tuning, and after tuning with minimal and extensive augmentation."""


@dataclass(frozen=True)
class Statement:
    """A statement, where the paper makes it, and the comparisons that decide it."""

    name: str
    paper: str
    text: str
    bounds: Decides

    @property
    def expression(self) -> str:
        """Return the comparisons, with `*` for each size and `each_shift` for each shifted set."""
        return "; ".join(map(str, self.bounds(AnySize())))


STATEMENTS: list[Statement] = []


def statement(paper: str) -> Callable[[Decides], Decides]:
    """Register a function as the statement of its name; its docstring is the text.

    Args:
        paper: where the paper makes the statement.
    """

    def register(bounds: Decides) -> Decides:
        text = " ".join((bounds.__doc__ or "").split())
        STATEMENTS.append(Statement(bounds.__name__, paper, text, bounds))
        return bounds

    return register


def higher_at(
    sizes: Iterable[str], better: Model, worse: Model, metrics: Iterable[str]
) -> Iterator[Bound]:
    """Say that one model exceeds another in each metric, at each of these sizes."""
    sizes = list(sizes)
    for metric in metrics:
        for size in sizes:
            yield bound(better.value(size, metric), ">", worse.value(size, metric))


def higher(
    measured: MeasuredModels, better: Model, worse: Model, metrics: Iterable[str]
) -> Iterator[Bound]:
    """Say that one model exceeds another in each metric, at every size that has both."""
    return higher_at(measured.sizes(better, worse), better, worse, metrics)


@statement("abstract, figure 2")
def overhead(measured: MeasuredModels) -> Bounds:
    """Head initialisation and tuning with minimal augmentation cost at most a tenth of the
    pre-training."""
    tuned = Model("cost", "ct_min")
    for size in measured.sizes(tuned):
        yield bound(tuned.value(size, "overhead"), "<=", 10)


@statement("introduction, figure 2")
def less_compute_than_others(measured: MeasuredModels) -> Bounds:
    """At ViT-L tuned models take less compute, pre-training included, than MoCo v3, iBOT, Layer
    Grafting and the best MSN (ViT-L/7)."""
    others = (
        ("large", "moco_v3"), ("large", "ibot"), ("large", "layer_grafting"), ("large7", "msn"),
    )  # fmt: skip
    for method in ("ct_min", "ct_aug"):
        for size, other in others:
            hours = value("gpu_hours", "large", method, "hours")
            yield bound(hours, "<", value("gpu_hours", size, other, "hours"))


@statement("section 2")
def layer_grafting_costs_more(measured: MeasuredModels) -> Bounds:
    """At ViT-L what Layer Grafting takes after MAE is at least ten times what head initialisation
    and tuning take (in the paper 15 times)."""
    yield bound(value("gpu_hours", "large", "mae", "grafting_ratio"), ">=", 10)


def gain(size: str, metric: str) -> Quantity:
    """Return the points that tuning with minimal augmentation adds to MAE."""
    return MINIMAL.value(size, metric) - MAE.value(size, metric)


@statement("section 4.3, table 1")
def probe_gain(measured: MeasuredModels) -> Bounds:
    """Tuning with minimal augmentation raises linear probing accuracy at every size."""
    return higher(measured, MINIMAL, MAE, ["linear_probe"])


@statement("section 4.3, table 1")
def knn_gain(measured: MeasuredModels) -> Bounds:
    """Tuning with minimal augmentation raises k-NN accuracy at every size."""
    return higher(measured, MINIMAL, MAE, ["knn_standardized"])


@statement("section 4.3, table 1")
def knn_gains_most(measured: MeasuredModels) -> Bounds:
    """k-NN accuracy gains more than linear probing accuracy."""
    for size in measured.sizes(MINIMAL, MAE):
        yield bound(gain(size, "knn_standardized"), ">", gain(size, "linear_probe"))


@statement("section 4.3, table 1")
def aug_gain(measured: MeasuredModels) -> Bounds:
    """Tuning with extensive augmentation improves every low-shot and every feature evaluation at
    every size."""
    return higher(measured, EXTENSIVE, MAE, (*FEW_LABELS, *FEATURES))


@statement("section 4.3, table 1")
def low_shot_gain(measured: MeasuredModels) -> Bounds:
    """With one, two or five labels a class, tuning improves on MAE at every size."""
    return higher(measured, MINIMAL, MAE, SHOTS)


@statement("introduction and section 4.3, table 1")
def fewest_labels_gain_most(measured: MeasuredModels) -> Bounds:
    """The fewer the labels, the larger the gain: one label a class gains more than five."""
    for size in measured.sizes(MINIMAL, MAE):
        yield bound(gain(size, "low_shot_1"), ">", gain(size, "low_shot_5"))


@statement("introduction and section 4.3, table 1")
def many_labels_gain_least(measured: MeasuredModels) -> Bounds:
    """With a tenth of the labels the gain is smaller than with five labels a class."""
    for size in measured.sizes(MINIMAL, MAE):
        yield bound(gain(size, "low_shot_10pct"), "<", gain(size, "low_shot_5"))


@statement("section 4.3, table 1")
def scaling(measured: MeasuredModels) -> Bounds:
    """The k-NN gain of tuning grows with the size of the encoder."""
    for smaller, larger in pairwise(SIZES):
        yield bound(gain(larger, "knn_standardized"), ">", gain(smaller, "knn_standardized"))


@statement("section 4.3, table 1")
def base_is_too_small(measured: MeasuredModels) -> Bounds:
    """At ViT-B the best instance-discrimination model stays ahead in both feature evaluations."""
    return higher_at(["base"], Model("low_shot", "ibot"), EXTENSIVE, FEATURES)


@statement("section 4.3, table 1")
def large_beats_others(measured: MeasuredModels) -> Bounds:
    """At ViT-L the tuned model with extensive augmentation is ahead of iBOT, MSN and Layer Grafting
    in both feature evaluations."""
    for metric in FEATURES:
        for other in ("ibot", "msn", "layer_grafting"):
            yield from higher_at(["large"], EXTENSIVE, Model("low_shot", other), [metric])


@statement("section 4.3, table 1")
def large_beats_ibot_with_few_labels(measured: MeasuredModels) -> Bounds:
    """At ViT-L the tuned model with extensive augmentation is ahead of iBOT with any number of
    labels, from one a class to a tenth of them."""
    return higher_at(["large"], EXTENSIVE, Model("low_shot", "ibot"), FEW_LABELS)


@statement("section 4.3, table 1")
def min_wins_extreme_low_shot(measured: MeasuredModels) -> Bounds:
    """At ViT-L, with one or two labels a class, minimal augmentation beats every model with
    extensive augmentation."""
    for metric in ("low_shot_1", "low_shot_2"):
        for other in ("ibot", "msn", "layer_grafting", "ct_aug"):
            yield from higher_at(["large"], MINIMAL, Model("low_shot", other), [metric])


@statement("section 4.3, table 1")
def min_matches_aug_at_huge(measured: MeasuredModels) -> Bounds:
    """At ViT-H minimal augmentation is at least as good as extensive on every low-shot
    benchmark."""
    for metric in FEW_LABELS:
        yield bound(MINIMAL.value("huge", metric), ">=", EXTENSIVE.value("huge", metric))


@statement("section 4.3, table 1")
def aug_helps_small_models(measured: MeasuredModels) -> Bounds:
    """At ViT-B extensive augmentation beats minimal on every benchmark."""
    return higher_at(["base"], EXTENSIVE, MINIMAL, (*FEW_LABELS, *FEATURES))


@statement("abstract, section 4.3, table 17")
def best_probe(measured: MeasuredModels) -> Bounds:
    """ViT-H with extensive augmentation exceeds the best linear probing accuracy published before,
    81.1, that of a model at twice the resolution."""
    yield bound(EXTENSIVE.value("huge", "linear_probe"), ">", 81.1)


@statement("section 4.3, table 2")
def cluster_gain(measured: MeasuredModels) -> Bounds:
    """Tuning raises k-means cluster accuracy at every size."""
    for method in ("ct_min", "ct_aug"):
        tuned = Model("clustering", method)
        mae = Model("clustering", "mae")
        yield from higher(measured, tuned, mae, ["accuracy"])


@statement("section 4.3, table 2")
def silhouette(measured: MeasuredModels) -> Bounds:
    """Before tuning the classes overlap (silhouette below zero), afterwards they are apart (above
    zero)."""
    for method, sign in (("mae", "<"), ("ct_min", ">")):
        model = Model("clustering", method)
        for size in measured.sizes(model):
            yield bound(model.value(size, "silhouette"), sign, 0)


@statement("figure 1, table 2")
def clusters_at_huge(measured: MeasuredModels) -> Bounds:
    """At ViT-H cluster accuracy is more than five times that of MAE."""
    mae = value("clustering", "huge", "mae", "accuracy")
    yield bound(value("clustering", "huge", "ct_min", "accuracy"), ">", 5 * mae)


@statement("section 4.3, table 2")
def clusters_beat_others(measured: MeasuredModels) -> Bounds:
    """At ViT-L minimal augmentation is enough to cluster better than MSN and iBOT."""
    tuned = Model("clustering", "ct_min")
    for other in ("msn", "ibot"):
        yield from higher_at(["large"], tuned, Model("clustering", other), ["accuracy"])


@statement("section 4.4, table 3")
def ablation_order(measured: MeasuredModels) -> Bounds:
    """Every component is needed: masking costs least, then the missing head initialisation, then
    the missing neighbour lookup."""
    parts = ("", "_masked", "_no_head", "_no_lookup")
    models = [Model("ablation", f"ct_min_k1{part}") for part in parts]
    for metric in FEATURES:
        for better, worse in pairwise(models):
            yield from higher(measured, better, worse, [metric])


@statement("section 4.4")
def masked_on_one_device(measured: MeasuredModels) -> Bounds:
    """With masked inputs the whole batch of contrastive tuning of ViT-L fits on one device."""
    yield bound(value("gpu_hours", "large", "mae", "tune_masked_fits"), ">=", 1)


@statement("section 4.4, tables 3 and 4")
def lookup_is_essential(measured: MeasuredModels) -> Bounds:
    """With crop and flip only and without the lookup, tuning makes the features worse than
    MAE's."""
    tuned, mae = Model("ablation", "ct_min_k1_no_lookup"), Model("combined", "mae")
    for metric in FEATURES:
        for size in measured.sizes(tuned, mae):
            yield bound(tuned.value(size, metric), "<", mae.value(size, metric))


@statement("section 4.4, table 4")
def combined_helps_little(measured: MeasuredModels) -> Bounds:
    """Training both objectives together improves on MAE, by less than half of what tuning adds."""
    combined, mae = Model("combined", "combined"), Model("combined", "mae")
    tuned = Model("combined", "ct_min_k1")
    yield from higher(measured, combined, mae, FEATURES)
    for metric in FEATURES:
        for size in measured.sizes(combined, mae, tuned):
            of_both = combined.value(size, metric) - mae.value(size, metric)
            of_tuning = tuned.value(size, metric) - mae.value(size, metric)
            yield bound(2 * of_both, "<", of_tuning)


@statement("section 4.4, table 4")
def sequential_wins(measured: MeasuredModels) -> Bounds:
    """One after the other is best, also against combined or detached pre-training that is tuned
    afterwards."""
    tuned = Model("combined", "ct_min_k1")
    for metric in FEATURES:
        for other in ("combined_ct", "combined_ct_skip", "detached_ct_skip"):
            yield from higher(measured, tuned, Model("combined", other), [metric])


@statement("section 4.4, table 4")
def fresh_head_is_better(measured: MeasuredModels) -> Bounds:
    """After combined pre-training a newly initialised head tunes better than the one it brings."""
    fresh, brought = Model("combined", "combined_ct"), Model("combined", "combined_ct_skip")
    return higher(measured, fresh, brought, FEATURES)


@statement("section 4.4")
def nnclr_loss_falls_at_once(measured: MeasuredModels) -> Bounds:
    """Where the NNCLR loss of combined pre-training may change the encoder, it is at once lower (by
    a fifth or more over the first tenth of the epochs; in the paper by about 30 %)."""
    combined = Model("pretraining", "combined_ct_skip")
    detached = Model("pretraining", "detached_ct_skip")
    for size in measured.sizes(combined, detached):
        limit = 0.8 * detached.value(size, "nnclr_loss")
        yield bound(combined.value(size, "nnclr_loss"), "<", limit)


@statement("section 4.4, figure 5")
def shortcut_features(measured: MeasuredModels) -> Bounds:
    """Combined pre-training keeps more of the image's colours than MAE does; tuning takes back only
    a part."""
    errors = (
        ("combined", "<", "mae"),
        ("combined_ct", ">", "combined"),
        ("combined_ct", "<", "ct_min"),
    )
    return _color_errors(measured, errors)


@statement("section 4.4, figure 5")
def fine_tuning_keeps_shortcuts(measured: MeasuredModels) -> Bounds:
    """Supervised fine-tuning of all layers, with extensive augmentation, takes back only a part of
    these colours, too."""
    errors = (("combined_fine_tuned", ">", "combined"), ("combined_fine_tuned", "<", "ct_min"))
    return _color_errors(measured, errors)


def _color_errors(measured: MeasuredModels, asked: Iterable[tuple[str, str, str]]) -> Bounds:
    """Compare pairs of methods by the error of predicting an image's colours from its features."""
    for method, sign, other in asked:
        models = Model("color_histogram", method), Model("color_histogram", other)
        for size in measured.sizes(*models):
            one, two = (model.value(size, "error_last") for model in models)
            yield bound(one, sign, two)


@statement("section 4.4, table 5")
def robustness(measured: MeasuredModels) -> Bounds:
    """Tuning improves on MAE on every shifted test set, for every k and augmentation."""
    for method in ("ct_min_k1", "ct_min_k10", "ct_min", "ct_min_k30", "ct_aug"):
        tuned = Model("robustness", method)
        mae = Model("robustness", "mae")
        yield from higher(measured, tuned, mae, measured.shifts())


@statement("section 4.4, table 5")
def more_neighbours_are_robust(measured: MeasuredModels) -> Bounds:
    """A lookup among several neighbours is more robust than the nearest one alone."""
    for method in ("ct_min_k10", "ct_min", "ct_min_k30"):
        several = Model("robustness", method)
        nearest = Model("robustness", "ct_min_k1")
        yield from higher(measured, several, nearest, measured.shifts())


@statement("section 4.4, table 5")
def aug_is_robust(measured: MeasuredModels) -> Bounds:
    """Tuning with extensive augmentation is more robust than with minimal augmentation."""
    extensive, minimal = Model("robustness", "ct_aug"), Model("robustness", "ct_min")
    return higher(measured, extensive, minimal, measured.shifts())


@statement("section 4.4, table 5")
def aug_is_more_robust_to_larger_shifts(measured: MeasuredModels) -> Bounds:
    """Its gain in robustness is a factor that grows with the shift (V2, R, Sketch, A)."""
    extensive, minimal = Model("robustness", "ct_aug"), Model("robustness", "ct_min")
    for smaller, larger in pairwise(SHIFTED):
        for size in measured.sizes(extensive, minimal):
            factor = extensive.value(size, larger) / minimal.value(size, larger)
            before = extensive.value(size, smaller) / minimal.value(size, smaller)
            yield bound(factor, ">", before)


@statement("section 4.4, figure 6, table 20")
def dogs15(measured: MeasuredModels) -> Bounds:
    """On Dogs15 tuning multiplies the cluster accuracy of ViT-L by more than four."""
    mae = value("dogs15_best", "large", "mae", "accuracy")
    yield bound(value("dogs15_best", "large", "ct_min", "accuracy"), ">", 4 * mae)


@statement("section 4.4, figure 6")
def combined_clusters_little(measured: MeasuredModels) -> Bounds:
    """On Dogs15 combined pre-training clusters better than MAE, and less than half as well as tuned
    models."""
    combined = value("dogs15_best", "large", "combined", "accuracy")
    yield bound(combined, ">", value("dogs15_best", "large", "mae", "accuracy"))
    for method in ("ct_min", "ct_aug"):
        yield bound(2 * combined, "<", value("dogs15_best", "large", method, "accuracy"))


@statement("appendix E")
def clusters_vary_little(measured: MeasuredModels) -> Bounds:
    """Over the runs of k-means the cluster accuracy on ImageNet has a standard deviation of at most
    0.7 points, on Dogs15 of at most 4.3."""
    for table, limit in (("clustering_mean", 0.75), ("dogs15_mean", 4.35)):
        for size in SIZES:
            for method in ("mae", "ct_min", "ct_aug"):
                yield bound(value(table, size, method, "deviation"), "<=", limit)


@statement("appendix A.1")
def fused_attention(measured: MeasuredModels) -> Bounds:
    """FlashAttention speeds up pre-training at every size, by less the larger it is (in the paper
    by 40, 30 and 20 % for ViT-B, L and H)."""
    base, large, huge = (value("gpu_hours", size, "mae", "flash_gain") for size in SIZES)
    yield bound(huge, ">", 0)
    yield bound(large, ">", huge)
    yield bound(base, ">", large)


@statement("appendix E, figure 11")
def neighbours_are_of_the_class(measured: MeasuredModels) -> Bounds:
    """The nearest neighbours of three images (a partridge, a strawberry, a viaduct) are mostly of
    other classes before tuning, and of the same class afterwards."""
    for method, sign in (("mae", "<"), ("ct_min", ">"), ("ct_aug", ">")):
        yield bound(value("neighbor_retrieval", "huge", method, "query_precision"), sign, 50)


@statement("appendix A.1, table 6")
def reimplementation(measured: MeasuredModels) -> Bounds:
    """The re-implemented MAE matches the public one in linear probing, and so do the tuned models
    in both evaluations, to half a point."""
    asked = (
        ("mae", "linear_probe"), ("ct_min_k1", "linear_probe"), ("ct_min_k1", "knn_standardized"),
    )  # fmt: skip
    for method, metric in asked:
        own, public = (Model("reimplementation", f"{method}{end}") for end in ("", "_public"))
        for sign, limit in (("<", 0.5), (">", -0.5)):
            for size in measured.sizes(own, public):
                yield bound(own.value(size, metric) - public.value(size, metric), sign, limit)


@statement("appendix D, table 11")
def not_sensitive(measured: MeasuredModels) -> Bounds:
    """No single hyper-parameter in the tested ranges costs a point of linear probing accuracy."""
    tested = (
        *("epochs_10", "epochs_30", "trainable_6", "trainable_15", "trainable_18"),
        *("encoder_ema_0.0", "encoder_ema_0.999", "temperature_0.15", "temperature_0.25"),
        *("topk_10", "topk_20", "topk_30"),
        *("projector_ema_0.0", "projector_ema_0.995", "projector_ema_0.999"),
    )
    default = value("sensitivity", "large", "topk_1", "linear_probe")
    for method in tested:
        yield bound(value("sensitivity", "large", method, "linear_probe"), ">", default - 1)


@statement("section 3 and appendix D, table 11")
def more_neighbours_raise_knn(measured: MeasuredModels) -> Bounds:
    """k above 1 in the lookup raises k-NN accuracy."""
    for method in ("topk_10", "topk_20", "topk_30"):
        several = Model("sensitivity", method)
        nearest = Model("sensitivity", "topk_1")
        yield from higher(measured, several, nearest, ["knn_standardized"])


@statement("appendix D, table 12")
def concatenation(measured: MeasuredModels) -> Bounds:
    """Six concatenated blocks probe better than the last alone for ViT-L and ViT-H; for ViT-B, CLS
    with the mean of the patch tokens does."""
    asked = (("base", "concat_cls_mean"), ("large", "concat_6"), ("huge", "concat_6"))
    for size, metric in asked:
        for method in ("ct_min", "ct_aug"):
            last = value("concat_probe", size, method, "concat_1")
            yield bound(value("concat_probe", size, method, metric), ">", last)


@statement("appendix D, table 13")
def fine_tuning_keeps(measured: MeasuredModels) -> Bounds:
    """With all labels fine-tuning gains little from tuning, but loses nothing."""
    mae = Model("fine_tune", "mae")
    tuned = [Model("fine_tune", method) for method in ("ct_min", "ct_aug")]
    for model in tuned:
        yield from higher(measured, model, mae, ["fine_tune"])
    for model in tuned:
        for size in measured.sizes(model, mae):
            limit = mae.value(size, "fine_tune") + 0.5
            yield bound(model.value(size, "fine_tune"), "<", limit)


@statement("appendix D, table 14")
def small_patches(measured: MeasuredModels) -> Bounds:
    """ViT-H with 14-pixel patches starts lower than with 16 and after tuning is ahead only with a
    tenth of the labels."""
    asked = [("mae", metric) for metric in FEATURES]
    asked += [("ct_min", metric) for metric in (*SHOTS, "low_shot_1pct", *FEATURES)]
    for method, metric in asked:
        small, large = (value("huge14", size, method, metric) for size in ("huge14", "huge"))
        yield bound(small, "<", large)
    small, large = (
        value("huge14", size, "ct_min", "low_shot_10pct") for size in ("huge14", "huge")
    )
    yield bound(small, ">", large)


@statement("appendix D, table 14")
def better_than_i_jepa(measured: MeasuredModels) -> Bounds:
    """With 14-pixel patches the tuned ViT-H beats I-JEPA on every benchmark."""
    tuned, other = Model("huge14", "ct_min"), Model("huge14", "i_jepa")
    return higher_at(["huge14"], tuned, other, (*FEW_LABELS, *FEATURES))


@statement("appendix D, table 15")
def rotation_invariance(measured: MeasuredModels) -> Bounds:
    """Tuning makes predictions more invariant to rotations; extensive augmentation makes no
    difference to that."""
    mae, minimal, extensive = (
        Model("effective_invariance", method) for method in ("mae", "ct_min", "ct_aug")
    )
    yield from higher(measured, minimal, mae, ["ei_rotation"])
    sizes = measured.sizes(extensive, minimal)
    for size in sizes:
        limit = minimal.value(size, "ei_rotation") + 0.01
        yield bound(extensive.value(size, "ei_rotation"), "<", limit)
    for size in sizes:
        limit = minimal.value(size, "ei_rotation") - 0.01
        yield bound(extensive.value(size, "ei_rotation"), ">", limit)


@statement("appendix D, table 15")
def color_invariance(measured: MeasuredModels) -> Bounds:
    """Tuning makes predictions more invariant to colour even where it never changes colours, and
    more so where it does."""
    mae, minimal, extensive = (
        Model("effective_invariance", method) for method in ("mae", "ct_min", "ct_aug")
    )
    yield from higher(measured, minimal, mae, ["ei_color"])
    yield from higher(measured, extensive, minimal, ["ei_color"])


@statement("appendix D, table 16")
def oracle(measured: MeasuredModels) -> Bounds:
    """With crop and flip only, a linear probe after tuning with an oracle beats full fine-tuning,
    also with label smoothing."""
    tuned = Model("oracle", "ct_oracle")
    for method in ("crop_flip", "label_smoothing"):
        fine_tuned = Model("oracle", method)
        for size in measured.sizes(tuned, fine_tuned):
            probed = tuned.value(size, "linear_probe")
            yield bound(probed, ">", fine_tuned.value(size, "fine_tune"))
