"""The hook order_examples: curricula and mixtures of third parties, on two ranks, resumed."""

import shutil

import numpy as np
import pytest
from conftest import chats, must_succeed, read_metrics, run_ranks, tiny_tables, write_recipe
from plugin_packages import activate, install
from prepared_rows import make_plan
from saved_runs import forget
from wishes import CURRICULUM, MIXTURE

from plugsft import DataError, PluginError, hookimpl
from plugsft.batches.defaults import BatchDefaults
from plugsft.commands.recipes import check
from plugsft.data.defaults import DataDefaults
from plugsft.lab.forecast.forecaster import read_epoch
from plugsft.lab.trials import trials
from plugsft.registry.load import load
from plugsft.tokens.store import Tokens


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes a recipe of two sources with a plugin."""
    activate(install(tmp_path / "site", curriculum=CURRICULUM, mixture=MIXTURE), monkeypatch)
    tables = [tiny_tables(tmp_path / name, chats(20, seed)) for seed, name in enumerate("ab")]
    sources = [{"source": table["data"]["source"]} for table in tables]

    def make(name, **more):
        tables[0]["train"] |= {"micro_batch": 2, "epochs": 2}
        return write_recipe(
            tmp_path / f"{name}.toml",
            {
                **tables[0],
                "output": str(tmp_path / name),
                "data": {"sources": sources, "max_length": 256},
                "plugins": {name: {}},
                "checkpoint": {"every": 1, "keep": 20},
                **more,
            },
        )

    return make


def orders(recipe, tokens):
    """Return the order of each epoch, as the plugin of a recipe gives it."""
    [plugin] = load(recipe)[1].plugins.values()
    named = {"tokens": tokens, "epoch": 0, "seed": 0}
    arguments = plugin.order_examples.__code__.co_varnames[1:4]
    for epoch in range(2):
        given = named | {"epoch": epoch}
        yield plugin.order_examples(**{name: given[name] for name in arguments if name in given})


@pytest.mark.parametrize("name", ["curriculum", "mixture"])
def test_a_third_party_orders_the_epochs(write, tmp_path, name):
    rows = shutil.copy(tmp_path / "b/data.jsonl", tmp_path / "evaluation.jsonl")
    recipe = write(name, eval={"source": str(rows)})
    run = tmp_path / name
    result = run_ranks(2, recipe)
    assert result.returncode == 0, result.stderr
    tokens = max((Tokens(folder) for folder in (run / "tokens").iterdir()), key=len)
    expected = [
        int(tokens.lengths[order[start : start + 8]].sum())
        for order in orders(recipe, tokens)
        for start in range(0, len(order), 8)
    ]
    metrics = read_metrics(run)
    assert [line["tokens"] for line in metrics] == expected
    assert len(metrics) == {"curriculum": 10, "mixture": 4}[name]
    # An evaluation has its own order of all its examples: `mixture` needs two sources.
    resumed = shutil.copytree(run, tmp_path / "resumed")
    half = len(metrics) // 2 + 1  # in the second epoch
    forget(resumed, half)
    result = run_ranks(2, recipe, f"output={resumed}", "--resume")
    assert result.returncode == 0, result.stderr
    for before, after in zip(metrics, read_metrics(resumed), strict=True):
        assert all(before[key] == after[key] for key in ("tokens", "loss", "grad_norm"))
    weights = [(at / "model/model.safetensors").read_bytes() for at in (run, resumed)]
    assert weights[0] == weights[1]


def test_check_plan_and_tune_ask_for_the_order(write, tmp_path, capsys):
    recipe = write("curriculum")
    check(recipe, [], [], None)
    assert "steps       about 10, 5 an epoch of 40 examples" in capsys.readouterr().out
    must_succeed("prepare", recipe)
    [folder] = (tmp_path / "curriculum/tokens").iterdir()
    [tokenizer] = (tmp_path / "curriculum/scratch").glob("tokenizer-*")
    words = [f'data.tokens="{folder}"', f'model.tokenizer="{tokenizer}"']
    loaded, active = load(recipe, words)
    sorted_lengths = sorted(Tokens(folder).lengths.tolist())
    active.attach(DataDefaults(loaded.folder), BatchDefaults())
    epoch = read_epoch(loaded, active, tmp_path)
    assert epoch.tokens.lengths[epoch.order].tolist() == sorted_lengths
    check(recipe, words, [], None)
    assert "steps       10, 5 an epoch of 40 examples" in capsys.readouterr().out
    with trials(*load(recipe, words)) as runner:
        order = runner.epoch_order()
        assert runner.tokens.lengths[order].tolist() == sorted_lengths
        runner.use(order[::-1])  # and the plugin has no say
        trial = runner.run({}, steps=4)
    assert not trial.error
    longest_first = np.array(sorted_lengths[::-1])
    assert trial.of("tokens") == longest_first[:32].reshape(4, 8).sum(1).tolist()


class Orders(BatchDefaults):
    """Gives an order of its own."""

    def __init__(self, *orders):
        self.orders = orders

    @hookimpl
    def order_examples(self, epoch):
        return self.orders[min(epoch, len(self.orders) - 1)]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (
            [0.5],
            r"'order_examples' gave float64 values of shape \[1\] for epoch 0; it must give",
        ),
        ([[1]], r"gave int64 values of shape \[1, 1\] for epoch 0; it must give a list of example"),
        ([[0], [1, 2]], r"gave object values of shape \[2\] for epoch 0; it must give a list"),
        ([3, 20], r"gave the example 20 for epoch 0, but there are 20, from 0 to 19"),
        ([-1, 3], r"gave the example -1 for epoch 0, but there are 20"),
    ],
)
def test_an_order_that_is_none_is_refused(order, message):
    with pytest.raises(PluginError, match=message):
        make_plan(20, core=Orders(order))


def test_epochs_of_different_numbers_of_steps_are_refused():
    made = make_plan(20, 4, core=Orders(range(20), range(10)))
    assert made.per_epoch == 5
    with pytest.raises(PluginError, match="gave 3 steps for epoch 1 and 5 for the first"):
        made.plan_step(6)
    made = make_plan(20, 4, core=Orders(range(20), np.arange(17, dtype=np.uint8)))
    assert made.plan_step(6).layout[0][0].dtype == np.int64


def test_an_order_without_examples_is_refused():
    with pytest.raises(DataError, match="an epoch has no example"):
        make_plan(20, core=Orders([]))
