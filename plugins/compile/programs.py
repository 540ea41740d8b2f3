"""The count of compiled programs, and the warning where torch stops compiling."""

import logging
import time

from torch._dynamo import config
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.utils import counters

from plugsft import say

LIMIT = 32
"""Most programs of a function. Beyond it, torch runs other shapes uncompiled."""
LOGGER = "torch._dynamo.convert_frame"
"""Where torch reports that a function has reached its limit of programs."""


class Programs(logging.Filter):
    """Counts the programs of this process, their seconds, and the reason to stop compiling."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.repeated, self.seconds, self.reason = 0, 0, 0.0, ""
        self._started, self._breaks = 0.0, _graph_breaks()
        config.recompile_limit = LIMIT
        # A layer that torch cannot compile runs uncompiled: no later shape may end the run.
        config.suppress_errors = True
        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)
        logging.getLogger(LOGGER).addFilter(self)

    def close(self) -> None:
        """Stop counting."""
        callback_handler.remove_start_callback(self._start)
        callback_handler.remove_end_callback(self._end)
        logging.getLogger(LOGGER).removeFilter(self)

    @property
    def graph_breaks(self) -> int:
        """Number of places where a program ends, and uncompiled code runs."""
        return _graph_breaks() - self._breaks

    def describe(self) -> str:
        """Describe the programs so far."""
        texts = [f"{self.count} program{'s' if self.count > 1 else ''} compiled"]
        texts[0] += f" in {self.seconds:.0f} s"
        if self.repeated:
            texts.append(f"{self.repeated} of them for other inputs")
        if self.graph_breaks:
            texts.append(f"{self.graph_breaks} graph breaks")
        if self.reason:
            texts.append(f"layers also ran uncompiled: {self.reason}")
        return ", ".join(texts)

    def filter(self, record: logging.LogRecord) -> bool:
        """Replace torch's messages about uncompiled code by one warning."""
        reason = _reason_in(record)
        if reason and not self.reason:
            self.reason = reason
            say(
                f"warning: plugins.compile: {reason}. Layers run uncompiled where no program fits; "
                "the run goes on, slower"
            )
        return not reason

    def _start(self, _: CallbackArgs) -> None:
        self._started = time.perf_counter()

    def _end(self, compilation: CallbackArgs) -> None:
        self.seconds += time.perf_counter() - self._started
        self.count += 1
        # The id is FUNCTION/VARIANT: 3/0, 3/1.
        self.repeated += not str(compilation.compile_id).endswith("/0")


def _graph_breaks() -> int:
    return sum(counters["graph_break"].values())


def _reason_in(record: logging.LogRecord) -> str:
    """Return why torch does not compile a function, or "" for other messages."""
    if record.exc_info and record.exc_info[1]:
        return f"torch could not compile a layer: {_one_line(record.exc_info[1])}"
    if str(record.msg).startswith("torch._dynamo hit config."):
        _, limit, _, reason, _ = record.args  # type: ignore[misc]  # a tuple of five
        return f"a layer has {limit} programs, the most allowed ({_one_line(reason)})"
    return ""


def _one_line(text: object) -> str:
    """Return the first 200 characters, without line breaks."""
    return " ".join(str(text).split())[:200]
