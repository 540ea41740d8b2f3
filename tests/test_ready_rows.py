"""Rows that hold their tokens already: checked, never tokenized."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import datasets
import numpy as np
import pytest
from conftest import (
    ROOT,
    chats,
    read_metrics,
    run_plugsft,
    run_ranks,
    start_plugsft,
    tiny_tables,
    write_jsonl,
    write_recipe,
)
from trl import pack_dataset

from plugsft import DataError
from plugsft.audit.inspect_data import opened_rows
from plugsft.commands.data import inspect
from plugsft.commands.recipes import check
from plugsft.data.defaults import DataDefaults
from plugsft.data.prepare import prepare
from plugsft.data.sample import sample_rows
from plugsft.registry.load import resolve


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Rows that plugsft has tokenized: the tables of a recipe, and the tokens."""
    folder = tmp_path_factory.mktemp("base")
    tables = tiny_tables(folder, chats(24))
    prepared = prepare_tokens(tables)
    tables["model"]["tokenizer"] = str(prepared.tokenizer_folder)
    return tables, prepared.tokens


def prepare_tokens(tables):
    recipe, active = resolve(tables)
    active.attach(DataDefaults(recipe.folder))
    return prepare(recipe, active)


def rows_of(tokens, **more):
    """Return tokens as rows with labels."""
    rows = []
    for number in range(len(tokens)):
        ids, mask = tokens.example(number)
        labels = np.where(mask, ids, -100)
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()} | more)
    return rows


def save(rows, folder: Path, **features) -> Path:
    datasets.Dataset.from_list(rows).save_to_disk(str(folder), **features)
    return folder


def opened(base, source, plugins=None, **data):
    tables = base[0] | {"data": {"source": str(source), "max_length": 256} | data}
    tables |= {"output": f"{source}-run", "plugins": plugins or {}}
    return prepare_tokens(tables).tokens


def assert_same(tokens, other):
    assert len(tokens) == len(other)
    for number in range(len(other)):
        for values, expected in zip(tokens.example(number), other.example(number), strict=True):
            assert values.dtype == expected.dtype and values.tolist() == expected.tolist()
    assert tokens.targets.tolist() == other.targets.tolist()
    assert tokens.lengths.tolist() == other.lengths.tolist()


def as_masks(rows, name):
    """Return rows with a mask in place of labels."""
    return [
        {"input_ids": row["input_ids"], name: [int(label >= 0) for label in row["labels"]]}
        for row in rows
    ]


def written(path, rows):
    """Write rows in the way that a name asks for; return the source."""
    if path.suffix == ".jsonl":
        return write_jsonl(path, rows)
    data = datasets.Dataset.from_list(rows)
    if path.suffix == ".parquet":
        data.to_parquet(str(path))
    elif path.name == "int32":
        features = dict.fromkeys(data.column_names, datasets.List(datasets.Value("int32")))
        data.cast(datasets.Features(features)).save_to_disk(str(path), num_shards=3)
    else:
        data.save_to_disk(str(path))
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "int32", "int64"])
def test_ready_rows_are_the_tokens_that_we_make(tmp_path, base, name):
    source = written(tmp_path / name, rows_of(base[1]))
    tokens = opened(base, source)
    assert_same(tokens, base[1])


def converted(base, source, name, **data):
    """Refuse rows for a column, then convert them with the code that the refusal has."""
    with pytest.raises(DataError) as refused:
        opened(base, source, **data)
    message = str(refused.value)
    assert str(source) in message and f"'{name}'" in message
    code = message[message.index("rows.map(") :]
    # The code ends where its brackets are closed.
    code = next(code[:end] for end in count(len("rows.map()")) if is_code(code[:end]))
    rows = eval(code, {"rows": datasets.load_from_disk(str(source))})
    folder = source.with_name(f"{name} converted")
    rows.save_to_disk(str(folder))
    return folder


def is_code(text):
    try:
        return bool(ast.parse(text))
    except SyntaxError:
        return False


@pytest.mark.parametrize("name", ["loss_mask", "completion_mask", "assistant_masks"])
def test_masks_of_other_tools_are_refused_with_the_code_that_writes_labels(tmp_path, base, name):
    rows = rows_of(base[1])
    source = save(as_masks(rows, name), tmp_path / "masks")
    assert_same(opened(base, converted(base, source, name)), base[1])
    refuse(base, source, "no row has a token to train on", f"'{name}'", on_bad_row="drop")
    # A mask beside labels: what both mark is trained.
    both = [row | {name: [0, *[1] * (len(row["labels"]) - 1)]} for row in rows]
    last = max(number for number, label in enumerate(both[0]["labels"]) if label >= 0)
    both[0][name] = [int(number == last) for number in range(len(both[0][name]))]
    tokens = opened(base, converted(base, save(both, tmp_path / "both"), name))
    assert tokens.targets.tolist() == [1, *base[1].targets.tolist()[1:]]


