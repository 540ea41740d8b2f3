"""The plan: every example once, whatever the ranks, a pure function of the step."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepared_rows import make_plan

from plugsft import DataError, PluginError, Recipe, hookimpl
from plugsft.batches.defaults import BatchDefaults
from plugsft.batches.plan import InOrder, Plan, shuffle, split_over_ranks

SIZES = {
    "count": st.integers(1, 60),
    "batch": st.integers(1, 17),
    "micro": st.integers(1, 5),
    "ranks": st.integers(1, 4),
}


def members(step_plan):
    return [int(number) for rank in step_plan.layout for part in rank for number in part]


@given(**SIZES, seed=st.integers(0, 2**32 - 1))
def test_an_epoch_takes_every_example_once(count, batch, micro, ranks, seed):
    made = make_plan(count, batch, micro, ranks, seed)
    for epoch in range(2):
        step_plans = [made.plan_step(epoch * made.per_epoch + n + 1) for n in range(made.per_epoch)]
        assert {step_plan.epoch for step_plan in step_plans} == {epoch}
        assert sorted(n for step_plan in step_plans for n in members(step_plan)) == list(
            range(count)
        )
        sizes = [len(members(step_plan)) for step_plan in step_plans]
        assert sizes == [batch] * (count // batch) + [count % batch] * bool(count % batch)


@given(**SIZES)
def test_ranks_march_together(count, batch, micro, ranks):
    made = make_plan(count, batch, micro, ranks)
    for step in range(1, made.per_epoch + 1):
        layout = made.plan_step(step).layout
        assert len(layout) == ranks
        (steps,) = {len(rank) for rank in layout}
        assert all(len(part) <= micro for rank in layout for part in rank)
        # No step is empty everywhere.
        assert all(sum(len(rank[number]) for rank in layout) for number in range(steps))


@given(**SIZES, others=st.tuples(st.integers(1, 5), st.integers(1, 4)))
def test_a_window_does_not_depend_on_how_it_is_laid_out(count, batch, micro, ranks, others):
    one, two = make_plan(count, batch, micro, ranks), make_plan(count, batch, *others)
    for step in range(1, one.per_epoch + 1):
        a, b = one.plan_step(step), two.plan_step(step)
        assert sorted(members(a)) == sorted(members(b))
        assert (a.denominator, a.tokens) == (b.denominator, b.tokens)
        assert a.denominator == sum(number + 1 for number in members(a))
        assert a.tokens == sum(number + 10 for number in members(a))


def test_windows_are_a_pure_function_of_seed_and_step():
    made = make_plan(steps=50)
    forward = [members(made.plan_step(step)) for step in range(1, 51)]
    fresh = make_plan()
    for step in np.random.default_rng(0).permutation(50):
        assert members(fresh.plan_step(int(step) + 1)) == forward[step], "seeking, back and forth"
        assert members(make_plan().plan_step(int(step) + 1)) == forward[step]
    assert members(make_plan(seed=1).plan_step(1)) != forward[0]
    second = shuffle([(20, 1.0)], seed=0, epoch=1)[:6].tolist()
    assert sorted(forward[made.per_epoch]) == sorted(second), "each epoch has an order of its own"


@given(**SIZES)
def test_a_window_knows_its_examples_and_how_uneven_its_ranks_are(count, batch, micro, ranks):
    made = make_plan(count, batch, micro, ranks)
    for step in range(1, made.per_epoch + 1):
        step_plan = made.plan_step(step)
        shares = [sum(int(n) + 10 for part in rank for n in part) for rank in step_plan.layout]
        assert step_plan.imbalance == pytest.approx(max(shares) / np.mean(shares))
        assert step_plan.examples == len(members(step_plan))
        assert step_plan.micro_batches == -(-step_plan.examples // micro)


def test_the_order_is_pinned_for_every_platform_and_version():
    assert shuffle([(10, 1.0)], seed=3, epoch=0).tolist() == [6, 8, 4, 1, 3, 5, 9, 7, 0, 2]
    assert shuffle([(10, 1.0)], seed=3, epoch=1).tolist() == [2, 4, 0, 5, 8, 1, 3, 9, 7, 6]


def test_the_number_of_steps():
    assert make_plan(20, 6).steps == 4
    assert make_plan(20, 6, epochs=3).steps == 12
    assert make_plan(20, 6, epochs=3, steps=5).steps == 5
    recipe = make_plan(20, 6, epochs=3, steps=5)
    assert Plan(recipe.tokens, _recipe_of(recipe), 2, recipe._hooks, evaluates=True).steps == 4


def _recipe_of(made):
    return Recipe.model_validate(
        {
            "output": "run",
            "model": {"path": "none"},
            "data": {"source": "none"},
            "train": made._train.model_dump(exclude_none=True),
        }
    )


@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.floats(0.01, 4.0, allow_nan=False)), min_size=1, max_size=4
    ),
    st.integers(0, 5),
)
def test_weights_say_how_often_each_row_comes(sources, epoch):
    taken = Counter(shuffle(sources, 7, epoch).tolist())
    first = 0
    for count, weight in sources:
        mine = [taken[number] for number in range(first, first + count)]
        assert sum(mine) == int(weight) * count + round(weight % 1 * count)
        assert set(mine) <= {int(weight), int(weight) + 1}, "no row twice before all once"
        first += count


def test_a_half_is_a_new_half_each_epoch():
    halves = [frozenset(shuffle([(100, 0.5)], 0, epoch).tolist()) for epoch in range(3)]
    assert len(set(halves)) == 3 and {len(half) for half in halves} == {50}


def test_an_epoch_without_examples_is_refused():
    with pytest.raises(DataError, match="an epoch has no example: raise the weights"):
        make_plan(sources=[{"examples": 20, "weight": 0.001}])


def test_the_last_window_may_be_uneven():
    assert [[part.tolist() for part in rank] for rank in split_over_ranks(np.arange(5), 2, 2)] == [
        [[0, 1], [4]],
        [[2, 3], []],
    ]
    assert [[part.tolist() for part in rank] for rank in split_over_ranks(np.arange(1), 3, 4)] == [
        [[0]],
        [[]],
        [[]],
    ]


def test_windows_are_a_sequence():
    train = SimpleNamespace(batch_size=4, micro_batch=2)
    step_plans = InOrder(np.arange(10), 1, train)
    assert len(step_plans) == 3 == len(list(step_plans))
    assert len(step_plans[1:]) == 2
    with pytest.raises(IndexError):
        step_plans[3]


def test_batches_must_give_every_epoch_the_same_number():
    class Shrinks(BatchDefaults):
        number = 4

        @hookimpl
        def plan_batches(self, order, ranks, train):
            self.number -= 1
            return InOrder(order[: 4 * self.number], ranks, train)

    made = make_plan(20, 4, core=Shrinks())
    with pytest.raises(PluginError, match="gave 2 steps for epoch 1 and 3 for the first"):
        made.plan_step(4)
