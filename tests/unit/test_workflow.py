"""The rules as Snakemake understands them."""

from parsed_workflow import parsed


def test_every_rule_with_a_command_has_a_log_and_a_benchmark() -> None:
    rules = {name: rule for name, rule in parsed()["rules"].items() if rule["command"]}
    assert {"pretrain", "features", "table"} <= set(rules)
    for name, rule in rules.items():
        assert rule["log"] and rule["benchmark"], name


def test_where_a_job_runs_is_no_part_of_what_it_is() -> None:
    """Snakemake runs a job again whose parameters or inputs change: no cluster setting is there."""
    here, there = parsed()["jobs"], parsed("juwels")["jobs"]
    assert here.keys() == there.keys()
    for name, job in here.items():
        moved = there[name]
        assert (moved["params"], moved["input"]) == (job["params"], job["input"]), name
        if "cluster" in job["resources"]:
            assert moved["resources"]["cluster"] == "slurm" != job["resources"]["cluster"], name


def test_reading_an_experiment_imports_no_torch() -> None:
    assert "snakemake" in parsed()["modules"] and "torch" not in parsed()["modules"]