@pytest.mark.parametrize(
    ("plugins", "size"), [({"bfd_packing": {"capacity": 512}}, 1), ({"length_group": {}}, 4)]
)
def test_the_loss_is_that_of_the_same_rows(tmp_path, base, plugins, size):
    """With an evaluation on a part of the rows."""
    tables, tokens = base
    save(rows_of(tokens), tmp_path / "ready")
    more = {
        "plugins": plugins,
        "eval": {"every": 2, "split": "train[:8]"},
        "train": {"batch_size": 8, "micro_batch": size, "learning_rate": 3e-3},
    }
    losses = {}
    for name, source in (("ours", tables["data"]["source"]), ("ready", tmp_path / "ready")):
        data = {"source": str(source), "max_length": 256}
        run = tmp_path / f"{name}-run"
        recipe = tables | more | {"output": str(run), "data": data}
        result = run_plugsft(write_recipe(tmp_path / f"{name}.toml", recipe))
        assert result.returncode == 0, result.stderr
        lines = (run / "metrics.jsonl").read_text().splitlines()
        losses[name] = [
            [line.get(key) for key in ("loss", "eval_loss", "grad_norm")]
            for line in map(json.loads, lines)
        ]
    assert losses["ready"] == losses["ours"] and read_metrics(run)


def test_packed_rows_are_refused_and_the_code_of_the_docs_takes_them_apart(tmp_path, base):
    packed = pack_dataset(datasets.Dataset.from_list(rows_of(base[1])), 256, "bfd")
    packed.save_to_disk(str(tmp_path / "packed"))
    assert len(packed) < len(base[1])
    refuse(base, tmp_path / "packed", "'seq_lengths' is of rows that another tool", "bfd_packing")
    page = (ROOT / "docs/data.md").read_text()
    [code] = [text for text in re.findall(r"```python\n(.*?)```", page, re.S) if "packed" in text]
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
    ours, theirs = (
        {tuple(map(tuple, tokens.example(number))) for number in range(len(tokens))}
        for tokens in (base[1], opened(base, tmp_path / "rows"))
    )
    assert theirs == ours


def joined(rows, **columns):
    """Two rows as one, with padding and columns that another tool writes."""
    first, second = rows[:2]
    return {name: first[name] + second[name] + [0] * 3 for name in ("input_ids", "labels")} | {
        name: of(len(first["labels"]), len(second["labels"])) for name, of in columns.items()
    }


def test_places_of_one_document_are_read_and_padding_is_taken_out(tmp_path, base):
    """As axolotl and transformers write them; of two documents they are refused."""
    rows = rows_of(base[1])
    whole, left, right = [], [], []
    for row in rows:
        size = len(row["labels"])
        whole.append(row | {"attention_mask": [1] * size, "position_ids": [*range(size)]})
        left.append(
            {name: padding * 3 + row[name] for name, padding in PADDING.items()}
            | {"attention_mask": [0] * 3 + [1] * size, "weight": 1.0}
        )
        right.append(
            {name: row[name] + padding * 3 for name, padding in PADDING.items()}
            | {"attention_mask": [1] * size + [0] * 3}
            # What transformers writes for padding.
            | {"position_ids": [*range(size), 1, 1, 1]}
        )
    assert_same(opened(base, save(whole, tmp_path / "whole")), base[1])
    for name, padded in {"left": left, "right": right}.items():
        source = save(padded, tmp_path / name / "rows")
        assert_same(opened(base, converted(base, source, "attention_mask")), base[1])
    for name, of in {
        "position_ids": lambda a, b: [*range(a), *range(b), 0, 0, 0],
        "attention_mask": lambda a, b: [1] * a + [2] * b + [0] * 3,
    }.items():
        source = save([joined(rows, **{name: of})], tmp_path / name)
        refuse(base, source, "another tool has packed", f"'{name}'", "docs/data.md")


PADDING = {"input_ids": [0], "labels": [-100]}


