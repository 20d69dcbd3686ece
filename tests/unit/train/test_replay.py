"""A logged step is repeated from a kept state, and every difference from the log is noticed."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import ranks
from tiny_runs import ENCODER, HEAD, STAGE

from maect import cli
from maect.core.entries import line_of
from maect.launch.local import Local
from maect.launch.record import new_job, write_job
from maect.stages.pretrain import Pretrain
from maect.stages.run import RunConfig, train
from maect.tools import jobs
from maect.train.replay import part_of

SETTINGS = STAGE | {
    "augmentation": "mae", "base_lr": 1e-3, "weight_decay": 0.05, "contrastive": "combined",
    "contrastive_weight": 1.0, "head": HEAD, "epochs": 5,
}  # fmt: skip


def write(root: Path, name: str, shards: Path, **changes) -> Path:
    """A resolved run beside its shards."""
    config = RunConfig(
        run=name, stage="pretrain", size="tiny", seed=1, shards=shards, encoder=ENCODER,
        settings=Pretrain.model_validate(SETTINGS | changes),
    )  # fmt: skip
    config.write(root / "runs" / name / "config.yaml")
    return root / "runs" / name


@pytest.fixture(scope="module")
def finished(shards, tmp_path_factory) -> Path:
    """A run of 12 steps on two ranks with the states of steps 11 and 12."""
    root = tmp_path_factory.mktemp("replay")
    folder = write(root, "mae", shards)
    job = {"function": train, "config": str(folder / "config.yaml"), "save_every_minutes": 0.0}
    assert ranks.run(2, job, log=root / "log") == ["done"]
    return folder


@pytest.fixture
def replay(monkeypatch, tmp_path, capsys):
    """`maect replay`; the launcher only starts the ranks."""

    def launch(task, folder, resources, is_done, **_):
        job = {"function": train, **task.arguments}
        said = ranks.run(resources.ranks, job, log=tmp_path / "log")
        assert said == ["done"] and is_done(), said

    def call(run: Path, step: int, *words: str) -> tuple[int, str]:
        before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
        status = cli.main(["replay", str(run), "--step", str(step), *words])
        assert before == {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
        assert not list(run.parent.parent.glob(".replay-*"))
        return status, " ".join(capsys.readouterr())

    monkeypatch.setattr(jobs, "launch", launch)
    return call


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy of the run that a test may damage."""
    shutil.copytree(finished, tmp_path / "runs" / "mae")
    return tmp_path / "runs" / "mae"


def test_a_job_that_the_launcher_leaves_does_not_run_on(finished, monkeypatch, capsys):
    ended = []

    def left(task, folder, *_, **__):
        write_job(folder, new_job(folder, "local", 2, None))
        raise SystemExit(130)

    monkeypatch.setattr(jobs, "launch", left)
    monkeypatch.setattr(Local, "end", lambda self, folder, job: ended.append(job.name))
    words = ["replay", str(finished), "--step", "12", "--devices", "2"]
    with pytest.raises(SystemExit):
        cli.main(words)
    assert len(ended) == 1 and not list(finished.parent.parent.glob(".replay-*"))
    assert cli.main([*words, "--detach"]) == 2


def test_a_step_is_what_the_log_says(finished, replay, tmp_path):
    status, said = replay(finished, 12, "--devices", "2", "--out", str(tmp_path / "step.json"))
    assert status == 0, said
    assert "steps 12 to 12 repeated: 1 compared" in said
    equal = re.search("equal, bit by bit: (.*)", said)
    assert equal and {"grad_norm", "loss", "loss_mae", "lr"} <= {*equal[1].split(", ")}
    step = json.loads((tmp_path / "step.json").read_text())
    assert len(step["images"]) == 16 and step["images"][0] in said
    squares = sum(float(norm) ** 2 for norm in step["gradients"].values())
    assert math.sqrt(squares) == pytest.approx(float(step["values"]["grad_norm"]), rel=1e-6)
    assert {"encoder.blocks.3", "encoder.norm", "head.predictor.0"} <= step["gradients"].keys()


def test_without_a_state_before_it_from_the_start(run, replay):
    """And a log that says anything else, however it came to do so, is found out."""
    log = run / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    for number in (0, 1):
        entry = json.loads(lines[number])
        timing = entry.pop("timing")
        del timing["crc32"]
        if number:
            entry["loss"] = math.nextafter(entry["loss"], 9.0)
        else:  # trained with an online evaluation, which may change at any time
            entry["online_knn"] = 42.0
        lines[number] = line_of(entry.pop("step"), entry, timing)
    lines[2] = lines[2].replace('"grad_norm": ', '"grad_norm": 1')  # damaged, as its checksum says
    log.write_text("".join(lines))
    status, said = replay(run, 3, "--devices", "2")
    assert status == 2 and "the start, as no state before it is kept" in said
    assert f"step 2: loss {entry['loss']!r} in the log" in said
    assert "step 2 differs from the log" in said
    assert "not in the log: step 3" in said and "2 compared" in said


def test_what_could_only_differ_is_refused(run, replay):
    status, said = replay(run, 12)
    assert status == 2 and "computed on 2 ranks" in said
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("seed: 1", "seed: 2"))
    status, said = replay(run, 12, "--devices", "2")
    assert status == 2 and "not what the run began with" in said


def test_a_step_that_was_not_finite_is_looked_at(shards, replay, tmp_path):
    folder = write(tmp_path, "steep", shards, contrastive_weight=1e37)
    job = {"function": train, "config": str(folder / "config.yaml")}
    assert "shows what it was" in ranks.run(1, job, log=tmp_path / "log")
    status, said = replay(folder, 1)
    assert status == 0 and re.search("ends the training: gradient norm (inf|nan) in step 1", said)
    assert "not finite): " in said and "not in the log: step 1" in said


@pytest.mark.parametrize(
    "name, part",
    [
        ("encoder.blocks.11.attn.qkv.weight", "encoder.blocks.11"),
        ("encoder.cls_token", "encoder.cls_token"),
        ("head.projector.0.weight", "head.projector.0"),
    ],
)
def test_parts_of_a_module(name, part):
    assert part_of(name) == part
