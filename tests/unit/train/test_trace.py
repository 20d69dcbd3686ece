"""A window of steps under torch.profiler: traces of both ranks, and the same bits as without."""

import json
from pathlib import Path

import pytest
from ranks import run

from maect.core.errors import UserError
from maect.records import RunRecord
from maect.train.trace import steps_of


def test_a_window_is_profiled_and_changes_nothing(job, tmp_path):
    jobs = job("mae", "mae"), job("traced", "mae") | {"trace": "3-4"}
    assert run(2, *jobs, log=tmp_path / "log") == ["done", "done"]
    plain, traced = (Path(value["folder"]) for value in jobs)
    found = sorted((traced / "traces").iterdir())
    assert [path.name for path in found] == [f"steps-3-4-rank-{rank}.json" for rank in (0, 1)]
    for path in found:
        names = [event["name"] for event in json.loads(path.read_text())["traceEvents"]]
        # In each of two steps ZeRO updates two groups of parameters, with and without weight decay.
        assert sum(name.startswith("Optimizer.step") for name in names) == 4
        assert "aten::addmm" in names
    weights = [folder / "encoder.safetensors" for folder in (plain, traced)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    records = [json.loads(RunRecord.path(folder).read_text()) for folder in (plain, traced)]
    assert records[0]["fingerprint"] == records[1]["fingerprint"]
    assert not (plain / "traces").exists()


@pytest.mark.parametrize("window", ["3", "0-2", "4-3", "9-11", "a-b", "-1-2"])
def test_another_window_is_refused(window):
    assert steps_of("9-10", 10) == range(9, 11)
    with pytest.raises(UserError, match=rf"--trace {window}: .* within 1-10"):
        steps_of(window, 10)
