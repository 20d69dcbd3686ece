"""What was made of something else, or has changed since, is not taken for what is asked for."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import maect
from maect.answers.vectors import Vectors
from maect.cli import main
from maect.core.arrays import seek_kept, write_kept
from maect.core.context import Context
from maect.core.entries import finished_entries
from maect.core.errors import UserError
from maect.core.files import read_record, read_table_text, sha256_file, write_record
from maect.data.changes import changes, may_differ
from maect.data.index import LABEL, open_index
from maect.data.shards import shard
from maect.evaluate import EvaluationConfig
from maect.evaluate.evaluation import Completion, evaluate
from maect.evaluate.features import extract
from maect.evaluate.training_free import Score
from maect.records import ImportedFile, RunRecord
from maect.stages.imported import is_another_file
from maect.tools.compare import _read_scores, _write_scores
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
    record = read_record(RunRecord.path(run))
    record["sha256"]["encoder.safetensors"] = sha256_file(run / "encoder.safetensors")
    write_record(RunRecord.path(run), record)


def test_a_model_card_has_no_numbers_of_another_encoder(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
        evaluate(Context(cpus=2), config=config)
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
        evaluate(Context(cpus=2), config=config)


def test_features_given_by_hand_are_the_users_choice(pipeline: Path, tmp_path: Path) -> None:
    """Other features as `inputs.test`, from a folder that is no results folder."""
    told = pipeline / "results/evaluations/ct_tiny/knn.yaml"
    other = tmp_path / "other.safetensors"
    shutil.copy(pipeline / "results/features/ct_tiny/digits-train.safetensors", other)
    config = EvaluationConfig.read(told, [f"inputs.test={other}"])
    config.write(tmp_path / "knn.yaml")
    assert evaluate(Context(cpus=2), config=tmp_path / "knn.yaml") == "done"


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
        extract(Context(cpus=2), encoder=encoder, shards=shards, out=tmp_path / "x.safetensors")
    monkeypatch.setattr(trainer, "start", lambda context: None)
    from maect.stages.run import RunConfig

    told = RunConfig.read(pipeline / "results/runs/mae_tiny/config.yaml")
    stage, _, _ = told.training("mae_tiny")
    run = trainer.RunInputs(tmp_path / "run", shards, stage, told.encoder, told.seed)
    with pytest.raises(UserError, match=r"index\.npy: changed since it was written"):
        trainer.train(Context(cpus=2), run)
    assert not (tmp_path / "run").exists()


def test_a_log_that_was_cut_between_two_lines(
    pipeline: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A finished run's log whose last lines are gone without a trace."""
    run = pipeline / RUN
    epochs, log = RunRecord.of(run).logged_epochs, run / "metrics.jsonl"
    count = len(finished_entries(run, epochs))
    assert count > 4 and not caplog.text
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:-2]))
    assert len(finished_entries(run, epochs)) == count - 2
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


def embedded(pipeline: Path, name: str, *words: str) -> Path:
    """Vectors of the images of `val` with their classes, by the run's encoder."""
    out = pipeline / name
    given = [str(pipeline / RUN), str(pipeline / "images/val"), "--out", str(out)]
    assert main(["embed", *given, "--kind", "folder", *words]) == 0
    return out


