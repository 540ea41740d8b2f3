"""Several `plugsft prepare` make one data set; any of them may be killed."""

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest
from conftest import (
    ROOT,
    must_succeed,
    only_full,
    run_plugsft,
    start_plugsft,
    tiny_tables,
    wait_for,
    write_jsonl,
    write_recipe,
)
from plugin_packages import activate, install
from prepared_rows import many_slices

from plugsft.audit.prepare import prepare_data
from plugsft.base import build_once
from plugsft.base.atomic import damage
from plugsft.registry.load import load
from plugsft.tokens.store import Tokens

# Notes which process prepares which slice, and waits for a file.
SLOW = """
    import os, time

    @plugin()
    class Slow:
        @hookimpl(wrapper=True)
        def render(self, rows):
            with open(os.environ["NOTE"], "a") as note:
                note.write(f"{os.getpid()} {len(rows)}\\n")
            while not os.path.exists(os.environ.get("GO", "/")):
                time.sleep(0.01)
            return (yield)
"""
SLICES = 12


@pytest.fixture
def many(tmp_path, monkeypatch):
    """Give `many()`: a recipe of many slices."""
    activate(install(tmp_path / "site", slow=SLOW), monkeypatch)
    monkeypatch.setenv("NOTE", str(tmp_path / "note"))
    tables = many_slices(tmp_path, SLICES)

    def make():
        return write_recipe(tmp_path / "many.toml", tables | {"plugins": {"slow": {}}})

    return make


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def noted(tmp_path):
    """Which process prepared which slice, by the number of its rows."""
    text = (tmp_path / "note").read_text() if (tmp_path / "note").exists() else ""
    return [tuple(map(int, line.split())) for line in text.splitlines()]


def claims(run):
    """The processes that have claimed slices, by the names of their claims."""
    return {path.read_text() for path in run.glob("tokens/.*.parts-*/.slice.claim-data-*")}


def test_four_processes_prepare_and_two_are_killed(many, tmp_path):
    run, alone = tmp_path / "run", tmp_path / "alone"
    recipe = many()
    must_succeed("prepare", recipe, f"output={alone}")
    (tmp_path / "note").unlink()
    go = tmp_path / "go"
    env = {"PLUGSFT_PROGRESS_SECONDS": "0", "GO": str(go)}
    started = [start_plugsft("prepare", recipe, f"output={run}", env=env) for _ in range(4)]
    wait_for(lambda: len(noted(tmp_path)) == 4)  # each is in its first slice
    victims = started[:2]
    for victim in victims:
        os.kill(victim.pid, signal.SIGKILL)
    go.touch()
    results = [process.wait() for process in started]
    assert [result.returncode for result in results] == [-signal.SIGKILL] * 2 + [0] * 2, results
    (folder,) = (run / "tokens").iterdir()
    (reference,) = (alone / "tokens").iterdir()
    assert content(folder) == content(reference) and damage(folder) is None
    # Each slice was prepared once, but for the two that the killed processes had begun.
    killed = {process.pid for process in victims}
    assert len([pid for pid, _ in noted(tmp_path) if pid not in killed]) <= SLICES
    assert len(noted(tmp_path)) == SLICES + 2
    assert len({pid for pid, _ in noted(tmp_path)}) == 4, "all four took part"
    told = "".join(result.stdout for result in results[2:])
    assert re.search(rf"\d+ of {SLICES} slices by 1 host, \d+ rows/s", told), told
    counts = re.findall(rf"data: this process prepared (\d+) of {SLICES} slices", told)
    assert len(counts) == 2 and sum(map(int, counts)) <= SLICES
    assert len(re.findall(r"^data: .* s$", told, re.M)) == 1, "one of them published"


def test_a_bad_row_ends_all_processes_and_leaves_nothing(many, tmp_path):
    recipe, go = many(), tmp_path / "go"
    (tmp_path / "7.jsonl").write_text('{"text": 3}\n' * 10)
    late = start_plugsft("prepare", recipe, env={"GO": str(go)})
    wait_for(lambda: noted(tmp_path))  # it is in its first slice
    results = [run_plugsft("prepare", recipe)]
    go.touch()
    results.append(late.wait())
    assert [result.returncode for result in results] == [2, 2], results
    for result in results:
        assert "7.jsonl: lines 1, 2, " in result.stderr + result.stdout
    pids = [pid for pid, _ in noted(tmp_path)]
    assert pids.count(late.pid) == 1 and len(pids) < SLICES, "nobody went on"
    assert [*(tmp_path / "run/tokens").iterdir()] == []


