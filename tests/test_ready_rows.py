"""Rows that hold their tokens already: trained on where they lie, checked, never tokenized."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from conftest import (
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
from plugsft.base.types import Shard
from plugsft.commands.audit.inspect import opened_rows
from plugsft.commands.check import check
from plugsft.commands.inspect import inspect
from plugsft.commands.runs.inputs import check_first_row
from plugsft.data.defaults import DataDefaults
from plugsft.data.prepare import prepare
from plugsft.data.readers.ready import Reader
from plugsft.data.readers.saved import open_saved
from plugsft.data.sample import sample_rows
from plugsft.recipe.tables import Data, Source
from plugsft.registry.load import resolve
from plugsft.tokens.shards import write_shard


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


@pytest.mark.parametrize("name", ["loss_mask", "completion_mask", "assistant_masks"])
def test_masks_of_other_tools_are_read(tmp_path, base, name):
    rows = as_masks(rows_of(base[1]), name)
    assert_same(opened(base, save(rows, tmp_path / "masks")), base[1])


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
        recipe = tables | more | {"output": str(tmp_path / name), "data": data}
        result = run_plugsft(write_recipe(tmp_path / f"{name}.toml", recipe))
        assert result.returncode == 0, result.stderr
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [
            [line.get(key) for key in ("loss", "eval_loss", "grad_norm")]
            for line in map(json.loads, lines)
        ]
    assert losses["ready"] == losses["ours"] and read_metrics(tmp_path / "ready")


def test_documents_that_trl_packed_stay_apart(tmp_path, base):
    packed = pack_dataset(datasets.Dataset.from_list(rows_of(base[1])), 256, "bfd")
    packed.save_to_disk(str(tmp_path / "packed"))
    tokens = opened(base, tmp_path / "packed")
    assert "seq_lengths" in packed.column_names and len(packed) < len(tokens)
    ours = {(*ids,): (*mask,) for ids, mask in map(base[1].example, range(len(base[1])))}
    theirs = {(*ids,): (*mask,) for ids, mask in map(tokens.example, range(len(tokens)))}
    assert theirs == ours and len(tokens) == len(base[1])
    assert tokens.rows.max() == len(packed) - 1
    assert "documents by seq_lengths" in tokens.facts["mask"]


def test_a_folder_that_axolotl_prepared_is_read(tmp_path, base):
    """position_ids that begin again mark a document; attention_mask is 0 on padding."""
    rows, joined = rows_of(base[1]), []
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        sizes = [len(first["input_ids"]), len(second["input_ids"])]
        joined.append({
            "input_ids": first["input_ids"] + second["input_ids"] + [0] * 3,
            "labels": first["labels"] + second["labels"] + [-100] * 3,
            "attention_mask": [1] * sum(sizes) + [0] * 3,
            # What transformers writes for padding.
            "position_ids": [*range(sizes[0]), *range(sizes[1]), 1, 1, 1],
        })  # fmt: skip
    tokens = opened(base, save(joined, tmp_path / "prepared"))
    assert_same(tokens, base[1])
    assert tokens.rows.tolist() == [*np.arange(24) // 2]


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
    "neither -100 nor its own token": {"labels": lambda row: [*row["labels"][1:], -100]},
    "'labels' is not as long as": {"labels": lambda row: row["labels"][:-1]},
    "no trained token": {"labels": lambda row: [-100] * len(row["labels"])},
    "no token": {"input_ids": lambda row: [], "labels": lambda row: []},
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
    assert ("line 6" if source.suffix else "row 5 (counting from 0)") in message
    dropped = opened(base, source, on_bad_row="drop")
    assert dropped.rows.tolist() == [row for row in range(24) if row != 5]
    for number, row in enumerate(dropped.rows.tolist()):
        assert dropped.example(number)[0].tolist() == base[1].example(row)[0].tolist()


def refuse(base, source, *words, plugins=None, **data):
    with pytest.raises(DataError) as refused:
        opened(base, source, plugins, **data)
    assert all(word in str(refused.value) for word in words), refused.value


def test_what_cannot_be_honoured_is_refused(tmp_path, base):
    rows = rows_of(base[1])
    source = save(rows, tmp_path / "ready")
    refuse(base, source, "plugin 'kto'", "before they are tokens", plugins={"kto": {}})
    refuse(base, source, 'train_on = "last"', "their own labels", train_on="last")
    bare = save([{"input_ids": row["input_ids"]} for row in rows], tmp_path / "bare")
    refuse(base, bare, "without labels or a mask", 'data.train_on = "all"')
    every = opened(base, bare, train_on="all")
    assert every.targets.tolist() == (base[1].lengths - 1).tolist()
    pictures = save([row | {"images": "x"} for row in rows], tmp_path / "pictures")
    refuse(base, pictures, "'images' holds images", "data.ignore")
    assert_same(opened(base, pictures, ignore=["images"]), base[1])
    for name in ("seq_lengths", "position_ids"):
        wrong = [row | {name: [5] * len(row["labels"])} for row in rows]
        refuse(base, save(wrong, tmp_path / name), name, "rows 0, 1")
    left = [row | {"attention_mask": [0] + [1] * (len(row["labels"]) - 1)} for row in rows]
    refuse(base, save(left, tmp_path / "left"), "'attention_mask' is 0 before its last token")


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
    refuse(base, source, "rows 0, 1, 2 (counting from 0): a list is null")
    lines = tmp_path / "lines.jsonl"
    lines.write_text("{\n" * 3 + write_jsonl(tmp_path / "rows.jsonl", rows[3:]).read_text())
    refuse(base, lines, "lines 1, 2, 3: not a JSON object")
    for path in (source, lines):
        tokens = opened(base, path, on_bad_row="drop")
        assert tokens.rows.tolist() == [*range(3, 24)]
    weights = [row | {"weight": 2.0 if n % 2 else None} for n, row in enumerate(rows)]
    tokens = opened(base, save(weights, tmp_path / "weights"))
    assert tokens.columns["weight"].tolist() == [1.0, 2.0] * 12
    for kind, weight in {"string": "2", "bool": True}.items():
        words = [row | {"weight": weight} for row in rows]
        refuse(base, save(words, tmp_path / kind), f"column 'weight' holds {kind}")
    refuse(base, source, "longer than 2 tokens", max_length=2, **DROP)


DROP = {"on_bad_row": "drop", "too_long": "drop"}
NO_PANDAS = """
import sys
from pathlib import Path
from plugsft.base.types import Shard
from plugsft.data.readers import saved
from plugsft.data.readers.ready import Reader
from plugsft.recipe.tables import Data, Source
rows = saved.open_saved(Source(source=sys.argv[1]), "")
examples = Reader(Data(source=sys.argv[1]), 400, Shard(""), 0).examples(rows)
print(len(examples.rows), *sorted({"pandas", "torch", "datasets"} & {*sys.modules}))
"""


def test_reading_tokens_imports_nothing_that_takes_long(tmp_path, base):
    """Importing pandas alone takes longer than 100,000 rows."""
    source = save(rows_of(base[1]), tmp_path / "rows")
    command = [sys.executable, "-P", "-c", NO_PANDAS, str(source)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.stdout.split() == ["24"], result


def fastest(work):
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)


def test_rows_of_tokens_are_checked_as_arrays(tmp_path):
    """Takes 5 to 15 times as long as four comparisons; as lists of Python, hundreds of times."""
    ids = np.arange(10_000 * 256, dtype=np.int32) % 300
    labels = np.where(ids % 2, ids, -100).astype(np.int32)
    offsets = np.arange(0, len(ids) + 1, 256, dtype=np.int32)
    columns = {
        name: pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
        for name, values in (("input_ids", ids), ("labels", labels))
    }
    datasets.Dataset(pa.table(columns)).save_to_disk(str(tmp_path / "rows"))
    source = Source(source=str(tmp_path / "rows"))
    rows, data = open_saved(source, ""), Data(source=source.source, max_length=256)

    def read():
        examples = Reader(data, 400, Shard(""), 0).examples(rows)
        assert write_shard(tmp_path / "data.arrow", examples) > len(ids) // 2 - 10_000

    def compare():
        return ids.min(), ids.max(), (labels != ids) & (labels != -100), labels >= 0

    assert fastest(read) < 60 * fastest(compare)


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
    assert "the rows' own tokens, trained by labels; a row is one example" in shown
    assert "user" in shown  # decoded
    with opened_rows(*resolve(tables)) as (work, sources):
        assert sample_rows(work, sources, 0, 3, 5).tokens.rows.tolist() == [3, 4]


def test_a_jsonl_file_of_tokens_passes_the_first_look(tmp_path, base):
    source = write_jsonl(tmp_path / "rows.jsonl", rows_of(base[1]))
    check_first_row(Source(source=str(source)), Data(source=str(source)))


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
