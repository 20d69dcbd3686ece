"""Splits of an experiment file, as the workflow's rules shard them; mistakes in them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from sample_images import image_folder, write_all
from test_imagenet import devkit, val_images, val_labels

from maect.core.errors import UserError
from maect.data.index import open_index
from maect.data.sources.imagenet import imagenet_classes
from maect.experiment import load
from maect.experiment.start import missing_images

ROOT = Path(__file__).parents[3]


def experiment(folder: Path, splits: dict[str, Any], **changes: Any) -> Path:
    file = folder / "mine.yaml"
    values = {"storage": str(folder / "results"), "datasets": {"mine": {"splits": splits}}}
    file.write_text(yaml.safe_dump(values | {"runs": {}} | changes, sort_keys=False))
    return file


def test_options_of_every_kind_reach_the_workflows_shards(tmp_path, monkeypatch):
    monkeypatch.setenv("MINE", str(tmp_path / "in"))
    images = tmp_path / "in"
    write_all(images / "val", val_images())
    devkit(images)
    image_folder(images / "folders")
    (images / "bad.txt").write_text("c0/000.jpg\n")
    names = [f"c{label}/{number:03d}.jpg" for label in range(3) for number in range(7)]
    (images / "most.txt").write_text("\n".join([*names, "c1/gone.jpg"]))
    (images / "two.txt").write_text("c2\nc0\n")
    splits = {
        "val": {
            "images": "$MINE/val", "kind": "imagenet_val",
            "labels": "$MINE/ILSVRC2012_devkit_t12.tar.gz",
        },
        "train": {
            "images": "$MINE/folders", "exclude": "$MINE/bad.txt", "shards": 2,
            "only": "$MINE/most.txt", "skip_unreadable": True,
        },
        "some": {"kind": "view", "of": "train", "classes": "$MINE/two.txt"},
    }  # fmt: skip
    file = experiment(tmp_path, splits)
    wanted = load(str(file))
    assert missing_images(wanted) == []
    command = [Path(sys.executable).parent / "snakemake", "--snakefile", ROOT / "Snakefile"]
    command += ["--directory", tmp_path, "--cores", "2", "--nolock", "--quiet"]
    command += ["--config", f"experiment={file}", "--", "shards"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    val, train, view = (open_index(wanted.shards("mine", name)) for name in splits)
    labels = {f"{key}.JPEG": label for key, label in zip(val.keys(), val.labels, strict=True)}
    assert labels == val_labels()
    assert (train.n, len(train.shards), val.class_names) == (20, 2, imagenet_classes())
    assert view.class_names == ("c2", "c0") and np.bincount(view.labels).tolist() == [7, 6]
    assert all(view.class_names[view.labels[i]] == view.key(i)[:2] for i in range(13))
    left = {"config.yaml", "crc32.npy", "done", "index.json", "index.npy", "keys.txt"}
    assert {path.name for path in view.directory.iterdir()} == left


IMAGES = {"train": {"images": "/i/train"}, "val": {"images": "/i/val", "kind": "imagenet"}}


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"kind": "view", "of": "dogs", "classes": "dogs15"}, "`of`: 'dogs' is no split"),
        ({"kind": "view", "of": "val"}, "kind view needs `classes`"),
        ({"kind": "view", "classes": "dogs15"}, "kind view needs `of`"),
        ({"kind": "view", "of": "val", "classes": "a", "images": "/i"}, "view takes no `images`"),
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
