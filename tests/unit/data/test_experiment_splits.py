"""Every kind of source, sharded as an experiment file says and the workflow's rules do it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from sample_images import image_folder
from test_imagenet import PLACES, WNIDS, devkit, train_tar, val_images, val_labels

from maect.cli import main
from maect.core.errors import UserError
from maect.data.config import CONFIG
from maect.data.index import open_index
from maect.data.sources.base import DOGS15
from maect.data.sources.imagenet import imagenet_classes
from maect.experiment import Experiment, load
from maect.experiment.start import missing_images

ROOT = Path(__file__).parents[3]


def experiment(folder: Path, splits: dict[str, Any], **changes: Any) -> Path:
    file = folder / "mine.yaml"
    values = {"storage": str(folder / "results"), "datasets": {"mine": {"splits": splits}}}
    file.write_text(yaml.safe_dump(values | {"runs": {}} | changes, sort_keys=False))
    return file


def shard_as_the_rules_do(wanted: Experiment, split: str) -> Path:
    out = wanted.shards("mine", split)
    wanted.shards_config("mine", split).write(out / CONFIG)
    assert main(["shard", str(out / CONFIG)]) == 0
    return out


def test_options_of_every_kind(tmp_path, monkeypatch):
    monkeypatch.setenv("MINE", str(tmp_path / "images"))
    images = tmp_path / "images"
    images.mkdir()
    train_tar(images / "ILSVRC2012_img_train.tar", (*WNIDS, DOGS15[0]))
    devkit(images)
    (images / "val").mkdir()
    for name, data in val_images().items():
        (images / "val" / name).write_bytes(data)
    image_folder(images / "folders")
    (images / "bad.txt").write_text("c0/000.jpg\n")
    names = [f"c{label}/{number:03d}.jpg" for label in range(3) for number in range(7)]
    (images / "most.txt").write_text("\n".join([*names, "c1/gone.jpg"]))
    (images / "two.txt").write_text("n15075141\nn01440764\n")
    file = experiment(tmp_path, {
        "train": {
            "images": "$MINE/ILSVRC2012_img_train.tar", "kind": "imagenet_train_tar", "shards": 2,
        },
        "val": {
            "images": "$MINE/val", "kind": "imagenet_val",
            "labels": "$MINE/ILSVRC2012_devkit_t12.tar.gz",
        },
        "folder": {
            "images": "$MINE/folders", "exclude": "$MINE/bad.txt", "shards": 2,
            "only": "$MINE/most.txt", "skip_unreadable": True,
        },
        "view": {"kind": "view", "of": "train", "classes": "$MINE/two.txt"},
    })  # fmt: skip
    wanted = load(str(file))
    assert missing_images(wanted) == []
    found = {name: open_index(shard_as_the_rules_do(wanted, name)) for name in
             wanted.datasets["mine"].splits}  # fmt: skip
    assert {name: index.n for name, index in found.items()} == {
        "train": 12, "val": 5, "folder": 20, "view": 6,
    }  # fmt: skip
    assert set(found["train"].labels) == {*PLACES.values(), imagenet_classes().index(DOGS15[0])}
    truth = {name.removesuffix(".JPEG"): label for name, label in val_labels().items()}
    assert dict(zip(found["val"].keys(), found["val"].labels, strict=True)) == truth
    view = found["view"]
    assert view.class_names == ("n15075141", "n01440764")
    assert {view.key(i).split("/")[0]: int(view.labels[i]) for i in range(6)} == {
        "n15075141": 0, "n01440764": 1,
    }  # fmt: skip
    assert not list(wanted.shards("mine", "view").glob("*.tar"))


IMAGES = {"train": {"images": "/i/train"}, "val": {"images": "/i/val", "kind": "imagenet"}}


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"kind": "view", "of": "dogs", "classes": "dogs15"}, "`of`: 'dogs' is no split"),
        ({"kind": "view", "of": "val"}, "kind view needs `classes`"),
        ({"kind": "view", "classes": "dogs15"}, "kind view needs `of`"),
        (
            {"kind": "view", "of": "val", "classes": "dogs15", "images": "/i"},
            "kind view takes no `images`",
        ),
        ({"images": "/i", "classes": "dogs15"}, "kind folder takes no `classes`"),
        ({"images": "/i", "kind": "imagenet_val"}, "kind imagenet_val needs `labels`"),
        ({"kind": "imagenet"}, "needs its source as `images`"),
        ({"images": "/i", "kind": "folders"}, "unknown kind of source; did you mean 'folder'?"),
    ],
)
def test_mistakes_are_named_on_reading(split, message, tmp_path):
    with pytest.raises(UserError) as fault:
        load(str(experiment(tmp_path, IMAGES | {"dogs": split})))
    assert message in str(fault.value) and "mine.yaml" in str(fault.value)
    assert "\n" not in str(fault.value)


def test_lost_lists_are_named_before_anything_runs(tmp_path):
    splits = {
        "val": {"images": str(tmp_path), "kind": "imagenet_val", "labels": "/no/devkit.tar.gz"},
        "unpacked": {"images": str(tmp_path), "kind": "imagenet_val", "labels": str(tmp_path)},
        "some": {"kind": "view", "of": "val", "classes": "/no/classes.txt"},
    }
    lost = missing_images(load(str(experiment(tmp_path, splits))))
    assert [fault.split(": ")[-1] for fault in lost] == [
        "no file /no/devkit.tar.gz (split val)",
        f"no file {tmp_path} (split unpacked)",
        "no file /no/classes.txt (split some)",
    ]


def test_view_in_the_workflow(tmp_path):
    image_folder(tmp_path / "images", per_class=4)
    (tmp_path / "classes.txt").write_text("c2\nc0\n")
    splits = {
        "val": {"images": str(tmp_path / "images")},
        "some": {"kind": "view", "of": "val", "classes": str(tmp_path / "classes.txt")},
    }
    command = [Path(sys.executable).parent / "snakemake", "--snakefile", ROOT / "Snakefile"]
    command += ["--directory", tmp_path, "--cores", "2", "--nolock", "--quiet"]
    command += ["--config", f"experiment={experiment(tmp_path, splits)}", "--", "shards"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    root = tmp_path / "results/shards/mine"
    assert np.bincount(open_index(root / "some").labels).tolist() == [4, 4]
    left = {"config.yaml", "crc32.npy", "done", "index.json", "index.npy", "keys.txt"}
    assert {p.name for p in (root / "some").iterdir()} == left
