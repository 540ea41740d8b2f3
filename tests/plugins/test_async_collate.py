"""async_collate: the same batches, built while others train; nothing outlives a run."""

import dataclasses
import json
import os
import re
import shutil
import signal
import threading
import time
import traceback
import weakref
from contextlib import closing, nullcontext
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    chats,
    must_succeed,
    read_metrics,
    read_record,
    run_plugsft,
    start_plugsft,
    tiny_tables,
)
from plugin_packages import activate, install

from plugsft import LoadedStep, testing
from plugsft.base.machine import look
from plugsft.batches.defaults import BatchDefaults
from plugsft.batches.plan import Plan
from plugsft.data.defaults import DataDefaults
from plugsft.data.prepare import prepare
from plugsft.model.defaults import ModelDefaults
from plugsft.plugins import async_collate
from plugsft.plugins.async_collate.ahead import Ahead
from plugsft.ranks.load_batches import BatchLoader
from plugsft.registry.active import check
from plugsft.registry.load import resolve

# 43 examples in global batches of 8: five whole ones and one of three, twice.
TRAIN = {"epochs": 2, "batch_size": 8, "micro_batch": 2, "learning_rate": 1e-3}
STEPS = range(1, 13)
# Lays a global batch out as single rows, and collates examples into one row each, end to end.


class World:
    """Data that was really prepared, and what feeds it."""

    def __init__(self, folder):
        tables = tiny_tables(folder, chats(43))
        self.tables = tables | {"train": TRAIN}
        recipe, active = resolve(self.tables)
        active.attach(DataDefaults(recipe.folder), BatchDefaults(), ModelDefaults())
        self.tokens = prepare(recipe, active).tokens

    def feed(self, steps=STEPS, ranks=1, rank=0, **plugins):
        train = TRAIN | ({"micro_batch": 1} if "bfd_packing" in plugins else {})
        recipe, active = resolve(self.tables | {"train": train, "plugins": plugins})
        hook = active.attach(DataDefaults(recipe.folder), BatchDefaults(), ModelDefaults()).hooks
        check(active, recipe, look())
        place = SimpleNamespace(process_index=rank, num_processes=1, device=torch.device("cpu"))
        plan = Plan(self.tokens, recipe, ranks, hook)
        assert plan.steps == len(STEPS) or "bfd_packing" in plugins
        steps = range(steps.start, min(steps.stop, plan.steps + 1))
        loader = BatchLoader(hook, place, pad=0, packed="bfd_packing" in plugins)
        return loader.load(plan.plan_step, self.tokens, steps, lambda operation: nullcontext())

    def build(self):
        """Build global batches without any feed."""
        built = {batch.step: LoadedStep(batch.plan, batch.micro_batches) for batch in self.feed()}
        return lambda step: dataclasses.replace(built[step])


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert threads() == []


def threads():
    return [one for one in threading.enumerate() if one.name == "async_collate"]


def assert_same(ours, serial):
    assert [loaded.plan.step for loaded in ours] == [loaded.plan.step for loaded in serial]
    for loaded, expected in zip(ours, serial, strict=True):
        a, b = (
            {**vars(step.plan), "layout": flat(step.plan.layout)} for step in (loaded, expected)
        )
        assert a == b
        assert len(loaded.micro_batches) == len(expected.micro_batches)
        for mine, plain in zip(loaded.micro_batches, expected.micro_batches, strict=True):
            assert list(mine) == list(plain)
            for name, tensor in mine.items():
                if isinstance(tensor, torch.Tensor):
                    assert tensor.dtype == plain[name].dtype and torch.equal(tensor, plain[name])
                else:
                    assert tensor == plain[name]


def flat(layout):
    return [[part.tolist() for part in rank] for rank in layout]


def assert_identical(world, depth=1, ranks=1, rank=0, **plugins):
    """LoadedSteps from every step on, over the end of an epoch, ahead and serially."""
    for first in (*STEPS, len(STEPS) + 1):
        where = {"steps": range(first, len(STEPS) + 1), "ranks": ranks, "rank": rank}
        ahead = world.feed(**where, async_collate={"depth": depth}, **plugins)
        assert_same([*ahead], [*world.feed(**where, **plugins)])


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("ranks, rank", [(1, 0), (2, 0), (2, 1)])
def test_it_gives_what_serial_feeding_gives(world, depth, ranks, rank):
    assert_identical(world, depth, ranks, rank)
    assert_identical(world, depth, ranks, rank, length_group={})


@pytest.mark.parametrize("scope", ["step", "dataset"])
@pytest.mark.parametrize("ranks, rank", [(1, 0), (2, 1)])
def test_it_gives_what_serial_feeding_gives_when_rows_are_packed(world, scope, ranks, rank):
    packing = {"bfd_packing": {"capacity": 128, "scope": scope}}
    assert_identical(world, 2, ranks, rank, **packing)
    [loaded, *_] = world.feed(ranks=ranks, rank=rank, async_collate={}, **packing)
    assert {"input_ids", "position_ids", "documents"} <= set(loaded.micro_batches[0])


