"""Ends a run in good order: on a signal, on a plugin's request, or after a notice that failed."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, Self

from ..base.console import say_at_once
from ..base.errors import Stopped
from .agree import Said, raise_failures, say_to_all
from .failures import reason_of
from .launcher import LAUNCHER_ENDED


class Stopping:
    """Collects this rank's reasons to end the run, and agrees on them with the other ranks.

    It catches signals and the launcher's end; a later second signal ends the run at once.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, LAUNCHER_ENDED)
    REPEATED = 2.0
    """Seconds: Ctrl-C comes from the terminal, and a moment later from the launcher too."""

    def __init__(self, describe: Callable[[bool], str]) -> None:
        """`describe`: what to print at a signal; true is given at one that ends the run at once."""
        self._describe = describe
        self.reason = ""
        """Why all ranks end the run: set once they agreed."""
        self.signal = ""
        """The signal that ends the run: set once all ranks agreed."""
        self.can_save = False
        """Whether every rank can save a checkpoint after the failure that they agreed on."""
        self._request = ""
        """Why a plugin on this rank asked to stop."""
        self._signal, self._received = "", 0.0
        self._error: Exception | None = None
        self._fatal = False
        self._handlers: dict[int, Any] = {}
        """The handlers before this one, restored at the end."""

    def request(self, reason: str) -> None:
        """Ask all ranks to end the run after this step, with checkpoint and model."""
        line = " ".join(str(reason).split())
        self._request = self._request or line or "a plugin stopped the run"

    def fail(self, error: Exception, fatal: bool) -> None:
        """Store the error of a notice until the next agreement, where all ranks end.

        If it is fatal, no checkpoint is saved after it.
        """
        self._error = self._error or error
        self._fatal = self._fatal or fatal

    @contextmanager
    def agreed(self, operation: str) -> Iterator[None]:
        """Run a block without collectives; agree on its errors, earlier ones, and on stopping.

        Here, and nowhere else, ranks learn of a signal or of a plugin's wish to stop: before each
        step ("making batches"), before each micro-batch of an evaluation, and before each save.
        """
        caught: Exception | None = None
        try:
            yield
        except Exception as raised:
            caught = raised
        error = self._error or caught
        own = Said(
            operation,
            failure=reason_of(error) if error else None,
            can_save=caught is None and not self._fatal,
            stop=self._request,
            signal=self._signal,
        )
        said = say_to_all(own, error)
        failed = [one for one in said if one.failure is not None]
        # Ranks that came to different operations could not save together.
        at_one = len({one.operation for one in said}) == 1
        self.can_save = at_one and bool(failed) and all(one.can_save for one in failed)
        raise_failures(said, error)
        self.signal = next((one.signal for one in said if one.signal), "")
        self.reason = self.signal or next((one.stop for one in said if one.stop), "")

    def raise_if_stopped(self, step: int, output: str) -> None:
        """End the run on all ranks, if a signal asked for it."""
        if self.signal:
            number = getattr(signal, self.signal, signal.SIGTERM)
            raise Stopped(
                f"stopped by {self.reason} after step {step}: saved; "
                f"resume with --resume ({output})",
                128 + number,
            )

    def __enter__(self) -> Self:
        # Python allows no handlers in other threads.
        for number in self.SIGNALS if current_thread() is main_thread() else ():
            # Under nohup, SIGHUP stays ignored.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # After a signal, the same one may come again while the run ends.
        for number, handler in ({} if self._signal else self._handlers).items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._signal:
            ended = number == LAUNCHER_ENDED
            self._signal = "the end of its launcher" if ended else signal.Signals(number).name
            self._received = time.monotonic()
            say_at_once(self._describe(False))
        elif number != LAUNCHER_ENDED and time.monotonic() - self._received > self.REPEATED:
            say_at_once(lost := self._describe(True))
            raise KeyboardInterrupt(lost)
