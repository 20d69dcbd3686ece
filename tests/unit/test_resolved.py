"""Resolved files: what is written is read back, wherever the results are, and mistakes named."""

import os
import re
import shutil
from pathlib import Path

import pytest
from PIL import Image

from maect.cli import main
from maect.core.errors import UserError
from maect.core.files import write_record
from maect.data.index import open_index
from maect.data.shards import shard
from maect.evaluate import EvaluationConfig, load_evaluation
from maect.experiment.load import load
from maect.experiment.resolve import resize, run_config
from maect.launch.owner import lock_folder
from maect.recipes import OnlineEvaluation, load_encoder
from maect.records import RunRecord
from maect.stages import load_recipe
from maect.stages.run import RunConfig, resize_of, train
from maect.tools.train import _as_saved


def tuning(root: Path) -> RunConfig:
    return RunConfig(
        run="ct", stage="tune", recipe="ct_min", size="tiny", seed=1,
        shards=root / "shards/d/train", source=root / "runs/head", encoder=load_encoder("tiny"),
        settings=load_recipe("ct_min", "tiny", {"head": {"head_weight_decay": 1e-5}}),
    )  # fmt: skip


def probe(root: Path) -> EvaluationConfig:
    protocol, settings = load_evaluation(
        "linear_probe_concat", "tiny", {"epochs": 3, "warmup_epochs": 1}
    )
    inputs = {"train": root / "shards/d/train", "many": [root / "runs/a", root / "runs/b"]}
    return EvaluationConfig(
        evaluation="linear_probe_concat", protocol=protocol, settings=settings,
        run=root / "runs/ct", inputs=inputs, resize=16,
    )  # fmt: skip


def written(root: Path) -> tuple[Path, Path]:
    run, evaluation = root / "runs/ct/config.yaml", root / "evaluations/ct/linear_probe_concat.yaml"
    tuning(root).write(run)
    probe(root).write(evaluation)
    return run, evaluation


def test_what_is_written_is_read_back_also_where_it_was_moved(tmp_path, monkeypatch):
    """Paths are those of the file; weights that lie elsewhere stay where they are."""
    root, weights = tmp_path / "here", tmp_path / "weights/mae.pth"
    run, evaluation = written(root)
    assert EvaluationConfig.read(evaluation) == probe(root)
    monkeypatch.chdir(run.parent)
    assert RunConfig.read("config.yaml") == tuning(root)
    config = tuning(root).model_copy(update={"weights": weights})
    config.write(root / "runs/imported/config.yaml")
    assert config.digest == tuning(root).digest
    root = shutil.move(root, tmp_path / "there")
    assert RunConfig.read(root / "runs/ct/config.yaml") == tuning(root)
    assert EvaluationConfig.read(root / evaluation.relative_to(tmp_path / "here")) == probe(root)
    assert RunConfig.read(root / "runs/imported/config.yaml").weights == weights


@pytest.mark.parametrize(
    ("lookup", "stop", "found"),
    [("topk", None, True), ("none", None, False), ("none", True, True), ("topk", False, False)],
)
def test_what_the_positive_passes_on_is_read_back(tmp_path, lookup, stop, found):
    """The default depends on the lookup."""
    head = {"lookup": lookup} | ({} if stop is None else {"stop_gradient": stop})
    settings = load_recipe("ct_min", "tiny", {"head": head})
    config = tuning(tmp_path).model_copy(update={"settings": settings})
    config.write(tmp_path / "runs/ct/config.yaml")
    read = RunConfig.read(tmp_path / "runs/ct/config.yaml")
    assert read == config and read.digest == config.digest
    assert settings.head.stop_gradient is found


@pytest.mark.parametrize("least, most, given, expected", [
    (1, 16, 4, 8), (8, 8, 8, 8), (1, 4, 4, None), (16, 16, 16, None),
])  # fmt: skip
def test_a_run_goes_on_with_as_many_ranks_as_saved_its_state(
    tmp_path, least, most, given, expected
):
    """Refused before a job waits in the queue, where the nodes of a profile do not allow it."""
    write_record(tmp_path / "state/step-000000005/state.json", {"step": 5, "world_size": 32})
    allowed = f"{least}..{most}" if most > least else str(most)
    if expected is not None:
        assert _as_saved(tmp_path, given, 4, allowed) == expected
        return
    with pytest.raises(UserError, match=rf"from 32 ranks to {4 * given}, .*--convert-world-size"):
        _as_saved(tmp_path, given, 4, allowed)


