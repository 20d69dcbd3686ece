"""The block and pooling that `maect compare --blocks` recommends."""

from dataclasses import replace

import numpy as np
import torch
from evaluate.by_hand import blocks_of

from maect import load
from maect.cli import main
from maect.evaluate.features import Encoding, LastBlocks
from maect.evaluate.outcomes import held_out_for
from maect.models.weights import load_encoder_weights
from maect.tools import block_choice
from maect.tools.block_choice import OUTPUT, choose, readings, recommend
from maect.tools.compare import open_folder

OWN = (OUTPUT, "mean")


def test_another_reading_must_be_distinguishably_better():
    rows = np.arange(200)
    right = {OWN: rows < 100, ("3", "cls"): rows < 140, ("4", "mean"): rows < 120}
    best, gain = choose(right, OWN)
    assert best == ("3", "cls") and gain.value == 20 and gain.low > 0
    few = {name: one[98:103] for name, one in right.items()}
    best, gain = choose(few, OWN)
    assert best == OWN and gain.value == 0
    same = {(str(block), "cls"): rows < 100 for block in range(1, 25)} | {OWN: rows < 100}
    assert choose(same, OWN)[0] == OWN
    better = {("25", "cls"): rows < 107}  # p 0.016: enough for one reading, not for the best of 25
    assert [choose(some | better, OWN)[0] for some in ({OWN: same[OWN]}, same)] == [*better, OWN]


def test_held_out_images_choose_and_test_images_score(run, folders, tmp_path, monkeypatch):
    """Of the block that is chosen first, then of the encoder's own reading."""
    folder, encoder = open_folder("split", folders / "split"), load(run)
    # Of the true classes every reading gets all images right.
    folder = replace(folder, labels=np.random.default_rng(0).permutation(folder.labels))
    found = []
    for best in (OWN, ("1", "cls")):
        monkeypatch.setattr(block_choice, "choose", lambda right, own, best=best: (best, right))
        found.append(recommend(encoder, folder, tmp_path))
    own, other = found
    held = held_out_for(folder.labels[~folder.test], folder.checksums[:75], 46).sum()
    assert {len(right) for one in found for right in one.gain.values()} == {held}
    assert own.test[0] == own.test[1] == other.test[1] != other.test[0]


def test_columns_are_the_readings_that_they_are_called(run, folders, tmp_path):
    """Against the encoder's own calls, block by block, without the class that reads all."""
    folder, encoder = open_folder("whole", folders / "whole"), load(run)
    found = recommend(encoder, folder, tmp_path)
    assert found is not None and len(found.scores) == len(readings(["cls", "mean"], found.blocks))
    module, settings, _ = load_encoder_weights(run / "encoder.safetensors")
    assert found.blocks == settings.depth
    shape = (2, 3, settings.image_size, settings.image_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8)
    every = LastBlocks(run / "encoder.safetensors", torch.device("cpu"), "fp32", 10**9)
    columns = every(images).unflatten(1, (-1, settings.width))
    names = readings(every.poolings, every.blocks)
    plain = Encoding(run / "encoder.safetensors", torch.device("cpu"))
    blocks = blocks_of(module, plain._ready(images))
    with torch.no_grad():
        last = module.norm(blocks[-1])
    expected = {(OUTPUT, "cls"): last[:, 0]}
    for number, tokens in enumerate(blocks, 1):
        expected[str(number), "cls"] = tokens[:, 0]
        expected[str(number), "mean"] = tokens[:, 1:].mean(1)
    found_columns = {name: columns[:, names.index(name)] for name in expected}
    torch.testing.assert_close(found_columns, expected, rtol=1e-4, atol=1e-5)


def test_an_encoder_that_pools_in_another_way_is_compared_as_it_pools(run, folders, tmp_path):
    """[CLS] and patches averaged, which no block is read by: a third reading of the output."""
    folder, encoder = open_folder("whole", folders / "whole"), load(run)
    plain = recommend(encoder, folder, tmp_path)
    encoder.encoding.pooling = encoder.pooling = "mean_cls"
    found = recommend(encoder, folder, tmp_path)
    assert found is not None and plain is not None
    assert found.own == (OUTPUT, "mean_cls") and found.best in found.scores
    assert {name: found.scores[name] for name in plain.scores} == plain.scores
    assert len(found.scores) == len(plain.scores) + 1
    assert "output, as its own head pools" in found.sentence


def test_the_command_says_it_and_the_page_has_it(run, folders, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["compare", str(run), "--out", str(out), "--threads", "1", "--blocks", "--images"]
    assert main([*words, str(folders / "whole"), str(folders / "flat")]) == 0
    said = capsys.readouterr().out
    line = next(line for line in said.splitlines() if ": read " in line)
    assert "held-out training images" in line and "flat:" not in line
    assert line.partition(": read ")[2] in (out / "index.html").read_text()
