"""The engine takes the same steps as a training loop in plain PyTorch, without DeepSpeed."""

import math
from pathlib import Path

import numpy as np
import torch
from lookups import clear
from ranks import run
from safetensors.torch import load_file
from tiny_runs import losses, metrics

from maect.data.index import open_index
from maect.data.loader import train_batches
from maect.data.random import ids_shuffle, lookup_numbers
from maect.data.transforms import augment
from maect.models import heads
from maect.recipes import Encoder, Pixels
from maect.stages.objectives import Views
from maect.stages.pretrain import Pretrain
from maect.stages.tune import Tune


def plain(value, kind, steps, rates):
    """Losses, gradient norms and final encoder; `rates` gives a parameter's rate and decay."""
    stage = kind.model_validate(value["settings"])
    shape = Encoder.model_validate(value["encoder"])
    seed, source = value["seed"], value["source"]
    objective = stage.build(shape, seed, source and Path(source))
    trained = [(n, p) for n, p in objective.named_parameters() if p.requires_grad]
    average = {n: p.detach().clone() for n, p in trained if n.startswith("encoder.")}
    index, views = open_index(Path(value["shards"])), stage.view_settings()
    batches = train_batches(
        index, global_batch=16, rank=0, world_size=1, seed=seed, views=views, image_size=16,
        start_step=0, steps=steps, threads=1,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(
        [{"params": [p], "lr": 0.0, "weight_decay": rates(n, p)[1]} for n, p in trained],
        betas=(0.9, 0.95),
    )
    found, norms, warmup = [], [], steps // 5
    for step, batch in enumerate(batches):
        images = torch.stack(
            [
                augment(batch.images[0][i], v, i, seed, batch.epochs, batch.ids, Pixels())
                for i, v in enumerate(views)
            ]
        )
        order = (
            ids_shuffle(16, seed, batch.epochs, batch.ids, range(2)) if stage.mask_ratio else None
        )
        neighbors = lookup_numbers(3, seed, batch.epochs, batch.ids, 2)
        ids, labels = torch.from_numpy(batch.ids), torch.from_numpy(batch.labels)
        loss, _ = objective(Views((images,), order, ids, labels, neighbors))
        optimizer.zero_grad()
        loss.backward()
        found.append(loss.item())
        norms.append(math.sqrt(sum(float(p.grad.square().sum()) for _, p in trained)))
        cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
        factor = (step + 1) / (warmup + 1) if step < warmup else cosine
        for group, (name, parameter) in zip(optimizer.param_groups, trained, strict=True):
            group["lr"] = factor * rates(name, parameter)[0]
        optimizer.step()
        if kind is Tune:
            with torch.no_grad():
                for name, parameter in trained:
                    if name in average:
                        average[name] = 0.99 * average[name] + 0.01 * parameter
                head = objective.head
                for slow, fast in zip(
                    head.slow_projector.children(), head.projector.children(), strict=True
                ):
                    for name in ("weight", "bias"):
                        if getattr(fast, name, None) is not None:
                            old, new = getattr(slow, name), getattr(fast, name)
                            old.copy_(0.9 * old + 0.1 * new)
                    for name in ("running_mean", "running_var"):
                        if hasattr(fast, name):
                            getattr(slow, name).copy_(getattr(fast, name))
    final = average if kind is Tune else {n: p.detach() for n, p in trained}
    return found, norms, {n.removeprefix("encoder."): v for n, v in final.items()}


def test_same_steps(job, tmp_path, monkeypatch):
    """DeepSpeed's stage 0 on one rank, and its stage 1 on two."""
    for ranks in (1, 2):
        folder = tmp_path / f"{ranks}"
        mae = job("mae", "mae", folder=folder)
        # Two epochs from this seed: no lookup hangs on a last bit, whatever sums in which order.
        tune = job("tune", "ct_min", tmp_path / "1/mae", folder=folder, epochs=2) | {"seed": 7}
        assert run(ranks, mae, tune, log=tmp_path / "log") == ["done"] * 2
    assert "untested optimizer" not in (tmp_path / "log").read_text()
    monkeypatch.setattr(heads, "topk_nn", clear)

    def mae_rates(name, parameter):
        return 1e-3 * 16 * 2 / 256, 0.05 if parameter.ndim > 1 else 0.0

    def tune_rates(name, parameter):
        peak, matrix = 1e-3 * 16 * 2 / 256, parameter.ndim > 1
        if name.startswith("head."):
            return peak, 1e-5 if matrix else 0.0
        scale = {"blocks.2": 0.65**2, "blocks.3": 0.65, "norm": 1.0}
        factor = next(f for key, f in scale.items() if name.startswith(f"encoder.{key}"))
        return peak * factor, 0.05 if matrix else 0.0

    for value, kind, steps, rates in ((mae, Pretrain, 10, mae_rates), (tune, Tune, 5, tune_rates)):
        found, norms, final = plain(value, kind, steps, rates)
        assert max(norms) > 1.2  # gradients are not clipped, which would show from here on
        for ranks in ("1", "2"):
            folder = tmp_path / ranks / Path(value["folder"]).name
            # fp32 sums over two halves of the batch instead of the whole, see test_world_size
            np.testing.assert_allclose(losses(folder), found, rtol=2e-5)
            logged = [line["grad_norm"] for line in metrics(folder)]
            np.testing.assert_allclose(logged, norms, rtol=1e-3)
            saved = load_file(folder / "encoder.safetensors")
            for name in final.keys() & saved.keys():
                torch.testing.assert_close(saved[name], final[name], rtol=0, atol=1e-4)
