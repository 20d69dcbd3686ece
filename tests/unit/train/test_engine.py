"""Settings that change how a step is computed but not what, and what a run leaves behind."""

import errno
import json
import platform
import subprocess
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from ranks import Place, alone, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_runs import ENCODER, losses, metrics

from maect.core.context import Context
from maect.core.errors import UserError
from maect.models.kernels import flash_kernel, mixed_precision, use_attention
from maect.models.vit import build_encoder, seeded
from maect.recipes import load_encoder
from maect.recipes.settings import Computing
from maect.records import RunRecord
from maect.stages import load_recipe
from maect.stages.fine_tune import FineTune
from maect.train import checkpoint
from maect.train.checkpoint import (
    ParameterSlice,
    Saver,
    StateReader,
    complete_states,
    snapshot,
    state_record,
)
from maect.train.engine import Engine, cast_parts, random_batch, single_rank_group
from maect.train.objective import Objective
from maect.train.passes import compile_blocks, is_to_be_compiled
from maect.train.run_folder import RunLock
from maect.train.trainer import TrainingFault


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
    compile_blocks(compiled, torch.device("cpu"))
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
        assert compile_blocks(objective, torch.device("cpu")) == ""
        for tokens in range(2, 12):
            block(torch.zeros(1, tokens, objective.encoder.settings.width))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1 + 10


def test_without_flash_attn_compiled_blocks_are_whole(eager_compiler):
    """The package is not looked for in a block, where that would end the graph."""
    if find_spec("flash_attn"):
        pytest.skip("flash_attn is installed")
    objective = Bare()
    use_attention(objective, "flash_attn")
    assert compile_blocks(objective, torch.device("cpu")) == ""
    objective.gradients()
    assert not torch._dynamo.utils.counters["graph_break"]


def test_without_flash_attn_it_says_so_once(caplog):
    if find_spec("flash_attn"):
        pytest.skip("flash_attn is installed")
    flash_kernel.cache_clear()
    objective = Bare("bf16")
    use_attention(objective, "flash_attn")
    objective.gradients()
    assert caplog.text.count("flash_attn is not installed") == 1


def sdpa_in_place_of_flash_attn(context):
    plain, objective = Bare("bf16"), Bare("bf16")
    use_attention(objective, "flash_attn")
    same_bits(objective.gradients(), plain.gradients())


def recomputed_activations(context):
    plain, saving = Bare("bf16"), Bare("bf16")
    saving.encoder.checkpointing = True
    same_bits(saving.gradients(), plain.gradients())


def test_other_ways_to_compute_give_the_same_bits_in_bf16(tmp_path):
    """In a process of its own, as a rank: late in a long session these bits have differed."""
    ways = [recomputed_activations]
    if not find_spec("flash_attn"):
        ways.append(sdpa_in_place_of_flash_attn)
    jobs = [{"function": way} for way in ways]
    assert run(1, *jobs, log=tmp_path / "log") == [None] * len(jobs)


