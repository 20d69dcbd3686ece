"""`python make_results.py FOLDER`: a small finished pipeline, every job in this one process."""

import copy
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image
from sklearn.datasets import load_digits

from maect.cli import main
from maect.core.context import Context
from maect.core.files import make_folder
from maect.data.shards import shard
from maect.evaluate import pictures
from maect.evaluate.base import Features
from maect.evaluate.evaluation import evaluate
from maect.evaluate.features import extract
from maect.experiment import load
from maect.experiment.chosen_shards import note_own
from maect.experiment.pages import figures, tables
from maect.experiment.resolve import features_file, files
from maect.launch.record import Job, write_job
from maect.stages.run import train

HEAD = {"head": {"queue_size": 32, "topk": 2}}
EXPERIMENT: dict[str, Any] = {
    "datasets": {"digits": {"resize": 16, "splits": {"train": {"shards": 2}, "val": {}}}},
    "runs": {
        "mae_tiny": {"recipe": "mae", "size": "tiny", "set": {"epochs": 3}},
        "head_tiny": {"recipe": "head_min", "size": "tiny", "from": "mae_tiny", "set": HEAD},
        "ct_tiny": {"recipe": "ct_min", "size": "tiny", "from": "head_tiny", "set": HEAD},
    },
    "evaluate": [
        {
            "runs": ["mae_tiny", "ct_tiny"],
            "protocols": ["knn", "linear_probe", "clustering", "umap", "explore", "retrieval"],
        }
    ],
    "protocols": {
        "linear_probe": {"epochs": 3, "batch_size": 16, "warmup_epochs": 0},
        "clustering": {"runs": 4},
    },
    "tables": ["low_shot", "clustering"],
    "figures": ["umap", "confusion", "training_curves", "pipeline"],
}


def write_images(root: Path) -> None:
    """Sixty digits of four classes to train on, and forty others."""
    digits = load_digits()
    few = np.flatnonzero(digits.target < 4)[:100]
    for place, number in enumerate(few):
        split = "train" if place < 60 else "val"
        file = root / split / str(digits.target[number]) / f"{number:04d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        grey = np.rint(digits.images[number] * (255 / 16)).astype(np.uint8)
        Image.fromarray(grey).convert("RGB").resize((16, 16)).save(file)


def asked(folder: Path) -> dict[str, Any]:
    """The experiment whose images and results are in a folder."""
    told = copy.deepcopy(EXPERIMENT) | {"storage": str(folder / "results")}
    for split, about in told["datasets"]["digits"]["splits"].items():
        about["images"] = str(folder / "images" / split)
    for run in told["runs"].values():
        run["set"] = {"epochs": 2, "batch_size": 16, "precision": "fp32"} | run["set"]
    return told


def make(_: Context, folder: Path) -> str:
    """Leave `folder/results` and the experiment `folder/mini.yaml`; a job of `ranks.run`."""
    os.chdir(folder)
    os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}  # which DeepSpeed reads
    write_images(folder / "images")
    (folder / "mini.yaml").write_text(yaml.safe_dump(asked(folder), sort_keys=False))
    experiment = load(str(folder / "mini.yaml"))
    for _, split in experiment.splits:
        own = experiment.own_shards("digits", split)
        make_folder(own)
        note_own(own, experiment.shards_config("digits", split))
        count = experiment.datasets["digits"].splits[split].shards
        shard(experiment.images("digits", split), own, "folder", count)
    for path, config in files(experiment):
        config.write(path)
    for run in experiment.runs:
        config = experiment.folder(run) / "config.yaml"
        job = Job("local", "maect-x-1", 1, arguments={"config": str(config)})
        job.state, job.id, job.ending = "ended", "1", "done"
        write_job(config.parent, job)
        assert train(Context(cpus=2), config=config) == "done"
    for run in experiment.evaluated:
        for split in map(Features, ("train", "val")):
            encoder = experiment.folder(run) / "encoder.safetensors"
            out = features_file(experiment, run, "digits", split)
            shards = experiment.shards("digits", split.split)
            given = {"encoder": encoder, "shards": shards, "out": out, "resize": 16}
            assert extract(Context(cpus=2), **given) == "done"
    # What UMAP would need a minute to compile: two of the features.
    pictures.embedded = lambda rows, *_, **__: rows[:, :2].astype(np.float32)
    ordered = sorted(experiment.evaluations, key=lambda pair: pair[1] == "retrieval")
    for run, name in ordered:
        config = experiment.root / "evaluations" / run / f"{name}.yaml"
        assert evaluate(Context(cpus=2), config=config) == "done"
    assert main(["duplicates", str(experiment.folder("ct_tiny"))]) == 0
    for kind, names in (("table", tables(experiment)), ("figure", figures(experiment))):
        for name in names:
            assert main(["page", str(experiment.root / f"{kind}s/{name}.yaml")]) == 0, name
    for page in ("claims", "images", "report"):
        assert main(["page", str(experiment.root / f"{page}.yaml")]) == 0
    return "done"


if __name__ == "__main__":
    make(Context(), Path(sys.argv[1]).resolve())
