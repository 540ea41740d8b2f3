"""Columns of `render` travel with the tokens to batches and steps, whatever prepares them."""

import datasets
import numpy as np
import pytest
from conftest import chats, read_metrics, run_plugsft, run_ranks, tiny_tables, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from plugin_packages import activate, install
from prepared_rows import prepare_rows, text_row

from plugsft import DataError, PluginError, RecipeError
from plugsft.base.types import Shard
from plugsft.batches.defaults import BatchDefaults
from plugsft.batches.plan import Plan
from plugsft.commands.recipes import check
from plugsft.data import prepare, sources
from plugsft.data.defaults import DataDefaults
from plugsft.lab.forecast.forecaster import read_epoch, workload_of
from plugsft.lab.trials import write_examples
from plugsft.lab.tune import keeps_steps
from plugsft.model.defaults import ModelDefaults
from plugsft.recipe.tables import Data, Source
from plugsft.registry.load import load, resolve
from plugsft.tokens.shards import Examples, write_index, write_shard
from plugsft.tokens.store import Tokens
from plugsft.tokens.views import cut, share_prompts

VALUES = {
    "bool": st.booleans(),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "float64": st.floats(allow_nan=False),
}
TELLS = """
    @plugin()
    class Tells:
        "Give examples their `tells` of the row as columns."
        tells: list[str]

        @hookimpl(wrapper=True)
        def render(self, rows):
            rendered = yield
            for name in self.tells:
                if any(name in row for row in rows):
                    rendered.columns[name] = [row.get(name) for row in rows]
            rendered.read = {*rendered.read, *self.tells}
            return rendered
"""


def write(folder, columns, counts):
    """Write shards of examples of two tokens; `columns` hold the values of all."""
    shards, first = [], 0
    for number, count in enumerate(counts):
        examples = Examples(
            ids=np.arange(2 * count, dtype=np.int32),
            mask=np.tile([False, True], count),
            counts=np.full(count, 2),
            num_sequences=np.ones(count, np.int64),
            rows=np.arange(first, first + count),
            columns={
                name: np.array(values[first : first + count], kind)
                for name, (kind, values) in columns.items()
            },
        )
        shards.append(Shard(f"data-{number}.arrow", count, columns=examples.types))
        write_shard(folder / shards[-1].file, examples)
        first += count
    write_index(folder, shards, {"key": "k"})


@settings(max_examples=30, deadline=None)
@given(st.data(), st.lists(st.integers(0, 5), min_size=1, max_size=3), st.booleans())
def test_what_is_read_is_what_was_written(tmp_path_factory, data, counts, in_memory):
    folder = tmp_path_factory.mktemp("tokens")
    kinds = data.draw(st.dictionaries(st.sampled_from("cba"), st.sampled_from([*VALUES])))
    columns = {
        name: (kind, data.draw(st.lists(VALUES[kind], min_size=sum(counts), max_size=sum(counts))))
        for name, kind in kinds.items()
    }
    write(folder, columns, counts)
    tokens, table = Tokens(folder, in_memory), datasets.load_from_disk(str(folder))
    present = columns if sum(counts) else {}
    assert {*tokens.columns} == {*present} == {*table.column_names} - {*BARE}
    for name, (kind, values) in present.items():
        assert tokens.columns[name].dtype == kind == table.features[name].dtype
        assert tokens.columns[name].tolist() == values == list(table[name])
    for number in range(sum(counts)):  # and each shard is opened
        assert len(tokens.example(number)[0]) == 2


BARE = ("input_ids", "loss_mask", "lengths", "shared", "trained", "row", "content")


def made_tokenizer(folder):
    [tokenizer] = (folder / "run/scratch").glob("tokenizer-*")
    return str(tokenizer)


