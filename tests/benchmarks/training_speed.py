"""Throughput, model FLOP utilisation and memory of pre-training and tuning, in every variant.

Batches come from the CPU, as from a loader that is quick enough; nothing is written.

    python tests/benchmarks/training_speed.py [--sizes base,large,huge] [--batch 64] [--steps 20]

Meant for a GPU; with `--device cpu --sizes tiny` it shows that it works. Each line is a process of
its own. Utilisation is relative to the rate of a large matrix product measured here, and to the
data sheet's where the device is known. The last lines compare pre-training with the step as
facebookresearch/mae writes it, and the whole of contrastive tuning with the whole of pre-training
(paper: at most 10 % more).
"""

import argparse
from typing import Any

import torch
from training import clock, in_own_process, join, parser

from maect.models.attention import flash_kernel
from maect.recipes.flops import peak_flops
from maect.stages import load_recipe

VARIANTS: dict[str, dict[str, Any]] = {
    "sdpa": {},
    "sdpa, compile": {"compile": True},
    "flash_attn": {"attention": "flash_attn"},
    "flash_attn, compile": {"compile": True, "attention": "flash_attn"},
    "sdpa, checkpointing": {"activation_checkpointing": True},
}


def matrix_rate(device: torch.device) -> float:
    """FLOP/s of a large product: in bfloat16, on a CPU in float32, where that is the faster one."""
    n, kind = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(n, n, device=device, dtype=kind) for _ in range(2))
    best = float("inf")
    for _ in range(20):
        began = clock(device)
        _ = a @ b
        best = min(best, clock(device) - began)
    return 2 * n**3 / best


def line(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def measure_size(options: argparse.Namespace, size: str, rate: float, peak: float | None) -> None:
    """All stages and variants of one encoder."""
    fastest: dict[str, float] = {}
    for recipe in ("mae", "head_min", "ct_min"):
        variants: dict[str, dict[str, Any]] = dict(VARIANTS)
        if recipe == "mae":
            variants["as in facebookresearch/mae"] = {"explicit": True}
        for name, changes in variants.items():
            if changes.get("attention") == "flash_attn" and flash_kernel() is None:
                line(size, recipe, name, "not installed", "", "", "", "")
                continue
            found = in_own_process(options, size, recipe, **changes)
            if not found:
                line(size, recipe, name, "out of memory", "", "", "", "")
                continue
            images, flops = found["images_per_second"], found["flops"]
            if name in VARIANTS:
                fastest[recipe] = max(fastest.get(recipe, 0.0), images)
            line(
                size, recipe, name, f"{images:.1f}", f"{flops / 1e12:.2f}",
                f"{100 * flops / rate:.1f} %", f"{100 * flops / peak:.1f} %" if peak else "",
                f"{found['gib']:.2f}",
            )  # fmt: skip
        # The last variant is the step to compare with.
        if recipe == "mae" and found:
            ratio = fastest[recipe] / images
            print(f"{size}: pre-training {ratio:.2f} x as fast as that step", flush=True)
    hours = {r: load_recipe(r, size).epochs / speed for r, speed in fastest.items()}
    extra = (hours["head_min"] + hours["ct_min"]) / hours["mae"]
    print(
        f"{size}: head initialisation and tuning: {100 * extra:.1f} % of pre-training", flush=True
    )


def main() -> None:
    arguments = parser()
    arguments.add_argument("--sizes", default="base,large,huge")
    options = arguments.parse_args()
    device = join(options.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    rate, peak = matrix_rate(device), peak_flops(name)
    sheet = f", data sheet {peak / 1e12:.0f}" if peak else ""
    print(f"{name}: matrix product {rate / 1e12:.2f} TFLOP/s{sheet}; batch {options.batch}")
    line("encoder", "stage", "variant", "images/s", "TFLOP/s", "of product", "of sheet", "GiB")
    line("---", "---", "---", "---:", "---:", "---:", "---:", "---:")
    for size in options.sizes.split(","):
        measure_size(options, size, rate, peak)


if __name__ == "__main__":
    main()
