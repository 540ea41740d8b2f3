"""The cache: its commands, its keys, damage, and the cost of a hit."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from conftest import (
    FULL,
    ROOT,
    chats,
    read_metrics,
    run_plugsft,
    start_ranks,
    tiny_tables,
    write_jsonl,
    write_recipe,
)
from forks import FORKS
from plugin_packages import LOUD, activate, install
from transformers import LlamaConfig, LlamaForCausalLM

from plugsft import DataError
from plugsft.api import PlugsftError
from plugsft.base import checksums as digests
from plugsft.base.atomic import HOST_ID, damage, is_whole, publish
from plugsft.base.build_once import PATIENCE
from plugsft.base.checksums import add_checksum, cached_file_digest, digest, parse_checksummed
from plugsft.base.for_commands import parse_size
from plugsft.base.types import Shard
from plugsft.batches.defaults import BatchDefaults
from plugsft.batches.plan import Plan
from plugsft.data import prepare
from plugsft.data import prepare as keys
from plugsft.data.defaults import DataDefaults
from plugsft.model.defaults import ModelDefaults
from plugsft.recipe.tables import Recipe
from plugsft.registry.active import Active
from plugsft.registry.load import load, resolve
from plugsft.tokens.shards import Examples, write_index, write_shard
from plugsft.tokens.store import Tokens


@pytest.fixture
def recipe(tmp_path, home):
    """Give `recipe(data={...})`: a recipe file with a cache and a tokenizer that is there."""

    def make(**changes):
        tables = tiny_tables(tmp_path, changes.pop("rows", None))
        if not (tmp_path / "tokenizer").exists():
            made, active = resolve({**tables, "output": str(tmp_path / "first")})
            active.attach(DataDefaults(made.folder))
            shutil.copytree(prepare.prepare(made, active).tokenizer_folder, tmp_path / "tokenizer")
        tables["model"]["tokenizer"] = str(tmp_path / "tokenizer")
        tables["plugins"] = changes.pop("plugins", {"arrow_cache": {}})
        for name, change in changes.items():
            tables[name] = tables.get(name, {}) | change if isinstance(change, dict) else change
        return write_recipe(tmp_path / "recipe.toml", tables)

    return make


def built(path, *overrides):
    """Prepare a recipe's data in this process; return its entry."""
    return prepare.prepare(*opened(path, overrides)).tokens.folder


def opened(path, overrides):
    made, active = load(path, overrides)
    active.attach(DataDefaults(made.folder))
    return made, active


def key(path, *overrides):
    made, active = opened(path, overrides)
    data = prepare.open_data(made, active)
    return digest(keys.key_of(data.work, data.sources, active))


def cache(*words):
    return run_plugsft("cache", *words)


def flip(path, at, bit=0):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1 << bit
    path.write_bytes(raw)


def test_each_change_of_what_the_tokens_depend_on_changes_the_key(recipe, tmp_path, monkeypatch):
    site = install(tmp_path / "site", loud=LOUD)
    activate(site, monkeypatch)
    path = recipe()
    template = tmp_path / "other.jinja"
    chatml = (ROOT / "plugsft/data/chatml.jinja").read_text()
    template.write_text(chatml + "{# the same, almost #}")
    names = [key(path)]
    for change in (
        "data.max_length=255",
        "data.too_long=drop",
        "data.on_bad_row=drop",
        "data.train_on=last",
        "data.columns.messages=chat",
        "data.template_kwargs.a=1",
        "data.split=train[:9]",
        f"model.chat_template={template}",
        "plugins.loud={}",
        "plugins.loud.mark='?'",
    ):
        names.append(key(path, change))
    template.write_text(chatml + "{# the same, Almost #}")
    names.append(key(path, f"model.chat_template={template}"))
    (module,) = site.glob("*.py")
    module.write_text(module.read_text() + "# a note\n")
    names.append(key(path, "plugins.loud={}"))
    described = tmp_path / "tokenizer/tokenizer.json"
    kept = described.read_text()
    described.write_text(kept.replace('"normalizer": null', '"normalizer": {"type": "NFC"}'))
    names.append(key(path))
    described.write_text(kept)
    data = tmp_path / "data.jsonl"
    flip(data, data.read_bytes().index(b"quick") + 2)
    names.append(key(path))
    assert len(set(names)) == len(names) == 15


