"""Import public weights as a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from maect.core.errors import UserError
from maect.data.commands import StatedPixels

if TYPE_CHECKING:
    from maect.models.checkpoints import Converted


def import_weights(
    weights: Path,
    run: Path | None = None,
    /,
    *,
    layout: str | None = None,
    timm: Annotated[str | None, Parameter(metavar="NAME")] = None,
    size: str | None = None,
    image_size: int | None = None,
    pixels: StatedPixels = None,
) -> None:
    """Turn downloaded weights into a run.

    `maect import weights/mae_pretrain_vit_base.pth results/mine/runs/mae_base`

    Args:
        weights: a checkpoint, as published; or the resolved file of a run that imports one, alone.
        run: folder to write, for a checkpoint.
        layout: of the checkpoint, one of docs/weights.md (default: detected).
        timm: the model's name in timm, in place of layout and size
            (docs/reference/timm_encoders.md).
        size: encoder size (default: detected).
        image_size: pixels to use it at (default: its own).
    """
    from maect.core.settings import validated
    from maect.recipes import Pixels
    from maect.stages.imported import import_weights as convert

    if weights.suffix == ".yaml":
        _import_as_resolved(weights)
        return
    if run is None:
        raise UserError(f"{weights}: name the run's folder, too")
    if timm is not None and (layout or size):
        raise UserError(f"--timm {timm} says everything: leave out --layout and --size")
    read = validated(Pixels, pixels or {}, "--pixels")
    layout, imported = convert(weights, run, layout, size, image_size, read, timm)
    _say_imported(run, layout, imported)


def _import_as_resolved(path: Path) -> None:
    """Import by the resolved file of a run, next to it, unless that is done."""
    from maect.core.stamps import stamped
    from maect.stages.imported import Import, is_imported
    from maect.stages.imported import import_weights as convert
    from maect.stages.run import RunConfig

    config = RunConfig.read(path)
    run = path.parent
    if config.weights is None or not isinstance(config.settings, Import):
        raise UserError(f"{path}: no `weights`: this run is not an import")
    shape = config.encoder
    settings = config.settings
    with stamped(path, config):
        if is_imported(run, config.weights, settings, shape):
            print(f"{run}: imported before")
            return
        layout, imported = convert(
            config.weights, run, settings.layout, config.size, shape.image_size, shape.pixels,
            settings.timm,
        )  # fmt: skip
    _say_imported(run, layout, imported)


def _say_imported(run: Path, layout: str | None, imported: "Converted") -> None:
    """Print the name, size and pooling of an imported encoder."""
    what = imported.timm or f"layout {layout}, size {imported.size}"
    print(
        f"{run}: {what}, {imported.encoder.image_size} pixels, "
        f"pooling {imported.pooling}; {sum(imported.left_out.values())} tensors left out"
    )
