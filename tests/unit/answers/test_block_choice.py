"""The block and pooling that `maect compare --blocks` recommends."""

from pathlib import Path

import numpy as np
import pytest
import torch

from maect import load
from maect.cli import main
from maect.evaluate.encoding import Encoding
from maect.models.weights import load_encoder_weights
from maect.tools.block_choice import OUTPUT, choose, readings, recommend
from maect.tools.compare import open_folder

from .conftest import photograph

OWN = (OUTPUT, "mean")


def test_another_reading_must_be_distinguishably_better():
    rows = np.arange(200)
    right = {OWN: rows < 100, ("3", "cls"): rows < 140, ("4", "mean"): rows < 120}
    best, gain = choose(right, OWN)
    assert best == ("3", "cls") and gain.value == 20 and gain.low > 0
    few = {name: one[98:103] for name, one in right.items()}
    best, gain = choose(few, OWN)
    assert best == OWN and gain.value == 0
    same = {("1", "cls"): rows < 100, OWN: rows < 100}
    assert choose(same, OWN)[0] == OWN


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("blocks")
    for number in range(90):
        file = root / "whole" / "abc"[number % 3] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        photograph(number, 30, 24).save(file)
        flat = root / "flat" / f"{number}.png"
        flat.parent.mkdir(exist_ok=True)
        photograph(number, 30, 24).save(flat)
    return root


def test_columns_are_the_readings_that_they_are_called(run, photographs, tmp_path):
    """Against the encoder's own calls, block by block, without the class that reads all."""
    folder, encoder = open_folder("whole", photographs / "whole"), load(run)
    found = recommend(encoder, folder, tmp_path / "blocks")
    assert found is not None and len(found.scores) == len(readings(["cls", "mean"], found.blocks))
    module, settings, _ = load_encoder_weights(run / "encoder.safetensors")
    assert found.blocks == settings.depth
    images = torch.randint(0, 256, (2, 3, settings.image_size, settings.image_size))
    from maect.evaluate.encoding import LastBlocks

    every = LastBlocks(run / "encoder.safetensors", torch.device("cpu"), "fp32", 10**9)
    columns = every(images.to(torch.uint8)).unflatten(1, (-1, settings.width))
    names = readings(every.poolings, every.blocks)
    plain = Encoding(run / "encoder.safetensors", torch.device("cpu"))
    tokens = module.patch_embed(plain._ready(images.to(torch.uint8)))
    tokens = tokens + module.pos_embed[:, settings.prefix_tokens :]
    tokens = torch.cat([module.cls_token.expand(2, -1, -1), tokens], dim=1)
    with torch.no_grad():
        for number, block in enumerate(module.blocks, 1):
            tokens = block(tokens)
            for pooling, expected in (("cls", tokens[:, 0]), ("mean", tokens[:, 1:].mean(1))):
                found_column = columns[:, names.index((str(number), pooling))]
                torch.testing.assert_close(found_column, expected, rtol=1e-4, atol=1e-5)
        last = module.norm(tokens)
        torch.testing.assert_close(
            columns[:, names.index((OUTPUT, "cls"))], last[:, 0], rtol=1e-4, atol=1e-5
        )


def test_the_command_says_it_and_the_page_has_it(run, photographs, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["compare", str(run), "--out", str(out), "--threads", "1", "--blocks", "--images"]
    assert main([*words, str(photographs / "whole"), str(photographs / "flat")]) == 0
    said = capsys.readouterr().out
    line = next(line for line in said.splitlines() if ": read " in line)
    assert "held-out training images" in line and "flat:" not in line
    assert line.partition(": read ")[2] in (out / "index.html").read_text()
