"""From sources to tokens: which rows are used, left out, and reported."""

import json
import multiprocessing
import pickle
import re
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
from conftest import (
    chats,
    must_succeed,
    read_metrics,
    run_plugsft,
    start_plugsft,
    tiny_tables,
    write_jsonl,
    write_recipe,
)
from formats import ASK, TELL
from plugin_packages import LOUD, activate, install

from plugsft import DataError, RecipeError
from plugsft.base.machine import look
from plugsft.base.types import Slice
from plugsft.data import prepare, sources
from plugsft.data.chat import CHATML
from plugsft.data.defaults import DataDefaults
from plugsft.data.formats import ROLES
from plugsft.data.prepare import key_of
from plugsft.registry.load import load, resolve
from plugsft.start.checks import Case
from plugsft.start.open import prepare_data
from plugsft.tokens.schema import FORMAT
from plugsft.tokens.store import Tokens

GOOD = {"messages": [ASK, TELL]}
UNKNOWN = f"unknown role 'nobody'; known are {', '.join(ROLES)}"
NOBODY = {"messages": [{"role": "nobody", "content": "x"}, TELL]}
LONG = {"messages": [ASK, {**TELL, "content": "owl " * 300}]}
LATE = {"messages": [{**ASK, "content": "who " * 300}, TELL]}


@pytest.fixture
def run(tmp_path):
    """Give `run(rows, max_length=...)`: prepares rows, returns all, tokens, evaluation tokens."""

    def make(rows, eval=None, plugins=None, **data):
        tables = tiny_tables(tmp_path, rows)
        tables["data"] |= {"max_length": 64, **data}
        tables["eval"] = eval or {}
        if eval is None:
            del tables["eval"]
        if "sources" in data:
            del tables["data"]["source"]
        recipe, active = resolve({**tables, "plugins": plugins or {}})
        active.attach(DataDefaults(recipe.folder))
        made = prepare.prepare(recipe, active)
        return made, made.tokens, made.evaluation

    return make


def texts(work, tokens):
    return [work.tokenizer.decode(tokens.example(n)[0]) for n in range(len(tokens))]


def test_rows_become_examples_in_order(run):
    rows = chats(50)
    work, tokens, _ = run(rows, max_length=256)
    assert texts(work, tokens) == [
        work.tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in rows
    ]
    assert tokens.rows.tolist() == list(range(50))
    facts = tokens.facts
    assert (facts["rows"], facts["examples"]) == (50, 50)
    assert facts["tokens"] == tokens.lengths.sum()
    assert facts["trained_tokens"] == tokens.targets.sum()
    assert facts["mask"] == "each answer as a server would write it, by the chat template"
    for number, row in enumerate(rows):
        ids, mask = tokens.example(number)
        said = [turn["content"] + "<|im_end|>" for turn in row["messages"][1::2]]
        assert work.tokenizer.decode(ids[mask]) == "".join(said)


def test_slices_leave_no_seam(run, monkeypatch):
    rows = chats(53)
    _, whole, _ = run(rows)
    expected = [whole.example(n)[0].tolist() for n in range(len(whole))]
    monkeypatch.setattr(sources, "SLICE_ROWS", 10)
    _, cut, _ = run(rows, on_bad_row="drop")  # another key
    assert [cut.example(n)[0].tolist() for n in range(len(cut))] == expected
    assert cut.rows.tolist() == list(range(53))
    assert len(list(cut.folder.glob("data-*.arrow"))) == 6


def test_a_line_that_is_not_utf_8_has_its_own_reason(run, tmp_path):
    path = write_jsonl(tmp_path / "latin.jsonl", [GOOD, 3, GOOD])
    path.write_bytes(path.read_bytes() + '{"text": "café"}\n'.encode("latin-1"))
    with pytest.raises(
        DataError,
        match=r"latin.jsonl: line 2: not a JSON object; line 4: not UTF-8\. Correct them, or",
    ):
        run(None, source=str(path))


BAD = [GOOD, NOBODY, GOOD, {"messages": []}, NOBODY, 3, {"messages": [ASK]}, GOOD]


def test_bad_rows_stop_the_run_with_reasons_and_numbers(run, tmp_path):
    with pytest.raises(DataError) as caught:
        run(BAD)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/data.jsonl: lines 2, 5: unknown role 'nobody'; known ")
    for part in (
        "; line 4: 'messages' is not a list of turns, or is empty",
        "; line 6: not a JSON object",
        "; line 7: no turn of the assistant to train",
        '. Correct them, or set data.on_bad_row = "drop"',
    ):
        assert part in message, part
    assert not list((tmp_path / "run").rglob("*.arrow")), "and leave nothing"


