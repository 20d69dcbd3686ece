"""Train and evaluate from Python: `maect.run_training`, `maect.load`, `maect.run_evaluation`."""

import pytest
from tiny_runs import ENCODER, STAGE

import maect
from maect.core.errors import UserError
from maect.core.files import read_record
from maect.evaluate import EvaluationConfig
from maect.evaluate.protocols.encoders import KnnPerBlock
from maect.records import RunRecord
from maect.stages.pretrain import Pretrain
from maect.stages.run import RunConfig

SETTINGS = STAGE | {"augmentation": "mae", "base_lr": 1e-3, "weight_decay": 0.05, "epochs": 1}


def test_a_run_is_trained_and_evaluated(shards, tmp_path):
    config = tmp_path / "runs/mae/config.yaml"
    RunConfig(
        run="mae", stage="pretrain", size="tiny", shards=shards, encoder=ENCODER,
        settings=Pretrain.model_validate(SETTINGS),
    ).write(config)  # fmt: skip
    out = tmp_path / "runs/again/config.yaml"
    run = maect.run_training(config, ["seed=3"], out)
    assert run == out.parent and read_record(RunRecord.path(run))["seed"] == 3
    assert not RunRecord.path(config.parent).exists()
    assert maect.load(run).width == ENCODER.width
    asked = tmp_path / "evaluations/again/knn_per_block.yaml"
    EvaluationConfig(
        evaluation="knn_per_block", protocol="knn_per_block", run=run, resize=16,
        inputs={"train": shards, "test": shards}, settings=KnnPerBlock(k=3),
    ).write(asked)  # fmt: skip
    other = asked.with_name("k5.yaml")
    metrics = maect.run_evaluation(asked, ["settings.k=5"], other, devices=1)
    assert len(metrics["knn"]) == ENCODER.depth
    record = read_record(other.with_suffix(".json"))
    assert record["metrics"] == metrics and record["settings"]["k"] == 5
    assert not asked.with_suffix(".json").exists()
    assert maect.run_evaluation(str(other)) == metrics  # which is there


def test_mistakes_are_user_errors(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        maect.run_training(tmp_path / "config.yaml")
    with pytest.raises(UserError, match="unknown 'device'; did you mean 'devices'"):
        maect.run_evaluation(tmp_path / "knn.yaml", device=2)
