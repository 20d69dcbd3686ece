"""The experiment file: expansion, links, and one clear message for each mistake."""

import copy
import functools
import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from maect.cli import main
from maect.core.errors import UserError
from maect.core.yaml_files import read_yaml
from maect.evaluate import EvaluationConfig, FeaturesConfig
from maect.experiment import load, pages, resolve, start
from maect.experiment.load import EXPERIMENTS
from maect.experiment.resolve import run_config
from maect.experiment.schema import one_of
from maect.records import seedless
from maect.report.configs import Row
from maect.stages import Training, load_recipe
from maect.stages.run import RunConfig

ROOT = Path(__file__).parents[2]
bundled = functools.cache(load)
TINY: dict[str, Any] = yaml.safe_load("""
datasets: {mine: {splits: {train: {images: /images/train}, val: {images: /images/val}}}}
runs:
  mae_tiny: {recipe: mae, size: tiny}
  "head_{aug}_tiny":
    {recipe: "head_{aug}", size: tiny, from: mae_tiny, each: {aug: [min, aug]}}
  "ct_{aug}_tiny":
    {recipe: "ct_{aug}", size: tiny, from: "head_{aug}_tiny", each: {aug: [min, aug]}}
evaluate: [{runs: [mae_tiny, ct_*], protocols: [knn, linear_probe]}]
""")
DATASET = TINY["datasets"]["mine"]


def write(folder: Path, **changes: Any) -> str:
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump(TINY | changes, sort_keys=False))
    return str(file)


def entry(runs: str, protocols: str, **more: Any) -> dict[str, Any]:
    """An entry of `evaluate`, of words."""
    return {"runs": runs.split(), "protocols": protocols.split(), **more}


@pytest.mark.parametrize(
    ("stated", "expected"), [(None, "fp32 tf32"), ("fp32", "fp32 fp32"), ("bf16", "bf16 bf16")]
)
def test_precision_of_features(stated, expected, tmp_path):
    runs = TINY["runs"] | {"mae_base": {"recipe": "mae", "size": "base"}}
    found = load(write(tmp_path, runs=runs, **({"features": stated} if stated else {})))
    names = ("mae_tiny", "mae_base")
    assert [resolve.precision(found, name) for name in names] == expected.split()


def test_a_run_has_a_shape_of_its_own(tmp_path):
    """Without an entry in the package; what starts from it has the same one, or is refused."""
    shape = {"width": 96, "heads": 4, "depth": 5}
    runs = {name: run | {"encoder": shape} for name, run in TINY["runs"].items()}
    experiment = load(write(tmp_path, runs=runs, tables=["low_shot"]))
    run = experiment.runs["ct_min_tiny"]
    assert run.architecture == "tiny_w96_d5" and run.encoder.heads == 4
    told = run_config(experiment, "ct_min_tiny").encoder
    assert (told.width, told.depth, told.image_size) == (96, 5, 16)
    with pytest.raises(UserError, match="head_min_tiny"):
        load(write(tmp_path, runs=runs | {"mae_tiny": TINY["runs"]["mae_tiny"]}))


def own_recipe(folder: Path, recipe: str) -> str:
    """An experiment whose tuning has a recipe of its own."""
    run = TINY["runs"]["ct_{aug}_tiny"] | {"recipe": recipe}
    return write(folder, runs=TINY["runs"] | {"ct_{aug}_tiny": run})


def test_a_recipe_of_ones_own_lies_beside_the_experiment(tmp_path, monkeypatch):
    """It starts from one of the package, or from another file, and has values for sizes."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "longer.yaml").write_text("base: ct_min\nepochs: {tiny: 7, base: 9}\n")
    (folder / "warmer.yaml").write_text("base: longer.yaml\nhead: {topk: 5, temperature: 0.3}\n")
    file = own_recipe(tmp_path, "recipes/warmer.yaml")
    monkeypatch.chdir(folder)  # paths are relative to the file
    told = run_config(load(file), "ct_min_tiny")
    head = {"topk": 5, "temperature": 0.3}
    assert told.settings == load_recipe("ct_min", "tiny", {"epochs": 7, "head": head})
    assert (told.stage, told.recipe) == ("tune", "recipes/warmer.yaml")
    assert load_recipe("longer.yaml", "huge").epochs == 9  # which is like large, and that like base
    monkeypatch.setenv("RECIPES", str(folder))
    assert load(own_recipe(tmp_path, "$RECIPES/warmer.yaml")).runs["ct_min_tiny"].settings == (
        told.settings
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "own.yaml: no such recipe file"),
        ("- base", "own.yaml: not a mapping of keys to values"),
        ("base: ct_mim", "own.yaml: recipes: unknown base 'ct_mim'; did you mean 'ct_min'?"),
        ("base: own.yaml", "own.yaml: a recipe that is its own base"),
        ("epochs: 3", "own.yaml: write `base`, the recipe that it starts from, or `stage`"),
        ("stage: import", "own.yaml: stage: unknown 'import'"),
        ("base: ct_min\nepoch: 3", "own.yaml: unknown key 'epoch'; did you mean 'epochs'?"),
        ("base: mae", "stage pretrain starts from nothing"),
    ],
)
def test_a_wrong_recipe_of_ones_own_is_named(tmp_path, text, message):
    if text is not None:
        (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        load(own_recipe(tmp_path, "own.yaml"))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_expansion_and_links(tmp_path):
    storage = tmp_path / "results"
    experiment = load(write(tmp_path, seeds=2, tables=["low_shot"], storage=str(storage)))
    runs = experiment.runs
    assert len(runs) == 10
    assert runs["ct_aug_tiny-s1"].source == "head_aug_tiny-s1"
    assert runs["head_min_tiny"].source == "mae_tiny"
    assert runs["ct_min_tiny"].method == "ct_min"
    tuned = Row("tiny", "ct_min", ["ct_min_tiny", "ct_min_tiny-s1"])
    assert experiment.rows("low_shot")[1] == tuned
    chain = ["ct_min_tiny", "head_min_tiny", "mae_tiny"]
    assert experiment.with_ancestors(["ct_min_tiny"]) == chain
    assert ("mae_tiny-s1", "knn") in experiment.evaluations
    assert runs["mae_tiny"].settings.outputs == ("encoder.safetensors",)
    told = run_config(experiment, "ct_aug_tiny-s1")
    assert (told.stage, told.recipe, told.size, told.seed) == ("tune", "ct_aug", "tiny", 1)
    assert told.settings == load_recipe("ct_aug", "tiny")
    assert told.shards == storage / "shards/mine/train"
    assert told.source == storage / "runs/head_aug_tiny-s1"


def test_values_of_each_are_filled_in_and_typed(tmp_path):
    changes = {"epochs": 7, "crop_scale": [0.3, 1.0], "head": {"topk": "{k}", "lookup": "none"}}
    run = {"recipe": "ct_min", "size": "tiny", "from": "head_min_tiny", "set": changes}
    runs = TINY["runs"] | {"ct_k{k}_tiny": run | {"each": {"k": [1, 10]}}}
    found = load(write(tmp_path, runs=runs)).runs["ct_k10_tiny"]
    changes["head"] = {"topk": 10, "lookup": "none"}
    assert found.settings == load_recipe("ct_min", "tiny", changes)


def test_every_resolved_file_is_read_back_as_it_was(tmp_path):
    found = bundled("digits")
    for path, told in resolve.files(found):
        file = tmp_path / path.relative_to(found.root)
        told.write(file)
        assert type(told).read(file).digest == told.digest, path


def test_features_say_how_images_are_resized(tmp_path):
    """Also where the experiment does not: what a run's file says may be of before."""
    files = dict(resolve.files(load("digits")))
    found = {path: made for path, made in files.items() if isinstance(made, FeaturesConfig)}
    assert found and {config.resize for config in found.values()} == {16}
    assert {config.precision for config in found.values()} == {"fp32"}
    assert Path("results/digits/features/ct_min_tiny/digits-val.yaml") in found
    asked = [entry("ct_min_*", "knn_last_4")]
    files = dict(resolve.files(load(write(tmp_path, evaluate=asked, storage="r"))))
    config = files[Path("r/features/ct_min_tiny/mine-val.before_norm.last_4.yaml")]
    assert isinstance(config, FeaturesConfig)
    assert config.how == {"precision": "fp32", "resize": 18, "norm": False, "blocks": 4}


