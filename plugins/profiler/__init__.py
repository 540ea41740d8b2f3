"""Measure the parts of a step, name bottlenecks, and the recipe lines that remove them."""

import json
import math
import os
import time
from collections.abc import Generator, Iterator
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, distributed
from torch.nn import Module
from torch.optim import Optimizer
from torch.profiler import profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from plugsft import (
    Batch,
    Fed,
    Feed,
    Machine,
    Recipe,
    RecipeError,
    hookimpl,
    plugin,
    say,
    state,
)
from plugsft.kit.model import Shapes, peak_flops, shapes_of
from plugsft.kit.tokens import Tokens

from .bottlenecks import Measured, bottlenecks

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
"""What a step is divided into. `norm` adds the loss up over the ranks, and clips."""
WARMUP = 2
"""First steps, which do not count: kernels are chosen, memory is fetched, and in the second one
operators are counted."""
NAME = "profile.json"
BRIEF = 30e-6
"""Seconds. On a CPU, an operator that takes less mostly pays for being called."""


class Mark(NamedTuple):
    """The end of a part: on the host's clock, and on the GPU's, where there is one."""

    ended: str
    time: float
    busy: float
    """What the thread had of its core until then: less, where others ran."""
    event: Any

    def until(self, other: "Mark") -> float:
        """Return the seconds from this one to another."""
        if self.event is None:
            return other.time - self.time
        return float(self.event.elapsed_time(other.event)) / 1e3


class Clock:
    """Marks where each part of a step ends. Nobody waits for the GPU to come there."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu, self.steps, self.device = on_gpu, 0, torch.device("cpu")
        self._marks: list[Mark] = []

    def mark(self, ended: str) -> None:
        """Mark the end of a part."""
        last = self._marks[-1].ended if self._marks else ""
        if last == "backward" and ended in ("rest", "norm"):
            ended = "exchange"  # of this micro-batch alone; DeepSpeed takes its step in a backward
        elif last == "optimizer" and ended == "norm":
            ended = "optimizer"  # it has several parts
        elif last == "exchange" and ended in ("logging", "checkpoint"):
            ended = "norm"  # where the optimizer's step came before
        event = None
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
        self._marks.append(Mark(ended, time.perf_counter(), time.thread_time(), event))

    def backward(self) -> None:
        """Mark its beginning, and have its end marked."""
        self.mark("forward")  # with what others do after it
        # First in line: who exchanges gradients queues later for the end of his own.
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self.mark("backward"))

    def cut(self) -> list[Mark]:
        """Return the marks of a step; its last one begins the next."""
        marks, self._marks = self._marks, self._marks[-1:]
        self.steps += 1
        return marks

    def is_idle(self) -> bool:
        """Tell whether the GPU has already come to the last mark."""
        return self.on_gpu and bool(self._marks[-1].event.query())


class Forward(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped upstream
    """Looks at one forward: how many operators it calls, and how much the head gives."""

    def __init__(self, vocabulary: int, places: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators, self.logits, self.places = 0, 0, places
        self._vocabulary = vocabulary

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, and call."""
        made = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.operators += 1
        wide = isinstance(made, Tensor) and made.ndim > 1 and made.shape[-1] == self._vocabulary
        if wide:
            self.logits = max(self.logits, made.numel())
        return made


