"""plugsft from Python: runs in one process, plugin objects, ranks, errors, data."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
import tomli_w
import torch
from accelerate import Accelerator
from conftest import chats, only_full, read_metrics, run_plugsft, tiny_tables, write_jsonl

import plugsft.api
from plugsft import hookimpl, plugin, state
from plugsft.api import PlugsftError
from plugsft.api.isolation import isolated
from plugsft.api.recipes import opened
from plugsft.api.results import FinishedRun
from plugsft.base.checksums import file_digest
from plugsft.data import sources
from plugsft.registry.discover import OWN

LORA = {"model": {"dtype": "bfloat16"}, "plugins": {"lora": {"r": 4}}}


@plugin()
class Watching:
    """Counts steps, watches the model's life, and fails or interrupts at a step."""

    fail: int = 0
    interrupt: int = 0
    seen: int = state(0)
    model: object = state(None)

    @hookimpl
    def ready(self, run):
        self.model = weakref.ref(run.model.module)

    @hookimpl
    def stepped(self, run):
        self.seen += 1
        if run.step == self.interrupt:
            os.kill(os.getpid(), signal.SIGINT)
        if run.step == self.fail:
            raise ValueError("no more")


@plugin()
class Listing:
    """Has an option of any kind."""

    values: list


def surroundings():
    """Return what a run must leave as it was."""
    files = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return {
        "environment": dict(os.environ),
        "threads": {thread.name for thread in threading.enumerate()},
        "files": sorted(os.readlink(path) for path in files if os.path.exists(path)),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "warnings": list(warnings.filters),
    }


def learned(run):
    """Return the numbers and the weights of a run, bit by bit."""
    numbers = [(line["loss"], line["grad_norm"]) for line in read_metrics(run)]
    files = sorted((run / "model").glob("*.safetensors"))
    return numbers, [(path.name, file_digest(path)) for path in files]


@pytest.fixture
def tables(tmp_path):
    return tiny_tables(tmp_path)


def test_runs_in_one_process_equal_fresh_ones_and_leave_nothing(tables, tmp_path, capsys):
    fresh = {}
    for name, changes in {"full": {}, "lora": LORA}.items():
        (tmp_path / f"{name}.toml").write_text(
            tomli_w.dumps({**tables, **changes_of(tables, changes)})
        )
        done = run_plugsft(tmp_path / f"{name}.toml", f"output={tmp_path / name}")
        assert done.returncode == 0, done.stderr
        fresh[name] = learned(tmp_path / name)

    environment = dict(os.environ)
    plugsft.api.train(
        tables, output=tmp_path / "first", train={"steps": 1}
    )  # imports the libraries
    assert dict(os.environ) == environment
    Accelerator(cpu=True, mixed_precision="no")  # the user's own: the next run makes another
    torch.manual_seed(3)
    before, lives = surroundings(), []

    def train(name, **options):
        watching = Watching(**options.pop("watching", {}))
        try:
            return plugsft.api.train(tables, plugins=[watching], output=tmp_path / name, **options)
        finally:
            lives.append(watching.model)

    run = train("again")
    assert learned(run.folder) == fresh["full"]
    with pytest.raises(ValueError, match="no more") as failed:
        train("failed", watching={"fail": 2})
    assert "raised by plugin 'watching', in its hook 'stepped'" in failed.value.__notes__
    lora_tables = changes_of(tables, LORA)

    async def in_a_notebook():
        return plugsft.api.train({**tables, **lora_tables}, output=tmp_path / "loop")

    assert learned(asyncio.run(in_a_notebook()).folder) == fresh["lora"]
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(train, "thread").result()
    assert learned(run.folder) == fresh["full"]
    gc.collect()
    # The error of the failed run is still there, as in a notebook, and its model is not.
    assert [life() for life in lives] == [None] * 3
    assert surroundings() == before
    assert "step 3/3" in capsys.readouterr().out


def changes_of(tables, changes):
    """Return the tables that changes replace."""
    return {
        name: {**tables.get(name, {}), **table} if isinstance(table, dict) else table
        for name, table in changes.items()
    }


