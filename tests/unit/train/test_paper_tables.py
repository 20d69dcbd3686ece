"""The recipes are the paper's tables 7, 8 and 10, cell by cell, but for deviations listed here."""

import csv
from pathlib import Path

import pytest

import maect.paper
from maect import recipes
from maect.core.errors import UserError
from maect.core.settings import digest
from maect.evaluate import evaluation_names, load_evaluation
from maect.evaluate.protocols.encoders import Accuracy
from maect.recipes import load_encoder, recipe_names, sizes
from maect.recipes.__main__ import table_of
from maect.report.registry import TABLES
from maect.stages import load_recipe
from maect.stages.tune import Tune

RESULTS = Path(maect.paper.__file__).parent
PAPER = RESULTS / "hyperparameters"
SIZES = {"base": ["base"], "large": ["large"], "huge": ["huge", "huge14"]}
LETTERS = {"base": "B", "large": "L", "huge": "H"}

# As the paper prints what our settings say. Optimizer and schedule are the same for all recipes:
# test_world_size and test_parameters hold the engine to AdamW and to warm-up, then cosine.
CELLS = {
    "Epochs": lambda s: s.epochs,
    "Batch size": lambda s: s.batch_size,
    "Optimizer": lambda s: "AdamW",
    "Optimizer: Momentum": lambda s: f"β1={s.beta1},β2={s.beta2}",
    "Learning rate schedule": lambda s: "warmup → cosine",
    "Learning rate schedule: Warmup fraction": lambda s: f"{100 * s.warmup_fraction:.4g} %",
    "Encoder: Learning rate": lambda s: s.base_lr,
    "Encoder: Layer-wise lr decay": lambda s: s.layer_decay,
    "Encoder: Weight decay": lambda s: s.weight_decay,
    "Encoder: Frozen layers": lambda s: s.frozen_blocks,
    "Encoder: EMA": lambda s: s.encoder_ema,
    "NNCLR head: Learning rate": lambda s: s.head.head_lr,
    "NNCLR head: Weight decay": lambda s: s.head.head_weight_decay,
    "NNCLR head: Temperature τ": lambda s: s.head.temperature,
    "NNCLR head: topk-NN k": lambda s: s.head.topk,
    "NNCLR head: Projector EMA": lambda s: s.head.projector_ema,
}
FINE_TUNED = {
    "Optimizer: Momentum": lambda s: f"β1={s.beta1}, β2={s.beta2}",
    "Optimizer: Weight decay": lambda s: s.weight_decay,
    "Learning rate: Peak": lambda s: s.base_lr,
    "Learning rate: Schedule": lambda s: "warmup → cosine",
    "Learning rate: Warmup epochs": lambda s: s.warmup_epochs,
    "Layer-wise lr decay": lambda s: s.layer_decay,
    "DropPath": lambda s: s.drop_path,
    "Label smoothing": lambda s: s.label_smoothing,
    "Augmentations: RandomResizedCrop": lambda s: "224²",
    "Augmentations: RandomHorizontalFlip": lambda s: f"p={s.flip}",
    "Augmentations: num_layers": lambda s: s.randaugment_layers,
    "Augmentations: magnitude": lambda s: s.randaugment_magnitude,
}
FINE_TUNED |= {name: CELLS[name] for name in ("Epochs", "Batch size", "Optimizer")}
# (recipe, size, cell): what the recipe has instead. All follow the authors' published settings.
DEVIATIONS = {
    ("ct_aug", "huge", "NNCLR head: topk-NN k"): 20,
    ("ct_aug", "huge14", "NNCLR head: topk-NN k"): 20,
}


def table(name: str) -> dict[tuple[str, str], str]:
    """(setting, size) to the printed cell; `100 (B), 50 (L/H)` is one of several sizes."""
    with open(PAPER / f"{name}.csv", encoding="utf-8", newline="") as file:
        rows = {row.pop("setting"): row for row in csv.DictReader(file)}
    return {
        (setting, size): of_size(row["value"], LETTERS[size]) if "value" in row else row[size]
        for setting, row in rows.items()
        for size in SIZES
    }


def of_size(cell: str, letter: str) -> str:
    for part in cell.split("), "):
        value, _, sizes = part.rstrip(")").partition(" (")
        if letter in sizes.split("/"):
            return value
    return cell


def same(printed: str, ours: object) -> bool:
    try:
        return float(printed) == ours
    except ValueError:
        return printed == ours


@pytest.mark.parametrize("name", ["ct_min", "ct_aug", "fine_tune_10pct"])
def test_every_cell(name):
    fine_tuned = name == "fine_tune_10pct"
    cells, printed, different = FINE_TUNED if fine_tuned else CELLS, table(name), {}
    assert {setting for setting, _ in printed} == cells.keys()
    for (setting, column), value in printed.items():
        for size in SIZES[column]:
            recipe = fine_tuning(name, size) if fine_tuned else load_recipe(name, size)
            ours = cells[setting](recipe)
            if not same(value, ours):
                different[name, size, setting] = ours
    assert different == {key: value for key, value in DEVIATIONS.items() if key[0] == name}


def fine_tuning(name: str, size: str) -> Accuracy:
    protocol, settings = load_evaluation(name, size)
    assert protocol == "accuracy" and isinstance(settings, Accuracy)
    return settings


