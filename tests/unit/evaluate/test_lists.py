"""Lists of labelled images are part of what identifies a result, by their content."""

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from maect.core.errors import UserError
from maect.data.index import open_index
from maect.evaluate.protocols.encoders import Accuracy
from maect.evaluate.protocols.stored_features import LowShot
from maect.experiment import resolve
from maect.experiment.load import Experiment, load
from maect.experiment.start import missing_lists
from maect.stages.fine_tune import FineTune
from maect.stages.run import RunConfig

from .conftest import given, store

NAMES = ("msn_1shot_split1.txt", "msn_1shot_split2.txt", "simclr_10percent.txt")
EVALUATIONS = ("low_shot", "fine_tune_low_shot", "fine_tune_10pct")
RUNS = (
    "mae_tiny.fine_tune_low_shot.1shot-split1",
    "mae_tiny.fine_tune_low_shot.1shot-split2",
    "mae_tiny.fine_tune_10pct.seed0",
)


@pytest.fixture
def lists(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / "lists" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "lists" / name).write_text(f"an_image_of_{name}\n")
    return tmp_path / "lists"


def experiment(tmp_path: Path, lists: Path) -> Experiment:
    few = {"subsets": str(lists), "shots": [1], "splits": 2}
    file = tmp_path / "few.yaml"
    splits = {"train": {"images": "/images/train"}, "val": {"images": "/images/val"}}
    values = {
        "storage": str(tmp_path / "results"),
        "datasets": {"mine": {"splits": splits}},
        "runs": {"mae_tiny": {"recipe": "mae", "size": "tiny"}},
        "evaluate": [{"runs": ["mae_tiny"], "protocols": list(EVALUATIONS)}],
        "protocols": {
            "low_shot": few,
            "fine_tune_low_shot": few,
            "fine_tune_10pct": {"subsets": str(lists)},
        },
    }
    file.write_text(yaml.dump(values))
    return load(str(file))


def identities(found: Experiment) -> dict[str, str]:
    evaluations = {n: resolve.evaluation_config(found, "mae_tiny", n).digest for n in EVALUATIONS}
    return evaluations | {name: resolve.run_config(found, name).digest for name in RUNS}


def changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return [name for name in before if before[name] != after[name]]


def test_an_edited_list_is_another_evaluation_and_training(tmp_path, lists):
    before = identities(experiment(tmp_path, lists))
    assert identities(experiment(tmp_path, lists)) == before
    with (lists / NAMES[1]).open("a") as file:
        file.write("another\n")
    after = identities(experiment(tmp_path, lists))
    assert changed(before, after) == ["low_shot", "fine_tune_low_shot", RUNS[1]]
    (lists / NAMES[2]).write_text("another\n")
    assert changed(after, identities(experiment(tmp_path, lists))) == ["fine_tune_10pct", RUNS[2]]


def test_the_same_lists_in_another_folder_make_nothing_again(tmp_path, lists):
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(lists, elsewhere)
    first, second = experiment(tmp_path, lists), experiment(tmp_path, elsewhere)
    assert identities(second) == identities(first)
    for pair in itertools.product(["mae_tiny"], EVALUATIONS):
        made = first.evaluation(*pair).model_dump(mode="json")
        assert second.evaluation(*pair).matches_record(made)
        assert not second.evaluation(*pair).matches_record(made | {"lists_sha256": {}})
        assert not second.evaluation(*pair).matches_record(made | {"subsets": None})
    for name in RUNS:
        asked, now = (resolve.run_config(each, name) for each in (first, second))
        assert now.fingerprint("data", {}) == asked.fingerprint("data", {})
        assert now.settings.matches_record(asked.settings.model_dump(mode="json"))
    assert LowShot(subsets="a").identifying() == LowShot(subsets="b").identifying() != {}


def test_a_job_refuses_lists_that_it_was_not_prepared_with(tmp_path, lists, images, job, rank):
    """Edited while it waited; or, of settings without checksums, not the official ones."""
    found = experiment(tmp_path, lists)
    resolve.run_config(found, RUNS[1]).write(tmp_path / "config.yaml")
    waiting = RunConfig.read(tmp_path / "config.yaml").settings
    scored = found.evaluation("mae_tiny", "low_shot")
    assert isinstance(waiting, FineTune) and list(waiting.lists_sha256) == [NAMES[1]]
    assert isinstance(scored, LowShot) and list(scored.lists_sha256) == list(NAMES[:2])
    features = store(tmp_path / "f.safetensors", np.eye(2, 4), [0, 1], ["a/one", "b/two"])
    split = open_index(images / "shards" / "train")

    def refused(message: str, *each: FineTune | LowShot) -> None:
        for settings in each:
            with pytest.raises(UserError, match=message):
                if isinstance(settings, LowShot):
                    settings.evaluate(rank, given(job, train=features, test=features))
                else:
                    settings.training_images(split)

    refused(r"lacks 1 listed images", waiting, scored)
    (lists / NAMES[1]).write_text("another\n")
    bare = {"subsets": str(lists), "shots": (1,), "splits": 2}
    refused(r"split2\.txt: not the list that this job was prepared with", waiting, scored)
    refused(r"split1\.txt: not the list", FineTune(subsets=str(lists), shots=1), LowShot(**bare))


def test_lists_that_nobody_reads_do_not_count(lists):
    assert FineTune(subsets=str(lists)).lists == Accuracy(subsets=str(lists)).lists == []
    assert LowShot().lists == FineTune(fraction=0.1).lists == []
    assert LowShot(shots=(), fractions=(1.0,), subsets=str(lists)).lists == []


def test_a_list_that_is_not_there_is_named_before_anything_is_queued(tmp_path, lists):
    pairs = [("mae_tiny", name) for name in EVALUATIONS]
    assert missing_lists(experiment(tmp_path, lists), pairs) == []
    (lists / NAMES[1]).unlink()
    (said,) = missing_lists(experiment(tmp_path, lists), pairs)
    assert said.endswith(f"no {NAMES[1]} in {lists}")  # where there are own lists, no others
    for name in NAMES:
        (lists / name).unlink(missing_ok=True)
    (said,) = missing_lists(experiment(tmp_path, lists), pairs)
    assert f"no {NAMES[0]} in {lists}; `maect retrieve low_shot_lists {lists}` brings" in said
    (said,) = missing_lists(experiment(tmp_path, tmp_path / "gone"), pairs)
    assert f"no low-shot lists in {tmp_path}/gone; `maect retrieve" in said