ASK, TELL = [{"role": "user", "content": "who?"}], [{"role": "assistant", "content": "owls"}]
TEXT, CHAT = {"text": "owls hunt at night"}, {"messages": ASK + TELL}
PAIR = {"prompt": "who? ", "chosen": "owls", "rejected": "elks"}
READY = {"input_ids": [300, 301], "labels": [-100, 301]}
MIXED = {
    "": [
        (CHAT, TEXT),
        (TEXT, CHAT),
        (TEXT, {"review": "good"}),
        ({"prompt": ASK, "completion": TELL}, {"prompt": "who?", "completion": "owls"}),
        (READY, READY | {"loss_mask": [0, 1]}),
        (READY, {"input_ids": [300, 301]}),
        (READY, TEXT),
    ],
    "dpo": [
        (PAIR, {"prompt": ASK, "chosen": TELL, "rejected": ASK}),
        (PAIR, {"prompt": "who? ", "completion": "owls"}),
    ],
}


@pytest.mark.parametrize("plugin", MIXED)
def test_the_first_rows_of_a_source_decide_how_all_are_read(plugin, tmp_path, monkeypatch):
    tiny = tmp_path / "tokenizer"
    tiny.mkdir()
    prepare_rows(tiny, [chats(24)], {})
    monkeypatch.setattr(sources, "FIRST_ROWS", 10)
    files, kept = [[one] * 10 + [other] * 20 + [one] * 3 for one, other in MIXED[plugin]], []
    for size, workers in ((1000, 1), (7, 2)):
        monkeypatch.setattr(sources, "SLICE_ROWS", size)
        plugins = {"multiprocess_tokenize": {"workers": workers}} | ({plugin: {}} if plugin else {})
        (tmp_path / f"{size}").mkdir()
        tokens = prepare_rows(
            tmp_path / f"{size}",
            files,
            plugins,
            {"tokenizer": made_tokenizer(tiny)},
            on_bad_row="drop",
        )
        kept.append(tokens.rows.tolist())
    assert kept[0] == kept[1] == [*range(10), 30, 31, 32] * len(files)


@pytest.fixture
def tells(tmp_path, monkeypatch):
    activate(install(tmp_path / "site", tells=TELLS), monkeypatch)
    return {"tells": {"tells": ["label", "score"]}}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_row_s_columns_stay_with_its_example(tells, tmp_path, monkeypatch, home, workers):
    """Through slices, sources, bad rows, workers, the cache, a sample for trials, and cuts."""
    monkeypatch.setattr(sources, "SLICE_ROWS", 7)
    rows = [text_row(n, label=n % 3 == 0, score=n if n < 20 else n / 2) for n in range(40)]
    rows[4]["text"] = ""
    rows[30]["score"] = None  # whatever a bad row holds
    rows[30]["text"] = 7
    parts, plugins = [rows[:25], rows[25:]], {**tells, "arrow_cache": {}}
    if workers > 1:
        plugins["multiprocess_tokenize"] = {"workers": workers}
    tokens = prepare_rows(tmp_path, parts, plugins, on_bad_row="drop")
    assert home.exists() and len(tokens) == 38
    good = [each for number, each in enumerate(rows) if number not in (4, 30)]

    def ensure(tokens, expected):
        assert tokens.columns["label"].tolist() == [each["label"] for each in expected]
        assert tokens.columns["score"].tolist() == [float(each["score"]) for each in expected]
        assert {name: array.dtype.name for name, array in tokens.columns.items()} == {
            "label": "bool",
            "score": "float64",
        }

    ensure(tokens, good)
    assert tokens.facts["columns"] == {"label": "bool", "score": "float64"}
    named = {"tokens": str(tokens.folder), "model": {"tokenizer": made_tokenizer(tmp_path)}}
    for again in ({}, named):
        ensure(prepare_rows(tmp_path, parts, plugins, on_bad_row="drop", **again), good)
    numbers = np.array([5, 9, 30])
    ensure(cut(tokens, numbers, np.zeros(3, np.int64), np.full(3, 2)), [good[n] for n in numbers])
    write_examples(tokens, numbers, tmp_path / "sample")
    ensure(Tokens(tmp_path / "sample"), [good[n] for n in numbers])


