"""`plugsft tune`: find the micro-batch, or the packed row capacity, that trains fastest."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from rich.text import Text

from ...base.console import format_count, format_size, out, say
from ...base.errors import PlugsftError, RecipeError
from ...base.machine import look
from ...base.sizes import parse_size
from ...ranks.precision import on_cpu
from ...recipe.capabilities import Capability
from ...recipe.parse import flatten
from ...recipe.read import read
from ...recipe.tables import Recipe
from ...registry.active import Active
from ..bench.timing import machine_facts, machine_line
from ..trials.runner import Trial, TrialRunner, trials
from .edit_recipe import ensure_free, write_edited
from .search import MOST, NEAR_BEST, Probe, Search, Setting
from .sizes import capacities, choose_steps, keeps_steps, lengths_of, micro_batches, with_own

WARMUP = 2
"""Steps before those that are measured; memory peaks in them."""
MARGIN = 0.05
"""Share of the memory that stays free, as other steps of the run may need more."""


class Interrupted(PlugsftError):
    """Ctrl-C: the message names the best setting so far."""

    exit_code = 130


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    overrides: Sequence[str]
    without: Sequence[str]
    memory: str | None
    steps: int
    launch: str
    to: Path | None


def tune(recipe: Recipe, active: Active, path: Path, options: Options) -> None:
    """Find the fastest size by probes in fresh processes; write the recipe with it."""
    if "RANK" in os.environ:
        raise RecipeError('tune starts ranks by itself: run it with --launch "accelerate launch"')
    limit = parse_size(options.memory, "--memory") if options.memory else 0
    target = ensure_free(path, options.to)
    tuning = Tuning(recipe, limit, options.steps)
    try:
        with trials(recipe, active, options.launch) as runner:
            tuning.run(runner)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped, and nothing written; {tuning.so_far()}") from None
    best, reasons = tuning.conclude()
    for line in reasons:
        say(line)
    if best == tuning.own:
        say("nothing is written")
        return
    heading = f"plugsft tune {shlex.join([str(path), *options.overrides])}: {date.today()}, "
    comments = [heading + machine_line(machine_facts()), *reasons]
    if not write_edited(path, target, changes_of(tuning, best, path, options), comments):
        say(f"warning: {path}: its comments are lost")
    say(f"written: {target}")


def changes_of(tuning: "Tuning", best: Setting, path: Path, options: Options) -> dict[str, Any]:
    """Return the keys to set in the recipe's file: the command line's, then the best setting's."""
    in_file, tables = flatten(read(path)), read(path, options.overrides)
    changes: dict[str, Any] = {f"plugins.{name}.enabled": False for name in options.without}
    changes |= {key: value for key, value in flatten(tables).items() if in_file.get(key) != value}
    changes[tuning.key] = best.size
    if best.recompute != tuning.own.recompute:
        table = f"plugins.{tuning.recomputing}"
        if tuning.recomputing in tables.get("plugins", {}):
            changes[f"{table}.enabled"] = best.recompute
        else:
            changes[table] = {}
    return changes


