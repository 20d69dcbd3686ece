import threading
import zlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from sample_images import flip

from maect.core.errors import UserError
from maect.data import random
from maect.data.decode import read_rgb
from maect.data.index import ID, Index, open_index
from maect.data.loader import (
    Batch,
    BatchLayout,
    Packed,
    evaluation_parts,
    train_batches,
    view_parts,
)
from maect.data.transforms import random_crops
from maect.recipes import AUGMENTATIONS, View

VIEWS = AUGMENTATIONS["min"]


def stream(index: Index, steps: int, start: int = 0, **changes) -> Iterator[Batch]:  # type: ignore[no-untyped-def]
    arguments = {
        "global_batch": 20, "rank": 0, "world_size": 1, "seed": 3, "views": VIEWS,
        "image_size": 32, "threads": 2,
    }  # fmt: skip
    return train_batches(index, start_step=start, steps=steps, **(arguments | changes))


def batches(index: Index, steps: int, start: int = 0, **changes) -> list[Batch]:  # type: ignore[no-untyped-def]
    return list(stream(index, steps, start, **changes))


def same(a: Batch, b: Batch) -> bool:
    return (
        a.step == b.step
        and np.array_equal(a.ids, b.ids)
        and np.array_equal(a.epochs, b.epochs)
        and np.array_equal(a.labels, b.labels)
        and torch.equal(a.images[0], b.images[0])
    )


def test_every_sample_once_in_each_of_three_epochs(index):
    # 20 does not divide 24; three epochs are 72 samples, of four batches 80.
    found = batches(index, 4)
    ids = np.concatenate([b.ids for b in found])[:72].reshape(3, 24)
    epochs = np.concatenate([b.epochs for b in found])[:72].reshape(3, 24)
    assert (np.sort(ids, 1) == np.arange(24)).all()
    assert (epochs == np.arange(3)[:, None]).all()
    assert all(len(set(b.epochs)) == 2 for b in found[1:])
    for b in found:
        assert (b.labels == index.labels[b.ids]).all()
        assert b.images[0].shape == (2, 20, 3, 32, 32) and b.images[0].dtype == torch.uint8


@pytest.mark.parametrize("start", [1, 4, 1000])
def test_resumed_batches_are_bit_identical(index, start):
    reference = batches(index, 6) if start < 6 else batches(index, 6, start=start - 3)
    resumed = batches(index, 2, start=start)
    assert all(same(a, b) for a, b in zip(reference[start % 997 :][:2], resumed, strict=True))


def test_threads_do_not_matter(index):
    reference = batches(index, 3, threads=1)
    for threads in (2, 7):
        assert all(map(same, reference, batches(index, 3, threads=threads)))
    assert not same(reference[0], batches(index, 1, seed=4)[0])


def test_evaluation_is_resize_and_centre_crop(index):
    from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Resize

    reference = Compose([Resize(37, interpolation=InterpolationMode.BICUBIC), CenterCrop(32)])
    parts = [range(10), range(10, 19), range(19, 24), range(24, 24)]
    found = list(evaluation_parts(index, image_size=32, parts=parts, threads=2))
    assert [len(labels) for _, labels, _ in found] == [10, 9, 5, 0]
    images = torch.cat([images for images, _, _ in found])
    assert np.concatenate([ids for _, _, ids in found]).tolist() == list(range(24))
    assert (np.concatenate([labels for _, labels, _ in found]) == index.labels).all()
    for i in range(24):
        expected = np.asarray(reference(read_rgb(index.read(i)))).astype(int)
        assert abs(images[i].permute(1, 2, 0).numpy() - expected).max() <= 2
    ((squeezed, _, _),) = evaluation_parts(
        index, image_size=32, parts=[range(24)], threads=2, squeezed=True
    )
    for i in range(24):
        whole = read_rgb(index.read(i)).resize((32, 32), Image.Resampling.BICUBIC)
        assert abs(squeezed[i].permute(1, 2, 0).numpy().astype(int) - np.asarray(whole)).max() <= 2


def test_wrong_arguments_are_named(index):
    with pytest.raises(UserError, match="batch_size 20 is not a multiple of 3 ranks"):
        batches(index, 1, world_size=3)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        batches(index, 1, rank=2, world_size=2)
    with pytest.raises(UserError, match="resize 16"):
        list(evaluation_parts(index, image_size=32, resize=16, parts=[range(1)], threads=1))


def test_damage_after_sharding_names_the_sample(copy):
    """One bit is enough; with a checksum of wrong bytes it must not decode."""
    index = open_index(copy)
    _, shard, offset, size, *_ = index.rows[4].tolist()
    flip(index.shards[shard], offset + size - 3)
    with pytest.raises(UserError, match=rf"sample 4 \({index.key(4)}\) is damaged: its checksum"):
        batches(open_index(copy), 2)
    with open(index.shards[shard], "r+b") as file:
        file.seek(offset)
        file.write(bytes(size))
    sums = index.checksums.copy()
    sums[index.rows[4, ID]] = zlib.crc32(bytes(size))
    with pytest.raises(UserError, match=rf"cannot decode sample 4 \({index.key(4)}\)"):
        batches(replace(open_index(copy), checksums=sums), 2)


def test_abandoned_loader_leaves_no_threads(index):
    before = threading.active_count()
    loader = stream(index, 1000, global_batch=8, seed=0, image_size=16, threads=3)
    next(iter(loader))
    assert threading.active_count() > before
    loader.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


LOCAL = View(crop_scale=(0.05, 0.25), size=12)


