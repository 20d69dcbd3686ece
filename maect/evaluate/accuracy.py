"""Accuracy of fine-tuned encoders on the test split (paper, B and E)."""

from typing import Annotated

from pydantic import Field, model_validator

from maect.evaluate.base import Protocol
from maect.stages.fine_tune import FineTune, Recipe

Count = Annotated[int, Field(gt=0)]


class Accuracy(Recipe, Protocol):
    """Mean accuracy over fine-tunings: of every seed, or every number of shots and split."""

    shots: tuple[Count, ...] = ()
    """So many labels per class instead of a fraction, `splits` times each."""
    splits: int = Field(default=3, gt=0)
    seeds: int = Field(default=1, gt=0)
    """Trainings with seeds `seed`, `seed` + 1 ...; the subset is that of `seed`."""
    seed: int = 0

    @model_validator(mode="after")
    def _consistent(self) -> "Accuracy":
        if self.shots and (self.seeds > 1 or self.fraction < 1):
            raise ValueError("shots: the splits are the repetitions; leave out seeds and fraction")
        return self

    @property
    def lists(self) -> str | None:
        """Folder of official low-shot lists that is read, if any."""
        return self.subsets

    def trainings(self) -> dict[str, tuple[FineTune, int]]:
        """Settings and seed of each run that is scored, by the last part of its name."""
        recipe = {name: getattr(self, name) for name in Recipe.model_fields}
        base = FineTune(**recipe, subset_seed=self.seed)
        if not self.shots:
            seeds = range(self.seed, self.seed + self.seeds)
            return {f"seed{seed}": (base, seed) for seed in seeds}
        subsets = [(shots, split + 1) for shots in self.shots for split in range(self.splits)]
        return {
            f"{shots}shot-split{split}": (
                base.model_copy(update={"shots": shots, "split": split}),
                self.seed,
            )
            for shots, split in subsets
        }
