"""Compares k-NN, linear probe and efficient probe with the leaderboard's own code, step by step.

    git clone https://github.com/billpsomas/efficient-probing CHECKOUT
    python docs/reference/leaderboard_code.py CHECKOUT

Reads four of its files, and runs on the CPU in float32:

- k-NN: `knn_classifier` of engine_finetune.py on digits, beside the protocols `knn_leaderboard` and
  `knn_leaderboard_final_norm`, every k and T that they sweep;
- probes: poolings/ep.py, `_batchnorm` of probe_heads.py, util/lars.py and util/lr_sched.py, from
  the same initial values on the same random features, with its learning rates; weights and losses
  are compared after every update.

Ends with 1 if accuracies differ, or weights or losses by more than rounding.
"""

import argparse
import ast
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from maect.core.context import Context
from maect.evaluate import load_evaluation
from maect.evaluate.base import EvaluationJob
from maect.evaluate.lars_probes import LarsHead, MultiQueryHead
from maect.evaluate.protocols.probes import EfficientProbe, LarsLinearProbe
from maect.evaluate.store import write_features

TRAIN, TEST, CLASSES = 150, 70, 10
WIDTH, BATCH, TOKENS, QUERIES, UPDATES, WARMUP = 24, 256, 9, 4, 90, 10
ROUNDING = 1e-5


def theirs(checkout: Path, file: str, *names: str) -> SimpleNamespace:
    """Some functions and classes of a file of the checkout, without what else it imports."""
    tree = ast.parse((checkout / file).read_text(encoding="utf-8"))
    wanted: list[ast.stmt] = [
        node for node in tree.body
        if (isinstance(node, ast.Import | ast.ImportFrom)
        and ast.unparse(node).split()[1].split(".")[0] in ("torch", "math", "typing", "functools"))
        or (isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names)
    ]  # fmt: skip
    given: dict[str, Any] = {}
    exec(compile(ast.Module(wanted, []), file, "exec"), given)
    return SimpleNamespace(**{name: given[name] for name in names})


def compare_knn(checkout: Path) -> bool:
    """Accuracies of every k and T, of digits as they are and behind a LayerNorm."""
    classify = theirs(checkout, "engine_finetune.py", "knn_classifier").knn_classifier
    pixels, labels = load_digits(return_X_y=True)
    rows = torch.tensor(pixels[: TRAIN + TEST], dtype=torch.float32)
    norm = nn.LayerNorm(rows.shape[1])
    torch.manual_seed(0)
    same = total = 0
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for parameter in norm.parameters():
            parameter.copy_(1 + 0.3 * torch.randn(parameter.shape))
        for name, features in (
            ("knn_leaderboard", rows),
            ("knn_leaderboard_final_norm", norm(rows)),
        ):
            unit = F.normalize(features, dim=1, p=2)
            parts = {"train": slice(0, TRAIN), "test": slice(TRAIN, TRAIN + TEST)}
            inputs = {}
            for split, part in parts.items():
                inputs[split] = Path(folder, f"{name}-{split}.safetensors")
                write_features(
                    inputs[split], [features[part].numpy()], width=features.shape[1],
                    labels=labels[: TRAIN + TEST][part].astype(np.int64),
                    keys=[f"{n:04d}" for n in range(*part.indices(TRAIN + TEST))],
                    record={
                        "run": "digits", "encoder_sha256": "", "index_digest": split,
                        "class_names": list(map(str, range(CLASSES))), "pooling": "cls",
                        "image_size": 8, "resize": 8, "precision": "fp32",
                    },
                )  # fmt: skip
            job = EvaluationJob(Path(folder), Path(folder, f"{name}.json"), inputs)
            _, settings = load_evaluation(name, "large")
            for row in settings.evaluate(Context(), job)["sweep"]:
                if row["standardized"]:
                    continue
                truth = torch.tensor(labels[: TRAIN + TEST])
                top1, _ = classify(
                    unit[:TRAIN], truth[:TRAIN], unit[TRAIN:], truth[TRAIN:], row["k"],
                    row["temperature"], use_cuda=False, num_classes=CLASSES, num_chunks=1,
                )  # fmt: skip
                total += 1
                same += abs(top1 - row["accuracy"]) < 1e-9
    print(f"k-NN on {TRAIN} and {TEST} digits: {same} of {total} accuracies are the same")
    return same == total > 0


