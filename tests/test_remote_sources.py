"""Sources at s3://: read by ranges, refused with the cure, noticed when they change."""

import gzip
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from conftest import (
    chats,
    only_full,
    run_plugsft,
    tiny_tables,
    write_jsonl,
    write_recipe,
)

from plugsft import DataError, RecipeError
from plugsft.data.defaults import DataDefaults
from plugsft.data.prepare import prepare
from plugsft.data.readers import remote
from plugsft.data.sources import open_source, slices_of
from plugsft.output.folder import ensure_inputs
from plugsft.recipe.tables import Data, Source
from plugsft.registry.load import resolve

moto = pytest.importorskip("moto.server", reason="pip install -e '.[dev]'")
s3fs = pytest.importorskip("s3fs", reason="pip install -e '.[dev]'")
ROWS = chats(20_000)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """20,000 chats as jsonl and as parquet with row groups of 1,000."""
    folder = tmp_path_factory.mktemp("files")
    write_jsonl(folder / "rows.jsonl", ROWS)
    datasets.Dataset.from_list(ROWS).to_parquet(str(folder / "rows.parquet"), batch_size=1000)
    for number in range(3):
        write_jsonl(folder / f"part-{number}.jsonl", ROWS[number * 8 : number * 8 + 8])
    return folder


@pytest.fixture(scope="module")
def bucket(files):
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
        for file in files.iterdir():
            store.put(str(file), f"rows/{'parts/' * file.name.startswith('part')}{file.name}")
        yield store
    server.stop()


@pytest.fixture
def asked(monkeypatch):
    """Count the bytes that are asked for."""
    sizes, fetch = [], remote.Address._fetch

    def count(self, start, stop):
        sizes.append(stop - start)
        return fetch(self, start, stop)

    monkeypatch.setattr(remote.Address, "_fetch", count)
    return sizes


def opened(url, split="train"):
    return open_source(Source(source=url, split=split))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_rows_are_read_by_ranges(files, bucket, asked, name):
    rows = opened(f"s3://rows/{name}")
    size = (files / name).stat().st_size
    assert len(rows) == len(ROWS) and rows.identity == rows.identity
    if name == "rows.parquet":
        assert sum(asked) <= 1 << 16 < size / 10  # the footer alone
    # Another process reads a slice.
    part = pickle.loads(pickle.dumps(slices_of([rows], Data(source="x"))[1]))
    asked.clear()
    remote._read_group.cache_clear()
    assert part.rows.read(5, 8) == ROWS[part.start + 5 : part.start + 8]
    assert 0 < sum(asked) < size / 5
    asked.clear()
    assert opened(f"s3://rows/{name}", "train[:10]").read(0, 10) == ROWS[:10]
    assert sum(asked) < size / 2.5


def test_folders_and_patterns_are_read(bucket):
    for url in ("s3://rows/parts", "s3://rows/parts/", "s3://rows/parts/part-*.jsonl"):
        rows = opened(url)
        assert rows.read(0, 24) == ROWS[:24] and len(rows) == 24
        assert rows.part(7, 9).read(0, 2) == ROWS[7:9]
    assert opened("s3://rows/parts/part-[12].jsonl").read(0, 1) == ROWS[8:9]


def test_names_may_hold_letters_of_patterns(bucket):
    line = json.dumps(ROWS[3]) + "\n"
    names = ("a[1].jsonl", "b*.jsonl", "c?.jsonl", "run[1]/d.jsonl")
    for name in (*names, "a1.jsonl", "bb.jsonl", "cc.jsonl"):
        bucket.pipe(f"rows/letters/{name}", (line if name in names else "{}\n").encode())
    for name in (*names, "run[1]/"):
        assert opened(f"s3://rows/letters/{name}").read(0, 9) == [ROWS[3]]
    assert len(opened("s3://rows/letters/b?.jsonl")) == 2


@pytest.mark.parametrize("url", ["https://bob:hunter2@host/a.jsonl", "s3://KEY:hunter2@b/a"])
def test_an_address_with_a_password_is_refused(tmp_path, url):
    """Recipes, logs and reports would show it."""
    tables = tiny_tables(tmp_path) | {"data": {"source": url}}
    with pytest.raises(RecipeError, match=r"data\.source: an address with a password") as refused:
        resolve(tables)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "written", ["s3://rows/${SECRET}/rows.jsonl", "s3://rows/a.jsonl?$SECRET", "$STORE/a.jsonl"]
)
@pytest.mark.parametrize(
    ("key", "command"),
    [
        ("data.source", "check"),
        ("data.source", "inspect"),
        ("eval.source", "prepare"),
        ("model.path", "check"),
    ],
)
def test_no_recipe_sends_a_variable_to_a_store(tiny, key, command, written, monkeypatch):
    monkeypatch.setenv("SECRET", "hf_hunter2")
    monkeypatch.setenv("STORE", "s3://rows")
    result = run_plugsft(command, tiny(), f"{key}={written}")
    assert result.returncode == 2 and f"{key}: an address takes no environment" in result.stderr
    assert "hunter2" not in result.stderr


