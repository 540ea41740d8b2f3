"""The search for the fastest size in few probes.

The time of a token is a sum of powers of the micro-batch's size: what a launch costs is shared by
more tokens, padding and crowded caches grow, the rest stays. The logarithm of such a sum is convex
in the logarithm of the size. So the line through two probes bounds what may come beyond them, and
most sizes need not be tried. The peak of memory grows in a line, and is foreseen.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

GAIN = 1.02
"""What can be no faster than the best by this factor is left untried."""
FLAT = 0.985
"""Of speeds within this share of the best, the one that needs the least memory is chosen."""
NOISE = 0.02
"""Share by which a measured speed may be wrong."""
LEAP = 16
"""A probe is at most so many times as large as one that fits."""
FAR = 8
"""What is so many times smaller than all that was tried may be another matter."""
AGAIN = 0.85
"""Share of its speed that a size keeps, at most, where layers are computed again."""
LIGHTER = 4
"""Times as large a micro-batch is likely to fit where layers are computed again."""
LEAST = 6
"""Probes that may always be made; else a third of all settings."""


@dataclass(frozen=True)
class Setting:
    """What is turned: a size, and whether layers are computed again in the backward pass."""

    size: int
    again: bool = False


@dataclass(frozen=True)
class Probe:
    """What came of a setting: tokens in a second (0: memory ran out), and bytes at the peak."""

    setting: Setting
    speed: float
    peak: int = 0


@dataclass
class Search:
    """Says what to probe next, from the probes that were made."""

    sizes: Sequence[int]
    """All that may be chosen, rising."""
    own: Setting
    """Where it begins."""
    limit: float = math.inf
    """Bytes that a rank may hold."""
    base: int = 0
    """Bytes that it holds whatever the size, as far as is known."""
    probes: list[Probe] = field(default_factory=list)
    may_again: bool = True
    """Whether layers can be computed again."""

    def next(self) -> Setting | None:
        """Return what to probe next; None, where nothing is likely to be faster."""
        if not self.probes:
            return self.own
        if self.fastest and len(self.probes) >= max(LEAST, len(self.sizes) * 2 // 3):
            return None
        for again in (False, True) if self.may_again else (False,):
            place = self._next_place(again)
            if place is not None:
                return Setting(self.sizes[place], again)
        return None

    def best(self) -> Probe | None:
        """Return, of those about as fast as the fastest, the one that needs the least memory."""
        close = [one for one in self.probes if one.speed and one.speed >= self.fastest * FLAT]
        return min(close, key=lambda one: (one.peak, one.setting.size), default=None)

    @property
    def fastest(self) -> float:
        """The best speed so far."""
        return max((one.speed for one in self.probes), default=0.0)

    def _curve(self, again: bool) -> tuple[dict[int, Probe], int]:
        """Return the probes that fit, by their rising places, and the first place that did not."""
        mine = [one for one in self.probes if one.setting.again == again]
        there = sorted((self.sizes.index(one.setting.size), one.speed, one) for one in mine)
        died = next((place for place, speed, _ in there if not speed), len(self.sizes))
        return {place: one for place, speed, one in there if speed}, died

    def _next_place(self, again: bool) -> int | None:
        fits, died = self._curve(again)
        # What fits fits all the more where layers are computed again.
        sure = max({**fits, **self._curve(False)[0]} if again else fits, default=None)
        if sure is None:
            own = self.probes[0]
            if died == len(self.sizes) and own.setting.again and own.speed and not again:
                return self.sizes.index(own.setting.size)
            return 0 if died else None  # where the least does not fit, nothing does
        places = [place for place in range(died) if place not in fits]
        most = max(sure, self._holds(again))
        hopeful = [
            place
            for place in places
            if self.sizes[place] <= most and self._bound(place, again) > GAIN * self.fastest
        ]
        if not hopeful:
            return None
        best = sure if not fits else max(fits, key=lambda place: fits[place].speed)
        beyond = [place for place in hopeful if place > best]
        if beyond and best == max(fits, default=sure):
            # At once as far as memory goes; halfway, where it has run out before.
            return beyond[-1] if died == len(self.sizes) else beyond[len(beyond) // 2]
        middle = self._vertex(fits, best)
        return min(hopeful, key=lambda place: abs(self._log(place) - middle))

    def _holds(self, again: bool) -> float:
        """Return the largest size that is likely to fit, and no leap."""
        fits, _ = self._curve(again)
        plain, _ = self._curve(False)
        if not fits:
            return LIGHTER * self.sizes[max(plain)]
        *_, one = fits.values()
        others = [(other.setting.size, other.peak) for other in fits.values() if other != one]
        size, peak = others[-1] if others else (0, self.base)
        slope = (one.peak - peak) / (one.setting.size - size)
        room = (self.limit - one.peak) / slope if slope > 0 else math.inf
        leap = max(self.sizes[place] for place in (fits | plain if again else fits))
        return min(one.setting.size + room, LEAP * leap)

    def _bound(self, place: int, again: bool) -> float:
        """Return the most speed that a setting can have, were its curve concave."""
        fits, _ = self._curve(again)
        bound = self._line(fits, place)
        plain, _ = self._curve(False)
        if again and plain:
            # Computed again, a size is slower by a share that grows no less.
            below = [other for other in fits if other <= place]
            shares = [fits[other].speed / self._plain(plain, other) for other in below]
            bound = min(bound, min([AGAIN, *shares]) * self._plain(plain, place))
        return bound

    def _plain(self, plain: Mapping[int, Probe], place: int) -> float:
        return plain[place].speed if place in plain else self._line(plain, place)

    def _line(self, fits: Mapping[int, Probe], place: int) -> float:
        """Return the least of what the lines through two probes below and two above allow."""
        below = [other for other in sorted(fits, reverse=True) if other < place]
        above = [other for other in fits if other > place]
        bounds = [math.inf]
        for side, beyond in ((below, above), (above, below)):
            if len(side) < 2 or (not below and self.sizes[place] * FAR < self.sizes[side[0]]):
                continue
            line = self._through(*(fits[other] for other in side[:2]))
            # A probe above the line shows that the curve is not concave here.
            if not beyond or fits[beyond[0]].speed <= line(self.sizes[beyond[0]]):
                bounds.append(line(self.sizes[place]))
        return min(bounds)

    def _through(self, near: Probe, far: Probe) -> Callable[[int], float]:
        """Return the line through two probes, beyond the near one, as steep as noise lets it be."""
        apart = abs(math.log(near.setting.size / far.setting.size))
        slope = (math.log(near.speed / far.speed) + NOISE) / apart
        return lambda size: near.speed * math.exp(slope * abs(math.log(size / near.setting.size)))

    def _vertex(self, fits: Mapping[int, Probe], best: int) -> float:
        """Return where a parabola through the best and its neighbours has its top, or about."""
        left = max((place for place in fits if place < best), default=0)
        right = min((place for place in fits if place > best), default=len(self.sizes) - 1)
        a, b, c = map(self._log, (left, best, right))
        if left in fits and right in fits:
            rises, falls = (math.log(fits[best].speed / fits[p].speed) for p in (left, right))
            one, other = (b - a) * falls, (b - c) * rises
            if one - other:
                return b - ((b - a) * one - (b - c) * other) / (2 * (one - other))
        return (a + b) / 2 if b - a > c - b else (b + c) / 2

    def _log(self, place: int) -> float:
        return math.log(self.sizes[place])
