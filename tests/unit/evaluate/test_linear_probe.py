import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from maect.answers.classes import read_classifier
from maect.core.files import read_record
from maect.data.index import ID
from maect.data.transforms import normalize
from maect.evaluate import load_evaluation, probe_training
from maect.evaluate.base import EvaluationJob, Interrupted
from maect.evaluate.evaluation import evaluate
from maect.evaluate.linear_probe import Heads, refiner_forms, representations
from maect.evaluate.protocols.probes import LinearProbe, epoch_ends
from maect.train.stage import schedule

from .by_hand import all_images, blocks_of, clear, crops, task_of
from .conftest import Rank, resolved

SETTINGS = LinearProbe(
    epochs=4, batch_size=32, warmup_epochs=1, learning_rates=(8.0, 0.8, 0.08),
    crop_scale=(0.6, 1.0), flip=0.0, precision="fp32",
)  # fmt: skip


FORMS = ("output_cls", "output_cls_mean", "last_cls", "last_cls_mean")


def job_of(images: Path, out: Path) -> EvaluationJob:
    inputs = {"train": images / "shards/train", "test": images / "shards/val"}
    return EvaluationJob(images / "runs/mae", out, inputs, resize=16)


def test_probe_is_the_plain_loop(images, tmp_path, rank):
    """One step after the other with the same parts, written without the protocol's machinery."""
    seed = 2  # of which no class hangs on a last bit
    job = job_of(images, tmp_path / "linear_probe.json")
    metrics = SETTINGS.model_copy(update={"seed": seed}).evaluate(rank, job)
    task = task_of(job)
    encoding, train = task.encoding, task.train
    pictures, y_test = all_images(task.test)
    x_test = encoding(pictures)
    ends = [5, 10, 15, 18]  # 150, 300 and 450 images are seen; 600 are 18 batches and a part
    heads = Heads(16, 10, [1.0, 0.1, 0.01], 0.9, seed, torch.device("cpu"))
    steps = 4 * 150 // 32
    history, best = {}, (0.0, x_test)
    for batch, cropped in crops(train, steps, encoding.settings.pixels, seed):
        factor = schedule(batch.step, steps, 150 / 32)
        heads.step(encoding(cropped), torch.from_numpy(batch.labels), factor)
        right = heads.predict(x_test) == y_test[:, None]
        history[batch.step + 1] = (100 * right.sum(0) / len(y_test)).tolist()
        if batch.step + 1 in ends:
            normal = (x_test - heads.mean) * torch.rsqrt(heads.var + 1e-5)
            logits = heads._logits(normal).detach()
            clear(logits / logits.abs().amax(dim=(0, 2), keepdim=True), 3e-5)
        if batch.step + 1 in ends and max(history[batch.step + 1]) > best[0]:
            number = int(right.sum(0).argmax())
            best = max(history[batch.step + 1]), heads.predict(x_test)[:, number]
    assert ends[-1] == steps
    last = history[steps]
    assert metrics["last_by_rate"] == pytest.approx(
        dict(zip(("8.0", "0.8", "0.08"), last, strict=True))
    )
    assert metrics["linear_probe_last"] == pytest.approx(max(last))
    assert metrics["linear_probe"] == pytest.approx(max(max(history[end]) for end in ends))
    best_by_epoch = [max(history[end]) for end in ends]
    assert metrics["best_by_epoch"] == pytest.approx(best_by_epoch)
    assert metrics["best_epoch"] == 1 + int(np.argmax(best_by_epoch))
    assert metrics["linear_probe"] > 20  # chance is 10
    # The classifier that was kept is the one behind the number.
    kept = load_file(tmp_path / "linear_probe.safetensors")
    normal = (x_test - kept["mean"]) / (kept["var"] + 1e-5).sqrt()
    assert torch.equal((normal @ kept["weight"].T + kept["bias"]).argmax(1), best[1])
    assert read_classifier(tmp_path / "linear_probe.safetensors").resize == 16


