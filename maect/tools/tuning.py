"""Experiments that continue an encoder on one's own images: settings, and epochs for some hours."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from maect.core.errors import UserError, counted
from maect.core.files import fill_template
from maect.data.sources.base import UNLABELLED
from maect.evaluate.protocols.encoders import Agreement
from maect.evaluate.protocols.stored_features import Geometry
from maect.experiment.schema import check_plain
from maect.recipes import HeadSettings
from maect.stages import load_recipe
from maect.stages.refine import Refine
from maect.stages.tune import Tune
from maect.tools import own_training
from maect.tools.new_experiment import Written, flow, read_folder, write_all
from maect.tools.own_training import FEWEST_STEPS, SMALLEST_BATCH, power_of_two
from maect.tools.plan import Device, PlannedJob, wall
from maect.tools.tuned_encoder import Start

By = Literal["tune", "refine", "diet"]
TEMPLATE = Path(__file__).with_name("tune.yaml.j2")
BEFORE, SMALL, HEAD, AFTER = "before", "smaller", "head", "after"
"""Runs of the experiment: the import, the same at fewer pixels where the hours allow no more, what
is put on it, and the encoder that is continued."""
SMALLER = (0.75, 0.5)
"""Parts of the image size that are tried in turn until the time is enough."""
LOCAL = 0.43
"""Height of a local view, as a part of the image size: 96 of 224 pixels (MIM-Refiner)."""
SHOTS = (1, 2, 5)
TARGET = "evaluations"
"""Rule that makes all that the result is read from."""


@dataclass(frozen=True)
class TuningPlan:
    """Choice of how an encoder is continued.

    Attributes:
        pixels: of its input.
        batch: images of an update.
        epochs: of each run that trains.
        why: in words.
    """

    pixels: int
    batch: int
    epochs: Mapping[str, int]
    why: str


@dataclass(frozen=True)
class Continuation:
    """An encoder, images, and the way of continuing."""

    start: Start
    written: Written
    by: By
    command: str

    @property
    def n(self) -> int:
        """Number of images to train on."""
        return self.written.counts["train"]

    @property
    def recipes(self) -> dict[str, str]:
        """Names of the recipes, by run."""
        colored = self.written.images.colored and self.start.encoder.pixels.channels == 3
        views = "aug" if colored else "min"
        if self.by == "diet":
            return {AFTER: "diet"}
        if self.by == "tune":
            return {HEAD: f"head_{views}", AFTER: f"ct_{views}"}
        end = "" if colored else "_min"
        return {HEAD: f"refine_heads{end}", AFTER: f"refine{end}"}

    def lengths(self) -> dict[str, int]:
        """Return the epochs of each run; few images get more epochs, for enough steps."""
        usual = own_training.lengths(self.start.size, self.n)
        return {run: usual["head_min" if run == HEAD else "ct_min"] for run in self.recipes}

    def first(self) -> TuningPlan:
        """Return the plan that these images deserve."""
        recipe = load_recipe(self.recipes[AFTER], self.start.size)
        batch = min(recipe.batch_size, max(1, power_of_two(self.n) // 4))
        why = "its own size; a fixed schedule, epochs by the number of images"
        return TuningPlan(self.start.encoder.image_size, batch, self.lengths(), why)

    def least(self, plan: TuningPlan) -> TuningPlan:
        """Return a plan with the fewest epochs that change an encoder."""
        epochs = -(-FEWEST_STEPS * plan.batch // self.n)
        fewest = {run: epochs if run == AFTER else max(1, epochs // 2) for run in self.recipes}
        return replace(plan, epochs=fewest)

    def is_smaller(self, plan: TuningPlan) -> bool:
        """Return whether a plan trains at fewer pixels than the encoder's own."""
        return plan.pixels < self.start.encoder.image_size

    def planned(self, plan: TuningPlan, device: Device) -> list[PlannedJob]:
        """Return all jobs of the experiment with times, as `maect plan` does."""
        return self.written.priced(self.text(plan), device)

    def text(self, plan: TuningPlan) -> str:
        """Return the experiment's text."""
        written, images, start = self.written, self.written.images, self.start
        labelled = [entry for entry in images.entries if entry.label != UNLABELLED]
        known = dict.fromkeys((entry.label for entry in labelled), 0)
        for entry in labelled:
            known[entry.label] += entry.name not in written.held
        shots, left_out = evaluated(known, self.n)
        own = start.encoder.pixels
        statistics = {"channels": own.channels, "mean": own.mean, "std": own.std}
        steps = plan.epochs[AFTER] * self.n // plan.batch
        size = {} if "timm" in start.imported else {"size": start.size}
        pixels = start.encoder.image_size
        imported = {**start.imported, **size, "image_size": pixels}
        is_smaller = self.is_smaller(plan)
        return fill_template(
            TEMPLATE,
            flow=flow,
            command=self.command,
            skip_unreadable=written.skip_unreadable,
            n=self.n,
            val=written.counts["val"],
            classes=f"in {len(images.classes)} classes" if images.classes else "without labels",
            grouped=bool(images.classes),
            remarks=written.remarks,
            encoder=start.name,
            by=self.by,
            plan=plan,
            name=written.name,
            resize=pixels if images.side < pixels * 256 / 224 and not is_smaller else None,
            reading=images.pixels.model_copy(update=statistics).model_dump(
                mode="json", exclude_defaults=True
            ),
            one_in=None if written.val else round(len(images.entries) / len(written.held)),
            splits=written.splits,
            every=own_training.evaluate_every(plan.epochs[AFTER], self.n),
            imported=imported,
            smaller={**imported, "image_size": plan.pixels} if is_smaller else None,
            too_few_steps=steps < FEWEST_STEPS,
            steps=steps,
            trained=self._trained(plan, steps),
            left_out=left_out,
            protocols=[Geometry.name, Agreement.name] if shots else [Agreement.name],
            shots=shots,
        )

    def _trained(self, plan: TuningPlan, steps: int) -> dict[str, dict[str, Any]]:
        """Return the runs that train, as the experiment has them."""
        runs: dict[str, dict[str, Any]] = {}
        source = SMALL if self.is_smaller(plan) else BEFORE
        for run, recipe in self.recipes.items():
            values = {"epochs": plan.epochs[run], "batch_size": plan.batch}
            runs[run] = {
                "recipe": recipe, "size": self.start.size, "image_size": plan.pixels,
                "from": source, "set": values | self._changed(plan, run, recipe, steps),
            }  # fmt: skip
            source = run
        return runs

    def _changed(self, plan: TuningPlan, run: str, recipe: str, steps: int) -> dict[str, Any]:
        """Return the values of a recipe that depend on the images."""
        stage = load_recipe(recipe, self.start.size)
        if self.by == "diet":
            return {"images": self.n}
        head = cast(HeadSettings, cast(Any, stage).head)
        queue = own_training.queue_for(head, self.n)
        changed: dict[str, Any] = {"head": {"queue_size": queue["queue_size"]}}
        if run == AFTER:
            changed["head"] = queue
            momentum = cast(Tune | Refine, stage).encoder_ema
            changed["encoder_ema"] = own_training.average_for(momentum, steps)
        if self.by == "refine":
            patch = self.start.encoder.patch_size
            changed["local_size"] = max(1, round(LOCAL * plan.pixels / patch)) * patch
        return changed


