"""Columns that nothing reads: refused if they change what a row means, else named."""

import os

import pytest
from conftest import chats, run_plugsft, tiny_tables, write_jsonl
from formats import ASK, POOR, ROWS, TELL
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from plugin_packages import activate, install

from plugsft import DataError, RecipeError
from plugsft.api import PlugsftError
from plugsft.commands.data import inspect
from plugsft.commands.recipes import check
from plugsft.data import prepare, sources
from plugsft.data.defaults import DataDefaults
from plugsft.data.formats import READ_COLUMNS
from plugsft.data.jsonl import RowList
from plugsft.data.load_tokenizer import train_tokenizer
from plugsft.data.render import CHANGES_MEANING, render_rows
from plugsft.data.slices import render
from plugsft.recipe.tables import Data
from plugsft.registry.load import resolve
from plugsft.tokens.tokenizer import lighten

# PLUGSFT_FULL=1 (tools/test --full) makes this many.
COUNT = 1_000 if os.environ.get("PLUGSFT_FULL") == "1" else 60
PAIRED = {"prompt", "chosen", "rejected", "system", "tools", "chat_template_kwargs", "weight"}
OTHERS = ["id", "score", "system", "history", "inputs", "prompts"]
"""Columns of other data sets; some are like one that is read."""
NOTHING = [None, [], ""]
VALUES = [*NOTHING, False, True, 0, 1, 0.5, "x", ["x"], [0], {"bytes": "x"}]


@pytest.fixture(scope="module")
def tokenizer():
    def texts(batch, source, wrapped):
        return render_rows(batch, wrapped, Data(source="none"))

    return lighten(train_tokenizer([RowList(chats(40))], texts, 500))


@pytest.fixture(scope="module")
def hooks(tmp_path_factory):
    """Give, for rows of a kind, the hooks of a run that reads them."""
    tables = tiny_tables(tmp_path_factory.mktemp("hooks"))

    def of(kind):
        plugins = {"dpo": {}} if kind == "preference" else {}
        recipe, active = resolve({**tables, "plugins": plugins})
        return active.attach(DataDefaults(recipe.folder)).hooks

    made = {kind: of(kind) for kind in ROWS}
    return made.__getitem__


def rendered(hook, rows, tokenizer, **data):
    return render(hook, Data(source="none", **data), "rows.jsonl", rows, tokenizer)


def test_every_format_is_here():
    assert READ_COLUMNS.keys() | {"preference"} == ROWS.keys()


