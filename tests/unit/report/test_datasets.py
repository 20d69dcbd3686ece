"""The page of several data sets: which numbers it takes from where, and how they are shown."""

import pandas as pd

from maect.core.files import write_record
from maect.evaluate import PROTOCOLS
from maect.experiment.pages import make_page
from maect.report.configs import DatasetsConfig, ReportConfig
from maect.report.pages import report_page


def test_each_number_stands_under_its_data_set_with_its_interval(tmp_path):
    birds = {"knn": 81.26, "knn_low": 70.04, "knn_high": 90.0, "k": 3, "sweep": []}
    leaves = {"knn": 50.0, "knn_low": 44.44, "knn_high": 55.0, "knn_held_out": 51.0}
    for name, metrics in (
        ("knn", birds),
        ("knn.on.leaves", leaves),
        ("low_shot.on.leaves", {"low_shot_2": 12.34}),
        ("effective_invariance", {"ei_rotation": 0.1234}),
    ):
        record = {"metrics": metrics, "settings": {}, "provenance": {}}
        write_record(tmp_path / f"evaluations/mae/{name}.json", record)
    measured = ("knn", "low_shot", "effective_invariance")
    about = {"measures": {name: dict(PROTOCOLS[name]().headline()) for name in measured}}
    about |= {"runs": ["mae", "not_evaluated"], "datasets": {"birds": "", "leaves": ".on.leaves"}}
    path = tmp_path / "datasets.yaml"
    DatasetsConfig(name="mine", evaluations=tmp_path / "evaluations", **about).write(path)
    make_page(path)
    frame = pd.read_csv(path.with_suffix(".csv"))
    found = [tuple(line) for line in frame.fillna(-1).itertuples(index=False)]
    assert found == [
        ("mae", "birds", "knn", "knn", 81.26, 70.04, 90.0),
        ("mae", "leaves", "knn", "knn", 50.0, 44.44, 55.0),
        ("mae", "leaves", "knn", "knn_held_out", 51.0, -1, -1),
        ("mae", "leaves", "low_shot", "low_shot_2", 12.34, -1, -1),
        ("mae", "birds", "effective_invariance", "ei_rotation", 0.1234, -1, -1),
    ]
    of_birds, of_leaves = path.with_suffix(".md").read_text().split("## leaves")
    assert "## birds" in of_birds and "| mae | 81.3 (70.0 to 90.0) | 0.123 |" in of_birds
    assert "2 labels per class" in of_leaves
    assert "| mae | 50.0 (44.4 to 55.0) | 51.0 | 12.3 |" in of_leaves
    page = report_page(ReportConfig(name="mine", datasets=path.with_suffix(".csv")))
    assert "<td>50.0<small>44.4 to 55.0</small></td>" in page and "Data set leaves" in page
