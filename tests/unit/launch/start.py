"""A launcher: `python start.py FOLDER ARGUMENTS RESOURCES [detach] [impatient]`."""

import json
import sys
from pathlib import Path

from maect.core.errors import UserError
from maect.core.log import command_log
from maect.launch import Resources, Task, launch, launcher, record
from maect.launch.local import Local

# File systems that others share are looked at less often; tests need not wait as long.
launcher.TICK, Local.interval = 0.1, 0.1


def without_patience() -> None:
    """A job that is asked to stop has no time but that of its save, from its first moment on."""
    is_saving, launcher.STOP_PATIENCE, launcher.STOP_STEPS = record.is_saving, 0.0, 0

    def spared(folder: Path, job: record.Job) -> bool:
        return not (folder / "saving").exists() or is_saving(folder, job)

    record.is_saving = spared


def main() -> int:
    folder = Path(sys.argv[1])
    arguments, resources = json.loads(sys.argv[2]), json.loads(sys.argv[3])
    function = arguments.pop("function", "counting:count")
    identity = arguments.pop("identity", "")
    if "impatient" in sys.argv[4:]:
        without_patience()
    try:
        with command_log():
            launch(
                Task(function, {"folder": str(folder), **arguments}, identity),
                folder,
                Resources(**{**resources, "sbatch": tuple(resources.get("sbatch", ()))}),
                is_done=(folder / "done.json").exists,
                describe="count",
                detach="detach" in sys.argv[4:],
            )
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        # Not getrusage: its peak includes that of the process that started us.
        peak = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
        print(f"peak {peak} KB, torch {'torch' in sys.modules}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
