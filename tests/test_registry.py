"""Plugins as real modules: found, configured, checked, ordered, called."""

import itertools
import random
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from textwrap import dedent
from types import SimpleNamespace

import pytest
from conftest import (
    must_succeed,
    read_metrics,
    read_record,
    run_plugsft,
    start_ranks,
    tiny_tables,
    write_recipe,
)
from plugin_packages import LOUD, activate, install, tables_with

from plugsft import PluginError, RecipeError
from plugsft.base.machine import look
from plugsft.commands.overview import describe_hooks, summary_of
from plugsft.data.defaults import DataDefaults
from plugsft.hooks import Hooks, hookimpl
from plugsft.registry.active import Active, check
from plugsft.registry.contracts import guarded
from plugsft.registry.create import order
from plugsft.registry.discover import find
from plugsft.registry.load import load, resolve

WRAPS = """
@plugin({contract})
class Wraps:
    depth: int = 1

    @hookimpl(wrapper=True)
    def load_batches(self):
        result = yield
        return result
"""
ANSWERS = """
@plugin()
class Answers:
    @hookimpl
    def load_batches(self, build, steps):
        return map(build, steps)
"""


@pytest.fixture
def company(tmp_path, monkeypatch):
    """Give `company(name=source, ...)`: installs plugins, returns tables of a recipe with them."""
    return partial(tables_with, tmp_path, monkeypatch)


def refused(tables, without=()):
    with pytest.raises(RecipeError) as caught:
        resolve(tables, without)
    return caught.value.problems


