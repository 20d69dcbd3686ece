"""A launcher: `python start.py FOLDER ARGUMENTS RESOURCES`."""

import json
import sys
from pathlib import Path

from maect.core.errors import UserError
from maect.core.log import command_log
from maect.launch import Resources, Task, launch, launcher
from maect.launch.local import Local

# File systems that others share are looked at less often; tests need not wait as long.
launcher.TICK, Local.interval = 0.1, 0.1


def main() -> int:
    folder = Path(sys.argv[1])
    arguments, resources = json.loads(sys.argv[2]), json.loads(sys.argv[3])
    function = arguments.pop("function", "counting:count")
    identity = arguments.pop("identity", "")
    try:
        with command_log():
            launch(
                Task(function, {"folder": str(folder), **arguments}, identity),
                folder,
                Resources(**resources).resolved(),
                is_done=(folder / "done.json").exists,
                describe="count",
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