def test_another_stop_token_of_the_model_changes_the_key(recipe):
    data = prepare.open_data(*(made := opened(recipe(), ())))
    before = digest(keys.key_of(data.work, data.sources, made[1]))
    data.work.tokenizer = replace(data.work.tokenizer, more_stops=("quick",))
    assert digest(keys.key_of(data.work, data.sources, made[1])) != before


def test_what_cannot_change_the_tokens_does_not_change_the_key(recipe, tmp_path):
    path = recipe()
    shutil.copy(tmp_path / "data.jsonl", tmp_path / "moved.jsonl")
    shutil.copytree(tmp_path / "tokenizer", tmp_path / "moved")
    expected = key(path)
    for same in (
        "output=elsewhere",
        "plugins.multiprocess_tokenize={workers = 3}",
        "plugins.arrow_cache={in_memory = true}",
        "plugins.length_group={}",
        "train.batch_size=3",
        "train.micro_batch=3",
        "train.seed=7",
        "checkpoint.every=3",
        "eval={split = 'train[:3]'}",
        f"data.source={tmp_path}/moved.jsonl",
        f"model.tokenizer={tmp_path}/moved",
    ):
        assert key(path, same) == expected, same


@pytest.mark.slow
def test_the_key_is_the_same_in_every_process(recipe, home, tmp_path):
    template = (ROOT / "plugsft/data/chatml.jinja").read_text("utf8")
    (tmp_path / "own.jinja").write_text(template + "{% if a and b %}{% endif %}")
    path = recipe(
        model={"chat_template": str(tmp_path / "own.jinja")},
        data={"template_kwargs": {"b": 1, "a": {"d": 1, "c": 2}}},
    )
    command = [sys.executable, "-m", "plugsft", "prepare", str(path)]
    for seed in ("1", "2"):
        subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": seed})
    assert [entry.name for entry in home.glob("[0-9a-f]*")] == [key(path)]


def test_ls_lists_what_is_there(recipe, home, tmp_path):
    assert cache("ls").stdout == f"{home}: 0 entries, 0 B\n"
    path = recipe()
    one = built(path)
    two = built(path, "data.max_length=99")
    os.utime(one / "manifest.json", (0, 0))
    (two / "index.arrow").unlink()
    (home / ".0123456789abcdef.parts-000001").mkdir()
    head, first, second, last = cache("ls").stdout.splitlines()
    assert head.split()[:4] == ["key", "rows", "tokens", "size"]
    facts = Tokens(one).facts
    harm = r"damaged: index.arrow is missing +.*data.jsonl"
    assert re.fullmatch(rf"{two.name} +24 +775 .*  {harm}", first), "the last used comes first"
    assert re.fullmatch(
        rf"{one.name} +24 +{facts['tokens']:,} +[\d.]+ KiB  19\d\d-.* +sizes match +"
        + re.escape(str(tmp_path / "data.jsonl")),
        second,
    )
    assert last.startswith(f"{home}: 2 entries, ")
    assert last.endswith("; 1 unfinished")


def other_facts(part, name, value):
    def harm(entry):
        facts = parse_checksummed((entry / "facts.json").read_text())
        facts[part][0][name] = value
        (entry / "facts.json").write_text(json.dumps(add_checksum(facts)))

    return harm


def of_another_version(entry):
    facts = parse_checksummed((entry / "facts.json").read_text())
    (entry / "facts.json").write_text(json.dumps(add_checksum(facts | {"format": 7})))


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (other_facts("shards", "examples", "x"), "facts.json: damaged"),
        (other_facts("shards", "file", "data-y.arrow"), "damaged: no such file or directory"),
        (other_facts("shards", "file", "../data-0.arrow"), "facts.json: damaged: it names ../data"),
        (other_facts("shards", "checksum", "0"), "arrow: damaged: its checksum is wrong"),
        (lambda entry: (entry / "facts.json").write_text("{}"), "facts.json: damaged"),
        (of_another_version, "by another version of plugsft"),
        (lambda entry: (entry / "facts.json").write_text("[" * 10**5), "facts.json: damaged"),
        (
            lambda entry: (entry / "facts.json").unlink(),
            "facts.json: damaged: no such file or directory",
        ),
    ],
)
def test_a_data_set_that_does_not_fit_together_is_refused(recipe, harm, says):
    entry = built(recipe())
    harm(entry)
    with pytest.raises(DataError, match=re.escape(says)):
        Tokens(entry, in_memory=True)


