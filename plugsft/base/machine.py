"""This machine's cores, memory and disk, and this process's rank; limits of cgroups, version 2."""

import os
import platform
import re
import resource
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil

from .errors import DiskError, LaunchError

SWITCHES = {"zero3": "ACCELERATE_USE_DEEPSPEED", "fsdp2": "ACCELERATE_USE_FSDP"}
"""Strategy -> the variable by which accelerate tells a rank."""


@dataclass(frozen=True)
class Machine:
    """The resources of a run: the container's limits, not the hardware's."""

    host: str
    system: str
    cores: int
    memory: int
    """Bytes."""
    rank: int
    world_size: int
    strategy: str
    """How ranks shard the model: "fsdp2", "zero3", or "" if each holds all of it."""

    @property
    def is_main(self) -> bool:
        """Whether this is the main process, which prints and writes files."""
        return self.rank == 0


def env_number(name: str, default: int = 0, least: int = 0) -> int:
    """Return a whole number of the environment; refuse any other text there."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or int(text) < least:
        raise LaunchError(
            f"the environment has {name}={text!r}, and it should be a whole number, {least} or "
            "more; unset it, or correct it"
        )
    return int(text)


def look() -> Machine:
    """Return this machine, with the rank that the launcher set; refuse ranks that cannot be."""
    rank, size = env_number("RANK"), env_number("WORLD_SIZE", 1, 1)
    local, beside = env_number("LOCAL_RANK"), env_number("LOCAL_WORLD_SIZE", size, 1)
    env_number("MASTER_PORT")
    alone = not {"RANK", "MASTER_ADDR"} <= os.environ.keys()
    if rank >= size or local >= beside or (alone and (size > 1 or "LOCAL_RANK" in os.environ)):
        raise LaunchError(
            f"the environment makes this process rank {rank} of {size}, by variables that no "
            "launcher leaves so: unset RANK, LOCAL_RANK and WORLD_SIZE, or start by a launcher"
        )
    return Machine(
        host=platform.node(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=num_cores(),
        memory=memory_limit(),
        rank=rank,
        world_size=size,
        strategy="".join(
            name for name, it in SWITCHES.items() if os.environ.get(it, "").lower() == "true"
        ),
    )


def not_installed(package: str, extra: str) -> str:
    """Return that a package is missing, and the extra of plugsft that has it; "" if it is there."""
    # A folder of that name, such as wandb's for its files, is found too, without an origin.
    if getattr(find_spec(package), "origin", None) is not None:
        return ""
    return f"{package} is not installed: pip install 'plugsft[{extra}]'"


def child_environment(**changes: str) -> dict[str, str]:
    """Return the environment of a Python that plugsft starts.

    Neither it nor a process that it starts imports from the working directory, which may be a
    clone of someone else's recipes.
    """
    return {**os.environ, "PYTHONSAFEPATH": "1", **changes}


def num_cores() -> int:
    """Return the usable cores: the affinity mask, or the container's quota if less."""
    allowed = len(os.sched_getaffinity(0))
    quota = _cgroup("cpu.max").split()
    if quota and quota[0] != "max":
        allowed = min(allowed, max(1, int(quota[0]) // int(quota[1])))
    return allowed


def memory_limit() -> int:
    """Return the usable bytes of memory: the machine's, or the container's if less."""
    total: int = psutil.virtual_memory().total
    limit = _cgroup("memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def available_memory() -> int:
    """Return the bytes of memory for new data, also within a container's or job's limit."""
    available: int = psutil.virtual_memory().available
    for path in re.findall(r"^0::(/.*)", _text("/proc/self/cgroup"), re.M):
        for group in (Path(path), *Path(path).parents):
            limit, used = (_cgroup(f"{group}/memory.{name}") for name in ("max", "current"))
            if limit.isdigit() and used.isdigit():
                facts = _cgroup(f"{group}/memory.stat")
                cached = map(int, re.findall(r"^(?:in)?active_file (\d+)", facts, re.M))
                available = min(available, int(limit) - int(used) + sum(cached))
    return available


def peak_memory() -> int:
    """Return this process's peak memory in bytes."""
    # A process inherits ru_maxrss from its parent.
    if match := re.search(r"VmHWM:\s*(\d+)", _text("/proc/self/status")):
        return int(match[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def free_disk(folder: Path) -> int:
    """Return the free bytes on the disk of a folder, which need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    if not usage.total:  # as of /proc
        raise DiskError(f"{folder}: is no place for files", "name another folder")
    return usage.free


def _cgroup(name: str) -> str:
    # Inside a container, the root of the cgroups holds its own limits.
    return _text(f"/sys/fs/cgroup/{name}").strip()


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
