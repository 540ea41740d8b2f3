"""Broken recipes, rows and files: each is refused with its place named, or read as written.

PLUGSFT_FULL=1 (tools/test --full) tries them all; otherwise the first of the same row.
"""

import copy
import json
import math
import os
import random
import re
import shutil
import sys
import tempfile
import tomllib
from contextlib import suppress

import pytest
import tomli_w
from conftest import chats, run_plugsft, tiny_tables, write_recipe

from plugsft import DataError
from plugsft.base.atomic import damage
from plugsft.base.checksums import cache_folder
from plugsft.base.errors import PlugsftError, RecipeError
from plugsft.cli import main
from plugsft.data.jsonl import RowList, find_lines
from plugsft.data.load_tokenizer import train_tokenizer
from plugsft.data.render import render_rows
from plugsft.output import report
from plugsft.output.folder import describe_results, find_run
from plugsft.recipe.parse import resolved
from plugsft.recipe.tables import COLUMNS, Data
from plugsft.registry.load import load
from plugsft.tokens.tokenizer import lighten

FULL = os.environ.get("PLUGSFT_FULL") == "1"
COUNT = 500 if FULL else 150
VALUES = [
    0, 1, -1, 3, 8, 0.5, -0.5, 1e308, math.inf, -math.inf, math.nan, 2**31, 2**63, 10**30,
    True, False, "", "x", "train", "train[:2]", "assistant", "all", "a\nb", "\0", "x" * 5000,
    "..", "/proc", "/dev/null", "東京", "{{", "cosine", [], [1], ["x"], [[]], [{}], {}, {"x": 1},
    {"source": 3}, {"enabled": "no"}, {"a": {"b": {"c": []}}},
]  # fmt: skip
KEYS = ["", "x", "output", "batch_size", "a\nb", "a.b", "東京", "x" * 300, "__class__", "self"]


def base(folder):
    tables = tiny_tables(folder)
    tables["data"] |= {"split": "train[:20]", "train_on": "assistant", "columns": {}}
    tables["train"] |= {"epochs": 1, "schedule": "cosine", "warmup": 0.1, "seed": 3, "steps": 2}
    tables["eval"] = {"every": 2, "split": "train[:4]"}
    tables["checkpoint"] = {"every": 2, "keep": 1}
    tables["plugins"] = {}
    return tables


def places(tables, path=()):
    """Every place in nested tables, as a path of keys."""
    for key, value in tables.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


def mutate(number, tables):
    """Return the bytes of mutant `number`, and its key if a single one was changed."""
    rng = random.Random(number)
    kind = rng.choice(
        ["value", "value", "value", "key", "drop", "add", "override", "text", "bytes"]
    )
    tables = copy.deepcopy(tables)
    path = rng.choice(list(places(tables)))
    table = tables
    for key in path[:-1]:
        table = table[key]
    if kind in ("value", "override"):
        value = rng.choice(VALUES)
        if kind == "override":
            text = tomli_w.dumps({"v": value}).partition("=")[2].strip()
            text = text if isinstance(value, (int, float, str)) else "[]"
            return tomli_w.dumps(tables).encode(), path, [f"{'.'.join(path)}={text}"]
        table[path[-1]] = value
    elif kind == "key":
        old = path[-1]
        letters = list(old)
        letters[rng.randrange(len(old))] = rng.choice("abcxyz_")
        new = rng.choice([rng.choice(KEYS), "".join(letters), old.upper(), old + "s"])
        table[new] = table.pop(old)
        path = (*path[:-1], new)
    elif kind == "drop":
        del table[path[-1]]
    elif kind == "add":
        new = rng.choice(KEYS)
        table[new] = rng.choice(VALUES)
        path = (*path[:-1], new)
    content = tomli_w.dumps(tables).encode()
    if kind == "text":
        return content[: rng.randrange(len(content))], None, []
    if kind == "bytes":
        content = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        return bytes(content), None, []
    return content, path, []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


def check(path, overrides, capsys):
    """Do what `plugsft check` does; return its exit code and what it complained of."""
    try:
        main(["check", str(path), *overrides])
        code = 0
    except SystemExit as end:
        code = end.code or 0
    return code, capsys.readouterr().err


