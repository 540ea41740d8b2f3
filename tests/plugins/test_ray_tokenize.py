"""ray_tokenize: a Ray cluster makes the same bytes, though it loses a worker and a node."""

import json
import os
import re
import signal
import sys
import time
from functools import partial
from importlib.util import find_spec

import psutil
import pytest
from conftest import (
    bare_tables,
    only_full,
    run_plugsft,
    start_plugsft,
    wait_for,
    write_jsonl,
    write_recipe,
)
from plugin_packages import activate, install
from prepared_rows import many_slices

from plugsft import RecipeError
from plugsft.base.machine import look
from plugsft.plugins.ray_tokenize import RayTokenize
from plugsft.registry.active import check
from plugsft.registry.load import resolve

SLICES = 16
# Notes when a process begins and ends a slice; a row with "here" fails.
NOTING = """
    import json, os, time

    @plugin(affects_tokens=[])
    class Noting:
        file: str = ""
        seconds: float = 0.0

        @hookimpl(wrapper=True)
        def render(self, rows):
            def note(what):
                line = json.dumps([what, os.getpid(), os.environ.get("RAYON_NUM_THREADS")])
                with open(self.file, "a") as file:
                    file.write(line + "\\n")

            note("begin")
            time.sleep(self.seconds)
            rendered = yield
            if any("here" in str(row) for row in rows):
                raise ZeroDivisionError("by an owl")
            note("end")
            return rendered
"""


def test_it_refuses_to_run_without_ray(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    recipe, active = resolve(bare_tables(tmp_path, {"ray_tokenize": {}}))
    with pytest.raises(RecipeError, match=re.escape("ray is not installed: pip install 'plugsft")):
        check(active.attach(), recipe, look())


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
def test_small_data_starts_no_cluster():
    plugin = RayTokenize()
    plugin.check(look())
    assert plugin.tokenize([None] * 2, None) is None
    assert plugin.summary() == "nothing to tokenize"


@pytest.fixture(scope="module")
def cluster():
    """Start a cluster of two nodes on this machine."""
    pytest.importorskip("ray", reason="ray is not installed")
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 2, "object_store_memory": 100 << 20}
    two = Cluster(initialize_head=True, head_node_args=options | {"include_dashboard": False})
    two.add_node(**options)
    yield two
    two.shutdown()


@pytest.fixture
def many(tmp_path, monkeypatch):
    """Give `many(seconds)`: a recipe of many slices, whose workers take their time."""
    pytest.importorskip("ray", reason="ray is not installed")
    activate(install(tmp_path / "site", noting=NOTING), monkeypatch)
    tables = many_slices(tmp_path, SLICES)

    def make(seconds=0.0, **ray_tokenize):
        noting = {"seconds": seconds, "file": str(tmp_path / "notes")}
        plugins = {"noting": noting, "ray_tokenize": ray_tokenize}
        return write_recipe(tmp_path / "many.toml", tables | {"plugins": plugins})

    return make


def notes(tmp_path):
    text = (tmp_path / "notes").read_text() if (tmp_path / "notes").exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def content(run):
    (folder,) = [path for path in (run / "tokens").iterdir() if path.name[0] != "."]
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def workers_but(pids, tmp_path):
    """The processes that began a slice, but for some."""
    return [pid for what, pid, _ in notes(tmp_path) if what == "begin" and pid not in pids]


def children(pid):
    return psutil.Process(pid).children(recursive=True)


@only_full
def test_a_lost_worker_and_a_lost_node_change_no_byte(cluster, many, tmp_path):
    alone = tmp_path / "alone"
    recipe = many(seconds=0.0)
    result = run_plugsft("prepare", recipe, f"output={alone}", "--without=ray_tokenize")
    assert result.returncode == 0, result
    (tmp_path / "notes").unlink()
    recipe = many(seconds=1.0, address=cluster.address)
    words = ("prepare", recipe, f"output={tmp_path / 'run'}", "plugins.noting.seconds=1.0")
    started = start_plugsft(*words, env={"PLUGSFT_PROGRESS_SECONDS": "0"})
    first = wait_for(partial(workers_but, {started.pid}, tmp_path))[0]
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: len({*workers_but({started.pid, first}, tmp_path)}) >= 3)
    node = cluster.worker_nodes.copy().pop()
    cluster.remove_node(node, allow_graceful=False)
    result = started.wait()
    assert result.returncode == 0, result
    assert content(tmp_path / "run") == content(alone)
    assert " slices by 1 host, " in result.stdout and "rows/s" in result.stdout
    written = re.search(r"slices by node: (.*); in this process: (\d+)", result.stdout)
    assert len(written[1].split(", ")) in (1, 2), result.stdout
    begun = [note for note in notes(tmp_path) if note[0] == "begin"]
    assert len(begun) > SLICES, "some slices began twice"
    assert {threads for _, pid, threads in begun if pid != started.pid} == {"1"}
    cluster.add_node(num_cpus=2, object_store_memory=100 << 20)


@only_full
def test_errors_are_those_of_one_process(cluster, many, tmp_path):
    recipe = many(address=cluster.address)
    (tmp_path / "9.jsonl").write_text('{"text": 3}\n' * 10)
    alone, together = (
        run_plugsft("prepare", recipe, *extra) for extra in (["--without=ray_tokenize"], [])
    )
    assert (alone.returncode, together.returncode) == (2, 2), together
    assert "9.jsonl: lines 1, 2," in alone.stderr and together.stderr == alone.stderr
    # A plugin's own error names the row.
    write_jsonl(tmp_path / "9.jsonl", [{"text": "owls"}] * 4 + [{"text": "here"}])
    result = run_plugsft("prepare", recipe)
    assert result.returncode != 0
    assert "by an owl" in result.stderr and "it was row 4" in result.stderr, result.stderr
    assert not [*tmp_path.glob("run/tokens/.*")]


@only_full
def test_few_slices_are_in_flight_and_ctrl_c_ends_in_order(cluster, many, tmp_path):
    recipe = many(seconds=0.5, address=cluster.address, in_flight=1)
    started = start_plugsft("prepare", recipe)
    wait_for(lambda: len(workers_but({started.pid}, tmp_path)) >= 3)
    busy = most = 0
    for what, pid, _ in notes(tmp_path):
        if pid != started.pid:
            busy += 1 if what == "begin" else -1
            most = max(most, busy)
    assert most == 1
    os.kill(started.pid, signal.SIGINT)
    result = started.wait()
    assert result.returncode == 130 and "Traceback" not in result.stderr, result
    before = len(notes(tmp_path))
    time.sleep(2)
    assert len(notes(tmp_path)) <= before + 1, "the cluster dropped the other slices"
    again = run_plugsft("prepare", recipe, "plugins.noting.seconds=0.0")
    assert again.returncode == 0 and "continuing after" in again.stdout


@only_full
def test_a_cluster_that_is_started_here_ends_with_the_data(many, tmp_path):
    recipe = many(seconds=0.5)
    started = start_plugsft("prepare", recipe)
    wait_for(partial(workers_but, {started.pid}, tmp_path))
    processes = children(started.pid)
    assert any("raylet" in process.name() for process in processes)
    result = started.wait()
    assert result.returncode == 0, result
    assert psutil.wait_procs(processes, timeout=240)[1] == []


@only_full
def test_an_address_without_a_cluster_says_so(many):
    recipe = many(seconds=0.0, address="127.0.0.1:1")
    result = run_plugsft("prepare", recipe)
    assert result.returncode == 2 and "Start a cluster with `ray start --head`" in result.stderr
    assert "Traceback" not in result.stderr