def test_bad_rows_are_dropped_and_counted_if_so_wished(run, capsys):
    _, tokens, _ = run(BAD, on_bad_row="drop")
    assert tokens.rows.tolist() == [0, 2, 7]
    assert tokens.facts["bad_rows"][UNKNOWN] == {"count": 2, "rows": [1, 4]}
    assert sum(entry["count"] for entry in tokens.facts["bad_rows"].values()) == 5
    assert "3 examples of 8 rows" in capsys.readouterr().out


def test_rows_of_a_slice_are_named_with_it(run):
    with pytest.raises(
        DataError, match=r"data.jsonl \(split train\[1:\]\): lines 2, 5: unknown role"
    ):
        run(BAD, split="train[1:]")


def test_bad_rows_in_later_slices_keep_their_numbers(run, monkeypatch):
    monkeypatch.setattr(sources, "SLICE_ROWS", 6)
    rows = [GOOD] * 20
    for number in (2, 3, 11, 19):
        rows[number] = NOBODY
    _, tokens, _ = run(rows, on_bad_row="drop")
    assert tokens.facts["bad_rows"][UNKNOWN]["rows"] == [2, 3, 11, 19]
    assert tokens.rows.tolist() == [n for n in range(20) if n not in (2, 3, 11, 19)]


def test_a_later_slice_is_read_in_the_format_of_the_first_rows(run, monkeypatch):
    monkeypatch.setattr(sources, "SLICE_ROWS", 10)
    _, tokens, _ = run([GOOD] * 110 + [{"text": "owls hoot"}] * 10, on_bad_row="drop")
    assert len(tokens) == 110
    assert sum(entry["count"] for entry in tokens.facts["bad_rows"].values()) == 10


@pytest.mark.parametrize("rows", [[{"messages": [ASK]}] * 3, [NOBODY]])
def test_a_data_set_without_a_trained_token_stops(run, rows):
    with pytest.raises(DataError, match=r"no row has a token to train on: line.*Correct"):
        run(rows, on_bad_row="drop")


def test_an_empty_slice_stops(run):
    with pytest.raises(DataError, match="has no rows; set another split"):
        run([GOOD], split="train[:0]")


def test_long_rows_are_cut_dropped_or_refused(run):
    rows = [GOOD, LONG, GOOD, LONG]
    work, tokens, _ = run(rows)
    assert tokens.lengths.max() == 64 and len(tokens) == 4
    assert tokens.facts["truncated"] == {"count": 2, "rows": [1, 3]}
    whole = work.tokenizer.apply_chat_template(LONG["messages"])["input_ids"]
    assert tokens.example(1)[0].tolist() == whole[:64]
    _, tokens, _ = run(rows, too_long="drop")
    assert tokens.rows.tolist() == [0, 2]
    assert tokens.facts["bad_rows"] == {"longer than 64 tokens": {"count": 2, "rows": [1, 3]}}
    with pytest.raises(DataError, match=r"lines 2, 4: longer than 64 tokens\. Raise data.max_l"):
        run(rows, too_long="error")


def test_a_row_that_truncation_leaves_without_a_target_is_left_out_and_counted(run, capsys):
    _, tokens, _ = run([GOOD, LATE])
    assert tokens.rows.tolist() == [0] and tokens.facts["truncated"]["count"] == 0
    reason = "no trained token, or two equal answers, within data.max_length; left out"
    assert not tokens.facts["bad_rows"]
    assert tokens.facts["warnings"] == {reason: {"count": 1, "rows": [1]}}
    assert "1 row left out" in prepare.summarize(tokens.facts, "prepared")
    assert f"warning: data: line 2: {reason}" in capsys.readouterr().out
    with pytest.raises(DataError, match=rf"line 1: {reason}\. Raise data.max_length"):
        run([LATE])
    # A row that is malformed still stops the run, and only that row is named.
    with pytest.raises(
        DataError, match=r"line 3: no turn of the assistant to train\. Correct it, or set"
    ) as found:
        run([GOOD, LATE, {"messages": [GOOD["messages"][0]]}])
    assert "line 2" not in str(found.value)


def test_unknown_columns_name_the_known_ones(run):
    with pytest.raises(DataError, match=r"these columns: chat, id. Known are messages; prompt and"):
        run([{"id": 1, "chat": []}])


