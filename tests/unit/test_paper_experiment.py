"""`workflow/experiments/paper.yaml` against the paper's own tables, and its cost to look at."""

import functools
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from maect.experiment import load
from maect.experiment.pages import figures, inputs_of_shown, tables
from maect.report.registry import FIGURES, PUBLISHED, TABLE_NAMES, TABLES
from maect.report.tables import paper_table

ROOT = Path(__file__).parents[2]
experiment_of = functools.cache(load)
# Printed for comparison with what was published of them; not imported.
PRINTED_ONLY = {
    "extended": {
        ("base", "simmim"), ("base", "nnclr"), ("base", "cmae"), ("base", "i_jepa"),
        ("large", "i_jepa"), ("large", "moco_v3"), ("large7_bn", "moco_v3"), ("huge14", "moco_v3"),
        ("huge14_bn", "moco_v3"), ("small8", "dino"), ("base8", "dino"), ("large7", "msn"),
    },
    "refined": {
        ("large", "mugs"), ("huge", "mae_ct"), ("huge14", "mae_ct"),
    },
}  # fmt: skip


def home(table):
    """The experiment that a table is of; digits have no masks."""
    return {"refined": "refined", "dense": "shapes"}.get(table, "paper")


@pytest.mark.parametrize("name", ["paper", "digits"])
def test_every_table_and_figure_is_asked_for(name):
    experiment = experiment_of(name)
    elsewhere = {"shapes"} if name == "digits" else {"shapes", "refined"}
    assert set(experiment.tables) == {one for one in TABLE_NAMES if home(one) not in elsewhere}
    left_out = {"gain_by_precision"}
    if not experiment.spec.online_evaluation:
        left_out |= {"reconstructions", "neighbors_in_training", "knn_per_block"}
    assert set(experiment.figures) == set(FIGURES) - left_out


@pytest.mark.parametrize("table", TABLE_NAMES)
def test_a_run_and_evaluations_behind_every_line_of_the_papers_tables(table):
    experiment, printed = experiment_of(home(table)), paper_table(table)
    asked, columns, rows = set(experiment.evaluations), TABLES[table], experiment.rows(table)
    lines = {(row.architecture, row.method) for row in rows}
    assert set(printed.index) - lines == PRINTED_ONLY.get(table, set())
    for row, metric in itertools.product(rows, columns.metrics):
        line, column = (row.architecture, row.method), metric.paper or metric.name
        if line in printed.index and column in printed and pd.notna(printed.at[line, column]):
            names = columns.evaluations_of(metric, row.method)
            assert any((run, name) in asked for run in row.runs for name in names), (line, column)


# tex 762: "the fine-tuning protocol used above and said protocol but with only crop & flip", whose
# rate is 1e-3 for MAE (tex 760) and 3e-5 otherwise (table 10); "we use a higher lr (1e-2) for MAE
# with ViT-H/14".
# MIM-Refiner, finetune_1p/: run/data2vec2_huge14_semivitmin.yaml lr 1.0e-2, effective_batch_size
# 128, weight_decay 0.05; template_tracked_huge16_ijepamin.yaml lr 3.0e-5, 512, weight_decay 0.4.
ONE_PERCENT = {
    ("huge", "mae"): (1e-3, 512, 0.05), ("large", "mae"): (1e-3, 512, 0.05),
    ("base", "mae"): (1e-3, 512, 0.05), ("huge14", "mae"): (1e-2, 128, 0.05),
    ("large", "ct_min"): (3e-5, 512, 0.05), ("base", "ct_aug"): (3e-5, 512, 0.05),
    ("huge", "ct_aug"): (3e-5, 512, 0.4), ("huge14", "ct_min"): (3e-5, 512, 0.4),
    ("large", "ibot"): (3e-5, 512, 0.05), ("huge14", "i_jepa"): (3e-5, 512, 0.05),
}  # fmt: skip


def test_one_percent_is_tuned_for_untuned_and_tuned_models():
    experiment, found = experiment_of("paper"), {}
    for table in ("low_shot", "huge14"):
        columns = TABLES[table]
        one_percent = next(m for m in columns.metrics if m.name == "low_shot_1pct")
        for row in experiment.rows(table):
            (run,) = row.runs
            asked = {name for one, name in experiment.evaluations if one == run}
            names = asked & {*columns.evaluations_of(one_percent, row.method)}
            assert len(names) == (row.method != "mae_public"), run
            for name in names - {"low_shot_pct"}:
                value = experiment.evaluation(run, name)
                assert not (value.mixes or value.random_erasing or value.drop_path), name
                assert (value.randaugment_layers == 0) == row.method.startswith(("mae", "ct_"))
                rate = value.base_lr, value.batch_size, value.weight_decay
                found[row.architecture, row.method] = rate
    assert {key: found[key] for key in ONE_PERCENT} == ONE_PERCENT


