"""Import of public encoders."""

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import field_validator

from maect.core.errors import UserError, did_you_mean
from maect.core.files import read_json, sha256_file
from maect.core.settings import digest
from maect.models.layouts import LAYOUTS
from maect.recipes import Encoder, Pixels
from maect.records import ENCODER, ImportedFile, RunRecord
from maect.train.stage import Stage

if TYPE_CHECKING:  # it imports torch
    from maect.models.checkpoints import Converted


class Import(Stage):
    """Import of a public encoder, in place of training (`docs/weights.md`)."""

    name: ClassVar[str] = "import"
    title: ClassVar[str] = "Importing {run}"
    trains: ClassVar[bool] = False

    layout: str | None = None
    """Layout of the checkpoint, a key of `LAYOUTS`; None: detected from its content."""
    timm: str | None = None
    """The model's full name in timm, in place of a layout (`maect.recipes.timm_encoders`)."""

    @field_validator("layout")
    @classmethod
    def _known(cls, layout: str | None) -> str | None:
        if layout is not None and layout not in LAYOUTS:
            raise ValueError(f"unknown {layout!r}; {did_you_mean(layout, LAYOUTS)}")
        return layout

    @property
    def shape(self) -> dict[str, Any]:
        """Settings of the encoder's shape that the layout fixes; {} if the layout is not known."""
        return {} if self.layout is None else LAYOUTS[self.layout].shape


def import_weights(
    weights: Path,
    folder: Path,
    layout: str | None = None,
    size: str | None = None,
    image_size: int | None = None,
    pixels: Pixels | None = None,
    timm: str | None = None,
) -> tuple[str | None, "Converted"]:
    """Make a run folder out of a public checkpoint: its encoder, and a record of its origin.

    Args:
        weights: the checkpoint.
        folder: the run folder, `runs/RUN`; an earlier import in it is replaced.
        layout: of the checkpoint, a key of `LAYOUTS`; None: detected from its content.
        size: of the encoder; None: detected from the shapes.
        image_size: to use the encoder at; None: the one that it was trained at.
        pixels: of its images from now on; None: three channels, with ImageNet's statistics.
        timm: name of the model in timm, in place of layout and size.

    Returns:
        The layout (None for a model of timm), and the converted encoder.

    Raises:
        UserError: the weights cannot be read or do not fit, or the folder has a run that was
            trained.
    """
    from maect.models.checkpoints import convert, convert_timm, find_layout, read_checkpoint
    from maect.models.weights import save_encoder
    from maect.train.run_folder import origin

    record = RunRecord.path(folder)
    trained = (folder / "state").exists() or (folder / "metrics.jsonl").exists()
    if trained or (record.exists() and RunRecord.of(folder).stage != "import"):
        raise UserError(f"{folder}: holds a run that was trained here; import into another folder")
    exported = weights if weights.is_dir() else weights.parent
    about: Any = None
    with suppress(UserError, OSError):  # the file may be of any program
        about = read_json(exported / "config.json")
    if isinstance(about, dict) and {"maect", "pretrained_cfg"} <= about.keys():
        # The settings for reading images would be lost.
        raise UserError(
            f"{exported}: written by `maect export`; import the run's own weights, or use the "
            "folder as it is: maect.load, maect embed and maect predict take it"
        )
    checkpoint = read_checkpoint(weights)
    if timm is not None:
        new = convert_timm(checkpoint, timm, weights.name, image_size, pixels)
    elif layout is not None and layout not in LAYOUTS:
        raise UserError(f"unknown layout {layout!r}; known: {', '.join(LAYOUTS)}")
    else:
        layout = layout or find_layout(checkpoint, weights.name)
        new = convert(checkpoint, layout, weights.name, size, image_size, pixels)
    sha256, found = sha256_file(weights), weights.stat()
    record.unlink(missing_ok=True)  # it would be about another encoder for a moment
    save_encoder(folder / ENCODER, new.tensors, new.encoder, new.pooling)
    RunRecord(
        run=folder.name,
        stage="import",
        fingerprint=digest("import", new.timm or layout, new.encoder, new.pooling, sha256),
        weights=ImportedFile(
            file=weights.name,
            sha256=sha256,
            size=found.st_size,
            modified=found.st_mtime_ns,
            layout=layout,
            left_out=new.left_out,
            timm=new.timm,
            layer_scale_folded=new.layer_scale_folded,
        ),
        size=new.size,
        encoder=new.encoder,
        pooling=new.pooling,
        files=(ENCODER,),
        sha256={ENCODER: sha256_file(folder / ENCODER)},
        finished=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **origin(),
    ).write(record)
    return layout, new


def is_imported(folder: Path, weights: Path, settings: Import, encoder: Encoder) -> bool:
    """Return whether a run folder holds the import that is asked for, with its files.

    The checkpoint itself may be gone.
    """
    made = RunRecord.find(folder)
    if made is None or made.weights is None or is_another_file(weights, made.weights):
        return False
    if not all((folder / file).exists() for file in made.files):
        return False
    if settings.layout is None:  # detected in the weights, and the shape with it
        encoder = encoder.model_copy(update=shape_found(made.weights))
    asked = [(settings.layout, made.weights.layout), (settings.timm, made.weights.timm)]
    return made.encoder == encoder and all(one in (None, given) for one, given in asked)


def is_another_file(weights: Path, imported: ImportedFile) -> bool:
    """Return whether a checkpoint exists and differs from the one that was imported.

    It is read only if its size or time differs.
    """
    try:
        found = weights.stat()
        if (found.st_size, found.st_mtime_ns) == (imported.size, imported.modified):
            return False
        return sha256_file(weights) != imported.sha256
    except OSError:  # it is not needed any more
        return False


def shape_found(imported: ImportedFile) -> dict[str, Any]:
    """Return the settings of the encoder's shape that an imported checkpoint's layout fixes."""
    found = LAYOUTS.get(str(imported.layout))
    return {} if found is None else found.shape
