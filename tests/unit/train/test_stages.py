"""Every stage in `STAGES` that trains, a new one included, from whatever it may start from."""

import inspect
import json
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from documented import multicrop
from lookups import clearly
from ranks import run
from test_resume import identical
from tiny_runs import HEAD, losses, metrics

from maect.evaluate import load_evaluation
from maect.models.vit import build_encoder, seeded
from maect.models.weights import load_encoder_weights
from maect.recipes import load_encoder, recipe_names, recipe_values, variant_names
from maect.records import RunRecord
from maect.stages import STAGES, Training, load_recipe, starts_from
from maect.stages.imported import import_weights
from maect.stages.run import RunConfig, train

ENCODER = load_encoder("tiny")
SHORT = {"batch_size": 16, "epochs": 2, "precision": "fp32"}  # 5 steps of the 40 images


def settings(name: str) -> Training:
    """A stage as its first recipe has it for `tiny`, or the first evaluation that trains it."""
    for recipe in recipe_names():
        if recipe_values(recipe, "tiny")["stage"] == name:
            return load_recipe(recipe, "tiny", SHORT)
    for evaluation in variant_names():
        for stage, _ in load_evaluation(evaluation, "tiny")[1].trainings().values():
            if isinstance(stage, Training) and stage.name == name:
                return type(stage).model_validate(stage.model_dump() | SHORT)
    raise AssertionError(f"no recipe of stage {name}")


Write = Callable[..., dict[str, object]]
SEEDS = range(1, 17)


@pytest.fixture(scope="module")
def write(shards) -> Write:
    """Writes a run's resolved file: what `run` is told of it."""

    def job(folder: Path, stage: Training, source: Path | None, seed: int = 1) -> dict[str, object]:
        config = RunConfig(
            run=folder.name, stage=stage.name, size="tiny", seed=seed, shards=shards, source=source,
            encoder=ENCODER, settings=stage,
        )  # fmt: skip
        config.write(folder / "config.yaml")
        return {"function": train, "config": str(folder / "config.yaml")}

    return job


@pytest.fixture(scope="module")
def finished(write: Write, tmp_path_factory) -> Callable[..., Path]:
    """The folder of a finished run of a stage, made when it is first asked for."""
    root = tmp_path_factory.mktemp("finished")

    def make(name: str, after: tuple[str, ...] = ()) -> Path:
        folder = root / name
        if folder.exists():
            return folder
        if not STAGES[name].trains:
            with seeded(9):  # whose images' features differ enough for lookups
                weights = build_encoder(ENCODER).state_dict()
            torch.save(weights, root / "dino.pth")
            import_weights(root / "dino.pth", folder, "dino", "tiny")  # pooled otherwise than ours
            return folder
        first = next((kind for kind in starts_from(name) if kind not in after), None)
        source = None if first is None else make(first, (*after, name))
        job = write(folder, settings(name), source)
        assert run(1, job, log=root / "log") == ["done"]
        return folder

    return make


def stopped(context, *, at: int, **job):
    """A training that is asked to stop after a step."""
    context.stop_at = at
    return train(context, **job)


def first_loss(
    folder: Path, write: Write, stage: Training, source: Path | None, whole: Path, log: Path
) -> tuple[float, float]:
    """The first loss on one rank and on two, with a seed whose lookups no rounding decides.

    Of the first seed the run on two ranks is `whole`.
    """
    for seed in SEEDS:
        alone, pair = (write(folder / f"{n}-{seed}", stage, source, seed) for n in (1, 2))
        # Before the first update a cosine moves by 2e-6 with the order of the sums.
        checked = alone | {"function": clearly, "of": train, "least": 2e-5}
        if "candidates of a lookup" in (verdict := run(1, checked, log=log, stop_at=1)):
            continue
        assert verdict == ["requeue"]
        if seed > SEEDS[0]:
            assert run(2, pair, log=log, stop_at=1) == ["requeue"]
            whole = folder / f"2-{seed}"
        return losses(folder / f"1-{seed}")[0], losses(whole)[0]
    raise AssertionError(f"no seed of {SEEDS} whose lookups are decided by more than rounding")


