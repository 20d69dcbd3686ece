"""Public weights in an experiment: planned, refused while they are missing, imported."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mini_pipeline import MINI, ROOT, Pipeline
from safetensors.torch import load_file

from maect.models.decoder import Decoder
from maect.models.vit import build_encoder, seeded
from maect.recipes import load_encoder
from maect.records import RunRecord
from maect.tools.dry_run import jobs_to_run

FILE = "mae_pretrain_vit_tiny.pth"
RUNS: dict[str, Any] = {
    "mae_tiny_public": {"weights": "", "size": "tiny"},
    "head_min_tiny": MINI["runs"]["head_min_tiny"] | {"from": "mae_tiny_public"},
    "ct_min_tiny": MINI["runs"]["ct_min_tiny"],
}
EVALUATE = [{"runs": ["mae_tiny_public", "ct_min_tiny"], "protocols": ["knn"]}]


def write_mae(file: Path) -> dict[str, Any]:
    """A checkpoint as facebookresearch/mae writes one, with its decoder."""
    encoder = load_encoder("tiny")
    with seeded(7):
        weights = dict(build_encoder(encoder).state_dict())
        decoder = Decoder(encoder).state_dict()
    more = {f"decoder_{name}": value for name, value in decoder.items() if name != "mask_token"}
    more["mask_token"] = decoder["mask_token"]
    torch.save({"model": weights | more, "epoch": 799}, file)
    return weights


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    """An experiment on weights that are not there yet."""
    runs = RUNS | {"mae_tiny_public": RUNS["mae_tiny_public"] | {"weights": str(tmp_path / FILE)}}
    return Pipeline(tmp_path / "p", MINI | {"runs": runs, "evaluate": EVALUATE})


def test_a_dry_run_plans_without_the_weights(pipeline: Pipeline) -> None:
    pipeline.command()
    given = [f"experiment={pipeline.folder / 'mini.yaml'}"]
    jobs = jobs_to_run(["evaluations"], given, ROOT / "cluster_profiles/local")
    rules = [job.rule for job in jobs]
    assert {"import", "head", "tune"} <= {*rules} and "pretrain" not in rules


@pytest.mark.slow
def test_weights_are_missed_and_then_imported(pipeline: Pipeline, tmp_path: Path) -> None:
    done = pipeline.run("evaluations")
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("maect")]
    assert len(lines) == 1 and f"runs: mae_tiny_public: no weights at {tmp_path}" in lines[0]
    assert not (pipeline.results / "shards").exists()  # nothing has begun

    weights = write_mae(tmp_path / FILE)
    run = pipeline.results / "runs/mae_tiny_public"
    pipeline.complete(str(RunRecord.path(run)))
    record = json.loads(RunRecord.path(run).read_text())
    assert (record["stage"], record["weights"]["layout"]) == ("import", "mae")
    found = load_file(run / "encoder.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
