"""Writes an experiment file for one's own images, with what was chosen and why as comments."""

import logging
import math
import shlex
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast

import yaml

from maect.core.errors import UserError, counted
from maect.core.files import write_text
from maect.data.retrieve import CATALOGUE
from maect.data.sources import UNLABELLED, find_source
from maect.evaluate import Protocol
from maect.evaluate.clustering import Clustering
from maect.evaluate.explore import Explore
from maect.evaluate.knn import Knn
from maect.evaluate.linear_probe import LinearProbe
from maect.evaluate.low_shot import LowShot
from maect.evaluate.retrieval import Retrieval
from maect.evaluate.umap import Umap
from maect.experiment import load
from maect.experiment.schema import check_plain, fill_path
from maect.launch.progress import rough
from maect.recipes import load_encoder
from maect.stages import STAGES, load_recipe
from maect.stages.tune import Tune
from maect.tools import own_training
from maect.tools.own_images import (
    FEWEST_VAL,
    STATISTICS,
    Images,
    check_same_classes,
    descend,
    find_splits,
    held_out,
    inspect_images,
)
from maect.tools.own_training import (
    Chosen,
    encoder_for,
    evaluate_every,
    lengths,
    power_of_two,
    quickest,
    settings_of,
    tune_batch,
)
from maect.tools.plan import Device, PlannedJob, SplitFacts, all_jobs, listed, make_plan, wall
from maect.tools.speed import busy

log = logging.getLogger(__name__)
P = TypeVar("P", bound=Protocol)

SHARD_BYTES = 300_000_000
FEW = 10_000  # images, below which a public encoder is worth a try before anything is trained
FIRST = "dinov2_small"  # of the public ones: small, and good at photographs
AVERAGED = 2.5
"""Steps of tuning over those that its average spans: as in the paper, 25,000 over 10,000."""


def about(number: int) -> str:
    """A number of images in words, to one or two digits."""
    if number >= 1e6:
        return f"{number / 1e6:.0f} million"
    return f"{round(number, -4 if number >= 1e5 else -3):,}"


