"""Ranks that no longer hold the same weights are found before a state is saved."""

import torch
from ranks import refused, run
from test_resume import ALWAYS, identical, steps_saved

from maect.train.trainer import Trainer


def with_a_flipped_bit(context, *, where, **job):
    """A training in which rank 1's copy has one other bit from step 4 on."""
    update = Trainer._update

    def flipping(self, means, number):
        update(self, means, number)
        if number == 4 and context.rank == 1:
            held = dict(self.objective.named_parameters()) | self.objective.saved_buffers()
            bits = held[where].data.view(torch.int32).flatten()
            bits[3] ^= 1

    Trainer._update = flipping
    try:
        return refused(context, **job)
    finally:
        Trainer._update = update


def test_a_flipped_bit_stops_the_run_before_it_is_saved(job, tmp_path, whole):
    """Of weights, and of a buffer."""
    weights, buffer = job("weights", "mae") | ALWAYS, job("buffer", "mae") | ALWAYS
    flips = [
        value | {"function": with_a_flipped_bit, "where": where}
        for value, where in (
            (weights, "encoder.blocks.2.attn.proj.weight"), (buffer, "encoder.pos_embed")
        )
    ]  # fmt: skip
    *messages, verdict = run(2, *flips, buffer, log=tmp_path / "log")
    for message in messages:
        assert "ReplicaError: after step 4 the weights or buffers of rank 1 of 2 differ" in message
    assert 1 <= steps_saved(weights["folder"])[-1] <= 3
    assert verdict == "done"
    identical(whole / "mae", buffer["folder"])
