"""Commands that run one job each, here or on a cluster, from training to evaluation."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from maect.answers.commands import Resize
from maect.core.commands import Log, Word, command
from maect.core.errors import UserError, check_names
from maect.core.files import need
from maect.data.commands import StatedPixels

if TYPE_CHECKING:
    from maect.evaluate import EvaluationConfig
    from maect.models.checkpoints import Converted
    from maect.stages.run import RunConfig
    from maect.tools.jobs import Where

log = logging.getLogger(__name__)
File = TypeVar("File", "RunConfig", "EvaluationConfig")


@dataclass(frozen=True, kw_only=True)
class Launching:
    """Place and resources of a job.

    Attributes:
        nodes: a number, or a range such as 1..16, of which a training takes what its batch can use.
        devices: ranks per node; auto and gpus: one per GPU, or without GPUs two (auto) or one.
        cpus: CPUs per rank (auto: an equal share of all).
        memory_mb: memory per node (0: any).
        minutes: wall limit of one job.
        sbatch: further sbatch options, KEY=VALUE,KEY=VALUE.
        setup: script that the compute node sources first.
        python: what ranks run in place of this Python.
        detach: leave the job running on Ctrl-C.
    """

    cluster: Literal["local", "slurm"] = "local"
    nodes: str = "1"
    devices: str = "1"
    cpus: str = "auto"
    memory_mb: int = 0
    minutes: int = 1440
    partition: str = ""
    account: str = ""
    sbatch: str = ""
    setup: str = ""
    python: str = ""
    detach: bool = False
    log: Log = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Make it of options by their names, whose numbers may be numbers."""
        check_names("options", options, [field.name for field in fields(cls)])
        words = {k: str(v) for k, v in options.items() if k in ("nodes", "devices", "cpus")}
        return cls(**dict(options) | words)

    def where(self, gpu: str = "") -> "Where":
        """Return where a job runs, on devices of the given model."""
        from maect.experiment.working_folder import other_clone
        from maect.launch import Resources
        from maect.launch.owner import SNAKEMAKE
        from maect.launch.resources import node_range
        from maect.tools.jobs import Where

        # Within a pipeline, that has said it once.
        if SNAKEMAKE not in os.environ and (note := other_clone(Path.cwd())):
            log.warning("%s", note)
        others = {field.name for field in fields(self)} - {"nodes", "detach", "log"}
        given = {name: getattr(self, name) for name in others}
        resources = Resources.parse(nodes=node_range(self.nodes)[0], **given)
        return Where(resources, self.nodes, gpu, self.detach)


@dataclass(frozen=True)
class Changed:
    """Config of a job, and its changes.

    Attributes:
        config: the resolved file; results go beside it.
        changes: in place of what the file says, e.g. settings.epochs=10 settings.head.topk=1
            seed=1; this is another job, which needs --out.
        out: write the changed file here, results beside it.
    """

    config: Path
    changes: Annotated[Sequence[str], Word("KEY=VALUE")] = ()
    _: KW_ONLY
    out: Annotated[Path | None, Word("FILE")] = None

    @property
    def path(self) -> Path:
        """Return where the file is that describes the job."""
        return self.out or self.config

    def read(self, kind: type[File]) -> tuple[File, Path]:
        """Read the resolved file with its changes, and write it to where it belongs.

        Raises:
            UserError: changes that would be of another run than the one whose files lie beside it.
        """
        from maect.recipes.few_labels import FewLabels

        config = kind.read(self.config, self.changes)
        if self.out is None:
            if self.changes:
                raise UserError(
                    f"{self.config}: {self.changes[0]} makes this another job; "
                    "name its file with --out"
                )
            return config, self.config
        config = config.named(self.out)
        if isinstance(config.settings, FewLabels):
            config = config.model_copy(update={"settings": config.settings.read_lists()})
        _check_free(self.out, config.text(self.out))
        config.write(self.out)
        return config, self.out


def _check_free(path: Path, text: str) -> None:
    """Refuse to write a config over a file that says something else (UserError)."""
    if path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
        raise UserError(f"{path}: exists and says something else; choose another --out")


