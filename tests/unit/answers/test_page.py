"""The page that explains it: its commands and its Python, in a folder as it supposes one."""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import maect
from maect.cli import main
from maect.models.weights import save_tensors
from maect.records import line_of

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "answers.md"
TUTORIAL = DOCS / "tutorials/groups.md"
ELSEWHERE = ("fiftyone", "lancedb")


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
    for command, code in _blocks(PAGE.read_text(encoding="utf-8")):
        if command:
            assert main(shlex.split(command, comments=True)) == 0, command
        elif not any(name in code for name in ELSEWHERE):
            exec(code, names)
    assert names["vectors"].shape == (32, encoder.width)
    for name in ("birds-clusters/index.html", "classes.csv", "birds.safetensors"):
        assert (tmp_path / name).exists()


def test_the_tutorial_on_groups_works_word_for_word(run, photographs, tmp_path, monkeypatch):
    monkeypatch.setattr("maect.data.retrieve.retrieve", lambda what, out: [out / what])
    for name in ("dinov2_small", "siglip2_base"):
        shutil.copytree(run, tmp_path / "weights" / name)
    for name in ("birds", "labelled"):
        shutil.copytree(photographs, tmp_path / name)
    shutil.copy(next(photographs.glob("*/*.jpg")), tmp_path / "birds/a.jpg")
    for file in (tmp_path / "labelled").glob("*/*.*"):  # compare needs 40 images
        if file.suffix in (".jpg", ".png"):
            with Image.open(file) as image:
                image.convert("RGB").rotate(180).save(file.with_name(f"{file.stem}-turned.png"))
    monkeypatch.chdir(tmp_path)
    commands = [command for command, _ in _blocks(TUTORIAL.read_text(encoding="utf-8")) if command]
    assert len(commands) == 10
    for command in commands:
        assert main(shlex.split(command, comments=True)) == 0, command
    for name in ("groups/index.html", "sorted", "twice/copies.txt", "compared/index.html"):
        assert (tmp_path / name).exists()


def _blocks(text: str) -> list[tuple[str, str]]:
    """Commands and Python, in the order of the page."""
    found = re.finditer(r"^    maect (?P<command>.*)$|^```python\n(?P<code>[^`]*)^```", text, re.M)
    return [(match["command"] or "", match["code"] or "") for match in found]
