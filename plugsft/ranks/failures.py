"""A failed rank notifies the others, even those that hang in a collective.

Nodes beat in the launcher's store: one that dies while data is prepared is noticed.
"""

import os
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import cache

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # made in C++

from ..base.console import print_error
from ..base.errors import PlugsftError, TrainError
from ..base.machine import env_number

PAUSE = 0.5
"""Seconds between two checks for a failed rank."""
GRACE = 10.0
"""Seconds that a rank has to end in order after another rank's failure."""
BEAT, PATIENCE, FIRST = 1.0, 30.0, 600.0
"""Seconds between beats, and without one after which a node counts as dead.

Before the first it may take longer: Python starts slowly from some disks.
"""


def store(seconds: float = 300) -> TCPStore:
    """Connect to the launcher's store, which works before there is a process group."""
    address, port = os.environ["MASTER_ADDR"], env_number("MASTER_PORT")
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=seconds))


def store_key(name: str) -> str:
    """Make a name differ between torchrun's restarts, which share one store."""
    return f"plugsft-{name}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def reason_of(error: BaseException) -> str:
    """Format an error in one line for other ranks."""
    text = "; ".join([*str(error).splitlines(), *getattr(error, "__notes__", ())])
    return text if isinstance(error, PlugsftError) else f"{type(error).__name__}: {text}"


class Failure:
    """The first failure of any rank, in one line that names it."""

    def __init__(self) -> None:
        self.text = ""
        self._store: TCPStore | None = None
        self._received, self._stopped = threading.Event(), threading.Event()

    def listen(self) -> None:
        """Listen for failures; needs a process group."""
        # A host may allow fewer sockets than ranks: those ranks run without.
        with suppress(RuntimeError, KeyError):
            self._store = store(seconds=10)
            threading.Thread(target=self._listen, args=(self._store,), daemon=True).start()

    def publish(self, error: Exception) -> None:
        """Publish this rank's failure, unless another rank did."""
        if self._store is not None:
            with suppress(RuntimeError):
                text = f"rank {dist.get_rank()} failed: {reason_of(error)}"
                first = self._store.compare_set(store_key("failed"), "", text).decode()
                if first == text:
                    self.stop_listening()  # this rank ends by its own error, with its traceback
                # This rank may host the store: let the others read it before it ends.
                time.sleep(2 * PAUSE)

    def reason(self) -> str:
        """Wait a little for the reason of another rank, which this one has lost."""
        self._received.wait(4 * PAUSE)
        return self.text

    def stop_listening(self) -> None:
        """Stop listening before this rank ends."""
        self._stopped.set()

    def _listen(self, shared: TCPStore) -> None:
        key = store_key("failed")
        with suppress(RuntimeError):  # the store ends with the launcher or the main rank
            while not shared.check([key]):
                if self._stopped.wait(PAUSE):
                    return
            self.text = shared.get(key).decode()
            self._received.set()
        if self.text and not self._stopped.wait(GRACE):
            # NCCL waits for a lost rank forever, and nothing can be raised there.
            if os.environ.get("RANK", "0") == "0":
                print_error(f"error: {self.text}")
            os._exit(1)


failure = Failure()
"""The failure of this process's run."""


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
            time.sleep(BEAT)


def number_of_nodes() -> int:
    """Count the machines of the launch; 1 outside of torchrun and accelerate."""
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
    """Name a lost machine, whose ranks can say nothing more."""
    return TrainError(f"machine {node} has ended, before step 1; see its own messages")