def test_a_third_party_plugin_is_found_but_imported_only_if_active(company, tmp_path):
    tables = company(one=WRAPS.format(contract=""), two=WRAPS.format(contract=""))
    found = find()
    assert found["one"].origin.endswith(" 1.2") and summary_of(found["one"]) == "For a test"
    del tables["plugins"]["two"]
    path = write_recipe(tmp_path / "recipe.toml", tables)
    script = f"""
        import sys
        from plugsft.registry.discover import find
        from plugsft.registry.load import load
        targets = {{name: found.target for name, found in find().items()}}
        assert not set(targets.values()) & set(sys.modules), "finding imports nothing"
        load({str(path)!r})
        print([name for name, target in targets.items() if target in sys.modules])
    """
    said = subprocess.run(
        [sys.executable, "-c", dedent(script)], capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == "['one']"


def test_options_are_the_constructor_call(company):
    tables = company(one=WRAPS.format(contract=""))
    tables["plugins"]["one"] = {"depth": 7}
    recipe, active = resolve(tables)
    assert active.plugins["one"].depth == 7 and recipe.plugins == {"one": {"depth": 7}}
    del tables["plugins"]["one"]["depth"]
    assert resolve(tables)[0].plugins == {"one": {"depth": 1}}, "the record has every option"
    for given, expected in [
        ({"depth": "7"}, "plugins.one.depth: given '7'; it should be a whole number, such as 2, w"),
        ({"dept": 7}, "plugins.one.dept: unknown key (given 7); did you mean 'depth'? allowed: d"),
        (3, "plugins.one: given 3; write {} for defaults, or remove it"),
        ({"enabled": 1}, "plugins.one.enabled: given 1; it should be true or false"),
    ]:
        tables["plugins"]["one"] = given
        (line,) = refused(tables)
        assert expected in line


def test_a_plugin_can_be_switched_off(company):
    tables = company(one=WRAPS.format(contract=""), two=WRAPS.format(contract="requires=['one']"))
    tables["plugins"]["two"]["enabled"] = False
    assert list(resolve(tables)[1].plugins) == ["one"]
    assert list(resolve(tables, ["one"])[1].plugins) == []
    assert "enabled" not in resolve(tables)[0].plugins["one"]
    assert refused(tables, ["on"]) == [
        "--without on: the recipe has no [plugins.on]; did you mean 'one'? it has one, two"
    ]
    tables["plugins"] = {"one": {"enabled": False}, "two": {}}
    (line,) = refused(tables)
    assert "plugins.two: requires 'one' (it is switched off): add [plugins.one]" in line


def test_an_unknown_plugin_names_the_nearest_and_all(company):
    tables = company(squeeze=ANSWERS)
    tables["plugins"] = {"squeze": {}}
    (line,) = refused(tables)
    assert "plugins.squeze: unknown plugin; did you mean 'squeeze'? there are: " in line
    assert "squeeze" in line.partition("there are: ")[2]


def test_two_distributions_with_one_name(company, tmp_path, monkeypatch):
    tables = company(one=ANSWERS)
    activate(install(tmp_path / "again", one=ANSWERS), monkeypatch)
    with pytest.raises(PluginError, match=r"two plugins are named 'one': made.* and made.* 1\.2"):
        resolve(tables)


def test_a_missing_package_names_the_command_that_mends_it(company):
    tables = company(one="import flash_attn_of_mars\n" + ANSWERS)
    (line,) = refused(tables)
    assert "plugins.one: plugin 'one' needs the package 'flash_attn_of_mars'" in line
    assert line.endswith("pip install flash_attn_of_mars")


def test_a_broken_import_is_a_line(company):
    (line,) = refused(company(one="from json import dumbs\n" + ANSWERS))
    assert "plugin 'one' cannot be imported: cannot import name 'dumbs'" in line


def test_a_syntax_error_is_a_line(company):
    (line,) = refused(company(one=ANSWERS + "\nx = ("))
    assert "plugin 'one' cannot be imported: '(' was never closed (made" in line


@pytest.mark.parametrize("source", ["x = 1", ANSWERS + ANSWERS.replace("Answers", "Other")])
def test_a_module_holds_one_plugin(company, source):
    (line,) = refused(company(one=source))
    assert "classes marked @plugin, and needs exactly one" in line


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            "@hookimpl\ndef optimise_model(self): ...",
            "optimise_model() is no hook; did you mean 'optimize_model'?",
        ),
        ("@hookimpl\ndef zzz(self): ...", "zzz() is no hook"),
        (
            "@hookimpl\ndef step(self, modle): ...",
            "step() has no argument 'modle'; did you mean 'model'? allowed: model, batch, "
            "denominator, token_nll",
        ),
        (
            "@hookimpl\ndef step(self, zzz): ...",
            "step() has no argument 'zzz'; allowed: model, batch, denominator, token_nll",
        ),
        ("@hookimpl\ndef step(self, *args): ...", "step() has no argument 'args'"),
        ("@hookimpl\ndef step(self, model=None): ...", "write 'model' as a plain argument"),
        ("@hookimpl\ndef step(self, *, model): ...", "write 'model' as a plain argument"),
        ("def step(self): ...", "step() is named like a hook; mark it with @hookimpl"),
        ("@hookimpl(tryfirst=True)\ndef step(self): ...", "only wrapper=True is understood"),
        ("@hookimpl(trylast=True)\ndef step(self): ...", "only wrapper=True is understood"),
        ("@hookimpl(hookwrapper=True)\ndef step(self): yield", "only wrapper=True is understood"),
        ("@hookimpl\ndef step(self): yield", "step() has a yield: mark it @hookimpl(wrapper=True)"),
        (
            "@hookimpl(wrapper=True)\ndef step(self): ...",
            "step() has no yield: remove wrapper=True, or yield once",
        ),
        ("@hookimpl\ndef logged(self): yield", "logged() has a yield: a notice has none"),
        ("@hookimpl\nasync def stepped(self): ...", "stepped(): a hook is a plain function"),
        (
            "@hookimpl(wrapper=True)\ndef logged(self): yield",
            "'logged' is a notice to every plugin",
        ),
    ],
)
def test_slips_that_pluggy_passes_over(company, body, expected):
    inherited = f"class Base:\n{dedent_in(body)}\n\n@plugin()\nclass One(Base):\n    x: int = 1\n"
    tables = company(one=f"@plugin()\nclass One:\n{dedent_in(body)}\n", two=inherited)
    lines = refused(tables)
    assert len(lines) == 2
    for name, line in zip(("one", "two"), lines, strict=True):
        assert f"plugins.{name}: plugin '{name}': " in line and expected in line


def test_an_option_with_a_list_as_its_default_is_refused(company):
    body = "@plugin()\nclass One:\n    names: {} = {}\n"
    lists, tables = body.format("list[str]", "[]"), body.format("dict[str, int]", "{'a': 1}")
    lines = refused(company(one=lists, two=tables))
    for name, kind, line in zip(("one", "two"), ("list", "dict"), lines, strict=True):
        assert f"plugins.{name}: names: write field(default_factory={kind})" in line


def dedent_in(body):
    return "".join(f"    {line}\n" for line in body.splitlines())


