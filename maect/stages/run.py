"""A run's resolved file, `runs/RUN/config.yaml`, and the function that its ranks call."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from pydantic import Field, SerializeAsAny

from maect.core.context import Context
from maect.core.errors import UserError, explain_out_of_memory
from maect.core.settings import LocalPath, digest, validated
from maect.core.stamps import Checksums, StampedFile, known_record, record_checksum, size_and_time
from maect.recipes import Encoder, OnlineEvaluation
from maect.recipes.cost import GIB
from maect.recipes.settings import PLAIN, Computing
from maect.records import RunRecord, weights_checksum
from maect.stages import STAGES, Stage, Training, check_source, recorded

if TYPE_CHECKING:  # it imports torch
    from maect.train.trainer import Verdict


class RunConfig(StampedFile):
    """The resolved file of a run, in the run's folder."""

    run: str
    stage: str
    recipe: str | None = None
    """Name of the recipe, for people; nothing reads it."""
    size: str
    """The encoder size, a column of the recipe."""
    seed: int = Field(default=0, ge=0)
    shards: LocalPath | None = None
    """Shard folder of the train split; None: an import."""
    source: LocalPath | None = None
    """Folder of the run to start from."""
    weights: LocalPath | None = None
    """The published checkpoint that is imported; its path is no part of the run's identity."""
    test: LocalPath | None = None
    """Shard folder of the split to score a fine-tuning on after every epoch."""
    resize: int | None = Field(default=None, gt=0)
    """Shorter side of images before the centre crop wherever the encoder is used; None: 256/224
    of the image size. Training does not depend on it."""
    encoder: Encoder
    settings: SerializeAsAny[Stage]
    """All settings that the result depends on."""
    computing: Computing | None = None
    """Way of computing, no part of the run's identity; None: an import, or defaults."""
    online_evaluation: OnlineEvaluation | None = None
    """Interval of the encoder's evaluation during training; no part of the run's identity."""

    kinds = ("stage", STAGES)

    def check(self, where: str) -> None:
        """Raise UserError if settings do not fit the encoder or the run to start from."""
        try:
            self.settings.check_encoder(self.encoder)
            if isinstance(self.settings, Training):
                self.settings.check_computing(self.computing or PLAIN)
        except ValueError as error:
            raise UserError(f"{where}: settings: {error}") from None
        if self.source is None:
            check_source(where, self.settings, self.encoder, None, "source")
            return
        # The command refuses a run that is not finished yet.
        record = RunRecord.find(self.source)
        if record and record.encoder:
            source = self.source.name, recorded(record), record.encoder
            check_source(f"{where}: source", self.settings, self.encoder, source, "source")

    def named(self, path: Path) -> Self:
        """Return the config for the run folder of another path."""
        return self.model_copy(update={"run": path.absolute().parent.name})

    def training(self, where: str | Path) -> tuple[Training, Computing, Path]:
        """Return stage, computing and shard folder; UserError if the stage does not train."""
        if not self.settings.trains or self.shards is None:
            raise UserError(f"{where}: stage {self.stage} does not train; `maect import {where}`")
        return cast(Training, self.settings), self.computing or PLAIN, self.shards

    @property
    def digest(self) -> str:
        """Identity of the settings, without the places of the inputs."""
        return digest(self.stage, self.settings, self.encoder, self.seed)

    @property
    def asked(self) -> str:
        """Identity of the settings and of the resizing of images for the encoder."""
        return digest(self.digest, self.resize)

    def made_of(self) -> Checksums:
        """Return the checksums of shards, of the source's weights and of a file to import."""
        splits = [shards for shards in (self.shards, self.test) if shards is not None]
        found = {
            shards / "index.json": known_record(shards / "index.json").get("digest")
            for shards in splits
        }
        if self.source is not None:
            found[RunRecord.path(self.source)] = weights_checksum(self.source)
        if self.weights is not None:
            found[self.weights] = size_and_time(self.weights)
        return found

    def result(self, path: Path) -> str | None:
        """Return the checksum of the run's record, or None if a file that it lists is missing."""
        record = RunRecord.path(path.parent)
        files = known_record(record).get("files", ())
        whole = all((path.parent / file).exists() for file in files)
        return record_checksum(record) if whole else None

    def fingerprint(self, data: str, weights: dict[str, str]) -> str:
        """Return the identity of the result.

        Args:
            data: digest of the shards.
            weights: checksums of the weights to start from, by file.
        """
        return self.settings.fingerprint(self.encoder, self.seed, data, weights)


def resize_of(run: Path) -> int | None:
    """Return a run's resizing of images; None: unknown, as for a run imported by hand."""
    config = run / "config.yaml"
    return RunConfig.read(config).resize if config.exists() else None


def train(
    context: Context,
    *,
    config: str | Path,
    digest: str | None = None,
    identity: str | None = None,
    computing: dict[str, Any] | None = None,
    **options: Any,
) -> "Verdict":
    """Train the run that a resolved file describes, or resume it; called on every rank.

    Args:
        context: this rank's.
        config: path of the file.
        digest: of the file when the job was submitted; it may have waited for days.
        identity: of the run when the job was submitted, which hangs on its data and source, too.
        computing: replaces the file's; chosen to fit into the devices' memory (`Training.fitted`).
        **options: of `maect.train.trainer.train`.

    Raises:
        UserError: the file is wrong or was changed, or see `maect.train.trainer.train`.
        NodeError: the device's memory is too small, or others use a part of it.
    """
    from maect.core.distributed import leave
    from maect.train import trainer

    file = RunConfig.read(config, submitted=digest)
    stage, how, shards = file.training(config)
    if computing is not None:
        how = validated(Computing, computing, "computing")
        stage.check_computing(how)
    run = trainer.RunInputs(
        Path(config).absolute().parent, shards, stage, file.encoder, file.seed, file.source,
        file.test, file.resize, how, identity,
    )  # fmt: skip
    with explain_out_of_memory(
        lambda said: _too_large(stage, how, file.encoder, context.world_size, said)
    ):
        verdict = trainer.train(context, run, online=file.online_evaluation, **options)
    leave()
    return verdict


def _too_large(
    stage: Training, computing: Computing, encoder: Encoder, ranks: int, said: str
) -> str:
    """Return advice for a device whose memory is too small, also at the next attempt."""
    share = stage.batch_size // (ranks * computing.accumulation)
    expected = stage.peak_memory(encoder, ranks, computing) / GIB
    return (
        f"out of GPU memory with {share} images on each of {ranks} ranks, where {expected:.0f} GiB "
        f"were expected: {said}; say in the profile what a GPU is (`gpu`), or set "
        "activation_checkpointing: true or (not with an NNCLR head) a larger accumulation, or take "
        "more nodes: the run goes on from its last state, with --convert-world-size on more nodes"
    )
