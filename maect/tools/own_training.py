"""Training that suits a folder of images, and an hour: encoder, batches and epochs."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from maect.evaluate import load_evaluation
from maect.evaluate.base import Protocol
from maect.evaluate.protocols.probes import LinearProbe
from maect.recipes import HeadSettings, OnlineEvaluation, load_encoder
from maect.recipes.cost import encoder_weights
from maect.stages import load_recipe
from maect.stages.tune import Tune
from maect.tools.own_images import Images
from maect.tools.plan import Device, PlannedJob, wall

log = logging.getLogger(__name__)
P = TypeVar("P", bound=Protocol)

PUBLIC = {"mae_base": "base", "mae_large": "large", "mae_huge14": "huge14"}
SEEN = 20_000_000  # images that pre-training shows, all epochs together
ENOUGH = 500_000  # images from which on the paper's own lengths are kept
HOUR = 3600.0  # seconds with --quick: of all jobs one after another, as `maect plan` counts them
PROBES, FEWEST_PROBED = 600.0, 10  # of it seconds of linear probes at most; epochs at least
SMALLEST_BATCH = 16  # of tuning, where a larger one leaves no time for enough steps
SMALLER = (("small", 64), ("small", 32), ("tiny", 32), ("tiny", 16))
"""Encoders and pixels that are tried in turn until the time is enough for some epochs."""
AVERAGED = 2.5
"""Steps of tuning over those that its average spans: as in the paper, 25,000 over 10,000."""
TUNED = 0.25
"""Part of the training's time for head and tuning (`maect.tools.plan.TUNED_BEST`)."""
FEWEST_STEPS = 100  # with which tuning changes an encoder at all
FEWEST_EPOCHS, FEWEST_SHOWN = 40, 1_000_000  # of pre-training: one of the two has to fit in


