"""Real trials leave their figures and nothing else."""

import sys

import numpy as np
import pytest
from conftest import ROOT, only_full, tiny_tables, write_recipe

from plugsft.lab.trials import trials, with_changes
from plugsft.registry.load import load
from plugsft.tokens.store import Tokens


@pytest.fixture
def recipe(tmp_path):
    return write_recipe(tmp_path / "recipe.toml", tiny_tables(tmp_path))


def test_a_trial_gives_figures_of_each_step_and_saves_nothing(recipe, tmp_path):
    with trials(*load(recipe)) as made:
        trial = made.run({"plugins.length_group": {}}, steps=3)
        held = {path.name for path in trial.folder.glob("run/*")}
    assert not trial.error and [step["step"] for step in trial.steps] == [1, 2, 3]
    assert len(trial.of("step_seconds", warmup=1)) == 2
    assert "checkpoints" not in held and "model" not in held
    assert [plugin["name"] for plugin in trial.run["plugins"]] == ["length_group", "trial"]
    [rank] = trial.ranks
    assert 50e6 < rank["before"] <= rank["host"]
    assert not made.folder.exists() and not (tmp_path / "run").exists()


def test_trials_learn_the_same_of_the_same_examples(recipe, forked_trials):
    with trials(*load(recipe), examples=16) as made:
        one, other, less = (
            made.run(changes, steps=2)
            for changes in ({}, {"train.micro_batch": 8}, {"train.learning_rate": 1e-6})
        )
    assert one.of("loss") == pytest.approx(other.of("loss"), rel=1e-5)
    assert one.of("loss")[0] == pytest.approx(less.of("loss")[0]) != less.of("loss")[1]


@only_full
def test_a_failed_trial_is_reported(recipe, forked_trials):
    with trials(*load(recipe)) as made:
        wrong = made.run({"train.micro_batch": 0}, steps=1)
        assert "train.micro_batch" in wrong.error and not wrong.out_of_memory
        less = made.run({}, steps=1, memory=100_000_000)
        assert less.error and less.out_of_memory, less.error


@only_full
def test_trials_leave_out_what_is_for_whole_runs(recipe, forked_trials):
    changes = [
        "plugins.tracker.to=['tensorboard']",
        "plugins.early_stopping.patience=1",
        "plugins.samples.prompts=['Who?']",
    ]
    with trials(*load(recipe, changes)) as made:
        trial = made.run({}, steps=1)
    assert [plugin["name"] for plugin in trial.run["plugins"]] == ["trial"]


@only_full
def test_no_step_of_a_trial_is_traced(recipe, forked_trials):
    with trials(*load(recipe, ["plugins.profiler.trace=[1,99]"])) as made:
        trial = made.run({}, steps=1)
    assert not trial.error and not (trial.folder / "run/profile").exists()


@only_full
def test_trials_take_the_examples_in_the_order_of_the_epoch(recipe, forked_trials):
    with trials(*load(recipe), examples=16) as made:
        lengths = made.tokens.lengths[made.epoch_order()]
        trial = made.run({}, steps=2)
    assert trial.of("tokens") == lengths[:16].reshape(2, 8).sum(1).tolist()


@only_full
def test_ranks_are_launched(recipe):
    file = ROOT / "recipes/accelerate/cpu2.yaml"
    launch = f"{sys.executable} -m accelerate.commands.launch --config_file {file}"
    with trials(*load(recipe), launch=launch) as made:
        trial = made.run({}, steps=2)
    assert not trial.error and len(trial.ranks) == 2
    assert trial.run["machine"]["ranks"] == 2 and len(trial.steps) == 2


@only_full
def test_pairs_stay_pairs(tmp_path, forked_trials):
    rows = []
    for number in range(12):
        asked = {"role": "user", "content": f"say {number}"}
        answers = [[asked, {"role": "assistant", "content": said}] for said in ("a b", "c")]
        rows.append(dict(zip(("chosen", "rejected"), answers, strict=True)))
    tables = tiny_tables(tmp_path, rows) | {"plugins": {"dpo": {}, "dpo_reference": {}}}
    path = write_recipe(tmp_path / "recipe.toml", tables)
    with trials(*load(path), examples=8) as made:
        some = Tokens(next(made.folder.glob("tokens-*")))
        assert some.facts["pairs"] == 8 and len(some.sequences(np.arange(8))[0]) == 16
        trial = made.run({"train.batch_size": 4}, steps=2)
    assert not trial.error and trial.of("loss")[0] == pytest.approx(np.log(2))


def test_tables_are_changed_in_a_copy():
    tables = {"train": {"steps": 1}, "plugins": {"a": {}}}
    other = with_changes(tables, {"train.steps": 2, "plugins.b": {"x": 1}, "plugins.a": None})
    assert other == {"train": {"steps": 2}, "plugins": {"b": {"x": 1}}}
    assert tables == {"train": {"steps": 1}, "plugins": {"a": {}}}
