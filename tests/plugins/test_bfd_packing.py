"""bfd_packing: few and even micro-batches, and the same results."""

import json
import tomllib

import numpy as np
import pytest
import torch
from conftest import chats, read_metrics, run_plugsft, run_ranks, write_recipe
from hypothesis import given, settings
from hypothesis import strategies as st
from plugin_packages import activate, install
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    FalconConfig,
    GemmaConfig,
    GPTJConfig,
    MambaConfig,
    MptConfig,
    Qwen3Config,
)

from plugsft import Capability, DataError, RecipeError, testing
from plugsft.base.machine import look
from plugsft.base.types import Shard
from plugsft.batches.plan import InOrder
from plugsft.model.load import ModelLoad
from plugsft.plugins.bfd_packing import BfdPacking
from plugsft.plugins.bfd_packing.attention_cost import break_even_length
from plugsft.plugins.bfd_packing.documents import documents_of
from plugsft.plugins.bfd_packing.layouts import PackedEpoch, PackedSteps, best_fit, deal
from plugsft.plugins.bfd_packing.overlong import cut_overlong
from plugsft.plugins.bfd_packing.packer import Longest
from plugsft.plugins.bfd_packing.row_shape import RowShape, fix_shape
from plugsft.recipe.tables import Train
from plugsft.registry.active import check
from plugsft.registry.load import resolve
from plugsft.tokens.shards import Examples, write_index, write_shard
from plugsft.tokens.store import Tokens

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=80)


def naive(lengths, capacity):
    """Best-fit-decreasing as books have it; return what is left in each bin."""
    left = []
    for length in sorted(lengths, reverse=True):
        fits = [space for space in left if space >= length]
        if fits:
            left.remove(min(fits))
        left.append((min(fits) if fits else capacity) - length)
    return sorted(left)


def cost(lengths):
    return lengths * (1 + lengths / 1000)


@settings(max_examples=300)
@given(LENGTHS, st.integers(40, 100))
def test_it_packs_as_best_fit_decreasing_does(lengths, capacity):
    lengths = np.array(lengths)
    items, bins, count = best_fit(lengths, capacity)
    assert sorted(items.tolist()) == list(range(len(lengths)))
    filled = np.bincount(bins, weights=lengths[items], minlength=count).astype(int)
    assert sorted((capacity - filled).tolist()) == naive(lengths.tolist(), capacity)


def test_lengths_beyond_sixteen_bits():
    lengths = np.array([70_000, 30_000, 65_536, 100_000, 34_464])
    items, bins, count = best_fit(lengths, 100_000)
    assert count == 3 and np.bincount(bins, weights=lengths[items]).tolist() == [1e5, 1e5, 1e5]


