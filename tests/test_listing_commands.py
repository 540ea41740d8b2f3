"""Commands that list: plugins, hooks, recipes, runs, and the schema for editors."""

import json
import re
import tomllib

import jsonschema
import pytest
from conftest import ROOT, must_succeed, read_record, run_plugsft
from plugin_packages import activate, install

from plugsft.base.errors import RecipeError
from plugsft.base.machine import look
from plugsft.batches.defaults import BatchDefaults
from plugsft.commands import overview
from plugsft.data.defaults import DataDefaults
from plugsft.model.defaults import ModelDefaults
from plugsft.output.folder import lock_output
from plugsft.output.record import Record
from plugsft.output.results import show_run
from plugsft.registry.contracts import SPECS, is_stage
from plugsft.registry.discover import find
from plugsft.registry.load import load

LOUD = '''
@plugin()
class Loud:
    """Make the model louder."""

    volume: int = 3
    """How loud."""
    kind: Kind
    heard: object = state()

    @hookimpl(wrapper=True)
    def render(self, rows):
        rendered = yield
        return rendered

    @hookimpl
    def summary(self):
        return f"volume {self.volume}"
'''
KINDS = '''
from typing import Literal
from pydantic import BaseModel

class Kind(BaseModel):
    """A kind, of which two plugins have their own."""
    FIELD
'''
QUIET = """
@plugin()
class Quiet:
    kind: Kind | None = None

    @hookimpl(wrapper=True)
    def render(self, rows):
        return (yield)

    @hookimpl
    def plan_batches(self, order, ranks, train):
        return [[[order]]]
"""
MISSING = "import nowhere_to_be_found\n@plugin()\nclass Missing:\n    x: int = 1\n"
BROKEN = "raise OSError('no driver')\n"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    site = install(
        tmp_path,
        loud=KINDS.replace("FIELD", "name: Literal['horn', 'bell']") + LOUD,
        quiet=KINDS.replace("FIELD", "depth: int") + QUIET,
        missing=MISSING,
        broken=BROKEN,
    )
    activate(site, monkeypatch)
    return site


def test_plugins_are_listed_without_importing_one(installed):
    result = must_succeed("plugins", env={"PYTHONPATH": str(installed)})
    lines = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert {"loud", "quiet", "missing", "broken"} <= set(lines)
    assert "1.2" in lines["broken"] and "For a test" in lines["broken"]


def test_hooks_lists_who_answers_and_who_wraps_from_the_inside(installed, tiny, capsys):
    options = {"loud": {"kind": {"name": "horn"}, "volume": 5}, "quiet": {}}
    path = tiny(plugins=options)
    overview.list_hooks(path, [], [])
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert lines["render"].split(maxsplit=2)[1:] == ["stage", "core, wrapped by loud, then quiet"]
    assert lines["plan_batches"].split(maxsplit=2)[1:] == ["stage", "quiet, else core"]
    assert lines["check"].split(maxsplit=2)[1:] == ["notice", "nobody"]
    assert lines["logged"].split(maxsplit=2)[1:] == ["notice", "core"]
    assert list(lines)[: len(SPECS)] == list(SPECS)

    overview.list_hooks(path, [], ["quiet"])
    assert "quiet" not in capsys.readouterr().out


def test_a_plugin_is_explained(installed):
    """With what it does, each option, and what it declares; plugins of others, too."""
    shown = must_succeed("plugins", "lora").stdout
    assert shown.startswith("Train small adapters on the frozen weights (LoRA)")
    assert (
        "  r: whole number, from 1\n      Rank: the inner width" in shown
        and "Default: 16.\n" in shown
    )
    assert '  targets: "all-linear", or list of texts\n' in shown
    assert re.search(r"^wraps +optimize_model, optimizer$", shown, re.M)
    assert re.search(r"^affects results +r, alpha, ", shown, re.M)
    assert "\ndocs/reference.md#pluginslora; " in shown
    shown = must_succeed("plugins", "liger").stdout
    assert "needs            pip install 'plugsft[liger]'\n" in shown
    assert "refuses          lora: Liger's kernels are for full fine-tuning" in shown
    shown = must_succeed("plugins", "loud", env={"PYTHONPATH": str(installed)}).stdout
    assert "  volume: whole number\n      How loud. Default: 3.\n" in shown
    assert "  kind: table, required\n" in shown
    assert "heard" not in shown and "docs/" not in shown


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lroa"], "'lroa' is neither a plugin nor a recipe; did you mean 'lora'?"),
        (["qqq"], "neither a plugin nor a recipe; `plugsft plugins` lists all plugins"),
        (["lora", "train.seed=1"], "lora: cannot be read"),
        (["nowhere.toml"], "nowhere.toml: cannot be read"),
        (["missing"], "plugin 'missing' needs the package 'nowhere_to_be_found': pip install"),
    ],
)
def test_a_plugin_that_cannot_be_explained_says_why(installed, words, says):
    result = run_plugsft("plugins", *words, env={"PYTHONPATH": str(installed)})
    assert result.returncode == 2 and says in result.stderr


