"""Public encoders by a short name, such as `dinov2_small`: a run that is imported at first use.

Nothing is downloaded here: compute nodes have no internet. `maect retrieve NAME` fills the folder.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from maect.core.errors import UserError, did_you_mean
from maect.core.yaml_files import read_yaml
from maect.data.retrieve import CATALOGUE
from maect.records import is_finished

log = logging.getLogger(__name__)

VARIABLE = "MAECT_WEIGHTS"


@dataclass(frozen=True)
class Public:
    """Recipe that turns the weights of a name in `CATALOGUE` into an encoder.

    Attributes:
        timm: the model's name in timm; none: its layout is found in the file.
    """

    timm: str | None = None
    image_size: int | None = None


_TIMM = read_yaml(Path(__file__).with_suffix(".yaml"))
PUBLIC = {name: Public(**given) for name, given in _TIMM.items()} | {
    name: Public()
    for name, files in CATALOGUE.items()
    if name.startswith(("mae", "maect", "moco", "msn", "dino_base", "ibot", "layer", "ijepa"))
    and files[0].unpacks_to is None
}


def folder() -> Path:
    """Return where weights and the runs of them are: $MAECT_WEIGHTS, or `weights` here."""
    return Path(os.environ.get(VARIABLE) or "weights")


def find_weights(name: str) -> Path:
    """Return the file of a public encoder's weights; UserError if it was not downloaded."""
    (remote,) = CATALOGUE[name]
    file = folder() / remote.name
    if not file.is_file():
        raise UserError(
            f"{name}: no {file}; on a machine with internet run `maect retrieve {name} "
            f"{folder()}`, or put {remote.url} there (another folder: {VARIABLE})"
        )
    return file


def find_run(given: Path) -> Path:
    """Return a run's folder; import a public encoder first, if that was not done."""
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
    file = find_weights(name)
    from maect.stages.imported import import_weights

    log.info("%s: imported from %s, once", run, file)
    import_weights(file, run, timm=PUBLIC[name].timm, image_size=PUBLIC[name].image_size)
    return run
