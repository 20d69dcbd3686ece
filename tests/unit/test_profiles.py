"""The cluster profiles, and the rules as Snakemake understands them, which they fit."""

import json
import os
import re
import subprocess
import sys
from ast import literal_eval
from pathlib import Path
from typing import Any

import pytest
from parsed_workflow import parsed, read_profile
from snakemake.resources import Resource

from maect.core.errors import UserError
from maect.core.resources import node_range, sbatch_options
from maect.experiment import load
from maect.experiment.profile import HERE, by_rule, find_profile, like_slurm
from maect.recipes import load_encoder
from maect.recipes.cost import relative_speed
from maect.stages import STAGES, load_recipe
from maect.tools.train import WORTH_A_RANK, training_nodes
from maect.train.watchdog import LIMIT

ROOT = Path(__file__).parents[2]
PROFILES = sorted(path.parent.name for path in (ROOT / "cluster_profiles").glob("*/config.yaml"))
SITES = [name for name in PROFILES if name != "local"]
TRAININGS = {name for name, stage in STAGES.items() if stage.trains}


@pytest.mark.parametrize("name", SITES)
def test_a_site_says_where_every_rule_computes(name):
    asked = read_profile(name)["set-resources"]
    rules = {key: set(rule["resources"]) for key, rule in parsed()["rules"].items()}
    assert {key for key, known in rules.items() if "cluster" in known} == set(asked)
    for rule, values in asked.items():
        assert values.keys() <= rules[rule], rule
        least, most = node_range(str(values["nodes"]))
        assert least == most or rule in TRAININGS, f"{rule}: only trainings have a range of nodes"
        assert values["cluster"] == "slurm" and values["slurm_account"] == "'$MAECT_ACCOUNT'"
        assert 0 < values["runtime"] <= asked["pretrain"]["runtime"] and values["devices"] > 0
        assert (ROOT / values["setup"]).exists()
        for option in sbatch_options(values.get("slurm_extra", "").strip("'")).items():
            assert re.fullmatch(r"[a-z-]+=[a-z0-9:_./-]+", "=".join(option)), option


@pytest.mark.parametrize("name", PROFILES)
def test_a_kill_costs_no_more_than_its_work(name):
    """Nor does a login node much at once: jobs of several cores, or gigabytes for an encoder."""
    profile = read_profile(name)
    assert profile["rerun-incomplete"] and profile["nolock"]
    assert profile["scheduler"] == "greedy"  # Snakemake slept on after its solver had died
    assert "code" not in profile["rerun-triggers"]
    if name in SITES:
        most = {rule: profile["cores"] // profile["set-threads"][rule] for rule in HERE}
        assert most == {"write_shards": 4, "import": 2}


def test_a_site_says_only_what_differs():
    site = {
        "training": {"devices": 2, "slurm_partition": "gpu2"},
        "cpu": {"slurm_partition": "batch", "slurm_extra": "--gres=none"},
        "knn": {"runtime": 7},
    }
    asked = like_slurm(site)["set-resources"]
    common = read_profile("slurm")["set-resources"]
    assert asked["features"] == common["features"] | {"devices": 2, "slurm_partition": "'gpu2'"}
    assert asked["throughput"]["slurm_partition"] == "'gpu2'"
    assert asked["throughput"]["devices"] == asked["umap"]["devices"] == 1
    assert asked["knn"] == asked["umap"] | {"runtime": 7}
    assert asked["umap"]["slurm_partition"] == "'batch'"
    assert like_slurm(site)["cores"] == read_profile("slurm")["cores"]

    # What is usual for a rule is cut to the site's wall limit; what the site itself says is not.
    asked = like_slurm({"training": {"runtime": 720}, "knn": {"runtime": 900}})["set-resources"]
    assert {asked[rule]["runtime"] for rule in (*TRAININGS, "linear_probe")} == {720}
    assert (asked["features"]["runtime"], asked["knn"]["runtime"]) == (240, 900)
    site = {"training": {"runtime": 2880}, "node": {"runtime": 90}, "cpu": {"runtime": 300}}
    asked = like_slurm(site)["set-resources"]
    limits = {"tune": 2880, "features": 90, "linear_probe": 90, "throughput": 90, "knn": 300}
    assert {rule: asked[rule]["runtime"] for rule in limits} == limits
    assert like_slurm({})["set-resources"] == common
    for text in ("--constraint='a|b'", "'--qos=q'", "--constraint='a|b' --qos='q'"):
        read = by_rule({"knn": {"slurm_extra": text}})["set-resources"]["knn"]
        assert literal_eval(read["slurm_extra"]) == (text if text[0] == "-" else "--qos=q")
    with pytest.raises(UserError, match="unknown job 'traning'; did you mean 'training'"):
        by_rule({"traning": {"nodes": 1}})


def test_a_name_is_not_read_as_python(monkeypatch):
    """Snakemake evaluates resources after it has filled in variables."""
    monkeypatch.setenv("MAECT_ACCOUNT", "open")
    asked = like_slurm({"training": {"slurm_partition": "all"}})["set-resources"]["pretrain"]
    where = {"wildcards": None, "input": None, "attempt": 1, "async_run": None}
    for key, name in (("slurm_partition", "all"), ("slurm_account", "open")):
        assert Resource.cli_evaluator(key, asked[key], **where) == name


def test_nccl_gives_up_before_the_trainers_own_watchdog():
    script = "source envs/juwels.sh && echo $NCCL_IB_TIMEOUT"
    said = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True).stdout
    assert 60 < 7 * 4.096e-6 * 2 ** int(said) < LIMIT


