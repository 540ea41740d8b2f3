"""arrow_cache: an entry is built once by one of many processes, and read by all."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import (
    chats,
    must_succeed,
    run_plugsft,
    start_plugsft,
    tiny_tables,
    write_jsonl,
    write_recipe,
)
from plugin_packages import activate, install

from plugsft import RecipeError, testing
from plugsft.base.atomic import damage, is_published, publish
from plugsft.base.checksums import add_checksum, parse_checksummed
from plugsft.base.machine import look
from plugsft.data import prepare, sources
from plugsft.data.defaults import DataDefaults
from plugsft.registry.active import check
from plugsft.registry.load import resolve
from plugsft.tokens.store import Tokens

ROUNDS = 20 if os.environ.get("PLUGSFT_FULL") else 2
# It notes who encodes a slice, and takes its time over it.
NOTING = """
    import os, time

    @plugin()
    class Noting:
        seconds: float = 0.0

        @hookimpl(wrapper=True)
        def encode(self):
            with open(os.environ["NOTE"], "a") as note:
                note.write(f"{os.getpid()}\\n")
            time.sleep(self.seconds)
            return (yield)
"""


@pytest.fixture
def run(tmp_path, home):
    """Give `run(output, **options)`: prepares data; returns the tokens and the plugin's summary."""

    def make(output="run", rows=None, tables=None, **options):
        recipe, active = resolve(
            {
                **tiny_tables(tmp_path, rows),
                "output": str(tmp_path / output),
                "plugins": {"arrow_cache": options},
                **(tables or {}),
            }
        )
        active.attach(DataDefaults(recipe.folder))
        check(active, recipe, look())
        tokens = prepare.prepare(recipe, active).tokens
        return tokens, active.summaries()["arrow_cache"]

    return make


@pytest.fixture
def noted(tmp_path, home, monkeypatch):
    """Give a recipe of many slices whose encoders are noted, and the file that notes them."""
    activate(install(tmp_path / "site", noting=NOTING), monkeypatch)
    monkeypatch.setenv("NOTE", str(tmp_path / "note"))
    (tmp_path / "note").touch()

    def make(slices, seconds=0.0, **options):
        tables = tiny_tables(tmp_path, chats(4))
        sources = [write_jsonl(tmp_path / f"{n}.jsonl", chats(4, n)) for n in range(slices)]
        tables["data"] = {
            "sources": [{"source": str(source)} for source in sources],
            "max_length": 64,
        }
        tables["plugins"] = {"arrow_cache": options, "noting": {"seconds": seconds}}
        return write_recipe(tmp_path / "recipe.toml", tables), tmp_path / "note"

    return make


def content(tokens):
    return [[one.tolist() for one in tokens.example(number)] for number in range(len(tokens))]


def left_over(home):
    return sorted(path.name for path in home.glob(".*"))


def builders(note):
    return note.read_text().split()


def test_a_second_run_finds_what_the_first_has_built(run, home, tmp_path, capsys):
    first, summary = run("one")
    (entry,) = home.iterdir()
    assert summary.startswith("miss: built in ") and summary.endswith(f" s, stored in {entry}")
    assert "from cache" not in capsys.readouterr().out
    second, summary = run("two")
    assert summary.startswith(f"hit: {entry.name}, opened in ") and summary.endswith(" ms")
    assert "from cache" in capsys.readouterr().out
    assert first.folder == second.folder == entry and content(first) == content(second)
    assert not (tmp_path / "one/tokens").exists() and not (tmp_path / "two/tokens").exists()
    assert damage(entry) is None and left_over(home) == []


def test_a_hit_does_not_read_the_rows_again(run, monkeypatch):
    first, _ = run()
    monkeypatch.setattr(sources, "find_lines", None)
    assert content(run()[0]) == content(first)


def test_evaluation_data_is_kept_beside_it(run, home, tmp_path):
    other = write_jsonl(tmp_path / "other.jsonl", chats(5, seed=1))
    tables = {"eval": {"source": str(other)}}
    assert run("one", tables=tables)[1].count("miss") == 2
    assert run("two", tables=tables)[1].count("hit") == 2
    assert len([*home.iterdir()]) == 2


