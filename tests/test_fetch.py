"""`plugsft fetch`: rows of a real object store are copied once, and what is no copy is refused."""

import json
import os
import socket
import subprocess
import sys

import fsspec
import pytest
from conftest import chats, run_plugsft, tiny_tables, write_recipe

from plugsft import DataError, DiskError
from plugsft.data.fetch import fetch

moto = pytest.importorskip("moto.server", reason="pip install -e '.[dev]'")
s3fs = pytest.importorskip("s3fs", reason="pip install -e '.[dev]'")
ROWS = chats(24)
PARTS = [f"part-{number}.jsonl" for number in range(3)]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture(scope="module")
def bucket():
    """A bucket of a real object store."""
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        store = s3fs.S3FileSystem()
        store.mkdir("rows")
        store.pipe("rows/rows.jsonl", lines(ROWS))
        for number, name in enumerate(PARTS):
            store.pipe(f"rows/parts/{name}", lines(ROWS[number * 8 : number * 8 + 8]))
        store.pipe("rows/parts/notes.txt", b"no rows")
        store.pipe("rows/parts/empty.jsonl", b"")  # many tools write empty parts
        yield store
    server.stop()


def names_in(folder):
    return sorted(path.name for path in folder.rglob("*") if not path.name.startswith("."))


@pytest.mark.parametrize("end", ["", "/", "/part-*.jsonl", "/part-[012].jsonl"])
def test_a_folder_or_a_pattern_is_copied(bucket, tmp_path, end, capsys):
    fetch(f"s3://rows/parts{end}", tmp_path)
    assert names_in(tmp_path) == PARTS
    assert b"".join((tmp_path / name).read_bytes() for name in PARTS) == lines(ROWS)
    said = capsys.readouterr().out
    assert "fetched: 3 files" in said and f'source = "{tmp_path}"' in said
    others = "empty.jsonl, notes.txt"
    left_out = f"left out, as empty or of another type: {others}" in said
    assert left_out == (not end.endswith(".jsonl"))


