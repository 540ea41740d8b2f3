"""`plugsft tune`: find the micro-batch, or the packed row capacity, that trains fastest.

It doubles the size until memory runs out. Then the recipe's own size and the fastest take turns.
"""

import statistics
from dataclasses import dataclass, field

import numpy as np

from ..base.console import format_count, format_size, out, say
from ..base.errors import PlugsftError, RecipeError, Stopped
from ..base.for_commands import parse_size
from ..base.machine import look
from ..base.types import Ints
from ..batches.defaults import BatchDefaults
from ..data.sample import EstimatedColumns
from ..ranks.precision import on_cpu
from ..recipe.capabilities import Capability
from ..recipe.parse import anchored
from ..recipe.tables import Recipe
from ..registry import active as registry
from ..registry.active import Active
from ..registry.load import resolve
from ..tokens.views import share_prompts
from .timing import FASTER, Ratio
from .trials import Trial, TrialRunner, refuse_ranks, trials

WARMUP = 2
"""Steps before those that are measured; memory peaks in them."""
MARGIN = 0.05
"""Share of the memory that stays free, as other steps of the run may need more."""
TURNS = 4
"""Probes of the recipe's own size and of the fastest, in turn."""


@dataclass
class Probes:
    """Measurements of a size."""

    size: int
    speeds: list[float] = field(default_factory=list)
    """Tokens per second of each probe; none if one failed."""
    peak: int = 0
    """Bytes."""
    error: str = ""
    """Why a probe failed."""

    @property
    def speed(self) -> float:
        """The median speed; 0 if a probe failed."""
        return statistics.median(self.speeds) if self.speeds else 0.0


def tune(
    recipe: Recipe, active: Active, words: str, memory: str | None, steps: int, launch: str
) -> None:
    """Find the fastest size by probes in fresh processes; say how to set it.

    `words`: the recipe and its changes, as in the command line.
    """
    refuse_ranks("tune")
    tuning = Tuning(recipe, parse_size(memory, "--memory") if memory else 0, steps)
    try:
        with trials(recipe, active, launch, examples=None) as runner:
            best = tuning.run(runner)
    except KeyboardInterrupt:
        raise Stopped(f"stopped; {tuning.so_far()}") from None
    for line in tuning.reasons(best):
        say(line)
    if best.size != tuning.own:
        say(f"set {tuning.key} = {best.size}: plugsft {words} {tuning.key}={best.size}")


