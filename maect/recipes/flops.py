"""Rates of devices, by the names that their drivers give."""

# Dense bfloat16 rates of one device in FLOP/s (NVIDIA's data sheets), by words of the name that
# the driver gives; of several that fit, the first.
PEAKS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
}


def peak_flops(device: str) -> float | None:
    """Dense bfloat16 FLOP/s of a whole device by its driver's name, or None if unknown."""
    words = f" {device.replace('-', ' ')} "  # as words: an RTX A4000 is no A40
    if " MIG " in words:
        return None
    return next((peak for name, peak in PEAKS.items() if f" {name} " in words), None)


def relative_speed(device: str) -> float:
    """Peak of a device relative to an A100's; 1 where it is not known."""
    return (peak_flops(device) or PEAKS["A100"]) / PEAKS["A100"]
