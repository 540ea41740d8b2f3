"""multiprocess_tokenize: the same bytes from any number of processes."""

import os
import re
import signal
import time

import psutil
import pytest
from conftest import (
    chats,
    only_full,
    run_plugsft,
    start_plugsft,
    tiny_tables,
    write_jsonl,
    write_recipe,
)
from plugin_packages import activate, install

from plugsft import DataError, PluginError, testing
from plugsft.base.machine import look
from plugsft.data import prepare, sources
from plugsft.data.defaults import DataDefaults
from plugsft.plugins import multiprocess_tokenize
from plugsft.plugins.multiprocess_tokenize import MultiprocessTokenize
from plugsft.registry.active import check
from plugsft.registry.load import resolve

MINE = multiprocess_tokenize.__name__


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Give `run(rows, workers, plugins)`: prepares in small slices; returns folder and plugin."""
    monkeypatch.setattr(sources, "SLICE_ROWS", 7)

    def make(rows, workers=3, plugins=None, **data):
        tables = tiny_tables(tmp_path, rows)
        tables["output"] = str(tmp_path / f"run-{workers}")
        tables["data"] |= data
        # The tokenizer of a test is trained on whatever the other plugins make of the rows.
        tables["plugins"] = (plugins or {}) | (
            {"multiprocess_tokenize": {"workers": workers}} if workers else {}
        )
        recipe, active = resolve(tables)
        active.attach(DataDefaults(recipe.folder))
        check(active, recipe, look())
        folder = prepare.prepare(recipe, active).tokens.folder
        return folder, active.plugins.get("multiprocess_tokenize")

    return make


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def workers_of(pid):
    """The worker processes of a process."""
    return [one for one in psutil.Process(pid).children() if MINE in " ".join(one.cmdline())]


def eventually(tell, seconds=240):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := tell():
            return found
        time.sleep(0.02)
    raise AssertionError("it never happened")


def test_any_number_of_workers_writes_the_same_bytes(run):
    rows = [*chats(60), {"messages": []}, 3, *chats(20)]
    folders = [run(rows, workers, on_bad_row="drop")[0] for workers in (None, 1, 2, 5)]
    first = content(folders[0])
    assert sum(name.startswith("data-") for name in first) == 12
    for folder in folders[1:]:
        assert content(folder) == first
    assert not workers_of(os.getpid())


def test_bad_rows_are_reported_as_without_workers(run):
    rows = [*chats(10), {"messages": []}, *chats(10)]
    with pytest.raises(DataError) as alone:
        run(rows, None)
    with pytest.raises(DataError) as together:
        run(rows, 3)
    assert str(together.value) == str(alone.value)
    assert "data.jsonl: line 11: 'messages' is not a list of turns, or is empty. Correct it" in str(
        together.value
    )
    assert not workers_of(os.getpid())


# Tells whether this process has begun workers; a test's own may be a child of it too.
BUSY = """
    import os
    import psutil

    # As it was when this was imported: here, one thread is asked for later.
    WORKER = "RAYON_NUM_THREADS" in os.environ

    def busy():
        try:
            children = psutil.Process().children()
            return any("multiprocess_tokenize" in " ".join(one.cmdline()) for one in children)
        except psutil.Error:
            return False
"""
STUMBLES = (
    BUSY
    + """
    import os, signal, time
    from pathlib import Path

    @plugin()
    class Stumbles:
        how: str = "raise"
        sign: str

        @hookimpl(wrapper=True)
        def render(self, rows):
            rendered = yield
            sign, patience = Path(self.sign), time.monotonic() + 240
            if WORKER:
                sign.touch()
                if self.how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.how == "exit":
                    os._exit(7)
                raise ZeroDivisionError("by an owl")
            # The process that began them leaves the other slices to its workers.
            while busy() and not sign.exists():
                assert time.monotonic() < patience
                time.sleep(0.01)
            return rendered
"""
)


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("kill", PluginError, "the worker process ended (killed, most often for lack of memory)"),
        ("exit", PluginError, "the worker process ended (with exit code 7)"),
        ("raise", ZeroDivisionError, "by an owl"),
    ],
)
def test_a_worker_that_ends_or_raises_stops_the_run_and_says_where(
    run, tmp_path, monkeypatch, how, error, words
):
    activate(install(tmp_path / "site", stumbles=STUMBLES), monkeypatch)
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    with pytest.raises(error) as caught:
        run(chats(40), 2, plugins={"stumbles": {"how": how, "sign": str(tmp_path / "sign")}})
    told = str(caught.value) + " ".join(getattr(caught.value, "__notes__", []))
    assert words in told
    # It takes the first slice or the second; the other is this process's.
    assert re.search(rf"{tmp_path / 'data.jsonl'}, rows (0 to 6|7 to 13)", told)
    if how == "raise":
        assert re.search("it was row [07]", told) and "in a worker process" in told
    assert not workers_of(os.getpid())
    assert not list((tmp_path / "run-2").rglob("data-*"))


OWL = (
    BUSY
    + """

    @plugin()
    class Owl:
        @hookimpl(wrapper=True)
        def render(self, rows):
            rendered = yield
            if busy() and any("here" in str(row) for row in rows):
                raise ZeroDivisionError("by an owl")
            return rendered
