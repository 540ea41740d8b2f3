"""Learning rates equal those of transformers at every step, without state."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import must_succeed, read_metrics, run_plugsft, run_ranks
from plugin_packages import activate, install
from transformers import TrainingArguments, get_scheduler

from plugsft.base.errors import PluginError, RecipeError
from plugsft.commands.recipes import check
from plugsft.lab.trials import trials
from plugsft.model.schedule import Schedule, schedule_factor, warmup_steps
from plugsft.recipe.tables import Train
from plugsft.registry.load import load
from plugsft.start.checks import check_schedule


def optimizer():
    one, other = torch.zeros(1), torch.zeros(1)
    return torch.optim.SGD([{"params": [one]}, {"params": [other], "lr": 0.25}], lr=0.5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("constant", {}),
        ("constant_with_warmup", {}),
        ("linear", {}),
        ("cosine", {}),
        ("cosine_with_restarts", {"num_cycles": 2}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("polynomial", {"power": 2.0}),
        ("inverse_sqrt", {}),
        ("cosine_with_min_lr", {"min_lr": 0.2, "num_cycles": 1.5}),
        ("polynomial", {"lr_end": 0.1}),
        ("inverse_sqrt", {"timescale": 7}),
        ("warmup_stable_decay", {"num_decay_steps": 5}),
        *(
            (
                "warmup_stable_decay",
                {"num_decay_steps": 6, "num_stable_steps": 7, "min_lr_ratio": 0.1}
                | {"warmup_type": rise, "decay_type": fall},
            )
            for rise, fall in (("cosine", "linear"), ("1-sqrt", "1-sqrt"))
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Both num_training_steps and num_stable_steps")
def test_each_schedule_is_that_of_transformers_in_any_order_of_steps(name, options):
    train = Train(
        batch_size=1, learning_rate=0.5, schedule=name, schedule_options=options, warmup=0.2
    )
    theirs_on = optimizer()
    theirs = get_scheduler(
        name,
        theirs_on,
        num_warmup_steps=4,
        num_training_steps=20,
        scheduler_specific_kwargs=options,
    )
    expected = []
    for _ in range(20):
        expected.append([group["lr"] for group in theirs_on.param_groups])
        theirs_on.step()
        theirs.step()
    ours_on = optimizer()
    ours = Schedule(schedule_factor(train, 20), ours_on, 20)
    for step in [*range(20, 0, -1), 7]:
        rate = ours.set(step)
        found = [group["lr"] for group in ours_on.param_groups]
        assert found == expected[step - 1] and rate == found[0], step


@pytest.mark.parametrize(
    ("warmup", "total"),
    [(0.1, 23), (0.03, 7), (0.07, 100), (0.5, 1), (0.999, 13), (1.0, 9), (2.0, 9), (0.0, 5)],
)
def test_a_share_of_warm_up_steps_is_rounded_as_transformers_trainer_does(warmup, total):
    theirs = TrainingArguments(output_dir="none", warmup_steps=warmup).get_warmup_steps(total)
    train = Train(batch_size=1, learning_rate=0.5, warmup=warmup)
    assert warmup_steps(train, total) == theirs
    factor = schedule_factor(train, total)
    rates = [factor(step) for step in range(total)]
    assert rates.index(max(rates)) == min(theirs, total - 1)


def test_warmup_is_a_share_below_1_and_a_number_of_steps_above():
    for warmup in (0.5, 10.0):
        on = optimizer()
        train = Train(batch_size=1, learning_rate=0.5, warmup=warmup)
        schedule = Schedule(schedule_factor(train, 20), on, 20)
        assert schedule.set(6) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("linear", {"foo": 1}, "foo: the schedule 'linear' has no such option; it has: none"),
        ("cosine", {"num_cycle": 2}, "no such option; did you mean 'num_cycles'? it has: num_"),
        ("cosine", {"num_cycles": "x"}, "num_cycles: the schedule 'cosine': given 'x'; Input sho"),
        ("cosine_with_min_lr", {}, "'cosine_with_min_lr' needs either min_lr or min_lr_rate"),
        ("warmup_stable_decay", {}, "num_decay_steps: the schedule 'warmup_stable_decay' needs it"),
        ("warmup_stable_decay", {"num_decay_steps": 2, "decay_type": "sqrt"}, "given 'sqrt'"),
        ("polynomial", {"lr_end": 0.5}, "needs lr_end < train.learning_rate; lr_end is 0.5"),
        ("cosine_with_min_lr", {"min_lr_rate": 9e18}, "needs a smallest learning rate that is no"),
        ("cosine_with_min_lr", {"min_lr": 0.6}, "needs a smallest learning rate that is no more"),
        ("warmup_stable_decay", {"num_decay_steps": 2, "min_lr_ratio": 2.0}, "given 2.0; Input"),
        ("inverse_sqrt", {"timescale": 0}, "timescale: the schedule 'inverse_sqrt': given 0;"),
    ],
)
def test_options_that_a_schedule_does_not_take_are_refused(name, options, says):
    train = Train(batch_size=1, learning_rate=0.5, schedule=name, schedule_options=options)
    with pytest.raises(RecipeError, match=r"train\.schedule_options.*" + re.escape(says)):
        check_schedule(SimpleNamespace(recipe=SimpleNamespace(train=train)))


def test_a_warm_up_that_a_schedule_would_ignore_is_refused():
    train = Train(batch_size=1, learning_rate=0.5, schedule="constant", warmup=0.1)
    with pytest.raises(RecipeError, match=r"train\.warmup: given 0\.1.*constant_with_warmup"):
        check_schedule(SimpleNamespace(recipe=SimpleNamespace(train=train)))


def test_a_run_warns_of_a_warm_up_that_takes_all_of_it(tiny):
    result = run_plugsft(tiny(), "train.steps=2", "train.warmup=3")
    assert "warning: the warm-up takes 3 of 2 steps" in result.stdout
    refused = run_plugsft("check", tiny(), "train.warmup=1e308")
    assert refused.returncode == 2 and "train.warmup: given 1e+308" in refused.stderr


def test_training_refuses_them_before_it_starts(tiny, tmp_path):
    result = run_plugsft(tiny(), "train.schedule_options={foo=1}")
    assert result.returncode == 2 and "train.schedule_options" in result.stderr
    assert "data:" not in result.stdout


HALVES = """
    @plugin(affects_results=["every"])
    class Halves:
        every: int
        wrong: bool = False

        @hookimpl
        def schedule(self, steps):
            def factor(step):
                return float("nan") if self.wrong and step == 2 else 0.5 ** (step // self.every)

            return factor
"""


def test_a_plugin_s_schedule_sets_the_rate_that_is_logged(tiny, tmp_path, monkeypatch, capsys):
    activate(install(tmp_path / "site", halves=HALVES), monkeypatch)
    train = {"steps": 6, "learning_rate": 1e-2}
    recipe = tiny(train=train, checkpoint={"every": 3}, plugins={"halves": {"every": 2}})
    done = run_plugsft(recipe)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    lines = read_metrics(run)
    assert [line["learning_rate"] for line in lines] == [
        1e-2 * 0.5 ** (step // 2) for step in range(6)
    ]
    # Resumed in the middle, it goes on with the rate of its step.
    again = tmp_path / "again"
    done = run_plugsft(recipe, f"output={again}", "--resume-from", run / "checkpoints/step-000003")
    assert done.returncode == 0, done.stderr
    resumed = {line["step"]: (line["loss"], line["learning_rate"]) for line in read_metrics(again)}
    assert resumed == {
        line["step"]: (line["loss"], line["learning_rate"]) for line in lines if line["step"] > 3
    }
    wrong = run_plugsft(recipe, "plugins.halves.wrong=true", "--overwrite")
    assert wrong.returncode == 2 and "'schedule' gave nan for step 3" in wrong.stderr
    # Before step 1, so that the finished run stays; `check` finds it, too.
    assert read_metrics(run) == lines
    with pytest.raises(RecipeError, match=r"'schedule' gave nan for step 3"):
        check(recipe, ["plugins.halves.wrong=true"], [], None)
    capsys.readouterr()
    check(recipe, [f"output={tmp_path}/new"], [], None)
    assert "schedule    halves, peak 0.01" in capsys.readouterr().out
    with trials(*load(recipe)) as runner:  # as `bench` and `tune` train
        trial = runner.run({}, steps=4)
    assert trial.of("learning_rate") == [1e-2, 1e-2, 5e-3, 5e-3]


def test_a_rate_that_changes_within_a_run_may_be_given_at_a_resume(tiny, tmp_path):
    recipe = tiny(train={"steps": 6, "learning_rate": 1e-2}, checkpoint={"every": 2, "keep": 9})
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    lower = "train.learning_rate_after.4=2e-3"
    must_succeed(recipe, f"output={whole}", lower)
    rates = [1e-2 * (6 - step) / 6 * (0.2 if step >= 4 else 1) for step in range(6)]
    assert [line["learning_rate"] for line in read_metrics(whole)] == pytest.approx(rates)
    must_succeed(recipe, f"output={parts}")
    words = recipe, f"output={parts}", "--resume-from", parts / "checkpoints/step-000004"
    refused = run_plugsft(*words, "train.learning_rate=0.002").stderr
    assert "(the steps that are left take train.learning_rate_after.4=0.002)" in refused
    assert "after.3 was not set and is 0.002" in run_plugsft(*words, lower.replace("4", "3")).stderr
    assert (
        "after.6: no learning rate follows" in run_plugsft(*words, lower.replace("4", "6")).stderr
    )
    must_succeed(*words, lower)
    losses = [[line["loss"] for line in read_metrics(run)] for run in (whole, parts)]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    refused = run_plugsft(recipe, f"output={parts}", "--resume")
    assert "train.learning_rate_after.4 was 0.002 and is not set" in refused.stderr


SLOWER = """
    @plugin()
    class Slower:
        @hookimpl(wrapper=True)
        def schedule(self):
            factor = yield
            return lambda step: factor(step) / 2
"""


def test_the_recipe_s_schedule_may_be_wrapped(tiny, tmp_path, monkeypatch, capsys):
    activate(install(tmp_path / "site", slower=SLOWER), monkeypatch)
    recipe = tiny(train={"steps": 4, "learning_rate": 1e-2}, plugins={"slower": {}})
    done = run_ranks(2, recipe)
    assert done.returncode == 0, done.stderr
    rates = [line["learning_rate"] for line in read_metrics(tmp_path / "run")]
    assert rates == pytest.approx([5e-3, 3.75e-3, 2.5e-3, 1.25e-3])
    check(recipe, [f"output={tmp_path}/new"], [], None)
    assert "schedule    slower, peak 0.01" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("factor", "message"),
    [
        (lambda step: -0.1, "'schedule' gave -0.1 for step 1; it returns a share of the peak"),
        (lambda step: None if step else 1, "'schedule' gave None for step 2; it returns a share"),
        (lambda step: 1 / (3 - step) if step < 3 else math.inf, "'schedule' gave inf for step 4"),
    ],
    ids=["negative", "nothing", "infinite"],
)
def test_a_schedule_that_is_none_is_refused(factor, message):
    with pytest.raises(PluginError, match=re.escape(message)):
        Schedule(factor, optimizer(), 4)


def test_any_type_of_number_is_a_factor():
    on = optimizer()
    assert Schedule(np.float32, on, 4).set(4) == 1.5
    assert [type(group["lr"]) for group in on.param_groups] == [float, float]