def test_a_stale_order_would_be_seen(world, monkeypatch):
    right = Ahead._build

    def first_epoch(self, build, step):
        def stale(step):
            old = build((step - 1) % 6 + 1)
            plan = dataclasses.replace(old.plan, step=step, epoch=(step - 1) // 6)
            return dataclasses.replace(old, plan=plan)

        return right(self, stale, step)

    monkeypatch.setattr(Ahead, "_build", first_epoch)
    with pytest.raises(AssertionError):
        assert_identical(world)


def test_random_numbers_of_the_loop_are_its_own(world):
    def drawn(**plugins):
        torch.manual_seed(0)
        return [torch.rand(3).tolist() for _ in world.feed(**plugins)]

    assert drawn(async_collate={"depth": 3}) == drawn()


@pytest.mark.parametrize("depth", [1, 3])
def test_batches_are_built_as_many_steps_ahead_as_depth_says(world, depth):
    build, began = world.build(), []

    def counted(step):
        began.append(step)
        return build(step)

    ahead = Ahead(counted, STEPS, depth)
    for step in (1, 2, 3):
        wait_until(lambda step=step: len(began) == step - 1 + depth)
        time.sleep(0.02)
        assert began == [*range(1, step + depth)]
        ahead.take()
    ahead.close(10)


def failing(world, at, error):
    build = world.build()

    def collapse():
        raise error

    def broken(step):
        return build(step) if step != at else collapse()

    return broken


def global_batches_of(build, depth=1):
    """LoadedSteps as the plugin does."""
    return async_collate.AsyncCollate(depth=depth).load_batches(build, STEPS)


@pytest.mark.parametrize("depth", [1, 5])
@pytest.mark.parametrize("kind", [KeyError, SystemExit])
def test_an_error_surfaces_at_its_step_with_its_own_traceback(world, depth, kind):
    seen, error = [], kind("gone")
    with pytest.raises(kind) as raised:
        for loaded in global_batches_of(failing(world, 4, error), depth):
            wait_until(lambda: not threads() or depth == 1)  # it has failed by now
            seen.append(loaded.plan.step)
    assert seen == [1, 2, 3] and raised.value is error
    names = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert names[-2:] == ["broken", "collapse"] and "take" in names


def test_an_error_of_the_loop_is_not_masked(world):
    global_batches = global_batches_of(failing(world, 2, KeyError("gone")))
    with pytest.raises(ValueError, match="the loop's own") as raised, closing(global_batches):
        for _ in global_batches:
            wait_until(lambda: not threads())
            raise ValueError("the loop's own")
    assert raised.value.__context__ is None and raised.value.__cause__ is None


def test_ctrl_c_passes_while_the_loop_waits():
    hung = threading.Event()

    def hang(step):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        hung.wait()

    with pytest.raises(KeyboardInterrupt):
        next(global_batches_of(hang))
    # What it was at is waited for by nobody, and ends its thread.
    hung.set()
    wait_until(lambda: not threads())


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_no_window_is_held_by_anyone_but_the_loop(world, depth):
    build, made = world.build(), []

    def watched(step):
        loaded = build(step)
        batches = [{name: tensor.clone() for name, tensor in loaded.batches[0].items()}]
        made.append(weakref.ref(batches[0]["input_ids"]))
        return dataclasses.replace(loaded, batches=batches)

    def alive():
        return [number for number, one in enumerate(made, start=1) if one() is not None]

    global_batches = global_batches_of(watched, depth)
    for loaded in global_batches:
        step = loaded.plan.step
        last = min(step + depth, len(STEPS))
        wait_until(lambda last=last: len(made) == last)
        assert alive() == [*range(step, last + 1)]
    del loaded
    assert alive() == []
    # Nor by one that is left in the middle.
    global_batches = global_batches_of(watched, depth)
    next(global_batches)
    global_batches.close()
    assert alive() == [] and threads() == []


SPY = """
    import gc
    import threading
    from plugsft import LoadedStep

    @plugin()
    class Spy:
        fails_at: int = 0
        seen: int = state(0)

        @hookimpl(wrapper=True)
        def step(self):
            self.seen += 1
            if self.seen == self.fails_at:
                raise ValueError("the loop's own")
            return (yield)

        @hookimpl
        def summary(self):
            names = [one.name for one in threading.enumerate()]
            steps = sum(isinstance(value, LoadedStep) for value in gc.get_objects())
            return f"{names.count('async_collate')} threads, {steps} steps"
"""


def test_whole_runs_are_the_same_and_so_are_resumed_ones(tiny, tmp_path, monkeypatch):
    activate(install(tmp_path, spy=SPY), monkeypatch)
    recipe = tiny(
        rows=chats(43),
        train=TRAIN,
        eval={"every": 4, "split": "train[:11]"},
        checkpoint={"every": 4},
        plugins={"length_group": {}, "spy": {}},
    )
    serial, ahead = tmp_path / "serial", tmp_path / "ahead"
    mine = (recipe, f"output={ahead}", "plugins.async_collate.depth=2")
    for words in ((recipe, f"output={serial}"), mine):
        must_succeed(*words)
    assert len(learned(serial)) == 12 + 3
    assert learned(ahead) == learned(serial) and weights(ahead) == weights(serial)
    spied, summary = (summary_of(ahead, name) for name in ("spy", "async_collate"))
    # The loop's own last one is still named there.
    assert spied == "0 threads, 0 steps"
    # 12 steps, and three evaluations of two global batches.
    assert re.fullmatch(
        r"up to 2 steps ahead: the batches of 18 steps took \d+\.\d\d s to build; "
        r"the loop waited \d+\.\d\d s",
        summary,
    )
    # From the middle of an epoch.
    for name in ("checkpoints/step-000012", "checkpoints/step-000008", "model"):
        shutil.rmtree(ahead / name)
    result = must_succeed(*mine, "--resume")
    assert "going on after step 4" in result.stdout
    assert learned(ahead) == learned(serial) and weights(ahead) == weights(serial)


def learned(run):
    timed = {"tokens_per_second", "step_seconds", "data_wait_seconds", "memory_gib"}
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{name: line[name] for name in line if name not in timed} for line in lines]


