"""Ranks that no longer hold the same weights are found before a state is saved."""

from pathlib import Path

import pytest
import torch
from ranks import run, train
from test_resume import ALWAYS, identical, steps_saved

from maect.train.trainer import Trainer


def train_with_a_flipped_bit(context, *, where, **job):
    """Rank 1's copy has one other bit from step 4 on."""
    update = Trainer._update

    def flipping(self, means, number):
        update(self, means, number)
        if number == 4 and context.rank == 1:
            held = dict(self.objective.named_parameters()) | self.objective.saved_buffers()
            bits = held[where].data.view(torch.int32).flatten()
            bits[3] ^= 1

    Trainer._update = flipping
    return train(context, **job)


@pytest.mark.parametrize("where", ["encoder.blocks.2.attn.proj.weight", "encoder.pos_embed"])
def test_a_flipped_bit_stops_the_run_before_it_is_saved(
    job, tmp_path: Path, whole: Path, where: str
) -> None:
    broken = job("broken", "mae") | ALWAYS
    log = tmp_path / "log"
    flipped = broken | {"function": train_with_a_flipped_bit, "where": where}
    message = run(2, flipped, log=log)
    assert "ReplicaError: after step 4 the weights or buffers of rank 1 of 2 differ" in message
    assert 1 <= steps_saved(broken["folder"])[-1] <= 3
    assert run(2, broken, log=log) == ["done"]
    identical(whole / "mae", broken["folder"])