def test_a_run_returns_its_figures_and_its_model(tables, tmp_path):
    changes = {"eval": {"every": 2, "split": "train[:50%]"}}
    run = plugsft.api.train(tables, **changes)
    assert (run.status, run.recipe["train"]["batch_size"]) == ("completed", 8)
    assert run.metrics["loss"].tolist() == [line["loss"] for line in read_metrics(run.folder)]
    assert run.evaluations["step"].tolist() == [2, 3] and run.evaluations["eval_loss"].min() > 0
    assert (
        repr(run).startswith(f"<run {run.folder}: completed, steps 3 of 3") and run.report.is_file()
    )
    page = run._repr_html_()
    assert "<th" in page and f"{run.metrics['loss'].iloc[-1]:.4f}" in page
    model, answers = run.model(), run.generate(["fox", "owls"], max_tokens=4)
    assert run.model() is model and len(answers) == 2
    assert answers[:1] == plugsft.api.generate(run.folder, "fox", max_tokens=4)
    assert len(run.tokenizer()) == model.get_input_embeddings().num_embeddings
    run.unload()
    assert run.model() is not model
    assert plugsft.api.load_run(str(run.folder)).status == "completed"
    with pytest.raises(PlugsftError, match="top_p has no effect at temperature 0"):
        run.generate(["fox"], top_p=0.5)
    with pytest.raises(PlugsftError, match="no such folder"):
        plugsft.api.load_run(tmp_path / "nowhere")


def test_prepare_and_inspect_return_data(tables, tmp_path):
    rows = [*chats(20), {"messages": [{"role": "user", "content": "and?"}]}]
    write_jsonl(tmp_path / "data.jsonl", rows)
    changes = {"data": {"on_bad_row": "drop"}}
    data = plugsft.api.prepare(tables, **changes)
    assert data.rows == 21 and data.examples >= 20 and sum(data.bad_rows.values()) == 1
    assert 0 < data.trained_tokens < data.tokens and data.folder.is_dir()
    seen = plugsft.api.inspect(tables, rows=2, **changes)
    (source,), (row, _) = seen.sources, seen.rows
    assert (source.tokens, source.trained_tokens) == (data.tokens, data.trained_tokens)
    assert [20] in source.bad_rows.values() and not seen.errors and seen.warnings
    assert rows[0]["messages"][1]["content"].split()[0] in row.trained_text
    assert all(token.ids for token in row.tokens) and row.trained_text in str(row).replace("][", "")
    page = seen._repr_html_()
    assert "<pre" in page and "line 21: no turn of the assistant to train; dropped<" in page
    [error] = plugsft.api.inspect(tables).errors
    assert "line 21" in error and "on_bad_row" in error


def test_mistakes_are_exceptions_with_the_words_of_the_command_line(tables, tmp_path, monkeypatch):
    (tmp_path / "my.toml").write_text(tomli_w.dumps(tables))
    words = {
        "train.batchsize=4": {"train": {"batchsize": 4}},
        "data.source=no.jsonl": {"data": {"source": "no.jsonl"}},
    }
    for override, changes in words.items():
        done = run_plugsft(tmp_path / "my.toml", override)
        with pytest.raises(plugsft.RecipeError) as error:
            plugsft.api.train(tmp_path / "my.toml", **changes)
        assert done.stderr == "".join(f"error: {line}\n" for line in str(error.value).splitlines())
    plugsft.api.train(tables, train={"steps": 1, "log_every": None})
    with pytest.raises(
        plugsft.RecipeError, match="holds a finished run: start again with --overwr"
    ):
        plugsft.api.train(tables)
    for resume in (True, "auto"):  # nothing to resume
        assert plugsft.api.train(tables, train={"steps": 1}, resume=resume).status == "completed"
    with pytest.raises(PlugsftError, match="ranks=0: give 1 or more"):
        plugsft.api.train(tables, ranks=0)
    with pytest.raises(PlugsftError, match="resume='yes': give True, False or"):
        plugsft.api.train(tables, resume="yes")
    busy = "another run is in progress in this process"
    with isolated(), pytest.raises(PlugsftError, match=busy):
        plugsft.api.prepare(tables)
    # Two threads: each would restore the environment of the other.
    with opened(tables, [Watching()], (), {}), pytest.raises(PlugsftError, match=busy):
        plugsft.api.train(tables, plugins=[Watching()], ranks=2)
    assert OWN not in os.environ


