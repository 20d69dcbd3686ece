"""The notebooks and the page of answers, with tiny data in place of what they name."""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch

import maect
from maect.cli import main
from maect.core.files import write_record
from maect.evaluate.base import EvaluationJob
from maect.evaluate.protocols.stored_features import Explore
from maect.models.decoder import Decoder
from maect.models.vit import build_encoder
from maect.models.weights import save_tensors
from maect.recipes import load_encoder
from maect.records import line_of
from maect.report.configs import Row
from maect.report.tables import build_table, write_table

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "answers.md"
TUTORIAL = DOCS / "tutorials/groups.md"
ELSEWHERE = ("fiftyone", "lancedb")


def execute(name: str, skip: tuple[str, ...] = (), **parameters: Any) -> dict[str, Any]:
    """Run a notebook's cells in the present folder, `!maect` in this process; returns its names."""

    def shell(line: str) -> None:
        program, *words = shlex.split(line)
        assert program == "maect" and main(words) == 0, line

    names: dict[str, Any] = {"shell": shell}
    book = nbformat.read(DOCS / f"notebooks/{name}.ipynb", as_version=4)
    nbformat.validate(book)
    for cell in book.cells:
        tags = cell.metadata.get("tags", [])
        if cell.cell_type != "code" or {*tags} & {*skip}:
            continue
        assert not cell.outputs and cell.execution_count is None  # kept without its results
        source = re.sub(r"^!(.+)$", r"shell(f'''\1''')", cell.source, flags=re.M)
        exec(source, names)
        if "parameters" in tags:
            assert {*parameters} <= {*names}
            names |= parameters
    return names


