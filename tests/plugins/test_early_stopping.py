"""early_stopping: the run ends at the right step, resumed or not, and keeps its best model."""

import math
import shutil

import pytest
import torch
from conftest import chats, must_succeed, read_record, run_plugsft, run_ranks, tiny_tables
from plugin_packages import activate, install
from safetensors.torch import load_file

from plugsft import RecipeError
from plugsft.base.machine import look
from plugsft.plugins.early_stopping import EarlyStopping
from plugsft.registry.active import check
from plugsft.registry.load import resolve

# Evaluations have the next of these values, as `eval_told`; steps have `told`, always 1.
TOLD = """
    @plugin(metrics=["told"])
    class Told:
        values: list[float]
        calls: int = state(0)
        is_main: bool = state(False)

        @hookimpl
        def ready(self, run):
            self.is_main = run.is_main

        @hookimpl
        def add_metrics(self):
            import torch
            if torch.is_grad_enabled():
                return {"told": torch.tensor(float(self.is_main))}
            self.calls += 1
            return {"told": torch.tensor(self.values[self.calls - 1] * self.is_main)}

        @hookimpl
        def state_dict(self):
            return {"calls": self.calls}

        @hookimpl
        def load_state_dict(self, state):
            self.calls = state["calls"]
"""


def steps_in(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def test_it_stops_at_the_same_step_resumed_on_fewer_ranks_and_keeps_the_best(
    tiny, tmp_path, monkeypatch
):
    activate(install(tmp_path / "site", told=TOLD), monkeypatch)
    options = {"metric": "eval_told", "best": "highest", "patience": 3}
    recipe = tiny(
        rows=chats(24),
        train={"steps": 9, "batch_size": 8, "learning_rate": 3e-3},
        eval={"split": "train[:4]", "every": 1},
        checkpoint={"every": 1, "keep": 2, "keep_best": "eval_told", "best": "highest"},
        plugins={
            # The best comes at step 2, and improvements over it after the stop.
            "told": {"values": [1.0, 3.0, 2.0, 2.5, 3.0, 9.0, 9.0, 9.0, 9.0]},
            "early_stopping": options,
        },
    )
    run = tmp_path / "run"
    done = run_ranks(2, recipe)
    assert done.returncode == 0, done.stderr
    record = read_record(run)
    assert (record["status"], record["steps"]["done"], record["best"]["step"]) == (
        "completed",
        5,
        2,
    )
    best = f"best eval_told {record['best']['eval_told']:.4g} at step 2"
    reason = f"eval_told did not improve in 3 evaluations; {best}"
    assert record["reason"] == reason and reason in (run / "report.html").read_text()
    assert f"stopped after step 5: {reason}" in done.stdout
    summaries = {plugin["name"]: plugin["summary"] for plugin in record["plugins"]}
    assert summaries["early_stopping"] == best
    assert steps_in(run / "checkpoints") == [2, 4, 5], "the best one is not pruned"
    exported = tmp_path / "exported"
    run_plugsft("export", run / "checkpoints/step-000002", "--to", exported)
    model, expected = (load_file(path / "model.safetensors") for path in (run / "model", exported))
    assert all(torch.equal(model[name], expected[name]) for name in expected)

    # Two of the three evaluations without improvement were before the resume.
    shutil.rmtree(run / "checkpoints/step-000005")
    refused = run_plugsft(recipe, "--resume", "plugins.early_stopping.patience=4")
    assert refused.returncode == 2 and "plugins.early_stopping.patience" in refused.stderr
    done = must_succeed(recipe, "--resume")
    assert "going on after step 4" in done.stdout
    assert read_record(run)["reason"] == reason and read_record(run)["best"]["step"] == 2

    # The checkpoint of the stop trains no further step.
    must_succeed(recipe, "--resume")
    assert read_record(run)["reason"] == reason and steps_in(run / "checkpoints") == [2, 4, 5]


class Listener:
    """A run that hears when it should stop."""

    def __init__(self):
        self.step, self.steps, self.reason = 0, 100, ""

    def stop(self, reason):
        self.reason = self.reason or reason


def stop_of(values, metric="eval_loss", patience=2, **options):
    """Return the step at which a plugin stops, 0: never; and its summary."""
    plugin, run = EarlyStopping(metric=metric, patience=patience, **options), Listener()
    other = "loss" if metric == "eval_loss" else "eval_loss"
    for run.step, value in enumerate(values, start=1):
        # A step's metrics, and those of its evaluation, come one after the other.
        plugin.logged(run, run.step, {other: 0.0})
        plugin.logged(run, run.step, {metric: value})
        if run.reason:
            break
    return run.step if run.reason else 0, plugin.summary()


@pytest.mark.parametrize(
    ("values", "options", "step", "best"),
    [
        ([3, 2, 1, 1, 1], {}, 5, "1 at step 3"),
        ([3, 2, 2, 1, 1], {}, 0, "1 at step 4"),
        ([3, 2.75, 2.5, 2.25], {"min_delta": 0.5}, 3, "3 at step 1"),
        ([3, 2.75, 2.25, 2], {"min_delta": 0.5}, 0, "2.25 at step 3"),
        ([1, 2, 3, 2, 3], {"best": "highest"}, 5, "3 at step 3"),
        ([1, 1.5, 2], {"best": "highest", "min_delta": 1.0}, 3, "1 at step 1"),
        ([2, 1, 1], {"patience": 1}, 3, "1 at step 2"),
        ([math.nan, 2, math.nan, math.nan], {}, 4, "2 at step 2"),
        ([2, -math.inf, math.nan], {}, 3, "2 at step 1"),
        ([2, 2, 2], {"metric": "loss"}, 3, "2 at step 1"),
    ],
)
def test_what_counts_as_an_improvement(values, options, step, best):
    metric = options.get("metric", "eval_loss")
    assert stop_of(values, **options) == (step, f"best {metric} {best}")


def test_values_that_are_never_finite_stop_too():
    assert stop_of([math.nan, math.inf, math.nan]) == (2, "no finite eval_loss")


def test_the_last_step_is_no_early_stop():
    plugin, run = EarlyStopping(patience=1), Listener()
    run.step = run.steps
    for value in 1.0, 1.0:
        plugin.logged(run, run.step, {"eval_loss": value})
    assert plugin.waited == 1 and not run.reason


def test_a_metric_of_steps_stops_too_and_an_unknown_one_is_named(tiny, tmp_path, monkeypatch):
    activate(install(tmp_path / "site", told=TOLD), monkeypatch)
    plugins = {
        "told": {"values": []},
        "early_stopping": {"metric": "told", "best": "lowest", "patience": 2},
    }
    recipe = tiny(train={"steps": 9, "batch_size": 8}, plugins=plugins)
    done = must_succeed(recipe, "train.batch_size=24")
    assert "stopped after step 3: told did not improve in 2 steps" in done.stdout
    done = run_plugsft(recipe, "--overwrite", 'plugins.early_stopping.metric="tol"')
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "plugins.early_stopping.metric: steps have no metric 'tol'; did you" in done.stderr


def test_a_metric_that_differs_between_ranks_is_refused_before_the_run(tmp_path):
    options = {"metric": "tokens_per_second"}
    recipe, active = resolve(tiny_tables(tmp_path) | {"plugins": {"early_stopping": options}})
    with pytest.raises(RecipeError) as refusal:
        check(active.attach(), recipe, look())
    problem = "plugins.early_stopping: metric: 'tokens_per_second' differs from rank to rank"
    assert problem in str(refusal.value)


def test_the_model_before_step_1_is_not_compared():
    plugin, run = EarlyStopping(patience=1), Listener()
    for run.step, value in enumerate([1.0, 3.0, 2.0]):
        plugin.logged(run, run.step, {"eval_loss": value})
    assert not run.reason and plugin.summary() == "best eval_loss 2 at step 2"
