"""The real thing on two processes: the world size changes nothing."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maect.core.files import read_record
from maect.evaluate.base import EvaluationJob
from maect.evaluate.evaluation import evaluate
from maect.evaluate.features import extract
from maect.evaluate.protocols.encoders import EffectiveInvariance, KnnPerBlock, Robustness
from maect.evaluate.protocols.probes import PatchKnn
from maect.evaluate.store import open_features

sys.path.append(str(Path(__file__).parents[1] / "train"))
from ranks import Ranks

from .conftest import given, masked_job, on_rank, resolved
from .test_attentive_probe import SETTINGS as ATTENTIVE
from .test_color_histogram import SETTINGS as HISTOGRAM
from .test_lars_probes import EFFICIENT
from .test_linear_probe import SETTINGS, job_of
from .test_patch_linear import SETTINGS as PATCHES

# Trained ones end with the same numbers up to rounding, the others too.
PROTOCOLS = (
    SETTINGS.model_copy(update={"concat": True}),
    HISTOGRAM,
    EFFICIENT,
    # One classifier of each reading: which of equals is chosen may hang on a last bit.
    ATTENTIVE.model_copy(update={"learning_rates": (0.3,), "weight_decays": (0.5,)}),
    Robustness(splits=("val",), precision="fp32"),
    EffectiveInvariance(draws=1, precision="fp32"),
    KnnPerBlock(precision="fp32"),
)

# These read masks. A pixel may lie between two neighbours or classes.
MASKED = (PatchKnn(neighbours=(1, 3)), PATCHES)

ACCURACIES = {
    "linear_probe", "linear_probe_last", "efficient_probe", "efficient_probe_last", "val",
    "agreement_rotation", "agreement_color", "attentive_probe", "attentive_probe_cls",
    "attentive_probe_mean", "attentive_probe_cls_mean",
}  # fmt: skip


def test_world_size_changes_nothing(images, drawn, tmp_path, rank):
    run, shards = images / "runs" / "mae", images / "shards"
    alone, together = tmp_path / "alone", tmp_path / "together"

    def job(out: Path) -> EvaluationJob:
        probe = tmp_path / "probe.safetensors"
        return given(job_of(images, out), val=shards / "val", probe=probe)

    def every_config(folder: Path) -> list[Path]:
        found = [resolved(job(folder / f"{p.name}.json"), p) for p in PROTOCOLS]
        masked = [resolved(masked_job(drawn, folder / f"{p.name}.json"), p) for p in MASKED]
        return found + masked

    features = {split: together / f"{split}.safetensors" for split in ("train", "val")}
    evaluate(rank, config=resolved(job(tmp_path / "probe.json"), SETTINGS))
    encoder = run / "encoder.safetensors"
    extracted = partial(on_rank, function=extract, encoder=encoder, resize=16)
    jobs: list[dict[str, Any]] = [
        {"function": extracted, "shards": shards / split, "out": out}
        for split, out in features.items()
    ]
    evaluated = partial(on_rank, function=evaluate)
    jobs += [{"function": evaluated, "config": config} for config in every_config(together)]
    ranks = Ranks(2, jobs, tmp_path / "log")
    try:
        for split in ("train", "val"):
            out = alone / f"{split}.safetensors"
            extract(rank, encoder=encoder, shards=shards / split, out=out, resize=16)
        for config in every_config(alone):
            evaluate(rank, config=config)
        assert ranks.finish(480) == ["done"] * len(jobs)
    finally:
        ranks.kill()
    for split in ("train", "val"):
        one, two = (open_features(p / f"{split}.safetensors") for p in (alone, together))
        # Kernels may differ between one and two threads, so not the bits.
        np.testing.assert_allclose(one.values, two.values, atol=1e-5)
        assert np.array_equal(one.labels, two.labels) and one.names() == two.names()
    for name in (protocol.name for protocol in PROTOCOLS):
        first, second = (read_record(p / f"{name}.json") for p in (alone, together))
        assert second["provenance"]["world_size"] == 2
        a, b = first["metrics"], second["metrics"]
        assert a.keys() == b.keys()
        for key in a:
            if key.endswith(("last_by_rate", "by_epoch")) or key in ACCURACIES:
                # One of 70 images may lie on the border between two classes.
                assert a[key] == pytest.approx(b[key], abs=100 / 70 + 1e-9)
            elif key in ("chosen", "held_out"):
                pass  # one of each, whose accuracies on the test images are compared
            elif key.startswith("ei_"):
                assert a[key] == pytest.approx(b[key], abs=1 / 70 + 1e-9)
            elif "best" not in key and not key.startswith("concat"):
                assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-3), (name, key)
    for name in (protocol.name for protocol in MASKED):
        one, two = (read_record(p / f"{name}.json")["metrics"][name] for p in (alone, together))
        assert one == pytest.approx(two, abs=1)