@command(
    names=("recipes", "sizes"),
    example="train runs/mae/config.yaml settings.epochs=10 --out runs/mae10/config.yaml",
)
def train(
    launching: Launching,
    changed: Changed,
    *,
    save_every_minutes: float = 2.0,
    convert_world_size: bool = False,
    gpu: str = "",
    stage_to: Annotated[str, Word("DIR")] = "",
    trace: Annotated[str, Word("FIRST-LAST")] = "",
) -> None:
    """Train a run, or resume it.

    Args:
        save_every_minutes: default 2.
        convert_world_size: resume on another number of ranks.
        gpu: model of the GPUs, such as A100-40GB: a step that is too large for one is computed in
            parts, or refused (default: this machine's, if the job runs here).
        stage_to: first copy the shards to this folder of each node; or to that in an environment
            variable of the node, by its name (TMPDIR).
        trace: profile these steps, such as 100-105, into the run's folder.
    """
    from maect.stages.run import RunConfig
    from maect.tools import jobs

    theirs = changed.path.parent / "config.yaml"
    if changed.path.name != theirs.name and theirs.exists():
        raise UserError(
            f"{changed.path}: its folder belongs to the run in {theirs.name}; choose another"
        )
    config, path = changed.read(RunConfig)
    jobs.train(
        config,
        path,
        launching.where(gpu),
        save_every_minutes=save_every_minutes,
        convert_world_size=convert_world_size,
        stage_to=stage_to,
        trace=trace,
    )


@command(
    name="import",
    names=("layouts", "sizes"),
    example="import weights/mae_pretrain_vit_base.pth results/mine/runs/mae_base",
)
def import_weights(
    weights: Path,
    run: Path | None = None,
    *,
    layout: str | None = None,
    timm: Annotated[str | None, Word("NAME")] = None,
    size: str | None = None,
    image_size: int | None = None,
    pixels: StatedPixels = None,
) -> None:
    """Turn downloaded weights into a run.

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
    from maect.data.config import stated_pixels
    from maect.recipes import Pixels
    from maect.stages.imported import import_weights as convert

    if weights.suffix == ".yaml":
        _import_as_resolved(weights)
        return
    if run is None:
        raise UserError(f"{weights}: name the run's folder, too")
    if timm is not None and (layout or size):
        raise UserError(f"--timm {timm} says everything: leave out --layout and --size")
    read = validated(Pixels, stated_pixels(pixels), "--pixels")
    layout, imported = convert(weights, run, layout, size, image_size, read, timm)
    _say_imported(run, layout, imported)


def _import_as_resolved(path: Path) -> None:
    """Import as the resolved file of a run says, beside it, unless that is done."""
    from maect.core.stamps import stamped
    from maect.stages.imported import Import, is_imported
    from maect.stages.imported import import_weights as convert
    from maect.stages.run import RunConfig

    config, run = RunConfig.read(path), path.parent
    if config.weights is None or not isinstance(config.settings, Import):
        raise UserError(f"{path}: no `weights`: this run is not an import")
    shape, settings = config.encoder, config.settings
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
    """Print what was taken out of a checkpoint."""
    what = imported.timm or f"layout {layout}, size {imported.size}"
    print(
        f"{run}: {what}, {imported.encoder.image_size} pixels, "
        f"pooling {imported.pooling}; {sum(imported.left_out.values())} tensors left out"
    )


@command(example="features results/birds/runs/ct_min --shards shards/val --out val.safetensors")
def features(
    launching: Launching,
    run: Path,
    *,
    shards: Path | None = None,
    out: Path | None = None,
    resize: Resize = None,
    precision: Literal["fp32", "tf32", "bf16"] | None = None,
    before_norm: bool = False,
    blocks: Annotated[int, Word("N")] = 1,
) -> None:
    """Compute an encoder's features of a split.

    Args:
        run: folder of the run; or the resolved file of features, alone.
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
        config, path = FeaturesConfig.read(run), run
    elif shards is None or out is None:
        raise UserError(f"{run}: name the shards with --shards and the file to write with --out")
    elif out.suffix != ".safetensors":
        raise UserError(
            f"{out}: features are written as .safetensors; "
            "maect embed writes tables of vectors as .parquet, .csv or .npy"
        )
    else:
        need(run / "encoder.safetensors", "encoder")
        encoder, path = encoder_settings(run), out.with_suffix(".yaml")
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
    jobs.extract_features(config, path, launching.where())


@command(
    names=("evaluations",),
    example="evaluate evaluations/mae/knn.yaml settings.k=5 --out evaluations/mae/k5.yaml",
)
def evaluate(launching: Launching, changed: Changed) -> None:
    """Evaluate an encoder in one way."""
    from maect.evaluate import EvaluationConfig
    from maect.tools import jobs

    before = EvaluationConfig.read(changed.config)
    config = EvaluationConfig.read(changed.config, changed.changes)
    if before.settings.inputs() != config.settings.inputs() and before.inputs == config.inputs:
        raise UserError(
            f"{changed.config}: {' '.join(changed.changes)} asks for other inputs; "
            "name the files with inputs.NAME=PATH"
        )
    jobs.evaluate(*changed.read(EvaluationConfig), launching.where())
