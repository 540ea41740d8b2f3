"""Stopping on signals: finish the step, save, and say how to resume."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from accelerate import Accelerator

from ..base.errors import Stopped
from .agree import agreed
from .launcher import launcher_ended


class Stop:
    """Catches signals and the launcher's end; a later second signal ends the run at once."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    REPEATED = 2.0
    """Seconds: Ctrl-C comes from the terminal, and a moment later from the launcher too."""

    def __init__(self) -> None:
        self._signal, self._received = "", 0.0
        self._error: Exception | None = None
        self._handlers: dict[int, Any] = {}
        """The handlers before this one, restored at the end."""

    @property
    def requested(self) -> bool:
        """Whether this process was told to stop, or failed."""
        return bool(self._signal) or self._error is not None or launcher_ended()

    @contextmanager
    def defer_error(self) -> Iterator[None]:
        """Store an error until the end of the next step, where all ranks stop together."""
        try:
            yield
        except Exception as error:
            self._error = self._error or error

    @contextmanager
    def raise_deferred(self) -> Iterator[None]:
        """Raise an error of the last step, which no later step would raise."""
        yield
        if self._error is not None:
            raise self._error

    def raise_stopped(self, accelerator: Accelerator, step: int, output: str) -> None:
        """End the run after a step, on every rank."""
        with agreed(accelerator, "logging metrics"):
            if self._error is not None:
                raise self._error
        other = "the end of its launcher" if launcher_ended() else "another rank"
        raise Stopped(
            f"stopped by {self._signal or other} after step {step}: saved; "
            f"resume with --resume ({output})",
            128 + (signal.Signals[self._signal] if self._signal else signal.SIGTERM),
        )

    def __enter__(self) -> Self:
        for number in self.SIGNALS:
            # Under nohup, SIGHUP stays ignored.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._signal:
            self._signal, self._received = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self._received > self.REPEATED:
            raise KeyboardInterrupt
