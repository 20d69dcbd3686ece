"""`maect clean`: training states that are no longer needed, and their size on disk."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from maect.core.errors import UserError
from maect.launch.owner import lock_folder
from maect.launch.record import read_job, verdict
from maect.records import RunRecord, is_finished
from maect.tools.plan_text import size_text
from maect.train.run_folder import check_weights, remove_states


@dataclass(frozen=True)
class OldStates:
    """Files of a training that may go, or that must stay for the reason in `needed`."""

    folder: Path
    bytes: int
    needed: str = ""


def states(root: Path) -> Iterator[OldStates]:
    """Return the states in a results folder, those of other recipes and damaged ones included.

    A state is what an unfinished training resumes from, and what a finished one writes its files
    from again should they be lost: it may go once these are there, with the bits of the record.
    """
    for run in sorted(path for path in root.glob("runs/*") if path.is_dir()):
        for folder in sorted([*run.glob("state"), *run.glob("stale-*/state")]):
            files = [path for path in folder.rglob("*") if path.is_file()]
            needed = _needed(folder.parent) or ("a link" if folder.is_symlink() else "")
            if needed and folder.parent != run:
                needed = f"of another recipe, {needed}; if it may be lost: rm -r {folder.parent}"
            yield OldStates(folder, sum(path.stat().st_size for path in files), needed)


def _needed(run: Path) -> str:
    """Return why the states of a finished run must stay; empty if they need not."""
    if not is_finished(run):
        return "its training is not finished"
    try:
        files = RunRecord.of(run).files
        check_weights(run)
    except UserError as error:
        return f"what it left is damaged: {error}"
    if not all((run / name).exists() for name in files):
        return "what it left is not complete"
    job = read_job(run)  # last, since reading all weights takes long
    may_run = job is not None and job.state != "ended" and verdict(run, job) is None
    return f"{job} may still write it" if may_run else ""


def clean(root: Path, remove: bool) -> None:
    """Print the states that may go and their sizes; remove them with `remove`.

    Raises:
        UserError: there are no runs, or something is at work there.
    """
    if not any(root.glob("runs/*")):
        raise UserError(f"{root}: no runs there; give a results folder such as results/digits")
    freed = 0
    with lock_folder(root, patience=0):
        for state in states(root):
            note = f"  stays: {state.needed}" if state.needed else ""
            print(f"{size_text(state.bytes):>8}  {state.folder}{note}")
            if state.needed:
                continue
            freed += state.bytes
            if remove:
                remove_states(state.folder.parent)
                if state.folder.exists():
                    raise UserError(f"{state.folder}: not removed; is it another user's?")
    total = size_text(freed)
    if remove:
        print(f"{root}: {total} freed")
    elif freed:
        print(f"{root}: {total} can be freed: the same command with --remove")
    else:
        print(f"{root}: nothing can be freed")
