"""Capabilities: declared by plugins, asked of the recipe, checked when a class is declared."""

import copy
import pickle
import tomllib
from functools import partial

import pytest
from conftest import ROOT, run_plugsft, write_recipe
from plugin_packages import tables_with

from plugsft import PluginError, RecipeError
from plugsft.recipe.capabilities import SHARED, SUGGESTED, Capability
from plugsft.recipe.parse import resolved
from plugsft.registry.contracts import contract_of
from plugsft.registry.discover import find, load_class
from plugsft.registry.load import resolve

PACKER = """
@plugin(provides={"packed_rows": "tokens"})
class Packer:
    tokens: int = 512
"""
REPORTER = "@plugin(provides={'external_reports': None})\nclass Reporter:\n    pass\n"


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Return `tables(name=source)`, which installs plugins and returns a recipe with them."""
    return partial(tables_with, tmp_path, monkeypatch)


def test_a_recipe_knows_who_provides_a_capability(tables):
    raw = tables(stranger=PACKER)
    recipe, _ = resolve(raw)
    packing = recipe.provides("packed_rows")
    assert packing and packing == ("stranger", "tokens", 512)
    assert (packing.key, packing.table) == ("plugins.stranger.tokens", "[plugins.stranger]")
    assert not recipe.provides("adapters")
    assert not resolve(raw, ["stranger"])[0].provides("packed_rows")
    raw["plugins"] |= {"stranger": {"tokens": 64}, "lora": {}}
    recipe, _ = resolve(raw)
    assert recipe.provides("packed_rows").value == 64
    assert recipe.provides("adapters") == ("lora", "r", 16)


def test_an_option_that_is_false_turns_its_capability_off(tables):
    raw = tables() | {"plugins": {"dpo": {}, "bfd_packing": {}}}
    recipe, _ = resolve(raw)
    assert recipe.provides("preference_pairs") and not recipe.provides("shared_prompts")
    raw["plugins"]["dpo"]["share_prompt"] = True
    assert resolve(raw)[0].provides("shared_prompts").value is True


def test_capabilities_survive_copies_pickles_and_the_recipe_of_a_run(tables):
    recipe, _ = resolve(tables(stranger=PACKER))
    again, _ = resolve(tomllib.loads(resolved(recipe)))
    for other in (
        recipe.model_copy(update={"output": "elsewhere"}),
        copy.deepcopy(recipe),
        pickle.loads(pickle.dumps(recipe)),
        again,
    ):
        assert other.provides("packed_rows") == recipe.provides("packed_rows")
    changed = recipe.model_copy(update={"plugins": {"stranger": {"tokens": 7}}})
    assert changed.provides("packed_rows").value == 7
    assert not recipe.model_copy(update={"plugins": {}}).provides("packed_rows")


def test_a_question_for_an_unknown_capability_names_the_nearest(tables):
    recipe, _ = resolve(tables())
    with pytest.raises(PluginError, match="unknown capability 'packed_row'; did you mean 'packed_"):
        recipe.provides("packed_row")


def test_two_plugins_with_one_capability_are_both_named(tables):
    raw = tables(one=PACKER, two=PACKER, three=REPORTER, four=REPORTER)
    with pytest.raises(RecipeError) as caught:
        resolve(raw)
    assert caught.value.problems == [
        "recipe: plugins.two: provides packed_rows, and so does 'one': "
        "remove one, or switch it off with --without"
    ]
    recipe, _ = resolve(raw, ["one"])
    assert [each.plugin for each in recipe.providers("external_reports")] == ["four", "three"]


@pytest.mark.parametrize(
    ("contract", "message"),
    [
        (
            "affects_results=['scop']",
            "class One: @plugin(affects_results=...) names 'scop', which is no option; did you "
            "mean 'scope'? options: enabled, scope",
        ),
        ("affects_tokens=['zzz']", "@plugin(affects_tokens=...) names 'zzz', which is no option;"),
        ("provides={'packed_rows': 'scop'}", "@plugin(provides=...) names 'scop', which is no opt"),
        (
            "provides={'packd_rows': 'scope'}",
            "@plugin(provides=...): unknown capability 'packd_rows'; did you mean 'packed_rows'?",
        ),
        ("after='lora'", '@plugin(after="lora"): write a list: ["lora"]'),
        ("before=['*']", '@plugin(...): "*" is for `after` only'),
        (
            "provides={'packed_rows': None}",
            '\'packed_rows\' needs the option that tunes it: provides={"packed_rows": "OPTION"}',
        ),
    ],
)
def test_a_misspelt_name_in_a_contract_is_a_message_to_the_user(
    tables, tmp_path, contract, message
):
    raw = tables(one=f"@plugin({contract})\nclass One:\n    scope: int = 1\n")
    recipe = write_recipe(tmp_path / "recipe.toml", raw)
    for command in ("check", "train", "plugins"):
        result = run_plugsft(command, recipe)
        assert result.returncode == 2
        [line] = result.stderr.splitlines()
        assert line.startswith(f"error: {recipe}: plugins.one: ") and message in line
    assert not (tmp_path / "run").exists()


def test_every_capability_has_its_bundled_plugin():
    bundled = {name: found for name, found in find().items() if found.origin == "bundled"}
    provided = [
        (capability, name)
        for name, found in bundled.items()
        for capability in contract_of(load_class(found)).provides
    ]
    assert dict(provided).keys() == SUGGESTED.keys() >= SHARED
    assert SUGGESTED.items() <= {*provided}
    assert Capability.bundled("packed_rows").table == "[plugins.bfd_packing]"


def test_the_page_of_hooks_explains_every_capability():
    page = (ROOT / "docs/hooks.md").read_text(encoding="utf8")
    table = page.split("\n| capability |")[1].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table]
    assert {row[0]: row[3].split(", ")[0] for row in rows} == SUGGESTED
    classes = {name: load_class(found) for name, found in find().items()}
    for capability, option, meaning, plugins in rows:
        for plugin in plugins.split(", "):
            assert (contract_of(classes[plugin]).provides[capability] or "") == option and meaning
