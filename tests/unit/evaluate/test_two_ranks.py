"""The real thing on two processes: the world size changes nothing."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np

from maect.evaluate.features import extract
from maect.evaluate.run import run_protocol
from maect.evaluate.store import open_features

from .conftest import Rank
from .test_linear_probe import SETTINGS

SCRIPT = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from evaluate.conftest import Rank
from maect.evaluate.features import extract
from maect.evaluate.run import run_protocol

number, images, out, settings = int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5]
rank = Rank(number, number, 2, 2, cpus=1)
run, shards = images / "runs" / "mae", images / "shards"
for split in ("train", "val"):
    extract(rank, encoder=run / "encoder.safetensors", shards=shards / split,
            out=out / f"{split}.safetensors", resize=16)
run_protocol(rank, protocol="linear_probe", run=run, out=out / "linear_probe.json",
             train_shards=shards / "train", test_shards=shards / "val", resize=16,
             settings=json.loads(settings))
run_protocol(rank, protocol="knn", run=run, out=out / "knn.json",
             train=out / "train.safetensors", test=out / "val.safetensors")
"""


def test_world_size_changes_nothing(images: Path, tmp_path: Path, rank: Rank) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }
    arguments = [str(Path(__file__).parent.parent), "", str(images), str(tmp_path)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, arguments[0], number, *arguments[2:],
             SETTINGS.model_dump_json()],
            env=environment,
        )
        for number in ("0", "1")
    ]  # fmt: skip
    run, shards = images / "runs" / "mae", images / "shards"
    try:
        for split in ("train", "val"):
            extract(
                rank,
                encoder=run / "encoder.safetensors",
                shards=shards / split,
                out=tmp_path / f"alone-{split}.safetensors",
                resize=16,
            )
        run_protocol(
            rank,
            protocol="linear_probe",
            run=run,
            out=tmp_path / "alone.json",
            train_shards=shards / "train",
            test_shards=shards / "val",
            resize=16,
            settings=SETTINGS.model_dump(),
        )
        assert [process.wait(120) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    for split in ("train", "val"):
        one = open_features(tmp_path / f"alone-{split}.safetensors")
        two = open_features(tmp_path / f"{split}.safetensors")
        # Kernels may differ between one and two threads, so not the bits.
        np.testing.assert_allclose(one.all(), two.all(), atol=1e-5)
        assert np.array_equal(one.labels, two.labels) and one.names() == two.names()
    one, two = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("alone", "linear_probe"))
    assert two["provenance"]["world_size"] == 2
    for rate, accuracy in one["metrics"]["last_by_rate"].items():
        assert abs(accuracy - two["metrics"]["last_by_rate"][rate]) <= 100 / 70 + 1e-9
    assert (tmp_path / "knn.json").exists()
