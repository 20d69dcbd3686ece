"""Compute an encoder's features and evaluate it, by hand or by a rule."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from maect.answers.commands import Resize
from maect.core.errors import MissingFileError, UserError
from maect.core.files import need, sha256_file
from maect.core.resources import Resources
from maect.tools.train import (
    LOCAL,
    Changes,
    Log,
    Out,
    Where,
    arguments_of,
    check_free,
    need_shards,
    read_job,
    run_job,
)

if TYPE_CHECKING:
    from maect.evaluate import FeaturesConfig


def features(
    run: Path,
    /,
    *,
    resources: Where = LOCAL,
    shards: Path | None = None,
    out: Path | None = None,
    resize: Resize = None,
    precision: Literal["fp32", "tf32", "bf16"] | None = None,
    before_norm: bool = False,
    blocks: Annotated[int, Parameter(metavar="N")] = 1,
    log: Log = None,
) -> None:
    """Compute an encoder's features of a split.

    `maect features results/birds/runs/ct_min --shards val --out val.safetensors`

    Args:
        run: folder of the run; or the resolved file of features, alone.
        resources: where to run.
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
        check_free(path, config.text(path))
        if out.exists() and not path.exists():
            raise UserError(
                f"{out}: exists, and no {path.name} says what it is; choose another --out"
            )
    _launch_features(config, path, resources.resolved())


def _launch_features(config: "FeaturesConfig", path: Path, resources: Resources) -> None:
    """Write the features of a split next to their file; UserError if inputs are missing."""
    from maect.core.settings import digest
    from maect.core.stamps import stamped
    from maect.launch import Task

    encoder = need(config.run / "encoder.safetensors", "encoder")
    out = path.with_suffix(".safetensors")
    wanted = config.how | {
        "encoder_sha256": sha256_file(encoder),
        "index_digest": need_shards(config.shards),
    }

    def is_done() -> bool:
        from maect.evaluate.store import open_record

        try:
            return wanted.items() <= open_record(out).items()
        except MissingFileError:
            return False

    config.write(path)
    task = Task("maect.evaluate.features:features", arguments_of(config, path), digest(wanted))
    with stamped(path, config):
        run_job("features", out.with_suffix(".job"), task, is_done, resources, out)


def evaluate(
    config: Path,
    changes: Changes = (),
    /,
    *,
    out: Out = None,
    resources: Where = LOCAL,
    log: Log = None,
) -> None:
    """Evaluate an encoder in one way.

    `maect evaluate evaluations/mae/knn.yaml settings.k=5 --out mine/k5.yaml`

    Args:
        config: the evaluation's resolved file; the result goes beside it, as JSON.
        changes: in place of what the file says, such as settings.k=5; this is another evaluation,
            which needs --out.
        resources: where to run.
    """
    from maect.core.stamps import stamped
    from maect.evaluate import EvaluationConfig
    from maect.evaluate.evaluation import Completion
    from maect.launch import Task

    before = EvaluationConfig.read(config)
    after = EvaluationConfig.read(config, changes)
    if before.settings.inputs() != after.settings.inputs() and before.inputs == after.inputs:
        raise UserError(
            f"{config}: {' '.join(changes)} asks for other inputs; "
            "name the files with inputs.NAME=PATH"
        )
    evaluation, path = read_job(EvaluationConfig, config, changes, out)
    resources = resources.resolved()
    evaluation.settings.check_ranks(resources.ranks)
    need(evaluation.run / "encoder.safetensors", "encoder")
    for name in evaluation.settings.inputs():
        if name not in evaluation.inputs:
            raise UserError(f"{path}: inputs: {name!r} is missing")
        for file in evaluation.paths(name):
            need(file, f"input {name!r}")
    result = Completion(path)
    arguments = arguments_of(evaluation, path)
    task = Task("maect.evaluate.evaluation:evaluate", arguments, result.identity)
    job = path.with_suffix(".job")
    with stamped(path, evaluation):
        run_job("evaluate", job, task, result.is_there, resources, path.with_suffix(".json"))
