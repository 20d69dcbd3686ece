"""`maect doctor`: each fault is a line with a hint. Its job: tests/cluster/test_site.py."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from maect import cli
from maect.core.errors import UserError
from maect.core.files import write_record
from maect.experiment import Experiment, load
from maect.launch import Resources
from maect.records import RunRecord
from maect.stages.pretrain import Pretrain
from maect.tools import doctor
from maect.tools.doctor import Finding, judge, lines, misspelt, read_profile, resources

ROOT = Path(__file__).parents[2]


def report(**changes: Any) -> dict[str, Any]:
    """What four ranks on two nodes saw, all well on GPUs."""
    ranks = [
        {"host": "h", "node": rank // 2, "devices": ["a", "b"], "device": "NVIDIA A100",
         "driver": "580.95.05", "sum": 6.0, "files": 4,
         "gigabytes": 20.0 + rank, "trained": 0.5} | changes
        for rank in range(4)
    ]  # fmt: skip
    return {"ranks": ranks, "versions": {"python": "3.12.1", "torch": "2.14"}, "internet": False}


def failures(findings: list[Finding]) -> list[str]:
    assert all(finding.hint for finding in findings if finding.kind == "FAIL")
    return [finding.what for finding in findings if finding.kind == "FAIL"]


def test_a_healthy_site() -> None:
    text = "\n".join(lines(judge(report())))
    assert "FAIL" not in text and "hint" not in text
    assert "ok   job on 2 nodes, 4 ranks: python 3.12.1, torch 2.14" in text
    assert "ok   2 GPUs a node: NVIDIA A100" in text
    assert "ok   NCCL all-reduce over 4 ranks: 20.00 GB/s" in text
    assert "note compute nodes have no internet" in text


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"sum": 3.0}, "NCCL all-reduce gives a wrong sum"),
        ({"files": 2}, "files written on one node are not seen on another"),
    ],
)
def test_what_the_ranks_saw(changes: dict[str, Any], fault: str) -> None:
    assert failures(judge(report(**changes))) == [fault]


def test_a_device_bound_to_each_rank() -> None:
    """srun may show every rank only its own device."""
    seen = report()
    for number, rank in enumerate(seen["ranks"]):
        rank["devices"] = [f"device {number % 2}"]
    assert failures(judge(seen)) == []


@pytest.mark.parametrize(
    ("cuda", "said", "kind", "told"),
    [
        ("13.0", 590, "ok", "torch for CUDA 13.0 needs NVIDIA driver 580; the site has 590"),
        ("13.0", 575, "FAIL", "torch for CUDA 13.0 needs NVIDIA driver 580; the site has 575"),
        ("12.6", 535, "ok", "torch for CUDA 12.6 needs NVIDIA driver 525; the site has 535"),
        ("13.0", None, "note", "the site's is unknown"),
        (None, None, "note", "is built without CUDA"),
    ],
)
def test_the_driver_of_a_profile(
    cuda: str | None, said: int | None, kind: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.version.cuda", cuda)
    (finding,) = doctor.driver(said)
    assert finding.kind == kind and told in finding.what
    assert bool(finding.hint) is ((said is None and cuda is not None) or kind == "FAIL")


def test_the_driver_of_the_nodes() -> None:
    assert "ok   NVIDIA driver 580.95.05" in lines(judge(report(), 580))
    assert failures(judge(report(), 590)) == ["NVIDIA driver 580.95.05, not 590"]
    assert "driver" not in "".join(lines(judge(report(devices=[]), 590)))


def test_ranks_that_trained_apart() -> None:
    seen = report()
    seen["ranks"][3]["trained"] = 0.25
    assert failures(judge(seen)) == ["weights differ between ranks after a step"]


def test_the_job_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks train here; where GPUs cannot be used, the first attempt is the last."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    two = Resources("local", devices=2, cpus=1)
    text = "\n".join(lines(doctor.run_probe(tmp_path, two)))
    assert "FAIL" not in text and "ok   DeepSpeed trains a step over 2 ranks" in text
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)  # of an engine in this process
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (fault,) = failures(doctor.run_probe(tmp_path, replace(two, devices=1)))
    assert "the job was given GPUs, and torch" in fault and "CUDA_VISIBLE_DEVICES=0" in fault


def test_what_one_rule_needs_is_no_upper_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 nodes are the end of one rule's range, and all that another rule asks for."""
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "sbatch")
    monkeypatch.setattr(doctor, "command", lambda *words: (int("--nodes=16" in words), "", "no"))
    asked = {"cluster": "slurm", "devices": 4, "cpus_per_task": 8, "slurm_partition": "p"}
    findings = doctor.requests(
        {"pretrain": asked | {"nodes": "1..16"}, "tune": asked | {"nodes": 16}}
    )
    assert [finding.kind for finding in findings] == ["ok", "FAIL"]
    findings = doctor.requests({"pretrain": asked | {"nodes": "1..16"}})
    assert [finding.kind for finding in findings] == ["ok", "note"]


