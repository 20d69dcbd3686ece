"""Write an experiment file for one's own images, with choices and reasons as comments."""

import math
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, cast

import yaml

from maect.core.errors import UserError, counted
from maect.core.files import fill_template, write_text
from maect.data.retrieve import CATALOGUE
from maect.data.sources.base import UNLABELLED
from maect.evaluate.protocols.probes import LinearProbe
from maect.evaluate.protocols.stored_features import (
    Clustering,
    Explore,
    Knn,
    LowShot,
    Retrieval,
    Umap,
)
from maect.experiment import Experiment, load
from maect.experiment.schema import check_plain, fill_path
from maect.launch.progress import rough
from maect.recipes import load_encoder
from maect.stages import STAGES, load_recipe
from maect.stages.tune import Tune
from maect.tools import own_images, own_training
from maect.tools.own_images import STATISTICS, Images, descend, inspect_images
from maect.tools.own_training import Chosen, power_of_two, settings_of
from maect.tools.plan import Device, PlannedJob, SplitFacts, all_jobs, listed, make_plan, wall

TEMPLATE = Path(__file__).with_name("experiment.yaml.j2")
SHARD_BYTES = 300_000_000
FEW = 10_000  # images, below which a public encoder is worth a try before anything is trained
FIRST = "dinov2_small"  # of the public ones: small, and good at photographs


def about(number: int) -> str:
    """Return a number of images in words, to one or two digits."""
    if number >= 1e6:
        return f"{number / 1e6:.0f} million"
    return f"{round(number, -4 if number >= 1e5 else -3):,}"


def outlook(out: Path, device: Device) -> list[str]:
    """Return lines on an experiment's time on a device and on its results."""
    experiment = load(str(out))
    jobs = make_plan(all_jobs(experiment), experiment, device).jobs
    total = wall(jobs)
    training = wall(job for job in jobs if job.stage in STAGES)
    encoders = [name for name, run in experiment.runs.items() if isinstance(run.settings, Tune)]
    is_long = total > 1.1 * own_training.HOUR
    quicker = " --quick writes an experiment for an hour." if is_long else ""
    return [
        f"All of it takes about {rough(total)} here, {rough(training)} of that for training "
        f"(estimated from {device.source}).{quicker}",
        f"What comes out: encoders {', '.join(encoders)} in {experiment.root}/runs; "
        f"{', '.join([*experiment.tables, *experiment.figures])} in {experiment.root}/report.html.",
    ]


def without_training(out: Path) -> list[str]:
    """Return lines to try first with few images; none with many, or if public weights are used."""
    experiment = load(str(out))
    dataset = experiment.default_dataset
    known = listed(experiment, dataset, "train")
    public = any(not run.settings.trains for run in experiment.runs.values())
    if public or known is None or known.images is None or known.images >= FEW:
        return []
    images = shlex.quote(str(experiment.images(dataset, "train")))
    return [
        f"With fewer than {FEW:,} images first try a public encoder, which needs no training:",
        f"  maect retrieve {FIRST} weights",
        f"  maect embed {FIRST} {images} --out {dataset}.parquet",
        f"  maect cluster {dataset}.parquet --out groups",
    ]


def flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    text: str = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6
    )
    return text.removesuffix("...\n").strip()  # the end of a document, behind a single word


def list_texts(images: Images, out: Path, chosen: set[str]) -> dict[str, tuple[Path, str]]:
    """Return the lists of images of `train` and `val`: their paths and texts."""
    names = [entry.name for entry in images.entries]
    parts = {"train": [name for name in names if name not in chosen], "val": sorted(chosen)}
    return {
        part: (out.resolve().with_suffix(f".{part}.txt"), "".join(f"{name}\n" for name in of))
        for part, of in parts.items()
    }


def write_all(texts: dict[Path, str], out: Path) -> None:
    """Write the files, which stay if the experiment can be read.

    Raises:
        UserError: it cannot, or one of them is there with another content.
    """
    for path, text in texts.items():
        if path.exists() and path.read_bytes() != text.encode():
            raise UserError(f"{path}: already exists; choose another name, or remove it")
    try:
        for path, text in texts.items():
            write_text(path, text)
        load(str(out))
    except BaseException:
        for path in texts:
            path.unlink(missing_ok=True)
        raise