@pytest.fixture
def birds(run: Path, photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `birds` and the results of an experiment on them, which is where one stands."""
    (tmp_path / "birds").symlink_to(photographs)
    results = tmp_path / "results/birds"
    (results / "runs").mkdir(parents=True)
    (results / "runs/ct").symlink_to(run)
    assert main(["shard", str(photographs), str(results / "shards/birds/val")]) == 0
    monkeypatch.chdir(tmp_path)
    return results


def test_embed_and_search(birds):
    names = execute("embed_and_search")
    assert names["vectors"].shape == (30, names["encoder"].width) and len(names["nearest"]) == 5
    assert Path("groups/index.html").exists()


def test_add_a_protocol(birds):
    names = execute("add_a_protocol")
    assert -1 < names["metrics"]["similarity"] < 1


@pytest.mark.slow
def test_read_the_report(birds):
    shards, features = birds / "shards/birds/val", birds / "val.safetensors"
    words = ["--shards", str(shards), "--out", str(features)]
    assert main(["features", str(birds / "runs/ct"), *words]) == 0
    evaluations = birds / "evaluations"
    job = EvaluationJob(birds / "runs/ct", evaluations / "ct/explore.json",
              {"features_val": features, "images_val": shards})  # fmt: skip
    Explore(clusters=3).evaluate(None, job)  # type: ignore[arg-type]
    for name in ("knn", "linear_probe"):
        result = {"metrics": {name: 61.5}, "settings": {"test_split": "val"}, "provenance": {}}
        write_record(evaluations / f"ct/{name}.json", result)
    table = build_table("low_shot", [Row("tiny", "ct_min", ("ct",))], evaluations, False)
    write_table(table, birds / "tables/low_shot.csv")
    logged = birds / "runs/ct/metrics.jsonl"
    logged.write_text("".join(f'{{"epoch": {n}, "loss": {3 - n}}}\n' for n in range(3)))
    try:
        names = execute("read_the_report")
    finally:
        logged.unlink()
    assert names["table"]["knn"].tolist() == [61.5] and names["curve"]["loss"].tolist() == [3, 2, 1]
    assert len(names["images"]) == 30 and names["images"]["group"].nunique() == 3


@pytest.mark.parametrize(
    "skip",
    [
        pytest.param(("download", "long"), id="plan"),
        pytest.param(("download",), id="all", marks=pytest.mark.slow),
    ],
)
def test_tune_on_my_images(skip, tmp_path, monkeypatch):
    """With an encoder for 16 pixels under the name of ViT-B."""
    from maect.data.bundled import write_digits

    monkeypatch.setattr("maect.tools.own_training.PUBLIC", {"mae_base": "tiny"})
    monkeypatch.setenv("WEIGHTS", str(tmp_path / "weights"))
    monkeypatch.chdir(tmp_path)
    write_digits(tmp_path / "digits")
    (tmp_path / "weights").mkdir()
    encoder = load_encoder("tiny")
    decoder = Decoder(encoder).state_dict()
    weights = dict(build_encoder(encoder).state_dict()) | {"mask_token": decoder.pop("mask_token")}
    weights |= {f"decoder_{name}": value for name, value in decoder.items()}
    torch.save({"model": weights}, tmp_path / "weights/mae_pretrain_vit_base.pth")
    epochs = {"head": 1, "ct": 1}
    execute("tune_on_my_images", skip, IMAGES="digits", NAME="mine", EPOCHS=epochs)
    assert (tmp_path / "results/mine/report.html").exists() == ("long" not in skip)


def follow(page: Path, names: dict[str, Any]) -> int:
    """Run the commands and the Python of a page in their order; return how many commands."""
    blocks = re.compile(r"^    maect (?P<command>.*)$|^```python\n(?P<code>[^`]*)^```", re.M)
    commands = 0
    for block in blocks.finditer(page.read_text(encoding="utf-8")):
        if block["command"]:
            commands += 1
            assert main(shlex.split(block["command"], comments=True)) == 0, block["command"]
        elif not any(name in block["code"] for name in ELSEWHERE):
            exec(block["code"], names)
    return commands


def test_the_page_works_word_for_word(run, photographs, tmp_path, monkeypatch):
    home = tmp_path / "results/birds/runs/ct_min"
    home.parent.mkdir(parents=True)
    shutil.copytree(run, home)
    (home / "metrics.jsonl").write_text(line_of(1, {"loss": 2.0}, {"device_seconds": 1.0}))
    monkeypatch.setattr("maect.data.retrieve.retrieve", lambda what, out: [out / what])
    shutil.copytree(run, tmp_path / "weights/dinov2_small")
    shutil.copytree(photographs, tmp_path / "birds")
    for name in ("a.jpg", "b.png"):
        source = next(photographs.glob(f"*/*{name[1:]}"))
        shutil.copy(source, tmp_path / "birds" / name)
    monkeypatch.chdir(tmp_path)
    encoder = maect.load(home)
    probe = {name: torch.ones(encoder.width) for name in ("mean", "var")}
    probe |= {"weight": torch.ones(2, encoder.width), "bias": torch.zeros(2)}
    left = tmp_path / "results/birds/evaluations/ct_min/linear_probe.safetensors"
    texts = {"encoder_sha256": encoder.sha256, "resize": str(encoder.resize)}
    save_tensors(left, probe, {"class_names": '["a", "b"]', **texts})
    names: dict[str, Any] = {}
    follow(PAGE, names)
    assert names["vectors"].shape == (32, encoder.width)
    for name in ("birds-clusters/index.html", "classes.csv", "birds.safetensors"):
        assert (tmp_path / name).exists()


def test_the_tutorial_works_word_for_word(run, photographs, folders, tmp_path, monkeypatch):
    monkeypatch.setattr("maect.data.retrieve.retrieve", lambda what, out: [out / what])
    for name in ("dinov2_small", "siglip2_base"):
        shutil.copytree(run, tmp_path / "weights" / name)
    shutil.copytree(photographs, tmp_path / "birds")
    shutil.copytree(folders / "whole", tmp_path / "labelled")
    shutil.copy(next(photographs.glob("*/*.jpg")), tmp_path / "birds/a.jpg")
    monkeypatch.chdir(tmp_path)
    assert follow(TUTORIAL, {}) == 10
    for name in ("groups/index.html", "sorted", "twice/copies.txt", "compared/index.html"):
        assert (tmp_path / name).exists()
