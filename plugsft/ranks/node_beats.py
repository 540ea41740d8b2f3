"""Nodes beat in the launcher's store: one that dies while data is prepared is noticed."""

import os
import threading
import time
from contextlib import suppress
from functools import cache

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # made in C++

from ..base.errors import TrainError
from ..base.machine import env_number
from .failures import store, store_key

PAUSE, PATIENCE, FIRST = 1.0, 30.0, 600.0
"""Seconds between beats, and without one after which a node counts as dead.

Before the first it may take longer: Python starts slowly from some disks.
"""


@cache
def launcher_store() -> TCPStore:
    """Connect to the launcher's store once: a lost machine 0 breaks the connection."""
    return store()


def keep_beating() -> None:
    """Beat for this node until the process ends; for a launch on several nodes."""
    if number_of_nodes() > 1:
        launcher_store()
        if os.environ["LOCAL_RANK"] == "0":
            threading.Thread(target=_beat, daemon=True).start()


def _beat() -> None:
    with suppress(RuntimeError):  # the store ends with its launcher
        while launcher_store().add(store_key(f"beat-{os.environ['GROUP_RANK']}"), 1):
            time.sleep(PAUSE)


def number_of_nodes() -> int:
    """Return the number of nodes; 1 outside of torchrun and accelerate."""
    return env_number("GROUP_WORLD_SIZE", 1, 1)


class Nodes:
    """The nodes of a launch, as their beats show them."""

    def __init__(self) -> None:
        self._seen = dict.fromkeys(range(number_of_nodes()), (0, time.monotonic()))

    def ensure_alive(self) -> None:
        """Raise if a node has stopped beating; a node alone does not beat."""
        now = time.monotonic()
        for node, (beats, since) in self._seen.items() if len(self._seen) > 1 else ():
            if (newest := launcher_store().add(store_key(f"beat-{node}"), 0)) != beats:
                self._seen[node] = newest, now
            elif now - since > (PATIENCE if beats else FIRST):
                raise ended(node)


def ended(node: int) -> TrainError:
    """Return the error of a lost node."""
    return TrainError(f"machine {node} has ended, before step 1; see its own messages")
