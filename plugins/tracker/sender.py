"""Sends metrics to one tracker, and tries again later if it fails."""

import time
from typing import Any

from plugsft import say

from .runs import finish
from .samples import Samples, log_samples
from .values import describe_error

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 600.0
"""Seconds until a tracker that failed is tried again; each failure doubles them."""


class Sender:
    """One tracker, and the metrics that it has not received yet."""

    def __init__(self, kind: str, tracker: Any) -> None:
        self._kind, self._tracker = kind, tracker
        self._queue: list[tuple[int, dict[str, Any] | Samples]] = []
        self._sent = 0
        self._error, self._finished = "", False
        self._pause, self._next_try = FIRST_PAUSE, 0.0

    def send(self, step: int, entry: dict[str, Any] | Samples) -> None:
        """Send metrics or samples, after those that are still in the queue; never raise."""
        if isinstance(entry, dict):
            entry = {name: value for name, value in entry.items() if value is not None}
        self._queue.append((step, entry))
        if time.monotonic() >= self._next_try:
            self._send_queue()

    def finish(self, status: str) -> None:
        """Send the queue, and finish the tracker's run with a status."""
        try:
            self._send_queue()
            finish(self._kind, self._tracker, status)
            self._finished = True
        except Exception as error:
            self._warn(error)

    def describe(self) -> str:
        """Report how many entries were sent."""
        sent = f"{self._kind}: {self._sent} of {self._sent + len(self._queue)} entries"
        if self._finished and not self._queue:
            return sent + (", late" if self._error else "")
        return f"{sent}, {self._error}; metrics.jsonl has all"

    def _send_queue(self) -> None:
        try:
            while self._queue:
                step, entry = self._queue[0]
                if isinstance(entry, list):
                    log_samples(self._kind, self._tracker, step, entry)
                elif self._kind == "wandb":
                    self._tracker.log({**entry, "step": step})
                else:
                    self._tracker.log(entry, step=step)
                del self._queue[0]
                self._sent += 1
            self._pause = FIRST_PAUSE
        except Exception as error:
            self._warn(error)
            self._next_try = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _warn(self, error: Exception) -> None:
        """Warn of the first error; keep the last for the report."""
        text = describe_error(error)
        if not self._error:
            say(f"warning: {self._kind} failed, and the run continues without it: {text}")
        self._error = text
