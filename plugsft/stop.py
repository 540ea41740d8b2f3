"""Being told to stop: finish the step, keep everything, and say how to go on."""

import signal
from types import FrameType
from typing import Any, Self

from .errors import PlugsftError


class Stopped(PlugsftError):
    """The run ended early because it was told to."""

    def __init__(self, name: str, step: int, output: str, saved: bool) -> None:
        kept = "saved; go on with --resume" if saved else "no checkpoint could be written"
        super().__init__(
            f"stopped by {name or 'another rank'} after step {step}: {kept} ({output})"
        )
        self.exit_code = 128 + (signal.Signals[name] if name else signal.SIGTERM)


class Stop:
    """Hears SIGTERM and SIGINT while it is entered. A second one ends at once."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.name = ""
        self._before: list[Any] = []

    @property
    def asked(self) -> bool:
        """Whether this process was told to stop."""
        return bool(self.name)

    def __enter__(self) -> Self:
        self._before = [signal.signal(number, self._hear) for number in self.SIGNALS]
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in zip(self.SIGNALS, self._before, strict=True):
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
