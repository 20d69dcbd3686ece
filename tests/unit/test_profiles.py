"""The cluster profiles: complete, readable, and as the Snakefile needs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from parsed_workflow import parsed, read_profile

from maect.core.errors import UserError
from maect.experiment.profile import by_rule, like_slurm
from maect.launch.resources import WORTH_A_RANK, fixed_nodes, node_range, training_nodes
from maect.recipes import load_encoder
from maect.recipes.flops import relative_speed
from maect.stages import STAGES, load_recipe

ROOT = Path(__file__).parents[2]
PROFILES = sorted(path.parent.name for path in (ROOT / "cluster_profiles").glob("*/config.yaml"))
SITES = [name for name in PROFILES if name != "local"]
TRAININGS = {name for name, stage in STAGES.items() if stage.trains}


@pytest.mark.parametrize("name", SITES)
def test_a_site_says_where_every_rule_computes(name: str) -> None:
    asked = read_profile(name)["set-resources"]
    rules = {key: set(rule["resources"]) for key, rule in parsed()["rules"].items()}
    assert {key for key, known in rules.items() if "cluster" in known} == set(asked)
    for rule, values in asked.items():
        assert values.keys() <= rules[rule], rule
        least, most = node_range(str(values["nodes"]))
        assert least == most or rule in TRAININGS, f"{rule}: only trainings have a range of nodes"
        assert values["cluster"] == "slurm" and values["slurm_account"] == "$MAECT_ACCOUNT"
        assert 0 < values["runtime"] <= 1440 and values["devices"] > 0
        assert (ROOT / values["setup"]).exists()
        for argument in filter(None, values.get("slurm_extra", "").split(",")):
            assert re.fullmatch(r"[a-z-]+=[a-z0-9:_-]+", argument), argument


@pytest.mark.parametrize("name", PROFILES)
def test_a_kill_costs_no_more_than_its_work(name: str) -> None:
    profile = read_profile(name)
    assert profile["rerun-incomplete"] and profile["nolock"]
    assert "code" not in profile["rerun-triggers"]


def test_a_site_says_only_what_differs() -> None:
    site = {
        "training": {"devices": 2, "slurm_partition": "gpu2"},
        "cpu": {"slurm_partition": "batch", "slurm_extra": "gres=none"},
        "knn": {"runtime": 7},
    }
    asked = like_slurm(site)["set-resources"]
    common = read_profile("slurm")["set-resources"]
    assert asked["features"] == common["features"] | site["training"]
    assert asked["throughput"]["slurm_partition"] == "gpu2"
    assert asked["throughput"]["devices"] == asked["umap"]["devices"] == 1
    assert asked["knn"] == asked["umap"] | {"runtime": 7}
    assert asked["umap"]["slurm_partition"] == "batch"
    assert like_slurm(site)["cores"] == read_profile("slurm")["cores"]


def test_a_kind_that_is_none() -> None:
    with pytest.raises(UserError, match="unknown job 'traning'; did you mean 'training'"):
        by_rule({"traning": {"nodes": 1}})


@pytest.mark.parametrize("modules", [False, True], ids=["no modules", "modules"])
@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "envs").glob("*.sh")))
def test_setup_scripts_end_well(script: str, modules: bool) -> None:
    """Also where a module is missing: a job ends if its script does."""
    begin = "module() { return 1; }; " if modules else ""
    done = subprocess.run(
        ["bash", "-uc", f"{begin}source envs/{script} && env"],
        cwd=ROOT, capture_output=True, text=True, timeout=30, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert "HF_HUB_OFFLINE=1" in done.stdout


def test_an_account_that_is_not_set_stops_before_anything_runs(tmp_path: Path) -> None:
    """One line, no traceback."""
    profile = ROOT / "cluster_profiles/juwels"
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"),
         "--profile", str(profile), "--config", "experiment=digits"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={key: value for key, value in os.environ.items() if key != "MAECT_ACCOUNT"},
    )  # fmt: skip
    assert done.returncode
    assert done.stderr.splitlines()[-1] == (
        "maect: the profile's account is $MAECT_ACCOUNT, which is not set: export it"
    )
    assert not (tmp_path / "results").exists()


def test_a_training_takes_as_many_nodes_as_its_batch_is_worth() -> None:
    def nodes(given: str, size: str) -> int:
        stage, encoder = load_recipe("mae", size), load_encoder(size)
        step = stage.flops_per_image(encoder) * stage.batch_size
        return training_nodes(given, 4, stage.batch_size, step)

    assert nodes("1..16", "tiny") == 1
    assert nodes("1..16", "large") == 4
    # 1024 images on 3 nodes of 4: 2 is the largest number that divides them.
    assert nodes("1..3", "large") == 2
    assert training_nodes("1..1024", 4, 1024, 64 * WORTH_A_RANK) == 16
    assert training_nodes("1..1024", 4, 1024, 64 * WORTH_A_RANK, relative_speed("H100")) == 4
    # One number is what a person wants, whatever it is worth.
    assert nodes("8", "tiny") == 8
    with pytest.raises(UserError, match="batch_size 128 is not a multiple of 12 ranks"):
        nodes("3", "tiny")
    with pytest.raises(UserError, match=r"batch_size 128 is not a multiple of ranks on 5\.\.7"):
        nodes("5..7", "tiny")


@pytest.mark.parametrize("nodes", ["0", "4..2", "auto", "1..", "-1", "1-4"])
def test_nodes_that_are_none(nodes: str) -> None:
    with pytest.raises(UserError, match=f"--nodes {nodes}: a number of nodes, or LEAST..MOST"):
        node_range(nodes)


def test_an_evaluation_has_no_range_of_nodes() -> None:
    assert fixed_nodes("2") == 2
    with pytest.raises(UserError, match="a range is for trainings"):
        fixed_nodes("1..2")
