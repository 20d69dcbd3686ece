"""Online evaluation: its numbers, and that a training knows nothing of it."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from ranks import Place, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_resume import bits
from tiny_runs import job_maker, metrics, noise_shards
from torch import nn
from torch.nn import functional as F

from maect.data.index import ID, open_index
from maect.data.loader import evaluation_parts
from maect.data.transforms import denormalize, normalize
from maect.measures import rank_me
from maect.models.decoder import patchify
from maect.models.vit import build_encoder, seeded
from maect.models.weights import load_encoder_weights
from maect.recipes import OnlineEvaluation, Pixels, load_encoder
from maect.records import RunRecord
from maect.stages import load_recipe
from maect.stages.classifier import Classifier
from maect.stages.fine_tune import FineTune
from maect.train.checkpoint import PARAM, ParameterSlice
from maect.train.online import OnlineEvaluator, measures

CPU = torch.device("cpu")
ONLINE = {"every_epochs": 2, "images": 500}
FEW = {"batch_size": 64}  # four epochs of 6.25 steps


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """As the others', with images enough to be evaluated: 16 of 400."""
    return noise_shards(tmp_path_factory.mktemp("many"), 400)


def evaluations(folder):
    keys = ("step", "online_knn", "online_rank_me", "online_uniformity", "online_alignment")
    return [{k: e[k] for k in keys} for e in metrics(folder) if "online_rank_me" in e]


def without_evaluations(folder):
    return [{k: v for k, v in e.items() if not k.startswith("online_")} for e in metrics(folder)]


STAGES = {"mae": None, "head_min": "mae", "ct_min": "head_min"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shards):
    """Folder of runs of all stages, each with and without online evaluation."""
    root = tmp_path_factory.mktemp("online")
    job, jobs = job_maker(root, shards), []
    for recipe, source in STAGES.items():
        evaluated = job(f"{recipe}-evaluated", recipe, source, **FEW) | {"online": ONLINE}
        jobs += [job(recipe, recipe, source, **FEW), evaluated]
    assert run(1, *jobs, log=root / "log") == ["done"] * len(jobs)
    return root / "runs"


def test_an_online_evaluation_changes_no_bit_of_any_stage(runs):
    for recipe in STAGES:
        plain, evaluated = runs / recipe, runs / f"{recipe}-evaluated"
        assert bits(plain) == bits(evaluated) and len(bits(plain)) == 1 + (recipe != "mae")
        assert without_evaluations(evaluated) == metrics(plain)
        assert [one["step"] for one in evaluations(evaluated)] == [13, 25]
        records = [json.loads(RunRecord.path(f).read_text()) for f in (plain, evaluated)]
        assert records[0]["fingerprint"] == records[1]["fingerprint"]
        assert records[0]["sha256"] == records[1]["sha256"]
        lines = (evaluated / "metrics.jsonl").read_text().splitlines()
        parts = [json.loads(line)["timing"].get("online_part") for line in lines]
        assert [step for step, part in enumerate(parts, 1) if part] == [13, 25]
        # Pictures beside the numbers: neighbours of any encoder, what a decoder makes of images.
        shown = ["neighbors"] + ["reconstructions"] * (recipe == "mae")
        names = sorted(file.name for file in (evaluated / "online").iterdir())
        assert names == [f"{name}-{step:08d}.jpg" for name in shown for step in (13, 25)]
        events = EventAccumulator(str(evaluated / "tensorboard"))
        events.Reload()
        assert sorted(events.Tags()["images"]) == [f"online/{name}" for name in shown]
        assert [picture.step for picture in events.Images("online/neighbors")] == [13, 25]
    # A frozen encoder looks the same from beginning to end, a trained one does not.
    first, last = evaluations(runs / "head_min-evaluated")
    assert {**first, "step": 0} == {**last, "step": 0}
    first, last = evaluations(runs / "ct_min-evaluated")
    assert first["online_rank_me"] != last["online_rank_me"]