@pytest.fixture
def weights(tmp_path) -> str:
    (tmp_path / "weights.safetensors").touch()
    return str(tmp_path / "weights.safetensors")


def test_every_evaluation_crops_images_as_the_public_encoder_does(tmp_path, weights):
    """Those that run the encoder as those that read features; also of what is tuned from it."""
    runs = {
        "dino": {"timm": "vit_base_patch16_224.dino", "weights": weights},
        "dinov3": {"timm": "vit_base_patch16_dinov3.lvd1689m", "weights": weights},
        "ct": {"recipe": "ct_min", "size": "base", "from": "dino"},
    }
    asked = [entry("dino ct", "knn linear_probe fine_tune")]
    asked.append(entry("dinov3", "knn linear_probe knn_per_block"))
    experiment = load(write(tmp_path, runs=runs, evaluate=asked, storage="r"))
    found: dict[str, set[int | None]] = {name: set() for name in runs}
    for _, config in resolve.files(experiment):
        if isinstance(config, (EvaluationConfig, FeaturesConfig)):
            found[config.run.name].add(config.resize)
        elif isinstance(config, RunConfig):
            found[config.run.partition(".")[0]].add(config.resize)
    assert found == {"dino": {248}, "ct": {248}, "dinov3": {256}}
    stated = {"mine": DATASET | {"resize": 260}}
    experiment = load(write(tmp_path, runs=runs, evaluate=asked, storage="r", datasets=stated))
    assert {resolve.resize(experiment, name, "mine") for name in runs} == {260}


def test_a_public_encoder_is_trained_on_none_of_the_data_sets(tmp_path, weights):
    """Their order does not say how it crops images, nor those that it is not given its size."""
    runs = {
        "dino": {"layout": "dino", "size": "base", "weights": weights},
        "timms": {"timm": "vit_base_patch16_224.dino", "weights": weights},
        "ct": {"recipe": "ct_min", "size": "base", "from": "dino", "dataset": "close"},
    }
    data = {"close": DATASET | {"resize": 230}, "wide": DATASET}
    asked = [entry("dino timms ct", "knn fine_tune", datasets=["wide", "close"])]
    for order in (["close", "wide"], ["wide", "close"]):
        datasets = {name: data[name] for name in order}
        found = load(write(tmp_path, datasets=datasets, runs=runs, evaluate=asked))
        assert [resolve.resize(found, run, "wide") for run in runs] == [None, 248, 230]
        assert {resolve.resize(found, run, "close") for run in runs} == {230}
        for run in runs:
            name = found.evaluation_name("fine_tune", "wide")
            tuned = run_config(found, f"{run}.{name}.seed0").resize
            assert tuned == resolve.evaluation_config(found, run, name).resize
            assert tuned == resolve.resize(found, run, "wide")
    datasets = {"tiny": DATASET | {"resize": 32}, "wide": DATASET}
    asked = [entry("dino", "knn", datasets=["wide"])]
    found = load(write(tmp_path, datasets=datasets, runs={"dino": runs["dino"]}, evaluate=asked))
    assert run_config(found, "dino").resize is None


@pytest.mark.parametrize("page", ["claims", "datasets", "images"])
def test_a_page_without_anything_to_show_is_refused(tmp_path, page):
    """Each is a target by its name, whatever the file asks for."""
    found = load(write(tmp_path, storage="r", compare_with_paper=False, tables=["low_shot"]))

    def faults(rule: str, config: str) -> list[str]:
        return start.faults(found, [start.PendingJob(rule, {}, [], found.root / config, False)])

    (fault,) = faults(page, f"{page}.yaml")
    said = f"mine.yaml: asks for nothing that the page {page} would show; leave it out"
    assert fault.endswith(said) and faults("report_html", "report.yaml") == []
    assert pages.shown_config(found, "low_shot", figure=False).compare_with_paper is False


