"""Outputs of a finished training: its weights and, last, its completion record."""

import time

from maect.core.context import Context
from maect.core.entries import entries, missing
from maect.core.files import sha256_file
from maect.data.index import Index
from maect.records import RunRecord
from maect.train.checkpoint import StateReader, saved, state_record
from maect.train.device_time import DeviceTime
from maect.train.run_folder import origin, read_notes
from maect.train.stage import RunInputs


def write_final_record(
    run: RunInputs, identity: str, images: Index, context: Context, clock: DeviceTime
) -> None:
    """Export the weights of the final state and write the completion record, last; on rank 0.

    Args:
        run: the run, whose last state is saved.
        identity: its fingerprint.
        images: that it was trained on.
        context: rank 0's.
        clock: of the training.
    """
    state = saved(run.folder / "state")[0]
    reader = StateReader(state, state_record(state, identity))
    exported = run.stage.export(run, reader, images)
    logged = entries(run.folder / "metrics.jsonl")
    timing = [entry["timing"] for entry in logged]
    speeds = sorted(t["images_per_second"] for t in timing)
    held = clock.held
    steps = run.stage.total_steps(images.n)
    unlogged = missing({entry["step"] for entry in logged}, steps, steps)
    record = {
        "run": run.folder.name,
        "fingerprint": identity,
        **run.description,
        "index_digest": images.digest,
        "view_of": images.view_of,
        **exported,
        "files": run.stage.outputs,
        "sha256": {name: sha256_file(run.folder / name) for name in run.stage.outputs},
        "world_size": context.world_size,
        "device_hours": timing[-1]["device_seconds"] / 3600 if timing else 0.0,
        "held_hours": held / 3600,
        "useful_part": min(1.0, clock.useful / held) if held else None,
        "images_per_second": speeds[len(speeds) // 2] if speeds else 0.0,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **origin(),
        "attempts": read_notes(run.folder).get("attempts", []),
        "losses": [loss / max(count, 1) for loss, count in reader.record["losses"]],
        "scores": reader.record.get("scores"),
        "unlogged_steps": unlogged or None,
    }
    RunRecord.model_validate(record).write(RunRecord.path(run.folder))