def test_other_methods_are_probed_in_every_form():
    """tex 108: "linear probing of the best reported models from other self-supervised methods".

    Those are of different forms: DINO's and iBOT's read [CLS] and the mean of the patches, I-JEPA's
    one block or four.
    """
    experiment = experiment_of("paper")
    rows = [row for table in experiment.tables for row in experiment.rows(table)]
    others = {run for row in rows if row.method in PUBLISHED for run in row.runs}
    assert len(others) == 10
    for run in others:
        probes = {name for one, name in experiment.evaluations if one == run}
        assert "linear_probe" not in probes and "linear_probe_forms" in probes
        assert experiment.evaluation(run, "linear_probe_forms").concat


def test_a_figure_waits_for_the_numbers_behind_it():
    experiment = experiment_of("paper")
    for name in TABLES.keys() & FIGURES.keys():
        table, figure = (set(inputs_of_shown(experiment, name, kind)) for kind in (False, True))
        assert table <= figure, name
        if name == "gpu_hours":
            ibot = experiment.root / "evaluations" / "ibot_large"
            assert ibot / "linear_probe_forms.json" in figure


def test_what_figures_5_and_11_show():
    """tex 1275: three images, labelled partridge, strawberry and viaduct; tex 442: "Not even
    supervised fine-tuning of all layers --- using augmentations based on expert knowledge"."""
    experiment = experiment_of("paper")
    named = {"n01807496": "partridge", "n07745940": "strawberry", "n04532670": "viaduct"}
    for run in ("mae_huge", "ct_min_huge", "ct_aug_huge"):
        assert experiment.evaluation(run, "retrieval").classes == tuple(named)
    rows = {row.method: row.runs for row in experiment.rows("color_histogram")}
    (tuned,) = rows["combined_fine_tuned"]
    settings = experiment.runs[tuned].settings
    assert tuned.startswith(f"{rows['combined'][0]}.")
    assert settings.frozen_blocks == 0 and settings.randaugment_layers and settings.mixup


@pytest.mark.parametrize("name", ["paper", "cifar10", "tiny_imagenet", "digits"])
def test_nothing_is_made_that_nothing_shows(name):
    """Runs and evaluations are read by a table, a figure, or an evaluation that is."""
    experiment = experiment_of(name)
    shown = {
        (path.parent.name, path.stem)
        for figure, names in ((False, tables(experiment)), (True, figures(experiment)))
        for name in names
        for path in inputs_of_shown(experiment, name, figure)
        if path.suffix == ".json" and path.parent.parent.name == "evaluations"
    }
    needed = {(run, need) for run, name in shown for need in experiment.evaluation(run, name).needs}
    assert set(experiment.evaluations) == shown | needed
    behind = experiment.with_ancestors({run for run, _ in experiment.evaluations})
    trained = {name for name, run in experiment.runs.items() if not run.scored_by}
    assert trained == {name for name in behind if not experiment.runs[name].scored_by}


def test_every_line_of_the_label_figure_ends_at_all_labels():
    experiment = experiment_of("paper")
    for row in experiment.rows("label_efficiency"):
        asked = {name for run, name in experiment.evaluations if run in row.runs}
        assert "fine_tune" in asked and any("10pct" in name for name in asked), row


SNAKEMAKE = """
import atexit, pathlib, sys
atexit.register(lambda: print(pathlib.Path("/proc/self/status").read_text()))
from snakemake.cli import main
main(sys.argv[1:])
"""


def dry_run(*words):
    """What Snakemake says, and last its largest memory: not ru_maxrss, which begins at ours."""
    command = [sys.executable, "-c", SNAKEMAKE, "-n", *words]
    unset = ("IMAGENET", "IMAGENET_SHIFTED", "WEIGHTS", "LOW_SHOT_LISTS")
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


def test_looking_at_the_whole_paper_is_cheap_even_without_imagenet():
    said = dry_run()
    assert int(re.search(r"(?m)^total +(\d+)$", said)[1]) > 500
    assert int(re.search(r"(?m)^VmHWM:\s+(\d+) kB$", said)[1]) < 150 * 1024
    warnings = [line for line in said.splitlines() if line.startswith("maect: warning")]
    assert sum("no images at $IMAGENET/train " in line for line in warnings) == 1
    assert any("(split train), as IMAGENET is not set: export it; " in line for line in warnings)
    lists = "no low-shot lists in $LOW_SHOT_LISTS, as LOW_SHOT_LISTS is not set"
    assert sum(lists in line for line in warnings) == 1


def test_one_table_asks_for_its_runs_only():
    said = dry_run("results/paper/tables/ablation.csv")
    trained = set(re.findall(r"(?:Pre-training|Contrastive tuning of|NNCLR head) (\S+)", said))
    tuned = {f"ct_min_large_k1{part}" for part in ("", "_masked", "_no_head", "_no_lookup")}
    assert trained == {"mae_large", "head_min_large", *tuned}
    assert "IMAGENET_SHIFTED" not in said and "WEIGHTS" not in said