def test_checkpointing_covers_the_decoder():
    patches = (ENCODER.image_size // ENCODER.patch_size) ** 2
    order = torch.arange(patches).flip(0).repeat(2, 1)
    tokens = torch.linspace(-1, 1, 2 * 5 * ENCODER.width).view(2, 5, ENCODER.width)
    gradients, calls = [], []
    for saving in (False, True):
        decoder = load_recipe("mae", "base").objective(ENCODER, 0).decoder
        assert decoder in cast_parts(decoder)  # to which an engine says so
        decoder.checkpointing = saving
        seen = []
        decoder.blocks[0].register_forward_pre_hook(lambda *_, seen=seen: seen.append(1))
        decoder(tokens, order).square().mean().backward()
        gradients.append({name: p.grad for name, p in decoder.named_parameters()})
        calls.append(len(seen))
    assert calls == [1, 2]
    same_bits(*gradients)


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


def test_updates_are_those_of_adamw():
    stage = load_recipe("mae", "tiny", {"batch_size": 4, "precision": "fp32"})
    shape, cpu = load_encoder("tiny"), torch.device("cpu")
    ours, plain = (stage.objective(shape, 0) for _ in range(2))
    names = {id(p): name for name, p in ours.named_parameters()}
    groups = stage.parameter_groups(plain)
    settings = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in groups]
    adam = torch.optim.AdamW(settings, betas=(stage.beta1, stage.beta2))

    def passes(seed):
        batch = random_batch(stage, shape, 4, seed)
        loss, _ = engine(ours.prepare(batch, cpu))
        engine.backward(loss)
        plain(plain.prepare(batch, cpu))[0].backward()

    with single_rank_group(Context()):
        engine = Engine(ours, stage, stage.parameter_groups(ours), cpu)
        assert not engine.captures and not engine.compiled
        engine.start_average("encoder.")
        for number, rate in enumerate((0.5, 1.0, 0.25)):
            adam.zero_grad()
            passes(number)
            norm = sum(p.grad.square().sum().item() for g in groups for p in g["params"])
            assert engine.squared_norm().item() == pytest.approx(norm, rel=1e-4)
            for group, given in zip(adam.param_groups, groups, strict=True):
                group["lr"] = rate * given["peak_lr"]
            adam.step()
            engine.step(rate)
        peaks = [0.25 * group["peak_lr"] for group in groups]
        assert engine.learning_rates() == (min(peaks), max(peaks))
        for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6, msg=name)
        # A slice is the parameter itself, whole on one rank, with AdamW's moments.
        trained = {names[id(p)]: p for g in stage.parameter_groups(ours) for p in g["params"]}
        assert {piece.name for piece in engine.slices} == {*trained}
        moments = {"param", "exp_avg", "exp_avg_sq"}
        for piece in engine.slices:
            own = {"ema"} if piece.name.startswith("encoder.") else set()
            assert piece.start == 0 and piece.values.keys() == moments | own
            assert piece.values["param"].data_ptr() == trained[piece.name].data_ptr()
            assert piece.values["exp_avg_sq"].count_nonzero() > 0
        engine.close()


def test_what_a_run_records(job):
    """TensorBoard has what metrics.jsonl has, once, over an interruption; run.json the rest."""
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


def test_a_collapsed_embedding_stops_the_run_with_a_saved_state(job):
    # One channel can only be 1 or -1 after normalisation.
    jobs = [job("mae", "mae", epochs=1), job("head", "head_min", "mae", head={"embedding": 1})]
    with pytest.raises(TrainingFault, match="step 10: all embeddings lie on a line"):
        alone(*jobs)
    folder = Path(jobs[1]["folder"])
    assert [place.name for place in complete_states(folder / "state")] == ["step-000000010"]
    assert len(losses(folder)) == 10 == len(metrics(folder))  # the last one shows the collapse


def test_a_second_save_of_a_step_that_fails_spoils_nothing(tmp_path, monkeypatch):
    """Step 2 was spoilt: step 1 is saved once more, and the disk of rank 1 is full by then."""
    places = [Place(rank, rank, 2) for rank in range(2)]
    lock = RunLock(tmp_path, places[0])
    savers = [Saver(tmp_path, places[0], lock), Saver(tmp_path, places[1], None)]
    real = checkpoint.save_file

    def save():
        for rank in (1, 0):
            savers[rank].save(1, {f"param|{3 * rank}|x": torch.ones(3)}, {"fingerprint": "ours"})
        for saver in savers:
            saver.wait()

    def full(tensors, path):
        if "param|3|x" in tensors:
            raise OSError(28, "No space left on device")
        real(tensors, path)

    save()
    monkeypatch.setattr(checkpoint, "save_file", full)
    save()
    assert all("No space left" in saver.error for saver in savers)
    (state,) = complete_states(tmp_path / "state")
    for rank in range(2):
        checkpoint.check_files(state, checkpoint.state_record(state, "ours"), rank, 2)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_people_are_told_that_nothing_is_saved(tmp_path, monkeypatch, caplog):
    """Once, and whatever becomes of their message."""
    place, said = Place(0, 0, 1), []

    def say(sentence):
        said.append(sentence)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    def full(*_):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(place, "say", say)
    monkeypatch.setattr(checkpoint, "save_file", full)
    saver = Saver(tmp_path, place, RunLock(tmp_path, place))

    def save(step):
        saver.save(step, {"param|0|x": torch.zeros(3)}, {})
        saver.wait()
        return len(said)

    assert [save(step) for step in (1, 2, 3)] == [1, 1, 1]
    assert "state of step 1 not saved" in said[0] and "quota exceeded" in said[0]
    assert "state of step 3" in saver.error and saver.error in caplog.text


