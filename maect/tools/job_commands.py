"""Commands that run one job each, here or on a cluster, from training to evaluation."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from cyclopts import Parameter

from maect.answers.commands import Resize
from maect.core.errors import UserError
from maect.core.files import need
from maect.data.commands import StatedPixels
from maect.tools.launching import LOCAL, Launching

if TYPE_CHECKING:
    from maect.evaluate import EvaluationConfig
    from maect.models.checkpoints import Converted
    from maect.stages.run import RunConfig

File = TypeVar("File", "RunConfig", "EvaluationConfig")
Changes = Annotated[Sequence[str], Parameter(metavar="KEY=VALUE")]
Out = Annotated[
    Path | None,
    Parameter(metavar="FILE", help="write the changed file here; results go beside it"),
]


def read_job(
    kind: type[File], config: Path, changes: Sequence[str] = (), out: Path | None = None
) -> tuple[File, Path]:
    """Read a resolved file with changes and write it to where it belongs.

    Args:
        kind: class of the file.
        config: the resolved file.
        changes: `KEY=VALUE` in place of what it says.
        out: where to write the changed file; needed with changes, which make another job.

    Returns:
        The config, and the file that describes the job; results go beside it.

    Raises:
        UserError: changes without `out`, or `out` belongs to another job.
    """
    from maect.recipes.few_labels import FewLabels

    read = kind.read(config, changes)
    if out is None:
        if changes:
            raise UserError(
                f"{config}: {changes[0]} makes this another job; name its file with --out"
            )
        return read, config
    read = read.named(out)
    if isinstance(read.settings, FewLabels):
        read = read.model_copy(update={"settings": read.settings.read_lists()})
    _check_free(out, read.text(out))
    read.write(out)
    return read, out


def _check_free(path: Path, text: str) -> None:
    """Refuse to write a config over a different file (UserError)."""
    if path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
        raise UserError(f"{path}: exists and says something else; choose another --out")


def train(
    config: Path,
    changes: Changes = (),
    /,
    *,
    out: Out = None,
    launching: Launching = LOCAL,
    save_every_minutes: float = 2.0,
    convert_world_size: bool = False,
    gpu: str = "",
    stage_to: Annotated[str, Parameter(metavar="DIR")] = "",
) -> None:
    """Train a run, or resume it.

    `maect train runs/mae/config.yaml settings.epochs=9 --out runs/mae9/config.yaml`

    Args:
        config: the run's resolved file; results go beside it.
        changes: in place of what the file says, such as settings.epochs=10 settings.head.topk=1
            seed=1; this is another run, which needs --out.
        launching: where to run.
        save_every_minutes: default 2.
        convert_world_size: resume on another number of ranks.
        gpu: model of the GPUs, such as A100-40GB: a step that is too large for one is computed in
            parts, or refused (default: this machine's, if the job runs here).
        stage_to: first copy the shards to this folder of each node; or to that in an environment
            variable of the node, by its name (TMPDIR).
    """
    from maect.stages.run import RunConfig
    from maect.tools import jobs

    path = out or config
    owner = path.parent / "config.yaml"
    if path.name != owner.name and owner.exists():
        raise UserError(f"{path}: its folder belongs to the run in {owner.name}; choose another")
    run, path = read_job(RunConfig, config, changes, out)
    jobs.train(
        run,
        path,
        launching,
        gpu=gpu,
        save_every_minutes=save_every_minutes,
        convert_world_size=convert_world_size,
        stage_to=stage_to,
    )


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


def features(
    run: Path,
    /,
    *,
    launching: Launching = LOCAL,
    shards: Path | None = None,
    out: Path | None = None,
    resize: Resize = None,
    precision: Literal["fp32", "tf32", "bf16"] | None = None,
    before_norm: bool = False,
    blocks: Annotated[int, Parameter(metavar="N")] = 1,
) -> None:
    """Compute an encoder's features of a split.

    `maect features results/birds/runs/ct_min --shards val --out val.safetensors`

    Args:
        run: folder of the run; or the resolved file of features, alone.
        launching: where to run.
        shards: folder of a split's shards, for a run.
        out: the file to write, X.safetensors, for a run; its settings go to X.yaml beside it. What
            is there with other settings is refused.
        precision: of the encoder's products (default: tf32 from ViT-B's width on, which takes a GPU
            a quarter of the time of fp32; below it fp32).
        before_norm: leave out the encoder's final norm.
        blocks: with --before-norm: concatenate the outputs of the last N blocks.
    """
    from maect.core.settings import validated
    from maect.evaluate import FeaturesConfig
    from maect.evaluate.base import encoder_settings
    from maect.stages.run import resize_of
    from maect.tools import jobs

    if run.suffix == ".yaml":
        config = FeaturesConfig.read(run)
        path = run
    elif shards is None or out is None:
        raise UserError(f"{run}: name the shards with --shards and the file to write with --out")
    elif out.suffix != ".safetensors":
        raise UserError(
            f"{out}: features are written as .safetensors; maect embed writes tables of vectors"
        )
    else:
        need(run / "encoder.safetensors", "encoder")
        encoder = encoder_settings(run)
        path = out.with_suffix(".yaml")
        given = {
            "run": run,
            "shards": shards,
            "precision": precision or encoder.features_precision,
            "resize": resize or resize_of(run) or encoder.default_resize,
            "norm": not before_norm,
            "blocks": blocks,
        }
        config = validated(FeaturesConfig, given, "maect features")
        _check_free(path, config.text(path))
        if out.exists() and not path.exists():
            raise UserError(
                f"{out}: exists, and no {path.name} says what it is; choose another --out"
            )
    jobs.extract_features(config, path, launching)


def evaluate(
    config: Path,
    changes: Changes = (),
    /,
    *,
    out: Out = None,
    launching: Launching = LOCAL,
) -> None:
    """Evaluate an encoder in one way.

    `maect evaluate evaluations/mae/knn.yaml settings.k=5 --out mine/k5.yaml`

    Args:
        config: the evaluation's resolved file; the result goes beside it, as JSON.
        changes: in place of what the file says, such as settings.k=5; this is another evaluation,
            which needs --out.
        launching: where to run.
    """
    from maect.evaluate import EvaluationConfig
    from maect.tools import jobs

    before = EvaluationConfig.read(config)
    after = EvaluationConfig.read(config, changes)
    if before.settings.inputs() != after.settings.inputs() and before.inputs == after.inputs:
        raise UserError(
            f"{config}: {' '.join(changes)} asks for other inputs; "
            "name the files with inputs.NAME=PATH"
        )
    jobs.evaluate(*read_job(EvaluationConfig, config, changes, out), launching)