def encoder_for(images: Images, public: str | None) -> tuple[str, int, str]:
    """Return the size of the encoder, of its input in pixels, and the reason."""
    if public is not None:
        size = PUBLIC[public]
        return size, load_encoder(size).image_size, f"the shape of the public weights {public}"
    seen = f"the images' shorter side is {images.side} pixels (median)"
    if images.side < 24:
        return "tiny", 16, f"{seen}: patches of 4, {weights('tiny')} parameters"
    if images.side < 80:
        pixels = min(64, images.side // 4 * 4)
        return "small", pixels, f"{seen}: patches of 4, {weights('small')} parameters"
    size = "large" if len(images.entries) >= ENOUGH else "base"
    pixels = min(224, images.side // 16 * 16)
    more = "more" if size == "large" else "fewer"
    which = f"ViT-{size[0].upper()}, as for {more} than {ENOUGH:,}"
    return size, pixels, f"{seen}: patches of 16; {which} images"


def weights(size: str) -> str:
    """Return how large an encoder is, in words."""
    return f"{encoder_weights(load_encoder(size)) / 1e6:.1f} million"


def power_of_two(number: float) -> int:
    """Return the largest power of two up to a number of at least 1."""
    return 1 << (int(number).bit_length() - 1)


def queue_for(head: HeadSettings, n: int) -> dict[str, int]:
    """Return the settings of a head's queue for `n` images: no larger than they can fill."""
    queue = min(head.queue_size, power_of_two(n))
    return {"queue_size": queue, "topk": min(head.topk, max(1, queue // 50))}


def average_for(momentum: float, steps: int) -> float:
    """Return the momentum of an encoder's average for a tuning of `steps` steps."""
    return min(momentum, round(max(0.0, 1 - AVERAGED / max(1, steps)), 4))


def lengths(size: str, n: int) -> dict[str, int]:
    """Return the epochs by recipe; few images get more epochs, for enough steps."""
    # Images to show, all epochs together; fewest and most epochs.
    shown = {"mae": (SEEN, 400, 1600), "head_min": (SEEN / 20, 20, 100)}
    shown |= {"ct_min": (SEEN / 10, 40, 200)}
    if n >= ENOUGH:
        return {recipe: load_recipe(recipe, size).epochs for recipe in shown}
    return {
        recipe: round(min(most, max(fewest, images / n)))
        for recipe, (images, fewest, most) in shown.items()
    }


def tune_batch(size: str, n: int) -> int:
    """Return the images in a batch of head and tuning: the recipe's, or a quarter of the queue."""
    recipe = cast(Tune, load_recipe("ct_min", size))
    queue = min(recipe.head.queue_size, power_of_two(n))
    return min(recipe.batch_size, max(1, queue // 4))


@dataclass(frozen=True)
class Chosen:
    """Choice of the runs that an experiment trains.

    Attributes:
        size: of the encoder.
        pixels: of its input.
        why: both, in words.
        epochs: by recipe; without `mae` where public weights are imported.
        batch: of head and tuning.
        augmentations: of tuning.
        probe: epochs of a linear probe; None: the protocol's own; 0: there is no time for one.
    """

    size: str
    pixels: int
    why: str
    epochs: dict[str, int]
    batch: int
    augmentations: tuple[str, ...]
    probe: int | None = None


Planned = Callable[[Chosen], list[PlannedJob]]
"""All jobs of the experiment that trains this, as `maect plan` prices them."""


def quickest(first: Chosen, n: int, public: str | None, device: Device, planned: Planned) -> Chosen:
    """Choose the largest encoder that trains within an hour on a device, and its epochs.

    The hour is that of all jobs. Linear probes take a sixth of it at most; head and tuning get the
    steps that change an encoder, and a quarter of the time for training; pre-training the rest.

    Args:
        first: what these images deserve; public weights keep its size.
        public: weights that are imported; none: pre-training is among the jobs.
    """
    shapes = [(first.size, first.pixels)]
    shapes += [(s, p) for s, p in SMALLER if p < first.pixels] if public is None else []
    fewest = math.ceil(min(FEWEST_EPOCHS, FEWEST_SHOWN / n))
    for size, pixels in shapes:
        last = (size, pixels) == shapes[-1]
        if public is None and not last:
            # Pre-training alone may take too long: nothing else is measured then.
            recipe = load_recipe("mae", size)
            encoder = load_encoder(size, pixels)
            log.info("measuring a training step: %s at %d pixels", size, pixels)
            if fewest * n / device.images_per_second(recipe, encoder) > HOUR:
                continue
        chosen = replace(first, size=size, pixels=pixels, batch=tune_batch(size, n))
        chosen, left = shortened(chosen, fewest, n, public, planned)
        while left < 0 and last and chosen.batch > SMALLEST_BATCH:
            smaller = replace(chosen, batch=chosen.batch // 2)
            chosen, left = shortened(smaller, fewest, n, public, planned)
        if left >= 0:
            break
    why = first.why
    if (chosen.size, chosen.pixels) != (first.size, first.pixels):
        why = f"{first.size} at {first.pixels} pixels would not finish in an hour"
    return replace(chosen, why=f"{why}; epochs for an hour, estimated from {device.source}")


def shortened(
    chosen: Chosen, fewest: int, n: int, public: str | None, planned: Planned
) -> tuple[Chosen, float]:
    """Return a choice with epochs for an hour and the seconds to spare, below 0 if it is too slow.

    Args:
        chosen: with the batch of tuning, whose steps come first.
        fewest: epochs of pre-training; if they take too long, it gets what is left.
    """
    tune = math.ceil(FEWEST_STEPS * chosen.batch / n)
    least = {"mae": fewest, "head_min": max(1, tune // 2), "ct_min": tune}
    wanted = lengths(chosen.size, n)
    if public:
        del least["mae"]
    chosen = replace(chosen, epochs=least)
    jobs = planned(chosen)
    probes = sum(job.seconds or 0.0 for job in jobs if job.stage == LinearProbe.name)
    if probes > PROBES:
        epochs = int(settings_of(LinearProbe, chosen.size).epochs * PROBES / probes)
        chosen = replace(chosen, probe=epochs if epochs >= FEWEST_PROBED else 0)
        jobs = planned(chosen)
    stages = {load_recipe(recipe, chosen.size).name: recipe for recipe in least}
    one = {
        recipe: (job.seconds or 0.0) / least[recipe]
        for job in jobs
        if (recipe := stages.get(job.stage))
    }
    left = HOUR - wall(jobs)
    if left < 0 and "mae" in least:
        fits = least["mae"] - math.ceil(-left / one["mae"])
        return replace(chosen, epochs=least | {"mae": max(1, fits)}), left

    share = divided if "mae" in least else lengthened
    return replace(chosen, epochs=share(least, wanted, one, left)), left


def divided(
    least: Mapping[str, int], wanted: Mapping[str, int], seconds: Mapping[str, float], left: float
) -> dict[str, int]:
    """Return the epochs that the time left allows, `TUNED` of it for head and tuning.

    Arguments are those of `lengthened`.
    """

    def spent(epochs: Mapping[str, int]) -> float:
        return sum(epochs[run] * seconds[run] for run in epochs)

    total = spent(least) + left
    tuned = {run: epochs for run, epochs in least.items() if run != "mae"}
    tuned = lengthened(tuned, wanted, seconds, TUNED * total - spent(tuned))
    mae = int((total - spent(tuned)) / seconds["mae"])
    best = tuned | {"mae": max(least["mae"], min(wanted["mae"], mae))}
    return lengthened(best, wanted, seconds, total - spent(best))


def lengthened(
    least: Mapping[str, int], wanted: Mapping[str, int], seconds: Mapping[str, float], left: float
) -> dict[str, int]:
    """Return the epochs that the time left allows: of each run the same share of those wanted.

    Args:
        least: fewest epochs of each run, for which there is time.
        wanted: most epochs of each run.
        seconds: that one epoch takes.
        left: seconds beyond the fewest epochs.
    """
    best = dict(least)
    for percent in range(1, 101):
        epochs = {run: max(fewest, wanted[run] * percent // 100) for run, fewest in least.items()}
        if sum((epochs[run] - least[run]) * seconds[run] for run in least) <= left:
            best = epochs
    return best


def evaluate_every(tuned: int, n: int) -> int:
    """Return the epochs between online evaluations: ten in tuning, if each has 50 images."""
    return max(tuned // 10, math.ceil(50 / OnlineEvaluation.part / n))


def settings_of(protocol: type[P], size: str) -> P:
    """Return a protocol's own settings for an encoder size."""
    return cast(P, load_evaluation(protocol.name, size)[1])