def test_where_it_is_kept(run, home, tmp_path, monkeypatch):
    mine = tmp_path / "mine"
    assert run(folder=str(mine))[0].folder.parent == mine / "tokens" and not home.exists()
    monkeypatch.delenv("PLUGSFT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert run()[0].folder.parent == tmp_path / "xdg/plugsft/tokens"


def test_a_hit_is_noted_as_the_last_use(run):
    entry = run()[0].folder
    os.utime(entry / "manifest.json", (0, 0))
    run(read_only=True)
    assert (entry / "manifest.json").stat().st_mtime == 0
    run()
    assert time.time() - (entry / "manifest.json").stat().st_mtime < 60


def flip(path, at=-1):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def other_key(entry):
    facts = parse_checksummed((entry / "facts.json").read_text())
    facts["key_parts"]["options"]["max_length"] = 3
    (entry / "facts.json").write_text(json.dumps(add_checksum(facts)))
    again = entry.with_name("again")
    with publish(again) as folder:
        for path in entry.glob("[!m]*"):
            shutil.copy(path, folder)
    shutil.rmtree(entry)
    again.rename(entry)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda entry: next(entry.glob("data-*")).unlink(), "data-00-000000000000.arrow is missi"),
        (lambda entry: os.truncate(next(entry.glob("data-*")), 64), "is not what was written"),
        (lambda entry: (entry / "index.arrow").write_bytes(b""), "index.arrow is not what was wri"),
        (lambda entry: flip(entry / "facts.json", 10), "facts.json is not what was written"),
        (lambda entry: flip(entry / "index.arrow", -1), "index.arrow: damaged: "),
        (lambda entry: (shutil.rmtree(entry), entry.mkdir()), "its manifest cannot be read"),
        (other_key, "it was built for another key"),
    ],
)
def test_a_damaged_entry_is_noticed_and_built_again(run, home, capsys, harm, says):
    tokens, _ = run()
    expected, entry = content(tokens), tokens.folder
    del tokens
    harm(entry)
    tokens, summary = run("two", read_only=True)
    assert tokens.folder.parent != home, "it may only read, so the run prepares its own"
    assert summary.startswith("not used: ") and says in summary
    capsys.readouterr()
    tokens, summary = run("three")
    said = capsys.readouterr().out
    assert f"cache: rebuilding {entry}: " in said and says in said
    assert summary.startswith("miss: built in ") and content(tokens) == expected
    assert damage(entry) is None and left_over(home) == []


def test_a_read_only_cache_is_read_and_never_written(run, home, tmp_path):
    tokens, summary = run("one", read_only=True)
    assert "the entry does not exist" in summary and not home.exists()
    assert tokens.folder.parent == tmp_path / "one/tokens"
    run("two")
    tokens, summary = run("three", read_only=True)
    assert summary.startswith("hit") and tokens.folder.parent == home


@pytest.mark.parametrize("small_disk", ["200k"], indirect=True)
def test_on_a_full_disk_the_run_goes_on_without_it(run, small_disk, tmp_path, capsys):
    tokens, summary = run(rows=chats(2000), folder=str(small_disk))
    assert tokens.folder.parent == tmp_path / "run/tokens" and len(tokens) == 2000
    assert summary.startswith(f"not used: {small_disk}") and "the disk is full" in summary
    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("cache: ")]
    assert line.startswith("cache: not used, the run continues without it: ")
    assert "output=" not in line, "another output would not help"
    assert [*(small_disk / "tokens").iterdir()] == [], "and it leaves the room that it took"


@pytest.mark.parametrize("small_disk", ["200k"], indirect=True)
def test_on_a_read_only_disk_hits_still_serve(run, small_disk, tmp_path):
    entry = run("one", folder=str(small_disk))[0].folder
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    tokens, summary = run("two", folder=str(small_disk))
    assert summary.startswith("hit") and tokens.folder == entry
    tokens, summary = run("three", rows=chats(7), folder=str(small_disk))
    assert summary.startswith("not used: ") and "read-only file system" in summary
    assert tokens.folder.parent == tmp_path / "three/tokens"


@pytest.mark.parametrize("folder", ["/proc/plugsft", "/dev/null"])
def test_a_folder_that_cannot_be_made_is_named(run, tmp_path, folder):
    tokens, summary = run(folder=folder)
    assert summary.startswith(f"not used: {folder}") and "cannot be written" in summary
    assert tokens.folder.parent == tmp_path / "run/tokens"