def test_a_pair_has_one_value(tells, tmp_path):
    pairs = [
        {"prompt": "who? ", "chosen": f"owls {n}", "rejected": "elks", "score": n} for n in range(9)
    ]
    pairs[2]["rejected"] = ""
    tokens = prepare_rows(tmp_path, [pairs], {**tells, "dpo": {}}, on_bad_row="drop")
    assert tokens.facts["pairs"] == 8
    scores = [0, 1, 3, 4, 5, 6, 7, 8]
    assert tokens.columns["score"].tolist() == scores
    assert share_prompts(tokens).columns["score"].tolist() == scores
    assert tokens.columns["score"].dtype == np.int64


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, None], "the value None; it must be true, false, an integer of 64 bits or a float"),
        ([1, "2"], "the value '2'; it must be"),
        ([[1], [2]], r"the value \[1\]; it must be"),
        ([2**63, 1], "the value 9223372036854775808; it must be"),
    ],
)
def test_values_that_no_column_can_hold_are_refused(tells, tmp_path, values, message):
    rows = [text_row(n, score=value) for n, value in enumerate(values)]
    with pytest.raises(PluginError, match=rf"rows-0\.jsonl: .* the column 'score' {message}"):
        prepare_rows(tmp_path, [rows], tells)


def test_a_source_without_the_column_is_named(tells, tmp_path):
    parts = [[text_row(n, score=n) for n in range(3)], [text_row(n) for n in range(3)]]
    message = r"rows-1\.jsonl: its rows have no column 'score', but those of .*rows-0\.jsonl have; "
    with pytest.raises(DataError, match=message + "add it to all rows"):
        prepare_rows(tmp_path, parts, tells)


def test_booleans_beside_numbers_are_0_and_1(tells, tmp_path):
    parts = [[text_row(n, score=n) for n in range(3)], [text_row(n, score=n > 0) for n in range(3)]]
    tokens = prepare_rows(tmp_path, parts, tells)
    assert tokens.columns["score"].tolist() == [0, 1, 2, 0, 1, 1]
    parts[0][1]["score"] = 0.5
    (tmp_path / "floats").mkdir()
    model = {"tokenizer": made_tokenizer(tmp_path)}
    tokens = prepare_rows(tmp_path / "floats", parts, tells, model)
    assert tokens.columns["score"].tolist() == [0, 0.5, 2, 0, 1, 1]


WRONG = """
    @plugin()
    class Wrong:
        name: str = "score"
        count: int = 0

        @hookimpl(wrapper=True)
        def render(self, rows):
            rendered = yield
            rendered.columns[self.name] = [1] * (len(rows) + self.count)
            return rendered
"""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"count": 1},
            "'render' of plugin 'wrong' gave the column 'score' of length 4, but the number",
        ),
        ({"name": "lengths"}, "'lengths'; plugsft has a column of this name: rename it"),
    ],
)
def test_a_plugin_that_gives_wrong_columns_is_refused(tmp_path, monkeypatch, options, message):
    activate(install(tmp_path / "site", wrong=WRONG), monkeypatch)
    with pytest.raises(PluginError, match=message):
        prepare_rows(tmp_path, [[text_row(n) for n in range(3)]], {"wrong": options})


def test_evaluation_data_without_the_column_is_refused(tells, tiny, tmp_path):
    bare = write_jsonl(tmp_path / "bare.jsonl", [text_row(n) for n in range(9)])
    recipe = tiny(
        [text_row(n, score=n) for n in range(9)], plugins=tells, eval={"source": str(bare)}
    )
    result = run_plugsft(recipe)
    assert result.returncode == 2
    [line] = result.stderr.splitlines()
    assert f"eval.source: {bare}: its rows have no column 'score', but the training rows" in line


# A loss of its own for good and bad answers, as in KTO.
JUDGES = """
    import numpy as np
    import torch

    @plugin()
    class Judges:
        @hookimpl(wrapper=True)
        def render(self, rows):
            rendered = yield
            rendered.columns["label"] = [row["label"] for row in rows]
            rendered.read = {*rendered.read, "label"}
            return rendered

        @hookimpl(wrapper=True)
        def collate(self, tokens, examples):
            batch = yield
            labels = tokens.columns["label"][examples]
            assert (labels == (tokens.rows[examples] % 3 == 0)).all()
            signs = np.repeat(np.where(labels, 1.0, -1.0), tokens.targets[examples])
            return batch | {"_signs": torch.from_numpy(signs)}

        @hookimpl
        def step(self, model, batch, denominator, token_nll):
            nll = token_nll(model=model, batch=batch, summed=False)
            return torch.sigmoid(nll * batch["_signs"].to(nll)).sum() / denominator
"""


