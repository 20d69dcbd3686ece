"""`maect plan`: what is left to run is asked of Snakemake; its price is plain arithmetic."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from stamping import stamp_finished

from maect.core.errors import UserError
from maect.core.files import RUN, write_record
from maect.evaluate import PROTOCOLS
from maect.experiment import Experiment, load, resolve
from maect.experiment.chosen_shards import note_own
from maect.recipes import Pixels, load_encoder
from maect.recipes.cost import encode_flops, encoder_weights
from maect.records import RunRecord
from maect.stages import load_recipe
from maect.tools.dry_run import jobs_to_run
from maect.tools.plan import (
    CPU_RATE,
    REQUEUED,
    SPEEDS,
    START,
    Device,
    Plan,
    PlannedJob,
    RuleJob,
    SplitFacts,
    all_here,
    critical_path,
    make_plan,
    measured,
    missing,
    shards_of,
    tuned_part,
)
from maect.tools.plan_text import lines
from maect.tools.speed import Machine, this_machine

PROFILE = Path(__file__).parents[2] / "cluster_profiles/juwels"
HERE = {"cluster": "local", "nodes": 1, "devices": 2, "runtime": 1440}
HEAD = "results/digits/runs/head_min_tiny/done"
FIVE = Pixels(channels=5, mean=(0.5,) * 5, std=(0.25,) * 5)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_tunings_part_of_the_operations_is_said(here):
    """By hand, of encoders whose MAE the experiment trains."""
    experiment, refined = load("digits"), load("refined")
    runs = [experiment.runs[name] for name in ("mae_tiny", "head_min_tiny", "ct_min_tiny")]
    parts = [run.settings.epochs * run.settings.flops_per_image(run.encoder) for run in runs]
    found = tuned_part(experiment, "ct_min_tiny")
    assert found == pytest.approx(sum(parts[1:]) / sum(parts))
    assert tuned_part(experiment, "mae_tiny") is tuned_part(experiment, "head_min_tiny") is None
    assert all(tuned_part(refined, name) is None for name in refined.runs)
    said = "head and tuning take 10% (a)"
    for tuned, words in (
        ({"a": 0.1, "b": 0.52, "c": 0.2}, " to 52% (b) of a model's operations; with"),
        ({"a": 0.1}, " of a model's operations; with few epochs on CIFAR-10 25%"),
    ):
        told = lines(Plan([job("ct", 1.0)], tuned=tuned))
        (line,) = (line for line in told if "operations" in line)
        assert line.startswith(said + words)


def job(name: str, seconds: float | None, *needs: str, **more: Any) -> PlannedJob:
    usual = {"nodes": 1, "devices": 4, "limit": 86400.0, "source": "", "stage": "tune"} | more
    return PlannedJob(
        name=name, seconds=seconds, makes=Path(name), needs=tuple(map(Path, needs)), **usual
    )


def plan_of(
    experiment: Experiment, device: Device, rule: str, nodes: str = "1", devices: str = "1",
    **wildcards: str,
) -> Plan:  # fmt: skip
    resources = {"nodes": nodes, "devices": devices, "runtime": 1440}
    return make_plan([RuleJob(rule, wildcards, resources)], experiment, device)


def test_the_jobs_are_those_that_snakemake_would_run(here):
    left = jobs_to_run([HEAD], ["experiment=digits"], PROFILE)
    rules = [job.rule for job in left]
    assert sorted(rules) == ["head", "pretrain", "write_images", "write_shards"]
    found = load("digits")
    plan = make_plan(left, found, Device("A100"))
    path = [(job.stage, job.name, job.nodes, job.devices) for job in critical_path(plan.jobs)]
    assert path == [("pretrain", "mae_tiny", 1, 4), ("head", "head_min_tiny", 1, 4)]
    assert len(plan.jobs) == 2 == plan.others

    # What is there is not run again.
    images, shards, mae = (
        found.root.absolute() / name
        for name in ("images/digits", "shards/digits/train", "runs/mae_tiny")
    )
    for folder in (images, shards, mae):
        folder.mkdir(parents=True)
    note_own(shards, found.shards_config("digits", "train"))
    write_record(shards / "index.json", {"digest": "0"})
    (shards / "index.npy").touch()
    weights = mae / "encoder.safetensors"
    weights.write_text("mae_tiny")
    write_record(mae / RUN, {"files": [weights.name], "sha256": {weights.name: "1"}})
    resolve.run_config(found, "mae_tiny").write(mae / "config.yaml")
    stamp_finished(found)
    left = jobs_to_run([HEAD], ["experiment=digits"], PROFILE)
    assert [job.rule for job in left] == ["head"]


def test_what_waits_for_what_through_features_and_other_evaluations(here):
    target = "results/digits/evaluations/mae_tiny/retrieval.done"
    left = jobs_to_run([target], ["experiment=digits"], PROFILE)
    path = critical_path(make_plan(left, load("digits"), Device("A100")).jobs)
    assert [job.stage for job in path] == ["pretrain", "features", "clustering", "retrieval"]


def test_a_table_that_is_asked_for_by_name_needs_its_own_evaluations_alone(here):
    left = jobs_to_run([], ["experiment=digits", "tables=clustering", "figures="], PROFILE)
    assert {job.rule for job in left} & PROTOCOLS.keys() == {"clustering"}


@pytest.mark.parametrize(
    ("target", "profile", "words"),
    [("no/such", PROFILE, "No rule to produce no/such"), (HEAD, Path("/no/such"), "/no/such")],
)
def test_snakemakes_refusal_is_one_line(here, target, profile, words, capfd):
    with pytest.raises(UserError, match=words) as error:
        jobs_to_run([target], ["experiment=digits"], profile)
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_hours_of_a_training_from_its_operations(here):
    """ViT-L by hand: twice the multiplications of every matrix, three passes."""
    plan = plan_of(load("paper"), Device("A100", 0.35), "pretrain", "1..16", "4", run="mae_large")
    (planned,) = plan.jobs
    assert (planned.nodes, planned.devices) == (4, 4)
    tokens, width, all_tokens, decoder = 1 + 49, 1024, 1 + 196, 512
    block = 24 * tokens * width**2 + 4 * tokens**2 * width
    decoded = 24 * all_tokens * decoder**2 + 4 * all_tokens**2 * decoder
    view = 3 * (24 * block + 8 * decoded)
    seconds = 2 * view * 1_281_167 * 800 / (0.35 * 312e12 * 16)
    assert planned.seconds == pytest.approx(seconds, rel=0.02)  # embedding and pixels: 1 %
    assert "35% of an A100" in planned.source


CPU = {"device": "AMD EPYC", "threads": 1}
GPU = {"device": "NVIDIA H200", "threads": None}


def trained(root: Path, name: str, size: str, by: dict[str, Any], speed: float, ranks: int) -> None:
    """Leave the record of a run of a recipe, by the name of the run."""
    settings = load_recipe(name.partition("-")[0], size)
    record = {"run": name, "stage": settings.name, "settings": settings.model_dump(mode="json")}
    record |= {"encoder": load_encoder(size).model_dump(mode="json"), "attempts": [by]}
    record |= {"images_per_second": speed, "world_size": ranks}
    write_record(RunRecord.path(root / "runs" / name), record)


def test_a_measurement_beats_operations(here):
    experiment, encoder = load("digits"), load_encoder("tiny", None)
    root, stage = experiment.root, load_recipe("ct_min", "tiny")
    assert measured(root, stage, encoder, on_cpu=True) is None
    known = {"ct_min-cpu": Device("H100").source, "ct_min-gpu": "ct_min-gpu/run.json on NVIDIA"}
    for name, attempt in (("ct_min-cpu", CPU), ("ct_min-gpu", GPU)):
        trained(root, name, "tiny", attempt, 100.0, 4)
        (planned,) = plan_of(experiment, Device("cpu"), "tune", "1", "2", run="ct_min_tiny").jobs
        assert planned.seconds == pytest.approx(1_297 * 25 / (25.0 * 2))
        assert "ct_min-cpu/run.json on AMD EPYC" in planned.source
        # A CPU does not say how fast a GPU is.
        (planned,) = plan_of(experiment, Device("H100"), "tune", "1", "2", run="ct_min_tiny").jobs
        assert known[name] in planned.source


def test_a_run_with_other_views_is_a_measurement_in_proportion(here):
    encoder, asked = load_encoder("large"), load_recipe("refine_d2v2", "large")
    other = load_recipe("refine_global", "large").flops_per_image(encoder)
    share = other / asked.flops_per_image(encoder)
    assert share < 1 / 1.5
    for name, speed, expected in (
        ("refine_global", 1600.0, 1600.0 / 16 * share),
        ("refine_d2v2", 800.0, 800.0 / 16),  # nearer
    ):
        trained(here, name, "large", GPU, speed, 16)
        known = measured(here, asked, encoder, on_cpu=False)
        assert known is not None and known[0] == pytest.approx(expected)


def unknown_images(folder: Path, runs: dict[str, Any] | None = None) -> Experiment:
    runs = runs or {"mae_tiny": {"recipe": "mae", "size": "tiny"}}
    splits = {split: {"images": str(folder)} for split in ("train", "val")}
    asked = [{"runs": [*runs], "protocols": ["linear_probe"]}]
    values = {"datasets": {"mine": {"splits": splits}}, "runs": runs, "evaluate": asked}
    (folder / "x.yaml").write_text(yaml.safe_dump(values))
    return load(str(folder / "x.yaml"))


@pytest.mark.parametrize("gpu", ["A100-40GB", ""])
def test_a_batch_that_does_not_split_is_said_with_and_without_a_known_gpu(gpu, here):
    runs = {"mae": {"recipe": "mae", "size": "tiny", "computing": {"accumulation": 3}}}
    resources = {"nodes": "2", "devices": "4", "runtime": 1440, "gpu": gpu}
    jobs = [RuleJob("pretrain", {"run": "mae"}, resources)]
    (planned,) = make_plan(jobs, unknown_images(here, runs), Device("A100")).jobs
    said = r"will be refused: batch_size .* is not a multiple of 8 ranks x accumulation 3"
    assert re.fullmatch(said, planned.fitted)


def test_samples_that_nobody_knows_are_said_and_not_guessed(here):
    assert shards_of(Path("shards/mine/train")).images is None
    folder = here / "shards/imagenet/train"
    assert shards_of(folder) == SplitFacts(1_281_167, 147_897_477_120, False)
    write_record(folder / "index.json", {"n": 10, "shards": [{"size": 3}, {"size": 4}]})
    assert shards_of(folder) == SplitFacts(10, 7, True)
    plan = plan_of(unknown_images(here), Device("A100"), "pretrain", run="mae_tiny")
    assert plan.jobs[0].seconds is None
    text = "\n".join(lines(plan))
    assert "not known, and not counted: images of" in text and "no time known of 1 job" in text


def test_images_are_counted_before_they_are_sharded(here):
    images = here / "birds"
    for number in range(12):
        path = images / f"{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(100))
    experiment = unknown_images(images)
    jobs = [RuleJob("write_shards", {"dataset": "mine", "split": "train"}, {})]
    jobs += [RuleJob("pretrain", {"run": "mae_tiny"}, HERE)]
    plan = make_plan(jobs, experiment, Device("cpu"))
    assert plan.shards(experiment.shards("mine", "train")) == SplitFacts(12, 1200, False, 2)
    stage, encoder = load_recipe("mae", "tiny"), load_encoder("tiny")
    flops = 12 * stage.epochs * stage.flops_per_image(encoder)
    assert plan.jobs[0].seconds == pytest.approx(flops / (2 * CPU_RATE))
    told = "\n".join(lines(plan))
    assert "not known" not in told and "all of it on this machine" in told
    assert "device min" in told and "node min" in told  # of hours there would be 0.0
    assert missing(jobs, experiment) == []
    images.rename(here / "elsewhere")
    (fault,) = missing(jobs, experiment)
    assert fault.startswith(f"{images}/x.yaml: datasets: mine: no images at {images} (split train)")


def test_this_machine_is_measured(monkeypatch):
    """Encoders up to `small` on a CPU; wider ones take as long as their operations."""
    asked = []

    def measure(stage: Any, encoder: Any, batch: int) -> float:
        asked.append(encoder.width)
        assert 2 <= batch <= 1024
        return 5e10 / float(stage.flops_per_image(encoder))

    monkeypatch.setattr("maect.tools.speed.measure", measure)
    machine, of_gpu, tiny = Machine("cpu"), Machine("H100"), load_encoder("tiny")
    small, huge = load_encoder("small"), load_encoder("huge")
    tune = load_recipe("ct_min", "tiny")
    # Two processes share the cores, and each was measured with its share; two GPUs are two.
    one = 1e11 / tune.flops_per_image(tiny)
    assert machine.images_per_second(tune, tiny, 2) == pytest.approx(one)
    assert machine.images_per_second(tune, tiny, 4) == pytest.approx(one)
    assert of_gpu.images_per_second(tune, tiny, 2) == pytest.approx(one)
    assert asked == [tiny.width] * 2
    speed = machine.images_per_second(load_recipe("ct_min", "huge"), huge)
    assert speed == pytest.approx(1e11 / load_recipe("ct_min", "huge").flops_per_image(huge))
    assert asked[2:] == [small.width]
    assert machine.rate == pytest.approx(1e11) and machine.together(2) == machine.rate
    assert machine.source == "operations at 100 GFLOP/s, measured here"


@pytest.mark.parametrize("pixels", [Pixels(), FIVE], ids=["RGB", "5 channels"])
def test_a_step_is_measured(pixels, monkeypatch):
    monkeypatch.setattr("maect.tools.speed.SECONDS", 0.0)
    monkeypatch.setattr("maect.tools.speed.STEP_FLOPS", {"cpu": 0.0, "cuda": 0.0})
    machine, encoder = this_machine(), load_encoder("tiny", 16, pixels)
    assert 0 < machine.images_per_second(load_recipe("ct_min", "tiny"), encoder) < 1e6


def test_wall_limits_cut_a_training_into_pieces():
    assert job("short", 3600).pieces == 1
    long = job("long", 3 * 86400)
    assert long.pieces == 4  # what saving and starting take off each day
    assert long.wall == 3 * 86400 + 4 * START + 3 * REQUEUED
    assert long.node_hours == pytest.approx(72 + 4 * START / 3600)
    # Of two nodes with four devices each for an hour.
    _, row, *_ = lines(Plan([job("hour", 3600 - START, nodes=2)]))
    assert row.split()[-2:] == ["8.0", "2.0"]


def test_the_critical_path_is_the_longest_chain():
    jobs = [job("c2", 10, "b"), job("a", 100), job("b", 50, "a"), job("c1", 20, "a")]
    jobs.append(job("alone", 80))
    assert [j.name for j in critical_path(jobs)] == ["a", "b", "c2"]
    assert critical_path([]) == []
    # Were it not for the start of each job, the way over b would be no longer than c1's.
    assert [j.name for j in critical_path([*jobs[1:4], job("c1", 110, "a")])][-1] == "c1"


def test_where_an_experiment_computes():
    """An import is a command on this machine, without resources: it must not lead to an A100."""
    imported = RuleJob("import", {"run": "mae_base"}, {})
    tuned = RuleJob("tune", {"run": "ct_min_base"}, HERE)
    assert all_here([imported, tuned])
    assert not all_here([imported])
    assert not all_here([imported, RuleJob("tune", tuned.wildcards, HERE | {"cluster": "slurm"})])
    with pytest.raises(UserError, match="--device Abacus: its peak is not known"):
        _ = Device("Abacus").rate


def test_what_a_run_leaves_is_near_what_it_left():
    """ViT-L has 303 million weights (timm: vit_large_patch16_224 without its classifier)."""
    encoder = load_encoder("large", None)
    assert encoder_weights(encoder) == pytest.approx(303.3e6, rel=0.002)
    size = load_recipe("mae", "large", {}).state_bytes(encoder)
    assert 3 * 12 * 303e6 < size < 4 * 12 * 340e6


def test_operations_of_evaluations(here):
    """Passes over images times what one pass over one image takes."""
    experiment, device = load("digits"), Device("A100", 1.0)
    one = encode_flops(load_encoder("tiny"))

    def passes(rule: str, precision: str = "bf16", **wildcards: str) -> float:
        given = wildcards or {"evaluation": rule}
        (planned,) = plan_of(experiment, device, rule, run="mae_tiny", **given).jobs
        assert planned.seconds is not None
        return planned.seconds * device.rate * SPEEDS[precision] / one

    assert passes("features", "fp32", dataset="digits", split="val", norm="") == pytest.approx(500)
    assert passes("linear_probe") == pytest.approx(12_970 + 500)
    assert passes("effective_invariance") == pytest.approx(7 * 500)
    paper = load("paper")
    of_base = {"run": "mae_base", "dataset": "imagenet", "split": "val", "norm": ""}
    (planned,) = plan_of(paper, device, "features", **of_base).jobs  # in TF32, as larger encoders
    work = 50_000 * encode_flops(paper.runs["mae_base"].encoder)
    assert planned.seconds == pytest.approx(work / device.rate / SPEEDS["tf32"])
    of_base["norm"] = ".before_norm.last_4"
    (concatenated,) = plan_of(paper, device, "features", **of_base).jobs
    assert (planned.bytes, concatenated.bytes) == (50_000 * (4 * 768 + 8), 50_000 * (16 * 768 + 8))
    (planned,) = plan_of(experiment, device, "knn", run="mae_tiny", evaluation="knn").jobs
    # Ten minutes of 50,000 images.
    assert (planned.seconds, planned.source) == (pytest.approx(600 * 500 / 50_000 + 10), "assumed")
    asked = {"run": "mae_tiny", "evaluation": "linear_probe"}
    plan = plan_of(unknown_images(here), device, "linear_probe", **asked)
    assert plan.jobs[0].seconds is None and plan.unknown == {"images of mine train"}
