"""A recipe of many slices, which several processes prepare together."""

import time

from conftest import chats, tiny_tables, write_jsonl, write_recipe

from plugsft.audit.prepare import prepare_data
from plugsft.registry.load import load


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


def wait_for(condition, seconds=60):
    """Wait until a condition is true; return its value."""
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return result
