"""docs/hooks.md and plugins/README.md agree with the code."""

import dataclasses
import inspect
import re
import tomllib

import numpy as np
import pytest
from conftest import ROOT

import plugsft
from plugsft import data_kit, testing
from plugsft.base.types import Shard
from plugsft.commands.starting_files import FILES
from plugsft.hooks import Hooks
from plugsft.model.defaults import ModelDefaults
from plugsft.plugins.bfd_packing.documents import documents_of, pack
from plugsft.ranks.agree import Ranks
from plugsft.ranks.trained_model import RunModel
from plugsft.registry.contracts import SPECS
from plugsft.run import Run
from plugsft.testing.tiny_runs import LARGER_MICRO_BATCH, MICRO_BATCH, TINY
from plugsft.tokens.shards import Examples, write_index, write_shard

README = (ROOT / "plugins/README.md").read_text(encoding="utf8")
PAGE = (ROOT / "docs/hooks.md").read_text(encoding="utf8")
SKELETONS = {
    kind: (FILES / f"{kind}/plugsft_my_plugin.py").read_text(encoding="utf8")
    for kind in ("callback", "format", "loss", "optimizer")
}


def rows(first, page=PAGE):
    """Return the rows of the table whose head begins with a word, cell by cell."""
    table = page.split(f"\n| {first} |")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_page_has_the_hooks_and_public_names_of_today(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    from hooks_page import written

    assert written(PAGE) == PAGE
    for name in SPECS:
        assert f"\n- **`{name}(" in PAGE


def test_the_six_hooks_of_the_readme_have_their_arguments():
    calls = [row[0].strip("`") for row in rows("hook", README)]
    assert len(calls) == 6
    for call in calls:
        name, _, arguments = call.rstrip(")").partition("(")
        assert arguments == ", ".join([*inspect.signature(SPECS[name]).parameters][1:])


def test_every_hook_says_in_the_code_what_it_is_for():
    hooks = {name: hook for name, hook in vars(Hooks).items() if not name.startswith("_")}
    assert set(SPECS) == set(hooks)
    for name, hook in hooks.items():
        assert inspect.getdoc(hook).endswith("."), name


def test_every_law_is_there_with_its_arguments(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    from hooks_page import call_of

    laws = rows("law", README)
    assert [row[0] for row in laws] == [call_of(testing, name) for name in testing.__all__]
    assert all(len(row) == 2 and row[1] for row in laws)


def test_the_tiny_recipe_of_the_laws_is_there():
    section = PAGE.split("\n## The recipe of the laws\n")[1].split("\n## ")[0]
    recipe = section.split("```text\n")[1].split("```")[0]
    train = TINY["train"] | {"micro_batch": MICRO_BATCH}
    assert tomllib.loads(recipe) == TINY | {"train": train}
    assert f"a micro-batch of {LARGER_MICRO_BATCH};" in section


@pytest.mark.parametrize(("of", "kind"), [("Run", Run), ("RunModel", RunModel), ("Ranks", Ranks)])
def test_what_plugins_see_of_a_run_is_there(of, kind):
    cells = [cell for owner, cell, _ in rows("of") if owner == f"`{of}`"]
    shown = [name for cell in cells for name in re.findall("`(.+?)`", cell)]
    assert len(shown) > 5
    for name in shown:
        own, _, arguments = name.rstrip(")").partition("(")
        if "(" in name:
            parameters = list(inspect.signature(getattr(kind, own)).parameters)[1:]
            assert ", ".join(parameters) == arguments, name
        else:
            declared = own in kind.__annotations__ or hasattr(kind, own)
            assert declared or f"self.{own}" in inspect.getsource(kind), name


def names_in(first):
    """Return the names in the first column of a table, without arguments."""
    cells = [cell for row in rows(first) for cell in re.findall("`(.+?)`", row[0])]
    return [cell.split("(")[0] for cell in cells if cell != "len(tokens)"]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Return three examples, of two tokens each."""
    folder = tmp_path_factory.mktemp("tokens")
    examples = Examples(
        ids=np.arange(6, dtype=np.int32),
        mask=np.tile([False, True], 3),
        counts=np.full(3, 2),
        num_sequences=np.ones(3, np.int64),
        rows=np.arange(3),
        columns={},
    )
    shard = Shard("data-0.arrow", 3, columns=examples.types)
    write_shard(folder / shard.file, examples)
    write_index(folder, [shard], {"key": "k"})
    return data_kit.Tokens(folder)


def test_the_attributes_of_tokens_are_there_with_their_arguments(tokens):
    attributes = [name for name in vars(tokens) if not name.startswith("_")]
    methods = [name for name in vars(data_kit.Tokens) if not name.startswith("_")]
    assert {*names_in("tokens")} == {*attributes, *methods}
    for name in attributes:
        assert f"\n{name} " in inspect.getdoc(data_kit.Tokens), name
    for name in methods:
        assert inspect.getdoc(getattr(data_kit.Tokens, name)), name
        parameters = [*inspect.signature(getattr(data_kit.Tokens, name)).parameters][1:]
        call = f"`{name}({', '.join(parameters)})`"
        assert call in [row[0] for row in rows("tokens")]


def test_the_names_in_batches_are_there(tokens):
    examples = np.arange(3)
    padded = ModelDefaults().collate(tokens=tokens, examples=examples, pad=0)
    packed = pack(tokens, examples)
    shared = documents_of(np.full(2, 2), seen=np.array([0, 1]))
    assert {*names_in("batch")} == {*padded, *packed, *shared, "_places", "_target_weights"}
    kinds = {"padded": {*padded} - {*packed}, "packed": {*packed} - {*padded}}
    for kind, names in kinds.items():
        cells = [cell for cell, batches, _ in rows("batch") if batches == kind]
        assert {*re.findall("`(.+?)`", " ".join(cells))} == names


def test_labels_are_not_shifted(tokens):
    batch = ModelDefaults().collate(tokens=tokens, examples=np.arange(3), pad=0)
    assert batch["input_ids"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert batch["labels"].tolist() == [[-100, 1], [-100, 3], [-100, 5]]


def test_the_fields_of_rendered_are_there():
    fields = [field.name for field in dataclasses.fields(plugsft.Rendered)]
    assert names_in("rendered") == fields


@pytest.mark.parametrize("text", [README, *SKELETONS.values()], ids=["README", *SKELETONS])
def test_every_name_that_is_imported_from_plugsft_is_public(text):
    names = [
        name.strip()
        for line in re.findall(r"^from plugsft import ([\w, ]+)$", text, re.MULTILINE)
        for name in line.split(",")
    ]
    assert names
    for name in names:
        assert name in plugsft.__all__ or name in ("api", "testing")
