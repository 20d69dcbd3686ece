"""Thirty kills at random moments over the three stages end in the bits of runs without any.

`MAECT_KILLS=30 pytest -s -m slow` with this file prints each kill; a run of it is recorded in
docs/results/reliability/kills.csv.
"""

import os
import random
import time
from pathlib import Path

import pytest
from ranks import Ranks, run
from test_resume import identical, steps_saved

EPOCHS, STEPS = 20, 50
STAGES = [("mae", "mae", None), ("head", "head_aug", "mae"), ("ct", "ct_aug", "head")]
# Who is killed, and when: in the start-up, at any moment of a step, while files are being written
# (the first is killed as soon as a temporary file is seen), or between the last step and run.json.
KINDS = [
    ("all ranks", "step"), ("rank 0", "step"), ("rank 1", "step"), ("all ranks", "save"),
    ("rank 0", "save"), ("rank 1", "save"), ("all ranks", "step"), ("all ranks", "start"),
    ("rank 0", "step"), ("all ranks", "end"),
]  # fmt: skip


def reached(folder):
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def is_saving(folder):
    return any(folder.glob("state/step-*/.rank-*.tmp"))


def strike(ranks, folder, who, when, target, delay):
    """Kill one rank or all at the moment that was drawn; what they left behind."""
    conditions = {
        "start": lambda: True,
        "step": lambda: reached(folder) >= target,
        "save": lambda: reached(folder) >= target and is_saving(folder),
        "end": lambda: STEPS in steps_saved(folder),
    }
    deadline = time.monotonic() + 120
    while not conditions[when]() and all(p.is_alive() for p in ranks.processes):
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    if when in ("start", "step"):
        time.sleep(delay)
    alive = all(process.is_alive() for process in ranks.processes)
    ranks.kill(None if who == "all ranks" else [int(who[-1])])
    ranks.kill()  # as the launcher does with the others
    half = [p.name for p in folder.glob("state/step-*") if not (p / "state.json").exists()]
    return alive, bool(half) or is_saving(folder)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_encoders_are_those_of_runs_without_kills(job, tmp_path):
    count = int(os.environ.get("MAECT_KILLS", "30"))
    generator, log = random.Random(count), tmp_path / "log"
    whole = [
        job(name, recipe, source, folder=tmp_path / "whole", epochs=EPOCHS)
        for name, recipe, source in STAGES
    ]
    assert run(2, *whole, log=log) == ["done"] * 3
    landed = torn = 0
    for number, (name, recipe, source) in enumerate(STAGES):
        kills = count // 3 + (number < count % 3)
        broken = job(name, recipe, source, folder=tmp_path / "broken", epochs=EPOCHS)
        broken |= {"save_every_minutes": 0.0}
        folder = Path(broken["folder"])
        kinds = [KINDS[i % len(KINDS)] for i in range(kills)]
        generator.shuffle(kinds)
        kinds.sort(key=lambda kind: kind[1] == "end")
        for (who, when), target in zip(
            kinds, sorted(generator.sample(range(2, STEPS - 3), kills)), strict=True
        ):
            ranks = Ranks(2, [broken], log)
            alive, half = strike(ranks, folder, who, when, target, generator.uniform(0, 0.1))
            landed, torn = landed + alive, torn + half
            states = ", ".join(map(str, steps_saved(folder))) or "none"
            print(f"| {name} | {who} | {when} | {reached(folder)} | {states} | {half} |")
        assert run(2, broken, log=log) == ["done"]
        identical(whole[number]["folder"], folder)
    print(f"{landed} of {count} kills hit live ranks; {torn} left a state half written")
    assert landed == count and "resuming from step" in log.read_text()
