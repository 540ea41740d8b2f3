"""The search of tune on simulated machines, compared with a full sweep."""

import math
from random import Random

import pytest
from test_bench import REAL

from plugsft.lab.tune.search import MOST, REPEATS, Probe, Search, Setting
from plugsft.lab.tune.sizes import capacities, micro_batches, with_own

START = 8.0
"""Seconds that a probe takes besides its steps; these take as long, at the best speed."""


class Simulated:
    """A machine and a model, other ones for each seed, on which sizes differ in a known way."""

    def __init__(self, kind, seed, noise=0.0, tight=False):
        self.rng = random = Random(seed)
        least = random.randint(200, 4000)
        sizes = random.choice(
            [
                micro_batches(random.choice([32, 48, 64, 100, 128, 256])),
                capacities(least, int(least * random.uniform(16, 64))),
            ]
        )
        own = random.choice([sizes[0], *sizes, 1.1 * random.choice(sizes)])
        self.sizes = with_own(sizes, int(own))
        self.own = Setting(int(own), random.random() < 0.15)
        self.noise, first, last = noise, self.sizes[0], self.sizes[-1]
        self.launch = random.choice([0, 0.2, 1, 4, 16]) * first
        self.crowd = random.choice([0.001, 0.01, 0.1]) / first if kind == "unimodal" else 0
        self.padding = random.uniform(0.05, 0.5) if kind == "padded" else 0
        self.cliff, self.drop = math.inf, 1
        if kind == "flat":
            self.launch = random.choice([0, 0.1]) * first
        if kind == "cliff":
            self.launch = random.choice([0, 0.1, 0.5]) * first
            self.cliff, self.drop = random.choice(self.sizes[2:-1]), random.uniform(1.3, 2)
        self.base, self.slope = 10_000, 20_000 / last
        self.share, self.slower = random.uniform(0.15, 0.4), random.uniform(1.2, 1.4)
        self.limit = self.base + self.slope * random.uniform(0.15, 1) * last if tight else math.inf

    def peak(self, setting):
        grows = self.slope * setting.size * (self.share if setting.recompute else 1)
        return int(self.base + grows)

    def speed(self, setting):
        """Return the true speed; 0, where memory runs out."""
        if self.peak(setting) > self.limit:
            return 0.0
        size, first = setting.size, self.sizes[0]
        time = (1 + self.launch / size + self.crowd * size) * (size / first) ** self.padding
        if size > self.cliff:
            time *= self.drop * (size / self.cliff) ** 0.2
        return 1 / time / (self.slower if setting.recompute else 1)

    def probe(self, setting):
        noise = math.exp(self.rng.gauss(0, self.noise))
        speed = self.speed(setting) * noise
        return Probe(setting, (speed,) if speed else (), self.peak(setting))

    def seconds(self, setting, best):
        speed = self.speed(setting)
        return START + (START * best / speed if speed else 0)

    def sweep(self):
        """Return all settings that a sweep tries: each kind up to the first that does not fit."""
        for again in (False, True):
            for size in self.sizes:
                yield Setting(size, again)
                if not self.speed(Setting(size, again)):
                    break

    def search(self):
        search = Search(self.sizes, self.own, self.probe, [self.probe(self.own)])
        search.run()
        settings = [probe.setting for probe in search.probes]
        assert len({*settings}) == len(settings)
        return search


def compare(one):
    """Return the chosen speed over the best of a sweep, and the time over that of the sweep."""
    search, swept = one.search(), [*one.sweep()]
    best = max(map(one.speed, swept))
    seconds, sweep = (
        sum(one.seconds(setting, best) for setting in settings)
        for settings in (
            [probe.setting for probe in search.probes for _ in probe.speeds or [0]],
            swept,
        )
    )
    chosen = search.best() if search.is_sure() else search.probes[0]
    return one.speed(chosen.setting) / best, seconds / sweep