def test_what_a_job_reads(tmp_path):
    asked = [entry("ct_*", "knn linear_probe robustness")]
    protocols = {"robustness": {"splits": ["val"]}}
    found = load(write(tmp_path, evaluate=asked, protocols=protocols, storage="r"))

    def files(name: str) -> list[str]:
        return list(map(str, resolve.inputs_of_evaluation(found, "ct_min_tiny", name)))

    features = "r/features/ct_min_tiny/mine-{}.safetensors"
    assert files("knn") == [features.format("train"), features.format("val")]
    run, val = "r/runs/ct_min_tiny/run.json", "r/shards/mine/val/index.json"
    assert files("linear_probe") == [run, "r/shards/mine/train/index.json", val]
    probe = "r/evaluations/ct_min_tiny/linear_probe.safetensors"
    assert files("robustness") == [run, probe, val]
    made_of = ["r/shards/mine/train/index.json", "r/runs/head_min_tiny/run.json"]
    assert list(map(str, resolve.inputs_of_run(found, "ct_min_tiny"))) == made_of


def test_digest_follows_the_recipe_and_nothing_else(tmp_path):
    before = load(write(tmp_path))
    runs = dict(TINY["runs"], mae_tiny={"recipe": "mae", "size": "tiny", "set": {"epochs": 101}})
    after = load(write(tmp_path, runs=runs, description="a comment", storage="/elsewhere"))
    assert run_config(before, "mae_tiny").digest != run_config(after, "mae_tiny").digest
    assert run_config(before, "ct_min_tiny").digest == run_config(after, "ct_min_tiny").digest
    pair = "ct_min_tiny", "linear_probe"
    first, second = (resolve.evaluation_config(found, *pair) for found in (before, after))
    assert first.digest == second.digest and first.run != second.run


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("runs: [unclosed", "not valid YAML ("),
        ("run: {}", "unknown key 'run'; did you mean 'runs'?"),
        ("runs: {m: {recipe: mea, size: tiny}}", "unknown recipe 'mea'; did you mean 'mae'?"),
        ("runs: {m: {recipe: mae, size: giant}}", "unknown encoder size 'giant'"),
        ("runs: {m: {recipe: mae, size: tiny, set: {epoch: 1}}}",
         "unknown key 'epoch'; did you mean 'epochs'?"),
        ("runs: {m: {recipe: ct_min, size: tiny, from: x}}", "starts from unknown run 'x'"),
        ("runs: {m: {recipe: head_min, size: tiny}}", "stage head needs `from`"),
        ("runs: {m: {recipe: ct_aug, size: tiny, set: {from_scratch: true}}}",
         "from_scratch: frozen_blocks 2 would stay random; set it to 0"),
        ("more: {m: {recipe: ct_aug, size: tiny, from: mae_tiny, set: {from_scratch: true,"
         " frozen_blocks: 0}}}", "stage tune starts from nothing, but mae_tiny is a pretrain run"),
        ("more: {n: {recipe: mae, size: tiny, from: mae_tiny}}",
         "stage pretrain starts from nothing"),
        ("more: {n: {recipe: ct_min, size: tiny, from: head_min_tiny, set: {batch_size: 300}}}",
         "batch_size 300 does not divide queue_size 1024"),
        ("more: {n: {recipe: ct_min, size: tiny, from: head_min_tiny,"
         " set: {head: {embedding: 32}}}}", "head.embedding 32 differs from 64"),
        ("runs: {a: {recipe: head_min, size: tiny, from: b},"
         " b: {recipe: ct_min, size: tiny, from: a}}", "is a circle"),
        ("runs: {m;ls: {recipe: mae, size: tiny}}", "runs: 'm;ls' is not a name"),
        ("runs: {vit-s16: {recipe: mae, size: tiny}}", "vit-s16: an end such as -s16 is for"),
        ("runs: {m: {recipe: mae, size: tiny, computing: {zero: 1}}}", "unknown key 'zero'"),
        ("runs: {m: {recipe: mae, size: tiny, encoder: {widht: 96}}}", "did you mean 'width'"),
        ("runs: {m: {recipe: mae, size: tiny, encoder: {heads: 7}}}", "heads"),
        ("datasets: {mine: {resize: 15, splits: {train: {images: /i}, val: {images: /i}}}}",
         "mine: resize 15 is smaller than the 16 pixels that mae_tiny"),
        # Also where another data set is what is evaluated on.
        ("{datasets: {mine: {resize: 12, splits: &both {train: {images: /i}, val: {images: /i}}},"
         " all: {resize: 18, splits: *both}},"
         " runs: {m: {recipe: mae, size: tiny, dataset: all}},"
         " evaluate: [{runs: [m], protocols: [knn], datasets: [mine]}]}",
         "mine: resize 12 is smaller than the 16 pixels that m "),
        ("{datasets: {mine: {resize: 32, splits: {train: {images: /i}, val: {images: /i}}}},"
         " runs: {dino: {layout: dino, size: base, weights: w}},"
         " evaluate: [{runs: [dino], protocols: [knn]}]}",
         "mine: resize 32 is smaller than the 224 pixels that dino"),
        ("evaluate: [{runs: [ct_*], protocols: [kn]}]", "did you mean 'knn'?"),
        ("evaluate: [{runs: [ct_*], protocols: [knn], datasets: [mein]}]",
         "evaluate: datasets: unknown 'mein'; did you mean 'mine'?"),
        ("evaluate: [{runs: [mae_tiny.fine_tune.seed9], protocols: [knn]}]",
         "no run is named 'mae_tiny.fine_tune.seed9'"),
        ("evaluate: [{runs: [mae_tiny, mae_tiny.fine_tune.seed0], protocols: [fine_tune]}]",
         "fine_tune of mae_tiny.fine_tune.seed0, which is fine-tuned already"),
        ("{more: {mae_tiny.fine_tune.seed0: {recipe: mae, size: tiny}},"
         " evaluate: [{runs: [mae_tiny], protocols: [fine_tune]}]}",
         "mae_tiny.fine_tune.seed0: an evaluation trains a run of this name; choose another"),
        ("protocols: {knn: {kk: 3}}", "unknown key 'kk'"),
        ("protocols: {knn: {compile: true}}", "knn trains no run"),
        ("{protocols: {robustness: {splits: [imagenet_v2]}},"
         " evaluate: [{runs: [mae_tiny], protocols: [linear_probe, robustness]}]}",
         "imagenet_v2 has variants; name it imagenet_v2_threshold"),
        ("protocols: {knn: {test_split: test}}", "splits: unknown 'test'"),
        ("{protocols: {fine_tune: {train_split: nowhere}},"
         " evaluate: [{runs: [mae_tiny], protocols: [fine_tune]}]}",
         "protocols: fine_tune: splits: unknown 'nowhere'"),
        ("{protocols: {p: {protocol: knn, blocks: 3}},"
         " evaluate: [{runs: [mae_tiny], protocols: [p]}]}",
         "blocks 3 are read before the final norm: set norm: false"),
        ("protocols: {knn.on.x: {protocol: knn}}", "knn.on.x: '.on.' is for data sets"),
        ("protocols: {config: {protocol: knn}}", "protocols: config: that is a run's file"),
        ("datasets: {m: {splits: {val.before_norm: {images: /i}}}}",
         "datasets: m: splits: val.before_norm: '.before_norm' is for features"),
        ("datasets: {m.last_2: {splits: {val: {images: /i}}}}", "'.last_' is for features"),
        ("{protocols: {p: {epochs: 3}}, evaluate: [{runs: [mae_tiny], protocols: [p]}]}",
         "unknown 'p'"),
        ("{protocols: {p: {protocol: linear_prob}},"
         " evaluate: [{runs: [mae_tiny], protocols: [p]}]}", "did you mean 'linear_probe'?"),
        ("evaluate: [{runs: [mae_tiny], protocols: [effective_invariance]}]",
         "effective_invariance of mae_tiny reads the output of linear_probe; add it"),
        ("{datasets: {mine: {splits: &both {train: {images: /i}, val: {images: /i}}},"
         " other: {splits: *both}},"
         " evaluate: [{runs: [mae_tiny], protocols: [clustering]},"
         " {runs: [mae_tiny], protocols: [retrieval], datasets: [other]}]}",
         "reads the output of clustering"),
        ("{protocols: {robustness: {splits: [val, vla]}},"
         " evaluate: [{runs: [mae_tiny], protocols: [linear_probe, robustness]}]}",
         "robustness: splits: unknown 'vla'; did you mean 'val'"),
        ("tables: [lowshot]", "did you mean 'low_shot'?"),
        ("tables: {low_shot: [ct_mni]}", "tables: low_shot: no evaluated run is named 'ct_mni'"),
        ("tables: {low_shot: [{ct: ct_*}]}",
         "ct_min_tiny and ct_aug_tiny are both tiny ct; give one another name"),
        ("storage: $MAECT_NO_SUCH_VARIABLE/x", "MAECT_NO_SUCH_VARIABLE"),
        ("storage: /my results", "storage: '/my results' has ' '; choose one without blanks"),
        ("datasets: {$(reboot): {splits: {}}}", "datasets: '$(reboot)' is not a name"),
        ("datasets: {m: {splits: {a/b: {images: /i}}}}", "splits: 'a/b' is not a name"),
        ("datasets: {a-b: {splits: {c: {images: /i}}}, a: {splits: {b-c: {images: /i}}}}",
         "datasets: features of a-b: c and of a: b-c would both be called a-b-c"),
        ("{datasets: {mine: {splits: {training: {images: /i}}}}, evaluate: []}",
         "runs: mae_tiny: datasets: mine: splits: unknown 'train'; did you mean 'training'?"),
    ],
)  # fmt: skip
def test_mistakes_are_named(tmp_path, change, message):
    """In one line, with the file; `more:` are runs beside those of TINY."""
    file = tmp_path / "mine.yaml"
    if change == "runs: [unclosed":
        file.write_text(change)
    else:
        told = yaml.safe_load(change)
        if more := told.pop("more", None):
            told["runs"] = TINY["runs"] | more
        write(tmp_path, **told)
    with pytest.raises(UserError) as caught:
        load(str(file))
    assert message in str(caught.value)
    assert "mine.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"table": "low_shot"}, "--config: unknown 'table'; did you mean 'tables'?"),
        ({"tables": "lowshot"}, "--config tables: unknown 'lowshot'; did you mean 'low_shot'?"),
        ({"protocols": "umap"}, "--config protocols: unknown 'umap'; known: knn, linear_probe"),
        ({"seeds": 0}, "seeds"),
    ],
)
def test_a_wrong_config_is_named(tmp_path, change, words):
    file = write(tmp_path, tables=["low_shot", "extended"])
    with pytest.raises(UserError, match=re.escape(words)):
        load(file, **change)


