"""What holds on machines with GPUs, as far as it can be seen on one without."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from maect import cli
from maect.core import distributed
from maect.core.context import Context
from maect.core.errors import NodeError, UserError, explain_out_of_memory, memory_fault
from maect.core.resources import Resources, gpus_here
from maect.evaluate import evaluation as evaluations
from maect.evaluate import features
from maect.models.vit import build_encoder
from maect.recipes import load_encoder
from maect.recipes.cost import GIB, gpu_memory
from maect.stages import load_recipe, run
from maect.stages.classifier import Classifier
from maect.stages.fine_tune import FineTune
from maect.stages.run import RunConfig
from maect.train import trainer
from maect.train.engine import random_batch
from maect.train.objective import tensors_in

ONE_VISIBLE = """
import os
from datetime import timedelta
from unittest.mock import patch
import torch
os.environ["DS_ACCELERATOR"] = "cpu"  # nothing but the choice of the device is as on a GPU
from maect import cli
from maect.core import distributed
from maect.core.context import Context
from maect.train import engine

class Fourth(Context):
    local_rank = 3

rank = Fourth(gpus=True)
os.environ.update(RANK="0", LOCAL_RANK="3", WORLD_SIZE="1")
os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = "3"  # as below mpirun
with (patch.object(distributed, "uses_gpus", lambda: True),
      patch.object(torch.cuda, "device_count", lambda: 1),
      patch.object(torch.cuda, "set_device", lambda device: None),
      patch.object(torch.cuda, "synchronize", lambda: None),
      patch.object(engine, "join", lambda context, backend, timeout:
                   distributed.join(context, "gloo", timeout))):
    device = engine.start(rank)
assert device == torch.device("cuda", 0), device

def set_device(index):
    assert index == 0, f"CUDA error: invalid device ordinal {index}"

from deepspeed.accelerator import get_accelerator
from maect.stages import load_recipe
settings = load_recipe("mae", "base", {"batch_size": 4})
layer = torch.nn.Linear(8, 8)
group = {"params": list(layer.parameters()), "peak_lr": 1e-3, "weight_decay": 0.0}
with patch.object(type(get_accelerator()), "set_device", lambda self, index: set_device(index)):
    engine.Engine(layer, settings, [group], torch.device("cpu"))
print("trains")
"""


def test_the_engine_takes_the_one_gpu_that_its_rank_sees():
    """As srun binds them: DeepSpeed would take the device of the rank's number."""
    done = subprocess.run([sys.executable, "-c", ONE_VISIBLE], capture_output=True, text=True)
    assert done.stdout.endswith("trains\n"), done.stderr[-3000:]


class OneOfEight(Context):
    """A rank on one of two nodes with four GPUs each."""

    world_size, local_world_size = 8, 4

    def __init__(self) -> None:
        super().__init__(gpus=True)


def test_no_training_on_cpus_where_gpus_were_given(tmp_path, monkeypatch):
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.12  Wed\nGCC\n")
    monkeypatch.setattr(distributed, "DRIVER", driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    said = rf"torch {re.escape(torch.__version__)}, built for .*535\.104\.12"
    with pytest.raises(UserError, match=said) as refusal:
        distributed.device_of(OneOfEight())
    message = str(refusal.value)
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3" in message and "\n" not in message
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert distributed.device_of(OneOfEight()) == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("NCCL_ALGO", "", None),
        ("NCCL_ALGO", "Ring", None),
        # Which NCCL has only to reduce for all: a broadcast would fail.
        ("NCCL_ALGO", "Tree", "does not go with NCCL_ALGO=Tree: Ring"),
        ("NVIDIA_TF32_OVERRIDE", "0", None),
        ("NVIDIA_TF32_OVERRIDE", "1", "NVIDIA_TF32_OVERRIDE=1"),
    ],
)
def test_the_same_bits_at_every_start(name, value, fault, monkeypatch):
    asked: list[bool] = []
    monkeypatch.setattr(distributed, "uses_gpus", lambda: True)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on: asked.append(on))
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    expected = {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NVIDIA_TF32_OVERRIDE": "0"
    }  # fmt: skip
    for variable in (*expected, "TORCHINDUCTOR_DETERMINISTIC"):
        monkeypatch.setenv(variable, value)  # so that it is as it was afterwards
        if variable != name or not value:
            monkeypatch.delenv(variable)
    with pytest.raises(UserError, match=fault) if fault else nullcontext():
        distributed.be_deterministic()
    if not fault:
        assert expected.items() <= os.environ.items() and asked == [True]


