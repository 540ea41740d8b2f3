"""Learning rates equal those of transformers at every step, without state."""

import json
import math
import re

import numpy as np
import pytest
import torch
from conftest import read_metrics, run_plugsft, run_ranks
from plugin_packages import activate, install
from transformers import TrainingArguments, get_scheduler

from plugsft.base.errors import CheckpointError, PluginError, RecipeError
from plugsft.checkpoint.same_run import FORMAT, ensure_same_run, keys_affecting_results
from plugsft.commands.recipes import check
from plugsft.lab.trials import trials
from plugsft.model.schedule import Schedule, ScheduleDefaults, factors_of, without_peak
from plugsft.recipe.tables import Train
from plugsft.registry.load import load


def optimizer():
    one, other = torch.zeros(1), torch.zeros(1)
    return torch.optim.SGD([{"params": [one]}, {"params": [other], "lr": 0.25}], lr=0.5)


def factor_of(total, **keys):
    train = Train(batch_size=1, learning_rate=0.5, **keys)
    return ScheduleDefaults().schedule(train, total)


@pytest.mark.parametrize("warmup", [0.2, 0.0])
@pytest.mark.parametrize(
    ("keys", "name", "options"),
    [
        ({"schedule": "constant"}, "constant_with_warmup", {}),
        ({"schedule": "linear"}, "linear", {}),
        ({"schedule": "cosine"}, "cosine", {}),
        ({"schedule": "cosine", "final_rate": 0.1}, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ({"schedule": "wsd", "decay": 5}, "warmup_stable_decay", {"num_decay_steps": 5}),
        (
            {"schedule": "wsd", "decay": 0.31, "final_rate": 0.3},
            "warmup_stable_decay",
            {"num_decay_steps": 7, "min_lr_ratio": 0.3},
        ),
        (  # without a stable part
            {"schedule": "wsd", "decay": 0.8},
            "warmup_stable_decay",
            {"num_decay_steps": 16},
        ),
    ],
)
def test_each_schedule_is_that_of_transformers_in_any_order_of_steps(keys, name, options, warmup):
    if name == "warmup_stable_decay":
        options = {**options, "decay_type": "linear"}
    theirs_on = optimizer()
    theirs = get_scheduler(name, theirs_on, round(warmup * 20), 20, options)
    expected = []
    for _ in range(20):
        expected.append([group["lr"] for group in theirs_on.param_groups])
        theirs_on.step()
        theirs.step()
    ours_on = optimizer()
    ours = Schedule(factors_of(factor_of(20, warmup=warmup, **keys), 20), ours_on)
    for step in [*range(20, 0, -1), 7]:
        rate = ours.set(step)
        found = [group["lr"] for group in ours_on.param_groups]
        if name in ("warmup_stable_decay", "cosine_with_min_lr"):
            assert found == pytest.approx(expected[step - 1], rel=0, abs=1e-12), step
        else:
            assert found == expected[step - 1], step
        assert rate == found[0]


def test_a_linear_schedule_may_end_above_0():
    factor = factor_of(10, schedule="linear", warmup=2, final_rate=0.2)
    assert [factor(step) for step in (0, 1, 2, 6)] == pytest.approx([0.0, 0.5, 1.0, 0.6])
    assert factor(9) == pytest.approx(0.3) and factor(10) == 0.2


@pytest.mark.parametrize(
    ("warmup", "total"),
    [(0.1, 23), (0.03, 7), (0.07, 100), (0.5, 1), (0.999, 13), (1.0, 9), (2.0, 9), (0.0, 5)],
)
def test_a_share_of_warm_up_steps_is_rounded_as_transformers_trainer_does(warmup, total):
    theirs = TrainingArguments(output_dir="none", warmup_steps=warmup).get_warmup_steps(total)
    assert Train.steps_of(warmup, total) == theirs
    factor = factor_of(total, warmup=warmup)
    rates = [factor(step) for step in range(total)]
    assert rates.index(max(rates)) == min(theirs, total - 1)


def test_warmup_is_a_share_below_1_and_a_number_of_steps_above():
    for warmup in (0.5, 10.0):
        schedule = Schedule(factors_of(factor_of(20, warmup=warmup), 20), optimizer())
        assert schedule.set(6) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("keys", "steps", "says"),
    [
        ({"warmup": 3}, 2, "none of the 2 steps reaches train.learning_rate; lower train.warmup"),
        ({"warmup": 3}, 3, "none of the 3 steps reaches train.learning_rate; lower train.warmup"),
        ({"warmup": 3}, 4, ""),
        ({"schedule": "wsd", "warmup": 3, "decay": 7}, 9, "lower train.warmup or train.decay"),
        ({"schedule": "wsd", "warmup": 0.3, "decay": 7}, 10, ""),
        ({"schedule": "wsd", "warmup": 0.6, "decay": 0.6}, 100, "none of the 100 steps reaches"),
    ],
)
def test_a_run_without_a_step_at_the_peak_is_warned_of(keys, steps, says):
    train = Train(batch_size=1, learning_rate=0.5, **keys)
    found = without_peak(train, steps)
    assert says in found and bool(says) == bool(found)
    factor = ScheduleDefaults().schedule(train, steps)
    assert (max(map(factor, range(steps))) < 1) == bool(says)