@settings(max_examples=200)
@given(LENGTHS, st.integers(40, 100), st.integers(1, 6))
def test_a_window_is_dealt_whole_in_as_few_micro_batches_as_can_be(lengths, capacity, ranks):
    lengths = np.array(lengths)
    dealt = deal(lengths, cost(lengths), ranks, capacity)
    parts = [part for rank in dealt for part in rank]
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(lengths)))
    assert all(lengths[part].sum() <= capacity for part in parts)
    fewest = len(naive(lengths.tolist(), capacity))
    assert [len(rank) for rank in dealt] == [-(-fewest // ranks)] * ranks


def test_work_is_even_over_many_ranks():
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(20):
        lengths = np.clip(rng.lognormal(6, 1, 512).astype(np.int64) + 1, 1, 4096)
        costs = BfdPacking().cost(lengths)
        work = [sum(costs[part].sum() for part in rank) for rank in deal(lengths, costs, 64, 4096)]
        ratios.append(max(work) / np.mean(work))
    print(f"\nslowest of 64 ranks over the mean: {np.mean(ratios):.4f}")
    assert np.mean(ratios) <= 1.03


def members(layout):
    return sorted(int(number) for rank in layout for part in rank for number in part)


@given(LENGTHS, st.integers(1, 4), st.integers(1, 9), st.integers(0, 5))
def test_scope_step_keeps_every_window(lengths, ranks, size, seed):
    lengths = np.array(lengths)
    order = np.random.default_rng(seed).permutation(len(lengths))
    plain = InOrder(order, ranks, Train(batch_size=size, learning_rate=0.0))
    packed = PackedSteps(plain, lengths, ranks, 50, cost)
    assert [members(one) for one in packed] == [members(one) for one in plain]


@given(LENGTHS, st.integers(40, 100), st.integers(1, 3))
def test_rows_of_scope_dataset_have_one_shape_in_all_epochs(lengths, capacity, ranks):
    lengths = np.array(lengths)
    shapes = set()
    for seed in range(2):
        order = np.random.default_rng(seed).permutation(len(lengths))
        epoch = PackedEpoch(order, lengths, ranks, 4, capacity, cost)
        for examples in (row for step in epoch for rank in step for row in rank):
            documents, filled = lengths[examples], int(lengths[examples].sum())
            row = documents_of(np.array([*documents, *[capacity - filled] * (filled < capacity)]))
            fixed = fix_shape(row, filled, epoch.shape(1))
            bounds = fixed["cu_seq_lens_q"]
            assert bounds[: len(documents) + 1].tolist() == [0, *np.cumsum(documents)]
            assert bounds[-1] == capacity and bounds.dtype == torch.int32
            assert bounds.diff().min() >= 0 and bounds.diff().max() <= fixed["max_length_q"]
            assert fixed["cu_seq_lens_k"] is bounds and fixed["documents"] == row["documents"]
            shapes.add((len(bounds), fixed["max_length_q"], fixed["max_length_k"]))
    assert len(shapes) == 1


def test_a_row_that_no_plan_foresaw_keeps_its_documents():
    """Such as one that a plugin scores."""
    row = documents_of(np.array([9, 3, 3, 3, 2]))
    fixed = fix_shape(row, 18, RowShape(documents=2, longest=4))
    assert fixed["cu_seq_lens_q"].tolist() == [0, 9, 12, 15, 18, 20] and fixed["max_length_k"] == 9


@given(LENGTHS, st.integers(1, 4), st.integers(1, 9), st.integers(0, 5))
def test_scope_dataset_takes_every_example_once_whatever_the_ranks(lengths, ranks, size, seed):
    lengths = np.array(lengths)
    order = np.random.default_rng(seed).permutation(len(lengths))
    global_batches = [*PackedEpoch(order, lengths, ranks, size, 50, cost)]
    assert sorted(n for global_batch in global_batches for n in members(global_batch)) == list(
        range(len(lengths))
    )
    assert [members(global_batch) for global_batch in global_batches] == [
        members(one) for one in PackedEpoch(order, lengths, 1, size, 50, cost)
    ]
    for layout in global_batches:
        assert len({len(rank) for rank in layout}) == 1
        assert all(lengths[part].sum() <= 50 for rank in layout for part in rank)
    with pytest.raises(IndexError):
        PackedEpoch(order, lengths, ranks, size, 50, cost)[len(global_batches)]


def test_rows_come_in_another_order_and_company_each_epoch():
    lengths = np.array([25, 25, 30, 20, 10, 40] * 30)
    orders = [np.random.default_rng(seed).permutation(180) for seed in range(2)]
    one, two = ([members(row) for row in PackedEpoch(o, lengths, 1, 1, 50, cost)] for o in orders)
    assert one != two and sorted(map(len, one)) == sorted(map(len, two))
    assert {tuple(row) for row in one} != {tuple(row) for row in two}
    # Rows of long examples do not come first.
    firsts = [lengths[row].max() for row in one]
    assert firsts != sorted(firsts, reverse=True)


# Real runs.


def train(recipe, folder, *words):
    result = run_plugsft(recipe, f"output={folder}", *words)
    assert result.returncode == 0, result.stderr
    return read_metrics(folder)


def curve(lines):
    return [
        line[name] for name in ("loss", "grad_norm", "eval_loss") for line in lines if name in line
    ]


PACKED = "plugins.bfd_packing.capacity=96"
RUN = {"batch_size": 8, "epochs": 2, "max_grad_norm": 0.5}


@pytest.fixture
def runs(tiny):
    return tiny(
        rows=chats(21), train=RUN | {"micro_batch": 1}, eval={"every": 2, "split": "train[:5]"}
    )


def test_a_packed_run_learns_what_a_padded_one_learns(runs, tmp_path):
    plain = train(runs, tmp_path / "plain", "train.micro_batch=4")
    packed = train(runs, tmp_path / "packed", PACKED)
    assert len(curve(packed)) >= 12
    assert curve(packed) == pytest.approx(curve(plain), rel=1e-5)
    steps = [line for line in packed if "padding" in line]
    padded = [line for line in plain if "padding" in line]
    assert all(line["padding"] == 0 for line in steps)
    assert np.mean([line["padding"] for line in padded]) > 0.1
    assert all(line["examples_per_micro_batch"] > 1.5 and line["imbalance"] == 1 for line in steps)
    record = json.loads((tmp_path / "packed/run.json").read_text())
    [plugin] = record["plugins"]
    assert "each step packed into micro-batches of at most 96 tokens" in plugin["summary"]
    assert record["packed_rows"].startswith("documents proved apart (a change moves no neighbour)")
    assert record["batches"]["padding"] == 0


def test_two_ranks_learn_what_one_learns(runs, tmp_path):
    plain = train(runs, tmp_path / "plain")
    run_ranks(2, runs, f"output={tmp_path / 'two'}", PACKED)
    assert curve(read_metrics(tmp_path / "two")) == pytest.approx(curve(plain), rel=1e-5)


def test_a_packed_run_goes_on_as_if_it_had_not_been_stopped(runs, tmp_path):
    whole = train(runs, tmp_path / "whole", PACKED, "checkpoint.every=1", "checkpoint.keep=9")
    rest = [line for line in whole if line["step"] > 2]
    words = (runs, PACKED, "--resume-from", tmp_path / "whole/checkpoints/step-000002")
    result = run_plugsft(*words, f"output={tmp_path / 'again'}")
    assert result.returncode == 0, result.stderr
    assert curve(read_metrics(tmp_path / "again")) == curve(rest)
    run_ranks(2, *words, f"output={tmp_path / 'two'}")
    assert curve(read_metrics(tmp_path / "two")) == pytest.approx(curve(rest), rel=1e-5)
    other = run_plugsft(*words, "plugins.bfd_packing.scope=dataset")
    assert other.returncode == 2
    assert "plugins.bfd_packing.scope was not set and is 'dataset'" in other.stderr
    # Without it the same is learned.
    padded = run_plugsft(*words[::2], words[-1], f"output={tmp_path / 'padded'}")
    assert padded.returncode == 0, padded.stderr


FAMILIES = {
    "qwen3": (Qwen3Config, {"tie_word_embeddings": True}),
    "gemma": (GemmaConfig, {"tie_word_embeddings": True}),
}


@pytest.fixture
def family(tiny, tmp_path):
    """Give `family(name)`: a recipe of a tiny model of that family, with a real tokenizer."""

    def make(config, extra):
        first = tiny(rows=chats(21), train=RUN)
        assert run_plugsft(first, "train.steps=1").returncode == 0
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/model")
        sizes = {
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
        }
        model = AutoModelForCausalLM.from_config(config(**(sizes | extra)))
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        recipe = tiny(rows=chats(21), train=RUN | {"micro_batch": 1})
        tables = tomllib.loads(recipe.read_text())
        return write_recipe(recipe, tables | {"model": {"path": str(tmp_path / "model")}})

    return make


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_equals_padded_for_other_families(family, tmp_path, name):
    recipe = family(*FAMILIES[name])
    plain = train(recipe, tmp_path / "plain", "train.micro_batch=4")
    packed = train(recipe, tmp_path / "packed", PACKED)
    assert curve(packed) == pytest.approx(curve(plain), rel=1e-5)


def test_a_model_that_leaks_is_refused_before_the_first_step(family, tmp_path):
    recipe = family(MambaConfig, {"state_size": 4, "num_attention_heads": None})
    result = run_plugsft(recipe, f"output={tmp_path / 'leaks'}", PACKED)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "this model cannot be trained on packed rows: changing one document" in result.stderr
    assert "remove [plugins.bfd_packing]" in result.stderr
    assert "step 1/" not in result.stdout


OWN = {
    "gptj": (GPTJConfig, {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}),
    "falcon": (FalconConfig, {}),
    "mpt": (MptConfig, {"d_model": 32, "n_layers": 2, "n_heads": 4}),
}


@pytest.mark.parametrize("name", OWN)
def test_a_model_with_attention_of_its_own_is_refused_in_the_users_words(tmp_path, name):
    kind, sizes = OWN[name]
    shared = {"num_attention_heads": 4, "hidden_size": 32, "num_hidden_layers": 2}
    model = AutoModelForCausalLM.from_config(kind(vocab_size=97, **(sizes or shared)))
    model.save_pretrained(tmp_path)
    packer, load = BfdPacking(), ModelLoad(str(tmp_path))
    packer.packing, packer.longest = Capability("bfd_packing", "capacity", 64), Longest(64, 64)
    steps = packer.optimize_model(load)
    next(steps)
    with pytest.raises(RecipeError) as refused:
        try:
            model = load.load_model()
        except RecipeError as error:
            steps.throw(error)
        steps.send(model)
    assert "computes attention in its own code, which ignores" in str(refused.value)
    assert "[plugins.length_group] then lowers the padding" in str(refused.value)
    assert "plugsft_documents" not in str(refused.value)


UNPACKED = """
    import numpy as np
    from plugsft.plugins.bfd_packing.layouts import PackedEpoch

    @plugin()
    class Unpacked:
        "The global batches of packed rows, an example at a time."

        @hookimpl
        def plan_batches(self, order, lengths, ranks, train):
            global_batches = PackedEpoch(order, lengths, 1, train.batch_size, 96, lambda some: some)
            return [
                [[one[None] for part in rank for one in part] for rank in global_batch]
                for global_batch in global_batches
            ]
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_scope_dataset_learns_what_its_windows_hold(runs, tmp_path, monkeypatch, ranks):
    activate(install(tmp_path / "site", unpacked=UNPACKED), monkeypatch)
    words = ("train.batch_size=2",)
    plain = train(runs, tmp_path / "plain", *words, "plugins.unpacked={}")
    words = (*words, PACKED, 'plugins.bfd_packing.scope="dataset"')
    if ranks == 1:
        train(runs, tmp_path / "packed", *words)
    else:
        run_ranks(2, runs, f"output={tmp_path / 'packed'}", *words)
    packed = read_metrics(tmp_path / "packed")
    assert curve(packed) == pytest.approx(curve(plain), rel=1e-5)
    [record] = json.loads((tmp_path / "packed/run.json").read_text())["plugins"]
    assert "21 examples in" in record["summary"] and "a step is 2 rows" in record["summary"]


# Examples of more tokens than fit.


def test_longer_examples_stop_the_run_with_the_cure(runs):
    result = run_plugsft(runs, "plugins.bfd_packing.capacity=30")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "of 21 examples have more than 30 tokens, the longest" in result.stderr
    assert 'Raise capacity, or set overlong = "truncate" or "split"' in result.stderr


def test_truncated_examples_are_as_if_they_had_been_prepared_so(runs, tmp_path):
    words = ("data.on_bad_row=drop",)
    short = train(runs, tmp_path / "short", *words, "data.max_length=40")
    cut = train(
        runs,
        tmp_path / "cut",
        *words,
        "plugins.bfd_packing.capacity=40",
        'plugins.bfd_packing.overlong="truncate"',
    )
    assert curve(cut) == pytest.approx(curve(short), rel=1e-5)
    [record] = json.loads((tmp_path / "cut/run.json").read_text())["plugins"]
    assert "longer examples cut" in record["summary"]


def test_split_examples_lose_no_trained_part_and_double_none(runs, tmp_path):
    words = ("plugins.bfd_packing.capacity=25", 'plugins.bfd_packing.overlong="split"')
    lines = train(runs, tmp_path / "split", *words)
    whole = train(runs, tmp_path / "whole")
    both_epochs = sum(line["tokens"] for line in whole if "padding" in line)
    record = json.loads((tmp_path / "split/run.json").read_text())
    assert "longer examples split" in record["plugins"][0]["summary"]
    left_out = sum(bad_row["count"] for bad_row in record["data"]["bad_rows"].values())
    missing = both_epochs - sum(line["tokens"] for line in lines if line.get("epoch", 9) <= 2)
    assert 2 * left_out <= missing <= 2 * 25 * left_out


# Refusals.


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train.micro_batch=4"], "train.micro_batch has no effect"),
        (["plugins.length_group={}"], "cannot be used with 'bfd_packing'"),
        (["plugins.bfd_packing.capacity=1"], "plugins.bfd_packing.capacity"),
        (["plugins.bfd_packing.scope=epoch"], "allowed: 'step' or 'dataset'"),
        (
            ["plugins.dpo={}", "plugins.bfd_packing.overlong=split"],
            'overlong = "split" would cut one answer of a pair',
        ),
    ],
)
def test_what_cannot_be_is_refused(tiny, words, says):
    recipe = tiny(plugins={"bfd_packing": {}}, train={"micro_batch": 1})
    result = run_plugsft(recipe, *words)
    assert result.returncode == 2 and says in result.stderr and "Traceback" not in result.stderr


def test_half_an_epoch_anew_each_time_cannot_fill_the_same_number_of_rows(tiny):
    tables = tomllib.loads(tiny(train={"micro_batch": 1}).read_text())
    tables["data"]["sources"] = [{"source": tables["data"].pop("source"), "weight": 0.5}]
    tables["plugins"] = {"bfd_packing": {"scope": "dataset"}}
    recipe, active = resolve(tables)
    with pytest.raises(RecipeError, match="give it a whole weight"):
        check(active.attach(), recipe, look())


def test_overlong_examples_are_named_by_their_rows():
    class Known:
        lengths, rows = np.array([3, 9, 5, 7]), np.arange(4) + 10

    with pytest.raises(DataError, match=r"2 of 4 examples .* the longest 9 \(rows 11, 13\)"):
        cut_overlong(Known(), 5, "error")


def test_attention_is_weighed_by_the_model_itself():
    config = Qwen3Config(
        vocab_size=10, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    body = sum(p.numel() for p in model.parameters()) - 10 * 64
    assert break_even_length(model) == pytest.approx(body / (3 * 64))


def test_it_keeps_the_laws():
    testing.keeps_gradients("bfd_packing", {"capacity": 128})


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=30), min_size=1, max_size=12),
    st.integers(2, 12),
    st.integers(0, 12),
)
def test_what_is_split_or_cut_is_whole_elsewhere(tmp_path_factory, masks, room, second):
    folder = tmp_path_factory.mktemp("tokens")
    counts = np.array([len(mask) for mask in masks])
    mask = np.concatenate([np.array([False, *mask[1:]]) for mask in masks])
    ids = np.arange(len(mask), dtype=np.int32)
    rows = np.arange(len(masks)) * 10
    examples = Examples(ids, mask, counts, np.ones(len(masks), np.int64), rows)
    write_shard(folder / "data-0.arrow", examples)
    second = min(second, len(masks))
    sources = [{"examples": second}, {"examples": len(masks) - second}]
    shards = [Shard("data-0.arrow", examples=len(masks))]
    write_index(folder, shards, {"key": "", "sources": sources})
    tokens = Tokens(folder)
    # By hand: the first token of a part has nothing before it from which it could be predicted.
    starts = np.cumsum(counts) - counts
    cuts = [
        (start + skip, start + min(skip + room, count))
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
        for skip in range(0, count, room)
    ]
    firsts = [
        (start, start + min(room, count)) for start, count in zip(starts, counts, strict=True)
    ]
    for overlong, expected in (("split", cuts), ("truncate", firsts)):
        trained = [int(mask[start + 1 : stop].sum()) for start, stop in expected]
        some_long = counts.max() > room
        kept = [place for place, n in zip(expected, trained, strict=True) if n or not some_long]
        if not kept:
            with pytest.raises(DataError, match="for every example; raise capacity"):
                cut_overlong(tokens, room, overlong)
            continue
        fitted, cuts_made = cut_overlong(tokens, room, overlong)
        assert [fitted.example(n)[0].tolist() for n in range(len(fitted))] == [
            ids[start:stop].tolist() for start, stop in kept
        ]
        assert fitted.lengths.tolist() == [stop - start for start, stop in kept]
        assert fitted.targets.tolist() == [int(mask[a + 1 : b].sum()) for a, b in kept]
        assert fitted.denominators.tolist() == fitted.targets.tolist()
        assert len(fitted) == len(expected if some_long else masks) - cuts_made.untrained
        assert not some_long or fitted.targets.all()
        left_out = sum(one["count"] for one in fitted.facts.get("bad_rows", {}).values())
        assert left_out == cuts_made.untrained
        for number, (start, _) in enumerate(kept):
            example = int(np.searchsorted(np.cumsum(counts), start, "right"))
            assert fitted.source_of(number) == (int(example >= second), example * 10)


UNTRAINED = [
    {"prompt": " ".join(["word"] * prompt), "completion": " ".join(["yes"] * answer)}
    for prompt, answer in ((150, 3), (2, 4), (3, 150), (120, 2), (1, 3), (90, 5)) * 3
]


@pytest.mark.parametrize("overlong", ["split", "truncate"])
def test_parts_without_a_target_are_left_out_and_counted(tiny, tmp_path, overlong):
    recipe = tiny(
        rows=UNTRAINED,
        # A step is one example: one without a target would have no loss.
        train={"batch_size": 1, "micro_batch": 1, "epochs": 2},
        eval={"every": 20, "split": "train[:4]"},
        plugins={"bfd_packing": {"capacity": 24, "overlong": overlong}},
    )
    lines = train(recipe, tmp_path / "one")
    assert np.isfinite([line["loss"] for line in lines if "loss" in line]).all()
    assert all(line["trained_tokens"] > 0 for line in lines if "padding" in line)
    record = json.loads((tmp_path / "one/run.json").read_text())
    [plugin] = record["plugins"]
    assert "of them or their parts left out: no trained token" in plugin["summary"]
    [(reason, count)] = record["data"]["bad_rows"].items()
    assert reason.startswith("no trained token in ") and count["count"] > 3
    assert record["steps"]["per_epoch"] == record["data"]["examples"]
    whole = train(recipe, tmp_path / "two", "train.batch_size=6")
    run_ranks(2, recipe, f"output={tmp_path / 'ranks'}", "train.batch_size=6")
    assert curve(read_metrics(tmp_path / "ranks")) == pytest.approx(curve(whole), rel=1e-5)


def test_evaluation_data_without_a_target_is_refused_before_the_first_step(tiny):
    recipe = tiny(
        rows=UNTRAINED[:2],
        train={"batch_size": 1, "micro_batch": 1},
        eval={"every": 1, "split": "train[:1]"},
        plugins={"bfd_packing": {"capacity": 24, "overlong": "truncate"}},
    )
    result = run_plugsft(recipe)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert (
        "no trained token in the first 24 tokens of an example, for every example" in result.stderr
    )
    assert "step 1/" not in result.stdout


def test_check_counts_the_steps_of_packed_rows_and_finds_what_is_too_long(runs, tmp_path):
    words = (runs, PACKED, 'plugins.bfd_packing.scope="dataset"', "train.batch_size=2")
    told = run_plugsft("check", *words)
    assert told.returncode == 0, told.stderr
    train(*words[:1], tmp_path / "run", *words[1:])
    steps = json.loads((tmp_path / "run/run.json").read_text())["steps"]
    assert f"{steps['total']}, {steps['per_epoch']} an epoch of 21 examples" in told.stdout
    told = run_plugsft("check", runs, "plugins.bfd_packing.capacity=30")
    assert told.returncode == 2
    assert "of 21 examples have more than 30 tokens, the longest" in told.stderr
