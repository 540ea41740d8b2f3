"""`plugsft tune`: the micro-batch, or the capacity of a packed one, that trains fastest here."""

import math
import os
import shlex
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from ...base.console import format_size, out, parse_size, say
from ...base.errors import PlugsftError, RecipeError
from ...base.machine import look
from ...base.types import Ints
from ...batches.plan import shuffled
from ...output.bottlenecks import capacity
from ...output.disk_space import BYTES
from ...output.folder import ensure_inputs
from ...ranks.precision import on_cpu
from ...recipe.parse import flatten, read
from ...recipe.tables import Recipe
from ...registry.active import load
from ...tokens.store import Tokens
from ..bench.timing import machine_facts, machine_line
from ..trials.runner import Trial, Trials, trials
from .rewrite import ensure_free, rewrite
from .search import FLAT, Probe, Search, Setting

WARMUP = 2
"""Steps before those that are measured; the most that memory has to hold is in them."""
MARGIN = 0.05
"""Share of the memory that no probe may take: not every step of a run is tried."""
APART = 1.25
"""A size is at least so many times as large as the one before."""
STEP = math.sqrt(2)
"""A capacity is about so many times as large as the one before."""
PACKED, PADDED = "plugins.bfd_packing.capacity", "train.micro_batch"
AGAIN = "plugins.gradient_checkpointing"


class Ended(PlugsftError):
    """Told to stop: what is known so far is said."""

    exit_code = 130


def tune(
    path: Path,
    overrides: Sequence[str],
    without: Sequence[str],
    memory: str | None,
    steps: int,
    launch: str,
    to: Path | None,
) -> None:
    """Search the fastest size by probes in fresh processes; write the recipe that has it."""
    if "RANK" in os.environ:
        raise RecipeError('tune starts ranks by itself: run it with --launch "accelerate launch"')
    limit = parse_size(memory, "--memory") if memory else 0
    target = ensure_free(path, to)
    recipe, active = load(path, overrides, without)
    ensure_inputs(recipe, path)
    tuning = Tuning(recipe, limit, steps)
    try:
        with trials(recipe, active, launch) as made:
            tuning.run(made)
    except KeyboardInterrupt:
        raise Ended(f"stopped, and nothing written; {tuning.so_far()}") from None
    best, why = tuning.conclude()
    for line in why:
        say(line)
    if best == tuning.own:
        say("nothing is written: the recipe is as good as any")
        return
    before, given = flatten(read(path)), read(path, overrides)
    changes: dict[str, Any] = {f"plugins.{name}.enabled": False for name in without}
    changes |= {key: one for key, one in flatten(given).items() if before.get(key) != one}
    changes |= {key: one for key, one in tuning.changes(best).items() if key != AGAIN}
    if best.again != tuning.own.again:
        there = "gradient_checkpointing" in given.get("plugins", {})
        changes |= {f"{AGAIN}.enabled": best.again} if there else dict[str, Any]({AGAIN: {}})
    heading = f"plugsft tune {shlex.join([str(path), *overrides])}: {date.today()}, "
    if not rewrite(path, target, changes, [heading + machine_line(machine_facts()), *why]):
        say(f"warning: {path}: its comments could not be kept")
    say(f"written: {target}")