def test_one_plugin_replaces_a_stage(company):
    tables = company(one=ANSWERS, two=ANSWERS, three=WRAPS.format(contract=""))
    (line,) = refused(tables)
    assert "plugins.two: answers 'load_batches', and so does 'one': remove one, or" in line
    assert "--without" in line
    assert [*resolve(tables, ["one"])[1].plugins] == ["three", "two"]


def test_an_inherited_answer_counts(company):
    inherits = (
        ANSWERS.replace("@plugin()\n", "") + "\n@plugin()\nclass Two(Answers):\n    x: int = 1"
    )
    (line,) = refused(company(one=ANSWERS, two=inherits))
    assert "plugins.two: answers 'load_batches', and so does 'one'" in line


def test_requires_and_conflicts_have_reasons(company):
    tables = company(
        one=WRAPS.format(contract="requires=['three']"),
        two=WRAPS.format(contract="conflicts={'one': 'both pack rows'}"),
        three=ANSWERS,
    )
    assert refused(tables) == [
        "recipe: plugins.two: cannot be used with 'one': both pack rows. Remove one."
    ]
    lines = refused(tables, ["three"])
    assert "recipe: plugins.one: requires 'three': add [plugins.three]" in lines


def test_a_circle_is_named(company):
    tables = company(
        one=WRAPS.format(contract="after=['two']"),
        two=WRAPS.format(contract="after=['three']"),
        three=WRAPS.format(contract="after=['one']"),
    )
    with pytest.raises(PluginError, match="cannot be ordered") as caught:
        resolve(tables)
    # "one" comes after "two", so "two" comes before "one".
    circle = "three before two before one before three before two before one"
    assert str(caught.value).split(": ")[1].partition(";")[0] in circle


def test_before_puts_a_plugin_inside_another(company):
    tables = company(
        one=WRAPS.format(contract="before=['absent']"),
        two=WRAPS.format(contract="before=['one']"),
        zero=WRAPS.format(contract="before=['two'], after=['absent']"),
    )
    assert list(resolve(tables)[1].plugins) == ["zero", "two", "one"]
    assert list(resolve(tables, ["two"])[1].plugins) == ["one", "zero"]


@pytest.mark.parametrize(
    "contracts", [("before=['two']", "before=['one']"), ("before=['two'], after=['two']", "")]
)
def test_after_and_before_that_contradict_are_a_message_to_the_user(company, tmp_path, contracts):
    sources = [WRAPS.format(contract=contract) for contract in contracts]
    tables = company(**dict(zip(("one", "two"), sources, strict=True)))
    result = run_plugsft("check", write_recipe(tmp_path / "recipe.toml", tables))
    assert result.returncode == 2
    [line] = result.stderr.splitlines()
    assert line.startswith("error: plugins cannot be ordered, as their `after` and `before` say: ")
    assert "one before two before one" in line or "two before one before two" in line


def test_order_comes_from_after_and_names_never_from_the_recipe(company):
    rng = random.Random(0)
    names = [f"p{number}" for number in range(6)]
    # Any graph without circles: each may come after those that stand before it in some order.
    ranks = rng.sample(names, len(names))
    after = {
        name: [other for other in ranks[:place] if rng.random() < 0.4]
        for place, name in enumerate(ranks)
    }
    tables = company(**{name: WRAPS.format(contract=f"after={after[name]!r}") for name in names})
    seen = set()
    for shuffle in itertools.islice(itertools.permutations(names), 0, 720, 45):
        tables["plugins"] = {name: {} for name in shuffle}
        active = resolve(tables)[1].attach(DataDefaults(None))
        wraps = {hook: wraps for hook, _, _, wraps in describe_hooks(active)}
        assert list(active.plugins) == wraps["load_batches"]
        seen.add(tuple(active.plugins))
    (only,) = seen
    assert all(only.index(first) < only.index(name) for name in names for first in after[name])
    assert list(only) == order({name: active.plugins[name] for name in reversed(names)})


