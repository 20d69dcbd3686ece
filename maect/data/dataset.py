"""Use a split's shards in other training code: the same images, in the same order.

`ShardDataset` is a map-style `Dataset`.
"""

from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, Sampler

from maect.core.distributed import rank_and_size
from maect.core.errors import UserError
from maect.data.convert import ready_pixels
from maect.data.decode import UnreadableError
from maect.data.index import ID, LABEL, open_index
from maect.data.order import Order

Form = Literal["pil", "tensor"]


class ShardDataset(Dataset[dict[str, Any]]):
    """A map-style data set over a folder of shards; may be pickled for the workers of a DataLoader.

    Attributes:
        index: where each image is (`maect.data.index.Index`); `index.labels` are int64 [n].
        classes: their names, by label.

    Examples:
        >>> images = maect.shards("results/birds/shards/birds/val", transform=to_tensor)
        >>> loader = torch.utils.data.DataLoader(images, batch_size=64, num_workers=2)
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        image: Form = "pil",
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        """Open a split; see `maect.shards`."""
        if image not in get_args(Form):
            raise UserError(f"image {image!r}: {' or '.join(get_args(Form))}")
        self.index = open_index(Path(folder).resolve())
        self.classes = list(self.index.class_names)
        self.image = image
        self.transform = transform
        if image == "pil" and self.index.channels not in (1, 3):
            raise UserError(
                f"{folder}: images of {self.index.channels} channels are no Pillow images; "
                'ask for image="tensor"'
            )

    def __reduce__(self) -> tuple[type["ShardDataset"], tuple[Any, ...]]:
        return ShardDataset, (self.index.directory, self.image, self.transform)

    def __len__(self) -> int:
        return self.index.n

    def __getitem__(self, i: int) -> dict[str, Any]:
        """Return sample number i.

        Returns:
            `image`: upright RGB (or grey, of one channel), or a tensor uint8 [C, H, W], after
            `transform`; `label`: -1 without one; `key`: its name below the source without
            extension; `id`: its number in the split.
        """
        try:
            pixels = ready_pixels(self.index.read(i), self.index.turned, self.index.channels)
        except UnreadableError as error:
            raise self.index.undecodable(i, error) from None
        image: Any
        if self.image == "tensor":
            image = torch.from_numpy(np.array(pixels.transpose(2, 0, 1), order="C"))
        else:
            image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
        return {
            "image": image if self.transform is None else self.transform(image),
            "label": int(self.index.rows[i, LABEL]),
            "key": self.index.key(i),
            "id": int(self.index.rows[i, ID]),
        }

    def batch_sampler(
        self,
        batch_size: int,
        *,
        seed: int,
        steps: int,
        start_step: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> "StepSampler":
        """Return the batches of a run of `steps` steps, for the `batch_sampler` of a DataLoader.

        Args:
            batch_size: of all ranks together.
            steps: of the whole run; epochs follow each other without a gap.
            start_step: steps that are done; the next ones are the same as without a break.
            rank: whose part of each batch to return; by default torch.distributed's rank.

        Raises:
            UserError: `batch_size` is not a multiple of `world_size`.
        """
        own, ranks = rank_and_size()
        rank = own if rank is None else rank
        world_size = ranks if world_size is None else world_size
        if batch_size % world_size:
            raise UserError(f"batch_size {batch_size} is not a multiple of {world_size} ranks")
        if not 0 <= rank < world_size:
            raise UserError(f"rank {rank} of {world_size}: ranks count from 0")
        return StepSampler(
            Order(len(self), seed), range(start_step, steps), batch_size, rank, world_size
        )


class StepSampler(Sampler[list[int]]):
    """One rank's samples of each step, those of `maect.data.loader.train_batches`."""

    def __init__(
        self, order: Order, steps: range, batch_size: int, rank: int, world_size: int
    ) -> None:
        self._order = order
        self._steps = steps
        self._batch_size = batch_size
        self._share = batch_size // world_size
        self._rank = rank

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[list[int]]:
        for step in self._steps:
            start = step * self._batch_size + self._rank * self._share
            yield self._order.take(start, self._share)[0].tolist()