def all_of(tokens):
    """Everything that training takes of a data set."""
    numbers = np.arange(len(tokens))
    columns = [
        tokens.lengths,
        tokens.targets,
        tokens.rows,
        tokens._first_lengths,
        tokens._shared_prefixes,
    ]
    sources = [source["examples"] for source in tokens.facts["sources"]]
    parts = [*columns, *tokens.gather(numbers), np.array([tokens.facts["pairs"], *sources])]
    return b"".join(part.tobytes() for part in parts)


def harmed(rng, raw):
    """Flip bits of a file, cut it short, or overwrite a stretch of it."""
    raw = bytearray(raw)
    kind = rng.choice(["flip", "flip", "flip", "flips", "cut", "zeros", "longer"])
    at = rng.randrange(len(raw))
    if kind == "flip" and rng.random() < 0.3:
        at = rng.randrange(min(len(raw), 1024))  # where Arrow describes what follows
    if kind == "cut":
        return bytes(raw[:at])
    if kind == "longer":
        return bytes(raw) + bytes(rng.randrange(1, 100))
    if kind == "zeros":
        raw[at : at + 8] = bytes(len(raw[at : at + 8]))
        return bytes(raw)
    for _ in range(1 if kind == "flip" else 5):
        raw[at] ^= 1 << rng.randrange(8)
        at = rng.randrange(len(raw))
    return bytes(raw)


def open_flipped(entry, seed, count):
    """Harm one file after the other: the same tokens come out, or a line names the file."""
    rng = random.Random(seed)
    whole = all_of(Tokens(entry))
    files = [path for path in sorted(entry.iterdir()) if path.name != "manifest.json"]
    opened = {"whole": 0, "damaged": 0}
    for number in range(count):
        path = files[number % len(files)]
        kept = path.read_bytes()
        path.write_bytes(harmed(rng, kept))
        if path.read_bytes() != kept:
            assert damage(entry) == f"{path.name} is not what was written"
            if path.suffix == ".json":
                assert not is_whole(entry), "these few bytes are read each time"
        try:
            assert all_of(Tokens(entry, in_memory=rng.random() < 0.5)) == whole, (number, path)
            opened["whole"] += 1
        except DataError as error:
            assert str(path) in str(error) and "\n" not in str(error), (number, path)
            opened["damaged"] += 1
        path.write_bytes(kept)
    # The files of `datasets`, and the columns of shards that the index repeats, are not read.
    assert min(opened.values()) > count // 20, opened


def test_any_flipped_byte_is_found_and_none_does_harm(recipe, tmp_path, home):
    sources = [write_jsonl(tmp_path / f"{n}.jsonl", chats(5, n)) for n in range(3)]
    path = recipe()
    tables = path.read_text().replace(f'source = "{tmp_path}/data.jsonl"\n', "")
    listed = "".join(f'[[data.sources]]\nsource = "{source}"\n' for source in sources)
    path.write_text(tables.replace("[train]", f"{listed}[train]"))
    entry = built(path)
    # In a process of its own: a crash is found as one.
    count = 20_000 if FULL else 600
    process = FORKS.Process(target=open_flipped, args=(entry, 5, count))
    process.start()
    process.join(count / 5)
    alive = process.is_alive()
    process.kill()
    assert not alive and process.exitcode == 0
    assert damage(entry) is None


def test_gc_removes_what_was_not_used_for_long(recipe, home):
    path = recipe()
    entries = [built(path, f"data.max_length={length}") for length in (50, 60, 70, 80)]
    for days, entry in enumerate(entries):
        used = time.time() - days * 86_400
        os.utime(entry / "manifest.json", (used, used))
    done = cache("gc", "--keep-days", "1.5")
    assert sorted(home.iterdir()) == sorted(entries[:2])
    lines = sorted(done.stdout.splitlines()[:2])
    for line, entry in zip(lines, sorted(entries[2:]), strict=True):
        assert f"removed  {entry.name} " in line and "not used for 1.5 days" in line
    last = done.stdout.splitlines()[2]
    assert last.startswith(f"{home}: removed 2, ") and "; 2 entries left, " in last
    assert "; 2 entries left" in cache("gc").stdout
    # An entry with a file of the user's stays, and the others are removed.
    (entries[0] / "notes.txt").touch()
    done = cache("gc", "--keep-days", "0").stdout
    assert (
        f"left     {entries[0].name} " in done and f"did not write {entries[0]}/notes.txt" in done
    )
    assert [*home.iterdir()] == [entries[0]]