@pytest.mark.parametrize(
    ("sbatch", "given"),
    [
        ("", True), ("gres=gpu:a100:4,nvme:1", True), ("gpus-per-task=1", True),
        ("gres=none", False), ("gres=nvme:1", False),
    ],
)  # fmt: skip
def test_a_job_knows_whether_it_was_given_gpus(sbatch, given, monkeypatch):
    """By what sbatch was asked for; here, by what the shell leaves visible."""
    assert Resources(cluster="slurm", devices=4, slurm_extra=sbatch).has_gpus is given
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1" if given else "")
    assert Resources().has_gpus is given


TOO_SMALL: dict[str, Exception] = {
    "Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB;": torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB. Including ..."
    ),
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`;": RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`\nCompile"
    ),
    "Cuda failure 2 'out of memory';": dist.DistBackendError(
        "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.30.7\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
        "Cuda failure 2 'out of memory'"
    ),
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED;": RuntimeError(
        "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED\nmore"
    ),
    "CUDA error: out of memory;": torch.AcceleratorError(  # also of pinned memory
        "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in ..."
    ),
}


def fail(error: BaseException) -> Callable[..., Any]:
    def call(*_: object, **__: object) -> Any:
        raise error

    return call


def test_a_gpu_that_another_process_has_alone_is_told_in_one_line(monkeypatch):
    """As `maect doctor` meets it beside a job, where the compute mode is exclusive."""
    taken = "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCompile with ..."
    monkeypatch.setattr(distributed, "uses_gpus", lambda: True)
    for name in ("device_count", "is_available", "set_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 1)
    monkeypatch.setattr(torch.cuda, "synchronize", fail(torch.AcceleratorError(taken)))
    with pytest.raises(NodeError, match=r"^cuda:0 is busy: .*; try again when that has ended$"):
        distributed.device_of(OneOfEight())


@pytest.mark.parametrize("said", TOO_SMALL)
def test_a_device_that_is_too_small_says_what_to_do(said, tmp_path, monkeypatch, capsys):
    """One line and no further attempt: of a training, of evaluations, of other commands."""
    error = TOO_SMALL[said]
    RunConfig(
        run="mae", stage="pretrain", size="tiny", shards=tmp_path, encoder=load_encoder("tiny"),
        settings=load_recipe("mae", "tiny", {"batch_size": 64}),
    ).write(tmp_path / "config.yaml")  # fmt: skip
    told = SimpleNamespace(settings=None)
    monkeypatch.setattr(evaluations.EvaluationConfig, "read", lambda *_, **__: told)
    monkeypatch.setattr(evaluations, "job_of", lambda *_: None)
    for place in ((trainer, "train"), (features, "open_index"), (evaluations, "run")):
        monkeypatch.setattr(*place, fail(error))
    with pytest.raises(NodeError) as refusal:
        run.train(OneOfEight(), config=tmp_path / "config.yaml")
    message = str(refusal.value)
    assert f"8 images on each of 8 ranks, where 2 GiB were expected: {said}" in message
    assert "activation_checkpointing" in message and "\n" not in message
    words = f"^out of memory: {re.escape(said)} end other prog"
    with pytest.raises(NodeError, match=words):
        features.extract(OneOfEight(), encoder="e", shards="s", out="o")
    with pytest.raises(NodeError, match=words):
        evaluations.evaluate(OneOfEight(), config=tmp_path / "knn.yaml")
    monkeypatch.setattr("maect.experiment.schema.json_schema", fail(error))
    assert cli.main(["schema"]) == 2
    assert capsys.readouterr().err.startswith(f"maect schema: out of memory: {said}")
    monkeypatch.setattr("maect.experiment.schema.json_schema", fail(MemoryError()))
    assert cli.main(["schema"]) == 2 and "too little memory" in capsys.readouterr().err


def test_other_errors_stay_what_they_are(monkeypatch):
    other = fail(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal"), explain_out_of_memory():
        other()
    monkeypatch.setattr("maect.experiment.schema.json_schema", other)
    with pytest.raises(RuntimeError, match="illegal"):
        cli.main(["schema"])
    assert memory_fault(RuntimeError("")) is None


@pytest.mark.parametrize(
    ("name", "mebibytes", "gibibytes"),
    [("NVIDIA GH200 480GB", 97871, 96), ("NVIDIA A100-SXM4-40GB", 40960, 40)],
)
def test_memory_of_the_gpu_here(name, mebibytes, gibibytes, tmp_path, monkeypatch):
    """Also where the name is that of the memory of the CPU beside it."""
    (tmp_path / "nvidia-smi").write_text(f'#!/bin/sh\necho "{name}, {mebibytes}"\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_memory(gpus_here()[0]) == 0.98 * GIB * gibibytes
    given = gpu_memory(name)
    assert given is not None and given <= 1.01 * GIB * mebibytes / 1024


@pytest.mark.parametrize("on_gpus", [False, True])
def test_a_rank_that_fails_on_a_gpu_does_not_wait_for_the_others(on_gpus, monkeypatch):
    left: list[str] = []
    monkeypatch.setattr(distributed, "uses_gpus", lambda: on_gpus)
    monkeypatch.setattr(distributed.dist, "destroy_process_group", lambda: left.append("left"))
    with distributed.destroy_group_after():
        pass
    assert left == ["left"]
    with pytest.raises(UserError, match="broken"), distributed.destroy_group_after():
        raise UserError("broken")
    assert len(left) == (1 if on_gpus else 2)


HEAD = load_recipe("head_min", "tiny").model_dump()["head"]
PREPARED: dict[str, tuple[str, dict[str, Any], int]] = {
    "mae with a head": ("mae", {"contrastive": "combined", "head": HEAD}, 1),
    "tune": ("ct_aug", {}, 1),
    "refine, weighted": ("refine_d2v2", {}, 2),  # images of two sizes
    "fine_tune": ("", {"drop_path": 0.1}, 1),
}


@pytest.mark.parametrize("name", PREPARED)
def test_whatever_the_side_stream_makes_is_kept_until_the_model_has_read_it(name, monkeypatch):
    """The allocator would give it to the next batch while the main stream is behind."""
    recipe, changes, sizes = PREPARED[name]
    encoder = load_encoder("tiny")
    if recipe:
        stage = load_recipe(recipe, "tiny", changes)
        objective = stage.objective(encoder, 0)  # type: ignore[attr-defined]
    else:
        stage = FineTune.model_validate(changes)
        objective = Classifier(stage, build_encoder(encoder), 10, "cls", 0)
    calls: list[Any] = []
    main = SimpleNamespace(wait_stream=calls.append)

    def record_stream(tensor: torch.Tensor, on: object) -> None:
        calls.append((id(tensor), on is main))

    monkeypatch.setattr(torch.cuda, "stream", lambda side: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    about = {"_input_stream": "side", "objective": objective, "device": torch.device("cpu")}
    given: Any = SimpleNamespace(**about)
    made = tensors_in(trainer.Trainer._inputs(given, random_batch(stage, encoder, 4)))
    assert sum(tensor.ndim >= 4 for tensor in made) == sizes
    assert calls[0] == "side" and {(id(tensor), True) for tensor in made} == {*calls[1:]}


@dataclass
class Held:
    """Inputs as somebody's own objective might have them."""

    parts: object


def test_tensors_of_inputs_are_found_in_all_containers_or_refused():
    one, two, three, *more = map(torch.tensor, range(6))
    assert tensors_in(one) == [one]
    parts = [one, {"a": (two, None, 1.5, "b"), "c": 1, "d": three}, Held((more[0], True, more[1]))]
    found = tensors_in(Held([*parts, more[2]]))
    assert [*map(id, found)] == [*map(id, (one, two, three, *more))]
    for unknown in ({one}, iter([one]), SimpleNamespace(images=one)):
        with pytest.raises(TypeError, match=f"^{type(unknown).__name__} among what"):
            tensors_in(Held((two, unknown)))


def test_a_part_of_a_batch_is_pinned_without_gaps(monkeypatch):
    """CUDA copies nothing else by itself: PyTorch would put memory that is not pinned between."""
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, non_blocking: self)
    part = torch.arange(24).view(2, 4, 3)[:, :2]  # of two views, two images
    copied = distributed.to_device_async(part, torch.device("cuda"))
    assert torch.equal(copied, part) and pinned[0].is_contiguous()
