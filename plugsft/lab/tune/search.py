"""Search for the fastest size: double it, then refine once.

It doubles while that gains speed. Then it probes the recipe's own setting and the best again, in
turn, until the gain is sure.
"""

import bisect
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ..bench.timing import FASTER, Ratio

GAIN = 1.02
"""Least factor in speed that counts as a gain and not as noise."""
FACTOR = 1.9
"""Least factor from one size to the next: about two, as sizes are rounded."""
NEAR_BEST = 0.985
"""Of speeds within this share of the best, the setting with the least memory is chosen."""
SCATTER = 0.05
"""Where two probes of one setting differ by more than this, each setting is probed again."""
REPEATS, ROUNDS = 3, 5
"""Probes of each setting where they scatter; most rounds of the own setting and the best."""
MOST = REPEATS + ROUNDS
"""Most probes of a setting."""


@dataclass(frozen=True)
class Setting:
    """A size, and whether layers are recomputed in the backward pass."""

    size: int
    recompute: bool = False


@dataclass(frozen=True)
class Probe:
    """Measurements of a setting."""

    setting: Setting
    speeds: tuple[float, ...] = ()
    """Tokens per second of each probe; none if memory ran out."""
    peak: int = 0
    """Bytes."""

    @property
    def speed(self) -> float:
        """The median speed; 0 if memory ran out."""
        return statistics.median(self.speeds) if self.speeds else 0.0

    @property
    def scatter(self) -> float:
        """The fastest probe less the slowest, as a share of the median."""
        return (max(self.speeds) - min(self.speeds)) / self.speed if self.speeds else 0.0


@dataclass
class Search:
    """Probes settings, beginning with the recipe's own."""

    sizes: Sequence[int]
    """All sizes to choose from, rising."""
    own: Setting
    measure: Callable[[Setting], Probe]
    """Probes a setting once."""
    probes: list[Probe] = field(default_factory=list)
    """The settings that were probed, the recipe's own first."""
    repeats: int = 2
    """Probes of each setting; the first that fits is probed twice, to see the scatter."""
    can_recompute: bool = True
    """Whether the model can recompute layers."""

    def run(self) -> None:
        """Double or halve the size; try recomputing where memory runs out; refine once."""
        speed = self._speed(self.own)
        if speed:
            self._move(self._step(self.own, larger=True), larger=True)
        if self.fastest == speed:
            self._move(self._step(self.own, larger=False), larger=False)
        best, too_large = self.best(), [probe.setting for probe in self.probes if not probe.speed]
        if self.own.recompute:
            start = best.setting if best else self.own
            self._move(replace(start, recompute=False), larger=False)
        elif best and too_large:
            self._move(replace(min(too_large, key=_size), recompute=True), larger=True)
        elif too_large:
            self._move(Setting(self.sizes[0], recompute=True), larger=True)
        self._refine()
        self._settle()

    def best(self) -> Probe | None:
        """Return the own setting if near the fastest, else the least memory's."""
        if self.probes and 0 < self.fastest * NEAR_BEST <= self.probes[0].speed:
            return self.probes[0]
        near = [
            probe
            for probe in self.probes
            if probe.speed and probe.speed >= self.fastest * NEAR_BEST
        ]
        return min(near, key=lambda probe: (probe.peak, probe.setting.size), default=None)

    def gain(self) -> Ratio | None:
        """Return the best's speed relative to the own setting, if they differ."""
        best, own = self.best(), self.probes[0]
        if best is None or best == own or not own.speed:
            return None
        # Where probes scatter, only those in turn count: a machine's speed drifts.
        pairs = zip(own.speeds[self._apart :], best.speeds[self._apart :], strict=False)
        return Ratio(tuple(after / before for before, after in pairs))

    @property
    def _apart(self) -> int:
        """Probes of a setting that were not in turn with another."""
        return REPEATS if self.repeats == REPEATS else 0

    def is_sure(self) -> bool:
        """Tell whether the best is surely faster than the own setting."""
        gain = self.gain()
        return gain.word == FASTER if gain else not self.probes[0].speed

    def _settle(self) -> None:
        """Probe own setting and best in turn, until the gain is sure."""
        while (best := self.best()) and self.gain() and not self.is_sure():
            own = self.probes[0]
            # First one, then the other: a machine that becomes slower or faster favours neither.
            both = (own, best) if len(own.speeds) % 2 else (best, own)
            fewer = min(both, key=lambda probe: len(probe.speeds))
            if len(fewer.speeds) == self._apart + ROUNDS:
                return
            self._repeat(self.probes.index(fewer))

    @property
    def fastest(self) -> float:
        """The best speed so far."""
        return max((probe.speed for probe in self.probes), default=0.0)

    def _move(self, setting: Setting | None, larger: bool) -> None:
        """Probe a setting, then twice or half its size, as long as that gains."""
        while setting is not None and (self.can_recompute or not setting.recompute):
            before, speed = self.fastest, self._speed(setting)
            if (larger and not speed) or 0 < speed < GAIN * before:
                return
            setting = self._step(setting, larger)

    def _speed(self, setting: Setting) -> float:
        """Return the speed of a setting; measure it, again if probes scatter."""
        settings = [probe.setting for probe in self.probes]
        if setting not in settings:
            self.probes.append(self.measure(setting))
            settings.append(setting)
        place = settings.index(setting)
        while 0 < len(self.probes[place].speeds) < self.repeats:
            self._repeat(place)
        return self.probes[place].speed

    def _repeat(self, place: int) -> None:
        """Probe a setting once more."""
        known = self.probes[place]
        new = self.measure(known.setting)
        speeds = known.speeds + new.speeds if new.speeds else ()
        self.probes[place] = Probe(known.setting, speeds, max(known.peak, new.peak))
        if self.repeats == 2:
            self.repeats = REPEATS if self.probes[place].scatter > SCATTER else 1

    def _step(self, setting: Setting, larger: bool) -> Setting | None:
        """Return about twice or half the size, or the last; None after that."""
        sizes, size = self.sizes, setting.size
        if size == (sizes[-1] if larger else sizes[0]):
            return None
        if larger:
            place = min(bisect.bisect_left(sizes, FACTOR * size), len(sizes) - 1)
        else:
            place = max(bisect.bisect_right(sizes, size / FACTOR) - 1, 0)
        return replace(setting, size=sizes[place])

    def _refine(self) -> None:
        """Probe between the fastest and the nearest sizes that were probed."""
        if not self.fastest:
            return
        top = max(self.probes, key=lambda probe: probe.speed).setting
        probed = {
            probe.setting.size for probe in self.probes if probe.setting.recompute == top.recompute
        }
        above = min((size for size in probed if size > top.size), default=top.size)
        below = max((size for size in probed if size < top.size), default=top.size)
        for low, high in ((top.size, above), (below, top.size)):
            between = [size for size in self.sizes if low < size < high]
            if between:
                self._speed(replace(top, size=between[len(between) // 2]))


def _size(setting: Setting) -> int:
    return setting.size