def outlook(out: Path, device: Device) -> list[str]:
    """Return lines that say how long an experiment takes on a device, and what comes out of it."""
    experiment = load(str(out))
    jobs = make_plan(all_jobs(experiment), experiment, device).jobs
    total, training = wall(jobs), wall(job for job in jobs if job.stage in STAGES)
    encoders = [name for name, run in experiment.runs.items() if isinstance(run.settings, Tune)]
    quicker = (
        " --quick writes an experiment for an hour." if total > 1.1 * own_training.HOUR else ""
    )
    return [
        f"All of it takes about {rough(total)} here, {rough(training)} of that for training "
        f"(estimated from {device.source}).{quicker}",
        *busy(),
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
    """A value as YAML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow, value)) + "]"
    if not isinstance(value, str):
        return str(value).lower() if isinstance(value, bool) else str(value)
    # `no` and `2023` alone would be no text.
    plain = value.replace("_", "a").isalnum() and yaml.safe_load(value) == value
    options: dict[str, Any] = {"allow_unicode": True, "default_style": '"', "width": 10**6}
    return value if plain else yaml.safe_dump(value, **options).strip()


def list_texts(images: Images, out: Path, chosen: set[str]) -> dict[str, tuple[Path, str]]:
    """The lists of images of `train` and `val`: where they go and what is in them."""
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


def runs_of(
    images: Images,
    chosen: Chosen,
    n: int,
    public: str | None,
) -> list[str]:
    """The lines of `runs`."""
    size, pixels, epochs, batch = chosen.size, chosen.pixels, chosen.epochs, chosen.batch
    recipe = cast(Tune, load_recipe("ct_min", size))
    head = recipe.head
    queue = min(head.queue_size, power_of_two(n))
    topk = min(head.topk, max(1, queue // 50))
    at: dict[str, Any] = {"size": size} | (
        {} if pixels == load_encoder(size).image_size else {"image_size": pixels}
    )
    mae = f"mae_{size}"
    if public:
        weights = f"$WEIGHTS/{CATALOGUE[public][0].name}"
        lines = [
            f"  # Public weights: maect retrieve {public} $WEIGHTS",
            f"  {mae}: {flow({'weights': weights, 'layout': 'mae'} | at)}",
        ]
    else:
        few = (
            "the paper's"
            if n >= own_training.ENOUGH
            else f"shows about {about(epochs['mae'] * n)} images"
        )
        batch_mae = min(load_recipe("mae", size).batch_size, power_of_two(n / 4))
        changed = {"epochs": epochs["mae"], "batch_size": batch_mae}
        lines = [
            f"  # {counted(epochs['mae'], 'epoch')}: {few}. Where left and right mean something",
            "  # (letters, digits), add `flip: 0.0` here and below.",
            f"  {mae}: {flow({'recipe': 'mae'} | at | {'set': changed})}",
        ]
    steps = epochs["ct_min"] * n // batch
    average = min(recipe.encoder_ema, round(max(0.0, 1 - AVERAGED / max(1, steps)), 4))
    shared = {"batch_size": batch, "head": {"queue_size": queue}}
    tune = {"batch_size": batch, "head": {"queue_size": queue, "topk": topk}}
    tune |= {"encoder_ema": average} if average < recipe.encoder_ema else {}
    each = {"aug": [*chosen.augmentations]}
    too_few = f"Tuning has {steps} steps and will hardly change the encoder: give it more epochs."
    lines += [
        f"  # Keeps the last {queue} of {n:,} images to find neighbours among.",
        *([f"  # {too_few}"] if steps < own_training.FEWEST_STEPS else []),
        *([] if images.colored else ["  # Only minimal augmentation: the images have no colours."]),
    ]
    for name, recipe_name, source, settings, length in (
        (f"head_{{aug}}_{size}", "head_{aug}", mae, shared, "head_min"),
        (f"ct_{{aug}}_{size}", "ct_{aug}", f"head_{{aug}}_{size}", tune, "ct_min"),
    ):
        values: dict[str, Any] = {"recipe": recipe_name} | at | {"from": source}
        values |= {"set": {"epochs": epochs[length]} | settings, "each": each}
        lines.append(f"  {name}: {flow(values)}")
    return lines


def split_lines(
    images: Images,
    val: Images | None,
    test: Images | None,
    lists: dict[str, tuple[Path, str]],
    held: int,
    skip_unreadable: bool,
) -> list[str]:
    """The lines of `splits`; without `val`, lists say which images are held out."""

    def split(of: Images, n: int, only: Path | None) -> str:
        values: dict[str, Any] = {"images": str(of.folder), "kind": of.kind}
        if not find_source(of.kind).in_place:
            shards = max(math.ceil(n * of.bytes_each / SHARD_BYTES), min(16, n // 3000), 1)
            values["shards"] = shards
        values |= {"only": str(only)} if only else {}
        return flow(values | ({"skip_unreadable": True} if skip_unreadable else {}))

    if val is not None:
        return [
            f"      train: {split(images, len(images.entries), None)}",
            f"      val: {split(val, len(val.entries), None)}",
            *(
                [
                    "      # What a protocol measures on it: `test_split: test`; else nothing is.",
                    f"      test: {split(test, len(test.entries), None)}",
                ]
                if test
                else []
            ),
        ]
    one_in = round(len(images.entries) / held)
    of = " of every class" if images.classes else ""
    return [
        f"      # About one image in {one_in}{of} is held out: lists beside this file.",
        "      # Images you add later are ignored until you list them there.",
        f"      train: {split(images, len(images.entries) - held, lists['train'][0])}",
        f"      val: {split(images, held, lists['val'][0])}",
    ]


def evaluated(images: Images, held: set[str], val: int, size: str) -> tuple[list[str], list[str]]:
    """Evaluations that these images allow, and what is left out and why."""
    known = [entry for entry in images.entries if entry.label != UNLABELLED]
    classes = Counter(entry.label for entry in known if entry.name not in held)
    protocols, left_out = ([Knn.name, LinearProbe.name] if classes else []), []
    shots = max(settings_of(LowShot, size).shots)
    if not classes:
        left_out.append("Without labels there is no accuracy to measure, but much to look at")
    elif min(classes.values()) >= shots:
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

    def planned(self, chosen: Chosen, public: str | None, device: Device) -> list[PlannedJob]:
        """All jobs of the experiment, as `maect plan` prices them."""
        with TemporaryDirectory() as folder:
            file = Path(folder) / "quick.yaml"
            write_text(file, self.text(chosen, public))
            experiment = load(str(file))
        classes = len(self.images.classes) or 1000
        known = {
            experiment.shards(experiment.default_dataset, split): SplitFacts(
                n, None, False, classes
            )
            for split, n in self.counts.items()
        }
        return make_plan(all_jobs(experiment), experiment, device, known).jobs

    def text(self, chosen: Chosen, public: str | None) -> str:
        """The file."""
        images, size, pixels = self.images, chosen.size, chosen.pixels
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
        described = [
            "images to train on",
            f"in {len(images.classes)} classes" if images.classes else "without labels",
        ]
        near = images.side < pixels * 256 / 224
        shown = ["low_shot"] if images.classes else []
        shown += ["clustering"] if "clustering" in protocols else []
        drawn = ["umap"] if "umap" in protocols else []
        if "clustering" in protocols:
            drawn += ["confusion", "cluster_retrieval", "neighbor_retrieval"]
        drawn += ["training_curves", *([] if public else ["reconstructions"])]
        drawn += ["neighbors_in_training", "pipeline"]
        every = evaluate_every(chosen.epochs["ct_min"], n)
        pixels_as = images.pixels.model_dump(mode="json", exclude_defaults=True)
        name = "".join(c if c.isalnum() else "_" for c in self.folder.name) or "images"
        lines = [
            "# Written by `maect new-experiment`; edit it as you like.",
            # Not all of them have been opened.
            f"# {'Up to ' if self.skip_unreadable else ''}{n:,} {' '.join(described)}.",
        ]
        if images.loose:
            lines += [
                f"# No labels are used: {images.loose} images lie beside the class folders in",
                f"# {flow(str(images.folder))}; sort them into classes or remove them.",
            ]
        lines += [
            *(f"# {remark}." for remark in self.remarks),
            f"# Encoder {size}, {pixels} x {pixels} pixels: {chosen.why}.",
            f"description: MAE and contrastive tuning on {name}",
            "datasets:",
            f"  {flow(name)}:",
        ]
        if near:
            lines.append(f"    resize: {pixels} # images are hardly larger: nothing to crop away")
        lines += [
            f"    pixels: {flow(pixels_as)}",
            "    splits:",
            *split_lines(
                images, self.val, self.test, self.lists, len(self.held), self.skip_unreadable
            ),
            f"online_evaluation: {{every_epochs: {every}}} # k-NN and pictures while it trains",
            "runs:",
            *runs_of(images, chosen, n, public),
            "evaluate:",
            *(f"  # {reason}." for reason in left_out),
            f'  - runs: [mae_{size}, "ct_*"]',
            f"    protocols: {flow(protocols)}",
            "protocols:",
            f"  {Explore.name}: {{splits: [train, val]}} # the report's map of images",
            *([f"  {LinearProbe.name}: {flow(probe)}"] if probe else []),
            "compare_with_paper: false # its numbers are of ImageNet-1k",
            f"tables: {flow(shown)}",
            f"figures: {flow(drawn)}",
            "",
        ]
        return "\n".join(lines)


def new_experiment(
    folder: Path,
    out: Path,
    public: str | None = None,
    quick: Device | None = None,
    *,
    ignore_folders: bool = False,
    skip_unreadable: bool = False,
) -> str:
    """Write an experiment for the images in a folder.

    Args:
        folder: `CLASS/IMAGE` or images without classes; either also in `train` and `val` below it,
            by these or similar names.
        out: the file to write. Without a `val`, lists of both parts' images are written beside it.
        public: public weights to start from (`own_training.PUBLIC`); none: from scratch.
        quick: a device that an hour is to be enough on; none: as long as the images are worth.

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
    folder = folder.resolve()
    how = {"ignore_folders": ignore_folders, "skip_unreadable": skip_unreadable}
    where, *others = find_splits(folder)
    for path in filter(None, (where, *others, out.resolve())):
        if fill_path(str(path)) != str(path):
            raise UserError(
                f"{path}: experiments read what stands behind $ as the name of a variable; rename "
                "the folder, or make a link to it"
            )
    images = inspect_images(where, **how)
    val, test = (
        inspect_images(descend(other, images.class_names), FEWEST_VAL, **how) if other else None
        for other in others
    )
    for other in (val, test):
        if other:
            check_same_classes(images, other)
    remarks = list(images.remarks)
    if public is not None and images.pixels.channels == 3 and images.pixels.mean:
        own = {"mean": None, "std": None}
        images = replace(images, pixels=images.pixels.model_copy(update=own))
        remarks = [f"Mean and deviation are {public}'s" if r == STATISTICS else r for r in remarks]
    if val and not test and others[0] and others[0].name.lower().startswith("test"):
        remarks.append(
            "There is no val beside test: what is chosen while evaluating is chosen on test"
        )
    held = set() if val else held_out(images)
    lists = {} if val else list_texts(images, out, held)
    counts = {"train": len(images.entries) - len(held), "val": len(val.entries if val else held)}
    counts |= {"test": len(test.entries)} if test else {}
    written = Written(images, val, test, folder, lists, held, counts, remarks, skip_unreadable)
    n = counts["train"]
    size, pixels, why = encoder_for(images, public)
    epochs, augmentations = lengths(size, n), ("min", "aug") if images.colored else ("min",)
    if public:
        del epochs["mae"]
    chosen = Chosen(size, pixels, why, epochs, tune_batch(size, n), augmentations)
    if quick is not None:
        device = quick
        chosen = replace(chosen, augmentations=("min",))

        def planned(this: Chosen) -> list[PlannedJob]:
            return written.planned(this, public, device)

        chosen = quickest(chosen, n, public, device, planned)
    text = written.text(chosen, public)
    write_all(dict(lists.values()) | {out: text}, out)
    return text
