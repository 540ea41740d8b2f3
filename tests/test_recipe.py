"""Recipes: all mistakes of a file at once, each with place, value and cure."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest
from conftest import tiny_tables, write_recipe
from plugin_packages import activate, install
from pydantic import BaseModel

from plugsft import Recipe, RecipeError
from plugsft.recipe import tables as recipe_module
from plugsft.recipe.explain import explain
from plugsft.recipe.parse import changed, fields, flatten, resolved
from plugsft.recipe.read import read, validate
from plugsft.recipe.tables import Checkpoint
from plugsft.registry.discover import find, load_class
from plugsft.registry.load import load

WHOLE = "it should be a whole number, such as 2"


def problems(path, *overrides):
    with pytest.raises(RecipeError) as caught:
        load(path, overrides)
    lines = caught.value.problems
    assert all("\n" not in line for line in lines), lines
    return lines


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"lerning_rate": 1},
            "lerning_rate: unknown key (given 1); allowed: output, device, model, data, train",
        ),
        (
            {"learning_rate": 1},
            "learning_rate: unknown key (given 1); did you mean 'train.learning_rate'?",
        ),
        (
            {"train": {"batch_sise": 4}},
            "train.batch_sise: unknown key (given 4); did you mean 'batch_size'? allowed: batch",
        ),
        ({"train": {"batch_size": "8"}}, f"train.batch_size: given '8'; {WHOLE}, without quotes"),
        ({"train": {"batch_size": True}}, f"train.batch_size: given true; {WHOLE}"),
        ({"train": {"batch_size": "a few"}}, f"train.batch_size: given 'a few'; {WHOLE}"),
        (
            {"train": {"learning_rate": "1e-4"}},
            "train.learning_rate: given '1e-4'; it should be a number, such as 1e-4, without qu",
        ),
        (
            {"train": {"keep_whole_gradients": "true"}},
            "train.keep_whole_gradients: given 'true'; it should be true or false, without quotes",
        ),
        ({"train": {"schedule": True}}, "train.schedule: given true; allowed: 'constant', "),
        ({"data": {"ignore": "id"}}, "data.ignore: given 'id'; it should be a list, such as [\"na"),
        ({"train": {"batch_size": 0}}, "train.batch_size: given 0; it should be greater than or"),
        ({"train": {"epochs": 2**31}}, "train.epochs: given 2147483648; it should be less than"),
        (
            {"train": {"epochs": 0.2}},
            "train.epochs: given 0.2; it should be a whole number; or set train.steps",
        ),
        ({"train": {"warmup": 2.7}}, "train.warmup: given 2.7; from 1 on it is a number of steps"),
        (
            {
                "eval": {"source": "e.jsonl"},
                "checkpoint": {"keep_best": "eval_loss", "best": "highest"},
            },
            'checkpoint: best = "highest" would keep the worst model: eval_loss is a loss',
        ),
        ({"train": {"seed": -1}}, "train.seed: given -1; it should be greater than or equal to 0"),
        (
            {"train": {"learning_rate": float("nan")}},
            "train.learning_rate: given nan; it should be a finite number",
        ),
        (
            {"train": {"schedule": "cosin"}},
            "train.schedule: given 'cosin'; did you mean 'cosine'? allowed: 'constant', ",
        ),
        ({"train": {"schedule": ["x"]}}, "train.schedule: given ['x']; allowed: 'constant', "),
        ({"train": {"schedule": "wsd"}}, 'train: schedule = "wsd" and decay, the last part of the'),
        (
            {"train": {"decay": 0.1}},
            'train: schedule = "wsd" and decay, the last part of the run, g',
        ),
        ({"train": {"schedule": "wsd", "decay": 0}}, "train.decay: given 0; it should be greater"),
        ({"train": {"schedule": "wsd", "decay": 2.5}}, "train.decay: given 2.5; from 1 on it is a"),
        ({"train": {"final_rate": 1.5}}, "train.final_rate: given 1.5; it should be less than or "),
        (
            {"train": {"schedule": "constant", "final_rate": 0.0}},
            'train: final_rate is not for schedule = "constant", which stays at its peak; remov',
        ),
        ({"train": {"schedule_options": 3}}, "train.schedule_options: unknown key (given 3)"),
        ({"train": [1]}, "train: given [1]; it should be a table"),
        ({"plugins": 3}, "plugins: given 3; it should be a table"),
        ({"data": {"columns": {"text": 1}}}, "data.columns.text: given 1; it should be text in "),
        ({"data": {"columns": "text"}}, "data.columns: given 'text'; it should be a table"),
        (
            {"data": {"sources": [{"source": "x"}]}},
            "data: source and [[data.sources]] are both set; r",
        ),
        ({"model": {"path": "somewhere"}}, "model: path and [model.scratch] are both set; remo"),
        ({"model": {"scratch": {"hidden": 30}}}, "model.scratch: hidden (30) must be an even mul"),
        ({"model": {"scratch": {"kv_heads": 3}}}, "model.scratch: heads (2) must be a multiple of"),
        ({"output": ""}, "output: given ''; it should be a name or a path"),
        ({"output": "a\0b"}, "output: given 'a\\x00b'; it cannot be a path: embedded null byte"),
        ({"data": {"source": "x" * 5000}}, "data.source: given 'xxxx"),
        ({"a\nb": 1}, "'a\\nb': unknown key (given 1)"),
    ],
)
def test_each_mistake_is_one_line_with_file_key_value_and_cure(tmp_path, changes, expected):
    tables = tiny_tables(tmp_path)
    for name, change in changes.items():
        merge = isinstance(change, dict) and isinstance(tables.get(name), dict)
        tables[name] = {**tables[name], **change} if merge else change
        if name == "model" and "scratch" in change:
            tables["model"]["scratch"] = {"hidden": 32, "heads": 2, **change["scratch"]}
    path = write_recipe(tmp_path / "recipe.toml", tables)
    (line,) = problems(path)
    assert line.startswith(f"{path}: {expected}"), line


def test_a_missing_key_is_named(tiny):
    path = tiny()
    path.write_text(path.read_text().replace("batch_size = 8\n", "").replace("output", "#"))
    assert problems(path) == [
        f'{path}: output: missing; set it, for instance output = "runs/first"',
        f"{path}: train.batch_size: missing; set it, for instance batch_size = 16",
    ]


def test_a_missing_table_is_named_with_its_first_keys(tmp_path):
    (tmp_path / "recipe.toml").write_text("[model]\n[[data.sources]]\nsplit = 'x'\n")
    lines = [line.partition(": ")[2] for line in problems(tmp_path / "recipe.toml")]
    assert lines == [
        'output: missing; set it, for instance output = "runs/first"',
        'model: set path to a hub name or a folder, for instance path = "Qwen/Qwen3-0.6B"; or add '
        "[model.scratch] for a small new model",
        'data.sources.0.source: missing; set it, for instance source = "chats.jsonl"',
        "train: missing; add [train] with batch_size = 16, learning_rate = 1e-05 "
        "(`plugsft init sft` writes an example)",
    ]
    (tmp_path / "recipe.toml").write_text("output = 'x'\n[data]\n")
    model, data, _ = [line.partition(": ")[2] for line in problems(tmp_path / "recipe.toml")]
    assert model.startswith(
        'model: missing; add [model] with path = "Qwen/Qwen3-0.6B" (`plugsft ini'
    )
    assert data.startswith("data: set source to a file, a folder or a hub name, for instance sour")


def test_a_data_file_is_no_recipe(tmp_path):
    (tmp_path / "chats.jsonl").write_text("{}")
    (line,) = problems(tmp_path / "chats.jsonl")
    assert line.startswith(
        f"{tmp_path / 'chats.jsonl'}: is data, not a recipe; write a recipe (`pl"
    )
    assert f'set data.source = "{tmp_path / "chats.jsonl"}" in it' in line


def test_all_mistakes_of_a_file_come_at_once_the_plugins_among_them(tiny, tmp_path, monkeypatch):
    activate(
        install(tmp_path, squeeze="@plugin()\nclass Squeeze:\n    depth: int = 3\n"), monkeypatch
    )
    path = tiny(
        train={"batch_size": 0, "epoch": 2},
        data={"max_length": "long"},
        plugins={"squeez": {}, "squeeze": {"dept": 1}, "length_group": {"dept": 1}},
    )
    lines = "\n".join(problems(path))
    for key in (
        "train.batch_size: given 0",
        "train.epoch: unknown key",
        "data.max_length: given 'long'",
        "plugins.squeez: unknown plugin; did you mean 'squeeze'?",
        "plugins.squeeze.dept: unknown key (given 1); did you mean 'depth'? allowed: depth",
        "plugins.length_group.dept: unknown key (given 1); it has no options",
    ):
        assert key in lines, key


def test_nested_tables_in_a_list_are_named_by_number(tiny):
    path = tiny()
    text = path.read_text()
    text = text.replace(
        "[data]\n", "[data]\nsources = [{source = 'a'}, {source = 'b', wait = 2}]\n"
    )
    path.write_text("".join(line for line in text.splitlines(True) if "source = " not in line[:9]))
    (line,) = problems(path)
    assert "data.sources.1.wait: unknown key (given 2); did you mean 'weight'? allowed: " in line
    for bad, expected in [
        ("-1", "greater than 0"),
        ("inf", "less than or equal"),
        ("'1'", "a number, such as 1e-4, without quotes"),
    ]:
        path.write_text(path.read_text().replace("wait = 2", f"weight = {bad}"))
        (line,) = problems(path)
        assert "data.sources.1.weight: given" in line and expected in line
        path.write_text(path.read_text().replace(f"weight = {bad}", "wait = 2"))


NEEDS_QUOTES = (
    'is not TOML: Invalid value (at line 2, column 10); texts need quotes: output = "runs/x"'
)


LAUGHS = "".join(
    f"{a}: &{a} [{','.join([b] * 9)}]\n"
    for a, b in zip("abcdef", ["1", *(f"*{c}" for c in "abcde")], strict=True)
)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"output = ", "is not TOML: Invalid value (at end of document)"),
        (b"\noutput = runs/x # ours\n", NEEDS_QUOTES),
        (b"a = True\n", "is not TOML: Invalid value (at line 1, column 5); write a = true"),
        (b"a = 'x' y\n", "is not TOML: Expected newline or end of document after a statement"),
        (b"a = 1\na = 2\n", "is not TOML: Cannot overwrite a value (at line 2, column 6)"),
        (b'output = "\xff"', "is not TOML: 'utf-8' codec can't decode"),
        (b"x = 1" + b"0" * 5000, "is not TOML: Exceeds the limit"),
        (b"x = " + b"[" * 5000, "is not TOML: "),
        (b"when = 2024-13-45", "is not TOML: "),
        (b"", "output: missing; set it, for"),
    ],
)
def test_broken_toml(tmp_path, content, expected):
    path = tmp_path / "recipe.toml"
    path.write_bytes(content)
    assert problems(path)[0].startswith(f"{path}: {expected}")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (
            "r.yaml",
            "train:\n\tseed: 1\n",
            "is not YAML: found character '\\t' that cannot start any ",
        ),
        (
            "r.yaml",
            "train:\n  seed: 1\n   log_every: 1\n",
            "is not YAML: mapping values are not allowed here (at line 3, column 13); indent the",
        ),
        (
            "r.yaml",
            "train:\n   seed: 1\n  log_every: 1\n",
            "is not YAML: expected <block end>, found '<block mapping start>' (at line 3, "
            "column 3); indent the keys of a table alike",
        ),
        (
            "r.yaml",
            "a: [1\nb: 2",
            "is not YAML: expected ',' or ']', but got ':' (at line 2, column 2)",
        ),
        ("r.yaml", "a: {b: 1,\n b: 2}", "a.b: is written twice (at line 2, column 2); remove one"),
        ("r.yaml", "a: &a {x: 1}\nb:\n  <<: *a\n", "b: has a merge key, << (at line 3, column 3)"),
        (
            "r.yaml",
            "plugins:\n  lora:\n",
            "plugins.lora: has no value (at line 2, column 8); remove ",
        ),
        (
            "r.yaml",
            "a: [~]",
            "a.0: has no value (at line 1, column 5); remove the key, or write {} ",
        ),
        (
            "r.yaml",
            "1: a",
            "the recipe: has a key that is no text (at line 1, column 1); put it in ",
        ),
        (
            "r.yaml",
            "a: !!python/name:x y",
            "a: has the tag tag:yaml.org,2002:python/name:x (at line",
        ),
        ("r.yaml", "- 1", "is not YAML: it should have tables, such as model:, data: and train:"),
        ("r.yaml", "a: 1\n---\nb: 1", "is not YAML: found another document (at line 2, column 1)"),
        ("r.yaml", "a: \x01", "is not YAML: unacceptable character #x0001"),
        ("r.yaml", "a: &a [*a]", "is not YAML: nested too deeply"),
        ("r.yaml", "[" * 2000, "is not YAML: nested too deeply"),
        ("r.toml", "a" + ".a" * 3000 + " = 1", "is not TOML: nested too deeply"),
        ("r.yaml", LAUGHS, "is not YAML: it has more than 100,000 values, as its aliases repeat"),
        ("r.yml", "train:\n  keep_whole_gradients: no\n", ""),
        ("r.yaml", "", "output: missing; set it, for"),
        (
            "r.json",
            '{"text": "a"}\n{"text": "b"}\n',
            "is data, not a recipe; write a recipe",
        ),
    ],
)
def test_broken_yaml_and_data(tmp_path, name, content, expected):
    path = tmp_path / name
    path.write_text(content)
    lines = problems(path)
    assert lines[0].startswith(f"{path}: {expected}")
    if not expected:  # YAML 1.1 would read false
        what = "train.keep_whole_gradients: given 'no'; it should be true or false"
        assert f"{path}: {what}" in lines


def test_yaml_says_what_toml_says(tmp_path):
    """Numbers, dates, and words that YAML 1.1 reads as truth values."""
    texts = ["no", "off", "yes", "y", "2024-01-01", "12:30", "1_000", "0b1", "nan", "=", "é 😀"]
    tables = {
        **tiny_tables(tmp_path),
        "checkpoint": {"every": 0, "keep_best": "eval_loss"},
        "eval": {"every": 8, "split": "train[:9]"},
        "plugins": {"bfd_packing": {"capacity": 512}, "async_collate": {}},
    }
    tables["data"] |= {"ignore": texts, "columns": {"label": "on"}, "template_kwargs": {"a": True}}
    tables["train"] |= {"learning_rate": 1e-5, "eps": 0.5e-7, "weight_decay": 1, "warmup": 0.25}
    toml = write_recipe(tmp_path / "recipe.toml", tables)
    in_yaml = tmp_path / "recipe.yaml"
    listed = "".join(f"    - {text}\n" for text in texts)
    rest = {**tables, "data": None, "train": None}
    in_yaml.write_text(
        "# yaml-language-server: $schema=recipe.schema.json\n"
        + "".join(f"{key}: {json.dumps(value)}\n" for key, value in rest.items() if value)
        + f"""