def test_the_core_answers_every_stage_and_the_listed_notices(tiny):
    recipe, active = load(tiny())
    core = DataDefaults(recipe.folder), BatchDefaults(), ModelDefaults()
    active.attach(*core, Record(recipe, look(), active))
    answered = [hook for hook, _, answers, _ in overview.describe_hooks(active) if answers]
    assert answered == [hook for hook in SPECS if is_stage(hook) or hook in overview.CORE_NOTICES]


def test_a_run_is_shown_with_the_summaries_of_its_plugins(installed, tiny, tmp_path, capsys):
    path = tiny(plugins={"loud": {"kind": {"name": "horn"}}}, train={"steps": 1})
    must_succeed(path, env={"PYTHONPATH": str(installed)})
    show_run(tmp_path / "run")
    assert "loud: volume 3" in capsys.readouterr().out


def test_a_recipe_is_shown_with_every_default_and_runs_again(tiny, tmp_path, capsys):
    path = tiny()
    overview.show_recipe(path, ["train.seed=7"])
    printed = capsys.readouterr().out
    tables = tomllib.loads(printed)
    assert tables["train"]["seed"] == 7 and tables["train"]["beta2"] == 0.999
    (tmp_path / "again.toml").write_text(printed)
    overview.show_recipe(tmp_path / "again.toml", [])
    assert capsys.readouterr().out == printed


def test_a_run_is_shown(tiny, tmp_path, capsys):
    must_succeed(tiny(train={"steps": 2}, eval={"split": "train[:4]"}))
    result = run_plugsft("show", tmp_path / "run")
    shown = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    run = read_record(tmp_path / "run")
    assert shown["status"] == "completed"
    assert shown["steps"] == "2 of 2, 0.67 epochs"
    assert shown["loss"] == f"{run['final']['loss']:.4f}"
    assert shown["report"] == str(tmp_path / "run/report.html")
    assert "24 examples" in shown["data"]
    assert shown["talk"] == f"plugsft chat {tmp_path / 'run'}"


def test_a_run_that_was_killed_is_not_called_running(tmp_path, capsys):
    facts = {"status": "running", "started": "now", "machine": {"host": "h"}}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    show_run(tmp_path)
    shown = capsys.readouterr().out
    assert f"killed: continue with plugsft {tmp_path}/recipe.toml --overwrite" in shown


@pytest.mark.parametrize("text", [None, "{", "[]", '{"status": 1}'])
def test_a_folder_without_a_run_says_so(tmp_path, text):
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(RecipeError, match=r"run\.json"):
        show_run(tmp_path)


def test_a_misspelt_run_gets_a_hint(tmp_path):
    (tmp_path / "quickstart").mkdir()
    result = run_plugsft("show", tmp_path / "quickstar")
    assert result.returncode == 2
    assert "quickstar: no such folder; did you mean 'quickstart'?; name a run's" in result.stderr


def test_a_run_that_prepares_its_data_says_so(tiny):
    recipe, _ = load(tiny())
    with lock_output(recipe), pytest.raises(RecipeError, match="its run prepares its data"):
        show_run(recipe.folder)


def problems(schema, tables):
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(tables)]


def test_the_schema_takes_the_recipes_that_run_and_no_others(installed, tiny):
    schema = overview.make_schema(find())
    jsonschema.Draft202012Validator.check_schema(schema)
    recipes = [ROOT / "recipes/quickstart.toml", tiny()]
    for tables in [tomllib.loads(path.read_text()) for path in recipes]:
        assert problems(schema, tables) == []
        loud = {"enabled": False, "volume": 1, "kind": {"name": "horn"}}
        assert problems(schema, {**tables, "plugins": {"loud": loud}}) == []
        assert problems(schema, {**tables, "plugins": {"missing": {"x": 1, "y": 2}}}) == []
        assert problems(schema, {**tables, "plugins": {"quiet": {"kind": {"depth": 1}}}}) == []
        for wrong in (
            {**tables, "trian": {}},
            {**tables, "train": {**tables["train"], "batch_size": "many"}},
            {**tables, "plugins": {"nobody": {}}},
            {**tables, "plugins": {"loud": {**loud, "volum": 1}}},
            {**tables, "plugins": {"loud": {**loud, "heard": 1}}},
            {**tables, "plugins": {"loud": {**loud, "kind": {"depth": 1}}}},
            {**tables, "plugins": {"loud": {"volume": 1}}},
            {**tables, "plugins": {"quiet": {"kind": {"name": "horn"}}}},
        ):
            assert problems(schema, wrong), wrong


def test_the_schema_says_what_keys_mean_and_which_plugins_are_missing(installed):
    result = run_plugsft("schema", env={"PYTHONPATH": str(installed)})
    schema = json.loads(result.stdout)
    plugins = schema["properties"]["plugins"]["properties"]
    assert "pip install nowhere_to_be_found" in plugins["missing"]["description"]
    assert "no driver" in plugins["broken"]["description"]
    loud = schema["$defs"][plugins["loud"]["$ref"].rpartition("/")[2]]
    assert loud["description"] == "Make the model louder."
    assert loud["properties"]["volume"]["description"] == "How loud. Default: 3."
    switch = loud["properties"]["enabled"]["description"]
    assert switch == "false keeps the options and switches the plugin off. Default: true."
    train = schema["$defs"]["Train"]["properties"]
    assert train["schedule"]["description"].endswith(' Default: "linear".')
    assert "Default" not in train["batch_size"]["description"] + train["steps"]["description"]
