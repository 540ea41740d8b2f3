"""`plugsft tune`: find the micro-batch, or the packed row capacity, that trains fastest.

It doubles the size until memory runs out. Then the recipe's own size and the fastest take turns.
"""

import shlex
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import tomlkit

from ..base.atomic import write_text
from ..base.console import format_count, format_size, out, say
from ..base.errors import PlugsftError, RecipeError
from ..base.machine import look
from ..base.sizes import parse_size
from ..base.types import Ints
from ..batches.defaults import BatchDefaults
from ..batches.estimate import EstimatedColumns
from ..ranks.precision import on_cpu
from ..recipe.capabilities import Capability
from ..recipe.parse import anchored, flatten
from ..recipe.read import FORMATS, read
from ..recipe.tables import Recipe
from ..registry import active as registry
from ..registry.active import Active
from ..registry.load import resolve
from .timing import FASTER, Ratio, machine_facts, machine_line
from .trials import Interrupted, Trial, TrialRunner, refuse_ranks, trials, with_changes

WARMUP = 2
"""Steps before those that are measured; memory peaks in them."""
MARGIN = 0.05
"""Share of the memory that stays free, as other steps of the run may need more."""
TURNS = 4
"""Probes of the recipe's own setting and of the fastest, in turn."""


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    overrides: Sequence[str]
    without: Sequence[str]
    memory: str | None
    steps: int
    launch: str
    to: Path | None


@dataclass(frozen=True)
class Setting:
    """A size, and whether layers are recomputed in the backward pass."""

    size: int
    recompute: bool = False


@dataclass
class Probes:
    """Measurements of a setting."""

    setting: Setting
    speeds: list[float] = field(default_factory=list)
    """Tokens per second of each probe; none if memory ran out."""
    peak: int = 0
    """Bytes."""
    error: str = ""
    """Why a probe failed."""

    @property
    def speed(self) -> float:
        """The median speed; 0 if memory ran out."""
        return statistics.median(self.speeds) if self.speeds else 0.0


def tune(recipe: Recipe, active: Active, path: Path, options: Options) -> None:
    """Find the fastest size by probes in fresh processes; write the recipe with it."""
    refuse_ranks("tune")
    limit = parse_size(options.memory, "--memory") if options.memory else 0
    target = ensure_free(path, options.to)
    tuning = Tuning(recipe, limit, options.steps)
    try:
        with trials(recipe, active, options.launch, examples=None) as runner:
            best = tuning.run(runner)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped, and nothing written; {tuning.so_far()}") from None
    reasons = tuning.reasons(best)
    for line in reasons:
        say(line)
    if best.setting == tuning.own:
        say("nothing is written")
        return
    heading = f"plugsft tune {shlex.join([str(path), *options.overrides])}: {date.today()}, "
    comments = [heading + machine_line(machine_facts()), *reasons]
    changes = changes_of(tuning, best.setting, path, options)
    if not write_edited(path, target, changes, comments):
        say(f"warning: {path}: its comments are lost")
    say(f"written: {target}")


