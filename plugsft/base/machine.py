"""What this machine grants us: cores, memory, disk, and our place among the ranks."""

import os
import platform
import re
import resource
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
    quota = (_cgroup("cpu.max") or _first_version_quota()).split()
    if len(quota) == 2 and quota[0] != "max":
        allowed = min(allowed, max(1, int(quota[0]) // int(quota[1])))
    return allowed


def memory_limit() -> int:
    """Return the bytes of memory we may use: the machine's, or the container's if less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup("memory.max") or _cgroup("memory/memory.limit_in_bytes")
    return min(total, int(limit)) if limit.isdigit() else total


def peak_memory() -> int:
    """Return the most bytes of memory this process has held at once."""
    # Linux starts a process with the ru_maxrss of its starter: the peak of another program.
    if found := re.search(r"VmHWM:\s*(\d+)", _text("/proc/self/status")):
        return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def free_disk(folder: Path) -> int:
    """Return the free bytes where a folder lies or would lie."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def is_slow_to_map(folder: Path, machine: Machine) -> bool:
    """Tell whether a folder is on a Windows disk, seen from WSL: each page is fetched by itself."""
    return machine.wsl and re.match("/mnt/[a-z]/", f"{folder.resolve()}/") is not None


def _first_version_quota() -> str:
    """Return what older cgroups grant, as version 2 would write it."""
    quota, period = (_cgroup(f"cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
    return f"{quota} {period}" if quota.isdigit() else ""


def _cgroup(name: str) -> str:
    # A container sees its own limits at the root.
    return _text(f"/sys/fs/cgroup/{name}").strip()


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
