"""What all probes have in common: a kill changes no bit, and a broken feature is no result."""

import pytest
import torch

from maect.core.errors import UserError
from maect.evaluate.base import EvaluationJob, Interrupted
from maect.evaluate.features import Encoding
from maect.evaluate.probe_training import STATE
from maect.evaluate.protocols.probes import TrainsProbe

from .conftest import Rank, masked_job
from .test_attentive_probe import SETTINGS as ATTENTIVE
from .test_color_histogram import SETTINGS as HISTOGRAM
from .test_lars_probes import EFFICIENT
from .test_lars_probes import SETTINGS as LARS
from .test_linear_probe import SETTINGS as LINEAR
from .test_linear_probe import job_of
from .test_patch_linear import SETTINGS as PATCHES

PROBES: dict[str, TrainsProbe] = {
    "linear": LINEAR,
    "concat": LINEAR.model_copy(update={"concat": True}),
    "refiner": LINEAR.model_copy(update={"refiner": True, "held_out": 0.2, "epochs": 3}),
    "lars": LARS.model_copy(update={"held_out": 0.2}),
    "efficient": EFFICIENT,
    "attentive": ATTENTIVE,
    "histograms": HISTOGRAM.model_copy(update={"probes": 2}),
    "patches": PATCHES.model_copy(update={"held_out": 0.2}),
}


@pytest.mark.parametrize("name", PROBES)
def test_a_restart_ends_with_the_same_bits(images, drawn, tmp_path, name):
    settings = PROBES[name]

    def job(out: str) -> EvaluationJob:
        place = tmp_path / f"{out}.json"
        return masked_job(drawn, place) if name == "patches" else job_of(images, place)

    whole = settings.evaluate(Rank(), job("whole"))
    with pytest.raises(Interrupted):
        settings.evaluate(Rank(patience=7), job("broken"))
    again = Rank()
    assert settings.evaluate(again, job("broken")) == whole
    assert all(report["step"] > 7 for report in again.reports)
    for file in ("{}.safetensors", f".{{}}.state/{STATE}"):
        one, two = (tmp_path / file.format(out) for out in ("whole", "broken"))
        assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("name", ["linear", "lars", "efficient", "attentive", "histograms"])
def test_a_broken_feature_in_training_is_no_result(images, tmp_path, monkeypatch, name):
    """Of what is not a number the first class is the largest: an accuracy as if by chance.

    From the second training batch on one image's features are not finite: nothing is saved.
    """
    settings = PROBES[name]
    job = job_of(images, tmp_path / "probe.json")
    with pytest.raises(Interrupted):
        settings.evaluate(Rank(patience=6), job)
    state = job.state / STATE
    saved, seen = state.read_bytes(), []

    def broken(plain):
        def encoded(self, images, *how):
            given = plain(self, images, *how)
            x = (given if isinstance(given, torch.Tensor) else given.tokens).clone()
            if images.dtype == torch.float32:  # augmented; those of the test split are bytes
                seen.append(images)
                x[3] = torch.nan if len(seen) > 1 else x[3]
            return x if isinstance(given, torch.Tensor) else given._replace(tokens=x)

        return encoded

    for name in ("__call__", "output"):
        monkeypatch.setattr(Encoding, name, broken(getattr(Encoding, name)))
    # At the end of the epoch, and by one that is told to stop before.
    for patience in (10**9, 1):
        with pytest.raises(UserError, match=r"mae: after \d+ updates on .*train the probe is not"):
            settings.evaluate(Rank(patience=patience), job)
        assert state.read_bytes() == saved
