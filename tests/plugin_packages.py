"""Writes plugins for tests as authors do: packages with entry points."""

import importlib
import itertools
import os
import sys
from pathlib import Path
from textwrap import dedent

from conftest import tiny_tables

from plugsft.registry.contracts import is_stage

_numbers = itertools.count()
# TRL's settings in comparisons: float32, on the CPU.
TRL = {
    "per_device_train_batch_size": 8,
    "max_length": 256,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": [],
}
HEAD = "from plugsft import PluginError, RecipeError, hookimpl, plugin, state\n"
# This plugin changes the texts, and so the tokens and their key.
LOUD = """
    @plugin()
    class Loud:
        mark: str = "!"

        @hookimpl(wrapper=True)
        def render(self):
            rendered = yield
            rendered.texts = [text + self.mark for text in rendered.texts]
            return rendered
"""


def failing(*hooks: str) -> str:
    """Write hooks that only call `fail`, to be added to a class; those of stages wrap."""
    source = ""
    for hook in hooks:
        mark, end = ("(wrapper=True)", "return (yield)") if is_stage(hook) else ("", "")
        body = f"self.fail({hook!r})\n            {end}"
        source += f"\n        @hookimpl{mark}\n        def {hook}(self):\n            {body}\n"
    return source


def install(folder: Path, **plugins: str) -> Path:
    """Write plugins (name=module source) into a folder for sys.path; return the folder."""
    package = f"made{os.getpid()}_{next(_numbers)}"
    site = folder / package
    info = site / f"{package}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\nSummary: For a test\n"
    )
    points = "".join(f"{name} = {package}_{name}\n" for name in plugins)
    (info / "entry_points.txt").write_text(f"[plugsft]\n{points}")
    for name, source in plugins.items():
        (site / f"{package}_{name}.py").write_text(HEAD + dedent(source), encoding="utf8")
    return site


def tables_with(folder: Path, monkeypatch, **plugins: str) -> dict:
    """Install plugins; return the tables of a recipe with them."""
    activate(install(folder / "sites", **plugins), monkeypatch)
    return {**tiny_tables(folder), "plugins": {name: {} for name in plugins}}


def activate(site: Path, monkeypatch) -> None:
    """Put a folder on the path of this process and of its child processes."""
    monkeypatch.syspath_prepend(str(site))
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), before])))
    importlib.invalidate_caches()
    assert str(site) in sys.path


SEES = """
    import torch

    @plugin()
    class Sees:
        '''Note the types that really meet.'''

        seen: list = state([])
        states: list = state([])
        made: object = state()

        @hookimpl(wrapper=True)
        def step(self, model):
            def note(module, given, made):
                self.seen = sorted({str(one.dtype) for one in (given[0], made)})
            head = getattr(model, "module", model).get_output_embeddings()
            handle = head.register_forward_hook(note)
            loss = yield
            handle.remove()
            return loss

        @hookimpl(wrapper=True)
        def optimizer(self):
            self.made = yield
            self.made.register_step_post_hook(self.look)
            return self.made

        def look(self, *_):
            states = [one for each in self.made.state.values() for one in each.values()]
            states = [one for one in states if one.dim()]
            states += [one.grad for group in self.made.param_groups for one in group["params"]]
            self.states = sorted({str(one.dtype) for one in states})

        @hookimpl
        def summary(self):
            return "head: " + ", ".join(self.seen) + "; " + ", ".join(self.states)
"""