def changes_of(tuning: "Tuning", best: Setting, path: Path, options: Options) -> dict[str, Any]:
    """Return the keys to set in the recipe's file: the command line's, then the best setting's."""
    in_file, tables = flatten(read(path)), read(path, options.overrides)
    changes: dict[str, Any] = {f"plugins.{name}.enabled": False for name in options.without}
    changes |= {key: value for key, value in flatten(tables).items() if in_file.get(key) != value}
    changes[tuning.key] = best.size
    if best.recompute and not tuning.own.recompute:
        table = f"plugins.{tuning.recomputing}"
        if tuning.recomputing in tables.get("plugins", {}):
            changes[f"{table}.enabled"] = True
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
        self._probes: dict[Setting, Probes] = {}
        self._rival: Probes | None = None
        """The setting that took turns with the own one."""
        self._count = 0
        self._last = Trial(Path(), 0.0)

    @property
    def _allowed(self) -> int:
        """Bytes that a probe may take."""
        return int(self._limit * (1 - MARGIN))

    def run(self, runner: TrialRunner) -> Probes:
        """Probe the recipe's own setting, then others; return the best."""
        tokens = runner.tokens
        if self._recipe.provides("shared_prompts"):
            tokens = tokens.share_prompts()
        lengths = tokens.lengths
        longest, size = int(lengths.max()), self._recipe.train.batch_size
        if self._packing and longest > self.own.size:
            raise RecipeError(
                f"{self.key}: {self.own.size:,} is less than the longest example "
                f"({longest:,} tokens), and a larger one would affect results; set {longest} or "
                "more"
            )
        steps = choose_steps(runner.epoch_order(), size, lengths, self._steps)
        runner.use(steps.ravel())
        limit = self._limit
        if not limit and on_cpu(self._recipe):
            self._limit = look().memory
        self.probe(runner, self.own)
        ranks = max(1, len(self._last.ranks))
        totals = [rank["total"] for rank in self._last.ranks if rank.get("device")]
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
        """Probe other sizes; return the best setting."""
        self._find_sizes(runner, least, most)
        return self._compare(runner)

    def _find_sizes(self, runner: TrialRunner, least: int, most: int) -> None:
        """Double the size until it does not fit; look for one that fits if the own one does not."""
        size = self.own.size
        if self._probes[self.own].speeds:
            fits = True
            while fits and size < most:
                size = min(2 * size, most)
                fits = self.probe(runner, replace(self.own, size=size))
            return
        sizes = [size]
        while sizes[-1] > least:
            sizes.append(max(sizes[-1] // 2, least))
        for recompute in sorted({self.own.recompute, True}):
            for setting in (Setting(size, recompute) for size in sizes):
                if setting != self.own and self.probe(runner, setting):
                    return

    def _compare(self, runner: TrialRunner) -> Probes:
        """Probe own setting and the fastest in turn; return the fastest if it surely is."""
        own = self._probes[self.own]
        while (best := self._fastest()) is not own:
            if best is None:
                raise self._nothing_fits()
            if not own.speeds:
                break
            self._rival = best
            # In turn: a machine that becomes slower or faster favours neither.
            pair = (self.own, best.setting)
            if all(self.probe(runner, one) for n in range(TURNS) for one in pair[:: (-1) ** n]):
                return best if self._gain(best).word == FASTER else own
        return best

    def probe(self, runner: TrialRunner, setting: Setting) -> bool:
        """Train some steps with a setting; print the result; return whether it fits."""
        self._count += 1
        number = self._count
        with out.status(f"probe {number}: {self.name(setting)}"):
            trial = runner.run(self.changes(setting), WARMUP + self._steps, memory=self._allowed)
        self._last = trial
        probes = self._probes.setdefault(setting, Probes(setting))
        peak = max((rank.get("device") or rank["host"] for rank in trial.ranks), default=0)
        probes.peak = max(probes.peak, peak)
        if not trial.error:
            speed = speed_of(trial)
            probes.speeds.append(speed)
            result = f"{speed:,.0f} tokens/s, {format_size(peak)}"
        elif setting == self.own and not trial.out_of_memory:
            raise PlugsftError(f"{self.name(setting)}: {trial.error}")
        else:
            # The model, or another plugin, may refuse the setting.
            result = "out of memory" if trial.out_of_memory else trial.error.splitlines()[-1]
            probes.speeds.clear()
            probes.error = result
        yours = " (yours)" if setting == self.own else ""
        say(f"probe {number}: {self.name(setting)}{yours}: {result}, {trial.seconds:.0f} s")
        return not trial.error

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
        best = self._fastest()
        return f"best so far: {self._describe(best)}" if best else "no probe has finished"

    def _fastest(self) -> Probes | None:
        fitting = [probes for probes in self._probes.values() if probes.speeds]
        return max(fitting, key=lambda probes: probes.speed, default=None)

    def _gain(self, best: Probes) -> Ratio:
        """Return the speed relative to the own setting, in each turn."""
        turns = (best.speeds[-TURNS:], self._probes[self.own].speeds[-TURNS:])
        return Ratio(tuple(after / before for after, before in zip(*turns, strict=True)))

    def _describe(self, probes: Probes) -> str:
        memory = format_size(probes.peak)
        return f"{self.name(probes.setting)}: {probes.speed:,.0f} tokens/s, {memory}"

    def _nothing_fits(self) -> RecipeError:
        tried = "; ".join(map(self.name, self._probes))
        return RecipeError(
            f"nothing fits in {format_size(self._allowed)} a rank; tried: {tried}. The last: "
            f"{self._last.error}. More memory (--memory), a smaller data.max_length, "
            f"{Capability.bundled('offloaded_activations').table} on a GPU, and "
            f"{Capability.bundled('adapters').table} help"
        )

    def reasons(self, best: Probes) -> list[str]:
        """Say in lines why a setting is the best."""
        own = self._probes[self.own]
        lines = [f"{'keep yours' if best is own else 'chosen'}: {self._describe(best)}"]
        if best is not own and own.speeds:
            lines.append(f"{self._gain(best)} as fast as {self._describe(own)}")
        elif best is own and self._rival and self._rival.speeds:
            rival = f"{self.name(self._rival.setting)} is {self._gain(self._rival)} as fast"
            lines.append(f"{rival}: {self._gain(self._rival).word}")
        elif best is own:
            lines.append("no other setting is faster")
        failed = [probes for probes in self._probes.values() if probes.error]
        lines += [f"{self.name(probes.setting)}: {probes.error}" for probes in failed]
        if best.setting.recompute and not self.own.recompute:
            table = Capability.bundled("recomputed_activations").table
            lines.append(f'if memory allows, selective = "attention" in {table} may be faster')
        lines.append(
            f"{format_count(self._count, 'probe')} of {format_count(self._steps, 'step')}, in "
            f"{format_size(self._limit)} a rank less {MARGIN:.0%}"
        )
        return lines


def speed_of(trial: Trial) -> float:
    """Return tokens per second of the faster half of the steps: other processes only slow them."""
    steps = sorted(trial.steps[WARMUP:], key=lambda step: -float(step["tokens_per_second"]))
    fast = steps[: -(-len(steps) // 2)]
    seconds = sum(float(step["step_seconds"]) for step in fast)
    return sum(float(step["tokens"]) for step in fast) / seconds


def keeps_steps(recipe: Recipe) -> bool:
    """Tell whether a step has `batch_size` examples of the epoch's order, however it is packed."""
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


def ensure_free(recipe: Path, to: Path | None) -> Path:
    """Return the path of the new recipe; refuse one that exists."""
    target = to or recipe.with_suffix(".tuned.toml")
    if not target.parent.is_dir():
        raise RecipeError(f"--to: {target.parent}: no such folder; create it, or name another")
    if target.exists():
        raise RecipeError(f"--to: {target} exists; move it away, or name another file (--to FILE)")
    return target


def write_edited(
    recipe: Path, target: Path, changes: Mapping[str, Any], comments: Sequence[str]
) -> bool:
    """Write a recipe with {"table.key": value} set; return whether its comments stayed."""
    if recipe.suffix in FORMATS:  # YAML or JSON: the new recipe is TOML
        text, complete = tomli_w.dumps(with_changes(read(recipe), changes)), False
    else:
        text, complete = edit(recipe.read_text(encoding="utf8"), changes)
    write_text(target, "".join(f"# {line}\n" for line in comments) + f"\n{text}")
    return complete


def edit(text: str, changes: Mapping[str, Any]) -> tuple[str, bool]:
    """Set keys in the text of a recipe; return whether its comments stayed."""
    wanted = with_changes(tomllib.loads(text), changes)
    document = tomlkit.parse(text)
    for dotted_key, value in changes.items():
        *path, key = dotted_key.split(".")
        table: Any = document
        for name in path:
            if name not in table:
                # A super table has no header of its own: [plugins.lora] needs no [plugins].
                table[name] = tomlkit.table(is_super_table=isinstance(value, Mapping))
            table = table[name]
        table[key] = value
    edited = tomlkit.dumps(document)
    complete = tomllib.loads(edited) == wanted
    return (edited if complete else tomli_w.dumps(wanted)), complete
