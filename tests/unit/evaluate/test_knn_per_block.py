"""k-NN per block beside a second writing, on the tokens behind each of the blocks."""

import zlib
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from sklearn.preprocessing import StandardScaler

from maect.core.errors import UserError
from maect.data.index import Index, open_index
from maect.data.transforms import normalize
from maect.evaluate.base import EvaluationJob
from maect.evaluate.outcomes import held_out_by_content
from maect.evaluate.protocols.encoders import KnnPerBlock
from maect.models.weights import load_encoder_weights, save_encoder
from maect.recipes import load_encoder
from maect.recipes.cost import encode_flops
from maect.stages.imported import import_weights

from .by_hand import all_images, blocks_of
from .test_linear_probe import job_of

SETTINGS = KnnPerBlock(precision="fp32", k=5, temperature=0.01, train_images=80)


def pooled(job: EvaluationJob, index: Index, rows: range, pooling: str) -> list[np.ndarray]:
    """What leaves each block, pooled: float64 [n, width] a block."""
    encoder, settings, _ = load_encoder_weights(job.run / "encoder.safetensors")
    given = normalize(all_images(index)[0][list(rows)], settings.pixels)
    blocks = blocks_of(encoder.double().eval(), given.double())
    return [(x[:, 0] if pooling == "cls" else x[:, 1:].mean(1)).numpy() for x in blocks]


def classified(x, labels, y, truth) -> tuple[int, int]:
    """How many of y are classified rightly beyond doubt, and how many hang on rounding."""
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (x, y)]
    cosines = unit[1] @ unit[0].T
    ranks = np.argsort(-cosines, axis=1)
    sorted_cosines = np.take_along_axis(cosines, ranks, 1)
    votes = np.zeros((len(y), 10))
    for row, (near, similar) in enumerate(zip(ranks[:, :5], sorted_cosines, strict=True)):
        np.add.at(votes[row], labels[near], np.exp((similar[:5] - similar[0]) / 0.01))
    first, second = -np.sort(-votes, axis=1)[:, :2].T
    sure = (first - second > 1e-3) & (sorted_cosines[:, 4] - sorted_cosines[:, 5] > 1e-6)
    return int((sure & (votes.argmax(1) == truth)).sum()), int((~sure).sum())


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_agrees_with_a_second_writing(images, tmp_path, rank, pooling):
    job = job_of(images, tmp_path / "knn_per_block.json")
    train, test = open_index(job.path("train")), open_index(job.path("test"))
    chosen = range(0, 150, 2)
    # The file of this encoder says mean.
    told = {} if pooling == "mean" else {"pooling": pooling}
    metrics = SETTINGS.model_copy(update=told).evaluate(rank, job)
    known, asked = (
        pooled(job, index, rows, pooling) for index, rows in ((train, chosen), (test, range(70)))
    )
    labels = np.array([train.labels[row] for row in chosen])
    for name in ("knn", "knn_standardized"):
        assert len(metrics[name]) == 3
        for x, y, accuracy in zip(known, asked, metrics[name], strict=True):
            if name == "knn_standardized":
                scaler = StandardScaler().fit(x)
                x, y = scaler.transform(x), scaler.transform(y)
            right, unsure = classified(x, labels, y, test.labels)
            assert unsure <= 4 and right <= accuracy * 0.7 + 1e-9 <= right + unsure + 2e-9
        assert metrics[f"{name}_last"] == metrics[name][-1]
    # One block for another would be seen.
    assert len({*zip(metrics["knn"], metrics["knn_standardized"], strict=True)}) == 3
    assert metrics["best_block"] == 1 + int(np.argmax(metrics["knn_standardized"]))
    held = held_out_by_content(labels, [zlib.crc32(train.read(row)) for row in chosen])
    assert 0 < held.sum() < 20
    for x, accuracy in zip(known, metrics["held_out"], strict=True):
        x = StandardScaler().fit_transform(x)
        right, unsure = classified(x[~held], labels[~held], x[held], labels[held])
        assert right <= accuracy * held.sum() / 100 + 1e-9 <= right + unsure + 2e-9
    block = int(np.argmax(metrics["held_out"]))
    assert metrics["held_out_block"] == 1 + block
    assert metrics["knn_standardized_held_out"] == metrics["knn_standardized"][block]
    other = {"cls": "mean", "mean": "cls"}[pooling]
    assert metrics != SETTINGS.model_copy(update={"pooling": other}).evaluate(rank, job)


def test_of_convolutions_the_last_stage_is_measured(images, tmp_path, rank):
    """The others differ in width."""
    name = "convnextv2_atto.fcmae"
    module = timm.create_model(name, pretrained=False, num_classes=0)
    generator = torch.Generator().manual_seed(0)
    state = {
        key: 0.1 * torch.randn(value.shape, generator=generator) + (value.ndim < 2)
        for key, value in module.state_dict().items()
    }
    save_file(state, tmp_path / "model.safetensors")
    import_weights(tmp_path / "model.safetensors", tmp_path / "run", image_size=32, timm=name)
    job = replace(job_of(images, tmp_path / "out.json"), run=tmp_path / "run", resize=32)
    metrics = SETTINGS.model_copy(update={"train_images": 20}).evaluate(rank, job)
    assert len(metrics["knn"]) == len(metrics["knn_standardized"]) == 1
    assert 0 <= metrics["knn"][0] <= 100


def test_training_images_are_evenly_spaced_and_encoded_once():
    assert KnnPerBlock(train_images=80).compared(150) == range(0, 150, 2)
    assert KnnPerBlock(train_images=80).compared(80) == range(80)
    assert len(KnnPerBlock().compared(1281167)) == 128117
    encoder, counts = load_encoder("tiny"), {"train": 1000, "val": 300}
    flops = KnnPerBlock(train_images=400).flops(encoder, counts.__getitem__)
    assert flops == pytest.approx(encode_flops(encoder) * (334 + 300))


def test_too_few_images_and_a_broken_encoder_are_refused(images, tmp_path, rank):
    job = job_of(images, tmp_path / "knn_per_block.json")
    with pytest.raises(UserError, match=r"train: 4 of its images .* k is 5; lower k or raise"):
        SETTINGS.model_copy(update={"train_images": 4}).evaluate(rank, job)
    module, settings, pooling = load_encoder_weights(job.run / "encoder.safetensors")
    module.blocks[2].norm1.weight.data.fill_(torch.nan)
    (tmp_path / "run").mkdir()
    save_encoder(tmp_path / "run/encoder.safetensors", module.state_dict(), settings, pooling)
    with pytest.raises(UserError, match=r"run: the features are not finite"):
        SETTINGS.evaluate(rank, replace(job, run=tmp_path / "run"))
