"""Replicas in the originals' own layout, a few images each."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from sample_images import jpeg, random_crop, tar_of, write_all
from scipy.io import savemat

from maect.core.errors import UserError
from maect.data.index import open_index
from maect.data.shards import shard
from maect.data.sources.base import DOGS15
from maect.data.sources.imagenet import imagenet_classes

# Out of the sorted order on purpose.
WNIDS = ("n02097130", "n01440764", "n15075141")
PLACES = {"n01440764": 0, "n02097130": 197, "n15075141": 999}


def picture(seed: int) -> bytes:
    return jpeg(random_crop(np.random.default_rng(seed), largest=60))


def train_tar(path: Path, classes: tuple[str, ...] = WNIDS) -> dict[str, bytes]:
    """A tar of a tar for each class; returns the images by class and name."""
    images, tars = {}, []
    for wnid in classes:
        own = {f"{wnid}_{number}.JPEG": picture(number) for number in (10026, 35, 7)}
        images |= {f"{wnid}/{name}": data for name, data in own.items()}
        tars.append((f"{wnid}.tar", tar_of(own.items())))
    path.write_bytes(tar_of(tars))
    return images


def check(out: Path, images: dict[str, bytes], labels: dict[str, int]) -> None:
    index = open_index(out)
    assert index.n == len(images) and index.class_names == imagenet_classes()
    for i, key in enumerate(index.keys()):
        (name,) = (n for n in images if n.rpartition(".")[0].replace(".", "_") == key)
        assert index.read(i) == images[name] and index.labels[i] == labels[name], name


def test_classes_are_the_thousand():
    names = imagenet_classes()
    assert len(names) == 1000 and set(DOGS15) < set(names)
    assert {name: names.index(name) for name in WNIDS} == PLACES


def test_train_as_distributed_and_unpacked(tmp_path):
    packed = tmp_path / "ILSVRC2012_img_train.tar"
    images = train_tar(packed)
    labels = {name: PLACES[name.split("/")[0]] for name in images}
    shard(packed, tmp_path / "a", "imagenet_train_tar", 2, split="train")
    check(tmp_path / "a", images, labels)
    write_all(tmp_path / "unpacked", images)
    shard(tmp_path / "unpacked", tmp_path / "b", "imagenet", 2, split="train")
    check(tmp_path / "b", images, labels)
    assert open_index(tmp_path / "a").digest == open_index(tmp_path / "b").digest


def test_a_train_tar_of_over_eight_gigabytes(tmp_path):
    """Offsets beyond 2^33, in a sparse file: a member of no known kind takes nine gigabytes."""
    path = tmp_path / "train.tar"
    images = train_tar(path)
    classes = path.read_bytes()
    hole = tarfile.TarInfo("hole")
    hole.type, hole.size = b"Z", 9 << 30
    with open(path, "wb") as file:
        file.write(hole.tobuf(tarfile.GNU_FORMAT))
        file.seek(hole.size, 1)
        file.write(classes)
    shard(path, tmp_path / "out", "imagenet_train_tar", 1)
    check(tmp_path / "out", images, {name: PLACES[name.split("/")[0]] for name in images})
    lines = (tmp_path / "out/parts/000000.jsonl").read_text().splitlines()
    assert [json.loads(line)[4] > 9 << 30 for line in lines] == [True] * 9


# The devkit numbers the classes in an order of its own: here 1, 2, 3 and an inner node 1001.
DEVKIT_ORDER = ("n15075141", "n01440764", "n02097130")
TRUTH = (2, 1, 3, 3, 2)


def val_images() -> dict[str, bytes]:
    return {f"ILSVRC2012_val_{i:08d}.JPEG": picture(i) for i in range(1, 6)}


def val_labels() -> dict[str, int]:
    wnids = [DEVKIT_ORDER[t - 1] for t in TRUTH]
    return {n: PLACES[w] for n, w in zip(sorted(val_images()), wnids, strict=True)}


def devkit(root: Path) -> Path:
    folder = root / "ILSVRC2012_devkit_t12"
    (folder / "data").mkdir(parents=True)
    kind = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("num_children", "O")]
    rows = [(number, wnid, "some words", 0) for number, wnid in enumerate(DEVKIT_ORDER, 1)]
    synsets = np.array([*rows, (1001, "n00001740", "entity", 3)], dtype=kind)
    savemat(folder / "data/meta.mat", {"synsets": synsets[:, None]})
    truth = "".join(f"{t}\n" for t in TRUTH)
    (folder / "data/ILSVRC2012_validation_ground_truth.txt").write_text(truth)
    with tarfile.open(root / "ILSVRC2012_devkit_t12.tar.gz", "w:gz") as tar:
        tar.add(folder, folder.name)
    return Path(tar.name)


LABELS = {
    "numbers": ("", "{0}.JPEG {1}\n"),
    "wnids": ("", "{0} {2}\n"),
    "kaggle": ("ImageId,PredictionString\n", "{0},{2} 85 1 499 272\n"),
}
"""First line and lines of lists of labels, with an image's name, class number and WordNet ID."""


