"""Each kind of file and folder, by each command that reads rows, in a process of its own."""

import json
import os
import subprocess
import sys

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import chats, only_full, tiny_tables, write_jsonl, write_recipe
from served import ASK, CHATS, WEATHER, answer

from plugsft.base.errors import DataError
from plugsft.data.sources import open_source
from plugsft.recipe.tables import Source

API = "import sys, plugsft.api as api; api.prepare(sys.argv[1]); api.inspect(sys.argv[1])"
COMMANDS = {
    "prepare": ("-m", "plugsft", "prepare"),
    "check": ("-m", "plugsft", "check"),
    "inspect": ("-m", "plugsft", "inspect"),
    "plan": ("-m", "plugsft", "plan"),
    "train": ("-m", "plugsft"),
    "api": ("-c", API),
}
KINDS = (
    *("rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "rows.arrow"),
    *("saved", "folder of parquet", "folder of jsonl"),
)
# Each command once by default, on another kind.
SEEN = {
    *(("prepare", "rows.parquet"), ("check", "rows.arrow"), ("inspect", "folder of parquet")),
    *(("plan", "rows.json"), ("train", "rows.csv"), ("api", "saved")),
}


CALLS = [
    {"messages": turns, "tools": [{"type": "function", "function": WEATHER}], "id": number}
    for number, turns in enumerate((*CHATS.values(), [ASK, answer("[1, null]"), {"role": "user"}]))
]
"""Turns of different shape: some call tools, and one is wrong."""


def write(folder, kind, rows=None):
    """Write the same rows as a file or a folder of a kind."""
    rows = rows or [{"messages": row["messages"]} for row in chats(12)]
    path, data = folder / kind, datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    if kind.endswith(".jsonl"):
        write_jsonl(path, rows)
    elif kind.endswith(".json"):
        path.write_text(json.dumps(rows))
    elif kind.endswith(".csv"):
        turns = [[turn["content"] for turn in row["messages"][:2]] for row in rows]
        pd.DataFrame(turns, columns=["prompt", "completion"]).to_csv(path, index=False)
    elif kind.endswith(".parquet"):
        data.to_parquet(path)
    elif kind.endswith(".arrow"):
        table = data.data.table
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    elif kind == "saved":
        data.save_to_disk(path)
    else:
        path.mkdir()
        ending = kind.rpartition(" ")[2]
        write(path, f"train.{ending}", rows)
    return path


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        pytest.param(command, kind, marks=() if (command, kind) in SEEN else only_full)
        for command in COMMANDS
        for kind in KINDS
    ],
)
def test_a_command_reads_a_kind_of_file_in_a_fresh_process(tmp_path, command, kind):
    """Forks of tests have imported torch; what a user starts has not."""
    tables = tiny_tables(tmp_path)
    tables["data"]["source"] = str(write(tmp_path, kind))
    tables["train"]["steps"] = 1
    recipe = write_recipe(tmp_path / "recipe.toml", tables)
    words = [sys.executable, *COMMANDS[command], str(recipe)]
    environment = os.environ | {"HF_HOME": str(tmp_path / "hub")}
    result = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "rows.csv"])
def test_chats_with_calls_of_tools_are_the_same_in_each_kind(tmp_path, monkeypatch, kind):
    """`datasets` keeps turns of different shape as texts of JSON."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = open_source(Source(source=str(write(tmp_path, kind, CALLS))))
    assert rows.read(0, len(rows)) == CALLS
    assert rows.part(3, 5).read(0, 2) == CALLS[3:5]


def test_a_text_of_json_that_is_damaged_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    kind = pa.list_(pa.json_())
    damaged = pa.array([['{"role":'], ["[" * 10_000]], pa.list_(pa.string())).cast(kind)
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"messages": damaged}), file)
    rows = open_source(Source(source=str(file)))
    for row in range(2):
        with pytest.raises(DataError, match=r"its rows are damaged .*; write it"):
            rows.read(row, row + 1)


@pytest.mark.parametrize("files", ["a.jsonl b.parquet", "train.jsonl more.jsonl", "a.csv b.csv"])
def test_files_of_a_folder_that_are_not_read_are_named(tmp_path, monkeypatch, capsys, files):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    for name in files.split():
        write(tmp_path / "data", name)
    assert len(open_source(Source(source=str(tmp_path / "data"))))
    found = capsys.readouterr().out
    unread = {"a.jsonl b.parquet": "a.jsonl", "train.jsonl more.jsonl": "more.jsonl"}.get(files)
    assert (f"not read: {unread}. Of a folder" in found) if unread else "not read" not in found
