"""Speed of the evaluations against other implementations, as ratios within one run.

    python benchmarks/evaluation.py [knn] [logistic] [probe] [features] [--full]

What is compared takes turns, several times, and medians are shown: seconds and ratios by the clock
and of processor time, which say more on a machine that does something else meanwhile. Sizes are
scaled down to a few minutes on two cores; `--full` takes those of the targets in
`docs/results/speed.md`. faiss is compared if `pip install faiss-cpu` was run; nothing else
needs it.
"""

import argparse
import itertools
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

CORES = len(os.sched_getaffinity(0))
Calls = dict[str, Callable[[], Any]]


def medians(calls: Calls, rounds: int = 3) -> tuple[dict[str, Any], dict[str, Any]]:
    """Median seconds of some calls that take turns, by the clock and of the processor; results."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    results = {}
    for _ in range(rounds):
        for name, call in calls.items():
            wall, cpu = time.perf_counter(), time.process_time()
            results[name] = call()
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {name: np.median(times[name], axis=0) for name in calls}, results


def line(name: str, own: Any, ratio: Any = None, target: str = "") -> None:
    """A name, its times, and a ratio, by the clock and by processor time."""
    shown = f"{name:<58}{own[0]:9.2f} s{own[1]:9.2f} s"
    if ratio is not None:
        shown += f"{ratio[0]:8.2f} x{ratio[1]:8.2f} x"
    print(f"{shown}  {target}".rstrip(), flush=True)


def blobs(n: int, width: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Overlapping classes: float32 [n, width] and labels [n]."""
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(9).normal(size=(classes, width)).astype(np.float32)
    labels = rng.integers(0, classes, n)
    return centers[labels] + rng.normal(size=(n, width)).astype(np.float32), labels


def knn(full: bool, folder: Path) -> None:
    """Ours and faiss's flat index."""
    from maect.evaluate.knn import nearest
    from maect.evaluate.store import open_features, write_features

    n, q, width, k = (100_000, 50_000, 768, 20) if full else (20_000, 8_000, 768, 20)
    rows, labels = blobs(n, width, 1000, 0)
    queries, _ = blobs(q, width, 1000, 1)
    path = folder / "features.safetensors"
    about = {"keys": ["k"] * n, "record": {"class_names": []}}
    write_features(path, [rows], width=width, labels=labels, **about)
    train = open_features(path)
    x, y = (part / np.linalg.norm(part, axis=1, keepdims=True) for part in (rows, queries))

    calls: Calls = {"maect": lambda: nearest(train.values, queries, k, threads=CORES)[1]}
    try:
        import faiss

        faiss.omp_set_num_threads(CORES)
        index = faiss.IndexFlatIP(width)
        index.add(x)
        calls["faiss IndexFlatIP"] = lambda: index.search(y, k)[1]
    except ImportError:
        print("faiss is not compared: pip install faiss-cpu")
    times, found = medians(calls, 1 if full else 3)
    line(f"k-NN, {q} x {n} x {width}, k {k}: maect", times["maect"])
    for name in list(calls)[1:]:
        line(f"  {name}", times[name], times[name] / times["maect"], "target >= 1.00")
        print(f"    same neighbours: {100 * np.mean(found[name] == found['maect']):.3f} %")


