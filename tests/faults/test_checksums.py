"""What was made of something else, or has changed since, is not taken for what is asked for."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from maect.answers.vectors import Vectors
from maect.cli import main
from maect.core.context import Context
from maect.core.errors import UserError
from maect.core.files import read_record, sha256_file, write_record
from maect.data.shards import shard
from maect.evaluate.evaluation import Completion, evaluate
from maect.records import ImportedFile, RunRecord, entries
from maect.stages.imported import is_another_file

RUN = "results/runs/ct_tiny"


def exchange(one: Path, other: Path) -> None:
    """Give each the name of the other."""
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def train_otherwise(run: Path, other: str = "mae_tiny") -> None:
    """Put another run's encoder into a finished run, as training with other settings would."""
    shutil.copy(run.parent / other / "encoder.safetensors", run)
    record = read_record(RunRecord.path(run))
    record["sha256"]["encoder.safetensors"] = sha256_file(run / "encoder.safetensors")
    write_record(RunRecord.path(run), record)


def test_a_model_card_has_no_numbers_of_another_encoder(pipeline, tmp_path, capsys):
    """`maect publish` after the encoder was replaced: no number of the old one."""
    run = pipeline / RUN
    words = ["--repository", "me/digits"]
    assert main(["publish", str(run), str(tmp_path / "before"), *words]) == 0
    assert "| k-NN accuracy (%) |" in (tmp_path / "before/README.md").read_text()
    train_otherwise(run)
    capsys.readouterr()
    assert main(["publish", str(run), str(tmp_path / "after"), *words]) == 0
    card = (tmp_path / "after/README.md").read_text()
    assert "| k-NN accuracy (%) |" not in card and "model-index" not in card
    assert "knn.json: of an encoder that ct_tiny no longer has" in capsys.readouterr().err


@pytest.mark.parametrize("shards", [True, False])
def test_features_of_the_splits_exchanged(pipeline, shards):
    """Features of `train` and `val` under each other's names, with and without the shards."""
    features = pipeline / "results/features/ct_tiny"
    exchange(features / "digits-train.safetensors", features / "digits-val.safetensors")
    if not shards:
        shutil.rmtree(pipeline / "results/shards")
    config = pipeline / "results/evaluations/ct_tiny/knn.yaml"
    config.with_suffix(".json").unlink()
    with pytest.raises(UserError, match=r"digits-\w+\.safetensors: made of the split (val|train)"):
        evaluate(Context(cpus=2), config=config)
    with pytest.raises(UserError, match="made of the split"):
        Completion(config)
    assert not config.with_suffix(".json").exists()


def test_features_of_shards_that_were_made_again(pipeline):
    """The same split of other images, where no time of a file tells."""
    shards = pipeline / "results/shards/digits/val"
    made = (shards / "index.json").stat()
    next((pipeline / "images/val/0").glob("*.png")).unlink()
    shutil.rmtree(shards)
    shard(pipeline / "images/val", shards, "folder", 1)
    os.utime(shards / "index.json", ns=(made.st_atime_ns, made.st_mtime_ns))
    config = pipeline / "results/evaluations/ct_tiny/knn.yaml"
    with pytest.raises(UserError, match=r"digits-val\.safetensors: made of other images than"):
        evaluate(Context(cpus=2), config=config)


def test_a_log_that_was_cut_between_two_lines(pipeline):
    """A finished run's log whose last lines are gone without a trace."""
    log, sha256 = pipeline / RUN / "metrics.jsonl", RunRecord.of(pipeline / RUN).log_sha256
    assert sha256 is not None and len(entries(log, sha256=sha256)) > 4
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:-2]))
    with pytest.raises(UserError, match=r"metrics\.jsonl: damaged .*; put it back from a copy"):
        entries(log, sha256=sha256)
    log.unlink()
    assert entries(log, sha256=sha256) == []


def embedded(pipeline: Path, name: str, *words: str) -> Path:
    """Vectors of the images of `val` with their classes, by the run's encoder."""
    out = pipeline / name
    given = [str(pipeline / RUN), str(pipeline / "images/val"), "--out", str(out)]
    assert main(["embed", *given, "--kind", "folder", *words]) == 0
    return out


def test_vectors_of_another_encoder(pipeline, capsys):
    """Vectors of before the encoder was replaced: not searched, not added to, fit no classifier."""
    vectors, images = embedded(pipeline, "vectors.parquet"), pipeline / "images/val"
    before = Vectors.read(vectors)
    train_otherwise(pipeline / RUN)
    query = str(next(images.rglob("*.png")))
    assert main(["search", str(pipeline / RUN), str(vectors), query]) == 2
    assert "made with another encoder" in capsys.readouterr().err
    words = ["--labelled", str(vectors), "--classifier", str(pipeline / "c.safetensors")]
    out = ["--out", str(pipeline / "c.csv")]
    assert main(["predict", str(pipeline / RUN), str(images), *words, *out]) == 2
    assert "the vectors of another encoder" in capsys.readouterr().err
    assert main(["embed", str(pipeline / RUN), str(images), "--out", str(vectors)]) == 2
    assert "or replace it with --afresh" in capsys.readouterr().err
    vectors.unlink()
    embedded(pipeline, "vectors.parquet")
    assert not np.allclose(Vectors.read(vectors).values, before.values)


def test_weights_that_were_replaced_are_imported_again(tmp_path):
    """Another file under the name of the one that was imported, of its size and an old time."""
    weights = tmp_path / "w.pth"
    weights.write_bytes(b"first")
    found = weights.stat()
    noted = ImportedFile(
        file="w.pth", sha256=sha256_file(weights), size=found.st_size,
        modified=found.st_mtime_ns, layout="mae", left_out={},
    )  # fmt: skip
    assert not is_another_file(weights, noted)
    weights.touch()
    assert not is_another_file(weights, noted)
    shutil.copy(weights, tmp_path / "moved.pth")
    assert not is_another_file(tmp_path / "moved.pth", noted)
    weights.write_bytes(b"other")
    os.utime(weights, ns=(1, 1))
    assert is_another_file(weights, noted)
    weights.unlink()
    assert not is_another_file(weights, noted)