def test_gc_leaves_what_a_run_uses(recipe, home):
    made, active = opened(recipe(), [])
    tokens = prepare.prepare(made, active).tokens
    done = cache("gc", "--keep-days", "0")
    assert "in use" in done.stdout and tokens.folder.is_dir()
    assert "removed 0," in done.stdout and "; 1 entry left" in done.stdout
    del tokens
    assert "removed 1," in cache("gc", "--keep-days", "0").stdout and not [*home.iterdir()]


BUILDER = """
import sys, time
from pathlib import Path
from plugsft.base.build_once import once
def build(folder):
    (folder / "data-1").write_text("x" * 5000)
    print("begun", flush=True)
    time.sleep(100)
once(Path(sys.argv[1]), fill=build)
"""


def test_gc_removes_what_no_living_process_holds(home):
    dead, alive, half = (home / (digit * 16) for digit in "012")
    half.mkdir(parents=True)
    (half / "data-1").write_text("half copied, or somebody else's")
    (home / "notes.txt").write_text("not ours")
    with publish(home / ("3" * 16)) as whole:
        write_tokens(whole, 10)
    # Its builder died as it was to let go of its claim.
    late = home / f".{'3' * 16}.claim-builder"
    late.write_text(f"{HOST_ID} {2**22 - 1} 0")
    running = [
        subprocess.Popen(
            [sys.executable, "-c", BUILDER, str(place)], stdout=subprocess.PIPE, cwd=ROOT
        )
        for place in (dead, alive)
    ]
    try:
        for one in running:
            one.stdout.readline()
        running[0].kill()
        began = time.monotonic()
        done = cache("gc")
        assert done.returncode == 0 and alive.name not in done.stdout
        assert f"removed  {dead.name}  4.9 KiB  unfinished" in done.stdout
        assert time.monotonic() - began < PATIENCE, "a beat tells that the other lives"
        claim, parts, *others = sorted(path.name for path in home.iterdir())
        assert claim == f".{alive.name}.claim-builder"
        assert parts.startswith(f".{alive.name}.parts-")
        assert others == [half.name, "3" * 16, "notes.txt"]
    finally:
        for one in running:
            one.kill()
            one.communicate()
    cache("gc")
    assert sorted(path.name for path in home.iterdir()) == [half.name, "3" * 16, "notes.txt"]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("20GiB", 20 << 30),
        ("500MB", 500_000_000),
        ("1.5 tb", 1_500_000_000_000),
        ("7", 7),
        ("2k", 2000),
        ("1 KiB", 1024),
        ("12B", 12),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_size(text, "--memory") == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 XB", "1,5GB", "1iB", "one"])
def test_texts_that_are_no_size_are_refused(text):
    with pytest.raises(PlugsftError, match=r"--memory: given '.*'; write it as 20GiB"):
        parse_size(text, "--memory")


@pytest.fixture
def big(tmp_path, home):
    """A file that is worth a note of its checksum, written a while ago."""
    path = tmp_path / "big.jsonl"
    path.write_bytes(b"a" * digests.MIN_REMEMBERED_SIZE)
    os.utime(path, (1e9, 1e9))
    return path


def notes(home):
    return [*(home.parent / "files").glob("*")]


def test_a_checksum_is_remembered_by_path_size_and_time(big, home, tmp_path):
    known = cached_file_digest(big)
    (note,) = notes(home)
    remembered = "0123456789abcdef" * 2
    note.write_text(remembered)
    assert cached_file_digest(big) == remembered
    other = tmp_path / "other.jsonl"
    shutil.copy2(big, other)
    assert cached_file_digest(other) == known, "another path"
    os.utime(big, (1e9, 1e9 + 1))
    assert cached_file_digest(big) == known, "another time"
    os.utime(big, (1e9, 1e9))
    shutil.copy2(big, other)
    other.replace(big)
    assert cached_file_digest(big) == known, "another file in its place"
    for note in notes(home):
        note.write_text(known[:9])
    assert cached_file_digest(big) == known, "a note that was cut short"
    with big.open("ab") as file:
        file.write(b"b")
    os.utime(big, (1e9, 1e9 + 1))
    assert cached_file_digest(big) != known, "another size"


def test_a_file_that_changes_within_a_tick_of_the_clock_is_read_again(big, home):
    now = time.time_ns()
    os.utime(big, ns=(now, now))
    first = cached_file_digest(big)
    with big.open("r+b") as file:
        file.write(b"b")
    os.utime(big, ns=(now, now))
    assert cached_file_digest(big) != first and notes(home) == []