class Tuning:
    """Probes of a recipe, each some steps in a fresh process."""

    def __init__(self, recipe: Recipe, limit: int, steps: int) -> None:
        self._recipe, self._limit, self._steps = recipe, limit, steps
        packing = recipe.plugins.get("bfd_packing")
        size, self.key = recipe.train.micro_batch, PADDED
        if packing is not None:
            self.key = PACKED
            size = capacity(recipe)
            if packing["scope"] == "dataset":
                raise RecipeError(
                    'plugins.bfd_packing.scope: with "dataset" a step is batch_size rows of '
                    'capacity tokens, so that another capacity would learn otherwise; set "step", '
                    "or choose it by hand"
                )
        self.own = Setting(size, recipe.has("gradient_checkpointing"))
        self._search = Search([size], self.own)
        self._trial = Trial(Path(), 0.0)
        """The last."""

    @property
    def sizes(self) -> Sequence[int]:
        """All that may be chosen."""
        return self._search.sizes

    @property
    def _most(self) -> int:
        """The bytes that a probe may take."""
        return int(self._limit * (1 - MARGIN))

    def run(self, made: Trials) -> None:
        """Probe the recipe's own setting, then what the search asks for."""
        lengths = lengths_of(self._recipe, made.tokens)
        self._ensure_whole(int(lengths.max()))
        windows = windows_of(self._recipe, made.tokens, lengths, self._steps)
        if len(windows) > 1:
            made.use(windows.ravel(), in_order=True)
        given = self._limit
        if not given and on_cpu(self._recipe):
            self._limit = look().memory
        first = self.probe(made, self.own)
        ranks = max(1, len(self._trial.ranks))
        totals = [one["total"] for one in self._trial.ranks if one.get("device")]
        self._limit = given or min(totals, default=look().memory // ranks)
        share = -(-self._recipe.train.batch_size // ranks)
        sizes = micro_batches(share)
        if self.key == PACKED:
            heaviest = -(-int(lengths[windows].sum(1).max()) // ranks)
            sizes = capacities(int(lengths.max()), heaviest)
        self._search = Search(
            with_own(sizes, self.own.size),
            self.own,
            self._most,
            held_by_model(self._trial),
            [first],
        )
        say(
            f"sizes: {len(self.sizes)}, from {self.sizes[0]:,} to {self.sizes[-1]:,}; "
            f"memory: {format_size(self._limit)} a rank, of which {MARGIN:.0%} stay free"
        )
        while (setting := self._search.next()) is not None:
            self._search.probes.append(self.probe(made, setting))

    def _ensure_whole(self, longest: int) -> None:
        if self.key == PACKED and longest > self.own.size:
            raise RecipeError(
                f"{PACKED}: {self.own.size:,} is less than the longest example has, "
                f"{longest:,} tokens, and a larger one would learn otherwise; set {longest} or more"
            )

    def probe(self, made: Trials, setting: Setting) -> Probe:
        """Train some steps with a setting, and say what came of it."""
        number = len(self._search.probes) + 1
        with out.status(f"probe {number}: {self.name(setting)}"):
            trial = made.run(self.changes(setting), WARMUP + self._steps, memory=self._most)
        self._trial = trial
        mine = " (yours)" if setting == self.own else ""
        peak = max((one.get("device") or one["host"] for one in trial.ranks), default=0)
        if not trial.error:
            probe = Probe(setting, speed_of(trial), peak)
            came = f"{probe.speed:,.0f} tokens/s, {format_size(peak)}"
        elif trial.out_of_memory:
            probe, came = Probe(setting, 0.0, peak), "out of memory"
        elif setting == self.own:
            raise PlugsftError(f"{self.name(setting)}: {trial.error}")
        else:
            # The model, or another plugin, is against it.
            self._search.may_again &= not setting.again
            probe, came = Probe(setting, 0.0, peak), trial.error.splitlines()[-1]
        say(f"probe {number}: {self.name(setting)}{mine}: {came}, {trial.seconds:.0f} s")
        return probe

    def changes(self, setting: Setting) -> dict[str, Any]:
        """Return what makes a recipe have a setting."""
        again = self._recipe.plugins.get("gradient_checkpointing", {})
        return {self.key: setting.size, AGAIN: again if setting.again else None}

    def name(self, setting: Setting) -> str:
        """Name a setting as a recipe would."""
        return f"{self.key} = {setting.size}" + f", [{AGAIN}]" * setting.again

    def so_far(self) -> str:
        """Say what is the best of the probes that were made."""
        best = self._search.best()
        if best is None:
            return "no probe has come to its end"
        return f"best of {len(self._search.probes)} so far: {self._told(best)}"

    def _told(self, probe: Probe) -> str:
        return f"{self.name(probe.setting)}: {probe.speed:,.0f} tokens/s, {format_size(probe.peak)}"

    def conclude(self) -> tuple[Setting, list[str]]:
        """Show all probes; return the best setting and why; raise, where nothing fits."""
        best = self._search.best()
        if best is None:
            tried = "; ".join(self.name(one.setting) for one in self._search.probes)
            raise RecipeError(
                f"nothing fits into {format_size(self._most)} a rank; tried: {tried}. The last: "
                f"{self._trial.error}. More memory (--memory), a smaller data.max_length, and "
                "[plugins.lora] help"
            )
        own = self._search.probes[0]
        self._show(best)
        lines = [f"chosen: {self._told(best)}"]
        if best == own:
            lines[0] += ", as it was"
        elif own.speed:
            lines.append(f"{best.speed / own.speed:.2f} times as fast as {self._told(own)}")
        else:
            lines.append(f"{self.name(own.setting)} runs out of memory")
        if best.speed < self._search.fastest:
            lines.append(f"of those within {1 - FLAT:.1%} of the fastest, it takes least memory")
        lines.append(
            f"{len(self._search.probes)} probes of {self._steps} steps, in "
            f"{format_size(self._limit)} a rank less {MARGIN:.0%}"
        )
        return best.setting, lines

    def _show(self, best: Probe) -> None:
        own = self._search.probes[0]
        rows = [["size", "layers", "tokens/s", "of yours", "memory", ""]]
        for one in sorted(self._search.probes, key=lambda one: (one.setting.size, one.speed)):
            notes = {"chosen": one == best, "yours": one == own}
            rows.append(
                [
                    f"{one.setting.size:,}",
                    "computed again" if one.setting.again else "kept",
                    f"{one.speed:,.0f}" if one.speed else "out of memory",
                    f"{one.speed / own.speed:.2f}" if one.speed and own.speed else "",
                    format_size(one.peak) if one.speed else "",
                    ", ".join(name for name, true in notes.items() if true),
                ]
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for number, row in enumerate(rows):
            cells = [text.rjust(wide) for text, wide in zip(row, widths, strict=True)]
            cells[1], cells[-1] = row[1].ljust(widths[1]), row[-1]
            out.print(Text("  ".join(cells).rstrip(), "" if number else "bold"))


def lengths_of(recipe: Recipe, tokens: Tokens) -> Ints:
    """Return how many tokens each example will have in a batch."""
    shares = recipe.plugins.get("dpo", {}).get("share_prompt", False)
    return (tokens.shared() if shares else tokens).lengths


def windows_of(recipe: Recipe, tokens: Tokens, lengths: Ints, steps: int) -> Ints:
    """Choose steps of the first epoch: first those that need most memory, then as they come.

    The first begins with the longest example, the second has most tokens; the others are spread
    from the one with least to the one with most.
    """
    sources = [(one["examples"], one["weight"]) for one in tokens.facts["sources"]]
    order = shuffled(sources, recipe.train.seed, 0)
    size = recipe.train.batch_size
    if len(order) < size:
        return order[None]
    windows = order[: len(order) // size * size].reshape(-1, size)
    sums = lengths[windows].sum(1)
    spread = np.argsort(sums, kind="stable")[
        np.linspace(0, len(sums) - 1, steps).round().astype(int)
    ]
    longest = windows[lengths[windows].max(1).argmax()].copy()
    longest[lengths[longest].argmax()] = longest[0]
    longest[0] = lengths.argmax()
    return np.stack([longest, windows[sums.argmax()], *windows[spread]])


def micro_batches(share: int) -> list[int]:
    """Return sizes, rising, that deal a rank's share of a step out evenly."""
    sizes = [share]
    for parts in range(2, share + 1):
        size = -(-share // parts)
        if size * APART <= sizes[-1]:
            sizes.append(size)
    return sizes[::-1]


def capacities(longest: int, heaviest: int) -> list[int]:
    """Return sizes, rising, from the longest example to the heaviest step of a rank."""
    sizes = [max(longest, heaviest)]
    while sizes[-1] > STEP * APART * longest:
        sizes.append(math.ceil(sizes[-1] / STEP))
    return sorted({*sizes, longest})


def with_own(sizes: Sequence[int], own: int) -> list[int]:
    """Put the recipe's own size in the place of those that are as good as the same."""
    near = min(own, sizes[-1])
    return sorted([own, *(one for one in sizes if not near / APART < one < near * APART)])


def speed_of(trial: Trial) -> float:
    """Return tokens in a second, of the faster half of the steps: others' work only slows them."""
    steps = sorted(trial.steps[WARMUP:], key=lambda step: -float(step["tokens_per_second"]))
    fast = steps[: -(-len(steps) // 2)]
    return sum(float(one["tokens"]) for one in fast) / sum(
        float(one["step_seconds"]) for one in fast
    )


def held_by_model(trial: Trial) -> int:
    """Return about the bytes that a rank holds whatever the size: itself, weights, moments."""
    if "model" not in trial.run:
        return 0
    model, machine = trial.run["model"], trial.run["machine"]
    trained = model["trained_parameters"]
    frozen = (model["parameters"] - trained) * BYTES[model["dtype"]]
    weights = frozen + 4 * trained * BYTES[model["weights"]]  # with gradients and two moments
    spread = machine["ranks"] if machine["launcher"] in ("FSDP2", "ZeRO-3") else 1
    before = 0 if trial.ranks[0].get("device") else int(trial.ranks[0]["before"])
    return before + int(weights) // spread