def colours(folder: Path, count: int) -> Path:
    """Shards of so many images without labels."""
    (folder / "images").mkdir()
    for number in range(count):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"images/{number}.png")
    shard(folder / "images", folder / "shards", "unlabelled", 1)
    return folder / "shards"


def test_an_oracle_needs_labels(tmp_path):
    index = open_index(colours(tmp_path, 64))
    changes = {"batch_size": 16, "head": {"queue_size": 64, "topk": 1}}
    assert load_recipe("ct_min", "tiny", changes).training_images(index).n == 64
    changes["head"]["lookup"] = "oracle"
    with pytest.raises(UserError, match="an oracle needs labels; some images have none"):
        load_recipe("ct_min", "tiny", changes).training_images(index)


def test_online_evaluation_and_resizing_are_in_the_file_and_no_part_of_the_run(tmp_path):
    plain, run = tuning(tmp_path), tmp_path / "runs/ct/config.yaml"
    plain.write(run)
    assert resize_of(run.parent) is None is resize_of(tmp_path / "runs/imported")
    online = OnlineEvaluation(every_epochs=2, images=100)
    config = plain.model_copy(update={"online_evaluation": online, "resize": 20})
    config.write(run)
    assert RunConfig.read(run) == config and config.digest == plain.digest
    assert resize_of(run.parent) == 20
    digits = load("digits")
    name = next(iter(digits.runs))
    assert run_config(digits, name).resize == 16 == resize(digits, name, digits.default_dataset)


def test_written_only_if_changed(tmp_path):
    run, _ = written(tmp_path)
    os.utime(run, (1, 1))
    assert not tuning(tmp_path).write(run)
    assert run.stat().st_mtime == 1
    assert tuning(tmp_path).model_copy(update={"seed": 2}).write(run)
    assert RunConfig.read(run).seed == 2


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ("settings.head.topkk=1", "settings: unknown key 'head.topkk'; did you mean 'topk'?"),
        ("sead=1", "unknown key 'sead'; did you mean 'seed'?"),
        ("stage=tun", "stage: unknown 'tun'; did you mean 'tune'?"),
        ("settings.epochs=-1", "settings: epochs: Input should be greater than 0 (given: -1)"),
        ("settings.head.topk=2000", "topk 2000 is larger than queue_size 1024"),
        ("settings.frozen_blocks=4", "config.yaml: settings: frozen_blocks 4 leaves none"),
        ("online_evaluation.every_epochs=0", "online_evaluation.every_epochs: "),
        ("seed", "seed: write KEY=VALUE"),
        ("seed.a=1", "seed.a=1: 'seed' has no keys of its own"),
        ("seed=[", "not valid YAML"),
        (b"run: [unclosed", "config.yaml: not "),
        (b"\xff\xfe\x00", "config.yaml: not "),
        (None, "no such file; `maect resolve EXPERIMENT` writes it"),
    ],
)
def test_mistakes_are_named(tmp_path, change, fault):
    """In changes by hand, in the file itself, or where it is gone."""
    run, _ = written(tmp_path)
    if change is None:
        run.unlink()
    elif isinstance(change, bytes):
        run.write_bytes(change)
    with pytest.raises(UserError) as error:
        RunConfig.read(run, [change] if isinstance(change, str) else ())
    assert fault in str(error.value) and "\n" not in str(error.value)
    assert str(run) in str(error.value) or str(change) in str(error.value)


def test_changes_by_hand(tmp_path):
    run, evaluation = written(tmp_path)
    changed = RunConfig.read(run, ["settings.head.topk=7", "seed=3", "shards=../../other"])
    assert changed.settings.head.topk == 7 and changed.seed == 3
    assert changed.shards == tmp_path / "other"
    for change, said in (
        ("protocol=linear_prob", r"concat\.yaml: protocol: unknown 'linear_prob'; did you"),
        ("settings.epoch=1", r"settings: unknown key 'epoch'; did you mean 'epochs'"),
    ):
        with pytest.raises(UserError, match=said):
            EvaluationConfig.read(evaluation, [change])


