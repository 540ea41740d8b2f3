"""Figures that a run reports, computed a second way; and what must differ between ranks."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from conftest import chats, must_succeed, read_metrics, read_record, run_ranks, write_jsonl
from plugin_packages import activate, install
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardOf
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoTokenizer

from plugsft import PluginError, hookimpl, plugin
from plugsft.base.types import Shard
from plugsft.batches.plan import shuffle
from plugsft.data.slices import merge
from plugsft.kit import shard_of
from plugsft.plugins.bfd_packing import BfdPacking
from plugsft.plugins.ema import Ema
from plugsft.plugins.router_loss.routers import sequence_shares
from plugsft.ranks.loss_scale import MANY, LossScale
from plugsft.ranks.step_numbers import Numbers
from plugsft.recipe.tables import Checkpoint
from plugsft.registry.create import inspect_hooks
from plugsft.tokens.shards import Examples, write_index, write_shard
from plugsft.tokens.store import Tokens

SLOW = """
    import time

    @plugin()
    class Slow:
        lines: list = state([])

        @hookimpl(wrapper=True)
        def collate(self):
            time.sleep(0.1)
            return (yield)

        @hookimpl
        def stepped(self, run):
            if run.is_main:
                text = (run.recipe.folder / "metrics.jsonl").read_text()
                self.lines.append(len(text.splitlines()))

        @hookimpl
        def summary(self):
            return str(self.lines)
