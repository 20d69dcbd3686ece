"""`maect tune`: which encoders it takes, what it writes, and what it says of made-up outcomes."""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from test_new_experiment import digits

from maect.core.errors import UserError
from maect.data.retrieve import CATALOGUE
from maect.evaluate.outcomes import Difference, difference, pack
from maect.experiment import load
from maect.models.vit import build_encoder, seeded
from maect.models.weights import save_encoder
from maect.recipes import Encoder, load_encoder
from maect.records import EvaluationRecord
from maect.stages.imported import import_weights
from maect.tools import tuning_result
from maect.tools.new_experiment import write_all
from maect.tools.plan import Device, PlannedJob
from maect.tools.tuned_encoder import Start, find_start
from maect.tools.tuning import Continuation, evaluated, fitted, is_written_by, write_tuning
from maect.tools.tuning_result import conclude, judge

TINY = load_encoder("tiny")
__all__ = ["digits"]  # a fixture


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a tiny ViT, named as timm names its tensors."""
    path = tmp_path_factory.mktemp("weights") / "mine.pth"
    with seeded(0):
        torch.save(build_encoder(TINY).state_dict(), path)
    return path


def run_folder(folder: Path, encoder: Encoder = TINY, pooling: Any = "mean") -> Path:
    with seeded(1):
        state = build_encoder(encoder).state_dict()
    folder.mkdir(parents=True)
    save_encoder(folder / "encoder.safetensors", state, encoder, pooling)
    return folder


def test_encoders_are_found_by_file_and_by_folder(weights, tmp_path):
    start = find_start(str(weights))
    assert start.imported == {"weights": str(weights), "layout": "mae", "size": "tiny"}
    # Of a run its own pooling: the mean is MAE's of this size, [CLS] is DINO's.
    for pooling, layout in (("mean", "mae"), ("cls", "dino")):
        start = find_start(str(run_folder(tmp_path / pooling, pooling=pooling)))
        assert (start.imported["layout"], start.size) == (layout, "tiny")
    # What is imported by it is the same encoder.
    file = Path(start.imported["weights"])
    _, new = import_weights(file, tmp_path / "again", "dino", "tiny", 16, TINY.pixels)
    assert new.encoder == start.encoder and new.pooling == "cls"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("dinov2_smal", "no such folder or file, and no public encoder; did you mean"),
        ("dinov3_small", "cannot be trained: its positions are rotary; take a plain ViT, such as"),
        ("siglip2_base", "cannot be trained: "),
        ("{empty}", "has no encoder.safetensors; name a finished run or an exported folder"),
        ("{registers}", "cannot be imported again: its shape with 4 registers"),
        ("{ijepa}", "cannot be imported again|no \\[CLS\\] token"),
    ],
)
def test_other_encoders_are_refused_in_a_line(given, message, tmp_path):
    (tmp_path / "empty").mkdir()
    run_folder(tmp_path / "registers", TINY.model_copy(update={"registers": 4}))
    run_folder(tmp_path / "ijepa", TINY.model_copy(update={"class_token": False}))
    named = {name: tmp_path / name for name in ("empty", "registers", "ijepa")}
    with pytest.raises(UserError, match=message) as error:
        find_start(given.format(**named))
    assert "\n" not in str(error.value)


def written_tuning(start: Start, images: Path, out: Path, by: str) -> str:
    """The text of an experiment that tunes an encoder by a recipe, as `maect tune X` writes it."""
    return write_tuning(start, images, out, by, "maect tune X", {}, None, Device("cpu"))


@pytest.mark.parametrize("by", ["tune", "diet"])
def test_the_file_that_is_written_is_an_experiment(by, weights, digits, tmp_path):
    out = tmp_path / "mine.yaml"
    text = written_tuning(find_start(str(weights)), digits / "val", out, by)
    experiment = load(str(out))
    before, after = experiment.runs["before"], experiment.runs["after"]
    assert before.encoder == after.encoder and text.startswith("# maect tune X\n")
    train, val = ((tmp_path / f"mine.{part}.txt").read_text().split() for part in ("train", "val"))
    assert len(train) + len(val) == 500 and not {*train} & {*val}
    assert after.settings.batch_size == 64  # a quarter of the images, a power of two
    expected = itertools.product(("before", "after"), ("geometry", "agreement"))
    assert set(experiment.evaluations) == {*expected}
    if by == "diet":
        assert after.source == "before" and after.settings.images == len(train)
    else:
        assert after.source == "head" and experiment.runs["head"].source == "before"
    # The same command goes on with it, whatever was changed below the first line.
    out.write_text(text.replace("epochs: 200", "epochs: 3"))
    assert is_written_by(out, "maect tune X")
    with pytest.raises(UserError, match="its first line is not this command"):
        is_written_by(out, "maect tune Y")


@pytest.mark.parametrize(
    ("name", "by"), [("dinov2_small_registers", "tune"), ("dinov2_small", "refine")]
)
def test_public_encoders_of_dinov2_are_continued(name, by, digits, tmp_path, monkeypatch):
    monkeypatch.setenv("MAECT_WEIGHTS", str(tmp_path))
    with pytest.raises(UserError, match="on a machine with internet run `maect retrieve"):
        find_start(name)
    (tmp_path / CATALOGUE[name][0].name).touch()  # read only when it is imported
    start = find_start(name)
    assert start.size == "small14" and start.encoder.image_size == 224
    out = tmp_path / "mine.yaml"
    written_tuning(start, digits / "val", out, by)
    runs = load(str(out)).runs
    registers = 4 if name.endswith("registers") else 0
    assert {run.encoder.registers for run in runs.values()} == {registers}
    if by == "refine":
        assert runs["after"].settings.local_size == 98


def test_classes_say_what_is_measured():
    assert evaluated({}, 300)[0] == []
    assert evaluated({0: 30, 1: 4}, 34)[0] == [1, 2]
    assert evaluated({0: 30, 1: 30}, 60) == ([1, 2, 5], [])
    assert evaluated({0: 4, 1: 4}, 8)[0] == []  # fewer images than neighbours


def test_labels_that_are_held_out_are_none_to_learn_from(continuation):
    """Two training images are left of every digit."""
    seen: Counter[int] = Counter()
    held = set()
    for entry in continuation.written.images.entries:
        seen[entry.label] += 1
        held |= {entry.name} if seen[entry.label] > 2 else set()
    written = replace(continuation.written, held=held, counts={"train": 20, "val": len(held)})
    given = replace(continuation, written=written)
    assert "shots: [1, 2]" in given.text(given.first())


def test_chances_of_a_table_are_corrected_for_their_number():
    chances = {"knn_raw": 0.01, "low_shot_1_raw": 0.02, "agreement": 0.5}
    found = {name: of(8, 3, 13, p) for name, p in chances.items()}
    means = dict.fromkeys(chances, (50.0, 58.0))
    rows = tuning_result._rows(tuning_result.Measured(found, means, {}, None))
    assert [row["p"] for row in rows] == ["0.03", "0.04", "0.5"]


def timed(epoch: float) -> Callable[[Any], list[PlannedJob]]:
    """Jobs of made-up length: 600 s for the rest, and each epoch by image size and batch."""

    def jobs(plan: Any) -> list[PlannedJob]:
        share = epoch * (plan.pixels / 16) ** 2
        seconds = {"rest": 600.0, "head": plan.epochs["head"] * share}
        seconds["after"] = plan.epochs["after"] * 2 * share
        about = ("", Path("made"))
        return [
            PlannedJob(name, name, 1, 1, seconds[name], 1e9, *about, here=True) for name in seconds
        ]

    return jobs


@pytest.fixture
def continuation(weights, digits, tmp_path) -> Continuation:
    from maect.tools.new_experiment import read_folder

    written = read_folder(digits / "val", tmp_path / "mine.yaml", {})
    return Continuation(find_start(str(weights)), written, "tune", "maect tune X")


def test_hours_give_epochs_then_batch_then_image_size(continuation):
    device = Device("cpu")
    # Enough time: what the images are worth, and no more.
    plan = fitted(continuation, 10, device, timed(1.0))
    assert plan.epochs == continuation.lengths() and plan.pixels == 16 and plan.batch == 64
    # Half of it: fewer epochs, and all of the time.
    plan = fitted(continuation, 0.3, device, timed(2.0))
    least = continuation.least(continuation.first())
    assert least.epochs["after"] < plan.epochs["after"] < continuation.lengths()["after"]
    spent = sum(job.seconds for job in timed(2.0)(plan))
    assert 0.8 * 0.3 * 3600 < spent < 0.3 * 3600
    # Hardly any: smaller batches give the same steps with fewer epochs.
    plan = fitted(continuation, 0.3, device, timed(14.0))
    assert plan.batch < 64 and plan.pixels == 16
    plan = fitted(continuation, 0.3, device, timed(60.0))
    assert plan.pixels < 16 and "16 pixels leave too few steps" in plan.why
    with pytest.raises(UserError, match=r"the fewest steps take .* take a smaller encoder or more"):
        fitted(continuation, 0.3, device, timed(1000.0))


@pytest.mark.parametrize("by", ["tune", "diet"])
def test_at_fewer_pixels_the_result_compares_with_the_original_at_its_own(
    by, continuation, tmp_path
):
    given = replace(continuation, by=by)
    plan = replace(given.first(), pixels=12)
    out = tmp_path / "mine.yaml"
    write_all(dict(given.written.lists.values()) | {out: given.text(plan)}, out)
    experiment = load(str(out))
    sizes = {name: run.encoder.image_size for name, run in experiment.runs.items()}
    trained = dict.fromkeys(given.recipes, 12)
    assert sizes == {"before": 16, "smaller": 12, **trained}
    first = experiment.runs["after" if by == "diet" else "head"]
    assert first.source == "smaller"
    assert {run for run, _ in experiment.evaluations} == {"before", "after"}


def of(value: float, low: float, high: float, p: float) -> Difference:
    return Difference(100, value, low, high, None, None, p)


UP, DOWN, EVEN = of(8, 3, 13, 0.004), of(-8, -13, -3, 0.004), of(1, -3, 5, 0.7)


@pytest.mark.parametrize(
    ("differences", "ranks", "word"),
    [
        ({"knn_raw": UP, "agreement": DOWN}, (9, 9), "Better"),
        ({"knn_raw": DOWN, "agreement": UP}, (9, 9), "Worse"),
        ({"knn_raw": EVEN, "agreement": UP}, (9, 9), "Not distinguishable"),
        ({"knn_raw": of(8, 0.1, 16, 0.06)}, (9, 9), "Not distinguishable"),
        ({"knn_raw": of(8, -0.1, 16, 0.04)}, (9, 9), "Not distinguishable"),
        ({"knn_raw": UP}, (9, 2), "Better"),  # classes know better than a rank
        ({"agreement": UP}, (9, 5), "Better"),
        ({"agreement": UP}, (9, 4), "Not distinguishable"),
        ({"agreement": DOWN}, (9, 4), "Worse"),
        ({"knn_raw": difference(np.ones(30), np.ones(30))}, (5, 5), "Not distinguishable"),
    ],
)
def test_the_verdict_follows_the_rule(differences, ranks, word):
    verdict = judge(differences, ranks)
    assert verdict.word == word
    assert bool(verdict.reason) == (word != "Better" and differences == {"agreement": UP})


def outcome(run: Path, name: str, right: dict[str, np.ndarray], **metrics: float) -> None:
    run.mkdir(parents=True, exist_ok=True)
    EvaluationRecord(
        metrics=metrics,
        provenance={"splits": {"test": {"index_digest": "d"}}},
        outcomes={key: pack(value) for key, value in right.items()},
    ).write(run / f"{name}.json")


@pytest.mark.parametrize(("gained", "kept"), [(30, "after"), (-30, "before")])
def test_the_better_encoder_is_kept(gained, kept, weights, digits, tmp_path):
    out = tmp_path / "mine.yaml"
    written_tuning(find_start(str(weights)), digits / "val", out, "tune")
    values = yaml.safe_load(out.read_text()) | {"storage": str(tmp_path / "results")}
    out.write_text(yaml.safe_dump(values, sort_keys=False))
    experiment = load(str(out))
    rows = np.arange(100)
    spread = {"alignment": 0.2, "uniformity": -2.0, "rank_me": 9.0}
    for number, run in enumerate(("before", "after")):
        with seeded(number):
            state = build_encoder(TINY).state_dict()
        torch.save(state, tmp_path / "other.pth")
        import_weights(tmp_path / "other.pth", experiment.folder(run), "dino", "tiny")
        right = {"knn_raw": rows < 50 + gained * number, "knn_whitened_0.01": rows < 78}
        folder = experiment.root / "evaluations" / run
        outcome(folder, "geometry", right)
        outcome(folder, "agreement", {"agreement": np.stack([rows < 60] * 10)}, **spread)
    lines = conclude(experiment, "mine.pth")
    words = {30: "Better: ", -30: "Worse: "}
    assert lines[0].startswith(f"{words[gained]}k-NN 50.0 → {50 + gained}.0 %, {gained:+.1f}")
    assert lines[0].endswith("on 100 held-out images.")
    exported = experiment.root / "encoder" / "model.safetensors"
    trained = experiment.folder(kept) / "encoder.safetensors"
    assert exported.read_bytes() == trained.read_bytes()
    page = (experiment.root / "result.html").read_text()
    shown = page.partition("<h1>")[2]
    assert shown.startswith(words[gained])
    ahead = {30: "does as well as", -30: "is ahead of"}
    by = {30: "(+2.0 points, ", -30: "by 58.0 points ("}
    free = f"gives k-NN 78.0 % and {ahead[gained]} the continued encoder {by[gained]}"
    assert free in page
    table = (experiment.root / "result.csv").read_text().splitlines()
    assert table[1].startswith(f"k-NN,50.0,{50 + gained}.0,{gained:+.1f},")
    # What was kept can be continued again.
    again = find_start(str(experiment.root / "encoder"))
    assert again.size == "tiny" and again.encoder == TINY