def test_a_run_and_check_warn_of_a_warm_up_and_a_decay_that_take_all_of_it(tiny):
    keys = "train.schedule=wsd", "train.decay=2", "train.warmup=2"
    result = run_plugsft(tiny(), "train.steps=3", *keys)
    says = "none of the 3 steps reaches train.learning_rate; lower train.warmup or train.decay"
    assert f"warning: {says}" in result.stdout
    assert says in run_plugsft("check", tiny(), "train.steps=3", *keys).stdout
    refused = run_plugsft("check", tiny(), "train.warmup=1e308")
    assert refused.returncode == 2 and "train.warmup: given 1e+308" in refused.stderr


def test_a_checkpoint_from_before_the_keys_were_typed_is_resumed(tiny, tmp_path):
    recipe, active = load(tiny())
    keys = keys_affecting_results(recipe, active)
    old = {"train.schedule_options": {}, "train.learning_rate_after": {}}
    state = {"format": FORMAT, "step": 2, "recipe": keys | old}
    (tmp_path / "state.json").write_text(json.dumps(state))
    ensure_same_run(tmp_path, recipe, active)
    state["recipe"]["train.schedule_options.num_cycles"] = 2
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=r"schedule_options\.num_cycles was 2 and is not set"):
        ensure_same_run(tmp_path, recipe, active)


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
    said = "'schedule' of plugin 'halves' gave nan for step 3"
    assert wrong.returncode == 2 and said in wrong.stderr
    # Before step 1, so that the finished run stays; `check` finds it, too.
    assert read_metrics(run) == lines
    with pytest.raises(RecipeError, match=said):
        check(recipe, ["plugins.halves.wrong=true"], [], None)
    capsys.readouterr()
    check(recipe, [f"output={tmp_path}/new"], [], None)
    assert "schedule    halves, peak 0.01" in capsys.readouterr().out
    with trials(*load(recipe)) as runner:  # as `bench` and `tune` train
        trial = runner.run({}, steps=4)
    assert trial.of("learning_rate") == [1e-2, 1e-2, 5e-3, 5e-3]


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
        (lambda: 1.0, "gave a function that fails for step 1 ("),
    ],
    ids=["negative", "nothing", "infinite", "of nothing"],
)
def test_a_schedule_that_is_none_is_refused(factor, message):
    with pytest.raises(PluginError, match=re.escape(message)):
        factors_of(factor, 4)


def test_any_type_of_number_is_a_factor():
    on = optimizer()
    assert Schedule(factors_of(np.float32, 4), on).set(4) == 1.5
    assert [type(group["lr"]) for group in on.param_groups] == [float, float]
