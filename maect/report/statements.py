"""Statements of the paper's section 4.3 that its tables can decide, in our own words.

`claims.py` has the language of the comparisons. Every statement that rests on printed numbers holds
for the paper's own; a test checks that.
"""

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
FEATURES = ("linear_probe", "knn")
RESULTS: tuple[Statement, ...] = (
    Statement(
        "overhead",
        "Head initialisation and tuning with minimal augmentation cost at most a tenth of the "
        "pre-training.",
        "abstract, figure 2",
        ("cost.*.ct_min.overhead <= 10",),
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
        ("low_shot.*.ct_min.knn > low_shot.*.mae.knn",),
    ),
    Statement(
        "knn_gains_most",
        "k-NN accuracy gains more than linear probing accuracy.",
        "section 4.3, table 1",
        (
            "low_shot.*.ct_min.knn - low_shot.*.mae.knn"
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
            "low_shot.large.ct_min.knn - low_shot.large.mae.knn"
            " > low_shot.base.ct_min.knn - low_shot.base.mae.knn",
            "low_shot.huge.ct_min.knn - low_shot.huge.mae.knn"
            " > low_shot.large.ct_min.knn - low_shot.large.mae.knn",
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
)
