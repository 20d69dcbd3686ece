"""`maect doctor`: each fault is a line with a hint. Its job: tests/cluster/test_site.py."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from maect import cli
from maect.core.errors import UserError
from maect.experiment import load
from maect.launch import LaunchError, Resources
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
    return {"ranks": ranks, "versions": {"python": "3.12.1", "torch": "2.14"}}


def failures(findings: list[Finding]) -> list[str]:
    assert all(finding.hint for finding in findings if finding.kind == "FAIL")
    return [finding.what for finding in findings if finding.kind == "FAIL"]


def test_a_healthy_site():
    text = "\n".join(lines(judge(report())))
    assert "FAIL" not in text and "hint" not in text
    assert "ok   job on 2 nodes, 4 ranks: python 3.12.1, torch 2.14" in text
    assert "ok   2 GPUs a node: NVIDIA A100" in text
    assert "ok   NCCL all-reduce over 4 ranks: 20.00 GB/s" in text
    assert "ok   NVIDIA driver 580.95.05" in text


def test_what_the_ranks_saw():
    """Also where srun shows every rank only its own device."""
    for changes, fault in (
        ({"sum": 3.0}, "NCCL all-reduce gives a wrong sum"),
        ({"files": 2}, "files written on one node are not seen on another"),
    ):
        assert failures(judge(report(**changes))) == [fault]
    seen = report()
    for number, rank in enumerate(seen["ranks"]):
        rank["devices"] = [f"device {number % 2}"]
    assert failures(judge(seen)) == []
    seen["ranks"][3]["devices"] = ["device 0"]
    assert "ok   1 GPUs a node: NVIDIA A100" in lines(judge(seen))  # of the poorest node
    seen["ranks"][3]["trained"] = 0.25
    assert failures(judge(seen)) == ["weights differ between ranks after a step"]


def test_the_job_itself(tmp_path, monkeypatch):
    """One rank trains here (two do in `tests/cluster`); one that fails is a line."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    alone = Resources(devices=1, cpus_per_task=1)
    text = "\n".join(lines(doctor.run_probe(tmp_path, alone)))
    assert "FAIL" not in text and "ok   DeepSpeed trains a step over 1 rank" in text

    def fail(*_: object, **__: object) -> None:
        raise LaunchError("no node")

    monkeypatch.setattr(doctor, "launch", fail)
    assert failures(doctor.run_probe(tmp_path, alone)) == ["job on 1 node x 1: no node"]


def test_what_one_rule_needs_is_no_upper_end(monkeypatch):
    """16 nodes are the end of one rule's range, and all that another rule asks for."""
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "sbatch")

    def command(*words: str) -> tuple[int, str, str]:
        assert words[:-1] == ("sbatch", "--test-only")
        return int("--nodes=16\n" in Path(words[-1]).read_text()), "", "no"

    monkeypatch.setattr(doctor, "command", command)
    asked = {"cluster": "slurm", "devices": 4, "cpus_per_task": 8, "slurm_partition": "p"}
    ranged = {"pretrain": asked | {"nodes": "1..16"}}
    for rules, kinds in ((ranged | {"tune": asked | {"nodes": 16}}, "FAIL"), (ranged, "note")):
        assert [finding.kind for finding in doctor.requests(rules)] == ["ok", kinds]
    (fault,) = failures(doctor.requests({"pretrain": asked | {"slurm_account": "$MINE"}}))
    assert fault == "pretrain: --slurm-account $MINE: this variable is not set; export it"


def test_the_profile_is_read_as_snakemake_reads_it(monkeypatch):
    monkeypatch.setenv("MAECT_ACCOUNT", "budget")
    rules = read_profile(ROOT / "cluster_profiles/leonardo")
    assert (rules["pretrain"]["nodes"], rules["features"]["nodes"]) == ("1..16", 1)
    wanted = resources(rules["pretrain"], 2)
    assert (wanted.nodes, wanted.devices, wanted.cpus_per_task, wanted.runtime) == (2, 4, 8, 1440)
    assert (wanted.slurm_partition, wanted.slurm_account) == ("boost_usr_prod", "budget")
    assert wanted.mem_mb == 480000 and wanted.setup == str(Path("envs/leonardo.sh").absolute())
    local = read_profile(ROOT / "cluster_profiles/local")["pretrain"]
    assert not [f for path in ROOT.glob("cluster_profiles/*") for f in misspelt(read_profile(path))]
    limits = {"licences": 1, "mem_mib": 9, "disk_mb": 9, "threads": 2}
    (finding,) = misspelt({"tune": {"slurm_acount": "mine", "devices": 4} | limits})
    assert finding.kind == "FAIL" and finding.what == "tune: no job reads the resource slurm_acount"
    assert resources(local, 1).cluster == "local"
    with pytest.raises(UserError, match="not a cluster profile"):
        read_profile(ROOT / "envs")


def test_faults_before_any_job(tmp_path, monkeypatch, capsys):
    """No sbatch: a line, a hint, and no job is tried."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    asked = {"cluster": "slurm", "nodes": 1, "devices": 1, "cpus_per_task": 1}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"set-resources": {"pretrain": asked}}))
    assert cli.main(["doctor", "--profile", str(tmp_path), "--experiment", "digits"]) == 2
    told = capsys.readouterr()
    said = "FAIL there is no sbatch on this machine\n     hint: run this on a login node"
    assert said in told.out and "1 of" in told.err and not (tmp_path / "results").exists()


def test_storage_that_cannot_be_written(tmp_path):
    values = yaml.safe_load((ROOT / "workflow/experiments/digits.yaml").read_text())
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(values | {"storage": "/proc/maect"}))
    (fault,) = failures(doctor.storage(load(str(file))))
    assert "cannot be written" in fault
