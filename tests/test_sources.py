"""Sources of every kind give the same rows, or a clear error."""

import json
import os
import re

import datasets
import pytest
from conftest import chats, run_plugsft, tiny_tables, write_jsonl, write_recipe

from plugsft import DataError, RecipeError
from plugsft.data import sources
from plugsft.data.sources import ensure_columns, open_source
from plugsft.recipe.tables import Data, Source

ROWS = chats(20)


def rows_of(place, split="train"):
    rows = open_source(Source(source=str(place), split=split))
    whole = rows.read(0, len(rows))
    # Any stretch is the same as that part of the whole.
    assert rows.read(1, 3) == whole[1:3]
    return whole


def write(folder, kind):
    data = datasets.Dataset.from_list(ROWS)
    path = folder / f"data.{kind}"
    if kind == "jsonl":
        write_jsonl(path, ROWS)
    elif kind == "json":
        path.write_text(json.dumps(ROWS, indent=1, ensure_ascii=False), encoding="utf8")
    elif kind == "lines.json":
        write_jsonl(path, ROWS)
    elif kind == "parquet":
        data.to_parquet(path)
    elif kind == "saved":
        data.save_to_disk(path)
    elif kind == "dict":
        datasets.DatasetDict(train=data, test=data.select(range(3))).save_to_disk(path)
    elif kind == "arrow":
        data.save_to_disk(folder / "saved")
        (arrow,) = (folder / "saved").glob("*.arrow")
        arrow.rename(path)
    elif kind == "folder":
        path.mkdir()
        data.to_parquet(path / "train-00000.parquet")
    return path


