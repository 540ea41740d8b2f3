"""The ranks that a forecast is for: how many, and the memory of each."""

from dataclasses import dataclass, replace

import torch

from ...base.console import format_count, format_size
from ...base.machine import look

GB = 10**9
PER_MACHINE = 8
"""Default number of GPUs of a machine."""

GPU_MEMORY = {
    "B200": 180,
    "H200": 141,
    "H100": 80,
    "A100": 80,
    "A100-40GB": 40,
    "MI300X": 192,
    "L40S": 48,
    "4090": 24,
    "T4": 16,
    "V100": 16,
    "V100-32GB": 32,
}
"""GB (10^9 bytes) of each GPU, from its data sheet."""
ANY = "GPU"
"""The device of a cluster, if only its memory is known."""


@dataclass(frozen=True)
class Cluster:
    """The machines to train on."""

    device: str
    """Name of the GPU, "GPU" for any, or "CPU"."""
    gpu: bool
    memory: float
    """Bytes of each rank."""
    machines: int
    per_machine: int
    listed: int = 0
    """GB on the data sheet, if `memory` comes from there."""

    def __str__(self) -> str:
        memory = f"{format_size(self.memory)} each" if self.ranks > 1 else format_size(self.memory)
        memory += f" ({self.listed} GB on the data sheet)" if self.listed else ""
        if not self.gpu:
            return f"CPU: {format_count(self.ranks, 'rank')} on this machine, {memory}"
        each = f"{self.machines:,} machines with {self.per_machine} {self.device} each"
        where = each if self.machines > 1 else f"{self.per_machine} {self.device}"
        return f"GPUs: {where}, {memory}"

    @property
    def ranks(self) -> int:
        """Number of ranks on all machines."""
        return self.machines * self.per_machine

    @property
    def reserved(self) -> float:
        """Bytes of a rank that hold no tensors."""
        return 1.5 * GB if self.gpu else 0.75 * GB

    @property
    def reserved_for(self) -> str:
        """The owners of the reserved bytes."""
        return "driver, NCCL and gaps" if self.gpu else "Python and its libraries"

    def doubled(self) -> "Cluster":
        """Return twice as many ranks: in the machine, or on more machines where it is full."""
        full = self.machines > 1 or self.per_machine >= PER_MACHINE
        machines, per_machine = (2, 1) if full else (1, 2)
        return replace(
            self,
            machines=machines * self.machines,
            per_machine=per_machine * self.per_machine,
        )


def this_device() -> tuple[str, bool, float]:
    """Return the name of this machine's GPU, or "CPU"; whether it is a GPU; its bytes."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(), True, torch.cuda.get_device_properties().total_memory
    return "CPU", False, look().memory
