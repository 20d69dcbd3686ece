"""Public encoders by a short name, such as `dinov2_small`: a run that is imported at first use.

Nothing is downloaded here: compute nodes have no internet. `maect retrieve NAME` fills the folder.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from maect.core.errors import UserError, did_you_mean
from maect.data.retrieve import CATALOGUE
from maect.records import is_finished

log = logging.getLogger(__name__)

VARIABLE = "MAECT_WEIGHTS"


@dataclass(frozen=True)
class Public:
    """Recipe that turns the weights of a name in `CATALOGUE` into an encoder.

    Attributes:
        timm: the model's name in timm; none: its layout is found in the file.
        image_size: to use it at; none: its own.
    """

    timm: str | None = None
    image_size: int | None = None


PUBLIC: dict[str, Public] = {
    # Their k-NN is published at 224 pixels; timm's configuration is of 518.
    "dinov2_small": Public("vit_small_patch14_dinov2.lvd142m", 224),
    "dinov2_base": Public("vit_base_patch14_dinov2.lvd142m", 224),
    "dinov2_large": Public("vit_large_patch14_dinov2.lvd142m", 224),
    "dinov2_small_registers": Public("vit_small_patch14_reg4_dinov2.lvd142m", 224),
    "dinov2_base_registers": Public("vit_base_patch14_reg4_dinov2.lvd142m", 224),
    "dinov2_large_registers": Public("vit_large_patch14_reg4_dinov2.lvd142m", 224),
    "dinov3_small": Public("vit_small_patch16_dinov3.lvd1689m"),
    "dinov3_base": Public("vit_base_patch16_dinov3.lvd1689m"),
    "dinov3_large": Public("vit_large_patch16_dinov3.lvd1689m"),
    "siglip2_base": Public("vit_base_patch16_siglip_224.v2_webli"),
    "siglip2_large": Public("vit_large_patch16_siglip_256.v2_webli"),
    "clip_base": Public("vit_base_patch16_clip_quickgelu_224.openai"),
    "dino_small": Public("vit_small_patch16_224.dino"),
} | {
    name: Public()
    for name, files in CATALOGUE.items()
    if name.startswith(("mae", "maect", "moco", "msn", "dino_base", "ibot", "layer", "ijepa"))
    and files[0].unpacks_to is None
}


def folder() -> Path:
    """Return where weights and the runs of them are: $MAECT_WEIGHTS, or `weights` here."""
    return Path(os.environ.get(VARIABLE) or "weights")


def find_run(given: Path) -> Path:
    """The folder of a run, or that of a public encoder, which is imported if it is not there.

    Args:
        given: a folder, or a name of `PUBLIC` if there is no such folder.

    Raises:
        UserError: neither, or the weights are not there.
    """
    name = str(given)
    if given.exists() or len(given.parts) != 1:
        return given
    if name not in PUBLIC:
        raise UserError(
            f"{name}: no such folder, and no public encoder; {did_you_mean(name, PUBLIC)}"
        )
    run = folder() / name
    if is_finished(run):
        return run
    (remote,) = CATALOGUE[name]
    file = folder() / remote.name
    if not file.is_file():
        raise UserError(
            f"{name}: no {file}; on a machine with internet run `maect retrieve {name} "
            f"{folder()}`, or put {remote.url} there (another folder: {VARIABLE})"
        )
    from maect.stages.imported import import_weights

    log.info("%s: imported from %s, once", run, file)
    import_weights(file, run, timm=PUBLIC[name].timm, image_size=PUBLIC[name].image_size)
    return run
