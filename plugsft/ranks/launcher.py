"""The launcher of this process: found in its environment, and watched while it runs."""

import os
import signal
import threading
import time

WATCHED: list[int] = []
"""Process number of the launcher."""
PAUSE = 1.0
"""Seconds between two checks of the launcher."""


def started_too_few() -> bool:
    """Tell whether `accelerate launch` was asked for several processes and started one.

    It does so, without a message, on a machine without GPU. Its environment then has the address
    of a main process, but no number of ranks.
    """
    return by_accelerate() and "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ


def launcher_ended() -> bool:
    """Tell whether the launcher has ended: this process then has another parent."""
    return bool(WATCHED) and os.getppid() not in WATCHED


def by_accelerate() -> bool:
    """Tell whether `accelerate launch` started this process, alone.

    It always sets this variable. The precision's is no sign: people export that one themselves.
    """
    return "ACCELERATE_DYNAMO_BACKEND" in os.environ


def watch_launcher() -> None:
    """End this process in order when its launcher dies.

    Processes without a launcher, such as a shell's background jobs, are not watched.
    """
    if by_accelerate() or "TORCHELASTIC_RUN_ID" in os.environ:
        WATCHED[:] = [os.getppid()]
        threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    while not launcher_ended():
        time.sleep(PAUSE)
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        # Before the first step: there is nothing to save.
        os.kill(os.getpid(), signal.SIGTERM)
