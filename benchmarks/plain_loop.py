"""Training steps written by hand around the same model, which the engine is compared with."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import torch
from timm.layers import Attention
from timm.models.vision_transformer import Block
from torch import Tensor

from maect.recipes import Encoder
from maect.stages.base import WithoutLabels
from maect.stages.objectives import Views
from maect.train.engine import random_batch

Compiled = Literal["no", "blocks", "passes", "graphs"]
"""Nothing; each transformer block; all that has fixed shapes; that as CUDA graphs
(`mode="reduce-overhead"`)."""


class PlainLoop:
    """PyTorch's autocast and fused AdamW around an objective of a stage without labels.

    With `explicit` it is facebookresearch/mae's loop: attention as two products and a softmax, an
    optimizer that is not fused, and the loss read at every step.
    """

    def __init__(
        self,
        stage: WithoutLabels,
        encoder: Encoder,
        objective: Any,
        device: torch.device,
        compiled: Compiled = "no",
        explicit: bool = False,
    ) -> None:
        self.stage, self.encoder, self.objective, self.device = stage, encoder, objective, device
        self.explicit = explicit
        for module in objective.modules() if explicit else ():
            if isinstance(module, Attention):
                module.__class__, module.fused_attn = Attention, False
        if compiled == "blocks":
            for module in objective.modules():
                if isinstance(module, Block):
                    module.forward = torch.compile(module.forward, dynamic=False)  # type: ignore[method-assign]
        elif compiled != "no":
            mode = "reduce-overhead" if compiled == "graphs" else None
            objective.passes = torch.compile(objective.compute, dynamic=False, mode=mode)
        groups = [{**group, "lr": 1e-4} for group in stage.parameter_groups(objective)]
        fused = device.type == "cuda" and not explicit
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=fused)
        named = objective.encoder.named_parameters()
        self.masters = [p for _, p in named if p.requires_grad]
        self.averages = [p.detach().clone() for p in self.masters]
        pixels = random_batch(stage, encoder, stage.batch_size).images
        self.pixels = [raw.pin_memory() if device.type == "cuda" else raw for raw in pixels]
        self._keep: Callable[[], None] = lambda: None
        if compiled == "graphs":
            self._keep = torch.compiler.cudagraph_mark_step_begin

    def step(self) -> None:
        """One update from a batch on the CPU."""
        b, patches = self.stage.batch_size, self.encoder.patches
        self._keep()
        copied = [raw.to(self.device, non_blocking=True) for raw in self.pixels]
        images = tuple((raw.float() / 255 - 0.45) / 0.22 for raw in copied)
        views, neighbors = len(images[0]), None
        order = None
        if self.stage.mask_ratio:
            order = torch.rand(views, b, patches, device=self.device).argsort(2)
        ids = torch.arange(b, device=self.device)
        for head in [*self.objective.queue_heads.values()][:1]:
            shape = (head.lookups * views, b)
            neighbors = torch.randint(head.settings.topk, shape, device=self.device)
        loss, _ = self.objective(Views(images, order, ids, ids, neighbors))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._average()
        if self.explicit:
            self.read(loss)

    def read(self, loss: Tensor) -> float:
        """Wait for the loss."""
        return float(loss)

    @torch.no_grad()
    def _average(self) -> None:
        self.objective.after_update(lambda part: nullcontext())
        if self.stage.encoder_average is not None:
            torch._foreach_lerp_(self.averages, self.masters, 1 - self.stage.encoder_average)