def test_long_rows_are_cut_or_dropped(tmp_path, base):
    source = save(rows_of(base[1]), tmp_path / "long")
    length = int(np.median(base[1].lengths))
    cut = opened(base, source, max_length=length)
    assert cut.lengths.max() == length and cut.facts["truncated"]["count"]
    dropped = opened(base, source, max_length=length, too_long="drop")
    kept = base[1].lengths <= length
    assert dropped.lengths.tolist() == base[1].lengths[kept].tolist()
    assert dropped.rows.tolist() == np.flatnonzero(kept).tolist()
    for number, row in enumerate(dropped.rows.tolist()):
        assert dropped.example(number)[0].tolist() == base[1].example(row)[0].tolist()


def broken(row, **changes):
    return row | {name: change(row) for name, change in changes.items()}


BROKEN = {
    "outside of the tokenizer's": {"input_ids": lambda row: [9999, *row["input_ids"][1:]]},
    "the token itself or -100: write it unshifted": {
        "labels": lambda row: [*row["labels"][1:], -100]
    },
    "'labels' is not, for each token,": {"labels": lambda row: row["labels"][:-1]},
    "no trained token": {"labels": lambda row: [-100] * len(row["labels"])},
    "'input_ids' is not a list of integers, or is empty": {"input_ids": lambda row: []},
    "every token, with data.train_on": {"labels": lambda row: None},
}


@pytest.mark.parametrize("reason", BROKEN)
@pytest.mark.parametrize("kind", ["folder", "rows.jsonl"])
def test_a_bad_row_is_named(tmp_path, base, reason, kind):
    rows = rows_of(base[1])
    rows[5] = broken(rows[5], **BROKEN[reason])
    source = written(tmp_path / kind, rows)
    with pytest.raises(DataError) as refused:
        opened(base, source)
    message = str(refused.value)
    assert reason in message and str(source) in message and 'on_bad_row = "drop"' in message
    assert ("line 6" if source.suffix else "row 6") in message
    dropped = opened(base, source, on_bad_row="drop")
    assert dropped.rows.tolist() == [row for row in range(24) if row != 5]
    for number, row in enumerate(dropped.rows.tolist()):
        assert dropped.example(number)[0].tolist() == base[1].example(row)[0].tolist()


@pytest.mark.parametrize("name", ["input_ids", "labels"])
@pytest.mark.parametrize("value", [True, False])
def test_true_is_no_integer(tmp_path, base, name, value):
    rows = rows_of(base[1])
    rows[5][name][-1] = value
    rows[6]["input_ids"][1:3] = [0, 1]
    rows[6]["labels"][1:3] = [-100, 1]
    source = written(tmp_path / "rows.jsonl", rows)
    refuse(base, source, f"line 6: '{name}' is not a list of integers, or is empty.")


def refuse(base, source, *words, plugins=None, **data):
    with pytest.raises(DataError) as refused:
        opened(base, source, plugins, **data)
    assert all(word in str(refused.value) for word in words), refused.value


def test_what_cannot_be_honoured_is_refused(tmp_path, base):
    rows = rows_of(base[1])
    source = save(rows, tmp_path / "ready")
    refuse(base, source, "plugin 'kto'", "before they are tokens", plugins={"kto": {}})
    for train_on in ("last", "all"):
        refuse(base, source, "rows of tokens with labels are trained by them", train_on=train_on)
    bare = save([{"input_ids": row["input_ids"]} for row in rows], tmp_path / "bare")
    refuse(base, bare, 'those without labels on every token, with data.train_on = "all"')
    refuse(base, bare, "without labels", train_on="last")
    every = opened(base, bare, train_on="all")
    assert every.targets.tolist() == (base[1].lengths - 1).tolist()
    pictures = save([row | {"images": "x"} for row in rows], tmp_path / "pictures")
    refuse(base, pictures, "'images' holds images", "data.ignore")
    assert_same(opened(base, pictures, ignore=["images"]), base[1])
    wrong = [row | {"attention_mask": [1] * (len(row["labels"]) - 1) + [-1]} for row in rows]
    refuse(base, save(wrong, tmp_path / "wrong"), "'attention_mask' is not 1 for each token")


def test_columns_are_renamed_and_rows_weighed(tmp_path, base):
    rows = [
        {"tokens": row["input_ids"], "targets": row["labels"], "weight": float(number + 1)}
        for number, row in enumerate(rows_of(base[1]))
    ]
    source, names = tmp_path / "named", {"input_ids": "tokens", "labels": "targets"}
    tokens = opened(base, save(rows, source), columns=names)
    assert_same(tokens, base[1])
    assert tokens.columns["weight"].tolist() == [*range(1, 25)]


