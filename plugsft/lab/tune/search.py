"""Search for the fastest size: double it while that gains speed, then refine once."""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

GAIN = 1.02
"""Least factor in speed that counts as a gain and not as noise."""
FACTOR = 1.9
"""Least factor from one size to the next: about two, as sizes are rounded."""
NEAR_BEST = 0.985
"""Of speeds within this share of the best, the setting with the least memory is chosen."""


@dataclass(frozen=True)
class Setting:
    """A size, and whether layers are recomputed in the backward pass."""

    size: int
    recompute: bool = False


@dataclass(frozen=True)
class Probe:
    """Measurements of a setting: tokens per second (0: out of memory), and peak bytes."""

    setting: Setting
    speed: float
    peak: int = 0


@dataclass
class Search:
    """Probes settings, beginning with the recipe's own."""

    sizes: Sequence[int]
    """All sizes to choose from, rising."""
    own: Setting
    measure: Callable[[Setting], Probe]
    probes: list[Probe] = field(default_factory=list)
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

    def best(self) -> Probe | None:
        """Return the probe with the least memory among those near the fastest."""
        near = [
            probe
            for probe in self.probes
            if probe.speed and probe.speed >= self.fastest * NEAR_BEST
        ]
        return min(near, key=lambda probe: (probe.peak, probe.setting.size), default=None)

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
        """Return the speed of a setting; measure it once."""
        for probe in self.probes:
            if probe.setting == setting:
                return probe.speed
        self.probes.append(self.measure(setting))
        return self.probes[-1].speed

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