"""


@pytest.mark.slow
def test_the_record_of_two_ranks_equals_counts_from_rows_and_metrics(tiny, tmp_path, monkeypatch):
    activate(install(tmp_path, slow=SLOW), monkeypatch)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
    rows = [
        {"text": " ".join(words[: 2 + n % 7] * (1 + n % 3)), "weight": [0, 0.5, 2, 1][n % 4]}
        for n in range(23)
    ]
    bad = [{"text": ""}, {"text": 5}, {"text": ""}]
    held_out = write_jsonl(tmp_path / "held_out.jsonl", rows[:9])
    recipe = tiny(
        rows=[*rows, *bad],
        data={"on_bad_row": "drop"},
        train={"batch_size": 8, "micro_batch": 1, "epochs": 2},
        eval={"every": 5, "source": str(held_out)},
        plugins={"slow": {}},
    )
    done = run_ranks(2, recipe)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    record, steps = read_record(run), read_metrics(run)
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    lengths = [len(tokenizer(row["text"], add_special_tokens=False).input_ids) for row in rows]
    counted = [n for n, row in zip(lengths, rows, strict=True) if row["weight"]]
    # The end of a text is a token too, and the first token is no target.
    assert record["data"]["tokens"] == sum(counted) + len(counted)
    assert record["data"]["trained_tokens"] == sum(counted)
    p95 = np.percentile(np.array(counted) + 1, 95)
    assert record["data"]["lengths"]["p95"] == pytest.approx(p95)
    assert sorted(one["count"] for one in record["data"]["bad_rows"].values()) == [1, 2]
    assert sum(step["tokens"] for step in steps) == 2 * (sum(counted) + len(counted))
    assert sum(step["trained_tokens"] for step in steps) == 2 * sum(counted)
    [*_, evaluation] = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    expected = [n for n, row in zip(lengths[:9], rows, strict=False) if row["weight"]]
    assert evaluation["eval_tokens"] == sum(expected)

    # A rank waits for its batches, and no longer than the step takes.
    assert all(0.1 < step["data_wait_seconds"] <= step["step_seconds"] for step in steps)
    column = {name: np.array([step[name] for step in steps]) for name in steps[0]}
    seconds, tokens = column["step_seconds"], column["tokens"]
    assert record["throughput"] == pytest.approx(
        {
            "tokens_per_second": tokens.sum() / seconds.sum(),
            "trained_tokens_per_second": column["trained_tokens"].sum() / seconds.sum(),
            "step_seconds_median": np.median(seconds),
        },
        abs=1e-3,
    )
    assert record["batches"] == pytest.approx(
        {
            "padding": 1 - tokens.sum() / (tokens / (1 - column["padding"])).sum(),
            "examples_per_micro_batch": column["examples_per_micro_batch"].mean(),
            "data_wait_share": column["data_wait_seconds"].sum() / seconds.sum(),
            "imbalance": column["imbalance"].mean(),
        },
        abs=1e-3,
    )
    # Each line is in the file as soon as the next step is done.
    [seen] = [one["summary"] for one in record["plugins"] if one["name"] == "slow"]
    assert all(count >= number - 1 for number, count in enumerate(json.loads(seen), start=1))


@pytest.mark.slow
def test_ranks_draw_different_dropout_and_a_step_draws_the_same_again(tiny, tmp_path):
    """The rate is 0 and the row is the same, so only dropout can make a difference."""
    row = chats(1)[0]
    lora = {"lora": {"r": 4, "dropout": 0.5}}

    def norms(name, ranks):
        train = {"batch_size": ranks, "micro_batch": 1, "learning_rate": 0.0, "steps": 2}
        recipe = tiny(rows=[row] * 8, train=train, plugins=lora)
        done = run_ranks(ranks, recipe, f"output={tmp_path / name}", "train.max_grad_norm=0")
        assert done.returncode == 0, done.stderr
        return [line["grad_norm"] for line in read_metrics(tmp_path / name)]

    one, two = norms("one", 1), norms("two", 2)
    assert norms("again", 1) == one and abs(one[0] / one[1] - 1) > 1e-3
    assert abs(two[0] / one[0] - 1) > 1e-3, "rank 1 drops what rank 0 drops"


def test_rows_that_packing_leaves_out_join_those_of_preparation(tiny, tmp_path):
    long = [{"role": "user", "content": "fox " * 90}, {"role": "assistant", "content": "dog"}]
    recipe = tiny(
        rows=[*chats(6), {"messages": []}, {"messages": long}],
        data={"on_bad_row": "drop"},
        train={"micro_batch": 1},
        plugins={"bfd_packing": {"capacity": 64, "overlong": "truncate"}},
    )
    must_succeed(recipe)
    bad = read_record(tmp_path / "run")["data"]["bad_rows"]
    assert len(bad) == 2 and all(entry["count"] == 1 for entry in bad.values())


def test_merged_slices_add_up():
    one = {"cut": {"count": 30, "rows": [*range(10)]}, "own": {"count": 1, "rows": [5]}}
    two = {"cut": {"count": 4, "rows": [60, 61, 62, 63]}}
    first = Shard("a", 5, 50, 20, rows=9, bad={"x": [1]}, too_long=[2], truncated=[3], warnings=one)
    second = Shard("b", 7, 80, 41, rows=8, bad={"x": [9], "y": [8]}, too_long=[10], warnings=two)
    first.engines, second.engines, second.largest, first.largest = {"e": 3}, {"e": 4, "f": 1}, 9, 11
    total = merge([first, second])
    assert (total.examples, total.tokens, total.trained, total.rows) == (12, 130, 61, 17)
    assert (total.bad, total.too_long, total.truncated) == ({"x": [1, 9], "y": [8]}, [2, 10], [3])
    assert {name: entry["count"] for name, entry in total.warnings.items()} == {"cut": 34, "own": 1}
    assert (total.engines, total.largest) == ({"e": 7, "f": 1}, 11)


def test_a_micro_batch_without_examples_is_not_counted_as_empty_space(monkeypatch):
    monkeypatch.setattr("plugsft.plugins.bfd_packing.documents.pack", lambda tokens, examples: {})
    packing = BfdPacking(capacity=20)
    packing.max_tokens = 20
    tokens = SimpleNamespace(lengths=np.array([4, 6]))
    for examples in ([0, 1], []):
        packing.collate(tokens=tokens, examples=np.array(examples, np.int64))
    assert "50% full" in packing.summary()


def test_examples_of_equal_tokens_and_other_masks_or_lengths_have_other_checksums(tmp_path):
    examples = Examples(
        ids=np.tile(np.arange(3, dtype=np.int32), 4),
        mask=np.array([[0, 1, 1], [0, 0, 1], [0, 1, 1], [0, 1, 1]], np.bool_).ravel(),
        counts=np.array([3, 3, 3, 1, 2]),  # the last example has two sequences
        num_sequences=np.array([1, 1, 1, 2]),
        rows=np.arange(4),
    )
    shard = Shard("data-0.arrow", 4, columns=examples.types)
    write_shard(tmp_path / shard.file, examples)
    write_index(tmp_path, [shard], {"key": "k"})
    first, other, again, split = Tokens(tmp_path).contents.tolist()
    assert first == again and len({first, other, split}) == 3


def test_a_loss_that_is_not_finite_breaks_a_step_whose_norm_is():
    def broken(loss, norm):
        numbers = Numbers(Accelerator(cpu=True), [torch.tensor(loss)], {}, {})
        numbers.add(loss_scale=1, grad_norm=norm)
        return numbers.are_broken()

    for loss, norm in ((np.nan, 1.0), (np.inf, 1.0), (1.0, np.nan), (1.0, np.inf)):
        assert broken(loss, norm) == 1
    assert broken(2.0, 3.0) == 0


def test_shares_of_the_router_loss_are_those_of_targets_and_weights():
    """Two pairs of 2 + 6 and 3 + 1 targets; the second counts a half."""
    tokens = SimpleNamespace(
        sequence_targets=lambda examples: np.array([2, 6, 3, 1]),
        targets=np.array([8, 4]),
        denominators=np.array([8.0, 4.0]),
        weights=lambda examples: np.array([1.0, 0.5]),
    )
    assert sequence_shares(tokens, np.array([0, 1])).tolist() == [2, 6, 1.5, 0.5]
    tokens.denominators = np.array([1.0, 1.0])  # an objective that counts pairs
    assert sequence_shares(tokens, np.array([0, 1])).tolist() == [0.25, 0.75, 0.375, 0.125]


@pytest.mark.parametrize("rows", [1, 4, 5])
@pytest.mark.parametrize("rank", [0, 1])
def test_random_rounding_counts_from_the_first_number_of_a_rank(rank, rows):
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    try:
        whole = torch.arange(rows * 3).view(rows, 3)
        part = [*whole.chunk(2), whole[:0]][rank]
        mesh = init_device_mesh("cpu", (2,))
        sizes = {"shape": whole.shape, "stride": whole.stride()}
        weight = DTensor.from_local(part, mesh, [ShardOf(0)], run_check=False, **sizes)
        assert shard_of(weight).start == (part[0, 0] if len(part) else rows * 3)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("steps, every", [(1, 1), (9, 1), (10, 1), (11, 2), (25, 3), (9000, 500)])
def test_checkpoints_come_ten_times_a_run_or_every_500_steps(steps, every):
    assert Checkpoint().interval(steps, 3) == every
    for every, expected in ((7, 7), (0, 0), ("epoch", 3)):
        assert Checkpoint(every=every).interval(steps, 3) == expected


def test_skipped_steps_that_do_not_follow_each_other_are_no_warning(capsys):
    half = SimpleNamespace(mixed_precision="fp16", device=torch.device("cpu"))
    scale = LossScale(half)
    for step in range(1, 4 * MANY):
        scale.count(step, 2.0**16, float("inf") if step % 2 else 1.0)
    assert scale.skipped == 2 * MANY and "in a row" not in capsys.readouterr().out


def test_a_plugin_that_restores_a_state_it_does_not_save_is_refused():
    @plugin()
    class Forgets:
        @hookimpl
        def load_state_dict(self, state):
            pass

    with pytest.raises(PluginError, match=r"load_state_dict\(\) and no state_dict\(\)"):
        inspect_hooks(Forgets, "forgets")


def test_a_resumed_average_counts_the_steps_before():
    before, after = Ema(), Ema()
    before.steps = 7
    after.load_state_dict(before.state_dict())
    assert after.steps == 7


@pytest.mark.parametrize("count, weight, expected", [(11, 0.25, 3), (10, 0.26, 3), (11, 2.7, 30)])
def test_a_share_of_a_source_is_rounded_to_the_nearest_row(count, weight, expected):
    assert len(shuffle([(count, weight)], seed=0, epoch=0)) == expected


WAITS = """
    from plugsft import step_log

    @plugin()
    class Waits:
        lines: list = state([])

        @hookimpl
        def ready(self, run):
            self.file = run.recipe.folder / "metrics.jsonl"
            step_log.SLOW = SECONDS

        @hookimpl(wrapper=True)
        def step(self):
            self.lines.append(len(self.file.read_text().splitlines()))
            return (yield)

        @hookimpl
        def summary(self):
            return str(self.lines)
"""


@pytest.mark.parametrize("slow", [False, True])
def test_the_line_of_a_slow_step_is_there_before_the_next_step(tiny, tmp_path, monkeypatch, slow):
    waits = WAITS.replace("SECONDS", "0" if slow else "100")
    activate(install(tmp_path, waits=waits), monkeypatch)
    train = {"batch_size": 1, "micro_batch": 1, "steps": 5}
    must_succeed(tiny(train=train, checkpoint={"every": 99}, plugins={"waits": {}}))
    [waits] = read_record(tmp_path / "run")["plugins"]
    assert json.loads(waits["summary"]) == ([0, 1, 2, 3, 4] if slow else [0, 0, 1, 2, 3])