def logistic(full: bool, folder: Path) -> None:
    """5 images x 1,000 classes x 1,024 at MSN's penalty, to scikit-learn's objective."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    from maect.evaluate import low_shot as ours

    warnings.simplefilter("ignore", ConvergenceWarning)
    classes, width = (1000, 1024) if full else (200, 1024)
    rows, _ = blobs(5 * classes, width, 1, 0)
    centers = np.random.default_rng(1).normal(size=(classes, width)).astype(np.float32)
    labels = np.repeat(np.arange(classes), 5)
    features = ours.center_and_scale(rows + 0.7 * centers[labels])
    penalty = 0.00025 / len(labels)

    def sklearn(iterations: int) -> Any:
        model = LogisticRegression(
            C=1 / (len(labels) * penalty), fit_intercept=False, tol=1e-12, max_iter=iterations
        )
        return model.fit(features, labels)

    def objective(weights: Any) -> float:
        return ours._loss(features @ weights, labels)[0] + penalty / 2 * float((weights**2).sum())

    target = objective(ours.fit(features, labels, classes, penalty)[0])
    # The fewest tens of iterations after which scikit-learn's objective is as low, to 1 in 1e4.
    for iterations in itertools.count(10, 10):
        model = sklearn(iterations)
        value = objective(model.coef_.T.astype(np.float64))
        if value <= target * 1.0001 or model.n_iter_.max() < iterations:
            break
    print(f"  objective: maect {target:.6g}, scikit-learn after {iterations}: {value:.6g}")
    calls: Calls = {
        "maect": lambda: ours.fit(features, labels, classes, penalty),
        "scikit-learn": lambda: sklearn(iterations),
    }
    times, _ = medians(calls, 1 if full else 3)
    line(f"logistic regression, {len(labels)} x {classes} x {width}: maect", times["maect"])
    other = times["scikit-learn"]
    line("  scikit-learn lbfgs", other, other / times["maect"], "target >= 3")


def probe(full: bool, folder: Path) -> None:
    """Training steps with ten rates against one, and the encoder alone (ViT-S/16)."""
    import torch
    from timm.models.vision_transformer import VisionTransformer

    from maect.evaluate.linear_probe import Heads

    side, steps, size = (224, 8, 128) if full else (96, 2, 32)
    encoder = VisionTransformer(
        img_size=side, patch_size=16, embed_dim=384, depth=12, num_heads=6, num_classes=0
    ).eval()
    images = torch.randn(size, 3, side, side)
    labels = torch.randint(1000, (size,))

    def train(rates: int) -> None:
        heads = Heads(384, 1000, [0.1] * rates, 0.9, 0, torch.device("cpu")) if rates else None
        for _ in range(steps):
            with torch.inference_mode():
                features = encoder(images)
            if heads is not None:
                heads.step(features, labels, 0.5)

    train(10)
    calls: Calls = {str(rates): lambda r=rates: train(r) for rates in (0, 1, 10)}
    times, _ = medians(calls, 5)
    for name, value in times.items():
        target = "target <= 1.30" if name == "10" else ""
        line(f"probe, {steps} steps of {size}: {name} rates", value, value / times["1"], target)


def features(full: bool, folder: Path) -> None:
    """Extraction from JPEG shards against the same encoder on the same images in memory."""
    import torch
    from photographs import write_folder

    from maect.core.context import Context
    from maect.data.index import open_index
    from maect.data.loader import evaluation_parts
    from maect.data.shards import shard
    from maect.evaluate.features import Encoding, extract, part_ranges
    from maect.models.vit import build_encoder
    from maect.models.weights import save_encoder
    from maect.recipes import load_encoder

    count = 4096 if full else 96
    shard(write_folder(folder / "images", count), folder / "shards", "folder", 1)
    settings = load_encoder("base").model_copy(update={"width": 384, "heads": 6})
    (folder / "run").mkdir()
    path, out = folder / "run" / "encoder.safetensors", folder / "features.safetensors"
    save_encoder(path, build_encoder(settings).state_dict(), settings, "cls")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, index = Encoding(path, device), open_index(folder / "shards")
    parts = evaluation_parts(index, image_size=224, parts=part_ranges(count), threads=CORES)
    pictures = [images for images, _, _ in parts]

    def forward() -> None:
        for images in pictures:
            model(images).cpu()

    def extracted() -> None:
        out.unlink(missing_ok=True)
        extract(Context(CORES), encoder=path, shards=folder / "shards", out=out)

    forward()
    times, _ = medians({"forward": forward, "extract": extracted})
    line(f"encoder alone, {count} images of 224 (ViT-S/16, {device})", times["forward"])
    share = times["forward"] / times["extract"]
    line("  feature extraction (x: of its throughput)", times["extract"], share, "target >= 0.95")


ALL = {f.__name__: f for f in (knn, logistic, probe, features)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=list(ALL), help=", ".join(ALL))
    parser.add_argument("--full", action="store_true", help="sizes of the targets")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{CORES} cores, load {load:.1f}, {'full' if options.full else 'reduced'} sizes")
    for name in options.what:
        with tempfile.TemporaryDirectory() as folder:
            ALL[name](options.full, Path(folder))


if __name__ == "__main__":
    main()
