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
from .launcher import lost


class Stop:
    """Hears signals and the launcher's end. One more signal, later, ends at once."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    LATER = 2.0
    """Seconds: Ctrl-C reaches us from the terminal, and a moment later from the launcher too."""

    def __init__(self) -> None:
        self.name, self._since = "", 0.0
        self.error: Exception | None = None
        self._before: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        """Whether this process was told to stop, or failed."""
        return bool(self.name) or self.error is not None or lost.is_set()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep an error for the end of the next step, where all ranks stop together."""
        try:
            yield
        except Exception as error:
            self.error = self.error or error

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise an error of the last step, which no later step would raise."""
        yield
        if self.error is not None:
            raise self.error

    def end(self, accelerator: Accelerator, step: int, output: str) -> None:
        """End the run after a step, on every rank."""
        with agreed(accelerator, "logging metrics"):
            if self.error is not None:
                raise self.error
        reason = self.name or ("the end of its launcher" if lost.is_set() else "another rank")
        raise Stopped(
            f"stopped by {reason} after step {step}: saved; resume with --resume ({output})",
            128 + (signal.Signals[self.name] if self.name else signal.SIGTERM),
        )

    def __enter__(self) -> Self:
        for number in self.SIGNALS:
            # Under nohup, SIGHUP stays ignored.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if not self.name:
            self.name, self._since = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self._since > self.LATER:
            raise KeyboardInterrupt