@pytest.mark.parametrize(
    ("said", "kind", "told"),
    [
        ("1-00:00:00\n", "ok", "p: jobs of up to 720 min (pretrain); the wall limit is 1440"),
        ("06:00:00\n", "FAIL", "p: jobs of up to 720 min (pretrain); the wall limit is 360"),
        ("30:00\n", "FAIL", "p: jobs of up to 720 min (pretrain); the wall limit is 30"),
        ("infinite\n", "note", "SLURM says no wall limit"),
        ("", "note", "SLURM says no wall limit"),
    ],
)
def test_wall_limits(said: str, kind: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile's assumption is compared with the partition, which `--test-only` may not do."""
    asked = []

    def command(*words: str) -> tuple[int, str, str]:
        asked.append(words)
        return 0, said, ""

    monkeypatch.setattr(doctor, "command", command)
    rules = {
        "pretrain": {"cluster": "slurm", "slurm_partition": "p", "runtime": 720},
        "features": {"cluster": "slurm", "slurm_partition": "p", "runtime": 240},
        "write_shards": {"threads": 16},
    }
    (finding,) = doctor.wall_limits(rules)
    assert finding.kind == kind and told in finding.what and bool(finding.hint) is (kind == "FAIL")
    assert asked == [("sinfo", "--noheader", "--partition=p", "--format=%l")]


def test_the_profile_is_read_as_snakemake_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAECT_ACCOUNT", "budget")
    rules = read_profile(ROOT / "cluster_profiles/leonardo")
    assert (rules["pretrain"]["nodes"], rules["features"]["nodes"]) == ("1..16", 1)
    wanted = resources(rules["pretrain"], 2)
    assert (wanted.nodes, wanted.devices, wanted.cpus, wanted.minutes) == (2, 4, 8, 1440)
    assert (wanted.partition, wanted.account) == ("boost_usr_prod", "budget")
    assert wanted.memory_mb == 480000 and wanted.setup == str(Path("envs/leonardo.sh").absolute())
    local = read_profile(ROOT / "cluster_profiles/local")["pretrain"]
    assert not [f for path in ROOT.glob("cluster_profiles/*") for f in misspelt(read_profile(path))]
    limits = {"licences": 1, "mem_mib": 9, "disk_mb": 9, "threads": 2}
    (finding,) = misspelt({"tune": {"slurm_acount": "mine", "devices": 4} | limits})
    assert finding.kind == "FAIL" and finding.what == "tune: no job reads the resource slurm_acount"
    assert resources(local, 1).cluster == "local"
    with pytest.raises(UserError, match="not a cluster profile"):
        read_profile(ROOT / "envs")


def test_faults_before_any_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No sbatch, no setup script: two lines, two hints, and no job is tried."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    asked = {"cluster": "slurm", "nodes": 1, "devices": 1, "cpus_per_task": 1, "setup": "no.sh"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"set-resources": {"pretrain": asked}}))
    assert cli.main(["doctor", "--profile", str(tmp_path), "--experiment", "digits"]) == 2
    said = capsys.readouterr()
    assert "FAIL setup script no.sh does not exist\n     hint: correct `setup`" in said.out
    assert (
        "FAIL there is no sbatch on this machine\n     hint: run this on a login node" in said.out
    )
    assert "2 of" in said.err and not (tmp_path / "results").exists()


def test_a_setup_script_that_fails(tmp_path: Path) -> None:
    script = tmp_path / "site.sh"
    script.write_text("echo no module >&2\nfalse\n")
    findings = doctor.setup_script({"a": {"setup": str(script)}, "b": {"setup": str(script)}})
    assert failures(findings) == [f"setup script {script} fails: no module"]
    script.write_text("true\n")
    assert failures(doctor.setup_script({"a": {"setup": str(script)}})) == []


def stored(tmp_path: Path, storage: str) -> Experiment:
    values = yaml.safe_load((ROOT / "workflow/experiments/digits.yaml").read_text())
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(values | {"storage": storage}))
    return load(str(file))


