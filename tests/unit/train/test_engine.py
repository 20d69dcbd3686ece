"""Settings that change how a step is computed but not what, and what a run leaves behind."""

import json
import os
import platform
import subprocess
import warnings
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import alone, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_runs import ENCODER, metrics
from torch import nn

from maect.core.context import Context
from maect.core.errors import UserError
from maect.models.kernels import flash_kernel, mixed_precision, use_attention
from maect.models.vit import build_encoder, seeded
from maect.recipes import load_encoder
from maect.recipes.settings import Computing
from maect.records import RunRecord
from maect.stages import load_recipe
from maect.stages.fine_tune import FineTune
from maect.train import engine, trainer
from maect.train.checkpoint import complete_states
from maect.train.engine import Engine, random_batch, seconds_between, single_rank_group
from maect.train.objective import Objective
from maect.train.passes import compile_blocks, is_to_be_compiled
from maect.train.trainer import TrainingFault

CPU = torch.device("cpu")


class Bare(Objective):
    """An encoder and nothing else."""

    def __init__(self, precision="fp32"):
        super().__init__()
        self.precision = precision
        with seeded(0):
            self.encoder = build_encoder(ENCODER)

    def gradients(self):
        images = torch.linspace(-1, 1, 4 * 3 * 16 * 16).view(4, 3, 16, 16)
        with mixed_precision(images.device, self.precision):
            tokens = self.encoder(images).tokens
        tokens.square().mean().backward()
        return {name: p.grad for name, p in self.encoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("frozen", [0, 2])
@pytest.mark.slow
def test_compiled_blocks_compute_the_same(frozen):
    plain, compiled = Bare(), Bare()
    for objective in (plain, compiled):
        objective.encoder.freeze(frozen)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_blocks(compiled, CPU)
    ours, theirs = compiled.gradients(), plain.gradients()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    # One graph for all blocks of a kind beside the one that was tried, not one a block.
    assert 1 < graphs <= 4 and not torch._dynamo.utils.counters["graph_break"]
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-7)


def test_what_is_compiled_where_nothing_is_asked():
    def compiled(recipe, size, device, asked=None, zero=1, norm="pre"):
        tune = {"mixup": 0, "cutmix": 0}
        stage = FineTune.model_validate(tune) if not recipe else load_recipe(recipe, size)
        with torch.device("meta"):
            encoder = build_encoder(load_encoder(size).model_copy(update={"norm": norm}))
        computing = Computing(compile=asked, zero_stage=zero)
        return is_to_be_compiled(encoder, stage.labelled, torch.device(device), computing)

    assert compiled("mae", "base", "cuda") and compiled("ct_min", "large", "cuda")
    assert not compiled("mae", "small", "cuda") and not compiled("mae", "base", "cpu")
    assert not compiled("mae", "base", "cuda", zero=3)
    assert not compiled("", "base", "cuda")  # fine-tuning, which was not measured
    assert not compiled("ct_min", "base", "cuda", norm="post")  # data2vec's, which cannot be
    assert compiled("mae", "small", "cpu", True) and not compiled("mae", "base", "cuda", False)


@pytest.fixture
def eager_compiler(monkeypatch):
    """Compile without code generation, and count graphs from zero."""
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: compiler(f, backend="eager", **how))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def test_blocks_are_compiled_for_more_shapes_than_eight(eager_compiler):
    objective = Bare()
    block = objective.encoder.blocks[0]
    with torch._dynamo.config.patch(recompile_limit=8), torch.no_grad():
        assert compile_blocks(objective, CPU) == ""
        for tokens in range(2, 12):
            block(torch.zeros(1, tokens, objective.encoder.settings.width))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1 + 10


def test_without_flash_attn_compiled_blocks_are_whole(eager_compiler, caplog):
    """The package is not looked for in a block, where that would end the graph, and only once."""
    if find_spec("flash_attn"):
        pytest.skip("flash_attn is installed")
    flash_kernel.cache_clear()
    for _ in range(2):
        objective = Bare()
        use_attention(objective, "flash_attn")
    assert compile_blocks(objective, CPU) == ""
    objective.gradients()
    assert not torch._dynamo.utils.counters["graph_break"]
    assert caplog.text.count("flash_attn is not installed") == 1


def computed_otherwise(context):
    """Gradients with recomputed activations, and by SDPA in place of a missing flash_attn."""
    plain = Bare("bf16").gradients()
    saving, flash = Bare("bf16"), Bare("bf16")
    saving.encoder.checkpointing = True
    same_bits(saving.gradients(), plain)
    if not find_spec("flash_attn"):
        use_attention(flash, "flash_attn")
        same_bits(flash.gradients(), plain)


def test_other_ways_to_compute_give_the_same_bits_in_bf16(tmp_path):
    """In a process of its own, as a rank: late in a long session these bits have differed."""
    assert run(1, {"function": computed_otherwise}, log=tmp_path / "log") == [None]


