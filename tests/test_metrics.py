"""Metrics by name: declared by plugins, so that recipes name only those that a run will have."""

import json
import re
from types import SimpleNamespace

import pytest
from conftest import chats, must_succeed, read_metrics, read_record, run_plugsft, start_ranks
from plugin_packages import activate, install, tables_with

from plugsft.base.errors import PluginError, RecipeError
from plugsft.base.machine import look
from plugsft.registry.load import load, resolve
from plugsft.registry.metrics import METRICS
from plugsft.start.checks import Case, check_metrics

MEASURES = """
    import torch

    def names(plugin, recipe):
        return [plugin.metric, f"own_{plugin.number}", "third"][: plugin.most]

    @plugin(metrics=names)
    class Measures:
        metric: str = "sharpness"
        number: int = 1
        most: int = 2
        gives: str = ""

        @hookimpl
        def add_metrics(self):
            names = [self.gives or self.metric, f"own_{self.number}"]
            return dict.fromkeys(names, torch.ones(()))
"""
WATCHES = """
    @plugin(watches=["metric"])
    class Watches:
        metric: str | None = None
"""
EVAL = {"every": 2, "split": "train[:8]"}


@pytest.fixture
def company(tiny, tmp_path, monkeypatch):
    activate(install(tmp_path, one=MEASURES, two=MEASURES, three=WATCHES), monkeypatch)
    plugins = {"one": {}, "two": {"metric": "x", "number": 2}, "three": {}}
    return tiny(train={"steps": 2}, eval=EVAL, plugins=plugins)


def test_the_core_s_metrics_are_those_that_a_run_logs(company, tmp_path):
    done = must_succeed(company)
    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    *_, trained, evaluated = (line.keys() for line in lines)
    own = {"own_1", "own_2", "sharpness", "x"}
    assert own < trained and trained - own <= METRICS
    assert evaluated - {"step", "eval_loss", "eval_tokens"} == {f"eval_{name}" for name in own}
    for line in re.findall(r"^step .* loss .*", done.stdout, re.M):
        assert re.search(
            r"loss [\d.]+  sharpness [\d.]+  own_1 [\d.]+  x [\d.]+  own_2 ", line + " "
        )


@pytest.mark.parametrize("metric", [*sorted(METRICS), "eval_loss", "eval_x", "sharpness"])
def test_a_name_that_is_taken_is_refused_with_its_owners(company, metric):
    owner = {"sharpness": "of plugin 'one'"}.get(metric, "a metric of plugsft|evaluation")
    with pytest.raises(RecipeError, match=owner) as caught:
        load(company, [f"plugins.two.metric={metric}"])
    [problem] = caught.value.problems
    assert f"plugins.two: its metric '{metric}'" in problem


def test_a_plugin_may_measure_again_what_it_has_measured(company):
    recipe, active = load(company)
    run = SimpleNamespace(recipe=recipe)
    active.attach()
    assert active.metrics(run).keys() == active.metrics(run).keys() != set()


@pytest.mark.parametrize("name", ["sharpnes", "checksum", "loss"])
def test_a_metric_that_is_not_declared_ends_the_run_before_a_weight_has_moved(
    company, tmp_path, name
):
    result = run_plugsft(company, f"plugins.one.gives={name}")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    hint = "; did you mean 'sharpness'?" if name == "sharpnes" else ";"
    assert (
        f"plugin 'one': its metric '{name}' is not declared: name it in @plugin(metrics=[...])"
        f"{hint} declared are: sharpness, own_1"
    ) in result.stderr
    assert read_record(tmp_path / "run")["status"] == "failed"
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_metric_may_have_any_name_that_is_free(company, tmp_path):
    """Sums over ranks hold numbers of the core beside those of plugins."""
    must_succeed(company, "plugins.one.metric=checksum")
    assert all("checksum" in line for line in read_metrics(tmp_path / "run"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["checkpoint.keep_best=eval_los"],
            "checkpoint.keep_best: evaluations have no metric 'eval_los'; did you mean 'eval_loss'?"
            " they have: eval_loss, eval_tokens, eval_sharpness, eval_own_1, eval_x, eval_own_2",
        ),
        (["checkpoint.keep_best=sharpness"], "'sharpness'; did you mean 'eval_sharpness'?"),
        (
            ["checkpoint.keep_best=eval_mean_token_accuracy"],
            "no metric 'eval_mean_token_accuracy';",
        ),
        (["plugins.three.metric=los"], "plugins.three.metric: steps have no metric 'los'; did you"),
        (
            ["plugins.three.metric=eval_y"],
            "evaluations have no metric 'eval_y'; did you mean 'eval_x",
        ),
        (["plugins.three.metric=loss_scale"], "steps have no metric 'loss_scale'; did you"),
        (
            ["plugins.three.metric=eval_loss", "no eval"],
            "'eval_loss' comes from evaluations, and there",
        ),
        (
            ["checkpoint.keep_best=eval_loss", "no eval"],
            "checkpoint.keep_best: 'eval_loss' comes from",
        ),
        (["checkpoint.keep_best=eval_x", "checkpoint.best=highest"], ""),
        (["checkpoint.keep_best=eval_x"], "checkpoint.best: 'eval_x' is no loss; set the value"),
        (["plugins.three.metric=loss_scale", "model.dtype=float16"], ""),
        (["plugins.three.metric=own_2"], ""),
        (["plugins.three.metric=third", "plugins.two.most=3"], ""),
        (["plugins.three.metric=third"], "steps have no metric 'third'"),
    ],
)
def test_only_a_metric_that_will_exist_may_be_watched(company, words, says):
    recipe, active = load(company, [word for word in words if word != "no eval"])
    if "no eval" in words:
        recipe = recipe.model_copy(update={"eval": None})
    if not says:
        check_metrics(Case(recipe, active, look()))
        return
    with pytest.raises(RecipeError) as caught:
        check_metrics(Case(recipe, active, look()))
    [problem] = caught.value.problems
    assert says in problem


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("metrics='loss'", '@plugin(metrics="loss"): write a list: ["loss"]'),
        ("watches=['metric']", "@plugin(watches=...) names 'metric', which is no option"),
    ],
)
def test_a_wrong_declaration_is_refused(tmp_path, monkeypatch, arguments, says):
    wrong = f"""
        @plugin({arguments})
        class Wrong:
            pass
    """
    with pytest.raises(RecipeError) as caught:
        resolve(tables_with(tmp_path, monkeypatch, wrong=wrong))
    assert says in str(caught.value)


