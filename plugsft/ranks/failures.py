"""A watch over all ranks, kept by a thread of each of them in the launcher's store.

A rank that fails writes its reason there, and the others end with it, even those that prepare data
or hang in a collective. Each machine beats there: one that dies while data is prepared is noticed.
"""

import os
import threading
import time
from contextlib import suppress
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # made in C++

from ..base.console import print_error
from ..base.errors import PlugsftError, TrainError
from ..base.machine import env_number

PAUSE = 0.5
"""Seconds between two looks at the store, and between two beats."""
GRACE = 10.0
"""Seconds that a rank has to end in order after another rank's failure."""
SILENT, FIRST = 30.0, 600.0
"""Seconds without a beat after which a machine counts as dead.

Before the first beat it may take longer: Python starts slowly from some disks.
"""
MOST_REQUESTS = 2_000
"""The most that waiting ranks, all together, ask of the store in a second."""


def connect_store() -> TCPStore:
    """Connect to the launcher's store, which works before there is a process group."""
    address, port = os.environ["MASTER_ADDR"], env_number("MASTER_PORT")
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))


def store_key(name: str) -> str:
    """Make a name differ between torchrun's restarts, which share one store."""
    return f"plugsft-{name}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def describe_failure(error: BaseException) -> str:
    """Describe an error and its notes in one line, for other ranks and the record."""
    text = "; ".join([*str(error).splitlines(), *getattr(error, "__notes__", ())])
    if text and isinstance(error, PlugsftError | KeyboardInterrupt):
        return text
    return f"{type(error).__name__}: {text}"


class PeerError(TrainError):
    """Another rank failed; this one ends with that rank's reason."""


class Watch:
    """Waits for the first failure of any rank: one line that names the rank."""

    def __init__(self) -> None:
        self.reason = ""
        self._store: TCPStore | None = None
        self._received, self._ended = threading.Event(), threading.Event()

    def start(self) -> None:
        """Start the thread, once there is a store."""
        if self._store is None:
            self._store = connect_store()
            threading.Thread(target=self._run, args=(self._store,), daemon=True).start()

    def end(self) -> None:
        """End the watch, as this rank ends."""
        self._ended.set()

    def publish(self, error: Exception) -> None:
        """Tell the other ranks of this one's failure, unless another rank failed before."""
        shared, self._store = self._store, None  # a rank says it once
        if shared is None:
            return
        with suppress(RuntimeError):  # the store has ended
            text = f"rank {os.environ['RANK']} failed: {describe_failure(error)}"
            first = shared.compare_set(store_key("failed"), "", text).decode()
            if first == text:
                self.end()  # this rank ends by its own error, with its traceback
            # This rank may host the store: let the others read it before it ends.
            time.sleep(2 * PAUSE)

    def wait_for_reason(self) -> str:
        """Wait a little for the reason of another rank, which this one has lost."""
        self._received.wait(4 * PAUSE)
        return self.reason

    def wait_for_ranks(self, size: int) -> None:
        """Wait until all ranks have come here, another one has failed, or a machine has died."""
        shared, here = self._store, store_key("prepared")
        assert shared is not None
        machines = range(env_number("GROUP_WORLD_SIZE", 1, 1))
        seen = dict.fromkeys(machines, (0, time.monotonic()))
        try:
            shared.add(here, 1)
            while shared.add(here, 0) < size:
                if self.reason:
                    # A launcher takes the exit code of the first rank that ends: the failed one.
                    time.sleep(GRACE / 2)
                    raise PeerError(self.reason)
                if os.environ["RANK"] == "0":
                    ensure_alive(shared, seen)
                time.sleep(max(0.2, size / MOST_REQUESTS))
        except RuntimeError as error:  # machine 0 has the store
            raise ended(0) from error

    def _run(self, shared: TCPStore) -> None:
        beat = store_key(f"beat-{os.environ.get('GROUP_RANK', '0')}")
        with suppress(RuntimeError):  # the store ends with the launcher or the main rank
            while not shared.check([store_key("failed")]):
                if os.environ.get("LOCAL_RANK") == "0":
                    shared.add(beat, 1)
                if self._ended.wait(PAUSE):
                    return
            self.reason = shared.get(store_key("failed")).decode()
            self._received.set()
        if self.reason and not self._ended.wait(GRACE):
            # NCCL waits for a lost rank forever, and nothing can be raised there.
            if os.environ["RANK"] == "0":
                print_error(f"error: {self.reason}")
            os._exit(1)


watch = Watch()
"""The watch of this process."""


def ensure_alive(shared: TCPStore, seen: dict[int, tuple[int, float]]) -> None:
    """Raise if a machine has stopped beating; `seen`: its newest beat, and when that was new."""
    now = time.monotonic()
    for machine, (beats, since) in seen.items():
        newest = shared.add(store_key(f"beat-{machine}"), 0)
        if newest != beats:
            seen[machine] = newest, now
        elif now - since > (SILENT if beats else FIRST):
            raise ended(machine)


def ended(machine: int) -> TrainError:
    """Name a lost machine, whose ranks can say nothing more."""
    return TrainError(f"machine {machine} has ended, before step 1; see its own messages")