def test_an_epoch_ends_with_the_update_that_completes_it():
    for images, batch, epochs in (
        (150, 32, 4), (600, 1024, 2), (600, 1024, 50), (784, 96, 30), (96, 32, 3),
        (1_281_167, 1024, 50),
    ):  # fmt: skip
        steps, ends = epoch_ends(images, batch, epochs)
        assert steps * batch <= epochs * images < (steps + 1) * batch
        assert len(ends) == epochs and ends[-1] == steps and ends[0] > 0
        for epoch, end in enumerate(ends, 1):
            assert end * batch >= epoch * images or end == steps
            assert (end - 1) * batch < epoch * images


@pytest.mark.parametrize(("seconds", "kept"), [(1.0, 10), (50.0, 8), (130.0, 10)])
def test_a_kill_loses_what_follows_the_last_save(
    images, tmp_path, rank, monkeypatch, seconds, kept
):
    """Of updates that take so many seconds each, the eleventh or tenth is not done.

    Saved are the ends of epochs, after 5 and 10, and updates 120 seconds after the last save.
    """
    whole = SETTINGS.evaluate(rank, job_of(images, tmp_path / "whole.json"))
    job = job_of(images, tmp_path / "linear_probe.json")
    plain, steps = Heads.step, []
    monkeypatch.setattr(probe_training, "monotonic", lambda: seconds * len(steps))

    def killed(self, *arguments):
        steps.append(arguments)
        if len(steps) == (10 if kept == 8 else 11):
            raise MemoryError
        return plain(self, *arguments)

    monkeypatch.setattr(Heads, "step", killed)
    with pytest.raises(MemoryError):
        SETTINGS.evaluate(rank, job)
    del steps[:]
    monkeypatch.setattr(Heads, "step", lambda *a: steps.append(a) or plain(*a))
    assert SETTINGS.evaluate(rank, job) == whole
    assert len(steps) == 18 - kept
    files = [tmp_path / f"{name}.safetensors" for name in ("whole", "linear_probe")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_another_probes_state_is_not_taken(images, tmp_path, rank, caplog):
    job = job_of(images, tmp_path / "linear_probe.json")
    with pytest.raises(Interrupted):
        SETTINGS.evaluate(Rank(patience=5), job)
    other = SETTINGS.model_copy(update={"seed": 1})
    fresh = other.evaluate(rank, job_of(images, tmp_path / "whole.json"))
    assert not caplog.messages
    assert other.evaluate(rank, job) == fresh
    (job.state / probe_training.STATE).write_bytes(b"half")
    assert other.evaluate(rank, job) == fresh
    assert len(caplog.messages) == 2
    assert all(message.endswith("the training starts over") for message in caplog.messages)


def test_json_and_requeue(images, tmp_path, rank):
    job = job_of(images, tmp_path / "linear_probe.json")
    config = resolved(job, SETTINGS)
    assert evaluate(Rank(patience=4), config=config) == "requeue"
    assert not job.out.exists() and job.state.exists()
    assert evaluate(rank, config=config) == "done" and not job.state.exists()
    result = read_record(job.out)
    assert result["settings"]["learning_rates"] == [8.0, 0.8, 0.08]
    assert result["settings"]["resize"] == 16
    assert result["provenance"]["splits"]["test"]["index_digest"]


def test_concatenations_are_probes_of_their_own(images, tmp_path, rank):
    """Each as if it were trained alone: the same features, the same initial weights."""
    together = SETTINGS.model_copy(update={"concat": True})
    job = job_of(images, tmp_path / "linear_probe_concat.json")
    metrics = together.evaluate(rank, job)
    # Three blocks: no concatenation of 4 or 6.
    named = {"concat_1", "concat_2", "concat_cls_mean"}
    probed = {name for name in metrics if "last" not in name and "best" not in name}
    assert named == probed - {"linear_probe"}
    best = max(named, key=metrics.get)
    assert metrics["linear_probe"] == metrics[best] == metrics[metrics["best_form"]]
    assert len(metrics["concat_2_last_by_rate"]) == 3
    plain = SETTINGS.evaluate(rank, job_of(images, tmp_path / "plain.json"))
    # One of 70 images may lie on the border between two classes.
    border = 100 / 70 + 1e-9
    for mine, alone in (("", ""), ("_last", "_last")):
        expected = pytest.approx(plain[f"linear_probe{alone}"], abs=border)
        assert metrics[f"concat_1{mine}"] == expected
    assert metrics["concat_1_best_by_epoch"] == pytest.approx(plain["best_by_epoch"], abs=border)
    kept = load_file(tmp_path / "linear_probe_concat.safetensors")
    assert kept.keys() == {f"{name}.{part}" for name in named for part in Heads.SAVED}


def test_refiners_probes_are_modules_and_the_choice_saw_no_held_out_image(images, tmp_path, rank):
    """MIM-Refiner's four inputs a second time: block by block, a module and SGD for each probe."""
    settings = SETTINGS.model_copy(update={"refiner": True, "held_out": 0.2, "epochs": 3})
    job = job_of(images, tmp_path / "linear_probe_refiner.json")
    metrics = settings.evaluate(rank, job)
    task = task_of(job)
    encoding, train = task.encoding, task.train

    def inputs(pictures: torch.Tensor) -> dict[str, torch.Tensor]:
        raw = blocks_of(encoding.encoder, pictures)
        with torch.no_grad():
            last = encoding.encoder.norm(raw[-1])
        cls = torch.cat([tokens[:, 0] for tokens in raw], 1)
        mean = torch.cat([tokens[:, 1:].mean(1) for tokens in raw], 1)
        output = torch.cat([last[:, 0], last[:, 1:].mean(1)], 1)
        every = torch.cat([cls, mean], 1)
        return dict(zip(FORMS, (last[:, 0], output, cls, every), strict=True))

    def centre(index) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        pictures, labels = all_images(index)
        return inputs(normalize(pictures, encoding.settings.pixels)), labels

    held = task.draw_held_out(0.2, 0)
    assert held.n == 30 and np.isin(held.rows[:, ID], train.rows[:, ID]).all()
    scored = {"": centre(task.test), "held": centre(held)}
    probes = {}
    for part in scored:
        for form, x in scored[""][0].items():
            weight = torch.empty(3, 10 * x.shape[1])
            torch.nn.init.trunc_normal_(
                weight, std=0.01, generator=torch.Generator().manual_seed(0)
            )
            for number, rate in enumerate((1.0, 0.1, 0.01)):
                linear = torch.nn.Linear(x.shape[1], 10)
                linear.weight.data = weight[number].view(10, -1)
                torch.nn.init.zeros_(linear.bias)
                norm = torch.nn.BatchNorm1d(x.shape[1], affine=False)
                model = torch.nn.Sequential(norm, linear)
                optimizer = torch.optim.SGD(model.parameters(), rate, 0.9)
                probes[part, form, number] = model, optimizer, rate
    steps, ends = 3 * 150 // 32, [5, 10, 14]
    history: dict[tuple[str, str, int], list[float]] = {key: [] for key in probes}
    for batch, cropped in crops(train, steps, encoding.settings.pixels):
        read = inputs(cropped)
        others = [i not in set(held.rows[:, ID].tolist()) for i in batch.ids.tolist()]
        for (part, form, _), (model, optimizer, rate) in probes.items():
            seen = torch.tensor(others if part else [True] * 32)
            optimizer.param_groups[0]["lr"] = rate * schedule(batch.step, steps, 150 / 32)
            optimizer.zero_grad()
            target = torch.from_numpy(batch.labels)[seen]
            torch.nn.functional.cross_entropy(model.train()(read[form][seen]), target).backward()
            optimizer.step()
        if batch.step + 1 in ends:
            for key, (model, _, _) in probes.items():
                read_, labels = scored[key[0]]
                logits = model.eval()(read_[key[1]]).detach()
                right = (logits.argmax(1) == labels).sum()
                history[key].append(100 * int(right) / len(labels))
    forms, state = list(scored[""][0]), job.state / probe_training.STATE
    tensors = load_file(state)
    with safe_open(state, "pt") as file:
        own = json.loads(file.metadata()["record"])["own"]
    for (part, form, number), (model, _, _) in probes.items():
        name = f"{form}.held_out" if part else form
        saved = {key: tensors[f"{name}/{key}"][number] for key in ("weight", "bias")}
        torch.testing.assert_close(saved, dict(model[1].state_dict()), rtol=1e-3, atol=1e-4)
        # One image may lie on the border between two classes.
        border = 100 / len(scored[part][1]) + 1e-9
        found = [accuracies[number] for accuracies in own[name]]
        assert found == pytest.approx(history[part, form, number], abs=border)
    for form in forms:
        assert list(metrics[f"{form}_last_by_rate"].values()) == own[form][-1]
        assert metrics[f"{form}_best_by_epoch"] == [max(rates) for rates in own[form]]
    assert metrics["linear_probe"] == max(max(max(epoch) for epoch in own[f]) for f in forms)
    # Of the probes that did not see the held-out images the best; scored is its like.
    best = max(max(max(epoch) for epoch in own[f"{f}.held_out"]) for f in forms)
    form, epoch = metrics["held_out_form"], metrics["held_out_epoch"] - 1
    number = settings.learning_rates.index(metrics["held_out_rate"])
    assert metrics["held_out_accuracy"] == own[f"{form}.held_out"][epoch][number] == best
    assert metrics["linear_probe_held_out"] == own[form][epoch][number]
    assert metrics["linear_probe_held_out"] <= metrics["linear_probe"]


def test_refiners_forms_are_four_columns_each_with_thirteen_rates():
    _, settings = load_evaluation("linear_probe_refiner", "large")
    assert isinstance(settings, LinearProbe) and settings.refiner
    encoding = SimpleNamespace(settings=SimpleNamespace(width=8, class_token=True), blocks=4)
    columns = refiner_forms(encoding)  # type: ignore[arg-type]
    assert len(columns) * len(settings.learning_rates) == 52
    widths = {form: len(range(*part.indices(80))) for form, part in columns.items()}
    assert widths == dict(zip(FORMS, (8, 16, 32, 64), strict=True))
    encoding.settings.class_token = False  # CrossMAE: its patch mean in place of [CLS]
    assert list(refiner_forms(encoding)) == ["output_mean", "last_mean"]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="concat and refiner are two choices"):
        LinearProbe(concat=True, refiner=True)


