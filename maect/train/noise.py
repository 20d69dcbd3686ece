"""Batches of noise, where shapes matter and images do not."""

import numpy as np
import torch

from maect.data.loader import Batch
from maect.recipes import Encoder, views_by_size
from maect.train.stage import Training


def random_batch(stage: Training, encoder: Encoder, images: int, seed: int = 0) -> Batch:
    """A rank's batch of noise, on the CPU, as the loader decodes it."""
    noise = torch.Generator().manual_seed(seed)
    sizes = views_by_size(stage.view_settings(), encoder.image_size).items()
    channels = encoder.pixels.channels
    pixels = tuple(
        torch.randint(
            256, (len(views), images, channels, side, side), dtype=torch.uint8, generator=noise
        )
        for side, views in sizes
    )
    ids = np.arange(images, dtype=np.int64)
    return Batch(0, ids, ids * 0, ids % 10, pixels)
