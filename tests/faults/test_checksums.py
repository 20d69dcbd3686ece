"""What was made of something else, or has changed since, is not taken for what is asked for."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maect.cli import main
from maect.core.context import SingleRank
from maect.core.entries import finished_entries
from maect.core.errors import UserError
from maect.core.files import read_json, read_table_text, sha256_file, write_record
from maect.data.index import LABEL, open_index
from maect.data.shards import shard
from maect.data.sources.changes import changes, may_differ
from maect.evaluate import EvaluationConfig
from maect.evaluate.features import extract
from maect.evaluate.run import Completion, evaluate
from maect.train import trainer

RUN = "results/runs/ct_tiny"


def exchange(one: Path, other: Path) -> None:
    """Give each the name of the other."""
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def train_otherwise(run: Path) -> None:
    """Put another encoder into a finished run, as a training with other settings would."""
    shutil.copy(run.parent / "mae_tiny/encoder.safetensors", run)
    record = read_json(run / "run.json")
    record["sha256"]["encoder.safetensors"] = sha256_file(run / "encoder.safetensors")
    write_record(run / "run.json", record)


def test_a_model_card_has_no_numbers_of_another_encoder(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`maect publish` after the encoder was replaced: no number of the old one."""
    run = pipeline / RUN
    assert main(["publish", str(run), str(tmp_path / "before")]) == 0
    assert "| knn |" in (tmp_path / "before/README.md").read_text()
    train_otherwise(run)
    capsys.readouterr()
    assert main(["publish", str(run), str(tmp_path / "after")]) == 0
    card = (tmp_path / "after/README.md").read_text()
    assert "| knn |" not in card and "model-index" not in card
    assert "knn.json: of an encoder that ct_tiny no longer has" in capsys.readouterr().err


def test_duplicates_are_not_looked_for_by_the_features_of_another_encoder(
    pipeline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`maect audit` after the encoder was replaced."""
    train_otherwise(pipeline / RUN)
    assert main(["audit", str(pipeline / RUN)]) == 2
    assert "digits-train.safetensors: made with another encoder" in capsys.readouterr().err


def test_the_page_of_images_is_not_of_another_encoder(
    pipeline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`maect page images.yaml` after the encoder was replaced."""
    train_otherwise(pipeline / RUN)
    assert main(["page", str(pipeline / "results/images.yaml")]) == 2
    assert "explore.safetensors: not there, or of an encoder that" in capsys.readouterr().err


@pytest.mark.parametrize("shards", [True, False])
def test_features_of_the_splits_exchanged(pipeline: Path, shards: bool) -> None:
    """Features of `train` and `val` under each other's names, with and without the shards."""
    features = pipeline / "results/features/ct_tiny"
    exchange(features / "digits-train.safetensors", features / "digits-val.safetensors")
    if not shards:
        shutil.rmtree(pipeline / "results/shards")
    config = pipeline / "results/evaluations/ct_tiny/knn.yaml"
    config.with_suffix(".json").unlink()
    with pytest.raises(UserError, match=r"digits-\w+\.safetensors: made of the split (val|train)"):
        evaluate(SingleRank(cpus=2), config=config)
    with pytest.raises(UserError, match="made of the split"):
        Completion(config)
    assert not config.with_suffix(".json").exists()


def test_features_of_shards_that_were_made_again(pipeline: Path) -> None:
    """The same split of other images, where no time of a file tells."""
    shards = pipeline / "results/shards/digits/val"
    made = (shards / "index.json").stat()
    next((pipeline / "images/val/0").glob("*.png")).unlink()
    shutil.rmtree(shards)
    shard(pipeline / "images/val", shards, "folder", 1)
    os.utime(shards / "index.json", ns=(made.st_atime_ns, made.st_mtime_ns))
    config = pipeline / "results/evaluations/ct_tiny/knn.yaml"
    with pytest.raises(UserError, match=r"digits-val\.safetensors: made of other images than"):
        evaluate(SingleRank(cpus=2), config=config)


def test_features_given_by_hand_are_the_users_choice(pipeline: Path, tmp_path: Path) -> None:
    """Other features as `inputs.test`, from a folder that is no results folder."""
    told = pipeline / "results/evaluations/ct_tiny/knn.yaml"
    other = tmp_path / "other.safetensors"
    shutil.copy(pipeline / "results/features/ct_tiny/digits-train.safetensors", other)
    config = EvaluationConfig.read(told, [f"inputs.test={other}"])
    config.write(tmp_path / "knn.yaml")
    assert evaluate(SingleRank(cpus=2), config=tmp_path / "knn.yaml") == "done"


def test_a_flipped_label_of_a_large_index(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index too large to be hashed at every opening is, before training and for features."""
    shards = pipeline / "results/shards/digits/train"
    rows = np.load(shards / "index.npy", mmap_mode="r+")
    rows[5, LABEL] ^= 1
    rows.flush()
    with pytest.raises(UserError, match=r"index\.npy: changed since it was written"):
        open_index(shards)
    monkeypatch.setattr("maect.data.index._HASHED_ON_OPEN", 0)
    open_index(shards)
    encoder = pipeline / RUN / "encoder.safetensors"
    with pytest.raises(UserError, match=r"index\.npy: changed since it was written"):
        extract(SingleRank(cpus=2), encoder=encoder, shards=shards, out=tmp_path / "x.safetensors")
    monkeypatch.setattr(trainer, "start", lambda context: None)
    from maect.stages.run import RunConfig

    told = RunConfig.read(pipeline / "results/runs/mae_tiny/config.yaml")
    stage, _ = told.training("mae_tiny")
    run = trainer.Run(tmp_path / "run", shards, stage, told.encoder, told.seed)
    with pytest.raises(UserError, match=r"index\.npy: changed since it was written"):
        trainer.train(SingleRank(cpus=2), run)
    assert not (tmp_path / "run").exists()


def test_a_log_that_was_cut_between_two_lines(
    pipeline: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A finished run's log whose last lines are gone without a trace."""
    run = pipeline / RUN
    record, log = read_json(run / "run.json"), run / "metrics.jsonl"
    count = len(finished_entries(run, record))
    assert count > 4 and not caplog.text
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:-2]))
    assert len(finished_entries(run, record)) == count - 2
    assert f"{log}: the entries after epoch" in caplog.text


