"""hf_schedule follows the schedules of transformers, and refuses what they do not take."""

from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from conftest import must_succeed, read_metrics, run_plugsft
from transformers import get_scheduler

from plugsft import RecipeError, Train
from plugsft.plugins.hf_schedule import HfSchedule
from plugsft.recipe.schedule_names import NAMES


def settings(**keys):
    return Train(**{"batch_size": 1, "learning_rate": 0.5, "warmup": 0.2, "steps": 20} | keys)


def check(name, options, **keys):
    HfSchedule(name=name, options=options).check(SimpleNamespace(train=settings(**keys)))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cosine", {"num_cycles": 1.5}),
        ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1, "warmup_lr_rate": 0.01}),
        ("cosine_with_min_lr", {"min_lr": 0.2, "num_cycles": 1.5}),
        ("cosine_with_restarts", {"num_cycles": 2}),
        ("inverse_sqrt", {"timescale": 7}),
        ("polynomial", {"power": 2.0, "lr_end": 0.1}),
        ("warmup_stable_decay", {"num_decay_steps": 6, "decay_type": "1-sqrt"}),
    ],
)
def test_each_schedule_is_that_of_transformers_in_any_order_of_steps(name, options):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    theirs = get_scheduler(name, optimizer, 4, 20, options)
    expected = []
    for _ in range(20):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    check(name, options)
    curve = HfSchedule(name=name, options=options).schedule(settings(), 20)
    assert [0.5 * curve(step) for step in reversed(range(20))] == expected[::-1]


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        (
            "polynomial",
            {"powr": 2},
            "polynomial of transformers refuses them: get_polynomial_decay",
        ),
        ("polynomial", {"powr": 2}, "got an unexpected keyword argument 'powr'"),
        ("polynomial", {"power": "x"}, "polynomial of transformers refuses them: unsupported"),
        ("polynomial", {"lr_end": 0.5}, "lr_end (0.5) must be smaller than initial lr (0.5)"),
        ("cosine_with_min_lr", {}, "One of min_lr or min_lr_rate should be set"),
        ("warmup_stable_decay", {}, "1 required positional argument: 'num_decay_steps'"),
        ("warmup_stable_decay", {"num_decay_steps": 2, "decay_type": "x"}, "Unknown decay type: x"),
        ("inverse_sqrt", {"timescale": 0}, "inverse_sqrt of transformers refuses them: division"),
    ],
)
def test_options_are_refused_with_the_words_of_transformers(name, options, says):
    with pytest.raises(RecipeError) as caught:
        check(name, options)
    assert str(caught.value).startswith("plugins.hf_schedule.options: ") and says in str(
        caught.value
    )


def test_check_says_once_that_options_are_refused(tiny):
    keys = "plugins.hf_schedule.name=polynomial", "plugins.hf_schedule.options.powr=2"
    refused = run_plugsft("check", tiny(), *keys)
    assert refused.returncode == 2 and refused.stderr.count("error: ") == 1
    assert "plugins.hf_schedule.options: polynomial of transformers refuses" in refused.stderr


@pytest.mark.parametrize(
    "keys", [{"schedule": "cosine"}, {"schedule": "wsd", "decay": 3}, {"final_rate": 0.0}]
)
def test_another_schedule_in_train_is_refused(keys):
    with pytest.raises(RecipeError, match=r"it replaces train\.schedule; remove that, with decay"):
        check("polynomial", {}, **keys)


def test_schedules_that_look_at_metrics_or_are_the_core_s_are_refused_by_name(tiny):
    for name in ("reduce_lr_on_plateau", "greedy", "constant"):
        refused = run_plugsft("check", tiny(), f"plugins.hf_schedule.name={name}")
        assert refused.returncode == 2
        assert f"plugins.hf_schedule.name: given '{name}'; " in refused.stderr


def test_a_run_follows_it_and_goes_on_with_it_at_a_resume(tiny, tmp_path):
    plugins = {"hf_schedule": {"name": "cosine_with_restarts"}}
    recipe = tiny(train={"steps": 4, "warmup": 1}, checkpoint={"every": 2}, plugins=plugins)
    done = must_succeed(recipe)
    assert "plugin hf_schedule: active" in done.stdout
    run, again = tmp_path / "run", tmp_path / "again"
    peak = read_metrics(run)[1]["learning_rate"]
    rates = [line["learning_rate"] / peak for line in read_metrics(run)]
    assert rates == pytest.approx([0.0, 1.0, 0.75, 0.25])
    middle = "--resume-from", run / "checkpoints/step-000002"
    must_succeed(recipe, f"output={again}", *middle)
    assert [line["loss"] for line in read_metrics(again) if line["step"] > 2] == [
        line["loss"] for line in read_metrics(run) if line["step"] > 2
    ]
    new = f"output={tmp_path}/new"
    other = run_plugsft(recipe, new, "plugins.hf_schedule.options.num_cycles=2", *middle)
    assert other.returncode == 2 and "plugins.hf_schedule.options" in other.stderr
    checked = run_plugsft("check", recipe, new)
    assert "schedule    hf_schedule, peak " in checked.stdout


def test_it_has_each_schedule_that_the_core_lacks():
    lacking = {name for name, schedule in NAMES.items() if schedule is None}
    assert lacking <= {*get_args(HfSchedule.__annotations__["name"])}
