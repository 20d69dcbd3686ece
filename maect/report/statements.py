"""Statements of the paper that its tables can decide, in our own words, in the paper's order.

A comparison is Python on values TABLE.ARCHITECTURE.METHOD.METRIC (`x.large["ema_0.9"].accuracy` for
names with a dot) and numbers; `*` is every architecture for which the experiment has all of the
comparison's models that are named with it; the metric `each_shift` is each of the paper's shifted
test sets, or each of those that stand in for them. They are text, not functions, because
`claims.csv` and the report print them. Every statement that rests on printed numbers holds for the
paper's own.
"""

import itertools
from dataclasses import dataclass


@dataclass(frozen=True)
class Statement:
    """What is said, where the paper says it, and the comparisons that decide it."""

    name: str
    text: str
    paper: str
    comparisons: tuple[str, ...]


def each(template: str, *values: str) -> tuple[str, ...]:
    """The template with `{}` filled with each value."""
    return tuple(template.replace("{}", value) for value in values)


SHOTS = ("low_shot_1", "low_shot_2", "low_shot_5")
LOW_SHOT = (*SHOTS, "low_shot_1pct", "low_shot_10pct")
FEATURES = ("linear_probe", "knn_standardized")
"""k-NN as the authors' code computes it; the verdict on features as they are is printed with it."""
_MAE = "reimplementation.*"
SHIFTED = ("imagenet_v2", "imagenet_r", "imagenet_sketch", "imagenet_a")
EACH_SHIFT = "each_shift"
_SENSITIVITY = (
    "epochs_10", "epochs_30", "trainable_6", "trainable_15", "trainable_18", "encoder_ema_0.0",
    "encoder_ema_0.999", "temperature_0.15", "temperature_0.25", "topk_10", "topk_20", "topk_30",
    "projector_ema_0.0", "projector_ema_0.995", "projector_ema_0.999",
)  # fmt: skip