def test_missing_columns_stop_before_a_row_is_rendered(run, tmp_path):
    rows = [{"dialog": GOOD["messages"], "id": 1}] * 3
    nope = "data.columns: no row has the column 'nope' (for tools); columns: dialog, id"
    with pytest.raises(RecipeError, match=re.escape(nope)):
        run(rows, columns={"messages": "dialog", "tools": "nope"})
    with pytest.raises(DataError, match=re.escape("dialog, tools (renamed by [data.columns])")):
        run(rows, columns={"tools": "id"})
    # What is evaluated on may lack what the rest has.
    other = write_jsonl(tmp_path / "other.jsonl", rows)
    with_tools = [*rows, {**rows[0], "functions": []}]
    columns = {"messages": "dialog", "tools": "functions"}
    _, tokens, evaluation = run(with_tools, columns=columns, eval={"source": str(other)})
    assert (len(tokens), len(evaluation)) == (4, 3)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"text": "owls"}, "owls<|im_end|>"),
        ({"prompt": "who?", "completion": "owls"}, "who?owls<|im_end|>"),
    ],
)
def test_other_formats(run, row, text):
    work, tokens, _ = run([row] * 3)
    ids, mask = tokens.example(0)
    assert work.tokenizer.decode(ids) == text
    trained = work.tokenizer.decode(ids[mask])
    # The first token of a text has nothing before it that could predict it.
    assert trained == ("owls<|im_end|>" if "prompt" in row else work.tokenizer.decode(ids[1:]))


def test_a_mixture_is_one_data_set(run, tmp_path):
    one = write_jsonl(tmp_path / "one.jsonl", [GOOD] * 4)
    two = write_jsonl(tmp_path / "two.jsonl", [{"text": "owls " * (n + 1)} for n in range(6)])
    sources = [{"source": str(one), "weight": 0.5}, {"source": str(two), "split": "train[2:5]"}]
    work, tokens, _ = run(None, sources=sources)
    assert [(source["examples"], source["weight"]) for source in tokens.facts["sources"]] == [
        (4, 0.5),
        (3, 1),
    ]
    assert [tokens.source_of(n) for n in range(7)] == [(0, n) for n in range(4)] + [
        (1, n) for n in range(3)
    ]
    assert texts(work, tokens)[4] == "owls owls owls <|im_end|>"
    _, again, _ = run(None, sources=[{**sources[0], "weight": 3.0}, sources[1]])
    assert again.folder == tokens.folder, "weights do not change the tokens"
    assert again.facts["sources"][0]["weight"] == 3.0


def test_evaluation_data_is_prepared_like_the_rest(run, tmp_path):
    other = write_jsonl(tmp_path / "other.jsonl", [GOOD] * 5)
    _, tokens, evaluation = run([GOOD] * 9, eval={"source": str(other)})
    assert (len(tokens), len(evaluation)) == (9, 5) and evaluation.folder != tokens.folder
    _, tokens, evaluation = run([GOOD] * 9, eval={"split": "train[-2:]"})
    assert len(evaluation) == 2
    with pytest.raises(RecipeError, match=r"eval.source: no rows of its own"):
        run(None, sources=[{"source": str(other)}], eval={})


def test_prepared_once_then_found(run, capsys):
    rows = chats(10)
    _, first, _ = run(rows)
    assert "from cache" not in capsys.readouterr().out
    before = {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    _, second, _ = run(rows)
    assert "from cache" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in second.folder.iterdir()} == before


def test_what_changes_the_tokens_changes_the_key_and_nothing_else_does(tmp_path, monkeypatch):
    activate(install(tmp_path / "site", loud=LOUD, quiet=QUIET), monkeypatch)

    def key(**changes):
        tables = tiny_tables(tmp_path, [GOOD] * 3)
        for name, change in changes.items():
            merge = isinstance(tables.get(name), dict)
            tables[name] = {**tables[name], **change} if merge else change
        recipe, active = resolve(tables)
        active.attach(DataDefaults(recipe.folder))
        return prepare.prepare(recipe, active).tokens.facts["key"]

    other = tmp_path / "other.jinja"
    other.write_text(CHATML.read_text() + "{# the same, almost #}")
    base = key()
    for same in (
        {"output": str(tmp_path / "elsewhere")},
        {"train": {"batch_size": 3, "seed": 4, "learning_rate": 1.0}},
        {"plugins": {"quiet": {}}},
        {"checkpoint": {"every": 3}},
    ):
        assert key(**same) == base, same
    others = [
        key(data={"max_length": 65}),
        key(data={"too_long": "drop"}),
        key(data={"train_on": "last"}),
        key(data={"template_kwargs": {"add_generation_prompt": True}}),
        key(model={"chat_template": str(other)}),
        key(plugins={"loud": {}}),
        key(plugins={"loud": {"mark": "?"}}),
    ]
    assert len({base, *others}) == 8
    moved = write_jsonl(tmp_path / "moved.jsonl", [GOOD] * 3)
    assert key(data={"source": str(moved)}) == base, "moved data is the same data"
    write_jsonl(moved, [GOOD] * 2 + [LONG])
    assert key(data={"source": str(moved)}) != base