def test_arguments_of_another_kind_are_refused_with_the_kind_to_give(tables, tmp_path):
    circle = {}
    circle["model"] = circle
    for options, message in (
        ({"recipe": None}, "recipe=None: give a recipe file, or a dict of tables"),
        ({"recipe": circle}, "recipe: nested too deeply"),
        (
            {"plugins": Watching()},
            r"plugins=Watching\(.*\): give a list of objects",
        ),
        ({"plugins": {"watching": Watching()}}, r"plugins.watching: pass an object as plugins=\["),
        ({"plugins": [Listing(values=[None])]}, "plugins.listing: an option is no plain value"),
        ({"without": None}, "without=None: give a list of names of plugins"),
        ({"ranks": "2"}, "ranks='2': give a whole number"),
        ({"ranks": 1000, "device": "cpu"}, "ranks=1000: on the CPU of this machine, give at most"),
        ({"resume_from": 3}, "resume_from=3: give the folder of a checkpoint"),
    ):
        with pytest.raises(PlugsftError, match=message):
            plugsft.api.train(**{"recipe": tables, **options})
    with pytest.raises(PlugsftError, match="rows='all': give a whole number"):
        plugsft.api.inspect(tables, rows="all")
    run = FinishedRun(tmp_path)
    for call in (lambda: plugsft.api.load_run(None), lambda: plugsft.api.generate(None, "?")):
        with pytest.raises(PlugsftError, match="=None: give a run"):
            call()
    for prompts in (3, [3], [{"role": "user", "content": "?"}], [[{"role": "user"}]]):
        with pytest.raises(PlugsftError, match="give a text, or a list of texts and chats"):
            run.generate(prompts)
    with pytest.raises(PlugsftError, match="temperature = 'hot': it should be a valid number"):
        run.generate("?", temperature="hot")


def test_a_message_that_names_an_option_has_a_note_with_the_argument(tables):
    plugsft.api.train(tables, train={"steps": 1})
    both = {"overwrite": True, "resume": True}
    for options, note in (
        ({}, "train(..., overwrite=True)"),
        (both, "train(..., resume=True) or train(..., overwrite=True)"),
        ({"without": ["lora"]}, "train(..., without=[...])"),
    ):
        with pytest.raises(plugsft.RecipeError) as refused:
            plugsft.api.train(tables, train={"steps": 1}, **options)
        assert refused.value.__notes__ == [f"from Python: {note}"]


def test_a_plugin_object_trains_with_fresh_state(tables, tmp_path):
    watching = Watching(fail=9)
    run = plugsft.api.train(tables, plugins=[watching])
    assert watching.seen == 3
    [entry] = run.record["plugins"]
    assert (entry["name"], entry["options"]) == ("watching", {"fail": 9, "interrupt": 0})
    assert entry["origin"] == f"class Watching of {__name__}"
    # The command line has no such plugin.
    done = run_plugsft(run.folder / "recipe.toml", "--overwrite")
    assert done.returncode == 2
    assert (
        "plugins.watching: unknown plugin, not installed, and not passed from Python" in done.stderr
    )
    again = plugsft.api.train(run.folder / "recipe.toml", plugins=[watching], overwrite=True)
    assert watching.seen == 3 and again.folder == run.folder


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ([Watching], r"Watching is a class; pass an object of it: Watching\(...\)"),
        ([3], "int is no plugin; mark its class with @plugsft.plugin()"),
        ([Watching(), Watching()], "two objects are named 'watching'; remove one"),
        ([Watching(fail=3)], "plugins.watching.fail: the object in plugins=.* has another value"),
    ],
)
def test_objects_that_are_no_plugin_or_contradict_the_recipe_are_refused(tables, objects, message):
    with pytest.raises(PlugsftError, match=message):
        plugsft.api.train({**tables, "plugins": {"watching": {"fail": 2}}}, plugins=objects)


