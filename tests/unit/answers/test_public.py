"""Public encoders by a short name, and an `embed` that goes on after a break."""

import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maect import load
from maect.answers import public, vectors
from maect.answers.public import PUBLIC
from maect.answers.vectors import Vectors, embed_into
from maect.cli import main
from maect.core.errors import UserError
from maect.core.files import read_record, sha256_file
from maect.data.decode import UnreadableError
from maect.data.retrieve import CATALOGUE
from maect.recipes.timm_encoders import find_timm
from maect.records import RunRecord

from .conftest import photograph


def test_every_name_can_be_retrieved_and_is_known_to_timm():
    assert {"dinov2_small", "dinov3_base", "siglip2_base", "mae_base", "ibot_large"} <= {*PUBLIC}
    for name, one in PUBLIC.items():
        (remote,) = CATALOGUE[name]
        assert remote.url.startswith("https://")
        if one.timm is not None:
            find_timm(one.timm).encoder(one.image_size)


def test_a_name_is_imported_once_and_used_everywhere(tiny, photographs, capsys):
    images = Path(shutil.copytree(photographs, "birds"))
    assert main(["embed", tiny, str(images), "--kind", "folder"]) == 0
    assert "birds.parquet: 30 images, 0 left out; 192 numbers each" in capsys.readouterr().out
    record = read_record(RunRecord.path(Path("weights/tiny")))
    assert record["weights"]["sha256"] == sha256_file(Path("weights/tiny.safetensors"))
    Path("weights/tiny.safetensors").unlink()  # no longer needed
    found = Vectors.read(Path("birds.parquet"))
    assert found.about["run"] == tiny and found.about["image_size"] == 64
    direct = load(tiny).encode([images / name for name in found.files])
    assert np.array_equal(direct, found.values)

    first = str(images / found.files[0])
    assert main(["search", tiny, "birds.parquet", first, "--count", "1"]) == 0
    similarity, _, name = capsys.readouterr().out.strip().partition("  ")
    # Random weights tell hardly anything apart.
    assert float(similarity) > 0.9999 and name in found.files
    labelled = ["--labelled", "birds.parquet", "--classifier", "c.safetensors"]
    assert main(["predict", tiny, str(images), "--out", "c.csv", *labelled]) == 0
    assert main(["cluster", "birds.parquet", "--out", "groups", "--groups", "3"]) == 0


