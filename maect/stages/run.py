"""What the ranks of a training run: it reads the run's resolved file."""

from pathlib import Path

from maect.core.context import Context
from maect.stages.config import RunConfig
from maect.train import trainer


def train(
    context: Context,
    *,
    config: str | Path,
    digest: str | None = None,
    save_every_minutes: float = 10.0,
    convert_world_size: bool = False,
    stage_to: str | None = None,
) -> trainer.Verdict:
    """Train the run that a resolved file describes, or resume it; called on every rank.

    Args:
        context: this rank's.
        config: `runs/RUN/config.yaml`.
        digest: of the file when the job was submitted; it may have waited for days.
        save_every_minutes: how much work a kill may cost.
        convert_world_size: resume from a state that another number of ranks saved.
        stage_to: node-local folder to read the shards from, copied there first.

    Raises:
        UserError: the file is wrong or another by now, or see `maect.train.trainer.train`.
    """
    told = RunConfig.read(config)
    told.check_digest(digest, config)
    stage, shards = told.training(config)
    folder = Path(config).absolute().parent
    return trainer.train(
        context,
        trainer.Run(folder, shards, stage, told.encoder, told.seed, told.source),
        save_every_minutes=save_every_minutes,
        convert_world_size=convert_world_size,
        stage_to=stage_to,
    )