QUIET = """
    @plugin()
    class Quiet:
        @hookimpl(wrapper=True)
        def load_batches(self):
            return (yield)
"""
OWN = """
    from plugsft import Rendered

    @plugin()
    class Own:
        @hookimpl
        def render(self, rows):
            if "owl" not in rows[0]:
                return None
            texts = [row["owl"] for row in rows]
            return Rendered(texts, [[(0, len(text))] for text in texts], list(range(len(rows))))
"""


def test_a_plugin_s_format_also_trains_a_new_tokenizer(run, tmp_path, monkeypatch):
    activate(install(tmp_path / "site", own=OWN), monkeypatch)
    work, tokens, _ = run([{"owl": "owls hoot"}] * 3, plugins={"own": {}})
    assert texts(work, tokens) == ["owls hoot"] * 3
    _, tokens, _ = run([GOOD] * 3, plugins={"own": {}})
    assert len(tokens) == 3, "None means: not my format"


def test_prepare_reports_the_tokenizer_and_plugins(tmp_path):
    tables = tiny_tables(tmp_path) | {"plugins": {"arrow_cache": {"folder": str(tmp_path)}}}
    tables["plugins"]["length_group"] = {}
    path = write_recipe(tmp_path / "recipe.toml", tables)
    for found in ("miss: built in", "hit: "):
        *_, plugin, trained, tokens = run_plugsft("prepare", path).stdout.splitlines()
        assert plugin.startswith(f"plugin arrow_cache: {found}")
        assert tokens.startswith("tokens: ")
    # With that tokenizer, a run takes these tokens.
    folder = trained.removeprefix("tokenizer: ")
    tables["data"]["tokens"] = tokens.removeprefix("tokens: ")
    with pytest.raises(RecipeError, match="`plugsft prepare` prints its folder"):
        resolve(tables)
    tables["model"]["tokenizer"] = folder
    result = run_plugsft(write_recipe(path, tables))
    assert result.returncode == 0 and "already prepared" in result.stdout, result


def test_work_travels_to_another_process(run, tmp_path):
    one = write_jsonl(tmp_path / "one.jsonl", chats(30))
    tables = tiny_tables(tmp_path)
    tables["data"] = {"sources": [{"source": str(one), "weight": 0.5}], "max_length": 64}
    recipe, active = resolve(tables)
    active.attach(DataDefaults(recipe.folder))
    tokens = prepare.prepare(recipe, active).tokens
    data = prepare.open_data(recipe, active)
    work, part = data.work, data.sources[0].part(0, 30)
    assert work.hooks and pickle.loads(pickle.dumps(work))._hooks is None
    (tmp_path / "there").mkdir()
    work.folder = tmp_path / "there"
    # A process of its own, which has nothing but what travels.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        shard = pool.submit(work.tokenize, Slice(0, 0, 30, part)).result()
    there = (tmp_path / "there" / shard.file).read_bytes()
    assert there == (tokens.folder / shard.file).read_bytes()


def test_several_processes_prepare_one_output(tmp_path):
    tables = tiny_tables(tmp_path, chats(300))
    path = write_recipe(tmp_path / "recipe.toml", tables)
    running = [start_plugsft("prepare", path) for _ in range(4)]
    done = [process.wait() for process in running]
    assert [one.returncode for one in done] == [0] * 4, done
    (folder,) = (tmp_path / "run/tokens").iterdir()
    assert len(Tokens(folder)) == 300
    published = [one for one in done if re.search(r"^data: .*, in [\d.]+ s$", one.stdout, re.M)]
    assert len(published) == 1


def test_tokens_on_disk_name_their_format_and_key(run):
    _, tokens, _ = run(chats(10))
    facts = json.loads((tokens.folder / "facts.json").read_text())
    assert facts["key_parts"]["format"] == FORMAT and facts["key"] == tokens.folder.name
    assert np.array_equal(Tokens(tokens.folder).lengths, tokens.lengths)


