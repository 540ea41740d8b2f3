"""plugsft bench measures planted plugins as they are."""

import importlib
import json
import math
import os
import random
import signal
import statistics
import time
from itertools import pairwise

import psutil
import pytest
from conftest import (
    ROOT,
    chats,
    must_succeed,
    only_full,
    run_plugsft,
    start_plugsft,
    tiny_tables,
    write_recipe,
)
from plugin_packages import activate, install

from plugsft.base.for_commands import print_table
from plugsft.lab.bench import BOTH, LEARNS, NO_STEP, READS, choose_contenders
from plugsft.lab.timing import (
    FASTER,
    NOISE,
    SLOWER,
    UNKNOWN,
    Bench,
    Ratio,
    head,
    in_rounds,
    speed_ratio,
    spread,
)
from plugsft.registry.load import load

NOTHING = """
    @plugin()
    class Nothing:
        @hookimpl(wrapper=True)
        def step(self):
            return (yield)
"""
PLANTED = {
    "nothing": NOTHING,
    # Of each token the same, so that it is the same share of long steps and of short ones.
    "sleeper": """
        import time

        @plugin()
        class Sleeper:
            seconds: float = 0.0

            @hookimpl(wrapper=True)
            def step(self, batch):
                time.sleep(self.seconds * int(batch["attention_mask"].sum()))
                return (yield)
    """,
    "louder": """
        @plugin()
        class Louder:
            @hookimpl(wrapper=True)
            def step(self):
                return 1.01 * (yield)
    """,
    "broken": """
        @plugin()
        class Broken:
            @hookimpl(wrapper=True)
            def step(self):
                yield
                raise RuntimeError("it broke")
    """,
    "slow": """
        import time

        @plugin()
        class Slow:
            @hookimpl(wrapper=True)
            def render(self, rows):
                time.sleep(0.5)
                return (yield)
    """,
    "both": """
        @plugin()
        class Both:
            @hookimpl(wrapper=True)
            def render(self):
                return (yield)

            @hookimpl(wrapper=True)
            def step(self):
                return (yield)
    """,
    "fragile": """
        import os

        @plugin()
        class Fragile:
            @hookimpl(wrapper=True)
            def render(self):
                return (yield)

            @hookimpl(wrapper=True)
            def step(self):
                if not os.environ.pop("HELPED", ""):
                    raise RuntimeError("nobody helped")
                return (yield)
    """,
    "helper": """
        import os

        @plugin()
        class Helper:
            @hookimpl(wrapper=True)
            def collate(self):
                os.environ["HELPED"] = "yes"
                return (yield)
    """,
    "needy": NOTHING.replace("Nothing", "Needy").replace("()", '(requires=["nothing"])', 1),
}


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Give a function that writes a tiny recipe with plugins, planted or not."""
    activate(install(tmp_path, **PLANTED), monkeypatch)

    def make(rows=None, **plugins):
        tables = tiny_tables(tmp_path, rows) | {"plugins": plugins}
        return write_recipe(tmp_path / "recipe.toml", tables)

    return make


def line_of(path, only=()):
    return choose_contenders(load(path)[1], only)


def test_each_takes_part_alone_and_left_out(recipe):
    line = line_of(recipe(nothing={}, louder={}, slow={}, tracker={"to": ["tensorboard"]}))
    assert line.optional == line.measured == ["louder", "nothing"] and line.kept == {
        "slow": NO_STEP
    }
    assert line.contenders == {
        "baseline": [],
        "all on": ["louder", "nothing"],
        "louder alone": ["louder"],
        "nothing alone": ["nothing"],
        "all but louder": ["nothing"],
        "all but nothing": ["louder"],
    }
    # Contenders with the same plugins share a trial.
    assert line.trials() == {
        "none": ["louder", "nothing"],
        "louder nothing": [],
        "louder": ["nothing"],
        "nothing": ["louder"],
    }


def test_what_a_recipe_needs_stays(recipe):
    path = recipe(dpo={}, dpo_reference={}, nothing={}, needy={}, both={}, louder={})
    line = line_of(path)
    assert line.kept == {"both": BOTH, "dpo": READS}
    assert line.optional == ["louder", "needy", "nothing", "dpo_reference"]
    assert LEARNS not in line.kept.values()


def test_a_plugin_goes_with_what_it_requires(recipe):
    line = line_of(recipe(nothing={}, needy={}, louder={}), only=["nothing", "needy"])
    assert line.measured == ["needy", "nothing"]
    assert line.contenders["needy alone"] == ["needy", "nothing"]
    assert line.contenders["all but nothing"] == ["louder"]
    assert line.contenders["all but needy"] == ["louder", "nothing"]
    assert "louder alone" not in line.contenders


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "bot"], "--only bot: the recipe has no such active plugin; did you mean"),
        (["--only", "slow"], "--only slow: the recipe has no such active plugin; it has "),
        (["--only", "both"], "--only both: it is always on"),
    ],
)
def test_wrong_options_of_bench_are_refused_in_one_line(recipe, words, said):
    result = run_plugsft("bench", recipe(nothing={}, both={}), *words)
    assert result.returncode == 2 and said in result.stderr and result.stderr.count("\n") == 1


REAL = json.loads((ROOT / "tests/data/trial_seconds.json").read_text())["of a token"]


def times_as_fast(one, other):
    return Ratio(tuple(b / a for a, b in zip(one, other, strict=True)))


def share(word, more=1.0, quiet=1.0, count=4_000):
    """Return how often a word is said of five rounds: neighbours, as the trials of a round are.

    `quiet` is the part of the noise that is left where a machine is not as busy.
    """
    dice, found = random.Random(0), []
    for _ in range(count):
        pairs = []
        for _ in range(5):
            at = dice.randrange(len(REAL) - 1)
            one, other = dice.sample([seconds**quiet for seconds in REAL[at : at + 2]], 2)
            pairs.append((one * more, other))
        found.append(times_as_fast(*zip(*pairs, strict=True)).word)
    return found.count(word) / count


def test_nothing_is_within_noise_and_five_percent_is_not():
    assert share(NOISE) >= 0.96 and share(NOISE, quiet=0.05) >= 0.96
    assert share(SLOWER, 1.05, quiet=0.05) >= 0.85
    assert share(FASTER, 1 / 1.05, quiet=0.05) >= 0.85
    # Where it is noisy, nobody can tell, and nothing is said.
    assert share(NOISE, 1.05) >= 0.95 and share(FASTER, 1.05) <= 0.02


@pytest.mark.parametrize("heavy", [1.5, 2, 4])
@pytest.mark.parametrize("size", [0.003, 0.02, 0.2])
def test_noise_of_any_size_is_taken_for_nothing_else(heavy, size):
    dice = random.Random(1)

    def trials():
        # Student's t, of few degrees: most of it small, and some as large as can be.
        spoils = [dice.gauss(0, 1) / math.sqrt(dice.gammavariate(heavy / 2, 2 / heavy))
                  for _ in range(5)]  # fmt: skip
        return [math.exp(min(max(size * spoil, -5), 5)) for spoil in spoils]

    words = [times_as_fast(trials(), trials()).word for _ in range(2_000)]
    assert words.count(NOISE) >= 0.975 * len(words)


def test_two_rounds_are_too_few_and_small_differences_are_noise():
    assert times_as_fast([1.0] * 2, [3.0] * 2).word == UNKNOWN
    assert times_as_fast([1.0] * 3, [3.0] * 3).word == FASTER
    assert times_as_fast([1.0] * 5, [1.015] * 5).word == NOISE
    assert times_as_fast([1.03] * 5, [1.0] * 5).word == SLOWER
    assert times_as_fast([1.0] * 3, [1.1, 1.2, 1.4]).word == NOISE  # as far apart as from 1
    assert times_as_fast([1.0] * 3, [1.3, 1.3, 1.4]).word == FASTER
    assert str(times_as_fast([1.0, 2.0], [2.0, 4.0])) == "2.00 x (2.00 to 2.00)"
    assert str(times_as_fast([1.0] * 3, [250.0] * 3)) == "250.00 x (250.00 to 250.00)"
    assert str(times_as_fast([8.0], [2.0])) == "0.25 x"
    assert spread([3.0]) == "3.000" and spread([3.0, 1.0, 2.0], ".0f") == "2 (1 to 3)"


def test_rounds_let_each_take_part_once_and_in_other_orders():
    ran = []
    contenders = {name: lambda name=name: ran.append(name) or name * 2 for name in "abcd"}
    assert list(in_rounds(6, contenders)) == [{name: name * 2 for name in "abcd"}] * 6
    orders = ["".join(ran[at : at + 4]) for at in range(0, 24, 4)]
    assert all(sorted(order) == list("abcd") for order in orders) and len({*orders}) > 3
    assert {order[0] for order in orders} != {orders[0][0]}


def figures(dice, cost=1.0, noise=0.005, off=0.0, **more):
    """Make a trial: steps of very different lengths, a spell that disturbs some of them."""
    tokens = [500, 120, 800, 300, 650, 150, 400, 700, 220, 900, 330, 480]
    spoilt = dice.randrange(len(tokens))
    seconds = [
        count * 1e-4 * cost * math.exp(dice.gauss(0, noise)) * (5 if at == spoilt else 1)
        for at, count in enumerate(tokens)
    ]
    return {
        "error": "",
        "whole": 5.0,
        "seconds": seconds,
        "tokens": tokens,
        "trained": [count // 2 for count in tokens],
        "loss": [3.0 * (1 + off), 2.9, 2.8] + [2.7] * 9,
        "grad_norm": [1.0] * 12,
        "exact": True,
        "host": 500 * 2**20,
        **more,
    }


def report(**trials):
    """Make a report of five rounds, of plugins `a` and `b`: key of a trial -> what it gives."""
    dice = random.Random(7)
    contenders = {
        "baseline": [],
        "all on": ["a", "b"],
        "a alone": ["a"],
        "b alone": ["b"],
        "all but a": ["b"],
        "all but b": ["a"],
    }
    keys = {name: " ".join(on) or "none" for name, on in contenders.items()}
    return {
        **head(),
        "status": "complete",
        "name": "made",
        "recipe": {"train": {"batch_size": 8}},
        "settings": {"rounds": 5, "steps": 10, "warmup": 2, "launch": ""},
        "measured": ["a", "b"],
        "kept": {"c": READS},
        "contenders": {name: {"on": on, "rounds": keys[name]} for name, on in contenders.items()},
        "rounds": [
            {key: figures(dice, **trials.get(key.replace(" ", "_"), {})) for key in keys.values()}
            for _ in range(5)
        ],
    }


def succeeded(bench, contender):
    return [trial for trial in bench.trials(contender) if not trial["error"]]


def words_of(found):
    return {row[0]: row[-1] for row in Bench(found).table()[1:]}


def test_a_bench_calls_plugins_faster_slower_or_within_noise():
    fast, slow = {"cost": 0.8}, {"cost": 1.05, "host": 600 * 2**20}
    found = report(a=fast, b=slow, a_b={"cost": 0.8 * 1.05})
    assert words_of(found) == {"a": FASTER, "b": SLOWER}
    one, other = Bench(found).results()
    assert one.alone.middle == pytest.approx(1.25, rel=0.02) == one.company.middle
    assert one.memory == {"host": 0} and other.memory == {"host": 100 * 2**20} and not one.learned
    # What it brings may be another thing in company.
    assert words_of(report(a=fast, a_b={"cost": 1.0})) == {
        "a": "faster; among the others within noise",
        "b": "within noise; among the others slower",
    }


def test_a_bench_of_two_rounds_calls_every_plugin_unknown():
    found = report(a={"cost": 0.5}, a_b={"cost": 0.5})
    found["rounds"] = found["rounds"][:2]
    assert words_of(found) == {"a": UNKNOWN, "b": UNKNOWN}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"off": 5e-5}, NOISE),
        ({"off": 2e-4}, f"{NOISE}; affects results (loss off by 0.0002)"),
        ({"off": 5e-3, "exact": False}, NOISE),
        ({"off": 2e-2, "exact": False}, f"{NOISE}; affects results (loss off by 0.02)"),
        ({"grad_norm": [1.0, 1.0, 1.002] + [1.0] * 9},
         f"{NOISE}; affects results (gradient norm off by 0.002)"),
        ({"grad_norm": [1.0] * 11 + [7.0]}, NOISE),  # by then rounding has made runs differ
        ({"trained": [9] * 12}, f"{NOISE}; affects results (other tokens in a step)"),
    ],
)  # fmt: skip
def test_what_is_learned_is_compared(change, said):
    assert words_of(report(a=change, a_b=change))["a"] == said


def test_a_contender_that_fails_is_named():
    found = report()
    for number, one in enumerate(found["rounds"]):
        one["a b"] = {"error": "x\nRuntimeError: <b>\nit broke", "whole": 1.0}
        if number:
            del one["a b"]
        one["b"] |= {"error": "gone"} if number == 2 else {}
    assert words_of(found) == {
        "a": "within noise; all but a failed",
        "b": "within noise; b alone failed",
    }
    assert len(succeeded(Bench(found), "b alone")) == 4


def test_steps_are_compared_with_their_like():
    dice = random.Random(3)
    trials = [figures(dice, noise=0.0) for _ in range(5)]
    ratio = speed_ratio([*pairwise(trials)], 2)
    assert ratio.rounds == pytest.approx([1.0] * 4)  # whichever step was disturbed
    # Steps of the warm-up count for nothing.
    plain = trials[0]["seconds"]
    slow = trials[0] | {"seconds": [one * (3 if n < 8 else 1) for n, one in enumerate(plain)]}
    assert speed_ratio([(slow, trials[0])], 8).middle == 1
    # Twice the tokens in a step, in twice the time: as fast.
    double = {
        "tokens": [2 * count for count in trials[0]["tokens"]],
        "seconds": [2 * one for one in trials[0]["seconds"]],
    }
    assert speed_ratio([(double, trials[0])], 2).middle == pytest.approx(1.0)


@only_full
@pytest.mark.slow
def test_planted_plugins_come_out_as_they_are(recipe, tmp_path, forked_trials):
    path = recipe(louder={}, slow={}, broken={})
    words = ["--rounds", 1, "--steps", 2, "--warmup", 1]
    result = must_succeed("bench", path, "--without", "broken", *words)
    folder = tmp_path / "run-bench"
    found = json.loads((folder / "bench.json").read_text())
    assert found["status"] == "complete" and found["machine"]["cores"] and "cpu" in found["machine"]
    assert "output" not in found["recipe"] and len(found["rounds"]) == 1
    bench = Bench(found)
    [louder] = bench.results()
    assert louder.learned.startswith("loss off by 0.01, gradient norm off by 0.01")
    assert found["summary"]["louder"].startswith(f"{UNKNOWN}; affects results")
    assert result.stdout.count(UNKNOWN) == 1
    [one] = succeeded(bench, "baseline")
    assert found["kept"] == {"slow": NO_STEP}
    assert one["host"] > 50e6
    assert "run-bench/bench.json" in result.stdout and [*folder.iterdir()] == [
        folder / "bench.json"
    ]
    assert not (tmp_path / "run").exists()
    result = run_plugsft("bench", path, *words)
    assert result.returncode == 2 and "bench.json exists; add --overwrite" in result.stderr


@only_full
def test_a_plugin_that_fails_is_named_and_the_others_are_measured(recipe, tmp_path, forked_trials):
    path = recipe(broken={})
    words = ["--rounds", 2, "--steps", 1, "--warmup", 0, f"output={tmp_path}/made"]
    result = must_succeed("bench", path, *words)
    assert result.stdout.count("failed: it broke") == 1  # it is not tried again
    found = json.loads((tmp_path / "made-bench/bench.json").read_text())
    assert words_of(found) == {"broken": "broken alone failed"}
    assert [sorted(one) for one in found["rounds"]] == [["broken", "none"], ["none"]]


@pytest.mark.slow
def test_a_baseline_that_does_not_run_names_the_cure(recipe, forked_trials):
    result = run_plugsft("bench", recipe(fragile={}, helper={}))
    assert result.returncode == 2 and "nobody helped" in result.stderr
    assert "the baseline, without helper, does not run" in result.stderr
    assert "bench without it" in result.stderr and result.stderr.count("\n") == 1


@only_full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_bench_that_is_stopped_keeps_whole_rounds_and_leaves_no_process(recipe, tmp_path, number):
    path = recipe(nothing={})
    words = ["--rounds", 50, "--steps", 1, "--warmup", 0]
    running = start_plugsft("bench", path, *words)
    kept, end = tmp_path / "run-bench/bench.json", time.monotonic() + 240
    while not kept.exists():
        assert time.monotonic() < end and running.process.is_alive()
        time.sleep(0.1)
    while not (trials := psutil.Process(running.pid).children(recursive=True)):
        assert time.monotonic() < end
    os.kill(running.pid, number)
    done = running.wait()
    assert done.returncode == 130 and "complete rounds are in " in done.stderr
    found = json.loads(kept.read_text())
    assert found["status"] == "stopped" and found["rounds"]
    assert not [trial for trial in trials if trial.is_running()]


FIVE = 5


@only_full
@pytest.mark.timeout(3600)
def test_of_five_benches_four_are_right(recipe, tmp_path):
    """Beside another worker of pytest, bench may miss a slower plugin, and must not invent one."""
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    model = {"scratch": {"hidden": 128, "layers": 2, "heads": 4, "vocab": 400, "context": 256}}
    tables = tiny_tables(tmp_path, chats(400)) | {"model": model}
    tables["train"] |= {"batch_size": 32, "micro_batch": 16}
    path = write_recipe(tmp_path / "recipe.toml", tables | {"plugins": {"nothing": {}}})
    words = ["--steps", 30]
    must_succeed("bench", path, *words, "--rounds", 3, f"output={tmp_path}/first")
    bench = Bench(json.loads((tmp_path / "first-bench/bench.json").read_text()))
    steps = [
        zip(one["seconds"], one["tokens"], strict=True) for one in succeeded(bench, "baseline")
    ]
    cost = statistics.median(seconds / tokens for trial in steps for seconds, tokens in trial)
    plugins = {"nothing": {}, "sleeper": {"seconds": 0.05 * cost}}
    write_recipe(path, tables | {"plugins": plugins})
    found = []
    for number in range(FIVE):
        must_succeed("bench", path, *words, f"output={tmp_path}/{number}", timeout=900)
        made = Bench(json.loads((tmp_path / f"{number}-bench/bench.json").read_text()))
        nothing, sleeper = made.results()
        found.append((nothing.alone.word, sleeper.alone.word))
        print(number, nothing.alone, sleeper.alone, flush=True)
    assert [one for one, _ in found].count(NOISE) >= FIVE - 1
    sleepers = [one for _, one in found]
    assert FASTER not in sleepers and (sleepers.count(SLOWER) >= FIVE - 1 or not alone)


def test_columns_are_aligned(capsys):
    print_table(Bench(report()).table())
    lines = capsys.readouterr().out.splitlines()
    assert len({line.index("within") for line in lines[1:]}) == 1 and len(lines) == 3
    assert lines[0].startswith("plugin  alone")


@pytest.mark.parametrize("name", ["plugins", "real_tokenizers", "mixers"])
def test_the_page_of_benchmarks_has_the_table_of_the_committed_figures(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools/bench"))
    plugins = importlib.import_module(name)
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf8")
    table = page.partition(plugins.BEGIN)[2].partition(plugins.END)[0]
    result = ROOT / f"tools/bench/results/{name}.json"
    made = plugins.table(json.loads(result.read_text())) if result.exists() else ""
    assert plugins.END in page and table == made


def test_the_tools_measure_with_the_same(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "tools/bench"))
    shared = importlib.import_module("shared")
    seconds = shared.in_rounds(3, short=lambda: None, long=lambda: time.sleep(0.02))
    assert [len(one) for one in seconds.values()] == [3, 3] and min(seconds["long"]) > 0.02
    assert shared.compare_speed([1.0] * 3, [2.0] * 3) == "2.00 x (2.00 to 2.00) as fast, faster"
    shared.write_report({"seconds": seconds}, tmp_path / "kept.json")
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert kept["seconds"] == seconds and kept["machine"]["cores"] and kept["versions"]["trl"]
    assert kept["machine"]["cpu"] and kept["date"] and len(kept["machine"]["system"]) > 4