def test_a_table_that_was_edited(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another digit in a table; `sha256sum -c` knows its checksum, too."""
    table = pipeline / "results/tables/low_shot.csv"
    text = table.read_text()
    sums = table.with_name("low_shot.csv.sha256").read_text()
    assert sums == f"{sha256_file(table)}  low_shot.csv\n"
    table.write_text(text.replace("tiny", "base", 1))
    assert main(["show", str(pipeline / "results")]) == 2
    assert "low_shot.csv: damaged or edited" in capsys.readouterr().err
    table.with_name("low_shot.csv.sha256").unlink()  # as of a table made by hand
    assert "base" in read_table_text(table)


def bitmaps(folder: Path, count: int) -> list[Path]:
    """Images whose files have one size whatever is on them."""
    files = []
    for number in range(count):
        file = folder / "ab"[number % 2] / f"{number:02d}.bmp"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20), (number, 50, 90)).save(file)
        files.append(file)
    return files


def test_images_edited_in_place_that_keep_their_size(tmp_path: Path) -> None:
    """Three of twenty bitmaps overwritten with white, five only touched."""
    images, shards = tmp_path / "images", tmp_path / "shards/mine/train"
    files = bitmaps(images, 20)
    shard(images, shards, "folder", 2)
    assert changes(shards) is None and not may_differ(shards, images)
    for file in files[3:8]:
        file.touch()
    assert changes(shards) is None and may_differ(shards, images)
    for file in files[:3]:
        size = file.stat().st_size
        Image.new("RGB", (20, 20), "white").save(file)
        assert file.stat().st_size == size
    found = changes(shards)
    assert found is not None and str(found) == "3 files changed (a/00.bmp …)"
    assert [*found.edited] == ["a/00.bmp", "a/02.bmp", "b/01.bmp"]


def test_images_that_were_copied_are_the_same(tmp_path: Path) -> None:
    """A copy has other times, and is no change; nor is it where shards are not finished."""
    images, shards = tmp_path / "images", tmp_path / "shards/mine/train"
    bitmaps(images, 6)
    shard(images, shards, "folder", 1)
    for file in shutil.copytree(images, tmp_path / "copy").rglob("*.bmp"):
        os.utime(file, (1, 1))
    assert changes(shards, tmp_path / "copy") is None
    (shards / "index.json").unlink()
    next(images.glob("a/*")).touch()
    assert changes(shards) is None


def test_pairs_that_look_alike_have_a_checksum(
    pipeline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another number in `audit.json`."""
    audit = pipeline / "results/audit.json"
    value = json.loads(audit.read_text())
    value["pairs"][0]["similarity"] = 0.5
    audit.write_text(json.dumps(value))
    assert main(["page", str(pipeline / "results/images.yaml")]) == 2
    assert "audit.json: damaged" in capsys.readouterr().err