def test_a_resolved_recipe_prepares_the_same_tokens(tmp_path):
    path = write_recipe(tmp_path / "recipe.toml", tiny_tables(tmp_path))
    recipe, active = load(path)
    active.attach(DataDefaults(recipe.folder))
    tokens = prepare.prepare(recipe, active).tokens
    tables = recipe.model_dump(exclude_none=True)
    recipe, active = resolve(tables)
    active.attach(DataDefaults(recipe.folder))
    assert prepare.prepare(recipe, active).tokens.folder == tokens.folder


@pytest.fixture
def named(tmp_path):
    """Prepared tokens, and `recipe(**data)`: tables that name them."""
    tables = tiny_tables(tmp_path, chats(30))
    path = write_recipe(tmp_path / "recipe.toml", tables)
    must_succeed(path)
    tables["model"] = {"path": str(tmp_path / "run/model")}
    path = write_recipe(tmp_path / "prepare.toml", tables)
    result = run_plugsft("prepare", path, f"output={tmp_path / 'cpu'}")
    folder = result.stdout.splitlines()[-1].removeprefix("tokens: ")
    tables["output"] = str(tmp_path / "gpu")

    def recipe(**data):
        kept = {key: value for key, value in {**tables["data"], **data}.items() if value}
        return write_recipe(tmp_path / "train.toml", {**tables, "data": kept})

    return folder, recipe


def test_a_run_takes_tokens_that_were_prepared_elsewhere(named, tmp_path):
    folder, recipe = named
    fresh = run_plugsft(recipe(), f"output={tmp_path / 'fresh'}")
    (tmp_path / "data.jsonl").rename(tmp_path / "away.jsonl")
    for number, source in enumerate([None, str(tmp_path / "data.jsonl")]):
        out = tmp_path / f"named-{number}"
        result = run_plugsft(recipe(tokens=folder, source=source), f"output={out}")
        assert result.returncode == 0 and "already prepared" in result.stdout, result
        assert not (out / "tokens").exists()
        losses = [line["loss"] for line in read_metrics(out)]
        assert losses == [line["loss"] for line in read_metrics(tmp_path / "fresh")]
        checked = run_plugsft("check", recipe(tokens=folder, source=source), f"output={out}-again")
        assert checked.returncode == 0 and "30 examples of 30 rows" in checked.stdout, checked
        assert f"steps       {len(losses)}" in checked.stdout
        again = run_plugsft(out / "recipe.toml", f"output={out}-again")
        assert again.returncode == 0 and fresh.returncode == 0, again


def test_tokens_of_another_recipe_are_refused_with_the_parts_that_differ(named, tmp_path):
    folder, recipe = named
    other = tmp_path / "other.jinja"
    other.write_text(CHATML.read_text() + "{# the same, almost #}")
    write_jsonl(tmp_path / "more.jsonl", chats(31))
    result = run_plugsft(
        recipe(tokens=folder, source=str(tmp_path / "more.jsonl"), max_length=100),
        "data.train_on=last",
        f"model.chat_template={other}",
    )
    assert result.returncode == 2 and "Traceback" not in result.stderr
    parts = "data, options.max_length, options.train_on, template; undo the change"
    assert f"data.tokens: {folder} was prepared with another {parts}" in result.stderr
    for wrong in (tmp_path / "run/model", tmp_path / "nowhere"):
        result = run_plugsft(recipe(tokens=str(wrong)))
        assert result.returncode == 2 and "data.tokens: " in result.stderr, result.stderr
    result = run_plugsft("prepare", recipe(tokens=folder))
    assert result.returncode == 2 and "is prepared already" in result.stderr


