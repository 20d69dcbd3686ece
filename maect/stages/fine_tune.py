"""Supervised fine-tuning."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, model_validator

from maect.core.errors import UserError
from maect.recipes import Encoder
from maect.recipes.cost import Cost, encoder_cost, view_groups
from maect.recipes.few_labels import fraction_list, shots_list
from maect.recipes.settings import PLAIN, Computing
from maect.stages.base import Supervised
from maect.train.stage import EVERY_OTHER, RunInputs, Training, layer_scale

if TYPE_CHECKING:  # these import torch
    import numpy as np
    from numpy.typing import NDArray

    from maect.data.index import Index
    from maect.data.transforms import Change
    from maect.stages.classifier import Classifier
    from maect.train.checkpoint import StateReader


class FineTune(Supervised, Training):
    """Supervised fine-tuning of an encoder on all labels or few: one training."""

    name: ClassVar[str] = "fine_tune"
    title: ClassVar[str] = "Fine-tuning {run}"
    starts_from: ClassVar[tuple[str, ...]] = (EVERY_OTHER,)
    # There are many runs (seeds, subsets, encoders), and none continues from their states.
    keeps_state: ClassVar[bool] = False
    labelled: ClassVar[bool] = True
    highest_zero: ClassVar[int] = 2

    shots: int = Field(default=0, ge=0)
    """Labels per class, instead of a fraction; 0: a fraction."""
    split: int = Field(default=1, gt=0)
    """Number of the subset among those with this many shots."""
    subset_seed: int = 0
    """Seed of the subset if no lists are given."""
    held_out: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of each class's labelled images to score the epochs on instead of training."""

    @model_validator(mode="after")
    def _consistent(self) -> "FineTune":
        if self.shots and self.fraction < 1:
            raise ValueError("shots and fraction: leave out one of them")
        return self

    def check_ranks(self, ranks: int, computing: Computing = PLAIN) -> None:
        """Refuse a number of processes that the batch does not split over, in pairs if they mix."""
        super().check_ranks(ranks, computing)
        share = self.batch_size // (ranks * computing.accumulation)
        if self.mixes and share % 2:
            raise UserError(
                f"batch_size {self.batch_size}: Mixup and CutMix pair images, and {ranks} ranks x "
                f"accumulation {computing.accumulation} leave {share} each, an odd number"
            )

    @property
    def outputs(self) -> tuple[str, ...]:
        """Files that a finished run has: the encoder and its classifier."""
        return ("encoder.safetensors", "head.safetensors")

    @property
    def lists(self) -> list[Path]:
        """List files of the labelled images: one, or none."""
        if self.subsets is None or not (self.shots or self.fraction < 1):
            return []
        if self.shots:
            return [shots_list(self.subsets, self.shots, self.split)]
        return [fraction_list(self.subsets, self.fraction)]

    @property
    def warmup(self) -> float:
        """Fraction of the updates in which the learning rate rises."""
        return self.warmup_epochs / self.epochs

    @property
    def lowest(self) -> float:
        """Fraction of the peak learning rates where the cosine ends."""
        return self.min_lr / self.peak_lr

    def images_of(self, images: int, classes: int) -> int:
        """Images of an epoch, of a training split with this many images and classes."""
        if self.shots:
            held_out = max(1, round(self.held_out * self.shots)) if self.held_out else 0
            return (self.shots - held_out) * classes
        return round((1 - self.held_out) * round(self.fraction * images))

    def image_change(self, seed: int) -> "Change | None":
        """Return RandAugment, with these settings."""
        from maect.data.transforms import randaugment

        return randaugment(self.randaugment_layers, self.randaugment_magnitude, seed)

    def training_images(self, index: "Index") -> "Index":
        """Return the labelled images without those held out.

        Raises:
            UserError: images without labels, too few classes, or too few images; a list that was
                changed.
        """
        import numpy as np

        labelled, held_out = self._labelled(index)
        rows = np.setdiff1d(labelled, held_out)
        return super().training_images(replace(index, rows=index.rows[rows]))

    def scored_images(self, index: "Index") -> "Index | None":
        """Return the held-out images, to score the epochs on; None: there are none."""
        if not self.held_out:
            return None
        _, held_out = self._labelled(index)
        return replace(index, rows=index.rows[held_out])

    def _labelled(self, index: "Index") -> "tuple[NDArray[np.int64], NDArray[np.int64]]":
        """Return the rows of the labelled images, and of those among them that are held out."""
        import numpy as np

        from maect.data.subsets import Labelled, fraction_rows, fraction_rows_of, shots_rows

        if index.n == 0 or index.labels.min() < 0:
            raise UserError(f"{index.directory}: fine-tuning needs labels; some images have none")
        if len(index.class_names) < 2:
            raise UserError(f"{index.directory}: fine-tuning needs at least two classes")
        self.check_lists()
        labelled = Labelled(index.directory, index.labels, index.keys, index.class_names)
        if self.shots:
            rows = shots_rows(labelled, self.shots, self.split, self.subset_seed, self.subsets)
        else:
            rows = fraction_rows_of(labelled, self.fraction, self.subset_seed, self.subsets)
        if not self.held_out:
            return rows, rows[:0]
        labels = index.labels[rows]
        held_out = fraction_rows(labels, self.held_out, self.subset_seed)
        without = np.setdiff1d(labels, np.delete(labels, held_out))
        if len(without):
            name = index.class_names[without[0]]
            raise UserError(
                f"{index.directory}: held_out leaves no image of {name} to learn from; it needs "
                "two labelled images of every class"
            )
        return rows, rows[held_out]

    def build(
        self, encoder: Encoder, seed: int, source: Path | None, classes: Sequence[str] = ()
    ) -> "Classifier":
        """Return the encoder of a run with a new classifier."""
        from maect.models.weights import load_encoder_weights
        from maect.stages.classifier import Classifier

        vit, _, pooling = load_encoder_weights(self.need(source) / "encoder.safetensors")
        return Classifier(self, vit, len(classes), pooling, seed)

    def rates(self, name: str, depth: int) -> tuple[float, float]:
        """Return learning rate and weight decay: decayed by layer in the encoder, else the peak."""
        part, _, inner = name.partition(".")
        scale = layer_scale(inner, depth, self.layer_decay) if part == "encoder" else 1.0
        return self.peak_lr * scale, self.weight_decay

    def export(self, run: RunInputs, reader: "StateReader", index: "Index") -> dict[str, Any]:
        """Write encoder and classifier; return pooling and the subset of labelled images."""
        from maect.data.subsets import subset_record
        from maect.models.weights import save_encoder, save_tensors
        from maect.train.checkpoint import PARAM

        objective = self.build(run.encoder, 0, run.source, index.class_names)
        weights = objective.encoder.state_dict()
        weights |= reader.part(PARAM, "encoder.", weights)
        norm = reader.part(PARAM, "fc_norm.", objective.fc_norm.state_dict())
        weights |= {f"fc_norm.{name}": value for name, value in norm.items()}
        path = run.folder / "encoder.safetensors"
        save_encoder(path, weights, run.encoder, objective.pooling)
        classifier = reader.part(PARAM, "head.", objective.head.state_dict())
        save_tensors(
            run.folder / "head.safetensors", classifier, {"classes": json.dumps(index.class_names)}
        )
        return {"pooling": objective.pooling, "subset": subset_record(index)}

    def check_encoder(self, encoder: Encoder) -> None:
        """Refuse too many frozen blocks, and RandAugment without 3 channels (ValueError)."""
        encoder.check_trainable()
        if self.randaugment_layers and encoder.pixels.channels != 3:
            raise ValueError(
                f"RandAugment changes images of 3 channels, not {encoder.pixels.channels}; set "
                "randaugment_layers to 0"
            )
        if self.frozen_blocks > encoder.depth:
            raise ValueError(
                f"frozen_blocks {self.frozen_blocks}: the encoder has {encoder.depth} blocks"
            )

    def costs(self, encoder: Encoder, computing: Computing = PLAIN) -> dict[str, Cost]:
        """Return the cost of the encoder; the classifier's is negligible."""
        groups = view_groups(encoder, self.view_settings())
        tuned = encoder.depth - self.frozen_blocks
        return {"encoder": encoder_cost(self.passes(computing), encoder, groups, tuned)}
