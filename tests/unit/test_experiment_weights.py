"""Runs with `weights:`: public weights in an experiment."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from maect.core.errors import UserError
from maect.core.files import write_record
from maect.experiment import Experiment, load
from maect.experiment.pipeline import is_forced
from maect.experiment.resolve import run_config
from maect.experiment.start import PendingJob, faults, missing_images, missing_weights, prepare
from maect.records import RunRecord

RUNS: dict[str, Any] = yaml.safe_load("""
mae_large_public: {weights: "$PUBLIC/mae_{x}.pth", size: large, each: {x: [l]}}
head_min_large: {recipe: head_min, size: large, from: mae_large_public}
ct_min_large: {recipe: ct_min, size: large, from: head_min_large}
ijepa_huge448: {weights: ~/ijepa.tar, size: huge, image_size: 448, layout: ijepa, method: ijepa}
""")


def experiment(folder: Path, runs: dict[str, Any] = RUNS, **more: Any) -> Experiment:
    splits = {split: {"images": str(folder)} for split in ("train", "val")}
    values = {"datasets": {"mine": {"splits": splits}}, "runs": runs, "storage": str(folder)}
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump(values | more, sort_keys=False))
    return load(str(file))


def test_an_import_is_a_run_to_start_from(tmp_path, monkeypatch):
    """It has no seeds."""
    monkeypatch.setenv("PUBLIC", "/public")
    found = experiment(tmp_path, evaluate=[{"runs": ["*"], "protocols": ["knn"]}])
    public, ijepa = found.runs["mae_large_public"], found.runs["ijepa_huge448"]
    assert (public.stage, public.method) == ("import", "mae_public")
    assert public.settings.outputs == ("encoder.safetensors",)
    assert public.weights == Path("/public/mae_l.pth")
    assert (ijepa.encoder.image_size, ijepa.encoder.class_token) == (448, False)
    assert ijepa.weights == Path.home() / "ijepa.tar"
    assert "head.safetensors" in found.runs["ct_min_large"].settings.outputs
    assert found.runs_of("import") == ["mae_large_public", "ijepa_huge448"]
    assert ("ijepa_huge448", "knn") in found.evaluations
    runs = experiment(tmp_path, seeds=3).runs
    assert len(runs) == 2 + 3 + 3
    assert runs["head_min_large-s2"].source == "mae_large_public"
    assert runs["ct_min_large-s2"].source == "head_min_large-s2"


def test_where_the_weights_are_is_no_part_of_the_identity(tmp_path, monkeypatch):
    def digests(**changes: Any) -> list[str]:
        public = RUNS["mae_large_public"] | changes
        found = experiment(tmp_path, RUNS | {"mae_large_public": public})
        return [run_config(found, name).digest for name in found.runs]

    before = digests()
    monkeypatch.setenv("PUBLIC", "/elsewhere")
    assert digests() == before
    assert digests(layout="mae")[0] != before[0]
    assert digests(layout="mae")[1:] == before[1:]


def test_missing_weights_are_named_until_they_are_imported(tmp_path, monkeypatch):
    monkeypatch.setenv("PUBLIC", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    found = experiment(tmp_path)
    first, _ = missing_weights(found)
    assert f"mine.yaml: runs: mae_large_public: no weights at {tmp_path}/mae_l.pth" in first
    (tmp_path / "mae_l.pth").touch()
    (tmp_path / "runs/ijepa_huge448").mkdir(parents=True)
    RunRecord.path(tmp_path / "runs/ijepa_huge448").touch()
    assert missing_weights(found) == []
    monkeypatch.delenv("PUBLIC")
    (line,) = missing_weights(experiment(tmp_path))
    assert "/mae_l.pth, as PUBLIC is not set: export it; correct" in line


def job(rule: str, forced: bool, **given: str) -> PendingJob:
    return PendingJob(rule, given, [], None, forced)


@pytest.mark.parametrize(("forced", "finished"), [(True, True), (False, True), (False, False)])
def test_what_is_finished_needs_its_weights_and_images_only_if_it_is_forced(
    tmp_path, forced, finished
):
    data = {"mine": {"splits": {"train": {"images": "/no/images"}}}}
    found = experiment(tmp_path, {"ijepa": RUNS["ijepa_huge448"]}, datasets=data)
    if finished:
        record = RunRecord.path(found.folder("ijepa"))
        record.parent.mkdir(parents=True)
        record.touch()
        write_record(found.own_shards("mine", "train") / "index.json", {})
        assert missing_images(found) == []
    imported = job("import", forced, run="ijepa")
    sharded = job("write_shards", forced, dataset="mine", split="train")
    for pending, said in ((imported, "no weights at"), (sharded, "no images at /no/images")):
        lines = faults(found, [pending])
        assert len(lines) == (forced or not finished) and all(said in line for line in lines)


def test_a_failed_import_leaves_what_was_imported_before(tmp_path):
    """Also one that is forced, which only gives up its record."""
    found = experiment(tmp_path, {"ijepa": RUNS["ijepa_huge448"]})
    folder = found.folder("ijepa")
    encoder, record = folder / "encoder.safetensors", RunRecord.path(folder)
    folder.mkdir(parents=True)
    encoder.write_text("weights")
    RunRecord(run="ijepa", stage="import", fingerprint="1", files=(encoder.name,)).write(record)
    prepare(found, [job("import", False, run="ijepa")])
    assert encoder.read_text() == "weights" and RunRecord.of(folder).fingerprint == "1"
    for _ in range(2):
        prepare(found, [job("import", True, run="ijepa")])
    assert encoder.read_text() == "weights" and not record.exists()


@pytest.mark.parametrize(
    ("rule", "stale"),
    [
        ("knn", "evaluations/ijepa/knn.json"),
        ("features", "features/ijepa/mine-val.safetensors"),
        ("write_shards", "shards/mine/val/index.json"),
        ("write_shards", "shards/mine/val/parts/000001.json"),
    ],
)
def test_what_a_forced_job_has_left_is_not_taken_for_its_result(tmp_path, rule, stale):
    found = experiment(tmp_path, {"ijepa": RUNS["ijepa_huge448"]})
    file = found.root / stale
    file.parent.mkdir(parents=True)
    file.touch()
    given = {"run": "ijepa", "evaluation": "knn", "dataset": "mine", "split": "val", "norm": ""}
    for forced in (False, True):
        assert file.exists()
        prepare(found, [PendingJob(rule, given, [], file.with_suffix(".yaml"), forced)])
    assert not file.exists()


@pytest.mark.parametrize(
    ("words", "forced"),
    [
        ({"targets": ["r/knn.done"], "forcetargets": False}, False),
        ({"targets": ["r/knn.done"], "forcetargets": True}, True),
        ({"targets": ["r/umap.done"], "forcetargets": True}, False),
        ({"forcerun": ["umap", "knn"]}, True),
        ({"forcerun": ["r/knn.done"]}, True),
        ({"forceall": True}, True),
    ],
)
def test_which_jobs_the_words_of_a_command_force(words, forced):
    given = {"forceall": False, "forcerun": [], "forcetargets": False, "targets": []} | words
    job = SimpleNamespace(rule=SimpleNamespace(name="knn"), output=["r/knn.done"])
    assert is_forced(SimpleNamespace(**given), job) is forced


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"size": "base"}, "x: needs `recipe`, to train by, or `weights`, to import"),
        ({"size": "base", "recipe": "mae", "weights": "w"}, "needs `recipe`.* one of them"),
        ({"size": "base", "recipe": "mae", "layout": "mae"}, "a recipe takes no `layout`"),
        ({"size": "base", "weights": "w", "from": "y"}, "weights to import takes no `from`"),
        ({"size": "base", "weights": "w", "set": {"epochs": 1}}, "import takes no `set`"),
        ({"size": "base", "weights": "w", "dataset": "mine"}, "import takes no `dataset`"),
        ({"size": "base", "weights": "w", "layout": "moco"}, "x: weights: layout: .*'moco_v3'"),
        ({"size": "bass", "weights": "w"}, "x: unknown encoder size 'bass'"),
        ({"recipe": "head_min", "size": "tiny", "from": "no_cls"},  # of I-JEPA
         "x: its encoder differs from that of no_cls"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(run, message, tmp_path):
    without = {"weights": "w", "size": "tiny", "layout": "ijepa"}
    with pytest.raises(UserError, match=message) as error:
        experiment(tmp_path, {"no_cls": without, "x": run})
    assert "\n" not in str(error.value)