def weights(run):
    return (run / "model/model.safetensors").read_bytes()


def summary_of(run, name):
    plugins = read_record(run)["plugins"]
    return next(plugin["summary"] for plugin in plugins if plugin["name"] == name)


def test_a_failed_run_shows_its_own_error_and_leaves_no_thread(tiny, tmp_path, monkeypatch):
    broken = """
        @plugin()
        class Broken:
            seen: int = state(0)

            @hookimpl(wrapper=True)
            def collate(self):
                self.seen += 1
                if self.seen == 9:
                    raise KeyError("the third step")
                return (yield)
    """
    activate(install(tmp_path, spy=SPY, broken=broken), monkeypatch)
    recipe = tiny(rows=chats(43), train=TRAIN, plugins={"spy": {}, "async_collate": {"depth": 4}})
    thread = run_plugsft(recipe, "plugins.broken={}")
    assert thread.returncode == 1 and len(read_metrics(tmp_path / "run")) == 2
    assert "KeyError: 'the third step'" in thread.stderr
    assert "raised by plugin 'broken', in its hook 'collate'" in thread.stderr
    assert summary_of(tmp_path / "run", "spy") == "0 threads, 1 steps"  # the error has the last
    loop = run_plugsft(recipe, "plugins.broken={}", "plugins.spy.fails_at=6", "--overwrite")
    assert loop.returncode == 1 and "ValueError: the loop's own" in loop.stderr
    assert "KeyError" not in loop.stderr
    assert summary_of(tmp_path / "run", "spy") == "0 threads, 0 steps"


SLOW = """
    import time

    @plugin()
    class Slow:
        collating: float = 0.0
        stepping: float = 0.0

        @hookimpl(wrapper=True)
        def collate(self):
            time.sleep(self.collating)
            return (yield)

        @hookimpl(wrapper=True)
        def step(self):
            time.sleep(self.stepping)
            return (yield)
"""


def test_a_signal_stops_a_run_that_waits_for_its_data(tiny, tmp_path, monkeypatch):
    activate(install(tmp_path, slow=SLOW), monkeypatch)
    plugins = {"async_collate": {}, "slow": {"collating": 0.3}}
    train = {"steps": 1000, "micro_batch": 8}
    running = start_plugsft(tiny(rows=chats(43), train=train, plugins=plugins))
    metrics = tmp_path / "run/metrics.jsonl"
    wait_until(lambda: metrics.is_file() and metrics.read_text().count("\n") >= 2)
    os.kill(running.pid, signal.SIGINT)
    ended = running.wait()
    assert ended.returncode == 130 and "stopped by SIGINT" in ended.stderr, ended.stderr
    assert "--resume" in ended.stderr and "Traceback" not in ended.stderr


def test_building_hides_behind_training(tiny, tmp_path, monkeypatch):
    activate(install(tmp_path, slow=SLOW), monkeypatch)
    slow = {"slow": {"collating": 0.15, "stepping": 0.25}}
    recipe = tiny(rows=chats(43), train={"steps": 10, "micro_batch": 8}, plugins=slow)
    for name, words in (("serial", []), ("ahead", ["plugins.async_collate={}"])):
        must_succeed(recipe, f"output={tmp_path / name}", *words)
    waits = [
        [line["data_wait_seconds"] for line in read_metrics(tmp_path / name)]
        for name in ("serial", "ahead")
    ]
    # Each step of the serial run waits for its collating, which the other hides. The least of
    # them: what else the machine does can only add to it.
    assert min(waits[0]) > 0.05 and min(waits[1]) < min(waits[0]) / 5
    built, waited = re.findall(r"(\d+\.\d\d) s", summary_of(tmp_path / "ahead", "async_collate"))
    assert float(built) >= 1.5 and float(waited) < float(built) / 2


def test_there_is_no_summary_before_a_batch():
    assert async_collate.AsyncCollate().summary() is None


def test_it_keeps_the_laws():
    testing.keeps_gradients("async_collate", {"depth": 2}, tolerance=0.0)
    testing.survives_a_worker("async_collate")


def wait_until(true):
    for _ in range(6000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it never came true")