def piece(values, start, stop):
    return ParameterSlice(
        "encoder.w", start, {kind: value[start:stop].clone() for kind, value in values.items()}
    )


def test_a_state_of_two_ranks_is_read_by_any_number_of_them(tmp_path):
    """Training waits for no save, and what it changes meanwhile is not in the state."""
    whole = {"param": torch.arange(12.0), "exp_avg": torch.arange(12.0) / 7}
    parts = [piece(whole, 0, 5), piece(whole, 5, 12)]
    buffers = {"encoder.mean": torch.tensor([3]), "head.queue": torch.ones(2)}
    taken = [snapshot([parts[0]], buffers), snapshot([parts[1]], {})]
    for value in (*parts[0].values.values(), *parts[1].values.values(), *buffers.values()):
        value.zero_()
    savers = [
        Saver(tmp_path, place, None if place.rank else RunLock(tmp_path, place))
        for place in (Place(rank, rank, 2) for rank in range(2))
    ]
    savers[0].save(1, taken[0], {"fingerprint": "ours"})  # waits in its thread for rank 1
    assert savers[0].is_writing and not complete_states(tmp_path / "state")
    savers[1].save(1, taken[1], {"fingerprint": "ours"})
    for saver in savers:
        saver.wait()
    assert savers[0].error is None and not savers[0].is_writing
    (state,) = complete_states(tmp_path / "state")
    reader = StateReader(state, state_record(state, "ours"))
    assert (state.name, reader.step, reader.record["world_size"]) == ("step-000000001", 1, 2)
    assert reader.names("param") == ["encoder.w"]
    three = [piece(whole, *ends) for ends in ((0, 4), (4, 6), (6, 12))]
    for part in three:
        for value in part.values.values():
            value.zero_()
    reader.restore(three)
    for kind, value in whole.items():
        assert torch.equal(torch.cat([part.values[kind] for part in three]), value)
    # A part of the objective, without the buffers that it does not have.
    like = {"w": torch.empty(3, 4), "mean": torch.empty(1), "queue": torch.empty(2)}
    found = reader.part("exp_avg", "encoder.", like)
    assert found.keys() == {"w", "mean"} and found["mean"].tolist() == [3]
    assert torch.equal(found["w"], whole["exp_avg"].view(3, 4))
    assert reader.part("exp_avg", "encoder.", {"w": like["w"]}).keys() == {"w"}
    for kind, start, missing in (("param", 10, 2), ("ema", 0, 4)):
        with pytest.raises(UserError, match=f"{missing} values of {kind} encoder.w are missing"):
            reader.values(kind, "encoder.w", start, 4)


def test_ranks_that_hold_other_bits_save_nothing(monkeypatch):
    compared = []
    monkeypatch.setattr(checkpoint, "rank_and_size", lambda: (0, 4))
    monkeypatch.setattr(checkpoint, "differing_ranks", lambda them: compared.extend(them) or [1, 3])
    weights, buffer = torch.ones(2), torch.zeros(3)
    with pytest.raises(checkpoint.ReplicaError, match=r"after step 7 .* rank 1, 3 of 4 differ"):
        checkpoint.compare_replicas(7, [weights], {"queue": buffer})
    assert compared[0] is weights and compared[1] is buffer
    monkeypatch.setattr(checkpoint, "differing_ranks", lambda them: [])
    checkpoint.compare_replicas(7, [weights], {})
