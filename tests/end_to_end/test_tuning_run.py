"""`maect tune` from an untrained encoder to the result's page, interrupted in between."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from maect.data.bundled import write_digits
from maect.models.vit import build_encoder, seeded
from maect.recipes import load_encoder
from maect.tools.plan import Device
from maect.tools.tuned_encoder import find_start
from maect.tools.tuning import words_of, write_tuning

pytestmark = pytest.mark.slow


def test_an_interrupted_command_goes_on_to_its_result(tmp_path):
    write_digits(tmp_path / "digits")
    images = Path("digits/val")
    with seeded(0):
        torch.save(build_encoder(load_encoder("tiny")).state_dict(), tmp_path / "mine.pth")
    out = tmp_path / "mine.yaml"
    command = words_of("mine.pth", images, {"by": "diet"})
    start = find_start(str(tmp_path / "mine.pth"))
    text = write_tuning(start, tmp_path / images, out, "diet", command, {}, None, Device("cpu"))
    out.write_text(text.replace("epochs: 200", "epochs: 4"))
    words = [sys.executable, "-P", "-m", "maect", *command.split()[1:], "--out", "mine.yaml"]

    def begun() -> "subprocess.Popen[str]":
        return subprocess.Popen(
            words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip

    first = begun()
    results = tmp_path / "results/mine"
    while not (results / "runs/before/done").exists() and first.poll() is None:
        time.sleep(0.2)
    first.send_signal(signal.SIGTERM)
    said, _ = first.communicate(timeout=120)
    assert not (results / "result.html").exists(), said
    said, _ = begun().communicate(timeout=500)
    assert "mine.yaml: resuming" in said, said
    line = next(line for line in said.splitlines() if "held-out images." in line)
    assert line.split(":")[0] in ("Better", "Worse", "Not distinguishable")
    assert f"<h1>{line.partition(' ')[0]}" in (results / "result.html").read_text()
    assert (results / "encoder/model.safetensors").exists()
