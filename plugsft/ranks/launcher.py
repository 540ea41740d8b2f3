"""The launcher of this process: found in its environment; its death ends this process in order."""

import ctypes
import os
import signal

LAUNCHER_ENDED = signal.SIGUSR2
"""What the system sends to a rank when its launcher ends; without a handler, it ends the rank."""
PR_SET_PDEATHSIG = 1
"""From Linux's prctl.h: the signal that this process gets when its parent ends."""


def started_too_few() -> bool:
    """Whether `accelerate launch` was asked for several processes and started one.

    It does so, without a message, on a machine without GPU. Its environment then has the address
    of a main process, but no number of ranks.
    """
    return by_accelerate() and "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ


def by_accelerate() -> bool:
    """Whether `accelerate launch` started this process, alone.

    It always sets this variable. The precision's is no sign: people export that one themselves.
    """
    return "ACCELERATE_DYNAMO_BACKEND" in os.environ


def watch_launcher() -> None:
    """End this process in order when its launcher dies: nobody else would end it.

    Processes without a launcher, such as a shell's background jobs, are not watched: they go on
    when their shell ends.
    """
    if by_accelerate() or "TORCHELASTIC_RUN_ID" in os.environ:
        launcher = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, LAUNCHER_ENDED)
        if os.getppid() != launcher:  # it ended a moment ago
            os.kill(os.getpid(), LAUNCHER_ENDED)
