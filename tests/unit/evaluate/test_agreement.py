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
from maect.evaluate.features import Encoding
from maect.evaluate.outcomes import unpack
from maect.evaluate.protocols.encoders import Agreement
from maect.evaluate.store import open_features
from maect.measures import alignment, rank_me, uniformity
from maect.recipes import View

from .by_hand import clear
from .conftest import given, store


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


@pytest.fixture
def seen(images, extracted, tmp_path) -> EvaluationJob:
    inputs = {"train": extracted["train"], "test": images / "shards/val"}
    return EvaluationJob(images / "runs/mae", tmp_path / "agreement.json", inputs)


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
    assert metrics["agreement_low"] < metrics["agreement"] < metrics["agreement_high"]
    np.testing.assert_allclose(unpack(seen.outcomes["agreement"]), shares)
    assert metrics["alignment"] == pytest.approx(alignment(pairs), rel=1e-4)
    assert metrics["uniformity"] == pytest.approx(uniformity(unit[0][0]), rel=1e-4)
    assert metrics["rank_me"] == pytest.approx(rank_me(pairs[0]), rel=1e-4)
    assert seen.notes["test_images"] == 20


def test_the_same_view_twice_agrees(seen, rank, tmp_path):
    """Training images need no labels."""
    whole = Agreement(crop_scale=(1.0, 1.0), flip=0.0)
    features = open_features(seen.path("train")).values
    train = store(tmp_path / "unlabelled.safetensors", features, np.full(150, -1))
    metrics = whole.evaluate(rank, given(seen, train=train))
    assert metrics["agreement"] == 100.0 and metrics["alignment"] == pytest.approx(0, abs=1e-10)
    for few in (Agreement(k=150), Agreement(bank=10)):  # of as many, all would be shared
        with pytest.raises(
            UserError, match=f"{few.k} training images .* for 70; more than {few.k} "
        ):
            few.evaluate(rank, seen)