def test_a_later_plugin_wraps_an_earlier_one(company):
    body = """
@plugin({contract})
class Wraps:
    @hookimpl(wrapper=True)
    def cache(self, key):
        key["seen"].append("{name} in")
        result = yield
        key["seen"].append("{name} out")
        return result
"""
    tables = company(
        inner=body.format(name="inner", contract="after=['answer']"),
        answer="""
            @plugin()
            class Answer:
                @hookimpl
                def cache(self, key):
                    key["seen"].append("answer")
                    return "here"
        """,
        a_outer=body.format(name="outer", contract="after=['inner']"),
    )
    active = resolve(tables)[1].attach(DataDefaults(None))
    key = {"seen": []}
    assert active.hooks.cache(key=key, build=None, read=None) == "here"
    assert key["seen"] == ["outer in", "inner in", "answer", "inner out", "outer out"]
    described = {hook: rest for hook, *rest in describe_hooks(active)}
    assert described["cache"] == [True, ["answer", "core"], ["inner", "a_outer"]]
    assert described["logged"] == [False, [], []]


CHECKED = ("tokenize", "render", "encode", "optimize_model", "optimizer", "schedule", "add_columns")
CHECKED += ("plan_batches", "load_batches", "collate", "step", "token_nll")


@pytest.mark.parametrize("hook", [*CHECKED, "add_metrics", "state_dict", "summary"])
def test_a_result_of_another_type_is_refused_with_its_plugin(hook):
    class Wrong:
        pass

    def answer(self):
        return object()

    def wrap(self):
        yield
        return object()

    setattr(Wrong, hook, hookimpl(answer))
    with pytest.raises(PluginError) as caught:
        getattr(guarded(Wrong(), "wrong"), hook)()
    says = f"'{hook}' gave a value of type object; it must give "
    assert f"plugin 'wrong': its answer to {says}" in str(caught.value)
    if hook not in CHECKED:
        return
    setattr(Wrong, hook, hookimpl(wrapper=True)(wrap))
    wrapper = getattr(guarded(Wrong(), "wrong"), hook)()
    next(wrapper)
    with pytest.raises(PluginError) as caught:
        wrapper.send(5)
    assert f"plugin 'wrong': its wrapper of {says}" in str(caught.value)


NO_WORK = SimpleNamespace(progress=lambda slices: nullcontext(print))
"""The work of no slices."""


def wrapping(body):
    lines = dedent_in(dedent_in(dedent(body)))
    return f"@plugin()\nclass Wraps:\n    @hookimpl(wrapper=True)\n    def tokenize(self):\n{lines}"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("result = yield", "its wrapper of 'tokenize' returned nothing; end it with: return"),
        ("return 3\nyield", "its wrapper of 'tokenize' returned before its yield"),
        ("yield\nyield\nreturn 3", "its wrapper of 'tokenize' yields twice"),
    ],
)
def test_a_wrapper_that_breaks_its_contract_is_named(company, body, expected, tmp_path):
    active = resolve(company(one=wrapping(body)))[1].attach(DataDefaults(tmp_path))
    with pytest.raises(PluginError, match=expected) as caught:
        active.hooks.tokenize(slices=[], work=NO_WORK)
    assert "plugin 'one'" in str(caught.value)


def test_a_wrapper_may_return_none_where_no_plugin_answers(company):
    source = wrapping("return (yield)").replace("tokenize", "render")
    active = resolve(company(one=source))[1].attach(DataDefaults(None))
    assert active.hooks.render(rows=[{"x": 1}], tokenizer=None, data=Ours()) is None


def test_a_stage_that_returns_none_is_refused_where_an_answer_is_needed(company, tmp_path):
    answer = "@plugin()\nclass Answers:\n    @hookimpl\n    def {hook}(self):\n        pass\n"
    active = resolve(company(one=answer.format(hook="plan_batches")))[1].attach(
        DataDefaults(tmp_path)
    )
    with pytest.raises(PluginError, match="plugin 'one': its answer to 'plan_batches' is None"):
        active.hooks.plan_batches(order=None, lengths=None, columns={}, ranks=1, train=None)
    active = resolve(company(two=answer.format(hook="tokenize")))[1].attach(DataDefaults(tmp_path))
    assert active.hooks.tokenize(slices=[], work=NO_WORK) == []


class Ours:
    columns = ignore = _lead_row = {}  # noqa: RUF012  # a stand-in


def test_a_wrapper_sees_and_may_mend_what_was_raised(company):
    body = """
        try:
            yield
        except ZeroDivisionError:
            return ["replaced"]
    """

    class Core:
        @hookimpl
        def tokenize(self):
            return 1 / 0

    active = resolve(company(one=wrapping(body)))[1].attach(Core())
    assert active.hooks.tokenize(slices=[], work=NO_WORK) == ["replaced"]
    active = resolve(company(two=wrapping("return (yield)")))[1].attach(Core())
    with pytest.raises(ZeroDivisionError):
        active.hooks.tokenize(slices=[], work=NO_WORK)


