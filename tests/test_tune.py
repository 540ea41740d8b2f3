"""plugsft tune: real probes under real limits of memory."""

import json
import math
import os
import re
import signal
import sys
import time
from pathlib import Path
from random import Random

import psutil
import pytest
from conftest import (
    ROOT,
    chats,
    must_succeed,
    only_full,
    read_metrics,
    run_plugsft,
    start_plugsft,
    tiny_tables,
    write_jsonl,
    write_recipe,
)
from plugin_packages import activate, install

from plugsft.base.errors import RecipeError
from plugsft.base.machine import look
from plugsft.lab.trials import Trial, trials
from plugsft.lab.tune import TURNS, Tuning, choose_steps
from plugsft.registry.load import load
from plugsft.tokens.store import Tokens

REAL = json.loads((ROOT / "tests/data/trial_seconds.json").read_text())["of a token"]
RECIPE = """\
# My recipe.
output = "{folder}/run"          # here

[model.scratch]
hidden = 32
layers = 24                      # much to keep for the backward pass
heads = 2
vocab = 400
context = 1024

[data]
source = "{folder}/data.jsonl"
max_length = 1024

[train]
batch_size = 8                   # never touched
micro_batch = 1                  # as memory allows
learning_rate = 3e-3
"""


def long_chats(count, words=300):
    """Make chats of about equal length, that fill memory."""
    return [
        {
            "messages": [
                {"role": "user", "content": "say"},
                {"role": "assistant", "content": "the quick brown fox jumps " * (words // 5)},
            ]
        }
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Give a folder with a recipe whose memory is the micro-batch's."""
    folder = tmp_path_factory.mktemp("tune")
    write_jsonl(folder / "data.jsonl", long_chats(16) + long_chats(1, words=350))
    (folder / "my.toml").write_text(RECIPE.format(folder=folder), encoding="utf8")
    return folder


def measure_peak(runner, size, **plugins):
    """Return the bytes that a process with a micro-batch of this size takes."""
    trial = runner.run({"train.micro_batch": size, **plugins}, steps=1)
    assert not trial.error
    return trial.ranks[0]["host"]


def lines_of(text):
    return [line for line in text.splitlines() if line.strip()]


class Machine:
    """Runs trials on which the speed of each size is given; 0 does not fit."""

    def __init__(self, speed):
        self.speed, self.probed = speed, []

    def run(self, changes, steps, memory):
        [size] = changes.values()
        self.probed.append(size)
        speed = self.speed(size)
        if not speed:
            return Trial(Path(), 0.0, error="no more", out_of_memory=True)
        return Trial(Path(), 0.0, steps=[{"tokens_per_second": speed}] * steps)


@pytest.fixture
def simulate(tiny):
    recipe, _ = load(tiny())

    def make(own, speed, most=16):
        """Tune sizes up to `most`; return the tuning, the best and the sizes in order."""
        tuning, machine = Tuning(recipe, 0, 1), Machine(speed)
        tuning.own = own
        tuning.probe(machine, own)
        return tuning, tuning.search(machine, 1, most), machine.probed

    return make


def test_the_size_doubles_until_it_does_not_fit(simulate):
    _, best, probed = simulate(3, lambda size: size if size < 20 else 0, most=100)
    assert best.size == 12 and probed == [3, 6, 12, 24, *2 * [3, 12, 12, 3]]
    assert simulate(3, lambda size: size, most=8)[1].size == 8  # a rank's examples of a step


def test_sizes_of_the_same_speed_change_nothing(simulate):
    tuning, best, _ = simulate(1, lambda size: 100 + size, most=2)
    reasons = tuning.reasons(best)
    assert best.size == 1
    assert reasons[0].startswith("keep yours: ") and reasons[1].endswith(": within noise")


def test_a_size_that_fits_is_looked_for(simulate):
    assert simulate(8, lambda size: size <= 2)[1].size == 2
    with pytest.raises(RecipeError, match=r"nothing fits in .* tried train\.micro_batch: 4, 2, 1"):
        simulate(4, lambda size: 0)


def test_a_repeat_that_runs_out_of_memory_counts(simulate):
    large = iter([4.0, 4.0])
    tuning, best, _ = simulate(1, lambda size: next(large, 0) if size == 4 else size, most=4)
    assert best.size == 2
    assert "train.micro_batch = 4: out of memory" in tuning.reasons(best)


@pytest.mark.parametrize("noise", [0.02, 0.1])
@pytest.mark.parametrize("most", [1, 4], ids=["no gain", "clear gain"])
def test_a_gain_is_distinguished_from_noise(simulate, noise, most):
    """`most`: the size up to which speed grows."""
    rng, changed = Random(5), 0
    for _ in range(100):
        _, best, _ = simulate(1, lambda size: min(size, most) * math.exp(rng.gauss(0, noise)))
        changed += best.size != 1
    assert changed <= 8 if most == 1 else changed >= 85


def test_the_drift_of_a_busy_machine_is_no_gain(simulate):
    """Seconds per token of real trials of one recipe, in the order of that day, there and back."""
    rng, changed = Random(3), 0
    for _ in range(200):
        there_and_back = 4 * (REAL + REAL[::-1])
        seconds = iter(there_and_back[rng.randrange(2 * len(REAL)) :])
        _, best, _ = simulate(4, lambda size, seconds=seconds: 1 / next(seconds), most=32)
        changed += best.size != 4
    # The speed of that day drifts by a factor of three.
    assert changed <= 20


@pytest.mark.slow
def test_without_another_size_yours_stays(tiny, tmp_path, forked_trials):
    path = tiny(train={"batch_size": 1, "micro_batch": 1})
    result = must_succeed("tune", path, "--steps", 1, cwd=tmp_path)
    assert "probe 1: " in result.stdout and "probe 2: " not in result.stdout
    assert "\nkeep yours: train.micro_batch = 1: " in result.stdout
    assert "\n1 probe of 1 step, in " in result.stdout
    assert "\nset " not in result.stdout


SLEEPY = """
import random
import time

@plugin()
class Sleepy:
    token: float = 0.0
    micro_batch: float = 0.0
    factor: float = state(0.0)

    @hookimpl(wrapper=True)
    def step(self, batch):
        # Another factor in each process, as on a machine that others use.
        self.factor = self.factor or random.SystemRandom().uniform(1, 1.4)
        tokens = int(batch["attention_mask"].sum())
        time.sleep(self.factor * (self.micro_batch + self.token * tokens))
        return (yield)
"""


@only_full
@pytest.mark.slow
def test_the_fastest_that_fits_is_found(place, tmp_path, monkeypatch, forked_trials):
    # Small micro-batches take longer on any machine.
    activate(install(tmp_path, sleepy=SLEEPY), monkeypatch)
    slow = "plugins.sleepy.micro_batch=0.1"
    with trials(*load(place / "my.toml")) as runner:
        # Two examples fit for sure: one step takes a few MiB less than a probe of several.
        room = int((measure_peak(runner, 4) + measure_peak(runner, 8)) / 2 / 0.95)
    words = ("tune", place / "my.toml", slow, "--memory", room, "--steps", 3)
    result = run_plugsft(*words, cwd=place, timeout=1200)
    print(result.stdout)
    assert result.returncode == 0, result.stderr
    probes = re.findall(r"probe \d+: (.*)", result.stdout)
    assert "train.micro_batch = 1 (yours)" in probes[0] and "train.micro_batch = 2: " in probes[1]
    assert "train.micro_batch = 8: out of memory" in result.stdout
    command = re.search(r"^set train.micro_batch = [24]: plugsft (.*)", result.stdout, re.M)[1]
    # It runs, and learns the same.
    losses = []
    for number, recipe in enumerate(([place / "my.toml"], command.split())):
        output = place / f"run-{number}"
        must_succeed(*recipe, "train.steps=1", f"output={output}", cwd=place)
        losses.append(read_metrics(output)[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@only_full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "says"),
    [({"token": 1e-3}, "keep yours: "), ({"micro_batch": 0.1}, "chosen: train.micro_batch = 8: ")],
    ids=["no gain", "clear gain"],
)
def test_own_size_and_fastest_take_turns(tmp_path, monkeypatch, forked_trials, options, says):
    """Small micro-batches take longer on any machine, so without a gain the largest stays."""
    activate(install(tmp_path, sleepy=SLEEPY), monkeypatch)
    tables = tiny_tables(tmp_path) | {"plugins": {"sleepy": options}}
    tables["train"]["micro_batch"] = 8 if says.startswith("keep") else 1
    recipe = write_recipe(tmp_path / "my.toml", tables)
    result = run_plugsft("tune", recipe, "--steps", 2, timeout=1200)
    print(result.stdout)
    assert result.returncode == 0, result.stderr
    assert f"\n{says}" in result.stdout
    if says.startswith("chosen"):
        assert len(re.findall(r"probe \d+: train.micro_batch = 8: ", result.stdout)) == 1 + TURNS
    assert ("\nset train.micro_batch = 8: plugsft " in result.stdout) == says.startswith("chosen")


@only_full
def test_nothing_fits(place, forked_trials):
    result = run_plugsft("tune", place / "my.toml", "--memory=100MB", cwd=place)
    assert result.returncode == 2
    assert (
        "nothing fits in 90.6 MiB a rank; tried train.micro_batch: 1. The last: " in result.stderr
    )
    assert "[plugins.gradient_checkpointing]" in result.stderr and "--memory" in result.stderr


@only_full
@pytest.mark.slow
def test_ctrl_c_says_what_was_best_so_far(place):
    running = start_plugsft("tune", place / "my.toml", "--steps=2", cwd=place)
    deadline = time.monotonic() + 200
    while "sizes:" not in running._out.read_text() if running._out.exists() else True:
        assert time.monotonic() < deadline and running.process.is_alive()
        time.sleep(0.2)
    time.sleep(1)  # the second probe is under way
    children = psutil.Process(running.pid).children(recursive=True)
    os.kill(running.pid, signal.SIGINT)
    done = running.wait()
    assert done.returncode == 130
    assert "best so far: train.micro_batch = 1: " in done.stderr
    assert children and not any(child.is_running() for child in children)


@only_full
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_ranks_are_launched_and_share_the_memory(place):
    file = ROOT / "recipes/accelerate/cpu2.yaml"
    launch = f"{sys.executable} -m accelerate.commands.launch --config_file {file}"
    words = ("train.batch_size=4", "--steps=1", f"--launch={launch}")
    result = must_succeed("tune", place / "my.toml", *words, cwd=place, timeout=1200)
    sizes = re.search(r"sizes: from 1 to (\d+); memory: ([\d.]+) GiB a rank", result.stdout)
    assert sizes[1] == "2"  # examples of a step for each rank
    assert float(sizes[2]) == pytest.approx(look().memory / 2**31, abs=0.1)


def test_what_cannot_be_tuned_is_refused_before_anything_is_measured(place):
    path = place / "my.toml"
    packed = "plugins.bfd_packing."
    for words, env, line in [
        (["--memory=much"], {}, "--memory: given 'much'; write it as 20GiB, 500MB, or in bytes"),
        ([], {"RANK": "0"}, "tune starts ranks by itself: run it with --launch"),
        (["data.source=gone.jsonl"], {}, "data.source: gone.jsonl: no such file or folder"),
        ([f"{packed}scope=dataset"], {}, f"{packed}capacity: tune cannot choose it: [plugins.bfd"),
        ([f"{packed}capacity=99"], {}, f"{packed}capacity: 99 is less than the longest example"),
    ]:
        result = run_plugsft("tune", path, *words, cwd=place, env=env)
        assert result.returncode == 2 and "probe" not in result.stdout
        [said] = result.stderr.splitlines()
        assert said.startswith(f"error: {line}")


@only_full
def test_a_probe_that_goes_wrong_otherwise_ends_it(place, forked_trials):
    result = run_plugsft("tune", place / "my.toml", "train.learning_rate=1e30", cwd=place)
    assert result.returncode == 2
    assert result.stderr.startswith("error: train.micro_batch = 1: step 2: loss ")


def test_probes_take_steps_of_the_run_those_that_fill_memory_first(tmp_path):
    tables = tiny_tables(tmp_path, chats(40))
    other = write_jsonl(tmp_path / "other.jsonl", [*chats(20, seed=1), *long_chats(1)])
    first = {"source": tables["data"].pop("source"), "weight": 0.6}
    tables["data"]["sources"] = [first, {"source": str(other)}]
    tables["data"]["max_length"] = 1000
    tables["model"]["scratch"]["context"] = 1000
    recipe, active = load(write_recipe(tmp_path / "recipe.toml", tables))
    with trials(recipe, active, examples=None) as made:
        lengths = made.tokens.lengths
        global_batches = choose_steps(made.epoch_order(), 8, lengths, 4)
        made.use(global_batches.ravel())
        used = Tokens(next(made.folder.glob("tokens-*")))
        assert [*used.rows] == [*made.tokens.rows[global_batches.ravel()]]
        assert [*used.lengths] == [*lengths[global_batches.ravel()]]
        trial = made.run({"train.micro_batch": 8}, steps=6)
    assert not trial.error
    assert trial.of("tokens") == lengths[global_batches].sum(1).tolist()
    assert global_batches.shape == (6, 8) and lengths[global_batches[0, 0]] == lengths.max()
    sums = [*lengths[global_batches].sum(1)]
    assert sums[2:] == sorted(sums[2:]) and sums[1] == max(sums[1:])
    assert all(len({*global_batch}) == 8 for global_batch in global_batches)


def test_a_data_set_smaller_than_a_step_is_one_step(tmp_path):
    recipe, active = load(write_recipe(tmp_path / "recipe.toml", tiny_tables(tmp_path, chats(5))))
    with trials(recipe, active) as made:
        global_batches = choose_steps(made.epoch_order(), 8, made.tokens.lengths, 4)
    assert global_batches.shape == (1, 5)