def flip(path: Path, at: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_vectors_that_were_damaged(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flipped bit in the numbers of `maect embed`: no search, no classes, nothing added."""
    vectors, images = embedded(pipeline, "vectors.parquet"), pipeline / "images/val"
    right = Vectors.read(vectors)
    flip(vectors, vectors.read_bytes().index(right.values[3].tobytes()[:16]))
    query = str(next(images.rglob("*.png")))
    for words in (
        ["search", str(pipeline / RUN), str(vectors), query],
        ["cluster", str(vectors), "--out", str(pipeline / "clusters")],
        ["predict", str(pipeline / RUN), str(images), "--labelled", str(vectors),
         "--classifier", str(pipeline / "c.safetensors"), "--out", str(pipeline / "c.csv")],
        ["embed", str(pipeline / RUN), str(images), "--out", str(vectors)],
    ):  # fmt: skip
        capsys.readouterr()
        assert main(words) == 2, words
        assert "vectors.parquet: damaged (its checksum differs)" in capsys.readouterr().err


def test_vectors_of_another_encoder(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_classifier_that_was_damaged(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flipped bit of a classifier that `maect predict` kept."""
    vectors, kept = embedded(pipeline, "vectors.parquet"), pipeline / "c.safetensors"
    words = [
        "predict",
        str(pipeline / RUN),
        str(pipeline / "images/val"),
        "--classifier",
        str(kept),
    ]
    out = ["--out", str(pipeline / "c.csv")]
    assert main([*words, "--labelled", str(vectors), *out]) == 0
    assert main([*words, *out]) == 0
    flip(kept, -5)
    assert main([*words, *out]) == 2
    assert "c.safetensors: damaged (its checksum differs)" in capsys.readouterr().err


def test_kept_parts_and_scores_under_each_others_names(tmp_path: Path) -> None:
    """Parts of features, and scores of `maect compare`: a damaged or renamed one is made again."""
    one, other = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    for number, path in enumerate((one, other)):
        write_kept(path, {"features": np.full((3, 4), number, np.float32)})
    part = seek_kept(one)
    assert part is not None and (part[0]["features"] == 0).all()
    exchange(one, other)
    assert seek_kept(one) is None is seek_kept(other)
    for number, path in enumerate((one, other)):
        _write_scores(path, {"knn": Score(np.array([50.0, number]), "k 1", (1.0, 2.0))})
    found = _read_scores(one)
    assert found is not None and found["knn"].per_image.tolist() == [50.0, 0.0]
    assert found["knn"].sets == (1.0, 2.0) and found["knn"].chosen == "k 1"
    exchange(one, other)
    assert _read_scores(one) is None is _read_scores(other)
    exchange(one, other)
    flip(one, -8)
    assert _read_scores(one) is None is not _read_scores(other)


def test_features_of_another_data_set(pipeline: Path) -> None:
    """Features of the same split of another data set, whose shards are not there."""
    features = pipeline / "results/features/ct_tiny"
    shutil.rmtree(pipeline / "results/shards")
    for split in ("train", "val"):
        (features / f"digits-{split}.safetensors").rename(features / f"other-{split}.safetensors")
    config = pipeline / "results/evaluations/ct_tiny/knn.yaml"
    text = config.read_text()
    assert "digits-val" in text
    config.write_text(text.replace("digits-", "other-"))
    with pytest.raises(UserError, match=r"other-\w+\.safetensors: made as digits-(train|val)"):
        evaluate(Context(cpus=2), config=config)


def test_features_of_an_encoder_whose_file_is_gone(pipeline: Path) -> None:
    """The run's record still promises another one."""
    train_otherwise(pipeline / RUN)
    (pipeline / RUN / "encoder.safetensors").unlink()
    config = pipeline / "results/evaluations/ct_tiny/knn.yaml"
    with pytest.raises(UserError, match="made from another encoder than"):
        evaluate(Context(cpus=2), config=config)


def test_an_exported_folder_that_was_edited(
    pipeline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights, their crop or their record: another digit is no other resize."""
    out, image = pipeline / "export", next((pipeline / "images/val").rglob("*.png"))
    assert main(["export", str(pipeline / RUN), str(out), "--resize", "20"]) == 0
    assert maect.load(out, "cpu").resize == 20
    text = (out / "config.json").read_text()
    for part, words in (("pretrained_cfg", "crop_pct edited"), ("maect", "damaged")):
        config = json.loads(text)
        config[part]["crop_pct"] = 1.0
        (out / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=words):
            maect.load(out, "cpu")
    (out / "config.json").write_text(text)
    flip(out / "model.safetensors", -4)
    assert main(["embed", str(out), str(image.parent), "--out", str(pipeline / "x.npy")]) == 2
    assert "model.safetensors: missing or damaged" in capsys.readouterr().err


def test_weights_that_were_replaced_are_imported_again(tmp_path: Path) -> None:
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
