"""Statements of the paper's section 4.4 and appendix, in our own words."""

import itertools

from maect.report.statements import FEATURES, LOW_SHOT, Statement, each

_MAE = "reimplementation.*"
_SHIFTED = ("imagenet_v2", "imagenet_r", "imagenet_sketch", "imagenet_a")
_SENSITIVITY = (
    "epochs_10", "epochs_30", "trainable_6", "trainable_15", "trainable_18", "encoder_ema_0.0",
    "encoder_ema_0.999", "temperature_0.15", "temperature_0.25", "topk_10", "topk_20", "topk_30",
    "projector_ema_0.0", "projector_ema_0.995", "projector_ema_0.999",
)  # fmt: skip

ANALYSIS: tuple[Statement, ...] = (
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
        "robustness",
        "Tuning improves on MAE on every shifted test set, for every k and augmentation.",
        "section 4.4, table 5",
        tuple(
            f"robustness.*.{method}.{metric} > robustness.*.mae.{metric}"
            for metric in _SHIFTED
            for method in ("ct_min_k1", "ct_min_k10", "ct_min", "ct_min_k30", "ct_aug")
        ),
    ),
    Statement(
        "more_neighbours_are_robust",
        "A lookup among several neighbours is more robust than the nearest one alone.",
        "section 4.4, table 5",
        tuple(
            f"robustness.*.{method}.{metric} > robustness.*.ct_min_k1.{metric}"
            for metric in _SHIFTED
            for method in ("ct_min_k10", "ct_min", "ct_min_k30")
        ),
    ),
    Statement(
        "aug_is_robust",
        "Extensive augmentation is more robust, by a factor that grows with the shift (V2, R, "
        "Sketch, A).",
        "section 4.4, table 5",
        (
            *each("robustness.*.ct_aug.{} > robustness.*.ct_min.{}", *_SHIFTED),
            *(
                f"robustness.*.ct_aug.{far} / robustness.*.ct_min.{far}"
                f" > robustness.*.ct_aug.{near} / robustness.*.ct_min.{near}"
                for near, far in itertools.pairwise(_SHIFTED)
            ),
        ),
    ),
    Statement(
        "dogs15",
        "On Dogs15 tuning multiplies the cluster accuracy of ViT-L by more than four.",
        "section 4.4, figure 6, table 20",
        ("dogs15_best.large.ct_min.accuracy > 4 * dogs15_best.large.mae.accuracy",),
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
                ("ct_min_k1", "ct_min_k1_public", "knn"),
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
            "sensitivity.*.{}.knn > sensitivity.*.topk_1.knn",
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
