"""Use a split's shards in other training code: the same images, in the same order.

`ShardDataset` is a map-style `Dataset`; it also gives a stock webdataset pipeline, and files.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from isal import isal_zlib
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import Dataset, Sampler

from maect.core.distributed import rank_and_size
from maect.core.errors import UserError, counted
from maect.core.files import atomic_write
from maect.data.convert import ARRAY, ready_pixels
from maect.data.decode import UnreadableError, extension_of
from maect.data.index import ID, LABEL, OFFSET, SHARD, Index, open_index
from maect.data.order import Order
from maect.data.sources.archives import is_image, sample_key, tar_members
from maect.data.sources.base import UNLABELLED

if TYPE_CHECKING:  # it takes a second to import
    from webdataset import WebDataset

Form = Literal["pil", "tensor"]
_AT_ONCE = 16
_RUNS_CODE = re.compile(r"(^|\.)(pyd|pkl|pickle|pth)(\.gz)*$")
"""Members of somebody else's tar that webdataset would unpickle, also unpacked."""


class ShardDataset(Dataset[dict[str, Any]]):
    """A map-style data set over a folder of shards; may be pickled for the workers of a DataLoader.

    Attributes:
        index: where each image is (`maect.data.index.Index`); `index.labels` are int64 [n].
        classes: their names, by label.
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

    def order(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the samples' numbers, int64 [n], in the order of an epoch of a training."""
        n = len(self)
        return Order(n, seed).take(epoch * n, n)[0]

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

    def webdataset(self, **options: Any) -> "WebDataset":
        """Return a stock pipeline, for `.shuffle(…).decode("pil").to_tuple("jpg", "cls")`.

        It yields files as they are stored, with the split's labels. Unlike a pipeline over the bare
        tars, it leaves out samples that a view lacks and members that webdataset would unpickle. It
        raises `UserError` with the tar's name for a changed image and for a tar that ends early.
        """
        from webdataset import WebDataset

        used = np.unique(self.index.rows[:, SHARD]).tolist()
        urls = [str(self.index.shards[number]) for number in used]
        return WebDataset(urls, **{"shardshuffle": False} | options).compose(
            partial(_check_samples, self)
        )

    def extract(self, folder: str | PathLike[str]) -> int:
        """Write every image as CLASS/KEY.ext, of unlabelled ones KEY.ext; return their number.

        A class folder that keys begin with is not repeated. Stopped, it continues when it is called
        again: files that are there already are compared.
        """
        folder = Path(folder)
        names = self._file_names()

        def write(i: int) -> None:
            data = self.index.read(i)
            extension = "npy" if data[:6] == ARRAY else extension_of(data)
            path = folder / f"{names[i]}.{extension}"
            if path.exists():
                if path.read_bytes() != data:
                    raise UserError(f"{path}: holds something else; choose another folder")
                return
            with atomic_write(path) as temporary:
                temporary.write_bytes(data)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for start in range(0, len(self), 1 << 10):
                list(pool.map(write, range(start, min(start + (1 << 10), len(self)))))
        return len(self)

    def _file_names(self) -> list[str]:
        """Return the path of each image below the folder, without extension."""
        names, labels = self.index.keys(), self.index.labels.tolist()
        folders = ["" if n == UNLABELLED else f"{self.classes[n]}/" for n in labels]
        if not all(map(str.startswith, names, folders)):
            names = list(map(str.__add__, folders, names))
        for name in names:
            if name.startswith("/") or ".." in PurePosixPath(name).parts:
                raise UserError(f"{self.index.directory}: sample {name!r} leads out of a folder")
        if len(set(names)) < len(names):
            raise UserError(f"{self.index.directory}: some samples would have the same file")
        return names


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


def _check_samples(
    dataset: ShardDataset, samples: Iterable[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the samples of the index, with its labels; UserError if a tar lacks some of them."""
    index = dataset.index
    elsewhere = index.record.get("in_place")
    shards = np.asarray(index.rows[:, SHARD])
    numbers = {str(path): number for number, path in enumerate(index.shards)}
    for url, found in groupby(samples, lambda sample: sample["__url__"]):
        rows = _rows_of(index, numbers[url], np.flatnonzero(shards == numbers[url]).tolist())
        missing = set(rows)
        for sample in found:
            row = rows.get(sample["__key__"])
            # Members of a sample may lie apart in somebody else's tar; webdataset gives each part.
            if row is None or (elsewhere and not any(is_image(f"k.{name}") for name in sample)):
                continue
            missing.discard(sample["__key__"])
            _, _, _, size, label, *_ = index.rows[row].tolist()
            files = [value for value in sample.values() if isinstance(value, bytes)]
            wanted = index.checksums[index.rows[row, ID]]
            if not any(len(x) == size and isal_zlib.crc32(x) == wanted for x in files):
                index.read(row)  # says how it is damaged
                raise UserError(f"{url}: sample {sample['__key__']} is not the indexed image")
            for name in list(filter(_RUNS_CODE.search, sample)):
                del sample[name]
            sample.pop("cls", None)
            yield sample if label == UNLABELLED else {**sample, "cls": str(label).encode()}
        if missing:
            raise UserError(
                f"{url}: webdataset misses {len(missing)} of {counted(len(rows), 'image')} "
                f"({min(missing)} first); check the shards with maect shard --verify"
            )


def _rows_of(index: Index, shard: int, rows: list[int]) -> dict[str, int]:
    """Return the row of each sample of a tar by webdataset's key.

    Raises:
        UserError: some are links, which webdataset leaves out.
    """
    if not index.record.get("in_place"):
        return {index.key(i): i for i in rows}
    path = index.shards[shard]
    with open(path, "rb") as file:
        members = tar_members(file, 0, str(path))
    at = {int(index.rows[i, OFFSET]): i for i in rows}
    # Where a link leads the file itself lies, which comes before it.
    keys = {offset: sample_key(name) for name, offset, _ in reversed(members) if offset in at}
    if len(keys) < len(rows):
        raise UserError(
            f"{path}: {counted(len(rows) - len(keys), 'image')} by a link, which webdataset leaves "
            "out; make the tar with tar --dereference --hard-dereference, and index that"
        )
    return {key: at[offset] for offset, key in keys.items()}