def same_bits(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def test_contrastive_stages_refuse_accumulation_with_the_reason():
    twice, head = Computing(accumulation=2), load_recipe("ct_min", "base").head.model_dump()
    combined = load_recipe("mae", "base", {"contrastive": "combined", "head": head})
    for stage in (load_recipe("head_min", "base"), load_recipe("ct_aug", "base"), combined):
        with pytest.raises(ValueError, match="batch statistics and negatives"):
            stage.check_computing(twice)
    load_recipe("mae", "base").check_computing(twice)


def test_an_engine_of_one_rank_without_passes():
    """Its learning rates before the first update, the seconds between its marks, its end."""
    model, settings = nn.Linear(3, 2), load_recipe("mae", "base", {"batch_size": 2})
    group = {"params": [*model.parameters()], "peak_lr": 1e-3, "weight_decay": 0.0}
    with single_rank_group(Context()):
        ours = Engine(model, settings, [group], CPU)
        assert ours.learning_rates() == (0, 0) and not ours.captures and not ours.compiled
        first = ours.mark()
        assert 0 <= seconds_between(first, ours.mark()) < 60
        ours.close()
    assert {piece.name for piece in ours.slices} == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("fault", ["", "there is no compiler"])
def test_an_engine_computes_as_the_config_says(fault, monkeypatch):
    """Whether its blocks are compiled, and why not, is for the record."""
    stage = load_recipe("mae", "tiny", {"batch_size": 4})
    model = stage.objective(load_encoder("tiny"), 0)
    asked = []
    monkeypatch.setattr(engine, "use_attention", lambda *given: asked.append(given))
    monkeypatch.setattr(engine, "compile_blocks", lambda *given: asked.append(given) or fault)
    computing = Computing(activation_checkpointing=True, attention="flash_attn", compile=True)
    with single_rank_group(Context()):
        ours = Engine(model, stage, stage.parameter_groups(model), CPU, computing)
        ours.close()
    assert asked == [(model, "flash_attn"), (model, CPU)]
    assert model.encoder.checkpointing and model.decoder.checkpointing
    assert (ours.compiled, ours.not_compiled) == (not fault, fault)


def test_deepspeed_is_told_of_the_cpu_and_its_deprecated_calls_are_not_shown(monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    with single_rank_group(Context()), warnings.catch_warnings(record=True) as shown:
        assert os.environ["DS_ACCELERATOR"] == "cpu"
        warnings.warn("all_gather_into_tensor is deprecated", FutureWarning, stacklevel=1)
        dist.all_gather_into_tensor(torch.empty(1), torch.ones(1))
        warnings.warn("another sentence", FutureWarning, stacklevel=1)
    assert [str(one.message) for one in shown] == ["another sentence"]


def test_a_random_batch_has_the_shapes_of_a_decoded_one():
    encoder, stage = load_encoder("tiny"), load_recipe("mae", "tiny")
    one, same, other = (random_batch(stage, encoder, 30, seed) for seed in (0, 0, 1))
    (pixels,) = one.images
    side = encoder.image_size
    assert pixels.shape == (len(stage.view_settings()), 30, 3, side, side)
    assert pixels.dtype == torch.uint8
    assert (pixels.min(), pixels.max()) == (0, 255)
    assert torch.equal(pixels, same.images[0]) and not torch.equal(pixels, other.images[0])
    assert one.step == 0 and one.epochs.tolist() == [0] * 30
    assert one.ids.tolist() == [*range(30)] and one.labels.tolist() == [*range(10)] * 3


def test_what_a_run_records(job, monkeypatch):
    """TensorBoard has what metrics.jsonl has, once, over an interruption; run.json the rest."""
    monkeypatch.setattr(trainer, "origin", dict)  # what is installed when it ends is not asked
    value = job("mae", "mae")
    folder = Path(value["folder"])
    assert alone(value | {"stop_at": 4}, value) == ["requeue", "done"]
    board = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    wanted = {"loss", "lr", "lr_lowest", "grad_norm", "epoch", "images_per_second", "memory_gib"}
    wanted |= {"tflops", "device_seconds", "held_seconds", "useful_seconds"}
    assert wanted == set(board.Tags()["scalars"])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for tag in board.Tags()["scalars"]:
        events = board.Scalars(tag)
        assert [event.step for event in events] == list(range(1, 11))
        expected = [line.get(tag, line["timing"].get(tag)) for line in lines]
        assert [event.value for event in events] == pytest.approx(expected, rel=1e-6)
    assert 0.05 < lines[-1]["timing"]["memory_gib"] < 64 and lines[-1]["timing"]["tflops"] > 0
    assert "utilization" not in lines[-1]["timing"]  # of a CPU there is no known rate

    record = json.loads(RunRecord.path(folder).read_text())
    assert record["settings"] == value["settings"] and record["encoder"] == value["encoder"]
    assert record["versions"]["torch"] == version("torch")
    assert record["versions"]["python"] == platform.python_version()
    git = ["git", "-C", str(Path(__file__).parent)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    revision = record.get("source_revision") or ""
    assert revision.startswith(head.stdout.strip())
    diff = folder / "source.diff"
    assert diff.exists() == ("-dirty" in revision)
    assert not diff.exists() or diff.read_text().startswith("diff --git")


def test_a_damaged_source_is_not_trained_on(job):
    value = job("mae", "mae", epochs=1)
    assert alone(value) == ["done"]
    with open(Path(value["folder"]) / "encoder.safetensors", "r+b") as file:
        file.seek(-2, 2)
        file.write(b"\1\2")
    with pytest.raises(UserError, match=r"encoder\.safetensors: damaged .*run\.json"):
        alone(job("head", "head_min", "mae"))


@pytest.mark.parametrize(("epochs", "step"), [(3, 7), (5, 10)])
def test_a_collapsed_embedding_stops_the_run_each_time(job, epochs, step):
    """Also in the last of 7 steps; the last of 12 is never reached."""
    # One channel can only be 1 or -1 after normalisation.
    value = job("head", "head_min", "mae", head={"embedding": 1}, epochs=epochs)
    folder = Path(value["folder"])
    assert alone(job("mae", "mae", epochs=1)) == ["done"]
    for _ in range(2):
        with pytest.raises(TrainingFault, match=f"step {step}: all embeddings lie on a line"):
            alone(value | {"save_every_minutes": 0.0})
        assert complete_states(folder / "state")[0].name == f"step-{step - 1:09d}"
        assert len(metrics(folder)) == step and "uniformity" in metrics(folder)[-1]
