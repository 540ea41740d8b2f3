"""length_group: the same steps with less padding."""

import random
import re

import numpy as np
import pytest
from conftest import TEXT, must_succeed, read_metrics, read_record
from hypothesis import given
from hypothesis import strategies as st

from plugsft import testing
from plugsft.batches.plan import InOrder, split_over_ranks
from plugsft.data.sample import EstimatedColumns
from plugsft.plugins.length_group import LengthGroup
from plugsft.plugins.length_group.sorted_steps import SortedSteps, count_padded, sort_layout
from plugsft.recipe.tables import Train

shapes = st.tuples(
    st.lists(st.integers(1, 500), min_size=1, max_size=40), st.integers(1, 4), st.integers(1, 5)
)


def layout_of(lengths, ranks, micro):
    return split_over_ranks(np.arange(len(lengths)), ranks, micro), np.array(lengths, np.int64)


def sorted_steps(layouts, lengths):
    return SortedSteps(layouts, lengths, EstimatedColumns(lengths))


def laid_out(layouts, lengths):
    """Plan steps by the plugin, and lay out the first one twice; return it and the plugin."""
    plugin = LengthGroup()
    planning = plugin.plan_batches(lengths, EstimatedColumns(lengths))
    next(planning)
    with pytest.raises(StopIteration) as planned:
        planning.send(layouts)
    assert len({str(planned.value.value[0]) for _ in range(2)}) == 1
    return planned.value.value[0], plugin


def places(lengths, layout):
    return count_padded(lengths, np.ones_like(lengths), layout)


def flat(layout):
    return sorted(int(number) for rank in layout for part in rank for number in part)


def sizes(layout):
    return [[len(part) for part in rank] for rank in layout]


@given(shapes)
def test_a_window_keeps_its_examples_and_its_shape_and_never_pads_more(shape):
    layout, lengths = layout_of(*shape)
    after = sorted_steps([layout], lengths)[0]
    assert flat(after) == flat(layout)
    assert sizes(after) == sizes(layout)
    assert places(lengths, after) <= places(lengths, layout)


@given(shapes)
def test_ranks_that_work_side_by_side_get_neighbours_in_length(shape):
    layout, lengths = layout_of(*shape)
    after = sort_layout(layout, lengths)
    dealt = [lengths[part] for step in zip(*after, strict=True) for part in step if len(part)]
    assert list(np.concatenate(dealt)) == sorted(lengths, reverse=True)


def test_any_layout_may_be_wrapped():
    lengths = np.array([5, 50, 7, 70, 6], np.int64)
    uneven = [[np.array([0, 1, 2]), np.array([], np.int64)], [np.array([3]), np.array([4])]]
    after = sort_layout(uneven, lengths)
    assert [[part.tolist() for part in rank] for rank in after] == [[[3, 1, 2], []], [[4], [0]]]


def test_a_window_is_laid_out_when_it_is_asked_for():
    asked = []

    class Counting(InOrder):
        def __getitem__(self, number):
            asked.append(number)
            return super().__getitem__(number)

    train = Train(batch_size=10, micro_batch=2, learning_rate=0.0)
    lengths = np.arange(1, 1_000_001)
    global_batches = sorted_steps(Counting(np.arange(1_000_000), 2, train), lengths)
    assert len(global_batches) == 100_000 and asked == []
    assert flat(global_batches[7]) == list(range(70, 80)) and asked == [7]
    assert [flat(global_batches[number])[0] for number in (2, 3)] == [20, 30]
    with pytest.raises(IndexError):
        global_batches[100_000]


def test_a_run_learns_the_same_with_less_padding(tiny, tmp_path):
    recipe = tiny(train={"micro_batch": 2, "epochs": 2})
    for name, plugin in (("with", ["plugins.length_group={}"]), ("without", [])):
        must_succeed(recipe, f"output={tmp_path / name}", *plugin)
    steps = [read_metrics(tmp_path / name) for name in ("with", "without")]
    assert len(steps[0]) == 6
    for ours, plain in zip(*steps, strict=True):
        assert ours["tokens"] == plain["tokens"]
        for metric in ("loss", "grad_norm"):
            assert ours[metric] == pytest.approx(plain[metric], rel=1e-5)
    [record] = read_record(tmp_path / "with")["plugins"]
    saved, before, after = map(int, re.findall(r"(\d+)%", record["summary"]))
    assert record["summary"].startswith(f"{saved}% of the padding saved")
    assert saved > 30 and after < before / 1.4


@pytest.mark.parametrize("batch", [8, 7])
def test_pairs_are_counted_as_they_are_padded(tiny, tmp_path, batch):
    """Two sequences each, of different lengths: each is a row of the padded micro-batch."""
    rng = random.Random(batch)

    def words(most):
        return " ".join(rng.choices(TEXT.split(), k=rng.randint(1, most)))

    rows = [
        {"prompt": words(9), "chosen": words(30) + " a", "rejected": words(5) + " b"}
        for _ in range(21)
    ]
    train = {"batch_size": batch, "micro_batch": 3, "log_every": 100}
    recipe = tiny(rows, train=train, plugins={"dpo": {}, "length_group": {}})
    must_succeed(recipe)
    run = read_record(tmp_path / "run")
    [summary] = [plugin["summary"] for plugin in run["plugins"] if plugin["name"] == "length_group"]
    _, before, after = map(int, re.findall(r"(\d+)%", summary))
    # What was measured of the tensors themselves.
    assert after == pytest.approx(100 * run["batches"]["padding"], abs=0.51)
    must_succeed(recipe, "--without", "length_group", f"output={tmp_path}/plain")
    padding = read_record(tmp_path / "plain")["batches"]["padding"]
    assert before == pytest.approx(100 * padding, abs=0.51) and after < before


def test_the_summary_is_the_padding_that_was_measured():
    assert LengthGroup().summary() is None
    layout, lengths = layout_of([10, 30, 10, 30], 1, 2)
    after, plugin = laid_out([layout], lengths)
    assert places(lengths, layout) == 120 and places(lengths, after) == 80
    assert plugin.summary() == "100% of the padding saved: 33% of all tokens before, 0% now"
    _, even = laid_out([layout], np.full(4, 9))
    assert even.summary() == "no padding to save"


def test_it_keeps_the_laws():
    testing.keeps_gradients("length_group")
    testing.survives_a_worker("length_group")