def test_a_label_travels_from_its_row_to_its_step(tiny, tmp_path, monkeypatch):
    activate(install(tmp_path / "site", judges=JUDGES), monkeypatch)
    rows = [text_row("x" * (n % 7), label=n % 3 == 0) for n in range(21)]
    data = write_jsonl(tmp_path / "eval.jsonl", rows[:5])
    recipe = tiny(
        rows, plugins={"judges": {}}, train={"micro_batch": 2}, eval={"source": str(data)}
    )
    runs = {"one": [], "two": [], "packed": ["plugins.bfd_packing={}", "train.micro_batch=1"]}
    metrics = {}
    for name, words in runs.items():
        ranks = 1 + (name == "two")
        result = run_ranks(ranks, recipe, f"output={tmp_path / name}", *words)
        assert result.returncode == 0, result.stderr
        metrics[name] = read_metrics(tmp_path / name)
    assert len(metrics["one"]) == 3
    for name in ("two", "packed"):
        for ours, theirs in zip(metrics["one"], metrics[name], strict=True):
            for metric in ("loss", "grad_norm"):
                assert ours[metric] == pytest.approx(theirs[metric], rel=1e-5), name


BALANCE = """
    import numpy as np
    from plugsft import Layouts

    class Dealt(Layouts):
        def __init__(self, layouts, labels):
            self.layouts, self.labels = layouts, labels

        def __len__(self):
            return len(self.layouts)

        def lay_out(self, number):
            layout = self.layouts[number]
            examples = np.concatenate([part for rank in layout for part in rank])
            examples = examples[np.argsort(self.labels[examples], kind="stable")]
            count = sum(map(len, layout))
            parts = [examples[first::count] for first in range(count)]
            return [parts[rank :: len(layout)] for rank in range(len(layout))]

    @plugin(after=["tells"])
    class Balance:
        "Deal the labels of each step out to its micro-batches."

        @hookimpl(wrapper=True)
        def plan_batches(self, columns):
            layouts = yield
            return Dealt(layouts, columns["label"] + columns["later"])
"""