def test_rows_without_values_are_named_or_have_defaults(tmp_path, base):
    rows = rows_of(base[1])
    empty = [dict.fromkeys(row) if number < 3 else row for number, row in enumerate(rows)]
    source = save(empty, tmp_path / "empty")
    refuse(base, source, "rows 1, 2, 3: no 'input_ids': the row has no columns")
    lines = tmp_path / "lines.jsonl"
    lines.write_text("{\n" * 3 + write_jsonl(tmp_path / "rows.jsonl", rows[3:]).read_text())
    refuse(base, lines, "lines 1, 2, 3: not a JSON object")
    for path in (source, lines):
        tokens = opened(base, path, on_bad_row="drop")
        assert tokens.rows.tolist() == [*range(3, 24)]
    weights = [row | {"weight": 2.0 if n % 2 else None} for n, row in enumerate(rows)]
    tokens = opened(base, save(weights, tmp_path / "weights"))
    assert tokens.columns["weight"].tolist() == [1.0, 2.0] * 12
    words = [row | {"weight": "2"} for row in rows]
    refuse(base, save(words, tmp_path / "words"), "'weight' is '2', and should be 0, or a number")
    refuse(base, source, "longer than 2 tokens", max_length=2, **DROP)


DROP = {"on_bad_row": "drop", "too_long": "drop"}


def test_a_replaced_folder_is_read_again_in_the_same_process(tmp_path, base):
    rows, source = rows_of(base[1]), tmp_path / "rows"
    opened(base, save(rows[:12], source)).example(0)
    shutil.rmtree(source)
    tokens = opened(base, save(rows[12:], source))
    assert [tokens.example(n)[0].tolist() for n in range(12)] == [
        row["input_ids"] for row in rows[12:]
    ]


def test_check_and_inspect_show_ready_rows(tmp_path, base, capsys):
    source = save(rows_of(base[1]), tmp_path / "ready")
    tables = base[0] | {"data": {"source": str(source), "max_length": 256}}
    recipe = write_recipe(tmp_path / "recipe.toml", tables | {"output": str(tmp_path / "run")})
    check(recipe)
    inspect(recipe)
    shown = capsys.readouterr().out
    assert "the rows' own tokens, trained by labels" in shown
    assert "user" in shown  # decoded
    with opened_rows(*resolve(tables)) as (work, sources):
        assert sample_rows(work, sources, 0, 3, 5).tokens.rows.tolist() == [3, 4]


def test_plugins_of_the_data_work_on_ready_rows(tmp_path, base, monkeypatch):
    """Slices in other processes, a shared cache, and a fast tokenizer that has nothing to do."""
    monkeypatch.setenv("PLUGSFT_CACHE", str(tmp_path / "cache"))
    source = save(rows_of(base[1]), tmp_path / "ready")
    plugins = {"multiprocess_tokenize": {"workers": 2}, "arrow_cache": {}}
    tokens = opened(base, source, plugins)
    assert_same(tokens, base[1])
    assert opened(base, source, plugins).folder == tokens.folder


@pytest.mark.slow
def test_ranks_and_a_killed_run_learn_from_ready_rows_as_one_process_does(tmp_path, base):
    source, run = save(rows_of(base[1]), tmp_path / "ready"), tmp_path / "run"
    train = {"batch_size": 4, "micro_batch": 2, "steps": 12, "learning_rate": 1e-3}
    tables = base[0] | {"data": {"source": str(source), "max_length": 256}, "train": train}
    recipe = write_recipe(tmp_path / "recipe.toml", tables | {"checkpoint": {"every": 2}})
    whole = tmp_path / "whole"
    assert run_plugsft(recipe, f"output={whole}").returncode == 0
    running = start_plugsft(recipe, f"output={run}")
    while not [*run.glob("checkpoints/step-*")] and running.process.is_alive():
        time.sleep(0.001)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    source.rename(tmp_path / "away")
    result = run_plugsft(recipe, f"output={run}", "--resume")
    assert result.returncode == 2 and str(source) in result.stderr, result.stderr
    (tmp_path / "away").rename(source)
    assert run_plugsft(recipe, f"output={run}", "--resume").returncode == 0
    weights = [folder / "model/model.safetensors" for folder in (run, whole)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    result = run_ranks(2, recipe, f"output={tmp_path / 'ranks'}")
    assert result.returncode == 0, result.stderr
    curves = read_metrics(whole), read_metrics(tmp_path / "ranks")
    assert len(curves[0]) == 12
    for one, other in zip(*curves, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-6)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
