"""Rows prepared as a run does, recipes of many slices, and plans over examples."""

from types import SimpleNamespace

import numpy as np
from conftest import chats, tiny_tables, write_jsonl, write_recipe

from plugsft import Recipe
from plugsft.audit.prepare import prepare_data
from plugsft.batches.defaults import BatchDefaults
from plugsft.batches.plan import Plan
from plugsft.data import prepare
from plugsft.data.defaults import DataDefaults
from plugsft.registry.active import Active
from plugsft.registry.load import load, resolve
from plugsft.start.guards import Guard


def many_slices(folder, count):
    """Return a recipe's tables: `count` sources of a slice each; number n has n + 3 rows."""
    tables = tiny_tables(folder / "small", chats(40))
    recipe = write_recipe(folder / "small.toml", tables)
    tokenizer = prepare_data(*load(recipe), recipe).tokenizer_folder
    files = [write_jsonl(folder / f"{n}.jsonl", chats(n + 3, n)) for n in range(count)]
    tables["data"] = {"sources": [{"source": str(file)} for file in files], "max_length": 64}
    tables["model"]["tokenizer"] = str(tokenizer)
    tables["output"] = str(folder / "run")
    return tables


def prepare_rows(folder, rows, plugins, model=None, **data):
    """Prepare a file of each list of rows, as a run does; return its tokens."""
    tables = tiny_tables(folder, rows[0])
    files = [write_jsonl(folder / f"rows-{n}.jsonl", each) for n, each in enumerate(rows)]
    tables["data"] = {"sources": [{"source": str(file)} for file in files], "max_length": 64} | data
    tables["model"] |= model or {}
    recipe, active = resolve({**tables, "plugins": plugins})
    active.attach(DataDefaults(recipe.folder))
    return prepare.prepare(recipe, active).tokens


def text_row(number, **columns):
    return {"text": f"owls see {number} mice", **columns}


def make_plan(count=20, batch=6, micro=2, ranks=2, seed=0, sources=None, core=None, **train):
    """Make a plan over examples without tokens."""
    recipe = Recipe.model_validate(
        {
            "output": "run",
            "model": {"path": "none"},
            "data": {"source": "none"},
            "train": {
                "batch_size": batch,
                "micro_batch": micro,
                "learning_rate": 1.0,
                "seed": seed,
                **train,
            },
        }
    )
    tokens = SimpleNamespace(
        facts={"sources": sources or [{"examples": count, "weight": 1.0}]},
        lengths=np.arange(count) + 10,
        targets=np.arange(count) + 1,
        columns={},
        plan_columns=dict,
        divisor=lambda examples: int((examples + 1).sum()),
        ensure_unchanged=lambda: None,
    )
    active = Active({}, {})
    guard = Guard(active.hooks)
    active.guard = SimpleNamespace(order_examples=guard.order_examples)
    return Plan(tokens, recipe, ranks, active.attach(core or BatchDefaults()).hooks)
