"""Limits of the machine, as a container sets them."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from plugsft.base import machine
from plugsft.base.machine import (
    available_memory,
    free_disk,
    look,
    memory_limit,
    num_cores,
    peak_memory,
)
from plugsft.ranks.connect import user_set_threads


@pytest.fixture
def container(monkeypatch):
    """Set what the container's files say."""
    said = {}
    monkeypatch.setattr(machine, "_cgroup", lambda name: said.get(name, ""))
    return said


def test_cores_follow_affinity_and_quota(container, monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda process: set(range(8)))
    for quota, cores in [
        ("", 8),
        ("max 100000", 8),
        ("200000 100000", 2),
        ("50000 100000", 1),
        ("9900000 100000", 8),
    ]:
        container["cpu.max"] = quota
        assert num_cores() == cores


def test_memory_is_the_container_s_if_that_is_less(container):
    whole = memory_limit()
    for limit, expected in [("max", whole), ("1000000", 1_000_000), (str(10**18), whole)]:
        container["memory.max"] = limit
        assert memory_limit() == expected


def test_available_memory_is_that_of_the_job_s_group(container, monkeypatch):
    groups = "1:name=systemd:/other\n0::/job/step\n"
    monkeypatch.setattr(machine, "_text", {"/proc/self/cgroup": groups}.get)
    machine_s = available_memory()
    assert 0 < machine_s <= memory_limit()
    cached = "anon 7\nactive_file 100\ninactive_file 200\nshmem 9\n"
    container |= {"/job/memory.max": "100000", "/job/memory.current": "60000"}
    container["/job/memory.stat"] = cached
    assert available_memory() == 40_300, "files in the cache make room"
    container["/job/memory.max"] = "max"
    assert available_memory() > 40_300


def test_peak_memory_is_that_of_the_process_and_not_of_its_parent():
    filler = np.ones(2**26)  # half a gigabyte, touched
    words = "import numpy; numpy.ones(2**24); print(peak_memory())"
    code = f"from plugsft.base.machine import peak_memory; {words}"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert 2**27 < int(result.stdout) < filler.nbytes < peak_memory()


def test_free_disk_of_a_folder_that_is_still_to_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "a/b/c", tmp_path / "file", tmp_path / "file/inside"):
        assert free_disk(place) == pytest.approx(free_disk(tmp_path), rel=0.1)
    monkeypatch.chdir(tmp_path)
    assert free_disk(Path("run/here")) > 0


def test_ranks_are_the_launcher_s(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (look().rank, look().world_size, look().is_main) == (0, 1, True)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert (look().rank, look().world_size, look().is_main) == (3, 8, False)
    assert look().cores >= 1 and look().memory > 0


@pytest.mark.parametrize("switch, strategy", [("true", "fsdp2"), ("True", "fsdp2"), ("no", "")])
def test_the_strategy_is_that_of_accelerate(monkeypatch, switch, strategy):
    """accelerate reads its switch in any case, and writes it as "true" and as "True"."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", switch)
    assert look().strategy == strategy


@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize("threads", [None, "1", "3"])
def test_threads_that_a_user_has_set_are_known(monkeypatch, launched, threads):
    """accelerate's launcher sets one thread if nobody has asked for any."""
    for name in ("OMP_NUM_THREADS", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    if launched:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert user_set_threads() == (threads == "3" or (threads == "1" and not launched))