def test_room_for_the_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = stored(tmp_path, str(tmp_path / "not/yet/there"))
    findings = doctor.storage(experiment)
    assert not failures(findings) and str(tmp_path) in findings[0].what
    # The room that is needed is a sum over runs: more than any disk has.
    monkeypatch.setattr(Pretrain, "state_bytes", lambda self, encoder: 10**18)
    monkeypatch.setattr(doctor, "FILES_PER_RUN", 10**15)
    assert ["TB needed" in what for what in failures(doctor.storage(experiment))] == [True, False]


def test_features_of_the_splits_that_evaluations_read(tmp_path: Path) -> None:
    """Whatever they are called; a split that no evaluation reads costs nothing."""
    shards = tmp_path / "results/shards/digits/held_out"
    shards.mkdir(parents=True)
    values: dict[str, Any] = {
        "storage": str(tmp_path / "results"),
        "datasets": {
            "digits": {"splits": {name: {"images": "x"} for name in ("train", "val", "held_out")}}
        },
        "runs": {"mae": {"recipe": "mae", "size": "tiny"}},
    }
    file = tmp_path / "mine.yaml"

    def needed(split: str, images: int, protocol: str = "knn") -> int:
        write_record(shards / "index.json", {"n": images, "shards": []})
        protocols = {protocol: {"test_split": split}}
        values["evaluate"] = [{"runs": ["mae"], "protocols": [protocol]}]
        file.write_text(yaml.safe_dump(values | {"protocols": protocols}))
        return doctor.needs(load(str(file)))[0]

    width = load("digits").runs["mae_tiny"].encoder.width
    assert needed("val", 10**9) == needed("val", 1)
    assert needed("held_out", 10**9 + 1) - needed("held_out", 1) == 10**9 * (4 * width + 8)
    four = needed("held_out", 10**9 + 1, "knn_last_4") - needed("held_out", 1, "knn_last_4")
    assert four == 10**9 * (4 * 4 * width + 8)
    # What is there needs no room any more.
    features, mae = tmp_path / "results/features/mae", tmp_path / "results/runs/mae"
    features.mkdir(parents=True)
    (features / "digits-held_out.safetensors").touch()
    assert needed("held_out", 10**9) == needed("held_out", 1)
    before, files = needed("held_out", 1), doctor.needs(load(str(file)))[1]
    mae.mkdir(parents=True)
    write_record(RunRecord.path(mae), {"run": "mae", "stage": "pretrain"})
    run = load(str(file)).runs["mae"]
    assert before - needed("held_out", 1) == run.settings.state_bytes(run.encoder)
    assert files - doctor.needs(load(str(file)))[1] == doctor.FILES_PER_RUN


def test_storage_that_cannot_be_written(tmp_path: Path) -> None:
    findings = doctor.storage(stored(tmp_path, "/proc/maect"))
    assert "cannot be written" in failures(findings)[0]
