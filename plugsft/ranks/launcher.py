"""The launcher of this process: how many ranks it was asked for, and whether it lives."""

import os
import signal
import threading
import time
from collections.abc import Sequence

import psutil
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

PAUSE = 1.0
"""Seconds between two checks of the launcher."""
TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
ended = threading.Event()
"""Whether the launcher of this process has ended while it runs."""


def asked_of_launcher() -> int:
    """Return the number of processes that `accelerate launch` was asked for.

    On a machine without GPU it starts a single process, without a message.
    """
    for _, line in _ancestors():
        if (start := _after_accelerate_launch(line)) is None:
            continue
        known, _ = launch_command_parser().parse_known_args(line[start:])
        if known.num_processes is None and known.config_file:
            return int(load_config_from_file(known.config_file).num_processes or 1)
        return int(known.num_processes or 1)
    return 1


def watch_launcher() -> None:
    """End this process in order when its launcher dies.

    Processes without a launcher, such as a shell's background jobs, are not watched.
    """
    for process, line in _ancestors():
        if _after_accelerate_launch(line) is not None or _is_torchrun(line):
            threading.Thread(target=_watch, args=(process,), daemon=True).start()
            return


def _watch(launcher: psutil.Process) -> None:
    while _lives(launcher):
        time.sleep(PAUSE)
    ended.set()
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        # Before the first step: there is nothing to save.
        os.kill(os.getpid(), signal.SIGTERM)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _ancestors() -> list[tuple[psutil.Process, list[str]]]:
    """Return the processes above this one with their command lines, the nearest first."""
    found = []
    try:
        for process in psutil.Process().parents():
            found.append((process, process.cmdline()))
    except psutil.Error:
        pass  # a process of another user
    return found


def _after_accelerate_launch(line: Sequence[str]) -> int | None:
    """Return where the arguments of `accelerate launch` begin, if a command line is one."""
    words = [os.path.basename(word) for word in line[:4]]
    for index, word in enumerate(words):
        spelt = word in ("accelerate-launch", "accelerate.commands.launch")
        if spelt or (word == "launch" and words[index - 1].startswith("accelerate")):
            return index + 1
    return None


def _is_torchrun(line: Sequence[str]) -> bool:
    return any(os.path.basename(word) in TORCHRUN for word in line[:4])
