"""Sources at s3:// and http://: read by ranges, refused with the cure, noticed when they change."""

import functools
import gzip
import http.server
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import datasets
import pytest
from conftest import (
    chats,
    only_full,
    read_metrics,
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


class Handler(http.server.SimpleHTTPRequestHandler):
    """A web server with ranges, which counts what it sends and can cut connections."""

    protocol_version = "HTTP/1.1"
    sent, cuts, ranges, requests = 0, 0, True, 0

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.send_error(403)  # as an address that is signed for reading does

    def do_GET(self):
        cls = type(self)
        cls.requests += 1
        file = Path(self.translate_path(self.path))
        if not file.is_file():
            self.send_error(404)
            return
        content = file.read_bytes()
        version = f'"{len(content)}-{file.stat().st_mtime_ns}"'
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        self.send_response(206 if wanted and cls.ranges else 200)
        if wanted and cls.ranges:
            last = min(int(wanted[2]), len(content) - 1)
            self.send_header("Content-Range", f"bytes {wanted[1]}-{last}/{len(content)}")
            content = content[int(wanted[1]) : int(wanted[2]) + 1]
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", version)
        self.end_headers()
        if cls.cuts:
            cls.cuts -= 1
            content = content[: len(content) // 2]
            self.close_connection = True
        self.wfile.write(content)
        cls.sent += len(content)


@pytest.fixture(scope="module")
def web(files):
    """The address of a local web server."""
    serve = functools.partial(Handler, directory=str(files))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


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
@pytest.mark.parametrize("where", ["s3", "http"])
def test_rows_are_read_by_ranges(files, bucket, web, asked, name, where):
    rows = opened(f"s3://rows/{name}" if where == "s3" else f"{web}/{name}")
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


@pytest.mark.parametrize(
    "url", ["https://bob:hunter2@host/a.jsonl", "https://hunter2@host/a", "s3://KEY:hunter2@b/a"]
)
def test_an_address_with_a_password_is_refused(tmp_path, url):
    """Recipes, logs and reports would show it."""
    tables = tiny_tables(tmp_path) | {"data": {"source": url}}
    with pytest.raises(RecipeError, match=r"data\.source: an address with a password") as refused:
        resolve(tables)
    assert "hunter2" not in str(refused.value)


def test_a_signed_address_may_hold_an_at_sign(web):
    url = f"{web}/rows.jsonl?X-Amz-Security-Token={'a' * 1000}&user=me@host"
    assert opened(url, "train[:3]").read(0, 3) == ROWS[:3]


@pytest.mark.parametrize(
    "written", ["{web}/${{SECRET}}/rows.jsonl", "{web}/a.jsonl?$SECRET", "$WEB/a.jsonl"]
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
def test_no_recipe_sends_a_variable_to_a_server(web, tiny, key, command, written, monkeypatch):
    monkeypatch.setenv("SECRET", "hf_hunter2")
    monkeypatch.setenv("WEB", web)
    before = Handler.requests
    result = run_plugsft(command, tiny(), f"{key}={written.format(web=web)}")
    assert result.returncode == 2 and f"{key}: an address takes no environment" in result.stderr
    assert Handler.requests == before and "hunter2" not in result.stderr


def test_no_record_holds_a_signature_and_the_run_resumes(web, tiny, tmp_path):
    query = "?a b|'c&X-Amz-Signature=hunter2"
    path = tiny(
        data={"source": f"{web}/part-0.jsonl{query}"},
        eval={"source": f"{web}/part-1.jsonl{query}"},
        train={"batch_size": 4, "steps": 4},
        checkpoint={"every": 2},
    )
    run = tmp_path / "run"
    for words in ([path], ["export", run, "--to", tmp_path / "exported"]):
        result = run_plugsft(*words)
        assert result.returncode == 0, result.stderr
        assert "hunter2" not in result.stdout
    texts = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file() and file != path]
    assert sum(f"{web}/part-0.jsonl".encode() in text for text in texts) >= 4
    assert not [text for text in texts if b"hunter2" in text]
    whole = read_metrics(run)
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoints/step-000004")
    # The run's own recipe needs its addresses; it then goes on as that of the user does.
    sources = [
        f"{key}.source={web}/part-{n}.jsonl{query}" for n, key in enumerate(["data", "eval"])
    ]
    result = run_plugsft(run / "recipe.toml", *sources, "--resume")
    assert result.returncode == 0, result.stderr
    assert [line["loss"] for line in read_metrics(run)] == [line["loss"] for line in whole]


def test_a_changed_object_is_noticed(bucket, tmp_path):
    before = opened("s3://rows/parts").identity
    assert opened("s3://rows/parts").identity == before
    bucket.pipe("rows/parts/part-2.jsonl", (json.dumps(ROWS[5]) + "\n").encode() * 8)
    assert opened("s3://rows/parts").identity != before
    bucket.pipe(
        "rows/parts/part-2.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS[16:24]).encode()
    )


@pytest.mark.parametrize("where", ["s3", "http"])
@pytest.mark.parametrize("name", ["changing.jsonl", "changing.parquet"])
def test_an_object_that_changes_between_two_slices_is_refused(files, bucket, web, where, name):
    content = (files / f"rows{Path(name).suffix}").read_bytes()

    def put(data):
        if where == "http":
            (files / name).write_bytes(data)
        else:
            bucket.pipe(f"rows/{name}", data)

    put(content)
    url = f"s3://rows/{name}" if where == "s3" else f"{web}/{name}"
    part = pickle.loads(pickle.dumps(slices_of([opened(url)], Data(source="x"))[1]))
    put(content.replace(b"owls", b"OWLS"))
    with pytest.raises(DataError, match=f"{url}: has changed while it was read; start again"):
        part.rows.read(5, 8)
    (files / name).unlink() if where == "http" else bucket.rm(f"rows/{name}")
    with pytest.raises(DataError, match=f"data: {url}: no such bucket, folder or object"):
        part.rows.read(5, 8)


def test_names_and_files_of_other_kinds(files, bucket, web):
    write_jsonl(files / "ünï 東.jsonl", ROWS[:3])
    bucket.put(str(files / "ünï 東.jsonl"), "rows/odd/ünï 東.jsonl")
    bucket.pipe("rows/odd/empty.jsonl", b"")  # many tools write empty parts
    for url in (f"{web}/ünï 東.jsonl", "s3://rows/odd/ünï 東.jsonl", "s3://rows/odd/"):
        assert opened(url).read(0, 4) == ROWS[:3]
    (files / "empty.parquet").touch()
    (files / "packed.jsonl").write_bytes(gzip.compress((files / "rows.jsonl").read_bytes()))
    for url, reason in {
        f"{web}/empty.parquet": "is empty; name an object with rows",
        "s3://rows/odd/empty.jsonl": "is empty; name an object with rows",
        f"{web}/packed.jsonl": "is compressed by gzip",
        f"{web}/rows.csv": "use names that end with .jsonl or .parquet",
    }.items():
        with pytest.raises(DataError, match=reason):
            len(opened(url))


def test_cut_connections_are_tried_again(web, monkeypatch):
    rows = opened(f"{web}/rows.jsonl")
    assert len(rows) == len(ROWS)
    monkeypatch.setattr(Handler, "cuts", 2)
    assert rows.read(0, 3) == ROWS[:3] and Handler.cuts == 0
    monkeypatch.setattr(Handler, "cuts", 99)
    monkeypatch.setattr(remote.time, "sleep", lambda seconds: None)
    with pytest.raises(DataError, match="cannot be read after 5 tries"):
        rows.read(0, 3)


def test_a_server_without_ranges_is_refused(web, monkeypatch):
    monkeypatch.setattr(Handler, "ranges", False)
    with pytest.raises(DataError, match="gives whole files only"):
        opened(f"{web}/rows.jsonl", "train[:3]").read(0, 3)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("s3://missing/rows.jsonl", "no such bucket, folder or object"),
        ("s3://rows/missing.jsonl", "no such bucket, folder or object"),
        ("s3://rows/missing", "no such bucket, folder or object"),
        ("WEB/missing.jsonl", "no such bucket, folder or object"),
        ("s9://rows/rows.jsonl", "use s3, gs, hf or https"),
    ],
)
def test_an_address_that_is_wrong_is_refused(bucket, web, url, reason):
    with pytest.raises(DataError) as refused:
        opened(url.replace("WEB", web))
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