def test_small_files_and_unwritable_notes_do_no_harm(big, home, tmp_path):
    small = tmp_path / "small"
    small.write_bytes(b"a")
    cached_file_digest(small)
    assert not notes(home)
    home.parent.mkdir(exist_ok=True)
    (home.parent / "files").write_text("in the way")
    assert cached_file_digest(big) == digests.file_digest(big)


def write_tokens(folder, rows):
    """Write a data set of short rows."""
    shards = []
    for first in range(0, rows, 10_000):
        numbers = np.arange(first, min(rows, first + 10_000))
        counts = 3 + numbers % 5
        ids = np.arange(counts.sum(), dtype=np.int32)
        examples = Examples(ids, ids % 2 == 0, counts, np.ones_like(counts), numbers)
        shards.append(Shard(f"data-{first:09d}.arrow", examples=len(numbers)))
        write_shard(folder / shards[-1].file, examples)
    sources = [{"examples": rows, "weight": 1.0}]
    write_index(folder, shards, {"key": "", "sources": sources})


def test_a_hit_costs_little_and_the_same_for_any_number_of_rows(tmp_path):
    tables = tiny_tables(tmp_path) | {"train": {"batch_size": 64, "learning_rate": 1.0}}
    recipe = Recipe.model_validate(tables)
    hook = Active({}, {}).attach(DataDefaults(tmp_path), BatchDefaults(), ModelDefaults()).hooks
    opened, first = {}, {}
    for rows in (10_000, 1_000_000):
        folder = tmp_path / str(rows)
        with publish(folder) as building:
            write_tokens(building, rows)
        times = []
        for _ in range(5):
            started = time.perf_counter()
            assert is_whole(folder)
            tokens = Tokens(folder)
            middle = time.perf_counter()
            step_plan = Plan(tokens, recipe, 1, hook).plan_step(1)
            batch = hook.collate(tokens=tokens, examples=np.concatenate(step_plan.layout[0]), pad=0)
            assert batch["input_ids"].shape == (64, 7)
            times.append((middle - started, time.perf_counter() - started))
        opened[rows], first[rows] = map(min, zip(*times, strict=True))
    print(f"\nopening: {opened}, to the first batch: {first}")
    assert first[1_000_000] <= 0.3
    assert opened[1_000_000] <= opened[10_000] + 0.02


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_flipped_bit_in_a_shard_ends_the_run_before_it_is_trained_on(recipe, tmp_path, ranks):
    path = recipe()
    folder = built(path)
    shard = next(folder.glob("data-*"))
    numbers = np.arange(len(Tokens(folder)))
    ids = Tokens(folder, in_memory=True).gather(numbers)[0].tobytes()
    # A low bit of a token in the middle: no id that the model does not know.
    flip(shard, shard.read_bytes().index(ids) + len(ids) // 8 * 4)
    named = [f"data.tokens={folder}", f"output={tmp_path / 'other'}"]
    ended = [rank.wait() for rank in start_ranks(ranks, path, *named)]
    said = [line for one in ended for line in one.stderr.splitlines() if "error: " in line]
    assert all(one.returncode in (1, 2) for one in ended), ended
    assert not any("Traceback" in one.stderr for one in ended), ended
    damaged = [line for line in said if f"{shard}: damaged: its checksum is wrong" in line]
    assert damaged and all(f"Remove the folder {folder}" in one for one in damaged), said
    assert len(read_metrics(tmp_path / "other")) < 3, "three steps are an epoch"
    assert not (tmp_path / "other/model").exists()


@pytest.mark.parametrize("plugins", [{}, {"arrow_cache": {}}])
def test_a_flipped_bit_in_an_index_of_a_cache_is_as_a_lost_file(recipe, plugins):
    """The data is prepared again, in the same start."""
    path = recipe(plugins=plugins)
    folder = built(path)
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    flip(folder / "index.arrow", len(whole["index.arrow"]) // 2)
    ended = run_plugsft(path, "--overwrite")
    assert ended.returncode == 0, ended.stderr
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == whole


def test_ids_that_the_model_does_not_know_are_refused(recipe, tmp_path):
    path = recipe()
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "small")
    small = tmp_path / "small"
    text = re.sub(r"(?ms)^\[model.scratch\]$.*?^$", "", path.read_text())
    path.write_text(text.replace("[model]\n", f'[model]\npath = "{small}"\n'))
    for command in (["check"], ["prepare"], []):
        result = run_plugsft(*command, path)
        assert result.returncode == 2 and "Traceback" not in result.stderr, result
        assert re.search(r"the token id 3\d\d, but the model knows only 300 ids", result.stderr), (
            result
        )
