"""Being told to stop: finish the step, keep everything, and say how to go on."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from .errors import PlugsftError


class Stopped(PlugsftError):
    """The run ended early because it was told to."""

    def __init__(self, name: str, step: int, output: str) -> None:
        super().__init__(
            f"stopped by {name or 'another rank'} after step {step}: saved; go on with --resume "
            f"({output})"
        )
        self.exit_code = 128 + (signal.Signals[name] if name else signal.SIGTERM)


class Stop:
    """Hears SIGTERM and SIGINT while it is entered. One more, later, ends at once."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)
    LATER = 2.0
    """Seconds: Ctrl-C reaches us from the terminal, and a moment later from the launcher too."""

    def __init__(self) -> None:
        self.name, self._since = "", 0.0
        self.error: Exception | None = None
        self._before: list[Any] = []

    @property
    def asked(self) -> bool:
        """Whether this process was told to stop, or has to."""
        return bool(self.name) or self.error is not None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep an error for the end of the next step, where all ranks stop together."""
        try:
            yield
        except Exception as error:
            self.error = self.error or error

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise at the end an error of the last step, after which no step stops the run."""
        yield
        if self.error is not None:
            raise self.error

    def end(self, step: int, output: str) -> Exception:
        """Return what ends the run after a step."""
        return self.error or Stopped(self.name, step, output)

    def __enter__(self) -> Self:
        self._before = [signal.signal(number, self._hear) for number in self.SIGNALS]
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for number, handler in zip(self.SIGNALS, self._before, strict=True):
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if not self.name:
            self.name, self._since = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self._since > self.LATER:
            raise KeyboardInterrupt
