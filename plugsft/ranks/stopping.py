"""Why a run ends in good order: a signal, a plugin's wish, or a notice that failed on one rank."""

import signal as signals
import time
from collections.abc import Callable, Sequence
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, NamedTuple, Self

from ..base.console import say_at_once
from ..base.errors import Stopped
from .failures import describe_failure
from .launcher import LAUNCHER_ENDED


class Vote(NamedTuple):
    """What a rank tells the others as it ends an operation."""

    operation: str
    failure: str = ""
    """Why this rank failed in it, or before."""
    can_save: bool = False
    """Whether this rank can save a checkpoint after its failure."""
    signal: str = ""
    """The signal that asks this rank to end."""
    request: str = ""
    """Why a plugin on this rank asks to end."""


class Stopping:
    """This rank's reasons to end the run, and those that all ranks have agreed on.

    It catches signals and the launcher's end; a later second signal ends the run at once.
    """

    SIGNALS = (signals.SIGTERM, signals.SIGINT, signals.SIGHUP, LAUNCHER_ENDED)
    REPEATED = 2.0
    """Seconds: Ctrl-C comes from the terminal, and a moment later from the launcher too."""

    def __init__(self, describe: Callable[[bool], str] = str) -> None:
        """`describe`: what to print at a signal; true is given at one that ends the run at once."""
        self._describe = describe
        self.reason = ""
        """Why all ranks end the run: set once they agreed."""
        self.agreed_signal = ""
        """The signal that ends the run: set once all ranks agreed."""
        self.all_can_save = False
        """Whether every rank can save a checkpoint after the failure that they agreed on."""
        self.own_error: Exception | None = None
        """The first failure of a notice on this rank."""
        self._own_error_is_fatal = False
        self._own_request = ""
        """Why a plugin on this rank asked to stop."""
        self._own_signal, self._caught_at = "", 0.0
        """The signal that this rank caught, and when."""
        self._handlers: dict[int, Any] = {}
        """The handlers before this one, restored at the end."""

    def request(self, reason: str) -> None:
        """Ask all ranks to end the run after this step, with checkpoint and model."""
        line = " ".join(str(reason).split())
        self._own_request = self._own_request or line or "a plugin stopped the run"

    def fail(self, error: Exception, fatal: bool) -> None:
        """Store the error of a notice until the next agreement, where all ranks end.

        If it is fatal, no checkpoint is saved after it.
        """
        self.own_error = self.own_error or error
        self._own_error_is_fatal = self._own_error_is_fatal or fatal

    def vote(self, operation: str, error: Exception | None, in_notice: bool) -> Vote:
        """Make this rank's vote on an operation; `error`: how it failed, or a notice before it."""
        return Vote(
            operation,
            failure=describe_failure(error) if error else "",
            # A notice that failed leaves the weights as they are.
            can_save=error is not None and in_notice and not self._own_error_is_fatal,
            signal=self._own_signal,
            request=self._own_request,
        )

    def learn(self, votes: Sequence[Vote]) -> None:
        """Learn why all ranks end, if one of them wants to; without votes, all go on.

        A rank's own signal or request is in its vote at each agreement, until the run ends.
        """
        self.agreed_signal = next((one.signal for one in votes if one.signal), "")
        self.reason = self.agreed_signal or next((one.request for one in votes if one.request), "")
        failed = [one for one in votes if one.failure]
        # Ranks that came to different operations could not save together.
        at_one = len({one.operation for one in votes}) == 1
        self.all_can_save = at_one and bool(failed) and all(one.can_save for one in failed)

    def raise_if_stopped(self, step: int, output: str) -> None:
        """End the run on all ranks, if a signal asked for it."""
        if self.agreed_signal:
            # The end of a launcher is no signal of the system.
            number = getattr(signals, self.agreed_signal, signals.SIGTERM)
            saved = f"after step {step}: saved; resume with --resume ({output})"
            raise Stopped(
                f"stopped by {self.reason} {saved if step else 'before step 1: nothing to save'}",
                128 + number,
            )

    def __enter__(self) -> Self:
        # Python allows no handlers in other threads.
        for number in self.SIGNALS if current_thread() is main_thread() else ():
            # Under nohup, SIGHUP stays ignored.
            if number != signals.SIGHUP or signals.getsignal(number) != signals.SIG_IGN:
                self._handlers[number] = signals.signal(number, self._handle)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # After a signal, the same one may come again while the run ends.
        for number, handler in ({} if self._own_signal else self._handlers).items():
            signals.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._own_signal:
            ended = number == LAUNCHER_ENDED
            self._own_signal = "the end of its launcher" if ended else signals.Signals(number).name
            self._caught_at = time.monotonic()
            say_at_once(self._describe(False))
        elif number != LAUNCHER_ENDED and time.monotonic() - self._caught_at > self.REPEATED:
            say_at_once(lost := self._describe(True))
            raise KeyboardInterrupt(lost)