@pytest.mark.parametrize("size", ["base", "large", "huge", "huge14"])
def test_what_table_10_does_not_print(size):
    settings = fine_tuning("fine_tune_10pct", size)
    assert not (settings.mixes or settings.random_erasing or settings.frozen_blocks)
    assert (settings.fraction, settings.seeds, settings.pooling) == (0.1, 1, "encoder")
    # MIM-Refiner, finetune_10p/template_tracked_large16_ijepa.yaml: `best_checkpoint_callback`,
    # `every_n_epochs: 1`, `metric_key: accuracy1/test/main`
    assert settings.epoch == "best"


@pytest.fixture
def add_size(monkeypatch):
    """Add an entry to encoders.yaml."""

    def add(name, entry):
        read, entries = recipes._read, recipes._read("encoders") | {name: entry}
        monkeypatch.setattr(recipes, "_read", lambda n: entries if n == "encoders" else read(n))

    return add


def test_one_entry_is_a_new_encoder_size(add_size):
    """What it says itself, and everything else, all recipes included, from what it is like."""
    add_size("wide", {"like": "large", "width": 1536})
    assert "wide" in sizes()
    assert load_encoder("wide") == load_encoder("large").model_copy(update={"width": 1536})
    for name in recipe_names():
        assert load_recipe(name, "wide") == load_recipe(name, "large")
    for name in set(evaluation_names()) - {"throughput"}:
        assert load_evaluation(name, "wide") == load_evaluation(name, "large")
    assert load_evaluation("throughput", "wide")[1].size == "wide"


def test_an_encoder_with_registers_is_one_entry(add_size):
    add_size("reg", {"like": "large", "registers": 4})
    large, reg = load_encoder("large"), load_encoder("reg")
    assert (reg.prefix_tokens, reg.patches) == (5, large.patches)
    # What had no registers before has the identity that it had then.
    assert digest(large) != digest(reg)
    assert reg.model_dump() == large.model_dump() | {"registers": 4}
    assert "registers" not in large.header
    mae = load_recipe("mae", "reg")
    assert mae.flops_per_image(large) < mae.flops_per_image(reg) < 1.2 * mae.flops_per_image(large)


def test_a_recipe_prints_beside_the_papers_table():
    for name, key, expected in (
        ("ct_min", "head.temperature", ["0.15", "0.2", "0.3", "0.3"]),
        ("fine_tune", "drop_path", ["0.1", "0.2", "0.3", "0.3"]),
    ):
        rows = {row[0]: row[1:] for row in map(str.split, table_of(name).splitlines())}
        columns = [rows[name].index(size) for size in ("base", "large", "huge", "huge14")]
        assert [rows[key][column] for column in columns] == expected
    assert table_of("refine", ["large", "huge14"]).split()[:3] == ["refine", "large", "huge14"]
    with pytest.raises(UserError, match="unknown recipe 'ct_mni'; did you mean 'ct_min'"):
        table_of("ct_mni")


def override(cell: str) -> dict:
    """A column of the sensitivity table as overrides of the recipe of ViT-L."""
    key, _, text = cell.rpartition("_")
    value = float(text) if "." in text else int(text)
    if key == "trainable":
        return {"frozen_blocks": load_encoder("large").depth - value}
    if key in ("topk", "temperature", "projector_ema"):
        return {"head": {key: value}}
    return {key: value}


def test_every_cell_of_the_sensitivity_table_is_an_override():
    with open(RESULTS / "sensitivity.csv", encoding="utf-8", newline="") as file:
        cells = [row["method"] for row in csv.DictReader(file)]
    default = load_recipe("ct_min", "large", {"head": {"topk": 1}})
    defaults = set()
    for cell in cells:
        changes = override(cell)
        merged = changes | {"head": {"topk": 1} | changes.get("head", {})}
        stage = load_recipe("ct_min", "large", merged)
        assert isinstance(stage, Tune)
        if stage == default:
            defaults.add(cell)
    # What the paper prints in gray, and nothing else, is the default.
    assert defaults == {
        "epochs_20", "trainable_12", "encoder_ema_0.9999", "temperature_0.2", "topk_1",
        "projector_ema_0.99",
    }  # fmt: skip


def test_the_checksum_of_a_heads_file_does_not_hang_on_how_classes_are_divided():
    assert load_recipe("head_aug", "tiny").head.header == (
        '{"queue_size":1024,"projector_hidden":256,"predictor_hidden":512,"embedding":64,'
        '"temperature":0.15,"topk":1,"projector_ema":0.0,"lookup":"topk","head_lr":0.001,'
        '"head_weight_decay":0.00001}'
    )


@pytest.mark.parametrize("size", ["tiny", "small", "micro", "base", "large", "huge", "huge14"])
def test_each_row_of_table_16_adds_its_component(size):
    rows = TABLES["oracle"].evaluations
    components = {
        "label_smoothing": 0.1, "mixup": 0.8, "cutmix": 1.0, "random_erasing": 0.25,
        "randaugment_layers": 2,
    }  # fmt: skip
    names = [
        rows[row][0]
        for row in (
            "crop_flip", "label_smoothing", "mixup", "cutmix", "random_erasing", "randaugment",
        )
    ]  # fmt: skip
    # tex 1032 prints 85.8 and tex 963 85.37 for "our MAE ViT-L/16" by one recipe: two measurements.
    assert fine_tuning(names[-1], size) == fine_tuning("fine_tune", size).model_copy(
        update={"seeds": 1}
    )
    before = fine_tuning(names[0], size).model_dump()
    assert not any(before[key] for key in components)
    for name, (key, value) in zip(names[1:], components.items(), strict=True):
        now = fine_tuning(name, size).model_dump()
        changed = {k: v for k, v in now.items() if v != before[k] and k != "seeds"}
        assert changed == {key: value}
        before = now