def test_check_reports_every_objection(company):
    objects = """
        @plugin()
        class Objects:
            @hookimpl
            def check(self, recipe, machine):
                raise RecipeError([f"epochs {recipe.train.epochs}", f"ranks {machine.world_size}"])
    """
    recipe, active = resolve(company(one=objects, two=objects))
    with pytest.raises(RecipeError) as caught:
        check(active.attach(), recipe, look())
    assert sorted(caught.value.problems) == [
        "plugins.one: epochs 1",
        "plugins.one: ranks 1",
        "plugins.two: epochs 1",
        "plugins.two: ranks 1",
    ]


def test_summaries(company):
    speaks = """
        @plugin()
        class Speaks:
            count: int = state(0)

            @hookimpl
            def summary(self):
                return f"{self.count} modules patched"
    """
    _, active = resolve(company(one=speaks, two=WRAPS.format(contract="")))
    active.plugins["one"].count = 49
    assert active.attach().summaries() == {"one": "49 modules patched", "two": "active"}


def test_a_plugin_s_source_is_part_of_what_it_makes(company):
    _, active = resolve(company(one=ANSWERS, two=WRAPS.format(contract="")))
    assert active.source_digest("one") != active.source_digest("two")
    assert active.implements("one", ["render", "load_batches"]) and not active.implements(
        "one", ["render"]
    )


def test_every_file_of_a_plugins_package_is_part_of_its_source(tmp_path, monkeypatch):
    site = install(tmp_path / "site", loud=LOUD)
    (module,) = site.glob("*.py")
    package = site / module.stem
    package.mkdir()
    module.rename(package / "__init__.py")
    words = package / "inner" / "words.py"
    words.parent.mkdir()
    words.write_text("MARK = 1\n")
    activate(site, monkeypatch)
    _, active = resolve(tiny_tables(tmp_path) | {"plugins": {"loud": {}}})
    before = active.source_digest("loud")
    assert before == active.source_digest("loud")
    words.write_text("MARK = 2\n")
    assert active.source_digest("loud") != before


def test_the_order_of_hooks_in_a_run(company, tmp_path):
    tables = company(
        listen="""
            @plugin()
            class Listen:
                @hookimpl
                def logged(self, step, metrics): ...
        """
    )
    tables["train"] |= {"steps": 2}
    tables["eval"] = {"every": 2, "split": "train[:8]"}
    result = must_succeed(
        write_recipe(tmp_path / "recipe.toml", tables), env={"PLUGSFT_TRACE": "1"}
    )
    began = [
        line
        for line in result.stderr.splitlines()
        if line.endswith(" [hook]") and "-->" not in line
    ]
    assert [line.removeprefix("  ").removesuffix(" [hook]") for line in began] == [
        "render",  # for the tokenizer's training
        *["cache", "  tokenize", "    render", "    encode"] * 2,
        "optimize_model",
        "optimizer",
        *["add_columns"] * 2,  # what is trained on, and what is evaluated
        "order_examples",
        "plan_batches",
        "schedule",
        "load_batches",
        *["collate"] * 2,
        *["step", "  token_nll"] * 2,
        *["collate"] * 2,
        *["step", "  token_nll"] * 2,
        "use_weights",  # to evaluate
        "  plan_batches",
        "  load_batches",
        *["  collate"] * 2,
        *["  step", "    token_nll"] * 2,
        "use_weights",  # to save the model
    ]
    assert read_record(tmp_path / "run")["status"] == "completed"


def test_tracing_is_off_unless_asked_for(company, monkeypatch, capsys, tmp_path):
    tables = company(one=ANSWERS)
    monkeypatch.delenv("PLUGSFT_TRACE", raising=False)
    resolve(tables)[1].attach().hooks.load_batches(build=str, steps=range(2))
    assert not capsys.readouterr().err
    monkeypatch.setenv("PLUGSFT_TRACE", "1")
    resolve(tables)[1].attach().hooks.load_batches(build=str, steps=range(2))
    assert "finish load_batches --> <map object" in capsys.readouterr().err


def test_hooks_are_stages_or_notices():
    stages = {hook for hook, is_stage, _, _ in describe_hooks(Active({}, {})) if is_stage}
    assert {hook for hook, *_ in describe_hooks(Active({}, {}))} - stages == {
        "check",
        "add_metrics",
        "ready",
        "stepped",
        "logged",
        "saved",
        "finished",
        "state_dict",
        "load_state_dict",
        "summary",
    }
    assert all(hasattr(Hooks, hook) for hook in stages)