class Tuning:
    """Probes of a recipe: each trains a few steps in a fresh process."""

    def __init__(self, recipe: Recipe, limit: int, steps: int) -> None:
        self._recipe, self._limit, self._steps = recipe, limit, steps
        self.key, self.own = recipe.micro_batch_size()
        self._packing = recipe.provides("packed_rows")
        if self._packing and not keeps_steps(recipe):
            raise RecipeError(
                f"{self.key}: tune cannot choose it: {self._packing.table} fills rows with "
                "examples of other steps, so another value would affect results; choose it by hand"
            )
        self._probes: dict[int, Probes] = {}
        self._count, self._apart = 0, list[str]()

    @property
    def _allowed(self) -> int:
        """Bytes that a probe may take."""
        return int(self._limit * (1 - MARGIN))

    def run(self, runner: TrialRunner) -> Probes:
        """Probe the recipe's own size, then others; return the best."""
        tokens = runner.tokens
        if self._recipe.provides("shared_prompts"):
            tokens = share_prompts(tokens)
        lengths = tokens.lengths
        longest, size = int(lengths.max()), self._recipe.train.batch_size
        if self._packing and longest > self.own:
            raise RecipeError(
                f"{self.key}: {self.own:,} is less than the longest example "
                f"({longest:,} tokens), and a larger one would affect results; set {longest} or "
                "more"
            )
        steps = choose_steps(runner.epoch_order(), size, lengths, self._steps)
        runner.use(steps.ravel())
        limit = self._limit
        if not limit and on_cpu(self._recipe):
            self._limit = look().memory
        first = self.probe(runner, self.own)
        ranks = max(1, len(first.ranks))
        totals = [rank["total"] for rank in first.ranks if rank.get("device")]
        self._limit = limit or min(totals, default=look().memory // ranks)
        least, most = 1, -(-size // ranks)
        if self._packing:
            least, most = longest, -(-int(lengths[steps].sum(1).max()) // ranks)
        say(
            f"sizes: from {least:,} to {most:,}; memory: {format_size(self._limit)} a rank, "
            f"{MARGIN:.0%} stays free"
        )
        return self.search(runner, least, most)

    def search(self, runner: TrialRunner, least: int, most: int) -> Probes:
        """Double the size until it does not fit, or halve it until it fits; return the best."""
        size, own = self.own, self._probes[self.own]
        if own.speeds:
            while size < most and not self.probe(runner, min(2 * size, most)).error:
                size = min(2 * size, most)
        else:
            while size > least and self.probe(runner, max(size // 2, least)).error:
                size = max(size // 2, least)
        while (best := self._fastest()) is not own:
            if best is None:
                raise self._nothing_fits()
            if not own.speeds:
                break
            # In turn: a machine that becomes slower or faster favours neither.
            pair = (self.own, best.size)
            sizes = [size for turn in range(TURNS) for size in pair[:: (-1) ** turn]]
            if not any(self.probe(runner, size).error for size in sizes):
                return best if self._gain(best).word == FASTER else own
        return best

    def probe(self, runner: TrialRunner, size: int) -> Trial:
        """Train some steps with a size; print the result, and note it."""
        self._count += 1
        name = f"probe {self._count}: {self.key} = {size}{' (yours)' * (size == self.own)}"
        with out.status(name):
            trial = runner.run({self.key: size}, WARMUP + self._steps, memory=self._allowed)
        probes = self._probes.setdefault(size, Probes(size))
        peak = max((rank.get("device") or rank["host"] for rank in trial.ranks), default=0)
        probes.peak = max(probes.peak, peak)
        self._apart = trial.run.get("computed_apart", self._apart)
        if not trial.error:
            speed = statistics.median(trial.of("tokens_per_second", WARMUP))
            probes.speeds.append(speed)
            result = f"{speed:,.0f} tokens/s, {format_size(peak)}"
        elif size == self.own and not trial.out_of_memory:
            raise PlugsftError(f"{self.key} = {size}: {trial.error}")
        else:
            # The model, or another plugin, may refuse the size.
            result = "out of memory" if trial.out_of_memory else trial.error.splitlines()[-1]
            probes.speeds.clear()
            probes.error = result
        say(f"{name}: {result}, {trial.seconds:.0f} s")
        return trial

    def so_far(self) -> str:
        """Say what a stop leaves: the best probe so far."""
        best = self._fastest()
        return f"best so far: {self._describe(best)}" if best else "no probe has finished"

    def _fastest(self) -> Probes | None:
        fitting = [probes for probes in self._probes.values() if probes.speeds]
        return max(fitting, key=lambda probes: probes.speed, default=None)

    def _gain(self, best: Probes) -> Ratio:
        """The speed relative to the own size, in each turn."""
        turns = (best.speeds[-TURNS:], self._probes[self.own].speeds[-TURNS:])
        return Ratio(tuple(after / before for after, before in zip(*turns, strict=True)))

    def _describe(self, probes: Probes) -> str:
        memory = format_size(probes.peak)
        return f"{self.key} = {probes.size}: {probes.speed:,.0f} tokens/s, {memory}"

    def _nothing_fits(self) -> RecipeError:
        tried, last = ", ".join(map(str, self._probes)), [*self._probes.values()][-1]
        plugins = ("recomputed_activations", "offloaded_activations", "adapters")
        tables = ", ".join(Capability.bundled(name).table for name in plugins)
        return RecipeError(
            f"nothing fits in {format_size(self._allowed)} a rank; tried {self.key}: {tried}. The "
            f"last: {last.error}. More memory (--memory), a smaller data.max_length and "
            f"plugins help: {tables}"
        )

    def reasons(self, best: Probes) -> list[str]:
        """Say in lines why a size is the best."""
        own = self._probes[self.own]
        lines = [f"{'keep yours' if best is own else 'chosen'}: {self._describe(best)}"]
        for probes in self._probes.values():
            took_turns = min(len(own.speeds), len(probes.speeds)) > TURNS
            if took_turns and probes is not own:
                gain = self._gain(probes)
                lines.append(f"{self.key} = {probes.size} is {gain} as fast as yours: {gain.word}")
        for probes in self._probes.values():
            if probes.error:
                lines.append(f"{self.key} = {probes.size}: {probes.error}")
        if self._packing and self._apart:
            lines.append(
                f"{', '.join(self._apart)} computes each document of a row alone: without a "
                f"kernel, {Capability.bundled('sorted_lengths').table} in place of "
                f"{self._packing.table} may be faster; tune it, too"
            )
        lines.append(
            f"{format_count(self._count, 'probe')} of {format_count(self._steps, 'step')}, in "
            f"{format_size(self._limit)} a rank less {MARGIN:.0%}"
        )
        return lines


def keeps_steps(recipe: Recipe) -> bool:
    """Whether a step has `batch_size` examples of the epoch's order, however it is packed."""
    _, active = resolve(anchored(recipe))
    active.attach(BatchDefaults())
    registry.check(active, recipe, look(), ["plan_batches"])
    size = recipe.train.batch_size
    order, lengths = np.arange(2 * size), np.full(2 * size, 2)
    layouts = active.hooks.plan_batches(
        order=order,
        lengths=lengths,
        columns=EstimatedColumns(lengths),
        ranks=1,
        train=recipe.train,
    )
    examples = np.concatenate([batch for rank in layouts[0] for batch in rank])
    return np.array_equal(np.sort(examples), order[:size])


def choose_steps(order: Ints, size: int, lengths: Ints, count: int) -> Ints:
    """Choose steps of an epoch, [step, example]; first the two that need most memory.

    The first begins with the longest example, the second has the most tokens; the others are
    evenly spaced in the steps sorted by tokens.
    """
    if len(order) < size:
        return order[None]
    steps = order[: len(order) // size * size].reshape(-1, size)
    sums = lengths[steps].sum(1)
    positions = np.linspace(0, len(sums) - 1, count).round().astype(int)
    spaced = np.argsort(sums, kind="stable")[positions]
    longest = steps[lengths[steps].max(1).argmax()].copy()
    longest[lengths[longest].argmax()] = longest[0]
    longest[0] = lengths.argmax()
    return np.stack([longest, steps[sums.argmax()], *steps[spaced]])