def test_what_is_evaluated_is_what_the_run_exports(runs, shards):
    """The last evaluation, again from the file: of MAE its weights, of tuning their average."""
    for recipe in ("mae", "ct_min"):
        folder = runs / f"{recipe}-evaluated"
        encoder, _, pooling = load_encoder_weights(folder / "encoder.safetensors")
        read = SimpleNamespace(encoder=encoder, parts_read=lambda: {})
        chosen = OnlineEvaluator(
            OnlineEvaluation(**ONLINE), open_index(shards), None, read, None, torch.device("cpu")
        ).index
        assert len(set(chosen.rows[:, ID].tolist())) == 16
        ((images, _, _),) = evaluation_parts(chosen, image_size=16, parts=[range(16)], threads=1)
        with torch.no_grad():
            features = encoder.pool(encoder(normalize(images, Pixels())).tokens, pooling)
        last = evaluations(folder)[-1]["online_rank_me"]
        assert last == pytest.approx(rank_me(features), rel=1e-5)


def test_reconstructions_show_what_is_visible_and_the_decoders_patches():
    torch.manual_seed(0)
    objective = load_recipe("mae", "tiny").objective(load_encoder("tiny"), 0)
    raw = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    images = normalize(raw, Pixels())
    assert torch.equal(denormalize(images, Pixels()), raw)
    order = torch.stack([torch.randperm(16) for _ in range(3)])
    parts = nn.ModuleDict(objective.parts_read()).eval()
    with torch.no_grad():
        seen, made = objective.reconstruct(parts, images, order)
        predicted = parts["decoder"](parts["encoder"](images, order[:, :4]).tokens, order)
    target, seen, made = (patchify(x, 4) for x in (images, seen, made))
    for image in range(3):
        for rank, patch in enumerate(order[image].tolist()):
            own = target[image, patch]
            if rank < 4:
                assert torch.equal(seen[image, patch], own) and torch.equal(made[image, patch], own)
            else:
                assert not seen[image, patch].any()
                expected = predicted[image, patch] * own.std() + own.mean()
                assert torch.allclose(made[image, patch], expected, atol=0.05)  # bfloat16


def cells(page):
    """The images of 16 pixels on a sheet, [rows, columns, 3, 16, 16], without the lines between."""
    lined = torch.from_numpy(page)[1:, 1:].permute(2, 0, 1)
    return lined.unfold(1, 16, 17).unfold(2, 16, 17).movedim(0, 2)


def test_an_evaluation_shows_queries_their_neighbours_and_reconstructions(shards):
    """Of 16 of the images three are queries; a sheet has a query in each row or column."""
    objective = load_recipe("mae", "tiny").objective(load_encoder("tiny"), 0)
    settings, index = OnlineEvaluation(**ONLINE), open_index(shards)
    evaluator = OnlineEvaluator(settings, index, 20, objective, Place(0, 0, 1), CPU)
    assert not any(parameter.requires_grad for parameter in evaluator.parts.parameters())
    assert evaluator.index.n == 16 and evaluator.queries == 3
    named = [(n, p.detach().view(-1)) for n, p in objective.named_parameters() if p.requires_grad]
    found = evaluator.evaluate([ParameterSlice(name, 0, {PARAM: values}) for name, values in named])
    how = {"image_size": 16, "parts": [range(16)], "threads": 1, "resize": 20}
    ((images, _, _),) = evaluation_parts(evaluator.index, **how)
    parts = nn.ModuleDict(objective.parts_read()).eval()
    with torch.no_grad():
        features = objective.features(parts, normalize(images, Pixels())).float()
    assert found["online_rank_me"] == pytest.approx(rank_me(features), rel=1e-4)
    assert 0 < found["online_alignment"] < 4 and found["online_uniformity"] < 0
    assert evaluator.pictures.keys() == {"neighbors", "reconstructions"}
    unit = F.normalize(features, dim=1)
    near = (unit[:3] @ unit[3:].T).argsort(dim=1, descending=True)[:, :5] + 3
    shown = images[torch.cat([torch.arange(3)[:, None], near], dim=1)]
    assert torch.equal(cells(evaluator.pictures["neighbors"]), shown)
    masked, made, queries = cells(evaluator.pictures["reconstructions"])
    assert torch.equal(queries, images[:3])
    visible = (masked == queries).all(1)  # a quarter; where it is, the reconstruction is the image
    assert 0.2 < visible.float().mean() < 0.4
    assert torch.equal(made.movedim(1, -1)[visible], queries.movedim(1, -1)[visible])


