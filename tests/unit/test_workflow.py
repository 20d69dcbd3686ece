"""The rules as Snakemake understands them."""

import json
from pathlib import Path
from typing import Any

from parsed_workflow import parsed


def test_every_rule_with_a_command_has_a_log_and_a_benchmark() -> None:
    rules = {name: rule for name, rule in parsed()["rules"].items() if rule["command"]}
    assert {"pretrain", "features", "table"} <= set(rules)
    for name, rule in rules.items():
        assert rule["log"] and rule["benchmark"], name


def made_of(job: dict[str, Any]) -> list[str]:
    """Inputs of a job, without the file that stands for a resolved file which is not there yet."""
    return [file for file in job["input"] if not Path(file).name.startswith("settings")]


def test_where_a_job_runs_is_no_part_of_what_it_is() -> None:
    """Snakemake runs a job again whose parameters or inputs change: no cluster setting is there."""
    elsewhere = {
        "cluster": "slurm", "nodes": 3, "devices": 5, "cpus_per_task": 7, "mem_mb": 11,
        "runtime": 13, "slurm_partition": "p", "slurm_account": "a", "slurm_extra": "qos=q",
        "setup": "s.sh", "save_every_minutes": 17, "stage_to": "t", "gpu": "g", "python": "y",
    }  # fmt: skip
    here = parsed()
    computing = [name for name, rule in here["rules"].items() if "cluster" in rule["resources"]]
    for name in computing:
        known = {key for key in here["rules"][name]["resources"] if key[0] != "_"}
        # (`resize` of features is also among their parameters, where anything says one.)
        assert known - {"tmpdir", "resize"} == elsewhere.keys(), name
    there = parsed(json.dumps(dict.fromkeys(computing, elsewhere)))
    assert here["jobs"].keys() == there["jobs"].keys()
    for name, job in here["jobs"].items():
        moved = there["jobs"][name]
        assert moved["params"] == job["params"] and made_of(moved) == made_of(job), name
        if "cluster" in job["resources"]:
            assert all(moved["resources"][key] == str(value) for key, value in elsewhere.items())


def test_reading_an_experiment_imports_no_torch() -> None:
    assert "snakemake" in parsed()["modules"] and "torch" not in parsed()["modules"]