def test_a_changed_object_is_noticed(bucket, tmp_path):
    before = opened("s3://rows/parts").identity
    assert opened("s3://rows/parts").identity == before
    bucket.pipe("rows/parts/part-2.jsonl", (json.dumps(ROWS[5]) + "\n").encode() * 8)
    assert opened("s3://rows/parts").identity != before
    bucket.pipe(
        "rows/parts/part-2.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS[16:24]).encode()
    )


@pytest.mark.parametrize("name", ["changing.jsonl", "changing.parquet"])
def test_an_object_that_changes_between_two_slices_is_refused(files, bucket, name):
    content = (files / f"rows{Path(name).suffix}").read_bytes()
    bucket.pipe(f"rows/{name}", content)
    url = f"s3://rows/{name}"
    part = pickle.loads(pickle.dumps(slices_of([opened(url)], Data(source="x"))[1]))
    bucket.pipe(f"rows/{name}", content.replace(b"owls", b"OWLS"))
    with pytest.raises(DataError, match=f"{url}: has changed while it was read; start again"):
        part.rows.read(5, 8)
    bucket.rm(f"rows/{name}")
    with pytest.raises(DataError, match=f"data: {url}: no such bucket, folder or object"):
        part.rows.read(5, 8)


def test_names_and_files_of_other_kinds(files, bucket):
    write_jsonl(files / "ünï 東.jsonl", ROWS[:3])
    bucket.put(str(files / "ünï 東.jsonl"), "rows/odd/ünï 東.jsonl")
    bucket.pipe("rows/odd/empty.jsonl", b"")  # many tools write empty parts
    for url in ("s3://rows/odd/ünï 東.jsonl", "s3://rows/odd/"):
        assert opened(url).read(0, 4) == ROWS[:3]
    bucket.pipe("rows/packed.jsonl", gzip.compress((files / "rows.jsonl").read_bytes()))
    for url, reason in {
        "s3://rows/odd/empty.jsonl": "is empty; name an object with rows",
        "s3://rows/packed.jsonl": "is compressed by gzip",
        "s3://rows/odd/rows.csv": "no such bucket, folder or object",
    }.items():
        with pytest.raises(DataError, match=reason):
            len(opened(url))


def test_cut_connections_are_tried_again(bucket, monkeypatch):
    rows = opened("s3://rows/rows.jsonl")
    assert len(rows) == len(ROWS)
    store, cuts = remote._store, iter(range(2))

    def cut(url):
        if next(cuts, None) is not None:
            raise ConnectionResetError("cut")
        return store(url)

    monkeypatch.setattr(remote, "_store", cut)
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)
    assert rows.read(0, 3) == ROWS[:3] and next(cuts, None) is None
    cuts = iter(range(99))
    with pytest.raises(DataError, match="cannot be read after 5 tries"):
        rows.read(0, 3)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("s3://missing/rows.jsonl", "no such bucket, folder or object"),
        ("s3://rows/missing.jsonl", "no such bucket, folder or object"),
        ("s3://rows/missing", "no such bucket, folder or object"),
        ("s9://rows/rows.jsonl", "only addresses of s3, s3a, gs, gcs, hf, file are read in place"),
    ],
)
def test_an_address_that_is_wrong_is_refused(bucket, url, reason):
    with pytest.raises(DataError) as refused:
        opened(url)
    assert reason in str(refused.value) and "data.source: " in str(refused.value)
    assert "\n" not in str(refused.value)


REFUSE = """
import sys
for name in sys.argv[2:]:
    sys.modules[name] = None
from plugsft import DataError, RecipeError
from plugsft.data.sources import open_source
from plugsft.recipe.tables import Source
try:
    open_source(Source(source=sys.argv[1]))
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


def tables_of(folder):
    return tiny_tables(folder) | {"data": {"source": "s3://rows/parts", "max_length": 256}}


def test_a_recipe_names_a_bucket(bucket, tmp_path):
    recipe, active = resolve(tables_of(tmp_path))
    active.attach(DataDefaults(recipe.folder))
    ensure_inputs(recipe, tmp_path / "recipe.toml")
    tokens = prepare(recipe, active).tokens
    write_jsonl(tmp_path / "data.jsonl", ROWS[:24])
    local, active = resolve(tiny_tables(tmp_path, ROWS[:24]))
    active.attach(DataDefaults(local.folder))
    expected = prepare(local, active).tokens
    assert tokens.facts["rows"] == 24 and tokens.facts["index"] == expected.facts["index"]


@only_full
def test_a_run_reads_its_rows_from_a_bucket(bucket, tmp_path):
    """A refusal is one line and exit code 2."""
    recipe = write_recipe(tmp_path / "recipe.toml", tables_of(tmp_path))
    result = run_plugsft(recipe, "train.steps=1")
    assert result.returncode == 0, result.stderr
    assert "24 examples of 24 rows" in result.stdout
    result = run_plugsft(recipe, "data.source=s3://rows/none.jsonl", f"output={tmp_path}/none")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "no such bucket, folder or object" in result.stderr