def test_too_few_images_are_not_evaluated(shards):
    few = OnlineEvaluation(every_epochs=1, images=9)
    objective = SimpleNamespace(encoder=SimpleNamespace(settings=None))
    evaluator = OnlineEvaluator(few, open_index(shards), None, objective, None, CPU)
    assert not evaluator.is_due(0, 10**9, True)


def test_killed_runs_repeat_or_keep_their_evaluations(job, runs, tmp_path):
    log = tmp_path / "log"
    # The 13th step evaluates; the state before it or after it is the last one.
    for number, kill_at in enumerate((13, 14)):
        saves = {"save_every_minutes": 0.0 if number else 10.0}
        broken = job(f"broken{number}", "mae", **FEW) | {"online": ONLINE} | saves
        with pytest.raises(RuntimeError, match="no rank answered"):
            run(1, broken, log=log, kill_at=kill_at)
        assert run(1, broken, log=log) == ["done"]
        assert bits(broken["folder"]) == bits(runs / "mae-evaluated")
        assert metrics(broken["folder"]) == metrics(runs / "mae-evaluated")


def test_two_ranks_see_what_one_sees(job, runs, tmp_path):
    """Also where the weights are partitioned; an evaluation of too few images is left out."""
    jobs = [
        job(f"zero{zero}", "mae", zero_stage=zero, **FEW) | {"online": ONLINE} for zero in (1, 3)
    ]
    few = job("few", "mae", epochs=1, **FEW) | {"online": {"every_epochs": 1, "images": 500}}
    assert run(2, *jobs, few, log=tmp_path / "log") == ["done"] * 3
    for mae in jobs:
        pairs = zip(evaluations(runs / "mae-evaluated"), evaluations(mae["folder"]), strict=True)
        for one, two in pairs:
            for key in one.keys() - {"online_knn"}:  # rounding may decide a vote
                assert one[key] == pytest.approx(two[key], rel=1e-3)
    assert evaluations(few["folder"]) == []
    assert "online evaluation: 8 of 400 images are too few" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("pooling", ["fc_norm", "cls"])
def test_a_classifier_is_evaluated_as_it_pools(shards, pooling):
    """Its own norm included, no branch dropped, the generator untouched."""
    with seeded(0):
        encoder = build_encoder(load_encoder("tiny"))
    objective = Classifier(FineTune(pooling=pooling, precision="fp32"), encoder, 4, pooling, 0)
    arguments = OnlineEvaluation(**ONLINE), open_index(shards), None, objective, Place(0, 0, 1)
    evaluator = OnlineEvaluator(*arguments, torch.device("cpu"))
    for parameter in objective.parameters():
        parameter.data += 0.01  # it trains, and drops
    for drop_path in objective.drop_paths:
        drop_path.factor = torch.zeros(16)
    named = [(n, p.detach().view(-1)) for n, p in objective.named_parameters() if p.requires_grad]
    state, mode = torch.get_rng_state(), objective.training
    found = evaluator.evaluate([ParameterSlice(name, 0, {PARAM: values}) for name, values in named])
    assert torch.equal(state, torch.get_rng_state()) and objective.training == mode
    assert found["online_rank_me"] > 1 and 0 <= found["online_knn"] <= 100
    taken = dict(evaluator.parts.named_parameters())
    ours = {name for name, _ in objective.named_parameters() if not name.startswith("head.")}
    assert set(taken) == ours
    assert all(torch.equal(taken[n].view(-1), p) for n, p in named if n in ours)


def test_measures_of_known_features():
    rows = torch.eye(4, 6).repeat(5, 1)
    labels = torch.arange(20) % 4
    found = measures(rows, torch.stack([rows[:4], rows[:4]]), labels)
    assert found["online_knn"] == 100 and set(found) == {
        "online_knn", "online_neighbors", "online_rank_me", "online_uniformity", "online_alignment",
    }  # fmt: skip
    assert found["online_neighbors"] == 100
    wrong = labels.clone()
    wrong[:3] = 9  # three of four queries
    assert measures(rows, torch.stack([rows[:4]] * 2), wrong)["online_neighbors"] == 25
    assert "online_knn" not in measures(rows, torch.stack([rows[:4]] * 2), labels - 1)
    assert measures(rows * math.inf, torch.stack([rows[:4]] * 2), labels) == {}
