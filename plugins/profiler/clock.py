"""Marks on the clocks of host and GPU, where each part of a step ends."""

import time
from typing import Any, NamedTuple

import torch

PARTS = (
    "wait",
    "copy",
    "forward",
    "backward",
    "exchange",
    "norm",
    "optimizer",
    "logging",
    "evaluation",
    "checkpoint",
    "rest",
)
"""Parts of a step. `norm`: all-reduce the loss, clip gradients, and on a CPU log the step before,
where its numbers are read late."""


class Mark(NamedTuple):
    """The end of a part, on the host's clock and on the GPU's, if there is a GPU."""

    part: str
    time: float
    cpu_seconds: float
    """Processor seconds of the thread so far; other processes on its core do not count."""
    event: Any

    def seconds_until(self, later: "Mark") -> float:
        """Return the seconds between two marks."""
        if self.event is None:
            return later.time - self.time
        return float(self.event.elapsed_time(later.event)) / 1e3


class Clock:
    """Marks where each part of a step ends, without waiting for the GPU."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu, self.steps = on_gpu, 0
        self._marks: list[Mark] = []

    def mark(self, part: str) -> None:
        """Mark the end of a part."""
        last = self._marks[-1].part if self._marks else ""
        if last == "backward" and part in ("rest", "norm"):
            # Gradients are reduced after each micro-batch, and by DeepSpeed before its optimizer.
            part = "exchange"
        elif last == "optimizer" and part == "norm":
            part = "optimizer"  # several optimizers in one
        elif last == "exchange" and part in ("logging", "checkpoint"):
            part = "norm"  # DeepSpeed's optimizer stepped inside the backward
        event = None
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
        self._marks.append(Mark(part, time.perf_counter(), time.thread_time(), event))

    def mark_backward(self) -> None:
        """Mark the end of the forward now, and the end of the backward when it comes."""
        self.mark("forward")  # with the work of other plugins after it
        # Queued before the callbacks that reduce gradients, which are queued during the backward.
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self.mark("backward"))

    def end_step(self) -> list[Mark]:
        """Return the marks of a step; its last mark begins the next step."""
        marks, self._marks = self._marks, self._marks[-1:]
        self.steps += 1
        return marks

    def is_gpu_idle(self) -> bool:
        """Tell whether the GPU has already reached the last mark."""
        return self.on_gpu and bool(self._marks[-1].event.query())