@plugin(after=["bfd_packing", "compile", "dpo", "dpo_reference", "gradient_checkpointing", "lora"])
class Profiler:
    """Measure the parts of a step, name bottlenecks, and the recipe lines that remove them.

    The figures of every rank go into OUTPUT/profile.json.
    """

    trace: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)
    """Steps to write a trace of, into OUTPUT/profile/, a file for each rank, as ui.perfetto.dev
    opens it. They do not count."""

    recipe: Recipe = state()
    machine: Machine = state()
    tokens: Tokens | None = state()
    shapes: Shapes = state()
    clock: Clock = state()
    forward: Forward | None = state()
    past: Any = state()
    """A step that counts and was not looked at yet: the GPU may be at work on it."""
    steps: list[list[float]] = state([])
    """Seconds of the parts of those that were."""
    flops: float = state(0.0)
    """What they needed of this rank."""
    micro_steps: int = state(0)
    """Their forwards."""
    places: int = state(0)
    """The most that a micro-batch had."""
    brief: float = state(math.inf)
    """The least that a forward took of the host."""
    idle: int = state(0)
    """In how many the GPU had nothing left to do when the host came to the backward's end."""
    ranks: list[Tensor] = state([])
    """Mean seconds of the parts on each rank, as last exchanged."""
    tracer: Any = state()
    said: str = state("")

    @hookimpl
    def check(self, recipe: Recipe, machine: Machine) -> None:
        """Take note of what runs, and where."""
        self.recipe, self.machine = recipe, machine

    @hookimpl(wrapper=True)
    def optimize_model(self) -> Generator[None, Module, Module]:
        """Look at the model's shapes."""
        model = yield
        self.shapes = shapes_of(model)
        return model

    @hookimpl(wrapper=True)
    def optimizer(self) -> Generator[None, Optimizer, Optimizer]:
        """Hear when its step begins and ends."""
        optimizer = yield
        self.clock = Clock(torch.cuda.is_available() and self.recipe.device != "cpu")
        optimizer.register_step_pre_hook(lambda *_: self.clock.mark("norm"))
        optimizer.register_step_post_hook(lambda *_: self.clock.mark("optimizer"))
        return optimizer

    @hookimpl(wrapper=True)
    def annotate(self) -> Generator[None, Tokens, Tokens]:
        """Keep the lengths of what is trained on, which comes first."""
        tokens = yield
        self.tokens = self.tokens or tokens
        return tokens

    @hookimpl(wrapper=True)
    def feed(self) -> Generator[None, Feed, Feed]:
        """Hear when a window is asked for, and when it is there."""
        feed = yield
        # An evaluation's are a part of the step that it follows.
        return self._heard(feed) if torch.is_grad_enabled() else feed

    def _heard(self, feed: Any) -> Iterator[Fed]:
        self.clock.mark("rest")
        before = self._saved()
        try:
            for number, fed in enumerate(feed, start=1):
                self.clock.mark("wait")
                self._trace(fed.window.step)
                yield fed
                self._trace(0)
                before, saved = self._saved(), before
                self.clock.mark("logging" if saved == before else "checkpoint")
                self._settle()
                marks = self.clock.cut()
                if number > WARMUP and fed.window.step not in self.trace:
                    self.past = (marks, fed.window, fed.copied)
            self._settle()
        finally:
            self._trace(0)
            if hasattr(feed, "close"):
                feed.close()

    def _saved(self) -> int:
        """Tell when a checkpoint was last made, or removed."""
        folder = self.recipe.folder / "checkpoints"
        return folder.stat().st_mtime_ns if folder.exists() else 0

    def _settle(self) -> None:
        """Count a step that is past, and that the GPU is done with."""
        if self.past is None:
            return
        marks, window, copied = self.past
        parts = dict.fromkeys(PARTS, 0.0)
        busy = 0.0
        for one, other in pairwise(marks):
            parts[other.ended] += one.until(other)
            busy += other.busy - one.busy if other.ended == "forward" else 0
        self.brief = min(self.brief, busy / len(window.layout[self.machine.rank]))
        parts["copy"] = min(copied, parts["wait"])  # else it was hidden behind another step
        parts["wait"] -= parts["copy"]
        self.steps.append([*parts.values()])
        assert self.tokens is not None
        mine = [part for part in window.layout[self.machine.rank] if len(part)]
        self.micro_steps += len(window.layout[self.machine.rank])
        if mine:
            lengths, seen = self.tokens.sequences(np.concatenate(mine))
            pairs = (lengths * (lengths / 2 + seen)).sum()
            self.flops += self.shapes.flops(float(lengths.sum()), float(pairs))
        self.past = None

    def _trace(self, step: int) -> None:
        """Begin a step's trace if one is wanted; write the one before."""
        folder = self.recipe.folder / "profile"
        if self.tracer is not None:
            name, tracer = self.tracer
            tracer.stop()
            folder.mkdir(exist_ok=True)
            tracer.export_chrome_trace(str(folder / name))
            self.tracer = None
        if step in self.trace:
            # Else it speaks between our lines.
            os.environ.setdefault("KINETO_LOG_LEVEL", "5")
            name = f"step-{step:06d}-rank-{self.machine.rank}.json.gz"
            self.tracer = name, profile(record_shapes=True)
            self.tracer[1].start()

    @hookimpl(wrapper=True)
    def step(self, batch: Batch) -> Generator[None, Tensor, Tensor]:
        """Hear when a forward begins and ends, and when its backward does."""
        training, clock = torch.is_grad_enabled(), self.clock
        clock.mark("rest" if training else "evaluation")
        if not training:
            loss = yield
            clock.mark("evaluation")
            return loss
        places = batch["input_ids"].numel()
        self.places = max(self.places, places)
        counted = self.forward is None and clock.steps == WARMUP - 1
        if counted and not self.recipe.has("compile"):
            with Forward(self.shapes.vocabulary, places) as self.forward:
                loss = yield
        elif self.tracer is not None:
            with record_function("forward"):
                loss = yield
        else:
            loss = yield
        clock.mark("forward")
        if loss.requires_grad:
            hear: Any = loss.register_hook
            hear(lambda _: clock.backward())
        clock.device = loss.device
        return loss

    @hookimpl
    def measure(self) -> dict[str, Tensor]:
        """Hear when the gradients are there; exchange between ranks what was measured."""
        if not torch.is_grad_enabled():
            return {}
        self.idle += self.clock.is_idle()
        self.clock.mark("exchange")
        count = len(self.steps)
        if distributed.is_initialized() and count and (count % 10 == 0 or count in (1, 2, 4)):
            mine = torch.from_numpy(np.mean(self.steps, 0)).to(self.clock.device, torch.float32)
            self.ranks = [torch.empty_like(mine) for _ in range(self.machine.world_size)]
            distributed.all_gather(self.ranks, mine)
        return {}

    @hookimpl
    def log(self, metrics: dict[str, Any]) -> None:
        """Hear what logging took."""
        self.clock.mark("evaluation" if "eval_loss" in metrics else "logging")

    @hookimpl
    def record(self, run: dict[str, Any]) -> None:
        """Refuse trace steps beyond the last; at the end, print and write the profile."""
        if run["status"] == "running":
            steps = run["steps"]["total"]
            if never := [step for step in self.trace if step > steps]:
                raise RecipeError(
                    f"plugins.profiler.trace: step {never[0]} does not exist; "
                    f"the run has {steps} steps"
                )
        if run["status"] == "running" or not self.steps:
            return
        mine = np.mean(self.steps, 0)
        ranks = [one.tolist() for one in self.ranks] or [mine.tolist()]
        shares = dict(zip(PARTS, mine / mine.sum(), strict=True))
        peak, whose = peak_flops(self.clock.device, "bfloat16" in run["dtypes"]["compute"])
        rate = self.flops / len(self.steps) / mine.sum()
        each = [dict(zip(PARTS, one, strict=True)) for one in ranks]
        found = bottlenecks(self.recipe, run, self._measured(shares, each))
        told = [f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005]
        self.said = (
            f"{mine.sum():.3g} s a step: {', '.join(told)}; "
            f"MFU {rate / peak:.0%} of {peak / 1e12:.3g} TFLOP/s ({whose})"
        )
        for line in found:
            say(f"profile: {line}")
        run["profile"] = {
            "steps": len(self.steps),
            "shares": {name: round(share, 4) for name, share in shares.items()},
            "mfu": round(rate / peak, 4),
            "flops_per_second": round(rate),
            "peak_flops_per_second": round(peak),
            "findings": found,
        }
        facts, path = {**run["profile"], "seconds_a_step": each}, self.recipe.folder / NAME
        try:
            path.write_text(json.dumps(facts, indent=1) + "\n")
        except OSError as error:
            say(f"warning: {path}: {error.strerror}")

    def _measured(self, shares: dict[str, float], ranks: list[dict[str, float]]) -> Measured:
        steps, seen = len(self.steps), self.forward
        if seen is None:
            return Measured(shares, ranks, self.micro_steps / steps)
        brief = self.brief / seen.operators
        on_gpu = self.clock.on_gpu
        small = self.idle >= 0.8 * self.clock.steps if on_gpu else brief <= BRIEF
        # At the worst three of them are held, in float32.
        head = 12 * seen.logits / seen.places * self.places
        return Measured(shares, ranks, self.micro_steps / steps, small, seen.operators, brief, head)

    @hookimpl
    def verdict(self) -> str | None:
        """Say where the time went."""
        return self.said or None