data:
  source: {tables["data"]["source"]}
  max_length: 0x100
  ignore:
{listed}  columns: {{label: on}}
  template_kwargs: {{a: True}}
train:
  batch_size: &eight 8
  micro_batch: +4
  learning_rate: 1e-5
  eps: .5E-7
  weight_decay: 1
  warmup: 0.25
  log_every: 01
""".replace("every: 8", "every: *eight")
    )
    wanted, found = read(toml), read(in_yaml)
    assert found == wanted and flatten(found).keys() == flatten(wanted).keys()
    kinds = [list(map(type, flatten(tables).values())) for tables in (found, wanted)]
    assert sorted(map(str, kinds[0])) == sorted(map(str, kinds[1]))
    assert resolved(load(in_yaml)[0]) == resolved(load(toml)[0])
    assert read(in_yaml, ["train.seed=3"])["train"]["seed"] == 3


def test_only_a_recipe_in_yaml_imports_its_parser(tiny):
    script = (
        "import sys; from plugsft.recipe.read import read; "
        f"read({str(tiny())!r}); print('yaml' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout == "False\n", result.stderr


def test_a_recipe_that_cannot_be_read(tmp_path):
    assert problems(tmp_path / "none.toml") == [
        f"{tmp_path / 'none.toml'}: cannot be read (no such file or directory)"
    ]
    (tmp_path / "nine.toml").mkdir()
    [line] = problems(tmp_path / "nine.tml")
    assert line.endswith("cannot be read (no such file or directory); did you mean 'nine.toml'?")
    [line] = problems(tmp_path / "nine.toml")
    assert line.endswith("nine.toml: cannot be read (is a directory)")


def test_the_mark_that_editors_of_windows_write_first_is_no_mistake(tiny):
    path = tiny()
    tables = read(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read(path) == tables


def test_numbers_too_long_to_print_are_still_a_line(tiny):
    path = tiny()
    path.write_text(path.read_text().replace("batch_size = 8", "batch_size = 0x" + "f" * 9000))
    (line,) = problems(path)
    assert "train.batch_size: given a number of more digits than Python writes; it should" in line


def test_overrides_set_any_key(tiny):
    recipe, _ = load(
        tiny(),
        [
            "train.learning_rate=1e-5",
            "train.steps=3",
            "data.split=train[:5]",
            "output=runs/here and there",
            'data.columns={messages = "talk"}',
            "eval.every=7",
            "eval.split=train[5:]",
            "checkpoint.keep = 9",
        ],
    )
    assert recipe.train.learning_rate == 1e-5 and recipe.train.steps == 3
    assert recipe.data.split == "train[:5]" and recipe.output == "runs/here and there"
    assert recipe.data.columns == {"messages": "talk"}
    assert recipe.eval is not None and recipe.eval.every == 7 and recipe.checkpoint.keep == 9


def test_overrides_reach_into_lists(tmp_path):
    raw = {"data": {"sources": [{"source": "a"}, {"source": "b"}]}}
    path = write_recipe(tmp_path / "r.toml", raw)
    assert read(path, ["data.sources.1.weight=0.5"])["data"]["sources"][1]["weight"] == 0.5


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.batch_size", "'train.batch_size': an override is written key.path=value"),
        ("=3", "'=3': an override is written key.path=value"),
        ("output.x=3", "'output.x=3': output is no table, so it has no 'x'"),
        ("train.batch_size=four", f"train.batch_size: given 'four'; {WHOLE}"),
        ("train.batchsize=4", "train.batchsize: unknown key (given 4); did you mean 'batch_size'?"),
        ("train..x=4", "train.'': unknown key"),
        ("train.seed=1\ny = 2", f"train.seed: given '1\\ny = 2'; {WHOLE}"),
        ("output=\udcff", "output: given '\\udcff'; it cannot be a path: "),
        ("train=3", "train: given 3; it should be a table"),
        ("plugins.nothing.x=3", "plugins.nothing: unknown plugin"),
    ],
)
def test_wrong_overrides(tiny, override, expected):
    (line,) = problems(tiny(), override)
    assert expected in line


def test_a_text_that_was_empty_is_a_change():
    assert changed({"data.system": ""}, {"data.system": "Be brief."}) == ["data.system"]


OLD_SCHEDULES = [
    ({"schedule": "constant_with_warmup"}, {"train": {"schedule": "constant"}}),
    (
        {"schedule": "cosine_with_min_lr", "schedule_options": {"min_lr_rate": 0.1}},
        {"train": {"schedule": "cosine", "final_rate": 0.1}},
    ),
    (
        {
            "schedule": "warmup_stable_decay",
            "schedule_options": {"num_decay_steps": 5, "decay_type": "linear", "min_lr_ratio": 0.1},
        },
        {"train": {"schedule": "wsd", "decay": 5, "final_rate": 0.1}},
    ),
    (
        {"schedule": "cosine_with_min_lr"},
        {"plugins": {"hf_schedule": {"name": "cosine_with_min_lr"}}},
    ),
    ({"schedule": "polynomial"}, {"plugins": {"hf_schedule": {"name": "polynomial"}}}),
    ({"schedule": "inverse_sqrt"}, {"plugins": {"hf_schedule": {"name": "inverse_sqrt"}}}),
    *(
        (
            {"schedule": name, "schedule_options": options},
            {"plugins": {"hf_schedule": {"name": name, "options": options}}},
        )
        for name, options in (
            ("cosine", {"num_cycles": 1.5}),
            ("cosine_with_min_lr", {"min_lr": 1e-6}),
            ("cosine_with_min_lr", {"min_lr_rate": 0.1, "num_cycles": 1.5}),
            ("cosine_with_restarts", {"num_cycles": 2}),
            ("polynomial", {"power": 2.0, "lr_end": 0.0}),
            ("warmup_stable_decay", {"num_decay_steps": 5, "min_lr_ratio": 0.1}),
            ("warmup_stable_decay", {"num_decay_steps": 5, "decay_type": "1-sqrt"}),
        )
    ),
]


@pytest.mark.parametrize(("old", "new"), OLD_SCHEDULES)
def test_an_old_schedule_is_refused_with_lines_that_a_recipe_takes(tmp_path, old, new):
    tables = tiny_tables(tmp_path)
    path = write_recipe(tmp_path / "r.toml", tables | {"train": tables["train"] | old})
    (line,) = problems(path)
    assert f"r.toml: train.schedule: '{old['schedule']}' is written otherwise now: " in line
    lines = line.partition(", write ")[2].split(", ")
    found = tomllib.loads("\n".join(lines))
    assert found == new
    merged = tables | {name: tables.get(name, {}) | table for name, table in found.items()}
    load(write_recipe(path, merged))


def test_a_changed_rate_is_refused_with_the_way_to_another_one(tiny):
    (line,) = problems(tiny(), "train.learning_rate_after.4=2e-3")
    assert "train.learning_rate_after: is gone; for another rate, export a checkpoint (plu" in line


def test_empty_tables_in_the_recipes_of_older_runs_set_nothing(tmp_path):
    tables = tiny_tables(tmp_path)
    then = {**tables["train"], "schedule_options": {}, "learning_rate_after": {}}
    recipe, wrong = validate({**tables, "train": then}, "r")
    assert not wrong and recipe == validate(tables, "r")[0]


def full_tables(folder):
    tables = tiny_tables(folder)
    tables["data"] |= {"columns": {"messages": "talk"}, "template_kwargs": {"a": [1, {"b": None}]}}
    del tables["data"]["template_kwargs"]["a"][1]["b"]  # TOML has no null
    tables["train"] |= {"schedule": "cosine", "final_rate": 0.1, "epochs": 3, "warmup": 0.5}
    tables["eval"] = {"every": 3, "source": tables["data"]["source"], "split": "train[:2]"}
    tables["checkpoint"] = {"every": 5}
    return tables


def test_the_resolved_recipe_reads_back_equal_from_anywhere(tmp_path, monkeypatch):
    tables = full_tables(tmp_path / "home")
    tables["output"], tables["data"]["source"] = "run", "data.jsonl"
    tables["eval"]["source"] = "./data.jsonl"
    monkeypatch.chdir(tmp_path / "home")
    recipe, _ = load(write_recipe(tmp_path / "recipe.toml", tables))
    text = resolved(recipe)
    (tmp_path / "resolved.toml").write_text(text)
    again, _ = load(tmp_path / "resolved.toml")
    monkeypatch.chdir("/")
    elsewhere, _ = load(tmp_path / "resolved.toml")
    assert again == elsewhere
    assert resolved(elsewhere) == text == resolved(again)
    assert again.output == str(tmp_path / "home/run")
    assert os.path.samefile(again.data.source, again.eval.source)
    moved = {"output", "data.source", "eval.source"}
    before, after = flatten(recipe.model_dump()), flatten(again.model_dump())
    assert {key for key in before if before[key] != after[key]} == moved
    # Every default stands in it.
    assert "weight_decay = 0.0" in text and 'too_long = "truncate"' in text


def test_the_resolved_recipe_of_a_mixture_reads_back(tmp_path):
    tables = tiny_tables(tmp_path)
    name = tables["data"].pop("source")
    tables["data"]["sources"] = [
        {"source": name, "weight": 0.5},
        {"source": name, "split": "a[:3]"},
    ]
    recipe, _ = load(write_recipe(tmp_path / "recipe.toml", tables))
    assert [one.weight for one in recipe.data.all_sources()] == [0.5, 1.0]
    path = tmp_path / "resolved.toml"
    path.write_text(resolved(recipe))
    assert load(path)[0] == recipe
    # The way a recipe reaches a worker process.
    assert validate(recipe.model_dump(exclude_none=True), "r") == (recipe, [])


def test_a_split_beside_a_mixture_is_refused(tmp_path):
    tables = tiny_tables(tmp_path)
    tables["data"] |= {"sources": [{"source": tables["data"].pop("source")}], "split": "train[:3]"}
    (line,) = problems(write_recipe(tmp_path / "recipe.toml", tables))
    assert "data: split belongs into each of [[data.sources]]" in line


@pytest.mark.parametrize("mixture", [False, True])
def test_an_evaluation_has_rows_of_its_own(tmp_path, mixture):
    tables = tiny_tables(tmp_path)
    source = tables["data"]["source"]
    if mixture:
        tables["data"]["sources"] = [{"source": tables["data"].pop("source"), "weight": 2.0}]
    for table in ({}, {"source": source}, {"every": 9, "split": "train"}):
        (line,) = problems(write_recipe(tmp_path / "recipe.toml", tables | {"eval": table}))
        assert "eval.source: no rows of its own; set source =" in line and "train[95%:]" in line
    tables["eval"] = {"source": source, "split": "train[5:]"}
    load(write_recipe(tmp_path / "recipe.toml", tables))


def places_of(table, prefix=""):
    """Yield the keys of a table, and of those in it, whose values are paths."""
    for name, info in table.__pydantic_fields__.items():
        if info.init is False:
            continue  # a plugin's state
        kinds = [info.annotation, *get_args(info.annotation)]
        marks = [*info.metadata, *(mark for kind in kinds for mark in get_args(kind)[1:])]
        if any(getattr(mark, "func", None) is recipe_module._expand for mark in marks):
            yield prefix + name
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from places_of(kind, f"{prefix}{name}.")


PLUGINS_OF_PLACES = {
    "dpo": "reference",
    "kto": "reference",
    "lora": "adapter",
    "arrow_cache": "folder",
    "samples": "file",
    "tracker": "folder",
}
PLACES = [*places_of(Recipe), *(f"plugins.{name}.{key}" for name, key in PLUGINS_OF_PLACES.items())]


def test_every_key_that_is_a_path_is_known_as_one():
    assert {"output", "model.path", "model.tokenizer", "data.source", "data.tokens"} < {*PLACES}
    named = re.compile("folder|path|file|reference|source|place|adapter")
    for name, found in find().items():
        cls = load_class(found)
        known = [*places_of(cls)]
        assert known == [one for one in [PLUGINS_OF_PLACES.get(name)] if one]
        options = [key for key, _ in fields(cls) if named.search(key)]
        assert options == known, "a path that knows no home folder"


@pytest.mark.parametrize("key", PLACES)
def test_a_path_knows_the_home_folder_and_environment_variables(tmp_path, monkeypatch, key):
    home = tmp_path / "home"
    (home / "there").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("RUNS", str(home))
    monkeypatch.delenv("NOWHERE", raising=False)
    monkeypatch.chdir(home)
    tables = tiny_tables(tmp_path)
    table = key.rpartition(".")[0]
    if key in ("model.path", "data.source"):
        tables[table].pop({"model.path": "scratch"}.get(key, "source"))
    if key == "data.tokens":
        tables["model"]["tokenizer"] = "gpt2"
    if key == "plugins.tracker.folder":
        tables["plugins"] = {"tracker": {"to": ["tensorboard"]}}
    path = write_recipe(tmp_path / "recipe.toml", tables)

    def loaded(value):
        recipe = load(path, [f"{key}={json.dumps(value)}"])[0]
        text = tomllib.loads(resolved(recipe))
        given = recipe.model_dump()
        for word in key.split("."):
            text, given = text[word], given[word]
        return given, text

    for written in ("~/there", "$HOME/there", "${RUNS}/there", "${HOME}/./there"):
        given, text = loaded(written)
        assert Path(given) == Path(text) == home / "there"
    # What is there is written so that it is found from any folder; a name on the hub stays.
    assert Path(loaded("there")[1]) == home / "there"
    if key in ("model.path", "model.tokenizer", "plugins.dpo.reference"):
        assert loaded("org/name") == ("org/name", "org/name")
    for written in ("${NOWHERE}/x", "$NOWHERE/x", "a/${NOWHERE}"):
        with pytest.raises(RecipeError) as caught:
            load(path, [f"{key}={json.dumps(written)}"])
        [line] = caught.value.problems
        assert f"{key}: the environment variable 'NOWHERE' is not set" in line
    with pytest.raises(RecipeError, match="its home folder is unknown"):
        load(path, [f'{key}="~nobody-has-this-name/x"'])


def test_a_recipe_is_frozen(tiny):
    recipe, _ = load(tiny())
    with pytest.raises(Exception, match="frozen"):
        recipe.train.steps = 3
    assert recipe.provides("adapters") is None


def test_the_schema_explains_every_key():
    def walk(schema):
        yield from schema.get("properties", {}).items()
        for inner in schema.get("$defs", {}).values():
            yield from walk(inner)

    schema = Recipe.model_json_schema()
    json.dumps(schema)
    tables = {"model", "data", "train", "eval", "checkpoint"}
    silent = [
        name for name, value in walk(schema) if name not in tables and "description" not in value
    ]
    assert silent == []


def test_each_branch_of_a_union_is_explained_in_one_line():
    from typing import Literal

    from pydantic import ValidationError

    from plugsft import plugin

    @plugin()
    class Packing:
        rows: int | Literal["auto"] = "auto"
        share: float | None = None
        names: dict[str, int] | None = None
        wanted: int

    with pytest.raises(ValidationError) as caught:
        Packing(rows="many", share="x", names={"a": "b"})
    lines = explain(caught.value.errors(include_url=False), Packing, "r", ("plugins", "packing"))
    assert lines == [
        f"r: plugins.packing.rows: given 'many'; {WHOLE}, or allowed: 'auto'",
        "r: plugins.packing.share: given 'x'; it should be a number, such as 1e-4",
        "r: plugins.packing.names.a: given 'b'; it should be a whole number, such as 2",
        "r: plugins.packing.wanted: missing; set it",
    ]


def test_checkpoints_come_ten_times_a_run_and_at_least_every_500_steps():
    steps = {1: 1, 9: 1, 10: 1, 11: 2, 95: 10, 5_000: 500, 100_000: 500}
    assert {total: Checkpoint().interval(total, 1) for total in steps} == steps