def test_features_of_a_kind_have_a_file_of_their_own(tmp_path):
    protocols = {"last": {"protocol": "knn", "norm": False, "blocks": 3}}
    evaluate = [entry("mae_tiny", "knn knn_before_norm last")]
    found = load(write(tmp_path, protocols=protocols, evaluate=evaluate))
    endings = {}
    for name in ("knn", "knn_before_norm", "last"):
        kind = found.evaluation("mae_tiny", name).inputs()["train"]
        endings[name] = resolve.ending(kind)
        assert resolve.of_ending("train", endings[name]) == kind
    assert [*endings.values()] == ["", ".before_norm", ".before_norm.last_3"]


def test_augmentations_are_taken_apart_and_replaced():
    plain, minimal = (load_recipe(name, "tiny").view_settings() for name in ("ct_aug", "ct_min"))
    alone = load_recipe("ct_aug", "tiny", {"jitter": 0.0, "blur": 0.0, "solarize": 0.0})
    assert [view.gray for view in alone.view_settings()] == [0.2, 0.2]
    assert tuple(v.model_copy(update={"gray": 0.0}) for v in alone.view_settings()) == minimal
    changes = {"flip": 0.0, "blur": 0.0, "crop_scale": [0.3, 1.0]}
    changed = load_recipe("ct_aug", "tiny", changes).view_settings()
    assert [view.blur for view in plain] == [1.0, 0.1]
    for view, before in zip(changed, plain, strict=True):
        assert (view.flip, view.blur, view.crop_scale) == (0.0, 0.0, (0.3, 1.0))
        assert (view.jitter, view.solarize) == (before.jitter, before.solarize)


