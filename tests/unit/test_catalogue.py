"""What the catalogue of Snakemake workflows and snakedeploy expect of the repository."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from maect.experiment.expand import CHANGES

ROOT = Path(__file__).parents[2]
SNAKEFILE = ROOT / "workflow/Snakefile"
TEST = ROOT / ".test/config"
DEPLOYED = f"""
configfile: "config/config.yaml"
module maect:
    snakefile: "{SNAKEFILE}"
    config: config["maect"]
use rule * from maect as maect_*
"""
"""What snakedeploy writes, with a key of its own for the module and other names of the rules."""
OURS = """
rule count:
    default_target: True
    input: rules.maect_shards.input
    output: "count.txt"
    shell: "echo {input} > {output}"
onstart: print("handler of ours")
onsuccess: print("handler of ours, too")
"""


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def snakemake(*words: str | Path, cwd: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "snakemake", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def test_files_of_a_standardized_workflow_are_there():
    """As the catalogue's own script asks: these three, and modules that end in .smk."""
    usage = read(ROOT / ".snakemake-workflow-catalog.yml")["usage"]
    assert usage["report"] is True and "--rerun-triggers mtime" in usage["mandatory-flags"]["flags"]
    # Rules run in Snakemake's own environment.
    assert not any(usage["software-stack-deployment"].values())
    assert SNAKEFILE.is_file() and (ROOT / "config/README.md").is_file()
    rules = [path for path in (ROOT / "workflow/rules").iterdir() if path.is_file()]
    assert rules and all(path.suffix == ".smk" for path in rules)


def test_the_configuration_is_explained_and_says_the_default():
    schema = read(ROOT / "workflow/schemas/config.schema.yaml")
    assert {*schema["properties"]} == {"experiment", *CHANGES}
    assert read(ROOT / "config/config.yaml") == {
        "experiment": schema["properties"]["experiment"]["default"]
    }
    text = (ROOT / "config/README.md").read_text(encoding="utf-8")
    assert all(f"`{key}`" in text for key in schema["properties"])


def test_a_configuration_of_another_type_is_refused(tmp_path):
    (tmp_path / "config.yaml").write_text("experiment: [digits]\n")
    words = ["--snakefile", SNAKEFILE, "--configfile", "config.yaml", "--dry-run"]
    done = snakemake(*words, cwd=tmp_path)
    assert done.returncode == 1 and "is not of type 'string'" in done.stdout


def test_the_rules_work_as_a_module_of_another_workflow(tmp_path):
    """Both workflows' handlers run; one of ours writes what the jobs read."""
    for name in ("config", "workflow"):
        (tmp_path / name).mkdir()
    (tmp_path / "workflow/Snakefile").write_text(DEPLOYED + OURS)
    config = {"other": 1, "maect": {"experiment": str(TEST / "experiment.yaml")}}
    (tmp_path / "config/config.yaml").write_text(yaml.safe_dump(config))
    words = ["--cores", "1", "--rerun-triggers", "mtime"]
    done = snakemake(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    shards = tmp_path / "results/experiment/shards/digits"
    assert (shards / "val/config.yaml").stat().st_size and (shards / "train/index.json").exists()
    assert "handler of ours\n" in done.stdout and "handler of ours, too\n" in done.stdout
    made = {path: path.read_bytes() for path in shards.rglob("*.*")}
    done = snakemake(*words, "--forceall", "--touch", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {path: path.read_bytes() for path in shards.rglob("*.*")} == made


WITHOUT = "import sys; from snakemake.cli import main; sys.modules['{hidden}'] = None; main()"


# Without pydantic: a clone that is not installed.
@pytest.mark.parametrize("hidden", ["maect", "pydantic"])
def test_without_maect_a_line_says_what_to_install(hidden, tmp_path):
    script = WITHOUT.replace("{hidden}", hidden)
    command = [sys.executable, "-P", "-c", script, "--snakefile", SNAKEFILE, "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert f"no module {hidden}" in said and ": install maect beside Snakemake" in said
    assert "Traceback" not in said and "maect/evaluate" not in said


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_run_of_minutes(tmp_path):
    """`.test`, as config/README.md and hosted CI run it, in a folder of its own."""
    (tmp_path / "config").symlink_to(TEST)
    words = ["--directory", tmp_path, "--snakefile", SNAKEFILE, "--cores", "2"]
    words += ["--configfile", TEST / "config.yaml", "--rerun-triggers", "mtime"]
    done = snakemake(*words, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    results = tmp_path / "results/experiment"
    assert "MAE-CT" in (results / "report.html").read_text(encoding="utf-8")
    assert "ct_min" in (results / "tables/low_shot.csv").read_text(encoding="utf-8")
