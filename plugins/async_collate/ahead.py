"""A thread that builds batches ahead of the loop, and copies them to the device."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Semaphore, Thread

import torch

from plugsft import LoadedStep


@dataclass
class Built:
    """The batches of a step, or the error of building them."""

    result: LoadedStep | BaseException
    seconds: float
    ready: torch.cuda.Event | None = None
    """Event after the copies of its tensors, on the side stream."""


class Ahead:
    """A thread that builds steps in order, at most `depth` ahead of the loop."""

    def __init__(self, build: Callable[[int], LoadedStep], steps: range, depth: int) -> None:
        self.taken, self.built, self.waited = 0, 0.0, 0.0
        self._closed = False
        self._room, self._done = Semaphore(depth), SimpleQueue[Built]()
        # Created here, on the current device of the main thread: each thread has its own.
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # untyped upstream
        self._side = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]
        self._thread = Thread(
            target=self._work, args=(build, steps), name="async_collate", daemon=True
        )
        self._thread.start()

    def take(self) -> LoadedStep:
        """Wait for the batches of the next step; no other call may follow an error."""
        started = time.perf_counter()
        built = self._done.get()
        self.waited += time.perf_counter() - started
        self.built += built.seconds
        try:
            if isinstance(built.result, BaseException):
                raise built.result
            if built.ready is not None:
                wait_for_copies(built.result, built.ready)
            self.taken += 1
            self._room.release()
            return built.result
        finally:
            # A raised error refers to this frame: break the cycle.
            del built

    def close(self, patience: float) -> None:
        """End the thread; drop the batches and errors that the loop has not taken."""
        self._closed = True
        self._room.release()
        self._thread.join(patience)

    def _work(self, build: Callable[[int], LoadedStep], steps: range) -> None:
        for step in steps:
            self._room.acquire()
            if self._closed or not self._build(build, step):
                return

    def _build(self, build: Callable[[int], LoadedStep], step: int) -> bool:
        started, ready = time.perf_counter(), None
        try:
            # Without a stream, this does nothing.
            with torch.cuda.stream(self._side):
                loaded = build(step)
                if self._side is not None:
                    ready = self._side.record_event()
        except BaseException as error:  # any error must reach the loop, which waits
            self._done.put(Built(error, time.perf_counter() - started))
            return False
        self._done.put(Built(loaded, time.perf_counter() - started, ready))
        return True


def wait_for_copies(loaded: LoadedStep, ready: torch.cuda.Event) -> None:
    """Let the current stream wait for tensors that were copied on the side stream."""
    stream = torch.cuda.current_stream()
    stream.wait_event(ready)
    for batch in loaded.batches:
        for value in batch.values():
            # The allocator must not reuse their memory before this stream has used them.
            if isinstance(value, torch.Tensor) and value.is_cuda:
                value.record_stream(stream)