def test_a_row_left_out_has_one_number_and_rows_of_eval_are_said_to_be_its(tiny, tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", [GOOD, LATE, GOOD, NOBODY])
    held = write_jsonl(tmp_path / "held.jsonl", [GOOD, NOBODY, LATE])
    data = {"source": str(rows), "max_length": 64, "on_bad_row": "drop"}
    recipe = tiny(data=data, train={"steps": 1}, eval={"source": str(held), "every": 1})
    checked, ran = run_plugsft("check", recipe), run_plugsft(recipe)
    lost = "no trained token, or two equal answers, within data.max_length; left out"
    assert f"line 2: {lost}" in checked.stdout and "line 4: unknown role" in checked.stdout
    assert re.search("data: 2 examples of 4 rows.*, 2 rows left out", ran.stdout), ran.stdout
    assert re.search("eval: 1 example of 3 rows.*, 2 rows left out", ran.stdout)
    assert f"warning: data: line 2: {lost}" in ran.stdout
    assert "warning: data: line 4: unknown role" in ran.stdout
    assert f"warning: eval: line 3: {lost}" in ran.stdout
    assert "warning: eval: line 2: unknown role" in ran.stdout
    assert "2 left out" in run_plugsft("show", tmp_path / "run").stdout
    report = (tmp_path / "run/report.html").read_text()
    shown = re.findall(r"(warnings, no trained token[^<]*, rows)\W.*?(\d+)\s*<", report, re.S)
    assert [number for _, number in shown] == ["2", "3"]


def test_lines_are_counted_with_blank_ones_and_rows_of_other_files_from_0(run, tmp_path):
    path = tmp_path / "gaps.jsonl"
    path.write_text(f"\n{json.dumps(GOOD)}\n\n \nnope\n{json.dumps(NOBODY)}\n")
    with pytest.raises(DataError, match=r"gaps.jsonl: line 5: not a JSON .*; line 6: unknown"):
        run(None, source=str(path))
    with pytest.raises(DataError, match=r"split train\[1:\]\): line 5: .*; line 6: unknown"):
        run(None, source=str(path), split="train[1:]")
    path = tmp_path / "array.json"
    path.write_text(json.dumps([GOOD, *[NOBODY] * 7]))
    with pytest.raises(DataError, match=r"rows 2, 3, 4, 5, 6 and 2 more: unk"):
        run(None, source=str(path))
    path.write_text(json.dumps([GOOD, NOBODY]))
    with pytest.raises(DataError, match=r"row 2: unknown .*\. Correct it, or"):
        run(None, source=str(path))


def test_a_template_with_a_date_writes_the_first_day_of_the_run(tiny, tmp_path):
    """Also in a later resume or inspection; and tokens of another day are others."""
    template, record = tmp_path / "dated.jinja", tmp_path / "run/run.json"
    template.write_text("{{ strftime_now('%Y-%m-%d') }}" + CHATML.read_text())
    path = tiny(model={"chat_template": str(template)})
    recipe, active = load(path)
    active.attach(DataDefaults(recipe.folder))
    keys = [key_of(prepare.open_data(recipe, active).work, [], active)]
    record.parent.mkdir(exist_ok=True)
    for day in ("2001-02-03", "2002-03-04"):
        record.write_text(json.dumps({"data": {"key_parts": {"day": day}}}))
        keys.append(key_of(prepare.open_data(recipe, active).work, [], active))
        assert keys[-1]["day"] == day and keys[-1] != keys[-2]
        shown = run_plugsft("inspect", path)
        assert shown.returncode == 0 and day in shown.stdout, shown


def test_a_run_from_step_1_writes_the_day_of_its_own_start(tiny, tmp_path):
    """Also where it replaces an earlier run, by whose day a resume goes on."""
    template, record = tmp_path / "dated.jinja", tmp_path / "run/run.json"
    template.write_text("{{ strftime_now('%Y-%m-%d') }}" + CHATML.read_text())
    path = tiny(model={"chat_template": str(template)}, train={"steps": 1})

    def day_in(facts):
        return facts["data"]["key_parts"]["day"]

    must_succeed(path)
    first = json.loads(record.read_text())
    first["data"]["key_parts"]["day"] = "2001-02-03"
    record.write_text(json.dumps(first))
    days = []
    for checkpoints in ([tmp_path / "run/checkpoints/step-000001"], []):
        recipe, active = load(path)
        active.attach(DataDefaults(recipe.folder))
        tokens = prepare_data(Case(recipe, active, look()), checkpoints).tokens
        days.append(day_in({"data": tokens.facts}))
    assert days[0] == "2001-02-03" < days[1]
    must_succeed(path, "--overwrite")
    assert day_in(json.loads(record.read_text())) > "2001-02-03"


def test_a_new_version_of_a_stage_trains_the_tokenizer_again(tiny, monkeypatch):
    folders = set()
    for version in (98, 99, 99):
        monkeypatch.setitem(prepare.VERSIONS, "render", version)
        recipe, active = load(tiny())
        active.attach(DataDefaults(recipe.folder))
        folders.add(prepare.open_data(recipe, active).tokenizer_folder)
    assert len(folders) == 2