@pytest.mark.parametrize("name", sorted(path.stem for path in EXPERIMENTS.glob("*.yaml")))
def test_bundled_experiments_are_valid(name):
    assert bundled(name).evaluations


def test_seeds_of_one_run_and_of_one_entry(tmp_path):
    ct = {"recipe": "ct_min", "size": "tiny", "from": "head_min_tiny", "seeds": 1}
    asked = [entry("mae_tiny once", "knn"), entry("mae_tiny", "linear_probe", seeds=2)]
    runs = TINY["runs"] | {"once": ct}
    found = load(write(tmp_path, seeds=3, runs=runs, evaluate=asked))
    assert "mae_tiny-s2" in found.runs and "once-s1" not in found.runs
    assert found.runs["once"].source == "head_min_tiny"
    assert found.evaluations == (
        ("mae_tiny", "knn"), ("mae_tiny-s1", "knn"), ("mae_tiny-s2", "knn"), ("once", "knn"),
        ("mae_tiny", "linear_probe"), ("mae_tiny-s1", "linear_probe"),
    )  # fmt: skip
    assert len(load(write(tmp_path, runs=runs, evaluate=asked), seeds=1).evaluations) == 3


def test_a_variant_of_a_protocol_has_a_name_of_its_own(tmp_path):
    variant = {"probe_short": {"protocol": "linear_probe", "epochs": 30}}
    names = ["probe_short", "linear_probe", "linear_probe_concat", "throughput"]
    found = load(write(tmp_path, protocols=variant, evaluate=[entry("mae_tiny", " ".join(names))]))
    assert found.protocols == dict.fromkeys(names[:3], "linear_probe") | {"throughput": names[3]}
    short, own, concat, throughput = (found.evaluation("mae_tiny", name) for name in names)
    assert (short.epochs, own.epochs) == (30, 50) and concat.concat and not own.concat
    assert throughput.size == "tiny"


def test_rows_in_their_order_and_under_other_names(tmp_path):
    rows = ["ct_*", {"trainable_3": "ct_min_tiny", "start": "mae_*"}]
    shown = load(write(tmp_path, seeds=2, tables={"sensitivity": rows, "low_shot": None}))
    assert shown.rows("sensitivity") == [
        Row("tiny", "ct_min", ["ct_min_tiny", "ct_min_tiny-s1"]),
        Row("tiny", "ct_aug", ["ct_aug_tiny", "ct_aug_tiny-s1"]),
        Row("tiny", "trainable_3", ["ct_min_tiny", "ct_min_tiny-s1"]),
        Row("tiny", "start", ["mae_tiny", "mae_tiny-s1"]),
    ]
    assert [row.method for row in shown.rows("low_shot")] == ["mae", "ct_min", "ct_aug"]


# Figures of the runs themselves.
RUNS_ALONE = {"training_curves", "pipeline", "reconstructions", "neighbors_in_training"}


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ({"protocols": "umap"}, {"umap", "cluster_formation", *RUNS_ALONE}),
        ({"protocols": "fine_tune", "tables": "oracle,low_shot",
          "figures": ["umap", "label_efficiency"]},
         {"label_efficiency", "oracle"}),  # its full recipe is `fine_tune`
        ({"protocols": "color_histogram"}, {"color_histogram", *RUNS_ALONE}),
        ({"tables": "", "figures": "pipeline,"}, {"pipeline"}),
        ({"tables": None, "figures": []}, set()),
    ],
)  # fmt: skip
def test_only_what_the_asked_protocols_can_show(asked, shown):
    found = load("digits", **asked)
    assert {*pages.tables(found), *pages.figures(found)} == shown


def test_config_asks_for_less(tmp_path):
    file = write(tmp_path, tables=["low_shot", "extended"], figures=["umap", "pipeline"])
    less = load(file, tables="extended", figures=["pipeline"], protocols="knn", seeds=3)
    assert list(less.spec.tables) == ["extended"] and list(less.spec.figures) == ["pipeline"]
    runs = itertools.product(("mae_tiny", "ct_min_tiny", "ct_aug_tiny"), ("", "-s1", "-s2"))
    assert set(less.evaluations) == {(f"{run}{seed}", "knn") for run, seed in runs}


def test_lines_without_an_evaluation_that_is_asked_for_are_left_out(tmp_path):
    asked = [entry("mae_tiny ct_*", "knn"), entry("mae_tiny", "umap")]
    figures = {"umap": ["mae_tiny"], "training_curves": ["ct_*", "mae_tiny"], "pipeline": ["ct_*"]}
    file = write(tmp_path, evaluate=asked, tables=["low_shot"], figures=figures)
    less = load(file, protocols="umap")
    assert [row.method for row in less.rows("training_curves")] == ["mae"]
    assert less.figures == ["umap", "training_curves"]
    wrong = write(tmp_path, evaluate=asked, figures={"umap": ["ma_tiny"]})
    with pytest.raises(UserError, match="no evaluated run is named 'ma_tiny'"):
        load(wrong, protocols="umap")


def test_a_line_of_a_run_whose_name_has_a_dot_is_left_out(tmp_path):
    """It is a fine-tuning's, and nobody asks for that."""
    asked = [
        {"runs": ["mae_0.75"], "protocols": ["fine_tune", "knn"]},
        {"runs": ["mae_0.75.fine_tune.seed0"], "protocols": ["knn"]},
    ]
    runs = {"mae_0.75": TINY["runs"]["mae_tiny"]}
    rows = {"low_shot": ["mae_0.75", "mae_0.75.fine_tune.seed0"]}
    less = load(write(tmp_path, runs=runs, evaluate=asked, tables=rows), protocols="knn")
    assert [row.runs for row in less.rows("low_shot")] == [("mae_0.75",)]


