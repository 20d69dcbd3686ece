"""Rates of devices, by the names that their drivers give."""

from pathlib import Path

from maect.core.yaml_files import read_yaml

PEAKS: dict[str, float] = read_yaml(Path(__file__).with_suffix(".yaml"))


def peak_flops(device: str) -> float | None:
    """Dense bfloat16 FLOP/s of a whole device by its driver's name, or None if unknown."""
    words = f" {device.replace('-', ' ')} "  # as words: an RTX A4000 is no A40
    if " MIG " in words:
        return None
    return next((peak for name, peak in PEAKS.items() if f" {name} " in words), None)


def relative_speed(device: str) -> float:
    """Peak of a device relative to an A100's; 1 where it is not known."""
    return (peak_flops(device) or PEAKS["A100"]) / PEAKS["A100"]