def compare_probe(checkout: Path, name: str, pooled: bool) -> bool:
    """Weights and losses of a probe after each of its updates."""
    told: dict[str, Any] = {"batch_size": BATCH, "epochs": UPDATES, "warmup_epochs": WARMUP}
    cpu = torch.device("cpu")
    ours: LarsHead = (
        MultiQueryHead(WIDTH, CLASSES, EfficientProbe(**told, queries=QUERIES), cpu)
        if pooled
        else LarsHead(WIDTH, CLASSES, LarsLinearProbe(**told), cpu)
    )
    peak = ours.optimizer.param_groups[0]["peak"]
    pooling = theirs(checkout, "poolings/ep.py", "EfficientProbing").EfficientProbing
    batch_norm = theirs(checkout, "probe_heads.py", "_batchnorm")._batchnorm
    last = nn.Linear(WIDTH, CLASSES)
    head = nn.Sequential(batch_norm(WIDTH), last)
    parts: dict[str, Tensor] = {"weight": last.weight, "bias": last.bias}
    if pooled:
        first = pooling(dim=WIDTH, num_queries=QUERIES, d_out=1)
        head = nn.Sequential(first, *head)
        parts |= {"values": first.v.weight, "queries": first.cls_token}
    with torch.no_grad():
        for key, parameter in parts.items():
            parameter.copy_(getattr(ours, key).view_as(parameter))
    optimizer = theirs(checkout, "util/lars.py", "LARS").LARS(head.parameters())
    adjust = theirs(checkout, "util/lr_sched.py", "adjust_learning_rate").adjust_learning_rate
    args = SimpleNamespace(lr=peak, min_lr=0.0, warmup_epochs=WARMUP, epochs=UPDATES)
    random = torch.Generator().manual_seed(0)
    shape = (BATCH, TOKENS, WIDTH) if pooled else (BATCH, WIDTH)
    weights = losses = 0.0
    for update in range(UPDATES):
        features = 2 * torch.randn(shape, generator=random) + 0.5
        labels = torch.randint(CLASSES, (BATCH,), generator=random)
        rate = adjust(optimizer, update, args)
        optimizer.zero_grad()
        loss = F.cross_entropy(head(features), labels)
        loss.backward()
        optimizer.step()
        own = ours.update(features, labels, rate / peak)
        losses = max(losses, abs(float(loss.detach() - own)))
        apart = (difference(p, getattr(ours, key)) for key, p in parts.items())
        weights = max(weights, *apart)
    print(
        f"{name}, {UPDATES} updates of {list(shape)} numbers: weights differ by {weights:.1e} at "
        f"most, losses by {losses:.1e}"
    )
    return max(weights, losses) < ROUNDING


def difference(parameter: Tensor, own: Tensor) -> float:
    """Largest difference of two tensors."""
    return float((parameter.detach() - own.detach().view_as(parameter)).abs().max())


def main() -> int:
    """Compare all three."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path)
    checkout = parser.parse_args().checkout
    version = subprocess.run(
        ["git", "-C", checkout, "log", "-1", "--format=%h, %cs"], capture_output=True, text=True
    )
    print(f"{checkout.name} {version.stdout.strip()}, PyTorch {torch.__version__}".rstrip())
    good = [
        compare_knn(checkout),
        compare_probe(checkout, "linear probe", pooled=False),
        compare_probe(checkout, "efficient probe", pooled=True),
    ]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
