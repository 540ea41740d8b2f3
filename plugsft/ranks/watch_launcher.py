"""Ends this process in order when its launcher dies."""

import os
import signal
import threading
import time

from .launcher import WATCHED, by_accelerate, launcher_ended

PAUSE = 1.0
"""Seconds between two checks of the launcher."""


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