STATEMENTS: tuple[Statement, ...] = (
    # Section 4.3
    Statement(
        "overhead",
        "Head initialisation and tuning with minimal augmentation cost at most a tenth of the "
        "pre-training.",
        "abstract, figure 2",
        ("cost.*.ct_min.overhead <= 10",),
    ),
    Statement(
        "less_compute_than_others",
        "At ViT-L tuned models take less compute, pre-training included, than MoCo v3, iBOT, Layer "
        "Grafting and the best MSN (ViT-L/7).",
        "introduction, figure 2",
        tuple(
            f"gpu_hours.large.{tuned}.hours < gpu_hours.{other}.hours"
            for tuned in ("ct_min", "ct_aug")
            for other in ("large.moco_v3", "large.ibot", "large.layer_grafting", "large7.msn")
        ),
    ),
    Statement(
        "layer_grafting_costs_more",
        "At ViT-L what Layer Grafting takes after MAE is at least ten times what head "
        "initialisation and tuning take (in the paper 15 times).",
        "section 2",
        ("gpu_hours.large.mae.grafting_ratio >= 10",),
    ),
    Statement(
        "probe_gain",
        "Tuning with minimal augmentation raises linear probing accuracy at every size.",
        "section 4.3, table 1",
        ("low_shot.*.ct_min.linear_probe > low_shot.*.mae.linear_probe",),
    ),
    Statement(
        "knn_gain",
        "Tuning with minimal augmentation raises k-NN accuracy at every size.",
        "section 4.3, table 1",
        ("low_shot.*.ct_min.knn_standardized > low_shot.*.mae.knn_standardized",),
    ),
    Statement(
        "knn_gains_most",
        "k-NN accuracy gains more than linear probing accuracy.",
        "section 4.3, table 1",
        (
            "low_shot.*.ct_min.knn_standardized - low_shot.*.mae.knn_standardized"
            " > low_shot.*.ct_min.linear_probe - low_shot.*.mae.linear_probe",
        ),
    ),
    Statement(
        "aug_gain",
        "Tuning with extensive augmentation improves every low-shot and every feature evaluation "
        "at every size.",
        "section 4.3, table 1",
        each("low_shot.*.ct_aug.{} > low_shot.*.mae.{}", *LOW_SHOT, *FEATURES),
    ),
    Statement(
        "low_shot_gain",
        "With one, two or five labels a class, tuning improves on MAE at every size.",
        "section 4.3, table 1",
        each("low_shot.*.ct_min.{} > low_shot.*.mae.{}", *SHOTS),
    ),
    Statement(
        "fewest_labels_gain_most",
        "The fewer the labels, the larger the gain: one label a class gains more than five.",
        "introduction and section 4.3, table 1",
        (
            "low_shot.*.ct_min.low_shot_1 - low_shot.*.mae.low_shot_1"
            " > low_shot.*.ct_min.low_shot_5 - low_shot.*.mae.low_shot_5",
        ),
    ),
    Statement(
        "many_labels_gain_least",
        "With a tenth of the labels the gain is smaller than with five labels a class.",
        "introduction and section 4.3, table 1",
        (
            "low_shot.*.ct_min.low_shot_10pct - low_shot.*.mae.low_shot_10pct"
            " < low_shot.*.ct_min.low_shot_5 - low_shot.*.mae.low_shot_5",
        ),
    ),
    Statement(
        "scaling",
        "The k-NN gain of tuning grows with the size of the encoder.",
        "section 4.3, table 1",
        (
            "low_shot.large.ct_min.knn_standardized - low_shot.large.mae.knn_standardized"
            " > low_shot.base.ct_min.knn_standardized - low_shot.base.mae.knn_standardized",
            "low_shot.huge.ct_min.knn_standardized - low_shot.huge.mae.knn_standardized"
            " > low_shot.large.ct_min.knn_standardized - low_shot.large.mae.knn_standardized",
        ),
    ),
    Statement(
        "base_is_too_small",
        "At ViT-B the best instance-discrimination model stays ahead in both feature evaluations.",
        "section 4.3, table 1",
        each("low_shot.base.ibot.{} > low_shot.base.ct_aug.{}", *FEATURES),
    ),
    Statement(
        "large_beats_others",
        "At ViT-L the tuned model with extensive augmentation is ahead of iBOT, MSN and Layer "
        "Grafting in both feature evaluations.",
        "section 4.3, table 1",
        tuple(
            f"low_shot.large.ct_aug.{metric} > low_shot.large.{other}.{metric}"
            for metric in FEATURES
            for other in ("ibot", "msn", "layer_grafting")
        ),
    ),
    Statement(
        "large_beats_ibot_with_few_labels",
        "At ViT-L the tuned model with extensive augmentation is ahead of iBOT with any number of "
        "labels, from one a class to a tenth of them.",
        "section 4.3, table 1",
        each("low_shot.large.ct_aug.{} > low_shot.large.ibot.{}", *LOW_SHOT),
    ),
    Statement(
        "min_wins_extreme_low_shot",
        "At ViT-L, with one or two labels a class, minimal augmentation beats every model with "
        "extensive augmentation.",
        "section 4.3, table 1",
        tuple(
            f"low_shot.large.ct_min.{metric} > low_shot.large.{other}.{metric}"
            for metric in SHOTS[:2]
            for other in ("ibot", "msn", "layer_grafting", "ct_aug")
        ),
    ),
    Statement(
        "min_matches_aug_at_huge",
        "At ViT-H minimal augmentation is at least as good as extensive on every low-shot "
        "benchmark.",
        "section 4.3, table 1",
        each("low_shot.huge.ct_min.{} >= low_shot.huge.ct_aug.{}", *LOW_SHOT),
    ),
    Statement(
        "aug_helps_small_models",
        "At ViT-B extensive augmentation beats minimal on every benchmark.",
        "section 4.3, table 1",
        each("low_shot.base.ct_aug.{} > low_shot.base.ct_min.{}", *LOW_SHOT, *FEATURES),
    ),
    Statement(
        "best_probe",
        "ViT-H with extensive augmentation exceeds the best linear probing accuracy published "
        "before, 81.1, that of a model at twice the resolution.",
        "abstract, section 4.3, table 17",
        ("low_shot.huge.ct_aug.linear_probe > 81.1",),
    ),
    Statement(
        "cluster_gain",
        "Tuning raises k-means cluster accuracy at every size.",
        "section 4.3, table 2",
        each("clustering.*.{}.accuracy > clustering.*.mae.accuracy", "ct_min", "ct_aug"),
    ),
    Statement(
        "silhouette",
        "Before tuning the classes overlap (silhouette below zero), afterwards they are apart "
        "(above zero).",
        "section 4.3, table 2",
        ("clustering.*.mae.silhouette < 0", "clustering.*.ct_min.silhouette > 0"),
    ),
    Statement(
        "clusters_at_huge",
        "At ViT-H cluster accuracy is more than five times that of MAE.",
        "figure 1, table 2",
        ("clustering.huge.ct_min.accuracy > 5 * clustering.huge.mae.accuracy",),
    ),
    Statement(
        "clusters_beat_others",
        "At ViT-L minimal augmentation is enough to cluster better than MSN and iBOT.",
        "section 4.3, table 2",
        each("clustering.large.ct_min.accuracy > clustering.large.{}.accuracy", "msn", "ibot"),
    ),
    # Section 4.4 and appendix
    Statement(
        "ablation_order",
        "Every component is needed: masking costs least, then the missing head initialisation, "
        "then the missing neighbour lookup.",
        "section 4.4, table 3",
        tuple(
            f"ablation.*.{better}.{metric} > ablation.*.{worse}.{metric}"
            for metric in FEATURES
            for better, worse in (
                ("ct_min_k1", "ct_min_k1_masked"),
                ("ct_min_k1_masked", "ct_min_k1_no_head"),
                ("ct_min_k1_no_head", "ct_min_k1_no_lookup"),
            )
        ),
    ),
    Statement(
        "masked_on_one_device",
        "With masked inputs the whole batch of contrastive tuning of ViT-L fits on one device.",
        "section 4.4",
        ("gpu_hours.large.mae.tune_masked_fits >= 1",),
    ),
    Statement(
        "lookup_is_essential",
        "With crop and flip only and without the lookup, tuning makes the features worse than "
        "MAE's.",
        "section 4.4, tables 3 and 4",
        each("ablation.*.ct_min_k1_no_lookup.{} < combined.*.mae.{}", *FEATURES),
    ),
    Statement(
        "combined_helps_little",
        "Training both objectives together improves on MAE, by less than half of what tuning adds.",
        "section 4.4, table 4",
        (
            *each("combined.*.combined.{} > combined.*.mae.{}", *FEATURES),
            *each(
                "2 * (combined.*.combined.{} - combined.*.mae.{})"
                " < combined.*.ct_min_k1.{} - combined.*.mae.{}",
                *FEATURES,
            ),
        ),
    ),
    Statement(
        "sequential_wins",
        "One after the other is best, also against combined or detached pre-training that is tuned "
        "afterwards.",
        "section 4.4, table 4",
        tuple(
            f"combined.*.ct_min_k1.{metric} > combined.*.{other}.{metric}"
            for metric in FEATURES
            for other in ("combined_ct", "combined_ct_skip", "detached_ct_skip")
        ),
    ),
    Statement(
        "fresh_head_is_better",
        "After combined pre-training a newly initialised head tunes better than the one it brings.",
        "section 4.4, table 4",
        each("combined.*.combined_ct.{} > combined.*.combined_ct_skip.{}", *FEATURES),
    ),
    Statement(
        "nnclr_loss_falls_at_once",
        "Where the NNCLR loss of combined pre-training may change the encoder, it is at once lower "
        "(by a fifth or more over the first tenth of the epochs; in the paper by about 30 %).",
        "section 4.4",
        (
            "pretraining.*.combined_ct_skip.nnclr_loss"
            " < 0.8 * pretraining.*.detached_ct_skip.nnclr_loss",
        ),
    ),
    Statement(
        "shortcut_features",
        "Combined pre-training keeps more of the image's colours than MAE does; tuning takes back "
        "only a part.",
        "section 4.4, figure 5",
        (
            "color_histogram.*.combined.error_last < color_histogram.*.mae.error_last",
            "color_histogram.*.combined_ct.error_last > color_histogram.*.combined.error_last",
            "color_histogram.*.combined_ct.error_last < color_histogram.*.ct_min.error_last",
        ),
    ),
    Statement(
        "fine_tuning_keeps_shortcuts",
        "Supervised fine-tuning of all layers, with extensive augmentation, takes back only a part "
        "of these colours, too.",
        "section 4.4, figure 5",
        (
            "color_histogram.*.combined_fine_tuned.error_last"
            " > color_histogram.*.combined.error_last",
            "color_histogram.*.combined_fine_tuned.error_last"
            " < color_histogram.*.ct_min.error_last",
        ),
    ),
    Statement(
        "robustness",
        "Tuning improves on MAE on every shifted test set, for every k and augmentation.",
        "section 4.4, table 5",
        tuple(
            f"robustness.*.{method}.{EACH_SHIFT} > robustness.*.mae.{EACH_SHIFT}"
            for method in ("ct_min_k1", "ct_min_k10", "ct_min", "ct_min_k30", "ct_aug")
        ),
    ),
    Statement(
        "more_neighbours_are_robust",
        "A lookup among several neighbours is more robust than the nearest one alone.",
        "section 4.4, table 5",
        tuple(
            f"robustness.*.{method}.{EACH_SHIFT} > robustness.*.ct_min_k1.{EACH_SHIFT}"
            for method in ("ct_min_k10", "ct_min", "ct_min_k30")
        ),
    ),
    Statement(
        "aug_is_robust",
        "Tuning with extensive augmentation is more robust than with minimal augmentation.",
        "section 4.4, table 5",
        (f"robustness.*.ct_aug.{EACH_SHIFT} > robustness.*.ct_min.{EACH_SHIFT}",),
    ),
    Statement(
        "aug_is_more_robust_to_larger_shifts",
        "Its gain in robustness is a factor that grows with the shift (V2, R, Sketch, A).",
        "section 4.4, table 5",
        tuple(
            f"robustness.*.ct_aug.{far} / robustness.*.ct_min.{far}"
            f" > robustness.*.ct_aug.{near} / robustness.*.ct_min.{near}"
            for near, far in itertools.pairwise(SHIFTED)
        ),
    ),
    Statement(
        "dogs15",
        "On Dogs15 tuning multiplies the cluster accuracy of ViT-L by more than four.",
        "section 4.4, figure 6, table 20",
        ("dogs15_best.large.ct_min.accuracy > 4 * dogs15_best.large.mae.accuracy",),
    ),
    Statement(
        "combined_clusters_little",
        "On Dogs15 combined pre-training clusters better than MAE, and less than half as well as "
        "tuned models.",
        "section 4.4, figure 6",
        (
            "dogs15_best.large.combined.accuracy > dogs15_best.large.mae.accuracy",
            *each(
                "2 * dogs15_best.large.combined.accuracy < dogs15_best.large.{}.accuracy",
                "ct_min",
                "ct_aug",
            ),
        ),
    ),
    Statement(
        "clusters_vary_little",
        "Over the runs of k-means the cluster accuracy on ImageNet has a standard deviation of at "
        "most 0.7 points, on Dogs15 of at most 4.3.",
        "appendix E",
        tuple(
            f"{table}.{size}.{method}.deviation <= {most}"
            for table, most in (("clustering_mean", "0.75"), ("dogs15_mean", "4.35"))
            for size in ("base", "large", "huge")
            for method in ("mae", "ct_min", "ct_aug")
        ),
    ),
    Statement(
        "fused_attention",
        "FlashAttention speeds up pre-training at every size, by less the larger it is (in the "
        "paper by 40, 30 and 20 % for ViT-B, L and H).",
        "appendix A.1",
        (
            "gpu_hours.huge.mae.flash_gain > 0",
            "gpu_hours.large.mae.flash_gain > gpu_hours.huge.mae.flash_gain",
            "gpu_hours.base.mae.flash_gain > gpu_hours.large.mae.flash_gain",
        ),
    ),
    Statement(
        "neighbours_are_of_the_class",
        "The nearest neighbours of three images (a partridge, a strawberry, a viaduct) are mostly "
        "of other classes before tuning, and of the same class afterwards.",
        "appendix E, figure 11",
        (
            "neighbor_retrieval.huge.mae.query_precision < 50",
            *each("neighbor_retrieval.huge.{}.query_precision > 50", "ct_min", "ct_aug"),
        ),
    ),
    Statement(
        "reimplementation",
        "The re-implemented MAE matches the public one in linear probing, and so do the tuned "
        "models in both evaluations, to half a point.",
        "appendix A.1, table 6",
        tuple(
            f"{_MAE}.{ours}.{metric} - {_MAE}.{public}.{metric} {by}"
            for ours, public, metric in (
                ("mae", "mae_public", "linear_probe"),
                ("ct_min_k1", "ct_min_k1_public", "linear_probe"),
                ("ct_min_k1", "ct_min_k1_public", "knn_standardized"),
            )
            for by in ("< 0.5", "> -0.5")
        ),
    ),
    Statement(
        "not_sensitive",
        "No single hyper-parameter in the tested ranges costs a point of linear probing accuracy.",
        "appendix D, table 11",
        tuple(
            f'sensitivity.large["{method}"].linear_probe'
            " > sensitivity.large.topk_1.linear_probe - 1"
            for method in _SENSITIVITY
        ),
    ),
    Statement(
        "more_neighbours_raise_knn",
        "k above 1 in the lookup raises k-NN accuracy.",
        "section 3 and appendix D, table 11",
        each(
            "sensitivity.*.{}.knn_standardized > sensitivity.*.topk_1.knn_standardized",
            "topk_10",
            "topk_20",
            "topk_30",
        ),
    ),
    Statement(
        "concatenation",
        "Six concatenated blocks probe better than the last alone for ViT-L and ViT-H; for ViT-B, "
        "CLS with the mean of the patch tokens does.",
        "appendix D, table 12",
        tuple(
            f"concat_probe.{size}.{method}.{column} > concat_probe.{size}.{method}.concat_1"
            for size, column in (
                ("base", "concat_cls_mean"),
                ("large", "concat_6"),
                ("huge", "concat_6"),
            )
            for method in ("ct_min", "ct_aug")
        ),
    ),
    Statement(
        "fine_tuning_keeps",
        "With all labels fine-tuning gains little from tuning, but loses nothing.",
        "appendix D, table 13",
        (
            *each("fine_tune.*.{}.fine_tune > fine_tune.*.mae.fine_tune", "ct_min", "ct_aug"),
            *each("fine_tune.*.{}.fine_tune < fine_tune.*.mae.fine_tune + 0.5", "ct_min", "ct_aug"),
        ),
    ),
    Statement(
        "small_patches",
        "ViT-H with 14-pixel patches starts lower than with 16 and after tuning is ahead only with "
        "a tenth of the labels.",
        "appendix D, table 14",
        (
            *each("huge14.huge14.mae.{} < huge14.huge.mae.{}", *FEATURES),
            *each("huge14.huge14.ct_min.{} < huge14.huge.ct_min.{}", *LOW_SHOT[:4], *FEATURES),
            "huge14.huge14.ct_min.low_shot_10pct > huge14.huge.ct_min.low_shot_10pct",
        ),
    ),
    Statement(
        "better_than_i_jepa",
        "With 14-pixel patches the tuned ViT-H beats I-JEPA on every benchmark.",
        "appendix D, table 14",
        each("huge14.huge14.ct_min.{} > huge14.huge14.i_jepa.{}", *LOW_SHOT, *FEATURES),
    ),
    Statement(
        "rotation_invariance",
        "Tuning makes predictions more invariant to rotations; extensive augmentation makes no "
        "difference to that.",
        "appendix D, table 15",
        (
            "effective_invariance.*.ct_min.ei_rotation > effective_invariance.*.mae.ei_rotation",
            "effective_invariance.*.ct_aug.ei_rotation"
            " < effective_invariance.*.ct_min.ei_rotation + 0.01",
            "effective_invariance.*.ct_aug.ei_rotation"
            " > effective_invariance.*.ct_min.ei_rotation - 0.01",
        ),
    ),
    Statement(
        "color_invariance",
        "Tuning makes predictions more invariant to colour even where it never changes colours, "
        "and more so where it does.",
        "appendix D, table 15",
        (
            "effective_invariance.*.ct_min.ei_color > effective_invariance.*.mae.ei_color",
            "effective_invariance.*.ct_aug.ei_color > effective_invariance.*.ct_min.ei_color",
        ),
    ),
    Statement(
        "oracle",
        "With crop and flip only, a linear probe after tuning with an oracle beats full "
        "fine-tuning, also with label smoothing.",
        "appendix D, table 16",
        each(
            "oracle.*.ct_oracle.linear_probe > oracle.*.{}.fine_tune",
            "crop_flip",
            "label_smoothing",
        ),
    ),
)