@settings(max_examples=COUNT, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from([*ROWS]),
    st.lists(
        st.dictionaries(st.sampled_from([*CHANGES_MEANING, *OTHERS]), st.sampled_from(VALUES)),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
def test_a_row_that_means_something_else_is_never_learned(tokenizer, hooks, kind, extras, renamed):
    """Whatever the format, the column and its neighbours; and ignored, it changes nothing."""
    read = READ_COLUMNS.get(kind, PAIRED)
    extras = [{k: v for k, v in extra.items() if k not in read} for extra in extras]
    # Text with both answers is taken for preferences, and refused as a whole.
    assume(kind != "text" or not {"chosen", "rejected"} <= {name for one in extras for name in one})
    telling = [{k for k, v in extra.items() if v not in NOTHING} for extra in extras]
    rows = [ROWS[kind] | extra for extra in extras]
    columns = {}
    if renamed:
        ours = next(iter(ROWS[kind]))
        columns = {ours: f"our {ours}"}
        rows = [{columns.get(k, k): v for k, v in row.items()} for row in rows]
    plain = rendered(hooks(kind), [ROWS[kind]], tokenizer)
    found = rendered(hooks(kind), rows, tokenizer, columns=columns)
    wrong = {number for number, names in enumerate(telling) if names & CHANGES_MEANING.keys()}
    assert found.bad.keys() == wrong
    for number in wrong:
        [name] = [name for name in CHANGES_MEANING if found.bad[number].startswith(f"'{name}' ")]
        assert name in telling[number]
        assert f'set data.ignore = ["{name}"] to train without it' in found.bad[number]
    good = [number for number in range(len(rows)) if number not in wrong]
    sequences = len(plain.texts)
    assert found.texts == plain.texts * len(good) and found.spans == plain.spans * len(good)
    assert found.rows == [number for number in good for _ in range(sequences)]
    others = {name for extra in extras for name in extra}
    if len(wrong) < len(rows) or kind != "preference":
        assert {*found.unread} == others
    cured = rendered(hooks(kind), rows, tokenizer, columns=columns, ignore=[*others])
    assert cured.texts == plain.texts * len(rows) and cured.spans == plain.spans * len(rows)
    assert not cured.bad and cured.warnings.keys() == plain.warnings.keys() and not cured.unread


@pytest.mark.parametrize(
    ("kind", "column"), [("text", "height"), ("alpaca", "inputs"), ("messages", "system")]
)
def test_a_column_like_one_that_is_read_is_only_named(tokenizer, hooks, kind, column):
    found = rendered(hooks(kind), [ROWS[kind] | {column: "tall"}], tokenizer)
    plain = rendered(hooks(kind), [ROWS[kind]], tokenizer)
    assert not found.bad and found.unread == [column]
    assert found.texts == plain.texts and found.warnings == plain.warnings


def run_of(folder, rows, plugins=None, **data):
    tables = tiny_tables(folder, rows)
    tables["data"] |= data
    recipe, active = resolve({**tables, "plugins": plugins or {}})
    active.attach(DataDefaults(recipe.folder))
    return prepare.prepare(recipe, active).tokens


def test_the_last_of_many_rows_is_seen_too(tmp_path, monkeypatch):
    """Whatever a sample says: each row is looked at when it is prepared."""
    monkeypatch.setattr(sources, "SLICE_ROWS", 100)
    rows = [ROWS["completion"]] * 1_999 + [ROWS["completion"] | {"label": False}]
    with pytest.raises(DataError, match=r"line 2000: 'label' tells good answers"):
        run_of(tmp_path, rows)
    tokens = run_of(tmp_path, rows, on_bad_row="drop")
    assert len(tokens) == 1_999 and tokens.rows[-1] == 1_998
    assert len(run_of(tmp_path, rows, ignore=["label"])) == 2_000


@pytest.mark.parametrize(
    ("column", "readers"),
    [
        ("label", "[plugins.kto]"),
        ("chosen", "[plugins.dpo] or [plugins.reward]"),
        ("rejected", "[plugins.dpo] or [plugins.reward]"),
    ],
)
def test_a_refused_column_names_the_plugins_that_read_it(tmp_path, column, readers):
    with pytest.raises(DataError) as refused:
        run_of(tmp_path, [ROWS["messages"] | {column: "x"}])
    cure = f'add {readers} to learn from it, or set data.ignore = ["{column}"] to train without it'
    assert cure in str(refused.value)


def test_a_margin_is_a_column_of_reward_and_else_unused(tmp_path):
    rows = [ROWS["preference"] | {"margin": 1.0}] * 3
    tokens = run_of(tmp_path / "dpo", rows, plugins={"dpo": {}})
    assert tokens.facts["unused_columns"] == ["margin"]
    tokens = run_of(tmp_path / "reward", rows, plugins={"reward": {}})
    assert not tokens.facts["unused_columns"] and tokens.columns["margin"].tolist() == [1.0] * 3


def test_answers_to_compare_are_not_taken_for_plain_chats(tmp_path):
    """As in data sets that hold the chosen chat as `messages`, too."""
    row = {"messages": [ASK, TELL], "chosen": [ASK, TELL], "rejected": [ASK, POOR]}
    with pytest.raises(DataError, match=r"add \[plugins.dpo\] or \[plugins.reward\] to learn"):
        run_of(tmp_path, [row] * 3)
    assert len(run_of(tmp_path, [row] * 3, ignore=["chosen", "rejected"])) == 3
    assert run_of(tmp_path, [row] * 3, plugins={"dpo": {}}).facts["pairs"] == 3


def test_rows_of_tokens_are_named(tmp_path):
    with pytest.raises(DataError, match=r"with \[model.scratch\], set model.tokenizer too"):
        run_of(tmp_path, [{"input_ids": [1, 2], "labels": [1, 2]}])
    with pytest.raises(DataError, match="columns: chosen_ids, prompt_ids, rejected_ids"):
        run_of(tmp_path, [{"prompt_ids": [1, 2], "chosen_ids": [1], "rejected_ids": [2]}])


READS = """
    @plugin()
    class Reads:
        "Leave out the rows whose label is false."

        @hookimpl(wrapper=True)
        def render(self, rows):
            rows[:] = [row for row in rows if row["label"]]
            rendered = yield
            rendered.read = {*rendered.read, "label"}
            return rendered
"""


def test_a_plugin_says_what_it_reads(tmp_path, monkeypatch):
    activate(install(tmp_path / "site", reads=READS), monkeypatch)
    rows = [ROWS["completion"] | {"label": good, "images": None} for good in (True, False)] * 3
    assert len(run_of(tmp_path, rows, plugins={"reads": {}})) == 3
    rows[2]["images"] = ["x"]
    with pytest.raises(DataError, match="'images' holds images"):
        run_of(tmp_path, rows, plugins={"reads": {}})


def test_what_is_ignored_must_be_there(tmp_path):
    rows = [ROWS["text"] | {"label": 1}] * 3
    with pytest.raises(
        RecipeError, match=r"data\.ignore: no row has the column 'lable'; columns: "
    ):
        run_of(tmp_path, rows, ignore=["lable"])
    with pytest.raises(RecipeError, match="ignore and columns both name 'label'"):
        run_of(tmp_path, rows, ignore=["label"], columns={"text": "label"})


def odd(count, *turns):
    return [{"messages": [*turns]}] * count


def test_unusual_turns_are_counted(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sources, "SLICE_ROWS", 5)
    rows = [
        *odd(7, ASK, TELL),
        *odd(12, ASK, ASK, TELL),
        *odd(1, ASK, TELL, TELL),
        *odd(1, ASK, TELL, ASK),
        {"messages": [ASK, {**TELL, "weight": 0}, ASK, ASK, TELL], "score": 3},
    ]
    warnings = run_of(tmp_path, rows).facts["warnings"]
    assert warnings == {
        "two turns of the user in a row": {"count": 13, "rows": [*range(7, 17)]},
        "two turns of the assistant in a row": {"count": 1, "rows": [19]},
        "the conversation ends with a turn of the user": {"count": 1, "rows": [20]},
    }
    shown = capsys.readouterr().out
    assert "\ndata: unused columns: score\n" in shown
    assert "warning: data: lines 8, 9, 10, 11, 12 and 8 more: two turns of" in shown
    run_of(tmp_path, rows)
    shown = capsys.readouterr().out
    assert "two turns of the user in a row" in shown, "from cache, too"
    assert "\ndata: unused columns: score\n" in shown, "from cache, too"


def test_unusual_turns_of_pairs_are_counted_once(tmp_path):
    row = {"prompt": [ASK, ASK], "chosen": [TELL], "rejected": [POOR, POOR]}
    facts = run_of(tmp_path, [row] * 2, plugins={"dpo": {}}).facts
    assert facts["warnings"] == {
        "two turns of the user in a row": {"count": 2, "rows": [0, 1]},
        "two turns of the assistant in a row": {"count": 2, "rows": [0, 1]},
    }


def test_check_and_inspect_name_them(tiny, tmp_path, capsys):
    rows = [ROWS["completion"] | {"label": n % 2 == 0, "source": "x"} for n in range(20)]
    recipe = tiny(rows=rows)
    commands = {
        "unused columns: label, score, url": lambda: check(recipe, [], [], None),
        "unused columns label, score, url": lambda: inspect(recipe, [], []),
    }
    for command in commands.values():
        with pytest.raises(PlugsftError) as refused:
            command()
        said = str(refused.value)
        assert "lines 1, 2, 3, 4, 5 and 15 more: 'label' tells good answers" in said
        assert 'data.ignore = ["label"] to train without it' in said
    result = run_plugsft(recipe)
    assert result.returncode == 2 and "'label' tells good answers" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    rows = [ROWS["chat completion"] | {"label": None, "score": n, "url": "x"} for n in range(9)]
    rows[5]["prompt"] = [ASK, ASK]
    write_jsonl(tmp_path / "data.jsonl", rows)
    for unused, command in commands.items():
        capsys.readouterr()
        command()
        said = " ".join(capsys.readouterr().out.split())
        assert "line 6: two turns of the user in a row" in said
        assert unused in said


@pytest.mark.parametrize("name", ["Label", "IMAGES", "Input_IDs"])
def test_the_case_of_a_name_hides_nothing(hooks, tokenizer, name):
    row = ROWS["text"] | {name: [1]}
    rendered = render(hooks("text"), Data(source="x"), "x", [row], tokenizer)
    assert f"'{name}' " in rendered.bad[0] and f'data.ignore = ["{name}"]' in rendered.bad[0]