MODULE = """
import os, signal, time
from pathlib import Path
from plugsft import hookimpl, plugin

@plugin()
class Rendering:
    folder: str
    processes: int = 1

    @hookimpl(wrapper=True)
    def render(self, rows):
        Path(self.folder, str(os.getpid())).touch()
        end = time.monotonic() + 240
        while len(os.listdir(self.folder)) < self.processes and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(0.1)
        return (yield)

@plugin()
class Interrupt:
    pid: int
    step: int
    error: str = ""

    @hookimpl
    def stepped(self, run):
        if run.step >= self.step:
            if self.error:
                raise ValueError(self.error)
            if run.is_main and run.step == self.step:
                os.kill(self.pid, signal.SIGINT)
            time.sleep(0.3)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Give a module with plugins, which other processes can import."""
    (tmp_path / "my_plugins.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    import my_plugins

    yield my_plugins
    del sys.modules["my_plugins"]


@only_full
def test_a_class_that_other_processes_need_is_in_a_module(tables, tmp_path, module, monkeypatch):
    monkeypatch.setattr(sources, "SLICE_ROWS", 1)
    plugsft.api.prepare(tables)
    [tables["model"]["tokenizer"]] = tmp_path.glob("run/scratch/tokenizer-*")
    tables |= {"output": tmp_path / "other", "plugins": {"multiprocess_tokenize": {"workers": 2}}}
    (folder := tmp_path / "processes").mkdir()
    rendering = module.Rendering(folder=str(folder), processes=2)
    data = plugsft.api.prepare(tables, plugins=[rendering])
    assert len(os.listdir(folder)) == 2 and data.rows == 24
    # The notebook's own class works here, and no other process can import it.
    monkeypatch.setattr(module.Rendering, "__module__", "__main__")
    rendering = module.Rendering(folder=str(folder))
    refused = pytest.raises(PlugsftError, match="another process needs its class Rendering")
    with refused:
        plugsft.api.prepare(tables, plugins=[rendering], output=tmp_path / "third")
    with refused:
        plugsft.api.train(tables, plugins=[rendering], ranks=2)
    alone = plugsft.api.prepare(tables, plugins=[rendering], without=["multiprocess_tokenize"])
    assert alone.tokens == data.tokens


def test_ctrl_c_ends_a_run_in_order(tables, tmp_path):
    whole = plugsft.api.train(tables, output=tmp_path / "whole")
    before = surroundings()["signals"]
    with pytest.raises(
        plugsft.api.Stopped, match="stopped by SIGINT after step 2: saved"
    ) as stopped:
        plugsft.api.train(tables, plugins=[Watching(interrupt=2)])
    assert stopped.value.__notes__ == ["from Python: train(..., resume=True)"]
    assert surroundings()["signals"] == before
    run = plugsft.api.load_run(tmp_path / "run")
    assert run.status == "stopped" and len(run.metrics) == 2
    run = plugsft.api.train(tables, resume=True)
    assert run.status == "completed" and learned(run.folder) == learned(whole.folder)


def test_ranks_start_and_end_by_themselves(tables, tmp_path, module, capsys):
    tables["train"]["epochs"] = 10
    alone = plugsft.api.train(tables, output=tmp_path / "alone")
    capsys.readouterr()
    interrupt = module.Interrupt(pid=os.getpid(), step=2)
    with pytest.raises(plugsft.api.Stopped, match=r"stopped by SIGINT after step [2-9]: saved"):
        plugsft.api.train(tables, ranks=2, plugins=[interrupt])
    assert ranks_of(os.getpid()) == []
    said = capsys.readouterr().out
    assert "DDP of 2" in said and said.count("step 1/30") == 1
    stopped = plugsft.api.load_run(tmp_path / "run").metrics
    wanted = alone.metrics[: len(stopped)]
    assert np.allclose(stopped[["loss", "grad_norm"]], wanted[["loss", "grad_norm"]], rtol=1e-5)
    resumed = plugsft.api.train(tables, resume=True)
    assert np.allclose(resumed.metrics["loss"], alone.metrics["loss"], rtol=1e-4)


def ranks_of(pid):
    """Return the processes below a process that are ranks, or their launcher."""
    below = psutil.Process(pid).children(recursive=True)
    return [process for process in below if "plugsft.api.ranks" in " ".join(process.cmdline())]


@only_full
def test_errors_of_ranks_and_the_end_of_their_parent(tables, tmp_path, module):
    failing = module.Interrupt(pid=0, step=2, error="no more")
    with pytest.raises(ValueError, match="no more") as error:
        plugsft.api.train(tables, ranks=2, plugins=[failing])
    notes = "".join(error.value.__notes__)
    assert "raised by plugin 'interrupt', in its hook 'stepped'" in notes and "Traceback" in notes
    with pytest.raises(plugsft.DataError, match="line 2"):
        rows = write_jsonl(tmp_path / "bad.jsonl", [*chats(1), {"messages": 3}])
        plugsft.api.train(tables, ranks=2, data={"source": rows}, output=tmp_path / "bad")
    # A notebook's kernel that is killed leaves no rank behind.
    (tmp_path / "my.toml").write_text(tomli_w.dumps(tables))
    call = "ranks=2, train={'epochs': 1000}, overwrite=True"
    code = f"import plugsft.api; plugsft.api.train({str(tmp_path / 'my.toml')!r}, {call})"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert any("step 5/" in line for line in parent.stdout)
    ranks = ranks_of(parent.pid)
    parent.kill()
    parent.communicate()
    assert len(ranks) == 3 and not psutil.wait_procs(ranks, timeout=240)[1]
    assert plugsft.api.load_run(tmp_path / "run").status == "stopped"
