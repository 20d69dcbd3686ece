"""`maect compare`: a table of encoders and folders, made from vectors that are kept."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

import maect
from maect.answers.encoder import ImageEncoder
from maect.cli import main
from maect.core.context import Context
from maect.data.shards import shard
from maect.evaluate.base import EvaluationJob
from maect.evaluate.knn import Sweep, sweep_settings
from maect.evaluate.protocols.stored_features import Knn
from maect.evaluate.store import open_features
from maect.tools import compare
from maect.tools.compare import GEOMETRY, measured, named, open_folder, vectors
from maect.tools.compare_page import frame_of

from .conftest import photograph, rewritten


@pytest.fixture(scope="module")
def other(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second run, whose encoder has other weights."""
    return rewritten(run, tmp_path_factory.mktemp("others") / "runs/mae", 0.5)


def test_encoders_and_folders_make_a_table(run, other, folders, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    words = ["compare", str(run), str(other), "--out", str(out), "--threads", "1", "--images"]
    words += [str(folders / name) for name in ("split", "whole", "flat")]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "split: ct: knn_held_out" in said and "flat: mae: rank_me" in said
    frame = pd.read_csv(out / "compare.csv")
    assert set(frame["encoder"]) == {"ct", "mae"}
    assert set(frame[frame["folder"] == "flat"]["measure"]) == {"rank_me", "uniformity"}
    split = frame[frame["folder"] == "split"]
    assert set(split["train_images"]) == {75} and set(split["test_images"]) == {46}
    assert {"knn", "shots_10", "logistic", "knn_best_on_test"} <= set(split["measure"])
    accuracies = split[~split["measure"].isin(["rank_me", "uniformity"])]
    assert accuracies.groupby("measure")["best"].any().all()
    assert set(frame[frame["folder"] == "whole"]["test_images"]) == {24}

    page = (out / "index.html").read_text(encoding="utf-8")
    assert not re.search(r'(src|href)="', page)
    assert "1 test image is also among the training images" in page
    best = split[split["measure"] == "knn_held_out"].sort_values("value").iloc[-1]
    assert f"On split, {best['encoder']} has the highest k-NN accuracy" in page
    assert "On flat" not in page
    shown = {f"{value:.1f}" for value in accuracies["value"]}
    assert shown <= set(re.findall(r"\d+\.\d", page))
    assert shown <= set(re.findall(r"\d+\.\d", (out / "compare.md").read_text()))

    # Nothing is encoded again, also if a folder is called otherwise now.
    before = (out / "compare.csv").read_bytes()
    monkeypatch.setattr(ImageEncoder, "readable", None)
    assert main(words) == 0
    assert (out / "compare.csv").read_bytes() == before
    moved = tmp_path / "moved"
    shutil.copytree(folders / "split", moved)
    assert main([*words[: words.index("--images") + 1], f"split={moved}"]) == 0
    again = pd.read_csv(out / "compare.csv")
    pd.testing.assert_frame_equal(again, split.reset_index(drop=True), check_dtype=False)


@pytest.mark.usefixtures("at_once")
def test_knn_is_that_of_the_protocol_on_the_same_images(run, tmp_path, monkeypatch):
    """Shards of an unchanged folder: the same held-out images, grid, k, T and accuracies."""
    images, rng = tmp_path / "images", np.random.default_rng(5)
    for number in range(260):
        # A third is in a class at random, so that no k and T get all images right.
        kind = "abc"[number % 3 if number % 9 < 6 else int(rng.integers(3))]
        file = images / ("train" if number < 245 else "val") / kind / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        photograph(number, 26, 24).save(file)
    inputs = {}
    for name, split in (("train", "train"), ("test", "val")):
        shards, inputs[name] = tmp_path / split, tmp_path / f"{split}.safetensors"
        shard(images / split, shards, "folder", 2, split=split)
        extract = ["features", str(run), "--shards", str(shards), "--out", str(inputs[name])]
        assert main(extract) == 0
    metrics = Knn().evaluate(Context(cpus=1), EvaluationJob(run, tmp_path / "knn.json", inputs))

    folder = open_folder("images", images)
    train = open_features(inputs["train"])
    names = [entry.name.removesuffix(".png") for entry in folder.parts[0].entries]
    checksums = dict(zip(names, folder.checksums, strict=False))
    assert [checksums[name] for name in train.names()] == train.contents()
    sweeps = []

    def recorded(*given: Any) -> Sweep:
        sweeps.append(sweep_settings(*given))
        return sweeps[-1]

    monkeypatch.setattr(compare, "sweep_settings", recorded)
    features = vectors(maect.load(run), folder, tmp_path / "kept")
    score = measured(folder, features, np.ones(260, bool), threads=1)
    plain = {(r["k"], r["temperature"]): r for r in metrics["sweep"] if not r["standardized"]}
    known = {pair: row["held_out"] for pair, row in plain.items() if row["held_out"] is not None}
    assert sweeps[0].held_out == known and len(set(known.values())) > 1
    assert sweeps[0].votes.keys() == plain.keys() and max(plain)[0] == 200
    k, temperature = max(known, key=known.__getitem__)
    assert score["knn_held_out"].chosen == f"k {k}, T {temperature:g}"
    for measure, metric in (("knn", "knn"), ("knn_held_out", "knn_held_out"),
                            ("knn_best_on_test", "knn_best")):  # fmt: skip
        assert score[measure].value == pytest.approx(metrics[metric], abs=1e-9)


def test_a_column_has_its_best_and_differences_to_the_first():
    """Of 200 images; one right image less than the best may be chance, 60 less are not."""
    rows = np.arange(200)
    scores = {
        (name, "birds"): {"knn": compare.Score(100.0 * (rows < right), sets=(1.0, 3.0))}
        for name, right in (("a", 100), ("b", 160), ("c", 159))
    }
    about: Any = dict.fromkeys("abc"), [SimpleNamespace(name="birds", classes=2)]
    frame = frame_of(compare.Matrix(*about, scores, {"birds": (9, 200)})).set_index("encoder")
    assert frame["best"].to_dict() == {"a": False, "b": True, "c": True}
    assert frame["difference"].tolist()[1:] == [30.0, 29.5]
    assert (frame["difference_low"][1:] > 20).all() and (frame["difference_high"][1:] < 40).all()
    assert (frame["low"] < frame["value"]).all() and (frame["value"] < frame["high"]).all()
    assert frame["deviation"].tolist() == [pytest.approx(2**0.5)] * 3


def test_each_measure_is_scored_by_its_own_predictions():
    """ReaL's labels are the images' own; length is not uniformity; unseen classes give no shots."""
    rng = np.random.default_rng(0)
    labels, tested = rng.integers(0, 3, 90), rng.integers(0, 3, 60)
    features = (np.eye(3, 5)[[*labels, *tested]] + rng.normal(size=(150, 5))).astype(np.float32)
    real: Any = SimpleNamespace(right=lambda predicted: predicted == tested)
    known = features[:90], labels, [*range(90)]
    found = compare.measure_with_labels(*known, features[90:], tested, real=real)
    assert "shots_1" not in compare.measure_with_labels(*known, features[90:], tested + 1)
    for name in ("knn", "logistic"):
        assert (found[f"{name}_real"].per_image == found[name].per_image).all()
    assert found["knn"].value != found["logistic"].value
    once, longer = (compare.measure_without_labels(scale * features) for scale in (1, 4))
    assert longer["uniformity"].value == pytest.approx(once["uniformity"].value, abs=1e-5)


def test_geometry_adds_corrections(run, other, folders, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["compare", str(run), str(other), "--images", str(folders / "split"), "--threads", "1"]
    assert main([*words, "--out", str(out), "--geometry"]) == 0
    frame = pd.read_csv(out / "compare.csv")
    more = frame[frame["measure"].isin(GEOMETRY)]
    assert set(GEOMETRY) == set(more["measure"])
    both = frame.pivot(index="encoder", columns="measure", values="value")
    for kept, raw in (("knn", "knn_raw"), ("shots_1", "shots_1_raw")):
        np.testing.assert_allclose(both[kept], both[raw], rtol=1e-12)
    assert more.groupby("measure")["best"].any().all()
    page = (out / "index.html").read_text(encoding="utf-8")
    assert "k-NN (k 10, T 0.07), features whitened with shrinkage 0.01" in page


def test_an_interrupted_comparison_resumes_and_a_damaged_file_is_made_again(
    run, other, folders, tmp_path, monkeypatch
):
    words = ["compare", str(run), str(other), "--images", str(folders / "split"), "--threads", "1"]
    assert main([*words, "--out", str(tmp_path / "whole")]) == 0
    encode, calls = ImageEncoder.readable, []

    def interrupted(self: ImageEncoder, *given, **more):  # type: ignore[no-untyped-def]
        calls.append(self.path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return encode(self, *given, **more)

    monkeypatch.setattr(ImageEncoder, "readable", interrupted)
    out = tmp_path / "out"
    assert main([*words, "--out", str(out)]) == 130
    (kept,) = (out / "vectors").iterdir()
    assert main([*words, "--out", str(out)]) == 0
    assert len(calls) == 2 + 3  # four parts in all, one of them kept
    whole = (tmp_path / "whole/compare.csv").read_bytes()
    assert (out / "compare.csv").read_bytes() == whole
    data = bytearray(kept.read_bytes())
    data[-1] ^= 1
    kept.write_bytes(data)
    assert main([*words, "--out", str(out)]) == 0
    assert len(calls) == 6 and (out / "compare.csv").read_bytes() == whole


def test_what_one_encoder_cannot_read_is_left_out_for_all(run, other, folders, tmp_path, capsys):
    images = shutil.copytree(folders / "split", tmp_path / "images")
    (images / "train/a/broken.png").write_bytes((images / "train/a/0.png").read_bytes()[:300])
    (images / "train/b/gone.png").symlink_to(tmp_path / "nowhere.png")
    words = ["compare", str(run), str(other), "--images", str(images), "--threads", "1"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().err
    assert "broken.png: left out" in told and "gone.png: left out: No such file" in told
    frame = pd.read_csv(tmp_path / "out/compare.csv")
    assert set(frame["train_images"]) == {75} and frame["value"].notna().all()


def test_names_and_faults_are_said_in_a_line(run, folders, tmp_path, capsys):
    assert named(["a/b", "x=c/b"], "encoders") == {"b": Path("a/b"), "x": Path("c/b")}
    few, odd = tmp_path / "few", tmp_path / "odd"
    shutil.copytree(folders / "split/train/a", few)
    shutil.copytree(folders / "split", odd)
    shutil.move(odd / "val/c", odd / "val/d")
    for encoders, images, fault in (
        ([run, run], folders / "whole", "two encoders are called ct; write NAME="),
        ([tmp_path], folders / "whole", "no such encoder"),
        ([run], tmp_path / "none", "no such folder"),
        ([run], few, "25 images; at least 40"),
        ([run], odd, "other classes"),
    ):
        words = [*map(str, encoders), "--images", str(images), "--out", str(tmp_path / "out")]
        assert main(["compare", *words]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert fault in line
    assert not (tmp_path / "out").exists()


def test_classes_beside_loose_images_are_no_labels(folders, tmp_path):
    images = shutil.copytree(folders / "whole", tmp_path / "images")
    shutil.copy(images / "a/0.png", images / "loose.png")
    folder = open_folder("images", images)
    assert folder.labels is None and "1 image lies beside class folders" in folder.remarks[0]


def test_imagenets_images_are_scored_by_reals_labels(run, folders, tmp_path, capsys):
    images, labels = shutil.copytree(folders / "split", tmp_path / "images"), []
    for number, path in enumerate(sorted(images.glob("*/*/*.png"))):
        path.rename(path.with_name(f"ILSVRC2012_val_{number + 1:08d}.png"))
        # Right is the class itself; of every second image nothing is known.
        labels.append(["abc".index(path.parent.name)] if number % 2 else [])
    (tmp_path / "real.json").write_text(json.dumps(labels))
    words = ["compare", str(run), "--out", str(tmp_path / "out"), "--threads", "1"]
    words += ["--real-labels", str(tmp_path / "real.json"), "--images"]
    assert main([*words, str(images), str(folders / "whole")]) == 0
    frame = pd.read_csv(tmp_path / "out/compare.csv").set_index(["folder", "measure"])
    known, scored = (frame["test_images"]["images", name] for name in ("knn_real", "knn"))
    assert 0 < known < scored
    first = frame["value"]
    assert not any(name.endswith("_real") for name in first["whole"].index)
    # Other labels are another score, from the vectors that are kept.
    (tmp_path / "real.json").write_text(json.dumps([[0, 1, 2]] * len(labels)))
    assert main([*words, str(images)]) == 0
    again = pd.read_csv(tmp_path / "out/compare.csv").set_index("measure")["value"]
    assert again["knn_real"] == again["logistic_real"] == 100
    assert again["knn"] == first["images", "knn"]
    capsys.readouterr()
    assert main([*words, str(folders / "whole")]) == 2
    assert "no folder has test images called ILSVRC2012_val_" in capsys.readouterr().err