"""
)


def test_an_error_in_the_main_process_names_its_row_too(run, tmp_path, monkeypatch):
    activate(install(tmp_path / "site", owl=OWL), monkeypatch)
    rows = [{"text": "owls"}] * 4 + [{"text": "here"}] + [{"text": "owls"}] * 2
    with pytest.raises(ZeroDivisionError) as caught:
        run(rows * 6, 2, plugins={"owl": {}})
    [note] = [one for one in caught.value.__notes__ if "rows" in one]
    assert re.search("rows (0 to 6|7 to 13): it was row (4|11)$", note)
    assert not workers_of(os.getpid())


LOOKS = (
    BUSY
    + """
    import os, sys, time
    from pathlib import Path
    from plugsft import Rendered

    @plugin()
    class Looks:
        sign: str

        @hookimpl
        def render(self, rows):
            threads = [os.environ.get(name) for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS")]
            text = f"{threads} torch {'torch' in sys.modules}"
            if WORKER:
                Path(self.sign).touch()
            else:
                text = f"another {rows}"
                while busy() and not Path(self.sign).exists():
                    time.sleep(0.01)
            return Rendered([text] * len(rows), [[(0, len(text))]] * len(rows), [*range(len(rows))])
"""
)


def test_a_worker_has_one_thread_and_no_torch(run, tmp_path, monkeypatch):
    activate(install(tmp_path / "site", looks=LOOKS), monkeypatch)
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    tables = tiny_tables(tmp_path, chats(40))
    looks = {"looks": {"sign": str(tmp_path / "sign")}}
    tables["plugins"] = looks | {"multiprocess_tokenize": {"workers": 2}}
    recipe, active = resolve(tables)
    active.attach(DataDefaults(recipe.folder))
    made = prepare.prepare(recipe, active)
    texts = {made.tokenizer.decode(made.tokens.example(number)[0]) for number in range(40)}
    assert {text for text in texts if "another" not in text} == {"['1', '1'] torch False"}
    assert "RAYON_NUM_THREADS" not in os.environ, "one thread was for the while only"


@pytest.mark.parametrize(
    ("slices", "cores", "memory", "expected"),
    [
        (1, 64, 2**40, 1),
        (3, 64, 2**40, 1),
        (40, 64, 2**40, 20),
        (4000, 64, 2**40, 64),
        (4000, 64, 5 * 2**30, 5),
        (4000, 1, 2**40, 1),
    ],
)
def test_auto_starts_as_many_workers_as_cores_and_memory_allow(slices, cores, memory, expected):
    class Granted:
        pass

    Granted.cores, Granted.memory = cores, memory
    auto = MultiprocessTokenize()
    auto.check(Granted)
    assert auto.count_processes(slices) == expected
    assert MultiprocessTokenize(workers=3).count_processes(slices) == min(3, slices)


def test_small_data_starts_no_process(run):
    folder, plugin = run(chats(10), "auto")
    assert plugin.summary() == "one process: the data is small"
    assert len(content(folder)) > 3
    _, plugin = run(chats(10), "auto")
    assert plugin.summary() == "nothing to tokenize"


@pytest.fixture
def long(tmp_path):
    """A recipe whose data keeps two workers busy for some seconds, in many slices."""
    rows = [{"text": f"owls hoot {number} " + "fox " * 40} for number in range(100_000)]
    tables = tiny_tables(tmp_path, rows[:200])
    write_jsonl(tmp_path / "long.jsonl", rows)
    tables["model"] = {"scratch": tables["model"]["scratch"]}
    run_plugsft("prepare", write_recipe(tmp_path / "small.toml", tables))
    (tokenizer,) = (tmp_path / "run/scratch").glob("tokenizer-*")
    tables["model"]["tokenizer"] = str(tokenizer)
    tables["data"]["source"] = str(tmp_path / "long.jsonl")
    tables["output"] = str(tmp_path / "long")
    tables["plugins"] = {"multiprocess_tokenize": {"workers": 2}}
    return write_recipe(tmp_path / "long.toml", tables)


@only_full
def test_after_a_kill_no_worker_stays_and_finished_shards_serve(long, tmp_path):
    process = start_plugsft("prepare", long)
    eventually(lambda: list((tmp_path / "long").rglob("data-*.json")))
    workers = workers_of(process.pid)
    assert len(workers) == 1, "the other is the process itself"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    psutil.wait_procs(workers, timeout=240)
    assert not any(worker.is_running() for worker in workers)
    result = run_plugsft("prepare", long)
    assert result.returncode == 0 and "continuing after" in result.stdout, result
    fresh = run_plugsft(
        "prepare", long, f"output={tmp_path / 'fresh'}", "--without=multiprocess_tokenize"
    )
    assert "going on" not in fresh.stdout
    (mine,), (theirs,) = ([*(tmp_path / name / "tokens").glob("*")] for name in ("long", "fresh"))
    assert content(mine) == content(theirs)


def test_ctrl_c_ends_the_workers(long, tmp_path):
    process = start_plugsft("prepare", long)
    workers = eventually(lambda: workers_of(process.pid))
    os.kill(process.pid, signal.SIGINT)
    assert process.wait().returncode != 0
    assert psutil.wait_procs(workers, timeout=240)[1] == []


def test_progress_is_printed_without_a_terminal(long):
    result = run_plugsft("prepare", long, env={"PLUGSFT_PROGRESS_SECONDS": "0"})
    lines = [line for line in result.stdout.splitlines() if line.startswith("tokenizing: ")]
    assert lines and all("rows/s, " in line and " tokens/s, about 0:" in line for line in lines)


def test_it_changes_nothing_that_is_learned():
    tables = {"data": {}}
    testing.keeps_gradients("multiprocess_tokenize", {"workers": 2}, tables=tables)