def test_a_job_is_what_was_submitted(tmp_path):
    """A job that waits for days must not take a recipe that was edited meanwhile."""
    run, _ = written(tmp_path)
    submitted = RunConfig.read(run)
    RunConfig.read(run, ["settings.epochs=3"]).write(run)
    with pytest.raises(UserError, match=r"config\.yaml: changed since this job was submitted"):
        train(None, config=run, digest=submitted.digest)  # type: ignore[arg-type]
    assert RunConfig.read(run, submitted=RunConfig.read(run).digest).settings.epochs == 3


def test_settings_stay_while_a_pipeline_runs(tmp_path, capsys):
    words = ["resolve", "digits", "--config", f"storage={tmp_path}"]
    with lock_folder(tmp_path):
        assert main(words) == 2
    assert "belongs to" in capsys.readouterr().err and not [*tmp_path.glob("*/*/*.yaml")]
    assert main(words) == 0 and [*tmp_path.glob("runs/*/config.yaml")]


def test_what_a_command_refuses(tmp_path, capsys):
    """Another file beside a run, other inputs that are not named, a file of another format."""
    run, probed = written(tmp_path)
    out = tmp_path / "evaluations/ct/other.yaml"
    for words, said in (
        (["train", run, "settings.epochs=3", "--out", run.with_name("other.yaml")],
         "other.yaml: its folder belongs to the run in config.yaml"),
        (["evaluate", probed, "settings.test_split=train", "--out", out],
         "settings.test_split=train asks for other inputs"),
    ):  # fmt: skip
        assert main([*map(str, words)]) == 2
        assert said in capsys.readouterr().err and not words[-1].exists()
    assert main(["train", str(run), "settings.epochs=3"]) == 2
    assert "makes this another job; name its file with --out" in capsys.readouterr().err
    assert run.read_text().splitlines()[1] == "format: 1"
    edit(run, "format: 1", "format: 2")
    assert main(["train", str(run)]) == 2
    assert f"{run}: format 2, and this version of maect reads 1: use" in capsys.readouterr().err


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


ENCODER = load_encoder("tiny")


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("frozen_blocks: 2", "frozen_blocks: 4", "settings: frozen_blocks 4 leaves none of the 4"),
        ("depth: 4", "depth: 5", "source: its encoder differs from that of head"),
        ("embedding: 64", "embedding: 32", "source: head.embedding 32 differs from 64 of head"),
        ("source: ../head\n", "", "stage tune needs `source`: a run to start from"),
        ("source: ../head", "source: ../ct2", "import, but ct2 is a tune run"),
    ],
)  # fmt: skip
def test_a_file_that_was_edited_is_checked_as_in_an_experiment(tmp_path, old, new, fault, capsys):
    run, _ = written(tmp_path)
    stages = {"head": load_recipe("head_min", "tiny"), "ct2": tuning(tmp_path).settings}
    for name, stage in stages.items():
        record = {"run": name, "stage": stage.name, "settings": stage.model_dump(mode="json")}
        record |= {"encoder": ENCODER.model_dump(mode="json")}
        write_record(RunRecord.path(tmp_path / "runs" / name), record)
    edit(run, old, new)
    assert main(["train", str(run)]) == 2
    error = capsys.readouterr().err
    assert f"{run}: " in error and fault in error


def test_a_batch_that_is_larger_than_the_data_is_refused_before_a_job_is_queued(tmp_path, capsys):
    settings, config = load_recipe("mae", "tiny"), tmp_path / "runs/mae/config.yaml"
    about = {"run": "mae", "stage": "pretrain", "recipe": "mae", "size": "tiny"}
    about |= {"shards": colours(tmp_path, 5), "encoder": ENCODER, "settings": settings}
    RunConfig(**about).write(config)
    assert main(["train", str(config)]) == 2
    fault = f"batch_size {settings.batch_size} is larger than its 5 images"
    assert fault in capsys.readouterr().err
    assert not config.with_name("job.json").exists()


def test_an_experiments_online_evaluation_is_that_of_its_trainings(tmp_path):
    text = Path("workflow/experiments/digits.yaml").read_text()
    text = re.sub(r"(?m)^online_evaluation:.*\n", "", text)
    configs = []
    for more in ("", "online_evaluation: {every_epochs: 3}\n"):
        (tmp_path / "mine.yaml").write_text(text + more)
        configs.append(run_config(load(tmp_path / "mine.yaml"), "mae_tiny"))
    plain, evaluated = configs
    assert plain.online_evaluation is None and plain.digest == evaluated.digest
    assert evaluated.online_evaluation == OnlineEvaluation(every_epochs=3)