@pytest.mark.parametrize("block", range(COUNT // 25))
def test_no_mutant_escapes(folder, capsys, monkeypatch, block):
    monkeypatch.chdir(folder)
    (folder / "recipe.toml").write_text(tomli_w.dumps(base(folder)))
    assert check(folder / "recipe.toml", [], capsys) == (0, ""), "the unchanged recipe is right"
    for number in range(block * 25, block * 25 + 25):
        content, path, overrides = mutate(number, base(folder))
        mutant = folder / "mutant.toml"
        mutant.write_bytes(content)
        code, said = check(mutant, overrides, capsys)
        told = f"mutant {number} ({path} {overrides}): {code} {said}"
        assert code in (0, 2), told
        assert "Traceback" not in said, told
        if code == 2:
            lines = said.splitlines()
            assert lines and all(line.startswith("error: ") for line in lines), told
            if path is not None:
                assert names(said, path), told
        else:
            assert said == "", told
            assert_right(mutant, overrides, folder)


def names(said, path):
    """Whether a complaint names the changed key, or what its table lacks without it."""
    shown = [key if re.fullmatch(r"[\w-]+", key) else repr(key) for key in path]
    word = re.search(rf"(?<!\w){re.escape(shown[-1])}(?!\w)", said)
    # A table that lost one of two keys says which to set.
    return ".".join(shown) in said or word or f"{'.'.join(shown[:-1])}: set " in said


def assert_right(path, overrides, folder):
    """An accepted recipe holds every value as it was written, and reads back as itself."""
    recipe, _ = load(path, overrides)
    again = folder / "again.toml"
    again.write_text(resolved(recipe))
    assert resolved(load(again)[0]) == again.read_text()
    written = tomllib.loads(path.read_text(encoding="utf8"))
    dumped = recipe.model_dump(exclude_none=True)
    for place in places(written):
        if overrides and overrides[0].startswith(".".join(place)):
            continue
        value, kept = written, dumped
        for key in place:
            value, kept = value[key], kept[key]
        if not isinstance(value, dict):
            assert value == kept, place


@pytest.mark.slow
def test_what_is_accepted_trains(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    trained, number = 0, 10_000
    while trained < (20 if FULL else 5):
        number += 1
        content, _, overrides = mutate(number, base(folder))
        mutant = folder / "mutant.toml"
        mutant.write_bytes(content)
        if check(mutant, overrides, capsys)[0]:
            continue
        recipe, _ = load(mutant, overrides)
        # It is the recipe that is tried here, not the patience of who waits for it.
        short = [*overrides, f"output={folder}/run-{number}", "train.steps=2", "checkpoint.every=0"]
        if recipe.model.scratch and recipe.model.scratch.hidden > 64:
            continue
        done = run_plugsft("train", mutant, *short)
        # 1 is a loss that is not finite: a learning rate of 1e308 is right, and of no use.
        assert done.returncode in (0, 1), f"mutant {number}: {done.stderr}"
        trained += 1


ROWS = [
    *chats(2),
    {"messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "reasoning_content": "r", "weight": 1, "train": True},
        {"role": "assistant", "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "content": "d"},
        {"role": "assistant", "content": "e"}],
     "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": {"b": []}}}}],
     "chat_template_kwargs": {"x": 1}},
    {"conversations": [
        {"from": "human", "value": "a"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
        {"from": "observation", "value": "b"}, {"from": "gpt", "value": "c"}], "tools": "[]"},
    {"instruction": "a", "input": "b", "output": "c", "history": [["d", "e"]], "system": "f"},
    {"prompt": "a", "completion": "b"},
    {"prompt": [{"role": "user", "content": "a"}],
     "completion": [{"role": "assistant", "content": "b"}]},
    {"text": "a"},
]  # fmt: skip
"""A row of each format."""


def nested(levels, inner=1):
    for _ in range(levels):
        inner = {"a": [inner]}
    return inner