def evaluated(images: Images, held: set[str], val: int, size: str) -> tuple[list[str], list[str]]:
    """Choose the evaluations that these images allow; return the others with reasons."""
    known = [entry for entry in images.entries if entry.label != UNLABELLED]
    classes = Counter(entry.label for entry in known if entry.name not in held)
    protocols = [Knn.name, LinearProbe.name] if classes else []
    left_out = []
    shots = max(settings_of(LowShot, size).shots)
    if not classes:
        left_out.append("Without labels there is no accuracy to measure, but much to look at")
    elif min(classes[label] for label in {entry.label for entry in known}) >= shots:
        protocols.append(LowShot.name)
    else:
        left_out.append(f"No {LowShot.name}: it needs {shots} training images of every class")
    if classes and val > len(classes):
        protocols += [Clustering.name, Retrieval.name]
    if classes and val > settings_of(Umap, size).neighbors:
        protocols.append(Umap.name)
    elif classes:
        left_out.append(f"No {Umap.name}: it needs more images than neighbours")
    return [*protocols, Explore.name], left_out


@dataclass(frozen=True)
class Written:
    """Part of the file about the images, whatever is trained on them."""

    images: Images
    val: Images | None
    test: Images | None
    folder: Path
    lists: dict[str, tuple[Path, str]]
    held: set[str]
    counts: dict[str, int]
    """Images of each split."""
    remarks: list[str]
    skip_unreadable: bool

    def priced(self, text: str, device: Device) -> list[PlannedJob]:
        """Return all jobs of an experiment's text with times, as `maect plan` does."""
        with TemporaryDirectory() as folder:
            file = Path(folder) / "planned.yaml"
            write_text(file, text)
            experiment = load(str(file))
        facts = self.facts(experiment)
        return make_plan(all_jobs(experiment), experiment, device, facts).jobs

    def text(self, chosen: Chosen, public: str | None) -> str:
        """Return the file's text, by its template."""
        images = self.images
        size = chosen.size
        n = self.counts["train"]
        protocols, left_out = evaluated(images, self.held, self.counts["val"], size)
        probe: dict[str, Any] = {}
        if LinearProbe.name in protocols and chosen.probe == 0:
            protocols.remove(LinearProbe.name)
            left_out.append(f"No {LinearProbe.name}: an hour is too short for it")
        elif LinearProbe.name in protocols:
            batch = min(1024, power_of_two(n / 4))
            probe |= {"batch_size": batch} if batch < 1024 else {}
            if chosen.probe is not None:
                probe |= {"epochs": chosen.probe, "warmup_epochs": chosen.probe // 10}
        groups = len(images.classes)
        clustered = Clustering.name in protocols
        figures = ["umap"] if Umap.name in protocols else []
        figures += ["confusion", "cluster_retrieval", "neighbor_retrieval"] if clustered else []
        figures += ["training_curves", *([] if public else ["reconstructions"])]
        return fill_template(
            TEMPLATE,
            flow=flow,
            counted=counted,
            images=images,
            n=n,
            chosen=chosen,
            size=size,
            classes=f"in {groups} classes" if groups else "without labels",
            remarks=self.remarks,
            skip_unreadable=self.skip_unreadable,
            name=self.name,
            reading=images.pixels.model_dump(mode="json", exclude_defaults=True),
            splits=self.splits,
            one_in=None if self.val else round(len(images.entries) / len(self.held)),
            every=own_training.evaluate_every(chosen.epochs["ct_min"], n),
            public=public,
            file=CATALOGUE[public][0].name if public else None,
            **_trained(chosen, n),
            left_out=left_out,
            protocols=protocols,
            probe=probe,
            tables=["low_shot"] * bool(groups) + ["clustering"] * clustered,
            figures=[*figures, "neighbors_in_training", "pipeline"],
        )

    @property
    def name(self) -> str:
        """Name of the data set."""
        return "".join(c if c.isalnum() else "_" for c in self.folder.name) or "images"

    @property
    def splits(self) -> dict[str, dict[str, Any]]:
        """Settings of each split."""
        given = {"train": (self.images, self.lists), "val": (self.val or self.images, self.lists)}
        given |= {"test": (self.test, {})} if self.test else {}
        return {name: self._split(name, *of) for name, of in given.items()}

    def facts(self, experiment: Experiment) -> dict[Path, SplitFacts]:
        """Return facts about the splits, by the folders of their shards, for a plan."""
        dataset = experiment.default_dataset
        classes = len(self.images.classes) or 1000
        return {
            experiment.shards(dataset, split): SplitFacts(n, None, False, classes)
            for split, n in self.counts.items()
        }

    def _split(self, name: str, of: Images, lists: dict[str, tuple[Path, str]]) -> dict[str, Any]:
        n = self.counts[name]
        fewest = math.ceil(n * of.bytes_each / SHARD_BYTES)
        shards = max(fewest, min(16, n // 3000), 1)
        values: dict[str, Any] = {"images": str(of.folder), "kind": of.kind, "shards": shards}
        values |= {"only": str(lists[name][0])} if lists else {}
        return values | ({"skip_unreadable": True} if self.skip_unreadable else {})


def _trained(chosen: Chosen, n: int) -> dict[str, Any]:
    """Return settings of the runs, and comments on them."""
    size = chosen.size
    steps = chosen.epochs["ct_min"] * n // chosen.batch
    recipe = cast(Tune, load_recipe("ct_min", size))
    average = own_training.average_for(recipe.encoder_ema, steps)
    own = load_encoder(size).image_size == chosen.pixels
    return {
        "at": f"size: {size}" + ("" if own else f", image_size: {chosen.pixels}"),
        "first_batch": min(load_recipe("mae", size).batch_size, power_of_two(n / 4)),
        "shown": about(chosen.epochs.get("mae", 0) * n) if n < own_training.ENOUGH else None,
        "head": own_training.queue_for(recipe.head, n),
        "average": average if average < recipe.encoder_ema else None,
        "steps": steps,
        "too_few_steps": steps < own_training.FEWEST_STEPS,
    }


def read_folder(folder: Path, out: Path, how: Mapping[str, Any]) -> Written:
    """Find the splits of a folder of images, or hold some out, and inspect them.

    Args:
        out: the experiment; lists of the images are named after it.
        how: options of `inspect_images`.

    Raises:
        UserError: images that cannot be used.
    """
    folder = folder.resolve()
    where, *others = own_images.find_splits(folder)
    for path in filter(None, (where, *others, out.resolve())):
        if fill_path(str(path)) != str(path):
            raise UserError(
                f"{path}: experiments read what stands behind $ as the name of a variable; rename "
                "the folder, or make a link to it"
            )
    for path in filter(None, (where, *others)):
        if Path.cwd().is_relative_to(path):
            raise UserError(
                f"{path}: results would lie among these images, in {Path.cwd() / 'results'}; "
                "run this in a folder outside of them"
            )
    images = inspect_images(where, **how)
    fewest = own_images.FEWEST_VAL
    val, test = (
        inspect_images(descend(other, images.class_names), fewest, **how) if other else None
        for other in others
    )
    for other in (val, test):
        if other:
            own_images.check_same_classes(images, other)
    remarks = list(images.remarks)
    if val and not test and others[0] and others[0].name.lower().startswith("test"):
        remarks.append(
            "There is no val beside test: what is chosen while evaluating is chosen on test"
        )
    held = set() if val else own_images.choose_validation(images)
    lists = {} if val else list_texts(images, out, held)
    counts = {"train": len(images.entries) - len(held), "val": len(val.entries if val else held)}
    counts |= {"test": len(test.entries)} if test else {}
    unreadable = bool(how.get("skip_unreadable"))
    return Written(images, val, test, folder, lists, held, counts, remarks, unreadable)


def new_experiment(
    folder: Path,
    out: Path,
    public: str | None = None,
    quick: Device | None = None,
    *,
    ignore_folders: bool = False,
    skip_unreadable: bool = False,
    stated: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Write an experiment for the images in a folder.

    Args:
        out: the file to write. Without a `val`, lists of both parts' images are written beside it.
        quick: a device that an hour is to be enough on; none: as long as the images are worth.
        stated: how images are read, as far as it is not to be found out.

    Raises:
        UserError: images that cannot be used, unknown weights, or a file that exists.
    """
    if out.suffix != ".yaml":
        raise UserError(f"{out}: an experiment's file ends in .yaml")
    if out.exists():
        raise UserError(f"{out}: already exists; choose another name, or remove it")
    check_plain(f"{out}: name", out.stem)
    if public is not None and public not in own_training.PUBLIC:
        raise UserError(
            f"--from-public {public}: unknown weights; choose from {', '.join(own_training.PUBLIC)}"
        )
    how: dict[str, Any] = {
        "ignore_folders": ignore_folders, "skip_unreadable": skip_unreadable, "stated": stated,
    }  # fmt: skip
    written = read_folder(folder, out, how)
    images = written.images
    if public is not None and images.pixels.channels == 3 and images.pixels.mean:
        own = {"mean": None, "std": None}
        images = replace(images, pixels=images.pixels.model_copy(update=own))
        said = f"Mean and deviation are {public}'s"
        remarks = [said if remark == STATISTICS else remark for remark in written.remarks]
        written = replace(written, images=images, remarks=remarks)
    n = written.counts["train"]
    size, pixels, why = own_training.encoder_for(images, public)
    epochs = own_training.lengths(size, n)
    batch = own_training.tune_batch(size, n)
    if public:
        del epochs["mae"]
    augmentations = ("min", "aug") if images.colored and quick is None else ("min",)
    chosen = Chosen(size, pixels, why, epochs, batch, augmentations)
    if quick is not None:

        def planned(chosen: Chosen) -> list[PlannedJob]:
            return written.priced(written.text(chosen, public), quick)

        chosen = own_training.quickest(chosen, n, public, quick, planned)
    text = written.text(chosen, public)
    write_all(dict(written.lists.values()) | {out: text}, out)
    return text
