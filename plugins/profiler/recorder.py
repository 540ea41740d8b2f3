"""Records the seconds of each part of a step, operators and floating-point operations."""

import math
import os
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed
from torch.nn import Module
from torch.profiler import profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from plugsft import Batch, Ints, LoadedStep, Machine, Recipe
from plugsft.data_kit import Tokens

from .clock import PARTS, Clock, Mark
from .flops import shapes_of

WARMUP = 2
"""First steps, which are not counted: kernels are chosen and memory is allocated. The second one
counts operators."""


class StepRecorder:
    """Records the steps of a run on one rank."""

    def __init__(
        self, recipe: Recipe, machine: Machine, trace: Collection[int], model: Module
    ) -> None:
        self.recipe, self.machine = recipe, machine
        self.shapes = shapes_of(model)
        self.clock = Clock(torch.cuda.is_available() and recipe.device != "cpu")
        self.device = torch.device("cpu")
        self.tokens: Tokens | None = None
        self.operators: OperatorCounter | None = None
        self.steps: list[list[float]] = []
        """Seconds of each part, for each counted step."""
        self.flops = 0.0
        """Floating-point operations of this rank in the counted steps."""
        self.micro_batches = 0
        """Micro-batches of this rank in the counted steps."""
        self.largest = 0
        """Most tokens in a micro-batch, with padding."""
        self.forward_cpu_seconds = math.inf
        """Least processor seconds of a forward."""
        self.idle_steps = 0
        """Steps in which the GPU had no work left when the host ended the backward."""
        self.rank_means: list[Tensor] = []
        """Mean seconds of each part on each rank, as last gathered."""
        self._traced = trace
        self._pending: tuple[list[Mark], list[Ints], float] | None = None
        """The last counted step, which the GPU may still compute."""

    def record_steps(self, feed: Iterator[LoadedStep]) -> Iterator[LoadedStep]:
        """Record training steps; an evaluation is a part of the step before it."""
        return self._record_steps(feed) if torch.is_grad_enabled() else feed

    def _record_steps(self, feed: Any) -> Iterator[LoadedStep]:
        self.clock.mark("rest")
        try:
            for number, loaded in enumerate(feed, start=1):
                self.clock.mark("wait")
                traced = loaded.plan.step in self._traced
                file = f"step-{loaded.plan.step:06d}-rank-{self.machine.rank}.json.gz"
                with tracing(self.recipe.folder / "profile" / file) if traced else nullcontext():
                    yield loaded
                self.clock.mark("logging")
                self._count_pending()
                marks = self.clock.end_step()
                if number > WARMUP and not traced:
                    micro_batches = loaded.plan.layout[self.machine.rank]
                    self._pending = marks, micro_batches, loaded.copied
            self._count_pending()
        finally:
            if hasattr(feed, "close"):
                feed.close()

    def _count_pending(self) -> None:
        """Count the step before the last, which the GPU has finished."""
        if self._pending is None:
            return
        marks, micro_batches, copied = self._pending
        seconds = dict.fromkeys(PARTS, 0.0)
        forward_cpu_seconds = 0.0
        for mark, later in pairwise(marks):
            seconds[later.part] += mark.seconds_until(later)
            if later.part == "forward":
                forward_cpu_seconds += later.cpu_seconds - mark.cpu_seconds
        self.forward_cpu_seconds = min(
            self.forward_cpu_seconds, forward_cpu_seconds / len(micro_batches)
        )
        # A copy ahead of its step does not delay the loop.
        seconds["copy"] = min(copied, seconds["wait"])
        seconds["wait"] -= seconds["copy"]
        self.steps.append([*seconds.values()])
        self.micro_batches += len(micro_batches)
        self._pending = None
        assert self.tokens is not None
        lengths, seen = self.tokens.sequences(np.concatenate(micro_batches))
        attended = (lengths * (lengths / 2 + seen)).sum()
        self.flops += self.shapes.flops(float(lengths.sum()), float(attended))

    def record_micro_batch(self, batch: Batch) -> Generator[None, Tensor, Tensor]:
        """Mark the beginning and end of a forward, and the end of its backward."""
        training = torch.is_grad_enabled()
        self.clock.mark("rest" if training else "evaluation")
        if not training:
            loss = yield
            self.clock.mark("evaluation")
            return loss
        tokens = batch["input_ids"].numel()
        self.largest = max(self.largest, tokens)
        counts_operators = self.operators is None and self.clock.steps == WARMUP - 1
        if counts_operators and not self.recipe.provides("compiled_layers"):
            with OperatorCounter(self.shapes.vocabulary, tokens) as self.operators:
                loss = yield
        else:
            with record_function("forward"):  # its name in a trace
                loss = yield
        self.clock.mark("forward")
        if loss.requires_grad:
            register_hook: Any = loss.register_hook
            register_hook(lambda _: self.clock.mark_backward())
        self.device = loss.device
        return loss

    def end_backward(self) -> None:
        """Mark the end of a training step's last backward; gather the ranks' figures if due."""
        if not torch.is_grad_enabled():
            return
        self.idle_steps += self.clock.is_gpu_idle()
        self.clock.mark("exchange")
        count = len(self.steps)
        if distributed.is_initialized() and count and (count % 10 == 0 or count in (1, 2, 4)):
            mean = torch.from_numpy(np.mean(self.steps, 0)).to(self.device, torch.float32)
            self.rank_means = [torch.empty_like(mean) for _ in range(self.machine.world_size)]
            distributed.all_gather(self.rank_means, mean)


class OperatorCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped upstream
    """Counts the operators of one forward, and the elements of its largest logits."""

    def __init__(self, vocabulary: int, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators, self.logits, self.tokens = 0, 0, tokens
        self._vocabulary = vocabulary

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator, and count it."""
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.operators += 1
        if isinstance(result, Tensor) and result.ndim > 1 and result.shape[-1] == self._vocabulary:
            self.logits = max(self.logits, result.numel())
        return result


@contextmanager
def tracing(file: Path) -> Iterator[None]:
    """Trace the block, and write the trace, also of a step that fails."""
    # Without this setting, Kineto prints to the console.
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    trace: Any = profile(record_shapes=True)
    trace.start()
    try:
        yield
    finally:
        trace.stop()
        file.parent.mkdir(exist_ok=True)
        trace.export_chrome_trace(str(file))