CELLS = [
    None, True, False, 0, 5, -1, 0.5, math.nan, math.inf, 10**30, 1, "", " ", "x", "\0", "\ud800",
    "[" * 100_000, '{"a":' * 100_000, "[" * 900 + "]" * 900, "{}", "[]", "null", "5", '"x"',
    "{% raw %}", "x" * 100_000, [], [[]], [[[]]], [None], [5], ["x"], ["x", "y"], [{}], {},
    {"x": 1}, {"role": "user"}, {"name": 3}, {"function": 3}, {"type": "image"},
    {"function": {"name": "f", "arguments": [1]}}, {"role": [], "content": {}},
    {"from": {}, "value": 1}, nested(90), nested(99, "x"), [nested(98)],
]  # fmt: skip


def within(value, path=()):
    """Every place in nested lists and tables."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from within(inner, (*path, key))


def altered(number):
    """Return a row of which one to three places are something else, or gone."""
    rng = random.Random(number)
    row = copy.deepcopy(rng.choice(ROWS))
    for _ in range(rng.choice([1, 1, 2, 3])):
        if not (all_places := list(within(row))):
            break
        *above, key = rng.choice(all_places)
        place = row
        for step in above:
            place = place[step]
        cell = copy.deepcopy(rng.choice(CELLS))
        if rng.random() < 0.1:
            del place[key]
        elif isinstance(place, dict) and rng.random() < 0.2:
            place[rng.choice([*COLUMNS, "role", "content", "train", "weight", "thinking"])] = cell
        else:
            place[key] = cell
    return row


@pytest.fixture(scope="module")
def tokenizer():
    texts = [message["content"] for row in chats(5) for message in row["messages"]]
    rows = RowList([{"text": text} for text in texts])
    data = Data.model_validate({"source": "x"})
    made = train_tokenizer([rows], lambda some, _, plain: render_rows(some, plain, data), 300)
    return lighten(made)


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_any_row_is_rendered_or_bad_with_a_reason(tokenizer, tmp_path, train_on):
    data = Data.model_validate({"source": "x", "train_on": train_on})
    count, rendered, bad = 20_000 if FULL else 700, 0, 0
    lines = [json.dumps(altered(number)) for number in range(count)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    read = find_lines(tmp_path / "rows.jsonl").read(0, count)
    for number, row in enumerate(read):
        if isinstance(row, str):
            assert row == "nested too deeply"
            continue
        try:
            made = render_rows([row], tokenizer, data)
        except DataError as error:
            assert "preferences" in str(error), lines[number]
            continue
        except Exception as error:
            raise AssertionError(lines[number][:2000]) from error
        if made is not None:
            assert len(made.texts) + len(made.bad) == 1, lines[number]
            assert all(reason and "\n" not in reason for reason in made.bad.values())
            encoded = tokenizer.encode_texts(made.texts, made.special_tokens)
            assert len(encoded.counts) == len(made.texts)
            rendered, bad = rendered + len(made.texts), bad + len(made.bad)
    assert min(rendered, bad) > count // 10, (rendered, bad)


@pytest.mark.parametrize("text", ["", "\n", "\n \n\t\n", "null\n" * 3, "[]", "5", "[" * 10**6])
@pytest.mark.parametrize("command", ["check", "train", "prepare", "inspect"])
def test_files_without_a_row_are_refused_by_each_command(tiny, capsys, text, command):
    path = tiny()
    (path.parent / "data.jsonl").write_text(text)
    with pytest.raises(SystemExit) as end:
        main([command, str(path)])
    said = capsys.readouterr().err
    assert end.value.code == 2 and "Traceback" not in said
    assert all(line.startswith("error: ") and "data.jsonl" in line for line in said.splitlines())


def test_the_family_of_errors_is_what_the_command_line_catches():
    assert PlugsftError.exit_code == 2


ODD = [None, 5, -1, "x", [], {}, [5], {"a": 1}, True, 10**30, [[[]]], math.inf]
TEXTS = ["", "[]", "5", "null", "{", "{}", "[" * 100_000, '{"a":' * 900 + "1" + "}" * 900, "\0"]
LINES = [
    "5",
    "[]",
    "[[1, 2]]",
    '{"step": "x", "loss": 1}',
    '{"step": 1, "loss": []}',
    '{"loss": 1}',
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of three steps."""
    folder = tmp_path_factory.mktemp("run")
    tables = tiny_tables(folder) | {"checkpoint": {"every": 1}}
    path = write_recipe(folder / "recipe.toml", tables)
    assert run_plugsft(path).returncode == 0
    return path


