"""What this machine grants us: cores, memory, disk, and our place among the ranks."""

import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """The limits a run lives in, as the container sets them, not as the hardware has them."""

    host: str
    system: str
    cores: int
    memory: int
    """Bytes."""
    rank: int
    world_size: int
    wsl: bool

    @property
    def is_main(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0


def look() -> Machine:
    """Read the machine and the launcher's environment."""
    release = platform.release()
    return Machine(
        host=platform.node(),
        system=f"{platform.system()} {release} {platform.machine()}",
        cores=num_cores(),
        memory=memory_limit(),
        rank=int(os.environ.get("RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        wsl="microsoft" in release.lower(),
    )


def num_cores() -> int:
    """Return the cores we may keep busy: affinity, and the container's quota."""
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = _cgroup("cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        allowed = min(allowed, max(1, int(quota[0]) // int(quota[1])))
    return allowed


def memory_limit() -> int:
    """Return the bytes of memory we may use: the machine's, or the container's if less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup("memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def free_disk(folder: Path) -> int:
    """Return the free bytes where a folder lies or would lie."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _cgroup(name: str) -> str:
    # Version 2 of cgroups; a container sees its own limits at the root.
    try:
        return Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return ""