def test_a_host_without_heartbeat_is_taken_over(many, tmp_path, monkeypatch):
    monkeypatch.setattr(build_once, "PATIENCE", 1.0)
    recipe = many()
    loaded, active = load(recipe)
    first = prepare_data(loaded, active, recipe).tokens.folder
    expected, home = content(first), tmp_path / "elsewhere/tokens"
    # What two hosts left: one has died, and the other died as it wrote its claim.
    shared = home / f".{first.name}.parts-shared"
    shared.mkdir(parents=True)
    (home / f".{first.name}.claim-elsewhere-7").write_text("elsewhere 7 0")
    (shared / ".slice.claim-data-03-000000000000").write_text("elsewhere 7 0")
    (shared / ".slice.claim-data-05-000000000000").touch()
    (shared / ".failed").write_text("rows of an earlier attempt")
    loaded, active = load(recipe, [f"output={tmp_path / 'elsewhere'}"])
    started = time.monotonic()
    second = prepare_data(loaded, active, recipe).tokens.folder
    assert time.monotonic() - started > 1.0, "it might have lived"
    assert content(second) == expected and [*home.iterdir()] == [second]


def test_a_training_waits_for_the_processes_that_prepare(many, tmp_path):
    recipe, go = many(), tmp_path / "go"
    preparing = start_plugsft("prepare", recipe, env={"GO": str(go)})
    wait_for(lambda: noted(tmp_path))  # it is in its first slice
    training = start_plugsft(recipe, "train.steps=1")
    wait_for(lambda: "waiting for another process" in training.output(), [training])
    go.touch()
    results = [process.wait() for process in (preparing, training)]
    assert [result.returncode for result in results] == [0, 0], results
    assert len(noted(tmp_path)) == SLICES


HOST = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


def start_host(*words, env):
    """Start a process in its own space of process numbers: it is another host for the others."""
    command = [*HOST, sys.executable, "-m", "plugsft", *map(str, words)]
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | env, stdout=subprocess.PIPE, text=True
    )


@pytest.fixture
def hosts():
    """Skip where a process cannot seem to be another host."""
    if subprocess.run([*HOST, "true"], capture_output=True).returncode:
        pytest.skip("other spaces of process numbers need root")


@only_full
def test_a_host_that_sleeps_in_its_slice_is_taken_over_and_may_wake(hosts, many, tmp_path):
    recipe, run, go = many(), tmp_path / "run", tmp_path / "go"
    must_succeed("prepare", recipe, f"output={tmp_path / 'alone'}")
    (tmp_path / "note").unlink()
    env = {"GO": str(go), "PLUGSFT_CACHE": str(tmp_path / "cache")}
    sleeper = start_host("prepare", recipe, f"output={run}", env=env)
    wait_for(lambda: noted(tmp_path))
    (process,) = psutil.Process(sleeper.pid).children()
    process.suspend()
    go.touch()
    begun = time.monotonic()
    other = start_host("prepare", recipe, f"output={run}", env=env)
    assert other.communicate(timeout=120)[0] and other.returncode == 0
    assert time.monotonic() - begun > build_once.PATIENCE, "it might have woken before"
    process.resume()
    told = sleeper.communicate(timeout=60)[0]
    assert sleeper.returncode == 0, told
    (folder,) = (run / "tokens").iterdir()
    (reference,) = (tmp_path / "alone/tokens").iterdir()
    assert content(folder) == content(reference) and damage(folder) is None
    assert len(noted(tmp_path)) == SLICES + 1


@only_full
def test_four_hosts_prepare_and_two_are_killed(hosts, tmp_path):
    """Print the times of one process, of four hosts, and of four hosts when two are killed."""
    rows = [{"text": f"owls hoot {number} " + "fox " * 120} for number in range(200_000)]
    tables = tiny_tables(tmp_path / "small", rows[:200])
    recipe = write_recipe(tmp_path / "small.toml", tables)
    tokenizer = prepare_data(*load(recipe), recipe).tokenizer_folder
    tables["model"]["tokenizer"] = str(tokenizer)
    tables["data"]["source"] = str(write_jsonl(tmp_path / "long.jsonl", rows))
    recipe = write_recipe(tmp_path / "long.toml", tables)
    folders, seconds = {}, {}
    for name, count, kills in (("one", 1, 0), ("four", 4, 0), ("killed", 4, 2)):
        run, begun = tmp_path / name, time.monotonic()
        env = {"PLUGSFT_PROGRESS_SECONDS": "1", "PLUGSFT_CACHE": str(tmp_path / f"cache-{name}")}
        started = [start_host("prepare", recipe, f"output={run}", env=env) for _ in range(count)]
        for number, host in enumerate(started[:kills]):
            wait_for(partial(has_shards, run, 6 * (number + 1)))
            host.kill()
        told = [host.communicate(timeout=400)[0] for host in started]
        seconds[name] = time.monotonic() - begun
        assert [host.returncode for host in started] == [-9] * kills + [0] * (count - kills), told
        (folders[name],) = [path for path in (run / "tokens").iterdir() if path.name[0] != "."]
        assert f" by {format_hosts(count)}, " in told[-1]
    for folder in folders.values():
        assert content(folder) == content(folders["one"]) and Tokens(folder)
    print(
        {name: f"{value:.1f} s" for name, value in seconds.items()}, "on", os.cpu_count(), "cores"
    )


def has_shards(run, count):
    return len([*run.glob("tokens/.*.parts-*/data-*.json")]) >= count


def format_hosts(count):
    return "1 host" if count == 1 else f"{count} hosts"
