"""Finished runs whose encoder has random weights."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from maect.core.files import sha256_file, write_record
from maect.models.vit import build_encoder, seeded
from maect.models.weights import save_encoder
from maect.recipes import Encoder
from maect.records import RunRecord


def finished_run(folder: Path, encoder: Encoder, pooling: str, **record: Any) -> nn.Module:
    """Write a run with its record, changed by `record`, and return its encoder."""
    with seeded(1):
        module = build_encoder(encoder).eval()
        with torch.no_grad():  # norms and biases that are not ones and zeros
            for parameter in module.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape))
    file = folder / "encoder.safetensors"
    save_encoder(file, module.state_dict(), encoder, pooling)
    values = {
        "run": folder.name, "stage": "tune", "source": "head_min", "seed": 3,
        "source_revision": "abc", "finished": "2026-01-01T00:00:00Z", "settings": {"epochs": 7},
        "versions": {"torch": "2"}, "encoder": encoder.model_dump(mode="json"),
        "sha256": {file.name: sha256_file(file)},
    }  # fmt: skip
    write_record(RunRecord.path(folder), values | record)
    return module