@pytest.mark.parametrize("name", [name for name, stage in STAGES.items() if stage.trains])
def test_a_stage_trains_resumes_and_leaves_what_it_says(name, write, finished, tmp_path):
    stage, log, sources = settings(name), tmp_path / "log", dict[str, Path | None]()
    stage.check_encoder(ENCODER)
    for kind in starts_from(name):
        source = STAGES[kind]() if not STAGES[kind].trains else settings(kind)
        stage.check_source(ENCODER, source, ENCODER)
        assert {*stage.inputs(source)} <= {*source.outputs}
        sources[kind] = finished(kind)
    sources = sources or {"nothing": None}
    jobs = {kind: write(tmp_path / kind, stage, source) for kind, source in sources.items()}
    first, *rest = sources
    whole, broken = tmp_path / first, tmp_path / "broken" / first
    resumed = write(broken, stage, sources[first])
    begun = resumed | {"function": stopped, "at": 3}
    assert run(2, jobs[first], begun, resumed, log=log) == ["done", "requeue", "done"]
    if rest:
        assert run(1, *(jobs[kind] for kind in rest), log=log) == ["done"] * len(rest)
    assert metrics(whole) == metrics(broken)
    for file in stage.outputs:
        assert (whole / file).read_bytes() == (broken / file).read_bytes()
    # The loss is one of the global batch, however many ranks share it, and wherever it begins.
    one, two = first_loss(tmp_path / "ranks", write, stage, sources[first], whole, log)
    assert one == pytest.approx(two, rel=1e-4)
    for kind, source in sources.items():
        folder = tmp_path / kind
        assert len(losses(folder)) == 5 and np.isfinite(losses(folder)).all()
        assert {path.name for path in folder.glob("*.safetensors")} == set(stage.outputs)
        left = {(folder / file).read_bytes() for file in stage.outputs}
        old = {path.read_bytes() for path in source.glob("*.safetensors")} if source else set()
        assert left - old  # something was learnt
        _, shape, pooling = load_encoder_weights(folder / "encoder.safetensors")
        record = json.loads(RunRecord.path(folder).read_text())
        assert (shape, pooling) == (ENCODER, record["pooling"])
        # What an online evaluation reads is what is exported, also of a frozen encoder.
        built = stage.build(ENCODER, 1, source, ("a", "b"))
        exported = built.export_pooling if hasattr(built, "export_pooling") else built.pooling
        assert exported == pooling
    assert stage.flops_per_image(ENCODER) > 0 and stage.state_bytes(ENCODER) > 0


def test_heads_share_what_is_drawn_for_their_lookups():
    stage = multicrop(local_size=8, read=(2, 3), head=HEAD)
    for key, value in {"topk": 5, "lookup": "oracle"}.items():
        other = {"heads.2": stage.head, "heads.3": stage.head.model_copy(update={key: value})}
        differing = type(
            "Differing", (type(stage),), {"head_settings": property(lambda _, at=other: at)}
        )
        with pytest.raises(ValueError, match=f"heads.3.{key} {value} differs from heads.2.{key}"):
            differing.model_validate(stage.model_dump())


def test_fields_are_those_of_the_nearest_class():
    """Of two bases pydantic takes a field from the first, even if the second redefines it."""
    for stage in STAGES.values():
        for name, field in stage.model_fields.items():
            nearest = next(cls for cls in stage.__mro__ if name in inspect.get_annotations(cls))
            assert repr(field) == repr(nearest.model_fields[name]), (stage, name)


def staged_late(context, **job):
    """A training on two ranks, of which one copies for as long as the other one waits.

    Not in a collective, which would end the training after half an hour.
    """
    import torch.distributed as dist
    from ranks import train

    from maect.train import trainer

    stage = trainer.stage_shards

    def late(*given):
        if context.rank == 1:
            store = dist.distributed_c10d._get_default_store()
            store.wait(["staged-0"], timedelta(minutes=1))
        return stage(*given)

    trainer.stage_shards = late
    try:
        return train(context, **job)
    finally:
        trainer.stage_shards = stage


def test_staged_run_is_bit_identical(job, tmp_path, shards, whole):
    log = tmp_path / "log"
    (tmp_path / "node").mkdir()
    moved = Path(shutil.copytree(shards, tmp_path / "shared" / "train"))
    staged = job("staged", "mae") | {"shards": str(moved), "stage_to": str(tmp_path / "node")}
    late = staged | {"function": staged_late, "stop_at": 4}
    assert run(2, late, log=log) == ["requeue"]
    (copy,) = (tmp_path / "node").iterdir()
    # With its source's tars emptied, what goes on can only read the copies.
    sizes = {tar: tar.stat().st_size for tar in moved.glob("*.tar")}
    for tar, size in sizes.items():
        tar.write_bytes(bytes(size))
    # Staged or not, a finished run is finished.
    assert run(2, staged, staged | {"stage_to": None}, log=log) == ["done"] * 2
    assert list((tmp_path / "node").iterdir()) == [copy]
    identical(whole / "mae", staged["folder"])
    records = [RunRecord.of(folder) for folder in (whole / "mae", Path(staged["folder"]))]
    assert records[0].fingerprint == records[1].fingerprint