def test_concatenations_are_of_the_last_blocks_and_end_with_the_other_pooling():
    encoding = SimpleNamespace(settings=SimpleNamespace(width=2), blocks=4, other="mean")
    features = np.repeat(["block 1", "block 2", "block 3", "block 4", "mean"], 2)
    parts = representations(encoding)  # type: ignore[arg-type]
    read = {name: list(dict.fromkeys(features[part].tolist())) for name, part in parts.items()}
    assert read == {
        "concat_1": ["block 4"],
        "concat_2": ["block 3", "block 4"],
        "concat_4": ["block 1", "block 2", "block 3", "block 4"],
        "concat_cls_mean": ["block 4", "mean"],
        "concat_mean": ["mean"],
    }


def test_all_of_the_heads_is_on_the_device():
    heads = Heads(4, 3, [0.1, 0.2], 0.9, 0, torch.device("meta"))
    tensors = (heads.weight, heads.bias, heads.mean, heads.var, heads.rates)
    assert all(tensor.is_meta for tensor in tensors)


def test_constant_features_stay_finite():
    heads = Heads(4, 3, [4.0], 0.9, 0, torch.device("cpu"))
    for _ in range(20):
        heads.step(torch.full((8, 4), 0.1), torch.zeros(8, dtype=torch.int64), 1.0)
    assert torch.isfinite(heads.weight).all()
    assert heads.predict(torch.full((2, 4), 0.1)).unique().tolist() == [0]