def test_a_report_without_tables_and_figures_lists_what_is_evaluated(tmp_path):
    found = load(write(tmp_path, storage=str(tmp_path)))
    listed = tmp_path / "datasets.csv"
    assert pages.report_inputs(found) == [listed] and pages.report_config(found).datasets == listed
    evaluated = {f"{run}/{name}" for run, name in found.evaluations}
    reads = pages.PAGES["datasets"].inputs(found, "datasets")
    assert {f"{path.parent.name}/{path.stem}" for path in reads} == evaluated
    shown = load(write(tmp_path, tables=["low_shot"]))
    assert shown.root / "datasets.csv" not in pages.report_inputs(shown)


def test_errors_of_claims_are_of_the_split_that_was_tested(tmp_path):
    splits = {name: {"images": f"/images/{name}"} for name in ("train", "val", "test")}
    tested = {name: {"test_split": "test"} for name in ("knn", "linear_probe")}
    file = write(
        tmp_path, datasets={"mine": {"splits": splits}}, protocols=tested, tables=["low_shot"]
    )
    found = load(file)
    index = found.shards("mine", "test") / "index.json"
    assert pages.claims_config(found, "claims").images["val"] == index.absolute()
    assert pages.report_config(found).tested == index.absolute()


def test_a_figure_of_one_seed_reads_the_first_only(tmp_path):
    figures = ["umap", "training_curves", "knn_compute"]
    asked = [entry("mae_tiny ct_*", "knn umap clustering")]
    found = load(write(tmp_path, seeds=2, evaluate=asked, figures=figures))
    reads = {name: pages.inputs_of_shown(found, name, figure=True) for name in figures}
    other = [name for name, paths in reads.items() if any("-s1/" in str(path) for path in paths)]
    assert other == ["knn_compute"]
    assert {path.stem for path in reads["umap"]} == {"umap", "clustering", "index"}


def test_runs_that_nothing_evaluates_are_trained(tmp_path):
    found = load(write(tmp_path, evaluate=[]))
    stamps = [found.root / f"runs/{run}/done" for run in found.runs]
    assert stamps and pages.report_inputs(found) == stamps


def test_what_figures_count_and_the_reports_commands_name(tmp_path):
    """Classes of the images that are shown, labels of those that are learnt from."""
    asked = [{"runs": ["mae_tiny", "ct_*"], "protocols": ["low_shot", "umap"]}]
    more = {"figures": ["umap", "label_efficiency"], "compare_with_paper": False}
    found = load(write(tmp_path, evaluate=asked, **more))
    shown = {name: pages.shown_config(found, name, figure=True) for name in found.figures}
    splits = {name: one.classes.parent.name for name, one in shown.items() if one.classes}
    assert splits == {"umap": "val", "label_efficiency": "train"}
    report = pages.report_config(found)
    assert report.run is not None and report.run.name == "ct_aug_tiny"
    assert report.folder == Path("/images/train")


def test_fine_tunings_are_runs_that_only_their_full_name_names(tmp_path):
    asked = [entry("mae_*", "fine_tune knn"), entry("mae_tiny.fine_tune.seed2", "knn")]
    asked.append(entry("mae_tiny", "fine_tune_low_shot"))
    protocols = {"fine_tune_low_shot": {"shots": [1, 2], "splits": 2}}
    found = load(write(tmp_path, evaluate=asked, protocols=protocols, storage="r"))
    tuned = [name for name, run in found.runs.items() if run.scored_by]
    assert tuned == [
        *(f"mae_tiny.fine_tune.seed{seed}" for seed in range(3)),
        *(f"mae_tiny.fine_tune_low_shot.{n}shot-split{s}" for n in (1, 2) for s in (1, 2)),
    ]
    last = found.runs["mae_tiny.fine_tune.seed2"]
    assert (last.stage, last.source, last.seed, last.size) == ("fine_tune", "mae_tiny", 2, "tiny")
    few = found.runs["mae_tiny.fine_tune_low_shot.2shot-split1"].settings.model_dump()
    assert (few["shots"], few["split"]) == (2, 1)
    # `mae_*` is the file's run alone.
    assert {run for run, name in found.evaluations if name == "knn"} == {"mae_tiny", last.name}
    told, root = run_config(found, last.name), found.root.absolute()
    assert (told.source, told.seed) == (root / "runs/mae_tiny", 2)
    assert (told.test, told.resize) == (root / "shards/mine/val", DATASET.get("resize"))
    assert found.shards("mine", "val") / "index.json" in resolve.inputs_of_run(found, last.name)
    assert run_config(found, "mae_tiny").test is None
    reads = set(map(str, resolve.inputs_of_evaluation(found, "mae_tiny", "fine_tune")))
    assert reads >= {f"r/runs/{name}/run.json" for name in tuned[:3]}
    scored = resolve.evaluation_config(found, "mae_tiny", "fine_tune")
    assert [path.name for path in scored.paths("trained")] == tuned[:3]


def test_a_job_that_the_file_does_not_list_is_told_as_well(tmp_path, monkeypatch):
    """Any file below the results folder may be asked for."""
    monkeypatch.chdir(tmp_path)
    found, pair = load(write(tmp_path, storage="r")), ("head_min_tiny", "knn")
    assert pair not in found.asked
    config = Path("r/evaluations/head_min_tiny/knn.yaml")
    wildcards = dict(zip(("run", "evaluation"), pair, strict=True))
    start.prepare(found, [start.PendingJob("knn", wildcards, [], config, False)])
    told = resolve.evaluation_config(found, *pair)
    assert EvaluationConfig.read(config).digest == told.digest


