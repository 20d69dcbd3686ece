"""What happens beside the steps: losses of epochs, scores, progress."""

import json
from types import SimpleNamespace

import pytest
import torch
from ranks import Place

from maect.core.errors import UserError
from maect.data.index import open_index
from maect.data.loader import evaluation_parts
from maect.train.hooks import CheckHealth, Hook, ReportProgress, Session, SumLosses, Update
from maect.train.online import EvaluateOnline, OnlineEvaluator
from maect.train.scores import ScoreEpochs, encode_share, scored_split
from maect.train.step import DeviceTime
from maect.train.watchdog import EVALUATING, SCORING

CPU = torch.device("cpu")
LOSSES = {step: 10.0 / step for step in range(1, 8)}


class Watchdog(Hook):
    def __init__(self):
        self.begun = []

    def begin(self, activity, step):
        self.begun.append((activity, step))


def session(steps=7, clock=None, **more):
    """40 images an epoch, in batches of 16: two and a half steps."""
    place = Place(0, 0, 1)
    stage = SimpleNamespace(batch_size=16, epochs=2)
    encoder = SimpleNamespace(image_size=16)
    engine = SimpleNamespace(slices="slices")
    clock = clock or DeviceTime(place, 0.0)
    made = Session(
        context=place, stage=stage, encoder=encoder, objective=None, engine=engine, device=CPU,
        images=40, steps=steps, clock=clock, hooks=[Watchdog()],
    )  # fmt: skip
    vars(made).update(more)
    return made


def follow(hook, steps):
    for step in steps:
        hook.after_step(Update(step, {"loss": LOSSES[step]}, 1.0))


def saved_record(hook):
    """What a state says, as it is read again."""
    record = {}
    hook.before_save(record)
    return json.loads(json.dumps(record))


def test_losses_of_epochs_go_on_where_a_state_was_saved():
    whole = SumLosses(session(), [])
    follow(whole, range(1, 8))
    expected = [
        [sum(LOSSES[step] for step in steps), len(steps)] for steps in ((1, 2, 3), (4, 5), (6, 7))
    ]
    assert saved_record(whole) == {"losses": expected}
    for step in range(1, 7):
        first = SumLosses(session(), [])
        follow(first, range(1, step + 1))
        second = SumLosses(session(), saved_record(first)["losses"])
        follow(second, range(step + 1, 8))
        assert saved_record(second) == {"losses": expected}


def scores_of(index, resize=None, steps=7, **more):
    """Every image is said to be of class 1."""
    classifier = SimpleNamespace(predict=lambda images: torch.ones(len(images), dtype=torch.int64))
    return ScoreEpochs(session(steps, objective=classifier, **more), index, resize)


def test_epochs_are_scored_at_their_ends(shards):
    scores = scores_of(open_index(shards))
    assert [step for step in range(1, 8) if scores.reads_model(step)] == [3, 5, 7]
    update = Update(2, {"loss": 1.0}, 1.0)
    scores.after_step(update)
    assert update.values == {"loss": 1.0} and not update.log_now
    update = Update(3, {"loss": 1.0}, 1.0)
    scores.after_step(update)
    assert update.values["accuracy"] == 25.0 and update.log_now  # one of four classes
    assert scores._session.hooks[0].begun == [(SCORING, 3)]
    assert scores._session.clock.useful > 0
    assert saved_record(scores)["scores"]["accuracies"] == [25.0]
    # What is left of the last epoch is scored, too.
    assert scores_of(open_index(shards), steps=6).reads_model(6)
    # The last of three steps may end the second epoch and the third one.
    short = {"images": 20, "stage": SimpleNamespace(batch_size=16, epochs=3)}
    losses = SumLosses(session(3, **short), [])
    follow(losses, (1, 2, 3))
    assert saved_record(losses)["losses"] == [[15.0, 2], [LOSSES[3], 1], [LOSSES[3], 1]]
    scores = scores_of(open_index(shards), steps=3, **short)
    follow(scores, (1, 2, 3))
    assert saved_record(scores)["scores"]["accuracies"] == [25.0] * 3


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_encodes_a_share_of_the_images(shards, ranks):
    """As many rows each, with zeros behind the last image, also of a rank without any."""
    index = open_index(shards)
    how = {"image_size": 16, "resize": 17, "squeezed": True}
    ((images, _, _),) = evaluation_parts(index, parts=[range(40)], threads=1, **how)

    def read(given):
        assert given.dtype == torch.uint8
        return given.flatten(1).int() + 1

    places = [Place(rank, rank, ranks) for rank in range(ranks)]
    rows = torch.cat([encode_share(p, index, CPU, encode=read, batch=16, **how) for p in places])
    assert len(rows) == {1: 48, 2: 64, 4: 64}[ranks]
    assert torch.equal(rows[:40], read(images)) and not rows[40:].any()