def test_a_run_without_a_plugin_it_names_says_where(company, tmp_path):
    tables = company(one=ANSWERS)
    path = write_recipe(tmp_path / "recipe.toml", tables)
    assert load(path, without=["one"])[0].plugins == {}
    tables["plugins"]["one"]["depth"] = 3
    write_recipe(path, tables)
    with pytest.raises(RecipeError, match=rf"{path}: plugins\.one\.depth: unknown key"):
        load(path)


def test_a_plugin_that_names_itself_is_named_once(company):
    words = ["plugins.one.depth: too deep", "plugins.one: too wide", "too long"]
    objects = f"""
        @plugin()
        class Objects:
            @hookimpl
            def check(self):
                raise RecipeError({words})
    """
    recipe, active = resolve(company(one=objects))
    with pytest.raises(RecipeError) as caught:
        check(active.attach(), recipe, look())
    assert caught.value.problems == [*words[:2], "plugins.one: too long"]


BREAKS = """
@plugin()
class Breaks:
    fails: bool = False

    @hookimpl(wrapper=True)
    def load_batches(self):
        1 / (not self.fails)
        return (yield)
"""


def test_an_unforeseen_error_names_the_plugin_and_the_hook_it_came_from(company):
    class Core:
        @hookimpl
        def load_batches(self, build, steps):
            return build(steps)

    tables = company(one=BREAKS, two=BREAKS)
    # Both wrap; the inner one, the core, or what the core calls, goes wrong.
    for fails, build, notes in (
        (True, len, ["raised by plugin 'one', in its hook 'load_batches'"]),
        (False, lambda steps: 1 / 0, []),
        (False, None, []),
    ):
        tables["plugins"]["one"]["fails"] = fails
        active = resolve(tables)[1].attach(Core())
        with pytest.raises((ZeroDivisionError, TypeError)) as caught:
            active.hooks.load_batches(build=build, steps=range(2))
        assert getattr(caught.value, "__notes__", []) == notes


COUNTS = """
@plugin()
class Counts:
    seen: int = state(0)

    @hookimpl
    def logged(self, run, step, metrics):
        self.seen += 1
        if step == {raises} and run.ranks.rank == {rank}:
            raise ConnectionError("the tracker is gone")

    @hookimpl
    def summary(self):
        return f"{{self.seen}} lines heard" if self.seen else None
"""


def test_the_last_summary_reaches_the_console_and_the_first_pretends_nothing(company, tmp_path):
    static = (
        "@plugin()\nclass Static:\n    @hookimpl\n    def summary(self):\n        return 'on'\n"
    )
    tables = company(counts=COUNTS.format(raises=0, rank=0), static=static)
    tables["train"] |= {"steps": 2}
    result = must_succeed(write_recipe(tmp_path / "recipe.toml", tables))
    said = [line for line in result.stdout.splitlines() if line.startswith(("plugin ", "step "))]
    assert [line.partition("  ")[0] for line in said] == [
        *["plugin counts: active", "plugin static: on", "step 1/2", "step 2/2"],
        "plugin counts: 2 lines heard",
    ]


@pytest.mark.parametrize(("step", "rank"), [(2, 0), (5, 1)])
def test_a_notice_that_fails_ends_every_rank_with_everything_saved(company, tmp_path, step, rank):
    tables = company(counts=COUNTS.format(raises=step, rank=rank))
    tables["train"] |= {"steps": 5}
    path = write_recipe(tmp_path / "recipe.toml", tables)
    ended = [rank.wait() for rank in start_ranks(2, path)]
    failed, other = ended[rank], ended[1 - rank]
    assert "ConnectionError: the tracker is gone" in failed.stderr
    assert failed.stderr.splitlines()[-1] == "raised by plugin 'counts', in its hook 'logged'"
    assert "Traceback" not in other.stderr and [failed.returncode, other.returncode] == [1, 1]
    assert (tmp_path / f"run/checkpoints/step-{step:06d}/manifest.json").is_file()
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [*range(1, step + 1)]
    record = read_record(tmp_path / "run")
    assert record["status"] == "failed" and "plugin 'counts'" in record["reason"]
    assert not (tmp_path / "run/model").exists()
