"""A results folder as an RO-Crate, by the stamps of its jobs."""

import json
from pathlib import Path
from typing import Any

import pytest

from maect.core.errors import UserError
from maect.core.files import write_record
from maect.report.crate import write_crate


def stamp(path: Path, **made_of: str) -> None:
    write_record(path, {"asked": "a1", "result": "b2", "made_of": made_of})


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """One run, made of shards of another folder, and an evaluation of it."""
    results = tmp_path / "digits"
    runs = ("runs/mae/config.yaml", "runs/mae/run.json")
    for name in (*runs, "evaluations/mae/knn.yaml", "evaluations/mae/knn.json"):
        (results / name).parent.mkdir(parents=True, exist_ok=True)
        (results / name).write_text("{}")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/index.json").touch()
    stamp(results / "runs/mae/done", **{"../../../other/index.json": "c3"})
    stamp(results / "evaluations/mae/knn.done", **{"../../runs/mae/run.json": "d4", "gone": "e5"})
    return results


def read(file: Path) -> dict[str, Any]:
    graph = json.loads(file.read_text(encoding="utf-8"))["@graph"]
    entities = {entity["@id"]: entity for entity in graph}
    assert len(entities) == len(graph)
    return entities


def test_each_job_names_what_it_read_and_made(results):
    entities = read(write_crate(results))
    knn, mae = entities["#evaluations/mae/knn"], entities["#runs/mae/"]
    inputs = [{"@id": "evaluations/mae/knn.yaml"}, {"@id": "runs/mae/run.json"}]
    assert knn["object"] == inputs  # without what is gone
    assert knn["result"] == {"@id": "evaluations/mae/knn.json"}
    assert mae["object"] == {"@id": "runs/mae/config.yaml"}  # without what is elsewhere
    assert mae["result"] == {"@id": "runs/mae/"}
    parts = {part["@id"] for part in entities["./"]["hasPart"]}
    assert parts == {
        "runs/mae/", "runs/mae/config.yaml", "runs/mae/run.json",
        "evaluations/mae/knn.yaml", "evaluations/mae/knn.json",
    }  # fmt: skip
    assert parts < entities.keys() and all((results / part).exists() for part in parts)


def test_the_licence_is_the_users(results):
    licence = "https://creativecommons.org/licenses/by/4.0/"
    entities = read(write_crate(results, licence))
    assert entities["./"]["license"] == {"@id": licence} and licence in entities
    assert "not stated" in read(write_crate(results))["#licence"]["name"]


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(UserError, match="no finished job"):
        write_crate(tmp_path)