@pytest.mark.parametrize(
    ("labels", "packed"), [("devkit", False), ("numbers", True), ("wnids", False), ("kaggle", True)]
)
def test_val(labels, packed, tmp_path):
    images, truth = val_images(), val_labels()
    source, path = tmp_path / "val", tmp_path / "labels.txt"
    if packed:
        source.write_bytes(tar_of(reversed(images.items())))
    else:
        write_all(source, images)
    if labels == "devkit":
        path = devkit(tmp_path)
    else:
        first, line = LABELS[labels]
        values = ((n.removesuffix(".JPEG"), t, imagenet_classes()[t]) for n, t in truth.items())
        path.write_text(first + "".join(line.format(*each) for each in values))
    shard(source, tmp_path / "out", "imagenet_val", 1, labels=path)
    check(tmp_path / "out", images, truth)


@pytest.mark.parametrize(
    ("kind", "names", "labels", "message"),
    [
        ("imagenet", ["n99999999/a.JPEG"], None, "'n99999999' is none of ImageNet's"),
        ("imagenet_v2", ["0/a.jpeg", "n01440764/a.jpeg"], None, "folders 0 to 999"),
        ("imagenet_val", ["a.JPEG"], None, "give --labels"),
        ("imagenet_val", ["a.JPEG"], "other 3", "no label for a.JPEG"),
        ("imagenet_val", ["a.JPEG"], "first 3\nonly_a_name", r"labels.txt:2"),
        ("imagenet_val", ["a.JPEG"], "first 3\na.JPEG 1000", r"labels.txt:2"),
        ("imagenet_val", ["a.JPEG"], "first 3\na.JPEG n00000000", r"labels.txt:2"),
    ],
)
def test_refusals(kind, names, labels, message, tmp_path):
    source = write_all(tmp_path / "in", dict.fromkeys(names, picture(0)))
    file = tmp_path / "labels.txt"
    file.write_text(f"{labels}\n")
    with pytest.raises(UserError, match=message):
        shard(source, tmp_path / "out", kind, 1, labels=file if labels else None)


# Names as in ImageNet-R and ImageNet-A; ImageNet-V2's folders are numbers.
NAMES = ["art_0.jpg", "0.000116_digital clock _ digital clock_0.865662.jpg", "0.1_x_0.2.jpg"]


@pytest.mark.parametrize(
    ("kind", "labels"),
    [
        ("imagenet", {f"{wnid}/{name}": PLACES[wnid] for wnid in WNIDS for name in NAMES}),
        ("imagenet_v2", {f"{number}/0a1b.jpeg": number for number in (0, 2, 10, 100, 999)}),
    ],
)
def test_other_test_sets(kind, labels, tmp_path):
    images = {name: picture(number) for number, name in enumerate(labels)}
    source = write_all(tmp_path / "in", images | {"README.txt": b"classes ..."})
    shard(source, tmp_path / "out", kind, 1)
    check(tmp_path / "out", images, labels)