KINDS = ["jsonl", "json", "lines.json", "parquet", "arrow", "saved", "dict", "folder"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """`datasets` keeps what it converts; not beside the user's own."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_same_rows(tmp_path, kind):
    path = write(tmp_path, kind)
    assert rows_of(path) == ROWS
    assert rows_of(path, "train[5:9]") == ROWS[5:9]
    assert rows_of(path, "train[-10%:]") == ROWS[-2:]
    assert rows_of(path, "train[:2]+train[18:]") == ROWS[:2] + ROWS[18:]
    assert rows_of(path, "train[9:5]+train[17:99]") == ROWS[17:]


@pytest.mark.parametrize("kind", KINDS)
def test_an_identity_follows_the_content_and_the_split(tmp_path, kind):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, two = write(tmp_path / "a", kind), write(tmp_path / "b", kind)
    name = Source(source=str(one))
    identity = open_source(name).identity
    json.dumps(identity)
    assert open_source(name).identity == identity
    assert open_source(Source(source=str(one), split="train[:3]")).identity != identity
    if kind in ("jsonl", "json", "lines.json", "parquet"):
        assert open_source(Source(source=str(two))).identity == identity, "moved, not changed"
    if kind == "jsonl":
        two.write_text(two.read_text().replace("the", "The", 1))
        assert open_source(Source(source=str(two))).identity != identity


def test_an_identity_follows_the_files_in_folders_of_a_folder(tmp_path):
    path = tmp_path / "set/data"
    path.mkdir(parents=True)
    (path.parent / "README.md").write_text("Chats.")
    datasets.Dataset.from_list(ROWS).to_parquet(path / "train-00000.parquet")
    before = open_source(Source(source=str(path.parent))).identity
    datasets.Dataset.from_list(ROWS[::-1]).to_parquet(path / "train-00000.parquet")
    assert open_source(Source(source=str(path.parent))).identity != before


def test_a_column_is_missed_only_where_no_row_of_any_source_has_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "COLUMN_ROWS", 4)
    late = [*({"dialog": [], "id": n} for n in range(20)), {"functions": []}]
    one, two = write_jsonl(tmp_path / "one.jsonl", [3, *late]), write(tmp_path, "parquet")
    opened = [open_source(Source(source=str(path))) for path in (two, one)]
    for columns in ({}, {"messages": "dialog"}, {"messages": "dialog", "tools": "functions"}):
        ensure_columns(Data(source="x", columns=columns, ignore=["id"]), opened)
    columns = {"messages": "dialog", "tools": "nope", "system": "no"}
    with pytest.raises(RecipeError) as caught:
        ensure_columns(Data(source="x", columns=columns, ignore=["di", "id"]), opened)
    there = "columns: dialog, functions, id, messages"
    assert caught.value.problems == [
        f"data.columns: no row has the column 'nope' (for tools); {there}",
        f"data.columns: no row has the column 'no' (for system); {there}",
        f"data.ignore: no row has the column 'di'; {there}",
    ]


def test_a_split_of_a_saved_dictionary(tmp_path):
    assert rows_of(write(tmp_path, "dict"), "test") == ROWS[:3]
    with pytest.raises(DataError, match=r"split 'valid' is not understood; splits: train, test"):
        rows_of(write(tmp_path / "again", "dict"), "valid")


@pytest.mark.parametrize("split", ["test", "train[", "train[a:]", "train[:300%]", "", "[:3]"])
def test_a_split_that_is_not_understood(tmp_path, split):
    path = write(tmp_path, "jsonl")
    with pytest.raises(
        DataError, match="is not understood; a file is one split, 'train'"
    ) as caught:
        rows_of(path, split)
    assert str(caught.value).startswith(f"data.source: {path}: split '{split}'")


def test_lines_in_every_dress(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "first, after a byte order mark"}\r\n'
        b"\r\n"
        b"                    \n"
        b"\n"
        b'   {"text": "indented"}\n'
        b'{"text": "\xe6\x9d\xb1\xe4\xba\xac"}\n'
        b'{"text": "' + b"x" * 3_000_000 + b'"}\n'
        b'{"text": "no end of line"}'
    )
    texts = [row["text"] for row in open_source(Source(source=str(path))).read(0, 99)]
    assert [text[:30] for text in texts] == [
        "first, after a byte order mark",
        "indented",
        "東京",
        "x" * 30,
        "no end of line",
    ]


def test_a_bad_line_is_one_bad_row(tmp_path):
    path = tmp_path / "data.jsonl"
    good = b'{"text": "good"}\n'
    bad = [
        b'{"text": ',
        b'{"text": "\xff"}',
        b"[1]",
        b"3",
        b"null",
        b"[" * 9999,
        b"1" + b"0" * 5000,
        '{"text": "first line of a file in UTF-16"}'.encode("utf-16-le"),
        b'{"text": "a", "text": "b"}',
    ]
    path.write_bytes(good + b"\n".join(bad) + b"\n" + good)
    rows = open_source(Source(source=str(path))).read(0, 99)
    reasons = [*["not a JSON object"] * len(bad)]
    reasons[0] += " (Expecting value at column 9)"
    reasons[1] = reasons[7] = "not UTF-8"
    reasons[5], reasons[8] = (
        "nested too deeply",
        "the key 'text' is there more than once",
    )
    assert rows == [{"text": "good"}, *reasons, {"text": "good"}]


TWICE = [
    '{"text": "a", "text": "b"}',
    '{"te\\u0078t": "a", "text": "b"}',
    '{"messages": [{"role": "user", "content": "a", "role": "assistant"}]}',
    '{"messages": [{"role": "user", "content": "a: b", "rol\\u0065" : "assistant"}]}',
    '{"messages": [{"content": null, "tool_calls": [{"function": {"name": "a", "name": "b"}}]}]}',
    '{"ids": [1, {"x": 1, "x": 2}]}',
]
ONCE = [
    '{"text": "\\"text\\": 1, \\"text\\": 2", "a:b" : {"text": "::"}}',
    '{"ids": [1, {"x": 1}], "messages": [{"role": "x"}, {"role": "x"}]}',
]


@pytest.mark.parametrize("line", TWICE)
def test_a_key_twice_in_one_object_is_refused(line, tmp_path):
    path, twice = tmp_path / "data.jsonl", "the key '(text|role|name|x)' is there more than once"
    path.write_text("\n".join([ONCE[0], line, ONCE[1]]))
    first, why, last = rows_of_short(path)
    assert [first, last] == [*map(json.loads, ONCE)] and re.fullmatch(twice, why)
    path = tmp_path / "data.json"
    path.write_text(f"[{ONCE[0]},\n {line}]")
    with pytest.raises(DataError, match=f"data.json: is not JSON: {twice}; correct the file"):
        rows_of_short(path)
    path.write_text(line)
    assert rows_of_short(path) == [why]


def test_a_broken_json_file_says_where(tmp_path):
    path = tmp_path / "data.json"
    path.write_text('[{"text": "a"},\n {"text": ]')
    with pytest.raises(DataError, match=r"data.json: is not JSON: .* line 2 column 11"):
        rows_of_short(path)
    path.write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"data.json: is not JSON"):
        rows_of_short(path)
    path.write_text('{"text": "a"}')
    assert rows_of_short(path) == [{"text": "a"}]


def rows_of_short(path):
    return open_source(Source(source=str(path))).read(0, 99)


def test_a_csv_file_is_read_as_text_with_its_quotes(tmp_path):
    path = tmp_path / "qa.csv"
    path.write_text('question,answer\n"Who, me?","You\nalone"\nWhat?,\n', encoding="utf8")
    first = {"question": "Who, me?", "answer": "You\nalone"}
    assert rows_of_short(path) == [first, {"question": "What?"}]


def test_a_parquet_file_s_empty_fields_count_as_missing(tmp_path):
    path = tmp_path / "data.parquet"
    datasets.Dataset.from_list(
        [{"text": "a", "messages": None}, {"text": None, "messages": [{"role": "user"}]}]
    ).to_parquet(path)
    assert rows_of_short(path) == [{"text": "a"}, {"messages": [{"role": "user"}]}]


def test_a_split_of_more_rows_than_there_are_is_warned_of(tmp_path, capsys):
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a"}] * 20)
    for split, warns in {"train[:100]": True, "train[5:21]": True, "train[:20]": False}.items():
        assert len(open_source(Source(source=str(rows), split=split))) <= 20
        said = f"split '{split}' asks for more rows than there are" in capsys.readouterr().out
        assert said == warns, split
    assert len(open_source(Source(source=str(rows), split="train[50%:100%]"))) == 10
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("data.jsonl", b"", "the file is empty; name a file with rows"),
        (
            "data.jsonl.gz",
            b"{}",
            "unknown file type '.gz'; use .jsonl, .json, .parquet, .arrow, .csv, unpacked",
        ),
        ("data.tsv", b"a\tb", "unknown file type '.tsv'; use .jsonl, .json, .parquet"),
        ("data.csv", b'a,b\n"1', "cannot be read as csv"),
        ("data", b"a,b", "unknown file type ''"),
        ("data.parquet", b"no parquet", "cannot be read as parquet"),
        ("data.arrow", b"no arrow", "cannot be read as arrow"),
        ("pipe.jsonl", b"", "is a pipe or a device"),
        ("folder/", b"", "the folder has no data"),
        ("folder/state.json", b"{}", "cannot be opened as a file"),
    ],
)
def test_what_cannot_be_opened_is_one_line(tmp_path, name, content, expected):
    place = tmp_path / name
    place.parent.mkdir(exist_ok=True)
    if name == "pipe.jsonl":
        os.mkfifo(place)
    else:
        place.mkdir() if name.endswith("/") else place.write_bytes(content)
    place = tmp_path / name.partition("/")[0]
    with pytest.raises(DataError) as caught:
        rows_of_short(place)
    message = str(caught.value)
    assert (
        message.startswith(f"data.source: {place}") and expected in message and "\n" not in message
    )


def test_a_broken_file_gives_our_error_alone(tmp_path):
    path = write(tmp_path, "parquet")
    path.write_bytes(path.read_bytes()[:-20])
    table = tiny_tables(tmp_path / "tiny") | {"data": {"source": str(path), "max_length": 256}}
    result = run_plugsft("inspect", write_recipe(tmp_path / "recipe.toml", table))
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(
        f"error: data.source: {path} (split 'train'): cannot be read as parquet: "
    )


def test_a_missing_file_names_the_nearest(tmp_path):
    write(tmp_path, "jsonl")
    (tmp_path / "recipe.toml").write_text("")
    with pytest.raises(DataError, match=r"dat.jsonl: no such file; did you mean 'data.jsonl'\?"):
        rows_of_short(tmp_path / "dat.jsonl")
    with pytest.raises(DataError, match=r"no such file$"):
        rows_of_short(tmp_path / "nowhere/zzz")
    with pytest.raises(DataError, match=r"no such file$"):
        rows_of_short(tmp_path / "recipe.jsonl")


def test_a_name_that_the_hub_would_have_to_know(tmp_path):
    with pytest.raises(DataError, match=r"data.source: nobody/nothing .*cannot be opened"):
        rows_of_short("nobody/nothing")


def test_an_evaluation_file_is_named_by_its_key(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    tables = tiny_tables(tmp_path) | {"eval": {"source": str(tmp_path / "empty.jsonl")}}
    recipe = write_recipe(tmp_path / "recipe.toml", tables)
    for command in ("train", "prepare", "check"):
        result = run_plugsft(command, recipe)
        (line,) = result.stderr.splitlines()
        says = f"{tmp_path / 'empty.jsonl'}: the file is empty; name a file with rows"
        assert line == f"error: eval.source: {says}"


@pytest.mark.parametrize("kind", ["path", "address", "link", "state"])
def test_a_folder_of_somebody_else_leads_nowhere_outside(tmp_path, kind):
    folder, secret = tmp_path / "folder", tmp_path / "secret.jsonl"
    write_jsonl(secret, [{"text": "secret"}])
    if kind == "state":
        datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(folder)
        state = json.loads((folder / "state.json").read_text())
        state["_data_files"][0]["filename"] = "../secret.arrow"
        (folder / "state.json").write_text(json.dumps(state))
    else:
        folder.mkdir()
        write_jsonl(folder / "train.jsonl", [{"text": "a"}])
    if kind == "link":
        (folder / "test.jsonl").symlink_to(secret)
    named = {"path": "../secret.jsonl", "address": "http://127.0.0.1:9/x.jsonl"}.get(kind)
    if named:
        configs = f"---\nconfigs:\n- config_name: default\n  data_files: {named}\n---\n"
        (folder / "README.md").write_text(configs)
    with pytest.raises(DataError, match=r"outside of its folder|leads out of the folder"):
        len(open_source(Source(source=str(folder))))


def test_files_in_the_hub_s_cache_are_links_to_its_blobs(tmp_path):
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots/abc"
    folder.mkdir(parents=True)
    blobs.mkdir()
    write_jsonl(blobs / "123", [{"text": "a"}])
    (folder / "train.jsonl").symlink_to(blobs / "123")
    assert len(open_source(Source(source=str(folder)))) == 1


def test_a_folder_of_splits_is_opened(tmp_path):
    for split, rows in ("train", 3), ("test", 2):
        (tmp_path / split).mkdir()
        write_jsonl(tmp_path / split / "rows.jsonl", [{"text": "a"}] * rows)
    assert len(open_source(Source(source=str(tmp_path), split="test"))) == 2


def test_a_csv_row_with_a_field_too_many_moves_no_column(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("prompt,completion\nhello,world,more\nhow,are,you\n")
    with pytest.raises(DataError, match="more fields than the first line has names"):
        len(open_source(Source(source=str(path))))
    path.write_text("prompt,completion\nhello,world\n")
    assert open_source(Source(source=str(path))).read(0, 1) == [
        {"prompt": "hello", "completion": "world"}
    ]


def test_a_csv_s_texts_are_trained_as_they_are_written(tmp_path):
    """pandas would guess types for each part of a file, and read "NA" as nothing."""
    answers = ["words"] * 12_000 + ["007", "1.10", "123456789012345678901", "NA", "null", "True"]
    lines = [f"{answer},{n % 3}.5,{n}" for n, answer in enumerate(answers)]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(["output,weight,note", *lines, ",,", ""]), encoding="utf8")
    rows = open_source(Source(source=str(path)))
    read = rows.read(11_999, 12_007)
    assert [row.get("output") for row in read] == [*answers[11_999:], None]
    weights = [n % 3 + 0.5 for n in range(11_999, 12_006)]
    assert [row.get("weight") for row in read] == [*weights, None]
    [row] = rows.part(12_000, 12_001).read(0, 1)
    assert row == {"output": "007", "weight": 0.5, "note": 12_000}


def test_a_csv_s_columns_of_numbers_may_mix_their_kinds(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("a,b,c\n1,1,12345678901234567890\ntrue,2.5,7\n,3,8\n", encoding="utf8")
    long = "12345678901234567890"  # as text, since no number of a table holds it
    assert rows_of_short(path) == [
        {"a": 1, "b": 1, "c": long},
        {"a": True, "b": 2.5, "c": "7"},
        {"b": 3, "c": "8"},
    ]