def test_scores_go_on_only_on_the_same_images(shards):
    index = open_index(shards)
    before = scores_of(index, resize=18)
    before.after_step(Update(3, {"loss": 1.0}, 1.0))
    record = saved_record(before)
    after = scores_of(index, resize=18)
    assert after.resume(record)
    after.after_step(Update(5, {"loss": 1.0}, 1.0))
    assert saved_record(after)["scores"]["accuracies"] == [25.0, 25.0]
    assert not scores_of(index, resize=20).resume(record)
    record["scores"]["index_digest"] = "of other images"
    assert not scores_of(index, resize=18).resume(record)
    assert not scores_of(index, resize=18).resume({})


def test_what_epochs_are_scored_on(shards, tmp_path):
    """Held-out images come before the split that a run names; other classes are refused."""
    index = open_index(shards)
    held_out = object()

    def run(held=None, test=None):
        stage = SimpleNamespace(scored_images=lambda split: held)
        return SimpleNamespace(stage=stage, test=test, shards=shards)

    assert scored_split(run(held_out, shards), index) is held_out
    assert scored_split(run(test=shards), index).digest == index.digest
    assert scored_split(run(), index) is None
    others = SimpleNamespace(class_names=["cat", "dog"])
    with pytest.raises(UserError, match="its classes differ from those of"):
        scored_split(run(test=shards), others)


def test_progress_names_the_epoch_and_the_last_accuracy():
    told = []
    training = session(5, SimpleNamespace(steps_per_second=2.0))
    training.context.report = told.append
    progress = ReportProgress(training)
    for step in range(1, 6):
        values = {"loss": LOSSES[step]} | ({"online_knn": 60.0} if step == 3 else {})
        progress.after_step(Update(step, values, 1.0))
    assert [line["epoch"] for line in told] == [1, 1, 2, 2, 2]
    assert [line["knn"] for line in told] == [None, None, 60.0, 60.0, 60.0]
    assert told[0] == {
        "epoch": 1, "epochs": 2, "step": 1, "steps": 5, "loss": 10.0, "images_per_second": 32.0,
        "knn": None,
    }  # fmt: skip


def test_the_encoder_is_evaluated_at_its_interval_and_at_the_end():
    """Every second epoch of 40 images: after step 5 of 16 images each, and after the last one."""
    found, asked = {"online_knn": 60.0}, []
    evaluator = SimpleNamespace(every=80, pictures={"neighbors": "a sheet"})
    evaluator.is_due = lambda *given: OnlineEvaluator.is_due(evaluator, *given)
    evaluator.evaluate = lambda slices: asked.append(slices) or dict(found)
    training = session()
    hook = EvaluateOnline(training, evaluator)
    assert [step for step in range(1, 8) if hook.reads_model(step)] == [5, 7]
    updates = {step: Update(step, {"loss": 1.0}, 1.0) for step in (4, 5, 7)}
    hook.after_step(updates[4])
    hook.after_step(updates[5])
    found.clear()  # features that were not finite: nothing to log
    hook.after_step(updates[7])
    assert asked == ["slices"] * 2 and training.hooks[0].begun == [(EVALUATING, 5), (EVALUATING, 7)]
    assert updates[5].values == {"loss": 1.0, "online_knn": 60.0} and updates[5].log_now
    assert updates[5].pictures == evaluator.pictures
    assert 0 < updates[5].timing["online_part"] <= 1 and training.clock.useful > 0
    for step in (4, 7):
        assert updates[step].values == {"loss": 1.0} and not updates[step].log_now


def test_embeddings_are_checked_every_ten_steps_and_at_the_end():
    faults = [None, "collapsed"]
    objective = SimpleNamespace(health=lambda batch: ({"uniformity": -float(batch)}, faults.pop()))
    hook = CheckHealth(session(25, objective=objective))
    assert [step for step in range(1, 26) if hook.reads_model(step)] == [10, 20, 25]
    updates = [Update(step, {"loss": 1.0}, 1.0) for step in (9, 10, 25)]
    for update in updates:
        hook.after_step(update)
    for update in (updates[0], updates[2]):
        assert (update.values, update.fault, update.log_now) == ({"loss": 1.0}, None, False)
    assert updates[1].values == {"loss": 1.0, "uniformity": -16.0}
    assert updates[1].fault == "collapsed" and updates[1].log_now