def test_fine_tunings_are_trained_on_what_is_evaluated(tmp_path):
    """Not on what the encoder saw before, and on the split that the protocol names."""
    splits = DATASET["splits"]
    mine = {"splits": splits | {"small": {"images": "/images/small"}}}
    datasets = {"mine": mine, "big": DATASET | {"resize": 20}}
    runs = {"mae_tiny": {"recipe": "mae", "size": "tiny", "dataset": "big"}}
    asked = [entry("mae_tiny", "fine_tune fine_tune_low_shot")]
    chosen = {"protocols": {"fine_tune": {"train_split": "small"}}, "evaluate": asked}
    found = load(write(tmp_path, datasets=datasets, runs=runs, storage="r", **chosen))
    for name, split in (("fine_tune.seed0", "small"), ("fine_tune_low_shot.1shot-split1", "train")):
        told = run_config(found, f"mae_tiny.{name}")
        assert told.shards == Path(f"r/shards/mine/{split}").absolute()
        assert Path(f"r/shards/mine/{split}/index.json") in resolve.inputs_of_run(found, told.run)
        # Its epochs are scored as its evaluation asks.
        asked = resolve.evaluation_config(found, "mae_tiny", name.split(".")[0])
        assert told.resize == asked.resize == 20
    assert run_config(found, "mae_tiny").shards == Path("r/shards/big/train").absolute()


@pytest.mark.parametrize(
    ("name", "size", "count"), [("digits_controls", "tiny", 12), ("cifar10_controls", "tiny8", 4)]
)
def test_controls_take_the_operations_of_tuning(name, size, count):
    """As nearly as whole epochs can."""
    experiment = bundled(name)

    def operations(run: str) -> float:
        told = experiment.runs[run]
        assert isinstance(told.settings, Training)
        total = told.settings.flops_per_image(told.encoder) * told.settings.epochs
        return total + (operations(told.source) if told.source else 0)

    asked = operations(f"ct_aug_{size}")
    controls = [run for run in experiment.runs if run.startswith(("mae_long", "scratch"))]
    assert len(controls) == count  # four a seed
    for run in controls:
        epochs = experiment.runs[run].settings.epochs
        assert epochs == round(asked / (operations(run) / epochs)), run


@pytest.mark.parametrize("name", ["digits_law", "cifar10_law"])
def test_the_law_differs_in_its_lookup_alone(name):
    runs = bundled(name).runs
    for augmentation in ("min", "aug"):
        tuned = [run for n, run in runs.items() if n.startswith(f"ct_{augmentation}")]
        kinds = [(run.settings.head.lookup, run.settings.head.oracle_right) for run in tuned]
        assert kinds == [
            ("topk", 1.0), ("none", 1.0), *[("oracle", right) for right in (0.25, 0.5, 0.75, 1.0)]
        ]  # fmt: skip
        same = {"lookup": "topk", "oracle_right": 1.0, "stop_gradient": True}
        for run in tuned:
            head = run.settings.head.model_copy(update=same)
            assert run.settings.model_copy(update={"head": head}) == tuned[0].settings
            assert run.source == tuned[0].source


@pytest.mark.parametrize("data, same", [
    ("digits", "digits_law"), ("cifar10", "cifar10_law"), ("tiny_imagenet", "tiny_imagenet"),
])  # fmt: skip
def test_the_clean_control_changes_the_lookup_alone(data, same):
    """With three seeds of all; what was published before is asked for with the same settings."""
    runs, before = bundled(f"{data}_no_lookup").runs, bundled(same).runs
    for augmentation in ("min", "aug"):
        ends = ("", "-s1", "-s2")
        own = [n for n in runs if n.startswith(f"ct_{augmentation}") and seedless(n) == n]
        whole, without, stopped = own
        for one, end in itertools.product((without, stopped), ends):
            lookup, control = (runs[name + end].settings for name in (whole, one))
            assert runs[one + end].source == runs[whole + end].source
            changed = {"lookup": "topk", "stop_gradient": True}
            again = control.head.model_copy(update=changed)
            assert control.model_copy(update={"head": again}) == lookup
            assert control.head.lookup == "none"
            assert control.head.stop_gradient == (one == stopped)
    known = set(runs) & set(before)
    assert len(known) >= 5 and all(runs[name].settings == before[name].settings for name in known)


def test_tiny_imagenet_differs_from_cifar10_by_its_images_alone():
    """As many patches, the same views in tuning, and neighbours left out beside them."""
    tiny, cifar = bundled("tiny_imagenet"), bundled("cifar10")
    ours, theirs = tiny.runs["ct_aug_micro8"], cifar.runs["ct_aug_micro"]
    assert ours.encoder.patches == theirs.encoder.patches == 64
    assert ours.settings.view_settings() == theirs.settings.view_settings()
    for aug in ("min", "aug"):
        whole, without = (tiny.runs[f"ct_{aug}_micro8{end}"] for end in ("", "_no_lookup"))
        assert without.settings.head.lookup == "none" and without.source == whole.source
        changed = {"head": whole.settings.head}
        assert without.settings.model_copy(update=changed) == whole.settings


def test_config_names_the_results_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MAECT_SCRATCH", str(tmp_path / "scratch"))
    lists = {"low_shot": {"subsets": "$MAECT_SCRATCH/m"}}
    file = write(tmp_path, storage="elsewhere", protocols=lists)
    found = load(file)
    assert found.root == Path("elsewhere")
    assert found.evaluation("mae_tiny", "low_shot").subsets == str(tmp_path / "scratch/m")
    assert load(file, storage="$MAECT_SCRATCH/a").root == tmp_path / "scratch/a"
    for storage, fault in (("a b", "has ' '"), ("$MAECT_UNSET/a", "MAECT_UNSET .* is not set")):
        with pytest.raises(UserError, match=f"storage: .*{fault}"):
            load(file, storage=storage)
    public = {"recipe": "mae", "size": "base", "public": {"weights": "w.pth", "layout": "mae"}}
    both = write(tmp_path, runs={"mae_base": public}, evaluate=[entry("*", "knn")])
    assert load(both, storage="b", starting_from="public").root == Path("b-public")


