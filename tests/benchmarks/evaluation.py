"""Speed of the evaluations against other implementations, as ratios within one run.

    python tests/benchmarks/evaluation.py [knn] [logistic] [probe] [clustering] [--scale 1.0]

`--scale` shrinks every problem's sample counts. faiss-cpu is compared if it is installed.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

CORES = len(os.sched_getaffinity(0))


def seconds(call: Callable[[], Any], repeats: int = 1) -> tuple[float, Any]:
    """Shortest time of some calls, and the last result."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        best = min(best, time.perf_counter() - start)
    return best, result


def line(name: str, value: float, ratio: float | None = None) -> None:
    print(f"{name:<58}{value:9.2f} s" + (f"{ratio:8.2f} x" if ratio else ""), flush=True)


def blobs(n: int, width: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    centers = np.random.default_rng(9).normal(size=(classes, width)).astype(np.float32)
    labels = rng.integers(0, classes, n)
    return centers[labels] + rng.normal(size=(n, width)).astype(np.float32), labels


def knn(scale: float) -> None:
    """50,000 queries, 100,000 samples of 768: ours, faiss's flat index, DINO's chunked matmul."""
    import torch

    from maect.evaluate.knn import nearest, normalize
    from maect.evaluate.store import open_features, write_features

    n, q, width, k = int(100_000 * scale), int(50_000 * scale), 768, 20
    rows, labels = blobs(n, width, 1000, 0)
    queries, _ = blobs(q, width, 1000, 1)
    record = {"class_names": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.safetensors"
        write_features(path, [rows], width=width, labels=labels, keys=["k"] * n, record=record)
        train = open_features(path)
        ours, (_, ids) = seconds(lambda: nearest(train, queries, k, threads=CORES))
    line(f"k-NN, {q} x {n} x {width}, k {k}: maect", ours)
    x, y = normalize(rows), normalize(queries)

    def dino() -> torch.Tensor:
        train, chunk = torch.from_numpy(x).T, max(1, q // 100)
        parts = torch.from_numpy(y).split(chunk)
        return torch.cat([(part @ train).topk(k, largest=True, sorted=True)[1] for part in parts])

    other, found = seconds(dino)
    line("  chunked matmul and topk (torch)", other, other / ours)
    print(f"  same neighbours: {100 * np.mean(found.numpy() == ids):.3f} %")
    try:
        import faiss
    except ImportError:
        print("  faiss-cpu is not installed")
        return
    faiss.omp_set_num_threads(CORES)
    index = faiss.IndexFlatIP(width)
    index.add(x)
    other, (_, found) = seconds(lambda: index.search(y, k))
    line("  faiss IndexFlatIP", other, other / ours)
    print(f"  same neighbours: {100 * np.mean(found == ids):.3f} %")


def logistic(scale: float) -> None:
    """5 x 1,000 classes x 1,024 at MSN's penalty, to the objective that cyanure reaches."""
    from sklearn.linear_model import LogisticRegression

    from maect.evaluate import logistic as ours

    classes, width = int(1000 * scale), 1024
    rows, _ = blobs(5 * classes, width, 1, 0)
    centers = np.random.default_rng(1).normal(size=(classes, width)).astype(np.float32)
    labels = np.repeat(np.arange(classes), 5)
    features = ours.prepare(rows + 0.7 * centers[labels])
    penalty = 0.00025 / len(labels)
    time_ours, (weights, converged) = seconds(
        lambda: ours.fit(features, labels, classes, penalty, "cyanure")
    )
    target = ours.objective(features, labels, weights, penalty)
    line(f"logistic regression, {len(labels)} x {classes} x {width}: cyanure", time_ours)
    print(f"  objective {target:.6g}, converged {converged}")
    # scikit-learn's solver on its own objective, more iterations until it is as low as ours.
    iterations = 100
    while True:
        model = LogisticRegression(
            C=1 / (len(labels) * penalty), fit_intercept=False, tol=1e-12, max_iter=iterations
        )
        other, _ = seconds(lambda model=model: model.fit(features, labels))
        value = ours.objective(features, labels, model.coef_.T.astype(np.float64), penalty)
        line(
            f"  scikit-learn lbfgs, {iterations} iterations, {value:.6g}", other, other / time_ours
        )
        if value <= target or iterations > 3000 or model.n_iter_.max() < iterations:
            return
        iterations *= 2


def probe(scale: float) -> None:
    """Ten rates against one, and the encoder alone, on random images (ViT-S/16, 96 pixels)."""
    import torch
    from timm.models.vision_transformer import VisionTransformer

    from maect.evaluate.heads import Heads

    encoder = VisionTransformer(
        img_size=96, patch_size=16, embed_dim=384, depth=12, num_heads=6, num_classes=0
    ).eval()
    steps, size = max(2, int(8 * scale)), 64
    images = torch.randn(size, 3, 96, 96)
    labels = torch.randint(1000, (size,))

    def train(rates: int) -> None:
        heads = Heads(384, 1000, [0.1] * rates, 0.9, 0, torch.device("cpu")) if rates else None
        for _ in range(steps):
            with torch.inference_mode():
                features = encoder(images)
            if heads is not None:
                heads.step(features, labels, 0.5)

    train(10)
    times = {rates: seconds(lambda r=rates: train(r), 3)[0] for rates in (0, 1, 10)}
    for rates, value in times.items():
        line(f"probe, {steps} steps of {size}: {rates} rates", value, value / times[1])


def clustering(scale: float) -> None:
    """Runs of mini-batch k-means on all cores against one."""
    from maect.evaluate.clustering import cluster
    from maect.evaluate.store import open_features, write_features
    from maect.recipes.protocols import Clustering

    n, width, runs = int(20_000 * scale), 384, 4 * CORES
    rows, labels = blobs(n, width, 100, 0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "test.safetensors"
        record = {"class_names": []}
        write_features(path, [rows], width=width, labels=labels, keys=["k"] * n, record=record)
        test = open_features(path)

        def run(count: int, threads: int) -> float:
            call = lambda: cluster(test, np.arange(n), Clustering(runs=count), threads)  # noqa: E731
            return seconds(call)[0]

        run(1, 1)
        # One run's time holds what is done once (reading, scaling, the silhouette).
        once = run(1, 1)
        one, many = (run(runs + 1, threads) - once for threads in (1, CORES))
        line(f"k-means, {runs} runs of {n} x {width} x 100: one core", one)
        line(f"  {CORES} cores (x: speed-up)", many, one / many)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["knn", "logistic", "probe", "clustering"])
    parser.add_argument("--scale", type=float, default=1.0)
    options = parser.parse_args()
    for name in options.what:
        globals()[name](options.scale)


if __name__ == "__main__":
    main()