def test_a_file_in_the_folder_s_place_is_refused(tmp_path):
    (tmp_path / "mine").write_text("")
    table = {"plugins": {"arrow_cache": {"folder": str(tmp_path / "mine")}}}
    recipe, active = resolve(tiny_tables(tmp_path) | table)
    active.attach()
    with pytest.raises(RecipeError, match=r"plugins.arrow_cache: folder: .*/mine is a file; give"):
        check(active, recipe, look())


def test_bad_rows_leave_nothing_in_the_cache(run, home):
    with pytest.raises(Exception, match="unknown role"):
        run(rows=[{"messages": [{"role": "nobody", "content": "x"}]}])
    assert [*home.iterdir()] == []


def mapped(path):
    return str(path) in Path("/proc/self/maps").read_text()


def test_in_memory_reads_at_once(run):
    one, _ = run()
    shard = next(one.folder.glob("data-*"))
    expected = content(one)
    assert mapped(shard)
    del one
    two, _ = run(in_memory=True)
    assert content(two) == expected and not mapped(shard)


def test_a_killed_build_is_gone_on_from(noted, home):
    recipe, note = noted(slices=8, seconds=0.3)
    first = start_plugsft("prepare", recipe)
    while len([*home.glob(".*.parts-*/data-*.json")]) < 3:
        time.sleep(0.02)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    done = len([*home.glob(".*.parts-*/data-*.json")])
    second = must_succeed("prepare", recipe)
    assert f"data: continuing after {done} of 8 slices" in second.stdout
    # The kill comes in the middle of a slice, or just before it begins.
    cut_short = builders(note).count(str(first.pid)) - done
    assert cut_short in (0, 1) and len(builders(note)) == 8 + cut_short
    (entry,) = home.iterdir()
    assert damage(entry) is None and len(Tokens(entry)) == 32


@pytest.mark.timeout(1200)
def test_eight_processes_and_random_kills(noted, home, tmp_path):
    recipe, note = noted(slices=6, seconds=0.05)
    must_succeed("prepare", recipe, "plugins.arrow_cache.enabled=false")
    (reference,) = (tmp_path / "run/tokens").iterdir()
    tokenizer = next((tmp_path / "run/scratch").iterdir())
    rng = random.Random(11)
    killed = 0
    for round in range(ROUNDS):
        note.write_text("")
        words = [recipe, f"model.tokenizer={tokenizer}"]
        started = [
            start_plugsft("prepare", *words, f"output={tmp_path}/out-{round}-{n}") for n in range(8)
        ]
        for _ in range(rng.randint(1, 3)):
            before = len(builders(note))
            while len(builders(note)) == before and any(one.process.is_alive() for one in started):
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 0.1))
            # Mostly the one that builds; else any of them.
            likely = builders(note)[-1:] if rng.random() < 0.8 else []
            victim = int(likely[0]) if likely else rng.choice(started).pid
            if sum(one.process.is_alive() for one in started) > 2:
                os.kill(victim, signal.SIGKILL)
                killed += 1
        ended = [one.wait() for one in started]
        survivors = [one for one in ended if one.returncode == 0]
        assert {one.returncode for one in ended} <= {0, -signal.SIGKILL}, ended
        (entry,) = [path for path in home.iterdir() if is_published(path)]
        assert all(f"tokens: {entry}" in survivor.stdout for survivor in survivors) and survivors
        assert sum("from cache" not in survivor.stdout for survivor in survivors) <= 1
        assert damage(entry) is None and content(Tokens(entry)) == content(Tokens(reference))
        result = run_plugsft("cache", "gc", env={"PLUGSFT_CACHE": str(home.parent)})
        assert result.returncode == 0 and [*home.iterdir()] == [entry], result
        shutil.rmtree(entry)
    assert killed >= ROUNDS


def test_it_keeps_the_laws(tmp_path):
    options = {"folder": str(tmp_path)}
    testing.keeps_gradients("arrow_cache", options)
    (entry,) = (tmp_path / "tokens").iterdir()
    assert testing.summary("arrow_cache", options).startswith(f"hit: {entry.name}")
    testing.keeps_gradients("arrow_cache", options)