def crafted(count):
    """Yield texts of run.json, and of metrics.jsonl, that plugsft did not write."""
    rng = random.Random(0)

    def change(record):
        keys = [(key,) for key in record]
        keys += [
            (key, inner) for key in record if isinstance(record[key], dict) for inner in record[key]
        ]
        record = copy.deepcopy(record)
        *above, key = rng.choice(keys)
        (record[above[0]] if above else record)[key] = rng.choice(ODD)
        return json.dumps(record)

    for text in TEXTS:
        yield "run.json", lambda _, text=text: text
    for text in [*LINES, "[" * 100_000]:
        yield "metrics.jsonl", lambda _, text=text: text + "\n"
    for _ in range(count):
        yield "run.json", change


@pytest.mark.slow
def test_a_crafted_record_breaks_no_command(run, tmp_path, capsys):
    whole = run.parent / "run"
    for number, (name, change) in enumerate(crafted(2000 if FULL else 15)):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("checkpoints", "model"))
        text = change(json.loads((whole / "run.json").read_text()))
        (folder / name).write_text(text)
        for words in (["show", folder], ["diff", folder, whole], ["chat", folder, "--ask", "x"]):
            try:
                main([str(word) for word in words])
                code = 0
            except SystemExit as end:
                code = end.code
            said = capsys.readouterr().err
            assert code in (0, 2) and "Traceback" not in said, (words[0], name, text[:300], said)
        with suppress(RecipeError):
            report.write(folder)
        assert find_run(folder).folder == folder and isinstance(describe_results(folder), str)
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    "manifest",
    ["{}", "[]", "5", "null", "", '{"a": 1}', '{"a": [1]}', '{"a": {}}', "[" * 100_000],
)
def test_a_crafted_manifest_is_no_whole_folder(tmp_path, manifest):
    (tmp_path / "manifest.json").write_text(manifest)
    assert damage(tmp_path) and damage(tmp_path, quick=True)


def test_without_a_home_the_cache_is_a_folder_of_this_user_alone(monkeypatch, tmp_path):
    for name in ("HOME", "XDG_CACHE_HOME", "PLUGSFT_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pwd", None)  # a container's user without a name
    folder = tmp_path / f"plugsft-{os.getuid()}"
    assert cache_folder() == cache_folder() == folder and folder.stat().st_mode & 0o77 == 0
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(PlugsftError, match=f"plugsft-{user + 1}: belongs to another user"):
        cache_folder()


WITHOUT_MANIFEST = shutil.ignore_patterns("manifest.json")
SETTINGS = ["config.json", "tokenizer_config.json", "tokenizer.json"]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("text", ["", "null", "5", "[]", "{", "[" * 100_000, "\0", '"x"'])
def test_a_model_with_a_broken_file_is_refused_by_its_name(run, tmp_path, capsys, name, text):
    source = run.parent / "run/model"
    model = shutil.copytree(source, tmp_path / "model", ignore=WITHOUT_MANIFEST)
    (model / name).write_text(text)
    tables = tiny_tables(tmp_path) | {"model": {"path": str(model)}}
    code, said = check(write_recipe(tmp_path / "recipe.toml", tables), [], capsys)
    assert code == 2 and f": {name}: " in said and "Traceback" not in said, said


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SETTINGS, "generation_config.json"])
def test_odd_settings_of_a_model_break_no_command(run, tmp_path, capsys, name):
    rng, source = random.Random(name), run.parent / "run/model"
    facts = json.loads((source / name).read_text())
    for number in range(100 if FULL else 2):
        folder = tmp_path / str(number)
        model = shutil.copytree(source, folder / "model", ignore=WITHOUT_MANIFEST)
        changed = facts | {rng.choice([*facts]): rng.choice(ODD)}
        (model / name).write_text(json.dumps(changed))
        tables = tiny_tables(folder) | {"model": {"path": str(model)}}
        path = write_recipe(folder / "recipe.toml", tables)
        code, said = check(path, [], capsys)
        assert code in (0, 2) and "Traceback" not in said, (changed, said)
        # What check lets pass may be refused later, but in one line.
        ended = run_plugsft(path)
        assert ended.returncode in (0, 2) and "Traceback" not in ended.stderr, (
            changed,
            ended.stderr,
        )