def test_config_says_where_splits_are(tmp_path):
    """The file that docs/cluster.md writes, for the paper; then what such a file may not say."""
    page = (ROOT / "docs/cluster.md").read_text(encoding="utf-8")
    block = re.search(r"^cat > tars\.yaml <<'END'\n(.*?)^END$", page, flags=re.M | re.S)
    assert block is not None
    tars = tmp_path / "tars.yaml"
    tars.write_text(block[1])
    experiments = bundled("paper"), load("paper", splits=str(tars))
    plain, changed = (one.datasets["imagenet"].splits for one in experiments)
    kinds = [changed[name].kind for name in ("train", "val")]
    assert kinds == ["imagenet_train_tar", "imagenet_val"]
    assert changed["train"].shards == plain["train"].shards
    for name in {*plain} - {"train", "val"}:
        assert changed[name] == plain[name]
    for text, said in (
        ("imagenett: {train: {images: a}}", "unknown 'imagenett'; did you mean 'imagenet'"),
        ("imagenet: {trian: {images: a}}", "splits: unknown 'trian'; did you mean 'train'"),
        ("imagenet: {train: {image: a}}", "paper.yaml with .*tars.yaml: .*image"),
        ("[imagenet]", "write DATASET"),
    ):
        tars.write_text(text)
        with pytest.raises(UserError, match=said):
            load("paper", splits=str(tars))
    with pytest.raises(UserError, match="no such file of splits"):
        load("paper", splits=str(tmp_path / "gone.yaml"))


def test_an_entry_names_the_data_sets_that_it_evaluates(tmp_path):
    """Those of the first keep names and contents; another's read its features and shards."""
    datasets = {"mine": DATASET, "other": DATASET | {"resize": 20}, "unused": DATASET}
    asked = ["knn", "linear_probe", "fine_tune", "clustering", "retrieval"]
    shown = {"datasets": datasets, "tables": ["clustering"]}
    alone = entry("mae_tiny", " ".join(asked))
    before = load(write(tmp_path, **shown, evaluate=[alone]))
    both = alone | {"datasets": ["mine", "other"]}
    experiment = load(write(tmp_path, **shown, evaluate=[both]))
    of_other = tuple((run, f"{name}.on.other") for run, name in before.evaluations)
    assert experiment.evaluations == (*before.evaluations, *of_other)
    for pair in before.evaluations:
        told, same = (resolve.evaluation_config(e, *pair) for e in (before, experiment))
        path = experiment.root / "evaluations" / pair[0] / f"{pair[1]}.yaml"
        assert told == same and told.text(path) == same.text(path)
    root = experiment.root.absolute()
    knn = resolve.evaluation_config(experiment, "mae_tiny", "knn.on.other")
    assert knn.inputs["train"] == root / "features/mae_tiny/other-train.safetensors"
    assert (knn.resize, knn.protocol) == (20, "knn")
    left = resolve.evaluation_config(experiment, "mae_tiny", "retrieval.on.other").inputs
    assert root / "evaluations/mae_tiny/clustering.on.other.safetensors" in left.values()
    told_run = run_config(experiment, "mae_tiny.fine_tune.on.other.seed0")
    assert told_run.shards == root / "shards/other/train" and told_run.resize == 20
    assert told_run.test == root / "shards/other/val"
    tuned = "mae_tiny.fine_tune.seed0"
    assert run_config(experiment, tuned) == run_config(before, tuned)
    assert "datasets" not in [path.stem for path, _ in pages.pages(before)]
    (page,) = [config for path, config in pages.pages(experiment) if path.stem == "datasets"]
    assert page.datasets == {"mine": "", "other": ".on.other"} and page.runs == ["mae_tiny"]
    assert page.measures["fine_tune"].keys() == {"fine_tune", "fine_tune_held_out"}
    assert [*page.measures] == asked


def test_editors_accept_all_experiments_and_no_misspelt_key(tmp_path, capsys):
    """By the JSON schema that `maect schema` prints."""
    jsonschema = pytest.importorskip("jsonschema")
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    files = sorted(EXPERIMENTS.glob("*.yaml"))
    for file in files:
        assert not list(check.iter_errors(read_yaml(file))), file
    told = read_yaml(EXPERIMENTS / "digits.yaml")
    for path, key, value in (
        (("runs", "mae_tiny"), "sise", "tiny"),
        (("datasets", "digits"), "kinds", "digits"),
        ((), "tables", ["low_shots"]),
        (("online_evaluation",), "every_epochs", "five"),
    ):
        wrong = copy.deepcopy(told)
        functools.reduce(dict.__getitem__, path, wrong)[key] = value
        assert list(check.iter_errors(wrong)), key


def test_how_a_run_is_computed_stands_beside_its_settings(tmp_path):
    """Written under `set:` or `computing:`; also of the trainings of an evaluation."""
    one = {"recipe": "mae", "size": "tiny"}
    runs = {
        "plain": one,
        "within": one | {"set": {"zero_stage": 2}},
        "beside": one | {"computing": {"zero_stage": 2, "accumulation": 2}},
    }
    told = {"protocols": {"fine_tune": {"compile": True}}, "tables": []}
    found = load(write(tmp_path, runs=runs, evaluate=[entry("plain", "fine_tune")], **told))
    plain, within, beside = (resolve.run_config(found, name) for name in runs)
    assert plain.digest == within.digest == beside.digest
    assert (within.computing.zero_stage, beside.computing.accumulation) == (2, 2)
    tuned = next(run for run in found.runs.values() if run.scored_by)
    assert tuned.computing.compile and not found.runs["plain"].computing.compile


def test_a_wildcard_is_one_of_the_names():
    """Names that begin with others, or hold what has a meaning in an expression, and no others."""
    for seed in range(200):
        draw = random.Random(seed)
        names = ["".join(draw.choices("ab._-{", k=draw.randint(1, 5))) for _ in range(seed % 12)]
        others = ["".join(draw.choices("ab._-{", k=draw.randint(0, 5))) for _ in range(100)]
        pattern = re.compile(one_of(names))
        for word in [*names, *others]:
            assert (pattern.fullmatch(word) is not None) == (word in names), (word, names)
    assert one_of(["mae_tiny", "mae_base", "x"]) == "mae_(tiny|base)|x"