@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize("noise", [0.0, 0.02], ids=["exact", "noisy"])
@pytest.mark.parametrize("kind", ["unimodal", "padded", "flat", "cliff"])
def test_it_finds_what_a_full_sweep_finds_in_a_part_of_its_time(kind, noise, tight):
    found = [compare(Simulated(kind, seed, noise, tight)) for seed in range(200)]
    speeds, times = zip(*found, strict=True)
    good = sum(speed >= 0.95 for speed in speeds) / len(found)
    mean = sum(times) / len(times)
    print(f"\n{good:.1%} within 5 %, the worst {min(speeds):.2f}; {mean:.2f} of the time")
    # A noisy machine takes repeats.
    assert good >= 0.95 and min(speeds) >= 0.8 and mean <= (0.4 if noise else 0.32)


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("most", [1, 4], ids=["no gain", "clear gain"])
def test_a_gain_is_told_from_scatter(noise, most):
    """`most`: the size up to which speed grows."""
    rng, changed, counts = Random(5), 0, []
    for _ in range(100):

        def probe(one):
            return Probe(one, (min(one.size, most) * math.exp(rng.gauss(0, noise)),), one.size)

        search = Search([1, 2, 3, 4, 6, 8, 12, 16], Setting(1), probe)
        search.run()
        changed += search.is_sure() and min(search.best().setting.size, most) > most / 2
        counts.append(max(len(probe.speeds) for probe in search.probes))
    print(f"\n{changed} of 100 changed")
    assert changed <= 8 if most == 1 else changed >= 85
    assert min(counts) >= 2 and max(counts) <= MOST


@pytest.mark.parametrize(("second", "count"), [(1.04, 1), (1.2, REPEATS)])
def test_settings_are_probed_again_only_where_probes_scatter(second, count):
    speeds = {Setting(1): iter([1.0, second, 1.0])}

    def probe(one):
        return Probe(one, (next(speeds.get(one, iter(())), 0.5),), one.size)

    search = Search([1, 2, 4], Setting(1), probe)
    search.run()
    assert [len(probe.speeds) for probe in search.probes] == [max(2, count), count]
    assert search.gain() is None and not search.is_sure()


def test_scatter_of_a_busy_machine_is_no_gain():
    """Seconds per token of real trials of one recipe, in the order of that day, there and back."""
    rng, changed = Random(3), 0
    for _ in range(200):
        there_and_back = 4 * (REAL + REAL[::-1])
        seconds = iter(there_and_back[rng.randrange(2 * len(REAL)) :])

        def probe(one, seconds=seconds):
            return Probe(one, (1 / next(seconds),), one.size)

        search = Search([1, 2, 3, 4, 6, 8], Setting(4), probe)
        search.run()
        changed += search.is_sure()
    print(f"\n{changed} of 200 changed")
    # The speed of that day drifts by a factor of three; without repeats most are taken for a gain.
    assert changed <= 20


def test_a_repeat_that_runs_out_of_memory_counts():
    speeds = iter([(1.0,), ()])
    search = Search([1], Setting(1), lambda setting: Probe(setting, next(speeds, ())))
    search.run()
    assert search.best() is None and not search.probes[0].speed


def search(own, fits, **options):
    """Search where only some settings fit, all equally fast."""
    made = Search(
        [1, 2, 4, 8, 16],
        own,
        lambda setting: Probe(setting, (1.0,) if fits(setting) else (), setting.size),
        **options,
    )
    made.run()
    return made


def test_where_nothing_fits_it_ends():
    made = search(Setting(8), lambda one: False)
    tried = [Setting(8), Setting(4), Setting(2), Setting(1), Setting(1, True)]
    assert [probe.setting for probe in made.probes] == tried and made.best() is None


def test_layers_are_recomputed_where_only_that_fits():
    made = search(Setting(8), lambda one: one.recompute and one.size < 4)
    assert made.best().setting.recompute


def test_layers_are_not_recomputed_where_they_cannot_be():
    made = search(Setting(8), lambda one: False, can_recompute=False)
    assert not any(probe.setting.recompute for probe in made.probes)


def test_a_recipe_that_recomputes_is_tried_without():
    made = search(Setting(4, True), lambda one: True)
    assert any(not probe.setting.recompute for probe in made.probes)


def test_of_equal_speeds_that_with_the_least_memory_is_chosen():
    search = Search([1, 2, 4], Setting(1), None)
    for size, speed, peak in ((1, 90, 5), (2, 99.5, 6), (4, 100, 9)):
        search.probes.append(Probe(Setting(size), (speed,), peak))
    assert search.best().setting == Setting(2)


def test_sizes_deal_a_step_out_evenly():
    assert micro_batches(1) == [1]
    assert micro_batches(8) == [1, 2, 3, 4, 8]
    assert micro_batches(48) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]
    assert capacities(500, 300) == [500]
    assert capacities(500, 2000) == [500, 708, 1001, 1415, 2000]
    assert with_own([1, 2, 4, 8], 3) == [1, 2, 3, 4, 8]
    assert with_own([500, 708, 1001, 1415, 2000], 1024) == [500, 708, 1024, 1415, 2000]
    assert with_own([1, 2, 4], 64) == [1, 2, 64]