def test_a_run_trains_on_what_a_fresh_process_has_fetched(bucket, tmp_path):
    command = [sys.executable, "-m", "plugsft", "fetch", "s3://rows/rows.jsonl"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 'source = "data/rows.jsonl"' in done.stdout
    for source in (tmp_path / "data/rows.jsonl", tmp_path / "data"):
        tables = tiny_tables(tmp_path) | {"data": {"source": str(source), "max_length": 256}}
        recipe = write_recipe(tmp_path / "recipe.toml", tables)
        result = run_plugsft(recipe, "train.steps=1", "--overwrite")
        assert result.returncode == 0 and "24 examples of 24 rows" in result.stdout, result.stderr


def test_copies_that_are_there_stay_and_what_failed_is_fetched_again(bucket, tmp_path, capsys):
    fetch("s3://rows/parts", tmp_path)
    (tmp_path / PARTS[1]).unlink()
    before = (tmp_path / PARTS[0]).stat()
    fetch("s3://rows/parts", tmp_path)
    assert "fetched: 1 file" in capsys.readouterr().out
    assert names_in(tmp_path) == PARTS and (tmp_path / PARTS[0]).stat() == before


def test_a_link_of_a_local_folder_is_copied_as_its_target(tmp_path, capsys):
    (tmp_path / "rows").mkdir()
    (tmp_path / "target").write_bytes(lines(ROWS))
    link, dangling = tmp_path / "rows/link.jsonl", tmp_path / "rows/dangling.jsonl"
    link.symlink_to(tmp_path / "target")
    dangling.symlink_to(tmp_path / "nowhere")
    os.utime(link, (0, 0), follow_symlinks=False)
    for _ in range(2):
        fetch(f"file://{tmp_path}/rows", tmp_path / "copy")
    copy = tmp_path / "copy/link.jsonl"
    assert not copy.is_symlink() and copy.read_bytes() == lines(ROWS)
    said = capsys.readouterr().out
    assert "0 files, 0 B; 1 there before" in said and "type: dangling.jsonl" in said


def test_a_disk_that_fills_while_a_local_file_is_copied_is_one_line(
    small_disk, tmp_path, monkeypatch
):
    (tmp_path / "rows.jsonl").write_bytes(lines(ROWS) * 1000)
    monkeypatch.setattr("plugsft.data.fetch.free_disk", lambda folder: 1 << 40)  # another fills it
    target = small_disk / "data"
    with pytest.raises(DiskError) as caught:
        fetch(f"file://{tmp_path}/rows.jsonl", target)
    start, cure = f"{target}/rows.jsonl: cannot be written: the disk is full (", "are free); free "
    assert str(caught.value).startswith(start) and cure in str(caught.value)
    assert str(caught.value).endswith("free some, or name another folder")


def test_what_is_no_copy_of_the_object_is_refused(bucket, tmp_path):
    (tmp_path / "mine.jsonl").write_bytes(lines(ROWS[:2]))
    bucket.pipe("rows/mine.jsonl", lines(ROWS[:2]))
    with pytest.raises(DataError, match=r"mine\.jsonl: is there, and is no copy of .*remove it"):
        fetch("s3://rows/mine.jsonl", tmp_path)
    (tmp_path / "mine.jsonl").unlink()
    fetch("s3://rows/mine.jsonl", tmp_path)
    bucket.pipe("rows/mine.jsonl", lines(ROWS[:2]).replace(b"e", b"E"))  # as many bytes
    with pytest.raises(DataError, match="as it is now"):
        fetch("s3://rows/mine.jsonl", tmp_path)


@pytest.mark.parametrize("change", [lambda old: old.replace(b"e", b"E"), lambda old: old[:50]])
def test_an_object_that_changes_while_it_is_copied_leaves_nothing(
    bucket, tmp_path, monkeypatch, change
):
    bucket.pipe("rows/changing.jsonl", lines(ROWS))
    store, _ = fsspec.core.url_to_fs("s3://rows", use_listings_cache=False)
    get = store.get_file

    def changing(*given, **more):
        get(*given, **more)
        bucket.pipe("rows/changing.jsonl", change(lines(ROWS)))

    monkeypatch.setattr(store, "get_file", changing)
    with pytest.raises(DataError, match="has changed while it was copied; start again"):
        fetch("s3://rows/changing.jsonl", tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_names_may_hold_letters_of_patterns_and_of_all_languages(bucket, tmp_path):
    names = ("a[1].jsonl", "b*.jsonl", "c?.jsonl", "ünï 東.jsonl", "run[1]/d.jsonl")
    for name in (*names, "a1.jsonl", "bb.jsonl", "cc.jsonl"):
        bucket.pipe(f"rows/letters/{name}", name.encode())
    for name in names:
        fetch(f"s3://rows/letters/{name}", tmp_path / "one")
    fetch("s3://rows/letters/", tmp_path / "all")
    for name in names:
        last = name.rpartition("/")[2]
        assert (
            (tmp_path / "one" / last).read_text() == (tmp_path / "all" / name).read_text() == name
        )
    assert len(names_in(tmp_path / "one")) == len(names)


def test_an_object_whose_name_leads_outside_is_refused(bucket, tmp_path):
    bucket.pipe("rows/outside/../../../away.jsonl", b"{}")
    with pytest.raises(DataError, match=r"outside|no object"):
        fetch("s3://rows/outside/", tmp_path / "in")
    assert not (tmp_path / "away.jsonl").exists()


def test_a_file_in_the_way_is_refused(bucket, tmp_path):
    (tmp_path / "file").write_text("")
    result = run_plugsft("fetch", "s3://rows/rows.jsonl", tmp_path / "file/data")
    assert result.returncode == 2 and "is not a folder" in result.stderr


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("s3://missing/rows.jsonl", "no such bucket, folder or object"),
        ("s3://rows/missing.jsonl", "no such bucket, folder or object"),
        ("s3://rows/parts/notes.txt", "no object with rows, whose name ends .jsonl"),
        ("folder/a.jsonl", ". A recipe names local files and folders, and data sets"),
        ("s9://rows/rows.jsonl", "only addresses of s3, s3a, gs, gcs, hf, file are fetched"),
        ("https://host/a.jsonl", "download the file (curl -O), and name it"),
        ("zip://a::http://b/c", "only addresses of"),
    ],
)
def test_an_address_that_is_wrong_is_refused(bucket, tmp_path, url, reason):
    result = run_plugsft("fetch", url, tmp_path)
    assert result.returncode == 2 and reason in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "written", ["s3://rows/a.jsonl", "s3://rows/$SECRET/a.jsonl", "$STORE/a", "s3://K:hunter2@b/a"]
)
@pytest.mark.parametrize(
    ("key", "command"),
    [("data.source", "check"), ("data.source", "inspect"), ("eval.source", "prepare")],
)
def test_a_recipe_with_an_address_says_how_to_copy_it(tiny, key, command, written, monkeypatch):
    monkeypatch.setenv("SECRET", "hf_hunter2")
    monkeypatch.setenv("STORE", "s3://hunter2")
    result = run_plugsft(command, tiny(), f"{key}={written}")
    assert result.returncode == 2 and "plugsft fetch ADDRESS" in result.stderr
    assert key in result.stderr and "hunter2" not in result.stderr


@pytest.mark.parametrize(
    "address",
    [
        *("http://{}/a.jsonl", "simplecache::http://{}/a.jsonl", "zip://a::http://{}/a.jsonl"),
        *("file:///a.jsonl::http://{}/a.jsonl", "reference://{}/a.jsonl", "ftp://{}/a.jsonl"),
        "webhdfs://{}/a.jsonl",
    ],
)
def test_no_address_asks_a_foreign_server(address, tmp_path):
    """Some servers never answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        host, port = server.getsockname()
        with pytest.raises(DataError, match=r"are fetched; download the file \(curl -O\)"):
            fetch(address.format(f"{host}:{port}"), tmp_path)
        with pytest.raises(BlockingIOError):
            server.accept()


REFUSE = """
import sys
for name in sys.argv[2:]:
    sys.modules[name] = None
from pathlib import Path
from plugsft import DataError, DiskError
from plugsft.data.fetch import fetch
try:
    fetch(sys.argv[1], Path("nowhere"))
except DataError as error:
    print(error)
"""


def test_missing_credentials_and_packages_are_named(bucket, tmp_path):
    """In processes of their own: a store's package is imported once."""
    nobody = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    env = {name: value for name, value in os.environ.items() if name not in nobody}
    env |= {"AWS_EC2_METADATA_DISABLED": "true", "HOME": str(tmp_path)}

    def refusal(url, *absent):
        command = [sys.executable, "-P", "-c", REFUSE, url, *absent]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60).stdout

    assert "credentials: AWS_ACCESS_KEY_ID" in refusal("s3://rows/rows.jsonl")
    assert "pip install plugsft[s3]" in refusal("s3://rows/rows.jsonl", "s3fs")
    assert "pip install plugsft[gs]" in refusal("gs://rows/rows.jsonl", "gcsfs")