def test_what_to_download_is_said_in_one_line(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv(public.VARIABLE, str(tmp_path / "elsewhere"))
    with pytest.raises(UserError) as told:
        load(tiny)
    assert "run `maect retrieve tiny " in str(told.value) and "\n" not in str(told.value)
    assert "https://example.org/x" in str(told.value)
    with pytest.raises(UserError, match=r"no public encoder; did you mean 'dinov2_small'\?"):
        load("dinov2_smal")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of eight images."""
    monkeypatch.setattr(vectors, "PART", 8)


def counting(run: Path, most: int = 10**9, **options: Any) -> Any:
    """Load an encoder that counts the images `seen`, and is interrupted by more than `most`."""
    encoder: Any = load(run, **options)
    inner, encoder.seen = encoder.readable, 0

    def readable(read: Any, n: int, *args: Any, **options: Any) -> Any:
        encoder.seen += n
        if encoder.seen > most:
            raise KeyboardInterrupt
        return inner(read, n, *args, **options)

    encoder.readable = readable
    return encoder


@pytest.mark.usefixtures("small_parts")
def test_an_interrupted_embed_goes_on(run, photographs, tmp_path):
    whole, out = tmp_path / "whole.parquet", tmp_path / "x.parquet"
    embed_into(whole, load(run), photographs)
    with pytest.raises(KeyboardInterrupt):
        embed_into(out, counting(run, most=20), photographs)
    assert not out.exists()
    encoder = counting(run)
    made = embed_into(out, encoder, photographs)
    assert (encoder.seen, made.images, made.kept) == (30 - 16, 30, 0)
    assert out.read_bytes() == whole.read_bytes()
    assert not out.with_name(f".{out.name}.parts").exists()


@pytest.mark.usefixtures("small_parts")
def test_only_new_and_changed_images_are_computed(run, photographs, tmp_path):
    images, out = shutil.copytree(photographs, tmp_path / "images"), tmp_path / "x.parquet"
    files = sorted(images.rglob("No*"))
    for file in files[:5]:
        file.unlink()
    embed_into(out, load(run), images)

    for file in files[:5]:
        shutil.copy(photographs / file.relative_to(images), file)
    shutil.copy(files[5], tmp_path / "other")  # another picture, of the same time
    shutil.copystat(files[6], tmp_path / "other")
    (tmp_path / "other").replace(files[6])
    files[7].unlink()
    files[8].write_text("broken")
    encoder = counting(run)
    made = embed_into(out, encoder, images)
    assert (encoder.seen, made.images, made.kept, len(made.left_out)) == (5 + 2, 28, 22, 1)
    whole = tmp_path / "whole.parquet"
    left_out = embed_into(whole, load(run), images).left_out
    expected, found = Vectors.read(whole), Vectors.read(out)
    assert found.files == expected.files and np.array_equal(found.values, expected.values)
    assert made.left_out == left_out and found.about == expected.about
    encoder.seen = 0
    assert embed_into(out, encoder, images).kept == 28 and encoder.seen == 1  # the broken one

    encoder = counting(run, resize=24)
    with pytest.raises(UserError, match=r"x\.parquet: made with resize 20, .* 24: .*--afresh"):
        embed_into(out, encoder, images)
    assert encoder.seen == 0
    embed_into(out, encoder, images, afresh=True)
    assert encoder.seen == 29  # otherwise resized: all of them


def test_an_image_that_becomes_readable_is_computed(run, tmp_path, monkeypatch):
    """As the message asks: `pip install pydicom`, and the same command again."""
    out, encoder = tmp_path / "x.parquet", load(run)
    (tmp_path / "images").mkdir()
    photograph(0, 30, 30).save(tmp_path / "images/a.png")

    def without_a_package(*image: Any) -> Any:
        raise UnreadableError("DICOM needs the package pydicom: uv pip install pydicom")

    with monkeypatch.context() as patched:
        patched.setattr("maect.answers.encoder.decode", without_a_package)
        for _ in range(2):
            with pytest.raises(UserError, match=r"none of 1 images .*uv pip install pydicom"):
                embed_into(out, encoder, tmp_path / "images")
    assert embed_into(out, encoder, tmp_path / "images").images == 1


def test_images_of_an_archive_are_not_those_that_lie_beside_it(run, tmp_path):
    archive, out = tmp_path / "birds.zip", tmp_path / "x.parquet"
    for name in ("1.png", "2.png"):
        photograph(int(name[0]), 30, 30).save(tmp_path / name)
    for first in ("1.png", "2.png"):
        with zipfile.ZipFile(archive, "w") as zipped:
            zipped.write(tmp_path / first, "1.png")
            zipped.write(tmp_path / "2.png", "2.png")
        assert embed_into(out, load(run), archive).kept == 0
    one, two = Vectors.read(out).values
    assert np.array_equal(one, two)


def test_a_table_that_is_read_is_not_written(run, photographs, tmp_path, capsys):
    images, kept = shutil.copytree(photographs, tmp_path / "images"), tmp_path / "kept.safetensors"
    table, labelled, out = images / "mine.csv", tmp_path / "l.parquet", tmp_path / "p.csv"
    rows = [f"{p.relative_to(images)},{p.parent.name}\n" for p in sorted(images.rglob("No*"))]
    table.write_text("".join(["path,label\n", *rows]))
    assert main(["embed", str(run), str(table), "--out", str(labelled)]) == 0
    fit = ["predict", str(run), str(table), "--labelled", str(labelled), "--classifier"]
    shutil.copy(run / "encoder.safetensors", kept)
    before = [path.read_bytes() for path in (table, labelled, kept)]
    for classifier, written, fault in (
        (tmp_path / "c.safetensors", table, "mine.csv: is read"),
        (labelled, out, "was not fitted by --labelled"),
        (kept, out, "was not fitted by --labelled"),
    ):
        assert main([*fit, str(classifier), "--out", str(written)]) == 2
        assert fault in capsys.readouterr().err
        assert [path.read_bytes() for path in (table, labelled, kept)] == before
    kept.unlink()
    for _ in range(2):  # its own is made again
        assert main([*fit, str(kept), "--out", str(out)]) == 0
    assert not (tmp_path / ".p.csv.parts").exists()


@pytest.mark.usefixtures("small_parts")
def test_an_interrupted_predict_goes_on(run, predicted, monkeypatch):
    predict, _, out = predicted
    whole = out.read_bytes()
    out.unlink()
    for most, status in ((20, 130), (14, 0)):
        encoder = counting(run, most)
        with monkeypatch.context() as patch:
            patch.setattr("maect.load", lambda *_, encoder=encoder, **__: encoder)
            assert main(predict) == status
    assert out.read_bytes() == whole
