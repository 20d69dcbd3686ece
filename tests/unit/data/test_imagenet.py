"""Replicas in the originals' own layout, a few images each."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from sample_images import jpeg, random_crop
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


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def write_all(root: Path, images: dict[str, bytes]) -> None:
    for name, data in images.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)


def train_tar(path: Path, classes: tuple[str, ...] = WNIDS) -> dict[str, bytes]:
    images = {}
    with tarfile.open(path, "w") as outer:
        for wnid in classes:
            stream = io.BytesIO()
            with tarfile.open(fileobj=stream, mode="w") as inner:
                for number in (10026, 35, 7):
                    name = f"{wnid}_{number}.JPEG"
                    images[f"{wnid}/{name}"] = picture(number)
                    add(inner, name, images[f"{wnid}/{name}"])
            add(outer, f"{wnid}.tar", stream.getvalue())
    return images


def check(out: Path, images: dict[str, bytes], labels: dict[str, int]) -> None:
    index = open_index(out)
    assert index.n == len(images) and index.class_names == imagenet_classes()
    for i in range(index.n):
        key = index.keys()[i]
        (name,) = (n for n in images if n.rpartition(".")[0].replace(".", "_") == key)
        assert index.read(i) == images[name]
        assert index.labels[i] == labels[name], name


def test_classes_are_the_thousand():
    names = imagenet_classes()
    assert len(names) == 1000
    assert {name: names.index(name) for name in WNIDS} == PLACES
    assert set(DOGS15) < set(names)


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
    parts = [tmp_path / "a.tar", tmp_path / "b.tar"]
    images = train_tar(parts[0], WNIDS[:1]) | train_tar(parts[1], WNIDS[1:])
    hole = tarfile.TarInfo("hole")
    hole.type, hole.size = b"Z", 9 << 30
    path = tmp_path / "train.tar"
    with open(path, "wb") as file:
        with tarfile.open(parts[0]) as tar:
            (member,) = tar.getmembers()
            file.write(parts[0].read_bytes()[: member.offset_data + -(-member.size // 512) * 512])
        file.write(hole.tobuf(tarfile.GNU_FORMAT))
        file.seek(hole.size, 1)
        file.write(parts[1].read_bytes())
    shard(path, tmp_path / "out", "imagenet_train_tar", 1)
    check(tmp_path / "out", images, {name: PLACES[name.split("/")[0]] for name in images})
    lines = (tmp_path / "out/parts/000000.jsonl").read_text().splitlines()
    offsets = [json.loads(line)[4] for line in lines]
    assert sum(offset > 9 << 30 for offset in offsets) == 6


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
    synsets = np.array(
        [(i, w, "some words", 0) for i, w in enumerate(DEVKIT_ORDER, 1)]
        + [(1001, "n00001740", "entity", 3)],
        dtype=kind,
    )
    savemat(folder / "data/meta.mat", {"synsets": synsets[:, None]})
    truth = "".join(f"{t}\n" for t in TRUTH)
    (folder / "data/ILSVRC2012_validation_ground_truth.txt").write_text(truth)
    with tarfile.open(root / "ILSVRC2012_devkit_t12.tar.gz", "w:gz") as tar:
        tar.add(folder, folder.name)
    return Path(tar.name)


@pytest.mark.parametrize(
    ("labels", "packed"), [("devkit", False), ("numbers", True), ("wnids", False), ("kaggle", True)]
)
def test_val(labels, packed, tmp_path):
    images, truth = val_images(), val_labels()
    source = tmp_path / ("ILSVRC2012_img_val.tar" if packed else "val")
    if packed:
        with tarfile.open(source, "w") as tar:
            for name in reversed(images):
                add(tar, name, images[name])
    else:
        write_all(source, images)
    path = tmp_path / "labels.txt"
    if labels == "devkit":
        path = devkit(tmp_path)
    elif labels == "numbers":
        path.write_text("".join(f"{n} {t}\n" for n, t in truth.items()))
    else:
        names = imagenet_classes()
        separator, suffix = (",", " 85 1 499 272") if labels == "kaggle" else (" ", "")
        lines = [
            f"{n.removesuffix('.JPEG')}{separator}{names[t]}{suffix}\n" for n, t in truth.items()
        ]
        path.write_text("".join(["ImageId,PredictionString\n"] * (labels == "kaggle") + lines))
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
    write_all(tmp_path / "in", dict.fromkeys(names, picture(0)))
    file = tmp_path / "labels.txt"
    file.write_text(f"{labels}\n")
    given = {"labels": file if labels else None}
    with pytest.raises(UserError, match=message):
        shard(tmp_path / "in", tmp_path / "out", kind, 1, **given)


def test_v2_folders_are_numbers(tmp_path):
    labels = {f"{number}/0a1b2c{number}.jpeg": number for number in (0, 2, 10, 100, 999)}
    images = {name: picture(number) for name, number in labels.items()}
    root = tmp_path / "imagenetv2-matched-frequency-format-val"
    write_all(root, images)
    shard(root, tmp_path / "out", "imagenet_v2", 1)
    check(tmp_path / "out", images, labels)


@pytest.mark.parametrize(
    ("root", "names"),
    [
        ("imagenet-r", ["art_0.jpg", "sketch_12.jpg"]),
        ("imagenet-a", ["0.000116_digital clock _ digital clock_0.865662.jpg", "0.1_x_0.2.jpg"]),
    ],
)
def test_renditions_and_adversarial(root, names, tmp_path):
    labels = {f"{wnid}/{name}": PLACES[wnid] for wnid in WNIDS for name in names}
    images = {name: picture(number) for number, name in enumerate(labels)}
    write_all(tmp_path / root, images)
    (tmp_path / root / "README.txt").write_text("classes ...")
    shard(tmp_path / root, tmp_path / "out", "imagenet", 1)
    check(tmp_path / "out", images, labels)
