"""How fast a device is: measured where something was measured, else from operations."""

from dataclasses import dataclass
from pathlib import Path

from maect.core.errors import UserError
from maect.core.files import read_mapping
from maect.recipes import Encoder
from maect.recipes.flops import peak_flops

UTILISATION = 0.35
FP32 = (
    1 / 16
)  # float32 without TF32 against dense bfloat16: A100 19.5 of 312 TFLOP/s, H100 67 of 989
CPU_RATE = 2e10  # FLOP/s of a CPU process of a few cores in PyTorch, where there is no GPU: a guess


@dataclass(frozen=True)
class Device:
    """What one rank computes on.

    Attributes:
        name: as of the driver, such as A100, or cpu.
        utilisation: part of the peak that a training reaches.
    """

    name: str
    utilisation: float = UTILISATION

    @property
    def rate(self) -> float:
        """FLOP/s of a training in bfloat16.

        Raises:
            UserError: the device is not in `maect.recipes.flops.PEAKS`.
        """
        if self.name == "cpu":
            return CPU_RATE
        peak = peak_flops(self.name)
        if peak is None:
            raise UserError(f"--device {self.name}: its peak is not known; name one like A100")
        return peak * self.utilisation

    @property
    def source(self) -> str:
        """Where `rate` is from, for people."""
        if self.name == "cpu":
            return f"operations at {CPU_RATE / 1e9:.0f} GFLOP/s a process"
        return f"operations at {self.utilisation:.0%} of an {self.name}'s peak"


def measured(root: Path, stage: str, size: str, encoder: Encoder) -> tuple[float, str] | None:
    """Images per second of one device in a stage, and the file that says so.

    A finished run with the same encoder is nearer to the truth than a `throughput` result, which
    is without loader and network.
    """
    for file in sorted(root.glob("runs/*/run.json")):
        record = read_mapping(file)
        same = record.get("stage") == stage and record.get("encoder") == encoder.model_dump()
        if same and record.get("images_per_second") and record.get("world_size"):
            return record["images_per_second"] / record["world_size"], str(file)
    for file in sorted(root.glob("evaluations/*/*.json")):
        result = read_mapping(file)
        about = result.get("provenance", {}).get("protocol"), result.get("settings", {}).get("size")
        speed = result.get("metrics", {}).get("samples_per_second", {})
        if about == ("throughput", size) and stage in speed:
            return speed[stage], str(file)
    return None
