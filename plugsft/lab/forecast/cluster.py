"""The ranks that a forecast is for: how many, and the memory of each."""

from dataclasses import dataclass, replace

import torch

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
}
"""GB of each GPU, from its data sheet."""


@dataclass(frozen=True)
class Cluster:
    """The machines to train on."""

    device: str
    """Name of the GPU, or "CPU"."""
    gpu: bool
    memory: float
    """Bytes of each rank."""
    machines: int
    per_machine: int

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
