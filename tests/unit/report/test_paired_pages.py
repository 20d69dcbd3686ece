"""The law's figure, the clean control, geometry: made of published numbers, of equal seeds."""

import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from maect.core.files import write_text
from maect.evaluate.outcomes import holm, mcnemar, pack

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs/results"
sys.path.insert(0, str(RESULTS))

import make_continued  # noqa: E402
import make_geometry  # noqa: E402
import make_law  # noqa: E402
import make_no_lookup  # noqa: E402
import paired  # noqa: E402

HEADS = {
    "ct_min": ("topk", True),
    "ct_min_no_lookup": ("none", False),
    "ct_min_no_lookup_stop_gradient": ("none", True),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three seeds of an MAE and of the lookup, two of one control and one of the other."""
    rng = np.random.default_rng(0)
    runs, measured, outcomes = [], [], []
    models = {"mae": 3, "ct_min": 3, "ct_min_no_lookup": 2, "ct_min_no_lookup_stop_gradient": 1}
    for model, seeds in models.items():
        for seed in range(seeds):
            end = f"_tiny-s{seed}" if seed else "_tiny"
            run = f"{model}{end}"
            stage, source = ("pretrain", "") if model == "mae" else ("tune", f"mae{end}")
            about = {"run": run, "stage": stage, "from": source, "seed": seed, "finished": True}
            runs.append(about | {"lookups_right": 50.0})
            right = rng.random(40) < 0.5 + 0.1 * len(model) / 10
            trials = rng.random((3, 40)) < 0.5
            for metric, one in (("knn_standardized", right), ("knn", trials)):
                value = 100 * float(one.mean())
                line = {"run": run, "evaluation": "knn", "metric": metric}
                measured.append(line | {"value": value})
                outcomes.append(line | pack(one).model_dump())
            nmi = {"run": run, "evaluation": "clustering", "metric": "nmi_mean"}
            measured.append(nmi | {"value": 10.0 + seed + len(model)})
            lookup, stop = HEADS.get(model, ("", False))
            head = f"{{lookup: {lookup}, stop_gradient: {str(stop).lower()}, oracle_right: 1.0}}"
            text = f"settings: {{augmentation: min, head: {head}}}\n"
            write_text(tmp_path / f"resolved/{run}.yaml", text)
    for name, lines in (("runs", runs), ("measured", measured), ("outcomes", outcomes)):
        pd.DataFrame(lines).to_csv(tmp_path / f"{name}.csv", index=False)
    return tmp_path


def test_the_law_has_equal_seeds(folder):
    """Only the first seed has all three kinds."""
    found = make_law.tuned(folder, "knn_standardized")
    assert set(found["seed"]) == {0} and len(found) == 3
    runs = pd.read_csv(folder / "runs.csv")
    runs[~runs["run"].str.contains("stop_gradient")].to_csv(folder / "runs.csv", index=False)
    found = make_law.tuned(folder, "nmi_mean")
    seeds = found.groupby("model")["seed"].nunique()
    assert seeds.to_dict() == {"ct_min_tiny": 2, "ct_min_no_lookup_tiny": 2}
    assert set(found["gain"]) == {len("ct_min") - 3.0, len("ct_min_no_lookup") - 3.0}


def test_a_difference_is_paired_by_seed_and_image(folder):
    published = paired.Published(folder)
    kinds = (paired.LOOKUP, paired.NONE, paired.STOPPED)
    assert set(published.runs) == {(paired.MAE, ""), *((kind, "crops") for kind in kinds)}

    def compare(one: str, other: str, metric: str = "knn_standardized", name: str = "knn"):
        models = ((kind, "" if kind == paired.MAE else "crops") for kind in (one, other))
        return published.compare(*(paired.Side(model, metric) for model in models), name)

    row = compare(paired.MAE, paired.LOOKUP)
    assert row is not None and row["seeds"] == 3 and row["images"] == 40
    changes = [
        published.values[f"ct_min_tiny{end}", "knn", "knn_standardized"]
        - published.values[f"mae_tiny{end}", "knn", "knn_standardized"]
        for end in ("", "-s1", "-s2")
    ]
    assert row["value"] == pytest.approx(np.mean(changes))
    assert row["std"] == pytest.approx(np.std(changes, ddof=1))
    assert row["gained"] - row["lost"] == pytest.approx(sum(changes) * 40 / 100)
    assert row["low"] < row["value"] < row["high"]
    assert row["p_seeds"] == pytest.approx(stats.ttest_1samp(changes, 0).pvalue)
    # Of one seed: McNemar's test of the images themselves.
    single = compare(paired.MAE, paired.STOPPED)
    assert single is not None and single["seeds"] == 1 and single["std"] is None
    assert single["p"] == mcnemar(single["gained"], single["lost"])
    assert (compare(paired.NONE, paired.LOOKUP) or {})["seeds"] == 2
    nmi = compare(paired.MAE, paired.NONE, "nmi_mean", "clustering")
    assert nmi == pytest.approx({"value": 13, "std": 0, "seeds": 2, "p_seeds": np.nan}, nan_ok=True)
    assert compare(paired.MAE, paired.LOOKUP, "nothing") is None


def test_a_cell_says_what_is_decided():
    same = {"value": 2.0, "std": 0.5, "low": 1.0, "high": 3.0, "p_seeds": 0.02}
    rows = [same | {"p": p} for p in (0.001, 0.04, 0.2)]
    for row, p in zip(paired.corrected(rows), holm([0.001, 0.04, 0.2]), strict=True):
        assert row["p_holm"] == p
    plain = "+2.0 ± 0.5 [+1.0, +3.0]"
    assert [paired.cell(row) for row in rows] == [f"**{plain}**", plain, plain]
    assert paired.cell(rows[0] | {"p_seeds": 0.06}) == paired.cell(rows[1])
    assert paired.cell({"value": -1.25, "std": None}) == "-1.2"


@pytest.mark.parametrize("made", [make_no_lookup, make_geometry], ids=lambda one: one.OUT.name)
def test_the_pages_are_what_the_numbers_say(made):
    """The CSV files follow from those of the experiments, and the page from these."""
    rows = made.differences()
    kept = pd.read_csv(made.OUT / "differences.csv").fillna({"views": ""})
    again = pd.DataFrame(rows)
    pd.testing.assert_frame_equal(kept, again, check_dtype=False, rtol=1e-6, atol=1e-9)
    given = (rows,) if made is make_no_lookup else (rows, made.values())
    text = made.page(*given)
    assert text == (made.OUT / "README.md").read_text(encoding="utf-8")
    words = [one for one in text.split("\n## ")[0].split() if re.search(r"\w", one)]
    assert "{" not in text and len(words) < 600


@pytest.mark.parametrize("shown", make_continued.TABLES, ids=lambda shown: shown.out)
def test_the_page_on_continued_encoders_is_what_the_numbers_say(shown):
    kept = pd.read_csv(RESULTS / shown.out / "values.csv")
    again = pd.DataFrame(make_continued.rows(shown, paired.Published(RESULTS / shown.data)))
    pd.testing.assert_frame_equal(kept, again, check_dtype=False, rtol=1e-6, atol=1e-9)
    text = make_continued.PAGE.read_text(encoding="utf-8")
    assert make_continued.table(shown, kept) in text
