"""Steps of an objective without the engine: in float64, sums agree to 1e-12."""

from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist


def trained(objective, stage, index, steps, seed, average=None):
    """Train by AdamW of PyTorch; yields number, views and loss of each step before its update.

    Beside the precision, which is the objective's, batches, masks and draws are those of training.
    `average` is the running average of parameters by name, if the stage has one.
    """
    from maect.data.loader import train_batches

    parameters = dict(objective.named_parameters())
    precision = objective.encoder.cls_token.dtype
    groups = stage.parameter_groups(objective)
    optimizer = torch.optim.AdamW(groups, betas=(stage.beta1, stage.beta2))
    batches = train_batches(
        index, global_batch=stage.batch_size, rank=0, world_size=1, seed=seed,
        views=stage.view_settings(), image_size=objective.encoder.settings.image_size,
        start_step=0, steps=steps, threads=1,
    )  # fmt: skip
    for step, batch in enumerate(batches):
        views = objective.prepare(batch, torch.device("cpu"))
        views.images = tuple(group.to(precision) for group in views.images)
        loss, logged = objective(views)
        optimizer.zero_grad()
        loss.backward()
        yield step, views, loss, logged
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * stage.lr_multiplier(step, steps)
        optimizer.step()
        objective.after_update(lambda part: nullcontext())
        for name, value in (average or {}).items():
            value.lerp_(parameters[name].detach(), 1 - stage.encoder_average)


def copied(objective):
    """Parameters and buffers by name, as they are; those that are trained have gradients."""
    tensors = dict(objective.named_parameters()) | dict(objective.named_buffers())
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    for name, parameter in objective.named_parameters():
        copies[name].requires_grad_(parameter.requires_grad)
    return copies


def steps(context, *, out, shards, stage, settings, encoder, seed, **_):
    """Six steps of gradient descent on several ranks; rank 0 leaves what came of them."""
    from maect.core.distributed import sum_scalars
    from maect.data.index import open_index
    from maect.data.loader import train_batches
    from maect.recipes import Encoder
    from maect.stages import STAGES
    from maect.train.engine import start

    device = start(context)
    stage, encoder = STAGES[stage].model_validate(settings), Encoder.model_validate(encoder)
    objective = stage.objective(encoder, seed).double()
    trained = [p for p in objective.parameters() if p.requires_grad]
    batches = train_batches(
        open_index(Path(shards)), global_batch=stage.batch_size, rank=context.rank,
        world_size=context.world_size, seed=seed, views=stage.view_settings(),
        image_size=encoder.image_size, start_step=0, steps=6, threads=1,
    )  # fmt: skip
    losses = []
    for batch in batches:
        views = objective.prepare(batch, device)
        views.images = tuple(group.double() for group in views.images)
        loss, _ = objective(views)
        objective.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in trained:
                dist.all_reduce(parameter.grad)
                parameter -= 0.1 / context.world_size * parameter.grad
        objective.after_update(lambda part: nullcontext())
        losses.append(sum_scalars([loss], device)[0] / context.world_size)
    if context.rank == 0:
        torch.save({"losses": torch.tensor(losses)} | objective.state_dict(), out)
    dist.barrier()
    return "done"
