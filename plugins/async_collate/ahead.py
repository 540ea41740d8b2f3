"""A thread that builds windows ahead of the loop, and copies them to the device."""

import time
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Semaphore, Thread

import torch

from plugsft import Build, Fed, PluginError


@dataclass
class Built:
    """What became of a step: its window, or what was raised instead."""

    fed: Fed | BaseException
    seconds: float
    ready: torch.cuda.Event | None = None
    """Where the copies of its tensors end, on the stream beside."""


class Ahead:
    """A thread that builds windows in order, at most `depth` more than were taken."""

    def __init__(self, build: Build, steps: range, depth: int) -> None:
        self.taken, self.built, self.waited = 0, 0.0, 0.0
        self._steps, self._closed = steps, False
        self._room, self._done = Semaphore(depth), SimpleQueue[Built]()
        # Made here: the thread has a current device of its own, and takes that of the stream.
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # untyped upstream
        self._side = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]
        self._thread = Thread(
            target=self._work, args=(build, steps), name="async_collate", daemon=True
        )
        self._thread.start()

    def take(self, step: int) -> Fed:
        """Wait for the window of a step, which must be the one in flight."""
        due = self._steps[self.taken] if self.taken < len(self._steps) else None
        if self._closed or step != due:
            raise PluginError(
                f"async_collate: step {step} was asked for, and "
                f"{'nothing' if self._closed or due is None else f'step {due}'} is in flight: "
                "windows are taken in order, each once"
            )
        started = time.perf_counter()
        one = self._done.get()
        self.waited += time.perf_counter() - started
        self.built += one.seconds
        try:
            if isinstance(one.fed, BaseException):
                self._closed = True
                raise one.fed
            if one.fed.window.step != step:
                raise PluginError(
                    f"async_collate: step {step} was asked for, and the window that was built for "
                    f"it is of step {one.fed.window.step}"
                )
            if one.ready is not None:
                hand_over(one.fed, one.ready)
            self.taken += 1
            self._room.release()
            return one.fed
        finally:
            # What is raised holds this frame; the frame must not hold it.
            del one

    def close(self, patience: float) -> None:
        """End the thread. What it built or raised and nobody took goes with this object."""
        self._closed = True
        self._room.release()
        self._thread.join(patience)

    def _work(self, build: Build, steps: range) -> None:
        for step in steps:
            self._room.acquire()
            if self._closed or not self._build(build, step):
                return

    def _build(self, build: Build, step: int) -> bool:
        started, ready = time.perf_counter(), None
        try:
            # Where there is no stream, this does nothing.
            with torch.cuda.stream(self._side):
                fed = build(step)
                if self._side is not None:
                    ready = self._side.record_event()
        except BaseException as error:  # whatever it is, the loop must not wait for ever
            self._done.put(Built(error, time.perf_counter() - started))
            return False
        self._done.put(Built(fed, time.perf_counter() - started, ready))
        return True


def hand_over(fed: Fed, ready: torch.cuda.Event) -> None:
    """Let the current stream use tensors that were copied on another, once they are there."""
    now = torch.cuda.current_stream()
    now.wait_event(ready)
    for batch in fed.batches:
        for value in batch.values():
            # Else their memory could be given away as soon as nobody names them.
            if isinstance(value, torch.Tensor) and value.is_cuda:
                value.record_stream(now)