def evaluated(known: Mapping[int, int], n: int) -> tuple[list[int], list[str]]:
    """Return the numbers of labels that classes allow, and why others are not measured.

    Args:
        known: training images of each class.
        n: all training images.
    """
    if len(known) < 2:
        return [], ["No classes: only the agreement of neighbours under augmentation is measured"]
    shots = [number for number in SHOTS if number <= min(known.values())]
    if not shots or n < Geometry().k:
        return [], ["Too few images of a class for k-NN and few labels"]
    more = [str(number) for number in SHOTS if number not in shots]
    return shots, [f"Too few images of a class for {' and '.join(more)} labels"] if more else []


def fitted(
    given: Continuation, hours: float, device: Device,
    planned: Callable[[TuningPlan], list[PlannedJob]],
) -> TuningPlan:  # fmt: skip
    """Choose image size, batch and epochs for all jobs together to take some hours on a device.

    The encoder's own size comes first. If it leaves no time for the fewest steps that change an
    encoder, smaller batches are tried, then smaller images.

    Raises:
        UserError: nothing fits.
    """
    first = given.first()
    patch = given.start.encoder.patch_size
    sides = [int(part * first.pixels) // patch * patch for part in (1.0, *SMALLER)]
    batches = [first.batch]
    while batches[-1] // 2 >= SMALLEST_BATCH:
        batches.append(batches[-1] // 2)
    total = 0.0
    for side in sides:
        for batch in batches:
            least = given.least(replace(first, pixels=side, batch=batch))
            jobs = planned(least)
            total = wall(jobs)
            if total <= 3600 * hours:
                return _longer(given, least, jobs, 3600 * hours - total, hours, device)
    raise UserError(
        f"{given.start.name}: the fewest steps take {total / 3600:.1f} hours here; take a smaller "
        "encoder or more --hours"
    )


def _longer(
    given: Continuation, least: TuningPlan, jobs: list[PlannedJob], left: float, hours: float,
    device: Device,
) -> TuningPlan:  # fmt: skip
    """Return a plan with the epochs that the time left allows, up to those of its images."""
    seconds = {
        job.name: (job.seconds or 0.0) / least.epochs[job.name]
        for job in jobs
        if job.name in least.epochs
    }
    best = own_training.lengthened(least.epochs, given.lengths(), seconds, left)
    own = given.start.encoder.image_size
    size = "its own size" if least.pixels == own else f"{own} pixels leave too few steps"
    why = f"{size}; a fixed schedule for {counted_hours(hours)}, estimated from {device.source}"
    return replace(least, epochs=best, why=why)


def counted_hours(hours: float) -> str:
    """Return a number of hours in words."""
    return counted(int(hours), "hour") if hours == int(hours) else f"{hours:g} hours"


def words_of(encoder: str, images: Path, options: Mapping[str, Any]) -> str:
    """Return a command of `maect tune` as it can be typed."""
    words = ["maect", "tune", encoder, "--images", str(images)]
    for name, value in options.items():
        if value is True:
            words.append(f"--{name}")
        elif value not in (None, False):
            words += [f"--{name}", str(value)]
    return shlex.join(words)


def file_for(encoder: str, images: Path, by: str) -> Path:
    """Return the experiment's default name: images, encoder and way of continuing."""
    parts = [images.resolve().name, Path(encoder).resolve().name, by]
    name = "_".join("".join(c if c.isalnum() or c in "_-" else "_" for c in p) for p in parts)
    return Path(f"{name}.yaml")


def is_written_by(out: Path, command: str) -> bool:
    """Return whether an experiment was written by a command, which goes on with it.

    Raises:
        UserError: it was written by another one.
    """
    if not out.exists():
        return False
    first, _, _ = out.read_text(encoding="utf-8").partition("\n")
    if first == f"# {command}":
        return True
    raise UserError(
        f"{out}: already exists, and its first line is not this command; run it with `maect run "
        f"{out}`, or choose another --out"
    )


def write_tuning(
    start: Start, images: Path, out: Path, by: By, command: str, how: Mapping[str, Any],
    hours: float | None, device: Device,
) -> str:  # fmt: skip
    """Write an experiment that continues an encoder on a folder of images; return its text.

    Args:
        command: that writes it, for its first line.
        how: options of `inspect_images`.
        hours: that all jobs may take on `device`; None: as long as the images are worth.

    Raises:
        UserError: images that cannot be used or read by the encoder, or a file that exists.
    """
    if out.suffix != ".yaml":
        raise UserError(f"{out}: an experiment's file ends in .yaml")
    check_plain(f"{out}: name", out.stem)
    written = read_folder(images, out, how)
    here, there = written.images.pixels.channels, start.encoder.pixels.channels
    if here != there and here != 3:
        raise UserError(f"{images}: has images of {here} channels, and {start.name} reads {there}")
    given = Continuation(start, written, by, command)
    plan = given.first()
    if hours is not None:
        plan = fitted(given, hours, device, lambda plan: given.planned(plan, device))
    text = given.text(plan)
    write_all(dict(written.lists.values()) | {out: text}, out)
    return text
