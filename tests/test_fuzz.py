"""Five hundred broken recipes: each is refused with its place named, or understood as written.

PLUGSFT_FULL=1 (tools/test --full) tries them all; otherwise the first of the same row.
"""

import copy
import math
import os
import random
import re
import tomllib

import pytest
import tomli_w
from conftest import tiny_tables

from plugsft.cli import main
from plugsft.errors import PlugsftError
from plugsft.reading import resolved
from plugsft.registry import load

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
    # A table that lost one of two keys says which two.
    return ".".join(shown) in said or word or f"{'.'.join(shown[:-1])}: give either" in said


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
        try:
            main(["train", str(mutant), *short])
            code = 0
        except SystemExit as end:
            code = end.code
        # 1 is a loss that is not finite: a learning rate of 1e308 is right, and of no use.
        assert code in (0, 1), f"mutant {number}: {capsys.readouterr().err}"
        trained += 1


def test_the_family_of_errors_is_what_the_command_line_catches():
    assert PlugsftError.exit_code == 2