SOURCES_ONLY = ("connection-pool", "deepspeed")
"""Pure Python, of which there are no wheels."""


def refused_on_arm(requirements: str, python: str, folder: Path) -> str:
    """What uv says against these requirements on Arm; "" if there is a wheel of each."""
    file = folder / "requirements.txt"
    file.write_text(requirements)
    words = [sys.executable, "-m", "uv", "pip", "compile", str(file), "--no-deps", "--quiet",
             "--python-platform", "aarch64-manylinux_2_28", "--python-version", python,
             "--only-binary", ":all:"]  # fmt: skip
    words += [word for name in SOURCES_ONLY for word in ("--no-binary", name)]
    for offline in (["--offline"], []):  # what was installed is known without the index
        done = subprocess.run([*words, *offline], capture_output=True, text=True, timeout=300)
        if done.returncode == 0 or "wheels" in done.stderr:
            return done.stderr
    pytest.skip(f"the package index cannot be asked: {done.stderr.strip()[-200:]}")


@pytest.mark.parametrize(
    "python", ["3.12", *(pytest.param(one, marks=pytest.mark.slow) for one in ("3.11", "3.13"))]
)
def test_the_lock_file_installs_on_arm(python, tmp_path):
    """Grace (Alps, JUPITER): every package that a marker does not leave out has a wheel."""
    text = (ROOT / "envs/requirements.lock").read_text(encoding="utf-8")
    assert refused_on_arm(text, python, tmp_path) == ""


def test_a_profile_says_nothing_of_the_experiment(tmp_path):
    """`maect run` gives Snakemake a `--config` of its own, which replaces that of a profile."""
    (tmp_path / "config.yaml").write_text("__use_yte__: true\nconfig: [storage=results/other]\n")
    with pytest.raises(UserError, match=r"config\.yaml: config: .* write --config KEY=VALUE"):
        find_profile(str(tmp_path))


@pytest.mark.parametrize("modules", [False, True], ids=["no modules", "modules"])
@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "envs").glob("*.sh")))
def test_setup_scripts_end_well(script, modules):
    """Also where a module is missing: a job ends if its script does."""
    begin = "module() { return 1; }; " if modules else ""
    command = ["bash", "-uc", f"{begin}source envs/{script} && env"]
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert "HF_HUB_OFFLINE=1" in done.stdout


def test_an_account_that_is_not_set_stops_before_anything_runs(tmp_path):
    """One line, no traceback."""
    command = [sys.executable, "-m", "snakemake", "--snakefile", ROOT / "Snakefile", "--profile",
               ROOT / "cluster_profiles/juwels", "--config", "experiment=digits"]  # fmt: skip
    environment = {key: value for key, value in os.environ.items() if key != "MAECT_ACCOUNT"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode
    said = "maect: the profile's account is $MAECT_ACCOUNT, which is not set: export it"
    assert done.stderr.splitlines()[-1] == said
    assert not (tmp_path / "results").exists()


def test_a_training_takes_as_many_nodes_as_its_batch_is_worth():
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
    for given, said in (
        ("3", "batch_size 128 is not a multiple of 12 ranks"),
        ("5..7", r"batch_size 128 is not a multiple of ranks on 5\.\.7"),
        *((wrong, f"--nodes {wrong}: a number of nodes, or LEAST..MOST")
          for wrong in ("0", "4..2", "auto", "1..", "-1", "1-4")),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            nodes(given, "tiny")


def test_every_rule_with_a_command_has_a_log_and_a_benchmark():
    rules = {name: rule for name, rule in parsed()["rules"].items() if rule["command"]}
    assert {"pretrain", "features", "table"} <= set(rules)
    for name, rule in rules.items():
        assert rule["log"] and rule["benchmark"], name
        # A training is told more of its place, and begins before what does not wait for it.
        is_training = name in TRAININGS
        assert ("--stage-to=" in rule["command"]) == bool(rule["priority"]) == is_training, name
    encoders = {Path(one).parent.name for one in parsed()["rules"]["encoders"]["input"]}
    assert encoders == {name for name, run in load("digits").runs.items() if not run.scored_by}


def made_of(job: dict[str, Any]) -> list[str]:
    """Inputs of a job, without the file that stands for a resolved file which is not there yet."""
    return [file for file in job["input"] if not Path(file).name.startswith("settings")]


def test_where_a_job_runs_is_no_part_of_what_it_is():
    """Snakemake runs a job again whose parameters or inputs change: no cluster setting is there."""
    elsewhere = {
        "cluster": "slurm", "nodes": 3, "devices": 5, "cpus_per_task": 7, "mem_mb": 11,
        "runtime": 13, "slurm_partition": "p", "slurm_account": "a",
        "slurm_extra": "--qos=q --hold", "setup": "s.sh", "save_every_minutes": 17,
        "stage_to": "t", "gpu": "g", "python": "y",
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