class Tuning:
    """Probes of a recipe: each trains a few steps in a fresh process."""

    def __init__(self, recipe: Recipe, limit: int, steps: int) -> None:
        self._recipe, self._limit, self._steps = recipe, limit, steps
        self.key, size = recipe.micro_batch_size()
        self._packing = recipe.provides("packed_rows")
        if self._packing and not keeps_steps(recipe):
            raise RecipeError(
                f"{self.key}: tune cannot choose it: {self._packing.table} fills rows with "
                "examples of other steps, so another value would affect results; choose it by hand"
            )
        recomputed = recipe.provides("recomputed_activations")
        self.recomputing = (recomputed or Capability.bundled("recomputed_activations")).plugin
        """The plugin that recomputes activations, in the recipe or to add."""
        self.own = Setting(size, recomputed is not None)
        self._search = Search([size], self.own, Probe)
        self._trials = 0
        self._last = Trial(Path(), 0.0)

    @property
    def sizes(self) -> Sequence[int]:
        """All sizes to choose from, rising."""
        return self._search.sizes

    @property
    def _allowed(self) -> int:
        """Bytes that a probe may take."""
        return int(self._limit * (1 - MARGIN))

    def run(self, runner: TrialRunner) -> None:
        """Probe the recipe's own setting, then search."""
        lengths = lengths_of(self._recipe, runner.tokens)
        self._ensure_whole(int(lengths.max()))
        size = self._recipe.train.batch_size
        steps = choose_steps(runner.epoch_order(), size, lengths, self._steps)
        if len(steps) > 1:
            runner.use(steps.ravel(), in_order=True)
        limit = self._limit
        if not limit and on_cpu(self._recipe):
            self._limit = look().memory
        first = self.probe(runner, self.own)
        ranks = max(1, len(self._last.ranks))
        totals = [rank["total"] for rank in self._last.ranks if rank.get("device")]
        self._limit = limit or min(totals, default=look().memory // ranks)
        share = -(-self._recipe.train.batch_size // ranks)
        sizes = micro_batches(share)
        if self._packing:
            largest_step = -(-int(lengths[steps].sum(1).max()) // ranks)
            sizes = capacities(int(lengths.max()), largest_step)
        sizes = with_own(sizes, self.own.size)
        self._search = Search(
            sizes,
            self.own,
            lambda setting: self.probe(runner, setting),
            [first],
            can_recompute=self._search.can_recompute,
        )
        say(
            f"sizes: {len(sizes)}, from {sizes[0]:,} to {sizes[-1]:,}; "
            f"memory: {format_size(self._limit)} a rank, {MARGIN:.0%} stays free"
        )
        self._search.run()

    def _ensure_whole(self, longest: int) -> None:
        if self._packing and longest > self.own.size:
            raise RecipeError(
                f"{self.key}: {self.own.size:,} is less than the longest example "
                f"({longest:,} tokens), and a larger one would affect results; set {longest} or "
                "more"
            )

    def probe(self, runner: TrialRunner, setting: Setting) -> Probe:
        """Train some steps with a setting; print the result."""
        self._trials += 1
        number = self._trials
        with out.status(f"probe {number}: {self.name(setting)}"):
            trial = runner.run(self.changes(setting), WARMUP + self._steps, memory=self._allowed)
        self._last = trial
        peak = max((rank.get("device") or rank["host"] for rank in trial.ranks), default=0)
        if not trial.error:
            probe = Probe(setting, (speed_of(trial),), peak)
            result = f"{probe.speed:,.0f} tokens/s, {format_size(peak)}"
        elif trial.out_of_memory:
            probe, result = Probe(setting, (), peak), "out of memory"
        elif setting == self.own:
            raise PlugsftError(f"{self.name(setting)}: {trial.error}")
        else:
            # The model, or another plugin, refuses the setting.
            self._search.can_recompute &= not setting.recompute
            probe, result = Probe(setting, (), peak), trial.error.splitlines()[-1]
        yours = " (yours)" if setting == self.own else ""
        say(f"probe {number}: {self.name(setting)}{yours}: {result}, {trial.seconds:.0f} s")
        return probe

    def changes(self, setting: Setting) -> dict[str, Any]:
        """Return the changes of the recipe for a setting."""
        options = self._recipe.plugins.get(self.recomputing, {})
        table = f"plugins.{self.recomputing}"
        return {self.key: setting.size, table: options if setting.recompute else None}

    def name(self, setting: Setting) -> str:
        """Name a setting as a recipe would."""
        recomputing = f", [plugins.{self.recomputing}]" if setting.recompute else ""
        return f"{self.key} = {setting.size}{recomputing}"

    def so_far(self) -> str:
        """Return a line about the best probe so far."""
        best = self._search.best()
        if best is None:
            return "no probe has finished"
        return f"best of {len(self._search.probes)} so far: {self._describe(best)}"

    def _describe(self, probe: Probe) -> str:
        return f"{self.name(probe.setting)}: {probe.speed:,.0f} tokens/s, {format_size(probe.peak)}"

    def conclude(self) -> tuple[Setting, list[str]]:
        """Print all probes; return the best setting and why; raise where nothing fits."""
        best = self._search.best()
        if best is None:
            tried = "; ".join(self.name(probe.setting) for probe in self._search.probes)
            raise RecipeError(
                f"nothing fits in {format_size(self._allowed)} a rank; tried: {tried}. The last: "
                f"{self._last.error}. More memory (--memory), a smaller data.max_length, "
                f"{Capability.bundled('offloaded_activations').table} on a GPU, and "
                f"{Capability.bundled('adapters').table} help"
            )
        own, gain = self._search.probes[0], self._search.gain()
        chosen = best if self._search.is_sure() else own
        self._print_table(chosen)
        if chosen == best != own:
            lines = [f"chosen: {self._describe(best)}"]
            relative = f"{gain} as fast as {self._describe(own)}"
            lines.append(relative if gain else f"{self.name(own.setting)} runs out of memory")
            if best.speed < self._search.fastest:
                lines.append(
                    f"of those within {1 - NEAR_BEST:.1%} of the fastest, it takes the least memory"
                )
            if best.setting.recompute and not self.own.recompute:
                table = Capability.bundled("recomputed_activations").table
                lines.append(f'if memory allows, selective = "attention" in {table} may be faster')
        else:
            lines = [f"keep yours: {self._describe(own)}"]
            scatter = f"{self.name(best.setting)} is {gain} as fast, which is within the scatter"
            lines.append(scatter if gain else "no other setting is faster")
        lines.append(
            f"{format_count(self._trials, 'probe')} of {format_count(self._steps, 'step')}, at "
            f"most {MOST} of a setting, in {format_size(self._limit)} a rank less {MARGIN:.0%}"
        )
        return chosen.setting, lines

    def _print_table(self, chosen: Probe) -> None:
        own = self._search.probes[0]
        rows = [["size", "layers", "tokens/s", "probes", "scatter", "x yours", "memory", ""]]
        for probe in sorted(
            self._search.probes, key=lambda probe: (probe.setting.size, probe.speed)
        ):
            notes = {"chosen": probe == chosen, "yours": probe == own}
            relative = probe.speed / own.speed if probe.speed and own.speed else 0.0
            rows.append(
                [
                    f"{probe.setting.size:,}",
                    "recomputed" if probe.setting.recompute else "stored",
                    f"{probe.speed:,.0f}" if probe.speed else "out of memory",
                    str(len(probe.speeds) or 1),
                    f"{probe.scatter:.1%}" if len(probe.speeds) > 1 else "",
                    f"{relative:.2f}" if relative else "",
                    format_size(probe.peak) if probe.speed else "",
                    ", ".join(note for note, applies in notes.items() if applies),
                ]
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for number, row in enumerate(rows):
            cells = [text.rjust(width) for text, width in zip(row, widths, strict=True)]
            cells[1], cells[-1] = row[1].ljust(widths[1]), row[-1]
            out.print(Text("  ".join(cells).rstrip(), "" if number else "bold"))
        say("scatter: the fastest probe of a setting less the slowest, relative to the median")


def speed_of(trial: Trial) -> float:
    """Return tokens per second of the faster half of the steps: other processes only slow them."""
    steps = sorted(trial.steps[WARMUP:], key=lambda step: -float(step["tokens_per_second"]))
    fast = steps[: -(-len(steps) // 2)]
    seconds = sum(float(step["step_seconds"]) for step in fast)
    return sum(float(step["tokens"]) for step in fast) / seconds