def test_a_function_of_names_that_fails_is_named(tmp_path, monkeypatch):
    wrong = """
        @plugin(metrics=lambda plugin, recipe: [plugin.nothing])
        class Wrong:
            pass
    """
    tables = tables_with(tmp_path, monkeypatch, wrong=wrong)
    with pytest.raises(AttributeError) as caught:
        resolve(tables)
    assert caught.value.__notes__ == ["raised by plugin 'wrong', in the metrics of its @plugin"]


def test_an_option_that_is_no_name_of_a_metric_is_not_watched(tmp_path, monkeypatch):
    wrong = """
        @plugin(watches=["every"])
        class Wrong:
            every: int = 5
    """
    recipe, active = resolve(tables_with(tmp_path, monkeypatch, wrong=wrong))
    with pytest.raises(RecipeError, match=r"plugins\.wrong\.every: steps have no metric '5'"):
        check_metrics(Case(recipe, active, look()))


@pytest.mark.parametrize("names", ["'x'", "None", "[5]"])
def test_names_of_a_function_that_are_no_names_are_refused(tmp_path, monkeypatch, names):
    wrong = f"""
        @plugin(metrics=lambda plugin, recipe: {names})
        class Wrong:
            pass
    """
    with pytest.raises(PluginError) as caught:
        resolve(tables_with(tmp_path, monkeypatch, wrong=wrong))
    assert "plugin 'wrong': metrics are " in str(caught.value)


DIVIDES = """
    import torch

    @plugin(metrics=["ones", "denominators", "right", "none"])
    class Divides:
        ones: float = state(0.0)
        denominators: list[float] = state([])

        @hookimpl(wrapper=True)
        def step(self, batch, denominator):
            self.ones += int((batch["labels"][:, 1:] != -100).sum())
            self.denominators.append(denominator)
            return (yield)

        @hookimpl
        def add_metrics(self, run):
            ones, self.ones = self.ones, 0.0
            [denominator] = {*self.denominators}
            self.denominators.clear()
            gives = {"ones": ones, "denominators": (denominator, 1), "none": (0, 0)}
            if not run.model.module.training:
                answers = run.model.generate(["Who?", "Why?"], max_tokens=2)
                gives["right"] = (torch.tensor(len(answers) - 1), len(answers))
            return gives
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_sums_are_divided_by_the_denominator_of_step_or_by_their_own_count(
    tiny, tmp_path, monkeypatch, ranks
):
    activate(install(tmp_path / "site", divides=DIVIDES), monkeypatch)
    recipe = tiny(
        rows=chats(24),
        train={"steps": 2, "batch_size": 8, "micro_batch": 2},
        eval=EVAL,
        checkpoint={"keep_best": "eval_right", "best": "highest"},
        plugins={"divides": {}},
    )
    for ended in [process.wait() for process in start_ranks(ranks, recipe)]:
        assert ended.returncode == 0, ended.stderr
    *steps, evaluation = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert len(steps) == 2
    for line in steps:
        assert line["ones"] == 1 and line["denominators"] == line["trained_tokens"]
        assert line["none"] is None and "right" not in line
    assert evaluation["eval_ones"] == 1 and evaluation["eval_right"] == 0.5
    assert evaluation["eval_denominators"] == evaluation["eval_tokens"]
    assert read_record(tmp_path / "run")["best"] == {"step": 2, "eval_right": 0.5}
