"""How many devices this machine has."""

import os
import subprocess

from maect.core.errors import UserError


def count_devices(devices: str) -> int:
    """`auto`: the GPUs of this machine, or two processes where there is none; `gpus`: or one."""
    if devices not in ("auto", "gpus"):
        if not devices.isdecimal() or not int(devices):
            raise UserError(f"--devices {devices}: a positive number, auto or gpus")
        return int(devices)
    processes = 2 if devices == "auto" else 1
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        return len(visible.split(","))
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return processes
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) or processes