def test_batches_are_planned_by_columns(tiny, tmp_path, monkeypatch, capsys):
    """On ranks; and in estimates, where a column of `add_columns` is not known yet."""
    adds = """
        import numpy as np

        @plugin(after=["balance"])
        class Adds:
            @hookimpl(wrapper=True)
            def add_columns(self):
                tokens = yield
                tokens.columns = {**tokens.columns, "later": np.ones(len(tokens))}
                return tokens
    """
    activate(install(tmp_path / "site", tells=TELLS, balance=BALANCE, adds=adds), monkeypatch)
    rows = [{**each, "label": int(n % 3 == 0)} for n, each in enumerate(chats(24))]
    plugins = {"tells": {"tells": ["label"]}, "balance": {}, "adds": {}}
    recipe = tiny(rows, plugins=plugins, train={"micro_batch": 2, "epochs": 4})
    metrics = []
    for ranks, words in ((2, []), (1, ["--without", "balance", f"output={tmp_path}/plain"])):
        result = run_ranks(ranks, recipe, *words)
        assert result.returncode == 0, result.stderr
        metrics.append(read_metrics(tmp_path / ("plain" if words else "run")))
    for ours, plain in zip(*metrics, strict=True):
        assert ours["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)

    [folder], (loaded, active) = (tmp_path / "run/tokens").iterdir(), load(recipe)
    hooks = active.attach(BatchDefaults()).hooks
    tokens = Tokens(folder)
    tokens.facts["sources"][0]["weight"] = 1.0
    tokens.columns["later"] = np.zeros(len(tokens))
    for step in range(1, 13):
        layout = Plan(tokens, loaded, 2, hooks).plan_step(step).layout
        sums = [tokens.columns["label"][part].sum() for rank in layout for part in rank]
        assert len(sums) == 4 and max(sums) - min(sums) <= 1
    check(recipe, [], ["adds"], None)
    assert "batches are planned by balance" in capsys.readouterr().out
    assert keeps_steps(loaded)
    loaded, active = load(recipe, [f"output={tmp_path}/planned"])
    active.attach(DataDefaults(loaded.folder), BatchDefaults(), ModelDefaults())
    epoch = read_epoch(loaded, active, tmp_path / "planned")
    assert workload_of(loaded, active, epoch, 2).micro_batches == 2


def test_pairs_are_planned_with_the_shapes_of_their_sequences(tmp_path):
    answers = ("owls", "elks, 9 bees and 5 mice"), ("3 owls hoot at 6", "no"), ("a", "b")
    pairs = [{"prompt": "who? ", "chosen": one, "rejected": other} for one, other in answers]
    tokens = prepare_rows(tmp_path, [pairs], {"dpo": {}})
    for shared in (tokens, share_prompts(tokens)):
        columns, counts = shared.plan_columns(), []
        for number in range(3):
            lengths = shared.sequences(np.array([number]))[0]
            counts.append((lengths.max(), len(lengths)))
        assert [*zip(columns["longest"], columns["sequences"], strict=True)] == counts
    texts = prepare_rows(tmp_path / "texts", [[text_row(n) for n in range(3)]], {})
    columns = texts.plan_columns()
    assert columns["longest"].tolist() == texts.lengths.tolist()
    assert columns["sequences"].tolist() == [1, 1, 1]


def test_columns_and_trained_turns_of_one_source_are_its_own(tmp_path, capsys):
    talk = [*ASK, *TELL, *ASK, *TELL]
    rows = [{"messages": talk}] * 3, [{"dialogue": talk}] * 3
    tables = tiny_tables(tmp_path, rows[0])
    files = [write_jsonl(tmp_path / f"rows-{n}.jsonl", each) for n, each in enumerate(rows)]
    plain, own = ({"source": str(file)} for file in files)
    changes = {"columns": {"messages": "dialogue"}, "train_on": "last"}

    def tokens_of(source):
        recipe, active = resolve(tables | {"data": {"sources": [plain, source]}})
        active.attach(DataDefaults(recipe.folder))
        return prepare.prepare(recipe, active).tokens

    with pytest.raises(DataError, match="no format has these columns: dialogue"):
        tokens_of(own)
    tokens = tokens_of(own | changes)
    assert (tokens.targets == [4, 4, 4, 2, 2, 2]).all() and len({*tokens.lengths}) == 1
    again = tokens_of(own | changes | {"train_on": "assistant"})
    assert len({*again.targets}) == 1 and again.folder != tokens.folder
    with pytest.raises(RecipeError, match="unknown name 'wieght'; did you mean 'weight'"):
        tokens_of(own | {"columns": {"wieght": "w"}})
    misspelt = Source(**own, columns={"messages": "dialog"})
    opened = [sources.open_source(Source(**plain)), sources.open_source(misspelt)]
    with pytest.raises(RecipeError, match="no row has the column 'dialog'"):
        sources.ensure_columns(Data(sources=[Source(**plain), misspelt]), opened)


def test_evaluation_rows_of_a_source_are_read_as_that_source(tmp_path):
    rows = [{"dialogue": [*ASK, *TELL]}] * 6
    plain = write_jsonl(tmp_path / "plain.jsonl", [{"messages": [*ASK, *TELL]}] * 6)
    own = write_jsonl(tmp_path / "own.jsonl", rows)
    source = {"source": str(own), "split": "train[:4]", "columns": {"messages": "dialogue"}}
    tables = tiny_tables(tmp_path) | {"data": {"sources": [{"source": str(plain)}, source]}}
    recipe, active = resolve(tables | {"eval": {"source": str(own), "split": "train[4:]"}})
    active.attach(DataDefaults(recipe.folder))
    assert len(prepare.prepare(recipe, active).evaluation) == 2
