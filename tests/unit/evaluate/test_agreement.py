"""Neighbours that two views share, against a second writing with loops."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from maect.core.errors import UserError
from maect.data.index import open_index
from maect.data.loader import view_parts
from maect.data.transforms import augment
from maect.evaluate import encoder_knn
from maect.evaluate.base import EvaluationJob
from maect.evaluate.encoder_knn import shared_neighbors
from maect.evaluate.evaluation import evaluate
from maect.evaluate.features import Encoding, extract
from maect.evaluate.outcomes import difference, outcomes_of, unpack
from maect.evaluate.protocols.encoders import Agreement
from maect.evaluate.store import open_features
from maect.measures import alignment, rank_me, uniformity
from maect.recipes import View
from maect.records import EvaluationRecord

from .conftest import given, resolved, store
from .margins import clear


def by_hand(pairs: np.ndarray, bank: np.ndarray, k: int) -> list[float]:
    """The part of the first view's k nearest that the second view has, image by image."""
    shares = []
    for first, second in zip(*pairs.astype(np.float64), strict=True):
        near = []
        for view in (first, second):
            cosine = [view @ row / np.linalg.norm(view) / np.linalg.norm(row) for row in bank]
            near.append(set(np.argsort(cosine)[-k:].tolist()))
        shares.append(len(near[0] & near[1]) / k)
    return shares


def test_shares_are_those_of_a_second_writing():
    random = np.random.default_rng(0)
    bank = random.normal(size=(60, 8)).astype(np.float32)
    first = random.normal(size=(300, 8))  # more than are compared together
    pairs = np.stack([first, first + 0.5 * random.normal(size=first.shape)]).astype(np.float32)
    shared = shared_neighbors(torch.from_numpy(pairs), bank, 5)
    assert shared.shape == (5, 300)
    np.testing.assert_allclose(shared.mean(0), by_hand(pairs, bank, 5))


@pytest.fixture
def seen(images, tmp_path, rank) -> EvaluationJob:
    run = images / "runs/mae"
    file = tmp_path / "train.safetensors"
    extract(
        rank, encoder=run / "encoder.safetensors", shards=images / "shards/train", out=file,
        resize=16,
    )  # fmt: skip
    inputs = {"train": file, "test": images / "shards/val"}
    return EvaluationJob(run, tmp_path / "agreement.json", inputs)


def test_metrics_are_of_two_views_of_evenly_spaced_images(seen, rank, monkeypatch):
    monkeypatch.setattr(encoder_knn, "DECODED", 7)
    settings = Agreement(images=20, bank=30, k=4)
    metrics = settings.evaluate(rank, seen)
    index, encoding = open_index(seen.path("test")), Encoding(seen.encoder, torch.device("cpu"))
    index = replace(index, rows=index.rows[[int(x) for x in np.linspace(0, 69, 20)]])
    view = View(crop_scale=settings.crop_scale, flip=settings.flip)
    (batch,) = view_parts(
        index, views=(view, view), image_size=16, seed=settings.seed, parts=[range(20)], threads=1
    )
    given = settings.seed, batch.epochs, batch.ids, encoding.settings.pixels
    pairs = torch.stack([encoding(augment(batch.images[0][n], view, n, *given)) for n in range(2)])
    bank = open_features(seen.path("train")).values[np.linspace(0, 149, 30).astype(int)]
    unit = [torch.nn.functional.normalize(rows, dim=-1) for rows in (pairs, torch.tensor(bank))]
    clear((unit[0] @ unit[1].T).flatten(0, 1).numpy(), 1e-6, chosen=4)
    shares = by_hand(pairs.numpy(), bank, 4)
    assert metrics["agreement"] == pytest.approx(100 * np.mean(shares))
    assert metrics["alignment"] == pytest.approx(alignment(pairs), rel=1e-4)
    assert metrics["uniformity"] == pytest.approx(uniformity(unit[0][0]), rel=1e-4)
    assert metrics["rank_me"] == pytest.approx(rank_me(pairs[0]), rel=1e-4)
    assert seen.notes["test_images"] == 20


def test_a_result_keeps_the_share_of_each_image(seen, rank):
    assert evaluate(rank, config=resolved(seen, Agreement())) == "done"
    metrics = EvaluationRecord.read(seen.out).metrics
    _, kept = outcomes_of(seen.out)
    shares = unpack(kept["agreement"])
    assert len(shares) == 70 and metrics["agreement"] == pytest.approx(100 * shares.mean())
    assert metrics["agreement_low"] < metrics["agreement"] < metrics["agreement_high"]
    assert difference(shares, shares).p == 1.0


def test_the_same_view_twice_agrees(seen, rank, tmp_path):
    """Training images need no labels."""
    whole = Agreement(crop_scale=(1.0, 1.0), flip=0.0)
    features = open_features(seen.path("train")).values
    train = store(tmp_path / "unlabelled.safetensors", features, np.full(150, -1))
    metrics = whole.evaluate(rank, given(seen, train=train))
    assert metrics["agreement"] == 100.0 and metrics["alignment"] == pytest.approx(0, abs=1e-10)


def test_too_few_images_are_refused(seen, rank):
    with pytest.raises(UserError, match="150 training and 70 test images; 151 and 2 are needed"):
        Agreement(k=151).evaluate(rank, seen)