def test_views_of_several_sizes_come_from_one_decode(index, monkeypatch):
    views = (VIEWS[0], LOCAL, LOCAL, VIEWS[1])
    reads = []
    read = Index.read
    monkeypatch.setattr(Index, "read", lambda self, i: reads.append(i) or read(self, i))
    found = batches(index, 3, views=views)
    assert len(reads) == 3 * 20
    for batch in found:
        assert [tuple(group.shape) for group in batch.images] == [
            (2, 20, 3, 32, 32), (2, 20, 3, 12, 12),
        ]  # fmt: skip
        # Each as drawn for its own number, whatever stands before it.
        for group, numbers in zip(batch.images, ([0, 3], [1, 2]), strict=True):
            size = group.shape[-1]
            for images, number in zip(group, numbers, strict=True):
                for row in (0, 7, 19):
                    width, height = (
                        np.array([s]) for s in read_rgb(read(index, batch.ids[row])).size
                    )
                    crop = random_crops(
                        width, height, views[number].crop_scale, size,
                        seed=3, epochs=batch.epochs[row], ids=batch.ids[row : row + 1], view=number,
                    )  # fmt: skip
                    out = np.zeros((1, 3, size, size), np.uint8)
                    index.render(int(batch.ids[row]), crop, out)
                    assert np.array_equal(out[0], images[row].numpy())


def test_ranks_restarts_and_packed_memory_of_several_sizes(index):
    views = (*VIEWS, LOCAL, LOCAL, LOCAL)
    whole = batches(index, 3, views=views)
    ranks = [batches(index, 3, views=views, rank=r, world_size=4) for r in range(4)]
    later = batches(index, 1, start=2, views=views)
    packed = batches(index, 3, views=views, draw=lambda epochs, ids: {})
    for number in range(2):
        for step, batch in enumerate(whole):
            parts = torch.cat([rank[step].images[number] for rank in ranks], 1)
            assert torch.equal(parts, batch.images[number])
            images, values = packed[step].to(torch.device("cpu"), lambda epochs, ids: {})
            assert torch.equal(images[number], batch.images[number])
            assert values.keys() == {"ids", "labels"}
        assert torch.equal(later[0].images[number], whole[2].images[number])
    for step, batch in enumerate(whole):
        for name in ("ids", "epochs", "labels"):
            parts = np.concatenate([getattr(rank[step], name) for rank in ranks])
            assert np.array_equal(parts, getattr(batch, name))
    half = whole[0].part(slice(5, 15))
    assert torch.equal(half.images[1], whole[0].images[1][:, 5:15]) and len(half.ids) == 10
    assert (half.step, half.epochs.tolist()) == (0, [0] * 10)


def test_views_of_parts_are_those_of_a_trainings_first_epoch(index):
    views = (*VIEWS, LOCAL)
    (whole,) = batches(index, 1, views=views, global_batch=24)
    parts = [range(3, 10), range(1)]
    found = view_parts(index, views=views, image_size=32, seed=3, parts=parts, threads=2)
    for number, (batch, part) in enumerate(zip(found, parts, strict=True)):
        assert batch.step == number and batch.ids.tolist() == [*part]
        places = [whole.ids.tolist().index(row) for row in part]
        assert same(replace(whole.part(places), step=number), batch)
        assert torch.equal(whole.images[1][:, places], batch.images[1])


def test_decoded_views_are_changed_by_epoch_and_sample(index):
    def change(views, epoch, sample):  # type: ignore[no-untyped-def]
        views[0][:, 0, 0] = (epoch, sample, len(views))

    plain = batches(index, 3)
    for one, other in zip(plain, batches(index, 3, change=change), strict=True):
        expected = torch.stack(
            [torch.from_numpy(part) for part in (one.epochs, one.ids, one.ids * 0 + 2)], 1
        )
        one.images[0][0, :, :, 0, 0] = expected.to(torch.uint8)
        assert same(one, other)


def test_packed_tensors_are_aligned_and_apart():
    shapes = {"a": (torch.uint8, (3, 5)), "b": (torch.int64, (2,)), "c": (torch.float32, (4, 1))}
    tensors = Packed(BatchLayout(shapes), False).tensors
    for number, tensor in enumerate(tensors.values()):
        tensor.fill_(number)
    start = tensors["a"].data_ptr()
    for number, (name, (kind, shape)) in enumerate(shapes.items()):
        assert (tensors[name].dtype, tuple(tensors[name].shape)) == (kind, shape)
        assert (tensors[name] == number).all() and (tensors[name].data_ptr() - start) % 64 == 0


def test_packed_batches_hold_what_is_drawn_for_them(index):
    def draw(epochs, ids):  # type: ignore[no-untyped-def]
        return {
            "masks": random.ids_shuffle(4, 3, epochs, ids, range(2)),
            "odd": torch.from_numpy((ids % 2).astype(np.int8)),
            "kept": torch.from_numpy(epochs.astype(np.float32) / 7),
        }

    plain, packed = batches(index, 3), batches(index, 3, draw=draw)
    for one, other in zip(plain, packed, strict=True):
        assert same(one, other) and other.packed is not None
        (images, expected), (others, found) = (
            batch.to(torch.device("cpu"), draw) for batch in (one, other)
        )
        assert all(map(torch.equal, images, others))
        assert expected.keys() == found.keys() == {"ids", "labels", "masks", "odd", "kept"}
        for name, value in expected.items():
            assert torch.equal(value, found[name]) and value.dtype == found[name].dtype
