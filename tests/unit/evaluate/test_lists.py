"""Lists of labelled images are part of what identifies a result, by their content."""

from pathlib import Path

import pytest
import yaml

from maect.core.errors import UserError
from maect.core.settings import digest
from maect.evaluate.accuracy import Accuracy
from maect.evaluate.low_shot import LowShot
from maect.experiment import resolve
from maect.experiment.load import Experiment, load
from maect.experiment.start import missing_lists
from maect.recipes.few_labels import OFFICIAL
from maect.stages.fine_tune import FineTune
from maect.stages.run import RunConfig

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


def test_an_edited_list_is_another_evaluation_and_training(tmp_path: Path, lists: Path) -> None:
    before = identities(experiment(tmp_path, lists))
    assert identities(experiment(tmp_path, lists)) == before
    with (lists / NAMES[1]).open("a") as file:
        file.write("another\n")
    after = identities(experiment(tmp_path, lists))
    assert changed(before, after) == ["low_shot", "fine_tune_low_shot", RUNS[1]]
    (lists / NAMES[2]).write_text("another\n")
    assert changed(after, identities(experiment(tmp_path, lists))) == ["fine_tune_10pct", RUNS[2]]


def test_official_lists_are_in_no_digest_as_they_were_in_none_before(
    lists: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for unknown in (
        FineTune(shots=1, subsets=str(lists)),
        LowShot(shots=(1,), splits=1, subsets=str(lists)),
    ):
        known = unknown.read_lists()
        assert digest(known) != digest(unknown)
        with monkeypatch.context() as official:
            official.setitem(OFFICIAL, NAMES[0], known.lists_sha256[NAMES[0]])
            assert digest(known) == digest(unknown)
            before, now = (each.model_dump(mode="json") for each in (unknown, known))
            assert before != now and known.decisive(before) == known.decisive(now)


def test_a_job_refuses_lists_that_were_edited_while_it_waited(tmp_path: Path, lists: Path) -> None:
    found = experiment(tmp_path, lists)
    resolve.run_config(found, RUNS[1]).write(tmp_path / "config.yaml")
    waiting = RunConfig.read(tmp_path / "config.yaml").settings
    assert isinstance(waiting, FineTune) and list(waiting.lists_sha256) == [NAMES[1]]
    scored = found.evaluation("mae_tiny", "low_shot")
    assert isinstance(scored, LowShot) and list(scored.lists_sha256) == list(NAMES[:2])
    waiting.check_lists()
    scored.check_lists()
    (lists / NAMES[1]).write_text("another\n")
    for settings in (waiting, scored):
        with pytest.raises(UserError, match=r"split2\.txt: changed since this job was prepared"):
            settings.check_lists()


def test_lists_that_nobody_reads_do_not_count(lists: Path) -> None:
    assert FineTune(subsets=str(lists)).lists == Accuracy(subsets=str(lists)).lists == []
    assert LowShot().lists == FineTune(fraction=0.1).lists == []
    assert LowShot(shots=(), fractions=(1.0,), subsets=str(lists)).lists == []


def test_a_list_that_is_not_there_is_named_before_anything_is_queued(
    tmp_path: Path, lists: Path
) -> None:
    pairs = [("mae_tiny", name) for name in EVALUATIONS]
    assert missing_lists(experiment(tmp_path, lists), pairs) == []
    (lists / NAMES[1]).unlink()
    (said,) = missing_lists(experiment(tmp_path, lists), pairs)
    assert f"no {NAMES[1]} in {lists}; `maect retrieve low_shot_lists {lists}` brings" in said
    (said,) = missing_lists(experiment(tmp_path, tmp_path / "gone"), pairs)
    assert f"no low-shot lists in {tmp_path}/gone; `maect retrieve" in said
