"""Speed of `maect embed` and `maect features` against a plain loop with timm, within one run.

    python benchmarks/embedding.py [--images 256] [--size base] [--rounds 3]

All encode the same JPEG photographs (640 x 480, drawn) with the same weights. They take turns after
a batch each that is not counted, and each time is printed at once; medians follow, by the clock and
of processor time. Starting Python is not among them. One round of 256 images by a ViT-B takes about
three minutes on two quiet cores.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image

import maect
from maect.answers.vectors import Vectors, embed_into
from maect.core.context import Context
from maect.core.files import sha256_file, write_record
from maect.data.shards import shard
from maect.evaluate.features import extract
from maect.evaluate.store import open_features
from maect.models.vit import build_encoder, seeded, timm_arguments
from maect.models.weights import save_encoder
from maect.recipes import load_encoder
from maect.records import RunRecord

CORES = len(os.sched_getaffinity(0))
BATCH = 32


def photographs(folder: Path, count: int) -> None:
    """Smooth scenes with grain, as JPEG."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for number in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8))
        scene = np.asarray(coarse.resize((640, 480), Image.Resampling.BICUBIC), np.float32)
        scene = (scene + rng.normal(0, 4, scene.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(scene).save(folder / f"{number:04d}.jpg", quality=90)


def a_run(folder: Path, size: str) -> None:
    """A finished run with random weights."""
    shape = load_encoder(size)
    with seeded(0):
        module = build_encoder(shape).eval()
    save_encoder(folder / "encoder.safetensors", module.state_dict(), shape, "mean")
    digest = {"encoder.safetensors": sha256_file(folder / "encoder.safetensors")}
    write_record(RunRecord.path(folder), {"run": "r", "stage": "import", "sha256": digest})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--size", default="base")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(CORES)
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        photographs(root / "photos", given.images)
        a_run(root / "runs/r", given.size)
        shard(root / "photos", root / "shards/train", "unlabelled", 1)
        encoder = maect.load(root / "runs/r")
        shape = encoder.encoding.settings
        model = timm.create_model(
            "vit_base_patch16_224", num_classes=0, **timm_arguments(shape, "mean")
        ).eval()
        model.load_state_dict(encoder.encoding.encoder.state_dict(), strict=False)
        transform = timm.data.create_transform(
            (3, shape.image_size, shape.image_size), interpolation="bicubic",
            crop_pct=shape.image_size / shape.default_resize,
        )  # fmt: skip
        files = sorted((root / "photos").iterdir())
        rank, out = Context(cpus=CORES), root / "features.safetensors"

        @torch.inference_mode()
        def loop(count: int = given.images) -> np.ndarray:
            parts = []
            for start in range(0, count, BATCH):
                images = [
                    transform(Image.open(f).convert("RGB")) for f in files[start : start + BATCH]
                ]
                parts.append(model(torch.stack(images)).numpy())
            return np.concatenate(parts)

        def features() -> np.ndarray:
            out.unlink(missing_ok=True)
            weights = root / "runs/r/encoder.safetensors"
            extract(rank, encoder=weights, shards=root / "shards/train", out=out)
            return open_features(out).all()

        def embedded() -> np.ndarray:
            table = root / "photos.parquet"
            embed_into(table, encoder, root / "photos", afresh=True)
            return Vectors.read(table).values

        calls: dict[str, Callable[[], np.ndarray]] = {
            "timm loop": loop,
            "embed": embedded,
            "features": features,
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        print(f"{given.images} images, {given.size}, batch {encoder.batch_size}, {CORES} cores")
        loop(BATCH)
        encoder.encode(files[: encoder.batch_size])
        for _ in range(given.rounds):
            for name, call in calls.items():
                wall, cpu = time.perf_counter(), time.process_time()
                vectors = call()
                times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
                print("  {}: {:.1f} s, {:.1f} s of CPU".format(name, *times[name][-1]), flush=True)
                assert vectors.shape == (given.images, encoder.width)
        first = [statistics.median(column) for column in zip(*times["timm loop"], strict=True)]
        for name, measured in times.items():
            wall, cpu = (statistics.median(column) for column in zip(*measured, strict=True))
            print(
                f"{name:<12}{wall:8.1f} s{cpu:8.1f} s of CPU"
                f"{wall / first[0]:8.2f} x{cpu / first[1]:8.2f} x of CPU"
            )


if __name__ == "__main__":
    main()
